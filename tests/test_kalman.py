"The update against FilterPy, over wide precisions and dtypes, and its errors."
import numpy as np
import pytest
import torch
from filterpy.kalman import KalmanFilter
from hypothesis import given
from hypothesis import strategies as st

from bft_nb.core import Belief
from bft_nb.kalman import gain, joseph_precision, update

wide = st.floats(1e-30, 1e30)


def filterpy_step(h, lam, e, lam_obs):
    "one FilterPy update of a d-dimensional state observed directly, z = h + e"
    d = len(h)
    kf = KalmanFilter(dim_x=d, dim_z=d)
    kf.x, kf.P = np.array(h)[:, None], np.diag(1 / np.array(lam))
    kf.H, kf.R = np.eye(d), np.diag(1 / np.array(lam_obs))
    kf.update((np.array(h) + np.array(e))[:, None])
    return torch.tensor(kf.x[:, 0]), torch.tensor(kf.P).diagonal(), torch.tensor(kf.K).diagonal()


def test_one_step_of_filterpy():
    gen = torch.Generator().manual_seed(0)
    h, e = torch.randn(2, 6, generator=gen, dtype=torch.float64)
    lam, lam_obs = 10 ** (2 * torch.rand(2, 6, generator=gen, dtype=torch.float64) - 1)
    mean, covariance, K = filterpy_step(*(x.tolist() for x in (h, lam, e, lam_obs)))
    posterior = update(Belief(h, lam), Belief(e, lam_obs))
    torch.testing.assert_close(posterior.mean, mean)
    torch.testing.assert_close(1 / posterior.precision, covariance)
    torch.testing.assert_close(gain(lam, lam_obs), K)


@given(wide, wide)
def test_gain_is_a_share_and_matches_float64(lam, lam_obs):
    known = torch.tensor(lam, dtype=torch.float32, requires_grad=True)
    seen = torch.tensor(lam_obs, dtype=torch.float32, requires_grad=True)
    K = gain(known, seen)
    assert 0 <= K.item() <= 1
    want = seen.detach().double() / (known.detach().double() + seen.detach().double())
    torch.testing.assert_close(K.detach().double(), want, rtol=1e-6, atol=1e-37)
    assert all(torch.isfinite(grad) for grad in torch.autograd.grad(K, (known, seen)))


@given(wide, wide, st.floats(-1e3, 1e3), st.floats(-1e3, 1e3))
def test_posterior_lies_between_prior_and_observation(lam, lam_obs, h, z):
    prior = Belief(torch.tensor([h]), torch.tensor([lam]))
    posterior = update(prior, Belief(torch.tensor([z]) - prior.mean, torch.tensor([lam_obs])))
    lo, hi, slack = min(h, z), max(h, z), 1e-6 * (1 + abs(h) + abs(z))
    assert lo - slack <= posterior.mean.item() <= hi + slack
    assert torch.isfinite(posterior.precision).all() and posterior.precision >= prior.precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_mean_keeps_its_dtype_and_precision_is_at_least_float32(dtype):
    posterior = update(Belief(torch.ones(2, 3, dtype=dtype), torch.full((2, 3), 300.0)), Belief(torch.ones(2, 3, dtype=dtype), torch.ones(2, 3)))
    assert posterior.mean.dtype == dtype and posterior.precision.dtype == torch.float32
    torch.testing.assert_close(posterior.precision, torch.full((2, 3), 301.0), rtol=0, atol=0)


def test_no_observation_changes_nothing():
    prior = Belief(torch.randn(4), torch.rand(4) + 0.1)
    torch.testing.assert_close(update(prior, Belief(torch.randn(4), torch.zeros(4))), prior, rtol=0, atol=0)


def test_no_prior_is_the_plain_residual():
    h, e = torch.randn(2, 5)
    torch.testing.assert_close(update(Belief(h, torch.full((5,), 1e-30)), Belief(e, torch.ones(5))).mean, h + e)


def test_order_of_observations_does_not_matter():
    prior = Belief(torch.randn(5).double(), torch.rand(5).double() + 0.1)
    seen = [Belief(torch.randn(5).double(), torch.rand(5).double() + 0.1) for _ in range(3)]

    def observe(belief, z):
        return update(belief, Belief(z.mean - belief.mean, z.precision))

    forward, backward = prior, prior
    for z in seen:
        forward = observe(forward, z)
    for z in reversed(seen):
        backward = observe(backward, z)
    torch.testing.assert_close(forward, backward)


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(-1, 2))
def test_joseph_never_beats_the_optimal_gain(lam, lam_obs, applied):
    lam, lam_obs, applied = torch.tensor([lam, lam_obs, applied], dtype=torch.float64)
    assert joseph_precision(lam, lam_obs, applied) <= (lam + lam_obs) * (1 + 1e-12)
    torch.testing.assert_close(joseph_precision(lam, lam_obs, gain(lam, lam_obs)), lam + lam_obs)


def test_joseph_with_a_forced_gain_against_simulation():
    gen = torch.Generator().manual_seed(0)
    lam, lam_obs, applied = 4.0, 1.0, 0.7
    prior_error, noise = torch.randn(2, 200_000, generator=gen, dtype=torch.float64)
    error = (1 - applied) * prior_error * lam**-0.5 - applied * noise * lam_obs**-0.5
    got = joseph_precision(*(torch.tensor(x, dtype=torch.float64) for x in (lam, lam_obs, applied)))
    torch.testing.assert_close(got, 1 / error.var(), rtol=0.02, atol=0)


def test_gradcheck():
    args = [(torch.rand(4, dtype=torch.float64) + 0.2).requires_grad_() for _ in range(4)]
    assert torch.autograd.gradcheck(lambda h, lam, e, lo: tuple(update(Belief(h, lam), Belief(e, lo))), args)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"got \[\(2,\), \(3,\)\]"):
        update(Belief(torch.ones(2), torch.ones(2)), Belief(torch.ones(3), torch.ones(3)))


def test_an_infinite_precision_is_refused():
    certain, known = (Belief(torch.zeros(1), torch.tensor([x])) for x in (torch.inf, 1.0))
    for pair in ((known, certain), (certain, known)):
        with pytest.raises(ValueError, match="the sum of both precisions must be finite, got inf"):
            update(*pair)
