"""Result rows in long format, appended atomically, and the ranks behind them.

A row says one number of one run. Rows live in CSV files (`data/results/*.csv`) with exactly the columns of `COLUMNS`;
per-user ranks live beside them (`data/results/ranks/*.npz`), so that two runs can be compared user by user.
"""

import csv
import hashlib
import io
import json
import math
import os
import re
import subprocess
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from bft_nb import __version__
from bft_nb.download import beside, destination, put_in_place, sweep

COLUMNS = ("exp", "dataset", "model", "params", "seed", "split", "metric", "value", "n", "seconds", "device", "commit", "utc")
KEY = ("exp", "dataset", "model", "params", "seed")
TEXT = ("exp", "dataset", "model", "split", "metric", "device", "commit")
RANK_CAP = 255  # ranks are stored in a byte; beyond this place no metric here looks


def canonical(params: Mapping[str, Any] | str, name: str = "params") -> str:
    "Parameters as JSON with sorted keys, so that equal parameters are equal text; `ValueError` with their name unless a JSON object."
    try:
        value = json.loads(params) if isinstance(params, str) else dict(params)
        text = json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be a JSON object, got {params!r}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {params!r}")
    return text


def run_key(row: Mapping[str, Any]) -> str:
    "Hash of exp, dataset, model, params and seed: what a run is, whatever it measured."
    parts = [canonical(row["params"]) if name == "params" else str(row[name]) for name in KEY]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def utc_now() -> str:
    "The time as a row holds it: UTC, to the second."
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def commit() -> str:
    """Which code made a result: the commit of the checkout this library runs from, with "+" after it if library, experiments or benchmarks differ from it.

    An installed library outside of a checkout gives its version, "v0.1.0".
    """
    folder = Path(__file__).resolve().parent
    code = (folder.name, "nbs/experiments", "benchmarks")  # what runs; a chapter does so as the module it exports

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(folder.parent), *arguments], capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", str(Path(__file__).resolve()))  # an environment inside another project's checkout is not ours
        return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", "--", *code) else "")
    except (OSError, subprocess.CalledProcessError):
        return f"v{__version__}"


def _number(name: str, value: Any, kind: type, low: float = -math.inf) -> int | float:
    try:
        number = kind(value)
        exact = kind is float or float(value) == number
    except (TypeError, ValueError, OverflowError):
        exact, number = False, math.nan
    if isinstance(value, bool) or not exact or not math.isfinite(number) or number < low:
        bound = "" if low == -math.inf else f" and at least {low:g}"
        raise ValueError(f"{name} must be a finite {kind.__name__}{bound}, got {value!r}")
    return number


def check_row(row: Mapping[str, Any]) -> dict[str, Any]:
    "The row with its types made right; `ValueError` naming the column that is missing, unknown or wrong."
    if set(row) != set(COLUMNS):
        missing, unknown = sorted(set(COLUMNS) - set(row)), sorted(set(row) - set(COLUMNS))
        raise ValueError(f"a row must have exactly the columns {', '.join(COLUMNS)}; missing: {missing}, unknown: {unknown}")
    for name in TEXT:
        if not isinstance(row[name], str) or not row[name].strip():
            raise ValueError(f"{name} must be text, got {row[name]!r}")
    try:
        datetime.strptime(str(row["utc"]), "%Y-%m-%dT%H:%M:%SZ")
    except ValueError as error:
        raise ValueError(f"utc must look like 2026-11-30T12:00:00Z, got {row['utc']!r}") from error
    numbers = {
        "seed": _number("seed", row["seed"], int),
        "value": _number("value", row["value"], float),
        "n": _number("n", row["n"], int, 0),
        "seconds": _number("seconds", row["seconds"], float, 0),
    }
    made = {**row, **numbers, "params": canonical(row["params"])}
    return {name: made[name] for name in COLUMNS}


def run_rows(
    run: Mapping[str, Any],  # exp, dataset, model, params, seed
    found: Mapping[str, Mapping[str, tuple[float, int]]],  # split -> metric -> (value, what it is a mean of)
    **common: Any,  # seconds, device
) -> list[dict[str, Any]]:
    "All rows of one run, with one time and the commit of this checkout."
    common = {**run, "commit": commit(), "utc": utc_now(), **common}
    return [row for split, values in found.items() for name, (value, n) in values.items() for row in make_rows({name: value}, split=split, n=n, **common)]


def make_rows(metrics: Mapping[str, float], **common: Any) -> list[dict[str, Any]]:
    "One row per metric; `common` holds the other columns (utc: now, unless given)."
    common = {"utc": utc_now(), **common}
    return [check_row({**common, "metric": name, "value": float(value)}) for name, value in metrics.items()]


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    "As `download.written`, for `path` with a suffix that the temporary file has as well."
    path = destination(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, f".{path.name}.?*{path.suffix}")
    temporary = beside(path, path.suffix)
    try:
        yield temporary
        put_in_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def append_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> int:
    "Append checked rows to a CSV file, all or none, whoever else is appending; returns how many. Warns of rows whose code is in no commit."
    path, new = Path(path), [check_row(row) for row in rows]
    if not new:
        return 0
    for made_by in sorted({row["commit"] for row in new if row["commit"].endswith("+")}):
        warnings.warn(f"{path.name}: rows of code that differs from its commit ({made_by}) cannot be made again: commit first, and do not publish them", stacklevel=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        old = read_rows(path) if path.exists() else []
        with _replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(old + new)
    return len(new)


def read_rows(paths: str | Path | Iterable[str | Path]) -> list[dict[str, Any]]:
    "All rows of one or several CSV files, checked; `ValueError` naming file and line for a bad one."
    paths = [paths] if isinstance(paths, str | Path) else list(paths)
    rows = []
    for path in map(Path, paths):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text in UTF-8: {error}") from error
        with io.StringIO(text, newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise ValueError(f"{path}: columns must be {', '.join(COLUMNS)}, got {reader.fieldnames}")
            for row in reader:
                try:
                    rows.append(check_row(row))
                except ValueError as error:
                    raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
    return rows


def has_rows(path: str | Path, run: Mapping[str, Any]) -> bool:
    "Does the file hold rows of this run (exp, dataset, model, params, seed)?"
    key = run_key(run)
    return Path(path).exists() and any(run_key(row) == key for row in read_rows(path))


class Stored(Exception):
    "The rows of a run are there already: nothing is to be done. `bft run` and `bft sweep` take it for an answer, not for a failure."


def check_new(path: str | Path, run: Mapping[str, Any]) -> None:
    "`Stored` if the file holds rows of this run (exp, dataset, model, params, seed)."
    if has_rows(path, run):
        raise Stored(f"{path} holds the rows of this run: remove them to make them again, or run it with store=false")


def check_part(name: str, value: str) -> None:
    "Raise `ValueError` for what can be no part of a file name."
    if not re.fullmatch(r"[\w.+=-]+", value):
        raise ValueError(f"{name} is part of a file name and must consist of letters, digits and . + = - _, got {value!r}")


def model_name(model: str) -> str:
    "What rows call a language model: its name, or the last part of a path or an id. `ValueError` if that can be no part of a file name."
    name = Path(os.path.abspath(Path(model).expanduser())).name
    check_part("the last part of model", name)
    return name


def ranks_path(folder: str | Path, run: Mapping[str, Any], split: str = "test") -> Path:
    "Where the ranks of a run are stored; `ValueError` for a name that is no part of a file name."
    for name in ("exp", "dataset", "model"):
        check_part(name, run[name])
    return Path(folder) / f"{run['exp']}-{run['dataset']}-{run['model']}-{run_key(run)}-{split}.npz"


def _beside(name: str, given: Any, ranks: np.ndarray, top: float = 255) -> np.ndarray:
    "What is stored beside ranks, as an array; `ValueError` unless one integer from 0 to `top` per rank."
    values = np.asarray(given)
    if values.shape != ranks.shape or not np.issubdtype(values.dtype, np.integer) or (values < 0).any() or (values > top).any():
        bound = "of at least 0" if top == math.inf else f"from 0 to {top}"
        raise ValueError(f"{name} must be integers {bound}, one per rank ({len(ranks)}), got {values.dtype} of shape {values.shape}")
    return values


def save_ranks(
    path: str | Path,
    ranks: Any,  # per user, cut at 255 here
    strata: Any = None,  # popularity stratum of each user's target, 0 is the rarest; None: not stored
    history: Any = None,  # items in each user's history, cut at 255 here; None: not stored
    repeated: Any = None,  # bool: is each user's target in the history? None: not stored
) -> Path:
    "Store ranks (with strata, lengths of histories and repeats) as compressed bytes; `ValueError` unless ranks are positive integers in one row and the others fit them."
    values = np.asarray(ranks)
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer) or (values < 1).any():
        raise ValueError(f"ranks must be positive integers in one row, got {values.dtype} of shape {values.shape}")
    arrays = {"ranks": np.minimum(values, RANK_CAP).astype(np.uint8)}
    if strata is not None:
        arrays["strata"] = _beside("strata", strata, values).astype(np.uint8)
    if history is not None:
        arrays["history"] = np.minimum(_beside("history", history, values, math.inf), RANK_CAP).astype(np.uint8)
    if repeated is not None:
        again = arrays["repeated"] = np.asarray(repeated)
        if again.shape != values.shape or again.dtype != bool:
            raise ValueError(f"repeated must be True or False, one per rank ({len(values)}), got {again.dtype} of shape {again.shape}")
    with _replacing(Path(path)) as temporary:
        np.savez_compressed(temporary, **arrays)
    return Path(path)


def _arrays(path: str | Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {key: stored[key] for key in stored}
    except (ValueError, EOFError, TypeError, zlib.error, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged: it must be what this library writes") from error


def _array(path: str | Path, name: str) -> np.ndarray:
    arrays = _arrays(path)
    if name not in arrays:
        raise ValueError(f"{path} holds no {name}, only {', '.join(arrays)}")
    return arrays[name]


def _stored(path: str | Path, name: str) -> np.ndarray:
    return _array(path, name).astype(np.int64)


def load_ranks(path: str | Path) -> np.ndarray:
    "Ranks per user as int64; 255 means 255 or worse."
    return _stored(path, "ranks")


def load_strata(path: str | Path) -> np.ndarray:
    "Popularity stratum of each user's target as int64; `ValueError` if the file holds none."
    return _stored(path, "strata")


def load_history(path: str | Path) -> np.ndarray:
    "Items in each user's history as int64, 255 means 255 or more; `ValueError` if the file holds none."
    return _stored(path, "history")


def load_repeated(path: str | Path) -> np.ndarray:
    'Which targets were in their user\'s history: "repeated" or "new" for each, the `groups` of `report.compare`; `ValueError` if the file does not say.'
    return np.where(_array(path, "repeated"), "repeated", "new")


def save_answers(
    path: str | Path,
    ids: Iterable[str],  # of the questions
    texts: Iterable[str],  # what was answered
    exact: Any,  # per question, 0 or 1
    f1: Any,  # per question, 0 … 1
) -> Path:
    "Store answers and their scores, compressed; `ValueError` unless there is one of each per question and scores lie in 0 … 1."
    arrays = {"ids": np.array(list(ids), dtype=str), "texts": np.array(list(texts), dtype=str), "exact": np.asarray(exact), "f1": np.asarray(f1, np.float32)}
    if len({a.shape for a in arrays.values()}) > 1 or arrays["f1"].ndim != 1:
        raise ValueError(f"one id, text and score per question: got {', '.join(f'{name} {a.shape}' for name, a in arrays.items())}")
    for name in ("exact", "f1"):
        if not ((arrays[name] >= 0) & (arrays[name] <= 1)).all():
            raise ValueError(f"{name} must lie in 0 … 1, got {arrays[name].min()} … {arrays[name].max()}")
    with _replacing(Path(path)) as temporary:
        np.savez_compressed(temporary, **arrays | {"exact": arrays["exact"].astype(np.uint8)})
    return Path(path)


def load_answers(path: str | Path) -> dict[str, np.ndarray]:
    "Ids, texts, exact and f1 as `save_answers` stored them; `ValueError` for a damaged file."
    return {name: _array(path, name) for name in ("ids", "texts", "exact", "f1")}


def save_arrays(path: str | Path, arrays: Mapping[str, Any]) -> Path:
    "Store arrays of numbers by name, compressed; `ValueError` for none, or one that is not of numbers."
    made: dict[str, Any] = {name: np.asarray(values) for name, values in arrays.items()}
    if bad := [name for name, values in made.items() if not np.issubdtype(values.dtype, np.number)] or ["nothing"] * (not made):
        raise ValueError(f"arrays must hold numbers, got {', '.join(bad)}")
    with _replacing(Path(path)) as temporary:
        np.savez_compressed(temporary, **made)
    return Path(path)


def load_arrays(path: str | Path) -> dict[str, np.ndarray]:
    "What `save_arrays` stored; `ValueError` for a damaged file."
    return _arrays(path)
