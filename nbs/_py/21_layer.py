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
# **So far** attention observes (chapter 20), the Kalman update weighs what it saw (chapter 12), the feed-forward network predicts (chapter 13).
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
from bft_nb.core import Belief
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
# The paper's answer is the mean precision over features, one number per token:
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


# %% [markdown]
# ## Out of attention: from heads to the stream
#
# The heads' means leave through the output projection, $o = W_O\,[e_1; \dots; e_H] + c$. A linear map of independent variables adds variances with squared weights:
#
# $$\operatorname{Var}(o_i) = \sum_j W_{O,ij}^2 \,\operatorname{Var}(e_j), \qquad \lambda_{obs,i} = 1/\operatorname{Var}(o_i). \tag{21.2}$$
#
# The paper says that several heads are supported; that their variances add this way, as if value dimensions were independent, is our choice. For two dimensions SymPy agrees, and shows what the independence leaves out:

# %%
w1, w2 = sp.symbols("w1 w2", real=True)
s1, s2 = sp.symbols("sigma1 sigma2", positive=True)
rho = sp.symbols("rho", real=True)
weights, covariance = sp.Matrix([[w1, w2]]), sp.Matrix([[s1**2, rho * s1 * s2], [rho * s1 * s2, s2**2]])
prove((weights * covariance * weights.T)[0] - (w1**2 * s1**2 + w2**2 * s2**2 + 2 * rho * w1 * w2 * s1 * s2))

# %% [markdown]
# With $\rho = 0$ this is (21.2). In the isotropic resolution all dimensions of a head share a variance, and their squared weights can be summed first: a $d \times H$ matrix instead of $d\times d$.


# %%
#| exports
def project(
    observation: Observation,  # per head
    weight: Float[Tensor, "d hk"],  # W_O
    bias: Float[Tensor, "d"] | None = None,  # c
) -> Belief:  # e and λ_obs in the residual stream, (b, t, d)
    "Heads to residual stream: means through W_O, variances through its square, (21.2)."
    mean = F.linear(observation.mean.transpose(1, 2).flatten(2), weight, bias)
    squared = weight.to(observation.precision.dtype).square()
    if observation.precision.shape[-1] == 1:
        squared = squared.unflatten(1, (observation.mean.shape[1], -1)).sum(-1)
    variance = observation.precision.reciprocal().transpose(1, 2).flatten(2)
    return Belief(mean, F.linear(variance, squared).reciprocal())


# %% [markdown]
# Formula and function are held together, in value and derivative:

# %%
v1, v2 = sp.symbols("v1 v2", positive=True)


# %%
def project_two(w1, w2, v1, v2):
    heads = Observation(torch.zeros(1, 2, len(v1), 1).double(), torch.stack([v1, v2])[None, ..., None].reciprocal(), torch.ones(1, 2, len(v1)))
    return torch.stack([project(Observation(heads.mean[:, :, [i]], heads.precision[:, :, [i]], None), torch.stack([w1[i], w2[i]])[None]).precision.squeeze() for i in range(len(v1))])


# %%
assert_same(1 / (w1**2 * v1 + w2**2 * v2), (w1, w2, v1, v2), project_two, n=16)

# %% [markdown]
# ## The step
#
# Everything is here. A layer, between its normalisations, is

# %% [markdown]
# ```python
# observation = project(observe(q, k, v, reliability(belief)), W_O)   # attention observes
# belief      = update(belief, observation)                          # the residual updates
# belief      = predict(belief, ffn(belief.mean), jacobian, q)       # the feed-forward network predicts
# ```
#
# To study a layer one wants to see what happened inside:


# %%
#| exports
class Step(NamedTuple):
    "One filter step, opened up: what a layer believed before, saw, concluded and predicted."

    prior: Belief  # on entry, (b, t, d)
    observation: Belief  # e and λ_obs in the residual stream, (b, t, d)
    n_eff: Float[Tensor, "b h t"]  # effective sample size per head
    posterior: Belief  # after the residual update
    predicted: Belief  # after the feed-forward network

    @property
    def gain(self) -> Float[Tensor, "b t d"]:
        "Kalman gain K = λ_obs/(λ + λ_obs), chapter 12."
        return gain(self.prior.precision, self.observation.precision)


# %% [markdown]
# ## A worked step
#
# Four tokens with two features. The third is badly known ($\lambda = 0.1$); the values agree except for the fourth. One head, identity projections, a feed-forward network that does nothing.

# %%
h = torch.tensor([[[1.0, 0.0], [1.2, 0.1], [0.0, 0.0], [3.0, 2.0]]])
prior = Belief(h, torch.tensor([1.0, 1.0, 0.1, 1.0])[None, :, None].expand(1, 4, 2))
heads = prior.mean[:, None]

# %%
observation = project(observe(heads, heads, heads, reliability(prior), is_causal=True), torch.eye(2))
posterior = update(prior, observation)
predicted = predict(posterior, torch.zeros_like(h), torch.zeros_like(h), torch.tensor([0.2, 0.2]))

# %%
#| label: fig-step
#| fig-cap: "One filter step: the update raises precision (grey to blue), most where the observation (black) is sure; process noise lowers it again, below the bound 1/Q (orange)."
#| code-fold: true
fig, ax = plt.subplots()
for belief, role, label in ((prior, "prior", "prior"), (observation, "observation", "observation"), (posterior, "posterior", "posterior"), (predicted, "baseline", "predicted")):
    ax.plot(range(1, 5), belief.precision[0, :, 0], "o-", color=COLOUR[role], label=label)
ax.set(xlabel="token", ylabel="precision of feature 1 [h⁻²]", xticks=range(1, 5))
ax.legend()
plt.show()

# %%
Step(prior, observation, None, posterior, predicted).gain[0, :, 0]

# %% [markdown]
# The badly known token has the largest gain: it believes what it sees. That is the mechanism the paper promises for rare items.
#
# ## Normalisation in the stream
#
# A pre-norm layer normalises only what it feeds to attention and network; the stream itself is untouched. A post-norm layer (BERT4Rec's habit) normalises the stream, and the belief must pass through: by the delta method of chapter 13 precision is divided by the squared diagonal of the norm's Jacobian.


# %%
#| exports
JACOBIAN_FLOOR = 1e-6  # of a squared Jacobian that divides a precision: one norm raises precision a million times at most


# %%
#| exports
def normalise(
    belief: Belief,  # (b, t, d)
    norm: nn.LayerNorm | nn.RMSNorm,  # over the last dimension
) -> Belief:
    "A belief through a norm: precision divided by the squared diagonal of the Jacobian (13.4), which is at least `JACOBIAN_FLOOR`."
    kind = "rms" if isinstance(norm, nn.RMSNorm) else "layer"
    eps = torch.finfo(belief.mean.dtype).eps if norm.eps is None else norm.eps
    jac = norm_jacobian(*standardise(belief.mean, kind, eps), norm.weight, kind)
    return Belief(norm(belief.mean), belief.precision / jac.square().clamp_min(JACOBIAN_FLOOR))


# %%
spread = Belief(torch.tensor([[[10.0, -10.0, 5.0, -5.0]]]), torch.ones(1, 1, 4))
normalise(spread, nn.LayerNorm(4)).precision

# %% [markdown]
# Features spread over ±10 are squeezed into ±1.3: their precision, in units of the squeezed feature, rises accordingly.
#
# ## The ordinary transformer
#
# With $\lambda \equiv 1$ all reliabilities are equal and kriging weights are attention weights; with gain one the update is the plain residual. Here is the first half of that, to the last bit; chapter 22 does a whole encoder.

# %%
plain = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
torch.testing.assert_close(observe(heads, heads, heads, reliability(certain(h)), is_causal=True).mean, plain)

# %% [markdown]
# ## Assumptions, and where they break
#
# - Heads and value dimensions are treated as independent. Correlated heads that repeat each other are counted twice: $\lambda_{obs}$ is then too large.
# - The bias $c$ is a constant and has no variance.
#
# ## Summary
#
# - A layer is `observe` → `update` → `predict` on one belief.
# - Reliability is the mean precision of a token; heads return to the stream through $W_O$ and $W_O^2$.
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
