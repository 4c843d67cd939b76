"""What the pages of the language studies share: which stored rows make a cell, and differences taken answer by answer.

A cell is a method under one condition at the budget of its study; several seeds of it may be stored. Its rates (the learning rate, and that
of what the method adds to the layers where it is another) are those that did best on the validation questions. Every function takes what is
stored so far, which may be nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bft_nb.core import check_option
from bft_nb.finetune import LEARNT, METHODS
from bft_nb.qa import QA_SETS, load_questions, nq_retrieved, own_file
from bft_nb.ranking import Estimate, bootstrap_mean, bootstrap_ratio
from bft_nb.report import choose, load_rows, results_folder, runs_of, signed
from bft_nb.results import COLUMNS, load_answers, ranks_path

__all__ = [
    "BUDGETS", "RAG", "ROLES", "SQUAD", "TRIALS", "advantage", "answers", "at_equal_rates", "both", "cell", "changed", "choices", "leads", "learnt", "level", "mean", "outcomes", "per_question",
    "relative", "seeds", "shown", "stray", "study_rows", "tuned", "tuning", "wordings",
]  # fmt: skip

ROLES = {"sft": "baseline", "focal": "noise", "gce": "other", "bft": "posterior", "bft_strong": "truth", "headwise": "truth", "elementwise": "prior", "sink": "observation"}  # of `bft_nb.figures.COLOUR`


SQUAD = dict(
    model="smollm2", dataset="squad_v1.1_train_part", corruption="uniform", adapter="lora", max_length=128, answer_length=16, steps=250, batch_size=4, n_eval=500, dtype="bfloat16",
)  # fmt: skip
RAG = dict(  # None: gold passage first, whole filter, which are no part of a run's name
    model="smollm2", dataset="nq_open_bm25_distractors", k_train=2, words=12, gold=None, without=None, adapter="lora", max_length=224, answer_length=16, steps=150, batch_size=4, dtype="bfloat16",
)  # fmt: skip
BUDGETS: dict[str, dict[str, Any]] = {"squad_noise": SQUAD, "rag_distractors": RAG}  # of the studies in the book
TRIALS: dict[str, dict[str, Any]] = {"squad_noise": dict(noise=0.3), "rag_distractors": dict(split="valid-k5.middle", n_eval=0)}  # what chooses the rates of a study: conditions for `tuned`


def _rates(rows: pd.DataFrame) -> pd.Series:
    "The rates of each row as text: `0.001`, or `0.001, own 0.01` where what a method adds to the layers has a rate of its own."
    own = rows["precision_lr"] if "precision_lr" in rows else pd.Series(np.nan, index=rows.index)
    return pd.Series([f"{lr:g}" if np.isnan(more) or more == lr else f"{lr:g}, own {more:g}" for lr, more in zip(rows["lr"], own)], index=rows.index, dtype=object)


def study_rows(experiment: str, folder: Path | None = None, **budget: Any) -> pd.DataFrame:
    "Stored rows of a study at its budget (`BUDGETS`, some of it exchanged), with a column `rates`; without any, an empty table. `ValueError` for an experiment that is none of these studies."
    check_option("experiment", experiment, BUDGETS)
    try:
        rows = load_rows(experiment, folder)
    except FileNotFoundError:
        return pd.DataFrame(columns=[*COLUMNS, "lr", "rates"])
    return choose(rows.assign(rates=_rates(rows)), **BUDGETS[experiment] | budget)


def tuning(rows: pd.DataFrame, split: str = "valid", **condition: Any) -> pd.DataFrame:
    "F1 on the validation questions at seed 0 by method (down) and rates (across)."
    tried = choose(rows, seed=0, split=split, metric="f1", **condition)
    if tried.empty:
        return pd.DataFrame()
    table = tried.pivot_table(index="method", columns="rates", values="value")
    return table.reindex(index=[m for m in METHODS if m in table.index], columns=tried.sort_values(["lr", "rates"])["rates"].unique())


def tuned(rows: pd.DataFrame, method: str, **condition: Any) -> str | None:
    "The rates that did best there; None if none were tried. Arguments as for `tuning`."
    table = tuning(rows, **condition)
    return str(table.loc[method].idxmax()) if method in table.index else None


def choices(rows: pd.DataFrame, **condition: Any) -> pd.DataFrame:
    "`tuning` in points of 100, the rates that did best, and whether their learning rate is the smallest or largest that the method was tried with."
    table = tuning(rows, **condition)
    best = {m: tuned(rows, m, **condition) for m in table.index}
    lr = dict(zip(rows["rates"], rows["lr"]))
    tried = {m: [lr[name] for name in table.columns[table.loc[m].notna()]] for m in best}
    edge = {m: "smallest tried" if lr[name] == min(tried[m]) else "largest tried" if lr[name] == max(tried[m]) else "" for m, name in best.items()}
    return (100 * table).round(1).assign(**{"chosen": pd.Series(best, dtype=object), "at the edge": pd.Series(edge, dtype=object)})


def stray(rows: pd.DataFrame, chosen: Mapping[str, str | None], **tried: Any) -> pd.DataFrame:
    "Stored runs at other rates than those chosen for their method, which no cell holds; those that served to choose (seed 0, and what is `tried`) are not among them."
    other = rows[rows["rates"] != rows["method"].map(chosen)] if len(rows) else rows
    other = other.drop(choose(other, seed=0, **tried).index)
    return other.reindex(columns=["method", "rates", "seed", *tried]).drop_duplicates().reset_index(drop=True)


def cell(rows: pd.DataFrame, method: str, rates: str | None, **condition: Any) -> pd.DataFrame:
    "All seeds of a method at the rates of `tuned` under a condition; empty if nothing is stored, or the rates are None."
    return rows.iloc[:0] if rates is None else choose(rows, method=method, rates=rates, **condition)


def learnt(rows: pd.DataFrame) -> dict[str, float]:
    "What `bft_nb.finetune.learnt` measured after training, averaged over the seeds of a cell; nothing where the method is no filter."
    found = choose(rows, split="train").groupby("metric")["value"].mean()
    return {name: float(found[name]) for name in LEARNT if name in found}


def answers(rows: pd.DataFrame, split: str = "test", folder: Path | None = None) -> dict[int, dict[str, np.ndarray]]:
    "Stored answers of a cell by seed: ids, texts, exact, f1 (0 … 1); `ValueError` if a seed has more than one run."
    return {run["seed"]: load_answers(ranks_path((folder or results_folder()) / "answers", run, split)) for run in runs_of(rows)} if len(rows) else {}


def per_question(found: dict[int, dict[str, np.ndarray]], metric: str = "f1") -> np.ndarray:
    "A score of each question in points of 100, averaged over seeds; none without a seed."
    if any(not np.array_equal(a["ids"], next(iter(found.values()))["ids"]) for a in found.values()):
        raise ValueError("the runs were asked different questions")
    return 100 * np.mean([a[metric] for a in found.values()], axis=0) if found else np.zeros(0)


def level(rows: pd.DataFrame, split: str = "test", metric: str = "f1", folder: Path | None = None) -> Estimate | None:
    "Mean score of a cell with its bootstrap interval over questions; None for an empty cell."
    values = per_question(answers(rows, split, folder), metric)
    return bootstrap_mean(values) if len(values) else None


def both(candidate: pd.DataFrame, baseline: pd.DataFrame, split: str = "test", folder: Path | None = None) -> tuple[dict, dict]:
    "Answers of two cells for the seeds that both have; `ValueError` unless they were asked the same."
    a, b = (answers(rows, split, folder) for rows in (candidate, baseline))
    a, b = {s: a[s] for s in a if s in b}, {s: b[s] for s in a if s in b}
    per_question(dict(enumerate([*a.values(), *b.values()])))
    return a, b


def advantage(candidate: pd.DataFrame, baseline: pd.DataFrame, split: str = "test", metric: str = "f1", folder: Path | None = None) -> np.ndarray:
    "Candidate minus baseline for each question in points of 100, averaged over the seeds that both have; empty if they share no seed."
    a, b = both(candidate, baseline, split, folder)
    return per_question(a, metric) - per_question(b, metric)


def relative(candidate: pd.DataFrame, baseline: pd.DataFrame, split: str = "test", metric: str = "f1", folder: Path | None = None) -> Estimate | None:
    "Candidate minus baseline in percent of the baseline's mean, over the seeds that both have, with its bootstrap interval over questions; None if they share no seed."
    a, b = (per_question(found, metric) for found in both(candidate, baseline, split, folder))
    return bootstrap_ratio(100 * (a - b), b) if len(a) else None


def at_equal_rates(rows: pd.DataFrame, candidate: str, baseline: str = "sft", split: str = "test", folder: Path | None = None, **condition: Any) -> pd.DataFrame:
    "What is stored of two methods at the same learning rate, by the candidate's rates: score of each with its interval, and the difference paired by question, over the seeds that both have."
    found = {}
    for lr, rates in choose(rows, method=candidate, **condition)[["lr", "rates"]].drop_duplicates().sort_values(["lr", "rates"]).itertuples(index=False):
        ours, others = cell(rows, candidate, rates, **condition), cell(rows, baseline, f"{lr:g}", **condition)
        shared = sorted(set(ours["seed"]) & set(others["seed"]))
        if shared:
            ours, others = (one[one["seed"].isin(shared)] for one in (ours, others))
            scores = {METHODS[m].title: shown(one, split, folder=folder) for m, one in ((baseline, others), (candidate, ours))}
            found[rates] = scores | {"Δ": mean(advantage(ours, others, split, folder=folder)), "seeds": ", ".join(map(str, shared))}
    return pd.DataFrame(found).T.rename_axis("rates")


def leads(pairs: Mapping[Any, tuple[pd.DataFrame, pd.DataFrame]], split: str = "test", metric: str = "f1", folder: Path | None = None) -> dict[Any, np.ndarray]:
    "`advantage` of each pair of cells that share a seed."
    found = {name: advantage(*pair, split, metric, folder) for name, pair in pairs.items()}
    return {name: lead for name, lead in found.items() if len(lead)}


def mean(values: np.ndarray) -> str:
    "`+1.2 [−0.3, +2.5]`: a mean over questions with its bootstrap interval; nothing for an empty cell."
    return signed(bootstrap_mean(values), 1) if len(values) else ""


def shown(rows: pd.DataFrame, split: str = "test", metric: str = "f1", folder: Path | None = None) -> str:
    "`42.7 [38.9, 46.4]`: `level` as text; nothing for an empty cell."
    found = level(rows, split, metric, folder)
    return "" if found is None else f"{found.mean:.1f} [{found.low:.1f}, {found.high:.1f}]"


def seeds(rows: pd.DataFrame, split: str = "test", metric: str = "f1", folder: Path | None = None) -> str:
    "`42.1 / 43.3`: the mean of each seed."
    return " / ".join(f"{100 * a[metric].mean():.1f}" for a in answers(rows, split, folder).values())


def outcomes(candidate: pd.DataFrame, baseline: pd.DataFrame, names: Sequence[str], split: str = "test", folder: Path | None = None) -> dict[str, int]:
    "How many answers are right (exact match) in both cells, in one of them, in neither, counted over the seeds that both have."
    a, b = both(candidate, baseline, split, folder)
    x, y = (np.concatenate([found[s]["exact"] for s in found]).astype(bool) if found else np.zeros(0, bool) for found in (a, b))
    return {"both": int((x & y).sum()), f"only {names[0]}": int((x & ~y).sum()), f"only {names[1]}": int((~x & y).sum()), "neither": int((~x & ~y).sum())}


def wordings(experiment: str) -> dict[str, str]:
    "The questions that are asked at the end of a study, by id, where `BFT_DATA` holds them; else nothing."
    check_option("experiment", experiment, BUDGETS)
    if experiment == "squad_noise":
        entry = QA_SETS["squad_v1.1_dev"]
        there = any(own_file(name) for name in (f"{entry.name}.parquet", *([entry.source.filename] if entry.source else [])))
        return {q.id: q.question for q in load_questions(entry.name)} if there else {}
    there = all(own_file(f"nq_open_{part}.parquet") for part in ("bm25_distractors", "distractor_passages"))
    return {r.id: r.question for r in nq_retrieved()} if there else {}


def changed(
    candidate: pd.DataFrame,  # rows of one cell
    baseline: pd.DataFrame,  # rows of another
    names: Sequence[str],  # what the table calls the two
    n: int = 5,  # at most, of each kind
    split: str = "test",
    folder: Path | None = None,
    asked: Mapping[str, str] | None = None,  # questions by id, as `wordings` finds them: a column of their own
) -> pd.DataFrame:  # index id; columns question, right, and the two answers
    "The first n questions, in the order in which they were asked, that only the candidate answered exactly, and the first n that only the baseline did (lowest seed that both have)."
    a, b = both(candidate, baseline, split, folder)
    if not a:
        return pd.DataFrame()
    x, y = a[min(a)], b[min(a)]
    rows = [i for one, other in ((x, y), (y, x)) for i in np.flatnonzero((one["exact"] == 1) & (other["exact"] == 0))[:n]]
    ids = x["ids"][rows]
    said = {"right": [names[0] if x["exact"][i] else names[1] for i in rows], names[0]: x["texts"][rows], names[1]: y["texts"][rows]}
    return pd.DataFrame(({"question": [asked.get(i, "") for i in ids]} if asked else {}) | said, index=pd.Index(ids, name="id"))
