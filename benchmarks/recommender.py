"""Is the confidence of `bft_nb.recommender` true on real data? Appends the answer to data/results/recommender.csv.

    python benchmarks/recommender.py ml100k

The last event of every user is hidden; a recommender is fitted to the rest through its public functions, recommends ten items to
everybody, and its confidence is compared with the hits, in fifths of the users by confidence. What sharpness and log precision say of a hit
is compared with what the length of the history and the popularity of its items say. Trained with the recommender's own defaults; every setting is named in the rows. The
page that reads them is chapter 33.
"""

import argparse
import time
from typing import Any

import numpy as np
import pandas as pd
import torch

from bft_nb.interactions import Examples, Sequences, from_end, load, rows
from bft_nb.recommender import Known, Recommender, calibrate, confidence, judge, last_choices, reliability_bins
from bft_nb.report import results_folder
from bft_nb.results import append_rows, commit, has_rows, make_rows

FORECASTS = {
    "sharpness": ["sharpness"], "precision": ["precision"], "both": ["sharpness", "precision"],
    "rivals": ["sharpness", "length", "popularity"], "all": ["sharpness", "length", "popularity", "precision"],
}  # fmt: skip


def losses(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    "Log loss of each user [nat]."
    return -np.where(y, np.log(p), np.log1p(-p))


def log_loss(p: np.ndarray, y: np.ndarray) -> float:
    "Mean log loss [nat]."
    return float(losses(p, y).mean())


def evidence(known: Known, histories: Sequences, log_count: np.ndarray) -> dict[str, np.ndarray]:
    "What a forecast may be learnt from: the model's evidence, and as rivals the log length of the history and the mean log count of its items in training."
    rivals = {"length": np.log(histories.lengths), "popularity": np.add.reduceat(log_count[histories.items], histories.offsets[:-1]) / histories.lengths}
    return dict(zip(("sharpness", "precision"), known.evidence.T)) | rivals


def shares(known: Known, test: Known, histories: tuple[Sequences, Sequences], log_count: np.ndarray, k: int) -> dict[str, float]:
    "Log loss on the hidden events of forecasters that were learnt on validation, the slopes of each, and what the log precision adds, user by user."
    v, y = known.ranks <= k, test.ranks <= k
    learnt, asked = (evidence(judged, read, log_count) for judged, read in zip((known, test), histories))
    found, loss = {"log_loss.rate": log_loss(np.full(len(y), v.mean()), y)}, {}
    for name, kinds in FORECASTS.items():
        if set(kinds) <= set(learnt):
            made = calibrate(np.column_stack([learnt[kind] for kind in kinds]), v)
            loss[name] = losses(confidence(made, np.column_stack([asked[kind] for kind in kinds])), y)
            found |= {f"log_loss.{name}": float(loss[name].mean())} | {f"slope.{name}.{i}": float(s) for i, s in enumerate(made.slopes)}
    for more, less in (("both", "sharpness"), ("all", "rivals")):
        if more in loss:
            gain = loss[less] - loss[more]
            found |= {f"gain.{more}": float(gain.mean()), f"gain.{more}.sd": float(gain.std(ddof=1))}
    return found


def named(made: Recommender) -> dict[str, Any]:
    "Every setting of a recommender that its outcome depends on, defaults too, as one level of names."
    return {name: value for name, value in made.settings.items() if name not in ("backbone", "device", "options")} | made.settings["options"]


def measure(name: str, bft: bool, seed: int, k: int, epochs: int | None) -> None:
    "One recommender, judged on the hidden last events."
    data = load(name)
    end, user = from_end(data.sequences), np.repeat(data.user_ids, data.sequences.lengths)
    frame = pd.DataFrame({"user": user, "item": data.item_ids[data.sequences.items - 1]})
    made = Recommender(bft=bft, max_epochs=epochs, seed=seed, device="cpu")
    run = dict(exp="recommender", dataset=name, model="sasrec", params={**named(made), "k": k}, seed=seed)
    path = results_folder() / "recommender.csv"
    if has_rows(path, run):
        return print("these rows are there already")
    start = time.perf_counter()
    made.fit(frame[end > 1], progress=True)
    numbers = pd.Series(np.arange(1, len(made.item_ids) + 1), made.item_ids)
    hidden = frame[end == 1].set_index("user").item.loc[made.user_ids]
    known = hidden.isin(numbers.index).to_numpy()  # an item that occurs only at somebody's end was never seen: no model can rank it
    targets = numbers.reindex(hidden[known]).to_numpy().astype(np.int32)
    users = np.flatnonzero(known)
    test = judge(made.model, Examples(users.astype(np.int32), rows(made.histories, users), targets), filter_seen=True)
    read = last_choices(made.histories).histories
    log_count = np.log(np.bincount(read.items, minlength=len(made.item_ids) + 1).clip(1))
    hits = test.ranks <= k
    found = {f"hr@{k}": hits.mean(), "unknown_targets": int((~known).sum()), **shares(made.known, test, (read, rows(made.histories, users)), log_count, k)}
    for b, part in enumerate(reliability_bins(made.confidence(test.evidence, k), hits)):
        found |= {f"confidence.bin{b}": part.confidence, f"hr@{k}.bin{b}": part.hit_rate, f"hits.bin{b}": round(part.hit_rate * part.n), f"n.bin{b}": part.n}
    common = dict(**run, split="held_out", n=len(hits), seconds=round(time.perf_counter() - start, 1), device="cpu", commit=commit())
    append_rows(path, make_rows(found, **common))
    print(pd.Series(found).round(4).to_string())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", nargs="?", default="ml100k")
    parser.add_argument("--plain", action="store_true", help="the plain backbone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--epochs", type=int, help="default: the recommender's own")
    a = parser.parse_args()
    torch.set_num_threads(1)
    measure(a.dataset, not a.plain, a.seed, a.k, a.epochs)
