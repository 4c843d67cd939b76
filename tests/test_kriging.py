"Kriging weights, mean, variance and effective sample size: properties, errors, and independent implementations."
import numpy as np
import pytest
import statsmodels.api as sm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pykrige.ok import OrdinaryKriging

from bft_nb.kriging import (
    effective_sample_size,
    kriging_mean,
    kriging_variance,
    kriging_weights,
    ordinary_kriging_weights,
)

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 9))
SEEDS = st.integers(0, 10_000)


def problem(shape, seed, dtype=torch.float64):
    "Logits (b, t, j), reliabilities (b, j) over twelve decades, and a mask in which every query sees a key."
    b, t, j = shape
    gen = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(b, t, j, generator=gen, dtype=dtype)
    lam_bar = 10 ** (12 * torch.rand(b, j, generator=gen, dtype=dtype) - 6)
    mask = torch.rand(b, t, j, generator=gen) < 0.6
    mask[torch.arange(b)[:, None], torch.arange(t), torch.randint(j, (b, t), generator=gen)] = True
    return logits, lam_bar, mask


def values(shape, seed, k=3):
    return torch.randn(shape[0], shape[2], k, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)


@given(SHAPES, SEEDS)
def test_weights_are_relevance_times_reliability(shape, seed):
    logits, lam_bar, mask = problem(shape, seed)
    alpha = logits.masked_fill(~mask, -torch.inf).softmax(-1)
    product = alpha * lam_bar[:, None]
    w = kriging_weights(logits, lam_bar, mask)
    torch.testing.assert_close(w, product / product.sum(-1, keepdim=True))
    torch.testing.assert_close(w.sum(-1), torch.ones_like(w[..., 0]))
    assert (w[~mask] == 0).all()


@given(SHAPES, SEEDS)
def test_the_normaliser_is_the_variance(shape, seed):
    logits, lam_bar, mask = problem(shape, seed)
    alpha = logits.masked_fill(~mask, -torch.inf).softmax(-1)
    s2_0 = kriging_variance(kriging_weights(logits, lam_bar, mask), lam_bar)
    torch.testing.assert_close(s2_0, 1 / (alpha * lam_bar[:, None]).sum(-1))


@given(SHAPES, SEEDS)
def test_no_unbiased_weights_have_less_variance(shape, seed):
    logits, lam_bar, _ = problem(shape, seed)
    p = logits.softmax(-1) * lam_bar[:, None]
    w = kriging_weights(logits, lam_bar)
    delta = 0.1 * torch.randn(w.shape, generator=torch.Generator().manual_seed(seed), dtype=w.dtype)
    other = w + delta - delta.mean(-1, keepdim=True)
    assert ((other**2 / p).sum(-1) >= (w**2 / p).sum(-1) * (1 - 1e-9)).all()


@given(SHAPES, SEEDS, st.floats(-50, 50), st.floats(1e-3, 1e3))
def test_weights_need_only_differences_of_logits_and_ratios_of_reliability(shape, seed, shift, factor):
    logits, lam_bar, mask = problem(shape, seed)
    w = kriging_weights(logits, lam_bar, mask)
    torch.testing.assert_close(kriging_weights(logits + shift, factor * lam_bar, mask), w, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(kriging_variance(w, factor * lam_bar), kriging_variance(w, lam_bar) / factor)


@given(SHAPES, SEEDS)
def test_the_order_of_the_keys_does_not_matter(shape, seed):
    logits, lam_bar, mask = problem(shape, seed)
    v = values(shape, seed)
    order = torch.randperm(shape[2], generator=torch.Generator().manual_seed(seed))
    w = kriging_weights(logits, lam_bar, mask)
    permuted = kriging_weights(logits[..., order], lam_bar[:, order], mask[..., order])
    torch.testing.assert_close(permuted, w[..., order])
    torch.testing.assert_close(kriging_mean(permuted, v[:, order]), kriging_mean(w, v))


@given(SHAPES, SEEDS, st.integers(1, 4))
def test_masked_keys_are_as_good_as_absent(shape, seed, extra):
    logits, lam_bar, mask = problem(shape, seed)
    pad = lambda x, value: torch.cat([x, torch.full((*x.shape[:-1], extra), value, dtype=x.dtype)], -1)
    w = kriging_weights(logits, lam_bar, mask)
    padded = kriging_weights(pad(logits, 40.0), pad(lam_bar, 1e-6), pad(mask, False))
    torch.testing.assert_close(padded, pad(w, 0.0))
    torch.testing.assert_close(kriging_variance(padded, pad(lam_bar, 1e-6)), kriging_variance(w, lam_bar))


@given(SHAPES, SEEDS)
def test_effective_sample_size_lies_between_one_and_the_number_of_visible_keys(shape, seed):
    logits, lam_bar, mask = problem(shape, seed)
    n = effective_sample_size(kriging_weights(logits, lam_bar, mask))
    assert (n >= 1 - 1e-12).all() and (n <= mask.sum(-1) * (1 + 1e-12)).all()


def test_many_equal_weights_in_half_precision_are_that_many():
    assert effective_sample_size(torch.full((20_000,), 1 / 20_000, dtype=torch.float16)) == pytest.approx(20_000, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_finite_and_leaves_in_float32(dtype):
    @settings(max_examples=30)
    @given(SHAPES, SEEDS)
    def check(shape, seed):
        logits, lam_bar, mask = problem(shape, seed)
        logits, lam_bar = logits.to(dtype).requires_grad_(), lam_bar.to(dtype).requires_grad_()
        w = kriging_weights(logits, lam_bar, mask)
        assert w.dtype == torch.float32
        total = w.square().sum() + kriging_variance(w, lam_bar).log().sum() + effective_sample_size(w).sum()
        assert all(torch.isfinite(g).all() for g in torch.autograd.grad(total, (logits, lam_bar)))

    check()


def test_gradcheck():
    logits, lam_bar, mask = problem((2, 3, 4), 0)
    lam_bar = 0.5 + lam_bar.log10().abs()
    cov = torch.eye(4, dtype=torch.float64) + 0.3
    both = logits.requires_grad_(), lam_bar.requires_grad_()
    target = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, y: kriging_weights(x, y, mask), both)
    assert torch.autograd.gradcheck(lambda x, y: kriging_variance(kriging_weights(x, y, mask), y), both)
    assert torch.autograd.gradcheck(lambda x, y: effective_sample_size(kriging_weights(x, y, mask)), both)
    assert torch.autograd.gradcheck(lambda c: ordinary_kriging_weights(cov, c), (target,))


def test_a_query_that_sees_no_key_has_no_evidence():
    mask = torch.tensor([[True, True], [False, False]])
    w = kriging_weights(torch.zeros(2, 2), torch.ones(2), mask)
    torch.testing.assert_close(w, torch.tensor([[0.5, 0.5], [0.0, 0.0]]))
    torch.testing.assert_close(effective_sample_size(w), torch.tensor([2.0, 0.0]))
    torch.testing.assert_close(kriging_variance(w, torch.ones(2)), torch.tensor([1.0, torch.inf]))


def test_heads_share_the_reliability_of_a_key():
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 3, 5, generator=gen)  # batch, head, query, key
    lam_bar = torch.rand(2, 5, generator=gen) + 0.5
    w = kriging_weights(logits, lam_bar[:, None])
    torch.testing.assert_close(w[:, 1], kriging_weights(logits[:, 1], lam_bar))
    assert kriging_mean(w, torch.randn(2, 4, 5, 6)).shape == (2, 4, 3, 6)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_reliability_is_named(bad):
    lam_bar = torch.tensor([1.0, bad])
    with pytest.raises(ValueError, match="lam_bar must be positive and finite"):
        kriging_weights(torch.zeros(1, 2), lam_bar)
    with pytest.raises(ValueError, match="lam_bar must be positive and finite"):
        kriging_variance(torch.full((1, 2), 0.5), lam_bar)


def test_bad_masks_and_shapes_are_named():
    zeros, ones = torch.zeros(3, 2), torch.ones(2)
    # jaxtyping, where it is switched on, refuses some of these before the function does
    with pytest.raises(TypeError, match="boolean|[Bb]ool"):
        kriging_weights(zeros, ones, torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"\(2, 3\) does not broadcast to the logits' \(3, 2\)"):
        kriging_weights(zeros, ones, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\(1, 3, 2\) does not broadcast"):
        kriging_weights(zeros, ones, torch.ones(1, 3, 2, dtype=torch.bool))
    with pytest.raises((ValueError, TypeError), match="one entry per key|[Tt]ype-check"):
        kriging_weights(zeros, torch.ones(3))
    with pytest.raises(ValueError, match="positive definite"):
        ordinary_kriging_weights(torch.tensor([[1.0, 0.5], [0.0, 1.0]]))


# --- independent implementations ---


@given(SHAPES, SEEDS)
def test_statsmodels_wls_is_the_kriging_mean(shape, seed):
    logits, lam_bar, _ = problem(shape, seed)
    p = (logits.softmax(-1) * lam_bar[:, None])[0, 0].numpy()
    v = values(shape, seed, k=1)
    fit = sm.WLS(v[0, :, 0].numpy(), np.ones(shape[2]), weights=p).fit()
    w = kriging_weights(logits, lam_bar)
    np.testing.assert_allclose(kriging_mean(w, v)[0, 0, 0].item(), fit.params[0], rtol=1e-9, atol=1e-12)
    # (XᵀWX)⁻¹: the variance of the mean at σ² = 1
    np.testing.assert_allclose(kriging_variance(w, lam_bar)[0, 0].item(), fit.normalized_cov_params[0, 0], rtol=1e-9)


def test_the_bordered_kriging_system_with_diagonal_covariance():
    logits, lam_bar, _ = problem((1, 1, 6), 3)
    p = (logits.softmax(-1) * lam_bar)[0, 0].numpy()
    p = p / p.max()  # the system is badly scaled otherwise
    lam_bar = lam_bar / (logits.softmax(-1) * lam_bar).max()
    system = np.block([[np.diag(1 / p), np.ones((6, 1))], [np.ones((1, 6)), np.zeros((1, 1))]])
    solution = np.linalg.solve(system, np.r_[np.zeros(6), 1])
    w = kriging_weights(logits, lam_bar)
    np.testing.assert_allclose(w[0, 0].numpy(), solution[:-1], rtol=1e-8, atol=1e-14)
    np.testing.assert_allclose(kriging_variance(w, lam_bar).item(), -solution[-1], rtol=1e-8)


def test_pykrige_with_an_exponential_covariance():
    rng = np.random.default_rng(0)
    here, there, v = rng.uniform(0, 10, (12, 2)), rng.uniform(0, 10, (5, 2)), rng.normal(size=12)
    sill, reach, nugget = 2.0, 4.0, 0.3
    model = {"psill": sill, "range": reach, "nugget": nugget}
    kriging = OrdinaryKriging(*here.T, v, variogram_model="exponential", variogram_parameters=model)
    want, want_variance = kriging.execute("points", *there.T)
    distance = lambda a, b: np.linalg.norm(a[:, None] - b[None], axis=-1)
    cov = torch.from_numpy(sill * np.exp(-3 * distance(here, here) / reach) + nugget * np.eye(12))
    cov_target = torch.from_numpy(sill * np.exp(-3 * distance(there, here) / reach))
    w = ordinary_kriging_weights(cov.expand(5, 12, 12), cov_target)
    variance = sill + nugget - 2 * (w * cov_target).sum(-1) + torch.einsum("ti,ij,tj->t", w, cov, w)
    np.testing.assert_allclose((w @ torch.from_numpy(v)).numpy(), np.asarray(want), rtol=1e-8)
    np.testing.assert_allclose(variance.numpy(), np.asarray(want_variance), rtol=1e-8)


def test_pykrige_with_a_pure_nugget_and_repeated_instruments():
    "A neighbour of integer precision p is p independent instruments with the same reading: equal-weight kriging of all of them."
    p, v = np.array([1, 4, 2]), np.array([20.0, 20.5, 24.0])
    readings, nugget = np.repeat(v, p), 0.7
    places = np.arange(len(readings), dtype=float)
    model = {"psill": 0.0, "range": 1.0, "nugget": nugget}
    kriging = OrdinaryKriging(places, places**2, readings, variogram_model="exponential", variogram_parameters=model)
    want, want_variance = kriging.execute("points", [100.0], [-100.0])
    lam_bar = torch.from_numpy(p / nugget)
    w = kriging_weights(torch.zeros(1, 3, dtype=torch.float64), lam_bar)
    np.testing.assert_allclose(kriging_mean(w, torch.from_numpy(v)[:, None]).item(), want[0], rtol=1e-9)
    # the relevance here is 1 for each, not 1/3; and PyKrige predicts a new reading, whose own variance comes on top
    np.testing.assert_allclose(kriging_variance(w, lam_bar).item() / 3 + nugget, want_variance[0], rtol=1e-9)


def test_half_precision_reliabilities_are_weighed_in_float32():
    lam_bar = torch.tensor([1000.0, 1500, 700]).bfloat16()
    torch.testing.assert_close(kriging_weights(torch.zeros(1, 3), lam_bar), kriging_weights(torch.zeros(1, 3), lam_bar.float()))


def test_logits_that_nobody_sees_may_be_anything():
    logits = torch.tensor([[torch.nan, torch.nan], [torch.inf, 0.0]], requires_grad=True)
    w = kriging_weights(logits, torch.ones(2), torch.zeros(2, dtype=torch.bool))
    assert (w == 0).all()
    w.sum().backward()
    assert (logits.grad == 0).all()
