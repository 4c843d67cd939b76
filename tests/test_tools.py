"The scripts behind the Makefile: their arguments, and what is left where they are interrupted."

import subprocess
import sys
import threading

import nbformat
import pytest
from helpers import ROOT, tool
from nbformat.v4 import new_code_cell, new_notebook

from bft_nb import runner


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (["check.py", "--help"], 0, "pairs, drift, ruff"),
        (["wheel.py", "--help"], 0, "empty virtual environment"),
        (["check.py", "lint"], 2, "no step 'lint' (steps: pairs, drift"),
        (["check.py", "-j", "0", "ruff"], 2, "must be an integer of at least 1, got '0'"),
        (["run_all.py", "-j", "0"], 2, "must be an integer of at least 1, got '0'"),
    ],
)
def test_arguments(command, status, said):
    done = subprocess.run([sys.executable, ROOT / "tools" / command[0], *command[1:]], capture_output=True, text=True)
    assert done.returncode == status and said in done.stdout + done.stderr


def test_no_jobs_of_the_environment_are_refused(monkeypatch):
    monkeypatch.setenv("J", "0")
    done = subprocess.run([sys.executable, ROOT / "tools" / "check.py", "ruff"], capture_output=True, text=True)
    assert done.returncode == 2 and "must be an integer of at least 1, got '0'" in done.stderr


def test_interrupting_the_run_of_all_begins_nothing_more(monkeypatch, tmp_path):
    run_all, begun, both = tool("run_all"), [], threading.Barrier(3, timeout=60)

    def execute(plan, *, stop, **_):
        begun.append(plan.source)
        both.wait()
        assert stop.wait(60), "nobody told it to end"
        raise runner.RunFailed("stopped")

    def interrupted(_):
        both.wait()  # two are running
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "execute", execute)
    monkeypatch.setattr(run_all, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all.main([], tmp_path, 2)
    assert len(begun) == 2


def pair(folder, *sources):
    "A notebook with these code cells, and where its twin would be."
    nb, twin = folder / "a.ipynb", folder / "_py" / "a.py"
    nbformat.write(new_notebook(cells=[new_code_cell(s) for s in sources]), nb)
    return nb, twin


@pytest.mark.parametrize(("module", "function", "command"), [("nbformat", "write", "save"), ("jupytext", "write", "absorb")])
def test_half_a_file_is_never_left(monkeypatch, tmp_path, module, function, command):
    nb_tool = tool("nb")
    nb, twin = pair(tmp_path, "1")
    before = nb.read_bytes()

    def dies(_, path, **__):
        path.write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(nb_tool, "pairs", lambda *_: [(nb, twin)])
    monkeypatch.setattr(getattr(nb_tool, module), function, dies)
    with pytest.raises(KeyboardInterrupt):
        nb_tool.save(nbformat.read(nb, 4), nb) if command == "save" else nb_tool.absorb([])
    assert nb.read_bytes() == before and [p for p in tmp_path.rglob("*") if p.is_file()] == [nb]


def test_a_cell_that_raises_leaves_the_others_clean(monkeypatch, tmp_path):
    nb_tool, cleaned = tool("nb"), []
    monkeypatch.setattr(nb_tool, "ROOT", tmp_path)
    monkeypatch.setattr(nb_tool, "pairs", lambda *_: [pair(tmp_path, "1 / 0")])
    monkeypatch.setattr(nb_tool, "clean", lambda: cleaned.append(True))
    with pytest.raises(Exception, match="ZeroDivisionError"):
        nb_tool.run([])
    assert cleaned
