"""SASRec: padding, batches, causality, saving, and an independent reference."""

import json
import math

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bft_nb.backbones import SASRec, align_left
from bft_nb.encoder import precision_parameters

close = torch.testing.assert_close


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "bft"])
def model(request):
    torch.manual_seed(0)
    return SASRec(n_items=30, max_length=12, d=16, bft=request.param).eval()


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(0)
    return SASRec(n_items=30, max_length=12, d=16).eval()


def pad(row, left, right):
    return torch.tensor([[0] * left + row + [0] * right])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 4), st.integers(0, 4), st.integers(0, 99), st.booleans())
def test_padding_and_company_change_nothing(row, left, right, seed, bft):
    torch.manual_seed(1)
    model = SASRec(n_items=30, max_length=16, d=16, bft=bft).eval()
    want = model(torch.tensor([row]))[0]
    padded = pad(row, left, right)
    others = torch.randint(0, 31, (3, padded.shape[1]), generator=torch.Generator().manual_seed(seed))
    got = model(torch.cat([others, padded]))[-1]
    close(got[left : left + len(row)], want, atol=1e-5, rtol=1e-5)
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


def test_causal_by_gradient(model):
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


@settings(max_examples=50, deadline=None)
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
def test_bad_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        SASRec(**arguments)


def test_bad_items(model, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # what a user meets: the library's own message
    with pytest.raises(ValueError, match="longer than max_length=12"):
        model(torch.ones(1, 13, dtype=torch.long))
    with pytest.raises(TypeError, match="float32"):
        model(torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"\(batch, time\)"):
        model(torch.ones(3, dtype=torch.long))
    with pytest.raises(ValueError, match="1..30, got 31"):
        model(torch.tensor([[1, 31]]))
    with pytest.raises(ValueError, match="got -1"):
        model(torch.tensor([[1, -1]]))


def test_save_and_load_without_pickle(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert {p.suffix for p in tmp_path.iterdir()} <= {".safetensors", ".json", ".md"}
    assert json.loads((tmp_path / "config.json").read_text())["n_items"] == 30
    again = SASRec.from_pretrained(tmp_path).eval()
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
