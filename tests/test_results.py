"""Result rows: exact columns, all or nothing, several writers."""

import csv
import multiprocessing as mp
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bft_nb
from bft_nb import results
from bft_nb.results import (
    COLUMNS, Stored, append_rows, canonical, check_new, check_row, commit, has_rows, load_history, load_ranks, load_repeated, load_strata, make_rows, ranks_path, read_rows,
    run_key, run_rows, save_ranks,
)  # fmt: skip


def row(**changes):
    base = dict(
        exp="rec", dataset="synthetic", model="SASRec", params={"bft": True, "d": 64}, seed=0, split="test", metric="hr@10",
        value=0.08, n=100, seconds=1.5, device="cpu", commit="abc123", utc="2026-11-30T12:00:00Z",
    )  # fmt: skip
    return base | changes


def test_round_trip(tmp_path):
    path = tmp_path / "deep" / "rec.csv"
    assert append_rows(path, [row(), row(metric="ndcg@10", value=0.04)]) == 2
    assert append_rows(path, [row(seed=1)]) == 1
    rows = read_rows(path)
    assert [r["metric"] for r in rows] == ["hr@10", "ndcg@10", "hr@10"]
    assert rows[0] == check_row(row())
    assert isinstance(rows[2]["seed"], int) and isinstance(rows[0]["value"], float)
    with path.open() as file:
        assert tuple(next(csv.reader(file))) == COLUMNS
    assert read_rows([path, path]) == rows * 2


def test_rows_of_uncommitted_code_are_called_that(tmp_path, recwarn):
    append_rows(tmp_path / "r.csv", [row(commit="abcdef0123")])
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"r\.csv: rows of code that differs from its commit \(abcdef0123\+\)"):
        append_rows(tmp_path / "r.csv", [row(seed=1, commit="abcdef0123+"), row(seed=2, commit="abcdef0123+")])


KILLED = """
import csv, os, signal, sys
from pathlib import Path
from test_results import append_rows, row
die, replace, writerows = lambda: os.kill(os.getpid(), signal.SIGKILL), Path.replace, csv.DictWriter.writerows
match sys.argv[2]:
    case "half written": csv.DictWriter.writerows = lambda writer, rows: (writerows(writer, rows[:-1]), die())
    case "not in place": Path.replace = lambda path, target: die()
    case "in place": Path.replace = lambda path, target: (replace(path, target), die())
append_rows(Path(sys.argv[1]), [row(seed=1), row(seed=2)])
"""


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize(("moment", "seeds"), [("half written", [0]), ("not in place", [0]), ("in place", [0, 1, 2])])
def test_killed_while_appending_all_rows_are_there_or_none(tmp_path, moment, seeds, monkeypatch):
    path = tmp_path / "rec.csv"
    append_rows(path, [row(seed=0)])
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path), moment], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert killed.returncode == -9 and not killed.stderr, killed.stderr
    assert [r["seed"] for r in read_rows(path)] == seeds
    monkeypatch.setattr("bft_nb.download.STALE", -1)
    append_rows(path, [row(seed=9)])  # the lock of the dead is no obstacle, what it left is swept
    assert [r["seed"] for r in read_rows(path)] == [*seeds, 9]
    assert not [p.name for p in tmp_path.iterdir() if p.name not in ("rec.csv", ".rec.csv.lock")]


def test_appending_changes_no_byte_of_what_is_there(tmp_path):
    path = tmp_path / "rec.csv"
    append_rows(path, [row(value=0.1 + 0.2)])
    before = path.read_bytes()
    append_rows(path, [row(seed=7)])
    assert path.read_bytes().startswith(before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": float("nan")}, "value"),
        ({"value": "high"}, "value"),
        ({"value": True}, "value"),
        ({"n": -1}, "n must be"),
        ({"n": 1.5}, "n must be"),
        ({"seconds": -1.0}, "seconds"),
        ({"seed": "one"}, "seed"),
        ({"exp": ""}, "exp"),
        ({"metric": None}, "metric"),
        ({"params": "[1]"}, "params"),
        ({"params": "{"}, "params"),
        ({"params": {"f": print}}, "params"),
        ({"utc": "yesterday"}, "utc"),
        ({"extra": 1}, "extra"),
    ],
)
def test_bad_rows_are_named_and_nothing_is_written(tmp_path, change, message):
    path = tmp_path / "rec.csv"
    with pytest.raises(ValueError, match=message):
        append_rows(path, [row(), row(**change)])
    assert not list(tmp_path.iterdir())


def test_missing_column_is_named():
    incomplete = row()
    del incomplete["commit"]
    with pytest.raises(ValueError, match=r"missing: \['commit'\]"):
        check_row(incomplete)


def test_bad_file_says_where(tmp_path):
    path = tmp_path / "rec.csv"
    append_rows(path, [row()])
    path.write_text(path.read_text().replace("0.08", "oops"))
    with pytest.raises(ValueError, match="line 2.*oops"):
        read_rows(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns must be"):
        read_rows(path)
    with pytest.raises(ValueError, match="columns must be"):
        append_rows(path, [row()])
    assert path.read_text() == "a,b\n1,2\n"


def write(path, seed):
    for metric in ("hr@10", "ndcg@10"):
        append_rows(path, [row(seed=seed, metric=metric)])


def test_several_writers_lose_nothing(tmp_path):
    path = tmp_path / "rec.csv"
    workers = [mp.get_context("fork").Process(target=write, args=(path, seed)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert sorted((r["seed"], r["metric"]) for r in read_rows(path)) == [(s, m) for s in range(4) for m in ("hr@10", "ndcg@10")]
    assert {p.name for p in tmp_path.iterdir()} <= {"rec.csv", ".rec.csv.lock"}


def test_run_key_ignores_the_order_of_parameters_and_what_was_measured():
    assert run_key(row(params={"d": 64, "bft": True})) == run_key(row(params='{"bft": true, "d": 64}', metric="mrr", value=1.0))
    assert run_key(row(seed=1)) != run_key(row())
    assert run_key(row(params={"bft": False, "d": 64})) != run_key(row())


@given(st.dictionaries(st.text(), st.one_of(st.integers(), st.booleans(), st.text(), st.floats(allow_nan=False, allow_infinity=False))))
def test_canonical_is_stable(params):
    assert canonical(canonical(params)) == canonical(params)


def test_has_rows(tmp_path):
    path = tmp_path / "rec.csv"
    assert not has_rows(path, row())
    append_rows(path, [row(), row(metric="ndcg@10", split="valid")])
    assert has_rows(path, row())
    assert not has_rows(path, row(seed=3))
    check_new(path, row(seed=3))
    with pytest.raises(Stored, match=r"rec\.csv holds the rows of this run"):
        check_new(path, row())


def test_make_rows():
    common = {name: value for name, value in row().items() if name not in ("metric", "value", "utc")}
    rows = make_rows({"hr@10": 0.1, "mrr": 0.05}, **common)
    assert [r["metric"] for r in rows] == ["hr@10", "mrr"]


def test_run_rows():
    run = {name: row()[name] for name in ("exp", "dataset", "model", "params", "seed")}
    rows = run_rows(run, {"valid": {"mrr": (0.1, 5)}, "test": {"mrr": (0.2, 6), "hr@10": (0.3, 7)}}, seconds=1.5, device="cpu")
    assert [(r["split"], r["metric"], r["value"], r["n"]) for r in rows] == [("valid", "mrr", 0.1, 5), ("test", "mrr", 0.2, 6), ("test", "hr@10", 0.3, 7)]
    assert {run_key(r) for r in rows} == {run_key(run)} and len({(r["commit"], r["utc"], r["seconds"], r["device"]) for r in rows}) == 1


def test_ranks(tmp_path):
    ranks = np.random.default_rng(0).zipf(1.3, 22_363).clip(1, 12_101)
    strata = ranks % 4
    path = save_ranks(ranks_path(tmp_path, row()), ranks, strata)
    np.testing.assert_array_equal(load_ranks(path), np.minimum(ranks, 255))
    np.testing.assert_array_equal(load_strata(path), strata)
    assert path.stat().st_size < 40_000
    assert path.name.startswith("rec-synthetic-SASRec-") and path.name.endswith("-test.npz")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("bad", [[0, 1], [1.5], [[1, 2]], [-3]])
def test_bad_ranks(tmp_path, bad):
    with pytest.raises(ValueError, match="positive integers"):
        save_ranks(tmp_path / "r.npz", np.array(bad), np.zeros(len(bad), dtype=int))
    assert not list(tmp_path.iterdir())


def test_strata_lie_beside_ranks(tmp_path):
    path = save_ranks(tmp_path / "r.npz", np.array([1, 300, 7]), np.array([0, 3, 1], dtype=np.int8))
    assert load_ranks(path).tolist() == [1, 255, 7] and load_strata(path).tolist() == [0, 3, 1]
    without = save_ranks(tmp_path / "s.npz", np.array([1]))
    with pytest.raises(ValueError, match="holds no strata"):
        load_strata(without)
    for bad in ([0, 1], [0, 1, -1], [0.0, 1.0, 2.0], [0, 1, 300]):
        with pytest.raises(ValueError, match="strata must be"):
            save_ranks(path, np.array([1, 2, 3]), np.array(bad))


@pytest.mark.parametrize("text", ["{", "[1]", "7"])
def test_what_is_no_json_object_is_named(text):
    with pytest.raises(ValueError, match="options must be a JSON object, got"):
        canonical(text, "options")


def test_history_lies_beside_ranks(tmp_path):
    path = save_ranks(tmp_path / "r.npz", np.array([1, 300]), history=np.array([3, 2000]))
    assert load_history(path).tolist() == [3, 255]
    for bad in ([1], [1, -2], [1.0, 2.0]):
        with pytest.raises(ValueError, match="history must be integers of at least 0"):
            save_ranks(path, np.array([1, 2]), history=np.array(bad))
    assert load_history(path).tolist() == [3, 255]


def test_a_link_to_rows_stays_a_link(tmp_path):
    (link := tmp_path / "link.csv").symlink_to("rows.csv")
    append_rows(link, [row()])
    assert link.is_symlink() and len(read_rows(tmp_path / "rows.csv")) == 1


def test_repeats_lie_beside_ranks(tmp_path):
    path = save_ranks(tmp_path / "r.npz", np.array([1, 300]), repeated=np.array([True, False]))
    assert load_repeated(path).tolist() == ["repeated", "new"]
    for bad in ([True], [0, 1], [[True, False]]):
        with pytest.raises(ValueError, match=r"repeated must be True or False, one per rank \(2\), got"):
            save_ranks(path, np.array([1, 2]), repeated=np.array(bad))
    with pytest.raises(ValueError, match="s.npz holds no repeated, only ranks"):
        load_repeated(save_ranks(tmp_path / "s.npz", np.array([1])))


def test_commit_names_the_code():
    assert re.fullmatch(r"[0-9a-f]{10}\+?|v[\d.]+", commit())


def test_commit_says_where_the_code_that_runs_differs(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "__file__", str(tmp_path / "bft_nb" / "results.py"))
    names = ("bft_nb/results.py", "nbs/experiments/a.ipynb", "nbs/10_kriging.ipynb", "benchmarks/b.py", "data/results/a.csv")
    git = lambda *given: subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *given], check=True, capture_output=True)
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("as committed")
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    clean = commit()
    assert re.fullmatch("[0-9a-f]{10}", clean)
    for name, mark in zip((*names, "nbs/experiments/new.ipynb"), ("+", "+", "", "+", "", "+")):
        (tmp_path / name).write_text("edited")
        assert commit() == clean + mark, name
        (tmp_path / name).write_text("as committed")


def test_commit_outside_of_a_checkout_is_the_version(tmp_path):
    shutil.copytree(Path(bft_nb.__file__).parent, tmp_path / "bft_nb", ignore=shutil.ignore_patterns("__pycache__"))
    code = "import bft_nb.results as r; print(r.commit())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.stdout.strip() == f"v{bft_nb.__version__}"
