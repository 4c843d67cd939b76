"The sandwich variance against statsmodels, the explicit residuals, simulation, and its edge cases."
import jaxtyping
import numpy as np
import pytest
import statsmodels.api as sm
import torch
from hypothesis import given
from hypothesis import strategies as st

from bft_nb.sandwich import (
    centre,
    claimed_variance,
    posterior_variance,
    sandwich_variance,
    signed_kappa,
    signed_weights,
)

shapes = st.tuples(st.integers(1, 4), st.integers(2, 12), st.integers(1, 3), st.integers(0, 2**31))


def draw(t, j, k, seed, batch=(), dtype=torch.float64):
    gen = torch.Generator().manual_seed(seed)
    a = torch.randn(*batch, t, j, generator=gen, dtype=torch.float64)
    lam_bar = torch.rand(*batch, j, generator=gen, dtype=torch.float64) + 0.2
    return a.to(dtype), lam_bar.to(dtype), torch.randn(*batch, j, k, generator=gen, dtype=torch.float64).to(dtype)


def by_residuals(b, v, m):
    "the sum over keys written out: (t, j, k) residuals"
    return (b[..., None] ** 2 * (v[..., None, :, :] - m[..., :, None, :]) ** 2).sum(-2)


@given(shapes)
def test_statsmodels_hc0_with_positive_weights(shape):
    a, lam_bar, v = draw(*shape)
    a = a.abs() + 0.05
    got = sandwich_variance(a, lam_bar, v)
    for t in range(a.shape[0]):
        b = signed_weights(a, lam_bar)[t]
        for k in range(v.shape[1]):
            fit = sm.WLS(v[:, k].numpy(), np.ones((len(b), 1)), weights=b.numpy()).fit(cov_type="HC0")
            want = fit.bse[0] ** 2 * b.sum().item() ** 2  # e = (fitted constant) · Σ b
            assert got[t, k].item() == pytest.approx(want, rel=1e-9, abs=1e-12)


def test_statsmodels_ols_hc0_with_equal_weights():
    _, _, v = draw(1, 20, 1, 0)
    fit = sm.OLS(v[:, 0].numpy(), np.ones((20, 1))).fit(cov_type="HC0")
    got = sandwich_variance(torch.full((1, 20), 1 / 20, dtype=torch.float64), torch.ones(20), v)
    assert got.item() == pytest.approx(fit.bse[0] ** 2, rel=1e-9)


@given(shapes)
def test_bread_and_filling_with_negative_weights(shape):
    a, lam_bar, v = draw(*shape)
    a = a + 2 * torch.sign(a.sum(-1, keepdim=True))  # one sign outweighs the other
    b = signed_weights(a, lam_bar)
    got = sandwich_variance(a, lam_bar, v)
    for t in (t for t in range(len(b)) if b[t].sum() ** 2 >= b[t].square().sum()):
        X, w, y = np.ones((b.shape[1], 1)), b[t].numpy(), v.numpy()
        bread = np.linalg.inv(X.T @ (w[:, None] * X))
        r = y - X @ (bread @ X.T @ (w[:, None] * y))
        for k in range(v.shape[1]):
            want = bread @ (X.T * w * r[:, k] ** 2 * w @ X) @ bread * w.sum() ** 2
            assert got[t, k].item() == pytest.approx(want.item(), rel=1e-8, abs=1e-12)


@given(shapes, st.lists(st.integers(1, 3), max_size=2))
def test_expanded_square_equals_the_residuals(shape, batch):
    a, lam_bar, v = draw(*shape, batch=tuple(batch))
    b = signed_weights(a, lam_bar)
    torch.testing.assert_close(sandwich_variance(a, lam_bar, v), by_residuals(b, v, centre(b, v)))


@given(shapes)
def test_centre_is_the_quotient_or_lies_near_the_values(shape):
    a, lam_bar, v = draw(*shape)
    b = signed_weights(a, lam_bar)
    m, total, squares = centre(b, v), b.sum(-1, keepdim=True), b.square().sum(-1, keepdim=True)
    quotient = (b @ v) / total
    plain = (total.square() >= squares).expand_as(m)
    torch.testing.assert_close(m[plain], quotient[plain])
    spread = v.max(0).values - v.min(0).values
    assert (m[~plain] - v.mean(0).expand_as(m)[~plain]).abs().le((2 + b.shape[-1]) * spread.expand_as(m)[~plain] + 1e-12).all()


@given(shapes, st.floats(-1e3, 1e3))
def test_shifting_the_values_changes_nothing(shape, shift):
    a, lam_bar, v = draw(*shape)
    torch.testing.assert_close(sandwich_variance(a, lam_bar, v + shift), sandwich_variance(a, lam_bar, v), rtol=1e-7, atol=1e-9)


def test_shift_of_a_thousand_in_float32():
    a, lam_bar, v = draw(4, 50, 8, 0)
    want = sandwich_variance(a, lam_bar, v)
    got = sandwich_variance(a.float(), lam_bar.float(), v.float() + 1e3)
    torch.testing.assert_close(got, want.float(), rtol=1e-3, atol=0)


def test_a_masked_first_key_may_say_anything():
    a, v = torch.tensor([[0.0, 0.3, 0.3, 0.4]]), torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    want = sandwich_variance(a[:, 1:], torch.ones(3), v[1:])
    for loud in (1e3, 1e5, -1e6):
        v[0] = loud
        torch.testing.assert_close(sandwich_variance(a, torch.ones(4), v), want)


@given(shapes)
def test_order_of_keys_and_sign_of_all_weights_do_not_matter(shape):
    a, lam_bar, v = draw(*shape)
    order = torch.randperm(v.shape[0])
    want = sandwich_variance(a, lam_bar, v)
    torch.testing.assert_close(sandwich_variance(a[:, order], lam_bar[order], v[order]), want)
    torch.testing.assert_close(sandwich_variance(-a, lam_bar, v), want)


@given(shapes)
def test_masked_keys_do_not_exist(shape):
    a, lam_bar, v = draw(*shape)
    padded = torch.cat([torch.zeros_like(a[:, :2]), a], 1), torch.cat([torch.ones(2), lam_bar]), torch.cat([torch.full_like(v[:1].expand(2, -1), 9.0), v])
    torch.testing.assert_close(sandwich_variance(*padded), sandwich_variance(a, lam_bar, v))


@given(shapes)
def test_softmax_weights_meet_chapter_11(shape):
    "κ S plus the covariance, under the weights, of weight and squared residual (14.4)"
    a, _, v = draw(*shape)
    w = a.softmax(-1)
    kappa = w.square().sum(-1, keepdim=True)
    squares = (v - (w @ v)[..., None, :]).square()  # (t, j, k)
    S = (w[..., None] * squares).sum(-2)
    covariance = (w[..., None] * (w - kappa)[..., None] * (squares - S[..., None, :])).sum(-2)
    torch.testing.assert_close(sandwich_variance(w, torch.ones(w.shape[-1]), v), kappa * S + covariance)
    torch.testing.assert_close(signed_kappa(w), kappa)


def test_variance_under_heteroscedastic_noise():
    "mean over repetitions against the true variance, which the pooled formula misses by a factor of two"
    gen = torch.Generator().manual_seed(0)
    b = 0.5 + torch.rand(1, 100, generator=gen, dtype=torch.float64)
    sigma2 = b[0] ** 4
    v = torch.randn(5_000, 100, 1, generator=gen, dtype=torch.float64) * sigma2.sqrt()[:, None]
    truth = (b[0].square() * sigma2).sum().item()
    assert sandwich_variance(b.expand(5_000, 1, 100), torch.ones(5_000, 100), v).mean().item() == pytest.approx(truth, rel=0.04)
    assert (v.var(1).mean() * b.square().sum()).item() < 0.8 * truth
    assert (v[..., 0] @ b[0]).var().item() == pytest.approx(truth, rel=0.06)


def test_prior_carries_one_key_and_fades_with_many():
    a, lam_bar, v = torch.tensor([[0.7]]), torch.tensor([4.0]), torch.tensor([[3.0]])
    kappa = signed_kappa(signed_weights(a, lam_bar))
    alone = posterior_variance(sandwich_variance(a, lam_bar, v), claimed_variance(a, lam_bar), kappa)
    torch.testing.assert_close(alone, torch.tensor([[0.49 * 4]]))
    a, lam_bar, v = draw(1, 5_000, 2, 0)
    a = a.abs()
    V = sandwich_variance(a, lam_bar, v)
    torch.testing.assert_close(posterior_variance(V, claimed_variance(a, lam_bar), signed_kappa(signed_weights(a, lam_bar))), V, rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_inputs_stay_finite_and_positive(dtype):
    for scale in (1e-6, 1.0, 1e4):
        a, lam_bar, v = draw(3, 9, 4, 1, batch=(2,), dtype=dtype)
        out = sandwich_variance(a, lam_bar.float() * scale, v)
        assert out.dtype == torch.float32 and out.isfinite().all() and (out >= 0).all()


def test_all_weights_zero_gives_zero_and_finite_gradients():
    args = [torch.zeros(1, 3), torch.ones(3), torch.randn(3, 2)]
    args = [x.requires_grad_() for x in args]
    out = sandwich_variance(*args)
    kappa = signed_kappa(signed_weights(*args[:2]))
    assert out.eq(0).all() and kappa.eq(1).all()
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(out.sum() + kappa.sum(), args))


def test_heads_share_one_reliability():
    a, lam_bar, v = draw(2, 5, 3, 0, batch=(2, 4))
    shared = lam_bar[:, :1]
    torch.testing.assert_close(sandwich_variance(a, shared, v), sandwich_variance(a, shared.expand(2, 4, 5), v))


def test_gradcheck():
    args = [x.requires_grad_() for x in draw(2, 4, 3, 5)]
    assert torch.autograd.gradcheck(sandwich_variance, args)
    assert torch.autograd.gradcheck(lambda a, lam_bar: signed_kappa(signed_weights(a, lam_bar)), args[:2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sandwich_variance(torch.ones(1, 3), torch.ones(2), torch.ones(3, 1)), "a and lam_bar must have the same number of keys, got 3 and 2"),
        (lambda: sandwich_variance(torch.ones(1, 3), torch.ones(3), torch.ones(4, 1)), "a and v must have the same number of keys, got 3 and 4"),
        (lambda: posterior_variance(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), nu0=-1.0), "nu0 must be positive and finite, got -1.0"),
    ],
)
def test_bad_input_is_named(call, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # what a user meets: the library's own message
    with pytest.raises(ValueError, match=message):
        call()


def test_kappa_of_small_weights_in_half_precision():
    torch.testing.assert_close(signed_kappa(torch.full((1, 4), 1e-4).half()).item(), 0.25, rtol=1e-2, atol=0)


def test_the_variance_of_one_text_does_not_hear_of_another():
    gen = torch.Generator().manual_seed(0)
    a = torch.block_diag(*(torch.randn(3, 3, generator=gen) for _ in range(2)))
    v = torch.randn(6, 2, generator=gen)
    loud = v.clone()
    loud[0] = 1e6
    before, after = (sandwich_variance(a, torch.ones(6), x)[3:] for x in (v, loud))
    torch.testing.assert_close(before, after, rtol=0, atol=0)
    assert sandwich_variance(torch.zeros(0, 0), torch.ones(0), torch.zeros(0, 2)).shape == (0, 2)
