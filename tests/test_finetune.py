"Fine-tuning: every method trains, a killed run goes on, bad input is named."

import itertools
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from bft_nb import finetune as ft
from bft_nb.finetune import LEARNT, METHODS, answering, finetune, learnt, length_grouped, prepare
from bft_nb.llama import layer_filters, trace
from bft_nb.models import load_model
from bft_nb.qa import Collator, Example, encode, lookup, prompt_ids
from bft_nb.results import load_answers, save_answers

QUICK = dict(steps=4, lr=1e-3, device="cpu")


@pytest.fixture(scope="module")
def questions():
    return lookup(24, seed=0)


def ready(method, questions, **options):
    made = prepare("tiny", method, [q.context for q in questions[:4]], **options)
    return made, [encode(q, made.tokenizer, 128) for q in questions], Collator(made.tokenizer)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("adapter", ft.ADAPTERS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method, adapter, questions):
    made, examples, collate = ready(method, questions, adapter=adapter)
    before = weights(made.model)
    tuned = finetune(made.model, examples, collate, method, **QUICK)
    assert [row["step"] for row in tuned.losses] == [1, 2, 3, 4] and all(row["loss"] > 0 for row in tuned.losses)
    changed = [name for name, p in weights(made.model).items() if not torch.equal(p, before[name])]
    assert any("lora_B" in name for name in changed) == (adapter == "lora")
    assert {module for module in ("bft", "gate") if any(f".{module}." in name for name in changed)} == {METHODS[method].added} - {""}
    assert (made.added > 0) == bool(METHODS[method].added)
    assert made.trainable == sum(p.numel() for p in before.values())


def test_methods_share_the_start_of_the_adapter(questions):
    a, b = (ready(method, questions, seed=3)[0].model for method in ("sft", "bft"))
    of = lambda model: {name: p for name, p in weights(model).items() if "lora_A" in name}
    assert of(a).keys() == of(b).keys() and all(torch.equal(p, of(b)[name]) for name, p in of(a).items())


def test_a_method_may_start_its_filter_elsewhere_and_the_caller_has_the_last_word(questions):
    shipped, strong, told = (layer_filters(ready(method, questions, **start)[0].model) for method, start in (("bft", {}), ("bft_strong", {}), ("bft_strong", dict(beta_a=0.5))))
    dials = lambda filters: {(round(f.beta_a.item(), 6), round(f.beta_g.item(), 6)) for f in filters}
    assert dials(shipped) == {(0.25, 0.01)} and dials(strong) == {(1.0, 0.1)} and dials(told) == {(0.5, 0.1)}


@pytest.mark.parametrize("method", ["bft", "headwise"])
def test_the_seed_decides_the_start(method, questions):
    a, b, other = (weights(ready(method, questions, seed=seed)[0].model) for seed in (1, 1, 2))
    assert all(torch.equal(p, b[name]) for name, p in a.items()) and any(not torch.equal(p, other[name]) for name, p in a.items())


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import test_finetune as t
made, examples, collate = t.ready({method!r}, t.lookup(24, seed=0))
t.at_call(6, lambda: os.kill(os.getpid(), signal.SIGKILL))
t.finetune(made.model, examples, collate, {method!r}, **t.EIGHT, out_dir={out!r})
"""
EIGHT = QUICK | dict(steps=8)  # a checkpoint after every second


def at_call(n, happens):
    "Have something happen at the n-th call of the loss; the list grows with each."
    calls, made = [], ft.loss_func

    def counting(name):
        loss = made(name)

        def once(*args, **kwargs):
            calls.append(1)
            if len(calls) == n:
                happens()
            return loss(*args, **kwargs)

        return once

    ft.loss_func = counting
    return calls


@pytest.fixture
def counted(monkeypatch):
    "Calls of the loss while a test runs."
    monkeypatch.setattr(ft, "loss_func", ft.loss_func)  # put back at the end
    return at_call(0, None)


@pytest.mark.parametrize("method", ["sft", "bft", "headwise"])
def test_a_killed_run_goes_on(method, questions, tmp_path, counted):
    whole, examples, collate = ready(method, questions)
    finetune(whole.model, examples, collate, method, **EIGHT, out_dir=tmp_path / "whole")
    assert len(counted) == 8
    script = KILLED.format(tests=str(Path(__file__).parent), method=method, out=str(tmp_path / "run"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    again = ready(method, questions)[0]
    for p in again.model.parameters():  # what is trained comes from the checkpoint
        p.data.mul_(1 + p.requires_grad)
    finetune(again.model, examples, collate, method, **EIGHT, out_dir=tmp_path / "run")
    assert len(counted) == 8 + 4, "after five steps, four of which were saved, four are left"
    for name, p in weights(whole.model).items():
        torch.testing.assert_close(weights(again.model)[name], p, atol=0, rtol=0)


def test_two_at_once_in_one_folder_train_once(questions, tmp_path, counted):
    made = [ready("bft", questions) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda m: finetune(m[0].model, *m[1:], "bft", **EIGHT, out_dir=tmp_path), made))
    assert len(counted) == 8 and done[0].losses == done[1].losses
    one, other = (weights(m[0].model) for m in made)
    assert all(torch.equal(p, other[name]) for name, p in one.items())


@pytest.mark.parametrize("adapter", ft.ADAPTERS)
def test_a_half_written_checkpoint_is_passed_over(adapter, questions, tmp_path, counted):
    run = QUICK | dict(steps=8, out_dir=tmp_path)
    made, examples, collate = ready("bft", questions, adapter=adapter)
    finetune(made.model, examples, collate, "bft", **run)
    last = tmp_path / "checkpoint-8"
    for lost in ("trainer_state.json", "optimizer.pt", next(last.glob("*.safetensors")).name):
        (last / lost).unlink()
        counted.clear()
        again = ready("bft", questions, adapter=adapter)[0]
        finetune(again.model, examples, collate, "bft", **run)
        assert len(counted) == 2, "it goes on from the sixth step"
        assert all(torch.equal(p, weights(made.model)[name]) for name, p in weights(again.model).items()) and (last / lost).exists()
    for other in (dict(lr=1e-2), dict(steps=9), dict(precision_lr=1e-2), dict(seed=1)):
        with pytest.raises(ValueError, match="holds a run with other settings or data"):
            finetune(made.model, examples, collate, "bft", **run | other)
    with pytest.raises(ValueError, match="holds a run with other settings or data"):
        finetune(made.model, examples[1:], collate, "bft", **run)


@pytest.mark.parametrize(
    ("change", "message"),
    [(dict(steps=0), "steps must be at least 1, got 0"), (dict(batch_size=0), "batch_size"), (dict(lr=0.0), "lr must be positive"), (dict(method="dpo"), "got 'dpo'"), (dict(dtype="float16"), "dtype must be one of 'float32', 'bfloat16', got 'float16'")],
)
def test_bad_arguments(change, message, questions):
    made, examples, collate = ready("sft", questions)
    settings = dict(method="sft") | QUICK | change
    with pytest.raises(ValueError, match=message):
        finetune(made.model, examples, collate, **settings)
    with pytest.raises(ValueError, match="examples must hold one at least"):
        finetune(made.model, [], collate, "sft", **QUICK)
    long = Example(*(torch.ones(513, dtype=torch.long) for _ in range(2)))
    with pytest.raises(ValueError, match="an example has 513 tokens, longer than the model's 512"):
        finetune(made.model, [*examples, long], collate, "sft", **QUICK)
    with pytest.raises(ValueError, match="max_length must be at most 512, the tokens that the model can take, got 513"):
        prepare("tiny", "bft", ["a text"], max_length=513)


def test_a_filter_needs_texts_and_a_known_adapter(questions):
    with pytest.raises(ValueError, match="calibration must hold one text"):
        prepare("tiny", "bft")
    with pytest.raises(ValueError, match="adapter must be one of 'lora', 'full', got 'ia3'"):
        prepare("tiny", "sft", adapter="ia3")


@pytest.mark.parametrize("n", [3, 64, 1000])
def test_batches_hold_rows_of_similar_length_and_every_example_before_any_again(n):
    lengths = np.random.default_rng(1).integers(50, 130, n).tolist()
    order = length_grouped(lengths, 60, 4, seed=2)
    assert order == length_grouped(lengths, 60, 4, seed=2) != length_grouped(lengths, 60, 4, seed=3)
    uses = np.bincount(order, minlength=n)
    assert len(order) == 240 and uses.max() - uses.min() <= 1
    if n == 1000:
        padded = sum(max(lengths[i] for i in order[at : at + 4]) * 4 for at in range(0, 240, 4))
        assert padded < 1.05 * sum(lengths[i] for i in order)


def test_no_batch_holds_an_example_twice_within_a_pass():
    order = np.array(length_grouped(range(1, 11), 10, 2)).reshape(10, 2)
    assert (order[:, 0] != order[:, 1]).all() and (np.bincount(order.ravel()) == 2).all()


@pytest.mark.parametrize("method", ["sft", "bft"])
def test_a_diverged_run_is_no_result(method, questions):
    made, examples, collate = ready(method, questions)
    with pytest.raises(FloatingPointError, match="smaller lr"):
        finetune(made.model, examples, collate, method, **QUICK | dict(steps=20, lr=1e30))


def test_the_last_step_is_told(questions):
    made, examples, collate = ready("sft", questions)
    assert [row["step"] for row in finetune(made.model, examples, collate, "sft", **QUICK | dict(steps=43)).losses][-2:] == [42, 43]


@pytest.mark.parametrize("method", ["sft", "bft"])
def test_the_model_is_asked_as_it_was_tuned(method, questions):
    made, examples, collate = ready(method, questions)
    finetune(made.model, examples, collate, method, **QUICK)
    batch = collate(examples[:3])
    batch.pop("labels")
    made.model.eval()
    with torch.no_grad():
        before = made.model(**batch).logits
        with answering(made.model) as lm:
            torch.testing.assert_close(lm(**batch).logits, before, atol=1e-4, rtol=1e-4)
            assert all(m.merged for m in lm.modules() if hasattr(m, "lora_A"))
        with answering(made.model, "bfloat16") as lm:
            assert not torch.equal(lm(**batch).logits.float(), before)
        torch.testing.assert_close(made.model(**batch).logits, before, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="dtype must be one of"), answering(made.model, "float16"):
        pass


def test_parts_of_a_filter_are_switched_off_only_while_it_is_asked(questions):
    plain, filtering = (ready(method, questions)[0].model.eval() for method in ("sft", "bft"))
    dials = [dial for layer in layer_filters(filtering) for dial in (layer.beta_a, layer.root_beta_g)]
    before = [dial.item() for dial in dials]
    ids = torch.arange(4, 14)[None]
    scores = {}
    with torch.no_grad():
        wanted = plain(input_ids=ids).logits
        for parts in ((), ("kriging",), ("kalman",), ("kriging", "kalman")):
            with answering(filtering, without=parts) as lm:
                scores[parts] = lm(input_ids=ids).logits
            assert [dial.item() for dial in dials] == before
    torch.testing.assert_close(scores.pop(("kriging", "kalman")), wanted, atol=1e-5, rtol=1e-5)  # nothing is learnt yet: the plain model
    assert all((a - b).abs().max() > 1e-4 for a, b in itertools.combinations([wanted, *scores.values()], 2))
    with pytest.raises(RuntimeError, match="halfway"), answering(filtering, without=["kriging"]):
        raise RuntimeError("halfway")
    assert [dial.item() for dial in dials] == before
    with pytest.raises(ValueError, match="each of without must be one of 'kriging', 'kalman', got 'gain'"), answering(filtering, without=["gain"]):
        pass
    with pytest.raises(TypeError, match="has no filtering layers"), answering(plain, without=["kalman"]):
        pass


def test_what_a_filter_has_learnt_is_measured(questions):
    assert learnt(ready("sft", questions)[0].model, "sft", None, questions) == {}
    made, examples, collate = ready("bft", questions)
    before = learnt(made.model, "bft", made.tokenizer, questions[:2])
    assert tuple(before) == LEARNT and 0.5 < before["gain"] < 1 and (before["beta_g"], before["beta_a"]) == pytest.approx((0.01, 0.25))
    finetune(made.model, examples, collate, "bft", **QUICK, precision_lr=0.1)
    after = learnt(made.model, "bft", made.tokenizer, questions[:1])
    records = trace(made.model.eval(), input_ids=torch.tensor([prompt_ids(questions[0], made.tokenizer)]))
    wanted = [(r.gain.mean(), r.beta_g, r.beta_a, r.lam_bar.log().mean()) for r in records]
    assert list(after.values()) == pytest.approx(np.mean([[float(x) for x in row] for row in wanted], 0))
    assert max(abs(float(beta_a) - 0.25) for _, _, beta_a, _ in wanted) > 0.01  # in some layer: over layers, steps of either sign cancel


def test_a_model_that_is_loaded_already(questions):
    loaded = load_model("tiny")
    made = prepare(loaded, "bft", [questions[0].context], adapter="full")
    assert made.model is loaded[0] and made.tokenizer is loaded[1]


def test_answers_are_stored_with_their_scores(tmp_path):
    path = save_answers(tmp_path / "a.npz", ["x", "y"], ["Ada", ""], [1, 0], [1.0, 0.25])
    found = load_answers(path)
    assert found["ids"].tolist() == ["x", "y"] and found["texts"].tolist() == ["Ada", ""] and found["exact"].tolist() == [1, 0] and found["f1"].tolist() == [1.0, 0.25]
    with pytest.raises(ValueError, match="one id, text and score per question"):
        save_answers(path, ["x"], ["a", "b"], [1], [1.0])
    with pytest.raises(ValueError, match="f1 must lie in 0 … 1"):
        save_answers(path, ["x"], ["a"], [1], [1.5])
    assert load_answers(path)["ids"].tolist() == ["x", "y"]
