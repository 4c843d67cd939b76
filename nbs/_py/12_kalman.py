# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Update: the residual connection is a Kalman update
#
# > A token adds what attention tells it, weighted by how much better attention knows than the token itself.

# %%
#| default_exp kalman

# %% [markdown]
# **So far** attention was read as a weighted mean of neighbours (chapter 10), and the spread of those neighbours gave the mean a precision $\lambda_{\text{obs}}$ (chapter 11).
# **Now** the token must combine what it is told with what it already believes. **Why**: an ordinary residual connection adds all of what it is told, however bad the observation.
# The Kalman filter [@kalman1960] says how much to add.

# %%
#| exports
import torch
from jaxtyping import Float
from torch import Tensor

from bft_nb.core import Belief, at_hand, at_least_float32, check_not_negative, check_precision

# %%
import matplotlib.pyplot as plt
import sympy as sp
from fastcore.test import test_fail

from bft_nb.core import check_belief
from bft_nb.figures import COLOUR, use_style
from bft_nb.symbolic import assert_same, prove

# %% [markdown]
# ## The smallest case
#
# We believe a room is at 20.0 °C, with a standard deviation of 0.5 °C. A thermometer with a standard deviation of 0.25 °C reads 20.4 °C. What do we believe now?
#
# Precisions are the inverse variances: $\lambda = 1/0.5^2 = 4$ and $\lambda_{\text{obs}} = 1/0.25^2 = 16$, in °C⁻². The thermometer is four times as precise, so we move four fifths of the way:

# %%
lam_room, lam_thermometer = 0.5**-2, 0.25**-2
share = lam_thermometer / (lam_room + lam_thermometer)
20.0 + share * (20.4 - 20.0)

# %% [markdown]
# What we then believe is sharper than either source alone, with a standard deviation [°C] of

# %%
(lam_room + lam_thermometer) ** -0.5


# %% [markdown]
# ## The gain, first route: the smallest posterior variance
#
# **Claim.** Among all rules $h' = h + K(z - h)$ that move a share $K$ of the way from the prior mean $h$ to an unbiased observation $z$, the one with the smallest error variance is
#
# $$K = \frac{\lambda_{\text{obs}}}{\lambda + \lambda_{\text{obs}}} \tag{12.1}$$
#
# This is the gain the paper gives for its residual connection **[P]** [@bft2026].
#
# Let $x$ be the truth. After the move the error is a mixture of the two errors,

# %%
K, x, h, z = sp.symbols("K x h z", real=True)
prove((x - (h + K * (z - h))) - ((1 - K) * (x - h) - K * (z - x)))

# %% [markdown]
# and the two are independent, with variances $1/\lambda$ and $1/\lambda_{\text{obs}}$. So the posterior error variance is

# %%
lam, lam_obs = sp.symbols("lambda lambda_obs", positive=True)
error_variance = (1 - K) ** 2 / lam + K**2 / lam_obs
error_variance

# %% [markdown]
# It is a parabola in $K$, open upwards. Its only stationary point is the minimum:

# %%
(K_min,) = sp.solve(sp.diff(error_variance, K), K)
prove(K_min - lam_obs / (lam + lam_obs))

# %%
assert sp.diff(error_variance, K, 2).is_positive

# %% [markdown]
# ## The gain, second route: the product of two Gaussians
#
# **Claim.** Multiply the prior density $N(h, 1/\lambda)$ by the likelihood $N(z, 1/\lambda_{\text{obs}})$. The product is again Gaussian in $x$; its mean is $h + K(z-h)$ with the same $K$, and its precision is
#
# $$\lambda' = \lambda + \lambda_{\text{obs}} \tag{12.2}$$

# %%
log_product = -lam * (x - h) ** 2 / 2 - lam_obs * (x - z) ** 2 / 2

# %% [markdown]
# A quadratic logarithm is a Gaussian; its precision is minus the second derivative:

# %%
prove(-sp.diff(log_product, x, 2) - (lam + lam_obs))

# %% [markdown]
# and its mean is where the first derivative vanishes:

# %%
(mode,) = sp.solve(sp.diff(log_product, x), x)
prove(mode - (h + K_min * (z - h)))

# %% [markdown]
# The first route needed no Gaussian: it used only means, variances and independence. The second needed no optimisation. That they agree is why the same gain serves whether or not the features are Gaussian:
# *best linear* in general, *best* if they are.
#
# ## What $e$ is
#
# The paper writes the update as $h' = h + K \circ e$ with $e$ the output of attention **[P]**. The textbook's rule is $h' = h + K(z - h)$. The two are the same statement if and only if
#
# $$e = z - h, \tag{12.3}$$
#
# that is, if the attention branch delivers the **innovation**: what the observation says *beyond* what the token already believes. This reading is ours **[D]**. It describes how residual branches are trained: the branch learns the correction,
# and the skip connection holds the estimate. The alternative, $e = z$, would make $h + Ke$ exceed the posterior mean by $K h$:

# %%
e = sp.Symbol("e", real=True)
prove((h + K_min * z) - mode - K_min * h)

# %% [markdown]
# The precision of the innovation is the precision of the observation: given the truth $x$ (and the prior mean $h$, a known number), $e = z - h$ is the observation shifted by a constant.
# So the $\lambda_{\text{obs}}$ of chapter 11, computed for $e$, is the $\lambda_{\text{obs}}$ of (12.1).
#
# ## The gain as code


# %%
#| exports
def gain(
    lam: Float[Tensor, "..."],  # prior precision λ, [h⁻²]
    lam_obs: Float[Tensor, "..."],  # observation precision λ_obs ≥ 0, [h⁻²]
) -> Float[Tensor, "..."]:  # K in [0, 1], no unit, float32 or wider
    "The Kalman gain (12.1), elementwise [@kalman1960; @bft2026]: the share of the innovation to believe. Signs are `update`'s to check."
    lam, lam_obs = at_least_float32(lam), at_least_float32(lam_obs)
    return lam_obs / (lam + lam_obs)


# %%
gain(torch.tensor(lam_room), torch.tensor(lam_thermometer))

# %% [markdown]
# The proved formula and the function agree in value and gradient:

# %%
assert_same(K_min, (lam, lam_obs), gain)


# %% [markdown]
# Two limits matter. Nothing observed, $\lambda_{\text{obs}} \to 0$: the gain is 0 and the prior stays. Nothing known, $\lambda \to 0$: the gain is 1, which is **the plain residual connection**.
# The ordinary transformer trusts every observation fully **[P]**. It therefore takes two settings to recover it: equal precisions, $\lambda \equiv 1$, make the weights of chapter 10 ordinary attention weights, but they leave a gain below one; the gain must be set to one as well.

# %%
sp.limit(K_min, lam_obs, 0), sp.limit(K_min, lam, 0)

# %% [markdown]
# The function keeps both limits over sixty powers of ten, with finite gradients (@fig-gain shows the range between):

# %%
extremes = torch.tensor([1e-30, 1.0, 1e30])
known, seen = (x.clone().requires_grad_() for x in torch.meshgrid(extremes, extremes, indexing="ij"))
K_grid = gain(known, seen)
assert all(grad.isfinite().all() for grad in torch.autograd.grad(K_grid.sum(), (known, seen)))
K_grid.detach()

# %%
#| label: fig-gain
#| fig-cap: "Only the ratio of the precisions matters: the gain is a logistic curve in its logarithm, one half where both know equally well."
#| code-fold: true
use_style()
ratio = torch.logspace(-4, 4, 201)
fig, ax = plt.subplots()
ax.plot(ratio, gain(torch.ones(()), ratio), color=COLOUR["posterior"])
ax.axhline(1, color=COLOUR["baseline"], linestyle="--")
ax.text(1.5e-4, 0.93, "plain residual, K = 1", color=COLOUR["baseline"])
ax.axhline(0, color=COLOUR["prior"], linestyle="--")
ax.text(1.5e1, 0.04, "keep the prior, K = 0", color=COLOUR["prior"])
ax.plot([lam_thermometer / lam_room], [share], "o", color=COLOUR["observation"])
ax.text(7, 0.76, "the thermometer", color=COLOUR["observation"])
ax.set(xscale="log", xlabel=r"precision ratio $\lambda_{\rm obs}/\lambda$", ylabel="gain K [1]")
plt.show()

# %% [markdown]
# ## The update as code
#
# $$h' = h + K \circ e, \qquad \lambda' = \lambda + \lambda_{\text{obs}} \tag{12.4}$$
#
# The prior is a belief; what attention delivers is a belief too: an innovation and its precision. The update takes two beliefs and returns one.
# It always checks shapes, but checks values only on a CPU: it runs in every layer, and looking at values would make a GPU wait. On a GPU, values are checked once, with `check_belief`, where a user hands them in.


# %%
#| exports
def _check_update(prior: Belief, observation: Belief) -> None:
    "Types and shapes."
    for belief in (prior, observation):
        if not isinstance(belief, Belief):
            raise TypeError(f"update takes two Beliefs, got {type(belief).__name__}")
    shapes = {tuple(x.shape) for x in (*prior, *observation)}
    if len(shapes) > 1:
        raise ValueError(f"prior and observation must have one shape, means and precisions alike, got {sorted(shapes)}")


# %%
#| exports
def _check_precisions(prior: Tensor, observation: Tensor, total: Tensor) -> None:
    "Values, on a CPU: neither negative, and their sum positive and finite."
    check_not_negative(prior, "prior precision")
    check_not_negative(observation, "observation precision")
    if at_hand(total) and total.numel():
        low, high = total.detach().aminmax()
        if low == 0:
            raise ValueError("prior and observation must not both have precision 0: nothing would be known")
        if high == torch.inf:
            raise ValueError("the sum of both precisions must be finite, got inf")


# %%
#| exports
def update(
    prior: Belief,  # h and λ
    observation: Belief,  # the innovation e = z − h and its precision λ_obs ≥ 0, where λ is zero above it
) -> Belief:  # h' in the dtype of h, λ' in float32 or wider
    """The Kalman update (12.4) of a diagonal belief [@kalman1960; @bft2026].

    `ValueError` if the four tensors do not have one shape or, on a CPU, if a precision is negative, infinite or NaN or both are zero."""
    _check_update(prior, observation)
    lam, lam_obs = at_least_float32(prior.precision), at_least_float32(observation.precision)
    total = lam + lam_obs
    _check_precisions(lam, lam_obs, total)
    moved = at_least_float32(prior.mean) + gain(lam, lam_obs) * at_least_float32(observation.mean)
    return Belief(moved.to(prior.mean.dtype), total)


# %%
room = Belief(torch.tensor([20.0]), torch.tensor([lam_room]))
reading = Belief(torch.tensor([20.4]) - room.mean, torch.tensor([lam_thermometer]))
posterior = update(room, reading)
check_belief(posterior)
posterior

# %% [markdown]
# Mean and precision are the formulas that were proved, and @fig-update shows the three densities:

# %%
assert_same(h + K_min * e, (h, e, lam, lam_obs), lambda h, e, lam, lam_obs: update(Belief(h, lam), Belief(e, lam_obs)).mean)

# %%
assert_same(lam + lam_obs, (h, e, lam, lam_obs), lambda h, e, lam, lam_obs: update(Belief(h, lam), Belief(e, lam_obs)).precision)

# %%
#| label: fig-update
#| fig-cap: "The posterior lies between prior and observation, close to the one that knows better, and is sharper than both."
#| code-fold: true
grid = torch.linspace(18.5, 21.5, 601)
fig, ax = plt.subplots()
observed = Belief(torch.tensor([20.4]), reading.precision)
for role, belief in {"prior": room, "observation": observed, "posterior": posterior}.items():
    normal = torch.distributions.Normal(belief.mean, belief.precision**-0.5)
    ax.plot(grid, normal.log_prob(grid).exp(), color=COLOUR[role], label=role)
ax.set(xlabel="temperature [°C]", ylabel="density [1/°C]")
ax.legend()
plt.show()

# %% [markdown]
# A bfloat16 mean stays bfloat16 while the precision is computed in float32, and a missing observation ($\lambda_{\text{obs}} = 0$) changes nothing:

# %%
half = Belief(torch.ones(3, dtype=torch.bfloat16), torch.full((3,), 300.0))
nothing = Belief(torch.full((3,), 7.0, dtype=torch.bfloat16), torch.zeros(3))
unmoved = update(half, nothing)
torch.testing.assert_close(unmoved, half, rtol=0, atol=0)
unmoved.mean.dtype, unmoved.precision.dtype

# %%
test_fail(lambda: update(half, Belief(torch.ones(2), torch.ones(2))), contains="got [(2,), (3,)]")


# %% [markdown]
# ## Off the optimum: Joseph's form
#
# The error variance above, $(1-K)^2/\lambda + K^2/\lambda_{\text{obs}}$, holds for **any** gain. It is the scalar case of the form named after Joseph [@bucy1968]. At the optimal gain it collapses to $1/\lambda'$:

# %%
joseph_at_optimum = error_variance.subs(K, K_min)
prove(joseph_at_optimum - 1 / (lam + lam_obs))

# %% [markdown]
# and so does the shorter textbook form $(1-K)/\lambda$:

# %%
prove((1 - K_min) / lam - 1 / (lam + lam_obs))

# %% [markdown]
# Away from the optimum only Joseph's form is right. With $K^\star$ for the optimal gain (12.1) it says exactly what a wrong gain costs:
#
# $$\frac{(1-K)^2}{\lambda} + \frac{K^2}{\lambda_{\text{obs}}} = \frac{1}{\lambda+\lambda_{\text{obs}}} + \Big(\frac1\lambda + \frac1{\lambda_{\text{obs}}}\Big)\,(K - K^\star)^2 \tag{12.5}$$

# %%
cost = (1 / lam + 1 / lam_obs) * (K - K_min) ** 2
prove(error_variance - 1 / (lam + lam_obs) - cost)


# %% [markdown]
# A gain is off its optimum whenever someone forces it: an ablation with $K \equiv 1$, a learned gate, a clamp. Then the precision must follow Joseph:


# %%
#| exports
def joseph_precision(
    lam: Float[Tensor, "..."],  # prior precision λ > 0, [h⁻²]
    lam_obs: Float[Tensor, "..."],  # observation precision λ_obs > 0, [h⁻²]
    applied: Float[Tensor, "..."],  # the gain that was really used, any number
) -> Float[Tensor, "..."]:  # posterior precision, at most λ + λ_obs, [h⁻²]
    "Precision after an update with any gain (12.5), Joseph's form [@bucy1968]; equals λ + λ_obs at the optimal gain. `ValueError` unless λ and λ_obs are positive and finite."
    check_precision(lam, "lam")
    check_precision(lam_obs, "lam_obs")
    lam, lam_obs, applied = at_least_float32(lam), at_least_float32(lam_obs), at_least_float32(applied)
    return 1 / ((1 - applied) ** 2 / lam + applied**2 / lam_obs)


# %%
assert_same(1 / error_variance, (lam, lam_obs, K), joseph_precision)

# %% [markdown]
# The plain residual connection, $K = 1$, keeps nothing of the prior's precision: what remains is $\lambda_{\text{obs}}$. The short form would claim a variance of zero, perfect knowledge.

# %%
one = torch.ones(())
torch.testing.assert_close(joseph_precision(4 * one, 16 * one, one), 16 * one)
(1 - one) / 4

# %% [markdown]
# How much better is the optimal update than the plain residual? For the thermometer, a little (20 against 16 °C⁻²). For an observation worse than the prior, much:

# %%
bad_reading = torch.tensor(0.25)
gain(4 * one, bad_reading), joseph_precision(4 * one, bad_reading, one), 4 + bad_reading

# %% [markdown]
# With $K = 1$ the token gives up a precision of 4 for one of 0.25.
#
# ## Assumptions, and where they break
#
# - **Independence.** Prior and observation errors are taken as independent. In a transformer both come from the same tokens, layer after layer, and a token attends to itself, so information is counted more than once and $\lambda'$ is too large. Process noise (chapter 13) has to make up for this.
# - **Unbiasedness.** $z$ measures the same quantity as $h$. This holds only as far as training makes it so.
# - **Diagonal.** Each feature is updated alone; covariances between features are not tracked **[P]**.
#
# ## Summary
#
# - The gain $K = \lambda_{\text{obs}}/(\lambda+\lambda_{\text{obs}})$ follows both from minimum variance and from the product of two Gaussians; precisions add.
# - Attention delivers the innovation $e = z - h$ (our reading), so $h' = h + K \circ e$; $K \to 1$ is the plain residual, $K \to 0$ keeps the prior.
# - With any other gain, Joseph's form gives the precision that is really left.
#
# ## Exercises
#
# **1.** Two observations arrive one after the other. Does their order matter? Show that two updates equal one update with the precision-weighted mean of both.
#
# <details><summary>Answer</summary>
#
# It does not matter: the result is symmetric in the two observations.

# %%
z2, lam2 = sp.symbols("z_2 lambda_2")
step = lambda h, lam, z, lo: (h + lo / (lam + lo) * (z - h), lam + lo)
twice, lam_twice = step(*step(h, lam, z, lam_obs), z2, lam2)
at_once, lam_once = step(h, lam, (lam_obs * z + lam2 * z2) / (lam_obs + lam2), lam_obs + lam2)
prove(twice - at_once), prove(lam_twice - lam_once)

# %% [markdown]
# </details>
#
# **2.** The variance of the innovation itself, before it is used, is $1/\lambda + 1/\lambda_{\text{obs}}$. How would you use it to notice that a precision is wrong? Try it on simulated data in which the true $\lambda_{\text{obs}}$ is a quarter of the claimed one.
#
# <details><summary>Answer</summary>
#
# The normalised innovation squared, $e^2/(1/\lambda + 1/\lambda_{\text{obs}})$, has mean 1 if both precisions are right. Here it should be $(1/4 + 1/4)/(1/4 + 1/16) = 1.6$, and up to simulation error it is. A mean above 1 says that some precision is claimed too high.

# %%
gen = torch.Generator().manual_seed(0)
truth = torch.randn(20_000, generator=gen) * 4**-0.5
readings = truth + torch.randn(20_000, generator=gen) * (16 / 4) ** -0.5
nis = readings**2 / (1 / 4 + 1 / 16)
nis.mean()

# %% [markdown]
# </details>
#
# **3.** The gain is a logistic function of $\log(\lambda_{\text{obs}}/\lambda)$. Prove it, and say what it means for a learned sigmoid gate.
#
# <details><summary>Answer</summary>
#
# A sigmoid gate can express any Kalman gain, if its input happens to be the log ratio of two precisions. Nothing makes it so: the gate must learn what the filter computes.

# %%
logit = sp.log(lam_obs / lam)
prove(1 / (1 + sp.exp(-logit)) - K_min)

# %% [markdown]
# </details>
