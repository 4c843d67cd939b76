"Tables of the language studies: which rows make a cell, and differences answer by answer."

import json

import numpy as np
import pytest

from bft_nb import qa_study as s
from bft_nb.figures import COLOUR
from bft_nb.qa import lookup
from bft_nb.rag import lookup_retrieved
from bft_nb.results import append_rows, make_rows, ranks_path, save_answers

N = 40


def store(folder, method="sft", seed=0, valid=0.4, right=0.5, noise=0.3, lr=1e-3, **params):
    given = {k: v for k, v in s.SQUAD.items() if k not in ("model", "dataset")} | {"method": method, "noise": noise, "lr": lr} | params
    if method == "bft":
        given.setdefault("precision_lr", lr)
    run = dict(exp="squad_noise", dataset=s.SQUAD["dataset"], model=s.SQUAD["model"], params=json.dumps(given), seed=seed)
    exact = (np.arange(N) < right * N).astype(int)
    for split, value in (("valid", valid), ("test", exact.mean())):
        append_rows(folder / "squad_noise.csv", make_rows({"f1": value}, **run, split=split, n=N, seconds=1.0, device="cpu", commit="abc"))
    save_answers(ranks_path(folder / "answers", run, "test"), [f"q{i}" for i in range(N)], [f"{method} {i}" for i in range(N)], exact, exact)


@pytest.fixture
def rows(tmp_path):
    store(tmp_path)
    store(tmp_path, valid=0.3, lr=3e-4)
    store(tmp_path, seed=1, right=0.6)
    store(tmp_path, "bft", right=0.75)
    store(tmp_path, "bft", valid=0.5, lr=3e-4, right=0.25)
    store(tmp_path, "bft", valid=0.45, precision_lr=1e-2)
    for other in (dict(steps=9), dict(corruption="swap"), dict(n_eval=9)):  # of another budget
        store(tmp_path, "bft", valid=0.9, **other)
    return s.study_rows("squad_noise", tmp_path), tmp_path


def test_each_method_at_the_rates_that_did_best(rows):
    stored, folder = rows
    assert s.tuning(stored, noise=0.3).loc["bft"].to_dict() == {"0.0003": 0.5, "0.001": 0.4, "0.001, own 0.01": 0.45}
    assert [s.tuned(stored, m, noise=0.3) for m in ("sft", "bft", "gce")] == ["0.001", "0.0003", None]
    assert s.cell(stored, "sft", "0.001", noise=0.3)["seed"].unique().tolist() == [0, 1]
    assert s.cell(stored, "gce", None).empty and s.cell(stored, "sft", "0.001", noise=0.0).empty
    assert s.choices(stored, noise=0.3)[["chosen", "at the edge"]].values.tolist() == [["0.001", "largest tried"], ["0.0003", "smallest tried"]]
    store(folder, "bft", valid=0.6, lr=5e-4, precision_lr=1e-2)
    stored = s.study_rows("squad_noise", folder)
    assert s.choices(stored, noise=0.3).loc["bft", ["chosen", "at the edge"]].tolist() == ["0.0005, own 0.01", ""]
    assert len(s.runs_of(s.cell(stored, "bft", "0.0005, own 0.01"))) == 1


def test_what_is_stored_at_other_rates_is_named(rows):
    stored, folder = rows
    chosen = {m: s.tuned(stored, m, noise=0.3) for m in s.METHODS}
    assert s.stray(stored, chosen, noise=0.3).empty  # but for the trials
    store(folder, "bft", noise=0.0)
    store(folder, "bft", seed=1)
    found = s.stray(s.study_rows("squad_noise", folder), chosen, noise=0.3)
    assert found.values.tolist() == [["bft", "0.001", 0, 0.0], ["bft", "0.001", 1, 0.3]]


def test_the_budget_is_that_of_the_book_unless_another_is_asked_for(rows):
    _, folder = rows
    assert set(s.study_rows("squad_noise", folder)["steps"]) == {250} and set(s.study_rows("squad_noise", folder, steps=9)["steps"]) == {9}
    with pytest.raises(ValueError, match="experiment must be one of 'squad_noise', 'rag_distractors', got 'squad'"):
        s.study_rows("squad")


def test_cells_without_a_common_seed_have_no_lead(rows):
    stored, folder = rows
    sft, bft = s.cell(stored, "sft", "0.001"), s.cell(stored, "bft", "0.001")
    found = s.leads({0.0: (bft, sft[sft["seed"] == 1]), 0.3: (bft, sft)}, folder=folder)
    assert found.keys() == {0.3} and found[0.3].shape == (N,)


def test_what_a_filter_has_learnt(rows):
    stored, folder = rows
    run = s.runs_of(s.cell(stored, "bft", "0.001"))[0]
    append_rows(folder / "squad_noise.csv", make_rows({"gain": 0.9, "loss": 2.0}, **run, split="train", n=16, seconds=1.0, device="cpu", commit="abc"))
    stored = s.study_rows("squad_noise", folder)
    assert s.learnt(s.cell(stored, "bft", "0.001")) == {"gain": 0.9} and s.learnt(s.cell(stored, "sft", "0.001")) == {}


def test_differences_are_paired_by_question_over_shared_seeds(rows):
    stored, folder = rows
    sft, bft = s.cell(stored, "sft", "0.001"), s.cell(stored, "bft", "0.001")
    assert s.level(sft, folder=folder).mean == pytest.approx(55) and s.seeds(sft, folder=folder) == "50.0 / 60.0"
    assert s.shown(bft, folder=folder).startswith("75.0 [")
    lead = s.advantage(bft, sft, folder=folder)
    assert lead.mean() == pytest.approx(25) and set(lead) == {0, 100}
    assert s.mean(lead).startswith("+25.0 [+")
    assert s.outcomes(bft, sft, ("BFT", "SFT"), folder=folder) == {"both": 20, "only BFT": 10, "only SFT": 0, "neither": 10}
    table = s.changed(bft, sft, ("BFT", "SFT"), n=3, folder=folder)
    assert table.index.tolist() == ["q20", "q21", "q22"] and table.loc["q20"].tolist() == ["BFT", "bft 20", "sft 20"]
    table = s.changed(bft, sft, ("BFT", "SFT"), n=3, folder=folder, asked={"q20": "Who?"})
    assert table["question"].tolist() == ["Who?", "", ""] and table.columns.tolist() == ["question", "right", "BFT", "SFT"]


def test_methods_at_equal_rates(rows):
    stored, folder = rows
    store(folder, lr=3e-3)  # a rate that only one of them has
    found = s.at_equal_rates(s.study_rows("squad_noise", folder), "bft", folder=folder, noise=0.3)
    assert found.index.tolist() == ["0.0003", "0.001", "0.001, own 0.01"] and found.columns.tolist() == ["SFT", "BFT", "Δ", "seeds"]
    assert found.loc["0.0003", "Δ"].startswith("−25.0 [") and found.loc["0.001", "Δ"].startswith("+25.0 [")
    assert set(found["seeds"]) == {"0"}  # seed 1 is stored of one method alone
    assert s.at_equal_rates(stored, "gce", folder=folder).empty


def test_a_difference_in_percent_of_the_baseline(rows):
    stored, folder = rows
    sft, bft = s.cell(stored, "sft", "0.001"), s.cell(stored, "bft", "0.001")
    found, points = s.relative(bft, sft, folder=folder), s.advantage(bft, sft, folder=folder)
    assert found.mean == pytest.approx(100 * points.mean() / 50) == pytest.approx(50) and 15 < found.low < 50 < found.high < 110
    assert s.relative(bft, sft[sft["seed"] == 1], folder=folder) is None and s.relative(sft, sft, folder=folder)[:3] == (0, 0, 0)


def test_the_questions_are_named_where_they_are_at_hand(monkeypatch, tmp_path):
    monkeypatch.setenv("BFT_DATA", str(tmp_path))
    assert s.wordings("squad_noise") == s.wordings("rag_distractors") == {}
    monkeypatch.setattr(s, "own_file", lambda name: tmp_path / name)
    monkeypatch.setattr(s, "load_questions", lambda name: lookup(2))
    monkeypatch.setattr(s, "nq_retrieved", lambda: lookup_retrieved(2))
    assert s.wordings("squad_noise") == {q.id: q.question for q in lookup(2)} and list(s.wordings("rag_distractors")) == ["lookup-0", "lookup-1"]


def test_a_cell_has_one_run_for_each_seed(rows):
    stored, folder = rows
    with pytest.raises(ValueError, match="one run for each seed, got 3 runs"):
        s.answers(s.choose(stored, method="sft"), folder=folder)


def test_every_method_has_a_colour():
    assert set(s.ROLES) == set(s.METHODS) and set(s.ROLES.values()) <= set(COLOUR)


def test_nothing_stored_is_nothing_shown(rows, tmp_path):
    empty = s.study_rows("rag_distractors", tmp_path)
    assert empty.empty and s.tuning(empty).empty and s.tuned(empty, "sft") is None and s.stray(empty, {}, n_eval=0).empty and s.choices(empty).empty
    stored, folder = rows
    none = s.cell(stored, "gce", None)
    assert s.shown(none) == s.seeds(none) == s.mean(s.advantage(none, stored.iloc[:0])) == "" and s.level(none) is None
    assert s.changed(none, none, ("a", "b")).empty and set(s.outcomes(none, none, ("a", "b")).values()) == {0}


def test_other_questions_are_not_compared(rows):
    stored, folder = rows
    bft = s.cell(stored, "bft", "0.001")
    run = s.runs_of(bft)[0]
    save_answers(ranks_path(folder / "answers", run, "test"), [f"x{i}" for i in range(N)], [""] * N, [0] * N, [0.0] * N)
    with pytest.raises(ValueError, match="asked different questions"):
        s.advantage(bft, s.cell(stored, "sft", "0.001"), folder=folder)
