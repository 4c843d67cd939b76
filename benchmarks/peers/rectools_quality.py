"""RecTools' SASRec, BERT4Rec or HSTU, trained on sequences whose last two items are set aside, and its ten best unseen items for every user.

    python rectools_quality.py settings.json out.npz

`settings.json` names an npz file with the whole sequences (`offsets`, `items`; the second-last item is for validation, the last for test) and
the configuration. Every `every` epochs, NDCG@10 on the validation items is measured on RecTools' own recommendations; `out.npz` holds those for the test
items at the best such epoch (`top`, one row per user, best first, 0 where there is none), the epoch, and the CPU time. Training stops after `epochs`,
after `patience` epochs without a better value, or when `minutes` of CPU time are used up.
"""

import json
import os
import sys
import time
from importlib.metadata import version

import numpy as np
import pandas as pd
import torch
from pytorch_lightning import Trainer, seed_everything
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import BERT4RecModel, HSTUModel, SASRecModel


def events(offsets: np.ndarray, items: np.ndarray, left_out: int) -> pd.DataFrame:
    "All but the last events of every user; the day is the position."
    lengths = np.diff(offsets) - left_out
    position = np.concatenate([np.arange(n) for n in lengths])
    user = np.repeat(np.arange(len(lengths)), lengths)
    return pd.DataFrame({Columns.User: user, Columns.Item: items[offsets[user] + position], Columns.Weight: 1.0, Columns.Datetime: pd.Timestamp(0) + pd.to_timedelta(position, "D")})


def top_ten(model, frame: pd.DataFrame, n_users: int) -> np.ndarray:
    "RecTools' ten best items the user has not seen; 0 where there is none."
    found = model.recommend(users=np.arange(n_users), dataset=Dataset.construct(frame), k=10, filter_viewed=True)
    top = np.zeros((n_users, 10), np.int64)
    top[found[Columns.User].to_numpy(), found[Columns.Rank].to_numpy() - 1] = found[Columns.Item].to_numpy()
    return top


def ndcg(top: np.ndarray, targets: np.ndarray) -> float:
    row, place = np.nonzero(top == targets[:, None])
    return float((1 / np.log2(place + 2)).sum() / len(targets)) if len(row) else 0.0


def main() -> None:
    with open(sys.argv[1]) as file:
        asked = json.load(file)
    with np.load(asked["sequences"]) as stored:
        offsets, items = stored["offsets"], stored["items"]
    torch.set_num_threads(1)
    seed_everything(asked["seed"])
    train, valid, test = events(offsets, items, 2), items[offsets[1:] - 2], events(offsets, items, 1)
    dataset, n_users, best, used = Dataset.construct(train), len(offsets) - 1, (-1.0, 0), 0.0
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    kind = {"sasrec": SASRecModel, "bert4rec": BERT4RecModel, "hstu": HSTUModel}[asked["model"]]
    model = kind(
        n_blocks=asked["n_layers"], n_heads=asked["n_heads"], n_factors=asked["d"], dropout_rate=asked["dropout"], session_max_len=asked["max_length"], lr=asked["lr"],
        batch_size=asked["batch_size"], loss="sampled_softmax" if asked["negatives"] else "softmax", n_negatives=asked["negatives"] or 1,
        get_trainer_func=lambda: Trainer(accelerator="cpu", **quiet), **{"bert4rec": {"mask_prob": asked["mask_probability"]}, "hstu": {"relative_time_attention": False, "similarity_module_kwargs": {"distance": asked.get("distance")}}}.get(asked["model"], {}),
    )  # fmt: skip
    for epoch in range(asked["every"], asked["epochs"] + 1, asked["every"]):
        start = time.process_time()
        model.fit_partial(dataset, min_epochs=asked["every"], max_epochs=asked["every"])
        used += time.process_time() - start
        value = ndcg(top_ten(model, train, n_users), valid)
        print(f"epoch {epoch}: ndcg@10 on validation {value:.4f}, {used:.0f} s", file=sys.stderr, flush=True)
        if value > best[0]:
            best = value, epoch
            part = sys.argv[2] + ".part.npz"
            np.savez_compressed(part, top=top_ten(model, test, n_users), epoch=epoch, valid=value, seconds=used, version=version("rectools"))
            os.replace(part, sys.argv[2])
        if epoch - best[1] >= asked["patience"] or time.process_time() > 60 * asked["minutes"]:
            break


if __name__ == "__main__":
    main()
