"""Run a grid of parameters of one notebook: several runs at a time, each once, and on from where it was stopped.

A grid file (YAML) names a notebook, parameters all cells share, and lists whose product are the cells:

    notebook: recommendation          # a stem in nbs/experiments, or a path beside the grid file
    parameters: {epochs: 60, store: true}
    grid:                             # or a list of such mappings, whose cells are put together
      dataset: [beauty, sports]
      seed: [0, 1]
    exclude: [{dataset: sports, seed: 1}]     # cells that have all of these values are left out
    include: [{dataset: toys, seed: 0}]       # and these are added

Each cell is one `runner.execute`, with its output name, its lock and its child process. An executor says where: threads
that wait for processes on this machine, or Ray on many (all of which see the same output folder and the same installation).
"""

import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, Protocol, runtime_checkable

from bft_nb import runner
from bft_nb.runner import Plan

__all__ = ["Executor", "Local", "Outcome", "OnRay", "cells", "plans", "read_grid", "states", "summary", "sweep"]

KEYS = ("notebook", "parameters", "grid", "exclude", "include")
PAUSE = 5.0  # seconds before a cell that another sweep runs is asked for again


class Outcome(NamedTuple):
    "What became of one cell."

    status: str  # "done", "kept", "stored", "failed", "stopped"; "busy" while another sweep runs it
    seconds: float = 0.0
    error: str = ""


# ---- the grid file ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _naming(where: object) -> Iterator[None]:
    "Say where the bad value stands."
    try:
        yield
    except (TypeError, ValueError) as e:
        raise (TypeError if isinstance(e, TypeError) else ValueError)(f"{where}: {e}") from None


def _no_key_twice(node: Any) -> None:
    "YAML keeps the last of two equal keys and says nothing; `ValueError` naming the line."
    todo, met = [node], set()
    while todo:
        node = todo.pop()
        if node is None or id(node) in met or node.id == "scalar":
            continue
        met.add(id(node))  # a node may be within itself
        pairs = node.value if node.id == "mapping" else []
        seen: set[str] = set()
        for key, _ in pairs:
            if str(key.value) in seen:
                raise ValueError(f"line {key.start_mark.line + 1}: {key.value!r} is given twice")
            seen.add(str(key.value))
        todo += reversed([value for _, value in pairs] or node.value)


def _yaml(text: bytes) -> Any:
    "The content of a YAML text; `ValueError` naming the line it cannot be read from, where that is known."
    import yaml

    try:
        _no_key_twice(yaml.compose(text, Loader=yaml.SafeLoader))
        return yaml.safe_load(text)
    except RecursionError:
        raise ValueError("lists within lists beyond what can be read") from None
    except (AttributeError, LookupError) as e:  # of a tag whose value it is not: `!!bool maybe`
        raise ValueError(f"a tag (!!) stands before a value that is not of its kind: {type(e).__name__}: {e}") from None
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        why = getattr(e, "problem", None) or str(e).splitlines()[0]
        raise ValueError(f"line {mark.line + 1}: {why}" if mark else f"not YAML: {why}") from None


def read_grid(path: str | Path) -> dict[str, Any]:
    "The mapping in a grid file; `FileNotFoundError`, or `ValueError` naming file and line or key."
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no grid file {path}")
    with _naming(path):
        spec = _yaml(path.read_bytes())
        if not isinstance(spec, dict):
            raise ValueError(f"a grid file holds the keys {', '.join(KEYS)}, got {type(spec).__name__}")
        for key in spec:
            if key not in KEYS:
                raise ValueError(f"unknown key {key!r}{runner.closest(str(key), list(KEYS))} (keys: {', '.join(KEYS)})")
        if not isinstance(spec.get("notebook"), str):
            raise ValueError(f"notebook must be the stem of an experiment or a path that ends in .ipynb, got {spec.get('notebook')!r}")
    return spec


def _typed(value: Any, default: Any) -> Any:
    "The value as `bft run` reads it: YAML takes 1e-3 for text; `ValueError` as `runner.parse_value`."
    return runner.parse_value(value) if isinstance(value, str) and not isinstance(default, str) else value


def _checked(given: Mapping[str, Any], allowed: Mapping[str, Any]) -> dict[str, Any]:
    "Parameters of the notebook, with its types; `ValueError` or `TypeError` naming the one that is not."
    made = {str(name): _typed(value, allowed.get(name)) for name, value in given.items()}
    runner.check_parameters(made, allowed)
    return made


def _mappings(spec: Mapping[str, Any], key: str, alone: bool = False) -> list[dict[str, Any]]:
    "The mappings of a section; `TypeError` unless it is a list of them (or, where `alone`, a single one)."
    value = spec.get(key)
    found = [value] if alone and isinstance(value, dict) else [] if value is None else value
    if not isinstance(found, list) or not all(isinstance(m, dict) for m in found):
        raise TypeError(f"{key} must be a {'mapping, or a ' if alone else ''}list of mappings from parameter to {'values' if alone else 'value'}, got {value!r}")
    return [{str(name): value for name, value in m.items()} for m in found]  # a key may be a number in YAML


def _product(lists: Mapping[str, Any], fixed: Mapping[str, Any], allowed: Mapping[str, Any]) -> list[dict[str, Any]]:
    "All cells of one grid, the last parameter fastest."
    runner.check_names(lists, allowed)
    for name, values in lists.items():
        if not isinstance(values, list):
            raise TypeError(f"{name!r} must be a list of values, got {values!r}; one value for all cells belongs under parameters")
        if not values:
            raise ValueError(f"{name!r} has no values, so there is no cell")
        if name in fixed:
            raise ValueError(f"{name!r} stands under parameters as well")
    if not lists:
        raise ValueError("names no parameter")
    return [_checked(dict(zip(lists, values)), allowed) for values in itertools.product(*lists.values())]


def _same(a: Any, b: Any) -> bool:
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _without(found: list[dict[str, Any]], rule: Mapping[str, Any]) -> list[dict[str, Any]]:
    "The cells that differ from the rule somewhere; `ValueError` if that is all of them."
    kept = [c for c in found if not all(name in c and _same(c[name], value) for name, value in rule.items())]
    if not rule or len(kept) == len(found):
        raise ValueError(f"no cell has {dict(rule)!r}")
    return kept


def cells(spec: Mapping[str, Any], allowed: Mapping[str, Any]) -> list[dict[str, Any]]:
    "The parameters of every cell, each once, in the order of the file; `ValueError` or `TypeError` naming section and parameter."
    shared = spec.get("parameters") or {}
    with _naming("parameters"):
        if not isinstance(shared, dict):
            raise TypeError(f"must be a mapping from parameter to value, got {shared!r}")
        fixed = _checked(shared, allowed)
    found: list[dict[str, Any]] = []
    with _naming("grid"):
        for lists in _mappings(spec, "grid", alone=True):
            found += [fixed | cell for cell in _product(lists, fixed, allowed)]
    with _naming("exclude"):
        for rule in _mappings(spec, "exclude"):
            found = _without(found, _checked(rule, allowed))
    with _naming("include"):
        found += [fixed | _checked(more, allowed) for more in _mappings(spec, "include")]
    if not found:
        raise ValueError("the grid is empty: give lists under grid, or cells under include")
    return list({json.dumps(c, sort_keys=True): c for c in found}.values())


def plans(grid: str | Path, out: str | Path | None = None) -> list[Plan]:
    "One plan per cell of a grid file; raises as `read_grid` and `cells`, naming the file."
    path = Path(grid).expanduser()
    spec = read_grid(path)
    name = spec["notebook"]
    with _naming(path):
        source = runner.find_notebook(path.parent / name if name.endswith(".ipynb") else name)
        return [runner.plan(source, cell, out) for cell in cells(spec, runner.allowed_parameters(source))]


# ---- where cells run -------------------------------------------------------------------------------------------


def attempt(plan: Plan, retry: bool, stop: Event | None = None) -> Outcome:
    "Execute one cell; whatever goes wrong is told in the outcome."
    start = time.perf_counter()
    try:
        done = runner.execute(plan, retry=retry, progress=False, wait=False, stop=stop)
        return Outcome(done.status, done.seconds)
    except Exception as e:  # a full disk as well: the other cells go on
        status = "stopped" if stop is not None and stop.is_set() else "failed"
        return Outcome(status, time.perf_counter() - start, f"{e}" if isinstance(e, runner.RunFailed) else f"{type(e).__name__}: {e}")


@runtime_checkable
class Executor(Protocol):
    "Where cells run."

    def submit(self, plan: Plan, retry: bool) -> Future:
        "Start `attempt`, now or when there is room."

    def close(self) -> None:
        "Drop what has not begun, end what runs and wait until it has ended."


def check_workers(workers: int) -> None:
    "`ValueError` for a number of runs at a time below one."
    if workers < 1:
        raise ValueError(f"the number of runs at a time must be at least 1, got {workers}")


class Local:
    "Threads of this process, each waiting for one child process."

    def __init__(self, workers: int = 1):
        check_workers(workers)
        self.pool, self.stop = ThreadPoolExecutor(workers), Event()

    def submit(self, plan: Plan, retry: bool) -> Future:
        return self.pool.submit(attempt, plan, retry, self.stop)

    def close(self) -> None:
        self.stop.set()
        self.pool.shutdown(cancel_futures=True)


class OnRay:
    "Tasks of a Ray cluster; each sees the GPUs it was given, and its notebook's kernel inherits them."

    def __init__(self, address: str = "auto", gpus: float = 0, cpus: float = 1):
        try:
            import ray
        except ImportError:
            raise ValueError("a sweep on a cluster needs Ray: pip install 'bft_nb[cluster]'") from None
        self.ray = ray
        self.refs: list[Any] = []
        self._init(address)
        self._check(gpus, cpus)
        self.task = ray.remote(num_gpus=gpus, num_cpus=cpus, max_retries=0)(attempt)

    def _init(self, address: str) -> None:
        "Join a cluster, or start one of this machine alone."
        where: dict[str, Any] = {"include_dashboard": False} if address == "local" else {"address": address}
        library = {"env_vars": {"PYTHONPATH": runner.environment()["PYTHONPATH"]}}
        try:
            self.ray.init(**where, log_to_driver=False, logging_level="ERROR", runtime_env=library)
        except Exception as e:  # Ray raises a bare one where it could not start
            why = f"{e}".partition("\n")[0]
            if address == "local":
                raise runner.RunFailed(f"Ray did not start on this machine: {why}") from None
            raise ValueError(f"no Ray cluster at {address!r} ({why}): `ray start --head` starts one, --ray local one for this sweep") from None

    def _check(self, gpus: float, cpus: float) -> None:
        "Ray would wait without end for a machine that does not exist."
        has = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if not any(r.get("GPU", 0) >= gpus and r.get("CPU", 0) >= cpus for r in has):
            self.ray.shutdown()
            raise ValueError(f"no machine of the cluster has {gpus:g} GPU and {cpus:g} CPU")

    def submit(self, plan: Plan, retry: bool) -> Future:
        self.refs.append(self.task.remote(plan, retry))
        return self.refs[-1].future()

    def close(self) -> None:
        _, running = self.ray.wait(self.refs, num_returns=len(self.refs), timeout=0) if self.refs else ([], [])
        for ref in running:
            self.ray.cancel(ref)  # as Ctrl-C in the task, which ends its child
        if running:
            self.ray.wait(running, num_returns=len(running), timeout=30)
        self.ray.shutdown()


# ---- the sweep -------------------------------------------------------------------------------------------------


def _outcome(future: Future) -> Outcome:
    "What a task returned; a task that Ray lost has failed."
    error = future.exception()
    return Outcome("failed", 0.0, f"{type(error).__name__}: {error}".splitlines()[0]) if error else future.result()


def work(todo: Sequence[Plan], executor: Executor, retry: bool) -> Iterator[tuple[Plan, Outcome]]:
    "Run all cells, giving each when it has ended; one that another sweep is at is asked for again after the others."
    waiting = {executor.submit(plan, retry): plan for plan in todo}
    later: list[tuple[float, Plan]] = []
    while waiting or later:
        for future in wait(waiting, timeout=1, return_when=FIRST_COMPLETED).done:
            plan, outcome = waiting.pop(future), _outcome(future)
            if outcome.status == "busy":
                later.append((time.monotonic() + PAUSE, plan))
            else:
                yield plan, outcome
        due = [plan for when, plan in later if when <= time.monotonic()]
        later = [entry for entry in later if entry[1] not in due]
        waiting |= {executor.submit(plan, False): plan for plan in due}  # if it has failed there, it has failed
        if not waiting:
            time.sleep(0.2)


def earlier(plan: Plan, retry: bool) -> Outcome | None:
    "What is known of a cell before the sweep; None if it is to be run."
    state = plan.state()
    if state == "failed" and not retry:
        return Outcome("failed", 0.0, f"{runner.cell_error(plan.beside('.failed'))} (in an earlier sweep; --retry-failed runs it again)")
    return Outcome("kept") if state == "done" else None


def _line(n: int, total: int, plan: Plan, outcome: Outcome) -> str:
    status = "FAILED" if outcome.status == "failed" else outcome.status
    return f"[{n}/{total}] {status:6} {outcome.seconds:7.0f} s  {plan.output.stem}" + (f"\n        {outcome.error}" if outcome.error else "")


def _shown(ended: Iterator[tuple[Plan, Outcome]], before: int, total: int) -> list[tuple[Plan, Outcome]]:
    "All of them, each told when it comes; the bar estimates the time to go from the cells of this sweep alone."
    from tqdm import tqdm

    found = []
    with tqdm(total=total, initial=before, unit="cell", smoothing=0, disable=None) as bar:
        for plan, outcome in ended:
            found.append((plan, outcome))
            bar.update()
            tqdm.write(_line(before + len(found), total, plan, outcome))
    return found


def check_limit(limit: int | None) -> None:
    "`ValueError` for a number of cells below one."
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")


def sweep(
    planned: Sequence[Plan],
    start: Callable[[], Executor],  # called if there is something to run; the executor is closed at the end, whatever happens
    *,
    retry_failed: bool = False,  # run cells again that failed in an earlier sweep
    limit: int | None = None,  # at most so many of the cells that are to be run
) -> list[tuple[Plan, Outcome]]:  # of every cell but those beyond the limit
    """Run what is not done, with a progress bar (on a terminal) and a line for each cell that ends.

    A cell that fails does not keep the others from running. `ValueError` for a limit below one and for an executor that cannot be.
    """
    check_limit(limit)
    known = [(plan, earlier(plan, retry_failed)) for plan in planned]
    found = [(plan, outcome) for plan, outcome in known if outcome]
    todo = [plan for plan, outcome in known if not outcome][:limit]
    if todo:
        with contextlib.closing(start()) as executor:
            found += _shown(work(todo, executor, retry_failed), len(found), len(found) + len(todo))
    return found


def states(planned: Sequence[Plan]) -> list[str]:
    "What `--dry-run` says of each cell: done, failed, running (in a process of this machine or folder) or to do."
    return ["running" if runner.is_running(plan) else plan.state() for plan in planned]


def summary(found: Sequence[tuple[Plan, Outcome]], total: int) -> str:
    "Counts, then every failed cell with its error."
    count = Counter(outcome.status for _, outcome in found)
    count["left"] = total - len(found)
    head = f"{total} cells: " + ", ".join(f"{n} {status}" for status, n in count.items() if n)
    bad = [f"FAILED  {plan.output.stem}\n        {outcome.error}" for plan, outcome in found if outcome.status == "failed"]
    return "\n".join([head, *bad])
