"`bft sweep`: every cell once, whatever is killed, fails or runs beside it."

import io
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import nbformat
import pytest
import yaml
from filelock import FileLock
from helpers import ROOT, alive, until
from nbformat.v4 import new_code_cell, new_notebook

from bft_nb import cli, runner, study, sweep
from bft_nb.results import read_rows
from bft_nb.sweep import Outcome, cells

ALLOWED = {"dataset": "synthetic", "seed": 0, "lr": 1e-3, "bft": False, "widths": [8], "limit": None}
PARAMETERS = 'seed = 0\nlr = 1e-3\nmode = "ok"\nmarks = "."\n'
BODY = """import os, time
from bft_nb.results import append_rows, check_new, make_rows
run = dict(exp="little", dataset=mode, model="none", params={}, seed=seed)
check_new(f"{marks}/rows.csv", run)
open(f"{marks}/{os.getpid()}.pid", "w").close()
if mode == "bad": raise ValueError("asked to fail")
time.sleep({"ok": 0, "slow": 1, "hangs": 100}[mode])
"""
MARK = """append_rows(f"{marks}/rows.csv", make_rows({"one": 1}, **run, split="test", n=1, seconds=0, device="cpu", commit="abc"))
with open(f"{marks}/{seed}-{mode}.runs", "a") as f: f.write("run\\n")
"""


# ---- the grid file -------------------------------------------------------------------------------------------------


def test_cells_are_the_product_without_and_with():
    spec = yaml.safe_load("""
        parameters: {lr: 3e-3}
        grid: {dataset: [beauty, sports], seed: [0, 1], widths: [[8], [8, 4]]}
        exclude: [{dataset: sports, seed: 1}, {widths: [8, 4], seed: 0}]
        include: [{dataset: toys, lr: 1}, {seed: 0, dataset: beauty, widths: [8]}]
    """)
    found = cells(spec, ALLOWED)
    names = [(c["dataset"], c.get("seed"), c.get("widths"), c["lr"]) for c in found]
    assert names == [("beauty", 0, [8], 3e-3), ("beauty", 1, [8], 3e-3), ("beauty", 1, [8, 4], 3e-3), ("sports", 0, [8], 3e-3), ("toys", None, None, 1)]


def test_several_grids_are_put_together_and_no_cell_twice():
    found = cells({"grid": [{"seed": [0, 1]}, {"seed": [1, 2]}, {"bft": [True], "seed": [1]}]}, ALLOWED)
    assert found == [{"seed": 0}, {"seed": 1}, {"seed": 2}, {"bft": True, "seed": 1}]


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("grid: {sede: [0]}", ValueError, "grid: unknown parameter 'sede'; did you mean 'seed'?"),
        ("parameters: {sed: 0}\ngrid: {seed: [0]}", ValueError, "parameters: unknown parameter 'sed'; did you mean 'seed'?"),
        ("grid: {seed: [0, x]}", TypeError, "grid: parameter 'seed' must be of type int"),
        ("grid: {bft: [1]}", TypeError, "grid: parameter 'bft' must be of type bool"),
        ("grid: {seed: 0}", TypeError, "grid: 'seed' must be a list of values, got 0"),
        ("grid: {seed: []}", ValueError, "grid: 'seed' has no values"),
        ("grid: {limit: [2026-01-01]}", TypeError, "grid: parameter 'limit' must be text, a number"),
        ("grid: {limit: &a [1, *a]}", TypeError, "grid: parameter 'limit' must be text, a number"),
        ("grid: {limit: [{1: a, b: 2}]}", TypeError, "grid: parameter 'limit' must be text, a number"),
        ("parameters: {limit: &a [*a]}\ngrid: {seed: [0]}", TypeError, "parameters: parameter 'limit' must be text, a number"),
        ("grid: {seed: [0]}\nexclude: [{limit: &a {b: *a}}]", TypeError, "exclude: parameter 'limit' must be text, a number"),
        ("grid: {}", ValueError, "grid: names no parameter"),
        ("parameters: {seed: 0}", ValueError, "the grid is empty"),
        ("grid: {7: [0]}", ValueError, "grid: unknown parameter '7' (allowed: "),
        ("grid: {seed: [null]}", TypeError, "grid: parameter 'seed' must be of type int"),
        ("grid: 3", TypeError, "grid must be a mapping, or a list of mappings"),
        ("parameters: 3\ngrid: {seed: [0]}", TypeError, "parameters: must be a mapping"),
        ("parameters: {seed: 0}\ngrid: {seed: [0]}", ValueError, "'seed' stands under parameters as well"),
        ("grid: {seed: [0]}\nexclude: [{seed: 7}]", ValueError, "exclude: no cell has {'seed': 7}"),
        ("grid: {seed: [0]}\nexclude: [{seed: 0}]", ValueError, "the grid is empty"),
        ("grid: {seed: [0]}\ninclude: [{sead: 0}]", ValueError, "include: unknown parameter 'sead'; did you mean 'seed'?"),
        ("grid: {seed: [0]}\ninclude: {seed: 0}", TypeError, "include must be a list of mappings"),
    ],
)
def test_a_bad_grid_is_refused_by_name(text, error, said):
    with pytest.raises(error) as caught:
        cells(yaml.safe_load(text), ALLOWED)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("notebook: x\ngrid: {seed: [0}\n", "line 2: "),
        ("notebook: x\ngrid:\n  seed: [0]\n  lr: [1]\n  seed: [1]\n", "line 5: 'seed' is given twice"),
        ("notebook: x\ngrids: {seed: [0]}\n", "unknown key 'grids'; did you mean 'grid'?"),
        ("grid: {seed: [0]}\n", "notebook must be the stem"),
        ("- 1\n", "a grid file holds the keys"),
        ("", "a grid file holds the keys"),
        ("notebook: x\nparameters: {seed: !!python/object:os.system 0}\n", "line 2: "),
        (b"notebook: \xff\xfe", "not YAML"),
        ("notebook: x\ngrid: {y: &a [1, *a]}\nfoo: 1\n", "unknown key 'foo'"),
        ("notebook: x\ngrid: &a {y: *a}\nfoo: 1\n", "unknown key 'foo'"),
        (f"notebook: x\ngrid: {{y: {'[' * 3000}{']' * 3000}}}\n", "lists within lists beyond what can be read"),
        ("notebook: x\ngrid: {? [&a [*a]] : 1, ? [&b [*b]] : 2}\n", "grid.yaml: "),
        ("notebook: x\ngrid: {y: [!!bool maybe]}\n", "a tag (!!) stands before a value that is not of its kind"),
        ("notebook: x\ngrid: {y: [!!timestamp then]}\n", "a tag (!!) stands before a value"),
    ],
)
def test_an_unreadable_file_is_refused_by_line(tmp_path, capsys, text, said):
    path = tmp_path / "grid.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert cli.main(["sweep", str(path)]) == 2
    err = capsys.readouterr().err
    assert said in err and "grid.yaml" in err


@pytest.mark.parametrize(("arguments", "says"), [
    (["--limit", "0"], "limit must be at least 1, got 0"), (["--limit", "-1"], "limit must be at least 1, got -1"), (["-j", "0"], "at least 1, got 0"), (["-j", "-2"], "at least 1, got -2"),
    (["--ray", "local", "--gpus", "-1"], "--gpus must be 0 or more, got -1"), (["--ray", "local", "--cpus", "nan"], "--cpus must be 0 or more, got nan"),
])  # fmt: skip
@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_a_number_of_runs_that_cannot_be_is_refused(tmp_path, capsys, arguments, says, more):
    (tmp_path / "grid.yaml").write_text("notebook: recommendation\ngrid: {seed: [0]}")
    assert cli.main(["sweep", str(tmp_path / "grid.yaml"), "--out", str(tmp_path), *arguments, *more]) == 2
    said = capsys.readouterr()
    assert says in said.err and not said.out


def test_missing_file_and_missing_notebook(tmp_path, capsys):
    assert cli.main(["sweep", str(tmp_path / "none.yaml")]) == 2
    (tmp_path / "grid.yaml").write_text("notebook: other.ipynb\ngrid: {seed: [0]}")
    assert cli.main(["sweep", str(tmp_path / "grid.yaml")]) == 2
    err = capsys.readouterr().err
    assert "no grid file" in err and "no notebook" in err and "other.ipynb" in err


@pytest.mark.parametrize("path", sorted((ROOT / "nbs" / "experiments" / "grids").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_grids_of_the_book_fit_their_notebooks(path, tmp_path):
    planned = sweep.plans(path, tmp_path)
    assert planned and len({p.output for p in planned}) == len(planned)
    assert all(p.parameters["store"] is True and p.source.parent == ROOT / "nbs" / "experiments" for p in planned)


def test_the_layers_of_the_study_share_data_seeds_and_budget(tmp_path):
    planned = [p.parameters for p in sweep.plans(ROOT / "nbs" / "experiments" / "grids" / "recommendation.yaml", tmp_path)]
    cells = {}
    for p in planned:
        assert p["epochs"] == study.epochs(p["dataset"], p["backbone"])
        name = p["backbone"] + " with times" * ("time_buckets" in p.get("options", ""))
        cells.setdefault(name, {}).setdefault((p["bft"], p.get("options")), set()).add((p["dataset"], p["seed"]))
    assert {name: len(layers) for name, layers in cells.items()} == {"sasrec": 3, "hstu": 2, "hstu with times": 2, "bert4rec": 3}
    assert all(len(set(map(frozenset, layers.values()))) == 1 for layers in cells.values())


def test_each_layer_is_tuned_on_the_same_grid(tmp_path):
    planned = [p.parameters for p in sweep.plans(ROOT / "nbs" / "experiments" / "grids" / "tuning.yaml", tmp_path)]
    grids = {}
    for p in planned:
        assert p["epochs"] == study.epochs(p["dataset"], p["backbone"]) and p["seed"] == 0 and p["dataset"] == study.tuned_on(p["dataset"], p["backbone"])
        grids.setdefault((p["dataset"], p["backbone"]), {}).setdefault((p["bft"], p.get("options")), set()).add((p["dropout"], p["lr"]))
    assert set(grids) == {(study.tuned_on(of, backbone), backbone) for of in study.DATASETS for backbone in ("sasrec", "bert4rec", "hstu")}
    for (_, backbone), layers in grids.items():
        assert len(layers) == (2 if backbone == "hstu" else 3) and len(set(map(frozenset, layers.values()))) == 1 and len(next(iter(layers.values()))) >= 2


# ---- the loop, without processes -----------------------------------------------------------------------------------


def plan(tmp_path, seed=0):
    return runner.Plan(tmp_path / "n.ipynb", {"seed": seed}, tmp_path / "out" / f"n-seed={seed}.ipynb", f"id{seed}")


class Scripted:
    "Answers each cell with the outcomes it was given, one a time."

    def __init__(self, answers):
        self.answers, self.asked, self.closed = answers, [], False

    def submit(self, plan, retry):
        future = Future()
        answer = self.answers[plan.parameters["seed"]].pop(0)
        self.asked.append((plan.parameters["seed"], retry))
        future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)
        return future

    def close(self):
        self.closed = True


def test_busy_cells_are_asked_for_again_and_lost_ones_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "PAUSE", 0.01)
    executor = Scripted({0: [Outcome("busy"), Outcome("busy"), Outcome("kept")], 1: [Outcome("done", 2.0)], 2: [OSError("machine lost")]})
    found = sweep.sweep([plan(tmp_path, s) for s in range(3)], lambda: executor, retry_failed=True)
    status = {p.parameters["seed"]: o.status for p, o in found}
    assert status == {0: "kept", 1: "done", 2: "failed"} and executor.closed
    assert Counter(executor.asked) == {(0, True): 1, (0, False): 2, (1, True): 1, (2, True): 1}
    said = sweep.summary(found, 4)
    assert said.splitlines()[0].startswith("4 cells: ") and "1 left" in said and "OSError: machine lost" in said
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]) == 3


def test_the_time_to_go_is_that_of_the_cells_of_this_sweep(tmp_path, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("tqdm.std.time", lambda: clock.now)

    def ended():
        for seed in range(4):
            clock.now += 60 * (seed + 1)
            yield plan(tmp_path, seed), Outcome("done", 60.0)

    assert len(sweep._shown(ended(), before=2, total=6)) == 4
    bars = re.findall(r"(\d)/6 \[(\d\d:\d\d)<(\S+),", terminal.getvalue())
    assert list(dict.fromkeys(bars)) == [("2", "00:00", "?"), ("3", "01:00", "03:00"), ("4", "03:00", "03:00"), ("5", "06:00", "02:00"), ("6", "10:00", "00:00")]


def test_limit_and_an_executor_that_is_closed_on_interruption(tmp_path):
    planned = [plan(tmp_path, s) for s in range(3)]
    executor = Scripted({s: [Outcome("done")] for s in range(3)})
    assert len(sweep.sweep(planned, lambda: executor, limit=2)) == 2 and len(executor.asked) == 2
    with pytest.raises(ValueError, match="limit must be at least 1"):
        sweep.sweep(planned, lambda: executor, limit=0)
    executor = Scripted({0: [Outcome("done")]})
    executor.submit = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(planned, lambda: executor)
    assert executor.closed


def test_a_lock_counts_only_while_it_is_held(tmp_path):
    one = plan(tmp_path)
    assert not runner.is_running(one)
    with FileLock(one.lock.parent.mkdir(parents=True) or one.lock):
        assert runner.is_running(one) and sweep.states([one]) == ["running"]
    assert one.lock.exists() or os.name == "nt"  # what a killed process leaves
    assert not runner.is_running(one) and sweep.states([one]) == ["to do"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-j", "0"], "must be at least 1"), (["--gpus", "1"], "need --ray"), (["--ray", "auto", "-j", "2"], "-j is for one machine"), (["--limit", "0"], "limit must be at least 1"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_go_together(little, capsys, args, said):
    assert cli.main(["sweep", str(little("grid: {seed: [0]}")), "--out", str(little.out), *args]) == 2
    assert said in capsys.readouterr().err


# ---- Ray -----------------------------------------------------------------------------------------------------------


class FakeRay:
    "What `OnRay` asks of Ray, in this process."

    def __init__(self, resources):
        self.resources, self.began, self.asked, self.cancelled = resources, None, None, []

    def init(self, **how):
        if how.get("address") == "auto":
            raise ConnectionError("Could not find any running Ray instance.\nMore.")
        if self.resources is None:
            raise Exception("The current node timed out during startup.")
        self.began = how

    def nodes(self):
        return [{"Alive": True, "Resources": self.resources}, {"Alive": False, "Resources": {"CPU": 99.0, "GPU": 99.0}}]

    def remote(self, **needs):
        self.asked = needs

        def ref(function, *args):
            future = Future()
            future.set_result(function(*args))
            return SimpleNamespace(future=lambda: future)

        return lambda function: SimpleNamespace(remote=lambda *args: ref(function, *args))

    def wait(self, refs, num_returns, timeout):
        return [], list(refs)

    def cancel(self, ref):
        self.cancelled.append(ref)

    def shutdown(self):
        self.began = None


def test_ray_runs_the_same_attempt(tmp_path, monkeypatch):
    fake = FakeRay({"CPU": 4.0, "GPU": 1.0})
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(sweep, "attempt", lambda plan, retry: Outcome("done", plan.parameters["seed"]))
    made = []
    found = sweep.sweep([plan(tmp_path, s) for s in range(2)], lambda: made.append(sweep.OnRay("local", gpus=1, cpus=2)) or made[0])
    assert sorted(o.seconds for _, o in found) == [0, 1]
    assert fake.asked == {"num_gpus": 1, "num_cpus": 2, "max_retries": 0}
    assert len(fake.cancelled) == 2 and fake.began is None
    with pytest.raises(ValueError, match="no machine of the cluster has 2 GPU"):
        sweep.OnRay("local", gpus=2)
    with pytest.raises(ValueError, match="no Ray cluster at 'auto'.*ray start --head"):
        sweep.OnRay("auto")
    fake.resources = None
    with pytest.raises(runner.RunFailed, match="Ray did not start on this machine: The current node timed out"):
        sweep.OnRay("local")


def test_missing_ray_names_the_extra(little, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["sweep", str(little("grid: {seed: [0]}")), "--out", str(little.out), "--ray", "local"]) == 2
    assert "pip install 'bft_nb[cluster]'" in capsys.readouterr().err


@pytest.mark.skipif(os.environ.get("BFT_TEST_RAY") != "1", reason="BFT_TEST_RAY is not 1: starts Ray, which takes a minute and fails at times on a loaded machine")
def test_ray_itself(little, capsys, monkeypatch):
    monkeypatch.setenv("RAY_agent_register_timeout_ms", "300000")
    grid = little("grid: {seed: [0, 1], mode: [ok, bad]}\nexclude: [{seed: 1, mode: bad}]")
    assert cli.main(["sweep", str(grid), "--out", str(little.out), "--ray", "local"]) == 1
    out, err = capsys.readouterr()
    assert "Ray did not start" not in err, err
    assert "2 done, 1 failed" in out and "ValueError: asked to fail" in out
    assert little.runs() == {"0-ok": 1, "1-ok": 1}


# ---- processes -----------------------------------------------------------------------------------------------------


class Little:
    "A notebook that notes each run in a folder, and grids beside it."

    def __init__(self, folder):
        self.folder, self.out, self.marks = folder, folder / "out", folder / "marks"
        self.marks.mkdir()
        kernel = {"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}}
        body = [new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}), new_code_cell(BODY), new_code_cell(MARK)]
        nbformat.write(new_notebook(cells=body, metadata=kernel), folder / "little.ipynb")

    def __call__(self, text):
        path = self.folder / "grid.yaml"
        path.write_text(f"notebook: little.ipynb\nparameters: {{marks: '{self.marks}'}}\n{text}")
        return path

    def start(self, grid, *args):
        command = [sys.executable, "-m", "bft_nb.cli", "sweep", str(grid), "--out", str(self.out), *args]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)

    def runs(self):
        "How often each cell has come to its end."
        return {p.stem: len(p.read_text().splitlines()) for p in self.marks.glob("*.runs")}

    def rows(self):
        "How many rows each cell has stored."
        return Counter(row["seed"] for row in read_rows(self.marks / "rows.csv")) if (self.marks / "rows.csv").exists() else Counter()

    def outputs(self):
        "What is in place, and since when."
        return {p.name: p.stat().st_mtime_ns for p in self.out.glob("*.ipynb") if ".part." not in p.name}

    def alive(self):
        "Kernels that are still there."
        return [pid for p in self.marks.glob("*.pid") if (pid := int(p.stem)) and alive(pid)]


@pytest.fixture
def little(tmp_path):
    return Little(tmp_path)


def test_failures_are_told_and_the_rest_is_done_then_kept(little, capsys):
    grid = little("grid: {mode: [bad, ok]}")

    def bft(*args):
        return cli.main(["sweep", str(grid), "--out", str(little.out), *args]), capsys.readouterr().out

    status, out = bft("--dry-run")
    assert status == 0 and "2 cells: 2 to do" in out and not little.out.exists()
    status, out = bft()
    assert status == 1 and "2 cells: 1 failed, 1 done" in out and "ValueError: asked to fail" in out
    status, out = bft()
    assert status == 1 and "1 failed, 1 kept" in out and "--retry-failed" in out and little.runs() == {"0-ok": 1}
    status, out = bft("--dry-run")
    assert status == 0 and "1 failed, 1 done" in out
    status, out = bft("--retry-failed")
    assert status == 1 and "[2/2] FAILED" in out and little.runs() == {"0-ok": 1}


MOMENTS = {
    "a child has begun": lambda little: len(list(little.out.glob(".locks/*"))),
    "a notebook is being executed": lambda little: len(list(little.marks.glob("*.pid"))),
    "one has stored its rows": lambda little: little.rows().total(),
    "one has come to its end, but may not be in place": lambda little: sum(little.runs().values()),
    "one is in place": lambda little: len(little.outputs()),
}


def kill_when(child, grows):
    "SIGKILL as soon as a number grows (or the sweep has come to its end)."
    start = grows()
    until(lambda: grows() > start or child.poll() is not None)
    child.kill()
    child.communicate()


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_killed_at_any_moment_it_goes_on_and_repeats_nothing(little):
    grid = little("grid: {mode: [slow], seed: [0, 1, 2]}")
    for moment in MOMENTS.values():  # the next begins at once: what the killed one has begun may still be ending
        before = little.outputs()
        kill_when(little.start(grid, "-j", "2"), partial(moment, little))
        assert before.items() <= little.outputs().items()
    kept, last = little.outputs(), little.start(grid, "-j", "2")
    _, err = last.communicate(timeout=300)
    assert last.returncode == 0, err
    assert kept and kept.items() <= little.outputs().items()  # not written again
    assert len(little.outputs()) == 3 and all(p.state() == "done" for p in sweep.plans(grid, little.out))
    assert little.rows() == {seed: 1 for seed in range(3)} and set(little.runs().values()) == {1}  # whatever was killed: no rows lost, none twice
    assert not list(little.out.glob("*.part.ipynb")) and not list(little.out.glob("*.failed.ipynb"))
    until(lambda: not little.alive(), 30)


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_interruption_ends_the_children(little):
    child = little.start(little("grid: {mode: [hangs], seed: [0, 1]}"), "-j", "2")
    until(lambda: len(list(little.marks.glob("*.pid"))) == 2)
    child.send_signal(signal.SIGINT)  # to the sweep alone, not to its group as a terminal would
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130 and "interrupted" in err
    assert little.outputs() == {} and little.runs() == {}
    until(lambda: not little.alive(), 30)


def test_two_sweeps_at_once_share_the_cells(little):
    grid = little("grid: {mode: [slow], seed: [0, 1, 2]}")
    both = [little.start(grid) for _ in range(2)]
    ends = [(*child.communicate(timeout=300), child.returncode) for child in both]
    assert [status for *_, status in ends] == [0, 0], ends
    assert little.runs() == {f"{seed}-slow": 1 for seed in range(3)}
    assert len(little.outputs()) == 3
