"""Tables and comparisons from stored rows and ranks alone: what a reader of the book sees, a clone can compute again."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bft_nb.ranking import Estimate, ndcg, paired_bootstrap, wilson_interval
from bft_nb.results import load_ranks, load_strata, ranks_path, read_rows
from bft_nb.runner import checkout

STRATA = ("rarest quarter", "2nd", "3rd", "most popular quarter")  # of items by train count; as written under figures


def results_folder() -> Path:
    "`data/results` of the checkout; `FileNotFoundError` outside of one."
    root = checkout()
    if root is None:
        raise FileNotFoundError("stored rows lie in data/results of a checkout of this repository, and the working directory is in none")
    return root / "data" / "results"


def load_rows(
    experiment: str,  # stem of a file in the folder
    folder: Path | None = None,  # default: `results_folder()`
) -> pd.DataFrame:  # one line per row, parameters spread into columns of their own names
    "Stored rows of an experiment; `FileNotFoundError` if there are none."
    path = (folder or results_folder()) / f"{experiment}.csv"
    if not path.exists():
        raise FileNotFoundError(f"no rows of {experiment!r} in {path.parent}")
    rows = pd.DataFrame(read_rows(path))
    params = pd.json_normalize([json.loads(p) for p in rows["params"]]) if len(rows) else pd.DataFrame()
    return pd.concat([rows, params.drop(columns=[c for c in params if c in rows])], axis=1)


def over_seeds(
    rows: pd.DataFrame,  # from `load_rows`, already chosen
    by: Sequence[str],  # columns that tell cells apart
) -> pd.DataFrame:  # index `by` + metric; columns mean, sd, seeds, n
    "Mean and standard deviation over seeds."
    grouped = rows.groupby([*by, "metric"], sort=False, dropna=False)
    return grouped.agg(mean=("value", "mean"), sd=("value", "std"), seeds=("seed", "nunique"), n=("n", "first"))


def runs_of(rows: pd.DataFrame) -> list[dict[str, Any]]:
    "The runs of a cell, as `results.ranks_path` wants them, ordered by seed; `ValueError` if a seed has several."
    names = ["exp", "dataset", "model", "params", "seed"]
    found = rows[names].drop_duplicates().sort_values("seed")
    if len(found) > found["seed"].nunique():
        raise ValueError(f"a cell must hold one run for each seed, got {len(found)} runs of {found['seed'].nunique()} seeds: choose their parameters")
    return found.to_dict("records")


def seed_ranks(
    rows: pd.DataFrame,  # of one cell: same data, model and parameters, all seeds
    split: str = "test",
    folder: Path | None = None,
    groups: Callable[[Path], np.ndarray] = load_strata,  # what to tell the users of a file apart by
) -> tuple[np.ndarray, np.ndarray]:  # ranks (seeds, users), groups (users,)
    "Stored ranks of every seed of a cell."
    paths = [ranks_path((folder or results_folder()) / "ranks", run, split) for run in runs_of(rows)]
    if not paths:
        raise ValueError("no stored run matches: no rows, or no seed that both cells have")
    ranks = [load_ranks(p) for p in paths]
    if len({len(r) for r in ranks}) > 1:
        raise ValueError(f"the seeds were evaluated on different users: {[len(r) for r in ranks]} of them")
    return np.stack(ranks), groups(paths[0])


def compare(
    candidate: pd.DataFrame,  # rows of one cell
    baseline: pd.DataFrame,  # rows of another, same data
    metric: Callable[[Tensor], Tensor] = ndcg,  # value per user from ranks
    split: str = "test",
    folder: Path | None = None,
    groups: Callable[[Path], np.ndarray] | None = load_strata,  # what to tell the users of a file apart by; None: all alone, in a third of the time
    relative: bool = False,  # in percent of the baseline's mean of the group
    candidate_split: str | None = None,  # where the candidate's ranks are stored, if not under `split`
) -> dict[str, Estimate]:  # keys "all", and per group: "0" (rarest) … "3"
    "Candidate minus baseline, averaged over the seeds that both have, with a bootstrap interval over users (the same in both); `ValueError` if they share no seed."
    a, b, strata = _paired(candidate, baseline, split, folder, groups or load_strata, candidate_split)
    return paired_bootstrap(a, b, metric, None if groups is None else strata, relative=relative)


def contrast(
    candidate: pd.DataFrame,  # rows of one cell
    baseline: pd.DataFrame,  # rows of another, same data
    group: str,  # as a key of `compare`
    metric: Callable[[Tensor], Tensor] = ndcg,  # value per user from ranks
    split: str = "test",
    folder: Path | None = None,
    groups: Callable[[Path], np.ndarray] = load_strata,  # what to tell the users of a file apart by
) -> Estimate:  # in percentage points; NaN where some resample has no hit to compare with
    "Relative gain of the candidate in one group of users minus that of all others, with a 95 % bootstrap interval, each part resampled by itself; `ValueError` if either part is empty."
    a, b, strata = _paired(candidate, baseline, split, folder, groups)
    inside = strata.astype(str) == group
    if inside.all() or not inside.any():
        raise ValueError(f"a contrast needs users in the group and users outside it, got group {group!r} of {', '.join(map(str, np.unique(strata)))}")
    values = torch.stack([metric(x).mean(0) for x in (a, b)], 1).numpy()
    rng = np.random.default_rng(0)
    ours, others = (_gain(_resampled(values[part], rng)) for part in (inside, ~inside))
    return _difference(ours, others, len(strata))


def growth(
    pair: tuple[pd.DataFrame, pd.DataFrame],  # rows of a candidate and of its baseline
    other: tuple[pd.DataFrame, pd.DataFrame],  # the same under another condition, same users
    metric: Callable[[Tensor], Tensor] = ndcg,  # value per user from ranks
    split: str = "test",
    folder: Path | None = None,
) -> Estimate:  # in percentage points
    "Relative gain under one condition minus that under another, with a 95 % bootstrap interval over users; `ValueError` unless both are of as many users."
    ranks = [x for cells in (pair, other) for x in _paired(*cells, split, folder, load_strata)[:2]]
    if len({x.shape[-1] for x in ranks}) > 1:
        raise ValueError(f"the two conditions must have the same users, got {ranks[0].shape[-1]} and {ranks[2].shape[-1]} of them")
    drawn = _resampled(torch.stack([metric(x).mean(0) for x in ranks], 1).numpy(), np.random.default_rng(0))
    return _difference(_gain(drawn[:, :2]), _gain(drawn[:, 2:]), ranks[0].shape[-1])


def _resampled(values: np.ndarray, rng: np.random.Generator, n: int = 2000) -> np.ndarray:
    "Column means of the users (rows) as they are and of n resamples; to draw users is to draw how often each distinct row occurs."
    rows, held = np.unique(values.astype(float), axis=0, return_counts=True)
    return np.vstack([held, rng.multinomial(held.sum(), held / held.sum(), n)]) @ rows / held.sum()


def _gain(means: np.ndarray) -> np.ndarray:
    "First column relative to the second, in percent; NaN where that is 0."
    ours, theirs = means.T
    return 100 * np.divide(ours - theirs, theirs, out=np.full_like(theirs, np.nan), where=theirs > 0)


def _difference(first: np.ndarray, second: np.ndarray, n: int) -> Estimate:
    "Of the users as they are, with the middle 95 % of the resamples."
    value, *drawn = first - second
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(float(value), float(low), float(high), n)


def _paired(
    candidate: pd.DataFrame, baseline: pd.DataFrame, split: str, folder: Path | None, groups: Callable[[Path], np.ndarray], candidate_split: str | None = None
) -> tuple[Tensor, Tensor, np.ndarray]:
    "Ranks of two cells (seeds, users) of the seeds that both have, and the users' groups."
    candidate, baseline = (rows[rows["seed"].isin(others["seed"])] for rows, others in ((candidate, baseline), (baseline, candidate)))
    (a, strata), (b, other) = seed_ranks(candidate, candidate_split or split, folder, groups), seed_ranks(baseline, split, folder, groups)
    if not np.array_equal(strata, other):
        raise ValueError("the two cells were evaluated on different users or strata")
    return torch.as_tensor(a), torch.as_tensor(b), strata


def interval(value: float, n: int) -> tuple[float, float]:
    "Distances from a hit rate over n users to the ends of its 95 % Wilson interval."
    low, high = wilson_interval(round(value * n), n)
    return value - low, high - value


def choose(
    rows: pd.DataFrame,
    **values: Any,  # column = value; None matches rows that lack the parameter
) -> pd.DataFrame:
    "Rows whose columns have these values."
    keep = pd.Series(True, index=rows.index)
    for name, value in values.items():
        column = rows[name] if name in rows else pd.Series(None, index=rows.index)
        keep &= column.isna() if value is None else column == value
    return rows[keep]


def signed(d: Estimate, digits: int = 4) -> str:
    "`+0.0012 [−0.0003, +0.0025]`."
    mean, low, high = (f"{x:+.{digits}f}".replace("-", "−") for x in (d.mean, d.low, d.high))
    return f"{mean} [{low}, {high}]"


def configuration(values: Mapping[str, Any]) -> pd.DataFrame:
    "Parameters as a two-column table."
    return pd.DataFrame({"value": [str(v) for v in values.values()]}, index=pd.Index(values, name="parameter"))
