"""Backbones: padding, batches, causality, saving, and independent references."""

import json
import math

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bft_nb.attention import NO_EVIDENCE, Observation
from bft_nb.backbones import (
    BACKBONES, LEAST_VARIANCE, BERT4Rec, BFTHSTULayer, HSTU, HSTULayer, SASRec, align_left, cloze, gated_precision, next_item, pointwise_observe,
    pointwise_relevance, time_bucket,
)  # fmt: skip
from bft_nb.core import Belief
from bft_nb.encoder import precision_parameters

close = torch.testing.assert_close


KINDS = [(name, bft) for name in BACKBONES for bft in (False, True)]
IDS = [f"{name}-{'bft' if bft else 'plain'}" for name, bft in KINDS]


def make(kind, **kw):
    name, bft = kind
    torch.manual_seed(0)
    return BACKBONES[name](**dict(n_items=30, max_length=12, d=16, bft=bft) | kw).eval()


@pytest.fixture(scope="module", params=KINDS, ids=IDS)
def model(request):
    return make(request.param)


@pytest.fixture(scope="module", params=[k for k in KINDS if k[0] != "bert4rec"], ids=[i for i in IDS if "bert" not in i])
def causal(request):
    return make(request.param)


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(0)
    return SASRec(n_items=30, max_length=12, d=16).eval()


def pad(row, left, right):
    return torch.tensor([[0] * left + row + [0] * right])


@settings(max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 4), st.integers(0, 4), st.integers(0, 99), st.sampled_from(KINDS), st.booleans())
def test_padding_and_company_change_nothing(row, left, right, seed, kind, no_grad):
    with torch.set_grad_enabled(not no_grad):  # without gradients torch takes a fused path
        check_padding_and_company(make(kind, max_length=16), row, left, right, seed)


def check_padding_and_company(model, row, left, right, seed):
    want = model(torch.tensor([row]))[0]
    padded = pad(row, left, right)
    others = torch.randint(0, 31, (3, padded.shape[1]), generator=torch.Generator().manual_seed(seed))
    got = model(torch.cat([others, padded]))[-1]
    close(got[left : left + len(row)], want, atol=1e-5, rtol=1e-5)
    close(model.last(torch.cat([others, padded]))[-1], model.last(torch.tensor([row]))[0], atol=1e-5, rtol=1e-5)
    if not isinstance(model, BERT4Rec):
        close(model.last(padded)[0], want[-1], atol=1e-5, rtol=1e-5)
    assert got[:left].abs().sum() + got[left + len(row) :].abs().sum() == 0


def test_padding_content_is_the_zero_vector_and_gets_no_gradient(model):
    model.zero_grad()
    model(torch.tensor([[3, 4, 0, 0], [0, 0, 5, 6]])).square().sum().backward()
    assert float(model.item_embedding.weight.grad[0].abs().max()) == 0
    before = model(torch.tensor([[3, 4, 0]]))
    with torch.no_grad():
        model.item_embedding.weight[0] = 1e3
        after = model(torch.tensor([[3, 4, 0]]))
        model.item_embedding.weight[0] = 0
    close(before, after)


@pytest.mark.parametrize("training", [False, True])
def test_empty_history_is_finite_in_value_and_gradient(model, training):
    model.train(training).zero_grad()
    hidden = model(torch.zeros(2, 5, dtype=torch.long))
    assert float(hidden.detach().abs().max()) == 0
    hidden.sum().backward()
    assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    model.eval()
    assert bool(torch.isfinite(model.scores(model.last(torch.zeros(1, 1, dtype=torch.long)))[:, 1:]).all())


def test_causal_by_gradient(causal):
    model = causal
    embedded = {}
    handle = model.item_embedding.register_forward_hook(lambda m, i, o: embedded.setdefault("x", o.detach().requires_grad_()))
    hidden = model(torch.tensor([[1, 2, 3, 4, 5]]))
    handle.remove()
    direction = torch.randn(16, generator=torch.Generator().manual_seed(0))  # the plain sum of a normalised state is constant
    for t in range(5):
        (grad,) = torch.autograd.grad(hidden[0, t] @ direction, embedded["x"], retain_graph=True)
        assert float(grad[0, t + 1 :].abs().sum()) == 0
        assert float(grad[0, : t + 1].abs().sum()) > 0


def reference(model, items):
    "The pre-norm causal encoder written out from the equations, one head at a time."
    x = model.item_embedding.weight[items] * 4 + model.position_embedding.weight[: len(items)]
    mask = torch.full((len(items), len(items)), -math.inf).triu(1)
    for layer in model.encoder.layers:
        y = layer.norm1(x)
        q, k, v = (y @ layer.self_attn.in_proj_weight.T + layer.self_attn.in_proj_bias).chunk(3, -1)
        heads = []
        for qh, kh, vh in zip(*(z.chunk(layer.self_attn.num_heads, -1) for z in (q, k, v)), strict=True):
            heads.append(torch.softmax(qh @ kh.T / math.sqrt(qh.shape[-1]) + mask, -1) @ vh)
        x = x + layer.self_attn.out_proj(torch.cat(heads, -1))
        x = x + layer.linear2(nn.functional.gelu(layer.linear1(layer.norm2(x))))
    return model.encoder.norm(x)


def test_against_the_equations(plain):
    model = plain
    items = torch.tensor([7, 3, 30, 1, 1, 12])
    close(model(items[None])[0], reference(model, items), atol=1e-5, rtol=1e-5)
    with torch.no_grad():  # torch's fused inference path
        close(model(items[None])[0], reference(model, items), atol=1e-5, rtol=1e-5)


def test_scores(model):
    state = model.last(torch.tensor([[1, 2], [3, 0]]))
    scores = model.scores(state)
    assert scores.shape == (2, 31) and bool((scores[:, 0] == -math.inf).all())
    close(scores[:, 1:], state @ model.item_weights()[1:].T)
    close(model.scores(state, torch.tensor([5, 9])), scores[:, [5, 9]])
    assert model.scores(model(torch.tensor([[1, 2, 3]]))).shape == (1, 3, 31)
    close(torch.autograd.grad(model.scores(state)[:, 1:].sum(), state)[0], model.item_weights()[1:].sum(0).expand(2, -1))


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=4))
def test_align_left_keeps_order(rows):
    aligned, order = align_left(torch.tensor(rows))
    for row, got in zip(rows, aligned.tolist(), strict=True):
        real = [i for i in row if i]
        assert got == real + [0] * (6 - len(real))
    close(aligned.gather(1, order.argsort(1)), torch.tensor(rows))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(n_items=0), "n_items"),
        (dict(n_items=5, max_length=0), "max_length"),
        (dict(n_items=5, d=10, n_heads=4), "d=10 and n_heads=4"),
        (dict(n_items=5, n_layers=0), "n_layers"),
        (dict(n_items=5, dropout=1.0), "dropout"),
    ],
)
@pytest.mark.parametrize("name", BACKBONES)
def test_bad_sizes(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        BACKBONES[name](**arguments)


def test_bad_items(model, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # what a user meets: the library's own message
    with pytest.raises(ValueError, match="a history of 13 items is longer than max_length=12"):
        model(torch.ones(1, 13 + model.special, dtype=torch.long))
    with pytest.raises(ValueError, match="longer than max_length=12"):
        model.last(torch.ones(1, 13, dtype=torch.long))
    with pytest.raises(TypeError, match="float32"):
        model(torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"\(batch, time\)"):
        model(torch.ones(3, dtype=torch.long))
    with pytest.raises(ValueError, match=f"1..30, got {31 + model.special}"):
        model(torch.tensor([[1, 31 + model.special]]))
    with pytest.raises(ValueError, match="got -1"):
        model(torch.tensor([[1, -1]]))


def test_save_and_load_without_pickle(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert {p.suffix for p in tmp_path.iterdir()} <= {".safetensors", ".json", ".md"}
    assert json.loads((tmp_path / "config.json").read_text())["n_items"] == 30
    again = type(model).from_pretrained(tmp_path).eval()
    items = torch.tensor([[1, 2, 3, 0]])
    close(again(items), model(items), atol=0, rtol=0)


def test_one_seed_one_model():
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(SASRec(n_items=9, d=8).state_dict())
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert 0.015 < float(made[0]["position_embedding.weight"].std()) < 0.025


def test_filtering_differs_in_the_layers_and_the_first_precision_only(plain):
    tracked = SASRec(n_items=30, max_length=12, d=16, bft=True)
    added = set(tracked.state_dict()) - set(plain.state_dict())
    assert added == {"precision.log_tau.weight", "encoder.layers.0.raw_noise", "encoder.layers.1.raw_noise"}
    assert set(plain.state_dict()) < set(tracked.state_dict())


@pytest.mark.parametrize("precision", ["item", "mlp", "constant"])
def test_the_degenerate_filter_is_the_plain_model(plain, precision):
    degenerate = SASRec(n_items=30, max_length=12, d=16, bft=True, precision=precision, kriging=False, kalman=False).eval()
    degenerate.load_state_dict(plain.state_dict(), strict=False)
    items = torch.randint(0, 31, (5, 12), generator=torch.Generator().manual_seed(0))
    close(degenerate(items), plain(items), atol=1e-6, rtol=1e-5)
    close(degenerate.scores(degenerate.last(items))[:, 1:], plain.scores(plain.last(items))[:, 1:], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("precision", ["item", "mlp", "constant"])
def test_precision_learns(precision):
    torch.manual_seed(0)
    model = SASRec(n_items=30, max_length=12, d=16, bft=True, precision=precision)
    model(torch.randint(1, 31, (4, 6))).square().mul(torch.linspace(0, 1, 16)).sum().backward()
    learned = [p for p in precision_parameters(model) if p.requires_grad]
    assert learned and all(bool(torch.isfinite(p.grad).all()) for p in learned)
    assert any(float(p.grad.abs().max()) > 0 for p in learned)


def test_what_the_filter_believes():
    torch.manual_seed(0)
    model = SASRec(n_items=30, max_length=12, d=16, bft=True, precision_init=2.0).eval()
    items = torch.tensor([[1, 2, 3, 0]])
    belief, steps = model.filter(items)
    close(belief.mean[:, :3], model(items)[:, :3], atol=1e-5, rtol=1e-5)
    assert len(steps) == 2 and bool((belief.precision[:, :3] > 0).all()) and bool(((steps[0].gain > 0) & (steps[0].gain < 1)).all())
    close(steps[0].prior.precision[:, :3], torch.full((1, 3, 16), 2.0))


def test_options_need_the_filter(plain):
    with pytest.raises(TypeError, match="nu0.*bft=True"):
        SASRec(n_items=5, nu0=2.0)
    with pytest.raises(ValueError, match="'user'"):
        SASRec(n_items=5, bft=True, precision="user")
    with pytest.raises(ValueError, match="precision_init=2"):
        SASRec(n_items=5, bft=True, precision="mlp", precision_init=2.0)
    with pytest.raises(TypeError, match="no precision"):
        plain.filter(torch.tensor([[1]]))


def test_options_are_saved(tmp_path):
    SASRec(n_items=5, d=8, bft=True, precision="constant", nu0=2.0, resolution="isotropic").save_pretrained(tmp_path)
    again = SASRec.from_pretrained(tmp_path)
    assert again.bft and again.encoder.layers[0].observing["nu0"] == 2.0 and again.encoder.layers[0].observing["resolution"] == "isotropic"


# ---- what all backbones owe ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("precision", ["item", "mlp", "constant"])
def test_each_degenerate_filter_is_its_plain_model(name, precision):
    plain, degenerate = make((name, False)), make((name, True), precision=precision, kriging=False, kalman=False)
    missing, unexpected = degenerate.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and all("raw_noise" in key or key.startswith("precision") for key in missing)
    items = torch.randint(0, 31, (5, 12), generator=torch.Generator().manual_seed(0))
    close(degenerate(items), plain(items), atol=1e-6, rtol=1e-5)
    close(degenerate.last(items), plain.last(items), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_every_parameter_gets_a_finite_gradient(kind):
    model = make(kind).train()
    sequences = torch.randint(1, 31, (8, 13), generator=torch.Generator().manual_seed(0))
    items, labels = model.training_batch(sequences, torch.Generator().manual_seed(0))
    hidden = model(items)[labels != 0]
    nn.functional.cross_entropy(hidden @ model.item_weights().T, labels[labels != 0]).backward()
    for name, p in model.named_parameters():
        if name.endswith("layers.1.raw_noise"):
            assert not p.requires_grad  # no observation follows the last layer
        else:
            assert p.grad is not None and bool(torch.isfinite(p.grad).all()), name
            zero_by_right = name.endswith("in_proj_bias")  # a key's bias moves all logits of a query alike
            assert zero_by_right or float(p.grad.abs().max()) > 0, name


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_bfloat16_is_finite_and_near(kind):
    model = make(kind)
    items = torch.randint(0, 31, (4, 12), generator=torch.Generator().manual_seed(0))
    want = model.last(items)
    with torch.autocast("cpu", torch.bfloat16):
        got = model.last(items)
    assert bool(torch.isfinite(got).all())
    close(got.float(), want, atol=0.15, rtol=0.1)


@pytest.mark.parametrize("kind", [k for k in KINDS if k[1]], ids=[i for i in IDS if "bft" in i])
@pytest.mark.parametrize("tau", [1e-6, 1e6])
def test_extreme_precisions_stay_finite(kind, tau):
    model = make(kind, precision="constant", precision_init=tau)
    hidden = model(torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0]]))
    hidden.square().mul(torch.linspace(0, 1, 16)).sum().backward()
    assert bool(torch.isfinite(hidden).all())
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)


def test_one_item_is_enough(model):
    for items in (torch.tensor([[7]]), torch.tensor([[0, 7]]), torch.tensor([[7, 0]])):
        close(model.last(items), model.last(torch.tensor([[7]])), atol=1e-6, rtol=1e-5)
    assert bool(torch.isfinite(model.last(torch.tensor([[7]]))).all())


@pytest.mark.parametrize("kind", [k for k in KINDS if k[1]], ids=[i for i in IDS if "bft" in i])
def test_what_each_filter_believes(kind):
    model = make(kind, precision_init=2.0)
    items = torch.tensor([[1, 2, 3, 0]])
    belief, steps = model.filter(items)
    close(belief.mean[:, :3], model(items)[:, :3], atol=1e-5, rtol=1e-5)
    assert len(steps) == 2 and bool((belief.precision[:, :3] > 0).all()) and bool(((steps[0].gain > 0) & (steps[0].gain < 1))[:, :3].all())
    close(steps[0].prior.precision[:, :3], torch.full((1, 3, 16), 2.0))
    assert steps[0].n_eff.shape == (1, 2, 4) and bool((steps[0].n_eff[..., :3] > 1 - 1e-5).all())
    close(model.item_precision(), torch.tensor([1e-6] + [2.0] * 30))
    assert all(layer.process_noise.shape == (16,) for layer in model.encoder.layers)


@pytest.mark.parametrize("name", BACKBONES)
def test_a_plain_model_has_no_belief(name):
    model = make((name, False))
    with pytest.raises(TypeError, match=f"a plain {BACKBONES[name].__name__} tracks no precision"):
        model.filter(torch.tensor([[1]]))
    with pytest.raises(TypeError, match="no precision"):
        model.item_precision()
    with pytest.raises(TypeError, match="nu0.*bft=True"):
        BACKBONES[name](n_items=5, nu0=2.0)


@pytest.mark.parametrize("kind", [k for k in KINDS if k[1]], ids=[i for i in IDS if "bft" in i])
def test_the_filter_refuses_padding_in_front(kind):
    model = make(kind)
    model.filter(torch.tensor([[2, 5, 0], [1, 0, 0]]))
    with pytest.raises(ValueError, match="left-aligned"):
        model.filter(torch.tensor([[0, 2, 5], [1, 0, 0]]))


def test_filtering_layers_of_hstu_filter_whatever_they_are_given():
    model, x = make(("hstu", True)), torch.randn(2, 4, 16)
    encoder, one = model.encoder, torch.ones_like(x)
    close(encoder(x), encoder(x, precision=one))
    close(encoder(x), encoder(Belief(x, one)).mean)
    assert len(encoder(x, with_intermediates=True)[1]) == 2
    close(encoder.layers[0](x), encoder.layers[0](Belief(x, one)).mean)
    assert float((encoder.layers[0](x) - HSTULayer.forward(encoder.layers[0], x)).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("arguments", [dict(precision=torch.ones(2, 4, 16)), dict(with_intermediates=True)])
def test_plain_layers_of_hstu_do_not_filter(arguments):
    with pytest.raises(TypeError, match="HSTULayer tracks no precision"):
        make(("hstu", False)).encoder(torch.randn(2, 4, 16), **arguments)


@pytest.mark.parametrize("kind", [k for k in KINDS if k[1]], ids=[i for i in IDS if "bft" in i])
def test_precision_parameters_of_each(kind):
    model = make(kind)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in precision_parameters(model)} == {"precision.log_tau.weight", "encoder.layers.0.raw_noise", "encoder.layers.1.raw_noise"}


def test_next_item_moves_by_one():
    items, labels = next_item(torch.tensor([[5, 6, 7], [8, 9, 0]]))
    assert items.tolist() == [[5, 6], [8, 0]] and labels.tolist() == [[6, 7], [9, 0]]


@pytest.mark.parametrize("name", BACKBONES)
def test_expected_number_of_targets(name):
    model = make((name, False))
    lengths = torch.tensor([2, 5, 13, 9]).repeat(500)
    sequences = torch.ones(2000, 13, dtype=torch.long) * (torch.arange(13) < lengths[:, None])
    _, labels = model.training_batch(sequences, torch.Generator().manual_seed(0))
    assert int((labels != 0).sum()) == pytest.approx(model.n_targets(lengths.numpy()), rel=0.02)
    assert bool((labels != 0).any(1).all())


@pytest.mark.parametrize("name", ["sasrec", "bert4rec"])
@pytest.mark.parametrize("bft", [False, True])
def test_post_norm(name, bft):
    model = make((name, bft), norm_first=False)
    assert model.encoder.norm is None and not any(layer.norm_first for layer in model.encoder.layers)
    hidden = model.last(torch.tensor([[1, 2, 0]]))
    close(hidden.mean(-1), torch.zeros(1), atol=1e-5, rtol=0)  # the last norm is the last layer's
    hidden.square().mul(torch.linspace(0, 1, 16)).sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["sasrec", "bert4rec"])
@pytest.mark.parametrize("precision", ["item", "mlp", "constant"])
def test_the_degenerate_filter_is_the_plain_model_in_post_norm_too(name, precision):
    plain, off = make((name, False), norm_first=False), make((name, True), norm_first=False, precision=precision, kriging=False, kalman=False)
    assert not off.load_state_dict(plain.state_dict(), strict=False).unexpected_keys
    items = torch.randint(0, 31, (5, 12), generator=torch.Generator().manual_seed(0))
    close(off(items), plain(items), atol=1e-6, rtol=1e-5)
    close(off.last(items), plain.last(items), atol=1e-6, rtol=1e-5)
    on = make((name, True), norm_first=False, precision=precision)
    on.load_state_dict(plain.state_dict(), strict=False)
    assert float((on.last(items) - plain.last(items)).detach().abs().max()) > 1e-3


def test_post_norm_against_the_equations():
    model = make(("sasrec", False), norm_first=False)
    items = torch.tensor([7, 3, 30, 1, 1, 12])
    x = model.item_embedding.weight[items] * 4 + model.position_embedding.weight[:6]
    mask = torch.full((6, 6), -math.inf).triu(1)
    for layer in model.encoder.layers:
        q, k, v = (x @ layer.self_attn.in_proj_weight.T + layer.self_attn.in_proj_bias).chunk(3, -1)
        heads = [torch.softmax(a @ b.T / math.sqrt(8) + mask, -1) @ c for a, b, c in zip(q.chunk(2, -1), k.chunk(2, -1), v.chunk(2, -1), strict=True)]
        x = layer.norm1(x + layer.self_attn.out_proj(torch.cat(heads, -1)))
        x = layer.norm2(x + layer.linear2(nn.functional.gelu(layer.linear1(x))))
    close(model(items[None])[0], x, atol=1e-5, rtol=1e-5)


# ---- BERT4Rec ------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
def test_cloze(rows, p, last, seed):
    sequences = torch.tensor([row + [0] * (6 - len(row)) for row in rows])
    items, labels = cloze(sequences, 10, p, last, torch.Generator().manual_seed(seed))
    hidden = labels != 0
    assert bool(hidden.any(1).all()) and not bool((hidden & (sequences == 0)).any())
    assert torch.equal(labels[hidden], sequences[hidden]) and bool((items[hidden] == 10).all())
    assert torch.equal(items[~hidden], sequences[~hidden])
    again = cloze(sequences, 10, p, last, torch.Generator().manual_seed(seed))
    assert torch.equal(again[0], items) and torch.equal(again[1], labels)


def test_cloze_limits():
    sequences = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]])
    assert cloze(sequences, 9, 0.0, 0.0)[0].tolist() == [[1, 2, 9, 0], [4, 9, 0, 0]]
    assert cloze(sequences, 9, 1.0, 0.0)[0].tolist() == [[9, 9, 9, 0], [9, 9, 0, 0]]
    assert cloze(sequences, 9, 1.0, 1.0)[0].tolist() == [[1, 2, 9, 0], [4, 9, 0, 0]]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "bft"])
def bert(request):
    return make(("bert4rec", request.param))


def test_the_mask_follows_the_last_item_whatever_the_padding(bert):
    got = bert.append_mask(torch.tensor([[0, 0, 3, 4], [3, 4, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0]]))
    assert got.tolist() == [[3, 4, 31, 0, 0], [3, 4, 31, 0, 0], [1, 2, 3, 4, 31], [31, 0, 0, 0, 0]]
    close(bert.last(torch.tensor([[0, 3, 4]]))[0], bert(torch.tensor([[3, 4, 31]]))[0, 2], atol=1e-6, rtol=1e-5)


def test_an_empty_history_is_asked_too(bert):
    state = bert.last(torch.zeros(1, 3, dtype=torch.long))
    assert bool(torch.isfinite(state).all()) and float(state.detach().abs().max()) > 0


def test_a_full_history_has_room_for_the_mask(bert):
    assert bert.last(torch.ones(1, 12, dtype=torch.long)).shape == (1, 16)
    with pytest.raises(ValueError, match="13 items is longer than max_length=12"):
        bert.last(torch.ones(1, 13, dtype=torch.long))


def test_both_sides_are_seen_and_padding_is_not(bert):
    base = bert(torch.tensor([[1, 2, 3, 0]]))
    assert float((bert(torch.tensor([[1, 2, 4, 0]])) - base)[0, 0].detach().norm()) > 1e-4
    with torch.no_grad():
        bert.item_embedding.weight[0] = 1e3
        changed = bert(torch.tensor([[1, 2, 3, 0]]))
        bert.item_embedding.weight[0] = 0
    close(changed, base, atol=1e-6, rtol=1e-5)


def test_the_mask_is_no_item(bert):
    state = bert.last(torch.tensor([[1, 2]]))
    assert bert.item_weights().shape == (31, 16) and bert.scores(state).shape == (1, 31)
    assert bert.item_embedding.weight.shape == (32, 16)


def test_bert_against_the_equations():
    model = make(("bert4rec", False))
    items = torch.tensor([7, 3, 31, 1, 12])
    x = model.item_embedding.weight[items] * 4 + model.position_embedding.weight[:5]
    for layer in model.encoder.layers:
        q, k, v = (layer.norm1(x) @ layer.self_attn.in_proj_weight.T + layer.self_attn.in_proj_bias).chunk(3, -1)
        heads = [torch.softmax(a @ b.T / math.sqrt(8), -1) @ c for a, b, c in zip(q.chunk(2, -1), k.chunk(2, -1), v.chunk(2, -1), strict=True)]
        x = x + layer.self_attn.out_proj(torch.cat(heads, -1))
        x = x + layer.linear2(nn.functional.gelu(layer.linear1(layer.norm2(x))))
    close(model(torch.cat([items, torch.zeros(3, dtype=torch.long)])[None])[0, :5], model.encoder.norm(x), atol=1e-5, rtol=1e-5)


def test_bad_probabilities():
    with pytest.raises(ValueError, match="mask_probability must be in .* got 1.5"):
        BERT4Rec(5, mask_probability=1.5)
    with pytest.raises(ValueError, match="last_probability"):
        BERT4Rec(5, last_probability=-0.1)


# ---- HSTU ----------------------------------------------------------------------------------------------------------


def test_hstu_against_the_equations():
    model = make(("hstu", False))
    items = torch.tensor([7, 3, 30, 1, 1, 12])
    x = model.item_embedding.weight[items] * 4 + model.position_embedding.weight[:6]
    norm = lambda y: (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()
    silu = lambda y: y * torch.sigmoid(y)
    for layer in model.encoder.layers:
        u, v, q, k = silu(norm(x) @ layer.in_proj.weight.T).chunk(4, -1)
        out = torch.zeros_like(v)
        for head in range(2):
            part = slice(8 * head, 8 * head + 8)
            for t in range(6):
                for j in range(t + 1):
                    out[t, part] += silu(q[t, part] @ k[j, part] + layer.position_bias[t - j]) / 12 * v[j, part]
        x = x + (norm(out) * u) @ layer.out_proj.weight.T + layer.out_proj.bias
    close(model(items[None])[0], model.encoder.norm(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("level", [1e-3, 1.0, 1e3])
def test_equal_reliability_of_any_size_leaves_the_sum(level):
    a = pointwise_relevance(torch.randn(2, 2, 5, 5), 5)
    v = torch.randn(2, 2, 5, 3)
    close(pointwise_observe(a, torch.full((2, 5), level), v).mean, a @ v)


def test_a_filter_of_certainty_with_gain_one_is_the_plain_layer():
    torch.manual_seed(0)
    plain, tracked = HSTULayer(8, 2, 5), BFTHSTULayer(8, 2, 5, kalman=False)
    tracked.load_state_dict(plain.state_dict(), strict=False)
    h = torch.randn(3, 5, 8)
    close(tracked.step(Belief(h, torch.ones_like(h))).posterior.mean, plain(h), atol=1e-6, rtol=1e-5)


def test_observation_is_chapter_14_row_by_row():
    torch.manual_seed(0)
    a, lam_bar, v = pointwise_relevance(torch.randn(1, 1, 4, 4, dtype=torch.float64), 4), torch.rand(1, 4, dtype=torch.float64) + 0.1, torch.randn(1, 1, 4, 2, dtype=torch.float64)
    seen = pointwise_observe(a, lam_bar, v)
    for t in range(4):
        relative = a[0, 0, t, : t + 1] / lam_bar[0, : t + 1].mean()
        b, x = relative * lam_bar[0, : t + 1], v[0, 0, : t + 1]
        n = b.sum() ** 2 / b.square().sum()
        m = b @ x / b.sum() if n >= 1 else None
        close(seen.mean[0, 0, t], b @ x)
        close(seen.n_eff[0, 0, t], n.clamp(min=1))
        if m is not None:
            variance = (b.square()[:, None] * (x - m) ** 2).sum(0) + (relative.square() * lam_bar[0, : t + 1]).sum() / n
            close(seen.precision[0, 0, t], 1 / variance)


def test_the_delta_method_through_norm_and_gate():
    torch.manual_seed(0)
    layer, o, u = HSTULayer(6, 1, 3).double(), torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    variance = torch.rand(6, dtype=torch.float64)
    jac = torch.autograd.functional.jacobian(layer.norm2, o).diagonal()
    want = layer.out_proj.weight.square() @ (jac.square() * u.square() * variance)
    seen = Observation(o.view(1, 1, 1, 6), 1 / variance.view(1, 1, 1, 6), torch.ones(1, 1, 1))
    close(gated_precision(seen, u.view(1, 1, 6), layer.out_proj.weight, 1e-6)[0, 0], 1 / want)


def test_silence():
    a, v = torch.zeros(1, 2, 1, 1), torch.ones(1, 2, 1, 3)
    seen = pointwise_observe(a, torch.ones(1, 1), v)
    assert float(seen.n_eff.max()) == 0 and float(seen.mean.abs().max()) == 0
    close(seen.precision, torch.full((1, 2, 1, 3), 1 / NO_EVIDENCE))
    weight, u = torch.randn(6, 6), torch.ones(1, 1, 6)
    close(gated_precision(seen, u, weight, 1e-6), torch.full((1, 1, 6), 1 / NO_EVIDENCE))
    a[0, 0] = 0.5  # one head speaks: the other says zero for certain
    half = pointwise_observe(a, torch.ones(1, 1), v)
    assert bool((gated_precision(half, u, weight, 1e-6) > 1e-6).all())
    closed = gated_precision(half, torch.zeros(1, 1, 6), weight, 1e-6)
    close(closed, torch.full((1, 1, 6), 1 / LEAST_VARIANCE))


def test_silent_heads_have_finite_gradients():
    torch.manual_seed(0)
    model = make(("hstu", True))
    with torch.no_grad():
        model.encoder.layers[0].position_bias.fill_(-200)  # SiLU underflows to zero
    hidden = model(torch.tensor([[1, 2, 3]]))
    hidden.square().mul(torch.linspace(0, 1, 16)).sum().backward()
    assert bool(torch.isfinite(hidden).all())
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)


def test_process_noise_alone_moves_the_belief_on():
    torch.manual_seed(0)
    step = BFTHSTULayer(8, 2, 5, process_noise=0.5).step(Belief(torch.randn(1, 4, 8), torch.ones(1, 4, 8)))
    close(step.predicted.mean, step.posterior.mean)
    close(1 / step.predicted.precision, 1 / step.posterior.precision + 0.5)
    still = BFTHSTULayer(8, 2, 5, process_noise=0.0)
    assert still.raw_noise is None
    step = still.step(Belief(torch.randn(1, 4, 8), torch.ones(1, 4, 8)))
    close(step.predicted.precision, step.posterior.precision)


def test_hstu_gradients():
    torch.manual_seed(0)
    layer = BFTHSTULayer(4, 2, 3).double()
    h, lam = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True), (0.5 + torch.rand(1, 3, 4, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda h, lam: tuple(layer.step(Belief(h, lam)).predicted), (h, lam))


def test_time_buckets_by_hand():
    times = torch.tensor([[0, 1, 61, 10**9]])
    got = time_bucket(times, 64)[0]
    want = [[min(63, int(math.log(max(abs(a - b), 1)) / 0.301)) for b in times[0].tolist()] for a in times[0].tolist()]
    assert got.tolist() == want


@pytest.mark.parametrize("bft", [False, True])
def test_time_matters_only_through_its_bias(bft):
    model = make(("hstu", bft), time_buckets=64)
    items, day = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]]), 86_400
    near, far = (torch.tensor([[0, 1, 2, 0], [0, 1, 0, 0]]) * step for step in (day, 300 * day))
    assert float((model(items, near) - model(items, far)).detach().abs().max()) > 1e-6
    close(model(items, near + 10**9), model(items, near))  # a shift of the clock
    left = model(torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 0, day, 2 * day]]))
    close(left[0, 1:], model(items, near)[0, :3], atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        for layer in model.encoder.layers: layer.time_bias.zero_()
    without = make(("hstu", bft))
    without.load_state_dict({k: v for k, v in model.state_dict().items() if "time_bias" not in k})
    close(model(items, near), without(items), atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="needs the times"):
        model(items)


def test_bad_hstu_options():
    with pytest.raises(ValueError, match="time_buckets must be at least 0, got -1"):
        HSTU(5, time_buckets=-1)
    with pytest.raises(ValueError, match="process_noise must be ≥ 0 and finite, got -1"):
        HSTU(5, bft=True, process_noise=-1.0)
    with pytest.raises(ValueError, match="nu0 must be positive"):
        HSTU(5, bft=True, nu0=0.0)
    with pytest.raises(TypeError, match="jacobian"):
        HSTU(5, bft=True, jacobian="full")


@pytest.mark.parametrize("faint", [1.0, 1e-6, 1e-9, 1e-12, 1e-16, 1e-20, 1e-28, 1e-38, 0.0])
@pytest.mark.parametrize("level", [1e-6, 1.0, 1e6])
def test_faint_weights_of_hstu_have_finite_gradients(faint, level):
    a, lam_bar = (torch.randn(2, 2, 5, 5) * faint).tril().requires_grad_(), torch.full((2, 5), level).requires_grad_()
    v, u, weight = torch.randn(2, 2, 5, 4).requires_grad_(), torch.randn(2, 5, 8).requires_grad_(), torch.randn(8, 8).requires_grad_()
    seen = pointwise_observe(a, lam_bar, v)
    lam_obs = gated_precision(seen, u, weight, 1e-6)
    assert all(bool((torch.isfinite(x) & (x > 0)).all()) for x in (seen.precision, lam_obs))
    for gradient in torch.autograd.grad(seen.mean.sum() + lam_obs.log().sum(), (a, lam_bar, v, u, weight)):
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("shift", [-5.0, -20.0, -40.0, -80.0, -120.0])
def test_a_deaf_hstu_filter_trains_on(shift):
    model = HSTU(9, max_length=6, d=8, dropout=0.0, bft=True)
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.position_bias.add_(shift)
    model(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]])).square().sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)
