# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Which part of the filter does what?
#
# > The filter with one part at a time removed, exchanged or scaled.

# %% [markdown]
# A filter that helps should help less when a part of it is taken away, and the part whose loss costs most is the one that matters. A filter that does not help should show, among its variants, what stands in its way.
#
# **What would refute the filter here**: variants without gain, without bias (the $\log\bar\lambda$ that kriging adds to the logits) or without both that rank as well as the whole.
#
# The page trains nothing: it reads the cells that `bft sweep nbs/experiments/grids/ablation.yaml` stored, at the tuned dropout and learning rate of the filter.

# %% tags=["parameters"]
studied = [["beauty", "sasrec"], ["instruments", "sasrec"], ["beauty", "hstu"], ["instruments", "hstu"], ["sports", "hstu"], ["toys", "hstu"]]  # data set and backbone
norms = [["beauty", "sasrec"], ["beauty", "bert4rec"]]  # where the place of the norms is changed

# %%
import json

import matplotlib.pyplot as plt
import pandas as pd

from bft_nb.backbones import BACKBONES
from bft_nb.core import check_option
from bft_nb.figures import COLOUR, use_style
from bft_nb.report import choose, compare, signed
from bft_nb.study import ARMS, DATASETS, EQUAL, cell, metrics, study_rows, tuned

# %%
use_style()
for dataset, backbone in [*studied, *norms]:
    check_option("dataset", dataset, DATASETS)
    check_option("backbone", backbone, BACKBONES)

# %% [markdown]
# ## The variants
#
# | options | what it is |
# |---|---|
# | `{}` | the filter as derived |
# | `kriging: false, kalman: false` | the null: neither bias nor gain |
# | `kalman: false` | bias only |
# | `kriging: false` | gain only |
# | `process_noise: 0` | no Q: precision only grows |
# | `process_noise: 0.01`, `1.0` | Q starts lower, higher (as derived: 0.1) |
# | `nu0: 0.01`, `10` | a prior worth next to nothing, or ten observations (as derived: one) |
# | `jacobian: none`, `full` | J = 0; gradients through J (as derived: detached) |
# | `resolution: isotropic` | one variance per head |
# | `weights: precision` | the other reading of the weights: T − 1 degrees of freedom |
# | `precision: constant`, `mlp` | one τ for all items; τ from the embedding |
# | `precision_init: 0.1`, `10`, `100`, `frequency` | τ starts lower, higher, much higher, by log frequency |
# | `precision_lr` | τ and Q learn faster |
#
# The place of the norms is not a part of the filter, but changes what it filters; it has a table of its own, at the end.
#
# HSTU has no feed-forward network, so no Jacobian J; its weights are not a distribution, so neither the reading of the weights nor the resolution applies to it.

# %%
stored = study_rows()


def settings(dataset: str, backbone: str) -> dict[str, float]:
    "Dropout and learning rate of the variants: those that the filter chose; HSTU's are Beauty's on all sets."
    return tuned(stored, backbone, "filter", "beauty" if backbone == "hstu" else dataset)


def variants(dataset: str, backbone: str) -> dict[str, pd.DataFrame]:
    "All stored variants of the filter, by their options, but those with the norms elsewhere or that read times."
    rows = choose(stored, dataset=dataset, model=backbone, thin=1.0, bft=True, **settings(dataset, backbone))
    kept = [options for options in rows["options"].unique() if not {"norm_first", "time_buckets"} & set(json.loads(options))]
    return {options: cell(stored, dataset, backbone, json.loads(options), **settings(dataset, backbone)) for options in sorted(kept, key=lambda o: (o != "{}", o))}


found = {(dataset, backbone): variants(dataset, backbone) for dataset, backbone in studied}


# %% [markdown]
# ## What each costs or gains
#
# NDCG@10 on validation and test; then the difference on the test items to the filter as derived, and to the plain layer, in percent of theirs, paired by user, with 95 % bootstrap intervals (the figure draws the first). A pair uses the seeds that both have; the intervals are over users, not over seeds. The plain layer has the learning rate that it chose itself. HSTU's variants have .003, which its filter chose on Beauty; the last columns compare with the plain layer at that rate, and with the filter at .006, which it chose on three other sets.


# %%
def line(where: tuple[str, str], options: str) -> dict[str, str]:
    "One line of the table."
    rows, plain = found[where][options], cell(stored, *where, "plain")
    same, faster = (cell(stored, *where, arm, **at) for arm, at in (("plain", settings(*where)), ("filter", EQUAL)))
    pairs = {"to plain": plain} | ({"to plain, equal rate": same, "to the filter at .006": faster} if where[1] == "hstu" else {})
    values = {f"NDCG@10, {split}": f"{metrics(rows, split)['mean']['ndcg@10']:.4f}" for split in ("valid", "test")}
    whole = {"to the filter": signed(compare(rows, found[where]["{}"], groups=None, relative=True)["all"], 1)} if options != "{}" else {}
    return {"seeds": str(rows["seed"].nunique()), **values, **whole, **{name: signed(compare(rows, of, groups=None, relative=True)["all"], 1) for name, of in pairs.items() if len(of)}}


# %%
table = pd.DataFrame({(*where, options): line(where, options) for where in found for options in found[where]}).T
table.fillna("").rename_axis(["data", "backbone", "options"])

# %%
#| label: fig-ablation
#| fig-cap: "NDCG@10 of each variant minus that of the filter as derived, in percent of the latter (bars: 95 % interval over users)."
#| code-fold: true
shown = [where for where in found if len(found[where]) > 1]
every = sorted({options for where in shown for options in found[where]} - {"{}"})
fig, axes = plt.subplots(1, len(shown), figsize=(1.5 * len(shown) + 1.6, 0.22 * len(every) + 0.8), squeeze=False, sharey=True, dpi=100)
for ax, where in zip(axes[0], shown):
    for options in set(found[where]) & set(every):
        d = compare(found[where][options], found[where]["{}"], groups=None, relative=True)["all"]
        ax.errorbar(d.mean, every.index(options), xerr=[[d.mean - d.low], [d.high - d.mean]], fmt="o", color=COLOUR["posterior"])
    ax.axvline(0, color="0.6", lw=1)
    ax.set(title="\n".join(where), yticks=range(len(every)), yticklabels=[o.strip("{}").replace('"', "") for o in every], xlabel="Δ [%]")
    ax.locator_params(axis="x", nbins=4, integer=True)
plt.show()

# %% [markdown]
# What each made of the filter: $\tau$ and the gains of both layers, rarest – most popular quarter, and the process noise. Where `kalman` is false, the gain is the one that was not applied.


# %%
def learnt(rows: pd.DataFrame) -> dict[str, str]:
    "What training left of the filter."
    mean = metrics(rows, "train")["mean"]
    ends = {name: " – ".join(f"{mean[f'{name}.q{q}']:.2f}" for q in (0, 3)) for name in ("tau", "gain.layer1", "gain.layer2")}
    return ends | {"Q": ", ".join(f"{mean[name]:.2f}" for name in ("q.layer1", "q.layer2") if name in mean)}


# %%
pd.DataFrame({(*where, options): learnt(rows) for where, of in found.items() for options, rows in of.items()}).T.rename_axis(["data", "backbone", "options"])

# %% [markdown]
# ## Norms in front or behind
#
# All models of the study are pre-norm: a branch reads $\operatorname{norm}(h)$ and adds to an $h$ that no norm touches, so $h$ grows over the layers and the share of one observation in it shrinks. In post-norm, as in the original transformer and BERT4Rec, a norm stands behind each sum: $h$ has a fixed length, and the filter's belief passes two norms a layer, each of which rescales its precision (21.3). A filter whose gain only stands in for a bound on that length would have less to do there.
#
# The layers keep the dropout and learning rate that they chose in pre-norm, so the question is the difference *between* the layers within post-norm; post-norm itself may want a smaller rate.


# %%
POST = {"norm_first": False}


def norm_line(where: tuple[str, str], arm: str) -> dict[str, str]:
    "One layer in both places of the norms, and in post-norm the filter's lead over it; says what is not stored."
    pre, post = cell(stored, *where, arm), cell(stored, *where, arm, options=POST)
    values = {f"{name}, {split}": f"{metrics(rows, split)['mean']['ndcg@10']:.4f}" if len(rows) else "no rows stored yet" for name, rows in (("pre", pre), ("post", post)) for split in ("valid", "test")}
    pairs = {"post to pre %": (post, pre)}
    if arm != "filter":
        pairs |= {f"filter to it, {name} %": (cell(stored, *where, "filter", options=o), rows) for name, o, rows in (("pre", None, pre), ("post", POST, post))}
    return values | {name: signed(compare(a, b, groups=None, relative=True)["all"], 1) for name, (a, b) in pairs.items() if set(a["seed"]) & set(b["seed"])}


# %%
pd.DataFrame({(*where, arm): norm_line(where, arm) for where in norms for arm in ARMS}).T.fillna("").rename_axis(["data", "backbone", "layer"])

# %%
filters = {(*where, name): cell(stored, *where, "filter", options=options) for where in norms for name, options in (("pre", None), ("post", POST))}
pd.DataFrame({key: learnt(rows) for key, rows in filters.items() if len(rows)}).T.rename_axis(["data", "backbone", "norms"])

# %% [markdown]
# ## Reading
#
# **On Beauty SASRec's filter misses no part, as there is no gain to lose; on Instruments the filter helps and either half of it will do; in HSTU a larger first precision does what a larger learning rate does; post-norm brings no gain of precision to light.**
#
# **SASRec on Beauty: no part is missed.**
#
# - Without a Jacobian, without $Q$, with one variance per head, with one $\tau$ for all or one that starts from frequency, the filter ranks as it does whole.
# - Bias alone and a prior worth next to nothing are better than the whole on the test items, by amounts just clear of zero, but neither stands out on validation, where gain alone leads; of ten variants at one seed that establishes no order.
# - A $\tau$ from the embedding, by a network, is the lowest on both, on test with an interval that just includes zero.
#
# **SASRec on Instruments: either half will do.**
#
# - Without both halves, bias and gain, the lead over torch's layer halves, with an interval clear of zero. With either of them most of it is back.
# - One $\tau$ for all items and a filter without $Q$ cost nothing that the intervals can tell from zero.
# - So what helps there is a precision that follows the weights' $n$ and the values' scatter, by whichever way it acts; not what is learnt of single items, and not the process noise, without which a filter freezes in theory and over two layers does not.
#
# **HSTU: a larger first precision does what a larger learning rate does.** One seed, tried after the study was read.
#
# - As derived and at a rate of .003, $\tau$ starts at one and stays there, and the gain of the first layer is .86 to .99: hardly a filter. With a $\tau$ of a hundred the gain of popular items falls to a half.
# - That filter is ahead of the plain layer at the same rate on all four sets, by 1.2 % on Beauty, where the interval includes zero, and by 2.1 to 3.5 % on Toys, Sports and Instruments, where it does not. Against the plain layer at the rate that it chose itself, only Instruments is left (+3.5 %).
# - But twice the rate lowers the gain as well, and against the filter as derived at .006 the larger $\tau$ leads nowhere (+.1 % on Instruments, behind by 1.3 to 2.4 % on the others, intervals that include zero).
# - So what helps HSTU is a filter that filters, whichever way it comes to it, and nothing is left for the start of $\tau$ in particular.
#
# **Post-norm does not bring a gain of precision to light** (SASRec on Beauty).
#
# - All three layers lose by it at the rates they chose in pre-norm, torch's 10 %, the null 4 %, the filter 3 %, with intervals clear of zero.
# - So there the filter leads torch's layer by 8 %, and this is the null's lead: over the null the filter is .7 % ahead, with an interval that includes zero, as in pre-norm.
# - It is another filter all the same: the gain falls from .4 to .1 in the first layer and from .5 to .2 in the second.
#
# **What remains open.** The tables show what is stored: for SASRec most kinds of variant on Beauty and the main ones on Instruments; for HSTU a larger first precision. Not run are the other reading of the weights, gradients through $J$, a $\tau$ that starts at another number in SASRec, other values of $Q$ and $\nu_0$, the halves of HSTU's filter, and BERT4Rec with the norms behind the branches. Each is shown when its rows are.
