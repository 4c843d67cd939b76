"""Run one parameterised notebook in a process of its own.

`run` is what `bft run`, `make run` and sweeps share. papermill changes the directory of the whole process
and its kernels share that process's fate, so every run is a child process with absolute paths; a caller that
wants several at once waits for them in threads. The child holds a lock on its output and puts it in place
itself, so that whoever starts the same run meanwhile waits or goes elsewhere, and it ends when its parent does,
however that ends. Nothing but the standard library is imported until a notebook is opened.
"""

import ast
import contextlib
import difflib
import hashlib
import importlib.util
import json
import math
import os
import re
import reprlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "Plan", "Run", "RunFailed", "allowed_parameters", "check_parameters", "checkout", "execute", "find_notebook", "is_running", "output_name", "parse_value",
    "plan", "run",
]  # fmt: skip

KERNEL = "python3"
RAISED, BUSY, KEPT, STORED = 3, 75, 76, 77  # exit statuses of the child: a cell raised, someone else is at it, someone else has done it, its rows are stored
DEEPEST, MOST = 20, 10_000  # lists within lists of a parameter; values in one level of them
STATUS = {0: "done", BUSY: "busy", KEPT: "kept", STORED: "stored"}


class Run(NamedTuple):
    "What became of one run."

    notebook: Path  # what was executed
    output: Path  # the executed notebook, written whole or not at all
    status: str  # "done", "kept" if the same run was there already, "stored" if its rows were, "busy" if another process is at it (only where `wait` is false)
    seconds: float  # wall clock


class RunFailed(RuntimeError):
    "A cell raised, or the process that ran the notebook died; the message names the cell and the error."


class Plan(NamedTuple):
    "One run: what it executes and where it puts it."

    source: Path
    parameters: dict[str, Any]
    output: Path
    identity: str  # hash of code and parameters: what a stored output must agree with

    def beside(self, end: str) -> Path:
        "The output's path with `.part` (being written) or `.failed` (a cell raised) before its suffix."
        return self.output.with_name(f"{self.output.stem}{end}.ipynb")

    @property
    def lock(self) -> Path:
        "Locked by the process that executes it; the file stays, and without such a process means nothing."
        return self.output.parent / ".locks" / f"{self.output.stem}.lock"

    def state(self) -> str:
        '"done", "failed" or "to do", by the outputs that are there.'
        if _carries(self.output, self.identity):
            return "done"
        return "failed" if _carries(self.beside(".failed"), self.identity) else "to do"


def checkout(start: str | Path | None = None) -> Path | None:
    "The checkout of this repository above `start` (default: the working directory), else the one this file lies in, else None."
    here = Path(start or Path.cwd()).resolve()
    for folder in [here, *here.parents, Path(__file__).resolve().parent.parent]:
        if (folder / "settings.ini").is_file() and (folder / "nbs").is_dir():
            return folder
    return None


def _experiments(root: Path | None) -> dict[str, Path]:
    folder = root / "nbs" / "experiments" if root else None
    return {p.stem: p for p in sorted(folder.glob("*.ipynb"))} if folder and folder.is_dir() else {}


def closest(word: str, among: list[str]) -> str:
    "`; did you mean …?` for the nearest word, else nothing."
    near = difflib.get_close_matches(word, among, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def find_notebook(notebook: str | Path, root: Path | None = None) -> Path:
    "A path to a notebook, or the stem of one in nbs/experiments of the checkout; `FileNotFoundError` names what there is."
    path = Path(notebook).expanduser()
    if path.suffix == ".ipynb":
        if path.is_file():
            return path.resolve()
        raise FileNotFoundError(f"no notebook {path}")
    known = _experiments(root or checkout())
    if str(notebook) in known:
        return known[str(notebook)].resolve()
    names = ", ".join(known) or "none: run it inside a clone of the repository, or give a path that ends in .ipynb"
    raise FileNotFoundError(f"no notebook {str(notebook)!r} in nbs/experiments{closest(str(notebook), list(known))} (experiments: {names})")


def parse_value(text: str) -> Any:
    "A parameter as typed: JSON (`1e-3`, `true`, `[1, 2]`), else YAML, else the text itself; `ValueError` for lists within lists beyond what can be read."
    try:
        with contextlib.suppress(ValueError):  # not JSON, or an integer of thousands of digits
            return json.loads(text)
        return _from_yaml(text)
    except RecursionError:
        raise ValueError(f"lists within lists beyond what can be read: {shown(text)}") from None


def _from_yaml(text: str) -> Any:
    "The value of a YAML text, or the text itself; `RecursionError` as PyYAML's."
    try:
        import yaml

        return yaml.safe_load(text)
    except RecursionError:
        raise
    except Exception:  # no PyYAML, or not YAML: a plain string
        return text


def shown(value: Any) -> str:
    "A value for a message, long and deep ones cut."
    brief = reprlib.Repr()
    brief.maxlevel, brief.maxstring, brief.maxother, brief.maxlong = 3, 200, 200, 200
    text = brief.repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def is_plain(value: Any) -> bool:
    "Can a notebook be given this: text, a number, true, false, null, or lists and mappings (whose names are text) of these, `DEEPEST` deep at most?"
    level = [value]
    for _ in range(DEEPEST):
        within: list[Any] = []
        for v in level:
            if isinstance(v, dict) and all(isinstance(name, str) for name in v):
                within += v.values()
            elif isinstance(v, list | tuple):
                within += v
            elif not isinstance(v, str | int | float | None):
                return False
        if not within:
            return True
        if len(within) > MOST:  # YAML writes a list of itself, or one of billions, in a line
            return False
        level = within
    return False


def _need_papermill() -> None:
    if importlib.util.find_spec("papermill") is None or importlib.util.find_spec("ipykernel") is None:
        raise RunFailed("running notebooks needs papermill and ipykernel: pip install 'bft_nb[nb]'")


def allowed_parameters(notebook: Path) -> dict[str, Any]:
    "Name and default of every parameter in the cell tagged `parameters` (a default that is no literal is given as `...`)."
    code = "\n".join("".join(cell["source"]) for cell in _cells(notebook) if "parameters" in cell["tags"])
    try:
        lines = ast.parse(code).body
    except SyntaxError as e:
        raise ValueError(f"{notebook}: the cell tagged parameters is not Python: {e}") from e
    found: dict[str, Any] = {}
    for line in lines:
        if isinstance(line, ast.Assign | ast.AnnAssign):
            names = line.targets if isinstance(line, ast.Assign) else [line.target]
            found |= {name.id: _literal(line.value) for name in names if isinstance(name, ast.Name)}
    return found


def _literal(node: ast.expr | None) -> Any:
    try:
        return ast.literal_eval(node)  # type: ignore[arg-type]  # None, of a declaration, is no literal either
    except ValueError:
        return ...


def _fits(value: Any, default: Any) -> bool:
    if default is None or default is ...:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return type(value) is type(default)
    if isinstance(default, float):
        return isinstance(value, int | float)
    if isinstance(default, list | tuple):
        return isinstance(value, list | tuple)
    return isinstance(value, type(default))


def check_names(names: Iterable[str], allowed: Mapping[str, Any]) -> None:
    "`ValueError` for a name the notebook does not have (papermill only warns)."
    for name in names:
        if name not in allowed:
            known = ", ".join(allowed) or "this notebook has none"
            raise ValueError(f"unknown parameter {name!r}{closest(name, list(allowed))} (allowed: {known})")


def check_parameters(given: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    "`ValueError` for a name the notebook does not have, `TypeError` for a value of another kind than its default, or that is not `is_plain`."
    check_names(given, allowed)
    for name, value in given.items():
        if not _fits(value, allowed[name]):
            kind = type(allowed[name]).__name__
            raise TypeError(f"parameter {name!r} must be of type {kind} like its default {allowed[name]!r}, got {shown(value)} ({type(value).__name__})")
        if not is_plain(value):
            raise TypeError(f"parameter {name!r} must be text, a number, true, false, null, or lists or mappings from text of these, at most {DEEPEST} deep and with {MOST:,} values, got {shown(value)}")


def output_name(stem: str, parameters: Mapping[str, Any] | None = None) -> str:
    "One name for one run: the stem, then its parameters in order of name; a hash stands in where they are long or unfit for a file name."
    if not parameters:
        return stem
    pairs = [f"{k}={v if isinstance(v, str) else json.dumps(v, sort_keys=True)}" for k, v in sorted(parameters.items())]
    text = ",".join(pairs)
    plain = re.sub(r"[^\w.,=+-]+", "-", text)
    if plain == text and len(text) <= 100:
        return f"{stem}-{text}"
    return f"{stem}-{plain[:80].rstrip('-,.')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _cells(notebook: Path) -> list[dict[str, Any]]:
    "The cells of a notebook file; `ValueError` if it is none."
    try:
        content = json.loads(notebook.read_text(encoding="utf-8"))
        return [{"cell_type": c["cell_type"], "source": c["source"], "tags": c["metadata"].get("tags", [])} for c in content["cells"]]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{notebook} is not a notebook (nbformat 4): {type(e).__name__}: {e}") from e


def _cells_to_run(tags: Sequence[Sequence[str]], parameters: Mapping[str, Any]) -> int:
    "How many cells a run executes, by the tags of all: one that stores its rows ends where the page begins to read everybody's (tag `result`)."
    ends = [n for n, of in enumerate(tags) if "result" in of] if parameters.get("store") is True else []
    return min(ends, default=len(tags))


def _identity(notebook: Path, parameters: Mapping[str, Any]) -> str:
    "Hash of the code that is run and of the parameters: what a kept output must agree with."
    cells = _cells(notebook)
    cells = cells[: _cells_to_run([c["tags"] for c in cells], parameters)]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    return hashlib.sha256(json.dumps([code, dict(parameters)], sort_keys=True).encode()).hexdigest()[:16]


def _carries(output: Path, identity: str) -> bool:
    try:
        return json.loads(output.read_text(encoding="utf-8"))["metadata"]["bft_run"] == identity
    except (OSError, ValueError, KeyError, TypeError):
        return False


def cell_error(notebook: Path) -> str:
    "`cell 7: ValueError: …` for the first cell with an error output, else nothing."
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError):
        return ""
    for i, cell in enumerate(cells):
        for out in cell.get("outputs", []):
            if out["output_type"] == "error":
                return f"cell {i}: {out['ename']}: {out['evalue']}"
    return ""


# glibc maps a large tensor into memory afresh each time one is made, and every page of it costs a fault; with these it keeps up to 4 GiB that a step has freed for the next
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**32)}


def environment() -> dict[str, str]:
    "The environment notebooks run in: this library first, silence about the widgets tqdm would like to have, memory kept between steps (`ALLOCATOR`) unless the caller's environment says otherwise."
    here, quiet = str(Path(__file__).resolve().parent.parent), "ignore:IProgress not found"
    first = {"PYTHONPATH": (here, os.pathsep), "PYTHONWARNINGS": (quiet, ",")}
    return {**ALLOCATOR, **os.environ, **{k: sep.join(filter(None, [v, os.environ.get(k)])) for k, (v, sep) in first.items()}}


def _end(child: subprocess.Popen) -> None:
    "Have a child end, and with it its kernel."
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _wait(child: subprocess.Popen, timeout: float | None, stop: threading.Event | None) -> str:
    "Wait until the child ends by itself; what it wrote to standard error."
    end = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        try:
            return child.communicate(timeout=timeout if stop is None else 0.5)[1] or ""
        except subprocess.TimeoutExpired:
            if stop is not None and stop.is_set():
                raise RunFailed("stopped") from None
            if time.monotonic() >= end:
                raise RunFailed(f"took more than {timeout} s") from None


def _spawn(plan: Plan, how: Mapping[str, bool], timeout: float | None, stop: threading.Event | None) -> tuple[int, str]:
    "Run this module as a child on a plan: its exit status and what it had to say."
    spec = {**how, "plan": {**plan._asdict(), "source": str(plan.source), "output": str(plan.output)}}
    sink = None if how["progress"] else subprocess.PIPE
    command = [sys.executable, "-u", "-m", "bft_nb.runner"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sink, stderr=sink, text=True, env=environment())
    # the pipe stays open as long as this process lives: its end is how the child learns that it was killed
    pipe, child.stdin = child.stdin, None
    assert pipe is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # a child that died at once has left its reason on standard error
            print(json.dumps(spec), file=pipe, flush=True)
        said = _wait(child, timeout, stop)
    finally:  # on time-out or Ctrl-C the child ends too
        _end(child)
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    return child.returncode, said.strip()


def _locked(lock: Path, timeout: float):
    "The lock of one output; `filelock.Timeout` if another process holds it longer than `timeout` s (-1: any time)."
    from filelock import FileLock

    lock.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(lock, timeout=timeout)


def is_running(plan: Plan) -> bool:
    "Is a living process, of this or another sweep, executing this run?"
    from filelock import Timeout

    try:
        with _locked(plan.lock, 0) if plan.lock.exists() else contextlib.nullcontext():
            return False
    except Timeout:
        return True


def _tidy(plan: Plan) -> None:
    "Remove what a child that died left half-written, unless somebody is writing it again."
    from filelock import Timeout

    with contextlib.suppress(Timeout, OSError), _locked(plan.lock, 0):
        plan.beside(".part").unlink(missing_ok=True)


def _why(plan: Plan, status: int, said: str) -> str:
    "What went wrong, by the traceback or else by the last words of the child."
    failed = plan.beside(".failed")
    if status == RAISED:
        return f"{cell_error(failed) or said} (whole traceback in {failed})"
    _tidy(plan)
    return said.splitlines()[-1] if said else f"the process ended with status {status}"


def plan(source: Path, parameters: Mapping[str, Any], out: str | Path | None = None, name: str | None = None) -> Plan:
    "The run of a notebook that was found with parameters that were checked; `out` and `name` as for `run`."
    folder = Path(out).expanduser().resolve() if out else (checkout() or Path.cwd()) / "runs"
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"out must be a folder, {folder} is a file")
    stem = name or output_name(source.stem, parameters)
    return Plan(source, dict(parameters), folder / f"{stem}.ipynb", _identity(source, parameters))


def execute(
    plan: Plan,
    *,
    force: bool = False,  # even if it is done
    retry: bool = True,  # even if it has failed before
    progress: bool = True,
    timeout: float | None = None,  # seconds
    wait: bool = True,  # while another process is at the same run; else the status is "busy"
    stop: threading.Event | None = None,  # set by another thread: end, with `RunFailed`
) -> Run:
    "Execute a plan unless it is done; raises `RunFailed`."
    start = time.perf_counter()
    if not force and plan.state() == "done":
        return Run(plan.source, plan.output, "kept", 0.0)
    _need_papermill()
    plan.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        status, said = _spawn(plan, {"force": force, "retry": retry, "progress": progress, "wait": wait}, timeout, stop)
    except RunFailed as e:
        _tidy(plan)
        raise RunFailed(f"{plan.source.name}: {e}") from None
    if status in STATUS:
        return Run(plan.source, plan.output, STATUS[status], time.perf_counter() - start)
    raise RunFailed(f"{plan.source.name}: {_why(plan, status, said)}")


def run(
    notebook: str | Path,  # a path, or the stem of an experiment
    parameters: Mapping[str, Any] | None = None,  # by the names in the cell tagged `parameters`
    *,
    out: str | Path | None = None,  # folder of the executed notebook; default: runs/ of the checkout
    name: str | None = None,  # of the executed notebook without suffix; default: `output_name`
    force: bool = False,  # run again even if the same run is there
    progress: bool = True,  # stream the notebook's output and a progress bar to the terminal
    timeout: float | None = None,  # seconds
) -> Run:  # status "kept" if the same code has been run with the same parameters, "stored" if the notebook found its rows stored
    """Execute a notebook into `out`, whole or not at all; with `store` true, the part of an experiment that makes the rows of this run.

    The output is written as NAME.part.ipynb and renamed when every cell has run. A run whose notebook code and parameters equal those of
    the stored output is kept, not repeated (changes of the library are not seen: `force`); one that another process is at is waited for.
    A notebook that raises `results.Stored` has nothing to do: it is left as far as it came, as an output like others.
    If a cell fails, the executed notebook with its traceback is moved to NAME.failed.ipynb and nothing else is left. Raises
    `FileNotFoundError` (no such notebook), `ValueError` (unknown parameter), `TypeError` (value of another kind than the default),
    `RunFailed` (a cell raised).
    """
    source, given = find_notebook(notebook), dict(parameters or {})
    check_parameters(given, allowed_parameters(source) if given else {})
    return execute(plan(source, given, out, name), force=force, progress=progress, timeout=timeout)


def _end_with_parent() -> None:
    "Ask this process to end when standard input does, which is when its parent is no more."

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin: its lock would be held when the interpreter ends
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
        os._exit(143)

    threading.Thread(target=watch, daemon=True).start()


def _execute(plan: Plan, progress: bool) -> int:
    "Execute the notebook, mark it as this run's and put it where it belongs; the exit status."
    import nbformat
    import papermill as pm

    part, failed, status = plan.beside(".part"), plan.beside(".failed"), 0
    streams = {"stdout_file": sys.stdout, "stderr_file": sys.stderr} if progress else {}
    nb = nbformat.read(plan.source, as_version=4)
    nb.cells = nb.cells[: _cells_to_run([c.metadata.get("tags", []) for c in nb.cells], plan.parameters)]
    nbformat.write(nb, part)
    try:
        pm.execute_notebook(
            str(part), str(part), parameters=plan.parameters or None, kernel_name=KERNEL,
            cwd=str(plan.source.parent), progress_bar=progress, **streams,
        )  # fmt: skip
    except pm.PapermillExecutionError as e:
        print(f"{e.ename}: {e.evalue}", file=sys.stderr)
        status = STORED if e.ename == "Stored" else RAISED
    nb = nbformat.read(part, as_version=4)
    nb.metadata["bft_run"] = plan.identity
    nbformat.write(nb, part)
    os.replace(part, failed if status == RAISED else plan.output)
    if status != RAISED:
        failed.unlink(missing_ok=True)
    return status


def _under_lock(plan: Plan, spec: Mapping[str, Any]) -> int:
    "Execute unless another process, before or meanwhile, has."
    state = plan.state()
    if state == "done" and not spec["force"]:
        return KEPT
    if state == "failed" and not spec["retry"]:
        return RAISED
    try:
        return _execute(plan, spec["progress"])
    finally:
        plan.beside(".part").unlink(missing_ok=True)


def _child() -> int:
    "Do the run described by the line of JSON on standard input: the only place where papermill runs."
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that the kernel is shut down as well
    spec = json.loads(sys.stdin.readline())
    _end_with_parent()
    from filelock import Timeout

    where = spec["plan"]
    plan = Plan(Path(where["source"]), where["parameters"], Path(where["output"]), where["identity"])
    try:
        with _locked(plan.lock, 0):
            return _under_lock(plan, spec)
    except Timeout:
        if not spec["wait"]:
            return BUSY
    if spec["progress"]:
        print("another process is executing this run: waiting for it", file=sys.stderr)
    with _locked(plan.lock, -1):
        return _under_lock(plan, spec)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(_child())
    sys.exit(130)
