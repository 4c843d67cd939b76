# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Kriging
#
# > Attention weights multiplied by each neighbour's precision are the best linear unbiased estimate, and its variance comes free.

# %%
#| default_exp kriging

# %% [markdown]
# **So far** a token carries a belief $(h, \lambda)$. **Now** it looks at its neighbours. **Why**: attention asks only how *relevant* a neighbour is.
# Geostatistics asks how to average neighbours that are unequally informative, and calls the best linear answer *kriging* [@matheron1963]. The paper reads self-attention as kriging [@bft2026]:
# one extra term inside the softmax.
#
# Facts marked **[P]** are the paper's; those marked **[D]** this book derives or chooses. Each letter is in the notation table of chapter 00.

# %%
#| exports
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bft_nb.core import at_least_float32, check_precision

# %%
import matplotlib.pyplot as plt
import sympy as sp
from fastcore.test import test_fail

from bft_nb.figures import COLOUR, use_style
from bft_nb.symbolic import assert_same, prove

# %% [markdown]
# ## Three thermometers
#
# How warm is it at the hut? Three thermometers stand on the same slope. The first stands closest and is the most relevant; its errors have a
# standard deviation of 1 °C. The second is a little further away but a better instrument (0.5 °C). The third is a toy (2 °C), and it disagrees.

# %%
use_style()
value = torch.tensor([20.0, 20.5, 24.0])  # v, [°C]
relevance = torch.tensor([0.5, 0.3, 0.2])  # α, no unit, sums to one
reliability = torch.tensor([1.0, 0.5, 2.0]) ** -2  # λ̄ = 1/sd², [°C⁻²]
reliability

# %% [markdown]
# Attention would average by relevance alone, and the toy pulls the mean up:

# %%
relevance @ value

# %% [markdown]
# Multiply each relevance by the reliability and normalise again. The good instrument takes over and the toy is nearly silent (@fig-weights):

# %%
product = relevance * reliability
weight = product / product.sum()
weight, weight @ value

# %%
#| label: fig-weights
#| fig-cap: "Reliability moves weight to the good thermometer (B), and leaves the toy (C) next to none: shares before (relevance) and after (kriging weight)."
#| code-fold: true
fig, ax = plt.subplots()
place = torch.arange(3)
ax.bar(place - 0.2, relevance, 0.38, color=COLOUR["baseline"], label="relevance α")
ax.bar(place + 0.2, weight, 0.38, color=COLOUR["posterior"], label="kriging weight w")
ax.set_xticks(place, ["A: near, sd 1 °C", "B: good, sd 0.5 °C", "C: toy, sd 2 °C"])
ax.set(ylabel="share of the estimate [1]")
ax.legend()
plt.show()

# %% [markdown]
# ## Relevance and reliability in one softmax
#
# Claim. Query $t$ scores key $j$ by the logit $\ell_{tj}$; its relevance is the softmax of the logits over the keys it may see,
#
# $$ \alpha_{tj} = \frac{e^{\ell_{tj}}}{\sum_{j'} e^{\ell_{tj'}}}, \qquad \ell_{tj} = \frac{q_t \cdot k_j}{\sqrt{k}}. \tag{10.1} $$
#
# The reliability $\bar\lambda_j$ of neighbour $j$ is its precision averaged over the features **[P]**. The kriging weights **[P]** are
#
# $$ w_{tj} = \frac{\alpha_{tj} \bar\lambda_j}{\sum_{j'} \alpha_{tj'} \bar\lambda_{j'}} = \operatorname{softmax}_j\!\left(\ell_{tj} + \log \bar\lambda_j\right). \tag{10.2} $$
#
# The query index $t$ is dropped from here on: each query is a problem of its own. We write $T$ for the number of visible keys and carry out the proofs with $T = 3$.

# %%
logits = sp.symbols("ell_1:4", real=True)
lams = sp.symbols("lambdabar_1:4", positive=True)
softmax = [sp.exp(x) / sum(sp.exp(y) for y in logits) for x in logits]
weighted = [a * lam for a, lam in zip(softmax, lams, strict=True)]
shifted = [sp.exp(x + sp.log(lam)) for x, lam in zip(logits, lams, strict=True)]

# %%
[prove(p / sum(weighted) - s / sum(shifted)) for p, s in zip(weighted, shifted, strict=True)]

# %% [markdown]
# The code is the right-hand side of (10.2). A mask says which keys may be seen; the convention is that of torch's `scaled_dot_product_attention`, true = visible.


# %%
#| exports
def _check_mask(mask: Tensor, scores: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean (True = visible), got {mask.dtype}")
    trailing = zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    if mask.dim() > scores.dim() or any(m not in (1, s) for m, s in trailing):
        raise ValueError(f"mask of shape {tuple(mask.shape)} does not broadcast to the logits' {tuple(scores.shape)}")


# %%
#| exports
def kriging_weights(
    logits: Float[Tensor, "*batch t j"],  # $\ell$, scaled dot products, [1]
    lam_bar: Float[Tensor, "*#batch j"],  # $\bar\lambda$, reliability of each key, [h⁻²]
    mask: Bool[Tensor, "..."] | None = None,  # True = visible, broadcast to the logits
) -> Float[Tensor, "*batch t j"]:  # $w$, float32 or wider, rows sum to one, [1]
    """The kriging weights $w = \\mathrm{softmax}(\\ell + \\log \\bar\\lambda)$, equation (10.2) [@bft2026].

    A query whose keys are all masked gets weights of zero, whatever its logits; one whose logits are all $-\\infty$ without a mask has none (NaN). Raises `ValueError` for a reliability that is not positive and finite or for shapes
    that do not fit, and `TypeError` for a mask that is not boolean.
    """
    check_precision(lam_bar, "lam_bar")
    if lam_bar.shape[-1:] != logits.shape[-1:]:
        raise ValueError(f"lam_bar needs one entry per key, got {tuple(lam_bar.shape)} for logits of shape {tuple(logits.shape)}")
    if any(m not in (1, n) for m, n in zip(reversed(lam_bar.shape[:-1]), reversed(logits.shape[:-2]), strict=False)):
        raise ValueError(f"lam_bar of shape {tuple(lam_bar.shape)} does not broadcast to logits of shape {tuple(logits.shape)}")
    scores = at_least_float32(logits) + at_least_float32(lam_bar).log().unsqueeze(-2)
    if mask is None:
        return scores.softmax(-1)
    _check_mask(mask, scores)
    seen = mask.any(-1, keepdim=True)
    return scores.masked_fill(~mask & seen, float("-inf")).masked_fill(~seen, 0).softmax(-1) * seen


# %%
w = kriging_weights(relevance.log()[None], reliability)
torch.testing.assert_close(w[0], weight)
w

# %% [markdown]
# Formula and function agree in value and in first derivative, here as functions of three relevances (of any scale: the softmax normalises) and three reliabilities:

# %%
alphas = sp.symbols("alpha_1:4", positive=True)
total = sum(a * lam for a, lam in zip(alphas, lams, strict=True))
formula = [a * lam / total for a, lam in zip(alphas, lams, strict=True)]


# %%
def by_key(*x: Tensor) -> tuple[Tensor, Tensor]:  # six tensors (n,) as logits (n, 1, 3) and reliabilities (n, 3)
    return torch.stack(x[:3], -1).log().unsqueeze(-2), torch.stack(x[3:], -1)


# %%
for j in range(3):
    assert_same(formula[j], (*alphas, *lams), lambda *x, j=j: kriging_weights(*by_key(*x))[:, 0, j])

# %% [markdown]
# Equal reliabilities change nothing: the ordinary transformer is the case $\bar\lambda \equiv$ constant **[P]**.

# %%
torch.testing.assert_close(kriging_weights(relevance.log()[None], torch.full((3,), 7.0))[0], relevance)

# %% [markdown]
# ## Best, linear, unbiased
#
# Claim. Let the neighbours be independent measurements of one quantity $\mu$ with
#
# $$ \operatorname{E} v_j = \mu, \qquad \operatorname{Var} v_j = \frac{\sigma^2}{p_j}, \qquad p_j = \alpha_j \bar\lambda_j . \tag{10.3} $$
#
# An irrelevant neighbour counts as a noisy one, and so does an unreliable one; the two effects multiply. The factor $\sigma^2$ has no unit here: $\sigma^2 = 1$ takes the tracked precision at its word. A *linear* estimate is $e = \sum_j w_j v_j$.
# It is *unbiased* for every $\mu$ when $\sum_j w_j = 1$, since $\operatorname{E} e = \mu \sum_j w_j$. *Best* means least variance [@aitken1936], and independence gives
# $\operatorname{Var} e = \sigma^2 \sum_j w_j^2 / p_j$. So (10.2) claims to solve
#
# $$ \min_w \; \sigma^2 \sum_j \frac{w_j^2}{p_j} \quad \text{subject to} \quad \sum_j w_j = 1 . \tag{10.4} $$
#
# The Lagrange multiplier $\eta$ prices the constraint. Setting all four derivatives to zero:

# %%
ws = sp.symbols("w_1:4", real=True)
sigma = sp.Symbol("sigma", positive=True)
eta = sp.Symbol("eta", real=True)
variance = sigma**2 * sum(x**2 / (a * lam) for x, a, lam in zip(ws, alphas, lams, strict=True))
lagrangian = variance + 2 * eta * (1 - sum(ws))

# %%
unknowns = (*ws, eta)
best = sp.solve([sp.diff(lagrangian, x) for x in unknowns], unknowns)
best[ws[0]]

# %% [markdown]
# The stationary point is the kriging weight, for each of the three:

# %%
[prove(best[x] - f) for x, f in zip(ws, formula, strict=True)]

# %% [markdown]
# For any $T$: the derivative with respect to $w_j$ is $2\sigma^2 w_j/p_j - 2\eta$, so $w_j = \eta\, p_j / \sigma^2$, and the constraint fixes $\eta = \sigma^2 / \sum_j p_j$.
# A stationary point need not be a minimum. This one is, and it is the only one: any other unbiased weights are $w_j + \delta_j$ with $\sum_j \delta_j = 0$, and the variance they add is a sum of squares,
#
# $$ \operatorname{Var}(w + \delta) - \operatorname{Var}(w) = \sigma^2 \sum_j \frac{\delta_j^2}{p_j} \ge 0 , \tag{10.5} $$
#
# because the cross term $2\sigma^2 \sum_j w_j \delta_j / p_j = 2 \eta \sum_j \delta_j$ vanishes. SymPy confirms it, and @fig-parabola shows it for two of the thermometers.

# %%
d1, d2 = sp.symbols("delta_1 delta_2", real=True)
deltas = (d1, d2, -d1 - d2)
moved = variance.subs({x: f + d for x, f, d in zip(ws, formula, deltas, strict=True)}, simultaneous=True)
least = variance.subs(dict(zip(ws, formula, strict=True)), simultaneous=True)
prove(moved - least - sigma**2 * sum(d**2 / (a * lam) for d, a, lam in zip(deltas, alphas, lams, strict=True)))

# %%
#| label: fig-parabola
#| fig-cap: "Kriging sits at the bottom of the parabola: variance of the estimate from thermometers A and B only, for every unbiased pair of weights (σ = 1)."
#| code-fold: true
share = torch.linspace(0, 1, 101)
p = product[:2]
spread = lambda s: s**2 / p[0] + (1 - s) ** 2 / p[1]
fig, ax = plt.subplots()
ax.plot(share, spread(share), color=COLOUR["prior"])
for s, name, role in ((p[0] / p.sum(), "kriging", "posterior"), (relevance[0] / relevance[:2].sum(), "relevance only", "baseline")):
    ax.plot(s, spread(s), "o", color=COLOUR[role], label=name)
ax.set(xlabel="weight of thermometer A [1]", ylabel="variance of the estimate [°C²]")
ax.legend()
plt.show()

# %% [markdown]
# The estimate itself is a matrix product. In a transformer it is the output of the attention head:


# %%
#| exports
def kriging_mean(
    w: Float[Tensor, "*batch t j"],  # $w$, weights from `kriging_weights`, [1]
    v: Float[Tensor, "*#batch j k"],  # $v$, values of the keys, [v]
) -> Float[Tensor, "*batch t k"]:  # $e$, [v]
    "The best linear unbiased estimate $e_t = \\sum_j w_{tj} v_j$, the solution of (10.4) [@matheron1963], in the wider of the two dtypes."
    wide = torch.promote_types(w.dtype, v.dtype)
    return w.to(wide) @ v.to(wide)


# %%
e = kriging_mean(w, value[:, None])
torch.testing.assert_close(e, (weight @ value).reshape(1, 1))
e

# %%
vs = sp.symbols("v_1:4", real=True)
as_rows = lambda *x: kriging_mean(torch.stack(x[:3], -1)[:, None], torch.stack(x[3:], -1)[..., None])[:, 0, 0]
assert_same(sum(x * y for x, y in zip(ws, vs, strict=True)), (*ws, *vs), as_rows)

# %% [markdown]
# ## The variance is already in the normaliser
#
# Claim **[D]**. At the optimum $\operatorname{Var} e = \sigma^2/\sum_j p_j = \eta$: the multiplier *is* the kriging variance. With $\sigma^2 = 1$,
#
# $$ s_0^2 = \sum_j \frac{w_j}{\bar\lambda_j} = \frac{1}{\sum_j \alpha_j \bar\lambda_j} . \tag{10.6} $$
#
# The right side is the normaliser of (10.2), which every softmax computes. The left side needs no normaliser at all, only the weights, and it has a meaning of its own: the weighted mean of the variances that the neighbours claim.
# The identity uses $\sum_j \alpha_j = 1$; multiplying all $\alpha$ by a constant would leave $w$ as it is and change $s_0^2$.

# %%
unit = {alphas[2]: 1 - alphas[0] - alphas[1]}
prove(least - sigma**2 / total), prove(best[eta] - least)

# %%
left = sum(f / lam for f, lam in zip(formula, lams, strict=True))
prove((left - 1 / total).subs(unit))


# %%
#| exports
def kriging_variance(
    w: Float[Tensor, "*batch t j"],  # $w$, weights from `kriging_weights`, [1]
    lam_bar: Float[Tensor, "*#batch j"],  # $\bar\lambda$, reliability of each key, [h⁻²]
) -> Float[Tensor, "*batch t"]:  # $s_0^2$, [h²]
    """The variance $s_0^2 = \\sum_j w_{tj}/\\bar\\lambda_j$ that the tracked precision claims for the estimate, equation (10.6).

    Infinite for a query that sees no key (all its weights are zero). Raises `ValueError` for a reliability that is not positive and finite.
    """
    check_precision(lam_bar, "lam_bar")
    claimed = (w / lam_bar.unsqueeze(-2)).sum(-1)
    return claimed.masked_fill((w == 0).all(-1), float("inf"))


# %%
s2_0 = kriging_variance(w, reliability)
torch.testing.assert_close(s2_0, 1 / product.sum()[None])
s2_0

# %% [markdown]
# The hut's temperature is 20.5 ± 0.76 °C, if the instruments deserve their labels. Whether they do is the question of chapter 11. Code and formula agree:

# %%
assert_same(left, (*alphas, *lams), lambda *x: kriging_variance(kriging_weights(*by_key(*x)), by_key(*x)[1])[:, 0])

# %% [markdown]
# ## How many neighbours did it see?
#
# Claim. If all neighbours had one and the same variance, now called $\sigma^2$ [v²], the weighted mean would have variance $\sigma^2 \sum_j w_j^2$, as if it were the plain mean of
#
# $$ n = \frac{1}{\sum_j w_j^2} \tag{10.7} $$
#
# neighbours. This is Kish's *effective sample size*, known from survey weights [@kish1965]. We also write $\kappa = 1/n = \sum_j w_j^2$.


# %%
#| exports
def effective_sample_size(
    w: Float[Tensor, "*batch j"],  # $w$, weights that sum to one over the last axis, [1]
) -> Float[Tensor, "*batch"]:  # $n$, between 1 and the number of keys, float32 or wider, [1]
    "Kish's effective sample size $n = 1/\\sum_j w_j^2$, equation (10.7) [@kish1965]; zero where all weights are zero (no key is visible)."
    kappa = at_least_float32(w).square().sum(-1)  # in half precision the squares of small weights vanish
    empty = kappa == 0
    return (1 / kappa.masked_fill(empty, 1)).masked_fill(empty, 0)


# %%
effective_sample_size(relevance), effective_sample_size(weight)

# %%
assert_same(1 / sum(x**2 for x in ws), ws, lambda *x: effective_sample_size(torch.stack(x, -1)))

# %% [markdown]
# Claim **[D]**. For weights that are not negative and sum to one, $1 \le n \le T$. Two identities prove it. The first is Lagrange's form of the Cauchy–Schwarz inequality,
#
# $$ T \sum_j w_j^2 - \Big(\sum_j w_j\Big)^2 = \sum_{i<j} (w_i - w_j)^2 \ge 0 , \tag{10.8} $$
#
# so $n \le T$, with equality exactly when all weights are equal. The second is the square of the sum,
#
# $$ \Big(\sum_j w_j\Big)^2 - \sum_j w_j^2 = 2 \sum_{i<j} w_i w_j \ge 0 , \tag{10.9} $$
#
# so $n \ge 1$, with equality exactly when one key takes everything. Both identities hold for any $T$; SymPy checks $T = 2$ and $3$.


# %%
def pairs(x: tuple) -> list[tuple]:
    return [(x[i], x[j]) for j in range(len(x)) for i in range(j)]


# %%
upper = [T * sum(x**2 for x in ws[:T]) - sum(ws[:T]) ** 2 - sum((a - b) ** 2 for a, b in pairs(ws[:T])) for T in (2, 3)]
[prove(u) for u in upper]

# %%
lower = [sum(ws[:T]) ** 2 - sum(x**2 for x in ws[:T]) - 2 * sum(a * b for a, b in pairs(ws[:T])) for T in (2, 3)]
[prove(u) for u in lower]

# %% [markdown]
# The equality cases, in numbers (@fig-sharpness shows what lies between them):

# %%
torch.testing.assert_close(effective_sample_size(torch.full((7,), 1 / 7)), torch.tensor(7.0))
torch.testing.assert_close(effective_sample_size(torch.tensor([0.0, 1.0, 0.0])), torch.tensor(1.0))

# %%
#| label: fig-sharpness
#| fig-cap: "A sharper softmax sees fewer neighbours: effective sample size of 16 keys with standard normal logits times a sharpness; median and 5–95 % band of 200 draws."
#| code-fold: true
gen = torch.Generator().manual_seed(0)
draws = torch.randn(200, 1, 16, generator=gen)
sharpness = torch.logspace(-1, 1.5, 40)
n_eff = torch.stack([effective_sample_size((s * draws).softmax(-1)) for s in sharpness])[..., 0]
low, mid, high = n_eff.quantile(torch.tensor([0.05, 0.5, 0.95]), dim=1)
fig, ax = plt.subplots()
ax.plot(sharpness, mid, color=COLOUR["posterior"], label="median")
ax.fill_between(sharpness, low, high, color=COLOUR["posterior"], alpha=0.2, linewidth=0)
for bound, x, y, name in ((1, 0.1, 1.3, "one key"), (16, 12, 15, "all keys")):
    ax.axhline(bound, color=COLOUR["prior"], linestyle="--")
    ax.text(x, y, name, fontsize=8)
ax.set(xscale="log", yticks=[1, 4, 8, 12, 16], xlabel="sharpness: standard deviation of the logits [1]", ylabel="effective sample size n [keys]")
plt.show()

# %% [markdown]
# And the definition keeps its promise: the variance of a weighted mean of equally noisy neighbours is $\sigma^2/n$, whatever the weights look like (@fig-neff-variance).

# %%
#| label: fig-neff-variance
#| fig-cap: "The variance of a weighted mean depends on its weights through n only: 60 random weight vectors over 4 to 64 keys, variance over 4,000 draws of noise with σ = 1 (crosses), and 1/n (line)."
#| code-fold: true
gen = torch.Generator().manual_seed(1)
noise = torch.randn(4000, 64, generator=gen)
points = []
for i in range(60):
    T = 4 * 2 ** (i % 5)
    wi = (3 * torch.rand(1, generator=gen) * torch.randn(T, generator=gen)).softmax(-1)
    points.append((effective_sample_size(wi), (noise[:, :T] @ wi).var()))
seen, measured = torch.tensor(points).T
fig, ax = plt.subplots()
ax.plot(seen, measured, "x", color=COLOUR["observation"], label="simulated")
ax.plot([1, 64], [1, 1 / 64], color=COLOUR["posterior"], label="σ²/n")
ax.set(xscale="log", yscale="log", xlabel="effective sample size n [keys]", ylabel="variance of the mean [°C²]")
ax.legend()
plt.show()

# %% [markdown]
# ## What geostatistics would add
#
# Kriging proper does not assume independent neighbours. A covariance function gives the covariance matrix $C$ of the neighbours and the covariance $c$ of each neighbour with the target [@cressie1993].
# *Ordinary* kriging does not know the mean, and asks for unbiasedness as we do. With a vector of ones $\mathbf 1$ its weights are
#
# $$ w = C^{-1}\left(c + \mathbf 1\, \frac{1 - \mathbf 1^\top C^{-1} c}{\mathbf 1^\top C^{-1} \mathbf 1}\right) . \tag{10.10} $$
#
# *Simple* kriging knows the mean, drops the constraint and uses $w = C^{-1} c$ on the deviations from it.
# Kriging *of the mean* sets $c = 0$: nothing ties the target to one neighbour more than to another, and only the noise tells them apart.


# %%
#| exports
def ordinary_kriging_weights(
    cov: Float[Tensor, "*batch j j"],  # $C$, covariance of the neighbours, [v²]
    cov_target: Float[Tensor, "*batch j"] | None = None,  # $c$, covariance with the target, [v²]; None = kriging of the mean
) -> Float[Tensor, "*batch j"]:  # $w$, sums to one, may be negative, [1]
    """The weights of ordinary kriging with a full covariance, equation (10.10) [@cressie1993].

    Raises `ValueError` unless the covariance is symmetric and positive definite.
    """
    if cov.dim() < 2 or not cov.shape[-1] or cov.shape[-1] != cov.shape[-2]:
        raise ValueError(f"cov must be square with at least one neighbour, got shape {tuple(cov.shape)}")
    factor, failed = torch.linalg.cholesky_ex(cov)
    if failed.any() or not torch.allclose(cov, cov.mT):
        raise ValueError(f"cov must be symmetric and positive definite, got {cov.tolist()}")
    one = torch.ones_like(cov[..., 0])
    right = torch.stack([one, torch.zeros_like(one) if cov_target is None else cov_target], -1)
    inv_one, inv_target = torch.cholesky_solve(right, factor).unbind(-1)
    return inv_target + inv_one * ((1 - inv_target.sum(-1)) / inv_one.sum(-1)).unsqueeze(-1)


# %% [markdown]
# Stationarity of the Lagrangian reads $C w - c = \eta \mathbf 1$, and (10.10) satisfies it together with the constraint. SymPy shows it for two neighbours with any covariances:

# %%
s1, s2, rho, c1, c2 = sp.symbols("s_1 s_2 rho c_1 c_2", positive=True)
C, c, one = sp.Matrix([[s1, rho], [rho, s2]]), sp.Matrix([c1, c2]), sp.ones(2, 1)
general = C.inv() * (c + one * (1 - (one.T * C.inv() * c)[0]) / (one.T * C.inv() * one)[0])
residue = C * general - c
prove(residue[0] - residue[1]), prove(sum(general) - 1)

# %%
sp_args = (s1, s2, rho, c1, c2)
# positive definite at every random point: the variances are shifted up by 5
shifted_up = sp.simplify(general[0].subs({s1: s1 + 5, s2: s2 + 5}, simultaneous=True))
two_by_two = lambda a, b, r: torch.stack([a + 5, r, r, b + 5], -1).reshape(-1, 2, 2)
assert_same(shifted_up, sp_args, lambda a, b, r, x, y: ordinary_kriging_weights(two_by_two(a, b, r), torch.stack([x, y], -1))[:, 0])

# %% [markdown]
# Independent neighbours are a *diagonal* $C$ with entries $\sigma^2/p_j$, which geostatistics calls a pure nugget effect: measurement noise and no spatial structure. Then (10.10) with $c = 0$ is our (10.2):

# %%
torch.testing.assert_close(ordinary_kriging_weights(torch.diag(1 / product)), weight)

# %% [markdown]
# Simple kriging with the same nugget gives $w = C^{-1} c = 0$: it keeps the known mean and learns nothing. The token's own belief is such a mean with an uncertainty, and joining the two is the update of chapter 12.
#
# **What is lost** without the off-diagonal. Let all pairs of $T$ neighbours share a correlation $\rho$, as paraphrases of one sentence do. Equal weights remain the best, but their variance is
#
# $$ \operatorname{Var} e = \frac{\sigma^2}{T} \left(1 + (T - 1) \rho\right) \;\to\; \rho\, \sigma^2 \quad (T \to \infty) , \tag{10.11} $$
#
# and not $\sigma^2/T$ (@fig-correlated): any number of copies of one opinion are worth fewer than $1/\rho$ opinions.

# %%
C3 = sigma**2 * sp.Matrix(3, 3, lambda i, j: 1 if i == j else rho)
mean3 = C3.inv() * sp.ones(3, 1) / (sp.ones(1, 3) * C3.inv() * sp.ones(3, 1))[0]
[prove(x - sp.Rational(1, 3)) for x in mean3]

# %%
prove((mean3.T * C3 * mean3)[0] - sigma**2 / 3 * (1 + 2 * rho))

# %%
#| label: fig-correlated
#| fig-cap: "Correlated neighbours are over-counted: the variance that independence claims (dashed) falls without end, the true variance of the same mean stops at ρσ² (σ = 1)."
#| code-fold: true
T = torch.arange(1, 257)
fig, ax = plt.subplots()
ax.plot(T, 1 / T, "--", color=COLOUR["prior"], label="claimed: ρ = 0")
for r, role in ((0.03, "posterior"), (0.3, "baseline")):
    ax.plot(T, (1 + (T - 1) * r) / T, color=COLOUR[role], label=f"true: ρ = {r}")
ax.set(xscale="log", yscale="log", xlabel="neighbours T [keys]", ylabel="variance of the mean [°C²]")
ax.legend()
plt.show()

# %% [markdown]
# ## How it fails
#
# A precision of zero or less is refused where it enters, and so is a mask of the wrong type or shape:

# %%
test_fail(lambda: kriging_weights(torch.zeros(1, 2), torch.tensor([1.0, 0.0])), contains="lam_bar must be positive")
test_fail(lambda: kriging_variance(torch.ones(1, 1), torch.tensor([-1.0])), contains="got -1.0")

# %%
test_fail(lambda: kriging_weights(torch.zeros(1, 2), torch.ones(2), torch.ones(1, 2)), contains="must be boolean")
test_fail(lambda: kriging_weights(torch.zeros(1, 2), torch.ones(2), torch.ones(3, dtype=torch.bool)), contains="does not broadcast")
test_fail(lambda: ordinary_kriging_weights(torch.ones(2, 2)), contains="positive definite")

# %% [markdown]
# A query that may see nothing has no estimate. Its weights are zero, its effective sample size is zero and its variance is infinite; nothing is NaN, and neither is a gradient:

# %%
blind = torch.zeros(1, 3, requires_grad=True)
nothing = kriging_weights(blind, reliability, torch.zeros(3, dtype=torch.bool))
nothing, effective_sample_size(nothing), kriging_variance(nothing, reliability)

# %%
torch.testing.assert_close(torch.autograd.grad(nothing.sum(), blind)[0], torch.zeros(1, 3))

# %% [markdown]
# **A tiny precision is not a mask.** As the reliability of one key goes to zero, its weight goes to zero but $w_j/\bar\lambda_j = \alpha_j / \sum_{j'} \alpha_{j'} \bar\lambda_{j'}$ does not:
# the key still takes its share of the relevance, and the claimed variance is wrong by the factor $1/(1 - \alpha_j)$. SymPy shows it with the third key fading:

# %%
fading = sp.limit(left.subs(unit), lams[2], 0)
seen_only = (alphas[0] + alphas[1]) / (alphas[0] * lams[0] + alphas[1] * lams[1])
prove(fading * (alphas[0] + alphas[1]) - seen_only)

# %%
faint = torch.tensor([1.0, 4.0, 1e-6])
masked = kriging_weights(relevance.log()[None], faint, torch.tensor([True, True, False]))
unmasked = kriging_weights(relevance.log()[None], faint)
kriging_variance(unmasked, faint) / kriging_variance(masked, faint)

# %% [markdown]
# A relevance of 0.2 inflates the variance by the factor $1/0.8 = 1.25$. Padding is therefore a real mask throughout the library.
#
# ## Assumptions, and where they break
#
# - *Independent neighbours*: @fig-correlated shows the price.
# - *One mean*: $\operatorname{E} v_j = \mu$ for all keys in view. Attention mixes different contents on purpose, and their differences then count as noise (chapter 11 measures it).
# - *One reliability per key*: $\bar\lambda_j$ averages over features **[P]**; a key known well in some features and badly in others is treated as middling in all.
# - *Units*: $\bar\lambda$ is a precision of the residual stream, [h⁻²], used for values that went through the value projection. The factor between the two units cancels in the weights but not in $s_0^2$, which serves as a prior only (chapter 11) **[D]**.
#
# ## Summary
#
# - Kriging weights are $\operatorname{softmax}(\ell + \log\bar\lambda)$: the unique minimum-variance unbiased weights for independent neighbours with variance $\sigma^2/(\alpha_j \bar\lambda_j)$.
# - Their variance is free, $s_0^2 = \sum_j w_j/\bar\lambda_j = 1/\sum_j \alpha_j \bar\lambda_j$, and Kish's $n = 1/\sum_j w_j^2$, between 1 and $T$, says how many neighbours were seen.
# - Correlation between neighbours is ignored, and a tiny precision is not a mask.
#
# ## Exercises
#
# **1.** Multiply every reliability by a constant $c > 0$. What happens to $w$, to $s_0^2$ and to $n$?
#
# <details><summary>Answer</summary>
#
# The weights and $n$ stay as they are; $s_0^2$ is divided by $c$. Kriging needs only ratios, its variance needs the unit.

# %%
times = sp.Symbol("c", positive=True)
scaled = {lam: times * lam for lam in lams}
[prove(f.subs(scaled, simultaneous=True) - f) for f in formula], prove((1 / total).subs(scaled, simultaneous=True) * times - 1 / total)

# %% [markdown]
# </details>
#
# **2.** Replace one neighbour by two identical copies of half its relevance. Which of $e$, $s_0^2$ and $n$ notices?
#
# <details><summary>Answer</summary>
#
# Only $n$, which counts keys and not information: another face of correlated neighbours.

# %%
split = torch.tensor([0, 0, 1, 2])
copies = kriging_weights(torch.tensor([0.25, 0.25, 0.3, 0.2]).log()[None], reliability[split])
torch.testing.assert_close(kriging_mean(copies, value[split, None]), e)
torch.testing.assert_close(kriging_variance(copies, reliability[split]), s2_0)
effective_sample_size(w), effective_sample_size(copies)

# %% [markdown]
# </details>
#
# **3.** Two measurements of one quantity: a belief $h$ with precision $\lambda$ and an observation $z$ with precision $\lambda_{\text{obs}}$. Which weight does kriging give to the observation?
#
# <details><summary>Answer</summary>
#
# $\lambda_{\text{obs}}/(\lambda + \lambda_{\text{obs}})$, the Kalman gain $K$ of chapter 12. Their equal relevance cancels:

# %%
lam, lam_obs = sp.symbols("lambda lambda_obs", positive=True)
gain = [f.subs(dict(zip((*alphas, *lams), (1, 1, 0, lam, lam_obs, 1), strict=True))) for f in formula][1]
prove(gain - lam_obs / (lam + lam_obs))

# %% [markdown]
# </details>
