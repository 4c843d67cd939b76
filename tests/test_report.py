"Reports: what the book shows comes from stored rows and ranks, and nothing else."

import json

import numpy as np
import pytest
import torch

from bft_nb import report, results
from bft_nb.ranking import hit_rate, ndcg
from bft_nb.results import append_rows, make_rows, ranks_path, save_ranks


def run(bft, seed, **params):
    return dict(exp="recommendation", dataset="beauty", model="sasrec", params=json.dumps({"bft": bft, "lr": 0.001, **params}), seed=seed)


def store(folder, bft, seed, ranks, strata, **params):
    this = run(bft, seed, **params)
    value = float(ndcg(torch.as_tensor(ranks)).mean())
    append_rows(folder / "recommendation.csv", make_rows({"ndcg@10": value}, **this, split="test", n=len(ranks), seconds=1.0, device="cpu", commit="abc"))
    save_ranks(ranks_path(folder / "ranks", this), ranks, strata)
    return value


@pytest.fixture
def study(tmp_path):
    rng = np.random.default_rng(0)
    strata = np.repeat([0, 1], 100)
    plain = [rng.integers(1, 60, 200) for _ in range(2)]
    values = {}
    for seed, ranks in enumerate(plain):
        better = np.where(strata == 0, np.maximum(ranks // 2, 1), ranks)
        values[False, seed] = store(tmp_path, False, seed, ranks, strata)
        values[True, seed] = store(tmp_path, True, seed, better, strata, precision_lr=0.03)
    return tmp_path, values


def test_parameters_become_columns(study):
    rows = report.load_rows("recommendation", study[0])
    assert len(rows) == 4 and set(rows["bft"]) == {True, False} and rows["lr"].eq(0.001).all()
    assert report.choose(rows, bft=False)["precision_lr"].isna().all()
    assert len(report.choose(rows, bft=True, precision_lr=0.03, seed=1)) == 1
    assert len(report.choose(rows, precision_lr=None)) == 2
    assert len(report.choose(rows, nowhere=None)) == 4 and len(report.choose(rows, nowhere=1)) == 0


def test_over_seeds(study):
    folder, values = study
    table = report.over_seeds(report.load_rows("recommendation", folder), ["bft"])
    pair = [values[True, 0], values[True, 1]]
    got = table.loc[(True, "ndcg@10")]
    assert got["seeds"] == 2 and got["n"] == 200
    np.testing.assert_allclose([got["mean"], got["sd"]], [np.mean(pair), np.std(pair, ddof=1)])


def test_compare_is_paired_over_users_and_seeds(study):
    folder, values = study
    rows = report.load_rows("recommendation", folder)
    found = report.compare(report.choose(rows, bft=True), report.choose(rows, bft=False), folder=folder)
    want = np.mean([values[True, s] - values[False, s] for s in (0, 1)])
    np.testing.assert_allclose(found["all"].mean, want, atol=1e-6)
    assert found["1"].mean == 0 and found["0"].low > 0 and found["0"].n == 100
    assert report.compare(report.choose(rows, bft=True), report.choose(rows, bft=False), folder=folder, groups=None) == {"all": found["all"]}
    same = report.compare(report.choose(rows, bft=True), report.choose(rows, bft=True), hit_rate, folder=folder)
    assert (same["all"].low, same["all"].high) == (0, 0)


def test_a_difference_uses_the_seeds_that_both_cells_have(study):
    folder, values = study
    rows = report.load_rows("recommendation", folder)
    candidate, baseline = report.choose(rows, bft=True), report.choose(rows, bft=False)
    found = report.compare(candidate, report.choose(baseline, seed=1), folder=folder)["all"]
    np.testing.assert_allclose(found.mean, values[True, 1] - values[False, 1], atol=1e-6)
    with pytest.raises(ValueError, match="no seed that both cells have"):
        report.compare(report.choose(candidate, seed=0), report.choose(baseline, seed=1), folder=folder)


def test_a_contrast_is_the_difference_between_the_gains_of_two_groups(study):
    folder, _ = study
    rows = report.load_rows("recommendation", folder)
    pair = report.choose(rows, bft=True), report.choose(rows, bft=False)
    gains = report.compare(*pair, folder=folder, relative=True)
    first, second = (report.contrast(*pair, group, folder=folder) for group in "01")
    np.testing.assert_allclose([first.mean, second.mean], np.array([1, -1]) * (gains["0"].mean - gains["1"].mean), rtol=1e-5)
    np.testing.assert_allclose([first.low, first.high], [gains["0"].low, gains["0"].high], rtol=0.1)  # the other group's gain is zero for all
    assert first.n == 200 and second.high < 0
    for group in ("2", "all"):
        with pytest.raises(ValueError, match=f"got group '{group}' of 0, 1"):
            report.contrast(*pair, group, folder=folder)


def test_growth_is_the_difference_between_the_gains_under_two_conditions(study):
    folder, _ = study
    rows = report.load_rows("recommendation", folder)
    better, plain = report.choose(rows, bft=True), report.choose(rows, bft=False)
    gain, found = report.compare(better, plain, folder=folder, relative=True)["all"], report.growth((better, plain), (plain, plain), folder=folder)
    np.testing.assert_allclose(found.mean, gain.mean, rtol=1e-5)
    np.testing.assert_allclose([found.low, found.high], [gain.low, gain.high], rtol=0.1)
    assert report.growth((better, plain), (better, plain), folder=folder)[:3] == (0, 0, 0)
    fewer = [store(folder, False, 5, np.arange(1, 51), np.zeros(50, int), lr=lr) and report.choose(report.load_rows("recommendation", folder), lr=lr) for lr in (0.2, 0.3)]
    with pytest.raises(ValueError, match="got 200 and 50 of them"):
        report.growth((better, plain), tuple(fewer), folder=folder)


def test_compare_refuses_other_users(study):
    folder, _ = study
    store(folder, True, 0, np.arange(1, 201), np.repeat([1, 0], 100), lr=0.5)
    rows = report.load_rows("recommendation", folder)
    with pytest.raises(ValueError, match="different users or strata"):
        report.compare(report.choose(rows, lr=0.5), report.choose(rows, bft=False), folder=folder)
    with pytest.raises(ValueError, match="no stored run"):
        report.compare(report.choose(rows, lr=7.0), report.choose(rows, bft=False), folder=folder)


def test_a_cell_has_one_run_for_each_seed(study):
    folder, _ = study
    store(folder, True, 0, np.arange(1, 201), np.repeat([0, 1], 100), lr=0.5)
    rows = report.load_rows("recommendation", folder)
    with pytest.raises(ValueError, match="3 runs of 2 seeds"):
        report.compare(report.choose(rows, bft=True), report.choose(rows, bft=False), folder=folder)


def test_missing_rows_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="'sinks'"):
        report.load_rows("sinks", tmp_path)


def test_the_committed_rows_can_be_read():
    for path in report.results_folder().glob("*.csv"):
        rows = report.load_rows(path.stem)
        assert len(rows) and (rows["dataset"] != "").all()
        assert not rows["commit"].str.contains(r"unknown|dirty|\+").any(), path


def test_the_committed_ranks_give_the_committed_numbers():
    folder, found = report.results_folder(), {}
    for row in results.read_rows(sorted(folder.glob("*.csv"))):
        if row["metric"] in ("hr@10", "ndcg@10"):
            found.setdefault(tuple(row[name] for name in (*results.KEY, "split")), {})[row["metric"]] = row
    paths = {key: ranks_path(folder / "ranks", next(iter(rows.values())), key[-1]) for key, rows in found.items()}
    assert {p for p in (folder / "ranks").iterdir()} <= set(paths.values()), "ranks of no stored run"
    lacking = [key for key, path in paths.items() if not path.exists()]
    assert not [key for key in lacking if key[0] == "recommendation" and key[-1] in ("test", "shuffled")]
    for key in found.keys() - set(lacking):
        ranks = torch.as_tensor(results.load_ranks(paths[key]))
        for metric, of in (("hr@10", hit_rate), ("ndcg@10", ndcg)):
            assert found[key][metric]["n"] == len(ranks)
            np.testing.assert_allclose(found[key][metric]["value"], of(ranks).mean(), atol=1e-6, err_msg=str(paths[key]))


def test_interval_is_wilsons():
    down, up = report.interval(0.1, 100)
    assert 0 < down < up < 0.1
    np.testing.assert_allclose([0.1 - down, 0.1 + up], [0.0552, 0.1744], atol=1e-4)


def test_signed():
    from bft_nb.ranking import Estimate

    assert report.signed(Estimate(0.0012, -0.0003, 0.0025, 9)) == "+0.0012 [−0.0003, +0.0025]"
    assert report.signed(Estimate(1.5, -2.0, 10.0, 9), digits=1) == "+1.5 [−2.0, +10.0]"
