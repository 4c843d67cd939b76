"Scatter, REML variance and the posterior of σ²: properties, limits, coverage, and independent implementations."
import inspect

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from statsmodels.stats.weightstats import DescrStatsW

from bft_nb.kriging import effective_sample_size, kriging_mean, kriging_variance, kriging_weights
from bft_nb.reml import observation_variance, posterior_scale, reml_mean_variance, reml_variance, scatter

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 9), st.integers(1, 4))
SEEDS = st.integers(0, 10_000)
POSITIVE = st.floats(1e-3, 1e3)


def draw(shape, seed, dtype=torch.float64):
    "Weights (b, t, j) and values (b, j, k)."
    b, t, j, k = shape
    gen = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(b, t, j, generator=gen, dtype=dtype)).softmax(-1), torch.randn(b, j, k, generator=gen, dtype=dtype)


def direct(w, v):
    return (w[..., None] * (v[:, None] - kriging_mean(w, v)[:, :, None]) ** 2).sum(-2)


def one(x):
    return torch.tensor([x], dtype=torch.float64)


@given(SHAPES, SEEDS)
def test_scatter_is_the_direct_sum(shape, seed):
    w, v = draw(shape, seed)
    S = scatter(w, v)
    assert (S >= 0).all()
    torch.testing.assert_close(S, direct(w, v), rtol=1e-9, atol=1e-12)


@given(SHAPES, SEEDS, st.floats(-1e3, 1e3))
def test_scatter_does_not_notice_a_shift(shape, seed, offset):
    w, v = draw(shape, seed)
    torch.testing.assert_close(scatter(w, v + offset), direct(w, v), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(scatter(w.float(), (v + offset).float()), direct(w, v).float(), rtol=1e-3, atol=2e-3)


def test_without_the_shift_float32_loses_everything_at_a_thousand():
    w, v = draw((4, 8, 32, 16), 0)
    relative = lambda S: ((S - scatter(w, v)) / scatter(w, v)).abs().max().item()
    far = (v + 1e3).float()
    assert relative(scatter(w.float(), far, torch.zeros(1, 1))) > 0.5
    assert relative(scatter(w.float(), far)) < 1e-2


def test_scatter_in_bfloat16_accumulates_in_float32():
    w, v = draw((2, 4, 8, 3), 0)
    low = v.bfloat16()
    S = scatter(w.float(), low)
    assert S.dtype == torch.float32
    torch.testing.assert_close(S, direct(w, low.double()).float(), rtol=1e-4, atol=1e-5)


def test_a_causal_row_does_not_know_the_future():
    gen = torch.Generator().manual_seed(0)
    w = torch.randn(6, 6, generator=gen).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    v = torch.randn(6, 4, generator=gen) + 30
    later = torch.cat([v[:3], 100 * v[3:]])
    torch.testing.assert_close(scatter(w, later)[:3], scatter(w, v)[:3], rtol=0, atol=0)


def test_gradcheck():
    w, v = (x.requires_grad_() for x in draw((2, 3, 4, 2), 0))
    shift = torch.full((1, 1), 0.3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda logits, x: scatter(logits.softmax(-1), x, shift), (w, v))
    S, n, s2_0 = (torch.rand(5, dtype=torch.float64).add(x).requires_grad_() for x in (0.1, 1.5, 0.1))
    assert torch.autograd.gradcheck(reml_variance, (S, n))
    assert torch.autograd.gradcheck(reml_mean_variance, (S, n))
    assert torch.autograd.gradcheck(lambda *x: posterior_scale(*x, nu0=2.0), (S, n, s2_0))
    assert torch.autograd.gradcheck(lambda S, n, x: observation_variance(S, 1 / n, x, nu0=2.0), (S, n, s2_0))
    assert torch.autograd.gradcheck(lambda S, n, x: observation_variance(S, 1 / n, x, keys=n), (S, n, s2_0))


def test_the_shift_carries_no_gradient_of_its_own():
    w, v = draw((1, 2, 5, 3), 0)
    v.requires_grad_()
    got, want = (torch.autograd.grad(f(w, v).sum(), v)[0] for f in (scatter, direct))
    torch.testing.assert_close(got, want)


@given(POSITIVE, st.floats(1, 1e3), POSITIVE, st.floats(0.1, 50))
def test_the_closed_form_is_the_posterior_scale_over_n(S, n, s2_0, nu0):
    S, n, s2_0 = one(S), one(n), one(s2_0)
    torch.testing.assert_close(observation_variance(S, 1 / n, s2_0, nu0), posterior_scale(S, n, s2_0, nu0) / n)


@given(POSITIVE, st.floats(0.1, 50))
def test_one_neighbour_leaves_the_claim(s2_0, nu0):
    torch.testing.assert_close(observation_variance(one(0.0), one(1.0), one(s2_0), nu0), one(s2_0))
    torch.testing.assert_close(observation_variance(one(0.0), one(1.0), one(s2_0), nu0, keys=one(1.0)), one(s2_0))


@given(POSITIVE, POSITIVE)
def test_many_neighbours_forget_the_prior(S, s2_0):
    S, n = one(S), one(1e12)
    torch.testing.assert_close(observation_variance(S, 1 / n, one(s2_0)), reml_variance(S, n) / n, rtol=1e-5, atol=0)


@given(st.floats(1, 1e3), POSITIVE, st.floats(0.1, 50))
def test_equal_values_earn_a_finite_precision(n, s2_0, nu0):
    got = 1 / observation_variance(one(0.0), one(1 / n), one(s2_0), nu0)
    torch.testing.assert_close(got, one(n * (nu0 + n - 1) / (nu0 * s2_0)))


@given(SHAPES, SEEDS, st.floats(0.01, 100))
def test_units(shape, seed, factor):
    "Values in other units: every variance scales with the square."
    w, v = draw(shape, seed)
    kappa, s2_0 = w.square().sum(-1, keepdim=True), torch.ones(1, 1, 1, dtype=torch.float64)
    was = observation_variance(scatter(w, v), kappa, s2_0)
    torch.testing.assert_close(observation_variance(scatter(w, factor * v), kappa, factor**2 * s2_0), factor**2 * was)


def test_gradients_are_finite_for_one_key_in_float32():
    v = torch.randn(1, 3, requires_grad=True)
    logits, lam_bar = torch.zeros(1, 1, requires_grad=True), torch.tensor([1e6], requires_grad=True)
    w = kriging_weights(logits, lam_bar)
    kappa, s2_0 = w.square().sum(-1, keepdim=True), kriging_variance(w, lam_bar)[:, None]
    lam_obs = 1 / observation_variance(scatter(w, v), kappa, s2_0)
    torch.testing.assert_close(lam_obs, torch.full((1, 3), 1e6))
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(lam_obs.sum(), (v, logits, lam_bar)))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="n_eff must be above 1 .*got 1.0"):
        reml_variance(one(1.0), one(1.0))
    with pytest.raises(ValueError, match="keys must be above 1, got 1.0"):
        reml_mean_variance(one(1.0), one(1.0))
    with pytest.raises(ValueError, match="n_eff must be at least 1, got 0.0"):
        posterior_scale(one(1.0), one(0.0), one(1.0))
    with pytest.raises(ValueError, match="n_eff must be at least 1, got nan"):
        posterior_scale(one(1.0), one(float("nan")), one(1.0))
    with pytest.raises(ValueError, match="keys must be at least 1, got 0.0"):
        observation_variance(one(1.0), one(1.0), one(1.0), keys=one(0.0))


@pytest.mark.parametrize("kappa", [0.0, -0.5, 2.0, float("nan")])
def test_bad_kappa_is_named(kappa):
    with pytest.raises(ValueError, match=rf"kappa must lie in \(0, 1\], got {kappa}"):
        observation_variance(one(1.0), one(kappa), one(1.0))


@pytest.mark.parametrize("nu0", [0.0, -1.0, float("nan")])
def test_bad_prior_degrees_of_freedom_are_named(nu0):
    with pytest.raises(ValueError, match=f"nu0 must be positive .*got {nu0}"):
        observation_variance(one(1.0), one(1.0), one(1.0), nu0=nu0)
    with pytest.raises(ValueError, match=f"nu0 must be positive .*got {nu0}"):
        posterior_scale(one(1.0), one(1.0), one(1.0), nu0=nu0)


# --- independent implementations ---


@given(st.integers(2, 9), SEEDS)
def test_statsmodels_frequency_weights_are_the_reliability_reading(keys, seed):
    w, v = draw((1, 1, keys, 1), seed)
    n = effective_sample_size(w)
    other = DescrStatsW(v[0, :, 0].numpy(), weights=(n[..., None] * w)[0, 0].numpy(), ddof=1)
    np.testing.assert_allclose(reml_variance(scatter(w, v), n[..., None]).item(), other.var, rtol=1e-8)


@given(st.integers(2, 9), SEEDS)
def test_statsmodels_wls_is_the_precision_reading(keys, seed):
    w, v = draw((1, 1, keys, 1), seed)
    fit = sm.WLS(v[0, :, 0].numpy(), np.ones(keys), weights=7 * w[0, 0].numpy()).fit()  # any common factor
    S = scatter(w, v)
    count = torch.full_like(S, keys)
    np.testing.assert_allclose(reml_mean_variance(S, count).item(), fit.bse[0] ** 2, rtol=1e-8)
    # with a prior worth nothing the option `keys` is the same number
    nearly = observation_variance(S, w.square().sum(-1, keepdim=True), torch.zeros_like(S), nu0=1e-12, keys=count)
    np.testing.assert_allclose(nearly.item(), fit.bse[0] ** 2, rtol=1e-6)


def test_statsmodels_reml_of_a_random_intercept():
    "In a balanced one-way layout the REML variance within groups is the mean of the groups' own REML variances."
    groups, size = 30, 5
    rng = np.random.default_rng(0)
    v = 2 * rng.normal(size=(groups, 1)) + rng.normal(size=(groups, size))
    frame = pd.DataFrame({"v": v.ravel(), "group": np.repeat(np.arange(groups), size)})
    fit = smf.mixedlm("v ~ 1", frame, groups="group").fit(reml=True)
    w = torch.full((groups, 1, size), 1 / size, dtype=torch.float64)
    ours = reml_variance(scatter(w, torch.from_numpy(v)[..., None]), torch.full((groups, 1, 1), float(size), dtype=torch.float64))
    np.testing.assert_allclose(ours.mean().item(), fit.scale, rtol=1e-4)


def test_scipy_posterior_by_numerical_integration():
    "Equal weights: prior × normal likelihood, μ and the constant integrated numerically, is the scaled inverse-χ² (an inverse gamma)."
    v, nu0, s2_0 = np.array([0.3, -1.2, 0.8, 2.0]), 1.0, 0.5
    prior = stats.invgamma(nu0 / 2, scale=nu0 * s2_0 / 2)
    variances, step = np.linspace(-7, 12, 4001, retstep=True)  # log σ²
    variances = np.exp(variances)
    z = np.linspace(-12, 12, 401)  # μ in standard errors around the mean
    mu = v.mean() + z * np.sqrt(variances / 4)[:, None]
    likelihood = np.exp(stats.norm(mu[..., None], np.sqrt(variances)[:, None, None]).logpdf(v).sum(-1))
    marginal = integrate.trapezoid(likelihood, mu, axis=-1) * prior.pdf(variances)
    marginal /= integrate.trapezoid(marginal * variances, dx=step)
    w = torch.full((1, 4), 0.25, dtype=torch.float64)
    n, S = effective_sample_size(w)[:, None], scatter(w, torch.from_numpy(v)[:, None])
    scale, nu = posterior_scale(S, n, torch.full_like(S, s2_0), nu0).item(), nu0 + 4 - 1
    np.testing.assert_allclose(marginal, stats.invgamma(nu / 2, scale=nu * scale / 2).pdf(variances), rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(integrate.trapezoid(marginal, dx=step), 1 / scale, rtol=1e-6)  # E[1/σ²]


@pytest.mark.parametrize("keys", [1, 2, 8])
def test_coverage_of_the_posterior(keys):
    "σ² drawn from the prior: central intervals hold it as often as they say, also for a single key."
    trials, nu0, s2_0 = 40_000, 3.0, 0.5
    rng = np.random.default_rng(keys)
    truth = stats.invgamma(nu0 / 2, scale=nu0 * s2_0 / 2).rvs(trials, random_state=rng)
    v = torch.from_numpy(5 + rng.normal(size=(keys, trials)) * truth**0.5)
    w = torch.full((1, keys), 1 / keys, dtype=torch.float64)
    n = effective_sample_size(w)[:, None]
    scale = posterior_scale(scatter(w, v), n, torch.full_like(n, s2_0), nu0)[0].numpy()
    nu = nu0 + keys - 1
    level = stats.invgamma(nu / 2, scale=nu * scale / 2).cdf(truth)
    for share in (0.5, 0.9):
        inside = np.abs(level - 0.5) < share / 2
        assert abs(inside.mean() - share) < 4 * (share * (1 - share) / trials) ** 0.5


@pytest.mark.parametrize("sharpness", [0.5, 1.5, 3.0])
def test_reml_is_unbiased_and_ml_is_not(sharpness):
    rng, keys, trials = np.random.default_rng(0), 12, 40_000
    w = torch.from_numpy(sharpness * rng.normal(size=(1, keys))).softmax(-1)
    S = scatter(w, torch.from_numpy(3 + 2 * rng.normal(size=(keys, trials))))
    n = effective_sample_size(w)[:, None]
    restricted = reml_variance(S, n)
    error = 4 * restricted.std().item() / trials**0.5
    assert abs(restricted.mean().item() - 4) < error
    assert abs(S.mean().item() - 4 * (1 - 1 / n.item())) < error < abs(S.mean().item() - 4)


def test_each_reading_is_off_by_a_known_factor_where_the_other_is_true():
    rng, keys, trials = np.random.default_rng(2), 12, 40_000
    w = torch.from_numpy(1.5 * rng.normal(size=(1, keys))).softmax(-1)
    noise = torch.from_numpy(rng.normal(size=(keys, trials)))
    n, T = effective_sample_size(w)[:, None], torch.full((1, 1), float(keys), dtype=torch.float64)
    by_1 = lambda v: reml_mean_variance(scatter(w, v), T).mean().item()
    by_2 = lambda v: (reml_variance(scatter(w, v), n) / n).mean().item()
    factor = (keys - 1) / (n.item() - 1)
    precision_true = noise / w[0, :, None].sqrt()  # Var e = 1
    np.testing.assert_allclose([by_1(precision_true), by_2(precision_true)], [1, factor], rtol=0.02)
    kappa = 1 / n.item()  # Var e = κ where all variances are one
    np.testing.assert_allclose([by_1(noise), by_2(noise)], [kappa / factor, kappa], rtol=0.02)


@pytest.mark.parametrize("sharpness", [0.5, 1.5])
def test_variance_of_the_mean_under_precision_weights(sharpness):
    "Heteroscedastic draws with Var v = σ²/p: S/(T − 1) estimates the variance that the kriging mean really has."
    rng, keys, trials = np.random.default_rng(1), 12, 40_000
    w = torch.from_numpy(sharpness * rng.normal(size=(1, keys))).softmax(-1)
    v = torch.from_numpy(rng.normal(size=(keys, trials))) / w[0, :, None].sqrt()
    estimate = reml_mean_variance(scatter(w, v), torch.full((1, 1), float(keys), dtype=torch.float64)).mean().item()
    np.testing.assert_allclose(estimate, 1.0, rtol=0.02)
    np.testing.assert_allclose(kriging_mean(w, v).var().item(), 1.0, rtol=0.03)


def test_a_shift_of_each_key_is_refused():
    v = torch.tensor([[1.0], [2.0], [4.0]])
    with pytest.raises(ValueError, match=r"shift must be the same for all keys, of shape \(…, 1, k\), got \(3, 1\)"):
        inspect.unwrap(scatter)(torch.full((1, 3), 1 / 3), v, v)
