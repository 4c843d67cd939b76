# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Any Llama becomes a filter
#
# > One call converts a pretrained Llama, Mistral, Qwen2, Qwen3 or SmolLM3: same weights, same interface, plus a precision that starts without disturbing what the model knows.

# %%
#| default_exp llama

# %% [markdown]
# **So far** a filter step replaced the layers of models that were trained from nothing. **Now** a language model comes with weights that cost a fortune, and its layers are to become filter steps without losing them.
# **Why** this needs a chapter: the filter's equations do not leave a pretrained model alone. Taken literally they destroy it (the numbers are below), so we need a family of filters that has the plain model at one end and the paper's filter at the other, and a start near the plain model.
#
# What comes out, in fifteen lines, imports included; `name` is a folder or a name on the hub, `texts` a list of strings, `folder` where the result goes. The same lines run near the end of this page.
#
# ```python
# import torch
# from peft import LoraConfig, PeftModel, get_peft_model
# from transformers import AutoModelForCausalLM, AutoTokenizer
# from bft_nb.llama import calibrate, convert, parameter_groups
# ```
#
# ```python
# batch = AutoTokenizer.from_pretrained(name)(texts, return_tensors="pt", padding=True, padding_side="left")
# model = calibrate(convert(AutoModelForCausalLM.from_pretrained(name)), batch)
# tuned = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], modules_to_save=["bft"]))
#
# optimizer = torch.optim.AdamW(parameter_groups(tuned, lr=1e-3, precision_lr=1e-2))
# for _ in range(5):
#     tuned(**batch, labels=batch["input_ids"].where(batch["attention_mask"] > 0, -100)).loss.backward()
#     optimizer.step()
#     optimizer.zero_grad()
# tuned.save_pretrained(folder, save_embedding_layers=False)
#
# again = PeftModel.from_pretrained(convert(AutoModelForCausalLM.from_pretrained(name)), folder).eval()
# generated = again.generate(**batch, max_new_tokens=8, do_sample=False)
# ```

# %%
#| hide
import warnings

# %%
#| hide
# the progress bars of the libraries below miss the notebook widgets, which this book does not use
warnings.filterwarnings("ignore", message="IProgress not found")
# peft asks transformers by a name that is on its way out
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")

# %%
#| exports
import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from bft_nb.attention import Moments, augmented, moments_blocked, read_moments
from bft_nb.core import Belief, at_least_float32, check_option, check_positive, check_precision
from bft_nb.dynamics import gated_ffn_jacobian, predict, standardise
from bft_nb.encoder import MLPPrecision
from bft_nb.kalman import gain, update
from bft_nb.layer import reliability
from bft_nb.reml import observation_variance

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import sympy as sp
from fastcore.test import test_fail
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM
from transformers.utils import logging

from bft_nb.figures import COLOUR, use_style
from bft_nb.models import tiny_llama, tiny_tokenizer
from bft_nb.report import choose, load_rows
from bft_nb.symbolic import assert_same, prove

# %%
use_style()
logging.disable_progress_bar()
logging.set_verbosity_error()

# %% [markdown]
# ## A dial between the plain layer and the filter
#
# A residual connection adds all of what attention found: gain 1. The Kalman update adds the share $K = \lambda_{\text{obs}}/(\lambda + \lambda_{\text{obs}})$ (chapter 12). A pretrained network has learned its weights for gain 1, and every later layer relies on it.
#
# The dial is a *power prior* [@ibrahim2000]: the prior belief enters Bayes' rule raised to a power $\beta \ge 0$. At $\beta = 1$ it counts in full, at $\beta = 0$ not at all. For Gaussians, the logarithm of the posterior is a sum of two parabolas **[D]**:

# %%
h, z, x = sp.symbols("h z x", real=True)
lam, lam_obs = sp.symbols("lambda lambda_obs", positive=True)
beta = sp.symbols("beta", nonnegative=True)
log_posterior = -beta * lam * (x - h) ** 2 / 2 - lam_obs * (z - x) ** 2 / 2
log_posterior

# %% [markdown]
# Its peak is the new mean, its downward curvature the new precision:
#
# $$h' = h + K\,(z - h), \qquad K = \frac{1}{1 + \beta\,\lambda/\lambda_{\text{obs}}}, \qquad \lambda' = \beta\lambda + \lambda_{\text{obs}} \tag{40.1}$$

# %%
peak = sp.solve(sp.diff(log_posterior, x), x)[0]
K = 1 / (1 + beta * lam / lam_obs)
prove(peak - (h + K * (z - h))), prove(-sp.diff(log_posterior, x, 2) - (beta * lam + lam_obs))

# %% [markdown]
# At $\beta = 1$ this is the paper's gain **[P]**; at $\beta = 0$ it is 1, the plain residual connection:

# %%
prove(K.subs(beta, 1) - lam_obs / (lam + lam_obs)), prove(K.subs(beta, 0) - 1)

# %% [markdown]
# No new code is needed: it is chapter 12's update with $\beta\lambda$ in the place of $\lambda$. Called with a precision of zero, it has a gain of exactly one, not of nearly one, because a number divided by itself is 1 in floating point as well.

# %%
assert_same(K, (lam, lam_obs, beta), lambda lam, lam_obs, beta: gain(beta * lam, lam_obs))
gain(torch.zeros(3), torch.tensor([1e-7, 0.3, 1e9])) == 1

# %% [markdown]
# In filtering, $\beta$ is known as a *forgetting factor*, and such a filter as one with fading memory [@anderson1979]: without dynamics, the evidence of a layer counts $\beta$ times as much with each later layer.

# %%
seen_at = sp.symbols("lambda_1:4", positive=True)
after = lam
for observed in seen_at:
    after = beta * after + observed
sp.collect(sp.expand(after), beta)

# %% [markdown]
# So $\beta$ near zero means: a token's precision is that of its last observation. Attention gets a dial of its own. In the kriging model (10.2), let a neighbour's precision count with a power $\beta_a$ **[D]**:
#
# $$w_{tj} \propto \alpha_{tj}\,\bar\lambda_j^{\,\beta_a}, \qquad \text{logits} = q_t \cdot k_j/\sqrt{k} + \beta_a \log\bar\lambda_j \tag{40.2}$$
#
# Each layer has one $\beta_a$ for its attention and one $\beta_g \ge 0$, the $\beta$ of its gain (40.1); both are learned. We store the root of $\beta_g$ and square it, so that $\beta_g$ cannot become negative (a negative one makes $K$ exceed 1, and infinite where $\beta\lambda = -\lambda_{\text{obs}}$).
#
# ## What a layer learns
#
# All that is new in a layer sits in one module, so that a library which handles modules (peft, a checkpoint, an optimiser) needs one name: `bft`. It holds
#
# - `beta_a`, `root_beta_g`: the two dials;
# - `raw_noise`: the process noise of (13.2) per feature, $Q = c_q \,\mathrm{softplus}(\text{raw})$. Residual variance grows over the depth of a language model by four to six orders of magnitude, so each layer has its scale $c_q$, which is measured, not learned. The last layer has no $Q$: nobody reads the precision after it, and a parameter without gradient is an error in distributed training;
# - in the first layer `tau`, the initial precision: a small network on the (normalised) embedding (chapter 22), times a measured scale;
# - `value_scale`: attention's $s_0^2 = \sum_j w_j/\bar\lambda_j$ is a variance of the residual stream, the scatter $S$ one of a head's values. One factor per head brings the first to the unit of the second **[D]**.

# %%
#| exports
LEAST, MOST = 1e-12, 1e12  # variances and precisions are kept between, [h²] or [h⁻²]
UNITS = ("stream", "normalised")  # of the precision that attention sees: λ̄, or λ̄ times the token's mean square


# %%
#| exports
def check_settings(
    config: PretrainedConfig,  # with the fields of `SETTINGS`
) -> None:
    "Raise `ValueError` for a setting of the filter that is out of range."
    check_positive("bft_beta_g", config.bft_beta_g, zero=True)
    check_positive("bft_noise_ratio", config.bft_noise_ratio)
    check_option("bft_units", config.bft_units, UNITS)
    check_option("bft_jacobian", config.bft_jacobian, ("detached", "full", "none"))
    if not math.isfinite(config.bft_beta_a):
        raise ValueError(f"bft_beta_a must be a finite number, got {config.bft_beta_a!r}")


# %%
#| exports
class Added(nn.Module):
    "What a conversion adds to a layer: a module that knows its own start, and reports what it saw."

    missing = "added parts: convert it first"  # what a message says of a model without

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.config = config
        self.report = nn.Identity()  # where `listening` listens

    def start(self) -> None:
        "To be called when all parameters are there: float32 at least, and the values they start with."
        self.to(torch.promote_types(torch.get_default_dtype(), torch.float32))
        self.initialise()

    def initialise(self) -> None:
        "Set what no checkpoint has set (transformers marks what it has loaded)."
        raise NotImplementedError


# %%
#| exports
class LayerFilter(Added):
    "What a filtering layer has beyond a plain one: two dials, a process noise, in the first layer the initial precision, and the scales that `calibrate` measures."

    missing = "filtering layers: use bft_nb.llama.convert(model)"

    def __init__(
        self,
        config: PretrainedConfig,  # of the model
        layer_idx: int,  # which layer, from 0
    ):
        check_settings(config)
        super().__init__(config)
        d = config.hidden_size
        self.first, self.last = layer_idx == 0, layer_idx == config.num_hidden_layers - 1
        self.beta_a, self.root_beta_g = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        self.register_buffer("value_scale", torch.empty(config.num_attention_heads))  # [v²/h²]
        self.register_buffer("form", torch.empty(2, dtype=torch.long))  # which units, and whether there is a Jacobian: settings that no other tensor shows
        if self.first:
            self.tau = MLPPrecision(d)
            self.register_buffer("tau_scale", torch.empty(1))  # [h⁻²]
        if not self.last:
            self.raw_noise = nn.Parameter(torch.empty(d))
            self.register_buffer("noise_scale", torch.empty(d))  # [h²]
        self.calibrating: Tensor | None = None  # (b, t), True = counts; None: not calibrating
        self.start()

    @torch.no_grad()
    def initialise(self) -> None:
        "Both dials at their settings, every scale at 1, τ = 1."
        init.constant_(self.beta_a, self.config.bft_beta_a)
        init.constant_(self.root_beta_g, math.sqrt(self.config.bft_beta_g))
        init.ones_(self.value_scale)
        init.copy_(self.form, torch.tensor([UNITS.index(self.config.bft_units), self.config.bft_jacobian != "none"]))
        if self.first:
            init.ones_(self.tau_scale)
            init.zeros_(self.tau.net[2].weight)
            init.zeros_(self.tau.net[2].bias)
        if not self.last:
            init.constant_(self.raw_noise, math.log(math.e - 1))  # softplus of it is 1
            init.constant_(self.noise_scale, self.config.bft_noise_ratio)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        "Refuse the weights of another form of filter, as adapters come without the model's configuration."
        saved: Tensor = state_dict.get(f"{prefix}form", self.form)  # type: ignore[assignment]
        if not torch.equal(saved.to(self.form.device), self.form):
            of, ours = (f"units={UNITS[form[0]]!r} and jacobian{'≠' if form[1] else '='}'none'" for form in (saved.tolist(), self.form.tolist()))
            raise ValueError(f"these are the weights of a filter with {of}, but the model was converted with {ours}: give convert the same")
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def beta_g(self) -> Tensor:
        "β of the gain, ≥ 0, (40.1)."
        return self.root_beta_g.square()

    def average(self, x: Float[Tensor, "b t *rest"]) -> Float[Tensor, "*rest"]:
        "Mean over the tokens that count, while calibrating."
        return at_least_float32(x)[self.calibrating].mean(0)

    def mean_square(self, h: Float[Tensor, "b t d"], eps: float) -> Float[Tensor, "b t 1"]:
        "The unit of variance of each token: 1, or with normalised units the mean square of its features, [h²]."
        if self.config.bft_units == "stream":
            return torch.ones((), device=h.device).expand(*h.shape[:-1], 1)
        return standardise(h, "rms", eps)[1].square().reciprocal()

    def initial_precision(self, h: Float[Tensor, "b t d"], eps: float) -> Float[Tensor, "b t d"]:
        "τ of each token from its embedding, [h⁻²]."
        unit = self.mean_square(h, eps)
        if self.calibrating is not None:
            self.tau_scale.copy_(1 / self.average(at_least_float32(h).square().mean(-1, keepdim=True) / unit))
        items = torch.zeros(h.shape[:2], dtype=torch.long, device=h.device)  # τ is read off the embedding alone
        return self.tau_scale * self.tau(items, standardise(h, "rms", eps)[0]) / unit

    def observation_variance(self, moments: Moments) -> Float[Tensor, "b h t"]:
        "Variance of each head's mean, (11.9), in the unit of its values, [v²]."
        s, s2_0 = moments.scatter.squeeze(-1), moments.s2_0
        if self.calibrating is not None:
            s_mean, claimed = (self.average(x.transpose(1, 2)) for x in (s, s2_0))
            self.value_scale.copy_((s_mean / claimed).clamp_min(LEAST))
        return observation_variance(s, moments.kappa, s2_0 * self.value_scale[:, None])

    def process_noise(self, h: Float[Tensor, "b t d"], delta: Float[Tensor, "b t d"], eps: float) -> Float[Tensor, "b t d"]:
        "Q per token and feature, [h²]."
        unit = self.mean_square(h, eps)
        if self.calibrating is not None:
            self.noise_scale.copy_(self.config.bft_noise_ratio * self.average(at_least_float32(delta).square() / unit))
        return self.noise_scale * F.softplus(self.raw_noise) * unit


# %% [markdown]
# The class reads five settings, which become fields of the model's own configuration, so that `save_pretrained` writes them beside the rest. Why these values start a model well is the subject of the section on SmolLM2.

# %%
#| exports
SETTINGS: dict[str, tuple[type, Any]] = {
    "bft_beta_a": (float, 0.25),  # β_a at the start: weight of log λ̄ in attention; 1 is the paper's, 0 switches it off
    "bft_beta_g": (float, 0.01),  # β_g at the start, ≥ 0: weight of the prior in the gain; 1 is the paper's, 0 switches it off
    "bft_noise_ratio": (float, 0.1),  # Q at the start, as a share of the mean square of what the network writes, > 0
    "bft_units": (str, "stream"),  # one of `UNITS`
    "bft_jacobian": (str, "detached"),  # J of the network: "detached" (no gradient through it), "full" or "none" (J = 0)
}  # name -> (type, default)

# %% [markdown]
# ## Where the precision travels
#
# One tensor runs between the layers of a pretrained model, and much machinery (gradient checkpointing, sharding, offloading, pipelines) relies on there being only one. So the belief is packed into it: $[h\,;\log\lambda]$, twice as wide. The first layer appends $\log\lambda$, the last strips it.
# A precision kept on the side, in an attribute, would be wrong as soon as a layer is computed again for the backward pass.
#
# The packed tensor is float32 at least, whatever the model's dtype: bfloat16 has 8 bits of mantissa, and a $\log\lambda$ near 8 would move in steps of 1/16. $h$ survives the round trip exactly, because every bfloat16 number is a float32 number.

# %%
#| exports
def pack(
    belief: Belief,  # (b, t, d)
) -> Float[Tensor, "b t two_d"]:  # [h ; log λ], float32 or wider
    "A belief as one tensor."
    return torch.cat([at_least_float32(belief.mean), belief.precision.clamp(LEAST, MOST).log()], -1)


# %%
#| exports
def unpack(
    packed: Float[Tensor, "b t two_d"],  # [h ; log λ]
    dtype: torch.dtype,  # of h
) -> Belief:
    "The way back."
    h, log_lam = packed.chunk(2, -1)
    return Belief(h.to(dtype), log_lam.exp())


# %%
narrow = Belief(torch.randn(1, 2, 4).bfloat16(), torch.tensor([0.3, 2000.0])[:, None].expand(1, 2, 4))
back = unpack(pack(narrow), torch.bfloat16)
torch.equal(back.mean, narrow.mean), back.precision[0, :, 0]

# %% [markdown]
# ### Through the cache
#
# While a model generates, the keys and values of earlier tokens come from a cache, and so must their $\bar\lambda$. The cache has no place for $\bar\lambda$, but it keeps whatever keys it is given. So we hand it keys with additional channels that hold $\log\bar\lambda$, and cut these off the keys that it returns. Growing, preallocated and sliding caches, reordering for beam search, cropping: all of these move the channels along.
# In half precision, a single channel would round. Three channels, each with what the ones before it left over, hold a float32: exactly in bfloat16, to about $2^{-25}$ in float16.

# %%
#| exports
def to_channels(
    x: Float[Tensor, "b t"],  # float32
    dtype: torch.dtype,  # of the channels
) -> Float[Tensor, "b t c"]:  # one channel, or three where the dtype is narrower than float32
    "Numbers as sums of numbers of another dtype."
    channels = []
    for _ in range(3 if torch.finfo(dtype).bits < 32 else 1):
        channels.append(x.to(dtype))
        x = x - channels[-1].to(x.dtype)
    return torch.stack(channels, -1)


# %%
#| exports
def from_channels(
    channels: Float[Tensor, "b t c"],
) -> Float[Tensor, "b t"]:  # float32 or wider
    "The sums, smallest first."
    return at_least_float32(channels).flip(-1).cumsum(-1)[..., -1]


# %%
log_lam_bar = torch.tensor([[7.913845, -0.002718281]])
torch.equal(from_channels(to_channels(log_lam_bar, torch.bfloat16)), log_lam_bar), log_lam_bar.bfloat16().float() - log_lam_bar


# %% [markdown]
# One object per call of a layer carries $\log\bar\lambda$ from the layer to its attention function, and stands between attention and cache:

# %%
#| exports
class Keys:
    "What one call of a filtering layer tells its attention: log λ̄ of all keys, in front of a cache also of the cached ones."

    def __init__(
        self,
        bft: nn.Module,  # the layer's `LayerFilter`, or peft's copy of it
        lam_bar: Float[Tensor, "b t"],  # λ̄ of the tokens that enter now, [h⁻²]
        cache: Any = None,  # transformers' cache, if one is used
    ):
        self.bft, self.log_lam_bar, self.cache = bft, lam_bar.clamp(LEAST, MOST).log(), cache

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        "The cache's own `update`, with the channels added on the way in and removed on the way out."
        width = keys.shape[-1]
        channels = to_channels(self.log_lam_bar, keys.dtype)[:, None].expand(*keys.shape[:-1], -1)
        keys, values = self.cache.update(torch.cat([keys, channels], -1), values, *args, **kwargs)
        self.log_lam_bar = from_channels(keys[:, 0, :, width:])
        return keys[..., :width], values


# %% [markdown]
# ## Observe
#
# transformers lets a library register an attention function by name; rotary positions and normalised queries have been dealt with when it is called; the heads that share keys and values are still to be written out. A mask function must be registered under the same name, or there is silently no mask.
#
# The explicit form computes the mean $e$ by the very operations of transformers' own explicit attention, in the same order, so that $\beta_a = 0$ adds an exact zero and nothing changes, to the last bit. The moments of (20.1) are those of chapter 20: one more product with the table of weights, and its rows' norms. (The table is by far the largest thing here, and every further pass over it costs as much as the softmax.)

# %%
#| exports
class Query(NamedTuple):
    "One call of attention, all heads alike."

    q: Float[Tensor, "b h t k"]
    k: Float[Tensor, "b h j k"]
    v: Float[Tensor, "b h j k"]
    log_lam_bar: Float[Tensor, "b j"]  # of the keys
    beta_a: Float[Tensor, "1"]
    mask: Tensor | None  # as the registered mask function makes it
    scaling: float  # of the logits
    dropout: float  # on the weights of the mean, never on those of the moments


# %%
#| exports
def attend_explicit(a: Query) -> tuple[Tensor, Moments, Tensor]:  # e (b, h, t, k), moments, weights w
    "Kriging with the tempered weights (40.2), every weight in memory."
    bias = a.beta_a * a.log_lam_bar[:, None, None]
    logits = a.q @ a.k.mT * a.scaling + (bias if a.mask is None else a.mask + bias)
    w = logits.softmax(-1, dtype=torch.promote_types(a.q.dtype, torch.float32))
    e = F.dropout(w.to(a.q.dtype), a.dropout) @ a.v
    with torch.autocast(w.device.type, enabled=False):
        v = a.v.to(w.dtype)
        out = w @ augmented(v - v[..., :1, :].detach(), a.log_lam_bar.exp()[:, None], diagonal=False)
        return e, read_moments(out, torch.linalg.vector_norm(w, dim=-1).square(), v.shape[-1])._replace(e=e), w


# %% [markdown]
# The blocked form never holds the table of weights. Chapter 20's function adds $\log\bar\lambda$ to the logits by a channel of queries and keys; another such channel adds $(\beta_a - 1)\log\bar\lambda$, which leaves $\beta_a\log\bar\lambda$.

# %%
#| exports
def attend_blocked(a: Query) -> tuple[Tensor, Moments, None]:  # e (b, h, t, k), moments
    "The same with memory linear in the length; equal up to rounding. `ValueError` for dropout."
    if a.dropout:
        raise ValueError(f"attention_dropout must be 0 with 'bft_blocked', got {a.dropout}: use 'bft'")
    visible = a.mask if a.mask is None or a.mask.dtype == torch.bool else a.mask > torch.finfo(a.mask.dtype).min / 2
    with torch.autocast(a.q.device.type, enabled=False):
        q, k, v = (at_least_float32(x) for x in (a.q, a.k, a.v))
        temper = ((a.beta_a - 1).expand(*q.shape[:-1], 1), a.log_lam_bar[:, None, :, None].expand(*k.shape[:-1], 1))
        q, k = torch.cat([q * a.scaling, temper[0]], -1), torch.cat([k, temper[1]], -1)
        origin = v[..., :1, :].detach()
        moments = moments_blocked(q, k, v - origin, a.log_lam_bar.exp()[:, None], visible, None, False, False)
        return (moments.e + origin).to(a.v.dtype), moments, None


# %%
#| exports
class Seen(NamedTuple):
    "What attention reports beside the mean."

    variance: Float[Tensor, "b h t"]  # 1/λ_obs of each head's mean, [v²]
    n_eff: Float[Tensor, "b h t"]  # Kish's effective sample size, [1]
    weights: Float[Tensor, "b h t j"] | None  # w, if they were in memory


# %%
#| exports
def bft_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, filtering: Keys | None = None, *, attend, **kwargs) -> tuple[Tensor, Seen]:
    "Attention as transformers calls it. Raises `ValueError` in a layer that is not a filtering one, and for a λ̄ that is not positive and finite."
    if filtering is None:
        raise ValueError(f"{type(module).__name__} asked for filtering attention, but its layer is not a filtering one: use bft_nb.llama.convert(model)")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    check_precision(filtering.log_lam_bar.exp(), "lam_bar")
    bft = filtering.bft
    e, moments, w = attend(Query(query, key, value, filtering.log_lam_bar, bft.beta_a, attention_mask, scaling, dropout if module.training else 0.0))
    with torch.autocast(e.device.type, enabled=False):
        return e.transpose(1, 2).contiguous(), Seen(bft.observation_variance(moments), 1 / moments.kappa, w)


# %%
#| exports
def visible_mask(*args: Any, **kwargs: Any) -> Tensor:
    "transformers' boolean mask, made in every case."
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


# %%
#| exports
IMPLEMENTATIONS = {"bft": (attend_explicit, eager_mask), "bft_blocked": (attend_blocked, visible_mask)}  # attn_implementation -> (attention, mask)
for _name, (_attend, _mask) in IMPLEMENTATIONS.items():
    AttentionInterface.register(_name, partial(bft_attention, attend=_attend))
    AttentionMaskInterface.register(_name, _mask)


# %% [markdown]
# ## Update and predict
#
# What remains is the layer itself. Variances of the heads go through the squared output projection (21.2), here with one variance per head:

# %%
#| exports
def stream_precision(
    variance: Float[Tensor, "b h t"],  # of each head's mean, [v²]
    weight: Float[Tensor, "d hk"],  # W_O
) -> Float[Tensor, "b t d"]:  # λ_obs, [h⁻²]
    "Precision of the observation in the residual stream, (21.2) for isotropic heads."
    with torch.autocast(variance.device.type, enabled=False):
        squared = weight.to(variance.dtype).square().unflatten(1, (variance.shape[1], -1)).sum(-1)
        return F.linear(variance.transpose(1, 2), squared).clamp(LEAST, MOST).reciprocal()


# %% [markdown]
# Both this function and the Jacobian need a module's *weights*, where everything else needs its output. An adapter changes the output and leaves the weights as they are, so its share must be added, or merging the adapter later would change the model:

# %%
#| exports
def effective_weight(
    linear: nn.Module,  # `nn.Linear`, or peft's LoRA around one
) -> Float[Tensor, "o i"]:
    "The matrix that a linear layer applies, unmerged LoRA adapters included."
    weight = linear.weight
    if getattr(linear, "merged", True) or linear.disable_adapters:
        return weight
    for adapter in linear.active_adapters:
        if adapter in linear.lora_A:
            weight = weight + linear.get_delta_weight(adapter).to(weight.dtype)
    return weight


# %% [markdown]
# To look inside, each call leaves a record at the layer's `report`:

# %%
#| exports
class LayerTrace(NamedTuple):
    "What a layer believed on entry and what it saw."

    belief: Belief  # h and λ on entry, (b, t, d)
    beta_g: Float[Tensor, "1"]  # weight of the prior in the gain
    beta_a: Float[Tensor, "1"]  # weight of log λ̄ in attention
    observation: Belief  # e and λ_obs in the residual stream, (b, t, d)
    n_eff: Float[Tensor, "b h t"]  # effective sample size per head, [1]
    weights: Float[Tensor, "b h t j"] | None  # kriging weights, with the explicit attention

    @property
    def gain(self) -> Float[Tensor, "b t d"]:
        "K of (40.1)."
        return gain(self.beta_g * self.belief.precision, self.observation.precision)

    @property
    def lam_bar(self) -> Float[Tensor, "b t"]:
        "λ̄ of each token on entry, [h⁻²]."
        return reliability(self.belief)


# %% [markdown]
# The class below is mixed into transformers' decoder layer and uses its parts under their own names. Read `forward` as the three lines of chapter 21.

# %%
#| exports
JACOBIAN_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}  # hidden_act -> activation of chapter 13


# %%
#| exports
_Mixed: Any = object  # the mixins use what transformers' classes bring


# %%
#| exports
class FilteringLayer(_Mixed):
    "A decoder layer as a filter step: [h ; log λ] in, [h ; log λ] out. Mixed into transformers' layer, whose parts it uses."

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        "Observe, update, predict."
        belief = self.receive(hidden_states)
        observation = self.observe(belief, attention_mask, kwargs)
        posterior = update(Belief(belief.mean, self.bft.beta_g * belief.precision), observation)
        return self.predict(posterior)

    def receive(self, hidden_states: Tensor) -> Belief:
        "The belief that enters; in the first layer its precision is τ."
        norm = self.input_layernorm
        if not self.bft.first:
            return unpack(hidden_states, norm.weight.dtype)
        return Belief(hidden_states, self.bft.initial_precision(hidden_states, norm.variance_epsilon))

    def observe(self, belief: Belief, mask: Tensor | None, kwargs: dict[str, Any]) -> Belief:
        "Attention's e and λ_obs."
        norm = self.input_layernorm
        lam_bar = reliability(belief) * self.bft.mean_square(belief.mean, norm.variance_epsilon).squeeze(-1)
        name = "cache" if "cache" in kwargs else "past_key_values"  # transformers renamed it in 5.2x
        keys = Keys(self.bft, lam_bar, kwargs.pop(name, None))
        kwargs[name] = None if keys.cache is None else keys
        e, seen = self.self_attn(hidden_states=norm(belief.mean), attention_mask=mask, filtering=keys, **kwargs)
        if not isinstance(seen, Seen):
            raise ValueError(f"attn_implementation must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {self.self_attn.config._attn_implementation!r}")
        observation = Belief(e.to(belief.mean.dtype), stream_precision(seen.variance, effective_weight(self.self_attn.o_proj)))
        self.bft.report(LayerTrace(belief, self.bft.beta_g, self.bft.beta_a.clone(), observation, seen.n_eff, seen.weights))
        return observation

    def predict(self, posterior: Belief) -> Tensor:
        "The network moves the mean, its Jacobian and Q the precision; the last layer leaves the precision behind."
        x = self.post_attention_layernorm(posterior.mean)
        gate, up = self.mlp.gate_proj(x), self.mlp.up_proj(x)
        delta = self.mlp.down_proj(self.mlp.act_fn(gate) * up)
        if self.bft.last:
            return posterior.mean + delta
        jac = self.jacobian(posterior.mean, gate, up)
        noise = self.bft.process_noise(posterior.mean, delta, self.post_attention_layernorm.variance_epsilon)
        return pack(predict(posterior, delta, jac, noise))

    def jacobian(self, h: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        "Diagonal of the network's Jacobian, (13.6)."
        mode, mlp, norm = self.bft.config.bft_jacobian, self.mlp, self.post_attention_layernorm
        if mode == "none":
            return torch.zeros((), device=h.device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and mode == "full"):
            xhat, inv_std = standardise(h, "rms", norm.variance_epsilon)
            w_gate, w_up, w_down = (effective_weight(linear) for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
            activation = JACOBIAN_NAMES.get(self.bft.config.hidden_act, mlp.act_fn)
            behind = dict(norm="rms", xhat=xhat, inv_std=inv_std, norm_weight=norm.weight, gate_zero=mlp.gate_proj.bias, up_zero=mlp.up_proj.bias)
            return gated_ffn_jacobian(gate, up, w_gate, w_up, w_down, activation, **behind)


# %% [markdown]
# ## The models
#
# Two more classes are mixed in, `FilteringModel` into the stack of layers and `FilteringForCausalLM` into the language model; what both need, `Converted` and `Filtering` hold. They initialise what is new, keep it in float32 when the rest is loaded in half precision, and tidy up what transformers records on request: hidden states lose their $\log\lambda$, attentions are the kriging weights.

# %%
#| exports
class Converted(_Mixed):
    "What all converted stacks and language models share. Mixed into transformers' classes."

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Added):
            module.initialise()


# %%
#| exports
class Filtering(Converted):
    "What a filtering stack and its language model share."

    _keep_in_fp32_modules_strict = ["bft"]


# %%
#| exports
class FilteringModel(Filtering):
    "A stack of filtering layers. Mixed into transformers' model."

    def __init__(self, config: PretrainedConfig):
        super().__init__(config)
        make_filtering(self)
        self.post_init()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        "transformers' own forward; hidden states without log λ, attentions as weights."
        as_dict = kwargs.pop("return_dict", None)
        out = super().forward(*args, return_dict=True, **kwargs)
        if out.hidden_states is not None:
            out.hidden_states = tuple(None if x is None else x[..., : self.config.hidden_size] for x in out.hidden_states)
        if out.attentions is not None:
            out.attentions = tuple(seen.weights for seen in out.attentions)
        return out.to_tuple() if as_dict is False else out


# %%
#| exports
class FilteringForCausalLM(Filtering):
    "A language model on filtering layers. Mixed into transformers' model."

    def __init__(self, config: PretrainedConfig):
        super().__init__(config)
        make_filtering(self.model)
        self.post_init()


# %% [markdown]
# For each family of models, four classes follow by inheritance. The *layer* of a family must be the one we know: norm, attention, norm, gated network, with the outputs of attention and network added to the stream. Others would fail in silence (Gemma 2 also normalises what it adds), so what has not been tested is refused.
#
# Chapter 42 converts the same families in another way, so what a conversion consists of is written down once.

# %%
#| exports
class Family(NamedTuple):
    "The classes of a family: transformers' own, and ours by inheritance."

    plain: type[PreTrainedModel]  # transformers' causal language model
    config: type[PretrainedConfig]
    part: type[nn.Module]  # what changes in a layer, or the layer itself
    model: type[PreTrainedModel]
    causal_lm: type[PreTrainedModel]


# %%
#| exports
class Conversion(NamedTuple):
    "What sets one way of converting apart from another."

    function: str  # the public one, for messages
    prefix: str  # of the names of classes
    part: str  # end of the name of transformers' class of which each layer has one
    mixins: tuple[type, type, type]  # into the part, the stack of layers and the language model
    settings: dict[str, tuple[type, Any]]  # fields of the configuration: name -> (type, default)
    families: dict[str, Family]  # model_type of the plain model -> classes; filled by `make_family`


# %%
#| exports
FAMILIES: dict[str, Family] = {}

# %%
#| exports
FILTERS = Conversion("convert", "BFT", "DecoderLayer", (FilteringLayer, FilteringModel, FilteringForCausalLM), SETTINGS, FAMILIES)


# %%
#| exports
def make_family(
    name: str,  # as in transformers' class names
    conversion: Conversion = FILTERS,
) -> tuple[type[PretrainedConfig], type[PreTrainedModel], type[PreTrainedModel]]:  # configuration, model, causal language model
    "Make the classes of a family, enter them in the conversion's `families` and with transformers' Auto classes."
    source = importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")

    def derive(end: str, *mixin: type, **members: Any) -> Any:
        doc = f"`{name}{end}` as `bft_nb.{conversion.mixins[0].__module__.split('.')[-1]}.{conversion.function}` makes it."
        home, called = conversion.mixins[0].__module__, f"{conversion.prefix}{name}{end}"
        made = type(called, (*mixin, getattr(source, name + end)), {"__module__": home, "__doc__": doc, **members})
        setattr(sys.modules[home], called, made)  # where pickle looks for it
        return made

    part, stack, language_model = conversion.mixins
    types, defaults = ({field: setting[i] for field, setting in conversion.settings.items()} for i in (0, 1))
    kind = getattr(source, f"{name}Config").model_type
    config = derive("Config", model_type=f"{conversion.prefix.lower()}_{kind}", __annotations__=types, **defaults)
    model = derive("Model", stack, config_class=config)
    causal_lm = derive("ForCausalLM", language_model, config_class=config)
    conversion.families[kind] = Family(getattr(source, f"{name}ForCausalLM"), config, derive(conversion.part, part), model, causal_lm)
    AutoConfig.register(config.model_type, config)
    AutoModel.register(config, model)
    AutoModelForCausalLM.register(config, causal_lm)
    return config, model, causal_lm


# %%
#| exports
def become(
    model: PreTrainedModel,  # transformers' stack of layers, with a configuration of ours
    conversion: Conversion,
) -> type[nn.Module]:  # class of the part that changes in every layer
    "Give a stack its class."
    family = conversion.families[model.config.model_type.removeprefix(f"{conversion.prefix.lower()}_")]
    model.__class__ = family.model
    _CAN_RECORD_REGISTRY[model] = model._can_record_outputs  # transformers enters a class when one is constructed
    return family.part


# %%
#| exports
def make_filtering(
    model: PreTrainedModel,  # transformers' stack of layers, with a configuration of ours
) -> None:
    "Turn the layers of a stack into filtering ones, in place; their weights stay where they are."
    part = become(model, FILTERS)
    for i, layer in enumerate(model.layers):
        if not isinstance(layer, part):
            layer.__class__ = part
            layer.bft = LayerFilter(model.config, i).to(layer.input_layernorm.weight.device)
    if model.config._attn_implementation not in IMPLEMENTATIONS:
        model.config._attn_implementation = "bft"


# %%
#| exports
BFTLlamaConfig, BFTLlamaModel, BFTLlamaForCausalLM = make_family("Llama")

# %%
#| exports
BFTMistralConfig, BFTMistralModel, BFTMistralForCausalLM = make_family("Mistral")

# %%
#| exports
BFTQwen2Config, BFTQwen2Model, BFTQwen2ForCausalLM = make_family("Qwen2")

# %%
#| exports
BFTQwen3Config, BFTQwen3Model, BFTQwen3ForCausalLM = make_family("Qwen3")

# %%
#| exports
BFTSmolLM3Config, BFTSmolLM3Model, BFTSmolLM3ForCausalLM = make_family("SmolLM3")


# %% [markdown]
# ## Convert
#
# Converting changes classes and adds the `bft` modules, in place: no weight is copied, and the model stays on its device.

# %%
#| exports
def converted_config(
    model: nn.Module,  # to be converted
    conversion: Conversion,
    **settings: Any,  # fields of the conversion's `settings`
) -> PretrainedConfig:
    "The configuration a model will have. `TypeError` for a model of another family, or one that is converted or wrapped already."
    old: Any = getattr(model, "config", None)
    family = conversion.families.get(getattr(old, "model_type", ""))
    if family is None or type(model) is not family.plain:
        allowed = ", ".join(f.plain.__name__ for f in conversion.families.values())
        raise TypeError(f"{conversion.function} takes one of {allowed}, got {type(model).__name__}")
    names = {"model_type": family.config.model_type, "architectures": [family.causal_lm.__name__]}
    return family.config.from_dict({**old.to_dict(), **settings, **names})


# %%
#| exports
def adopt(
    model: Any,  # a plain causal language model
    config: PretrainedConfig,  # by `converted_config`
    conversion: Conversion,
    attn_implementation: str,
) -> None:
    "Give a language model its class and all its parts their configuration."
    old, config._attn_implementation = model.config, attn_implementation
    for part in model.modules():
        if getattr(part, "config", None) is old:
            part.config = config
    model.__class__ = conversion.families[old.model_type].causal_lm


# %%
#| exports
def convert(
    model: nn.Module,  # a causal language model of one of `FAMILIES`
    *,
    beta_a: float = SETTINGS["bft_beta_a"][1],  # β_a at the start; 1 is the paper's, 0 the plain attention
    beta_g: float = SETTINGS["bft_beta_g"][1],  # β_g at the start, ≥ 0; 1 is the paper's, 0 the plain residual, for good
    noise_ratio: float = SETTINGS["bft_noise_ratio"][1],  # Q at the start, a share of what the network writes, > 0
    units: str = SETTINGS["bft_units"][1],  # one of `UNITS`
    jacobian: str = SETTINGS["bft_jacobian"][1],  # "detached", "full" or "none"
    attn_implementation: str = "bft",  # a key of `IMPLEMENTATIONS`
) -> PreTrainedModel:  # the same object
    "Make a pretrained model a filter, in place. Raises `TypeError` for a model of another family, `ValueError` for settings out of range."
    check_option("attn_implementation", attn_implementation, IMPLEMENTATIONS)
    settings = dict(bft_beta_a=beta_a, bft_beta_g=beta_g, bft_noise_ratio=noise_ratio, bft_units=units, bft_jacobian=jacobian)
    config = converted_config(model, FILTERS, **settings)
    check_settings(config)
    adopt(model, config, FILTERS, attn_implementation)
    make_filtering(model.model)
    return model


# %% [markdown]
# The smallest case: a Llama with four layers of 32 features, random weights, and a vocabulary of bytes. `eager` is transformers' explicit attention.

# %%
bytes_only = tiny_tokenizer()


def tiny() -> LlamaForCausalLM:
    model = tiny_llama(bytes_only, d=32, n_layers=4).eval()
    model.set_attn_implementation("eager")
    return model


# %%
converted = convert(tiny())
type(converted).__name__, {name: tuple(p.shape) for name, p in converted.model.layers[0].bft.named_parameters()}

# %% [markdown]
# Switched off, it is the plain model to the last bit, here on a batch with padding on the left:

# %%
ids = torch.randint(3, 259, (2, 9), generator=torch.Generator().manual_seed(0))
batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids).index_fill(1, torch.tensor([0, 1]), 0)}
with torch.no_grad():
    off, plain = convert(tiny(), beta_a=0.0, beta_g=0.0)(**batch).logits, tiny()(**batch).logits
assert torch.equal(off, plain)

# %% [markdown]
# Switched on in full it is the paper's filter, and even a random model shows it: the gain leaves 1, and the logits change (root mean square, in units of their standard deviation):

# %%
with torch.no_grad():
    full = convert(tiny(), beta_a=1.0, beta_g=1.0)(**batch).logits
(full - plain).square().mean().sqrt() / plain.std()

# %% [markdown]
# Precision costs few parameters. TinyLlama's own shape (22 layers of 2,048 features), built without allocating memory:

# %%
with torch.device("meta"):
    big = BFTLlamaForCausalLM(BFTLlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4, vocab_size=32000))
extra = sum(p.numel() for name, p in big.named_parameters() if ".bft." in name)
f"{extra:,} of {big.num_parameters():,}: {extra / big.num_parameters():.4%}"


# %% [markdown]
# ## Trace
#
# To see what the filter believes, run a batch with a listener at every layer:

# %%
#| exports
def added(
    model: nn.Module,  # any model that holds converted layers
    kind: type[Added] = Added,
) -> list[Any]:  # of modules of that kind
    "What a conversion has added, in the order of the layers. `TypeError` if there is nothing."
    found = [m for m in model.modules() if isinstance(m, kind)]
    if not found:
        raise TypeError(f"{type(model).__name__} has no {kind.missing}")
    return found


# %%
#| exports
def layer_filters(
    model: nn.Module,  # any model that holds filtering layers
) -> list[LayerFilter]:
    "The `bft` modules in the order of the layers; under peft the originals beside the copies that are trained. `TypeError` if there are none."
    return added(model, LayerFilter)


# %%
#| exports
@contextmanager
def listening(
    model: nn.Module,  # a converted model, or one wrapped by peft
    kind: type[Added] = LayerFilter,  # of what to listen to
) -> Iterator[list[Any]]:  # grows by one record (a filter's is a `LayerTrace`) per layer and forward pass
    "What the layers report while the block runs."
    found: list[Any] = []
    hooks = [part.report.register_forward_hook(lambda module, args, record: found.append(record)) for part in added(model, kind)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


# %%
#| exports
def trace(
    model: nn.Module,  # a filtering model, or one wrapped by peft
    **inputs: Any,  # of the model
) -> list[LayerTrace]:  # one per layer, without gradient
    "What every layer believed and saw in one forward pass."
    with listening(model) as found, torch.no_grad():
        model(**{"use_cache": False, **inputs})
    return found


# %%
records = trace(converted, **batch)
pd.DataFrame({"mean λ̄": [r.lam_bar.mean().item() for r in records], "mean K": [r.gain.mean().item() for r in records], "mean n_eff": [r.n_eff.mean().item() for r in records]}).round(3).rename_axis("layer")

# %% [markdown]
# The mean of $\bar\lambda$ in each layer says little so far: the scales are not set.
#
# ## Calibrate
#
# The residual stream of a language model grows over its depth; in SmolLM2 the mean square is some 600,000 times that of the embedding after layers 11 to 27 (counted from 0) and some 130,000 times after the last, most of it in a few features of a few tokens. No single $Q$ and no single $\tau$ serves all layers. One batch, one forward pass, front to back, sets the scales **[D]**:
#
# $$c_\tau = \frac{1}{\langle h_0^2\rangle}, \qquad c_{q,i} = \rho\,\langle \delta_i^2\rangle, \qquad c_{s,h} = \frac{\langle S_h\rangle}{\langle \sum_j w_{hj}/\bar\lambda_j\rangle} \tag{40.3}$$
#
# where $\langle\cdot\rangle$ is the mean over the real tokens of the batch, $\delta$ what the layer's network writes into the stream, and $\rho$ the `noise_ratio`: the network's prediction is taken to be uncertain by a share of its own size.

# %%
#| exports
@contextmanager
def _calibrating(filters: list[LayerFilter], counts: Tensor) -> Iterator[None]:
    try:
        for bft in filters:
            bft.calibrating = counts
        yield
    finally:
        for bft in filters:
            bft.calibrating = None


# %%
#| exports
def calibrate(
    model: nn.Module,  # a filtering model
    batch: Mapping[str, Tensor],  # input_ids (b, t), and attention_mask where there is padding
) -> nn.Module:  # the same object
    """Set the scales of every layer from one batch, (40.3). A few thousand tokens of the kind the model will see are plenty; no gradient, no labels.

    Raises `TypeError` for a model without filtering layers, `ValueError` without input_ids or if no text has two tokens: one alone scatters from nothing."""
    missing = {"input_ids"} - set(batch)
    if missing:
        raise ValueError(f"batch must hold input_ids (and attention_mask, if there is padding), got {', '.join(batch) or 'nothing'}")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    counts = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    if int(counts.sum(1).max()) < 2:
        raise ValueError(f"calibration needs a text of two tokens at least, got {tuple(counts.shape)} with {int(counts.sum(1).max())} in the longest")
    training = model.training
    with _calibrating(layer_filters(model), counts), torch.no_grad():
        model.eval()(**inputs, use_cache=False)
    return model.train(training)


# %%
records = trace(calibrate(converted, batch), **batch)
pd.DataFrame({"mean λ̄": [r.lam_bar.mean().item() for r in records], "mean K": [r.gain.mean().item() for r in records]}).round(3).rename_axis("layer")

# %% [markdown]
# ## Train
#
# The precision's own parameters are few and far from converged, those of the network many and nearly so. So the precision's get a learning rate of their own, and no weight decay: decay would pull $\log$-like numbers towards 0, which for them has no meaning.


# %%
#| exports
def parameter_groups(
    model: nn.Module,  # a converted model, or one wrapped by peft
    lr: float,  # of the network
    precision_lr: float | None = None,  # of what the conversion added (`bft`); None: the same
    weight_decay: float = 0.01,  # of the network's matrices
) -> list[dict[str, Any]]:  # for an optimiser of torch
    "Trainable parameters in up to three groups: matrices with decay, vectors without, and what the conversion added. Raises `ValueError` for rates that are not positive."
    check_positive("lr", lr)
    precision_lr = lr if precision_lr is None else precision_lr
    check_positive("precision_lr", precision_lr)
    check_positive("weight_decay", weight_decay, zero=True)
    ours = {id(p) for part in added(model) for p in part.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) not in ours and p.ndim > 1], "lr": lr, "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) not in ours and p.ndim <= 1], "lr": lr, "weight_decay": 0.0},
        {"params": [p for p in trained if id(p) in ours], "lr": precision_lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


# %%
pd.DataFrame([{"parameters": sum(p.numel() for p in g["params"]), **{k: g[k] for k in ("lr", "weight_decay")}} for g in parameter_groups(converted, lr=1e-4, precision_lr=1e-2)])

# %% [markdown]
# Which of them have no gradient in the first step? The initial precisions are all equal then, so the first layer's $\beta_a$ has nothing to weigh, and the first matrix of `tau` waits because the second starts at zero. (At $\beta_a = \beta_g = 0$, $\tau$ and $Q$ wait until $\beta_a$ has moved, and $\beta_g$ waits for ever, since a square has no slope at zero: that is why the start is near zero, not at it.)

# %%
converted(**batch, labels=batch["input_ids"]).loss.backward()
[name for name, p in converted.named_parameters() if ".bft." in name and p.grad.abs().max() < 1e-7]

# %% [markdown]
# ## The fifteen lines, run
#
# The tiny random Llama stands in for SmolLM2, for which only `name` would change.

# %%
here = tempfile.TemporaryDirectory()
name, folder = str(Path(here.name) / "tiny"), str(Path(here.name) / "tuned")
tiny().save_pretrained(name)
bytes_only.save_pretrained(name)
texts = ["A belief is a mean and a precision.", "Attention observes, the residual updates, the network predicts."]
torch.manual_seed(0);

# %%
batch = AutoTokenizer.from_pretrained(name)(texts, return_tensors="pt", padding=True, padding_side="left")
model = calibrate(convert(AutoModelForCausalLM.from_pretrained(name)), batch)
tuned = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], modules_to_save=["bft"]))

optimizer = torch.optim.AdamW(parameter_groups(tuned, lr=1e-3, precision_lr=1e-2))
for _ in range(5):
    tuned(**batch, labels=batch["input_ids"].where(batch["attention_mask"] > 0, -100)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
tuned.save_pretrained(folder, save_embedding_layers=False)

again = PeftModel.from_pretrained(convert(AutoModelForCausalLM.from_pretrained(name)), folder).eval()
generated = again.generate(**batch, max_new_tokens=8, do_sample=False)

# %% [markdown]
# What was loaded is what was saved, scales included:

# %%
with torch.no_grad():
    assert torch.equal(again(**batch).logits, tuned.eval()(**batch).logits)
generated.shape, again.base_model.model.model.layers[1].bft.noise_scale.mean() != 0.1

# %% [markdown]
# Without adapters, a converted model is saved and loaded like any other, and knows its class (`import bft_nb.llama` registers it):

# %%
model, whole = calibrate(convert(tiny()), batch), str(Path(here.name) / "whole")
model.save_pretrained(whole)
loaded = AutoModelForCausalLM.from_pretrained(whole).eval()
with torch.no_grad():
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
type(loaded).__name__

# %% [markdown]
# ## Does a pretrained model survive?
#
# A model of random weights has nothing to lose. SmolLM2 [@allal2025smollm2] does: 135 million parameters, 30 layers; here *SmolLM2-135M-Instruct, Q4_1 dequantised*. We ask two things of a start. The perplexity on paragraphs of Wikipedia (contexts of SQuAD [@rajpurkar2016squad]) may change by 1 % at most, and $\log\bar\lambda$ must differ between tokens in the middle layers (a standard deviation above .05), or there would be nothing to learn from. The two demands pull in opposite directions.
#
# The numbers are rows that the notebook `llama_init` has stored (`bft sweep nbs/experiments/grids/llama_init.yaml`); the scales were set on other paragraphs than those evaluated.

# %%
rows = load_rows("llama_init")
of = choose(rows, bft=False, model="smollm2").iloc[0]
f"{of['n_texts']:.0f} paragraphs, {of['n']:,} tokens; plain model: perplexity {of['value']:.2f}"


# %%
def start(beta_a=0.25, beta_g=0.01, noise_ratio=0.1, units="stream", calibrated=True) -> dict:
    "One start among the stored rows, empty if it has not been measured; the defaults are what is shipped."
    found = choose(rows, bft=True, model="smollm2", beta_a=beta_a, beta_g=beta_g, noise_ratio=noise_ratio, units=units, calibrated=calibrated)
    if found.empty:
        return {}
    values = found.set_index("metric")["value"]
    sd, k = (values[values.index.str.startswith(f"{name}.")].sort_index() for name in ("sd", "gain"))
    middle = sd.iloc[len(sd) // 3 : 2 * len(sd) // 3]
    return {"change, %": 100 * (values["perplexity"] / of["value"] - 1), "sd of log λ̄, middle": middle.mean(), "least of them": middle.min(), "least gain of a layer": k.min()}


# %%
STARTS = {
    "shipped: β_a = 0.25, β_g = 0.01, ρ = 0.1": {},
    "more noise: ρ = 1": dict(noise_ratio=1.0),
    "attention to the letter: β_a = 1": dict(beta_a=1.0),
    "the same with ρ = 1": dict(beta_a=1.0, noise_ratio=1.0),
    "β_g = 0.1": dict(beta_g=0.1),
    "strong: β_a = 1, β_g = 0.1": dict(beta_a=1.0, beta_g=0.1),
    "gain to the letter: β_g = 1": dict(beta_g=1.0),
    "all to the letter: both 1, τ = 1, not calibrated": dict(beta_a=1.0, beta_g=1.0, calibrated=False),
    "shipped, but not calibrated": dict(calibrated=False),
    "normalised units": dict(units="normalised"),
    "normalised units, not calibrated": dict(units="normalised", calibrated=False),
}
pd.DataFrame({name: found for name, settings in STARTS.items() if (found := start(**settings))}).T.round(3)

# %%
shipped = start()
assert abs(shipped["change, %"]) <= 1 and shipped["least of them"] > 0.05

# %% [markdown]
# **Reading.** The shipped start passes on both counts: perplexity within 1 %, and a spread several times the .05 in every one of the middle layers. Taken to the letter, the equations fail as a start: they turn a language model into noise. The two dials are to blame in very different measure.
#
# - The *gain* is what destroys. At $\beta_g = 1$, calibrated and with a mild attention, the model is lost; at a tenth of that weight a layer takes on nine tenths of what attention tells it and perplexity rises by 6 %; here it takes on four tenths, thirty times over.
# - *Attention* is harmless as long as $\beta_a \log\bar\lambda$ differs little between tokens. To the letter it costs several percent at the shipped noise; with ten times the noise it costs half a percent, and the precision is a third as lively, that is, spreads a third as much between tokens.
# - *Strong*, which is attention to the letter and ten times the shipped weight of the prior, costs what the two cost apart. With it the [experiments](experiments/squad_noise.ipynb) ask whether more of a filter would help.
# - *Normalised units*, in which a token's variances are shares of its mean square, were meant to spare the calibration, since one scale would serve all depths. They do not: without calibration they cost more than the stream's own units do, and with it no less. The mean square of a few tokens is enormous [@sun2024massive], and multiplying by it makes them the most reliable of all. They stay as an option, because in them nothing depends on the scale of the stream.
# - The dials trade against each other (@fig-tradeoff, left): what attention feels is $\beta_a$ times the spread. We ship a small $\beta_a$ and a lively precision, not the reverse, because training can turn up a dial faster than it can bring a dead signal to life **[D]**.

# %%
#| label: fig-tradeoff
#| fig-cap: "Left: perplexity survives while β_a times the spread of log λ̄ stays small. Right: it does not survive a large weight of the prior in the gain. Dotted: what we ask for, at most 1 % and more than .05."
#| code-fold: true
fig, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2))
for beta_a, role, mark, below in ((0.25, "posterior", "o", 11), (1.0, "baseline", "s", -5)):
    points = {rho: p for rho in (0.01, 0.1, 1.0) if (p := start(beta_a=beta_a, noise_ratio=rho))}
    x, y = ([p[name] for p in points.values()] for name in ("sd of log λ̄, middle", "change, %"))
    left.plot(x, y, mark + "-", color=COLOUR[role], markersize=5, label=f"β_a = {beta_a:g}")
    for rho, a, b in zip(points, x, y):
        left.annotate(f"ρ = {rho:g}", (a, b), xytext=(-2, -below), textcoords="offset points", ha="right", fontsize=8, color=COLOUR[role])
left.axvline(0.05, color=COLOUR["prior"], linestyle=":", linewidth=0.8)
left.set(xlabel="sd of log λ̄ over tokens, layers 11–20", ylabel="change of perplexity [%]", xlim=(0, None), ylim=(-1.5, None))
left.legend(fontsize=8)
betas = [b for b in (0.01, 0.1, 1.0) if start(beta_g=b)]
right.plot(betas, [start(beta_g=b)["change, %"] for b in betas], "o-", color=COLOUR["posterior"], markersize=5)
right.set(xlabel="β_g, weight of the prior in the gain", xscale="log")
right.set_yscale("symlog", linthresh=1)
right.set_ylim(-0.5, 2000)
for ax in (left, right):
    ax.axhline(0, color=COLOUR["prior"], linewidth=0.8)
    ax.axhline(1, color=COLOUR["prior"], linestyle=":", linewidth=0.8)
plt.show()

# %% [markdown]
# **Reading.** Left: with $\beta_a = 1$ the cost follows the spread: half a percent at .11, 5 % at .32, 15 % at .43. A quarter of the weight allows the same liveliness (.31) for .2 %. What the softmax feels is the product: .11 costs .5 %, and .25 × .31 = .08 costs .2 %.
# So the spread by itself is not what hurts. Either dial, $\beta_a$ or $\rho$, buys the perplexity back, but only the smaller $\beta_a$ leaves the precision alive.
#
# Right: the gain has no such corner. Ten times the shipped weight of the prior costs 6 %, and the paper's weight makes perplexity ten times what it was: the least gain of a layer falls from .95 to .61 and .09.
# One model, 16 paragraphs: a change of a tenth of a percent, like the one below zero, is no finding.
#
# ## How it fails
#
# A family whose layer has not been checked is refused, as are a model that is converted already, or wrapped by peft (convert first, then wrap):

# %%
other = Gemma2ForCausalLM(Gemma2Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8, pad_token_id=0))
test_fail(lambda: convert(other), contains="SmolLM3ForCausalLM, got Gemma2ForCausalLM")
test_fail(lambda: convert(convert(tiny())), contains="got BFTLlamaForCausalLM")
test_fail(lambda: convert(tiny(), beta_g=-0.1), contains="bft_beta_g must be ≥ 0")
test_fail(lambda: convert(tiny(), units="rms"), contains="'stream', 'normalised'")
test_fail(lambda: trace(tiny(), **batch), contains="has no filtering layers")

# %% [markdown]
# Another attention function would ignore $\bar\lambda$ without a word, so the layer checks what came back:

# %%
wrong = convert(tiny())
wrong.set_attn_implementation("sdpa")
test_fail(lambda: wrong(**batch), contains="attn_implementation must be one of 'bft', 'bft_blocked', got 'sdpa'")

# %% [markdown]
# ## Assumptions, and where they break
#
# - The tempered posterior forgets: at $\beta_g = .01$ a token's precision is nearly that of its last observation, and $\tau$ reaches no further than the first layers. To carry evidence over the depth, $\beta_g$ must grow in training.
# - $K$ acts on what attention *adds*, as if that were an innovation $z - h$ (chapter 12). A pretrained layer was never told so.
# - One number per head stands for the variance of all its values, and the projection treats heads as independent (21.2).
# - "To the last bit" holds against transformers' `eager` attention in float32 and half precision. Its other implementations differ from `eager` by rounding, and so do ours from them; in float64 `eager` takes the softmax in float32, and ours does not.
# - The explicit attention keeps a table of all pairs of tokens for each head, as `eager` does. `attn_implementation="bft_blocked"` keeps none, but does not support dropout.
# - The Jacobian costs three more products with the network's matrices in each layer, and in generation, where one token is computed at a time, a pass over those matrices. `jacobian="none"` saves both and takes $J = 0$.
# - Calibrated scales belong to the text they were measured on. A model fine-tuned far away should be calibrated again.
# - Weights in 8 or 4 bits give no matrix to square; dequantise first. Tensor parallelism has not been tried.
#
# ## Summary
#
# - `convert` makes a pretrained Llama, Mistral, Qwen2, Qwen3 or SmolLM3 [@touvron2023llama] a filter in place. The belief travels as $[h\,;\log\lambda]$, so checkpointing, caches, generation, peft [@hu2022lora] and distributed training work as before; under a thousandth of parameters is new.
# - A power prior connects the plain model ($\beta = 0$, to the last bit) with the paper's filter ($\beta = 1$), per layer and learned.
# - Taken to the letter, the equations destroy a pretrained model, by their gain; calibrated and tempered, they leave its perplexity within 1 % with a precision that differs between tokens.
#
# ## Exercises
#
# **1.** Multiply all $\bar\lambda$ in (40.2) by the same number. What changes in the weights, and what in $\lambda_{\text{obs}}$?
#
# <details><summary>Answer</summary>
#
# Nothing in the weights: a softmax does not see a constant. The claimed variance $s_0^2$ falls by that factor; the scatter $S$ stays.

# %%
logits, log_lam_bar = torch.randn(1, 1, 5, 5), torch.randn(1, 5)
call = Query(logits, torch.eye(5)[None, None], torch.randn(1, 1, 5, 2), log_lam_bar, torch.ones(1), None, 1.0, 0.0)
once, tenfold = attend_explicit(call)[1], attend_explicit(call._replace(log_lam_bar=log_lam_bar + math.log(10)))[1]
torch.testing.assert_close(once.scatter, tenfold.scatter)
torch.testing.assert_close(once.s2_0, 10 * tenfold.s2_0)

# %% [markdown]
# </details>
#
# **2.** Without process noise and with $\beta = 1$, the precision of (40.1) can only grow. Show that for $\beta < 1$ it still has a limit, when each layer brings the same $\lambda_{\text{obs}}$.
#
# <details><summary>Answer</summary>
#
# The fixed point of $\lambda' = \beta\lambda + \lambda_{\text{obs}}$ is $\lambda_{\text{obs}}/(1-\beta)$: the evidence of $1/(1-\beta)$ layers. Forgetting does what process noise does in chapter 13.

# %%
below = sp.symbols("beta", positive=True)
limit = sp.solve(below * lam + lam_obs - lam, lam)[0]
prove(limit - lam_obs / (1 - below))

# %% [markdown]
# </details>
#
# **3.** The first layer's tokens all start at the same $\tau$. Is its attention the plain one?
#
# <details><summary>Answer</summary>
#
# Yes: a constant $\log\bar\lambda$ falls out of the softmax. Precision begins to differ with the first observation.

# %%
filtering, plain = (trace(convert(tiny(), beta_a=beta_a), **batch) for beta_a in (1.0, 0.0))
torch.testing.assert_close(filtering[0].weights, plain[0].weights)
(filtering[1].weights - plain[1].weights).abs().max()

# %% [markdown]
# </details>

# %%
#| hide
here.cleanup()
