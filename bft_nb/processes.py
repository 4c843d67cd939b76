"""Several processes of one machine train one model: how `fit` and `finetune` use every GPU, from a script or inside a running notebook.

Each process is a new interpreter. It inherits nothing of the caller's memory, so CUDA may be in use already, and it does not run the caller's
script again, so a script needs no guard. Model and data go there, and weights come back, through files in a temporary folder.
The store at which the processes meet is held by the caller, on a port that the system chose for it. When the caller ends, however that happens,
their standard input ends, and with it the processes.

Store and process group are torch's. Its launchers are not used: `accelerate.notebook_launcher` forks, which CUDA does not survive;
`torch.multiprocessing.spawn` runs the caller's script again and turns exceptions into text; `torch.distributed.run` replaces the signal handlers of the
process it is called in, a notebook's kernel for one, and its workers outlive a kill of it.
"""

import codecs
import datetime
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bft_nb.core import check_count

__all__ = ["Elsewhere", "join", "number_of_processes", "process", "train_together"]

HOST = "127.0.0.1"
PATIENCE = datetime.timedelta(minutes=30)  # how long a process waits for another
START = "import json, sys; sys.path[:] = json.load(open(sys.argv[1] + '/path')); from bft_nb.processes import work; work(sys.argv[1])"


class Elsewhere(RuntimeError):
    "Where in another process an exception was raised: its text is the traceback there."


# ---- which of how many -------------------------------------------------------------------------------------------


def process() -> tuple[int, int]:  # (0, 1) if it is alone
    "Which of how many processes this one is, counted from 0; from the process group, else as `torchrun` says in the environment."
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    n = int(os.environ.get("WORLD_SIZE") or 1)
    return (int(os.environ.get("RANK") or 0) if n > 1 else 0), n


def number_of_processes(
    processes: int | None,  # None: one for each visible GPU
    place: torch.device,  # where the model is trained
    batch_size: int,  # rows that the processes share
) -> int:
    "How many processes to start, 1 for none. Inside one of several it is 1. Raises `TypeError` or `ValueError` for a number that can't be."
    if processes is not None:
        check_count("processes", processes)
    if process()[1] > 1:
        return 1
    most = torch.cuda.device_count() if place.type == "cuda" else 1
    if processes is None:
        return max(1, min(most, batch_size))
    if processes > batch_size:
        raise ValueError(f"processes must be at most batch_size={batch_size}, the rows that they share, got {processes}")
    if processes > most and place.type != "cpu":
        raise ValueError(f"processes must be at most {most}, the devices of type {place.type} to be seen, got {processes}")
    return processes


def join(place: torch.device, store: Any = None) -> None:
    "Meet the other processes, unless this one is alone or has met them: at a store, or where the environment says. Tensors on a CPU travel by gloo, those on a GPU by NCCL."
    rank, n = process()
    if n == 1 or dist.is_initialized() or "RANK" not in os.environ:
        return
    if place.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    where = {} if store is None else dict(store=store, rank=rank, world_size=n)
    dist.init_process_group("cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo", timeout=PATIENCE, **where)


# ---- the caller --------------------------------------------------------------------------------------------------


def train_together(
    train: Callable[..., Any],  # function of a module, not of a notebook: train(model, *arguments) in every process
    model: nn.Module,  # carries the trained weights afterwards
    arguments: Sequence[Any],
    n: int,  # processes
    place: torch.device,  # where the model is trained, and ends
) -> Any:  # what `train` returned in process 0
    """Train in `n` processes that this call starts; what process 0 says appears on standard error.

    Raises what the first process that failed raised, with its traceback as cause (`Elsewhere`), `RuntimeError` if a process was killed, and
    `TypeError` for what can't be handed over. No process is left behind, by Ctrl-C either.
    """
    with tempfile.TemporaryDirectory(prefix="bft-", ignore_cleanup_errors=True) as name:
        folder, children = Path(name), list[subprocess.Popen]()
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        _hand_over(folder, (train, model, tuple(arguments), place.type, store.port))
        try:
            for rank in range(n):
                children.append(_start(folder, _environment(rank, n, place)))
            _wait(folder, children)
        finally:
            _end(children)
        weights, found = torch.load(folder / "result", map_location="cpu", weights_only=False)
    own = model.to(place).train().state_dict()
    for key, value in weights.items():
        own[key].copy_(value)
    return found


def _hand_over(folder: Path, task: Any) -> None:
    "Write down what is to be done; `TypeError` if that is not possible."
    (folder / "path").write_text(json.dumps(sys.path))
    try:
        torch.save(task, folder / "task")
    except (pickle.PicklingError, AttributeError, TypeError) as e:
        raise TypeError(f"model and data must be picklable to be handed to other processes ({e}): give processes=1") from e


def _environment(rank: int, n: int, place: torch.device) -> dict[str, str]:
    "What a process finds in its environment, as `torchrun` would put it there."
    threads = max(1, torch.get_num_threads() // n)
    known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "OMP_NUM_THREADS": threads, "PYTHONIOENCODING": "utf-8"}
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    usual = {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}  # or it looks for its interface by the name of the machine
    usual["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # or it says that no parameter was without a gradient
    if place.type == "cuda":
        from accelerate.utils import check_cuda_p2p_ib_support

        if not check_cuda_p2p_ib_support():  # some cards can't talk to each other directly
            usual |= {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    return usual | os.environ | {name: str(value) for name, value in known.items()}


def _start(folder: Path, environment: dict[str, str]) -> subprocess.Popen:
    "Start a process; the pipe to its standard input stays open as long as this one lives."
    with (folder / f"said-{environment['RANK']}").open("wb") as said:
        return subprocess.Popen([sys.executable, "-c", START, str(folder)], stdin=subprocess.PIPE, stdout=said, stderr=said, env=environment)


def _wait(folder: Path, children: list[subprocess.Popen]) -> None:
    "Wait until all have ended well, and pass on what the first says; raise what made one fail."
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    with (folder / "said-0").open("rb") as said:
        while True:
            running = [child for child in children if child.poll() is None]
            if text := decode(said.read()):
                print(text, end="", file=sys.stderr, flush=True)
            if any(child.returncode for child in children):
                raise _failure(folder, [child.poll() for child in children])
            if not running:
                return
            time.sleep(0.05)


def _failure(folder: Path, codes: list[int | None]) -> BaseException:
    "Why processes ended: one was killed, or what was raised first."
    killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
    raised = sorted((pickle.loads(path.read_bytes()) for path in folder.glob("error-*")), key=lambda found: found[0])
    if raised and not killed:
        _, error, text = raised[0]
        error.__cause__ = Elsewhere(f"in another process\n\n{text}")
        return error
    rank = next(iter(killed), next(rank for rank, code in enumerate(codes) if code))
    code, said = codes[rank] or 0, (folder / f"said-{rank}").read_text(encoding="utf-8", errors="replace")[-2000:]
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return RuntimeError(f"process {rank} of {len(codes)} {how}. The last it said: {said or 'nothing'}")


def _end(children: list[subprocess.Popen]) -> None:
    "End those that still run; checkpoints are written so that it may happen at any time."
    for child in children:
        child.kill()
    for child in children:
        child.wait()
        if child.stdin:
            child.stdin.close()


# ---- the processes -----------------------------------------------------------------------------------------------


def work(folder: str) -> None:
    "Do this process's part of what was handed over, and leave; not by the end of the interpreter, where threads of torch now and then abort it."
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to answer
    _end_with_caller(folder)
    status = 0
    try:
        _part(Path(folder))
    except BaseException as e:
        _report(Path(folder), e)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_with_caller(folder: str) -> None:
    "End this process when standard input does, which is when the caller is no more."

    def watch() -> None:
        while os.read(0, 4096):
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _part(folder: Path) -> None:
    "Train; process 0 writes down the result."
    rank, n = process()
    try:
        train, model, arguments, kind, port = torch.load(folder / "task", map_location="cpu", mmap=True, weights_only=False)
    except (AttributeError, ImportError) as e:  # a class of the caller's notebook or script
        raise TypeError(f"model and data must be of classes that other processes can import ({e}): define them in a module, or give processes=1") from e
    join(torch.device(kind), dist.TCPStore(HOST, port, is_master=False, timeout=PATIENCE))
    found = train(model, *arguments)
    if rank == 0:
        torch.save((_learned(model), found), folder / "result")
    dist.barrier()
    dist.destroy_process_group()


def _learned(model: nn.Module) -> dict[str, torch.Tensor]:
    "What training may have changed: all but the frozen parameters."
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: x.detach().cpu() for name, x in model.state_dict().items() if name not in frozen and isinstance(x, torch.Tensor)}


def _report(folder: Path, error: BaseException) -> None:
    "Leave an exception for the caller, with the moment it was raised: others fail because this process did."
    text = "".join(traceback.format_exception(error))
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:  # its class does not travel
        error = RuntimeError(f"{type(error).__name__}: {error}")
    part = folder / f"part-{os.getpid()}"
    part.write_bytes(pickle.dumps((time.monotonic(), error, text)))
    part.replace(folder / f"error-{os.environ['RANK']}")
