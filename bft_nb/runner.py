"""Run one parameterised notebook in a process of its own.

`run` is what `bft run`, `make run` and sweeps share. papermill changes the directory of the whole process
and its kernels share that process's fate, so every run is a child process with absolute paths; a caller that
wants several at once waits for them in threads. Nothing but the standard library is imported until a
notebook is opened.
"""

import contextlib
import difflib
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Run", "RunFailed", "allowed_parameters", "check_parameters", "checkout", "find_notebook", "output_name", "parse_value", "run"]

KERNEL = "python3"


class Run(NamedTuple):
    "What became of one run."

    notebook: Path  # what was executed
    output: Path  # the executed notebook, written whole or not at all
    status: str  # "done", or "kept" if the same run was there already
    seconds: float  # wall clock


class RunFailed(RuntimeError):
    "A cell raised, or the process that ran the notebook died; the message names the cell and the error."


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
    "A parameter as typed: JSON (`1e-3`, `true`, `[1, 2]`), else YAML, else the text itself."
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    try:
        import yaml

        return yaml.safe_load(text)
    except Exception:  # no PyYAML, or not YAML: a plain string
        return text


def _need_papermill() -> None:
    if importlib.util.find_spec("papermill") is None or importlib.util.find_spec("ipykernel") is None:
        raise RunFailed("running notebooks needs papermill and ipykernel: pip install 'bft_nb[nb]'")


def allowed_parameters(notebook: Path) -> dict[str, Any]:
    "Name and default of every parameter in the cell tagged `parameters` (a default that is no literal is given as `...`)."
    _need_papermill()
    _cells(notebook)
    import ast
    import logging

    import papermill as pm

    logging.getLogger("papermill").setLevel(logging.ERROR)  # it warns of a missing cell, which is an answer here
    found = {}
    for name, entry in pm.inspect_notebook(str(notebook)).items():
        try:
            found[name] = ast.literal_eval(str(entry["default"]))
        except (ValueError, SyntaxError):
            found[name] = ...
    return found


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


def check_parameters(given: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    "`ValueError` for a name the notebook does not have (papermill only warns), `TypeError` for a value of another kind than its default."
    for name, value in given.items():
        if name not in allowed:
            names = ", ".join(allowed) or "this notebook has none"
            raise ValueError(f"unknown parameter {name!r}{closest(name, list(allowed))} (allowed: {names})")
        if not _fits(value, allowed[name]):
            kind = type(allowed[name]).__name__
            raise TypeError(f"parameter {name!r} must be of type {kind} like its default {allowed[name]!r}, got {value!r} ({type(value).__name__})")


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
        return [{"cell_type": c["cell_type"], "source": c["source"]} for c in content["cells"]]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{notebook} is not a notebook (nbformat 4): {type(e).__name__}: {e}") from e


def _identity(notebook: Path, parameters: Mapping[str, Any]) -> str:
    "Hash of the notebook's code and the parameters: what a kept output must agree with."
    cells = _cells(notebook)
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    return hashlib.sha256(json.dumps([code, dict(parameters)], sort_keys=True).encode()).hexdigest()[:16]


def _is_kept(output: Path, identity: str) -> bool:
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


def environment() -> dict[str, str]:
    "The environment notebooks run in: this library first, and silence about the widgets tqdm would like to have."
    here, quiet = str(Path(__file__).resolve().parent.parent), "ignore:IProgress not found"
    first = {"PYTHONPATH": (here, os.pathsep), "PYTHONWARNINGS": (quiet, ",")}
    return {**os.environ, **{k: sep.join(filter(None, [v, os.environ.get(k)])) for k, (v, sep) in first.items()}}


def _spawn(spec: Mapping[str, Any], progress: bool, timeout: float | None) -> str:
    "Run this module as a child on `spec`; what it had to say if it failed, else nothing."
    sink = None if progress else subprocess.PIPE
    command = [sys.executable, "-u", "-m", "bft_nb.runner"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sink, stderr=sink, text=True, env=environment())
    try:
        _, err = child.communicate(json.dumps(spec), timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{Path(spec['notebook']).name}: took more than {timeout} s") from None
    finally:  # on time-out or Ctrl-C the child, and with it its kernel, ends too
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(timeout=20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
    if child.returncode:
        lines = (err or "").strip().splitlines()
        return lines[-1] if lines else f"the process ended with status {child.returncode}"
    return ""


def run(
    notebook: str | Path,  # a path, or the stem of an experiment
    parameters: Mapping[str, Any] | None = None,  # by the names in the cell tagged `parameters`
    *,
    out: str | Path | None = None,  # folder of the executed notebook; default: runs/ of the checkout
    name: str | None = None,  # of the executed notebook without suffix; default: `output_name`
    force: bool = False,  # run again even if the same run is there
    progress: bool = True,  # stream the notebook's output and a progress bar to the terminal
    timeout: float | None = None,  # seconds
) -> Run:  # status "kept" if the same code has been run with the same parameters
    """Execute a notebook into `out`, whole or not at all.

    The output is written as NAME.part.ipynb and renamed when every cell has run. A run whose notebook code and parameters equal those of
    the stored output is kept, not repeated (changes of the library are not seen: `force`). If a cell fails, the executed notebook with
    its traceback is moved to NAME.failed.ipynb and nothing else is left. Raises `FileNotFoundError` (no such notebook), `ValueError`
    (unknown parameter), `TypeError` (value of another kind than the default), `RunFailed` (a cell raised).
    """
    source, given = find_notebook(notebook), dict(parameters or {})
    check_parameters(given, allowed_parameters(source) if given else {})
    root = checkout()
    folder = Path(out).expanduser().resolve() if out else (root or Path.cwd()) / "runs"
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"out must be a folder, {folder} is a file")
    name = name or output_name(source.stem, given)
    output, part, failed = (folder / f"{name}{end}.ipynb" for end in ("", ".part", ".failed"))
    identity, start = _identity(source, given), time.perf_counter()
    if not force and _is_kept(output, identity):
        return Run(source, output, "kept", 0.0)
    _need_papermill()
    folder.mkdir(parents=True, exist_ok=True)
    spec = {"notebook": str(source), "part": str(part), "parameters": given, "identity": identity, "progress": progress}
    try:
        trouble = _spawn(spec, progress, timeout)
        if not trouble:
            failed.unlink(missing_ok=True)
            os.replace(part, output)
            return Run(source, output, "done", time.perf_counter() - start)
        where = cell_error(part)
        if where:
            os.replace(part, failed)
        raise RunFailed(f"{source.name}: {where or trouble}" + (f" (whole traceback in {failed})" if where else ""))
    finally:
        part.unlink(missing_ok=True)


def _child() -> int:
    "Execute the run described by the JSON on standard input: the only place where papermill runs."
    import signal

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that the kernel is shut down as well
    spec = json.load(sys.stdin)
    import nbformat
    import papermill as pm

    part = Path(spec["part"])
    streams = {"stdout_file": sys.stdout, "stderr_file": sys.stderr} if spec["progress"] else {}
    try:
        pm.execute_notebook(
            spec["notebook"], str(part), parameters=spec["parameters"] or None, kernel_name=KERNEL,
            cwd=str(Path(spec["notebook"]).parent), progress_bar=spec["progress"], **streams,
        )  # fmt: skip
    except pm.PapermillExecutionError as e:
        print(f"{e.ename}: {e.evalue}", file=sys.stderr)
        return 1
    nb = nbformat.read(part, as_version=4)
    nb.metadata["bft_run"] = spec["identity"]
    nbformat.write(nb, part)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(_child())
    sys.exit(130)
