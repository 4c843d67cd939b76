# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # REML with a conjugate prior
#
# > How much the neighbours disagree, corrected for the mean they share, joined with what they claim: the precision of an observation.

# %%
#| default_exp reml

# %% [markdown]
# **So far** kriging gave an estimate $e$, the variance $s_0^2$ it *claims*, and the effective sample size $n$. **Now** we look at what the neighbours *do*: do they agree?
# **Why**: the update of chapter 12 needs the precision $\lambda_{\text{obs}}$ of the observation, and claims alone would never notice that three confident neighbours say three different things.
#
# The paper estimates the variance by REML, restricted maximum likelihood, under a scaled inverse-$\chi^2$ prior, without free parameters, and writes the residual sum as an expanded square **[P]**.
# The exact form below is ours **[D]**, each choice with its reason and its alternative.

# %%
#| exports
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bft_nb.core import at_hand, check_positive, wide_dtype

# %%
import matplotlib.pyplot as plt
import pandas as pd
import sympy as sp
from fastcore.test import test_fail
from scipy import stats

from bft_nb.figures import COLOUR, use_style
from bft_nb.kriging import effective_sample_size, kriging_mean, kriging_variance, kriging_weights
from bft_nb.symbolic import assert_same, prove

# %% [markdown]
# ## Three thermometers that disagree
#
# The hut of chapter 10 once more: the estimate was 20.46 °C with a claimed variance of 0.57 °C². The squared deviations from that estimate, weighted, are evidence of their own [°C²]:

# %%
use_style()
v = torch.tensor([[20.0], [20.5], [24.0]])  # (keys, one value feature), [°C]
lam_bar = torch.tensor([1.0, 4.0, 0.25])  # [°C⁻²]
w = kriging_weights(torch.tensor([[0.5, 0.3, 0.2]]).log(), lam_bar)  # (one query, keys)
e = kriging_mean(w, v)
(w @ (v - e) ** 2).item()

# %% [markdown]
# ## The scatter, without a third axis
#
# Claim. The weighted scatter around the kriging mean,
#
# $$ S = \sum_j w_j (v_j - e)^2 = \sum_j w_j v_j^2 - e^2 , \tag{11.1} $$
#
# needs no tensor over query × key × feature: its *expanded square* on the right is one more product with the attention weights **[P]**. Proof with three keys and $\sum_j w_j = 1$:

# %%
v1, v2, v3 = vs = sp.symbols("v_1:4", real=True)
w1, w2 = sp.symbols("w_1 w_2", positive=True)
ws = (w1, w2, 1 - w1 - w2)
mean = sum(a * x for a, x in zip(ws, vs, strict=True))
S = sum(a * (x - mean) ** 2 for a, x in zip(ws, vs, strict=True))

# %%
expanded = sum(a * x**2 for a, x in zip(ws, vs, strict=True)) - mean**2
prove(S - expanded)

# %% [markdown]
# The expanded square is a difference, but it is not negative as long as the weights are not: it equals a sum over pairs in which no mean appears,
#
# $$ S = \sum_{i<j} w_i w_j (v_i - v_j)^2 \ge 0 , \tag{11.2} $$
#
# and since only differences of values enter, adding one constant to all values changes nothing (*shift invariance*).

# %%
prove(S - sum(ws[i] * ws[j] * (vs[i] - vs[j]) ** 2 for j in range(3) for i in range(j)))

# %%
shift = sp.Symbol("shift", real=True)
prove(expanded.subs({x: x + shift for x in vs}, simultaneous=True) - expanded)


# %%
#| exports
def common_value(
    v: Float[Tensor, "*batch j k"],  # $v$, values of the keys, [v]
    sees: Bool[Tensor, "*#batch #t j"],  # which keys each query sees
) -> Float[Tensor, "..."]:  # one value for all keys and queries of a batch entry, (*batch, 1, k), without gradient, [v]
    "The value of the first key that every query sees which sees any: a shift from which none learns of a key it cannot see. 0 if there is no such key."
    if not v.shape[-2]:
        return v.new_zeros(())
    common = (sees | ~sees.any(-1, keepdim=True)).all(-2, keepdim=True) & sees.any(-2, keepdim=True)
    first = common.to(torch.uint8).argmax(-1, keepdim=True)
    return torch.where(common.any(-1, keepdim=True), v.detach().gather(-2, first.expand(*v.shape[:-2], 1, v.shape[-1])), 0)


# %% [markdown]
# In a causal mask the first key is common; two texts packed into one row have none:

# %%
packed = torch.block_diag(torch.ones(1, 1), torch.ones(2, 2)).bool()
common_value(v, torch.ones(3, 3).tril().bool()), common_value(v, packed)


# %%
#| exports
def scatter(
    w: Float[Tensor, "*batch t j"],  # $w$, weights, rows sum to one (or are all zero), [1]
    v: Float[Tensor, "*#batch j k"],  # $v$, values of the keys, [v]
    shift: Float[Tensor, "*#batch 1 #k"] | None = None,  # subtracted from $v$ first, [v]; None = the first key
) -> Float[Tensor, "*batch t k"]:  # $S \\ge 0$, float32 or wider, [v²]
    """The weighted scatter $S = \\sum_j w_j v_j^2 - (\\sum_j w_j v_j)^2$, the expanded square (11.1) [@bft2026].

    The shift leaves $S$ as it is and keeps the difference from cancelling; rounding below zero is cut off at zero.
    Raises `ValueError` for a shift that differs from key to key.
    """
    shift = v[..., :1, :] if shift is None else shift
    if shift.dim() < 2 or shift.shape[-2] != 1:
        raise ValueError(f"shift must be the same for all keys, of shape (…, 1, k), got {tuple(shift.shape)}")
    wide = wide_dtype(w, v)
    w, v = w.to(wide), v.to(wide) - shift.detach().to(wide)
    return (w @ v.square() - (w @ v).square()).clamp_min(0)


# %%
scatter(w, v)

# %% [markdown]
# The library against formula (11.1), as a function of three unnormalised weights and three values:

# %%
ps = sp.symbols("p_1:4", positive=True)
normal = dict(zip((w1, w2), (p / sum(ps) for p in ps), strict=False))


# %%
def one_feature(*x: Tensor) -> Tensor:  # six tensors (n,) as weights (n, 1, 3) and values (n, 3, 1)
    p, values = torch.stack(x[:3], -1), torch.stack(x[3:], -1)
    return scatter((p / p.sum(-1, keepdim=True)).unsqueeze(-2), values.unsqueeze(-1))[:, 0, 0]


# %%
assert_same(expanded.subs(normal), (*ps, *vs), one_feature)

# %% [markdown]
# ### Why the shift
#
# In floating point the difference $\sum_j w_j v_j^2 - e^2$ loses the digits its two terms share: about $2 \log_{10}(\text{mean}/\text{sd})$ of the seven that float32 has.
# Subtracting any constant near the values first costs nothing and restores them. We take the first key: with a mean over all keys, rounding in a causal model would depend on the future. The table and @fig-cancellation show what the shift is worth.


# %%
def relative_error(ratio: float, shift: Tensor | None = None) -> float:  # of S in float32, values with this mean and sd 1
    gen = torch.Generator().manual_seed(0)
    values = ratio + torch.randn(64, 256, generator=gen, dtype=torch.float64)
    weights = torch.randn(16, 64, generator=gen, dtype=torch.float64).softmax(-1)
    want, got = scatter(weights, values), scatter(weights.float(), values.float(), shift)
    return ((got - want) / want).abs().max().item()


# %%
zero = torch.zeros(1, 1)
rows = [(r, relative_error(r, zero), relative_error(r)) for r in (0, 30, 300)]
pd.DataFrame(rows, columns=["mean / sd", "error, no shift", "error, first key as shift"]).map("{:.0e}".format)

# %%
#| label: fig-cancellation
#| fig-cap: "A shift by the first key removes the cancellation: largest relative error of S in float32 over 16 queries × 256 features, values with standard deviation 1."
#| code-fold: true
ratios = torch.logspace(0, 3.5, 15)
fig, ax = plt.subplots()
ax.plot(ratios, [relative_error(r.item(), zero) for r in ratios], color=COLOUR["baseline"], label="expanded square as it stands")
ax.plot(ratios, [relative_error(r.item()) for r in ratios], color=COLOUR["posterior"], label="shifted by the first key")
ax.set(xscale="log", yscale="log", xlabel="mean / standard deviation of the values [1]", ylabel="relative error of S [1]")
ax.legend()
plt.show()

# %% [markdown]
# The shifted error rises slowly at the right end, where the float32 *values themselves* no longer hold the digits; no formula can restore those.
# At the left end the shift costs up to one digit, when the first key happens to be an outlier.
#
# ## What the scatter estimates
#
# Claim. Let the values be independent with one mean $\mu$ and one variance $\sigma^2$. Then
#
# $$ \operatorname{E} S = \sigma^2 \Big(1 - \sum_j w_j^2\Big) = \sigma^2 (1 - \kappa), \qquad \kappa = 1/n . \tag{11.3} $$
#
# The scatter is too small, because $e$ was fitted to the very values it is compared with. Write $v_j = \mu + \sigma z_j$ with independent $z_j$ of mean 0 and variance 1, and take expectations one $z_j$ at a time:

# %%
mu = sp.Symbol("mu", real=True)
sigma = sp.Symbol("sigma", positive=True)
zs = sp.symbols("z_1:4", real=True)
MOMENTS = (1, 0, 1, 0, 3)  # E z⁰ … E z⁴ of a standard normal


# %%
def expect(expr: sp.Expr, variables: tuple = zs) -> sp.Expr:  # expectation of a polynomial in independent z
    for z in variables:
        expr = sum(c * MOMENTS[power] for (power,), c in sp.Poly(sp.expand(expr), z).terms())
    return sp.expand(expr)


# %%
noisy = dict(zip(vs, (mu + sigma * z for z in zs), strict=True))
kappa_3 = sum(a**2 for a in ws)
prove(expect(S.subs(noisy)) - sigma**2 * (1 - kappa_3))

# %% [markdown]
# Dividing by the missing factor makes the estimate unbiased:
#
# $$ s^2_{\text{REML}} = \frac{S}{1 - 1/n} . \tag{11.4} $$
#
# With $T$ equal weights $n = T$ and this is the familiar sum of squares over $T - 1$. @fig-bias compares the two estimates in a simulation.


# %%
#| exports
def _check_at_least(count: Tensor, least: float, what: str) -> None:
    bad = ~(count >= least)
    if at_hand(count) and bad.any():
        raise ValueError(f"{what}, got {count[bad][0].item()}")


# %%
#| exports
def reml_variance(
    S: Float[Tensor, "*#shape"],  # $S$, from `scatter`, [v²]
    n_eff: Float[Tensor, "*#shape"],  # $n$, effective sample size, above 1, [1]
) -> Float[Tensor, "*shape"]:  # $s^2_{\text{REML}}$, variance of one value, [v²]
    """The unbiased (restricted maximum likelihood) variance $S/(1 - 1/n)$, equation (11.4) [@patterson1971].

    Raises `ValueError`, on a CPU, unless $n > 1$: one value has no scatter. `posterior_scale` has an answer there.
    """
    _check_at_least(n_eff, 1 + 1e-6, "n_eff must be above 1 (one value has no scatter)")
    return S / (1 - 1 / n_eff)


# %%
n_eff = effective_sample_size(w)[..., None]  # a last axis for the features
reml_variance(scatter(w, v), n_eff)

# %%
S_, n_ = sp.symbols("S n", positive=True)
assert_same(S_ / (1 - 1 / n_), (S_, n_), reml_variance, lo=1.1)

# %%
#| label: fig-bias
#| fig-cap: "Restricting removes the bias: mean of S (maximum likelihood) and of S/(1 − 1/n) (REML) over 20,000 draws with σ² = 1, for 16 keys and softmax weights of rising sharpness. Bars: ± 2 standard errors, mostly smaller than the dots."
#| code-fold: true
gen = torch.Generator().manual_seed(0)
logits, noise = torch.randn(16, generator=gen), torch.randn(16, 20000, generator=gen)
weights = torch.stack([(s * logits).softmax(-1) for s in torch.logspace(-1, 1, 14)])
n_sim = effective_sample_size(weights)
draws = scatter(weights, noise)
fig, ax = plt.subplots()
for x, name, role in ((draws, "ML: S", "baseline"), (reml_variance(draws, n_sim[:, None]), "REML: S/(1 − 1/n)", "posterior")):
    ax.errorbar(n_sim, x.mean(1), 2 * x.std(1) / 20000**0.5, fmt="o", markersize=4, color=COLOUR[role], label=name)
fine = torch.linspace(1, 16, 200)
ax.plot(fine, 1 - 1 / fine, "--", color=COLOUR["prior"], label="1 − 1/n")
ax.axhline(1, color=COLOUR["truth"], linestyle="--", label="truth")
ax.set(xlabel="effective sample size n [keys]", ylabel="estimated variance [σ²]", ylim=(0, 1.15))
ax.legend(loc="lower right")
plt.show()

# %% [markdown]
# ## Why "restricted"
#
# Unbiasedness is one road to (11.4). The likelihood is another, and it shows how many *degrees of freedom* the data leave. The weights can be read in two ways, and the two readings give two answers **[D]**.
#
# ### Reading 1: precision weights
#
# The kriging model (10.3): $v_j \sim N(\mu, \sigma^2/p_j)$, $p_j = \alpha_j \bar\lambda_j$. Let $P = \sum_j p_j$ and $Q_e = \sum_j p_j (v_j - e)^2 = P S$. The sum of squares around any $\mu$ splits into one around $e$ and the rest:

# %%
P = sum(ps)
e_p = sum(p * x for p, x in zip(ps, vs, strict=True)) / P
Q_e = sum(p * (x - e_p) ** 2 for p, x in zip(ps, vs, strict=True))
around_mu = sum(p * (x - mu) ** 2 for p, x in zip(ps, vs, strict=True))
prove(around_mu - (P * (mu - e_p) ** 2 + Q_e))

# %% [markdown]
# Maximum likelihood replaces $\mu$ by $e$ and forgets that it was fitted. REML integrates $\mu$ out [@patterson1971], which contributes one factor:

# %%
s2, Ps, Qs, e_ = sp.symbols("sigma2 P Q_e e", positive=True)
lost = sp.integrate(sp.exp(-Ps * (mu - e_) ** 2 / (2 * s2)), (mu, -sp.oo, sp.oo))
prove(lost - sp.sqrt(2 * sp.pi * s2 / Ps))

# %% [markdown]
# Of the $T$ normal densities each gives $-\tfrac12\log\sigma^2$; the integral gives one $+\tfrac12\log\sigma^2$ back. Up to constants, with $\sigma^2$ written `sigma2`:

# %%
T = sp.Symbol("T", positive=True)
likelihood = -T / 2 * sp.log(s2) - Qs / (2 * s2)  # with μ = e
restricted = likelihood + sp.log(s2) / 2  # with μ integrated out
ml, reml = (sp.solve(sp.diff(f, s2), s2)[0] for f in (likelihood, restricted))
ml, reml

# %%
prove(reml - Qs / (T - 1))

# %% [markdown]
# So $\sigma^2$ is estimated with $T - 1$ degrees of freedom, and with $Q_e = P S$ the variance of the kriging mean, $\operatorname{Var} e = \sigma^2/P$, becomes
#
# $$ \operatorname{Var} e = \frac{S}{T - 1} . \tag{11.5} $$
#
# This estimate is unbiased as well, whatever the $p_j$:

# %%
by_precision = dict(zip(vs, (mu + sigma * z / sp.sqrt(p) for z, p in zip(zs, ps, strict=True)), strict=True))
prove(expect(Q_e.subs(by_precision)) - 2 * sigma**2)


# %%
#| exports
def reml_mean_variance(
    S: Float[Tensor, "*#shape"],  # $S$, from `scatter`, [v²]
    keys: Float[Tensor, "*#shape"],  # $T$, number of visible keys, above 1, [1]
) -> Float[Tensor, "*shape"]:  # Var $e$, [v²]
    """The REML variance $S/(T - 1)$ of the kriging mean under precision weights, equation (11.5) [@patterson1971].

    Raises `ValueError`, on a CPU, unless $T > 1$.
    """
    _check_at_least(keys, 1 + 1e-6, "keys must be above 1")
    return S / (keys - 1)


# %%
assert_same(S_ / (T - 1), (S_, T), reml_mean_variance, lo=1.1)

# %% [markdown]
# ### Reading 2: reliability weights
#
# The weights say *which* keys belong to the neighbourhood: $v_j \sim N(\mu, \sigma^2)$, and key $j$ counts as $n w_j$ observations, $n$ in total. Its log-density enters $n w_j$ times; the exponents sum to $n$ where they summed to $T$,
# and the sum of squares is $n \sum_j w_j (v_j - \mu)^2 = n (\mu - e)^2 + n S$. The same algebra with $T \to n$, $P \to n$ and $Q_e \to n S$:

# %%
by_reliability = reml.subs({T: n_, Qs: n_ * S_})
prove(by_reliability - S_ / (1 - 1 / n_))

# %% [markdown]
# This is (11.4), with $n - 1$ degrees of freedom. For equal weights on some keys and zero on the others it is exact: REML on those keys, $n$ of them. For weights in between it is a power likelihood, an interpolation.
#
# ### Which one?
#
# **Our choice [D]** is the second. The paper's gain follows the effective sample size, and $T$ counts every key, however irrelevant: a softmax over 1,000 keys that looks at three of them has seen three.

# %%
wide = torch.cat([torch.zeros(3), torch.full((997,), -12.0)])  # three keys stand out
looks = wide.softmax(-1)
effective_sample_size(looks)

# %% [markdown]
# There is a second reason: reading 2 errs on the safe side. Reading 2 puts $\operatorname{Var} e = s^2_{\text{REML}}/n = \kappa S/(1 - \kappa)$. If reading 1 is true, $\operatorname{E} S = (T - 1)\,\sigma^2/P$ while the true variance is $\sigma^2/P$:
# the variance of reading 2 is too *large*, by the factor
#
# $$ \frac{T - 1}{n - 1} \ge 1 . $$
#
# If reading 2 is true, $\operatorname{E} S = \sigma^2(1 - \kappa)$ and the true variance is $\kappa\sigma^2$: that of reading 1 is too *small*, by the inverse of the same factor. The cautious error costs some gain (chapter 12); the other makes a token overconfident.

# %%
scatter_1, scatter_2 = (T - 1) * s2 / Ps, s2 * (1 - 1 / n_)  # E S if reading 1, 2 is true
by_2 = scatter_1 / n_ / (1 - 1 / n_) / (s2 / Ps)
by_1 = scatter_2 / (T - 1) / (s2 / n_)
prove(by_2 - (T - 1) / (n_ - 1)), prove(by_1 - (n_ - 1) / (T - 1))

# %% [markdown]
# Reading 1 remains as the option `keys` of `observation_variance` below, to be compared in experiments.

# %% [markdown]
# ## One value has no scatter: the prior
#
# The first token of a causal model sees itself only: $n = 1$, $S = 0$, and (11.4) is $0/0$. This is what the prior is for. The conjugate prior of a normal variance is the *scaled inverse-$\chi^2$* [@gelman2013],
#
# $$ \sigma^2 \sim \text{Scaled-Inv-}\chi^2(\nu_0, s_0^2), \qquad \log p(\sigma^2) = -\left(\tfrac{\nu_0}{2} + 1\right) \log \sigma^2 - \frac{\nu_0 s_0^2}{2 \sigma^2} + \text{const} : \tag{11.6} $$
#
# $\nu_0$ imaginary observations with scatter $s_0^2$.


# %%
def log_prior(nu: sp.Expr, scale: sp.Expr) -> sp.Expr:  # of σ², without its constant
    return -(nu / 2 + 1) * sp.log(s2) - nu * scale / (2 * s2)


# %% [markdown]
# Claim. Prior times restricted likelihood (reading 2) is again scaled inverse-$\chi^2$, with
#
# $$ \nu_0 + n - 1 \;\text{ degrees of freedom and scale }\; s^2_{\text{post}} = \frac{\nu_0 s_0^2 + n S}{\nu_0 + n - 1} . \tag{11.7} $$
#
# The log-densities differ by a constant, so their difference has derivative zero:

# %%
nu0, s2_0 = sp.symbols("nu0 s2_0", positive=True)
evidence = restricted.subs({T: n_, Qs: n_ * S_})
s2_post = (nu0 * s2_0 + n_ * S_) / (nu0 + n_ - 1)
prove(sp.diff(log_prior(nu0, s2_0) + evidence - log_prior(nu0 + n_ - 1, s2_post), s2))


# %%
#| exports
def posterior_scale(
    S: Float[Tensor, "*#shape"],  # $S$, from `scatter`, [v²]
    n_eff: Float[Tensor, "*#shape"],  # $n$, effective sample size, at least 1, [1]
    s2_0: Float[Tensor, "*#shape"],  # $s_0^2$, prior scale, from `kriging_variance`, [v²]
    nu0: float = 1.0,  # $\nu_0$, prior degrees of freedom, [1]
) -> Float[Tensor, "*shape"]:  # $s^2_{\text{post}}$, [v²]
    """The scale $(\\nu_0 s_0^2 + n S)/(\\nu_0 + n - 1)$ of the posterior of σ², equation (11.7) [@gelman2013].

    Raises `ValueError` for $\\nu_0 \\le 0$ and, on a CPU, for $n < 1$ (a query that sees no key has no posterior of this form).
    """
    check_positive("nu0", nu0)
    _check_at_least(n_eff, 1 - 1e-3, "n_eff must be at least 1")
    return (nu0 * s2_0 + n_eff * S) / (nu0 + n_eff - 1)


# %%
claimed = kriging_variance(w, lam_bar)[..., None]
posterior_scale(scatter(w, v), n_eff, claimed)

# %%
n_above_1 = lambda S, n, s2_0: posterior_scale(S, n + 1, s2_0)
assert_same(s2_post.subs({nu0: 1, n_: n_ + 1}), (S_, n_, s2_0), n_above_1)

# %% [markdown]
# The thermometers claimed 0.57 and scattered by 0.42; the posterior scale lies higher than both, since the scatter is corrected for the fitted mean (@fig-posterior).

# %%
#| label: fig-posterior
#| fig-cap: "The thermometers disagree more than they claim, and the variance of a neighbour moves up: prior and posterior density, dotted their scales s²."
#| code-fold: true
x = torch.linspace(0.01, 3, 300)
nu_post = n_eff.item()  # ν₀ + n − 1 with ν₀ = 1
scale_post = posterior_scale(scatter(w, v), n_eff, claimed).item()
fig, ax = plt.subplots()
for nu, scale, role in ((1.0, claimed.item(), "prior"), (nu_post, scale_post, "posterior")):
    ax.plot(x, stats.invgamma(nu / 2, scale=nu * scale / 2).pdf(x), color=COLOUR[role], label=f"{role}: ν = {nu:.1f}, s² = {scale:.2f} °C²")
    ax.axvline(scale, color=COLOUR[role], linestyle=":")
ax.set(xlabel="variance of a neighbour σ² [°C²]", ylabel="density [°C⁻²]", ylim=(0, None))
ax.legend()
plt.show()

# %% [markdown]
# ## The posterior mean of the precision
#
# Claim. If $\sigma^2 \sim \text{Scaled-Inv-}\chi^2(\nu, s^2)$, then $\operatorname{E}[1/\sigma^2] = 1/s^2$ exactly. The precision $\theta = 1/\sigma^2$ has the density $\theta^{\nu/2 - 1} e^{-\nu s^2 \theta/2}$, a gamma law:

# %%
theta, nu, scale = sp.symbols("theta nu s2", positive=True)
density = theta ** (nu / 2 - 1) * sp.exp(-nu * scale * theta / 2)
norm, first = (sp.integrate(f, (theta, 0, sp.oo)) for f in (density, theta * density))
prove(sp.gammasimp(first / norm) - 1 / scale)

# %% [markdown]
# The mean precision is also the right thing to ask for: filters add precisions, and the mean of the *variance*, $\nu s^2/(\nu - 2)$, does not exist for $\nu \le 2$, the case of a token with few neighbours.
#
# ## The precision of an observation
#
# The kriging mean has $\operatorname{Var} e = \sigma^2 \sum_j w_j^2 = \sigma^2/n$ (10.7), so its expected precision is
#
# $$ \lambda_{\text{obs}} = \frac{n}{s^2_{\text{post}}} . \tag{11.8} $$
#
# **Parameter free.** Two constants remain to be fixed, since the paper has none to tune **[P]**. Our choice **[D]** for the first is $\nu_0 = 1$, a prior worth one observation (a *unit-information* prior [@kass1995]). It decides while there is one neighbour, is outvoted by a few,
# and is the one value for which the division below disappears. For the second it is $s_0^2 = \sum_j w_j/\bar\lambda_j$ (10.6), the mean of the variances that the neighbours claim, so that the tracked precision enters as a prior and the scatter may correct it. ($s_0^2$ comes in [h²] and is read as [v²]; see the assumptions.)
# Alternatives: $\nu_0 = 0$ (Jeffreys) has no answer at $n = 1$; $\nu_0 \to \infty$ believes the claims and ignores the scatter; a learned $\nu_0$ per layer is possible, but is a parameter.
#
# **Closed form [D].** In $\kappa = 1/n = \sum_j w_j^2$, which a kernel accumulates anyway, the variance of the observation is
#
# $$ \frac{1}{\lambda_{\text{obs}}} = \frac{\kappa (\nu_0 \kappa s_0^2 + S)}{\nu_0 \kappa + 1 - \kappa} \;\overset{\nu_0 = 1}{=}\; \kappa (\kappa s_0^2 + S) . \tag{11.9} $$
#
# At $\nu_0 = 1$ nothing is divided: value and gradient are finite at $n = 1$.

# %%
kappa = sp.Symbol("kappa", positive=True)
lam_obs = n_ / s2_post
closed = kappa * (nu0 * kappa * s2_0 + S_) / (nu0 * kappa + 1 - kappa)
prove(1 / lam_obs - closed.subs(kappa, 1 / n_)), prove(closed.subs(nu0, 1) - kappa * (kappa * s2_0 + S_))

# %% [markdown]
# Reading 1 estimates $\sigma_e^2 = \operatorname{Var} e = \sigma^2/P$ directly. Its restricted log-likelihood is $-\tfrac{T-1}{2}\log\sigma_e^2 - S/(2\sigma_e^2)$, and $s_0^2 = 1/P$ (at $\sigma^2 = 1$) is what the tracked precision claims for that very variance:
#
# $$ \frac{1}{\lambda_{\text{obs}}} = \frac{\nu_0 s_0^2 + S}{\nu_0 + T - 1} . \tag{11.10} $$

# %%
by_count = (nu0 * s2_0 + S_) / (nu0 + T - 1)
evidence_1 = -(T - 1) / 2 * sp.log(s2) - S_ / (2 * s2)
prove(sp.diff(log_prior(nu0, s2_0) + evidence_1 - log_prior(nu0 + T - 1, by_count), s2))


# %%
#| exports
def observation_variance(
    S: Float[Tensor, "*#shape"],  # $S$, from `scatter`, [v²]
    kappa: Float[Tensor, "*#shape"],  # $\kappa = 1/n = \sum_j w_j^2$, at most 1, [1]
    s2_0: Float[Tensor, "*#shape"],  # $s_0^2$, prior scale, from `kriging_variance`, [v²]
    nu0: float = 1.0,  # $\nu_0$, prior degrees of freedom, [1]
    keys: Float[Tensor, "*#shape"] | None = None,  # $T$, visible keys: read the weights as precisions, (11.10)
) -> Float[Tensor, "*shape"]:  # $1/\lambda_{\text{obs}}$, [v²]
    """The variance $\\kappa(\\nu_0 \\kappa s_0^2 + S)/(\\nu_0 \\kappa + 1 - \\kappa)$ of a kriging mean, equation (11.9), without a division at $\\nu_0 = 1$.

    Raises `ValueError` for $\\nu_0 \\le 0$ and, on a CPU, for $\\kappa$ outside (0, 1], i.e. for weights that do not sum to one, or for fewer than one key.
    """
    check_positive("nu0", nu0)
    bad = ~((kappa > 0) & (kappa <= 1 + 1e-3))
    if at_hand(kappa) and bad.any():
        raise ValueError(f"kappa must lie in (0, 1], got {kappa[bad][0].item()}: the weights must sum to one and see a key")
    if keys is not None:
        _check_at_least(keys, 1.0, "keys must be at least 1")
        return (nu0 * s2_0 + S) / (nu0 + keys - 1)
    variance = kappa * (nu0 * kappa * s2_0 + S)
    return variance if nu0 == 1 else variance / (nu0 * kappa + 1 - kappa)


# %%
kappa_hut = w.square().sum(-1, keepdim=True)
1 / observation_variance(scatter(w, v), kappa_hut, claimed)

# %% [markdown]
# An observation of 20.46 °C with precision 2.5 °C⁻², a variance of 0.41 °C². Why is that *less* than the 0.57 °C² claimed, although the thermometers disagree? The claim has two meanings, and (10.6) proved them equal:
# as $\sum_j w_j/\bar\lambda_j$ it is what *one* neighbour claims on average, and that is the prior of $\sigma^2$ here. The posterior raises it to 0.74; averaging $n = 1.8$ neighbours then divides it by $n$.
# As $1/\sum_j \alpha_j\bar\lambda_j$ it is what the *mean* claims, and that is the prior of (11.10), which finds three thermometers in better agreement than the claim:

# %%
observation_variance(scatter(w, v), kappa_hut, claimed, keys=torch.full_like(kappa_hut, 3))

# %% [markdown]
# All three forms are checked against the code, with κ drawn from (0.1, 1):

# %%
args = (S_, kappa, s2_0)
assert_same(closed.subs(nu0, 1), args, observation_variance, hi=1.0)
assert_same(closed.subs(nu0, 3), args, lambda *x: observation_variance(*x, nu0=3.0), hi=1.0)

# %%
keys_above_1 = lambda S, s2_0, T: observation_variance(S, torch.ones_like(S), s2_0, keys=T + 1)
assert_same(by_count.subs({nu0: 1, T: T + 1}), (S_, s2_0, T), keys_above_1)

# %% [markdown]
# ## Three limits
#
# **One neighbour.** $n \to 1$ leaves the claim: $\lambda_{\text{obs}} \to 1/s_0^2$, whatever $\nu_0$ (there is no scatter, $S = 0$).

# %%
prove(sp.limit(lam_obs.subs(S_, 0), n_, 1) - 1 / s2_0)

# %%
one = torch.ones(1, requires_grad=True)
single = observation_variance(torch.zeros(1), one, torch.tensor([0.25]))
torch.testing.assert_close(single, torch.tensor([0.25]))
torch.autograd.grad(single, one)[0]

# %% [markdown]
# **Many neighbours.** $n \to \infty$ forgets the prior: $\lambda_{\text{obs}}$ approaches $n/s^2_{\text{REML}}$.

# %%
prove(sp.limit(lam_obs / (n_ / by_reliability), n_, sp.oo) - 1)

# %%
many = torch.tensor([1e6])
torch.testing.assert_close(1 / observation_variance(torch.tensor([2.0]), 1 / many, torch.tensor([0.25])), many / reml_variance(torch.tensor([2.0]), many))

# %% [markdown]
# **All values equal.** $S = 0$ and the precision stays finite: $n (\nu_0 + n - 1)/(\nu_0 s_0^2)$. Agreement earns precision like $n^2$, not infinity.

# %%
prove(lam_obs.subs(S_, 0) - n_ * (nu0 + n_ - 1) / (nu0 * s2_0))

# %%
same = scatter(torch.full((1, 4), 0.25), torch.full((4, 1), 3.0))
torch.testing.assert_close(1 / observation_variance(same, torch.tensor([[0.25]]), torch.tensor([[0.5]])), torch.tensor([[4 * 4 / 0.5]]))

# %%
#| label: fig-lambda-obs
#| fig-cap: "From claim to evidence: the precision of the observation starts at the claim 1/s₀² = 1 whatever the scatter, and ends on n/s²_REML (dashed)."
#| code-fold: true
n_axis = torch.logspace(0, 3, 100)
fig, ax = plt.subplots()
for s2_true, role in ((0.1, "truth"), (1.0, "posterior"), (10.0, "baseline")):
    S_axis = s2_true * (1 - 1 / n_axis)
    ax.plot(n_axis, 1 / observation_variance(S_axis, 1 / n_axis, torch.ones(100)), color=COLOUR[role], label=f"s²_REML = {s2_true:g}")
    ax.plot(n_axis, n_axis / s2_true, "--", color=COLOUR[role], linewidth=0.8)
ax.plot(1, 1, "o", color=COLOUR["prior"], label="claim 1/s₀²")
ax.set(xscale="log", yscale="log", xlabel="effective sample size n [keys]", ylabel="λ_obs [v⁻²]")
ax.legend()
plt.show()

# %% [markdown]
# In @fig-lambda-obs, neighbours that disagree much more than they claim, with $s^2_{\text{REML}}$ above $2 s_0^2$ (orange), first *lower* the precision: a second opinion that contradicts the first is worth less than one opinion nobody checked.
# Past that dip $\lambda_{\text{obs}}$ grows with $n$, and $n$ with the context, as long as attention stays spread: the gain of chapter 12 follows context length. The paper calls this information geometry **[P]**.
#
# ## How it fails

# %%
test_fail(lambda: reml_variance(torch.zeros(1), torch.ones(1)), contains="n_eff must be above 1")
test_fail(lambda: reml_mean_variance(torch.zeros(1), torch.ones(1)), contains="keys must be above 1, got 1.0")
test_fail(lambda: posterior_scale(torch.zeros(1), torch.zeros(1), torch.ones(1)), contains="n_eff must be at least 1, got 0.0")

# %%
test_fail(lambda: observation_variance(torch.zeros(1), torch.tensor([2.0]), torch.ones(1)), contains="kappa must lie in (0, 1], got 2.0")
test_fail(lambda: observation_variance(torch.zeros(1), torch.ones(1), torch.ones(1), nu0=0.0), contains="nu0 must be positive")

# %% [markdown]
# A query that sees no key has $\kappa = 0$ and is refused here: what attention does with such rows ("no evidence", $\lambda_{\text{obs}} \approx 0$) is decided in chapter 20.
#
# ## Assumptions, and where they break
#
# - *One mean and one variance in view.* Keys with different contents disagree for a reason; $S$ counts that as noise, and $\lambda_{\text{obs}}$ falls.
# - *Normal values.* (11.3) needs only two moments; the posterior needs normality, and heavy tails make it too sure.
# - *A fractional number of observations.* For unequal weights the posterior of reading 2 is an approximation. How good is it? The table counts how often a 90 % credible interval contains the true $\sigma^2$, which is drawn from the prior itself:


# %%
def coverage(weights: Tensor, trials: int = 20000) -> float:  # of the central 90 % interval, ν₀ = 4 and s₀² = 1
    gen = torch.Generator().manual_seed(0)
    truth = torch.as_tensor(stats.invgamma(2, scale=2).rvs(trials, random_state=0), dtype=torch.float64)
    values = torch.randn(len(weights), trials, generator=gen, dtype=torch.float64) * truth.sqrt()
    n = effective_sample_size(weights)
    scale_post = posterior_scale(scatter(weights[None], values)[0], n, torch.ones(trials, dtype=torch.float64), nu0=4.0)
    nu = 4 + n.item() - 1
    level = torch.as_tensor(stats.invgamma(nu / 2, scale=nu * scale_post.numpy() / 2).cdf(truth.numpy()))
    return ((level > 0.05) & (level < 0.95)).double().mean().item()


# %%
gen = torch.Generator().manual_seed(3)
random_logits = torch.randn(32, generator=gen, dtype=torch.float64)
cases = {"8 equal weights": torch.full((8,), 1 / 8, dtype=torch.float64), "32 keys, sharpness 1": random_logits.softmax(-1), "32 keys, sharpness 3": (3 * random_logits).softmax(-1)}
pd.DataFrame([(name, f"{effective_sample_size(x).item():.1f}", f"{coverage(x):.3f}") for name, x in cases.items()], columns=["weights", "n", "coverage of 90 %"])

# %% [markdown]
# The coverage is exact for equal weights (0.90 up to simulation error). For very unequal ones the interval contains the truth too often: it is too wide, which here is the cautious side.
#
# - *Two different quantities meet in* (11.7): $s_0^2$ comes from the residual stream's precision, $S$ from the values. The value projection stands between them, and training has to make the units agree **[D]**.
#
# ## Summary
#
# - The scatter $S = \sum w v^2 - e^2$ is free, never negative and shift-invariant; shift before squaring.
# - REML divides by the degrees of freedom the fitted mean leaves: $n - 1$ for reliability weights (ours), $T - 1$ for precision weights (an option).
# - A scaled inverse-$\chi^2$ prior with $\nu_0 = 1$ and $s_0^2 = \sum w/\bar\lambda$ gives $1/\lambda_{\text{obs}} = \kappa(\kappa s_0^2 + S)$: no parameter, no division, finite at $n = 1$.
#
# ## Exercises
#
# **1.** Which degrees of freedom would match the *variance* of $S$ as well as its mean [@satterthwaite1946]? Compare with $n - 1$.
#
# <details><summary>Answer</summary>
#
# A scaled $\chi^2_\nu$ has $\nu = 2 (\operatorname{E} S)^2/\operatorname{Var} S$. For normal values this is $(1 - \kappa)^2/(\kappa - 2 \sum w^3 + \kappa^2)$, and $T - 1$ for equal weights:

# %%
freedom = 2 * expect(S.subs(noisy)) ** 2 / (expect(S.subs(noisy) ** 2) - expect(S.subs(noisy)) ** 2)
satterthwaite = (1 - kappa_3) ** 2 / (kappa_3 - 2 * sum(a**3 for a in ws) + kappa_3**2)
prove(freedom - satterthwaite), satterthwaite.subs({w1: sp.Rational(1, 3), w2: sp.Rational(1, 3)})

# %% [markdown]
# The sharper the weights, the further it lies above $n - 1$. The posterior uses the smaller number and is too wide, as the coverage table found:


# %%
def both(x: Tensor) -> tuple[str, str]:  # Satterthwaite's degrees of freedom, n − 1
    k = x.square().sum()
    return f"{(1 - k) ** 2 / (k - 2 * (x**3).sum() + k**2):.1f}", f"{1 / k - 1:.1f}"


# %%
pd.DataFrame([(name, *both(x)) for name, x in cases.items()], columns=["weights", "Satterthwaite", "n − 1"])

# %% [markdown]
# </details>
#
# **2.** Show that $s^2_{\text{post}}$ is a weighted mean of $s_0^2$ and $s^2_{\text{REML}}$. With which weights?
#
# <details><summary>Answer</summary>
#
# The degrees of freedom, $\nu_0$ and $n - 1$:

# %%
prove(s2_post - (nu0 * s2_0 + (n_ - 1) * by_reliability) / (nu0 + n_ - 1))

# %% [markdown]
# </details>
#
# **3.** What does the scatter become in bfloat16, and why does `scatter` not allow it?
#
# <details><summary>Answer</summary>
#
# With mean 30 and standard deviation 1 the eight bits of bfloat16 keep nothing of the difference; even its sign is a matter of luck:

# %%
rough = (30 + torch.randn(64, generator=torch.Generator().manual_seed(0))).bfloat16()
(rough.square().mean() - rough.mean().square()).item(), scatter(torch.full((1, 64), 1 / 64), rough[:, None]).item()

# %% [markdown]
# </details>
