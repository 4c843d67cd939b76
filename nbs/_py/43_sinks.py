# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Attention sinks
#
# > A head that looks at the first token, where there is nothing to see: what the filter makes of it in closed form, and how to measure it in any of our models without a table of weights.

# %%
#| default_exp sinks

# %% [markdown]
# **So far** the precision of an observation follows the effective sample size $n$ of its weights (chapter 11), and language models became filters (chapter 40). **Now** we look at the weights that language models really have. Many of their heads put most of the weight on the first token, whatever it is [@xiao2024sinks], and its value is nearly zero: an *attention sink*, a place to look at when there is nothing to say [@gu2025sink].
# **Why**: the paper explains by $n$ why gating helps: a learned sigmoid gate does not follow the length of the context, whereas the Kalman gain does, because $n$ does **[P]**. A sink is where this must show: its $n$ is near 1 in a context of any length. What follows for the gain is not what one would guess.

# %%
#| hide
import warnings

# %%
#| hide
# the progress bars of the libraries below miss the notebook widgets, which this book does not use
warnings.filterwarnings("ignore", message="IProgress not found")

# %%
#| exports
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bft_nb.attention import BLOCK, rows_of_weights
from bft_nb.core import check_count
from bft_nb.gates import SinkGate
from bft_nb.kriging import effective_sample_size
from bft_nb.llama import FAMILIES, LEAST, Added, LayerFilter, LayerTrace, Seen
from bft_nb.qa import check_share
from bft_nb.reml import scatter

# %%
import matplotlib.pyplot as plt
import pandas as pd
import sympy as sp
from fastcore.test import test_fail
from transformers import Gemma2Config, Gemma2ForCausalLM

from bft_nb.figures import COLOUR, use_style
from bft_nb.gates import convert_gated
from bft_nb.kalman import gain
from bft_nb.llama import convert
from bft_nb.models import tiny_llama, tiny_tokenizer
from bft_nb.reml import observation_variance
from bft_nb.symbolic import assert_same, prove

# %% [markdown]
# ## Nine keys, one of them a sink
#
# A head gives .8 of its weight to the first key, whose value is zero, and shares the rest evenly among eight others. It sees nine keys; effectively it sees one and a half:

# %%
use_style()
w = torch.tensor([[0.8] + [0.025] * 8])
effective_sample_size(w), effective_sample_size(w[:, 1:] / w[:, 1:].sum())

# %% [markdown]
# ## How many keys a sink leaves
#
# Claim. Let a head put the mass $m$ on a sink and spread $1 - m$ over $T$ other keys with shares $p_j$, $\sum_j p_j = 1$, whose own effective sample size is $N = 1/\sum_j p_j^2$. Then
#
# $$ \kappa = \frac1n = m^2 + \frac{(1-m)^2}{N}, \qquad \lim_{N \to \infty} n = \frac{1}{m^2} . \tag{43.1} $$
#
# ($N = T$ if they share evenly.) Proof with three other keys, whose $p_j$ are written as unnormalised shares over their sum:

# %%
m = sp.Symbol("m", positive=True)
shares = sp.symbols("a_1:4", positive=True)
p = [a / sum(shares) for a in shares]
weights = [m, *((1 - m) * x for x in p)]
N = 1 / sum(x**2 for x in p)
prove(sum(x**2 for x in weights) - (m**2 + (1 - m) ** 2 / N))

# %%
n_rest, s2_0 = sp.symbols("N s2_0", positive=True)
kappa = m**2 + (1 - m) ** 2 / n_rest
prove(sp.limit(1 / kappa, n_rest, sp.oo) - 1 / m**2), prove(kappa.subs(m, 1) - 1), prove(kappa.subs(m, 0) - 1 / n_rest)


# %%
#| exports
def sink_kappa(
    mass: Float[Tensor, "*#shape"],  # $m$, weight on the sink, 0 … 1
    n_rest: Float[Tensor, "*#shape"],  # $N$, effective sample size of the other keys, at least 1
) -> Float[Tensor, "*shape"]:  # $\kappa = 1/n$ of all keys
    "The inverse effective sample size $m^2 + (1-m)^2/N$ of a head with a sink, equation (43.1)."
    return mass**2 + (1 - mass) ** 2 / n_rest


# %% [markdown]
# Checked against the function of chapter 10:


# %%
def rows_of(mass: Tensor, *a: Tensor) -> Tensor:  # (n, 1, 1 + keys)
    a = torch.stack(a, -1)
    return torch.cat([mass[:, None], (1 - mass[:, None]) * a / a.sum(-1, keepdim=True)], -1)[:, None]


# %%
assert_same(1 / kappa.subs(n_rest, N), (m, *shares), lambda *x: effective_sample_size(rows_of(*x))[:, 0], hi=0.9)
assert_same(kappa, (m, n_rest), sink_kappa, hi=0.9)

# %% [markdown]
# So a sink of mass $m$ *caps* the effective sample size at $1/m^2$, however long the context is. Heads with $m > .3$ are commonly called sinks [@gu2025sink]; in the filter's terms these are the heads that see at most eleven keys wherever the mass is above .3.

# %%
pd.DataFrame({"mass on the sink": [0.3, 0.5, 0.7, 0.9], "n is at most": [1 / x**2 for x in (0.3, 0.5, 0.7, 0.9)]}).round(1).set_index("mass on the sink").T

# %% [markdown]
# ## What such a head says, and how it scatters
#
# Claim. Let the values of the other keys have the weighted mean $\mu$ and scatter $s^2$ (with the shares $p_j$). With a sink of value zero the head says
#
# $$ e = (1-m)\,\mu, \qquad S = (1 - m)\,(s^2 + m\mu^2) . \tag{43.2} $$
#
# The first is a gate of $1 - m$ on what the others say. The second has two parts: the others' own scatter, and their disagreement with the sink's zero.

# %%
values = sp.symbols("v_1:4", real=True)
mu_ = sum(x * v for x, v in zip(p, values))
spread_ = sum(x * v**2 for x, v in zip(p, values)) - mu_**2
e = sum(x * v for x, v in zip(weights[1:], values))
S_ = sum(x * v**2 for x, v in zip(weights[1:], values)) - e**2
prove(e - (1 - m) * mu_), prove(S_ - (1 - m) * (spread_ + m * mu_**2))


# %%
#| exports
def sink_scatter(
    mass: Float[Tensor, "*#shape"],  # $m$, weight on the sink, 0 … 1
    mean: Float[Tensor, "*#shape"],  # $\mu$, weighted mean of the other values, [v]
    spread: Float[Tensor, "*#shape"],  # $s^2$, their weighted scatter, [v²]
) -> Float[Tensor, "*shape"]:  # $S$ of all keys, [v²]
    "The scatter $(1 - m)(s^2 + m\\mu^2)$ of a head whose sink has the value zero, equation (43.2)."
    return (1 - mass) * (spread + mass * mean**2)


# %%
mu, spread = sp.symbols("mu s2", positive=True)
S = (1 - m) * (spread + m * mu**2)
assert_same(S, (m, mu, spread), sink_scatter, hi=0.9)
of_values = lambda mass, a, b, c, x, y, z: scatter(rows_of(mass, a, b, c), F.pad(torch.stack([x, y, z], -1), (1, 0))[..., None])[:, 0, 0]
assert_same(S_, (m, *shares, *values), of_values, hi=0.9)

# %% [markdown]
# As the sink takes all, $S \to 0$: a head that looks at one key has nothing to compare it with.

# %%
S.subs(m, 1), prove(S.subs(m, 0) - spread)

# %% [markdown]
# ## What the filter makes of it
#
# By (11.9) the observation has the variance
#
# $$ \frac{1}{\lambda_{\text{obs}}} = \kappa\,(\kappa s_0^2 + S), \tag{43.3} $$
#
# with $s_0^2$, the variance that keys claim, taken to be the same for all of them. As the sink grows beyond an even share, $m > 1/(N+1)$, $\kappa$ rises; $S$ falls, at once where $\mu^2 \le s^2$, otherwise from $m = (1 - s^2/\mu^2)/2$ on:

# %%
prove(sp.diff(kappa, m).subs(m, 1 / (n_rest + 1))), prove(sp.diff(kappa, m, 2) - 2 - 2 / n_rest), prove(sp.diff(S, m) - (mu**2 * (1 - 2 * m) - spread))

# %% [markdown]
# So $\kappa$ raises the variance and $S$ lowers it. Which wins? The limits first.

# %%
variance = kappa * (kappa * s2_0 + S)
from_moments = lambda mass, n_rest, mean, spread, s2_0: observation_variance(sink_scatter(mass, mean, spread), sink_kappa(mass, n_rest), s2_0)
assert_same(variance.subs(n_rest, n_rest + 1), (m, n_rest, mu, spread, s2_0), lambda m, n, *rest: from_moments(m, n + 1, *rest), hi=0.9)
prove(variance.subs(m, 1) - s2_0), prove(variance.subs(m, 0) - (s2_0 / n_rest + spread) / n_rest)

# %% [markdown]
# - **No sink**, $m = 0$: $\lambda_{\text{obs}} \approx N/s^2$. Precision grows with the number of keys.
# - **All sink**, $m = 1$: $\lambda_{\text{obs}} = 1/s_0^2$, what one key claims for itself, whatever the length.
#
# So "a sink is almost no observation" is nearly right: it is *one* observation, of the value zero, taken at its word. It is not none, because the filter does not know that zero means "nothing". The mean does not move, since $K e = 0$, but the update adds $\lambda_{\text{obs}} = 1/s_0^2$ to the precision all the same: **a sink makes a token surer by looking away [D].**
#
# The gain against a prior of weight $\beta\lambda$ is $K = 1/(1 + \beta\lambda/\lambda_{\text{obs}})$, so its limits follow: $1/(1 + \beta\lambda s_0^2)$ where all is sink; 1 without a sink, in a context without end; and, in such a context with a sink of mass $m$ that does not go away, the third output below (`lam` is $\beta\lambda$):

# %%
prior = sp.Symbol("lam", positive=True)
K = 1 / (1 + prior * variance)
prove(K.subs(m, 1) - 1 / (1 + prior * s2_0)), prove(sp.limit(K.subs(m, 0), n_rest, sp.oo) - 1), sp.simplify(sp.limit(K, n_rest, sp.oo))

# %% [markdown]
# The third is below 1: a head whose sink keeps its share stays unsure in a context of any length.
#
# And between the limits? The paper's story is: low $n$, low gain **[P]**. Near $m = 1$ this is true only under a condition, which the slope of the variance shows:
#
# $$ \frac{d}{dm}\frac{1}{\lambda_{\text{obs}}}\Big|_{m=1} = 4 s_0^2 - (s^2 + \mu^2) . \tag{43.4} $$

# %%
prove(sp.diff(variance, m).subs(m, 1) - (4 * s2_0 - spread - mu**2))

# %% [markdown]
# **The gain rises as the head closes into a sink, whenever the mean square of the other values exceeds $4 s_0^2$ [D]**, although $n$ falls to 1. The reason is in (43.3): with $n$ the number of witnesses falls, but so does their disagreement, and a witness who is alone is believed.
#
# For many keys and $\mu = 0$ the whole course is in closed form. With $r = s_0^2/s^2 < 1/4$, the variance rises to a peak at
#
# $$ m^* = \frac{3 - \sqrt{9 - 32 r}}{8 r} \tag{43.5} $$
#
# and falls beyond it; the peak moves from two thirds ($r \to 0$) to 1 ($r = 1/4$), and for larger $r$ the variance rises all the way.

# %%
r = sp.Symbol("r", positive=True)
course = sp.limit(variance.subs({mu: 0, s2_0: r * spread}), n_rest, sp.oo)
peak = (3 - sp.sqrt(9 - 32 * r)) / (8 * r)
prove(sp.diff(course, m).subs(m, peak)), sp.limit(peak, r, 0), peak.subs(r, sp.Rational(1, 4))

# %% [markdown]
# Which side do real heads lie on? `calibrate` (40.3) makes the mean of the claims of a head equal to the mean of its scatter. For a head that is a sink of mass $M$ at every query, that means $s_0^2 = (1-M)(s^2 + M\mu^2)$, which is small (and where the mass varies about $M$, smaller still by $\mu^2\,\mathrm{Var}(m)$, since $S$ is concave in $m$). With $u = \mu^2/s^2$ the condition $s^2 + \mu^2 > 4 s_0^2$ becomes
#
# $$ M > \frac{(u - 1) + \sqrt{1 + u}}{2u} , $$
#
# which falls from three quarters, where the others say nothing in common ($u \to 0$), to a half. **A calibrated head that is closed for three quarters or more on average becomes surer by closing altogether [D].** (For $u > 3$ the condition holds once more at small $M$: a head that hardly uses its sink claims little.)
#
# This is about the last stretch, $m \to 1$ (@fig-sink-course, right). Where the head itself stands, at $m = M$, its gain still falls with the mass unless $M$ exceeds .825 (for many keys and $\mu = 0$, where $r = 1 - M$): below that the peak (43.5) lies beyond $M$, or, for $M \le 3/4$, there is none before 1.

# %%
M, u = sp.symbols("M u", positive=True)
end = sp.diff(variance, m).subs(m, 1).subs(s2_0, (1 - M) * (spread + M * mu**2)).subs(mu, sp.sqrt(u * spread)) / spread
bound = ((u - 1) + sp.sqrt(1 + u)) / (2 * u)
here = sp.simplify(sp.diff(course, m) / spread).subs({m: M, r: 1 - M})
prove(end.subs(M, bound)), sp.limit(bound, u, 0), sp.limit(bound, u, sp.oo), sp.nsolve(here / M, M, 0.8).round(3)

# %%
#| label: fig-sink-course
#| fig-cap: "Left: a sink of mass m caps the effective sample size at 1/m² (line: m = .3). Right: as a head of 256 other keys closes into a sink, the precision of what it observes falls to that of one key (claims as large as the scatter, r = 1), or falls and rises again (small claims)."
#| code-fold: true
mass = torch.linspace(0, 1, 201)
fig, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3))
for n, style in ((4, ":"), (32, "-."), (256, "--")):
    left.plot(mass, 1 / sink_kappa(mass, torch.tensor(float(n))), style, color=COLOUR["posterior"], label=f"N = {n}")
left.plot(mass[20:], 1 / mass[20:] ** 2, color=COLOUR["truth"], label="1/m²")
left.axvline(0.3, color=COLOUR["prior"], linewidth=0.8)
left.set(yscale="log", ylim=(0.8, 400), xlabel="mass m on the sink", ylabel="effective sample size n [keys]")
left.legend(fontsize=8)
for ratio, role in ((1.0, "prior"), (0.25, "posterior"), (0.05, "baseline")):
    course_of = 1 / from_moments(mass, torch.tensor(256.0), torch.tensor(0.0), torch.tensor(1.0), torch.tensor(ratio))
    right.plot(mass, course_of, color=COLOUR[role], label=f"r = s₀²/s² = {ratio:g}")
    right.plot(1, 1 / ratio, "o", color=COLOUR[role], markersize=4)
right.set(yscale="log", xlabel="mass m on the sink", ylabel="λ_obs [1/s²]")
right.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## A sink whose logit stands still
#
# Where does the mass come from? From a logit that stands out. The simplest model: the sink weighs as much as $c$ ordinary keys, and goes on doing so as the context grows. With $T$ other keys of equal logits,
#
# $$ m = \frac{c}{c + T}, \qquad e = \frac{T}{c + T}\,\mu, \qquad n = \frac{(c + T)^2}{c^2 + T} . \tag{43.6} $$

# %%
c, T = sp.symbols("c T", positive=True)
in_length = {m: c / (c + T), n_rest: T}
n = 1 / kappa.subs(in_length)
prove(n - (c + T) ** 2 / (c**2 + T)), prove(((1 - m) * mu).subs(in_length) - T / (c + T) * mu)

# %% [markdown]
# Four ranges follow. While $T \ll c$ the head is closed and $n \approx 1$. At $T = c$ it is half open, and $n$ is still below 4. For $c \ll T \ll c^2$ it opens, and $n \approx (T/c)^2$ grows with the *square* of the length, more steeply than in a broad head. Only when $T \gg c^2$ does $n$ count the keys. The slope of $\log n$ against $\log T$ is
#
# $$ \frac{d \log n}{d \log T} = \frac{2T}{c + T} - \frac{T}{c^2 + T} . \tag{43.7} $$

# %%
slope = 2 * T / (c + T) - T / (c**2 + T)
prove(T * sp.diff(sp.log(n), T) - slope), sp.limit(n, T, 0), sp.limit(n.subs(T, c), c, sp.oo), sp.limit(slope.subs(T, c ** sp.Rational(3, 2)), c, sp.oo), sp.limit(n / T, T, sp.oo)

# %% [markdown]
# Two things follow in this model **[D]**:
#
# - *A plain head with a sink is gated already, by a gate that follows the length.* The first token does what the learnt logit of (42.3) does: $1 - m$ opens as the context grows, and its odds $T/c$ double when the context does. A sigmoid gate on the query (42.1) sees one token; a network that gates by it can do without the sink, and need not follow the length.
# - *The sink hides the length from $n$*, until the context is longer than the sink is heavy. What the gain does depends on the claims (@fig-sink-length): where they are large, $4 s_0^2 > s^2 + \mu^2$, it rises from the first key on; where they are small, it first *falls* as the context grows, while $m$ comes down from 1 to the peak $m^*$ of (43.5).
#
# That logits stand still is an assumption about what a network has learnt, not a theorem. A sink that holds a constant *share* $m$ instead, because its logit rises with the length as $\log T$ does, is no gate that follows anything, and caps $n$ at $1/m^2$ for good. What the sinks of a pretrained model do is the subject of [the experiment](experiments/attention_sinks.ipynb).


# %%
def gain_at(length: Tensor, weight: float, claim: float, lam: float = 1.0) -> Tensor:  # K of a head with μ = 0 and s² = 1
    variance = from_moments(weight / (weight + length), length, torch.tensor(0.0), torch.tensor(1.0), torch.tensor(claim))
    return gain(torch.full_like(variance, lam), 1 / variance)


# %%
#| label: fig-sink-length
#| fig-cap: "The gain against the length if the sink weighs as much as c keys at every length. Left, large claims: it rises from the first key on, the later the heavier the sink. Right, small claims: it falls first. Prior precision 1/s²."
#| code-fold: true
length = torch.logspace(0, 5, 121)
fig, axes = plt.subplots(1, 2, figsize=(7.5, 2.8), sharey=True)
for ax, claim, name in zip(axes, (1.0, 0.05), ("claims s₀² = s²", "claims s₀² = s²/20")):
    for weight, role, style in ((1.0, "posterior", "-"), (30.0, "other", "--"), (1000.0, "baseline", "-.")):
        ax.plot(length, gain_at(length, weight, claim), style, color=COLOUR[role], label=f"c = {weight:g}")
    ax.set(xscale="log", ylim=(0.3, 1.03), xlabel="length T of the context [keys]", title=name)
axes[0].set_ylabel("gain K")
axes[0].legend(fontsize=8)
plt.show()

# %% [markdown]
# ## What to measure
#
# Per layer, head and query: the mass on the first token, $n$ with and without this token (the $n$ and $N$ of (43.1)), the scatter $S$, and the mean square of the other values, $s^2 + \mu^2$, and of the first token's, which the formulas take to be zero. For a filtering layer also $1/\lambda_{\text{obs}}$ per head, the gain and $\bar\lambda$; for a gated one the gate. The weights are those that the model really uses: with $\bar\lambda$ in a filtering layer, with the learnt logit where there is one.
# A learnt sink logit counts here as a key like the others, in front of all, with the value zero.


# %%
#| exports
class Call(NamedTuple):
    "One call of attention, as `weight_rows` reads it."

    q: Float[Tensor, "b h t k"]  # scaled
    k: Float[Tensor, "b h j k"]
    v: Float[Tensor, "b h j kv"]
    mask: Bool[Tensor, "#b #h t j"] | None  # True where a query may look; None: causal
    bias: Float[Tensor, "#b #h 1 j"] | None  # added to the logits of a key
    learnt: int = 0  # how many keys in front are learnt sink logits


# %%
#| exports
def weight_rows(
    call: Call,
    block: int = BLOCK,  # queries at a time
) -> Iterator[Float[Tensor, "b h r j"]]:  # rows of weights; causal blocks end at their last query
    "The weights of one call of attention, a block of queries after the other."
    for lo in range(0, call.q.shape[2], block):
        yield rows_of_weights(call.q, call.k, call.mask, call.bias, call.mask is None, lo, min(lo + block, call.q.shape[2]))


# %%
#| exports
class Measures(NamedTuple):
    "What the weights of a layer say, per query."

    mass: Float[Tensor, "b h t"]  # m, on the first token
    learnt: Float[Tensor, "b h t"]  # on a learnt sink logit, 0 where there is none
    tokens: Float[Tensor, "b h t"]  # on all tokens, what the learnt sink logit leaves
    n_eff: Float[Tensor, "b h t"]  # n, of all keys
    kappa: Float[Tensor, "b h t"]  # κ = 1/n, whose mean is not one over the mean of n
    n_rest: Float[Tensor, "b h t"]  # N, of the keys that are no sinks; of no meaning where there are none
    scatter: Float[Tensor, "b h t"]  # S, mean over the value's features, [v²]
    others: Float[Tensor, "b h t"]  # s² + μ², weighted mean square of the values that are no sinks, [v²]
    first: Float[Tensor, "b h t"]  # mean square of the first token's value, [v²]


# %%
#| exports
def measure_rows(
    w: Float[Tensor, "b h r j"],  # rows of weights
    v: Float[Tensor, "b h j kv"],
    learnt: int = 0,  # learnt sink logits among the keys, in front
) -> Measures:
    "The measures of a block of queries."
    rest, square = w[..., learnt + 1 :], v.square().mean(-1)
    total = rest.sum(-1).clamp_min(LEAST)
    n_rest = (total / torch.linalg.vector_norm(rest, dim=-1).clamp_min(LEAST)).square()
    others = (rest @ square[..., learnt + 1 :, None]).squeeze(-1) / total
    first = square[..., learnt, None].expand_as(others)
    n_eff = effective_sample_size(w)
    return Measures(w[..., learnt], w[..., :learnt].sum(-1), w[..., learnt:].sum(-1), n_eff, 1 / n_eff, n_rest, scatter(w, v).mean(-1), others, first)


# %%
#| exports
def measure_call(
    call: Call,
    block: int = BLOCK,  # queries at a time
) -> Measures:
    "The measures of all queries; no more than a block's weights are in memory."
    parts = [measure_rows(w, call.v[..., : w.shape[-1], :], call.learnt) for w in weight_rows(call, block)]
    return Measures(*(torch.cat(x, -1) for x in zip(*parts)))


# %% [markdown]
# The head from above as a call, with a query that prefers the first key:

# %%
ones = torch.ones(1, 1, 9, 1)
prefers = torch.tensor([0.8 / 0.025] + [1.0] * 8).log()[None, None, None]
called = Call(ones, torch.zeros(1, 1, 9, 1), F.pad(torch.randn(1, 1, 8, 1), (0, 0, 1, 0)), None, prefers)
pd.DataFrame({name: x[0, 0] for name, x in measure_call(called)._asdict().items()}).round(2).rename_axis("query").iloc[[0, 1, 3, 8]]

# %% [markdown]
# ### Listening to a model
#
# transformers' layers ask one place for the attention function they are to call. While we listen, that place hands out the same function, wrapped so that it also tells us what it was asked: rotary positions, grouped heads, masks and $\bar\lambda$ are then what the model itself uses, whatever implementation it runs on (which need not have the weights in memory: they are computed again, in blocks).

# %%
#| exports
def visible(
    mask: Tensor | None,  # as an implementation of attention is given it
) -> Tensor | None:  # True where a query may look
    "A mask as booleans; None, which means causal, stays None."
    return mask if mask is None or mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


# %%
#| exports
def with_sinks(
    call: Call,
    logits: Float[Tensor, "h"],  # learnt, one per head
) -> Call:
    "The call with the learnt sink logits as a key of value zero in front."
    (b, h, t, _), j = call.q.shape, call.k.shape[2]
    front = partial(F.pad, pad=(0, 0, 1, 0))
    mask = torch.ones(t, j, dtype=torch.bool, device=call.q.device).tril()[None, None] if call.mask is None else call.mask
    others = call.q.new_zeros(b, h, 1, j) if call.bias is None else call.bias.expand(b, h, 1, j)
    bias = torch.cat([logits.to(others.dtype)[None, :, None, None].expand(b, h, 1, 1), others], -1)
    return Call(call.q, front(call.k), front(call.v), F.pad(mask, (1, 0), value=True), bias, 1)


# %%
#| exports
def read_call(
    q: Float[Tensor, "b h t k"],
    k: Float[Tensor, "b hk j k"],
    v: Float[Tensor, "b hk j kv"],
    mask: Tensor | None,
    options: dict[str, Any],  # keywords of the call: scaling, and what a converted layer adds
) -> Call:
    "What an implementation of attention was asked, in float32, with one key head per query head."
    groups = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(groups, 1) for x in (k, v))
    keys, (gate, _) = options.get("filtering"), options.get("gating") or (None, None)
    bias = None if keys is None else (keys.bft.beta_a * keys.log_lam_bar)[:, None, None]
    call = Call(q.float() * options["scaling"], k, v, visible(mask), bias)
    return with_sinks(call, gate.logit) if isinstance(gate, SinkGate) else call


# %%
#| exports
@contextmanager
def watching(
    model: nn.Module,  # any model of transformers
    receive: Callable[[int, Call, Any], None],  # layer, the call, and what attention returned beside the mean
) -> Iterator[None]:
    "Hand every call of a model's attention to a function, while the block runs."
    find, ours = ALL_ATTENTION_FUNCTIONS.get_interface, {id(module) for module in model.modules()}

    def get_interface(name: str, default: Callable) -> Callable:
        attend = find(name, default)

        def attend_and_tell(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
            out = attend(module, q, k, v, mask, **kwargs)
            if id(module) in ours:
                with torch.autocast(q.device.type, enabled=False):
                    receive(module.layer_idx, read_call(q, k, v, mask, kwargs), out[1])
            return out

        return attend_and_tell

    ALL_ATTENTION_FUNCTIONS.get_interface = get_interface
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.get_interface = find


# %% [markdown]
# ### By layer, head and position
#
# How long is a context? In a causal model the $t$-th query sees $t$ keys whatever the length of the text, so the length is the query's position, and one pass measures all lengths. Queries go into bins that double: 2, 3–4, 5–8 … The first query sees nothing but the first token and is left out.

# %%
#| exports
def position_bins(
    length: int,  # of the texts, in tokens
) -> list[tuple[int, int]]:  # first and last position, from 1
    "Query positions 2, 3–4, 5–8, …, the last bin cut off at the length. `ValueError` for less than two tokens."
    check_count("length", length)
    if length < 2:
        raise ValueError(f"length must be at least 2, since the first query sees only itself, got {length}")
    return [(2**i + 1, min(2 ** (i + 1), length)) for i in range((length - 1).bit_length())]


# %%
position_bins(100)


# %%
#| exports
def binned(
    x: Float[Tensor, "b #h t"],
    bins: list[tuple[int, int]],
) -> Float[Tensor, "b #h n"]:
    "Means over the queries of each bin."
    return torch.stack([x[..., low - 1 : high].mean(-1) for low, high in bins], -1)


# %% [markdown]
# A filtering layer's attention returns the variance of each head; solving (43.3) for the claim gives $s_0^2 = n\,(n/\lambda_{\text{obs}} - S)$. And a learnt sink logit of mass $m_s$ is a gate (42.3), which is what the sink leaves, $g = 1 - m_s$. Its log-odds are taken from the weights in float32, as the sum over tokens against the sink, since in bfloat16 a gate that is nearly open rounds to 1.


# %%
#| exports
def of_attention(
    found: Measures,
    seen: Any,  # what attention returned beside the mean
    learnt: int = 0,  # learnt sink logits among the keys
) -> dict[str, Float[Tensor, "b h t"]]:
    "The measures by name; in a filtering layer also the variance $1/\\lambda_{\\text{obs}}$ and the claim $s_0^2$ of each head, [v²], with a learnt sink logit its gate and log-odds."
    by_name = found._asdict()
    tokens, more = by_name.pop("tokens"), {}
    if isinstance(seen, Seen):
        more = {"variance": seen.variance, "claim": (found.n_eff * (found.n_eff * seen.variance - found.scatter)).clamp_min(0)}
    if learnt:
        more = {"gate": tokens, "gate_odds": tokens.clamp_min(LEAST).log() - found.learnt.clamp_min(LEAST).log()}
    return by_name | more


# %% [markdown]
# Gain and gate are both sigmoids, which makes them comparable without a unit **[D]**: $K = \sigma(\log \lambda_{\text{obs}} - \log \beta_g\lambda)$ and $g = 2\,\sigma(W_g x)$. So beside the values we keep what is inside the sigmoid, the *log-odds*: of a gate on the query it is $W_g x$, of a sink logit $L - s$ (42.3), of the gain the log-ratio of evidence to prior.


# %%
#| exports
def of_filter(
    record: LayerTrace,  # of a filtering layer
) -> dict[str, Float[Tensor, "b 1 t"]]:
    "Gain, its log-odds and $\\bar\\lambda$ of each query, mean over features."
    prior = (record.beta_g * record.belief.precision).clamp_min(LEAST)
    odds = record.observation.precision.log() - prior.log()
    return {name: x[:, None] for name, x in (("gain", record.gain.mean(-1)), ("gain_odds", odds.mean(-1)), ("lam_bar", record.lam_bar))}


# %%
#| exports
def of_gate(
    g: Float[Tensor, "b t h c"],  # what a gate on the query reports
) -> dict[str, Float[Tensor, "b h t"]]:
    "Gate and its log-odds per head and query, mean over channels."
    odds = torch.logit((g.float() / 2).clamp(LEAST, 1 - 1e-7))
    return {"gate": g.float().mean(-1).mT, "gate_odds": odds.mean(-1).mT}


# %%
#| exports
def report_of(part: Added, record: Any) -> dict[str, Tensor]:
    "What a filter or a gate on the query reports, as measures; of a sink logit the weights say more."
    return of_filter(record) if isinstance(part, LayerFilter) else {} if isinstance(part, SinkGate) else of_gate(record)


# %%
#| exports
@contextmanager
def reporting(
    model: nn.Module,
    receive: Callable[[int, dict[str, Tensor]], None],  # layer, measures
) -> Iterator[None]:
    "Hand what filters and gates report to a function, while the block runs; nothing, if there are none."
    with ExitStack() as stack:
        for name, part in model.named_modules():
            if isinstance(part, Added):
                layer = int(re.findall(r"layers\.(\d+)\.", name)[-1])  # peft keeps a copy of each part, so counting them would not do
                hook = part.report.register_forward_hook(lambda module, args, record, layer=layer, part=part: receive(layer, report_of(part, record)))
                stack.callback(hook.remove)
        yield


# %%
#| exports
def check_measurable(
    model: nn.Module,
    ids: Tensor,
) -> None:
    "`TypeError` for a model whose attention we do not know, `ValueError` for texts that do not fit it."
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind.split("_")[-1] not in FAMILIES:
        raise TypeError(f"the model must be of a family among {', '.join(FAMILIES)}, plain or converted, got {kind}")
    position_bins(ids.shape[1])
    if ids.shape[1] > config.max_position_embeddings:
        raise ValueError(f"texts must have at most {config.max_position_embeddings} tokens, the most this model knows, got {ids.shape[1]}")


# %%
#| exports
def as_frame(
    layers: dict[int, dict[str, Float[Tensor, "b #h n"]]],  # layer -> measure -> values
    bins: list[tuple[int, int]],
) -> Any:  # a data frame
    "Measures as columns, a line per text, layer, head and bin."
    import pandas as pd

    lows, parts = {high: low for low, high in bins}, []
    for layer, found in sorted(layers.items()):
        b, h, _ = shape = found["mass"].shape
        index = pd.MultiIndex.from_product([range(b), [layer], range(h), list(lows)], names=["text", "layer", "head", "high"]).to_frame(index=False)
        index.insert(3, "low", index["high"].map(lows))
        parts.append(index.assign(**{name: x.expand(shape).flatten().cpu().numpy() for name, x in found.items()}))
    return pd.concat(parts, ignore_index=True)


# %%
#| exports
def measure_sinks(
    model: nn.Module,  # of one of `FAMILIES`, plain or converted, or one wrapped by peft
    ids: Int[Tensor, "b t"],  # texts of one length, without padding
    bins: list[tuple[int, int]] | None = None,  # first and last positions, from 1, of queries to be averaged; None: `position_bins`
) -> Any:  # a data frame
    """The measures of this chapter, a line per text, layer, head and bin of query positions; each layer's are reduced before the next is computed.

    `bos`: do the texts begin with the model's BOS token? `low`, `high`: the first and last query of a bin. Gain, `gain_odds` and `lam_bar`
    are the layer's, repeated for its heads. What a model does not have is no column.
    Raises `TypeError` for a model of another family, `ValueError` for texts that are too long or too short for it and bins that are not in them.
    """
    check_measurable(model, ids)
    bins = position_bins(ids.shape[1]) if bins is None else bins
    if bad := [pair for pair in bins if not 2 <= pair[0] <= pair[1] <= ids.shape[1]]:
        raise ValueError(f"bins must lie in 2 … {ids.shape[1]}, first position before last, got {bad[0]}")
    layers: dict[int, dict[str, Tensor]] = defaultdict(dict)

    def keep(layer: int, found: dict[str, Tensor]) -> None:
        layers[layer].update({name: binned(x.float(), bins) for name, x in found.items()})

    def receive(layer: int, call: Call, seen: Any) -> None:
        keep(layer, of_attention(measure_call(call), seen, call.learnt))

    with torch.no_grad(), watching(model, receive), reporting(model, keep):
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    first = model.config.bos_token_id  # some families have none
    bos = first is not None and bool((ids[:, 0] == first).all())
    return as_frame(layers, bins).assign(length=ids.shape[1], bos=bos)


# %% [markdown]
# A tiny Llama with random weights spreads its attention: no sinks, and $n$ about half the number of keys.

# %%
tokenizer = tiny_tokenizer()
ids = torch.cat([torch.full((2, 1), tokenizer.bos_token_id), torch.randint(3, 259, (2, 63), generator=torch.Generator().manual_seed(0))], 1)
tiny = lambda: tiny_llama(tokenizer, d=32, n_layers=4).eval()
found = measure_sinks(tiny(), ids)
found.query("text == 0 and layer == 0 and head == 0").drop(columns=["text", "learnt", "length"]).round(2)

# %% [markdown]
# The table is checked against the explicit computation: transformers' own weights, all in memory.

# %%
explicit = tiny()
explicit.set_attn_implementation("eager")
with torch.no_grad():
    tables = explicit(input_ids=ids, output_attentions=True).attentions
w = torch.stack(tables)[..., 32:, :]  # queries 33 … 64: (layer, text, head, query, key)
last = found[found["high"] == 64]
torch.testing.assert_close(torch.tensor(last["mass"].to_numpy()), w[..., 0].mean(-1).flatten())
torch.testing.assert_close(torch.tensor(last["n_eff"].to_numpy()), (1 / w.square().sum(-1)).mean(-1).flatten())

# %% [markdown]
# A filtering and a gated model have more to say:

# %%
measure_sinks(convert(tiny()), ids).groupby("high")[["mass", "n_eff", "scatter", "variance", "claim", "gain", "gain_odds", "lam_bar"]].mean().round(3)

# %%
measure_sinks(convert_gated(tiny(), "sink", sink=2.0), ids).groupby("high")[["mass", "learnt", "n_eff", "n_rest", "gate", "gate_odds"]].mean().round(3)

# %% [markdown]
# Here a learnt logit of 2 weighs as much as seven keys. Its gate is what it leaves, one minus the mass it takes, and it opens with the length, as (43.6) says where logits stand still.
#
# ### Sinks, counted
#
# The mean over texts and queries of each head, and the share of heads whose first token gets more than .3 [@gu2025sink]:


# %%
#| exports
def per_head(
    measured: Any,  # by `measure_sinks`, or lines of it
) -> Any:  # index layer, head
    "Means over texts and queries; a bin counts by its queries."
    share = measured["high"] - measured["low"] + 1
    values = measured.drop(columns=["text", "layer", "head", "low", "high", "length", "bos"])
    by = [measured["layer"], measured["head"]]
    return values.mul(share, axis=0).groupby(by).sum().div(share.groupby(by).sum(), axis=0)


# %%
#| exports
def sink_rate(
    measured: Any,  # by `measure_sinks`, or lines of it
    threshold: float = 0.3,  # of the mean mass on the first token
) -> float:
    "The share of heads that are sinks. `ValueError` unless the threshold lies in 0 … 1."
    check_share("threshold", threshold)
    return float((per_head(measured)["mass"] > threshold).mean())


# %%
per_head(found)[["mass", "n_eff", "n_rest"]].head(3).round(3), sink_rate(found), sink_rate(found, threshold=0.05)

# %% [markdown]
# To look at single heads there are their weights themselves, a table of all pairs of tokens and therefore meant for short texts:


# %%
#| exports
def attention_maps(
    model: nn.Module,  # as in `measure_sinks`
    ids: Int[Tensor, "1 t"],  # one text
    heads: list[tuple[int, int]],  # layer and head
) -> Float[Tensor, "n t t"]:  # weights on the text's tokens
    "The weights of some heads. Raises what `measure_sinks` does, and `ValueError` for a head that is not there."
    check_measurable(model, ids)
    found: dict[tuple[int, int], Tensor] = {}

    def receive(layer: int, call: Call, seen: Any) -> None:
        wanted = [head for at, head in heads if at == layer and head < call.q.shape[1]]
        if wanted:
            w = torch.cat([F.pad(rows, (0, call.k.shape[2] - rows.shape[-1])) for rows in weight_rows(call)], 2)
            found.update({(layer, head): w[0, head, :, call.learnt :] for head in wanted})

    with torch.no_grad(), watching(model, receive):
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    if missing := [head for head in heads if head not in found]:
        raise ValueError(f"heads must be (layer, head) of the model, got {missing[0]}")
    return torch.stack([found[head] for head in heads])


# %%
torch.testing.assert_close(attention_maps(explicit, ids[:1], [(1, 2)])[0], tables[1][0, 2])

# %% [markdown]
# ## How it fails
#
# What cannot be measured is refused, and what would be allowed is named:

# %%
test_fail(lambda: measure_sinks(tiny(), ids[:, :1]), contains="length must be at least 2")
test_fail(lambda: measure_sinks(tiny(), ids.repeat(1, 9)), contains="at most 512 tokens, the most this model knows, got 576")
test_fail(lambda: attention_maps(tiny(), ids[:1], [(1, 7)]), contains="heads must be (layer, head) of the model, got (1, 7)")
test_fail(lambda: sink_rate(found, threshold=3), contains="threshold must lie in 0 … 1, got 3")

# %%
other = Gemma2ForCausalLM(Gemma2Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8, pad_token_id=0))
test_fail(lambda: measure_sinks(other, ids), contains="got gemma2")

# %% [markdown]
# ## Assumptions, and where they break
#
# - *The sink's value is zero.* It is small in real models, not zero: `first` against `others` says how small. And sinks are not always first tokens; a full stop or a line break can be one [@sun2024massive]. We count the first.
# - *All keys claim the same.* A first token may be tracked as far more or less reliable than others; then $m = 1$ ends on its own claim $1/\bar\lambda_1$, wherever that is.
# - *One head.* Variances add over heads (21.2): a sink adds its $s_0^2$ to the variance of what the layer observes, and so lowers the gain of the heads that do say something. The limits of (43.3) are those of a head, not of the layer.
# - *Length is position.* It is the $t$ of the $t$-th query of a text, whatever comes later. But a text has a beginning, so early positions are not late ones with less context: they are different text.
# - No padding: left padding would move the first token. Texts are cut to one length.
# - In a filtering layer the weights contain $\bar\lambda$, so a sink may be due to the logits or to the precision.
#
# ## Summary
#
# - A sink of mass $m$ caps the effective sample size at $1/m^2$; it is *one* observation of nothing, taken at its word, and the update makes the token surer by it.
# - Low $n$ does not mean low gain: as a head closes into a sink the number of witnesses and their disagreement fall together, and the gain *rises* if the others' mean square exceeds $4 s_0^2$.
# - A sink whose logit stands still is a gate that follows the length, and hides the length from $n$ until the context outweighs it; one that keeps its share is neither. `measure_sinks` says where real heads lie, block by block, for plain, gated and filtering models alike.
#
# ## Exercises
#
# **1.** How heavy must a sink be, in ordinary keys, for a head to be called a sink ($m > .3$) on average over a text of $T$ tokens?
#
# <details><summary>Answer</summary>
#
# The average of $c/(c+t)$ over $t = 1 \dots T$ is about $(c/T)\log(1 + T/c)$, a function of $c/T$ alone: the rate depends on the length of the texts it is measured on, so that length must always be stated with the rate. At $m = .3$:

# %%
x = sp.Symbol("x", positive=True)
heavy = sp.nsolve(x * sp.log(1 + 1 / x) - 0.3, x, 0.1)
t = torch.arange(1, 2049)
round(float(heavy), 3), (float(heavy) * 2048 / (float(heavy) * 2048 + t)).mean()

# %% [markdown]
# </details>
#
# **2.** Two heads observe the same token with equal weight: a broad one with variance $s^2/N$, and a sink with $s_0^2$. By which factor does the sink lower the precision of the layer's observation?
#
# <details><summary>Answer</summary>
#
# The variances add, so by $1/(1 + N s_0^2/s^2)$: the more the broad head knows, the more the silent one spoils.

# %%
broad = spread / n_rest
prove((1 / (broad + s2_0)) / (1 / broad) - 1 / (1 + n_rest * s2_0 / spread))

# %% [markdown]
# </details>
#
# **3.** Would reading 1 of chapter 11, $1/\lambda_{\text{obs}} = (s_0^2 + S)/T$, which counts every key, behave as the paper's story wants?
#
# <details><summary>Answer</summary>
#
# The opposite: it knows no $n$, and the variance falls with $m$ whenever $S$ does. A head that is all sink is then surest of all, and the surer the longer the context:

# %%
by_count = (s2_0 + S) / T
sp.factor(sp.diff(by_count.subs(mu, 0), m)), by_count.subs(m, 1)

# %% [markdown]
# </details>
