# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Unnormalised attention: the sandwich
#
# > When the weights are signed and do not sum to one, the residuals themselves say how well the sum is known.

# %%
#| default_exp sandwich

# %% [markdown]
# **So far** attention weights were a softmax: positive, summing to one, and the observation was a weighted *mean* with the precision of chapters 10 and 11. **Now** the weights lose both properties.
# **Why**: one of our backbones, HSTU [@zhai2024], has no softmax. It weighs its neighbours by $a_{tj} = \operatorname{SiLU}(q_t \cdot k_j + \text{bias})/N$ with a constant $N$, the length of the longest history, so that ten similar neighbours say more than one. Its output is a sum, and a sum needs a variance of its own.
# The paper names the tool, the sandwich estimator **[P]** [@bft2026; @huber1967; @white1980]; the exact form is ours **[D]**.

# %%
#| exports
import torch
from jaxtyping import Float
from torch import Tensor

from bft_nb.core import at_least_float32, check_positive, check_precision, wide_dtype
from bft_nb.reml import common_value

# %%
import matplotlib.pyplot as plt
import sympy as sp
import torch.nn.functional as F
from fastcore.test import test_fail

from bft_nb.figures import COLOUR, band, use_style
from bft_nb.symbolic import assert_same, prove

# %% [markdown]
# ## The smallest case
#
# A room has three neighbours. They report how much warmer than expected they are, 0.4, 0.1 and 3.0 °C, and the room finds them relevant by logits 2, 1 and −1. SiLU, divided by $N = 3$, gives the relevances

# %%
a_room = F.silu(torch.tensor([[2.0, 1.0, -1.0]])) / 3
v_room = torch.tensor([[0.4], [0.1], [3.0]])
a_room

# %% [markdown]
# The third is negative and small: "whatever this one does, expect a little of the opposite". The reliabilities are $\bar\lambda = (1, 1.5, 1)$ relative to a typical key, and the weights are $b_j = a_j\bar\lambda_j$:

# %%
lam_bar_room = torch.tensor([1.0, 1.5, 1.0])
b_room = a_room * lam_bar_room
b_room, b_room.sum()

# %% [markdown]
# The observation is the sum $e = \sum_j b_j v_j$:

# %%
b_room @ v_room


# %% [markdown]
# This is not a mean: the weights sum to 0.86, and a second set of the same neighbours, with $N$ as it is, would double $e$. With $\bar\lambda \equiv 1$ the sum is HSTU's own attention, the degenerate case.
# (A factor common to all $\bar\lambda$ scales $e$; HSTU normalises the sum right after, which removes the factor. So we may measure $\bar\lambda$ against a typical key: then $\bar\lambda$ and $b$ are pure numbers, and $e$ is in [v] like the values. What a key claims as its variance, $1/\bar\lambda_j$, is in units of the typical key's variance, here 1 °C².)
#
# How well is $e$ known? A formula that knows only $\bar\lambda$ believes the labels, whatever the neighbours say. The sandwich estimator looks at what they say: the two that count agree, and the third lies far off.
#
# ## The variance of a weighted sum
#
# **Claim.** Let $v_j$ be independent with a common mean $\mu$ and **any** variances $\sigma_j^2$. Then
#
# $$\operatorname{Var}(e) = \sum_j b_j^2 \sigma_j^2, \qquad \widehat{\operatorname{Var}}(e) = \sum_j b_j^2\,(v_j - m)^2, \qquad m = \frac{\sum_j b_j v_j}{\sum_j b_j} \tag{14.1}$$
#
# The first is the variance of a linear combination. The second puts the one squared residual we have in the place of each $\sigma_j^2$. A single residual is a poor estimate of one variance, but the sum over many keys is a good estimate of the sum: that is the idea of Huber and White [@huber1967; @white1980].
# The sign of $b_j$ does not matter, because $b_j$ is squared, and no model of the $\sigma_j$ is needed.
#
# The name comes from regression. Fit a constant to the $v_j$ by weighted least squares with weights $b_j$: the design $X$ is a column of ones, the "bread" is $(X^\top W X)^{-1}$, and the "filling" (or "meat") is $X^\top W \operatorname{diag}(r_j^2)\, W X$ with the residuals $r_j = v_j - m$. The fitted constant is $m$, and its sandwich variance, times $(\sum_j b_j)^2$ because $e = m \sum_j b_j$, is (14.1):

# %%
b = sp.symbols("b1:4", nonzero=True)
v = sp.symbols("v1:4", real=True)
B, B2 = sum(b), sum(x**2 for x in b)
m = sum(x * y for x, y in zip(b, v, strict=True)) / B
residual = [x - m for x in v]

# %%
X, W = sp.ones(3, 1), sp.diag(*b)
bread = (X.T * W * X).inv()
filling = X.T * W * sp.diag(*(r**2 for r in residual)) * W * X
sandwich = sum(x**2 * r**2 for x, r in zip(b, residual, strict=True))
prove(B**2 * (bread * filling * bread)[0] - sandwich)

# %% [markdown]
# The expanded square eliminates the residuals, so that no array over queries, keys *and* features is ever formed. With $B_2$ the matrix of the $b_{tj}^2$:
#
# $$\widehat{\operatorname{Var}}(e) = B_2 v^2 - 2\,m \circ B_2 v + m^2 \circ B_2 1 \tag{14.2}$$

# %%
centre_of = sp.Symbol("m", real=True)
expanded = sum(x**2 * y**2 for x, y in zip(b, v, strict=True)) - 2 * centre_of * sum(x**2 * y for x, y in zip(b, v, strict=True)) + centre_of**2 * B2
prove(expanded - sum(x**2 * (y - centre_of) ** 2 for x, y in zip(b, v, strict=True)))


# %% [markdown]
# ## When the weights cancel
#
# With signed weights $\sum_j b_j$ can be zero, and $m = e/\sum_j b_j$ explodes while $e$ and its true variance do not. This is the ordinary state of an untrained network, in which logits have both signs.
#
# Kish's number (chapter 10), $n = (\sum_j b_j)^2/\sum_j b_j^2$, shows when: it is at least 1 for weights of one sign, and falls below 1 only when signs cancel. There, the level $e/\sum_j b_j$ is known less well than a single value.
# So below $n = 1$ we move the centre smoothly to the mean under the absolute weights, $m_0 = \sum_j |b_j| v_j / \sum_j |b_j|$, which always lies among the values **[D]**:
#
# $$m = m_0 + \frac{\sum_j b_j}{\max\big((\sum_j b_j)^2,\ \sum_j b_j^2\big)} \sum_j b_j (v_j - m_0) \tag{14.3}$$
#
# For $n \ge 1$ this is $e/\sum_j b_j$ exactly; it is continuous at $n = 1$; nothing is divided by a cancelling sum; and a shift of all $v_j$ shifts $m$ by as much. (Clamping $|\sum_j b_j|$ from below would be simpler, but pulls $m$ towards zero, so the variance would depend on where zero is.)

# %%
m0 = sp.Symbol("m_0", real=True)
prove(m0 + B / B**2 * sum(x * (y - m0) for x, y in zip(b, v, strict=True)) - m)

# %% [markdown]
# For positive weights $n \ge 1$, since the cross terms of $(\sum_j b_j)^2$ are positive:

# %%
prove(B**2 - B2 - 2 * (b[0] * b[1] + b[0] * b[2] + b[1] * b[2]))


# %%
#| exports
def signed_weights(
    a: Float[Tensor, "*batch t j"],  # relevances, any sign, 0 where masked
    lam_bar: Float[Tensor, "*#batch j"],  # neighbour reliability λ̄ > 0
) -> Float[Tensor, "*batch t j"]:  # b = a λ̄, float32 or wider
    "The weights of an unnormalised attention (14.1). `ValueError` if the numbers of keys differ or λ̄ is not positive and finite."
    check_precision(lam_bar, "lam_bar")
    if not lam_bar.dim():
        raise ValueError("lam_bar must have one entry per key, got a single number")
    if a.shape[-1] != lam_bar.shape[-1]:
        raise ValueError(f"a and lam_bar must have the same number of keys, got {a.shape[-1]} and {lam_bar.shape[-1]}")
    return at_least_float32(a) * at_least_float32(lam_bar).unsqueeze(-2)


# %%
#| exports
def signed_kappa(
    b: Float[Tensor, "*batch t j"],  # weights of any sign
) -> Float[Tensor, "*batch t 1"]:  # κ in (0, 1]
    "κ = min(1, Σ b²/(Σ b)²), one over Kish's effective sample size, at most 1; 1 where all weights are zero."
    b = at_least_float32(b)
    squares, total = b.square().sum(-1, keepdim=True), b.sum(-1, keepdim=True).square()
    largest = torch.maximum(squares, total)
    return torch.where(largest > 0, squares / torch.where(largest > 0, largest, 1.0), 1.0)


# %%
#| exports
def centre(
    b: Float[Tensor, "*batch t j"],  # weights of any sign
    v: Float[Tensor, "*batch j k"],  # values, [v]
) -> Float[Tensor, "*batch t k"]:  # m, float32 or wider, [v]
    "The level around which residuals are taken (14.3): Σ b v/Σ b, moved to the mean under |b| where signs cancel; 0 where all weights are."
    b, v = (x.to(wide_dtype(b, v)) for x in (b, v))
    size, total, squares = b.abs().sum(-1, keepdim=True), b.sum(-1, keepdim=True), b.square().sum(-1, keepdim=True)
    m0 = (b.abs() @ v) / torch.where(size > 0, size, 1.0)
    largest = torch.maximum(total.square(), squares)
    return m0 + total / torch.where(largest > 0, largest, 1.0) * (b @ v - total * m0)


# %% [markdown]
# Both are checked against their formulas: $\kappa$ for positive weights, and (14.3) where the signs cancel so far that $n < 1$ (weights $b_1$, $b_2$ and $-(b_1 + b_2)$ plus a little, which makes $\sum_j b_j^2$ the larger of the two):

# %%
p, q, r = sp.symbols("p q r", positive=True)
assert_same(B2.subs(dict(zip(b, (p, q, r), strict=True))) / (p + q + r) ** 2, (p, q, r), lambda *x: signed_kappa(torch.stack(x, -1)[:, None])[:, 0, 0])

# %%
cancelled = (p, q, r / 10 - p - q)
sizes = (p, q, p + q - r / 10)  # |b|, for the points drawn below
level = sum(x * y for x, y in zip(sizes, v, strict=True)) / sum(sizes)
guarded = level + r / 10 / sum(x**2 for x in cancelled) * sum(x * (y - level) for x, y in zip(cancelled, v, strict=True))
signed_rows = lambda p, q, r: torch.stack([p, q, r / 10 - p - q], -1)[:, None]
assert_same(guarded, (p, q, r, *v), lambda p, q, r, *v: centre(signed_rows(p, q, r), torch.stack(v, -1)[..., None])[:, 0, 0], lo=1, hi=2)

# %%
centre(b_room, v_room), (b_room @ v_room) / b_room.sum()

# %% [markdown]
# Here $n > 1$, so the two agree: the negative weight extrapolates away from the third neighbour, to below both others. Where the signs cancel, the plain quotient runs off and (14.3) does not:

# %%
cancelling = torch.tensor([[1.0, -0.999, 0.0]])
centre(cancelling, v_room), (cancelling @ v_room) / cancelling.sum()


# %%
#| exports
def _check_values(a: Tensor, v: Tensor) -> None:
    if a.shape[-1] != v.shape[-2]:
        raise ValueError(f"a and v must have the same number of keys, got {a.shape[-1]} and {v.shape[-2]}")


# %%
#| exports
def sandwich_variance(
    a: Float[Tensor, "*batch t j"],  # relevances, any sign, 0 where masked
    lam_bar: Float[Tensor, "*#batch j"],  # neighbour reliability λ̄ > 0
    v: Float[Tensor, "*batch j k"],  # values, [v]
) -> Float[Tensor, "*batch t k"]:  # estimate V of Var(Σ a λ̄ v) ≥ 0, [v²] for λ̄ relative to a typical key, float32 or wider
    """Huber–White variance of unnormalised attention by the expanded square (14.2) [@huber1967; @white1980; @bft2026].

    `ValueError` if the numbers of keys differ."""
    _check_values(a, v)
    b = signed_weights(a, lam_bar)
    b, v = (x.to(wide_dtype(b, v)) for x in (b, v))
    v = v - common_value(v, b != 0)  # residuals do not change; the squares lose less to rounding
    m, b2 = centre(b, v), b.square()
    return (b2 @ v.square() - 2 * m * (b2 @ v) + m.square() * b2.sum(-1, keepdim=True)).clamp(min=0)


# %%
sandwich_variance(a_room, lam_bar_room, v_room)

# %% [markdown]
# The shift by the first key changes no residual, but keeps the expanded square from subtracting large numbers: temperatures in kelvin give the same variance as in °C. (We take the first key that is heard at all, since a masked one may say anything; and not the mean of all keys, so that no later token reaches an earlier one, even through rounding.)

# %%
torch.testing.assert_close(sandwich_variance(a_room, lam_bar_room, v_room + 273.15), sandwich_variance(a_room, lam_bar_room, v_room), rtol=1e-3, atol=0)
with_mute = sandwich_variance(F.pad(a_room, (1, 0)), F.pad(lam_bar_room, (1, 0), value=1.0), F.pad(v_room, (0, 0, 1, 0), value=1e6))
torch.testing.assert_close(with_mute, sandwich_variance(a_room, lam_bar_room, v_room))


# %% [markdown]
# Value and gradient are those of the proved formula, first with positive relevances:

# %%
def three_keys(*x):
    a, lam_bar, v = (torch.stack(part, -1) for part in (x[:3], x[3:6], x[6:]))
    return sandwich_variance(a[:, None, :], lam_bar, v[..., None])[:, 0, 0]


# %%
a_sym, lam_bar_sym = sp.symbols("a1:4", real=True), sp.symbols("lambda1:4", positive=True)
formula = sandwich.subs({x: y * z for x, y, z in zip(b, a_sym, lam_bar_sym, strict=True)}, simultaneous=True)
assert_same(formula, (*a_sym, *lam_bar_sym, *v), three_keys)

# %% [markdown]
# then with the third relevance negative (the first two are shifted up, so that $n \ge 1$ and (14.3) is the plain quotient):

# %%
signed = formula.subs({a_sym[0]: a_sym[0] + 20, a_sym[1]: a_sym[1] + 20, a_sym[2]: -a_sym[2] / 10}, simultaneous=True)
assert_same(signed, (*a_sym, *lam_bar_sym, *v), lambda *x: three_keys(x[0] + 20, x[1] + 20, -x[2] / 10, *x[3:]), lo=1, hi=2)

# %%
test_fail(lambda: sandwich_variance(a_room, torch.ones(2), v_room), contains="same number of keys, got 3 and 2")
test_fail(lambda: sandwich_variance(a_room, lam_bar_room, torch.ones(4, 1)), contains="same number of keys, got 3 and 4")

# %% [markdown]
# ## Back to softmax
#
# For non-negative weights that sum to one, $b_j = w_j$, the centre is the kriging mean $e$ and the sandwich must meet chapter 11, which estimates $\operatorname{Var}(e)$ by $\kappa\, S$ up to REML's divisor, with $S = \sum_j w_j (v_j - e)^2$ and $\kappa = \sum_j w_j^2 = 1/n$.
#
# **Claim.** Their difference is a covariance, taken under the weights, between a key's weight and its squared residual $r_j^2$:
#
# $$\sum_j w_j^2 r_j^2 - \kappa S = \operatorname{Cov}_w(w_j, r_j^2) \tag{14.4}$$

# %%
w1, w2 = sp.symbols("w1 w2", positive=True)
w = (w1, w2, 1 - w1 - w2)
mean_w = lambda values: sum(x * y for x, y in zip(w, values, strict=True))
e = mean_w(v)
r2 = [(x - e) ** 2 for x in v]
S, kappa = mean_w(r2), mean_w(w)
covariance = mean_w([(x - kappa) * (y - S) for x, y in zip(w, r2, strict=True)])
prove(sum(x**2 * y for x, y in zip(w, r2, strict=True)) - kappa * S - covariance)

# %% [markdown]
# So the two agree exactly for equal weights, whatever the values, and on average whenever the size of the residual has nothing to do with the weight. If important keys are noisier, chapter 11 is too confident and the sandwich is not: that is what it is for.

# %%
equal = {w1: sp.Rational(1, 3), w2: sp.Rational(1, 3)}
prove((sum(x**2 * y for x, y in zip(w, r2, strict=True)) - kappa * S).subs(equal))

# %%
values = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
uniform = torch.full((1, 5), 0.2, dtype=torch.float64)
scatter_of_five = (values - values.mean(0)).square().mean(0)
torch.testing.assert_close(sandwich_variance(uniform, torch.ones(5), values)[0], scatter_of_five / 5)

# %% [markdown]
# ### The divisor
#
# REML divides by $1 - \kappa$, because residuals are taken from an estimated centre and so are too small. The sandwich has the same defect. Let $w_j = b_j/\sum b$, and let the errors $\epsilon_j$ be independent with variance $\sigma^2$. The residual is $\epsilon_j - \sum_i w_i\epsilon_i$, and its expected square is $\sigma^2 (1 - 2 w_j + \kappa)$:

# %%
noise, s2 = sp.symbols("epsilon1:4"), sp.Symbol("sigma2", positive=True)
variance_of = lambda linear, variances: sum(sp.expand(linear).coeff(x) ** 2 * y for x, y in zip(noise, variances, strict=True))
expected_r2 = [variance_of(x - mean_w(noise), [s2] * 3) for x in noise]
prove(expected_r2[0] - s2 * (1 - 2 * w[0] + kappa))

# %% [markdown]
# so that the sandwich is short by the factor $1 - 2\sum_j w_j^3/\kappa + \kappa$:

# %%
expected_sandwich = sum(x**2 * y for x, y in zip(w, expected_r2, strict=True))
shortfall = 1 - 2 * sum(x**3 for x in w) / kappa + kappa
prove(expected_sandwich - s2 * kappa * shortfall)

# %% [markdown]
# With $n$ equal weights that is $1 - 1/n$, REML's divisor exactly:

# %%
count = sp.Symbol("n", positive=True)
prove((1 - 2 * count * count**-3 / (1 / count) + 1 / count) - (1 - 1 / count))


# %% [markdown]
# For other positive weights the true factor is smaller than $1 - \kappa$, by twice the variance of a weight, taken under the weights, relative to its mean $\kappa$:
#
# $$\Big(1 - \kappa\Big) - \Big(1 - \frac{2}{\kappa}\sum_j w_j^3 + \kappa\Big) = \frac2\kappa \operatorname{Var}_w(w_j) \ge 0$$

# %%
prove((1 - kappa) - shortfall - 2 / kappa * mean_w([(x - kappa) ** 2 for x in w]))

# %% [markdown]
# We divide by $1 - \kappa$ in both chapters **[D]**. This needs no third moment of the weights, but it corrects for a part of the shortfall only, most of it where weights are alike. What is left errs on the side of confidence. Exercise 2 corrects each residual by its own leverage instead.
#
# ## The same conjugate prior
#
# A single key leaves no residual: $\kappa = 1$ and both estimate and divisor are zero. As in chapter 11, the tracked precision is the prior, worth $\nu_0$ observations. What the prior claims for the variance of $e$ is $V_0 = \sum_j b_j^2/\bar\lambda_j = \sum_j a_j^2 \bar\lambda_j$:

# %%
claim = sum(x**2 * y for x, y in zip(a_sym, lam_bar_sym, strict=True))
prove(sum((x * y) ** 2 / y for x, y in zip(a_sym, lam_bar_sym, strict=True)) - claim)

# %% [markdown]
# On softmax weights this is not quite chapter 11's claim $\kappa s_0^2$. The two differ as $V$ and $\kappa S$ do in (14.4), by a covariance under the weights, $V_0 - \kappa s_0^2 = \operatorname{Cov}_w(w_j, 1/\bar\lambda_j)$, which is zero where weights or reliabilities are equal, and negative where the weight goes to the reliable **[D]**:

# %%
claims = [1 / x for x in lam_bar_sym]
s2_0 = mean_w(claims)
prove(sum(x**2 * y for x, y in zip(w, claims, strict=True)) - kappa * s2_0 - mean_w([(x - kappa) * (y - s2_0) for x, y in zip(w, claims, strict=True)]))

# %% [markdown]
# Chapter 11 arrives at $\operatorname{Var}(e) = \kappa\,(\nu_0 \kappa s_0^2 + S)/(\nu_0\kappa + 1 - \kappa)$, its (11.9). There, the data give $\kappa S$ for the variance of $e$ and the prior claims $\kappa s_0^2$. Here they give $V$ and $V_0$, and the same formula reads **[D]**
#
# $$\frac{1}{\lambda_{\text{obs}}} = \frac{\nu_0\,\kappa\,V_0 + V}{\nu_0\,\kappa + 1 - \kappa}, \qquad \nu_0 = 1:\quad \frac{1}{\lambda_{\text{obs}}} = V + \kappa V_0 \tag{14.5}$$

# %%
V, V0, nu0, k, s20, S_sym = sp.symbols("V V_0 nu_0 kappa s_0^2 S", positive=True)
posterior = (nu0 * k * V0 + V) / (nu0 * k + 1 - k)
prove(posterior.subs({V: k * S_sym, V0: k * s20}) - k * (nu0 * s20 * k + S_sym) / (nu0 * k + 1 - k)), prove(posterior.subs(nu0, 1) - (V + k * V0))

# %% [markdown]
# Its limits: one key ($V = 0$, $\kappa = 1$) gives the claim $V_0$; many keys ($\kappa \to 0$) give the sandwich $V$.

# %%
prove(posterior.subs({V: 0, k: 1}) - V0), sp.limit(posterior, k, 0)


# %%
#| exports
def claimed_variance(
    a: Float[Tensor, "*batch t j"],  # relevances, any sign, 0 where masked
    lam_bar: Float[Tensor, "*#batch j"],  # neighbour reliability λ̄ > 0
) -> Float[Tensor, "*batch t 1"]:  # V₀ = Σ a² λ̄, in the unit of V
    "What the tracked precision claims for the variance of Σ a λ̄ v when Var v = 1/λ̄ (14.5). `ValueError` if the numbers of keys differ."
    return (signed_weights(a, lam_bar) * at_least_float32(a)).sum(-1, keepdim=True)


# %%
#| exports
def posterior_variance(
    variance: Float[Tensor, "*batch t k"],  # V of `sandwich_variance`, [v²]
    claimed: Float[Tensor, "*batch t 1"],  # V₀ of `claimed_variance`, [v²]
    kappa: Float[Tensor, "*batch t 1"],  # κ of `signed_kappa`
    nu0: float = 1.0,  # ν₀ > 0, what the prior is worth in observations
) -> Float[Tensor, "*batch t k"]:  # 1/λ_obs, [v²]
    "Sandwich and prior together (14.5). `ValueError` unless ν₀ > 0."
    check_positive("nu0", nu0)
    return (nu0 * kappa * claimed + variance) / (nu0 * kappa + 1 - kappa)


# %%
assert_same(claim, (*a_sym, *lam_bar_sym), lambda *x: claimed_variance(torch.stack(x[:3], -1)[:, None], torch.stack(x[3:], -1))[:, 0, 0])

# %%
assert_same(posterior, (V, V0, k, nu0), lambda V, V0, k, nu0: torch.stack([posterior_variance(*x[:3], nu0=x[3]) for x in zip(V, V0, k, nu0, strict=True)]), lo=0.1, hi=0.9)

# %% [markdown]
# For the room, three estimates of the variance of $e$ [°C²]: what the tracked precision claims, what the residuals say, and the two together.

# %%
V_room, V0_room = sandwich_variance(a_room, lam_bar_room, v_room), claimed_variance(a_room, lam_bar_room)
V0_room, V_room, posterior_variance(V_room, V0_room, signed_kappa(b_room))

# %% [markdown]
# The residuals are kinder than the labels: the two neighbours that count agree within 0.3 °C, where the labels allow for about a degree each. More than half of $V$ comes from the third neighbour, despite its small weight. With fewer than two effective neighbours the prior has the last word.

# %%
one_key = torch.tensor([[0.7]])
only_prior = posterior_variance(sandwich_variance(one_key, torch.tensor([4.0]), v_room[:1]), claimed_variance(one_key, torch.tensor([4.0])), signed_kappa(one_key))
torch.testing.assert_close(only_prior, torch.tensor([[0.7**2 * 4.0]]))
test_fail(lambda: posterior_variance(V_room, V0_room, signed_kappa(b_room), nu0=0.0), contains="nu0 must be positive and finite, got 0.0")

# %% [markdown]
# A query all of whose keys are masked has $a = 0$: then $e = 0$, and (14.5) gives a variance of zero for a sum of nothing. That is no observation at all; a layer sets $\lambda_{\text{obs}} = 0$ there.
#
# ## Does it hold up?
#
# The rival of the sandwich is the *model-based* variance: one pooled variance of the values, times $\sum_j b_j^2$. It is right if all keys are equally noisy. We let the noise of key $j$ depend on its weight, $\sigma_j^2 \propto |b_j|^{g}$: for $g > 0$ important keys are noisier, for $g < 0$ cleaner.
# @fig-sandwich uses 48 keys with SiLU weights of both signs and 4,000 repetitions, and compares both estimates with the true variance $\sum_j b_j^2\sigma_j^2$:


# %%
gen = torch.Generator().manual_seed(1)
weights = F.silu(2 * torch.randn(1, 48, generator=gen, dtype=torch.float64)) / 48


def estimates(g, repeats=4000):
    sigma2 = weights[0].abs() ** g
    values = torch.randn(repeats, 48, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * (sigma2 / sigma2.mean()).sqrt()[:, None]
    truth = (weights[0].square() * sigma2 / sigma2.mean()).sum()
    robust = sandwich_variance(weights.expand(repeats, 1, 48), torch.ones(repeats, 48), values).flatten()
    pooled = values.var(1).flatten() * weights.square().sum()
    return robust / truth, pooled / truth


# %%
#| label: fig-sandwich
#| fig-cap: "On average the sandwich stays near the true variance however noise and weight are related, which the model-based variance does not. Bands: ± 1 sd over 4,000 repetitions."
#| code-fold: true
use_style()
strengths = torch.linspace(-1, 2, 13)
robust, model = zip(*(estimates(g) for g in strengths), strict=True)
fig, ax = plt.subplots()
for ratios, role, label in ((model, "baseline", "model-based"), (robust, "posterior", "sandwich")):
    ratios = torch.stack(ratios)
    band(ax, strengths, ratios.mean(1), ratios.std(1), role, label)
ax.axhline(1, color=COLOUR["truth"], linestyle="--", label="truth")
ax.set(yscale="log", xlabel="exponent g: noise variance grows as |weight| to the g", ylabel="estimated / true variance [1]", ylim=(0.1, 50))
ax.legend()
plt.show()

# %%
summary = {g: [round(x.mean().item(), 2) for x in estimates(g)] for g in (-1.0, 0.0, 1.0, 2.0)}
summary  # g: [sandwich, model-based]

# %%
assert abs(summary[0.0][1] - 1) < 0.02 and all(0.75 < x[0] < 1.05 for x in summary.values())
assert summary[1.0][1] < 0.6 and summary[-1.0][1] > 1.5

# %% [markdown]
# Robustness has its price: the band of the sandwich is wider where the simple model is right ($g = 0$), and its mean lies below one. The latter is the missing divisor of the section above, $1 - 2\sum_j w_j^3/\kappa + \kappa$ at $g = 0$:

# %%
w48 = weights[0] / weights.sum()
shortfall_48 = 1 - 2 * w48.pow(3).sum() / w48.square().sum() + w48.square().sum()
torch.testing.assert_close(estimates(0.0)[0].mean(), shortfall_48, rtol=0.03, atol=0)
shortfall_48

# %% [markdown]
# ## Assumptions, and where they break
#
# - **Independent values.** Neighbours that are positively correlated and weighted with the same sign make every such estimate of the variance of a sum too small (with opposite signs, too large); the sandwich does not notice.
# - **One common mean.** Keys that disagree because they mean different things count as noise. For attention that is often wanted: disagreement is a reason to listen less.
# - **Many keys.** With few effective keys the estimate is noisy and too small, and $1 - \kappa$ makes up for only a part of that; the prior carries the estimate there.
# - **Cancelling signs.** Below $n = 1$ the centre is a convention (14.3).
#
# ## Summary
#
# - A weighted sum with weights of any sign has the Huber–White variance $\sum_j b_j^2 (v_j - m)^2$, computed by the expanded square.
# - On softmax weights it is chapter 11's $\kappa S$ plus the covariance of weight and squared residual, hence equal for equal weights.
# - It stays right when noise depends on weight, where the model-based variance does not; where keys are few, the prior of chapter 11 carries the estimate.
#
# ## Exercises
#
# **1.** A key is split into two keys of half the weight and the same value, so that $e$ and $m$ stay as they are. What happens to its term in (14.1), and what does this say about duplicated items in a user's history?
#
# <details><summary>Answer</summary>
#
# Two halves contribute $2\,(b/2)^2 r^2$, half of $b^2 r^2$. Two independent readings would deserve this reduction; a copy does not. Duplicates make any of these estimates overconfident.

# %%
r_sym = sp.Symbol("r", real=True)
prove(2 * (b[0] / 2) ** 2 * r_sym**2 - b[0] ** 2 * r_sym**2 / 2)

# %% [markdown]
# </details>
#
# **2.** The leverage of key $j$ is $\ell_j = b_j/\sum b$ (positive weights). The corrected forms HC2 and HC3 divide $r_j^2$ by $1 - \ell_j$ and $(1 - \ell_j)^2$ [@mackinnon1985]. Show that HC2 is unbiased under the kriging model $\operatorname{Var}(v_j) = \sigma^2/b_j$, and compare the three by simulation with eight keys.
#
# <details><summary>Answer</summary>
#
# Under the kriging model $E[r_j^2] = (1 - \ell_j)\,\sigma^2/b_j$, so HC2 undoes the factor exactly:

# %%
kriging_model = [s2 / x for x in b]
leverage = [x / B for x in b]
m_noise = sum(x * y for x, y in zip(leverage, noise, strict=True))
prove(sp.simplify(variance_of(noise[0] - m_noise, kriging_model)) - (1 - leverage[0]) * s2 / b[0])

# %% [markdown]
# HC0 is too small, HC2 right, HC3 too large:

# %%
b8 = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05], dtype=torch.float64)
draws = torch.randn(50_000, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * b8**-0.5
squared_residuals = (draws - (draws @ b8)[:, None]).square()
[round(((b8.square() / (1 - b8) ** power * squared_residuals).sum(1).mean() / b8.sum()).item(), 3) for power in (0, 1, 2)]

# %% [markdown]
# </details>
#
# **3.** What does a *learned* $\bar\lambda$ change in (14.5) if it is wrong by a factor $c$ for all keys?
#
# <details><summary>Answer</summary>
#
# $e$ scales by $c$, and $V$ by $c^2$ as it must; $\kappa$ is unchanged. But $V_0 = \sum_j a_j^2 \bar\lambda_j$ scales by $c$ only, so the prior's share of the variance falls as $1/c$: overconfident tokens are corrected by the residuals.

# %%
c = sp.Symbol("c", positive=True)
scaled = {y: c * y for y in lam_bar_sym}
prove(formula.subs(scaled, simultaneous=True) - c**2 * formula), prove(claim.subs(scaled, simultaneous=True) - c * claim)

# %% [markdown]
# </details>
