# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does a pretrained model survive its conversion?
#
# > Perplexity on real text before and after, and how much the precision differs between tokens: a start must keep the one and allow the other.

# %% [markdown]
# **What we want** of the start that `bft_nb.llama.convert` ships: the perplexity of a pretrained model changes by at most 1 %, and yet $\log\bar\lambda$ has a standard deviation above .05 over the tokens of the middle layers, so that there is something to learn from.
#
# **What would refute it**: either number on the wrong side. This page measures; chapter 40 reads all stored rows. To run one start of the study, or all of it:
#
# ```bash
# bft models fetch smollm2
# bft run llama_init -p model smollm2 -p texts squad -p starts '[{"beta_a": 1.0}]' -p store true
# bft sweep nbs/experiments/grids/llama_init.yaml
# ```

# %% tags=["parameters"]
model = "tiny"  # or "smollm2", an id of the hub, a folder
texts = "built-in"  # or "squad": contexts of SQuAD v1.1, development part, in the folder BFT_DATA
n_texts = 4  # that are evaluated
n_calibration = 2  # other texts, that set the scales
max_tokens = 64  # of each text
batch_size = 4
starts = '[{}, {"beta_a": 1.0, "beta_g": 1.0, "calibrated": false}]'  # JSON: what differs from the start that is shipped; keywords of `convert`, and "calibrated"
seed = 0  # which texts
store = False  # append the rows to data/results of this checkout?

# %%
import copy
import inspect
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import torch

from bft_nb.core import check_option
from bft_nb.llama import calibrate, convert, listening
from bft_nb.models import load_model, tiny_llama, tiny_tokenizer
from bft_nb.report import results_folder
from bft_nb.results import append_rows, commit, has_rows, make_rows, model_name

# %%
check_option("texts", texts, ("built-in", "squad"))
called = model_name(model)
if store and "tiny" in (model, texts):
    raise ValueError("rows of the tiny model are not stored: choose a pretrained one, or store=false")

# %% [markdown]
# ## Texts
#
# Contexts of SQuAD are paragraphs of Wikipedia; no two are the same, and the seed decides which.

# %%
BUILT_IN = [
    "A transformer adds what attention finds to what it already holds and never asks how sure it is of either.",
    "Attention observes, the residual connection updates, the feed-forward network predicts.",
    "A belief is a mean and a precision; precision is the inverse of variance.",
    "What has been measured often is known well, and what has been predicted far ahead is known badly.",
    "The prior counts for little where the observation is sharp, and for much where it is not.",
    "A number that every token carries costs little, and says how much to believe it.",
]


# %%
def read_texts() -> list[str]:
    "Distinct texts in an order that the seed decides."
    if texts == "built-in":
        found = BUILT_IN
    else:
        table = pq.read_table(Path(os.environ["BFT_DATA"]) / "qa" / "squad_v1.1_dev.parquet", columns=["context"])
        found = list(dict.fromkeys(table["context"].to_pylist()))
    return [found[i] for i in np.random.default_rng(seed).permutation(len(found))]


# %%
chosen = read_texts()[: n_texts + n_calibration]
if model == "tiny":
    tokenizer = tiny_tokenizer(BUILT_IN)
    plain = tiny_llama(tokenizer, n_layers=6).eval()
else:
    plain, tokenizer = load_model(model)


# %%
def encode(part: list[str]) -> dict[str, torch.Tensor]:
    return dict(tokenizer(part, return_tensors="pt", truncation=True, max_length=max_tokens, padding=True, padding_side="right", return_token_type_ids=False))


batches = [encode(chosen[i : i + batch_size]) for i in range(0, n_texts, batch_size)]
{"texts": n_texts, "tokens": int(sum(b["attention_mask"].sum() for b in batches)), "model_type": plain.config.model_type}


# %% [markdown]
# ## Measure
#
# Perplexity over all tokens but the first of each text.

# %%
@torch.no_grad()
def token_losses(lm, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    "Negative log-likelihood of each real token after the first."
    scores = lm(**batch, use_cache=False).logits[:, :-1].log_softmax(-1)
    real = batch["attention_mask"][:, 1:].bool()
    return -scores.gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)[real]


def perplexity(losses: list[torch.Tensor]) -> dict[str, float]:
    return {"perplexity": math.exp(torch.cat(losses).mean().item())}


# %% [markdown]
# Per layer, the spread of $\log\bar\lambda$ over real tokens, without the first of each text (many heads park their attention there, and it is unlike all others), and the mean gain.

# %%
def per_layer(records: list, batch: dict[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    "log λ̄ (layers, tokens) and gain (layers,) of one batch."
    real = batch["attention_mask"].bool()
    later = real & (torch.arange(real.shape[1]) > 0)
    return torch.stack([r.lam_bar[later].log() for r in records]).numpy(), torch.stack([r.gain[real].mean() for r in records]).numpy()


# %%
def measure(start: dict) -> dict[str, float]:
    "Convert a copy, calibrate it, and look."
    settings = dict(start)
    calibrated = settings.pop("calibrated")
    lm = convert(copy.deepcopy(plain), **settings)
    if calibrated:
        calibrate(lm, encode(chosen[n_texts:]))
    losses, seen = [], []
    for batch in batches:
        with listening(lm) as records:
            losses.append(token_losses(lm, batch))
        seen.append(per_layer(records, batch))
    sd = np.concatenate([log_lam_bar for log_lam_bar, _ in seen], 1).std(1)
    gains = np.mean([g for _, g in seen], 0)
    return perplexity(losses) | {f"sd.layer{i:02d}": float(v) for i, v in enumerate(sd)} | {f"gain.layer{i:02d}": float(v) for i, v in enumerate(gains)}


# %% [markdown]
# A start is named by all its settings, also those it leaves as they are shipped.

# %%
shipped = {name: inspect.signature(convert).parameters[name].default for name in ("beta_a", "beta_g", "noise_ratio", "units")} | {"calibrated": True}
wanted = [shipped | start for start in json.loads(starts)]
if unknown := {name for start in wanted for name in start} - set(shipped):
    raise ValueError(f"starts may set {', '.join(shipped)}, got {', '.join(sorted(unknown))}")
texts_of = dict(max_tokens=max_tokens, n_texts=n_texts, n_calibration=n_calibration)
run = dict(exp="llama_init", dataset=texts, model=called, seed=seed, commit=commit(), device="cpu", split="eval", n=int(sum(b["attention_mask"][:, 1:].sum() for b in batches)))
stored = results_folder() / "llama_init.csv" if store else None

# %%
found = {}
for start in [None, *wanted]:
    this = run | dict(params=texts_of | (dict(bft=False) if start is None else dict(bft=True, **start)))
    if stored and has_rows(stored, this):
        continue
    begin = time.perf_counter()
    result = perplexity([token_losses(plain, b) for b in batches]) if start is None else measure(start)
    if stored:
        append_rows(stored, make_rows(result, **this, seconds=round(time.perf_counter() - begin, 1)))
    found["plain" if start is None else json.dumps(start)] = result

# %% [markdown]
# ## What this run found
#
# Spread and gain are means over the middle third of the layers. The bounds above are for a pretrained model; the tiny one of the default run has random weights.

# %%
base = found.get("plain", {}).get("perplexity", math.nan)
middle = slice(plain.config.num_hidden_layers // 3, 2 * plain.config.num_hidden_layers // 3)
table = [
    {"start": name, "perplexity": r["perplexity"], "change, %": 100 * (r["perplexity"] / base - 1)}
    | {f"{what}, middle": np.mean([v for k, v in r.items() if k.startswith(f"{key}.")][middle]) for what, key in (("sd of log λ̄", "sd"), ("gain", "gain")) if "sd.layer00" in r}
    for name, r in found.items()
]
pd.DataFrame(table).round(3).set_index("start") if table else "all stored before"
