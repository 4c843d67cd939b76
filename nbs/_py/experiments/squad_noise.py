# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does a filter learn better from noisy labels?
#
# > A pretrained Llama is tuned to answer questions while a share of its label tokens is wrong: plain, with two robust losses, and as a filter.
#
# **The paper says** that TinyLlama-1.1B, tuned as a filter on SQuAD whose label tokens are corrupted with probability $n_p$, answers better than the same model tuned plainly (SFT) and than with focal loss, the more so the more noise; and that on clean data its F1 is 8.3 % above SFT [@bft2026].
#
# **What would refute it here**: a paired difference in F1 (filter minus SFT, same questions) that is not above zero at $n_p = 0$; one that does not grow with $n_p$; or a robust loss that does better.
#
# This page runs *one* cell of the study, by default a tiny random Llama on made-up lookups, offline and in seconds.

# %% tags=["parameters"]
model = "tiny"  # or "smollm2", an id of the hub ("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"), a folder
data = "lookup"  # to learn from; or "squad_v1.1_train_part", "squad_v1.1_train" (the official file), and squad_v1.1_dev is asked
method = "bft"  # "sft", "focal", "gce" or "bft"
noise = 0.3  # n_p, probability of each label token to be wrong
corruption = "uniform"  # or "swap": whole answers exchanged between questions
seed = 0
steps = 60
batch_size = 4
lr = 1e-3  # at its highest
precision_lr = 0.0  # of what only a filter has; 0: `lr`
adapter = "lora"  # or "full"
max_length = 128  # tokens of prompt and answer; longer questions are left out, in training and evaluation
n_eval = 60  # questions asked at the end
dtype = "float32"  # or "bfloat16": autocast
store = False  # append the rows to data/results of this checkout?

# %%
import numpy as np
import pandas as pd

from bft_nb.core import check_option
from bft_nb.finetune import METHODS, answering, finetune, prepare
from bft_nb.models import title
from bft_nb.qa import Collator, Scores, answer, answer_ids, corrupt, encode, load_questions, lookup, mean_nll, noise_floor, prompt_ids, score, swap_answers
from bft_nb.report import configuration, results_folder
from bft_nb.results import append_rows, commit, has_rows, make_rows, ranks_path, run_key, save_answers
from bft_nb.runner import checkout

# %%
check_option("method", method, METHODS)
check_option("data", data, ("lookup", "squad_v1.1_train_part", "squad_v1.1_train"))
check_option("corruption", corruption, ("uniform", "swap"))
if store and (model == "tiny" or data == "lookup"):
    raise ValueError("rows of the tiny model and of made-up questions are not stored: choose model and data, or store=false")

# %% [markdown]
# ## One cell
#
# The run is named by everything that decides its outcome. A filter starts as [chapter 40](../40_llama.ipynb) ships it.

# %%
answer_length = 16  # tokens, end included
training = dict(steps=steps, batch_size=batch_size, lr=lr)
params = dict(method=method, noise=noise, corruption=corruption, adapter=adapter, max_length=max_length, answer_length=answer_length, n_eval=n_eval, dtype=dtype, **training)
if METHODS[method].added:
    training["precision_lr"] = params["precision_lr"] = precision_lr or lr
run = dict(exp="squad_noise", dataset=data, model=model.rpartition("/")[2], params=params, seed=seed)
configuration(params)

# %% [markdown]
# Questions to learn from, to choose by, and to be asked. Those that do not leave room for an answer in `max_length` tokens, and those whose own answer is longer than that room, are left out of all three: long contexts are another question. The choice is the same for every method and seed, and no context of the questions to choose by is learnt from.

# %%
if data == "lookup":
    taught, asked = lookup(400, seed=0), lookup(400, seed=1)
else:
    taught, asked = load_questions(data), load_questions("squad_v1.1_dev")
prepared = prepare(model, method, [q.context for q in taught[:8]], adapter=adapter, max_length=max_length, seed=seed)
tokenizer = prepared.tokenizer
title(model), prepared.trainable, prepared.filtering


# %%
def that_fit(questions: list, n: int | None = None) -> list:
    "The questions that fit, in an order drawn once, the first n of them."
    order = np.random.default_rng(0).permutation(len(questions))
    fit = (
        q for q in (questions[i] for i in order)
        if len(prompt_ids(q, tokenizer)) + answer_length <= max_length and len(answer_ids(q.target, tokenizer)) <= answer_length
    )  # fmt: skip
    return list(fit) if n is None else [q for q, _ in zip(fit, range(n))]


# %%
taught, asked = that_fit(taught), that_fit(asked, n_eval)
valid = taught[-min(100, n_eval) :]
held_out = {q.context for q in valid}
taught = [q for q in taught if q.context not in held_out]
pd.DataFrame({"questions": [len(taught), len(valid), len(asked)]}, index=["to learn from", "to choose by", "to be asked"])

# %% [markdown]
# The noise is drawn once per seed, for all methods alike: each label token, the end token included, is replaced with probability $n_p$ by a token drawn from the whole vocabulary; the input stays clean. Or, with `swap`, a share $n_p$ of the questions is told another question's answer.

# %%
clean = [encode(q, tokenizer, max_length) for q in taught]
if corruption == "swap":
    examples = [encode(q, tokenizer, max_length) for q in swap_answers(taught, noise, seed)]
else:
    examples = corrupt(clean, noise, len(tokenizer), seed)
pd.Series({"labels": sum(len(e.answer) for e in clean), "questions with a wrong label": sum(not a.answer.equal(b.answer) for a, b in zip(examples, clean))})

# %%
collate = Collator(tokenizer)
folder = checkout() / "runs" / "finetune" / run_key(run) if store else None
tuned = finetune(prepared.model, examples, collate, method, **training, seed=seed, dtype=dtype, out_dir=folder, progress=store)
pd.DataFrame(tuned.losses).set_index("step").round(3).T

# %% [markdown]
# Uniform noise puts a floor under the training loss (chapter 41), so losses of different $n_p$ do not compare; answers to clean questions do.

# %%
floor = noise_floor(noise, len(tokenizer)) if corruption == "uniform" else 0.0
round(floor, 3), round(tuned.losses[-1]["loss"], 3)


# %%
def measure(questions: list) -> tuple[dict[str, tuple[float, int]], list[str], Scores]:
    "Scores of greedy answers with the number of questions; the negative log-likelihood per token of the true answers to the first hundred."
    with answering(prepared.model, dtype) as lm:
        said = answer(lm, tokenizer, questions, max_new_tokens=answer_length, batch_size=50)
        nll = mean_nll(lm, [encode(q, tokenizer, max_length) for q in questions[:100]], collate)
    found = score(said, questions)
    means = {"em": found.exact.mean(), "f1": found.f1.mean(), "subspan": found.subspan.mean()}
    return {name: (float(value), len(said)) for name, value in means.items()} | {"nll": (nll, min(100, len(said)))}, said, found


# %%
measured = {"valid": measure(valid), "test": measure(asked)}
pd.DataFrame({part: {name: value for name, (value, _) in m[0].items()} for part, m in measured.items()}).round(3)

# %% [markdown]
# The rows of this run, and its answers. They enter the book's results only on request, and never from the tiny model.

# %%
parts = {part: found for part, (found, _, _) in measured.items()}
parts["train"] = {name: (value, len(examples)) for name, value in (("loss", tuned.losses[-1]["loss"]), ("trainable", prepared.trainable), ("filtering", prepared.filtering))}
device, now = next(prepared.model.parameters()).device.type, commit()
rows = [
    row for part, found in parts.items() for name, (value, n) in found.items()
    for row in make_rows({name: value}, **run, split=part, n=n, seconds=round(tuned.seconds, 1), device=device, commit=now)
]  # fmt: skip
len(rows)

# %%
if store and not has_rows(results_folder() / "squad_noise.csv", run):
    for part, questions in {"valid": valid, "test": asked}.items():
        _, said, found = measured[part]
        save_answers(ranks_path(results_folder() / "answers", run, part), [q.id for q in questions], said, found.exact, found.f1)
    append_rows(results_folder() / "squad_noise.csv", rows)

# %% [markdown]
# ## The study
#
# No rows are stored yet. The cells of the study are those of the grid; with SmolLM2 each takes about half an hour of one CPU core:
#
# ```bash
# bft models fetch smollm2
# BFT_DATA=… bft sweep nbs/experiments/grids/squad_noise.yaml -j 2
# ```
#
# The paper's model is one parameter away, on a machine with a GPU: `-p model TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T -p device cuda -p dtype bfloat16`.
