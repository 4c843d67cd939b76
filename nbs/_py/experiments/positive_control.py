# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does a learned precision find the truth?
#
# > The positive control: a world in which the noise of every item is known, so that a learned precision can be right or wrong.

# %% [markdown]
# **The paper says** that a precision $\tau_i$ learned per item tells how far an item can be trusted, and that weighing by it, and updating by the gain it implies, makes better predictions where tokens differ in noise [@bft2026]. On real data nobody can check the first half. Here we can: chapter 29 draws every item $i$ with a reliability $\rho_i$, the probability that its appearance means something.
#
# **What would refute it here**: a rank correlation of $\tau_i$ with $\rho_i$ near zero; one as large in a world where all items are equally reliable; accuracy that does not fall when the learned $\tau$ are exchanged among items; no advantage over the plain layer, or one that does not grow with the heterogeneity of the items, in worlds where the exact filter profits from knowing $\rho$. Where even the exact filter hardly profits, equal accuracy refutes nothing; so this profit, the *headroom*, stands beside every result.
#
# This page has two parts. The first runs *one* cell of the study, by default a small one, offline and in seconds. The second reads *all* stored rows, and is the result.

# %% tags=["parameters"]
n_items = 200
n_clusters = 20
n_users = 600
n_events = 22  # per user; the last is tested on, the one before validated on
heterogeneity = 1.0  # spread of the items' reliability
two_kinds = False  # reliability is .05 or .95 (at heterogeneity 1) instead of evenly spread between them
bft = True  # filtering layers?
tau = "item"  # learned per item; "constant": one learned number for all; "true": ρ/(1 − ρ), not learned
seed = 0  # of the world and of the training
d = 32
dropout = 0.2
lr = 3e-3
precision_lr = 3e-2  # of log τ and the process noise
epochs = 3
store = False  # append the rows to data/results of this checkout?

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import transformers
from scipy.stats import pearsonr, rankdata

from bft_nb.backbones import SASRec
from bft_nb.core import check_option
from bft_nb.figures import COLOUR, use_style
from bft_nb.interactions import from_world, item_counts, leave_one_out, repeats
from bft_nb.ranking import hit_rate, ndcg, paired_bootstrap, protocol
from bft_nb.report import choose, configuration, load_rows, results_folder, runs_of, signed
from bft_nb.results import append_rows, check_new, has_rows, load_ranks, load_strata, ranks_path, run_rows, save_ranks
from bft_nb.training import evaluate, fit
from bft_nb.world import ladder, make_world

# %%
use_style()
check_option("tau", tau, ["item", "constant", "true"])
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()  # it warns of file systems

# %% [markdown]
# ## One cell
#
# The world, the protocol, and the ladder of four predictors: one that knows the popularity alone; one that filters exactly but takes all items for equally reliable; one that also knows $\rho$ when it names the next item; and one that knows it when weighing the history as well. The last step is the headroom, all that a precision can add to a model which has learned the rest.

# %%
size = dict(n_items=n_items, n_clusters=n_clusters, n_users=n_users, n_events=n_events, heterogeneity=heterogeneity, two_kinds=two_kinds)
world = make_world(**size, seed=seed)
split = leave_one_out(from_world(world))
counts = item_counts(split)[1:]
protocol(split=f"{split.kind}, {split.hash[:8]}", n_items=n_items, filter_seen=False, max_length=n_events - 1, n=n_users, repeats=repeats(split.test))

# %%
steps = ladder(world)
pd.DataFrame({name: r._asdict() for name, r in steps.items()}).T.round(4)

# %% [markdown]
# Users come back to items in this world, so seen items compete. Both arms, filter and plain, get the same budget; a plain model has no precision to tune.

# %%
training = dict(lr=lr, negatives=min(256, n_items), epochs=epochs, patience=max(5, epochs // 5))
params = dict(bft=bft, d=d, dropout=dropout, split_hash=split.hash[:16], **size, **training)
if bft:
    params |= dict(tau=tau, precision_lr=precision_lr)
run, path = dict(exp="positive_control", dataset="synthetic", model="sasrec", params=params, seed=seed), results_folder() / "positive_control.csv"
if store: check_new(path, run)
configuration(params)

# %%
torch.manual_seed(seed)
precision = dict(precision="constant" if tau == "constant" else "item") if bft else {}
model = SASRec(n_items, max_length=n_events - 1, d=d, dropout=dropout, bft=bft, **precision)
if bft and tau == "true":
    rho = torch.as_tensor(world.reliability[1:])
    model.precision.log_tau.weight.data[1:, 0] = (rho / (1 - rho)).log().float()
    model.precision.requires_grad_(False)

# %%
fitted = fit(model, split, seed=seed, precision_lr=precision_lr if bft else None, device="cpu", filter_seen=False, **training)
pd.DataFrame(fitted.history).set_index("epoch").drop(columns="seconds").round(4).tail(3)


# %% [markdown]
# Accuracy on the test item. For a filter with a $\tau$ per item also what remains when, after training, the $\tau$ are *shuffled* among items, and when all are made *level* (their geometric mean).


# %%
def accuracy(examples) -> tuple[np.ndarray, dict[str, float]]:
    "Ranks, and metric: mean over users."
    ranks = evaluate(model, examples, filter_seen=False)
    return ranks.numpy(), {"hr@10": float(hit_rate(ranks, 10).mean()), "ndcg@10": float(ndcg(ranks, 10).mean())}


# %%
@torch.no_grad()
def with_tau(change) -> dict[str, float]:
    "Test accuracy with log τ of the items changed by a function of it; the model is left as it was."
    log_tau = model.precision.log_tau.weight
    kept = log_tau.clone()
    log_tau[1:] = change(kept[1:])
    found = accuracy(split.test)[1]
    log_tau.copy_(kept)
    return found


# %%
ranks, test = accuracy(split.test)
_, valid = accuracy(split.valid)
if bft and tau == "item":
    order = torch.randperm(n_items, generator=torch.Generator().manual_seed(seed))
    for name, change in (("shuffled", lambda x: x[order]), ("level", lambda x: x.mean().expand_as(x))):
        test |= {f"{metric}.{name}": value for metric, value in with_tau(change).items()}
pd.Series(test).round(4)


# %% [markdown]
# Where items differ, does $\tau$ order them? By rank correlation, over all items and over those seen at least 50 times in training, and with popularity held fixed (ranks regressed on the rank of the count). Where all items are equally reliable there is no order to find; then $\tau$ is compared with the reliability the same item has in the world of the same seed *with* heterogeneity, which nothing in the data can tell.


# %%
def rank_correlation(x, y, given=None) -> float:
    "Spearman's, or with `given` the partial one: of what its ranks leave unexplained."
    a, b = rankdata(x), rankdata(y)
    if given is not None:
        a, b = (r - np.polyval(np.polyfit(rankdata(given), r, 1), rankdata(given)) for r in (a, b))
    return float(pearsonr(a, b)[0])


# %%
would_be = make_world(n_items, n_clusters, 1, 3, seed=seed).reliability[1:]  # evenly spread, same order of items
truth = world.reliability[1:] if heterogeneity else would_be
tenth = np.argsort(np.argsort(would_be)) * 10 // n_items  # of items by reliability, 0 the least


# %%
def order_found(name: str, value) -> dict[str, float]:
    "How a number per item goes with the truth, and its median in each tenth of items by reliability."
    often = counts >= 50
    found = {f"spearman.{name}_rho": rank_correlation(value, truth), f"partial.{name}_rho": rank_correlation(value, truth, counts)}
    found[f"spearman.{name}_count"] = rank_correlation(value, counts)
    if often.sum() > 20:
        found[f"spearman.{name}_rho.frequent"] = rank_correlation(value[often], truth[often])
    return found | {f"{name}.b{b}": float(np.median(value[tenth == b])) for b in range(10)}


# %% [markdown]
# A plain layer has no $\tau$, but it may have learned the same thing: a key can carry its item's reliability, and the softmax then weighs by it. So we measure in both models how much attention an item's tokens receive in the first layer, as a multiple of the uniform weight, averaged over heads, queries and users.


# %%
@torch.no_grad()
def received(users: int = 2000) -> np.ndarray:
    "Mean attention weight an item's tokens receive in layer 1, uniform = 1; NaN if never seen."
    items = torch.as_tensor(world.items[:users, :-1])
    x, layer = model.eval().embed(items), model.encoder.layers[0]
    mean, t = (x.mean if bft else x), items.shape[1]
    qkv = torch.nn.functional.linear(layer.norm1(mean), layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias)
    q, k, _ = qkv.unflatten(-1, (3, layer.self_attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    logits = q @ k.mT / q.shape[-1] ** 0.5
    if bft:
        logits = logits + x.precision.mean(-1).log()[:, None, None, :]
    causal = torch.ones(t, t, dtype=torch.bool).tril()
    weight = logits.masked_fill(~causal, -torch.inf).softmax(-1).mean(1) * torch.arange(1, t + 1)[:, None]
    per_token = weight.sum(1) / torch.arange(t, 0, -1)  # over the queries that see it
    total, n = (np.bincount(items.ravel(), w, n_items + 1)[1:] for w in (per_token.ravel(), None))
    return np.divide(total, n, out=np.full(n_items, np.nan), where=n > 0)


# %%
attention = received()
known = np.isfinite(attention)
learnt = order_found("attention", np.where(known, attention, np.nanmedian(attention)))
if bft and tau == "item":
    values = model.precision.tau.detach().numpy()
    learnt |= order_found("tau", values) | {"sd.log_tau": float(np.log(values).std())}
pd.Series({name: value for name, value in learnt.items() if ".b" not in name}, dtype=float).round(3)

# %% [markdown]
# The rows of this run; they enter the book's results only on request. With the rank of each test target is stored, as a stratum, whether the last item before the target is an unreliable one ($\rho < .5$: stratum 0).

# %%
found = {part: {name: (value, n_users) for name, value in of.items()} for part, of in (("test", test), ("valid", valid))}
found["train"] = {name: (value, n_items) for name, value in learnt.items()} | {"best_epoch": (fitted.best_epoch, 1)}
rows = run_rows(run, found, seconds=round(fitted.seconds, 1), device="cpu")
len(rows)

# %% [markdown]
# The steps of the ladder are rows of models of their own; both arms share them.

# %%
STEPS = dict(zip(steps, ["popularity", "bayes", "bayes+predict", "bayes+predict+filter"], strict=True))
ceilings = []
for name, r in steps.items():
    of_world = dict(run, model=STEPS[name], params=dict(bft=False, split_hash=split.hash[:16], **size))
    if not (store and has_rows(path, of_world)):
        ceilings += run_rows(of_world, {"test": {"hr@10": (r.hr, r.n), "ndcg@10": (r.ndcg, r.n)}}, seconds=0, device="cpu")

# %%
if store:
    unreliable_last = world.reliability[world.items[:, -2]] < 0.5
    save_ranks(ranks_path(path.parent / "ranks", run, "test"), ranks, np.where(unreliable_last, 0, 1))
    append_rows(path, rows + ceilings)

# %% [markdown] tags=["result"]
# ## The study
#
# From here on nothing of this run is used: everything is read from `data/results`. The worlds have 1,000 items in 50 clusters and 22 events per user. The seed draws the world and trains the model, so the two arms of one seed meet the same users, and users of different seeds live in different worlds. The rows are made, for `bft` true and false, by
#
# ```bash
# bft run positive_control -p n_items 1000 -p n_clusters 50 -p store true -p seed 0 -p bft true -p n_users 8000 -p epochs 25                    # evenly spread
# bft run positive_control -p n_items 1000 -p n_clusters 50 -p store true -p seed 0 -p bft true -p n_users 8000 -p epochs 25 -p two_kinds true  # two kinds
# ```
#
# and the second also with `-p n_users 2000 -p epochs 80` and `-p n_users 500 -p epochs 200` (early stopping ends most), with `-p heterogeneity 0.5` and `0`, and with `-p tau constant` and `-p tau true`. Learning rate, dropout and width are the same for both arms; in the world with two kinds, .003 with dropout .2 was better on validation than .01 with dropout .1 for both. The rate of $\log\tau$ was not searched. Seeds stored so far:

# %%
stored = choose(load_rows("positive_control"), n_items=1000, n_clusters=50)
ARMS = {
    "plain": dict(bft=False), "filter": dict(bft=True, tau="item", precision_lr=0.03),
    "filter, one τ for all": dict(bft=True, tau="constant"), "filter, true τ": dict(bft=True, tau="true"),
}  # fmt: skip
TWO = dict(two_kinds=True, heterogeneity=1, n_users=8000)
WORLDS = {
    "evenly spread, 8,000 users": dict(TWO, two_kinds=False), "two kinds, 8,000 users": TWO,
    "two kinds, 2,000 users": dict(TWO, n_users=2000), "two kinds, 500 users": dict(TWO, n_users=500),
    "half as different, 2,000 users": dict(TWO, n_users=2000, heterogeneity=0.5), "all equal, 2,000 users": dict(TWO, n_users=2000, heterogeneity=0),
}  # fmt: skip


# %%
def rows_of(arm: str, **of_world) -> pd.DataFrame:
    "Rows of one arm, or of a step of the ladder, in one kind of world."
    return choose(stored, **(dict(ARMS[arm], model="sasrec") if arm in ARMS else dict(model=arm)), **of_world)


def by_seed(rows: pd.DataFrame, metric: str, split: str = "test") -> pd.Series:
    "A metric by seed."
    return choose(rows, metric=metric, split=split).set_index("seed")["value"].sort_index()


def spread(values: pd.Series, digits: int = 2) -> str:
    "Mean over seeds, and their range."
    if values.empty:
        return "–"
    between = f" ({values.min():.{digits}f} … {values.max():.{digits}f})" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{between}".replace("-", "−")


# %%
seeds = {arm: {world: rows_of(arm, **of)["seed"].nunique() for world, of in WORLDS.items()} for arm in ARMS}
stored_worlds = {world: of for world, of in WORLDS.items() if seeds["filter"][world]}
pd.DataFrame(seeds).rename_axis(index="seeds stored")

# %% [markdown]
# A zero is a cell that has not been run; what follows shows the others.
#
# ### Does $\tau$ order the items?
#
# Two kinds of items are two values of $\rho$; even a perfect order of them has a rank correlation of $\sqrt{3}/2 = .87$ only, because within a kind all ranks tie. Rank correlations of the learned $\tau$, mean over seeds and their range:

# %%
ORDER = {"τ with ρ": "spearman.tau_rho", "seen ≥ 50 times": "spearman.tau_rho.frequent", "popularity fixed": "partial.tau_rho", "τ with popularity": "spearman.tau_count", "sd of log τ": "sd.log_tau"}
pd.DataFrame({world: {name: spread(by_seed(rows_of("filter", **of), metric, "train")) for name, metric in ORDER.items()} for world, of in stored_worlds.items()}).T


# %% [markdown]
# **Reading. Yes: with enough data $\tau$ orders the items by their true reliability** (drawn in the figure below).
#
# - It does so for frequent items a little better than for all, and nearly perfectly where there are two kinds.
# - With fewer users the order is lost first for the items seen least.
# - That chance alone could order a thousand items like this is ruled out by the size of the correlation: its standard error without any relation is .03.
# - Where all items are equal, $\tau$ still spreads, but without order: a spread of $\tau$ alone is no evidence of anything. (A mild null: with 2,000 users and half of the events noise, neither layer gets beyond popularity there, as the table of accuracies shows; so $\tau$ was under no pressure.)


# %%
def tenths(arm: str, name: str, **of_world) -> np.ndarray:
    "A number of each tenth of items by reliability, (seeds, 10)."
    rows = rows_of(arm, **of_world)
    return np.array([by_seed(rows, f"{name}.b{b}", "train").to_numpy() for b in range(10)]).T


def draw_tenths(ax, name: str, lines: list[tuple]) -> None:
    "One line per seed for each (arm, world, role, label)."
    for arm, world, role, label in lines:
        for i, line in enumerate(tenths(arm, name, **WORLDS[world])):
            ax.plot(range(1, 11), line, "o-", markersize=3, linewidth=1, color=COLOUR[role], label=None if i else label)
    ax.set(xticks=range(1, 11), xlabel="tenth of items by true reliability, 1: least reliable")


# %%
#| label: fig-tau
#| fig-cap: "The learned τ follows the odds of signal ρ/(1 − ρ) in both kinds of world, and is flat where all items are equal (medians of ten groups of 100 items; one line per seed; all equal: by the reliability the item would have)."
#| code-fold: true
fig, ax = plt.subplots()
draw_tenths(ax, "tau", [("filter", world, role, world) for world, role in (("evenly spread, 8,000 users", "posterior"), ("two kinds, 2,000 users", "other"), ("all equal, 2,000 users", "prior"))])
centre = 0.05 + 0.9 * (np.arange(10) + 0.5) / 10
ax.plot(range(1, 11), centre / (1 - centre), "--", color=COLOUR["truth"], label="odds ρ/(1 − ρ), evenly spread")
ax.set(yscale="log", ylabel="learned precision τ")
ax.legend(fontsize=8)
plt.show()

# %% [markdown]
# ### Does the model use it?
#
# The learned $\tau$, made level (the geometric mean for all) or shuffled among items after training:

# %%
ENDS = {"as learned": "", "level": ".level", "shuffled": ".shuffled"}
used = {world: {name: spread(by_seed(rows_of("filter", **of), f"ndcg@10{end}"), 4) for name, end in ENDS.items()} for world, of in stored_worlds.items()}
pd.DataFrame(used).T.rename_axis(index="NDCG@10")

# %% [markdown]
# **Reading. Yes, but most of what the filter knows about reliability does not sit in $\tau$.**
#
# - Shuffling costs more than levelling everywhere items differ, so the trained model weighs by $\tau$; where all items are equal neither costs anything.
# - But levelling costs less, at most 5 in 100.
#
# (The range over seeds is mostly that of the worlds.)
#
# ### Is it better than the plain layer?
#
# Floor and ceilings of chapter 29 (the ladder above: `bayes` filters exactly, `predict` and `filter` say where it knows $\rho$), the two layers, and their paired difference with a 95 % bootstrap interval over users. *Headroom* is what weighing the history by the true $\rho$ adds to the exact filter.


# %%
def stored_users(rows: pd.DataFrame, load) -> dict[int, np.ndarray]:
    "Stored ranks or strata by seed."
    return {run["seed"]: load(ranks_path(results_folder() / "ranks", run)) for run in runs_of(rows)}


def difference(candidate: pd.DataFrame, baseline: pd.DataFrame) -> dict:
    "Candidate minus baseline in NDCG@10 over the users of all worlds both have seen, with a bootstrap interval."
    a, b, strata = (stored_users(*of) for of in ((candidate, load_ranks), (baseline, load_ranks), (candidate, load_strata)))
    seeds = sorted(set(a) & set(b))
    a, b, strata = (np.concatenate([x[s] for s in seeds]) for x in (a, b, strata))
    return paired_bootstrap(torch.as_tensor(a), torch.as_tensor(b), ndcg, strata, n=1000)


def headroom(**of_world) -> pd.Series:
    "What weighing the history by the true ρ adds to the exact filter's NDCG@10, by seed."
    return by_seed(rows_of("bayes+predict+filter", **of_world), "ndcg@10") - by_seed(rows_of("bayes+predict", **of_world), "ndcg@10")


# %%
paired = {world: of for world, of in WORLDS.items() if set(rows_of("filter", **of)["seed"]) & set(rows_of("plain", **of)["seed"])}
gaps = {world: difference(rows_of("filter", **of), rows_of("plain", **of)) for world, of in paired.items()}
LADDER = ["popularity", "bayes", "bayes+predict", "bayes+predict+filter"]
table = {
    world: {name: f"{by_seed(rows_of(name, **of), 'ndcg@10').mean():.4f}" for name in [*LADDER, "plain", "filter"]}
    | {"filter − plain": signed(gaps[world]["all"]), "headroom": f"{headroom(**of).mean():.4f}"}
    for world, of in paired.items()
}
pd.DataFrame(table).T.rename_axis(index="NDCG@10")

# %% [markdown]
# By seed, since an interval over users does not know that another seed trains another model in another world:

# %%
by_one = {world: by_seed(rows_of("filter", **of), "ndcg@10") - by_seed(rows_of("plain", **of), "ndcg@10") for world, of in paired.items()}
pd.DataFrame({world: {f"seed {s}": f"{v:+.4f}".replace("-", "−") for s, v in gap.dropna().items()} for world, gap in by_one.items()}).T.fillna("–")

# %% [markdown]
# **Reading. No: where the items differ, no interval lies above zero.**
#
# - With 2,000 users or more every interval lies below the headroom (with 500 it just reaches it). Two seeds of one kind of world differ in sign.
# - Both layers lie well below the exact filter that does not even use $\rho$ on the history, so there is room for a better model; a learned precision does not fill it.
# - In the world of equal items the exact filter is far ahead of both because they have not learned the clusters at all.
#
# ### Does the advantage grow with heterogeneity, and with fewer users?
#
# Two figures: the difference between the layers beside the headroom, by either.


# %%
def draw(ax, names: list[str], x: str) -> None:
    "Advantage with its interval beside the headroom, one point for each world of which both arms are stored."
    names = [name for name in names if name in paired]
    at, d = [paired[name][x] for name in names], [gaps[name]["all"] for name in names]
    error = [[g.mean - g.low for g in d], [g.high - g.mean for g in d]]
    ax.plot(at, [headroom(**paired[name]).mean() for name in names], "s--", markersize=4, color=COLOUR["truth"], label="exact filter: with − without ρ")
    ax.errorbar(at, [g.mean for g in d], error, fmt="o-", markersize=4, capsize=3, color=COLOUR["posterior"], label="filtering − plain layer")
    ax.axhline(0, color=COLOUR["prior"], linestyle=":")
    ax.set(ylabel="difference in NDCG@10")
    ax.margins(y=0.3)
    ax.legend(fontsize=8, loc="upper left")


# %%
#| label: fig-heterogeneity
#| fig-cap: "Knowing ρ is worth more to the exact filter the more the items differ; the difference between the layers does not grow with it (two kinds, 2,000 users; bars: 95 % over users)."
#| code-fold: true
fig, ax = plt.subplots()
draw(ax, ["all equal, 2,000 users", "half as different, 2,000 users", "two kinds, 2,000 users"], "heterogeneity")
ax.set(xlabel="heterogeneity of the reliability", xticks=[0, 0.5, 1])
plt.show()

# %%
#| label: fig-users
#| fig-cap: "The headroom is there at every number of users; the filtering layer draws no more from it than the plain one (two kinds; bars: 95 % over users)."
#| code-fold: true
fig, ax = plt.subplots()
draw(ax, ["two kinds, 500 users", "two kinds, 2,000 users", "two kinds, 8,000 users"], "n_users")
ax.set(xlabel="users", xscale="log", xticks=[500, 2000, 8000], xticklabels=["500", "2,000", "8,000"])
ax.minorticks_off()
plt.show()

# %% [markdown]
# **Reading. Neither: the difference between the layers stays near zero** (with two kinds of items and 8,000 users the filter is .003 behind, clear of zero), while the headroom grows with heterogeneity and is there at every number of users. At heterogeneity 0 there is a reservation: there neither layer has learned more than popularity.
#
# ### Why
#
# Three questions. Does a filter with one $\tau$ for all items do as well, and would the *true* $\tau$ (odds of signal, not learned) do better? Is the difference where a precision should act, at users whose last item was an unreliable one ($\rho < .5$)? And has the plain layer learned to look away from unreliable items by itself?

# %%
why = {}
for world, arm in [(world, arm) for world in ("two kinds, 8,000 users", "two kinds, 2,000 users") if world in paired for arm in list(ARMS)[1:] if seeds[arm][world]]:
    gap = difference(rows_of(arm, **WORLDS[world]), rows_of("plain", **WORLDS[world]))
    why[world, arm] = {"all users": signed(gap["all"]), "last item unreliable": signed(gap["0"]), "last item reliable": signed(gap["1"])}
pd.DataFrame(why).T.rename_axis(columns="minus plain, NDCG@10")

# %% [markdown]
# **Reading. A learned order, right as it is, adds little or nothing here:** a filter with a single $\tau$ for all items does as well as one with a $\tau$ for each; nor does the difference favour the users for whom it should matter. The true $\tau$ has not been run.
#
# For the third question, how the attention that an item receives goes with $\rho$ and with popularity (table), and by tenths of reliability (figure):

# %%
looks = {
    (world, arm): {"ρ": spread(by_seed(rows_of(arm, **of), "spearman.attention_rho", "train")), "popularity": spread(by_seed(rows_of(arm, **of), "spearman.attention_count", "train"))}
    for world, of in WORLDS.items() for arm in list(ARMS)[:3] if seeds[arm][world]
}  # fmt: skip
pd.DataFrame(looks).T.rename_axis(columns="received attention, rank correlation with")

# %%
#| label: fig-attention
#| fig-cap: "The plain layer, which has no precision, also gives reliable items more attention than unreliable ones: keys carry the reliability of their item (layer 1, evenly spread, 8,000 users; one line per seed)."
#| code-fold: true
fig, ax = plt.subplots()
draw_tenths(ax, "attention", [(arm, "evenly spread, 8,000 users", role, arm) for arm, role in (("plain", "baseline"), ("filter", "posterior"))])
ax.axhline(1, color=COLOUR["prior"], linestyle=":")
ax.set(ylabel="attention received (uniform: 1)")
ax.legend()
plt.show()

# %% [markdown]
# **Reading. The plain layer learns the same lesson without a precision.**
#
# - A key is a learned function of the item, so it can carry the item's reliability into the logits, which is where kriging puts $\log\bar\lambda_i$. As one number per item, $\tau_i$ weighs by nothing that the embedding could not express; it could only be easier to learn, and with few users $\tau$ loses the order of the rare items too.
# - What remains open: this is an association, not an intervention: we have not taken the reliability out of the plain layer's keys to see its accuracy fall.
#
# ### What the control says
#
# - The mechanism works: learned precision ranks the true noise of items, the model uses it, and in a world without differences it ranks nothing.
# - It is no advantage: that weighing by a learned precision predicts better is **not** supported in the worlds where it has most to win, and nothing suggests that an advantage grows with heterogeneity or with fewer users.
# - So on real data an ordered $\tau$ is no evidence for better recommendations, and equal accuracy is no evidence against an ordered $\tau$. What a precision offers beyond attention has to be sought where the content cannot carry it: as a calibrated uncertainty, or for noise that is not a property of the item.
#
# **Caveats.** Few seeds (see the table; where there is one, an interval over users is all there is, and it knows nothing of the variation between trainings). Noise here belongs to the item alone, the case that suits a $\tau$ per item best, but also the one that content-based attention can learn. Two layers of width 32, one learning rate, few epochs: a model that came closer to the exact filter might divide the work differently. The received attention is that of layer 1 only.
