"Two processes (gloo, CPU) train as one does, whoever starts them: torchrun, a script, a notebook's kernel."

import json
import math
import os
import signal
import subprocess
import sys
import threading

import nbformat
import pytest
import torch
import workers
from helpers import ROOT, alive, two_processes, until
from nbformat.v4 import new_code_cell, new_notebook
from test_training import QUICK, chain_split, small, weights
from torch import nn

from bft_nb.processes import Elsewhere, number_of_processes, train_together
from bft_nb.training import IGNORE, fit

# what loads for long is imported by the tests that need it: their processes import this file, too
# three batches an epoch, one of them of a single sequence, and blanks drawn anew: the least convenient to share
SAME = dict(QUICK, epochs=4, patience=9)
CPU = torch.device("cpu")
close = torch.testing.assert_close


def data():
    return chain_split(users=65)


def fresh(split):
    return small(split, dropout=0.0, backbone="bert4rec", bft=True)


def assert_same(two, one, model, other):
    "Losses, metrics and weights of two runs, but for rounding."
    assert two.best_epoch == one.best_epoch and len(two.history) == len(one.history) == SAME["epochs"]
    for name in ("loss", "ndcg@10"):
        close([row[name] for row in two.history], [row[name] for row in one.history], rtol=1e-4, atol=1e-5)
    for name, value in weights(model).items():
        close(value, weights(other)[name], rtol=1e-2, atol=2e-3)


@pytest.fixture(scope="module")
def alone():
    "What one process makes of the data."
    split = data()
    model = fresh(split)
    return model, fit(model, split, **SAME)


# ---- torchrun ----------------------------------------------------------------------------------------------------


SCRIPT = """
import json
import torch.distributed as dist
from test_distributed import SAME, data, fresh
from bft_nb.training import fit
split = data()
fitted = fit(fresh(split), split, **SAME, out_dir={out!r}, processes=7)
if dist.get_rank() == 0:
    print(json.dumps([dist.get_world_size(), fitted.history]))
dist.destroy_process_group()
"""


def test_under_torchrun_the_loss_of_two_processes_is_that_of_one(tmp_path, alone):
    world, two = json.loads(two_processes(tmp_path, SCRIPT.format(out=str(tmp_path / "run"))).splitlines()[-1])
    one = alone[1].history
    assert world == 2 and len(one) == 4 and one[-1]["loss"] < one[0]["loss"]
    for name in ("loss", "ndcg@10"):
        close([row[name] for row in two], [row[name] for row in one], rtol=1e-4, atol=1e-5)


# ---- a notebook --------------------------------------------------------------------------------------------------


BEFORE = f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
TRAIN = (
    BEFORE
    + """
import math
import torch
from bft_nb.training import fit
from test_distributed import SAME, data, fresh
split = data()
model = fresh(split)
fitted = fit(model, split, **SAME, processes=2, progress=True)
torch.save((fitted, model), "found.pt")
"""
)
DIVERGE = """
with torch.no_grad():
    model.precision.log_tau.weight.fill_(math.nan)
fit(model, split, **SAME, processes=2)
"""


def test_two_processes_of_a_notebook_train_as_one_does(tmp_path, alone):
    from nbclient import NotebookClient

    spec = {"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}}
    notebook = new_notebook(cells=[new_code_cell(TRAIN), new_code_cell(DIVERGE)], metadata=spec)
    NotebookClient(notebook, timeout=600, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}).execute()
    first, second = (cell.outputs for cell in notebook.cells)
    assert {(o.output_type, o.get("name")) for o in first} == {("stream", "stderr")}, first
    said = "".join(o.text for o in first)
    assert said.count(" 0/12 ") == 1 and "loss=" in said and "[W" not in said  # one bar, and no warning of the processes
    fitted, model = torch.load(tmp_path / "found.pt", weights_only=False)
    assert_same(fitted, alone[1], model, alone[0])
    assert [o.ename for o in second] == ["FloatingPointError"], nbformat.writes(notebook)
    assert "smaller lr" in second[0].evalue and "Elsewhere" in "".join(second[0].traceback)


# ---- a script that is killed -------------------------------------------------------------------------------------


KILLED = (
    BEFORE
    + """
from bft_nb.training import fit
from test_distributed import SAME, data, fresh
from workers import Halt
split = data()
model = fresh(split)
model.register_forward_pre_hook(Halt({folder!r}, 8))
fit(model, split, **SAME, processes=2, out_dir={folder!r} + "/run")  # no guard: the script is not run again
"""
)


def test_a_killed_run_leaves_no_process_and_goes_on(tmp_path, alone):
    run = tmp_path / "run"
    temporary = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", KILLED.format(folder=str(tmp_path))], env=temporary) as script:
        until(lambda: script.poll() is not None or (run / "checkpoint-6" / "trainer_state.json").exists(), 300)
        marks = [int(path.stem) for path in tmp_path.glob("*.pid")]
        script.kill()
    assert len(marks) == 2 and script.pid not in marks
    until(lambda: not any(map(alive, marks)), 30)
    until(lambda: not list(tmp_path.glob("bft-*")), 30)  # nor what was handed over
    split, model = data(), small(data(), seed=5, dropout=0.0, backbone="bert4rec", bft=True)
    fitted = fit(model, split, **SAME, processes=2, out_dir=run)
    assert_same(fitted, alone[1], model, alone[0])
    again = fresh(split)
    assert fit(again, split, **SAME, processes=1, out_dir=run) == fitted  # the folder is that of any number of processes
    close(weights(again), weights(model), atol=0, rtol=0)
    assert (run / "model" / "model.safetensors").exists()


# ---- language models ---------------------------------------------------------------------------------------------


def test_two_processes_tune_a_language_model_as_one_does(tmp_path):
    from test_finetune import ready
    from test_finetune import weights as learnt

    from bft_nb.finetune import finetune
    from bft_nb.qa import lookup

    questions, run = lookup(24, seed=0), dict(steps=6, lr=1e-3, device="cpu", batch_size=3)  # two examples and one
    made, examples, collate = ready("bft", questions)
    one = finetune(made.model, examples, collate, "bft", **run)
    again = ready("bft", questions)[0]
    before = learnt(again.model)
    two = finetune(again.model, examples, collate, "bft", **run, processes=2, out_dir=tmp_path / "run")
    close([row["loss"] for row in two.losses], [row["loss"] for row in one.losses], rtol=1e-4, atol=1e-5)
    for name, value in learnt(again.model).items():
        close(value, learnt(made.model)[name], rtol=1e-3, atol=1e-4)
    assert any(not torch.equal(value, before[name]) for name, value in learnt(again.model).items())
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-5", "checkpoint-6"}
    with pytest.raises(ValueError, match="processes must be at most batch_size=3"):
        finetune(again.model, examples, collate, "bft", **run, processes=4)


# ---- how processes end -------------------------------------------------------------------------------------------


def test_a_failing_process_says_why(tmp_path):
    with pytest.raises(ValueError, match="^not this one$") as found:
        train_together(workers.refuse, nn.Linear(2, 2), (tmp_path,), 2, CPU)
    assert isinstance(found.value.__cause__, Elsewhere) and "in refuse" in str(found.value.__cause__)
    assert not any(alive(int(path.stem)) for path in tmp_path.glob("*.pid"))


def test_a_killed_process_is_named():
    with pytest.raises(RuntimeError, match="process 1 of 2 was killed by SIGKILL. The last it said: so long"):
        train_together(workers.die, nn.Linear(2, 2), (None,), 2, CPU)


def test_ctrl_c_ends_all(tmp_path):
    def interrupt():
        until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        train_together(workers.sleep, nn.Linear(2, 2), (tmp_path,), 2, CPU)
    assert not any(alive(int(path.stem)) for path in tmp_path.glob("*.pid"))


class Own(nn.Linear):
    "A class of a script, as far as other processes can tell."

    __module__ = "__main__"


def test_what_can_not_be_handed_over(monkeypatch):
    model = nn.Linear(2, 2)
    model.act = lambda x: x
    with pytest.raises(TypeError, match="must be picklable to be handed to other processes .*: give processes=1"):
        train_together(workers.die, model, (None,), 2, CPU)
    monkeypatch.setattr(sys.modules["__main__"], "Own", Own, raising=False)
    with pytest.raises(TypeError, match="classes that other processes can import .*: define them in a module, or give processes=1"):
        train_together(workers.die, Own(2, 2), (None,), 2, CPU)


# ---- how many ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processes", "error", "message"),
    [
        (0, ValueError, "processes must be at least 1, got 0"),
        ("two", TypeError, "'two'"),
        (True, TypeError, "got True"),
        (33, ValueError, "processes must be at most batch_size=32, the rows that they share, got 33"),
    ],
)
def test_bad_numbers(processes, error, message):
    split = data()
    with pytest.raises(error, match=message):
        fit(fresh(split), split, **SAME, processes=processes)


def test_the_number_of_processes(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [number_of_processes(None, place, 128) for place in (CPU, cuda)] == [1, 4]
    assert number_of_processes(3, CPU, 128) == 3 and number_of_processes(None, cuda, 2) == 2 and number_of_processes(1, cuda, 2) == 1
    for place, most in ((cuda, 4), (torch.device("mps"), 1)):
        with pytest.raises(ValueError, match=f"processes must be at most {most}, the devices of type {place.type} to be seen, got 5"):
            number_of_processes(5, place, 128)
    monkeypatch.setenv("WORLD_SIZE", "2")  # one of two already: none are started
    assert [number_of_processes(n, place, 128) for n in (None, 5) for place in (CPU, cuda)] == [1] * 4
    with pytest.raises(ValueError, match="out_dir must be a folder that all 2 processes see, got None"):
        fit(fresh(data()), data(), **SAME, processes=2)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_rows_are_shared_out(n):
    from bft_nb._trainer import share

    batch = {"items": torch.arange(10).reshape(5, 2), "labels": torch.ones(5, 2)}
    parts = [share(batch, rank, n) for rank in range(n)]
    close(torch.cat([part["items"] for part in parts])[:, 0].sort().values, batch["items"][:, 0])
    single = {name: x[:1] for name, x in batch.items()}
    for rank in range(1, n):
        assert share(single, rank, n)["labels"].tolist() == [[IGNORE, IGNORE]] and share(single, rank, n)["items"].shape == (1, 2)
    assert math.isclose(sum(float(part["labels"].sum()) for part in parts), 10)
