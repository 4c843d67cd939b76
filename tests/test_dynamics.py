"The dynamics: Jacobians against automatic differentiation, the precision recursion, the delta method against simulation."
import inspect

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import solve_discrete_are
from torch import nn
from torch.func import jacrev, vmap

from bft_nb.core import Belief
from bft_nb.dynamics import (
    ACTIVATIONS,
    MIN_GROWTH,
    activation_and_slope,
    ffn_jacobian,
    fixed_point,
    fold_weights,
    gated_ffn_jacobian,
    norm_jacobian,
    predict,
    propagate,
    standardise,
)

EPS = 1e-5
shapes = st.tuples(st.integers(2, 9), st.integers(1, 11), st.lists(st.integers(1, 3), max_size=2), st.integers(0, 2**31))
exact = dict(rtol=1e-10, atol=1e-10)


def draw(d, f, batch, seed):
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    return dict(h=normal(*batch, d), w1=normal(f, d), wu=normal(f, d), w2=normal(d, f), b1=normal(f), bu=normal(f), weight=normal(d), bias=normal(d))


def normed(h, norm, p):
    if norm == "layer":
        return F.layer_norm(h, h.shape[-1:], p["weight"], p["bias"], EPS)
    return F.rms_norm(h, h.shape[-1:], p["weight"], EPS) if norm == "rms" else h


def behind(norm, p):
    "the arguments that a norm adds, and W ↦ W β + b"
    if norm is None:
        return {}, lambda w, b: None
    xhat, inv_std = standardise(p["h"], norm, EPS)
    return dict(norm=norm, xhat=xhat, inv_std=inv_std, norm_weight=p["weight"]), lambda w, b: w @ p["bias"] + b if norm == "layer" else b


def autodiff_diagonal(fn, h):
    d = h.shape[-1]
    return vmap(jacrev(fn))(h.reshape(-1, d)).diagonal(dim1=-2, dim2=-1).reshape(h.shape)


@pytest.mark.parametrize("norm", ["layer", "rms", None])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", torch.tanh, nn.Mish(), nn.GELU()])
@settings(max_examples=15)
@given(shape=shapes)
def test_ffn_jacobian_is_exact(activation, norm, shape):
    p = draw(*shape)
    phi = activation_and_slope(activation)[0]
    want = autodiff_diagonal(lambda h: F.linear(phi(F.linear(normed(h, norm, p), p["w1"], p["b1"])), p["w2"]), p["h"])
    extra, zero = behind(norm, p)
    pre = F.linear(normed(p["h"], norm, p), p["w1"], p["b1"])
    got = ffn_jacobian(pre, p["w1"], p["w2"], activation, a_zero=zero(p["w1"], p["b1"]), **extra)
    torch.testing.assert_close(got, want, **exact)


@pytest.mark.parametrize("norm", ["layer", "rms", None])
@pytest.mark.parametrize("activation", ["silu", "gelu", torch.sigmoid])
@settings(max_examples=15)
@given(shape=shapes)
def test_gated_ffn_jacobian_is_exact(activation, norm, shape):
    p = draw(*shape)
    phi = activation_and_slope(activation)[0]

    def pair(h):
        x = normed(h, norm, p)
        return F.linear(x, p["w1"], p["b1"]), F.linear(x, p["wu"], p["bu"])

    def branch(h):
        gate, up = pair(h)
        return F.linear(phi(gate) * up, p["w2"])

    extra, zero = behind(norm, p)
    got = gated_ffn_jacobian(
        *pair(p["h"]), p["w1"], p["wu"], p["w2"], activation, gate_zero=zero(p["w1"], p["b1"]), up_zero=zero(p["wu"], p["bu"]), **extra
    )
    torch.testing.assert_close(got, autodiff_diagonal(branch, p["h"]), **exact)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@settings(max_examples=15)
@given(shape=shapes)
def test_norm_jacobian_is_exact(norm, shape):
    p = draw(*shape)
    got = norm_jacobian(*standardise(p["h"], norm, EPS), p["weight"], norm)
    torch.testing.assert_close(got, autodiff_diagonal(lambda h: normed(h, norm, p), p["h"]), **exact)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_standardise_is_the_norm_before_its_weight(norm):
    h = torch.randn(3, 5, dtype=torch.bfloat16)
    xhat, _ = standardise(h, norm, EPS)
    want = F.layer_norm(h.float(), (5,), eps=EPS) if norm == "layer" else F.rms_norm(h.float(), (5,), eps=EPS)
    torch.testing.assert_close(xhat, want)


def test_a_real_encoder_layer():
    "the feed-forward branch of nn.TransformerEncoderLayer, with its own parameters"
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", norm_first=True, batch_first=True, dtype=torch.float64).eval()
    nn.init.normal_(layer.norm2.weight)
    nn.init.normal_(layer.norm2.bias)
    h = torch.randn(2, 3, 8, dtype=torch.float64)
    w1, b1, w2 = layer.linear1.weight, layer.linear1.bias, layer.linear2.weight
    xhat, inv_std = standardise(h, "layer", layer.norm2.eps)
    pre, a_zero = layer.linear1(layer.norm2(h)), F.linear(layer.norm2.bias, w1, b1)
    got = ffn_jacobian(pre, w1, w2, layer.activation, norm="layer", xhat=xhat, inv_std=inv_std, norm_weight=layer.norm2.weight, a_zero=a_zero)
    want = autodiff_diagonal(lambda h: layer.linear2(layer.activation(layer.linear1(layer.norm2(h)))), h)
    torch.testing.assert_close(got, want, **exact)


def test_kept_matrix_gives_the_same():
    p = draw(5, 7, [3], 0)
    extra, _ = behind("layer", p)
    pre = F.linear(p["h"], p["w1"])
    folded = fold_weights(p["w1"], p["w2"], p["weight"], "layer")
    torch.testing.assert_close(ffn_jacobian(pre, p["w1"], p["w2"], folded=folded, **extra), ffn_jacobian(pre, p["w1"], p["w2"], **extra))
    pair = fold_weights(p["w1"], p["w2"], p["weight"], "layer"), fold_weights(p["wu"], p["w2"], p["weight"], "layer")
    args = pre, F.linear(p["h"], p["wu"]), p["w1"], p["wu"], p["w2"]
    torch.testing.assert_close(gated_ffn_jacobian(*args, folded=pair, **extra), gated_ffn_jacobian(*args, **extra))


def test_ffn_jacobian_gradcheck():
    p = draw(3, 4, [2], 0)

    def jac(h, w1, w2, weight):
        xhat, inv_std = standardise(h)
        return ffn_jacobian(F.linear(xhat * weight, w1), w1, w2, "gelu", norm="layer", xhat=xhat, inv_std=inv_std, norm_weight=weight)

    assert torch.autograd.gradcheck(jac, [p[k].requires_grad_() for k in ("h", "w1", "w2", "weight")])


def test_bfloat16_layer_gives_float32_jacobian():
    p = {k: v.bfloat16() for k, v in draw(8, 16, [4], 0).items()}
    got = ffn_jacobian(F.linear(p["h"], p["w1"]), p["w1"], p["w2"], "gelu")
    assert got.dtype == torch.float32 and got.isfinite().all()


@pytest.mark.parametrize("form", [F.relu, torch.relu, nn.ReLU(), nn.ReLU(inplace=True), F.gelu, nn.GELU(), nn.GELU("tanh"), F.silu, nn.SiLU()])
def test_known_activations_take_the_closed_form(form):
    value, slope = activation_and_slope(form)
    assert (value, slope) in ACTIVATIONS.values()
    a = torch.linspace(-6, 6, 48, dtype=torch.float64)
    want = vmap(torch.func.grad(value))(a)
    torch.testing.assert_close(slope(a), want)
    torch.testing.assert_close(value(a), form(a.clone()))


def test_slopes_stay_finite_far_out():
    a = torch.tensor([-1e4, -1e2, 0.0, 1e2, 1e4])
    for _, slope in ACTIVATIONS.values():
        assert slope(a).isfinite().all()
        torch.testing.assert_close(slope(a)[[0, -1]], torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: activation_and_slope("swish"), r"one of \['gelu', 'gelu_tanh', 'relu', 'silu'\], got 'swish'"),
        (lambda: fold_weights(torch.ones(3, 2), torch.ones(3, 2)), r"w1 must be \(f, d\) and w2 \(d, f\), got \(3, 2\) and \(3, 2\)"),
        (lambda: ffn_jacobian(torch.ones(3), torch.ones(3, 2), torch.ones(2, 3), norm="layer"), "needs xhat and inv_std"),
        (lambda: standardise(torch.ones(3), "batch"), "norm must be one of 'layer', 'rms', got 'batch'"),
        (lambda: norm_jacobian(torch.ones(3), torch.ones(1), norm="batch"), "got 'batch'"),
        (lambda: fold_weights(torch.ones(3, 2), torch.ones(2, 3), norm="batch"), "got 'batch'"),
        (lambda: predict(Belief(torch.ones(2), torch.ones(2)), torch.ones(3), torch.ones(2), torch.ones(2)), r"\(2,\), got \(3,\)"),
    ],
)
def test_bad_input_is_named(call, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # what a user meets: the library's own message
    with pytest.raises(ValueError, match=message):
        call()


@given(st.floats(1e-6, 1e6), st.floats(-5, 5), st.floats(0, 10))
def test_propagate_is_positive_finite_and_bounded(lam, jac, q):
    lam, jac, q = (torch.tensor(x, dtype=torch.float32, requires_grad=True) for x in (lam, jac, q))
    out = propagate(lam, jac, q)
    assert out > 0 and torch.isfinite(out)
    if q > 1e-6:
        assert out <= (1 / q) * (1 + 1e-6)
    assert all(torch.isfinite(grad) for grad in torch.autograd.grad(out, (lam, jac, q)))


def test_nothing_happens_without_dynamics_or_noise():
    lam = torch.logspace(-30, 30, 61)
    torch.testing.assert_close(propagate(lam, torch.zeros(61), torch.zeros(61)), lam, rtol=0, atol=0)


def test_clamp_at_minus_one_without_noise():
    torch.testing.assert_close(propagate(torch.tensor(1e6), torch.tensor(-1.0), torch.tensor(0.0)), torch.tensor(1e6 / MIN_GROWTH))


def test_predict_keeps_the_means_dtype():
    belief = Belief(torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3))
    out = predict(belief, torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(2, 3), torch.full((3,), 0.5))
    assert out.mean.dtype == torch.bfloat16 and out.precision.dtype == torch.float32
    torch.testing.assert_close(out.precision, torch.full((2, 3), 2 / 3))


@given(st.floats(0.05, 20), st.floats(-0.9, 1), st.floats(0.01, 5))
def test_fixed_point_solves_the_riccati_equation(lam_obs, jac, q):
    "SciPy's discrete algebraic Riccati equation of the same scalar filter"
    (variance,) = solve_discrete_are([[1 + jac]], [[1.0]], [[q]], [[1 / lam_obs]]).ravel()
    got = fixed_point(*(torch.tensor(x, dtype=torch.float64) for x in (lam_obs, jac, q)))
    torch.testing.assert_close(1 / got, torch.tensor(variance), rtol=1e-7, atol=0)


@given(st.floats(1e-6, 1e6), st.floats(0.1, 10), st.floats(-1.9, 1), st.floats(0.05, 5))
def test_every_start_converges(start, lam_obs, jac, q):
    start, lam_obs, jac, q = (torch.tensor(x, dtype=torch.float64) for x in (start, lam_obs, jac, q))
    lam = start
    for _ in range(200):
        lam = propagate(lam + lam_obs, jac, q)
    torch.testing.assert_close(lam, fixed_point(lam_obs, jac, q), rtol=1e-8, atol=0)


def test_fixed_point_without_noise():
    got = fixed_point(torch.ones(3), torch.tensor([-0.5, 0.0, 0.5]), torch.zeros(3))
    torch.testing.assert_close(got, torch.tensor([torch.inf, torch.inf, 0.8]))
    lam_obs, jac, q = (torch.tensor(x, requires_grad=True) for x in (1.0, 0.5, 0.0))
    assert all(torch.isfinite(grad) for grad in torch.autograd.grad(fixed_point(lam_obs, jac, q), (lam_obs, jac, q)))


def test_delta_method_against_simulation_and_where_it_breaks():
    z = torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    h, branch = torch.tensor(0.5, dtype=torch.float64), torch.relu  # the kink lies 0.5 below

    def ratio(sd):
        x = h + sd * z
        return ((x + branch(x)).var() * propagate(torch.tensor(sd**-2), torch.tensor(1.0), torch.tensor(0.0))).item()

    assert ratio(0.05) == pytest.approx(1, abs=0.01)
    assert ratio(2.0) < 0.75  # the belief is four times wider than the distance to the kink


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_slopes_are_flat_far_out_in_half_precision(name):
    slope = ACTIVATIONS[name][1]
    assert slope(torch.tensor([-300.0, 300.0]).half()).tolist() == [0.0, 1.0]


def test_a_precision_of_another_shape_than_the_mean_is_refused():
    belief = Belief(torch.zeros(3), torch.ones(3))
    with pytest.raises(ValueError, match=r"must broadcast to the shape of the mean, \(3,\), got \(5, 3\)"):
        inspect.unwrap(predict)(belief, torch.zeros(3), torch.zeros(5, 3), torch.zeros(()))
