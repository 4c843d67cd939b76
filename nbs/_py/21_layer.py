# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A layer is a filter step
#
# > Observe, update, predict: a transformer layer on beliefs, in three lines.

# %%
#| default_exp layer

# %% [markdown]
# **So far** attention observes (chapter 20), the Kalman update weighs what attention saw (chapter 12), and the feed-forward network predicts (chapter 13).
# **Now** the three are joined, on one `Belief` that each takes and each returns.
# **Why** this needs a chapter: attention observes *per head, in value space*, while the belief lives *in the residual stream*. Two small maps are missing: from a belief to the reliability of a token, and from heads back to the stream.

# %%
#| exports
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from bft_nb.attention import Observation, observe
from bft_nb.core import Belief, wide_dtype
from bft_nb.dynamics import norm_jacobian, predict, standardise
from bft_nb.kalman import gain, update

# %%
import matplotlib.pyplot as plt
import sympy as sp

from bft_nb.core import certain
from bft_nb.figures import COLOUR, use_style
from bft_nb.symbolic import assert_same, prove

# %%
use_style()

# %% [markdown]
# ## Into attention: how reliable is a token?
#
# The paper's answer is the mean precision over features, one number per token **[P]**:
#
# $$\bar\lambda_j = \tfrac1d \sum_i \lambda_{ji}. \tag{21.1}$$


# %%
#| exports
def reliability(
    belief: Belief,  # precision (b, t, d)
) -> Float[Tensor, "b t"]:  # λ̄, [h⁻²]
    "Mean precision over features, (21.1) [@bft2026]."
    return belief.precision.mean(-1)


# %%
reliability(Belief(torch.zeros(1, 2, 2), torch.tensor([[[1.0, 3.0], [0.1, 0.3]]])))

# %%
lam1, lam2 = sp.symbols("lambda1 lambda2", positive=True)
assert_same((lam1 + lam2) / 2, (lam1, lam2), lambda *x: reliability(Belief(torch.zeros(()), torch.stack(x, -1)[None]))[0])


# %% [markdown]
# ## Out of attention: from heads to the stream
#
# The means of the $H$ heads, concatenated into a vector $e$, pass through the output projection with matrix $W_O$ and bias $b_O$: feature $i$ of the stream receives $o_i = \sum_k W_{O,ik}\, e_k + b_{O,i}$, where $k$ runs over the value dimensions of all heads.
# A linear map of independent variables adds variances with squared weights:
#
# $$\operatorname{Var}(o_i) = \sum_k W_{O,ik}^2 \,\operatorname{Var}(e_k), \qquad \lambda_{\text{obs},i} = 1/\operatorname{Var}(o_i). \tag{21.2}$$
#
# The paper says that several heads are supported **[P]**; that their variances add this way, as if value dimensions were independent, is our choice **[D]**. The projection also turns the unit [v] into [h]. For two dimensions with correlation $\rho$, SymPy shows what assuming independence leaves out:

# %%
w1, w2 = sp.symbols("w1 w2", real=True)
s1, s2 = sp.symbols("sigma1 sigma2", positive=True)
rho = sp.symbols("rho", real=True)
weights, covariance = sp.Matrix([[w1, w2]]), sp.Matrix([[s1**2, rho * s1 * s2], [rho * s1 * s2, s2**2]])
prove((weights * covariance * weights.T)[0] - (w1**2 * s1**2 + w2**2 * s2**2 + 2 * rho * w1 * w2 * s1 * s2))

# %% [markdown]
# With $\rho = 0$ this is (21.2). A row of zeros in $W_O$, with which some networks are initialised, makes $o_i$ a constant, known for certain; its variance is kept at $10^{-12}$ at least **[D]**, so that its gain is one and not $\infty/\infty$. In the isotropic resolution (chapter 20) all dimensions of a head share a variance, and their squared weights can be summed first: a $d \times H$ matrix instead of $d\times d$.


# %%
#| exports
LEAST_VARIANCE = 1e-12  # of an observation in the residual stream, [h²]


# %%
#| exports
def project(
    observation: Observation,  # per head
    weight: Float[Tensor, "d hk"],  # W_O
    bias: Float[Tensor, "d"] | None = None,  # b_O
) -> Belief:  # e and λ_obs in the residual stream, (b, t, d)
    "Heads to residual stream: means through W_O, variances through its square, at least `LEAST_VARIANCE`, (21.2)."
    mean = F.linear(observation.mean.transpose(1, 2).flatten(2), weight, bias)
    squared = weight.to(observation.precision.dtype).square()
    if observation.precision.shape[-1] == 1:
        squared = squared.unflatten(1, (observation.mean.shape[1], -1)).sum(-1)
    variance = observation.precision.reciprocal().transpose(1, 2).flatten(2)
    with torch.autocast(variance.device.type, enabled=False):  # in half precision `LEAST_VARIANCE` would be 0
        return Belief(mean, F.linear(variance, squared).clamp_min(LEAST_VARIANCE).reciprocal())


# %% [markdown]
# Formula and function are compared in value and derivative, first for two heads with one dimension each, then for one head with two dimensions that share a variance:

# %%
v1, v2 = sp.symbols("v1 v2", positive=True)


# %%
def projected(heads, w1, w2, *variances):  # numbers
    precision = 1 / torch.stack(variances)
    seen = Observation(torch.zeros(1, heads, 1, 2 // heads).double(), precision.view(1, heads, 1, -1), torch.ones(1, heads, 1))
    return project(seen, torch.stack([w1, w2])[None]).precision.squeeze()


# %%
assert_same(1 / (w1**2 * v1 + w2**2 * v2), (w1, w2, v1, v2), torch.vmap(lambda *x: projected(2, *x)))
assert_same(1 / ((w1**2 + w2**2) * v1), (w1, w2, v1), torch.vmap(lambda *x: projected(1, *x)))

# %% [markdown]
# A row of zeros reports its bias, and is sure of it:

# %%
closed = project(Observation(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1)), torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([0.0, 3.0]))
update(certain(torch.zeros(1, 1, 2)), closed).mean

# %% [markdown]
# ## The step
#
# All parts are in place. A layer, between its normalisations, is three lines:
#
# ```python
# observation = project(observe(q, k, v, reliability(belief)), W_O)   # attention observes
# belief      = update(belief, observation)                          # the residual updates
# belief      = predict(belief, ffn(belief.mean), jacobian, Q)       # the feed-forward network predicts
# ```
#
# To study a layer one wants to see what happened inside:


# %%
#| exports
class Step(NamedTuple):
    "One filter step, opened up: what a layer believed before, saw, concluded and predicted."

    prior: Belief  # on entry, (b, t, d)
    observation: Belief  # e and λ_obs in the residual stream, (b, t, d)
    n_eff: Float[Tensor, "b h t"]  # effective sample size per head, [1]
    posterior: Belief  # after the residual update
    predicted: Belief  # after the feed-forward network

    @property
    def gain(self) -> Float[Tensor, "b t d"]:
        "Kalman gain K = λ_obs/(λ + λ_obs), chapter 12."
        return gain(self.prior.precision, self.observation.precision)


# %% [markdown]
# ## A worked step
#
# Four tokens with two features in one causal sequence. The third is badly known ($\lambda = 0.1$), and the fourth lies far from the others, so that it attends to little but itself. One head, all projections the identity, a feed-forward network that does nothing, process noise $Q = 0.2$.
# With identity projections the head reports a level, whereas an update wants the innovation $e = z - h$ (12.3), so we subtract the level that each token already holds. In a trained layer, $W_O$ and the value projection have to learn this. @fig-step follows the precision of one feature through the step.

# %%
h = torch.tensor([[[1.0, 0.0], [1.2, 0.1], [0.0, 0.0], [3.0, 2.0]]])
prior = Belief(h, torch.tensor([1.0, 1.0, 0.1, 1.0])[None, :, None].expand(1, 4, 2))
heads = prior.mean[:, None]

# %%
seen = observe(heads, heads, heads, reliability(prior), is_causal=True)
level = project(seen, torch.eye(2))
observation = level._replace(mean=level.mean - h)
posterior = update(prior, observation)
predicted = predict(posterior, torch.zeros_like(h), torch.zeros_like(h), torch.tensor([0.2, 0.2]))

# %%
#| label: fig-step
#| fig-cap: "One filter step: the update adds the precision of the observation (black) to the prior's (grey), and process noise takes part of the sum (blue) back (orange)."
#| code-fold: true
fig, ax = plt.subplots()
for belief, role, label in ((prior, "prior", "prior"), (observation, "observation", "observation"), (posterior, "posterior", "posterior"), (predicted, "baseline", "predicted")):
    ax.plot(range(1, 5), belief.precision[0, :, 0], "o-", color=COLOUR[role], label=label)
ax.set(xlabel="token", ylabel="precision of feature 1 [h⁻²]", xticks=range(1, 5))
ax.legend()
plt.show()

# %%
Step(prior, observation, seen.n_eff, posterior, predicted).gain[0, :, 0]

# %% [markdown]
# These are the gains of the four tokens. The badly known third one has the largest: it believes what it sees, and to the tokens that look at it, it is worth a tenth of another. The fourth has the gain of a token that is alone, one half: what it attends to is itself, with its own precision.
#
# Does a *rare item* behave like the third token? This arithmetic does not say: the answer depends on which initial precision the item has learned. The paper reports the opposite, higher initial precision and lower gain for rare items **[P]**. Which of the two holds is a question for the experiments.
#
# ## Normalisation in the stream
#
# A pre-norm layer normalises only what it feeds to attention and network; the stream itself is untouched. A post-norm layer, the older arrangement, normalises the stream, and the belief must pass through the norm. The rule is the delta method of chapter 13, with $J$ now the diagonal of the norm's own Jacobian (13.4), without the 1 of a residual branch **[D]**:
#
# $$h \to \operatorname{norm}(h), \qquad \lambda_i \to \frac{\lambda_i}{J_i^2}, \qquad J_i = \frac{\partial \operatorname{norm}(h)_i}{\partial h_i}. \tag{21.3}$$


# %%
#| exports
JACOBIAN_FLOOR = 1e-6  # of a squared Jacobian that divides a precision: one norm raises precision a million times at most


# %%
#| exports
def normalise(
    belief: Belief,  # (b, t, d)
    norm: nn.LayerNorm | nn.RMSNorm,  # over the last dimension
) -> Belief:
    "A belief through a norm (21.3): precision divided by the squared diagonal of the Jacobian, which is taken to be at least `JACOBIAN_FLOOR`."
    kind = "rms" if isinstance(norm, nn.RMSNorm) else "layer"
    eps = torch.finfo(wide_dtype(belief.mean)).eps if norm.eps is None else norm.eps  # torch normalises half precision in float32
    jac = norm_jacobian(*standardise(belief.mean, kind, eps), norm.weight, kind)
    return Belief(norm(belief.mean), belief.precision / jac.square().clamp_min(JACOBIAN_FLOOR))


# %%
spread = Belief(torch.tensor([[[10.0, -10.0, 5.0, -5.0]]]), torch.ones(1, 1, 4))
normalise(spread, nn.LayerNorm(4)).precision

# %% [markdown]
# Features spread over ±10 are squeezed into ±1.3: their precision, in units of the squeezed feature, rises accordingly. The rule is SymPy's derivative of LayerNorm, in value and gradient, with the second feature moved away from the other two:

# %%
H, lam = sp.symbols("h0:3", real=True), sp.Symbol("lambda", positive=True)
mean = sum(H) / 3
first = (H[0] - mean) / sp.sqrt(sum((x - mean) ** 2 for x in H) / 3 + sp.Float(1e-5))


# %%
def through_norm(h0, h1, h2, lam):
    h = torch.stack([h0, h1, h2], -1)
    return normalise(Belief(h, lam[:, None].expand_as(h)), nn.LayerNorm(3, dtype=h.dtype)).precision[:, 0]


# %%
formula = (lam / sp.diff(first, H[0]) ** 2).subs(H[1], H[1] + 5)
assert_same(formula, (*H, lam), lambda h0, h1, h2, lam: through_norm(h0, h1 + 5, h2, lam))

# %% [markdown]
# Why moved? Where one feature stands alone and all others are equal, the norm maps every height of it to the same value: $J$ is zero, and (21.3) would claim to know that value perfectly. There the floor acts:

# %%
alone = Belief(torch.tensor([[[9.0, 1.0, 1.0]]]), torch.ones(1, 1, 3))
normalise(alone, nn.LayerNorm(3, eps=0.0)).precision[0, 0, 0] * JACOBIAN_FLOOR

# %% [markdown]
# ## The ordinary transformer
#
# With $\lambda \equiv 1$ all reliabilities are equal and kriging weights are attention weights; with the gain held at one the update is the plain residual **[P]**. Here is the first half of that, up to rounding; chapter 22 does a whole encoder.

# %%
plain = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
torch.testing.assert_close(observe(heads, heads, heads, reliability(certain(h)), is_causal=True).mean, plain)

# %% [markdown]
# ## Assumptions, and where they break
#
# - Heads and value dimensions are treated as independent. Correlated heads that repeat each other are counted twice: $\lambda_{\text{obs}}$ is then too large (exercise 1).
# - The bias $b_O$ is a constant and has no variance.
# - The norm's Jacobian (21.3) is cut to its diagonal, as everywhere in this book.
#
# ## Summary
#
# - A layer is `observe` → `update` → `predict` on one belief.
# - Reliability is the mean precision of a token; heads return to the stream through $W_O$, their variances through its entries squared.
# - `Step` keeps what a layer saw, for study.
#
# ## Exercises
#
# **1.** Two heads report the same value with variance 1 each and $W_O$ averages them. What does (21.2) say the variance is, and what is it if the heads are copies of each other?
#
# <details><summary>Answer</summary>
#
# One half, against a truth of one:

# %%
average = (weights * covariance * weights.T)[0].subs({w1: sp.Rational(1, 2), w2: sp.Rational(1, 2), s1: 1, s2: 1})
average.subs(rho, 0), average.subs(rho, 1)

# %% [markdown]
# </details>
