"""What the pages of the recommendation study share: which stored rows make a cell, and what was chosen for them.

A cell is a data set, a backbone and a kind of layer (`ARMS`, or other options of the filtering layer) at the budget of the
study; several seeds of it may be stored. Its dropout and learning rate are those that did best on the validation items of `tuned_on`,
among the settings at which all layers of the backbone were tried: the budget of tuning is the same for each.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bft_nb.core import check_option
from bft_nb.report import choose, load_rows, over_seeds
from bft_nb.results import canonical, load_history

__all__ = ["ARMS", "BACKBONE_OPTIONS", "BUDGET", "DATASETS", "EQUAL", "HISTORIES", "cell", "epochs", "history_strata", "metrics", "rarest_minus_popular", "study_rows", "tuned", "tuned_on", "tuning"]

DATASETS = ("beauty", "sports", "toys", "instruments", "yelp", "ml1m")
ARMS: dict[str, dict[str, Any]] = {  # the kinds of layer: options of the filtering layer, none for the plain one
    "plain": {},
    "null": {"kriging": False, "kalman": False},  # the filtering layer with its filter switched off
    "filter": {},
}
BACKBONE_OPTIONS: dict[str, dict[str, Any]] = {"bert4rec": {"mask_probability": 0.3, "last_probability": 0.5}}  # of every arm
BUDGET = {"d": 64, "negatives": 512, "dtype": "float32"}  # and `epochs`
SETTINGS = {"bft", "max_length", "batch_size", "thin", "split_hash", "dropout", "lr", "precision_lr", "epochs", *BUDGET}  # whatever else a run names is an option of its layers
EQUAL = {"dropout": 0.5, "lr": 6e-3}  # HSTU's layers often choose different rates, within noise: they are looked at with these, too
HISTORIES = (4, 6, 10)  # a user's items: up to 4, up to 6, up to 10, more


def epochs(dataset: str, backbone: str) -> int:
    "Of training: BERT4Rec learns from a part of the positions at a time and gets twice as many; MovieLens, whose histories are twenty times longer, half."
    return (60 if backbone == "bert4rec" else 30) // (2 if dataset == "ml1m" else 1)


def tuned_on(dataset: str, backbone: str) -> str:
    "The set whose validation items chose a cell's dropout and learning rate: its own, but Beauty for SASRec on all sparse sets."
    return "beauty" if backbone == "sasrec" and dataset != "ml1m" else dataset


def _options(params: str) -> str:
    "What a run's parameters say about its layers beyond the settings of the study."
    given = json.loads(params)
    common = SETTINGS if given.get("precision_lr", given["lr"]) == given["lr"] else SETTINGS - {"precision_lr"}
    return canonical({name: value for name, value in given.items() if name not in common})


def study_rows(folder: Path | None = None) -> pd.DataFrame:
    "Stored rows of the study at its budget, with the options of the layers as one column of JSON."
    rows = choose(load_rows("recommendation", folder), **BUDGET)
    rows = rows[[row.epochs == epochs(row.dataset, row.model) for row in rows.itertuples()]]
    return rows.assign(options=[_options(p) for p in rows["params"]])


def _arm(backbone: str, arm: str | Mapping[str, Any], options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    "What distinguishes the rows of an arm; a mapping is options of the filtering layer. `options` come on top of the arm's own."
    if isinstance(arm, str):
        check_option("arm", arm, ARMS)
    own = ARMS[arm] if isinstance(arm, str) else arm
    return {"model": backbone, "bft": arm != "plain", "options": canonical({**BACKBONE_OPTIONS.get(backbone, {}), **own, **(options or {})})}


def tuning(rows: pd.DataFrame, backbone: str, arm: str, dataset: str = "beauty") -> pd.DataFrame:
    "NDCG@10 on the validation items of a data set at seed 0 by dropout (down) and learning rate (across), where all arms were tried that have rows there."
    check_option("arm", arm, ARMS)
    valid = choose(rows, dataset=dataset, seed=0, thin=1.0, split="valid", metric="ndcg@10")
    tried = {name: choose(valid, **_arm(backbone, name)).set_index(["dropout", "lr"])["value"] for name in ARMS}
    common = set.intersection(*([set(of.index) for of in tried.values() if len(of)] or [set()]))
    found = tried[arm][[at in common for at in tried[arm].index]]
    return found.groupby(level=["dropout", "lr"]).mean().unstack("lr")


def _best(tried: pd.DataFrame) -> dict[str, float]:
    "The settings of the largest value of a table from `tuning`."
    dropout, lr = tried.stack().idxmax()
    return {"dropout": float(dropout), "lr": float(lr)}


def tuned(rows: pd.DataFrame, backbone: str, arm: str, dataset: str = "beauty") -> dict[str, float]:
    "The dropout and learning rate that did best on `tuned_on` the data set; `ValueError` if none was tried."
    table = tuning(rows, backbone, arm, tuned_on(dataset, backbone))
    if table.empty:
        raise ValueError(f"no stored row tunes {backbone}, {arm} on {tuned_on(dataset, backbone)}")
    return _best(table)


def cell(
    rows: pd.DataFrame,  # from `study_rows`
    dataset: str,
    backbone: str,
    arm: str | Mapping[str, Any] = "filter",  # "plain", "null", "filter", or options of the filtering layer
    thin: float = 1.0,
    options: Mapping[str, Any] | None = None,  # of the model, on top of the arm's own: {"norm_first": False}, …; an arm is tuned without them
    **settings: float,  # dropout and lr; default: as tuned for this arm (for a mapping: as for the filter)
) -> pd.DataFrame:  # all seeds; empty if there is none
    "The stored rows of a cell; none for an arm that has not been tuned. `ValueError` for one of the settings without the other."
    if settings and set(settings) != {"dropout", "lr"}:
        raise ValueError(f"settings must be dropout and lr, or neither, got {', '.join(settings)}")
    if not settings:
        tried = tuning(rows, backbone, arm if isinstance(arm, str) else "filter", tuned_on(dataset, backbone))
        if tried.empty:
            return rows.iloc[:0]
        settings = _best(tried)
    return choose(rows, dataset=dataset, thin=thin, **settings, **_arm(backbone, arm, options))


def metrics(rows: pd.DataFrame, split: str = "test") -> pd.DataFrame:
    "Mean and spread over seeds of each metric of a cell (index metric; columns mean, sd, seeds, n)."
    return over_seeds(choose(rows, split=split), ["dataset"]).droplevel(0)


def rarest_minus_popular(rows: pd.DataFrame, quantity: str) -> pd.Series:
    "Of a quantity that training left at the positions of each quarter of the items (`tau`, `gain.layer1`, …): that of the rarest minus that of the most popular, by seed."
    rare, popular = (choose(rows, split="train", metric=f"{quantity}.q{q}").set_index("seed")["value"] for q in (0, 3))
    return (rare - popular).sort_index()


def history_strata(path: Path, edges: tuple[int, ...] = HISTORIES) -> np.ndarray:
    "Users of a file of ranks by the number of items in their history, 0 for the shortest."
    return np.searchsorted(edges, load_history(path), side="left")
