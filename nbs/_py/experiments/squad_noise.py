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
# > A pretrained Llama is tuned to answer questions while a share of its label tokens is wrong: plain, with focal loss, with a robust loss (GCE), and as a filter.

# %% [markdown]
# **The paper says** that TinyLlama-1.1B, tuned as a filter on SQuAD whose label tokens are corrupted with probability $n_p$, answers better than the same model tuned plainly (SFT) and than with focal loss, the more so the more noise; and that on clean data its F1 is 8.3 % above SFT [@bft2026].
#
# **What would refute it here**: a paired difference in F1 (filter minus SFT, same questions) that is not above zero at $n_p = 0$; one that does not grow with $n_p$; or a robust loss that does better.
#
# "As a filter" is a matter of degree. The shipped start keeps the gain $K$ near 1, where the filter is almost the plain model, and a step of training moves the filter's own parameters by about its learning rate at most. So the filter is also tried with a larger rate for these, and from a start with more of a filter in it (*strong*), and what they have learnt is a table below.
#
# The page has two parts. The first runs *one* cell of the study, by default a tiny random Llama on made-up lookups, offline and in seconds. The second reads the stored rows at the budget it names, and is the result.

# %% tags=["parameters"]
model = "tiny"  # or "smollm2", an id of the hub ("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"), a folder
data = "lookup"  # to learn from; or "squad_v1.1_train_part", "squad_v1.1_train" (the official file), and squad_v1.1_dev is asked
method = "bft"  # "sft", "focal", "gce", "bft", "bft_strong"; or "headwise", "elementwise", "sink" (chapter 42)
noise = 0.3  # n_p, probability of each label token to be wrong
corruption = "uniform"  # or "swap": whole answers exchanged between questions
seed = 0
steps = 60
batch_size = 4
lr = 1e-3  # at its highest
precision_lr = 0.0  # of what a filter (or gate) adds to the layers; 0: `lr`
adapter = "lora"  # or "full"
max_length = 128  # tokens of prompt and answer; longer questions are left out, in training and evaluation
n_eval = 60  # questions asked at the end
dtype = "float32"  # or "bfloat16": autocast
store = False  # append the rows to data/results of this checkout?

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from bft_nb import qa_study
from bft_nb.figures import COLOUR, use_style
from bft_nb.finetune import LEARNT, METHODS, answering, finetune, learnt, prepare
from bft_nb.models import load_model, title
from bft_nb.plan import report
from bft_nb.qa import Collator, Scores, answer, answer_ids, corrupt, encode, load_questions, lookup, mean_nll, noise_floor, prompt_ids, score, swap_answers
from bft_nb.qa_settings import ANSWER, ROWS, check_enough, check_length, check_settings
from bft_nb.qa_study import advantage, cell, changed, leads, level, mean, outcomes, relative, seeds, shown, wordings
from bft_nb.report import choose, configuration, results_folder, signed
from bft_nb.results import append_rows, check_new, model_name, ranks_path, run_key, run_rows, save_answers
from bft_nb.runner import checkout

# %%
use_style()
training = dict(steps=steps, batch_size=batch_size, lr=lr)
params = dict(method=method, noise=noise, corruption=corruption, adapter=adapter, max_length=max_length, answer_length=ANSWER, n_eval=n_eval, dtype=dtype, **training)
check_settings(params | dict(model=model, data=data, seed=seed, precision_lr=precision_lr, store=store));

# %% [markdown]
# ## One cell
#
# The run is named by everything that decides its outcome. A filter starts as [chapter 40](../40_llama.ipynb) ships it. *Strong* (`bft_strong`) is more of a filter from the start: $\beta_a = 1$, attention to the letter, and $\beta_g = .1$, ten times the shipped weight of the prior, at a price in perplexity that chapter 40 lists.

# %%
if METHODS[method].added:
    training["precision_lr"] = params["precision_lr"] = precision_lr or lr
run, path = dict(exp="squad_noise", dataset=data, model=model_name(model), params=params, seed=seed), results_folder() / "squad_noise.csv"
if store: check_new(path, run)
configuration(params)

# %% [markdown]
# Questions to learn from, to choose by, and to be asked. Those that do not leave room for an answer (`ANSWER` tokens, end included) in `max_length` tokens, and those whose own answer is longer than that room, are left out of all three: long contexts are another question. That leaves the short ones: of the 10,570 questions of SQuAD's dev set 809 fit, about 171 of its 2,067 contexts, and the 500 asked are about 158 of these, of 53 words in the median where all have 112 (SmolLM2's tokens). The choice is the same for every method and seed, and no context of the questions to choose by is learnt from, nor are a filter's scales measured on it.

# %%
if data == "lookup":
    taught, asked = lookup(400, seed=0), lookup(400, seed=1)
else:
    taught, asked = load_questions(data), load_questions("squad_v1.1_dev")
loaded = load_model(model)
tokenizer = loaded[1]
check_length(max_length, loaded[0].config)
title(model)


# %%
def that_fit(questions: list, n: int | None = None) -> list:
    "The questions that fit, in an order drawn once, the first n of them."
    order = np.random.default_rng(0).permutation(len(questions))
    fit = (
        q for q in (questions[i] for i in order)
        if len(prompt_ids(q, tokenizer)) + ANSWER <= max_length and len(answer_ids(q.target, tokenizer)) <= ANSWER
    )  # fmt: skip
    return list(fit) if n is None else [q for q, _ in zip(fit, range(n))]


# %%
taught, asked = that_fit(taught), that_fit(asked, n_eval)
valid = taught[-min(100, n_eval) :]
held_out = {q.context for q in valid}
taught = [q for q in taught if q.context not in held_out]
check_enough({"to be asked": (len(asked), n_eval), "to choose by": (len(valid), min(100, n_eval)), "to learn from": (len(taught), 1)}, max_length)
pd.DataFrame({"questions": [len(taught), len(valid), len(asked)]}, index=["to learn from", "to choose by", "to be asked"])

# %%
contexts = list(dict.fromkeys(q.context for q in taught))  # a filter's scales are measured on 16 of them
prepared = prepare(loaded, method, contexts[:: max(1, len(contexts) // 16)][:16], adapter=adapter, max_length=max_length, seed=seed)
prepared.trainable, prepared.added

# %% [markdown]
# The noise is drawn once per seed, for all methods alike: each label token, the end token included, is replaced with probability $n_p$ by a token drawn from the whole vocabulary; the input stays clean. Or, with `swap`, a share $n_p$ of the questions is told another question's answer.

# %%
clean = [encode(q, tokenizer, max_length) for q in taught]
if corruption == "swap":
    examples = [encode(q, tokenizer, max_length) for q in swap_answers(taught, noise, seed)]
else:
    examples = corrupt(clean, noise, len(tokenizer), seed)
pd.Series({"labels": sum(len(e.answer) for e in clean), "questions with a wrong label": sum(not a.answer.equal(b.answer) for a, b in zip(examples, clean))})

# %% [markdown]
# A run that stores its rows keeps checkpoints in `runs/finetune`, and goes on from the last of them if it is killed and started again; one with `store = False` writes none, and starts afresh.

# %%
collate = Collator(tokenizer)
folder = checkout() / "runs" / "finetune" / run_key(run) if store else None
trained = finetune(prepared.model, examples, collate, method, **training, seed=seed, dtype=dtype, out_dir=folder, progress=store)
pd.DataFrame(trained.losses).set_index("step").round(3).T

# %% [markdown]
# Uniform noise puts a floor under the training loss (chapter 41), so losses of different $n_p$ do not compare; answers to clean questions do.

# %%
floor = noise_floor(noise, len(tokenizer)) if corruption == "uniform" else 0.0
round(floor, 3), round(trained.losses[-1]["loss"], 3)


# %%
def measure(questions: list) -> tuple[dict[str, tuple[float, int]], list[str], Scores]:
    "Scores of greedy answers with the number of questions; the negative log-likelihood per token of the true answers to the first hundred."
    with answering(prepared.model, dtype) as lm:
        said = answer(lm, tokenizer, questions, max_new_tokens=ANSWER, batch_size=ROWS)
        nll = mean_nll(lm, [encode(q, tokenizer, max_length) for q in questions[:100]], collate)
    found = score(said, questions)
    means = {"em": found.exact.mean(), "f1": found.f1.mean(), "subspan": found.subspan.mean()}
    return {name: (float(value), len(said)) for name, value in means.items()} | {"nll": (nll, min(100, len(said)))}, said, found


# %%
measured = {"valid": measure(valid), "test": measure(asked)}
pd.DataFrame({part: {name: value for name, (value, _) in m[0].items()} for part, m in measured.items()}).round(3)

# %% [markdown]
# The defaults only try the page: sixty steps of four examples teach the tiny model no answer. In a minute it learns some by `bft run squad_noise -p steps 150 -p batch_size 32 -p lr 1e-2`.
#
# What a filter has learnt, on questions to choose by: the gain $K$, the weights of the prior and of the precision in attention, and $\log\bar\lambda$.

# %%
precision = learnt(prepared.model, method, tokenizer, valid[:16])
pd.Series(precision).round(4) if precision else "this method is no filter"

# %% [markdown]
# The rows of this run, and its answers. They enter the book's results only on request, and never from the tiny model.

# %%
parts = {part: found for part, (found, _, _) in measured.items()}
parts["train"] = {name: (value, len(examples)) for name, value in (("loss", trained.losses[-1]["loss"]), ("trainable", prepared.trainable), ("added", prepared.added))}
parts["train"] |= {name: (value, len(valid[:16])) for name, value in precision.items()}
rows = run_rows(run, parts, seconds=round(trained.seconds, 1), device=next(prepared.model.parameters()).device.type)
len(rows)

# %%
if store:
    for part, questions in {"valid": valid, "test": asked}.items():
        _, said, found = measured[part]
        save_answers(ranks_path(path.parent / "answers", run, part), [q.id for q in questions], said, found.exact, found.f1)
    append_rows(path, rows)

# %% [markdown] tags=["result"]
# ## The study
#
# From here on nothing of this run is used: everything is read from `data/results`. All of it is made again by
#
# ```bash
# bft models fetch smollm2
# BFT_DATA=… bft sweep nbs/experiments/grids/squad_noise.yaml -j 2
# ```
#
# SmolLM2-135M-Instruct learns from a thousand questions of 44 articles, each seen once, with low-rank matrices beside all its projections; 500 questions of other articles are asked. Within a seed, every method has the same contexts, order, batches, starting weights and steps.
#
# ### What was chosen, on validation
#
# F1 of a hundred questions about contexts that were not learnt from, at $n_p = .3$ and seed 0, by learning rate: the same three rates for every method, and the best one is taken for all its cells. The filter has one more trial than the others, with a rate of its *own* for the parameters that only it has.

# %%
stored = qa_study.study_rows("squad_noise")  # at the budget of `qa_study.SQUAD`
select = qa_study.TRIALS["squad_noise"]
chosen = {m: qa_study.tuned(stored, m, **select) for m in METHODS}
levels = sorted(stored["noise"].unique()) if len(stored) else []
cells = {(n, m): rows for n in levels for m in METHODS if len(rows := cell(stored, m, chosen[m], noise=n))}
qa_study.choices(stored, **select) if len(stored) else "no rows are stored yet"

# %% [markdown]
# Where the chosen rate is the smallest or largest that was tried, a better one may lie beyond it. Cells stored at rates other than the chosen ones appear below only in the table at equal rates:

# %%
others = qa_study.stray(stored, chosen, **select)
others if len(others) else "all are stored at the chosen rates" if len(stored) else "no rows are stored yet"

# %% [markdown]
# ### The table
#
# Exact match and F1 in points of 100 over the test questions and seeds, with a 95 % bootstrap interval over questions; F1 of each seed, which says how far trainings differ; the negative log-likelihood per token of the true answers to the first hundred [nat]; and F1 minus that of SFT, in points and in percent of SFT's F1 (the paper's unit; its 8.3 % is at $n_p = 0$). The difference is paired by question over the seeds that both have, so it need not be the difference of the two means. Questions about the same context are alike, so the intervals are somewhat too narrow.


# %%
def line(noise_level: float, m: str) -> dict[str, str]:
    "One line of the table."
    rows, sft = cells[noise_level, m], cells.get((noise_level, "sft"), stored.iloc[:0])
    share = relative(rows, sft) if m != "sft" else None
    against = {"Δ F1 to SFT": mean(advantage(rows, sft)) if m != "sft" else "", "in %": signed(share, 1) if share else ""}
    nll = choose(rows, split="test", metric="nll")["value"].mean()
    return {"EM": shown(rows, metric="exact"), "F1": shown(rows), "F1 by seed": seeds(rows), "NLL": f"{nll:.2f}"} | against


# %%
pd.DataFrame({(n, METHODS[m].title): line(n, m) for n, m in cells}).T.rename_axis(["noise", "method"]) if cells else "no rows are stored yet"

# %%
#| label: fig-noise
#| fig-cap: "F1 on clean questions after training on labels of which a share is wrong (bars: 95 % interval over questions)."
#| code-fold: true
if len(levels) > 1:
    fig, ax = plt.subplots()
    methods = [m for m in METHODS if any((n, m) in cells for n in levels)]
    for i, m in enumerate(methods):
        at = [(n + 0.004 * (i - (len(methods) - 1) / 2), level(cells[n, m])) for n in levels if (n, m) in cells]
        bars = [[f.mean - f.low for _, f in at], [f.high - f.mean for _, f in at]]
        ax.errorbar([x for x, _ in at], [f.mean for _, f in at], bars, fmt="o-", markersize=4, capsize=3, color=COLOUR[qa_study.ROLES[m]], label=METHODS[m].title)
    ax.set(xlabel="share of wrong label tokens $n_p$", ylabel="F1 [points of 100]")
    ax.legend()
    plt.show()

# %% [markdown]
# ### At equal learning rates
#
# The two need not have chosen the same rate, and a hundred answers tell little between two that are close. So here is F1 at each rate at which both were run, over the seeds that both have. *Own* is a separate rate for the filter's parameters; that line is compared with SFT at the common rate.

# %%
equal = {(METHODS[m].title, n): qa_study.at_equal_rates(stored, m, noise=n).rename(columns={METHODS[m].title: "filter"}) for m in METHODS if METHODS[m].added == "bft" for n in levels}
pd.concat(equal, names=["method", "noise"]) if len(stored) else "no rows are stored yet"

# %% [markdown]
# The negative log-likelihood of the true answers [nat per token] is steadier than F1; the mean over the seeds that are stored:

# %%
nll, titles = choose(stored, split="test", metric="nll"), {m: how.title for m, how in METHODS.items()}
nll.pivot_table(index=["noise", "method"], columns="rates", values="value").rename(index=titles).round(2) if len(nll) else "no rows are stored yet"

# %% [markdown]
# ### How much of a filter was it?
#
# After training, averaged over the layers and seeds: $K = 1$ would be the plain residual connection, $\beta_a = 0$ the plain attention; the shipped start has $\beta_g = .01$ and $\beta_a = .25$, the strong one .1 and 1.

# %%
of_filter = {(METHODS[m].title, n): qa_study.learnt(rows) for (n, m), rows in cells.items() if METHODS[m].added == "bft"}
pd.DataFrame(of_filter, index=LEARNT).T.rename_axis(["method", "noise"]).round(4) if of_filter else "no rows are stored yet"

# %% [markdown]
# Does the filter's lead over SFT grow with noise? Its lead at each level minus its lead on clean labels, question by question:

# %%
pairs = {n: (cells[n, "bft"], cells[n, "sft"]) for n in levels if {(n, "bft"), (n, "sft")} <= set(cells)}
lead = leads(pairs)
growth = {n: mean(lead[n] - lead[0.0]) for n in lead if n and 0.0 in lead}
pd.Series(growth, name="growth of the lead, F1").rename_axis("noise") if growth else "no rows are stored yet"

# %% [markdown]
# ### Which answers change
#
# Answers that are exactly right, by who gave them, over all shared seeds; then, at the highest stored noise, some that only one of the two got right: what is right can be read off the other column. An id is that of `squad_v1.1_dev` (the field `id` of `dev-v1.1.json`); the question stands beside it where this page ran with that set in `BFT_DATA`.

# %%
names = ("BFT", "SFT")
pd.DataFrame({n: outcomes(*pairs[n], names) for n in lead}).rename_axis("exactly right") if lead else "no rows are stored yet"

# %%
changed(*pairs[max(lead)], names, asked=wordings("squad_noise")) if lead else "no rows are stored yet"

# %% [markdown]
# ### Reading
#
# **We found no gain from the filter, on clean labels or on wrong ones.** Two seeds each:
#
# - *Clean labels*: F1 is .6 points below SFT's, −.9 % with an interval from −3.8 to +2.2, so the paper's +8.3 % lies outside.
# - *Three wrong tokens in ten*: 1.0 point below, with an interval that includes zero. The lead does not grow with the noise.
# - *The rate*: the filter chose the smallest rate it was tried with, by .2 points on a hundred answers. At equal rates, .0003 and .001, and with a larger rate of its own as well, the two are level.
# - *The likelihood* of the true answers is better at .001 than at .0003 for both, at seed 0 with noise: 1.20 for SFT and 1.21 for the filter against 1.31 and 1.32. So the filter's .72 on clean labels, where SFT has .66, is the rate's: by F1 on a hundred answers it chose the smaller one, and on clean labels it was run at that alone.
# - *More of a filter does not help*, as far as it was tried: the strong start, with $K = .89$, is 1.0 point behind SFT at the same rate, .0003, with an interval that includes zero; one seed, at that rate alone (its other cells stand in the grid).
# - *Focal loss and GCE* (one seed each) bring nothing either: level with SFT on clean labels and on noisy ones, with a worse likelihood, GCE most. At this size and this noise there is little for a robust method to win: SFT itself loses 4 points to three wrong tokens in ten.
#
# **A hint: the filter may tolerate a larger step.**
#
# - At .003 and seed 0 SFT diverged (it ends at a loss of 8.4, where the filter has 4.2), and none of its answers is right; the filter, on the same batches, goes on to 54 points. On the questions to choose by it keeps 63 points at that rate and seed, focal loss 59, GCE 39, SFT none. At seed 1 neither SFT nor the filter diverged, and they have 58 and 59. So the 27 points of that line are one training of two, and its interval, which is over questions, does not say how often that happens.
# - The same shows elsewhere: among [distractors](rag_distractors.ipynb), at that rate, SFT loses eleven points on the questions to choose by and the filter two, at one seed; and BERT4Rec on MovieLens learns as a filter at a rate at which its other layers do not ([the study](recommendation.ipynb)).
# - A validation set keeps one from such rates, so none of this is in the main table.
#
# **Why the noise makes no difference to the filter** **[D]**.
#
# - $\lambda$ is the precision of a token that is *read*, and what is read is clean, in training as at the end. A wrong label enters through the loss, behind the last layer, where there is no gain that could be turned down. What can know something of a label's reliability is a loss, such as focal loss and GCE.
# - And as shipped it is hardly a filter: $K = .99$, and both $\beta$ are where they started, since 250 steps move them by little. (The strong start moves them no more.)

# %% [markdown]
# ## The paper's size
#
# TinyLlama-1.1B on 32,000 questions of SQuAD is the same notebook with other parameters, on a machine with a GPU, or several, which share each batch (its rows are read as above, with `study_rows` at that budget):
#
# ```bash
# M=TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T
# hf download $M
# bft run squad_noise -p model $M -p data squad_v1.1_train -p method bft -p noise 0.3 \
#   -p steps 2000 -p batch_size 16 -p max_length 384 -p n_eval 2000 -p dtype bfloat16 -p store true
# ```
#
# With `--dry-run` it says what it needs and starts nothing. This is what it says here, where the model is not at hand; its parameters are counted on its published configuration:

# %%
paper = dict(
    model="TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", data="squad_v1.1_train", method="bft", noise=0.3,
    steps=2000, batch_size=16, max_length=384, n_eval=2000, dtype="bfloat16", store=True,
)  # fmt: skip
print(report("squad_noise", paper)[0])

# %% [markdown]
# The memory is that of live tensors in a training step, found by counting what two and three layers of this width keep (`bft_nb.plan.memory`). It has been checked on a CPU alone: the profiler's peak of live bytes for whole models of SmolLM2's shape lies 0 to 6 % above. What a GPU's allocator adds has not been measured, and the evaluation, which asks fifty questions at once, is not in it. Shorter questions need less of it.
