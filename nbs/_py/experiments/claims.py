# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What holds?
#
# > The paper's claims, one by one: its number, ours, and what follows.

# %% [markdown]
# **What is asked.** [The paper](https://arxiv.org/abs/2605.18832) [@bft2026] makes seven kinds of claims. Each has its page in this book; here stand the answers, side by side, computed from the same stored rows.
#
# **What counts.** A difference is *seen* if its whole 95 % interval lies above zero, *reversed* if it lies below, and *not shown* otherwise: an interval that includes zero is not evidence of no effect. The rule is the same for every claim. Intervals are over users, questions or texts, not over trainings. Differences are relative to the layer that differs by precision alone: the null for SASRec and BERT4Rec, the plain layer for HSTU and the language models ([why](recommendation.ipynb)).

# %% tags=["parameters"]
k = 10  # of HR@k and NDCG@k

# %%
import matplotlib.pyplot as plt
import pandas as pd
import torch

from bft_nb import qa_study
from bft_nb.backbones import BACKBONES
from bft_nb.figures import COLOUR, use_style
from bft_nb.llama import BFTLlamaConfig, BFTLlamaForCausalLM, added
from bft_nb.plan import KNOWN
from bft_nb.ranking import Estimate, bootstrap_mean, hit_rate, ndcg
from bft_nb.report import choose, compare, contrast, growth, load_rows, signed
from bft_nb.results import load_strata
from bft_nb.sink_study import sink_rows
from bft_nb.study import DATASETS, EQUAL, cell, history_strata, metrics, rarest_minus_popular, study_rows

# %%
use_style()
stored = study_rows()
FAIR = {"sasrec": "null", "bert4rec": "null", "hstu": "plain"}  # what a backbone's filter is compared with


def verdict(d: Estimate | None, said: float = 0.0) -> str:
    "Is a gain seen? Reversed if it is below zero, less than said if it is below a number that the paper names, not shown if it may be zero."
    if d is None:
        return "not run"
    return "reversed" if d.high < 0 else "less than said" if d.high < said else "seen" if d.low > 0 else "not shown"


def gain(dataset: str, backbone: str, arm: str, metric=lambda ranks: ndcg(ranks, k), groups=load_strata, group: str = "all", thin: float = 1.0, **settings: float) -> Estimate | None:
    "How much the filter is above an arm, in percent, each as tuned or both at other settings; None if it is not stored."
    ours, theirs = (cell(stored, dataset, backbone, a, thin, **settings) for a in ("filter", arm))
    if not set(ours["seed"]) & set(theirs["seed"]):
        return None
    return compare(ours, theirs, metric, groups=None if group == "all" else groups, relative=True).get(group)


def above_others(dataset: str, backbone: str, groups, **settings: float) -> Estimate | None:
    "By how many points the gain in HR@k of the first group is above that of all other users; None if it is not stored."
    pair = [cell(stored, dataset, backbone, arm, **settings) for arm in ("filter", FAIR[backbone])]
    return contrast(*pair, "0", hits, groups=groups) if all(map(len, pair)) else None


def grown(dataset: str, backbone: str, share: float, **settings: float) -> Estimate | None:
    "By how many points the gain in NDCG@k is larger with a share of the events than with all; None if it is not stored."
    thinned = [cell(stored, dataset, backbone, arm, share, **settings) for arm in ("filter", FAIR[backbone])]
    if not all(map(len, thinned)):
        return None
    whole = [rows[rows["seed"].isin(thinned[0]["seed"])] for rows in (cell(stored, dataset, backbone, arm, **settings) for arm in ("filter", FAIR[backbone]))]
    return growth((thinned[0], thinned[1]), (whole[0], whole[1]))


def hits(ranks: torch.Tensor) -> torch.Tensor:
    "HR@k of each user."
    return hit_rate(ranks, k)


# %% [markdown]
# ## 1. Better recommendations, on every set and backbone
#
# **The paper says** the filter is above its backbone on six sets, for SASRec, BERT4Rec and HSTU. On how many sets is it here? The paper's percentages are of HR@10; the study chose its settings by NDCG@10, so both are counted.

# %%
def ranked(ranks: torch.Tensor) -> torch.Tensor:
    "NDCG@k of each user."
    return ndcg(ranks, k)


METRICS = {f"NDCG@{k}": ranked, f"HR@{k}": hits}
leads = {(name, b, arm): {d: gain(d, b, arm, of) for d in DATASETS} for name, of in METRICS.items() for b in FAIR for arm in ("plain", "null") if (b, arm) != ("hstu", "null")}
counts = pd.DataFrame({key: pd.Series([verdict(d) for d in found.values()]).value_counts() for key, found in leads.items()}).T
counts.reindex(columns=["seen", "not shown", "reversed", "not run"]).fillna(0).astype(int).rename_axis(["metric", "backbone", "compared with"])

# %% [markdown]
# Set by set in HR@10, in percent:

# %%
by_hits = {key[1:]: {of: signed(d, 1) if d else "" for of, d in found.items()} for key, found in leads.items() if key[0] == f"HR@{k}"}
pd.DataFrame(by_hits).T.rename_axis(["backbone", "compared with"])

# %%
#| label: fig-claims
#| fig-cap: "The filter's NDCG@10 relative to the layer that differs by precision alone, set by set (bars: 95 % interval over users). Right of the line the filter is better."
#| code-fold: true
fig, ax = plt.subplots(figsize=(6, 3.4))
for j, (backbone, role) in enumerate(zip(FAIR, ("posterior", "truth", "noise"))):
    found = {i: d for i, d in enumerate(leads[f"NDCG@{k}", backbone, FAIR[backbone]].values()) if d}
    mean, low, high = ([getattr(d, end) for d in found.values()] for end in ("mean", "low", "high"))
    bars = [[m - x for m, x in zip(mean, low)], [x - m for m, x in zip(mean, high)]]
    ax.errorbar(mean, [i + 0.2 * (j - 1) for i in found], xerr=bars, fmt="os^"[j], color=COLOUR[role], markersize=4, label=f"{backbone}, to {FAIR[backbone]}")
ax.axvline(0, color="0.6", lw=1)
ax.set(yticks=range(len(DATASETS)), yticklabels=DATASETS, xlabel="NDCG@10, relative [%]")
ax.invert_yaxis()
ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# ## 2. The largest numbers: Instruments, rare items, cold users, sparse data
#
# **The paper says** HSTU gains 15.1 % HR@10 on Instruments; the rarest quarter of the targets gains 14.5 % HR@10 on Sports; cold users gain most; the gain grows as data get sparser, and is small on dense data. "Most" and "grows" compare two gains, so their difference has lines of its own, in points: a group against all other users, each part resampled by itself; a quarter of the events against all of them, at the seeds that all four cells have. HSTU's layers choose their learning rates on each set, by one seed; "equal rates" has both at .006.

# %%
WHO = {b: (b, {}) for b in FAIR} | {"hstu, equal rates": ("hstu", EQUAL)}  # backbone and settings


def on_sports(who: str, groups=load_strata, group: str = "all") -> Estimate | None:
    "The gain of a group of users on Sports in HR@k, in percent."
    backbone, settings = WHO[who]
    return gain("sports", backbone, FAIR[backbone], hits, groups, group, **settings)


lines = {
    **{("HSTU on Instruments, HR@10", who): (gain("instruments", "hstu", "plain", hits, **WHO[who][1]), 15.1) for who in WHO if who.startswith("hstu")},
    **{("rarest quarter on Sports, HR@10", who): (on_sports(who, group="0"), 14.5) for who in WHO},
    **{("… minus all other items", who): (above_others("sports", b, load_strata, **settings), 0.0) for who, (b, settings) in WHO.items()},
    **{("shortest histories on Sports, HR@10", who): (on_sports(who, history_strata, "0"), "most of all users") for who in WHO},
    **{("… minus all other users", who): (above_others("sports", b, history_strata, **settings), 0.0) for who, (b, settings) in WHO.items()},
    **{("all users on Sports, HR@10", who): (on_sports(who), "") for who in WHO},
    **{(f"Beauty, {share:.0%} of the events, NDCG@10", b): (gain("beauty", b, FAIR[b], thin=share), "grows downwards") for share in (1.0, 0.5, 0.25) for b in ("sasrec", "hstu")},
    **{("… 25% minus 100%", who): (grown("beauty", b, 0.25, **settings), 0.0) for who, (b, settings) in WHO.items() if b != "bert4rec"},
    **{("MovieLens (dense), NDCG@10", b): (gain("ml1m", b, FAIR[b]), "small") for b in FAIR},
}


def line(d: Estimate | None, says: float | str) -> dict[str, str]:
    "A line of a table of claims, with a verdict where the claim is a number, or that something is above zero."
    judged = verdict(d, says) if isinstance(says, float) else ""
    return {"the paper says [%]": says if isinstance(says, str) else f"{says:+.1f}" if says else "above 0", "here [%]": signed(d, 1) if d else "", "": judged}


# %%
pd.DataFrame({key: line(*found) for key, found in lines.items()}).T.rename_axis(["what", "backbone"])

# %% [markdown]
# ## 3. The mechanism
#
# **The paper says** rare items show a higher initial precision and a lower gain, $K\approx 0.77$. Rarest and most popular quarter, in the first layer; then the rarest's minus the most popular's, mean over seeds with its spread, and in how many seeds it has the sign of the claim. What is stored are means over positions, so there is no interval within a seed.

# %%
def mechanism(backbone: str, dataset: str) -> dict[str, str]:
    "τ and K of the rarest and the most popular quarter, and how they differ."
    rows, found = cell(stored, dataset, backbone, "filter"), {}
    learnt = metrics(rows, "train")["mean"]
    for name, quantity, sign in (("τ", "tau", 1), ("K", "gain.layer1", -1)):
        d = rarest_minus_popular(rows, quantity)
        found |= {f"{name}, {quarter}": f"{learnt[f'{quantity}.q{q}']:.2f}" for q, quarter in ((0, "rarest"), (3, "popular"))}
        found |= {f"{name}, Δ": f"{d.mean():+.2f}" + (f" ± {d.std():.2f}" if len(d) > 1 else ""), f"{name} as claimed": f"{(sign * d > 0).sum()} of {len(d)}"}
    return found


pd.DataFrame({(b, d): mechanism(b, d) for b in FAIR for d in DATASETS if len(cell(stored, d, b, "filter"))}).T.rename_axis(["backbone", "data"])

# %% [markdown]
# ## 4. Fine-tuning on wrong answers, 5. answering among distractors
#
# **The paper says** (TinyLlama-1.1B; here SmolLM2-135M) that with wrong label tokens BFT is above SFT and above focal loss, that on clean labels (np = 0) its F1 is 8.3 % above SFT's, and that it degrades less as distractors enter the context. Differences in F1 points of 100, and in percent of the other's F1:

# %%
def compared(experiment: str, other: str, split: str, **condition) -> dict[str, str]:
    "F1 of the filter minus F1 of another method, each at its own learning rate, in points and in percent of the other."
    rows = qa_study.study_rows(experiment)
    pair = [qa_study.cell(rows, m, qa_study.tuned(rows, m, **qa_study.TRIALS[experiment]), n_eval=500, **condition) for m in ("bft", other)]
    difference = qa_study.advantage(*pair, split)
    if not len(difference):
        return {"": verdict(None)}
    d, share, both = bootstrap_mean(difference), qa_study.relative(*pair, split), set(pair[0]["seed"]) & set(pair[1]["seed"])
    return {"F1, BFT minus it": signed(d, 1), "in % of it": signed(share, 1) if share else "", "seeds": str(len(both)), "": verdict(d)}


# %%
OTHERS = ("sft", "focal", "gce")
told = {("wrong labels", f"np = {n:g}", other): compared("squad_noise", other, "test", noise=n) for n in (0.0, 0.3) for other in OTHERS}
told |= {("distractors", f"k = {n}", other): compared("rag_distractors", other, f"test-k{n}.first") for n in (0, 5, 10, 20) for other in OTHERS}
pd.DataFrame(told).T.fillna("").rename_axis(["task", "condition", "compared with"])

# %% [markdown]
# ## 6. Gates do not follow the length of the context, gains do
#
# **The paper says** that a learned sigmoid gate does not change with the length of the context, and the gain does, because the effective sample size does. Change of the log-odds, base 2, per doubling of the length, with its interval over texts; 1 would be an odds that doubles with the context, 0 one that knows nothing of it.

# %%
slopes = sink_rows().query("split == 'bos'")
slopes = slopes[slopes["metric"].str.fullmatch(r"slope\.(gate_odds|gain_odds|n_eff)(\.low|\.high)?")]
slopes = slopes.assign(what=slopes["metric"].str.extract(r"slope\.(\w+)")[0], end=slopes["metric"].str.extract(r"\.(low|high)$")[0].fillna("mean"))
wide = slopes.pivot_table(index=["study", "arm", "seed", "what"], columns="end", values="value")
wide.apply(lambda s: signed(Estimate(s["mean"], s["low"], s["high"], 0), 2), axis=1).unstack("what").fillna("")

# %% [markdown]
# ## 7. It costs next to nothing
#
# **The paper says** under 0.1 % more parameters, the memory of ordinary attention, and negligible time. Parameters, counted: in a language model they are few; in a recommender with one $\tau$ for each item they are one per item, beside the item's $d$.

# %%
def parameters(model: torch.nn.Module) -> int:
    "Number of parameters."
    return sum(p.numel() for p in model.parameters())


def more(extra: int, of: int) -> dict[str, str]:
    "A line of the table."
    return {"parameters": f"{of:,}", "more": f"{extra:,}", "share": f"{100 * extra / of:.3f} %"}


# %%
with torch.device("meta"):
    llama = BFTLlamaForCausalLM(BFTLlamaConfig(**{name: value for name, value in KNOWN["TinyLlama/TinyLlama-1.1B"].items() if name != "model_type"}))
recommenders = {b: [parameters(make(12_101, bft=bft)) for bft in (False, True)] for b, make in BACKBONES.items()}  # as many items as Beauty
new = sum(map(parameters, added(llama)))
counted = {"TinyLlama-1.1B": more(new, parameters(llama) - new), **{f"{b}, Beauty's items, d = 64": more(whole - plain, plain) for b, (plain, whole) in recommenders.items()}}
pd.DataFrame(counted).T

# %% [markdown]
# Time of training, filter over plain layer, the median over rounds of one run on one CPU thread (of what it costs, [more](recommendation_speed.ipynb)):

# %%
speed = choose(load_rows("recommendation_speed"), metric="us_per_target").query("model in ['sasrec', 'bert4rec', 'hstu']")
plain, whole = (speed[speed["bft"] == bft].set_index(["model", "dataset", "negatives", "sequences", "seed"])["value"] for bft in (False, True))
(whole / plain).groupby(["model", "dataset", "negatives", "sequences"]).median().round(2).rename("filter/plain").reset_index().set_index(["model", "dataset"])

# %% [markdown]
# One layer alone, filter over torch's own with its fused attention, by length (`benchmarks/layer.py --store`; width 64, two heads, 6,400 tokens a batch, one CPU thread): CPU time of a forward pass and of a step of training, the most memory that a step adds, and the multiplications in the matrix products of a forward pass. *Explicit* keeps the matrix of weights, *blocked* goes through it in blocks.

# %%
layer = load_rows("layer")
layer.pivot_table(index=["model", "length"], columns="metric", values="value")[["forward", "step", "memory", "products"]].round(2).rename_axis(["implementation", "length"])

# %% [markdown]
# ## Reading
#
# | | the paper says | here | page |
# |---|---|---|---|
# | 1 | better on every set and backbone | **no**: SASRec and HSTU on two sets of six each, by 2 to 3 %, HSTU behind on one; BERT4Rec on none of the Amazon sets | [recommendation](recommendation.ipynb) |
# | 2 | up to +15 % HR@10, most for rare items, cold users, sparse data | **no**: 2.6 % where it says 15; no extra gain for rare items or cold users, in HSTU a loss; none for sparse data | [cold start](cold_start.ipynb), [sparsity](sparsity.ipynb) |
# | 3 | rare items: higher precision, lower gain | **yes** in SASRec and in BERT4Rec's first layer on sparse sets; **no** in HSTU | [mechanism](mechanism.ipynb) |
# | 4 | better from wrong labels, +8.3 % F1 on clean ones | **no**: level with plain fine-tuning | [noisy labels](squad_noise.ipynb) |
# | 5 | degrades less among distractors | **no**: level without distractors, and it loses more among ten or twenty, not less | [distractors](rag_distractors.ipynb) |
# | 6 | gates ignore the length of the context, gains follow it | **yes** for gates; gains **can**, and need not | [attention sinks](attention_sinks.ipynb) |
# | 7 | negligible cost | parameters **yes** in a language model, **no** in a recommender with one $\tau$ per item; time 1.1 to 1.75 times | [speed](recommendation_speed.ipynb) |
#
# ### 1. Better everywhere: no
#
# In NDCG@10, against the layer that differs by precision alone:
#
# - **SASRec** is ahead on two sets, Instruments and Yelp, by 2 to 3 %; on the other four no difference shows.
# - **HSTU** is ahead on two sets, Instruments and Sports, by 2 %, and 2 % behind on Beauty, each layer at the rate that it chose on the set; on the other three no difference shows. At one rate for both, .006, it is level on Beauty as well, so a rate decides as much as the filter does ([study](recommendation.ipynb)). Where the small rate is chosen it hardly filters; a larger rate, or a larger first precision, lowers its gain ([ablation](ablation.ipynb)).
# - **BERT4Rec** is ahead of its null on none of the Amazon sets. It leads on the two others: on Yelp by 6 %, all of it repeated places; on MovieLens by 8 %, at a learning rate at which the other layers fail, and by 6 % at one at which they learn.
#
# In HR@10, the paper's metric, the leads are SASRec's on Sports and Yelp (2 and 6 %), HSTU's on Sports and Instruments (2 to 3 %), and BERT4Rec's on MovieLens.
#
# Against torch's own layer the differences are larger, of both signs: SASRec is ahead in HR@10 on Beauty, Sports, Instruments and Yelp (2 to 13 %) and 4 % behind on MovieLens; BERT4Rec is behind on Sports and Instruments. Where the null differs from torch's layer too (SASRec on Instruments and Yelp, BERT4Rec on Sports and Yelp), half of the difference or all of it belongs to the dropout of attention weights, which only torch's layer has.
#
# ### 2. The large numbers: none of them
#
# - **HSTU on Instruments** gains 2.6 % HR@10, not 15.
# - **Rare items**: SASRec's rarest quarter on Sports gains nothing that shows, HSTU's *loses* 5 %, over three seeds; 14.5 % lies outside of both intervals. For no backbone does it gain more than the other items; in HSTU it gains 8 points less.
# - **Cold users**: users with short histories do not stand out from the others, except in HSTU, where they gain 6 points less.
# - **Sparse data**: with fewer events SASRec's gain does not grow. HSTU's does, by 6 points at a quarter of Beauty, when each layer has its own learning rate, and does not when both have one ([sparsity](sparsity.ipynb)).
# - **Dense data**: on MovieLens the differences of SASRec and HSTU are small, as the paper says; BERT4Rec's, 8 %, is not.
#
# ### 3. The order: in SASRec and BERT4Rec yes, in HSTU no
#
# The rarest quarter gets a higher $\tau$ and a lower gain than the most popular one in SASRec on every set (on MovieLens by a hair, and not in between) and, in the first layer, in BERT4Rec on the sparse ones. In HSTU the first layer's gain is near one on sparse sets, and ordered the other way. The size of $K$ depends on learning rate, dropout and seed, so .77 is not a constant. And the order does not bring the benefit for rare items that it was to explain.
#
# ### 4. Better from wrong labels: no
#
# SmolLM2's filter is level with SFT on clean labels (−.9 %, and 8.3 % lies outside the interval) and with three wrong tokens in ten, over two seeds, and its lead does not grow with the noise. It may tolerate a larger step: at three times the best rate SFT diverged in one of two seeds, the filter in neither. Focal loss and GCE, at one seed, are level with SFT as well, and with the filter.
#
# ### 5. Among distractors: the reverse
#
# Without distractors the two are level, and with five. With the gold snippet first the filter is 4 points behind with ten distractors and with twenty, clear of zero, over two seeds that agree: it loses more, not less. A reason that follows from the equations is that in a causal model precision grows with the number of tokens read, so the beginning of a long context is believed least; that is not tested yet ([distractors](rag_distractors.ipynb)). At the largest learning rate SFT loses eleven points on the questions to choose by and the filter two, at one seed. Focal loss and GCE, at one seed, do not help either.
#
# ### 6. Gates are flat; gains can follow, and need not
#
# - Sigmoid gates, headwise or elementwise, in SmolLM2-135M-Instruct after forty steps and in small models from scratch, do not follow the length: their log-odds change by .00 per doubling.
# - The filter's gain does, by .09 in SmolLM2, 85 % of it in the first third of the layers, and by .15 in a model from scratch at one learning rate, mostly in one layer; at twice the rate not at all. A learnt sink logit follows more steeply than either.
# - Real sinks keep their share of the weight as the context grows, so their sample size stays small, as the paper's explanation needs. But the lower loss of the filter from scratch is matched by a plain model whose attention is multiplied by a constant.
#
# ### 7. Time, nearly; parameters, in a language model
#
# - **Parameters**: TinyLlama grows by .007 %. A recommender grows by 1.5 %, fifteen times the claim, because every item has a $\tau$ beside its 64 numbers (one $\tau$ for all does as well, [ablation](ablation.ipynb)).
# - **Training time** of a recommender: SASRec's filter 1.1 to 1.3 times the plain layer's, BERT4Rec's 1.3, HSTU's 1.75.
# - **One layer alone**, in its blocked form, needs twice the memory of torch's layer with fused attention at every length from 50 to 2,048: it grows in the same way but is not the same. A step of training takes 1.5 to 1.9 times the time, a forward pass 2.1 to 2.8 times; in a whole recommender the softmax over the items, which both layers pay for, dilutes that.
# - No second forward pass hides in it: the matrix products are 1.2 to 1.7 times as many up to a length of 512, and at 2,048, where blocks that the mask forbids are skipped, fewer than without a fused kernel.
