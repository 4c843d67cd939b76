# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does a filter read past distractors?
#
# > A pretrained Llama is tuned to answer from a passage, and then asked with up to twenty others beside it: plain, with focal loss, with a robust loss (GCE), and as a filter.

# %% [markdown]
# **The paper says** that on NQ-Open, with passages in the context that a search returned and that do not hold the answer, a model tuned as a filter loses less than the same model tuned plainly [@bft2026]. Kriging is made for this: an observation that deserves no belief should get little weight.
#
# **What would refute it here**: the loss from no distractor to twenty is not smaller for the filter than for SFT (a difference of paired differences over the same questions), or the filter answers no better with twenty. With twenty distractors the gold passage stands first or in the middle (with five also last).
#
# "As a filter" is a matter of degree. The shipped start keeps the gain $K$ near 1, where the filter is almost the plain model, and a step of training moves the filter's own parameters by about its learning rate at most. So the filter is also tried with a larger rate for these, and what they have learnt is a table below.
#
# This page runs *one* cell of the study, one training and all its evaluations; by default a tiny random Llama on made-up facts, offline and in seconds. The second part reads all stored rows.

# %% tags=["parameters"]
model = "tiny"  # or "smollm2", an id of the hub ("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"), a folder
data = "lookup"  # or "nq_open_bm25_distractors"
method = "bft"  # "sft", "focal", "gce", "bft", "bft_strong"; or "headwise", "elementwise", "sink" (chapter 42)
passages = {"ks": [0, 2, 5], "k_train": 2, "words": 12, "gold": "first"}  # numbers of distractors at the end; most of them in training; words of a passage, 0: all; where the gold one stands at all of `ks`: "first", "middle", "last". What is left out is as here
seed = 0
steps = 60
batch_size = 4
lr = 1e-3  # at its highest
precision_lr = 0.0  # of what a filter (or gate) adds to the layers; 0: `lr`
adapter = "lora"  # or "full"
max_length = 224  # tokens of prompt and answer in training; longer ones are left out
without = []  # parts of a filter that are switched off when it is asked: "kriging" (attention as in the plain model), "kalman" (K = 1)
n_eval = 40  # questions asked at the end, half of all at most; 0: those to choose by alone
dtype = "float32"  # or "bfloat16": autocast
store = False  # append the rows to data/results of this checkout?

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from bft_nb import qa_study, rag
from bft_nb.figures import COLOUR, use_style
from bft_nb.finetune import LEARNT, METHODS, answering, finetune, learnt, prepare
from bft_nb.models import title
from bft_nb.plan import report
from bft_nb.qa import GOLD, Collator, answer_ids, check_question, encode, prompt, prompt_ids, score
from bft_nb.qa_settings import ANSWER, ROWS, check_enough, check_length, check_settings, passage_settings
from bft_nb.qa_study import advantage, answers, cell, changed, level, mean, outcomes, per_question, seeds, shown, wordings
from bft_nb.rag import answer_growing, check_prompts, mixed, snippets
from bft_nb.report import choose, configuration, results_folder
from bft_nb.results import append_rows, check_new, model_name, ranks_path, run_key, run_rows, save_answers
from bft_nb.runner import checkout

# %%
use_style()
training = dict(steps=steps, batch_size=batch_size, lr=lr)
passages = passage_settings(passages)
ks, k_train, words, gold = (passages[name] for name in ("ks", "k_train", "words", "gold"))
params = dict(method=method, ks=ks, adapter=adapter, max_length=max_length, answer_length=ANSWER, n_eval=n_eval, dtype=dtype, **training)
check_settings(params | dict(model=model, data=data, passages=passages, without=without, seed=seed, precision_lr=precision_lr, store=store));

# %% [markdown]
# ## One cell
#
# The run is named by everything that decides its outcome (the gold passage's place only where it is not first). A filter starts as [chapter 40](../40_llama.ipynb) ships it. *Strong* (`bft_strong`) is more of a filter from the start: $\beta_a = 1$, attention to the letter, and $\beta_g = .1$, ten times the shipped weight of the prior, at a price in perplexity that chapter 40 lists.

# %%
params |= dict(k_train=k_train, words=words) | ({} if gold == "first" else dict(gold=gold))
if METHODS[method].added:
    training["precision_lr"] = params["precision_lr"] = precision_lr or lr
tuned = dict(exp="rag_distractors", dataset=data, model=model_name(model), params=params, seed=seed)
run, path = tuned | ({"params": params | dict(without="+".join(sorted(set(without))))} if without else {}), results_folder() / "rag_distractors.csv"
if store: check_new(path, run)
configuration(run["params"])

# %% [markdown]
# NQ-Open has a passage with the answer (*gold*) for each question; BM25 chose the distractors, without an answer in them, from a pool of 23,160 passages, which is easier than retrieval from all of Wikipedia. So that a CPU can read twenty-one of them, **the study cuts every passage to a snippet of twelve words, under its title** (`words`; at 0 passages stay whole). Where a snippet begins is drawn at random, for distractors among all places and for the gold passage among those that leave the answer in: nothing about its length or the place of the answer in it tells the gold snippet apart. This is our choice **[D]**; it makes questions harder than with whole passages, for all methods alike.

# %%
whole = rag.questions(data)
order = np.random.default_rng(0).permutation(len(whole))
cut = [snippets(whole[i], words) for i in order]
print(prompt(cut[0].over(2, "middle")))

# %% [markdown]
# Each question is asked at the end, or used to choose by, or learnt from; which of the three is the same for every method and seed. A question whose gold passage belongs to one of the first two kinds is not learnt from, and a filter's scales are not measured on it. In training each question has between none and `k_train` distractors, with the gold snippet first, in the middle or last.

# %%
first, last = max(n_eval, len(cut) // 5), len(cut) - min(100, len(cut) // 4)
asked, valid = cut[:n_eval], cut[last:]
held_out = {whole[order[i]].gold for i in (*range(first), *range(last, len(cut)))} if data != "lookup" else set()
taught = [cut[i] for i in range(first, last) if whole[order[i]].gold not in held_out]
for r in asked + valid: check_question(r.over(0))

# %%
prepared = prepare(model, method, [r.over(k_train).context for r in taught[:16]], adapter=adapter, max_length=max_length, seed=seed)
tokenizer = prepared.tokenizer
check_length(max_length, prepared.model.config)
for conditions, k in ((asked, ks[-1]), (valid, ks[1])): check_prompts([r.over(k) for r in conditions], prepared.model, tokenizer, ANSWER)
title(model), prepared.trainable, prepared.added


# %%
def short(q) -> bool:
    "Does it fit?"
    length = len(answer_ids(q.target, tokenizer))
    return length <= ANSWER and len(prompt_ids(q, tokenizer)) + length <= max_length


# %%
examples = [encode(q, tokenizer, max_length) for q in mixed(taught, k_train, seed) if short(q)]
check_enough({"to learn from": (len(examples), 1)}, max_length)
pd.DataFrame({"questions": [len(examples), len(valid), len(asked)]}, index=["to learn from", "to choose by", "to be asked"])

# %% [markdown]
# A run that stores its rows keeps checkpoints in `runs/finetune`, and goes on from the last of them if it is killed and started again; one with `store = False` writes none, and starts afresh.

# %%
folder = checkout() / "runs" / "finetune" / run_key(tuned) if store else None
trained = finetune(prepared.model, examples, Collator(tokenizer), method, **training, seed=seed, dtype=dtype, out_dir=folder, progress=store)
pd.DataFrame(trained.losses).set_index("step").round(3).T

# %% [markdown]
# Each question is asked with more and more distractors, the gold snippet staying at one place (in the study first, so that each context begins as the one before and nothing is read twice). A model that reads only the first snippet would lose nothing there, and in training, with at most two distractors, the gold snippet is first in five of nine cases. So other places are asked for, too: both at the second number of distractors, one of them at the largest number (where the gold snippet usually stands first, that one is the middle). The questions to choose by are asked at the second number, with the gold snippet in the middle.


# %%
def ask(retrieved: list, conditions: list[tuple[int, str]]) -> dict[str, tuple[list, list, object]]:
    "Questions, greedy answers and scores under each condition; neighbours share the beginning of their contexts."
    questions = [[r.over(k, place) for r in retrieved] for k, place in conditions]
    with answering(prepared.model, dtype, without) as lm:
        said = answer_growing(lm, tokenizer, questions, max_new_tokens=ANSWER, batch_size=ROWS)
    return {f"k{k}.{place}": (qs, texts, score(texts, qs)) for (k, place), qs, texts in zip(conditions, questions, said)}


# %%
a, b = (place for place in GOLD if place != gold)
series = [[(k, gold) for k in ks], *([] if without else [[(ks[1], a), (ks[1], b), (ks[-1], a)]])]
if gold != "first":  # contexts that need not begin alike
    series = [[condition] for part in series for condition in part]
measured = {"valid": ask(valid, [(ks[1], "middle")]), "test": {name: found for part in series for name, found in ask(asked, part).items()} if n_eval else {}}
found = {(part, name): {"em": s.exact.mean(), "f1": s.f1.mean(), "subspan": s.subspan.mean()} for part, by in measured.items() for name, (_, _, s) in by.items()}
pd.DataFrame(found).T.round(3)

# %% [markdown]
# The defaults only try the page: sixty steps of four examples teach the tiny model no answer. In a minute it learns some by `bft run rag_distractors -p steps 200 -p batch_size 32 -p lr 1e-2`.
#
# What a filter has learnt, on questions to choose by: the gain $K$, the weights of the prior and of the precision in attention, and $\log\bar\lambda$.

# %%
precision = learnt(prepared.model, method, tokenizer, [r.over(ks[1], "middle") for r in valid[:16]])
pd.Series(precision).round(4) if precision else "this method is no filter"

# %% [markdown]
# The rows of this run, and its answers. They enter the book's results only on request, and never from the tiny model.

# %%
parts = {f"{part}-{name}": {metric: (float(v), len(measured[part][name][1])) for metric, v in of.items()} for (part, name), of in found.items()}
parts["train"] = {name: (value, len(examples)) for name, value in (("loss", trained.losses[-1]["loss"]), ("trainable", prepared.trainable), ("added", prepared.added))}
parts["train"] |= {name: (value, len(valid[:16])) for name, value in precision.items()}
rows = run_rows(run, parts, seconds=round(trained.seconds, 1), device=next(prepared.model.parameters()).device.type)
len(rows)

# %%
if store:
    for part, by in measured.items():
        for name, (qs, texts, s) in by.items():
            save_answers(ranks_path(path.parent / "answers", run, f"{part}-{name}"), [q.id for q in qs], texts, s.exact, s.f1)
    append_rows(path, rows)

# %% [markdown] tags=["result"]
# ## The study
#
# From here on nothing of this run is used: everything is read from `data/results`. All of it is made again by
#
# ```bash
# bft models fetch smollm2
# BFT_DATA=… bft sweep nbs/experiments/grids/rag_distractors.yaml -j 2
# ```
#
# SmolLM2-135M-Instruct learns from six hundred questions with none to two distractors each, with low-rank matrices beside all its projections, and is asked 500 others.
#
# ### What was chosen, on validation
#
# F1 of a hundred other questions with five distractors at seed 0, by learning rate: the same three rates for every method, and the best one is taken for all its cells. The filter has one more trial than the others, with a rate of its *own* for the parameters that only it has.

# %%
stored = qa_study.study_rows("rag_distractors")  # at the budget of `qa_study.RAG`
select = qa_study.TRIALS["rag_distractors"]
chosen = {m: qa_study.tuned(stored, m, **select) for m in METHODS}
cells = {m: rows for m in METHODS if len(rows := cell(stored, m, chosen[m], n_eval=500))}
qa_study.choices(stored, **select) if len(stored) else "no rows are stored yet"

# %% [markdown]
# At equal learning rates, on the same questions:

# %%
qa_study.at_equal_rates(stored, "bft", **select) if len(stored) else "no rows are stored yet"

# %% [markdown]
# Where the chosen rate is the smallest or largest that was tried, a better one may lie beyond it. Cells stored at rates other than the chosen ones are in no table below:

# %%
others = qa_study.stray(stored, chosen, n_eval=0)
others if len(others) else "all are stored at the chosen rates" if len(stored) else "no rows are stored yet"

# %% [markdown]
# ### The table
#
# Points of 100 over the test questions and seeds with a 95 % bootstrap interval over questions, the gold snippet first: F1, and exact match (EM); and whether an accepted answer is somewhere in the line (subspan), from the rows.

# %%
splits = {k: f"test-k{k}.first" for k in (0, 5, 10, 20)}
subspan = {(m, k): choose(rows, split=split, metric="subspan")["value"].mean() for m, rows in cells.items() for k, split in splits.items()}
lines = {(METHODS[m].title, k): {"EM": shown(rows, split, "exact"), "F1": shown(rows, split), "F1 by seed": seeds(rows, split), "subspan": f"{100 * subspan[m, k]:.1f}"} for m, rows in cells.items() for k, split in splits.items()}
pd.DataFrame(lines).T.rename_axis(["method", "distractors"]) if cells else "no rows are stored yet"

# %%
#| label: fig-distractors
#| fig-cap: "F1 by the number of distractors behind the gold snippet (bars: 95 % interval over questions)."
#| code-fold: true
if cells:
    fig, ax = plt.subplots()
    for i, (m, rows) in enumerate(cells.items()):
        found = [level(rows, split) for split in splits.values()]
        bars = [[f.mean - f.low for f in found], [f.high - f.mean for f in found]]
        ax.errorbar([k + 0.2 * (i - (len(cells) - 1) / 2) for k in splits], [f.mean for f in found], bars, fmt="o-", markersize=4, capsize=3, color=COLOUR[qa_study.ROLES[m]], label=METHODS[m].title)
    ax.set(xlabel="distractors [snippets]", ylabel="F1 [points of 100]", xticks=list(splits))
    ax.legend()
    plt.show()

# %% [markdown]
# ### How much of a filter was it?
#
# After training, averaged over the layers and seeds: $K = 1$ would be the plain residual connection, $\beta_a = 0$ the plain attention; the shipped start has $\beta_g = .01$ and $\beta_a = .25$, the strong one .1 and 1.

# %%
of_filter = {METHODS[m].title: qa_study.learnt(rows) for m, rows in cells.items() if METHODS[m].added == "bft"}
pd.DataFrame(of_filter, index=LEARNT).T.round(4) if of_filter else "no rows are stored yet"

# %% [markdown]
# What each method loses from no distractor to k of them, and how much less it loses than SFT (above zero: it degrades less), question by question:


# %%
def change(rows: pd.DataFrame, k: int) -> np.ndarray:
    "F1 with k distractors minus F1 without, for each question, averaged over seeds."
    return per_question(answers(rows, splits[k])) - per_question(answers(rows, splits[0]))


def spared(rows: pd.DataFrame, k: int) -> np.ndarray:
    "How much less F1 falls than SFT's."
    return advantage(rows, cells["sft"], splits[k]) - advantage(rows, cells["sft"], splits[0])


# %%
falls = {METHODS[m].title: {f"change to k = {k}": mean(change(rows, k)) for k in (5, 10, 20)} for m, rows in cells.items()}
for m in cells:
    if m != "sft" and "sft" in cells:
        falls[METHODS[m].title] |= {f"less than SFT, k = {k}": mean(spared(cells[m], k)) for k in (5, 10, 20)}
pd.DataFrame(falls).T.fillna("") if falls else "no rows are stored yet"

# %% [markdown]
# The lead in F1 over SFT under each condition, paired by question over the seeds that both have; with five and with twenty distractors also by the place of the gold snippet:

# %%
conditions = {**{f"k = {k}, first": split for k, split in splits.items()}, "k = 5, middle": "test-k5.middle", "k = 5, last": "test-k5.last", "k = 20, middle": "test-k20.middle"}
places = {METHODS[m].title: {name: shown(rows, split) for name, split in conditions.items() if name.startswith(("k = 5,", "k = 20,"))} for m, rows in cells.items()}
leads = {METHODS[m].title: {name: mean(advantage(rows, cells["sft"], split)) for name, split in conditions.items()} for m, rows in cells.items() if m != "sft" and "sft" in cells}
pd.concat({"F1": pd.DataFrame(places), "Δ F1 to SFT": pd.DataFrame(leads)}, axis=1).reindex(conditions).fillna("") if cells else "no rows are stored yet"

# %% [markdown]
# ### Which part of the filter loses them?
#
# The trained filter, asked again with parts of it switched off in every layer (`without`): kriging ($\beta_a = 0$, attention as in the plain model), the gain ($\beta_g = 0$, so $K = 1$), or both, which leaves the plain model with low-rank matrices that were tuned beside a filter. F1 with the gold snippet first; then, paired by question over shared seeds, how far each is ahead of SFT, and of the whole filter:

# %%
OFF = {"nothing": None, "kriging": "kriging", "the gain": "kalman", "both": "kalman+kriging"}
asked_without = {name: rows for name, parts in OFF.items() if len(rows := cell(qa_study.study_rows("rag_distractors", without=parts), "bft", chosen["bft"], n_eval=500))}


def compared(rows: pd.DataFrame, k: int) -> dict[tuple[str, str], str]:
    "F1 with k distractors, and minus that of SFT and of the whole filter."
    leads = {f"Δ to {METHODS[m].title}": mean(advantage(rows, cells[m], splits[k])) for m in ("sft", "bft") if m in cells and not rows.equals(cells[m])}
    return {(name, f"k = {k}"): text for name, text in ({"F1": shown(rows, splits[k])} | leads).items()}


# %%
parts_off = pd.DataFrame({name: compared(rows, 0) | compared(rows, 20) for name, rows in asked_without.items()}).T
parts_off.sort_index(axis=1).fillna("").rename_axis("switched off") if len(asked_without) > 1 else "no rows are stored yet"

# %% [markdown]
# ### Which answers change
#
# Answers that are exactly right, by who gave them, over all shared seeds; then, with twenty distractors, some that only one of the two got right: what is right can be read off the other column. An id `nq-N` is the N-th question, counted from 0, of NQ-Open as Lost in the Middle publishes it (`nq-open-oracle.jsonl.gz`); the question stands beside it where this page ran with the set in `BFT_DATA`.

# %%
names, pair = ("BFT", "SFT"), [cells[m] for m in ("bft", "sft") if m in cells]
pd.DataFrame({k: outcomes(*pair, names, split) for k, split in splits.items()}).rename_axis("exactly right") if len(pair) == 2 else "no rows are stored yet"

# %%
changed(*pair, names, split=splits[20], asked=wordings("rag_distractors")) if len(pair) == 2 else "no rows are stored yet"

# %% [markdown]
# ### Reading
#
# **We found that the filter loses more among distractors than SFT, not less.** Two seeds each:
#
# - *Without distractors* the two are level, and so they are with five, wherever the gold snippet stands.
# - *More of them, the gold snippet first*: the filter is behind by 4.2 points with ten and 4.1 with twenty, and what it loses against its own score without distractors is as much more than SFT loses, intervals clear of zero. Both seeds point the same way, by 5.8 and 2.6 points with ten, 6.2 and 2.1 with twenty. Where one of the two alone is exactly right with twenty, it is SFT 52 times and the filter 8 times.
# - *Twenty, the gold snippet in the middle*: 2.7 points behind, clear of zero.
# - *Trainings differ*, too: two seeds of SFT are 2.5 to 3.8 points apart with distractors, and up to 7 where the gold snippet is last, and the intervals know of questions alone. What speaks against chance is that both pairs of trainings agree, and that a pair shares its data, order and starting weights.
# - *There was room for a gain*: SFT falls from 78 points to 45 with five distractors and to 30 with twenty. The paper reports that a filter falls less **[P]**.
# - *The rates*: all methods chose the smallest of the three, so a smaller one may do better for each. On a hundred questions to choose by, the filter and SFT are level at the rates that either would choose; at the largest SFT has lost eleven points and the filter two, at one seed.
# - *Focal loss and GCE*, one seed each: neither helps. That focal loss falls less than SFT is not shown; it starts 3 points lower, and is 4 behind with the gold snippet last among five. GCE is 8 points behind SFT with twenty.
#
# **A reason that follows from the equations, and is not tested yet [D].** In a causal model a late token has read more than an early one. Its effective sample size is larger (it grows by a fifth to a quarter of a doubling with each doubling of the context, [attention sinks](attention_sinks.ipynb)), so its $\lambda_{\text{obs}}$ is, and so is the $\bar\lambda$ that the next layer weighs it by: whatever a text says, its beginning is believed least. That is where the gold snippet stands in most of the conditions, and where the first token stands, on which many heads rest. Training sees two distractors at most, so at twenty the slope has gone on for three times the length that the low-rank matrices could get used to. If this is it, the same filter with $\beta_a = 0$ in the evaluation loses less, and a gold snippet that stands last among twenty is not lost.

# %% [markdown]
# ## The paper's size
#
# TinyLlama-1.1B is the same notebook with another model, on a machine with a GPU, or several, which share each batch; there are no more questions to learn from, so each of some two thousand is seen twice (its rows are read as above, with `study_rows` at that budget). Its context, 2,048 tokens, does not hold twenty-one whole passages: of 500 questions none fits with twenty distractors and a fifth do not fit with ten (half need more than 3,400 tokens and 1,700, by SmolLM2's tokenizer). Snippets of 32 words fit, the longest prompt needs some 1,400. A model that reads more, SmolLM2 (8,192) among them, takes whole passages by `-p passages '{"words": 0}' -p max_length 1024`.
#
# ```bash
# M=TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T
# hf download $M
# bft run rag_distractors -p model $M -p data nq_open_bm25_distractors -p method bft -p passages '{"ks": [0, 5, 10, 20], "words": 32}' \
#   -p steps 250 -p batch_size 16 -p max_length 320 -p n_eval 500 -p dtype bfloat16 -p store true
# ```
#
# With `--dry-run` it says what it needs and starts nothing. This is what it says here, where the model is not at hand:

# %%
paper = dict(
    model="TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", data="nq_open_bm25_distractors", method="bft", passages={"ks": [0, 5, 10, 20], "words": 32},
    steps=250, batch_size=16, max_length=320, n_eval=500, dtype="bfloat16", store=True,
)  # fmt: skip
print(report("rag_distractors", paper)[0])

# %% [markdown]
# The memory is that of live tensors in a training step, checked on a CPU alone (`bft_nb.plan.memory`); the evaluation, which reads fifty contexts at once, is not in it.
