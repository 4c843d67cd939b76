"""Losses, batches, evaluation, training: determinism, resuming, early stopping."""

import json
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import two_processes
from hypothesis import given, settings
from hypothesis import strategies as st

from bft_nb.backbones import BACKBONES, SASRec
from bft_nb.interactions import Examples, Sequences, Split, from_lengths
from bft_nb.ranking import ndcg, ranks
from bft_nb.training import (
    IGNORE, LengthBatches, SequenceLoss, TrainingSequences, cross_entropy, draw_negatives, evaluate, fit, history_rows, interrupted_later, model_inputs,
    pad_rows, parameter_groups, resolve_device, sampled_softmax,
)  # fmt: skip

close = torch.testing.assert_close


def chain_split(users=120, n_items=24, seed=0) -> Split:
    "Users who walk along a ring of items, mostly one step at a time: learnable in a few epochs."
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 12, users)
    rows = [(rng.integers(n_items) + np.cumsum(rng.choice([1, 1, 1, 2], length))) % n_items + 1 for length in lengths]
    train, test = (from_lengths(lengths - cut, np.concatenate([row[: len(row) - cut] for row in rows])) for cut in (2, 1))
    who = np.arange(users, dtype=np.int32)
    valid_targets, test_targets = (np.array([row[-cut] for row in rows], dtype=np.int32) for cut in (2, 1))
    return Split("leave_one_out", "ring", n_items, who, train, Examples(who, train, valid_targets), Examples(who, test, test_targets), hash=f"ring{seed}")


def small(split, seed=0, backbone="sasrec", **kw):
    torch.manual_seed(seed)
    few = {"mask_probability": 0.3} if backbone == "bert4rec" else {}
    return BACKBONES[backbone](split.n_items, **dict(max_length=10, d=16, dropout=0.2) | few | kw)


QUICK = dict(device="cpu", batch_size=32, negatives=16, lr=5e-3, eval_batch_size=64)


@pytest.fixture(scope="module")
def split():
    return chain_split()


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        close(a[name], b[name], atol=0, rtol=0)


def without_seconds(history):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in history]


# ---- losses ------------------------------------------------------------------------------------------------------


def test_cross_entropy_by_definition():
    h, w = torch.randn(5, 4), torch.randn(8, 4)
    y = torch.tensor([1, 7, 3, 3, 2])
    scores = h @ w.T
    want = torch.stack([scores[i, 1:].exp().sum().log() - scores[i, y[i]] for i in range(5)])
    close(cross_entropy(h, y, w), want)


def test_sampled_softmax_with_every_other_item_is_the_full_one():
    h, w = torch.randn(3, 4), torch.randn(8, 4)
    for target in range(1, 8):
        y = torch.full((3,), target)
        others = torch.tensor([i for i in range(1, 8) if i != target])
        close(sampled_softmax(h, y, w, others), cross_entropy(h, y, w))
        close(sampled_softmax(h, y, w, torch.arange(1, 8)), cross_entropy(h, y, w))  # its own copy is masked
        close(sampled_softmax(h, y, w, others.repeat(3)), cross_entropy(h, y, w))  # the correction makes the number drop out


def test_sampled_denominator_is_unbiased():
    torch.manual_seed(0)
    h, w, y = torch.randn(2, 4), torch.randn(30, 4) * 0.5, torch.tensor([5, 9])
    scores = h @ w.T
    own = scores.gather(1, y[:, None]).squeeze(1)
    want = scores[:, 1:].exp().sum(1) - own.exp()
    draws = torch.stack([(sampled_softmax(h, y, w, draw_negatives(29, 64)).exp() - 1) * own.exp() for _ in range(2000)])
    error = draws.std(0) / math.sqrt(2000)
    assert bool(((draws.mean(0) - want).abs() < 4 * error).all())


def test_a_target_is_never_its_own_negative():
    h, w, y = torch.randn(2, 4), torch.randn(6, 4, requires_grad=True), torch.tensor([2, 3])
    loss = sampled_softmax(h, y, w, torch.tensor([2, 2, 2]))
    assert loss[0].item() == 0 and loss[1].item() > 0
    (grad,) = torch.autograd.grad(loss[0], w)
    assert float(grad.abs().max()) == 0


def test_padding_is_no_negative_and_no_class():
    assert int(draw_negatives(5, 10_000).min()) == 1 and int(draw_negatives(5, 10_000).max()) == 5
    w = torch.randn(6, 4, requires_grad=True)
    cross_entropy(torch.randn(2, 4), torch.tensor([1, 5]), w).sum().backward()
    assert float(w.grad[0].abs().max()) == 0


@pytest.mark.parametrize("negatives", [None, 8])
def test_loss_covers_all_positions_and_weighs_targets_alike(split, negatives):
    model = small(split).eval()
    data = TrainingSequences(split.train, model)
    batch = data.__getitems__(list(range(6)))
    torch.manual_seed(0)
    whole = SequenceLoss(model, negatives, 1.0)(model(batch["items"]), batch["labels"])
    assert int((batch["labels"] != IGNORE).sum()) == int(data.lengths[:6].sum())
    if negatives is None:
        parts = sum(SequenceLoss(model, None, 1.0)(model(b["items"]), b["labels"]) for b in (data.__getitems__([i]) for i in range(6)))
        close(whole, parts, atol=1e-4, rtol=1e-5)


# ---- batches -----------------------------------------------------------------------------------------------------


def test_training_rows_shift_by_one_and_keep_the_most_recent():
    sequences = Sequences(np.array([0, 1, 4, 10]), np.array([9, 1, 2, 3, 11, 12, 13, 14, 15, 16], dtype=np.int32))
    data = TrainingSequences(sequences, SASRec(16, max_length=4, d=4))
    assert len(data) == 2 and data.lengths.tolist() == [2, 4]  # one item has nothing to predict
    batch = data.__getitems__([0, 1])
    assert batch["items"].tolist() == [[1, 2, 0, 0], [12, 13, 14, 15]]
    assert batch["labels"].tolist() == [[2, 3, IGNORE, IGNORE], [13, 14, 15, 16]]
    assert data[0]["items"].tolist() == [1, 2]


@settings(max_examples=50)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(1, 5))
def test_pad_rows(lengths, max_length):
    sequences = from_lengths(np.array(lengths), np.arange(1, sum(lengths) + 1))
    got = pad_rows(sequences.offsets, sequences.items, np.arange(len(lengths)), max_length)
    for u, row in enumerate(got):
        want = sequences[u][-max_length:] if lengths[u] else np.array([], dtype=int)
        assert row[: len(want)].tolist() == want.tolist() and not row[len(want) :].any()


@settings(max_examples=30)
@given(st.integers(1, 400), st.integers(1, 64), st.integers(0, 5), st.integers(0, 3))
def test_every_sequence_once_an_epoch(n, batch_size, seed, epoch):
    lengths = np.random.default_rng(0).integers(1, 50, n)
    batches = LengthBatches(lengths, batch_size, seed, pool=3)
    batches.set_epoch(epoch)
    drawn = list(batches)
    assert sorted(i for b in drawn for i in b) == list(range(n))
    assert len(drawn) == len(batches) and max(map(len, drawn)) <= batch_size
    assert list(batches) == drawn


def test_batches_are_seeded_differ_by_epoch_and_hold_like_lengths():
    lengths = np.random.default_rng(0).integers(1, 50, 5000)
    a, b = LengthBatches(lengths, 64, seed=1), LengthBatches(lengths, 64, seed=1)
    assert list(a) == list(b)
    b.set_epoch(1)
    assert list(a) != list(b) and list(a) != list(LengthBatches(lengths, 64, seed=2))
    filled = sum(lengths[i].sum() for i in a) / sum(len(i) * lengths[i].max() for i in a)
    assert filled > 0.9


# ---- evaluation --------------------------------------------------------------------------------------------------


def test_evaluate_is_the_rank_of_each_user_alone(split):
    model = small(split).eval()
    got = evaluate(model, split.test, batch_size=17)
    assert got.dtype == torch.int64 and got.shape == (120,)
    for u in range(0, 120, 7):
        history = torch.from_numpy(split.test.histories[u].astype(np.int64))
        with torch.no_grad():
            scores = model.scores(model.last(history[-10:][None]))
        assert int(got[u]) == int(ranks(scores, torch.tensor([int(split.test.targets[u])]), history[None]))
    close(got, evaluate(model, split.test, batch_size=120))
    assert not torch.equal(got, evaluate(model, split.test, filter_seen=False))


def test_evaluate_leaves_the_model_in_its_mode(split):
    model = small(split).train()
    evaluate(model, split.valid)
    assert model.training


def test_evaluate_refuses_a_broken_model(split):
    model = small(split)
    with torch.no_grad():
        model.item_embedding.weight[3, 0] = math.nan
    with pytest.raises(ValueError, match="scores must be finite"):
        evaluate(model, split.valid)


def test_histories_longer_than_the_model_are_cut_but_seen_in_full():
    model = small(SimpleNamespace(n_items=24), max_length=3).eval()
    history = from_lengths(np.array([5, 2]), np.array([1, 2, 3, 4, 5, 6, 7]))
    examples = Examples(np.arange(2, dtype=np.int32), history, np.array([10, 11], dtype=np.int32))
    with torch.no_grad():
        scores = model.scores(model.last(torch.tensor([[3, 4, 5]])))
    want = ranks(scores, torch.tensor([10]), torch.tensor([[1, 2, 3, 4, 5]]))
    close(evaluate(model, examples)[:1], want)


# ---- training ----------------------------------------------------------------------------------------------------


def test_training_learns_and_restores_the_best_epoch(split, tmp_path):
    model = small(split)
    result = fit(model, split, epochs=12, patience=12, out_dir=tmp_path / "run", **QUICK)
    assert [row["epoch"] for row in result.history] == list(range(1, 13))
    best = max(row["ndcg@10"] for row in result.history)
    assert best > 0.5 > result.history[0]["ndcg@10"] - 0.1
    assert result.history[result.best_epoch - 1]["ndcg@10"] == best
    assert float(ndcg(evaluate(model, split.valid)).mean()) == pytest.approx(best)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert_equal(weights(SASRec.from_pretrained(tmp_path / "run" / "model")), weights(model))


def test_one_seed_one_result_and_another_seed_another(split):
    results = []
    for seed in (0, 0, 1):
        model = small(split)
        results.append((without_seconds(fit(model, split, seed=seed, epochs=2, **QUICK).history), weights(model)))
    assert results[0][0] == results[1][0] != results[2][0]
    assert_equal(results[0][1], results[1][1])


def test_early_stopping(split):
    model = small(split)
    result = fit(model, split, epochs=40, patience=2, **QUICK | dict(lr=0.05))
    assert len(result.history) == result.best_epoch + 2 < 40


KILLED = """
import os, sys
sys.path.insert(0, {tests!r})
from test_training import QUICK, chain_split, fit, small
import bft_nb._trainer as t
class Kill(t.Progress):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == {step}: os._exit(9)
t.Progress = Kill
split = chain_split()
fit(small(split, backbone={backbone!r}, bft={bft}), split, epochs=5, patience=9, precision_lr=1e-2, out_dir={out!r}, progress=True, **QUICK)
"""


@pytest.mark.parametrize(("backbone", "step", "bft"), [("sasrec", 2, False), ("sasrec", 10, False), ("sasrec", 12, True), ("bert4rec", 10, False), ("hstu", 10, True)])
def test_a_killed_run_ends_where_an_uninterrupted_one_does(split, tmp_path, backbone, step, bft):
    script = KILLED.format(tests=os.path.dirname(__file__), step=step, backbone=backbone, bft=bft, out=str(tmp_path / "killed"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 9, done.stderr[-2000:]
    run = dict(epochs=5, patience=9, precision_lr=1e-2) | QUICK
    # before anything was saved a second call starts afresh, from its own first weights; later they don't matter
    whole, resumed, again = (small(split, seed, backbone, bft=bft) for seed in (0, 0 if step == 2 else 5, 7))
    want = fit(whole, split, **run)
    got = fit(resumed, split, out_dir=tmp_path / "killed", **run)
    assert without_seconds(got.history) == without_seconds(want.history)
    assert_equal(weights(resumed), weights(whole))
    assert fit(again, split, out_dir=tmp_path / "killed", **run) == got  # a finished run is not trained again
    assert_equal(weights(again), weights(whole))


def test_blanks_depend_on_seed_and_epoch_and_not_on_what_was_drawn_before(split):
    def epoch(seed, number, reverse=False):
        data = TrainingSequences(split.train, small(split, backbone="bert4rec"))
        batches = data.batches(16, seed)
        batches.set_epoch(number)
        drawn = list(batches)
        return {tuple(b): data.__getitems__(b)["items"] for b in (drawn[::-1] if reverse else drawn)}

    first, again, later = epoch(0, 3), epoch(0, 3, reverse=True), epoch(0, 4)
    assert all(torch.equal(first[b], again[b]) for b in first)
    hidden = lambda e: {r: int((row == 25).sum()) for b, items in e.items() for r, row in zip(b, items, strict=True)}
    assert hidden(first) != hidden(later) != hidden(epoch(1, 4))
    assert min(hidden(first).values()) >= 1


def test_loss_of_blanks_is_a_mean(split):
    result = fit(small(split, backbone="bert4rec"), split, epochs=1, **QUICK | dict(negatives=None, lr=1e-6))
    assert result.history[0]["loss"] == pytest.approx(math.log(24), rel=0.05)


@pytest.mark.parametrize("bft", [False, True])
@pytest.mark.parametrize(("backbone", "epochs", "enough"), [("bert4rec", 12, 0.4), ("hstu", 6, 0.5)])
def test_the_other_backbones_learn_the_ring(split, backbone, bft, epochs, enough):
    result = fit(small(split, backbone=backbone, bft=bft), split, epochs=epochs, patience=epochs, **QUICK)
    assert max(row["ndcg@10"] for row in result.history) > enough
    assert result.history[-1]["loss"] < result.history[0]["loss"]


def test_times_reach_the_model_in_training_and_evaluation():
    sequences = Sequences(np.array([0, 3, 9]), np.array([1, 2, 3, 11, 12, 13, 14, 15, 16], dtype=np.int32), np.arange(9) * 86_400)
    model = small(SimpleNamespace(n_items=24), backbone="hstu", max_length=4, time_buckets=64).eval()
    batch = TrainingSequences(sequences, model).__getitems__([0, 1])
    assert (batch["times"] // 86_400).tolist() == [[0, 1, 2, 0], [4, 5, 6, 7]] and batch["items"].tolist() == [[1, 2, 0, 0], [12, 13, 14, 15]]
    examples = Examples(np.arange(2, dtype=np.int32), sequences, np.array([5, 6], dtype=np.int32))
    with torch.no_grad():
        scores = model.scores(model.last(torch.tensor([[13, 14, 15, 16]]), torch.tensor([[5, 6, 7, 8]]) * 86_400))
    close(evaluate(model, examples)[1:], ranks(scores, torch.tensor([6]), torch.tensor([[11, 12, 13, 14, 15, 16]])))
    with pytest.raises(ValueError, match="no times"):
        evaluate(model, Examples(examples.users, from_lengths(np.array([3, 6]), sequences.items), examples.targets))


def test_a_model_reads_recent_items_and_just_the_times_it_asks_for():
    sequences = Sequences(np.array([0, 1, 4]), np.array([7, 1, 2, 3], dtype=np.int32), np.array([5, 6, 7, 8]))
    ordered, timed = (small(SimpleNamespace(n_items=24), backbone="hstu", max_length=2, time_buckets=n) for n in (0, 8))
    assert [x.tolist() for x in model_inputs(timed, sequences, np.array([0, 1]))] == [[[7, 0], [2, 3]], [[5, 0], [7, 8]]]
    assert [x.tolist() for x in model_inputs(ordered, sequences, np.array([1]))] == [[[2, 3]]]
    assert history_rows(sequences, np.array([1, 0])).tolist() == [[1, 2, 3], [7, 0, 0]]


def test_a_half_written_checkpoint_is_dropped(split, tmp_path):
    fit(small(split), split, epochs=1, out_dir=tmp_path, **QUICK)  # leaves the mark by which the folder is known as this run's
    half = tmp_path / "checkpoint-99"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    result = fit(small(split), split, epochs=1, out_dir=tmp_path, **QUICK)
    assert len(result.history) == 1 and not half.exists()


def test_validating_less_often_trains_the_same(split, tmp_path):
    every, third = (fit(small(split), split, epochs=6, validate_every=n, out_dir=tmp_path / str(n), **QUICK) for n in (1, 3))
    assert [row["epoch"] for row in third.history] == [3, 6]
    assert without_seconds(third.history) == without_seconds([every.history[2], every.history[5]])
    assert sorted(p.name for p in (tmp_path / "3").glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-24"]


def test_the_linear_schedule_ends_at_zero(split, tmp_path):
    fit(small(split), split, epochs=4, schedule="linear", out_dir=tmp_path, **QUICK)
    log = json.loads((tmp_path / "checkpoint-16" / "trainer_state.json").read_text())["log_history"]
    rates = [row["learning_rate"] for row in log if "learning_rate" in row]
    assert rates == pytest.approx([QUICK["lr"] * (1 - (4 * epoch - 1) / 16) for epoch in (1, 2, 3, 4)])


def test_an_out_dir_belongs_to_one_run(split, tmp_path):
    fit(small(split), split, epochs=1, out_dir=tmp_path, **QUICK)
    with pytest.raises(ValueError, match="other settings"):
        fit(small(split), split, epochs=1, out_dir=tmp_path, **QUICK | dict(lr=1e-4))
    with pytest.raises(ValueError, match="other settings"):
        fit(small(split), chain_split(seed=1), epochs=1, out_dir=tmp_path, **QUICK)
    with pytest.raises(ValueError, match="other settings"):
        fit(small(split, d=8), split, epochs=1, out_dir=tmp_path, **QUICK)


@pytest.mark.parametrize("negatives", [None, 16])
def test_full_and_sampled_and_bfloat16(split, negatives):
    result = fit(small(split), split, epochs=3, **QUICK | dict(negatives=negatives, dtype="bfloat16"))
    assert result.history[-1]["loss"] < result.history[0]["loss"]


def test_diverged_training_says_so(split):
    model = small(split)
    with torch.no_grad():
        model.position_embedding.weight[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="loss"):
        fit(model, split, epochs=1, **QUICK)


def test_parameter_groups_of_a_plain_model(split):
    model = small(split)
    (group,) = parameter_groups(model, 1e-3, 1e-2, 0.1)
    assert len(group["params"]) == len(list(model.parameters())) and group["lr"] == 1e-3 and group["weight_decay"] == 0.1


def test_precision_parameters_have_a_learning_rate_of_their_own_and_no_decay(split):
    model = small(split, bft=True)
    rest, special = parameter_groups(model, 1e-3, 3e-2, 0.1)
    assert (special["lr"], special["weight_decay"], rest["lr"], rest["weight_decay"]) == (3e-2, 0.0, 1e-3, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in special["params"]} == {"precision.log_tau.weight", "encoder.layers.0.raw_noise"}
    assert len(rest["params"]) + len(special["params"]) == sum(p.requires_grad for p in model.parameters())
    assert parameter_groups(model, 1e-3, None, 0.0)[1]["lr"] == 1e-3


def test_precision_moves_faster_with_a_larger_rate(split):
    moved = []
    for rate in (1e-5, 5e-2):
        model = small(split, bft=True)
        result = fit(model, split, epochs=2, precision_lr=rate, **QUICK)
        moved.append(float(model.precision.tau.detach().log().abs().mean()))
        assert math.isfinite(result.history[-1]["loss"])
    assert moved[1] > 10 * moved[0]


def test_a_filtering_model_learns_the_ring(split):
    model = small(split, bft=True)
    assert max(row["ndcg@10"] for row in fit(model, split, epochs=12, patience=12, **QUICK).history) > 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(epochs=0), "epochs must be at least 1, got 0"),
        (dict(batch_size=0), "batch_size"),
        (dict(negatives=0), "negatives"),
        (dict(patience=0), "patience"),
        (dict(validate_every=0), "validate_every must be at least 1, got 0"),
        (dict(epochs=10, validate_every=4), "validate_every must divide epochs=10, got 4"),
        (dict(schedule="cosine"), "schedule must be one of 'constant', 'linear', got 'cosine'"),
        (dict(lr=0.0), "lr must be positive"),
        (dict(precision_lr=-1.0), "precision_lr must be positive"),
        (dict(dtype="float16"), "bfloat16"),
        (dict(device="tpu"), "device must be"),
    ],
)
def test_bad_arguments(split, change, message):
    with pytest.raises(ValueError, match=message):
        fit(small(split), split, **QUICK | change)


def test_bad_split(split):
    empty = SimpleNamespace(train=from_lengths(np.array([1, 1]), np.array([1, 2])), valid=split.valid, n_items=24, hash="")
    with pytest.raises(ValueError, match="two or more"):
        fit(small(split), empty, **QUICK)
    with pytest.raises(ValueError, match="n_items"):
        fit(small(SimpleNamespace(n_items=9)), split, **QUICK)


def test_an_interruption_waits_until_an_import_is_whole():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupted_later():
        signal.raise_signal(signal.SIGINT)
        done.append("imported")
    assert done == ["imported"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with interrupted_later():
        pass
    with ThreadPoolExecutor(1) as pool:  # where signals are none of our business
        assert pool.submit(lambda: interrupted_later().__enter__() is None).result()


def test_devices():
    assert resolve_device("cpu").type == "cpu"
    assert resolve_device("auto").type in ("cpu", "cuda", "mps")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="not available"):
            resolve_device("cuda")


def test_progress_shows_the_loss(split, capsys):
    fit(small(split), split, epochs=1, progress=True, **QUICK)
    captured = capsys.readouterr()
    assert "loss=" in captured.err and "valid ndcg@10=" in captured.err
    fit(small(split), split, epochs=1, **QUICK)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


TWO = """
import torch
import torch.distributed as dist
from test_training import *
from bft_nb.ranking import Ranking
split = chain_split()
model = small(split)
result = fit(model, split, epochs=6, patience=6, out_dir={out!r}, **QUICK)
rank = dist.get_rank()
own = Ranking(filter_seen=True, compute_on_cpu=False)
own.update(evaluate(model, split.test)[rank::2])
total = own.compute()
mine = torch.cat([p.detach().flatten() for p in model.parameters()])
both = [torch.empty_like(mine) for _ in range(2)]
dist.all_gather(both, mine)
assert torch.equal(*both)
assert float(total["n"]) == 120, total
alone = Ranking(filter_seen=True, sync_on_compute=False)
alone.update(evaluate(model, split.test))
assert abs(float(alone.compute()["ndcg@10"] - total["ndcg@10"])) < 1e-12
assert result.history[-1]["loss"] < result.history[0]["loss"]
dist.destroy_process_group()
print("both fine")
"""


def test_two_processes_agree_and_end(tmp_path):
    assert two_processes(tmp_path, TWO.format(out=str(tmp_path / "run"))).count("both fine") == 2
