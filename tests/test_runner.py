"`bft run`: one notebook, one process, one output or none."

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from helpers import ROOT, until
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from bft_nb import cli, runner

PARAMETERS = 'dataset = "synthetic"\nseed = 0\nlr = 1e-3\nbft = False\nwidths = [8]\nlimit = None\n'
BODY = 'import time\nif dataset == "broken": raise ValueError("asked to fail")\nif dataset == "slow": time.sleep(60)\nif dataset == "known": from bft_nb.results import Stored; raise Stored("rows are there")\n(seed, lr, bft)'


@pytest.fixture
def notebook(tmp_path):
    spec = {"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}}
    cells = [new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}), new_code_cell(BODY)]
    path = tmp_path / "little.ipynb"
    nbformat.write(new_notebook(cells=cells, metadata=spec), path)
    return path


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def bft(*args):
    return cli.main(["run", *map(str, args), "--quiet"])


def left(out):
    "What a run leaves; the folder of locks is hidden."
    return [p for p in out.iterdir() if p.name != ".locks"]


def result(path):
    return nbformat.read(path, 4).cells[-1].outputs[0].data["text/plain"]


def test_success_then_kept_then_forced(notebook, out, capsys):
    args = (notebook, "-p", "lr", "1e-5", "-p", "bft", "true", "--out", out)
    assert bft(*args) == 0
    (output,) = left(out)
    assert output.name == "little-bft=true,lr=1e-05.ipynb"
    assert result(output) == "(0, 1e-05, True)"  # 1e-05 is a number, as YAML alone would not have it
    written = output.stat().st_mtime_ns
    assert bft(*args) == 0 and "kept" in capsys.readouterr().out
    assert output.stat().st_mtime_ns == written
    assert bft(*args, "--force") == 0
    assert output.stat().st_mtime_ns > written
    assert left(out) == [output]


def test_a_changed_notebook_is_run_again(notebook, out):
    first = runner.run(notebook, {"seed": 3}, out=out, progress=False)
    nb = nbformat.read(notebook, 4)
    nb.cells[1].source = "seed + 1"
    nbformat.write(nb, notebook)
    second = runner.run(notebook, {"seed": 3}, out=out, progress=False)
    assert (first.status, second.status, first.output) == ("done", "done", second.output)
    assert result(second.output) == "4"


def test_unknown_parameter_is_named_with_the_closest_and_the_allowed(notebook, out, capsys):
    assert bft(notebook, "-p", "sede", "1", "--out", out) == 2
    err = capsys.readouterr().err
    assert "'sede'" in err and "did you mean 'seed'" in err and "dataset, seed, lr, bft, widths, limit" in err
    assert not out.exists()


@pytest.mark.parametrize(("name", "value", "kind"), [("seed", "abc", "int"), ("bft", "1", "bool"), ("widths", "8", "list"), ("lr", "fast", "float")])
def test_value_of_another_kind_is_refused(notebook, out, capsys, name, value, kind):
    assert bft(notebook, "-p", name, value, "--out", out) == 2
    err = capsys.readouterr().err
    assert f"{name!r} must be of type {kind}" in err
    assert not out.exists()


RECURSIVE: list = [1]
RECURSIVE.append(RECURSIVE)
LAUGHS = "[&a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1], " + ", ".join(f"&{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefgh", "bcdefghi")) + "]"


@pytest.mark.parametrize("text", [
    "2024-01-01", "2024-01-01T10:00:00", "{1: a, b: 2}", "{1: a}", "[{null: 1}]", "&a [1, *a]", "&a {b: *a}", "!!set {a, b}", "!!binary aGk=", "[" * 30 + "]" * 30, "[" * 5000, "[" * 300 + "]" * 300, '{"a":' * 5000, LAUGHS,
], ids=lambda text: text[:12])  # fmt: skip
def test_a_value_that_no_notebook_can_be_given_is_refused_by_name(notebook, out, capsys, text):
    for more in ((), ("--dry-run",)):
        assert bft(notebook, "-p", "limit", text, "--out", out, *more) == 2
        err = capsys.readouterr().err
        assert "parameter 'limit'" in err and len(err) < 600
    assert not out.exists()


@pytest.mark.parametrize(("value", "plain"), [
    (None, True), (1.5, True), ("x" * 10**6, True), ([[1, [None, "a"]], {"a": [True]}], True), ((1, 2), True), (list(range(10_000)), True), ([], True), ([[[]]], True),
    (..., False), (b"", False), ([{1}], False), ({1: 2}, False), (RECURSIVE, False), (Path("a"), False),
], ids=lambda value: f"{value}"[:12])  # fmt: skip
def test_what_a_notebook_can_be_given(value, plain):
    assert runner.is_plain(value) is plain


def test_repeated_parameter_is_refused(notebook, capsys):
    assert bft(notebook, "-p", "seed", "1", "-p", "seed", "2") == 2
    assert "'seed' is given twice" in capsys.readouterr().err


def test_failure_names_the_cell_and_leaves_nothing_half_written(notebook, out, capsys):
    assert bft(notebook, "-p", "dataset", "broken", "--out", out) == 1
    err = capsys.readouterr().err
    assert "ValueError: asked to fail" in err and "little.ipynb" in err
    (failed,) = left(out)  # the traceback, under a name that says so
    assert failed.name == "little-dataset=broken.failed.ipynb"
    assert "asked to fail" in runner.cell_error(failed)


def test_a_run_whose_rows_are_stored_has_nothing_to_do(notebook, out, capsys):
    assert bft(notebook, "-p", "dataset", "known", "--out", out) == 0
    said = capsys.readouterr().out
    assert said.startswith("stored: ") and "-p store false" in said
    (output,) = left(out)  # an answer like others: not asked for again
    assert output.name == "little-dataset=known.ipynb"
    assert bft(notebook, "-p", "dataset", "known", "--out", out) == 0 and capsys.readouterr().out.startswith("kept: ")


def test_a_run_that_stores_its_rows_ends_where_all_rows_are_read(tmp_path, out):
    kernel = {"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}}
    body = [
        new_code_cell("store = False\nseed = 0", metadata={"tags": ["parameters"]}), new_code_cell("seed + 1"),
        new_markdown_cell("## The study", metadata={"tags": ["result"]}), new_code_cell("seed + 2"),
    ]  # fmt: skip
    path = tmp_path / "study.ipynb"
    nbformat.write(new_notebook(cells=body, metadata=kernel), path)
    ends = {store: result(runner.run(path, {"store": store, "seed": 5}, out=out, progress=False).output) for store in (True, False)}
    assert ends == {True: "6", False: "7"}
    body[-1].source = "seed + 3"  # what is read does not change what was made
    nbformat.write(new_notebook(cells=body, metadata=kernel), path)
    assert [runner.run(path, {"store": store, "seed": 5}, out=out, progress=False).status for store in (True, False)] == ["kept", "done"]


def test_the_studies_say_where_they_begin_to_read():
    for page in (ROOT / "nbs" / "experiments").glob("*.ipynb"):
        cells = nbformat.read(page, 4).cells
        stores = [n for n, c in enumerate(cells) if c.cell_type == "code" and "append_rows(" in c.source]
        reads = [n for n, c in enumerate(cells) if "result" in c.metadata.get("tags", [])]
        if stores and page.stem != "llama_init":  # whose chapter reads its rows
            assert len(reads) == 1 and reads[0] > max(stores), page.stem


def test_time_out_leaves_nothing(notebook, out):
    with pytest.raises(runner.RunFailed, match="took more than"):
        runner.run(notebook, {"dataset": "slow"}, out=out, progress=False, timeout=3)
    assert left(out) == []


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_interruption_leaves_nothing(notebook, out):
    args = [sys.executable, "-m", "bft_nb.cli", "run", str(notebook), "-p", "dataset", "slow", "--out", str(out), "--quiet"]
    child = subprocess.Popen(args, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=Path(__file__).parent.parent)
    until(lambda: list(out.glob("*.part.ipynb")))
    os.killpg(child.pid, signal.SIGINT)  # as Ctrl-C does
    assert child.wait(60) == 130
    assert "interrupted" in child.stderr.read()
    assert left(out) == []


def test_missing_notebook(tmp_path, capsys, monkeypatch):
    assert bft(tmp_path / "nowhere.ipynb") == 2
    assert "nowhere.ipynb" in capsys.readouterr().err
    folder = tmp_path / "nbs" / "experiments"
    folder.mkdir(parents=True)
    (tmp_path / "settings.ini").write_text("[DEFAULT]")
    (folder / "recommendation.ipynb").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert bft("recomendation") == 2
    assert "did you mean 'recommendation'?" in capsys.readouterr().err
    assert runner.find_notebook("recommendation") == (folder / "recommendation.ipynb").resolve()


def test_list_prints_parameters_with_defaults(notebook, capsys):
    assert cli.main(["run", str(notebook), "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == ["dataset = 'synthetic'", "seed = 0", "lr = 0.001"]


def test_parameters_are_read_as_python(tmp_path):
    code = 'a = "x"  # where K = 1 (for good)\nb: float = -2.5\nc = [0, 5]  # "none" = 0\nd = 2 * 3\ne: int'
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("z = 1"), nbformat.v4.new_code_cell(code, metadata={"tags": ["parameters"]})])
    nbformat.write(nb, tmp_path / "n.ipynb")
    assert runner.allowed_parameters(tmp_path / "n.ipynb") == {"a": "x", "b": -2.5, "c": [0, 5], "d": ..., "e": ...}
    nb.cells[1].source = "a = "
    nbformat.write(nb, tmp_path / "n.ipynb")
    with pytest.raises(ValueError, match="n.ipynb: the cell tagged parameters is not Python"):
        runner.allowed_parameters(tmp_path / "n.ipynb")


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("3", 3), ("true", True), ("null", None), ("[1, 2]", [1, 2]), ("beauty", "beauty"), ("a: b: c", "a: b: c")])
def test_parse_value(text, value):
    got = runner.parse_value(text)
    assert got == value and type(got) is type(value)


def test_output_names_are_stable_safe_and_distinct():
    name = runner.output_name
    assert name("x") == "x"
    assert name("x", {"b": 1, "a": "s"}) == name("x", {"a": "s", "b": 1}) == "x-a=s,b=1"
    long = [name("x", {"path": f"../../{'y' * 300}{i}"}) for i in range(2)]
    assert long[0] != long[1] and all("/" not in n and len(n) < 120 for n in long)


def test_a_truncated_output_is_not_taken_for_a_run(notebook, out):
    out.mkdir()
    (out / "little-seed=1.ipynb").write_text('{"cells": [')
    assert runner.run(notebook, {"seed": 1}, out=out, progress=False).status == "done"
    assert json.loads((out / "little-seed=1.ipynb").read_text())["metadata"]["bft_run"]


def test_notebooks_keep_freed_memory_unless_the_caller_decides(monkeypatch):
    for name in runner.ALLOCATOR: monkeypatch.delenv(name, raising=False)
    assert runner.ALLOCATOR.items() <= runner.environment().items()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert runner.environment()["MALLOC_TRIM_THRESHOLD_"] == "131072"
