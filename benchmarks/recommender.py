"""Is the confidence of `bft_nb.recommender` true on real data? Appends the answer to data/results/recommender.csv.

    python benchmarks/recommender.py ml100k

The last event of every user is hidden; a recommender is fitted to the rest through its public functions, recommends ten items to
everybody, and its confidence is compared with the hits, in fifths of the users by confidence. Trained with the recommender's own
defaults; every setting is named in the rows. The page that reads them is chapter 33.
"""

import argparse
import time
from typing import Any

import numpy as np
import pandas as pd
import torch

from bft_nb.interactions import Examples, from_end, load, rows
from bft_nb.recommender import Recommender, calibrate, confidence, judge, reliability_bins
from bft_nb.report import results_folder
from bft_nb.results import append_rows, commit, has_rows, make_rows


def log_loss(p: np.ndarray, y: np.ndarray) -> float:
    "Mean log loss [nat]."
    return float(-np.where(y, np.log(p), np.log1p(-p)).mean())


def shares(known, test, k: int) -> dict[str, float]:
    "Log loss on the hidden events of forecasters that were learnt on validation, and the slopes of the full one."
    v, y = known.ranks <= k, test.ranks <= k
    found = {"log_loss.rate": log_loss(np.full(len(y), v.mean()), y)}
    for name, columns in {"sharpness": [0], "precision": [1], "both": [0, 1]}.items():
        if max(columns) < known.evidence.shape[1]:
            made = calibrate(known.evidence[:, columns], v)
            found[f"log_loss.{name}"] = log_loss(confidence(made, test.evidence[:, columns]), y)
            found |= {f"slope.{name}.{i}": float(s) for i, s in enumerate(made.slopes)}
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
    hits = test.ranks <= k
    found = {f"hr@{k}": hits.mean(), "unknown_targets": int((~known).sum()), **shares(made.known, test, k)}
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
