"The study's pages: which stored rows make a cell, and what was chosen on validation."

import dataclasses
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from bft_nb import interactions, study
from bft_nb.report import compare
from bft_nb.results import append_rows, load_history, load_repeated, make_rows, ranks_path, save_ranks

USERS = 60


def store(folder, dataset="beauty", model="sasrec", seed=0, valid=0.05, shift=0, shuffled=False, **params):
    given = {"bft": True, "d": 64, "dropout": 0.5, "dtype": "float32", "epochs": 30, "lr": 0.003, "negatives": 512, "thin": 1.0, "max_length": 50, "batch_size": 128} | params
    if given["bft"]:
        given.setdefault("precision_lr", given["lr"])
    run = dict(exp="recommendation", dataset=dataset, model=model, params=json.dumps(given), seed=seed)
    rows = [row for split in ("valid", "test") for row in make_rows({"ndcg@10": valid}, **run, split=split, n=USERS, seconds=1.0, device="cpu", commit="abc")]
    append_rows(folder / "recommendation.csv", rows)
    ranks = np.arange(1, USERS + 1) + shift
    for split in ("test", "shuffled") if shuffled else ("test",):
        save_ranks(ranks_path(folder / "ranks", run, split), ranks + (split == "shuffled"), np.arange(USERS) % 4, np.arange(USERS) // 3 + 1, np.arange(USERS) < 6)


@pytest.fixture
def folder(tmp_path):
    for dropout, lr, valid in [(0.5, 0.003, 0.06), (0.3, 0.003, 0.05), (0.5, 0.006, 0.055)]:
        store(tmp_path, bft=False, dropout=dropout, lr=lr, valid=valid, shift=2)
        store(tmp_path, dropout=dropout, lr=lr, valid=0.11 - valid, shuffled=True)
        store(tmp_path, dropout=dropout, lr=lr, kriging=False, kalman=False, valid=valid - 0.02)
    store(tmp_path, seed=1, dropout=0.3, shift=1)
    store(tmp_path, thin=0.5, dropout=0.3)
    store(tmp_path, dropout=0.3, precision_lr=0.03)
    store(tmp_path, dropout=0.3, precision="mlp")
    store(tmp_path, dropout=0.3, epochs=60)
    store(tmp_path, dataset="sports", dropout=0.3)
    return tmp_path


def test_each_layer_is_tuned_on_validation(folder):
    rows = study.study_rows(folder)
    assert study.tuned(rows, "sasrec", "plain") == {"dropout": 0.5, "lr": 0.003}
    assert study.tuned(rows, "sasrec", "filter") == {"dropout": 0.3, "lr": 0.003}
    table = study.tuning(rows, "sasrec", "plain")
    assert table.loc[0.5, 0.006] == 0.055 and np.isnan(table.loc[0.3, 0.006])
    with pytest.raises(ValueError, match="settings must be dropout and lr, or neither, got dropout"):
        study.cell(rows, "beauty", "sasrec", "filter", dropout=0.5)
    with pytest.raises(ValueError, match="no stored row tunes hstu, plain on beauty"):
        study.tuned(rows, "hstu", "plain")


def test_movielens_is_tuned_on_itself(folder):
    assert study.cell(study.study_rows(folder), "ml1m", "sasrec").empty
    for dropout, valid, epochs in [(0.5, 0.1, 15), (0.2, 0.2, 15), (0.3, 0.9, 30)]:
        store(folder, dataset="ml1m", dropout=dropout, valid=valid, epochs=epochs)
    rows = study.study_rows(folder)
    assert study.tuned(rows, "sasrec", "filter", "ml1m")["dropout"] == 0.2 and study.tuned(rows, "sasrec", "filter", "sports")["dropout"] == 0.3
    assert set(study.cell(rows, "ml1m", "sasrec")["dropout"]) == {0.2}


@pytest.mark.parametrize("backbone", ["bert4rec", "hstu"])
def test_the_others_are_tuned_on_each_set(folder, backbone):
    of = dict(model="bert4rec", epochs=60, mask_probability=0.3, last_probability=0.5) if backbone == "bert4rec" else dict(model="hstu")
    for dataset, lr, valid in [("beauty", 0.006, 0.2), ("beauty", 0.003, 0.1), ("toys", 0.006, 0.1), ("toys", 0.003, 0.2)]:
        store(folder, dataset=dataset, lr=lr, valid=valid, **of)
    rows = study.study_rows(folder)
    assert {d: set(study.cell(rows, d, backbone)["lr"]) for d in ("beauty", "toys", "sports")} == {"beauty": {0.006}, "toys": {0.003}, "sports": set()}


def test_a_setting_that_another_layer_was_not_tried_at_takes_no_part(folder):
    store(folder, dropout=0.1, valid=0.9, shuffled=True)
    store(folder, dropout=0.1, bft=False, valid=0.9)
    rows = study.study_rows(folder)
    assert study.tuned(rows, "sasrec", "filter") == {"dropout": 0.3, "lr": 0.003} and 0.1 not in study.tuning(rows, "sasrec", "plain").index
    store(folder, dropout=0.1, kriging=False, kalman=False, valid=0.01)
    rows = study.study_rows(folder)
    assert study.tuned(rows, "sasrec", "filter") == study.tuned(rows, "sasrec", "plain") == {"dropout": 0.1, "lr": 0.003}
    assert study.tuned(rows, "sasrec", "null") == {"dropout": 0.5, "lr": 0.003}
    with pytest.raises(ValueError, match="arm must be one of 'plain', 'null', 'filter', got 'best'"):
        study.tuning(rows, "sasrec", "best")


def test_the_stored_rows_leave_each_layer_the_same_choice():
    rows = study.study_rows()
    for dataset, backbone in product(study.DATASETS, ("sasrec", "bert4rec", "hstu")):
        of = study.tuned_on(dataset, backbone)
        tables = [table for arm in study.ARMS if len(table := study.tuning(rows, backbone, arm, of))]
        assert len(tables) == (2 if backbone == "hstu" else 3) and len({str(table.notna()) for table in tables}) == 1, (backbone, of)
        assert tables[0].notna().sum().sum() >= 2, f"{backbone} has nothing to choose from on {of}"


def test_the_budget_is_one_number_of_epochs_for_each_backbone_and_kind_of_set(folder):
    for epochs in (30, 60):
        store(folder, model="bert4rec", epochs=epochs, mask_probability=0.3, last_probability=0.5)
    rows = study.study_rows(folder)
    assert set(rows[rows["model"] == "bert4rec"]["epochs"]) == {60} and set(rows[rows["model"] == "sasrec"]["epochs"]) == {30}
    assert len(study.cell(rows, "beauty", "bert4rec")) == 2


def test_a_cell_is_all_seeds_of_one_setting_and_nothing_else(folder):
    rows = study.study_rows(folder)
    seeds = lambda *of, **kw: sorted(study.cell(rows, *of, **kw)["seed"].unique())
    count = lambda *of, **kw: len(study.cell(rows, *of, **kw)["params"].unique())
    assert seeds("beauty", "sasrec") == [0, 1] and count("beauty", "sasrec") == 1
    assert seeds("beauty", "sasrec", "plain") == seeds("beauty", "sasrec", "null") == [0]
    assert seeds("sports", "sasrec") == [0] and seeds("toys", "sasrec") == [] and seeds("beauty", "hstu") == []
    assert count("beauty", "sasrec", thin=0.5) == 1
    assert json.loads(study.cell(rows, "beauty", "sasrec", {"precision": "mlp"})["params"].iloc[0])["precision"] == "mlp"
    assert json.loads(study.cell(rows, "beauty", "sasrec", {"precision_lr": 0.03})["params"].iloc[0])["precision_lr"] == 0.03
    with pytest.raises(ValueError, match="arm must be one of 'plain', 'null', 'filter', got 'best'"):
        study.cell(rows, "beauty", "sasrec", "best", dropout=0.5, lr=0.003)


def test_an_arm_takes_options_on_top_of_its_own(folder):
    post = {"norm_first": False}
    for bft, more in [(False, {}), (True, {"dropout": 0.3}), (True, {"kriging": False, "kalman": False})]:
        store(folder, bft=bft, valid=0.07, **more, **post)
    store(folder, model="bert4rec", epochs=60, valid=0.07, mask_probability=0.3, last_probability=0.5, **post)
    rows = study.study_rows(folder)
    for arm in study.ARMS:
        named = json.loads(study.cell(rows, "beauty", "sasrec", arm, options=post)["params"].iloc[0])
        assert named["norm_first"] is False and named["bft"] == (arm != "plain") and ("kalman" in named) == (arm == "null")
        assert study.cell(rows, "beauty", "sasrec", arm)["value"].max() < 0.07 and study.cell(rows, "beauty", "sasrec", arm, options={"n_layers": 1}).empty
    of_null = study.cell(rows, "beauty", "sasrec", {**study.ARMS["null"], **post}, dropout=0.5, lr=0.003)
    assert len(of_null) and of_null.equals(study.cell(rows, "beauty", "sasrec", "null", options=post))
    assert len(study.cell(rows, "beauty", "bert4rec", options=post, dropout=0.5, lr=0.003)) and study.cell(rows, "beauty", "bert4rec", options=post).empty


def test_users_are_told_apart_by_their_histories(folder):
    rows = study.study_rows(folder)
    found = compare(study.cell(rows, "beauty", "sasrec"), study.cell(rows, "beauty", "sasrec", "plain"), folder=folder, groups=study.history_strata)
    assert {name: d.n for name, d in found.items()} == {"all": USERS, "0": 12, "1": 6, "2": 12, "3": 30}
    path = next((folder / "ranks").glob("*-test.npz"))
    assert load_history(path)[study.history_strata(path) == 0].max() == study.HISTORIES[0]


def test_users_are_told_apart_by_whether_their_target_repeats(folder):
    rows = study.study_rows(folder)
    found = compare(study.cell(rows, "beauty", "sasrec"), study.cell(rows, "beauty", "sasrec", "plain"), folder=folder, groups=load_repeated)
    assert {name: d.n for name, d in found.items()} == {"all": USERS, "new": 54, "repeated": 6}


def until_the_split(**parameters):
    "The page of the study with these parameters, as far as its split."
    page = Path(__file__).resolve().parent.parent / "nbs" / "_py" / "experiments" / "recommendation.py"
    lines = page.read_text(encoding="utf-8").split("# In the synthetic world")[0].splitlines()
    given = {name: f"{name} = {value!r}" for name, value in parameters.items()}
    exec("\n".join(given.get(line.partition(" = ")[0], line) for line in lines), found := {})
    return found["split"]


def test_the_study_refuses_times_that_nothing_reads_or_holds(monkeypatch):
    timed = json.dumps({"time_buckets": 64})
    with_times, without = until_the_split(backbone="hstu", options=timed), until_the_split()
    assert with_times.hash == without.hash and len(with_times.test.histories.times) == len(with_times.test.histories.items)
    with pytest.raises(ValueError, match="time_buckets: sasrec reads the order of a history, not its times; backbone must be hstu"):
        until_the_split(options=timed)
    monkeypatch.setattr(interactions, "load", lambda name: dataclasses.replace(interactions.synthetic(interactions.dataset(name)), times=None))
    with pytest.raises(ValueError, match="time_buckets: synthetic as it was loaded has no times: put a file with a column timestamp into BFT_DATA, or"):
        until_the_split(backbone="hstu", options=timed)


def test_a_plain_layer_with_options_is_a_cell_at_the_settings_of_the_plain_layer(folder):
    timed = {"time_buckets": 128}
    for dropout, bft in ((0.5, False), (0.3, True)):  # as each of the two was tuned
        store(folder, dropout=dropout, bft=bft, **timed)
    rows = study.study_rows(folder)
    of_plain, of_filter = study.cell(rows, "beauty", "sasrec", "plain", options=timed), study.cell(rows, "beauty", "sasrec", timed)
    assert set(of_plain["bft"]) == {False} and set(of_plain["dropout"]) == {0.5} and set(of_filter["bft"]) == {True} and set(of_filter["dropout"]) == {0.3}
    assert not study.cell(rows, "beauty", "sasrec", "plain")["options"].str.contains("time").any() and timed == {"time_buckets": 128}


def test_relative_differences_and_another_set_of_ranks(folder):
    rows = study.study_rows(folder)
    a, b = study.cell(rows, "beauty", "sasrec"), study.cell(rows, "beauty", "sasrec", "plain")
    hit = lambda ranks: (ranks <= 10).double()
    absolute, relative = (compare(a, b, hit, folder=folder, relative=r)["all"] for r in (False, True))
    assert relative.mean == pytest.approx(100 * absolute.mean / (8 / USERS))
    first = a[a["seed"] == 0]
    assert compare(first, first, hit, folder=folder, candidate_split="shuffled")["all"].mean == pytest.approx(-1 / USERS)


def test_metrics_are_those_of_the_split(folder):
    rows = study.study_rows(folder)
    found = study.metrics(study.cell(rows, "beauty", "sasrec"))
    assert found["seeds"]["ndcg@10"] == 2 and found["mean"]["ndcg@10"] == pytest.approx((0.06 + 0.05) / 2)
