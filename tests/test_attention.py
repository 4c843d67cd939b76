"The obligations of an implementation of attention: equality of its forms, edge cases, memory, gradients."

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import peak_bytes
from torch.testing import assert_close

from bft_nb.attention import NO_EVIDENCE, moments_blocked, observe
from bft_nb.kriging import effective_sample_size, kriging_mean, kriging_variance, kriging_weights
from bft_nb.reml import observation_variance, scatter


def draw(b=2, h=2, t=7, k=4, dtype=torch.float64, seed=0):
    gen = torch.Generator().manual_seed(seed)
    q, key, v = (torch.randn(b, h, t, k, generator=gen, dtype=torch.float64).to(dtype) for _ in range(3))
    lam_bar = (0.1 + 3 * torch.rand(b, t, generator=gen, dtype=torch.float64)).to(torch.promote_types(dtype, torch.float32))
    return q, key, v, lam_bar


def padding(b, t, shortest=1):
    "True where a key is real: sequences of lengths t, …, right-padded."
    lengths = torch.linspace(t, max(shortest, 1), b).long()
    return (torch.arange(t) < lengths[:, None])[:, None, None, :]


@settings(max_examples=40)
@given(
    b=st.integers(1, 3), h=st.integers(1, 3), t=st.integers(1, 150), k=st.integers(1, 5), causal=st.booleans(),
    mask=st.sampled_from(["none", "padding", "random", "float"]), resolution=st.sampled_from(["diagonal", "isotropic"]),
    weights=st.sampled_from(["reliability", "precision"]), nu0=st.sampled_from([0.3, 1.0, 4.0]),
)  # fmt: skip
def test_blocked_equals_explicit(b, h, t, k, causal, mask, resolution, weights, nu0):
    args = [x.requires_grad_() for x in draw(b, h, t, k)]
    gen = torch.Generator().manual_seed(t)
    m = {
        "none": None, "padding": padding(b, t), "random": torch.rand(b, h, t, t, generator=gen) < 0.5,
        "float": torch.randn(1, h, t, t, generator=gen, dtype=torch.float64).masked_fill(torch.rand(1, h, t, t, generator=gen) < 0.3, -torch.inf),
    }[mask]  # fmt: skip

    def run(impl):
        seen = observe(*args, mask=m, is_causal=causal, resolution=resolution, weights=weights, nu0=nu0, impl=impl)
        loss = seen.mean.sin().sum() + (1 + seen.precision).log().sum() + seen.n_eff.sum()
        return [*seen, *torch.autograd.grad(loss, args)]

    for got, want in zip(run("blocked"), run("explicit"), strict=True):
        assert torch.isfinite(got).all()
        assert_close(got, want)


def test_blocked_in_float32_against_explicit_in_float64_at_300():
    q, k, v, lam_bar = draw(3, 2, 300, 32, torch.float32)
    gen = torch.Generator().manual_seed(5)
    mask = padding(3, 300, 40) & (torch.rand(3, 2, 300, 300, generator=gen) < 0.8)
    results = {}
    for impl, dtype in (("explicit", torch.float64), ("blocked", torch.float32)):
        args = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, lam_bar)]
        seen = observe(*args, mask=mask, is_causal=True, impl=impl, shift=torch.zeros(()))
        variance = seen.precision.reciprocal().where(seen.n_eff.unsqueeze(-1) > 0, 0)
        grads = torch.autograd.grad((seen.mean.sum() + variance.sum()) / 300, args)
        results[impl] = [seen.mean, variance], grads
    for got, want in zip(results["blocked"][0], results["explicit"][0], strict=True):
        assert ((got - want).abs() / want.abs().clamp(min=1)).max() < 1e-6
    for got, want in zip(results["blocked"][1], results["explicit"][1], strict=True):
        assert (got - want).abs().max() < 5e-6


def test_it_is_chapters_10_and_11():
    q, k, v, lam_bar = draw()
    seen = observe(q, k, v, lam_bar)
    w = kriging_weights(q @ k.mT / 2, lam_bar[:, None])
    n, s2_0 = effective_sample_size(w), kriging_variance(w, lam_bar[:, None])
    assert_close(seen.mean, kriging_mean(w, v))
    assert_close(seen.n_eff, n)
    assert_close(seen.precision.reciprocal(), observation_variance(scatter(w, v), 1 / n[..., None], s2_0[..., None]))


def test_uniform_precision_is_plain_attention():
    q, k, v, lam_bar = draw(t=20)
    for causal in (True, False):
        plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        assert_close(observe(q, k, v, torch.full_like(lam_bar, 1.7), is_causal=causal).mean, plain)


@pytest.mark.parametrize("resolution", ["diagonal", "isotropic"])
def test_gradcheck(resolution):
    args = [x.requires_grad_() for x in draw(2, 2, 5, 3)]

    def run(*args):
        return observe(*args, mask=padding(2, 5, 2), is_causal=True, resolution=resolution)

    assert torch.autograd.gradcheck(run, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("impl", ["explicit", "blocked"])
def test_finite_over_the_range_of_precisions(dtype, scale, impl):
    q, k, v, lam_bar = draw(2, 2, 9, 4, dtype)
    lam_bar = (lam_bar * scale).clamp(1e-6, 1e6).requires_grad_()
    lam_bar.data[0, 0], lam_bar.data[0, 1] = 1e-6, 1e6
    one_key = torch.zeros(2, 1, 1, 9, dtype=torch.bool)
    one_key[..., 3] = True
    for mask, values in ((None, v), (one_key, v), (None, torch.full_like(v, 3.0)), (torch.zeros_like(one_key), v)):
        inputs = [x.detach().requires_grad_() for x in (q, k, values)]
        seen = observe(*inputs, lam_bar, mask=mask, impl=impl)
        assert seen.mean.dtype == dtype and seen.precision.dtype == torch.float32
        assert all(torch.isfinite(x).all() for x in seen) and (seen.precision > 0).all()
        grads = torch.autograd.grad(seen.mean.float().sum() + seen.precision.log().sum(), [*inputs, lam_bar])
        assert all(torch.isfinite(g).all() for g in grads)


def test_one_token():
    q, k, v, lam_bar = draw(1, 1, 1, 3)
    seen = observe(q, k, v, lam_bar, is_causal=True)
    assert_close(seen.mean, v)
    assert_close(seen.precision, lam_bar.expand(1, 1, 1, 3))


def test_nothing_visible_is_no_evidence():
    q, k, v, lam_bar = draw(1, 1, 3, 2)
    seen = observe(q, k, v, lam_bar, mask=torch.zeros(1, 1, 3, 3, dtype=torch.bool))
    assert (seen.mean == 0).all() and (seen.n_eff == 0).all()
    assert_close(seen.precision, torch.full_like(seen.precision, 1 / NO_EVIDENCE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_least_number_of_a_mask_hides_as_minus_infinity_does(dtype):
    q, k, v, lam_bar = draw(dtype=torch.float32)
    hidden = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.4
    least, infinite = (torch.zeros(2, 1, 7, 7, dtype=dtype).masked_fill(hidden, x) for x in (torch.finfo(dtype).min, -torch.inf))
    for weights in ("reliability", "precision"):
        for got, want in zip(observe(q, k, v, lam_bar, mask=least, weights=weights), observe(q, k, v, lam_bar, mask=infinite, weights=weights), strict=True):
            assert_close(got, want)


@pytest.mark.parametrize("offset", [1e3, torch.tensor([1e3, -500.0, 0.0, 30.0])])
def test_scatter_does_not_feel_an_offset_in_float32(offset):
    q, k, v, lam_bar = draw(2, 2, 40, 4, torch.float32)
    v = (v * 64).round() / 64  # so that adding the offset is exact and any difference is the code's
    near, far = (observe(q, k, x, lam_bar, is_causal=True) for x in (v, v + offset))
    assert_close(far.precision, near.precision, rtol=1e-5, atol=0)
    assert_close(far.mean - offset, near.mean, rtol=0, atol=1e-4)


def test_permuting_keys_changes_nothing():
    q, k, v, lam_bar = draw(2, 2, 12, 4)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    for got, want in zip(observe(q, k[:, :, order], v[:, :, order], lam_bar[:, order]), observe(q, k, v, lam_bar), strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("side", ["left", "right"])
def test_content_and_side_of_padding_change_nothing(side):
    q, k, v, lam_bar = draw(1, 2, 6, 4)
    want = observe(q, k, v, lam_bar, is_causal=True)

    def pad(x, dim):
        junk = torch.full([3 if i == dim % x.dim() else n for i, n in enumerate(x.shape)], 77.0, dtype=x.dtype)
        return torch.cat([junk, x] if side == "left" else [x, junk], dim)

    real = torch.arange(9) >= 3 if side == "left" else torch.arange(9) < 6
    got = observe(*(pad(x, 2) for x in (q, k, v)), pad(lam_bar, 1), mask=real[None, None, None], is_causal=True)
    for g, w in zip(got, want, strict=True):
        assert_close(g[:, :, real], w)


def test_no_rounding_leaks_from_the_future():
    q, k, v, lam_bar = draw(1, 2, 200, 4, torch.float32)
    other = v.clone()
    other[:, :, 150:] += 100.0
    for got, want in zip(observe(q, k, other, lam_bar, is_causal=True), observe(q, k, v, lam_bar, is_causal=True), strict=True):
        assert torch.equal(got[:, :, :150], want[:, :, :150])


def test_precision_reading_counts_keys():
    q, k, v, lam_bar = draw(1, 1, 6, 2)
    seen = observe(q, k, v, lam_bar, is_causal=True, weights="precision")
    triangle = torch.ones(6, 6, dtype=torch.bool).tril()
    w = kriging_weights(q @ k.mT / 2**0.5, lam_bar[:, None], triangle)
    s2_0, keys = kriging_variance(w, lam_bar[:, None]).unsqueeze(-1), torch.arange(1, 7)[None, None, :, None]
    assert_close(seen.precision.reciprocal(), (s2_0 + scatter(w, v)) / keys)


@pytest.mark.parametrize("mask", [None, "padding"])
def test_peak_memory_of_blocked_is_a_tenth_at_2048(mask):
    args = [x.requires_grad_() for x in draw(1, 2, 2048, 32, torch.float32)]

    def run(impl):
        seen = observe(*args, mask=None if mask is None else padding(1, 2048), is_causal=True, impl=impl)
        (seen.mean.sum() + seen.precision.log().sum()).backward()

    blocked, explicit = peak_bytes(lambda: run("blocked")), peak_bytes(lambda: run("explicit"))
    assert explicit > 2 * 4 * 2048**2  # the measure sees at least one table of weights
    assert blocked <= explicit / 10


def test_peak_memory_is_linear_in_the_length():
    def run(b, t):
        args = [x.requires_grad_() for x in draw(b, 2, t, 32, torch.float32)]
        return peak_bytes(lambda: observe(*args, is_causal=True).precision.log().sum().backward())

    assert run(1, 2048) <= 1.1 * run(4, 512)


def test_backward_of_backward_is_refused():
    args = [x.requires_grad_() for x in draw(1, 1, 4, 2)]
    (g,) = torch.autograd.grad(observe(*args).mean.sin().sum(), args[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


def test_blocks_do_not_matter():
    q, k, v, lam_bar = draw(1, 2, 33, 4)
    want = moments_blocked(q, k, v, lam_bar[:, None], None, None, True, True, block=64)
    for block in (1, 7, 33):
        for got, w in zip(moments_blocked(q, k, v, lam_bar[:, None], None, None, True, True, block=block), want, strict=True):
            assert_close(got, w)


def test_autocast_leaves_the_scatter_in_float32():
    q, k, v, lam_bar = (x.requires_grad_() for x in draw(2, 2, 20, 4, torch.float32))
    want = observe(q, k, v, lam_bar)
    with torch.autocast("cpu", torch.bfloat16):
        got = observe(q, k, v, lam_bar)
        got.precision.log().sum().backward()
    assert torch.equal(got.precision, want.precision)
    assert torch.isfinite(q.grad).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(k=torch.zeros(1, 1, 3, 5)), ValueError, "do not fit"),
        (dict(lam_bar=torch.ones(1, 4)), ValueError, r"lam_bar must have shape \(b, j\) = \(1, 3\), got \(1, 4\)"),
        (dict(mask=torch.ones(1, 1, 2, 3, dtype=torch.bool)), ValueError, "broadcast"),
        (dict(mask=torch.ones(3, 3, dtype=torch.bool)), ValueError, "broadcast"),
        (dict(mask=torch.ones(1, 1, 3, 3, dtype=torch.int64)), TypeError, "int64"),
        (dict(mask=torch.zeros(1, 1, 3, 3, requires_grad=True)), ValueError, "gradient"),
        (dict(resolution="full"), ValueError, "'diagonal', 'isotropic', got 'full'"),
        (dict(weights="kish"), ValueError, "got 'kish'"),
        (dict(impl="fused"), ValueError, "'explicit', 'blocked', got 'fused'"),
        (dict(nu0=0.0), ValueError, "nu0"),
    ],
)
def test_bad_input_is_named(change, error, message):
    q, k, v, lam_bar = draw(1, 1, 3, 2)
    bare = inspect.unwrap(observe)  # as a user runs it: without the shape checker of these tests
    with pytest.raises(error, match=message):
        bare(**(dict(q=q, k=k, v=v, lam_bar=lam_bar) | change))


def test_causal_needs_as_many_queries_as_keys():
    q, k, v, lam_bar = draw(1, 1, 4, 2)
    with pytest.raises(ValueError, match="got 2 and 4"):
        inspect.unwrap(observe)(q[:, :, :2], k, v, lam_bar, is_causal=True)


@pytest.mark.parametrize("impl", ["explicit", "blocked"])
def test_packed_texts_do_not_hear_of_each_other_through_rounding(impl):
    q, k, v, lam_bar = draw(b=1, t=6, dtype=torch.float32)
    text = torch.arange(6) // 3
    mask = (text[:, None] == text)[None, None]
    loud = v.clone()
    loud[:, :, 0] = 1e6
    before, after = (observe(q, k, x, lam_bar, mask=mask, is_causal=True, impl=impl) for x in (v, loud))
    for x, y in zip(before, after): assert_close(x[:, :, 3:], y[:, :, 3:], rtol=0, atol=0)


def test_a_key_that_only_the_future_could_name_is_no_origin():
    q, k, v, lam_bar = draw(b=1, t=3, dtype=torch.float32)
    mask = torch.tensor([[True, True, False], [True, False, True], [True, False, True]])[None, None]
    loud = v.clone()
    loud[:, :, 1] = 1e8  # named by query 0 alone, which may not see it
    for x, y in zip(*(observe(q, k, x, lam_bar, mask=mask, is_causal=True) for x in (v, loud))): assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(2, 2, 7, 4), (7, 4), (3,), (1, 2, 2, 1, 4)])
def test_a_shift_that_is_not_one_for_all_keys_is_refused(shape):
    bare = inspect.unwrap(observe)
    with pytest.raises(ValueError, match=r"shift must be the same for all keys and broadcast to \(b, h, 1, kv\) = \(2, 2, 1, 4\), got shape"):
        bare(*draw(), shift=torch.zeros(shape).double())


def test_who_is_to_blame_and_what_is_not():
    q, k, v, lam_bar = draw(dtype=torch.float32)
    blind = torch.ones(1, 1, 7, 7, dtype=torch.bool)
    blind[..., 2, :] = False
    seen = observe(q, k, v, lam_bar, mask=blind, nu0=1e9)
    assert torch.isfinite(seen.precision).all() and (seen.precision[:, :, 2] <= 1.001 / NO_EVIDENCE).all()
    with pytest.raises(ValueError, match="lam_bar must be large enough"):
        observe(q, k, v, torch.full((2, 7), 1e-39))
    with pytest.raises(ValueError, match="nu0 and 1/lam_bar must be small enough"):
        observe(q, k, v, torch.full((2, 7), 1e-30), nu0=1e20)
    with pytest.raises(TypeError, match="is_causal must be True or False, got 'false'"):
        inspect.unwrap(observe)(q, k, v, lam_bar, is_causal="false")


def test_no_keys_and_no_queries():
    q = torch.zeros(1, 1, 0, 2)
    for mask in (None, torch.ones(1, 1, 1, 0, dtype=torch.bool)):
        assert observe(q, q, q, torch.ones(1, 0), mask=mask).mean.shape == (1, 1, 0, 2)
