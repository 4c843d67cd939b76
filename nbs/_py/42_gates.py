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
# **Why** they belong here: softmax weights sum to one, so a head that has nothing to say must attend somewhere all the same, and models learn to attend to the first token for that (an *attention sink* [@xiao2024sinks]). What a Kalman gain is good for shows only beside these devices. This chapter builds them, the next one measures.

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
from bft_nb.kalman import gain
from bft_nb.llama import added, convert, parameter_groups
from bft_nb.models import tiny_llama, tiny_tokenizer
from bft_nb.reml import observation_variance
from bft_nb.symbolic import prove

# %%
use_style()
logging.disable_progress_bar()
logging.set_verbosity_error()

# %% [markdown]
# ## A gate on what attention found
#
# Of the places where a gate may stand, Qiu et al. found this one best: behind the weighted mean $e_t$ of a head and in front of the output projection. The token that asks sets the gate, by a sigmoid of a linear map of $x_t$, the normalised input of attention, from which the query is made too. There is either one number per head (*headwise*) or one per channel of each head (*elementwise*):
#
# $$e'_{t} = g_t \circ e_t, \qquad g_t = 2\,\sigma(W_g\, x_t), \qquad W_g = 0 \text{ at the start} \tag{42.1}$$
#
# The factor 2 and the zero are ours **[D]**: they make the start $g = 1$, so that a pretrained model is left alone, and leave a range $(0, 2)$ to learn in. The start is exactly 1, because $\sigma(0)$ is one half in floating point as well:

# %%
2 * torch.zeros(3).sigmoid() == 1

# %% [markdown]
# And $W_g$ moves from the first step: with $a = W_g x_t$, the slope $\mathrm{d}g/\mathrm{d}a = 2\sigma(a)\,\sigma(-a)$ is one half at $a = 0$, its largest value:

# %%
a = sp.symbols("a", real=True)
sigma = 1 / (1 + sp.exp(-a))
prove(sp.diff(2 * sigma, a) - 2 * sigma * sigma.subs(a, -a)), sp.diff(2 * sigma, a).subs(a, 0)

# %% [markdown]
# ## A logit for no token
#
# The other device gives the softmax somewhere to go: beside the logits $\ell_{tj}$ of the keys, one learned number $s$ per head joins the denominator, and carries no value.
#
# $$w_{tj} = \frac{e^{\ell_{tj}}}{e^{s} + \sum_i e^{\ell_{ti}}}, \qquad e'_t = \sum_j w_{tj}\, v_j \tag{42.2}$$
#
# The weights of the tokens no longer sum to one. Their sum is one number per head and query, and *the plain mean times that number* is the new mean. So a sink logit is a gate, too, and its input is the logarithm of the softmax's own denominator **[D]**:
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
# At what $s$ is a pretrained model left alone? At $s = -\infty$, which is no number to learn from. At a finite $s$ every output shrinks by the share $1 - g$ that goes to no token, and with that share the gradient of $s$ vanishes, too:

# %%
opening = sigma.subs(a, sp.log(total) - s)
prove(sp.diff(opening, s) + opening * (1 - opening))

# %% [markdown]
# So a sink logit either changes the model or has next to no gradient. We start at $s = 0$ **[D]**, meant for models trained from nothing: their logits are near zero, and they start as if there were one token more, whose value is zero. For a pretrained model that is a change, and a larger one the smaller $L$ is. A text's first token sees only itself, so its $L$ is a single logit.
#
# ## Three sigmoids
#
# The Kalman gain (40.1) is a sigmoid as well:
#
# $$K = \frac{1}{1 + \beta\lambda/\lambda_{\text{obs}}} = \sigma\big(\log\lambda_{\text{obs}} - \log\beta\lambda\big) \tag{42.4}$$

# %%
prior, lam_obs = sp.symbols("lambda_prior lambda_obs", positive=True)  # βλ and λ_obs
prove(1 / (1 + prior / lam_obs) - sigma.subs(a, sp.log(lam_obs) - sp.log(prior)))

# %% [markdown]
# The gate and the sink act on what a head has found, the gain on each feature of the stream, but what sets the three apart is what they look at:
#
# | | sigmoid of | sees | range |
# |---|---|---|---|
# | query gate (42.1) | $W_g x_t$ | the token that asks | $(0, 2)$ |
# | sink logit (42.3) | $L_t - s$ | how well and how many keys match | $(0, 1)$ |
# | Kalman gain (42.4) | $\log\lambda_{\text{obs},t} - \log\beta\lambda_t$ | how many keys count and how far their values agree, against what is known | $(0, 1)$ |
#
# Among $n$ keys with the same logit $\ell$, $L = \ell + \log n$, and a sink's gate opens as the context grows:

# %%
n = sp.symbols("n", positive=True)
of_n = sigma.subs(a, sp.log(n) + l[0] - s)
prove(of_n - n / (n + sp.exp(s - l[0]))), sp.limit(of_n, n, sp.oo)

# %% [markdown]
# The Kalman gain opens as well (@fig-length), since $1/\lambda_{\text{obs}} = \kappa(\kappa s_0^2 + S)$ with $\kappa = 1/n$ (11.9), as long as $S$ and $\lambda$ stay what they are. A query gate can follow the context only through what earlier layers have written into $x_t$.

# %%
#| label: fig-length
#| fig-cap: "A sink's gate and a Kalman gain open with the number of keys; a gate on a given query does not depend on it."
#| code-fold: true
fig, ax = plt.subplots()
keys = 2.0 ** torch.arange(0, 11)
one = torch.ones(())
for logit, style in ((0.0, "-"), (4.0, "--")):
    ax.plot(keys, (keys.log() - logit).sigmoid(), style, color=COLOUR["posterior"], label=f"sink logit s = {logit:g}")
for lam, style in ((1.0, "-"), (30.0, "--")):
    ax.plot(keys, gain(lam * one, 1 / observation_variance(one, 1 / keys, one)), style, color=COLOUR["prior"], label=f"gain, βλ = {lam:g}, S = s₀² = 1")
ax.axhline(0.5, color=COLOUR["baseline"], label="query gate, $W_g x$ = −1.1")
ax.set(xlabel="keys n, all with logit 0", ylabel="factor", ylim=(0, 1.02))
ax.set_xscale("log", base=2)
ax.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## In the layer
#
# One module per layer again, under the name `gate` in its attention: peft saves it with `modules_to_save=["gate"]`. It is called *around* the attention function, which it gets as an argument.

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
# The sink needs no attention function of its own. One more key with a logit of $s$ in every query is one more channel: $s$ in the queries, 1 in that key, 0 in all others. A channel of ones in the values then returns $g$ beside the mean, so the gate can be read although no weight is ever in memory.

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


# %% [markdown]
# transformers' own attention functions do the rest, under two names of ours. Only the explicit one, `gated_eager`, returns weights.

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
# A sink logit leaves the model alone only where it is far below all other logits. The table has the largest change of an output, and beside it the largest gradient that a sink gets:

# %%
found = {}
for start in (0.0, -5.0, -10.0, -20.0):
    model = convert_gated(tiny(), "sink", sink=start)
    out = model(**batch, labels=batch["input_ids"])
    out.loss.backward()
    found[start] = {"change of logits": (out.logits - plain).abs().max().item(), "gradient": max(part.logit.grad.abs().max().item() for part in added(model, Gate))}
pd.DataFrame(found).T.rename_axis("s").map("{:.0e}".format)

# %% [markdown]
# What gates and sinks cost, in TinyLlama's shape (22 layers of 2,048 features, 32 heads), built without allocating memory:

# %%
shape = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4, vocab_size=32000)
costs = {}
for kind in GATES:
    with torch.device("meta"):
        big = GatedLlamaForCausalLM(GatedLlamaConfig(**shape, gate=kind))
    costs[kind] = sum(p.numel() for part in added(big, Gate) for p in part.parameters())
pd.DataFrame({"parameters": costs, "share, %": {kind: 100 * n / big.num_parameters() for kind, n in costs.items()}}).round(4)

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


# %% [markdown]
# At the start the query gates are 1 everywhere. In the first layer of the tiny model, sinks at $s = 0$ take between a third and four fifths of the first token's attention, and less than a tenth of the ninth's:

# %%
assert all((g == 1).all() for g in trace_gates(gated, **batch))
pd.DataFrame(trace_gates(convert_gated(tiny(), "sink"), input_ids=ids)[0][0, :, :, 0].T).round(2).rename_axis("head").rename_axis("token", axis=1)

# %% [markdown]
# ## Train, save, load
#
# `parameter_groups` of chapter 40 gives the gates a learning rate of their own and no weight decay. After a few steps the model has changed, and it is saved and loaded like any other:

# %%
optimizer = torch.optim.AdamW(parameter_groups(gated, lr=1e-4, precision_lr=1e-2))
for _ in range(5):
    gated(**batch, labels=batch["input_ids"]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
with tempfile.TemporaryDirectory() as folder:
    gated.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
with torch.no_grad():
    assert torch.equal(loaded(**batch).logits, gated(**batch).logits)
type(loaded).__name__, [round(g.std().item(), 3) for g in trace_gates(loaded, **batch)]

# %% [markdown]
# ## How it fails
#
# The families are those of chapter 40, and a model has a filter or gates, not both. (A gate behind the filter's mean would have to shrink the variance by its square as well, or the gain would be that of another observation.)

# %%
other = Gemma2ForCausalLM(Gemma2Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8, pad_token_id=0))
test_fail(lambda: convert_gated(other), contains="SmolLM3ForCausalLM, got Gemma2ForCausalLM")
test_fail(lambda: convert_gated(convert(tiny())), contains="got BFTLlamaForCausalLM")
test_fail(lambda: convert(convert_gated(tiny())), contains="got GatedLlamaForCausalLM")
test_fail(lambda: convert_gated(tiny(), "each"), contains="'headwise', 'elementwise', 'sink', got 'each'")
test_fail(lambda: convert_gated(tiny(), "sink", sink=-math.inf), contains="gate_sink must be a finite number")
test_fail(lambda: trace_gates(tiny(), **batch), contains="has no gates")

# %% [markdown]
# An attention function without a gate would leave the gate out in silence, so the layer checks the name:

# %%
wrong = convert_gated(tiny())
wrong.config._attn_implementation = "sdpa"
test_fail(lambda: wrong(**batch), contains="must be one of 'gated_eager', 'gated_sdpa', got 'sdpa'")

# %% [markdown]
# ## Assumptions, and where they break
#
# - "To the last bit" holds for query gates, against the attention function that the model had. Other functions than `eager` and `sdpa` are refused: nothing in principle stands against a gate around them, but none has been tried.
# - A sink makes heads one channel wider and needs a mask even where the plain model leaves that to the kernel; kernels made for widths in multiples of eight may be slower.
# - Dropout on the weights reaches the channel of ones, so in training mode the reported gate of a sink is noisy.
# - Qwen3-Next, gpt-oss and their like were *trained* with these devices. A gate added to a finished model starts from heads that have learned their sinks long ago.
# - $W_g$ has no bias, and starts at zero also where a model is trained from nothing; Qiu et al. use $\sigma$ without our factor of two.
#
# ## Summary
#
# - `convert_gated` gives a pretrained Llama, Mistral, Qwen2, Qwen3 or SmolLM3 a gate per head or channel, or a sink logit per head, in place; attention runs in the kernels it had, and peft, caches, checkpointing and saving work as before.
# - Query gates start as the plain model to the last bit and have a gradient from the first step. A sink logit has a gradient only as far as it departs from the plain model.
# - A sink logit is a gate whose input is the log-denominator of the softmax. It, the query gate and the Kalman gain are three sigmoids of different evidence. Two of them follow the length of the context by construction: the sink logit's as long as logits stay where they are, the gain as long as $S$ and $\lambda$ do.
#
# ## Exercises
#
# **1.** A gate that is the same for all tokens would be no gate. Which weights could absorb it?
#
# <details><summary>Answer</summary>
#
# The columns of the output projection: $W_O\,(g \circ e) = (W_O\,\mathrm{diag}\, g)\, e$.

# %%
e, g, w_o = torch.randn(5, 8), torch.rand(8), torch.randn(6, 8)
torch.testing.assert_close(F.linear(e * g, w_o), F.linear(e, w_o * g))

# %% [markdown]
# </details>
#
# **2.** Write a sink logit as a first token that every query sees. What are its key and its value?
#
# <details><summary>Answer</summary>
#
# Its value is zero and its key $k_0$ such that $q \cdot k_0 / \sqrt{k} = s$ for *all* $q$, which no key does, unless the queries have a constant channel. Without one, the nearest thing is a token whose key most queries agree on.

# %%
q, k, v = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
constant = torch.cat([q, torch.full((1, 1, 5, 1), 0.7)], -1)  # s = 0.7, with a scaling of 1
token = torch.tensor([0.0, 0, 0, 0, 1]).expand(1, 1, 1, 5)
w = (constant @ torch.cat([token, F.pad(k, (0, 1))], -2).mT).softmax(-1)
torch.testing.assert_close(w[..., 1:] @ v, (q @ k.mT).softmax(-1) @ v * ((q @ k.mT).logsumexp(-1, keepdim=True) - 0.7).sigmoid())

# %% [markdown]
# </details>
#
# **3.** At which number of keys with equal logits $\ell$ is a sink's gate one half?
#
# <details><summary>Answer</summary>
#
# At $n = e^{s - \ell}$: a sink logit counts for that many tokens.

# %%
prove(of_n.subs(n, sp.exp(s - l[0])) - sp.Rational(1, 2))

# %% [markdown]
# </details>
