# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does the gain grow as data get sparser?
#
# > One data set at three densities: the same users, the same items, the same questions, fewer events to learn from.

# %% [markdown]
# **The paper says** that the filter's advantage grows as data get sparser, and is small where they are dense [@bft2026]. Comparing different shops cannot show it: they differ in more than density. Here one set is thinned.
#
# **What would refute it here**: a relative difference that does not rise as events are taken away, or whose intervals include zero throughout.
#
# The page trains nothing: it reads the cells that `bft sweep nbs/experiments/grids/sparsity.yaml` stored. `thin` of chapter 30 drops a share of each user's events, never the last three: the targets stay what they are.

# %% tags=["parameters"]
dataset = "beauty"
backbones = ["sasrec", "hstu"]
shares = [1.0, 0.5, 0.25]  # of the earlier events that training sees

# %%
import matplotlib.pyplot as plt
import pandas as pd

from bft_nb.backbones import BACKBONES
from bft_nb.core import check_option
from bft_nb.figures import COLOUR, use_style
from bft_nb.interactions import REGISTRY
from bft_nb.ranking import hit_rate, ndcg
from bft_nb.report import choose, compare, growth, seed_ranks, signed
from bft_nb.results import load_history
from bft_nb.study import DATASETS, EQUAL, cell, metrics, study_rows

# %%
use_style()
check_option("dataset", dataset, DATASETS)
for name in backbones:
    check_option("backbone", name, BACKBONES)
stored = study_rows()
cells = {(b, share, arm): cell(stored, dataset, b, arm, thin=share) for b in backbones for share in shares for arm in ("plain", "null", "filter")}
cells = {key: rows for key, rows in cells.items() if len(rows)}
pairs = {(b, share, f"to {arm}"): (cells[b, share, "filter"], rows) for (b, share, arm), rows in cells.items() if arm != "filter" and (b, share, "filter") in cells}
pairs |= {("hstu", share, "to plain, both at .006"): tuple(cell(stored, dataset, "hstu", arm, thin=share, **EQUAL) for arm in ("filter", "plain")) for share in shares if "hstu" in backbones}
pairs = {key: pair for key, pair in pairs.items() if all(map(len, pair))}

# %% [markdown]
# The three densities: how many interactions training sees, and how many that is for each item of the catalogue. Beside them NDCG@10 on the test items, mean over seeds, to show what sparsity costs every layer. *Seeds* counts them for plain / null / filter (HSTU: plain / filter); a thinned cell has one.

# %%
def events(share: float) -> float:
    "Interactions that training sees for each item; a test history is them and the validation item."
    rows = next(rows for (_, s, _), rows in cells.items() if s == share)
    return float((seed_ranks(rows, groups=load_history)[1] - 1).sum()) / REGISTRY[dataset].items


per_item = {share: events(share) for share in shares if any(s == share for _, s, _ in cells)}
levels = pd.Series({key: metrics(rows)["mean"]["ndcg@10"] for key, rows in cells.items()}).unstack().reindex(columns=["plain", "null", "filter"]).round(4)
seeds = {key: "/".join(str(cells[*key, arm]["seed"].nunique()) for arm in ("plain", "null", "filter") if (*key, arm) in cells) for key in levels.index}
levels.assign(**{"events an item": [round(per_item[share], 1) for _, share in levels.index], "seeds": pd.Series(seeds)}).rename_axis(["backbone", "share"])

# %% [markdown]
# The filter's gain in percent of the baseline's value, paired by user, with 95 % bootstrap intervals; and how many points more that is than with all events, the same users drawn for both, at seed 0, which all cells have. HSTU's layers chose different learning rates on the whole set (.003 the filter, .006 the plain layer), so they are compared at one rate, too. The figure draws the gain in NDCG@10:

# %%
gains = {metric.__name__: {key: compare(*pair, metric, groups=None, relative=True)["all"] for key, pair in pairs.items()} for metric in (hit_rate, ndcg)}
shown = pd.DataFrame({name: {key: signed(d, 1) for key, d in found.items()} for name, found in gains.items()}).rename(columns={"hit_rate": "HR@10 [%]", "ndcg": "NDCG@10 [%]"})


def first(b: str, share: float, to: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    "Filter and baseline at one density, seed 0."
    return choose(pairs[b, share, to][0], seed=0), choose(pairs[b, share, to][1], seed=0)


more = {(b, share, to): signed(growth(first(b, share, to), first(b, 1.0, to)), 1) for b, share, to in pairs if share < 1 and (b, 1.0, to) in pairs}
shown.assign(**{"more than with all, NDCG@10": pd.Series(more)}).fillna("").rename_axis(["backbone", "share", "compared"])

# %%
#| label: fig-sparsity
#| fig-cap: "Relative gain in NDCG@10 against the events that training saw for each item; the claim is a line that rises to the right (bars: 95 % interval over users)."
#| code-fold: true
fig, axes = plt.subplots(1, len(backbones), figsize=(4 * len(backbones), 3), sharey=True, squeeze=False)
for ax, b in zip(axes[0], backbones):
    for to, colour in (("to plain", COLOUR["posterior"]), ("to null", COLOUR["other"]), ("to plain, both at .006", COLOUR["truth"])):
        found = {share: gains["ndcg"][b, share, to] for share in shares if (b, share, to) in pairs}
        if found:
            mean, low, high = ([getattr(d, end) for d in found.values()] for end in ("mean", "low", "high"))
            ax.errorbar([f"{per_item[s]:.1f}" for s in found], mean, yerr=[[m - x for m, x in zip(mean, low)], [x - m for m, x in zip(mean, high)]], marker="o", capsize=3, color=colour, label=to)
    ax.axhline(0, color="0.6", lw=1)
    ax.set(title=b, xlabel="training events an item", ylabel="filter's NDCG@10, relative [%]")
    ax.legend()
plt.show()

# %% [markdown]
# ## Reading
#
# **The gain does not grow as data get sparser: not in SASRec, and in HSTU only where the two layers learn at different rates.**
#
# **SASRec: no.**
#
# - *Against torch's layer* the gain is largest at half of the events, which looks like the claim.
# - *Against the null* it is zero there, and at a quarter the filter is 3.6 % *behind*, with an interval that ends at zero. The change from all events to a quarter is not told apart from none.
# - What grew with sparsity was the null's lead over torch's layer.
#
# **HSTU: no, and it shows how a rate can pass for a filter.**
#
# - *Each layer at the rate it chose on the whole set* (.003 the filter, .006 the plain layer), the filter leads by 5 % at a quarter of the events, in both metrics, and from all to a quarter its lead grows by 6 points, with an interval clear of zero. That would be the claim.
# - *Both at .006*, nothing of it is left: level at a quarter, and the change from all events is −.9 points, with an interval from −5.6 to 3.5. So the 5 % are the smaller rate's, which suits the sparser set better; whether they would be the plain layer's too is not run.
#
# ### Caveats
#
# - One set. The cells at a half and a quarter of the events are one seed; only those of the whole set have three. Dropout and learning rate are those tuned on the whole set; a sparser one might want more dropout, in all layers.
# - Thinning removes events from histories, too, so users become colder and items rarer at once.
