# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Gates and sink logits
#
# > The other ways to let a head of attention say nothing: a learned gate on its output, and a learned logit that stands for no token. Both start as the plain model, and a sink logit turns out to be a gate.

# %%
#| default_exp gates

# %% [markdown]
# **So far** the gain of the Kalman update decides how much of what attention found enters the stream. **Now** come two simpler devices for the same purpose, which large models use: a sigmoid gate [@qiu2025gated] and a learned logit in the softmax's denominator [@openai2025gptoss].
# **Why** they belong here: softmax weights sum to one, so a head that has nothing to say must still attend somewhere, and it learns to attend to a first token that carries little (an *attention sink* [@xiao2024sinks]). Whoever wants to know what a gain of the filter's kind is good for has to compare it with these. The next chapter measures; this one builds.

# %%
#| hide
import warnings

# %%
#| hide
# the progress bars of the libraries below miss the notebook widgets, which this book does not use
warnings.filterwarnings("ignore", message="IProgress not found")

# %%
#| exports
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from bft_nb.core import check_option
from bft_nb.kalman import at_least_float32
from bft_nb.llama import Added, Conversion, Converted, Family, adopt, become, converted_config, listening, make_family

# %%
import tempfile

import matplotlib.pyplot as plt
import pandas as pd
import sympy as sp
from fastcore.test import test_fail
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM
from transformers.utils import logging

from bft_nb.figures import COLOUR, use_style
from bft_nb.llama import convert, parameter_groups
from bft_nb.models import tiny_llama, tiny_tokenizer
from bft_nb.symbolic import prove

# %%
use_style()
logging.disable_progress_bar()
logging.set_verbosity_error()

# %% [markdown]
# ## A gate on what attention found
#
# Between the weighted mean $e_t$ of a head and the output projection stands a factor that the token itself decides on **[P of Qiu et al.]**: a sigmoid of a linear map of $x_t$, the normalised input of attention, from which the query is made too. Either one number per head (*headwise*) or one per channel of each head (*elementwise*):
#
# $$e'_{t} = g_t \circ e_t, \qquad g_t = 2\,\sigma(W_g\, x_t), \qquad W_g = 0 \text{ at the start} \tag{42.1}$$
#
# The factor 2 and the zero are ours **[D]**: they make the start $g = 1$, so that a pretrained model is left alone, and leave a range $(0, 2)$ to learn in. Not nearly 1, but 1, because $\sigma(0)$ is one half in floating point as well:

# %%
2 * torch.zeros(3).sigmoid() == 1

# %% [markdown]
# And $W_g$ moves from the first step, as $\mathrm{d}g/\mathrm{d}a = 2\sigma(a)\,\sigma(-a)$ is one half at $a = 0$, its largest value:

# %%
a = sp.symbols("a", real=True)
sigma = 1 / (1 + sp.exp(-a))
prove(sp.diff(2 * sigma, a) - 2 * sigma * sigma.subs(a, -a)), sp.diff(2 * sigma, a).subs(a, 0)

# %% [markdown]
# ## A logit for no token
#
# The other device gives the softmax somewhere to go: one learned number $s$ per head joins the denominator and carries no value.
#
# $$w_{tj} = \frac{e^{\ell_{tj}}}{e^{s} + \sum_i e^{\ell_{ti}}}, \qquad e'_t = \sum_j w_{tj}\, v_j \tag{42.2}$$
#
# The weights of the tokens no longer sum to one. What they sum to is a number per head and query, and *the plain mean times that number* is the new mean. So a sink logit is a gate, too, and its input is the logarithm of the softmax's own denominator **[D]**:
#
# $$e'_t = g_t\, e_t, \qquad g_t = \sigma(L_t - s), \qquad L_t = \log \sum_i e^{\ell_{ti}} \tag{42.3}$$

# %%
l, v = sp.symbols("l1:4", real=True), sp.symbols("v1:4", real=True)
s = sp.symbols("s", real=True)
total = sum(map(sp.exp, l))
plain_mean = sum(sp.exp(x) * y for x, y in zip(l, v)) / total
with_sink = sum(sp.exp(x) * y for x, y in zip(l, v)) / (sp.exp(s) + total)
prove(with_sink - plain_mean * sigma.subs(a, sp.log(total) - s))

# %% [markdown]
# The difference between the two gates is what they see. (42.1) sees the token that asks, and no other. (42.3) sees the keys: among $n$ keys whose logits are $\ell$, $L = \ell + \log n$, and the gate opens as the context grows,

# %%
n = sp.symbols("n", positive=True)
of_n = sigma.subs(a, sp.log(n) + l[0] - s)
prove(of_n - n / (n + sp.exp(s - l[0]))), sp.limit(of_n, n, sp.oo)

# %%
#| label: fig-length
#| fig-cap: "A sink logit is a gate that opens with the number of keys; a gate on the query has no way to know it."
#| code-fold: true
fig, ax = plt.subplots()
keys = 2.0 ** torch.arange(0, 11)
for logit, style in ((0.0, "-"), (2.0, "--"), (4.0, ":")):
    ax.plot(keys, keys / (keys + math.exp(logit)), style, color=COLOUR["posterior"], label=f"sink logit s = {logit:g}")
ax.axhline(0.5, color=COLOUR["baseline"], label="query gate, $W_g x$ = −1.1")
ax.set(xlabel="keys n, all with logit 0", ylabel="gate g", xscale="log", ylim=(0, 1.02))
ax.set_xscale("log", base=2)
ax.legend(fontsize=8)
plt.show()

# %% [markdown]
# At what $s$ is a pretrained model left alone? At $s = -\infty$, which is no number to learn from. At a finite $s$ every output shrinks by the share $1 - g = \sigma(s - L)$ that goes to no token, and by that share shrinks the gradient that $s$ gets:

# %%
gate = sigma.subs(a, sp.log(total) - s)
prove(sp.diff(gate, s) + gate * (1 - gate))

# %% [markdown]
# We start at $s = 0$: a model that is trained from nothing has logits near zero, and starts as if there were one token more, whose value is zero. For a pretrained model that is a change, the smaller the longer the context, and how large depends on its $L$; a start at $-10$ or below keeps the function to within rounding where $L \ge 0$, and learns slowly.
#
# ## In the layer
#
# One module per layer again, in the attention and under the name `gate`: peft saves it with `modules_to_save=["gate"]`. It is called *around* the attention function, which it gets as an argument.

# %%
#| exports
GATES = ("headwise", "elementwise", "sink")
GATE_SETTINGS: dict[str, tuple[type, Any]] = {
    "gate": (str, "headwise"),  # one of `GATES`
    "gate_sink": (float, 0.0),  # the sink logits at the start
}  # name -> (type, default)


# %%
#| exports
def check_gate(
    config: PretrainedConfig,  # with the fields of `GATE_SETTINGS`
) -> None:
    "Raise `ValueError` for a setting that is out of range."
    check_option("gate", config.gate, GATES)
    if not math.isfinite(config.gate_sink):
        raise ValueError(f"gate_sink must be a finite number, got {config.gate_sink!r}")


# %%
#| exports
class Gate(Added):
    "What a gated attention has beyond a plain one. Its `forward` gets attention's input x (b, t, d), the attention function, q, k, v, mask and scaling; it returns the gated mean (b, t, h, k), and the weights if there are any."

    missing = "gates: use bft_nb.gates.convert_gated(model)"


# %%
#| exports
class QueryGate(Gate):
    "A factor per head, or per channel of each head, that the query's token decides on, (42.1)."

    def __init__(self, config: PretrainedConfig):
        super().__init__(config)
        self.heads, d = config.num_attention_heads, config.hidden_size
        width = 1 if config.gate == "headwise" else getattr(config, "head_dim", None) or d // self.heads
        self.weight = nn.Parameter(torch.empty(self.heads * width, d))
        self.start()

    def initialise(self) -> None:
        "W_g = 0: the gate is 1."
        init.zeros_(self.weight)

    def forward(self, x: Tensor, attend: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor | None]:
        "What `attend` finds, times the gate."
        e, w = attend(q, k, v, mask)
        gate = 2 * F.linear(x.to(self.weight.dtype), self.weight).sigmoid().unflatten(-1, (self.heads, -1))
        self.report(gate)
        return e * gate.to(e.dtype), w


# %% [markdown]
# The sink needs no attention function of its own. One more key with a logit of $s$ in every query is one more channel: $s$ in the queries, 1 in that key, 0 in all others. A channel of ones in the values then brings $g$ with it, so the gate can be read although no weight is ever in memory.

# %%
#| exports
class SinkGate(Gate):
    "One logit per head that takes its share of the softmax and carries no value, (42.2)."

    def __init__(self, config: PretrainedConfig):
        super().__init__(config)
        self.logit = nn.Parameter(torch.empty(config.num_attention_heads))
        self.start()

    def initialise(self) -> None:
        "All heads at the setting."
        init.constant_(self.logit, self.config.gate_sink)

    def forward(self, x: Tensor, attend: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor | None]:
        "What `attend` finds with one key more."
        channel = (self.logit / scaling).to(q.dtype)[:, None, None].expand(*q.shape[:-1], 1)
        only = F.pad(torch.ones_like(k[..., :1, :1]), (k.shape[-1], 0))
        q, k = torch.cat([q, channel], -1), torch.cat([F.pad(k, (0, 1)), only], -2)
        v = F.pad(torch.cat([v, torch.ones_like(v[..., :1])], -1), (0, 0, 0, 1))
        mask = causal(q, k[..., :-1, :]) if mask is None else mask
        e, w = attend(q, k, v, F.pad(mask, (0, 1), value=True if mask.dtype == torch.bool else 0.0))
        self.report(e[..., -1:])
        return e[..., :-1], None if w is None else w[..., :-1]


# %%
#| exports
def causal(
    q: Float[Tensor, "b h t k"],
    k: Float[Tensor, "b g j k"],
) -> Bool[Tensor, "1 1 t j"]:
    "The mask that transformers leaves out where torch makes it: the first query sees the first key, a single one (of a cache) all keys."
    t, j = q.shape[-2], k.shape[-2]
    visible = torch.ones(t, j, dtype=torch.bool, device=q.device)
    return (visible.tril() if t > 1 else visible)[None, None]


# %% [markdown]
# transformers' own attention functions do the rest, under two names of ours. Weights are there with the explicit one, `gated_eager`, only.

# %%
#| exports
def gated_attention(module, query, key, value, attention_mask, scaling, gating: tuple[nn.Module, Tensor] | None = None, *, attend, **kwargs) -> tuple[Tensor, Tensor | None]:
    "Attention as transformers calls it, with the layer's gate around it. Raises `ValueError` in a layer that has none."
    if gating is None:
        raise ValueError(f"{type(module).__name__} asked for gated attention, but has no gate: use bft_nb.gates.convert_gated(model)")
    gate, x = gating
    return gate(x, partial(attend, module, scaling=scaling, **kwargs), query, key, value, attention_mask, scaling)


# %%
#| exports
GATED = {"gated_eager": (eager_attention_forward, eager_mask), "gated_sdpa": (sdpa_attention_forward, sdpa_mask)}  # attn_implementation -> (attention, mask)
for _name, (_attend, _mask) in GATED.items():
    AttentionInterface.register(_name, partial(gated_attention, attend=_attend))
    AttentionMaskInterface.register(_name, _mask)

# %%
#| exports
_Mixed: Any = object  # the mixins use what transformers' classes bring


# %%
#| exports
class GatedAttention(_Mixed):
    "Attention with a gate. Mixed into transformers' attention."

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        "transformers' own forward; gate and input go with it to the attention function."
        check_option("attn_implementation", self.config._attn_implementation, GATED)
        return super().forward(hidden_states, *args, gating=(self.gate, hidden_states), **kwargs)


# %%
#| exports
class Gated(Converted):
    "What a gated stack and its language model share."

    _keep_in_fp32_modules_strict = ["self_attn.gate"]  # not "gate": transformers looks for it anywhere in a name, and there is a `gate_proj`


# %%
#| exports
class GatedModel(Gated):
    "A stack of gated layers. Mixed into transformers' model."

    def __init__(self, config: PretrainedConfig):
        super().__init__(config)
        make_gated(self)
        self.post_init()


# %%
#| exports
class GatedForCausalLM(Gated):
    "A language model on gated layers. Mixed into transformers' model."

    def __init__(self, config: PretrainedConfig):
        super().__init__(config)
        make_gated(self.model)
        self.post_init()


# %% [markdown]
# The families are those of chapter 40; what changes in a layer is its attention alone. The stream is not packed, and nothing else of the layer is ours.

# %%
#| exports
GATED_FAMILIES: dict[str, Family] = {}

# %%
#| exports
GATING = Conversion("convert_gated", "Gated", "Attention", (GatedAttention, GatedModel, GatedForCausalLM), GATE_SETTINGS, GATED_FAMILIES)


# %%
#| exports
def make_gated(
    model: PreTrainedModel,  # transformers' stack of layers, with a configuration of ours
) -> None:
    "Turn the attentions of a stack into gated ones, in place. `ValueError` for settings out of range."
    check_gate(model.config)
    part, kind = become(model, GATING), SinkGate if model.config.gate == "sink" else QueryGate
    for layer in model.layers:
        if not isinstance(layer.self_attn, part):
            layer.self_attn.__class__ = part
            layer.self_attn.gate = kind(model.config).to(layer.input_layernorm.weight.device)
    if model.config._attn_implementation not in GATED:
        model.config._attn_implementation = gated_name(model.config)


# %%
#| exports
def gated_name(
    config: PretrainedConfig,  # of a plain model
) -> str:  # a key of `GATED`
    "Our name of the attention that a model uses. `ValueError` if it is none of those we can put a gate around."
    name = f"gated_{config._attn_implementation or 'sdpa'}"
    check_option("attn_implementation", name, GATED)
    return name


# %%
#| exports
GatedLlamaConfig, GatedLlamaModel, GatedLlamaForCausalLM = make_family("Llama", GATING)

# %%
#| exports
GatedMistralConfig, GatedMistralModel, GatedMistralForCausalLM = make_family("Mistral", GATING)

# %%
#| exports
GatedQwen2Config, GatedQwen2Model, GatedQwen2ForCausalLM = make_family("Qwen2", GATING)

# %%
#| exports
GatedQwen3Config, GatedQwen3Model, GatedQwen3ForCausalLM = make_family("Qwen3", GATING)

# %%
#| exports
GatedSmolLM3Config, GatedSmolLM3Model, GatedSmolLM3ForCausalLM = make_family("SmolLM3", GATING)


# %% [markdown]
# ## Convert
#
# In place, as in chapter 40:

# %%
#| exports
def convert_gated(
    model: nn.Module,  # a causal language model of one of `GATED_FAMILIES`
    gate: str = GATE_SETTINGS["gate"][1],  # one of `GATES`
    *,
    sink: float = GATE_SETTINGS["gate_sink"][1],  # sink logits at the start
) -> PreTrainedModel:  # the same object
    "Give every attention of a pretrained model a gate, in place; it keeps its attention function. Raises `TypeError` for a model of another family, `ValueError` for an unknown gate or attention."
    config = converted_config(model, GATING, gate=gate, gate_sink=sink)
    check_gate(config)
    adopt(model, config, GATING, gated_name(model.config))
    make_gated(model.model)
    return model


# %%
bytes_only = tiny_tokenizer()


def tiny() -> LlamaForCausalLM:
    return tiny_llama(bytes_only, d=32, n_layers=4).eval()


# %%
gated = convert_gated(tiny(), "elementwise")
type(gated).__name__, gated.config._attn_implementation, {name: tuple(p.shape) for name, p in gated.model.layers[0].self_attn.gate.named_parameters()}

# %% [markdown]
# It starts as the plain model, to the last bit, with padding on the left as well:

# %%
ids = torch.randint(3, 259, (2, 9), generator=torch.Generator().manual_seed(0))
batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids).index_fill(1, torch.tensor([0, 1]), 0)}
with torch.no_grad():
    plain = tiny()(**batch).logits
    assert all(torch.equal(convert_gated(tiny(), gate)(**batch).logits, plain) for gate in ("headwise", "elementwise"))

# %% [markdown]
# A sink logit does not, unless it is far below all others:

# %%
with torch.no_grad():
    change = {s: (convert_gated(tiny(), "sink", sink=s)(**batch).logits - plain).abs().max().item() for s in (0.0, -5.0, -10.0, -20.0)}
change

# %% [markdown]
# ## Trace
#
# The gates of every layer, head and query in one forward pass, whichever their kind:

# %%
#| exports
def trace_gates(
    model: nn.Module,  # a gated model, or one wrapped by peft
    **inputs: Any,  # of the model
) -> list[Float[Tensor, "b t h c"]]:  # one per layer, without gradient; c = 1, or the width of a head if elementwise
    "The value g of every gate in one forward pass. `TypeError` for a model without gates."
    with listening(model, Gate) as found, torch.no_grad():
        model(**{"use_cache": False, **inputs})
    return found


# %%
opening = trace_gates(convert_gated(tiny(), "sink"), input_ids=ids)[0]
opening[0, :, :, 0].T
