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
#
# **The paper says** that a precision $\tau_i$ learned per item tells how far an item can be trusted, and that weighing by it, and updating by the gain it implies, makes better predictions where tokens differ in noise [@bft2026]. On real data nobody can check the first half. Here we can: chapter 29 draws every item $i$ with a reliability $\rho_i$, the probability that its appearance means something.
#
# **What would refute it here**: a rank correlation of $\tau_i$ with $\rho_i$ near zero; one as large in a world where all items are equally reliable; accuracy that does not fall when the learned $\tau$ are exchanged among items; no advantage over the plain layer, or one that does not grow with the heterogeneity of the items, in worlds where the exact filter profits from knowing $\rho$. Where even the exact filter hardly profits, equal accuracy refutes nothing; so that headroom stands beside every result.
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
from bft_nb.figures import COLOUR, band, use_style
from bft_nb.interactions import from_world, item_counts, leave_one_out, repeats
from bft_nb.ranking import hit_rate, ndcg, paired_bootstrap, protocol
from bft_nb.report import choose, configuration, load_rows, results_folder, runs_of, signed
from bft_nb.results import append_rows, commit, has_rows, load_ranks, make_rows, ranks_path, save_ranks
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
# The world, the protocol, and the headroom: what a predictor reaches that knows the popularity alone, that filters exactly but takes all items for equally reliable, that knows $\rho$ when it names the next item, and that knows it when weighing the history as well. The last step is all that a precision can add to a model which has learned the rest.

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
# Users come back to items in this world, so seen items compete. Both arms get the same budget; a plain model has no precision to tune.

# %%
training = dict(lr=lr, negatives=min(256, n_items), epochs=epochs, patience=max(5, epochs // 5))
params = dict(bft=bft, d=d, dropout=dropout, split_hash=split.hash[:16], **size, **training)
if bft:
    params |= dict(tau=tau, precision_lr=precision_lr)
run = dict(exp="positive_control", dataset="synthetic", model="sasrec", params=params, seed=seed)
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
# Accuracy on the test item. For a filter with a $\tau$ per item also: what remains when, after training, the $\tau$ are *shuffled* among items, and when all are made *level* (their geometric mean).


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
# Where items differ, does $\tau$ order them? By rank correlation, over all items and over those seen at least 50 times in training, and with popularity held fixed (ranks regressed on the rank of the count). Where all items are equally reliable there is no order to find; then $\tau$ is held against the reliability the same item has in the world of the same seed *with* heterogeneity, which nothing in the data can tell.


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
# A plain layer has no $\tau$, but it may have learned the same thing: a key can carry its item's reliability, and the softmax then weighs by it. So we measure in both models what an item's tokens receive in the first layer, as a multiple of the uniform weight, averaged over heads, queries and users.


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
# The rows of this run; they enter the book's results only on request. Beside the ranks of the test targets is stored, as a stratum, whether the last item before the target is an unreliable one ($\rho < .5$: stratum 0).

# %%
common = dict(seconds=round(fitted.seconds, 1), device="cpu", commit=commit())
rows = make_rows(test, **run, split="test", n=n_users, **common) + make_rows(valid, **run, split="valid", n=n_users, **common)
rows += make_rows(learnt, **run, split="train", n=n_items, **common) + make_rows({"best_epoch": fitted.best_epoch}, **run, split="train", n=1, **common)
len(rows)

# %% [markdown]
# The steps of the ladder are rows of models of their own; both arms share them.

# %%
STEPS = dict(zip(steps, ["popularity", "bayes", "bayes+predict", "bayes+predict+filter"], strict=True))
ceilings = []
for name, r in steps.items():
    of_world = dict(run, model=STEPS[name], params=dict(bft=False, split_hash=split.hash[:16], **size))
    if not (store and has_rows(results_folder() / "positive_control.csv", of_world)):
        ceilings += make_rows({"hr@10": r.hr, "ndcg@10": r.ndcg}, **of_world, split="test", n=r.n, **dict(common, seconds=0))

# %%
if store:
    unreliable_last = world.reliability[world.items[:, -2]] < 0.5
    save_ranks(ranks_path(results_folder() / "ranks", run, "test"), ranks, np.where(unreliable_last, 0, 1))
    append_rows(results_folder() / "positive_control.csv", rows + ceilings)
