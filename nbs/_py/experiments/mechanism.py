# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does the filter work as it says?
#
# > Gain, precision and effective sample size by popularity and layer, and what is left when τ is shuffled.

# %% [markdown]
# **The paper says** that rare items get a higher initial precision $\tau$ and a lower gain, $K \approx 0.77$ [@bft2026]: for an item seldom seen, the model believes the item's own embedding more than its neighbours.
#
# **What would refute it here**: $\tau$ or $K$ that do not order with popularity; a model that ranks as well when $\tau$ is exchanged between items, for then $\tau$ knows nothing of the item it stands beside, whatever its order.
#
# The page trains nothing: it reads what the cells of [the study](recommendation.ipynb) stored.

# %% tags=["parameters"]
backbones = ["sasrec", "bert4rec", "hstu"]

# %%
import matplotlib.pyplot as plt
import pandas as pd
import torch

from bft_nb.backbones import BACKBONES
from bft_nb.core import check_option
from bft_nb.figures import use_style
from bft_nb.kriging import kriging_weights
from bft_nb.report import STRATA, choose, compare, signed
from bft_nb.study import DATASETS, cell, metrics, rarest_minus_popular, study_rows

# %%
use_style()
for name in backbones:
    check_option("backbone", name, BACKBONES)
stored = study_rows()
cells = {(backbone, dataset): cell(stored, dataset, backbone, "filter") for backbone in backbones for dataset in DATASETS}
cells = {key: rows for key, rows in cells.items() if len(rows)}
learnt = {key: metrics(rows, "train")["mean"] for key, rows in cells.items()}


# %% [markdown]
# ## What is learnt
#
# By popularity of the item at the position, mean over seeds: its $\tau$, the precision on entry to layer 2 (`prior.layer2`) and the gain of both layers; the figure draws $\tau$ and the gain of layer 1. The quarters are of the catalogue, so each holds about as many items, and the most popular one far more positions.


# %%
def by_quarter(quantity: str) -> pd.DataFrame:
    "One line per cell."
    return pd.DataFrame({key: found[[f"{quantity}.q{s}" for s in range(len(STRATA))]].set_axis(STRATA) for key, found in learnt.items()}).T


# %%
pd.concat({name: by_quarter(name) for name in ("tau", "prior.layer2", "gain.layer1", "gain.layer2")}, axis=1).round(2)

# %% [markdown]
# How far seeds agree, where several are stored: $\tau$ and the gains of the rarest quarter minus those of the most popular one, mean and spread over seeds.


# %%
def by_seed(rows: pd.DataFrame) -> dict[str, str]:
    "Rarest minus most popular, with its spread over seeds and how many are above zero."
    found = {name: rarest_minus_popular(rows, name) for name in ("tau", "gain.layer1", "gain.layer2")}
    return {"seeds": str(len(found["tau"])), **{name: f"{d.mean():+.3f} ± {d.std():.3f}, {(d > 0).sum()} above 0" for name, d in found.items()}}


# %%
pd.DataFrame({key: by_seed(rows) for key, rows in cells.items() if rows["seed"].nunique() > 1}).T

# %% [markdown]
# And how far it depends on the settings: the gain of layer 1, rarest – most popular quarter, at every learning rate and dropout at which Beauty's filter is stored (mean over seeds).


# %%
def at_settings(backbone: str, dropout: float, lr: float) -> str:
    "The gain of layer 1 in the filter as derived."
    rows = cell(stored, "beauty", backbone, "filter", dropout=dropout, lr=lr)
    return " – ".join(f"{metrics(rows, 'train')['mean'][f'gain.layer1.q{q}']:.2f}" for q in (0, 3)) if len(rows) else ""


# %%
tried = choose(stored, dataset="beauty", bft=True, thin=1.0)
pd.DataFrame({name: {at: at_settings(name, *at) for at in choose(tried, model=name).groupby(["dropout", "lr"]).groups} for name in backbones}).fillna("").rename_axis(["dropout", "lr"])

# %%
#| label: fig-mechanism
#| fig-cap: "τ (left; HSTU's are flat) and the gain of layer 1 (right) by popularity of the item, SASRec solid, HSTU dashed, BERT4Rec dotted."
#| code-fold: true
fig, axes = plt.subplots(1, 2, figsize=(5.6, 2.0), dpi=100)
for ax, quantity, unit in ((axes[0], "tau", "initial precision τ [h⁻²]"), (axes[1], "gain.layer1", "gain K, layer 1")):
    for (backbone, dataset), values in by_quarter(quantity).iterrows():
        style = {"sasrec": "-", "hstu": "--", "bert4rec": ":"}[backbone]
        if (backbone, quantity) != ("hstu", "tau"):
            ax.plot(range(4), values, style, color=f"C{DATASETS.index(dataset)}", linewidth=1.2, label=dataset if style == "-" else None)
    ax.set(xticks=range(4), xticklabels=["rarest", "2nd", "3rd", "popular"], xlabel="quarter of items", ylabel=unit)
axes[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# The effective sample size, on which the gain rests, and the process noise:

# %%
noise = pd.DataFrame({key: found[["q.layer1", "q.layer2"]] for key, found in learnt.items()}).T
pd.concat({"n_eff.layer1": by_quarter("n_eff.layer1"), "n_eff.layer2": by_quarter("n_eff.layer2"), "Q": noise}, axis=1).round(2)

# %% [markdown]
# ## What τ knows
#
# The trained model once more on the test items, with the $\tau$ of the items exchanged at random (*shuffled*), and with all of them at their geometric mean (*levelled*). The table has the difference in NDCG@10 to the model as it is, in percent; for *shuffled* with its interval over users:


# %%
def without_tau(key: tuple[str, str]) -> dict[str, str]:
    "NDCG@10 as it is, and what exchanging and levelling τ costs."
    rows = cells[key]
    whole, level = (metrics(rows, part)["mean"]["ndcg@10"] for part in ("test", "levelled"))
    shuffled = compare(rows, rows, candidate_split="shuffled", groups=None, relative=True)["all"]
    return {"NDCG@10": f"{whole:.4f}", "shuffled [%]": signed(shuffled, 1), "levelled [%]": f"{100 * (level / whole - 1):+.1f}".replace("-", "−")}


# %%
pd.DataFrame({key: without_tau(key) for key in cells if len(choose(cells[key], split="shuffled"))}).T


# %% [markdown]
# ## Why the plain layer needs no $\tau$ to weigh
#
# **We derived.** Queries have a bias: $q_t = W_q x_t + b_q$. In the logit it contributes $b_q^\top k_j/\sqrt k$, which depends on the key alone, not on who asks. A term of that kind is the logarithm of a reliability, and kriging is what an ordinary layer does with it:
#
# $$\mathrm{softmax}_j\!\left(\frac{(W_q x_t + b_q)^\top k_j}{\sqrt k}\right) = \mathrm{softmax}_j\!\left(\frac{(W_q x_t)^\top k_j}{\sqrt k} + \log\bar\lambda_j\right), \qquad \log\bar\lambda_j := \frac{b_q^\top k_j}{\sqrt k}$$
#
# So a plain layer tracks a reliability per head, linear in the (normalised) token, wherever torch's default bias is on. What $\tau$ adds is a reliability that is *not* a linear function of the embedding, and an embedding of width 64, learnt per item, leaves little that is not.

# %%
torch.manual_seed(0)
attention = torch.nn.MultiheadAttention(8, 1, batch_first=True)
torch.nn.init.normal_(attention.in_proj_bias)
x = torch.randn(1, 5, 8)
(w_q, w_k, _), (b_q, b_k, _) = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
k = x @ w_k.T + b_k
log_lam = k @ b_q / 8**0.5
kriged = kriging_weights(x @ w_q.T @ k.mT / 8**0.5, log_lam.exp())
torch.testing.assert_close(kriged, attention(x, x, x)[1])
log_lam.detach().round(decimals=2)

# %% [markdown]
# HSTU's projections have no bias, so the argument does not reach it; there the next section's has to serve.
#
# ## The same order without a precision
#
# How far attention moves a token depends on the length of its $h$, and embeddings are free to be long or short. The move $\lVert h'-h\rVert/\lVert h\rVert$ of layer 1, by popularity of the item at the position, in the layer with a gain and in those without:


# %%
def moves(backbone: str, dataset: str) -> pd.DataFrame:
    "One line per kind of layer."
    arms = {arm: cell(stored, dataset, backbone, arm) for arm in ("plain", "null", "filter") if (backbone, arm) != ("hstu", "null")}
    found = {arm: metrics(rows, "train")["mean"][[f"move.layer1.q{s}" for s in range(len(STRATA))]].set_axis(STRATA) for arm, rows in arms.items() if len(rows)}
    return pd.DataFrame(found).T


# %%
pd.concat({key: moves(*key) for key in cells}).round(2)

# %% [markdown]
# ## Reading
#
# **On the sparse sets the order is the paper's in SASRec and BERT4Rec, and SASRec's plain layer finds it by itself; except on Instruments and in BERT4Rec, $\tau$ knows little of its items; in HSTU the filter hardly filters where the learning rate is small.**
#
# **The order is the paper's**, except in HSTU.
#
# - *SASRec*: $\tau$ falls with popularity from the rarest to the most popular quarter, by a fifth to a third on most sparse sets, most on Yelp and hardly on MovieLens. The gain of layer 1 is lower for the rarest quarter than for the most popular one; on MovieLens by .01, with both middle quarters above either.
# - *The gain's size* depends on the learning rate, on dropout and on the seed: on Beauty SASRec's is .73 at a rate of .003, .40 to .47 at .006 and .12 to .19 at .012, so a particular value such as .77 says little.
# - *BERT4Rec*: both order as in SASRec on the sparse sets, with gains of .1 to .3 in layer 1: there it takes on little of what attention finds. On Yelp the gain of layer 1 is a third whatever the item. Layer 2 is as small on Beauty; elsewhere on the sparse sets it is .55 to .81, and on Sports and Instruments ordered the other way.
# - *HSTU*: the order of the gain in layer 1 is reversed, in every seed, and $\tau$ hardly moves.
#
# **Precision and sample size follow.**
#
# - *Precision*: what enters the second layer still orders by popularity in SASRec on the sparse sets, on a higher level: one observation has been added. In HSTU it stands at three to eight times $\tau$ on the sparse sets.
# - *Sample size in SASRec*: that of layer 1 hardly depends on the item: four to eight keys on the sparse sets, of histories that are not much longer. So its gain's order is that of $\tau$, not of $n$.
# - *Sample size in the others* depends on it: HSTU's rises with popularity on Beauty (4.3 to 6.5) and Instruments (3.8 to 5.2), where its gain falls; BERT4Rec's rises on Sports (6.2 to 9.0) and Toys (6.5 to 9.1), with its gain, so there $n$ and $\tau$ are not told apart.
#
# **In HSTU the filter hardly filters** on the sparse sets where the learning rate is small.
#
# - Where it chose a rate of .003, on Beauty and Yelp, $K$ is .92 to .99 in layer 1 and .83 to .94 in layer 2: the update is nearly the plain residual, and what is left of the filter is its weighing of keys.
# - The observation behind HSTU's norm and gate is precise compared with a $\tau$ that starts at one and moves little.
# - Where it chose .006, on Sports, Toys and Instruments, $K$ is .68 to .90 in layer 1 and .54 to .74 in layer 2.
#
# **τ knows little, except on Instruments and in BERT4Rec.**
#
# - *SASRec*: exchanging $\tau$ between items at random costs .5 to 2 % of NDCG@10, and only on Instruments (2.1 %) does the interval exclude zero. There it costs as much as the filter is ahead of the null, and levelling two thirds of that; a filter trained with one $\tau$ for all keeps most of its lead all the same ([ablation](ablation.ipynb)).
# - *HSTU* loses 1.3 % on Instruments, clear of zero, and nothing that shows elsewhere.
# - *BERT4Rec*: the exchange costs 2 to 6 % on Beauty, Toys, Instruments and Yelp (on Sports and MovieLens nothing shows). On those four $\tau$ has learnt something of its items, and still only on Yelp is the filter's NDCG@10 ahead of a layer without one.
#
# **And SASRec's plain layer finds the order by itself** on the sparse sets: in it, too, attention moves rare items less. On MovieLens, and in BERT4Rec's plain layer, the order is another.
#
# ### Caveats
#
# - One seed, except on Beauty, Sports and Instruments (SASRec and HSTU).
# - The gain is averaged over features and positions; what a single feature does is not shown.
