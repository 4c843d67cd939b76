"Sinks measured block by block are those of the whole table of weights, for plain, gated and filtering models."

import copy

import numpy as np
import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_llama import batch, families, plain, strong
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bft_nb import corpus
from bft_nb.attention import BLOCK
from bft_nb.gates import convert_gated, trace_gates
from bft_nb.llama import added, layer_filters, trace
from bft_nb.results import load_arrays, save_arrays
from bft_nb.sinks import (
    Call, attention_maps, binned, measure_call, measure_sinks, per_head, position_bins, sink_kappa, sink_rate, sink_scatter, watching, weight_rows, with_sinks,
)  # fmt: skip

T = 40


def ids(b=2, t=T, seed=1):
    tokens = batch(b, t, seed=seed)["input_ids"]
    tokens[:, 0] = 1  # BOS
    return tokens


def column(frame, name):
    "A measure as (text, layer, head, bin)."
    sizes = [frame[n].nunique() for n in ("layer", "text", "head", "high")]
    return torch.tensor(frame[name].to_numpy()).reshape(sizes).transpose(0, 1)


def of_tables(w, v):
    "The measures from whole tables: w (b, l, h, t, j), v (b, l, h, j, k), the first key a token."
    rest = w[..., 1:] / w[..., 1:].sum(-1, keepdim=True)
    square = v.square().mean(-1)
    e = w @ v
    spread = ((v[..., None, :, :] - e[..., None, :]).square().mean(-1) * w).sum(-1)
    return {"mass": w[..., 0], "n_eff": 1 / w.square().sum(-1), "n_rest": 1 / rest.square().sum(-1), "scatter": spread, "others": (rest @ square[..., 1:, None]).squeeze(-1)}


def values_of(model, tokens):
    "Values of every layer, one per query head."
    found = []
    hooks = [m.register_forward_hook(lambda module, args, out: found.append(out)) for name, m in model.named_modules() if name.endswith("v_proj")]
    with torch.no_grad():
        out = model(input_ids=tokens, output_attentions=True)
    for hook in hooks:
        hook.remove()
    width = model.model.layers[0].self_attn.head_dim
    v = torch.stack([x.unflatten(-1, (-1, width)).transpose(1, 2).repeat_interleave(model.model.layers[0].self_attn.num_key_value_groups, 1) for x in found], 1)
    return torch.stack(out.attentions, 1).float(), v


def agree(frame, tables):
    for name, x in tables.items():
        assert_close(column(frame, name), binned(x.flatten(0, 1), position_bins(T)).reshape(*x.shape[:3], -1), atol=1e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


# the measures


@families
def test_plain_models_against_whole_tables(name):
    model = plain(name)  # Mistral with a window of 6 keys
    agree(measure_sinks(model, ids()), of_tables(*values_of(model, ids())))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_whatever_the_implementation_of_attention(name):
    model = plain(name)
    explicit = measure_sinks(model, ids())
    model.set_attn_implementation("sdpa")
    fused = measure_sinks(model, ids())
    assert_close(torch.tensor(fused.to_numpy(float)), torch.tensor(explicit.to_numpy(float)), atol=1e-5, rtol=1e-4)


def test_a_filtering_model_with_its_precision_in_the_weights():
    model = strong()
    frame, records = measure_sinks(model, ids()), trace(model, input_ids=ids())
    w = torch.stack([r.weights for r in records], 1)
    bins = position_bins(T)
    for name, x in {"mass": w[..., 0], "n_eff": torch.stack([r.n_eff for r in records], 1)}.items():
        assert_close(column(frame, name), binned(x.flatten(0, 1), bins).reshape(*x.shape[:3], -1), atol=1e-5, rtol=1e-4)
    for name, x in {"gain": torch.stack([r.gain.mean(-1) for r in records], 1), "lam_bar": torch.stack([r.lam_bar for r in records], 1)}.items():
        assert_close(column(frame, name)[:, :, 0], binned(x, bins), atol=1e-5, rtol=1e-4)
    odds = torch.stack([torch.logit(r.gain.double()).mean(-1) for r in records], 1).float()
    assert_close(column(frame, "gain_odds")[:, :, 0], binned(odds, bins), atol=1e-3, rtol=1e-3)


def test_the_claim_of_a_head_is_what_its_keys_claim():
    model = strong()
    found = column(measure_sinks(model, ids()), "claim")
    for layer, (record, bft) in enumerate(zip(trace(model, input_ids=ids()), layer_filters(model))):
        claimed = (record.weights / record.lam_bar[:, None, None]).sum(-1) * bft.value_scale[:, None]
        assert_close(found[:, layer], binned(claimed, position_bins(T)), atol=1e-4, rtol=1e-3)


def test_blocked_and_explicit_filters_measure_alike():
    one, other = strong(), strong()
    other.set_attn_implementation("bft_blocked")
    a, b = (measure_sinks(m, ids()) for m in (one, other))
    drop = ["claim"]  # a small difference of large numbers
    assert_close(torch.tensor(b.drop(columns=drop).to_numpy(float)), torch.tensor(a.drop(columns=drop).to_numpy(float)), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["headwise", "elementwise"])
def test_gates_leave_the_weights_alone_and_are_reported(kind):
    model = convert_gated(plain(), kind)
    with torch.no_grad():
        for gate in added(model):
            gate.weight.normal_(generator=torch.Generator().manual_seed(0))
    frame = measure_sinks(model, ids())
    w, v = values_of(model, ids())
    agree(frame, of_tables(w, v))
    g = torch.stack([x.mean(-1).mT for x in trace_gates(model, input_ids=ids())], 1)
    assert_close(column(frame, "gate"), binned(g.flatten(0, 1), position_bins(T)).reshape(*g.shape[:3], -1))


def test_a_learnt_sink_is_a_key_of_value_zero():
    model = convert_gated(plain(), "sink", sink=1.0)
    frame = measure_sinks(model, ids())
    w, v = values_of(model, ids())  # weights of the tokens, which sum to less than one
    learnt = 1 - w.sum(-1)
    assert_close(column(frame, "learnt"), binned(learnt.flatten(0, 1), position_bins(T)).reshape(*learnt.shape[:3], -1))
    assert_close(column(frame, "gate"), 1 - column(frame, "learnt"))
    n = 1 / (w.square().sum(-1) + learnt.square())
    assert_close(column(frame, "n_eff"), binned(n.flatten(0, 1), position_bins(T)).reshape(*n.shape[:3], -1))
    front = of_tables(w, v)
    agree(frame, {name: front[name] for name in ("mass", "n_rest", "others")})


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_a_model_wrapped_by_peft():
    model = strong()
    bare = measure_sinks(model, ids())
    wrapped = measure_sinks(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["bft"])).eval(), ids())
    assert_close(torch.tensor(wrapped.to_numpy(float)), torch.tensor(bare.to_numpy(float)))


def test_maps_are_the_weights():
    model = plain("qwen3")
    w, _ = values_of(model, ids(1))
    assert_close(attention_maps(model, ids(1), [(2, 1), (0, 3)]), torch.stack([w[0, 2, 1], w[0, 0, 3]]))


# block by block


def call(t=150, h=2, mask=None, bias=None):
    q, k, v = (torch.randn(1, h, t, 8, generator=torch.Generator().manual_seed(s)) for s in (0, 1, 2))
    return Call(q, k, v, mask, bias)


@pytest.mark.parametrize("block", [1, 7, 64])
@pytest.mark.parametrize("learnt", [False, True])
def test_streaming_equals_all_at_once(block, learnt):
    one = call(bias=torch.randn(1, 1, 1, 150))
    one = with_sinks(one, torch.tensor([0.5, -1.0])) if learnt else one
    for part, whole in zip(measure_call(one, block), measure_call(one, 150)):
        assert_close(part[..., 1:], whole[..., 1:])
    assert all(w.shape[2] <= block for w in weight_rows(one, block))


class Largest(TorchDispatchMode):
    "Remembers the size of the largest tensor that an operation made."

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_floating_point())])
        return out


def test_no_table_of_all_pairs_is_made():
    t, heads, model = 1024, 4, plain()
    model.config.max_position_embeddings = t
    model.set_attn_implementation("sdpa")
    with Largest() as seen:
        measure_sinks(model, ids(1, t))
    assert seen.numel <= heads * BLOCK * t < heads * t * t / 8


# the formulas


def test_a_head_with_a_sink_in_closed_form():
    gen = torch.Generator().manual_seed(0)
    v = torch.cat([torch.zeros(1, 1, 1, 5), torch.randn(1, 1, 60, 5, generator=gen)], 2)
    logits = 2 * torch.randn(1, 1, 1, 61, generator=gen)
    logits[..., 0] = 4.0
    one = Call(torch.zeros(1, 1, 61, 1), torch.zeros(1, 1, 61, 1), v, None, logits)
    found = measure_call(one)
    assert_close(1 / found.n_eff[..., 1:], sink_kappa(found.mass, found.n_rest)[..., 1:])
    w = next(weight_rows(one, 61))[0, 0, 1:]
    shares = w[:, 1:] / w[:, 1:].sum(-1, keepdim=True)
    mean = shares @ v[0, 0, 1:]
    spread = shares @ v[0, 0, 1:].square() - mean.square()
    assert_close(found.scatter[0, 0, 1:], sink_scatter(w[:, :1], mean, spread).mean(-1), atol=1e-5, rtol=1e-4)


def test_bins_cover_all_queries_but_the_first_once():
    for length in (2, 3, 4, 5, 64, 100, 1024):
        covered = [p for low, high in position_bins(length) for p in range(low, high + 1)]
        assert covered == list(range(2, length + 1))


def test_a_head_counts_its_queries_not_its_bins():
    model = plain()
    frame = measure_sinks(model, ids())
    w, _ = values_of(model, ids())
    mass = w[..., 1:, 0].mean((0, 3))
    assert_close(torch.tensor(per_head(frame)["mass"].to_numpy()).float(), mass.flatten())
    assert sink_rate(frame, 0.1) == (mass > 0.1).double().mean() > 0 and sink_rate(frame, 1.0) == 0


def test_bos_is_stated():
    tokens = ids()
    assert measure_sinks(plain(), tokens)["bos"].all()
    tokens[0, 0] = 5
    assert not measure_sinks(plain(), tokens)["bos"].any()
    without = plain()
    without.config.bos_token_id = None  # as Qwen's
    assert not measure_sinks(without, ids())["bos"].any()


# around


def test_listening_leaves_nothing_behind():
    model, other = plain(), plain(seed=1)
    before, heard = ALL_ATTENTION_FUNCTIONS.get_interface, []
    expected = model(input_ids=ids()).logits
    with pytest.raises(RuntimeError, match="stop"), watching(model, lambda layer, call, seen: heard.append(layer)):
        assert torch.equal(model(input_ids=ids()).logits, expected)
        other(input_ids=ids())
        raise RuntimeError("stop")
    assert heard == [0, 1, 2] and ALL_ATTENTION_FUNCTIONS.get_interface == before
    model(input_ids=ids())
    assert len(heard) == 3


def test_autocast_narrows_the_model_not_the_measures():
    model = plain()
    with torch.autocast("cpu", torch.bfloat16):
        frame = measure_sinks(model, ids())
    n = column(frame, "n_eff")
    assert torch.isfinite(n).all() and (n >= 1 - 1e-5).all()


@pytest.mark.parametrize("logit", [-12.0, 22.0])
def test_a_sink_gate_that_is_nearly_open_or_shut_keeps_its_odds_in_bfloat16(logit):
    model = convert_gated(plain(), "sink", sink=logit)
    odds = []
    for narrow in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            frame = measure_sinks(model, ids())
        odds.append(column(frame, "gate_odds"))
        assert_close(column(frame, "gate"), 1 - column(frame, "learnt"))
    assert 0 < (odds[1] - odds[0]).abs().max() < 0.1
    assert (odds[0] > 10).all() if logit < 0 else (odds[0] < -16).all()


def test_bins_can_be_chosen():
    model = plain()
    whole, one = measure_sinks(model, ids()), measure_sinks(model, ids(), [(17, 32), (40, 40)])
    assert list(one["high"].unique()) == [32, 40]
    same = whole[whole["high"] == 32].reset_index(drop=True)
    pd.testing.assert_frame_equal(one[one["high"] == 32].reset_index(drop=True), same)
    for bad in ((1, 5), (9, 8), (30, 41)):
        with pytest.raises(ValueError, match=rf"bins must lie in 2 … \d+, first position before last, got \({bad[0]}, {bad[1]}\)"):
            measure_sinks(model, ids(), [bad])


def test_bad_input():
    model = plain()
    with pytest.raises(ValueError, match="at most 128 tokens, the most this model knows, got 129"):
        measure_sinks(model, ids(1, 129))
    with pytest.raises(ValueError, match="length must be at least 2"):
        measure_sinks(model, ids(1, 1))
    with pytest.raises(TypeError, match="a family among llama, mistral.*got Linear"):
        measure_sinks(torch.nn.Linear(2, 2), ids())
    odd = copy.deepcopy(model)
    odd.config.model_type = "olmo2"
    with pytest.raises(TypeError, match="got olmo2"):
        measure_sinks(odd, ids())
    with pytest.raises(ValueError, match=r"got \(3, 0\)"):
        attention_maps(model, ids(1), [(0, 0), (3, 0)])
    with pytest.raises(ValueError, match="threshold must lie in 0 … 1"):
        sink_rate(measure_sinks(model, ids()), 1.5)


# text and arrays


def test_blocks_of_running_text():
    tokens = torch.arange(10, 31)
    assert corpus.blocks(tokens, 5).tolist() == [list(range(10 + 5 * i, 15 + 5 * i)) for i in range(4)]
    with_bos = corpus.blocks(tokens, 5, bos=1)
    assert with_bos.shape == (5, 5) and (with_bos[:, 0] == 1).all() and with_bos[:, 1:].flatten().tolist() == list(range(10, 30))
    example = corpus.as_examples(with_bos)[1]
    assert example.labels[0] == -100 and torch.equal(example.labels[1:], example.input_ids[1:])
    assert corpus.spread(with_bos, 3)[:, 1].tolist() == [10, 18, 26]
    with pytest.raises(ValueError, match="the text has 21 tokens, fewer than the 22 that a block of length 23 needs"):
        corpus.blocks(tokens, 23, bos=1)
    with pytest.raises(ValueError, match="makes 5 blocks, fewer than the 6"):
        corpus.spread(with_bos, 6)
    with pytest.raises(ValueError, match="texts must hold one"):
        corpus.token_stream([], None)
    with pytest.raises(ValueError, match="unknown data set"):
        corpus.documents(["nothing"])


def test_documents_are_distinct_and_can_leave_some_out():
    texts = corpus.documents(["lookup"])
    assert len(texts) == len(set(texts))
    assert corpus.documents(["lookup", "lookup"], besides=texts[:5]) == texts[5:]


def test_arrays_come_back_as_they_were(tmp_path):
    path = save_arrays(tmp_path / "a" / "x.npz", {"m": np.ones((2, 3), np.float16), "at": [1, 2]})
    back = load_arrays(path)
    assert back["m"].dtype == np.float16 and back["at"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="must hold numbers, got names"):
        save_arrays(tmp_path / "y.npz", {"names": ["a"]})
    with pytest.raises(ValueError, match="got nothing"):
        save_arrays(tmp_path / "y.npz", {})
    path.write_bytes(b"no")
    with pytest.raises(ValueError, match="x.npz is damaged"):
        load_arrays(path)
