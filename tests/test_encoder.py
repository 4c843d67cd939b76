"The drop-in encoder: torch's interface, the degenerate case, precision through every path."

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from bft_nb.core import Belief, certain
from bft_nb.encoder import BFTEncoder, BFTEncoderLayer, ConstantPrecision, ItemPrecision, MLPPrecision, precision_parameters
from bft_nb.layer import normalise, project, reliability

SHAPE = dict(d_model=12, nhead=3, dim_feedforward=20, dropout=0.0, batch_first=True, norm_first=True)


def randomise(module, seed=0):
    "Nothing at its special initial value, so that a missing term shows."
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=gen).to(p))
    return module


def pair(layers=2, norm=True, seed=0, shape=SHAPE, **options):
    "A plain encoder and a filtering one with the same weights."
    torch.manual_seed(seed)
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(**shape), layers, nn.LayerNorm(12) if norm else None, enable_nested_tensor=False)
    randomise(plain)
    bft = BFTEncoder(BFTEncoderLayer(**shape, **options), layers, nn.LayerNorm(12) if norm else None)
    missing, unexpected = bft.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and all(name.endswith("raw_noise") for name in missing)
    return plain.eval(), bft.eval()


def tokens(b=3, t=6, d=12, seed=1, dtype=torch.float32):
    return torch.randn(b, t, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def uncertain(mean, seed=2):
    return Belief(mean, 0.1 + 3 * torch.rand(mean.shape, generator=torch.Generator().manual_seed(seed), dtype=mean.dtype))


CAUSAL = nn.Transformer.generate_square_subsequent_mask


@settings(max_examples=30)
@given(
    t=st.integers(1, 9), batch_first=st.booleans(), norm_first=st.booleans(), bias=st.booleans(), activation=st.sampled_from(["relu", "gelu"]),
    masks=st.sets(st.sampled_from(["causal", "hint", "padding"])), floating=st.booleans(),
)  # fmt: skip
def test_degenerate_case_is_torchs_encoder(t, batch_first, norm_first, bias, activation, masks, floating):
    shape = SHAPE | dict(batch_first=batch_first, norm_first=norm_first, bias=bias, activation=activation)
    plain, bft = pair(shape=shape, kriging=False, kalman=False)
    x = tokens(t=t) if batch_first else tokens(t=t).transpose(0, 1)
    mask = CAUSAL(t) if masks else None
    mask = mask if floating or mask is None else mask.isinf()
    padding = torch.arange(t) >= torch.tensor([[t], [max(t - 1, 1)], [1]]) if "padding" in masks else None
    want = plain(x, mask=mask, src_key_padding_mask=padding if padding is None or not floating else torch.zeros(3, t).masked_fill(padding, -torch.inf))
    got = bft(x, mask=None if "hint" in masks else mask, src_key_padding_mask=padding, is_causal="hint" in masks and mask is not None)
    assert_close(got, want, rtol=1e-6, atol=5e-6)
    layer_got = bft.layers[0](x, mask, padding)
    assert_close(layer_got, plain.layers[0](x, mask, padding), rtol=1e-6, atol=5e-6)


def test_constructor_takes_torchs_arguments_in_order():
    import inspect

    theirs, ours = (list(inspect.signature(c.__init__).parameters) for c in (nn.TransformerEncoderLayer, BFTEncoderLayer))
    assert ours[: len(theirs)] == theirs
    theirs, ours = (list(inspect.signature(c.__init__).parameters) for c in (nn.TransformerEncoder, BFTEncoder))
    assert ours == theirs
    for cls, torchs in ((BFTEncoderLayer, nn.TransformerEncoderLayer), (BFTEncoder, nn.TransformerEncoder)):
        theirs, ours = (list(inspect.signature(c.forward).parameters) for c in (torchs, cls))
        assert ours[: len(theirs)] == theirs


def test_a_layer_works_inside_torchs_encoder():
    torch.manual_seed(0)
    layer = BFTEncoderLayer(12, 3, 20, batch_first=True)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] * 5 + [True]])
    with torch.no_grad(), pytest.warns(UserWarning, match="nested_tensor"):
        out = nn.TransformerEncoder(layer, 2).eval()(tokens(), src_key_padding_mask=padding)
    assert out.shape == (3, 6, 12) and torch.isfinite(out).all()


@pytest.mark.parametrize("batch_first", [True, False])
def test_layouts_agree(batch_first):
    _, bft = pair()
    for layer in bft.layers:
        layer.batch_first = batch_first
    belief = uncertain(tokens())
    want = pair()[1](belief, is_causal=True)
    turn = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    got = bft(Belief(*map(turn, belief)), is_causal=True)
    for g, w in zip(got, want, strict=True):
        assert_close(turn(g), w)
    one = bft(Belief(*(x[1] for x in belief)), is_causal=True)
    for g, w in zip(one, want, strict=True):
        assert_close(g, w[1])


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_batch_composition_change_nothing(side, norm_first):
    _, bft = pair(shape=SHAPE | dict(norm_first=norm_first))
    alone = uncertain(tokens(1, 6))
    want = bft(alone, is_causal=True)
    junk = Belief(torch.full((1, 3, 12), 50.0), torch.full((1, 3, 12), 1e-6))
    padded = Belief(*(torch.cat([j, x] if side == "left" else [x, j], 1) for x, j in zip(alone, junk, strict=True)))
    other = uncertain(tokens(1, 9, seed=7), seed=8)
    batch = Belief(*(torch.cat([x, y]) for x, y in zip(padded, other, strict=True)))
    hidden = torch.arange(9) < 3 if side == "left" else torch.arange(9) >= 6
    padding = torch.stack([hidden, torch.zeros(9, dtype=torch.bool)])
    got = bft(batch, src_key_padding_mask=padding, is_causal=True)
    assert all(torch.isfinite(x).all() for x in got)
    for g, w in zip(got, want, strict=True):
        assert_close(g[:1, ~hidden], w, rtol=1e-4, atol=1e-5)


def test_precision_beside_a_tensor_gives_the_mean_of_the_belief():
    _, bft = pair()
    belief = uncertain(tokens())
    mean = bft(belief.mean, is_causal=True, precision=belief.precision)
    assert torch.equal(mean, bft(belief, is_causal=True).mean)
    assert not torch.equal(mean, bft(belief.mean, is_causal=True))


def test_a_reliable_token_is_heard_more_and_listens_less():
    _, bft = pair(layers=1)
    x, lam = tokens(1, 5), torch.ones(1, 5, 12)
    sure, unsure = lam.clone(), lam.clone()
    sure[:, 2], unsure[:, 2] = 20.0, 0.05
    gains = {name: bft(Belief(x, p), with_intermediates=True)[1][0].gain[0, 2].mean() for name, p in (("sure", sure), ("even", lam), ("unsure", unsure))}
    assert gains["sure"] < gains["even"] < gains["unsure"]


@pytest.mark.parametrize("jacobian", ["detached", "full", "none"])
def test_jacobian_of_the_network_is_autograds(jacobian):
    layer = randomise(BFTEncoderLayer(**SHAPE, activation="gelu", jacobian=jacobian).double())
    belief = uncertain(tokens(1, 4, dtype=torch.float64))

    def network(h):
        return layer.linear2(torch.nn.functional.gelu(layer.linear1(layer.norm2(h))))

    step = layer.step(belief)
    full = torch.func.vmap(torch.func.jacrev(network))(step.posterior.mean[0])
    jac = torch.zeros(4, 12).double() if jacobian == "none" else full.diagonal(dim1=-2, dim2=-1)
    want = 1 / ((1 + jac) ** 2 / step.posterior.precision[0] + layer.process_noise)
    assert_close(step.predicted.precision[0], want)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_activations_by_name_and_in_place(name):
    torch.manual_seed(0)
    layers = [BFTEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True, activation=name)]
    if name == "silu":
        layers.append(BFTEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True, activation=nn.SiLU(inplace=True)))
        layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        first, *rest = [layer(certain(x)) for layer in layers]
    assert torch.isfinite(first.precision).all()
    for other in rest: assert_close(first, other)


IN_PLACE = [nn.SiLU, nn.ReLU, nn.Hardswish, nn.ELU, nn.Mish, lambda inplace: nn.LeakyReLU(0.1, inplace)]


@pytest.mark.parametrize("make", IN_PLACE)
@pytest.mark.parametrize("jacobian", ["detached", "full"])
def test_an_activation_that_overwrites_its_input_is_applied_once(make, jacobian):
    torch.manual_seed(0)
    shape = SHAPE | dict(activation=make(inplace=False))
    known = randomise(BFTEncoderLayer(**shape, jacobian=jacobian))
    over = BFTEncoderLayer(**SHAPE | dict(activation=make(inplace=True)), jacobian=jacobian)
    over.load_state_dict(known.state_dict())
    x = tokens()
    found = [layer(Belief(x, torch.full_like(x, 2.0))) for layer in (known, over)]
    assert_close(*found)
    grads = [torch.autograd.grad(out.mean.square().sum() + out.precision.sum(), [p for n, p in layer.named_parameters() if "linear" in n]) for out, layer in zip(found, (known, over))]
    assert_close(*grads)
    assert_close(over(x), known(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_round_the_precision_of_an_observation(dtype):
    layer = randomise(BFTEncoderLayer(**SHAPE))
    x = certain(tokens())
    with torch.no_grad():
        wide = layer.step(x).observation.precision
        with torch.autocast("cpu", dtype):
            step = layer.step(x)
            assert step.observation.precision.dtype == torch.float32
            assert_close(step.observation.precision, wide, rtol=0.1, atol=0)  # the means that it is taken from are rounded
            layer.self_attn.out_proj.weight.zero_()
            assert all(torch.isfinite(b.mean).all() and torch.isfinite(b.precision).all() for b in (layer.step(x).observation, layer(x)))


def test_a_mask_in_half_precision_hides_beside_a_mask_of_padding():
    _, bft = pair(layers=1, norm=False)
    mask = torch.zeros(6, 6).half()
    mask[0] = torch.finfo(torch.float16).min
    for padding in (None, torch.zeros(3, 6, dtype=torch.bool)):
        _, (step,) = bft(certain(tokens()), mask=mask, src_key_padding_mask=padding, with_intermediates=True)
        assert (step.n_eff[:, :, 0] == 0).all() and (step.n_eff[:, :, 1:] > 1).all()


@pytest.mark.parametrize(("name", "value", "error"), [("norm_first", "false", TypeError), ("batch_first", 1, TypeError), ("bias", None, TypeError), ("layer_norm_eps", -5.0, ValueError), ("dropout", True, ValueError)])
def test_torchs_own_arguments_are_looked_at(name, value, error):
    with pytest.raises(error, match=name):
        BFTEncoderLayer(**SHAPE | {name: value})


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_rms_norm_without_a_constant_of_its_own_in_half_precision(scale):
    norm, h = nn.RMSNorm(16, dtype=torch.bfloat16), scale * tokens(d=16)
    found, wide = normalise(Belief(h.bfloat16(), torch.ones(3, 6, 16)), norm), normalise(Belief(h.bfloat16().float(), torch.ones(3, 6, 16)), nn.RMSNorm(16))
    assert_close(found.mean.float(), wide.mean, rtol=1e-2, atol=1e-2)
    assert_close(found.precision, wide.precision, rtol=1e-2, atol=0)


def test_precision_stays_below_one_over_q():
    _, bft = pair(layers=6, norm=False, process_noise=0.5)
    for _, lam in (bft(Belief(tokens(), torch.full((3, 6, 12), p))) for p in (1e-6, 1.0, 1e6)):
        assert (lam > 0).all() and (lam < 2 + 1e-5).all()


def test_without_noise_the_filter_freezes():
    torch.manual_seed(0)
    shape = SHAPE | dict(dim_feedforward=4)
    gains = {}
    for q in (0.0, 0.5):
        bft = BFTEncoder(BFTEncoderLayer(**shape, process_noise=q, jacobian="none"), 8)
        gains[q] = [s.gain.mean().item() for s in bft(certain(tokens()), with_intermediates=True)[1]]
    assert gains[0.0][-1] < 0.6 * gains[0.0][0] and gains[0.5][-1] > gains[0.0][-1]


def test_isotropic_projection_is_the_diagonal_one_with_equal_variances():
    from bft_nb.attention import Observation

    weight = tokens(1, 12)[0, :12].repeat(2, 1)[:12]
    mean, precision = torch.zeros(1, 3, 5, 4), 0.5 + torch.rand(1, 3, 5, 1)
    n_eff = torch.ones(1, 3, 5)
    got = project(Observation(mean, precision, n_eff), weight)
    want = project(Observation(mean, precision.expand(1, 3, 5, 4), n_eff), weight)
    assert_close(got.precision, want.precision)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(None)])
def test_an_output_projection_of_zeros_is_certain_of_its_bias(rows):
    layer = BFTEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    with torch.no_grad():
        layer.self_attn.out_proj.weight[rows] = 0
        layer.self_attn.out_proj.bias.fill_(0.5)
    x = torch.randn(2, 3, 8).requires_grad_()
    step = layer.step(certain(x))
    assert_close(step.posterior.mean[..., rows], x[..., rows] + 0.5)
    (grad,) = torch.autograd.grad(step.predicted.mean.sum() + step.predicted.precision.sum(), x)
    assert torch.isfinite(grad).all() and all(torch.isfinite(belief.precision).all() for belief in (step.observation, step.predicted))


def test_projection_adds_variances_in_simulation():
    gen = torch.Generator().manual_seed(0)
    weight, sd = torch.randn(3, 4, generator=gen), torch.tensor([0.5, 1.0, 2.0, 0.1])
    from bft_nb.attention import Observation

    heads = Observation(torch.zeros(1, 2, 1, 2), (sd**-2).view(1, 2, 1, 2), torch.ones(1, 2, 1))
    sample = (sd * torch.randn(200_000, 4, generator=gen)) @ weight.T
    assert_close(project(heads, weight).precision[0, 0], 1 / sample.var(0), rtol=2e-2, atol=0)


@pytest.mark.parametrize("norm", [nn.LayerNorm(12), nn.RMSNorm(12)])
def test_normalise_is_the_delta_method(norm):
    norm = randomise(norm.double())
    belief = uncertain(tokens(1, 4, dtype=torch.float64))
    jac = torch.func.vmap(torch.func.jacrev(norm))(belief.mean[0]).diagonal(dim1=-2, dim2=-1)
    got = normalise(belief, norm)
    assert_close(got.mean, norm(belief.mean))
    assert_close(got.precision[0], belief.precision[0] / jac**2, rtol=1e-5, atol=1e-5)


def test_every_parameter_learns_except_the_last_noise():
    torch.manual_seed(0)
    bft = BFTEncoder(BFTEncoderLayer(**SHAPE), 2)
    items = torch.tensor([[1, 2, 3], [3, 1, 2]])
    tau = ItemPrecision(3)
    x = tokens(2, 3)
    out = bft(Belief(x, tau(items, x)), is_causal=True).mean
    (out * torch.randn(out.shape)).sum().backward()
    assert bft.layers[-1].raw_noise.grad is None and not bft.layers[-1].raw_noise.requires_grad
    for name, p in [*bft.named_parameters(), *tau.named_parameters()]:
        if p.requires_grad:
            assert p.grad is not None and p.grad.abs().sum() > 0, name


def test_bfloat16_is_finite_forwards_and_backwards():
    torch.manual_seed(0)
    bft = BFTEncoder(BFTEncoderLayer(**SHAPE, dtype=torch.bfloat16), 3, nn.LayerNorm(12, dtype=torch.bfloat16))
    for lam in (1e-6, 1.0, 1e6):
        x = tokens(dtype=torch.bfloat16).requires_grad_()
        out = bft(Belief(x, torch.full(x.shape, lam)), is_causal=True)
        out.mean.float().square().sum().backward()
        assert out.mean.dtype == torch.bfloat16 and out.precision.dtype == torch.float32
        assert torch.isfinite(out.mean).all() and torch.isfinite(out.precision).all() and torch.isfinite(x.grad).all()


def test_autocast_keeps_precision_in_float32():
    _, bft = pair()
    with torch.autocast("cpu", torch.bfloat16):
        out = bft(uncertain(tokens()), is_causal=True)
    assert out.precision.dtype == torch.float32 and torch.isfinite(out.mean).all()


def test_save_load_copy_and_compile_of_state():
    _, bft = pair()
    again = BFTEncoder(BFTEncoderLayer(**SHAPE), 2, nn.LayerNorm(12)).eval()
    again.load_state_dict(bft.state_dict())
    belief = uncertain(tokens())
    for other in (again, copy.deepcopy(bft)):
        for got, want in zip(other(belief), bft(belief), strict=True):
            assert torch.equal(got, want)


def test_torch_export_gives_the_same_encoder():
    torch.manual_seed(0)
    encoder, x = BFTEncoder(BFTEncoderLayer(**SHAPE), 2).eval(), tokens(2, 5)
    exported = torch.export.export(encoder, (x,), {"is_causal": True}).module()
    assert_close(exported(2 * x, is_causal=True), encoder(2 * x, is_causal=True))


def test_checkpointing_gives_the_same_gradients():
    _, bft = pair(layers=1)
    belief = uncertain(tokens())
    grads = []
    for checkpoint in (False, True):
        mean = belief.mean.clone().requires_grad_()
        inp = Belief(mean, belief.precision)
        out = torch.utils.checkpoint.checkpoint(bft, inp, use_reentrant=False) if checkpoint else bft(inp)
        out.mean.square().sum().backward()
        grads.append(mean.grad)
    assert_close(*grads)


def test_initial_precisions():
    x, items = torch.randn(2, 3, 4), torch.tensor([[1, 2, 0], [2, 2, 1]])
    tau = ItemPrecision(2, torch.tensor([2.0, 5.0]))
    assert_close(tau(items, x)[..., 0], torch.tensor([[2.0, 5.0, 1e-6], [5.0, 5.0, 2.0]]))
    assert tau(items, x).shape == x.shape
    assert_close(tau.tau, torch.tensor([2.0, 5.0]))
    tau(items, x).sum().backward()
    assert tau.log_tau.weight.grad[0] == 0
    assert_close(MLPPrecision(4)(items, x), torch.ones_like(x))
    assert_close(ConstantPrecision(3.0)(items, x), torch.full_like(x, 3.0))
    assert_close(reliability(certain(x)), torch.ones(2, 3))


def test_precision_parameters_are_all_and_only_those_of_precision():
    model = nn.ModuleDict(dict(enc=BFTEncoder(BFTEncoderLayer(**SHAPE), 2), tau=ItemPrecision(5), mlp=MLPPrecision(12), one=ConstantPrecision()))
    names = {id(p): name for name, p in model.named_parameters()}
    got = {names[id(p)] for p in precision_parameters(model)}
    assert got == {name for name in names.values() if "noise" in name or name.startswith(("tau", "mlp", "one"))}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, x: m(Belief(x, -torch.ones_like(x))), ValueError, "positive and finite"),
        (lambda m, x: m(Belief(x, torch.zeros_like(x))), ValueError, "got 0.0"),
        (lambda m, x: m(Belief(x, torch.ones(3, 6))), ValueError, "one shape"),
        (lambda m, x: m(certain(x), precision=torch.ones_like(x)), ValueError, "src is a Belief"),
        (lambda m, x: m(x, mask=torch.zeros(5, 6)), ValueError, r"mask must have shape \(6, 6\) or \(9, 6, 6\), got \(5, 6\)"),
        (lambda m, x: m(x, mask=torch.zeros(6, 6).int()), TypeError, "int32"),
        (lambda m, x: m(x, src_key_padding_mask=torch.zeros(6, 3).bool()), ValueError, r"\(3, 6\), got \(6, 3\)"),
        (lambda m, x: m(x, src_key_padding_mask=torch.zeros(3, 6).long()), TypeError, "int64"),
        (lambda m, x: m(x[0, 0]), ValueError, "two or three dimensions"),
        (lambda m, x: BFTEncoderLayer(10, 3), ValueError, "divisible by nhead, got 10 and 3"),
        (lambda m, x: BFTEncoderLayer(12, 3, process_noise=-1.0), ValueError, "process_noise must be ≥ 0"),
        (lambda m, x: BFTEncoderLayer(12, 3, nu0=0.0), ValueError, "nu0"),
        (lambda m, x: BFTEncoderLayer(12, 3, jacobian="exact"), ValueError, "'detached', 'full', 'none', got 'exact'"),
        (lambda m, x: BFTEncoderLayer(12, 3, resolution="full"), ValueError, "resolution"),
        (lambda m, x: BFTEncoder(nn.TransformerEncoderLayer(12, 3), 2), TypeError, "BFTEncoderLayer"),
        (lambda m, x: ItemPrecision(3, torch.ones(2)), ValueError, "3 of them"),
        (lambda m, x: ItemPrecision(3, 0.0), ValueError, "positive"),
        (lambda m, x: ConstantPrecision(-1.0), ValueError, "got -1.0"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call(pair()[1], tokens())
