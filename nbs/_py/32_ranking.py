# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Ranking
#
# > How good is a ranking, what does chance score, and in which eight ways can the number lie?

# %%
#| default_exp ranking

# %% [markdown]
# **So far** a model gives every item a score. **Now** we judge it by the place of the one item that was really next.
# **Why** a chapter on something so small: published numbers for the same model on the same data differ by a factor of two, and the causes are in this chapter, not in the models.

# %%
#| hide
import warnings

# %%
#| hide
# the progress bars of the libraries below miss the notebook widgets, which this book does not use
warnings.filterwarnings("ignore", message="IProgress not found")

# %%
#| exports
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torchmetrics import Metric

from bft_nb.core import check_count, check_flag

# %% [markdown]
# ## The smallest case
#
# Six items, three users. Column 0 is padding; the entry of row $u$ and column $i$ is the score $r_{ui}$. Ida's next item was 1, Bo's 4, Cy's 6:

# %%
scores = torch.tensor([
    [9.0, 0.9, 0.1, 0.5, 0.3, 0.2, 0.7],
    [9.0, 0.2, 0.8, 0.6, 0.4, 0.9, 0.1],
    [9.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
])  # fmt: skip
targets = torch.tensor([1, 4, 6])


# %% [markdown]
# By hand: Ida's item has the highest score, rank 1. Bo's is beaten by items 5, 2 and 3, rank 4. Cy's model gives every item the same score: the items share ranks 1 to 6, and the fair answer is their average, 3.5.
# A rank is an integer here, so a half is rounded up, never in the model's favour: 4.
#
# ## A rank in one pass
#
# With $n$ competitors of which $g$ score higher, $\ell$ lower and $m = n - g - \ell$ the same, the average rank is
#
# $$\operatorname{rank} = 1 + g + \frac{m}{2} = 1 + \frac{n + g - \ell}{2} = 1 + \frac{n + \sum_i \operatorname{sign}(r_i - r_{\text{target}})}{2} \tag{32.1}$$

# %%
import sympy as sp

# %%
from bft_nb.symbolic import prove

# %%
n, g, l = sp.symbols("n g ell", integer=True, nonnegative=True)
prove((1 + g + (n - g - l) / 2) - (1 + (n + g - l) / 2))


# %% [markdown]
# One subtraction, one sign, one sum: ten times cheaper than sorting, and ties are fair by construction. An item the user has seen already is given $-\infty$: it then counts as lower, whatever the other scores are.


# %%
#| exports
def check_finite(
    scores: Float[Tensor, "b v"],  # column 0 is padding and not looked at
) -> None:
    "Raise `ValueError` unless every item's score is finite: NaN compares as neither higher nor lower and would rank first."
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        raise TypeError(f"scores must be a floating-point tensor, got {scores.dtype if isinstance(scores, Tensor) else type(scores).__name__}")
    if scores.ndim != 2 or scores.shape[1] < 2:
        raise ValueError(f"scores must have shape (users, items + 1) with one item at least, got {tuple(scores.shape)}")
    if not len(scores):
        return
    low, high = scores[:, 1:].aminmax()
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        bad = int((~torch.isfinite(scores[:, 1:])).sum())
        raise ValueError(f"scores must be finite, got {bad} NaN or infinite of {scores[:, 1:].numel()}")


# %%
#| exports
def check_integers(name: str, x: Int[Tensor, "..."]) -> None:
    "Raise `TypeError` unless `x` is a tensor of integers."
    if not isinstance(x, Tensor) or x.is_floating_point() or x.dtype == torch.bool:
        raise TypeError(f"{name} must be a tensor of integers, got {x.dtype if isinstance(x, Tensor) else type(x).__name__}")


# %%
#| exports
def check_seen(seen: Int[Tensor, "b s"], n_rows: int, n_columns: int) -> None:
    "Raise `ValueError` unless there is one row of items (or filler, 0) per row of scores, `TypeError` unless they are integers."
    check_integers("seen", seen)
    if seen.ndim != 2 or len(seen) != n_rows:
        raise ValueError(f"seen must have one row per row of scores, ({n_rows}, any), got {tuple(seen.shape)}")
    wrong = (seen < 0) | (seen >= n_columns)
    if bool(wrong.any()):
        raise ValueError(f"seen must hold item ids 0 (filler) or 1..{n_columns - 1}, got {int(seen[wrong][0])}")


# %%
#| exports
def check_targets(targets: Int[Tensor, " b"], n_rows: int, n_columns: int) -> None:
    "Raise `ValueError` unless there is one target per row and each is an item (padding, 0, is none), `TypeError` unless they are integers."
    check_integers("targets", targets)
    if targets.shape != (n_rows,):
        raise ValueError(f"targets must have shape ({n_rows},), one per row of scores, got {tuple(targets.shape)}")
    wrong = (targets < 1) | (targets >= n_columns)
    if bool(wrong.any()):
        raise ValueError(f"targets must be item ids 1..{n_columns - 1}, got {int(targets[wrong][0])}")


# %%
#| exports
def ranks(
    scores: Float[Tensor, "b v"],  # column i is item i, column 0 padding (never ranked)
    targets: Int[Tensor, " b"],  # the item that was really next
    seen: Int[Tensor, "b s"] | None = None,  # items out of competition, filled up with 0; None: all compete
) -> Int[Tensor, " b"]:  # from 1 (best); average under ties, a half rounded up
    "Rank of the target among the whole catalogue, equation (32.1); `ValueError` for NaN or infinite scores or targets that are no items."
    check_finite(scores)
    check_targets(targets, *scores.shape)
    targets = targets.long()
    own = scores.gather(1, targets[:, None])
    rivals = scores.clone()
    rivals[:, 0] = -torch.inf
    if seen is not None:
        check_seen(seen, *scores.shape)
        rivals.scatter_(1, seen.long(), -torch.inf)
    rivals.scatter_(1, targets[:, None], -torch.inf)
    signs = rivals.sub_(own).sign_().sum(1, dtype=torch.float32).long()  # whole numbers, exact up to 2²⁴ items
    return 1 + (scores.shape[1] + signs + 1).div(2, rounding_mode="floor")


# %%
ranks(scores, targets)

# %% [markdown]
# Bo has seen items 2 and 5 before. Out of competition, they no longer stand in front:

# %%
seen = torch.tensor([[0, 0], [2, 5], [0, 0]])
ranks(scores, targets, seen)


# %% [markdown]
# ## Three summaries
#
# With one relevant item per user, the summaries are functions of the rank. Hit rate, the share of users whose item is among the first $K$:
#
# $$\mathrm{HR@}K = \mathbb 1[\operatorname{rank} \le K] \tag{32.2}$$

# %%
#| exports
def hit_rate(
    ranks: Int[Tensor, "*m"],  # from `ranks`
    k: int = 10,  # length of the list the user sees
) -> Float[Tensor, "*m"]:  # 0 or 1 per user
    "Was the target in the first k? Equation (32.2)."
    return (ranks <= k).double()


# %% [markdown]
# Normalised discounted cumulative gain [@jarvelin2002ndcg]: a hit at the top is worth 1, further down less. The ideal list has the one relevant item first, so the normaliser is 1:
#
# $$\mathrm{NDCG@}K = \frac{\mathbb 1[\operatorname{rank} \le K]}{\log_2(1 + \operatorname{rank})} \tag{32.3}$$


# %%
#| exports
def ndcg(
    ranks: Int[Tensor, "*m"],
    k: int = 10,
) -> Float[Tensor, "*m"]:  # in [0, 1] per user
    "Normalised discounted cumulative gain with one relevant item, equation (32.3) [@jarvelin2002ndcg]."
    return hit_rate(ranks, k) / torch.log2(1 + ranks.double())


# %% [markdown]
# And the reciprocal rank, without a cut:
#
# $$\mathrm{RR} = 1/\operatorname{rank} \tag{32.4}$$


# %%
#| exports
def reciprocal_rank(
    ranks: Int[Tensor, "*m"],
) -> Float[Tensor, "*m"]:  # in (0, 1] per user
    "One over the rank, equation (32.4)."
    return 1 / ranks.double()


# %%
found = ranks(scores, targets, seen)
torch.stack([hit_rate(found, 3), ndcg(found, 3), reciprocal_rank(found)])


# %% [markdown]
# ## One metric, any number of machines
#
# Each summary is a mean, so its state is a sum and a count. `torchmetrics` adds the states of several processes before dividing [@detlefsen2022torchmetrics]: no process needs to see another's users.


# %%
#| exports
class Ranking(Metric):
    "Full-ranking HR@K, NDCG@K and MRR with their protocol, from ranks or from scores."

    full_state_update = False
    higher_is_better = True
    is_differentiable = False

    def __init__(
        self,
        k: Sequence[int] = (10, 20),  # lengths of the list
        *,
        filter_seen: bool,  # are items of the history out of competition? No default: it moves HR by up to half
        **kwargs,  # of `torchmetrics.Metric`
    ):
        super().__init__(**kwargs)
        if not isinstance(k, Sequence) or not k or any(not isinstance(n, int) or n < 1 for n in k):
            raise ValueError(f"k must be positive list lengths, like (10, 20), got {k!r}")
        check_flag("filter_seen", filter_seen)
        self.k, self.filter_seen = tuple(k), filter_seen
        for name in ("hits", "gains"):
            self.add_state(name, torch.zeros(len(self.k), dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("reciprocal", "count", "repeats"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(
        self,
        scores: Tensor,  # scores (b, n_items + 1), or ranks (b,) if that is all that is given
        targets: Int[Tensor, " b"] | None = None,
        seen: Int[Tensor, "b s"] | None = None,  # histories, filled up with 0; required with `filter_seen`
    ) -> None:
        "Add users, by their scores or by ranks computed elsewhere."
        if targets is None:
            return self.add_ranks(scores)
        if self.filter_seen and seen is None:
            raise ValueError("filter_seen=True needs `seen`, the items of each history")
        found = ranks(scores, targets, seen if self.filter_seen else None)
        if seen is not None:
            check_seen(seen, *scores.shape)
        self.add_ranks(found, None if seen is None else int(repeated(targets, seen).sum()))

    def add_ranks(
        self,
        ranks: Int[Tensor, " b"],
        repeats: int | None = None,  # how many of the targets are in the history; None: not known
    ) -> None:
        "Add users by their ranks; `ValueError` unless ranks are positive integers."
        if ranks.is_floating_point() or ranks.dtype == torch.bool or ranks.ndim != 1 or bool((ranks < 1).any()):
            raise ValueError(f"ranks must be positive integers of shape (b,), got {ranks.dtype} of shape {tuple(ranks.shape)}")
        self.hits += torch.stack([hit_rate(ranks, k).sum() for k in self.k])
        self.gains += torch.stack([ndcg(ranks, k).sum() for k in self.k])
        self.reciprocal += reciprocal_rank(ranks).sum()
        self.count += len(ranks)
        self.repeats += float("nan") if repeats is None else repeats

    def compute(self) -> dict[str, Tensor]:
        "Means over users: hr@K, ndcg@K, mrr; and how many users, and how many targets had been seen before (NaN if histories were not given)."
        if not self.count:
            raise ValueError("no user has been ranked: call update first")
        means = {f"hr@{k}": hit / self.count for k, hit in zip(self.k, self.hits, strict=True)}
        means |= {f"ndcg@{k}": gain / self.count for k, gain in zip(self.k, self.gains, strict=True)}
        return means | {"mrr": self.reciprocal / self.count, "n": self.count, "repeats": self.repeats}


# %%
#| exports
def repeated(
    targets: Int[Tensor, " b"],
    seen: Int[Tensor, "b s"],  # histories, filled up with 0
) -> Bool[Tensor, " b"]:
    "Had the user seen the target before? Such a target stays in the ranking; this says how often it happened."
    return (targets[:, None] == seen).any(1)


# %%
metric = Ranking(k=(3,), filter_seen=True)
metric.update(scores, targets, seen)
metric.compute()


# %% [markdown]
# ## The protocol beside the number
#
# The choices behind a number belong beside it, in one sentence:


# %%
#| exports
def protocol(
    *,
    split: str,  # how past and future were divided, with its hash
    n_items: int,
    filter_seen: bool,
    max_length: int,  # of the history the model reads
    n: int,  # users
    repeats: int | None = None,  # targets that were in the history; None: not known
) -> str:
    "One sentence that belongs beside every number."
    filtering = "seen items filtered (−inf)" if filter_seen else "seen items compete"
    again = f"{n} targets" if repeats is None else f"{repeats} of {n} targets seen before (ranked all the same)"
    return f"full ranking of {n_items} items, {split}, {filtering}, {again}, histories cut to the last {max_length}, average rank under ties"


# %%
protocol(split="leave-one-out 1f3a", n_items=6, filter_seen=True, max_length=50, n=3, repeats=int(metric.repeats))

# %% [markdown]
# ## How sure
#
# A mean over all users hides the rare items, so results are also given by the popularity of the target. A stratum of rare items has few hits, so it needs an interval. A hit rate is a proportion: Wilson's interval [@wilson1927] stays inside $[0, 1]$ and is honest at zero hits.


# %%
#| exports
def wilson_interval(
    hits: int,
    n: int,  # trials
    confidence: float = 0.95,
) -> tuple[float, float]:  # lower and upper bound of the rate
    "Wilson's score interval of a proportion [@wilson1927], by `scipy.stats.binomtest`; (nan, nan) for no trials."
    from scipy.stats import binomtest

    if not 0 <= hits <= n or hits != int(hits) or not 0 < confidence < 1:
        raise ValueError(f"hits must be whole and lie in 0 … n and confidence in 0 … 1, got {hits} of {n} and {confidence}")
    if n == 0:
        return float("nan"), float("nan")
    interval = binomtest(int(hits), int(n)).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


# %%
wilson_interval(0, 50)


# %%
#| exports
class Stratum(NamedTuple):
    "Hit rate and NDCG of the users whose target lies in one stratum."

    stratum: int  # 0 is the rarest
    n: int  # users
    hr: float
    low: float  # Wilson bounds of `hr`
    high: float
    ndcg: float


# %%
#| exports
def by_stratum(
    ranks: Int[Tensor, " m"],
    strata: Int[np.ndarray, " m"],  # of each user's target, 0 is the rarest
    k: int = 10,
    confidence: float = 0.95,
) -> list[Stratum]:  # rarest first
    "Metrics by popularity of the target, with Wilson intervals; `ValueError` if the lengths differ."
    found, groups = torch.as_tensor(ranks), np.asarray(strata)
    if tuple(found.shape) != groups.shape:
        raise ValueError(f"ranks and strata must have one shape, got {tuple(found.shape)} and {groups.shape}")
    if groups.dtype.kind not in "iu":
        raise TypeError(f"strata must be integers, got {groups.dtype}")
    rows = []
    for s in np.unique(groups).tolist():
        part = found[torch.from_numpy(groups == s)]
        low, high = wilson_interval(int((part <= k).sum()), len(part), confidence)
        rows.append(Stratum(s, len(part), float(hit_rate(part, k).mean()), low, high, float(ndcg(part, k).mean())))
    return rows


# %% [markdown]
# The strata come from chapter 30, which counts items in the training part only: an item that is rare in training is rare to the model, however popular it becomes in the test.

# %%
from bft_nb.interactions import popularity_strata

# %%
train_counts = np.array([0, 9, 1, 1, 1, 4, 2])
strata = popularity_strata(train_counts, 3).stratum[targets]
by_stratum(found, strata, k=3)


# %% [markdown]
# ## Is A better than B?
#
# Both models rank the same users, so their difference is taken user by user, and the users are resampled with replacement [@efron1993bootstrap]:


# %%
#| exports
class Estimate(NamedTuple):
    "A mean over users (or questions), or a ratio of two, with its bootstrap interval."

    mean: float
    low: float  # NaN if there is one user alone
    high: float
    n: int  # users


# %%
#| exports
def _bootstrap(samples: tuple[np.ndarray, ...], statistic: Callable[..., np.ndarray], n: int, seed: int, confidence: float) -> Estimate:
    "Percentile interval of a statistic of users drawn again, by `scipy.stats.bootstrap`."
    from scipy.stats import bootstrap

    m = len(samples[0])
    if not m or any(len(x) != m for x in samples):
        raise ValueError(f"values must hold one number at least, and one for each user, got {[len(x) for x in samples]}")
    check_count("n", n)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie in 0 … 1, got {confidence}")
    if len(samples) > 1 and not samples[1].any():
        return Estimate(math.nan, math.nan, math.nan, m)
    value = float(statistic(*samples, axis=-1))
    if m < 2:
        return Estimate(value, math.nan, math.nan, m)
    if np.ptp(samples[0]) == 0 and (len(samples) == 1 or value == 0):
        return Estimate(value, value, value, m)
    rng = np.random.default_rng(seed)
    with np.errstate(invalid="ignore"):  # the spread of an infinite ratio
        made = bootstrap(samples, statistic, paired=True, vectorized=True, n_resamples=n, batch=64, method="percentile", confidence_level=confidence, rng=rng)
    return Estimate(value, float(made.confidence_interval.low), float(made.confidence_interval.high), m)


# %%
#| exports
def bootstrap_mean(
    values: Float[np.ndarray, " m"],  # per user; differences of two models, for a paired comparison
    n: int = 2000,  # resamples
    seed: int = 0,
    confidence: float = 0.95,
) -> Estimate:
    """Percentile bootstrap of a mean [@efron1993bootstrap].

    If all values are equal the interval has width zero: the bootstrap has seen no variation, which is not certainty. `ValueError` without users
    or for a confidence outside 0 … 1."""
    return _bootstrap((values,), lambda x, axis: x.mean(axis), n, seed, confidence)


# %%
#| exports
def _ratio(values: np.ndarray, base: np.ndarray, axis: int) -> np.ndarray:
    "Ratio of means; of a resample without any base, infinite with the sign of the values."
    top, below = values.mean(axis), base.mean(axis)
    return np.divide(top, below, out=np.where(top == 0, 0.0, np.copysign(np.inf, top)), where=below > 0)


# %%
#| exports
def bootstrap_ratio(
    values: Float[np.ndarray, " m"],  # per user
    base: Float[np.ndarray, " m"],  # of the same users, ≥ 0
    n: int = 2000,  # resamples
    seed: int = 0,
    confidence: float = 0.95,
) -> Estimate:
    "Percentile bootstrap of mean(values)/mean(base), both drawn together [@efron1993bootstrap]: a base of few hits makes the ratio uncertain, too. NaN if the base is 0 for all."
    return _bootstrap((values, base), _ratio, n, seed, confidence)


# %%
#| exports
def paired_bootstrap(
    ranks_a: Int[Tensor, "*seeds_a m"],  # of several trainings, if there are: their metric is averaged per user
    ranks_b: Int[Tensor, "*seeds_b m"],  # the same users in the same order
    metric: Callable[[Tensor], Tensor] = ndcg,  # value per user from ranks
    strata: Shaped[np.ndarray, " m"] | None = None,  # numbers or names: one interval per stratum, besides all
    n: int = 2000,  # resamples
    seed: int = 0,
    confidence: float = 0.95,
    relative: bool = False,  # in percent of the mean metric(b) of the same users
) -> dict[str, Estimate]:  # metric(a) − metric(b); keys "all" and, with strata, these as text
    "Bootstrap over users of the paired difference, by `bootstrap_mean` or `bootstrap_ratio`."
    a, b = torch.as_tensor(ranks_a), torch.as_tensor(ranks_b)
    if a.ndim == 0 or b.ndim == 0 or a.shape[-1] != b.shape[-1] or not a.numel() or not b.numel():
        raise ValueError(f"ranks must be of the same users, one at least, got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if strata is not None and np.shape(strata) != a.shape[-1:]:
        raise ValueError(f"strata must have one entry per user, ({a.shape[-1]},), got {np.shape(strata)}")
    ours, theirs = (metric(x).reshape(-1, x.shape[-1]).mean(0).numpy() for x in (a, b))
    difference = ours - theirs
    groups = {"all": np.ones(len(difference), dtype=bool)}
    if strata is not None:
        groups |= {str(s): np.asarray(strata) == s for s in np.unique(strata)}
    if relative:
        return {name: bootstrap_ratio(100 * difference[rows], theirs[rows], n, seed, confidence) for name, rows in groups.items()}
    return {name: bootstrap_mean(difference[rows], n, seed, confidence) for name, rows in groups.items()}


# %% [markdown]
# On a thousand users, two models that differ only by chance, and a model against one that really improves on it for one user in twenty:

# %%
rng = np.random.default_rng(3)
ranks_a = torch.from_numpy(rng.integers(1, 200, 1000))
ranks_c = torch.where(torch.from_numpy(rng.random(1000) < 0.05), 1, ranks_a)
paired_bootstrap(ranks_a, torch.from_numpy(rng.integers(1, 200, 1000)))["all"], paired_bootstrap(ranks_c, ranks_a)["all"]

# %% [markdown]
# `strata` may be names as well, for instance whether a target repeats an item of the history. Such a target is easy to hit where it is kept in the ranking while its seen rivals are not.

# %%
again = np.where(np.arange(1000) < 60, "repeated", "new")
{name: d.n for name, d in paired_bootstrap(ranks_c, ranks_a, strata=again).items()}

# %% [markdown]
# ## How the number lies
#
# ### 1 Sampled metrics
#
# To save time, many papers rank the target among $m$ random items instead of all $N$. The sampled rank of a target with full rank $r$ is one plus a hypergeometric count of the $r - 1$ better items,
#
# $$\mathrm{HR}_m\text{@}K = P\big(X < K\big), \qquad X \sim \mathrm{Hypergeometric}(N - 1,\ r - 1,\ m) \tag{32.5}$$
#
# so with $m = 100$ a rank of 600 among 12,000 becomes a hit almost always: the sampled metric no longer looks at the top of the list [@krichene2020sampled]. @fig-sampled shows what this does to two models. Model A finds the item for one user in ten and is lost for the others. Model B finds it for one in twenty-five and is vaguely right for the rest:

# %%
import matplotlib.pyplot as plt
from scipy.stats import hypergeom

# %%
from bft_nb.figures import COLOUR, use_style

# %%
n_items, users = 12_000, 1000
rank_a = np.r_[np.full(100, 5), np.linspace(2000, 12_000, 900)].astype(int)
rank_b = np.r_[np.full(40, 5), np.linspace(300, 1500, 960)].astype(int)
negatives = np.unique(np.geomspace(20, n_items - 1, 40).astype(int))
sampled = {name: [hypergeom.cdf(9, n_items - 1, r - 1, m).mean() for m in negatives] for name, r in {"A": rank_a, "B": rank_b}.items()}

# %%
#| label: fig-sampled
#| fig-cap: "With few sampled negatives model B looks far better than A, although A hits more than twice as often when the whole catalogue is ranked (right end)."
#| code-fold: true
use_style()
fig, ax = plt.subplots()
ax.plot(negatives, sampled["A"], color=COLOUR["posterior"], label="model A")
ax.plot(negatives, sampled["B"], color=COLOUR["baseline"], label="model B")
ax.set(xscale="log", xlabel="sampled negatives m [items]", ylabel="HR@10 [share of users]", ylim=(0, 1.02))
ax.legend()
plt.show()

# %% [markdown]
# At $m = N - 1$ the sampled metric is the full one, and only the full one is in this library:

# %%
assert np.isclose(sampled["A"][-1], (rank_a <= 10).mean()) and np.isclose(sampled["B"][-1], (rank_b <= 10).mean())
sampled["A"][-1], sampled["B"][-1]

# %% [markdown]
# ### 2 Constant and undefined scores
#
# The shortest implementation counts the items that score higher. It gives a model that has learnt nothing, or one that has diverged to NaN, a perfect result:

# %%
constant, broken, last = torch.zeros(1, 101), torch.full((1, 101), torch.nan), torch.tensor([100])
naive = [1 + int((s > s[:, last]).sum()) for s in (constant, broken)]
naive, ranks(constant, last)

# %%
from fastcore.test import test_fail

# %%
test_fail(lambda: ranks(broken, last), contains="got 100 NaN or infinite of 100")
test_fail(lambda: ranks(constant / 0.0, last), contains="scores must be finite")

# %% [markdown]
# ### 3 Seen items
#
# Filtering with the value 0 instead of $-\infty$ puts the seen items *first* as soon as scores are negative, as log-probabilities are:

# %%
log_probability = torch.tensor([[0.0, -3.0, -1.0, -2.0]])
wrong = log_probability.clone().index_fill_(1, torch.tensor([1, 3]), 0.0)
ranks(wrong, torch.tensor([2])), ranks(log_probability, torch.tensor([2]), torch.tensor([[1, 3]]))

# %% [markdown]
# And a target that the user has seen before (a café visited again) must not vanish from its own ranking. It stays, and it is counted:

# %%
again = Ranking(k=(1,), filter_seen=True)
again.update(log_probability, torch.tensor([2]), torch.tensor([[2, 3]]))
again.compute()

# %% [markdown]
# ### 4 Ties in time, 7 Cut histories
#
# Neither shows in the number at all. They are decided before the ranking, by the split (chapter 30) and by the model's `max_length`; so the sentence of `protocol` carries the hash of the one and the value of the other.
#
# ### 5 Strata counted on the wrong data
#
# Count popularity on all data and every target has been counted once through itself: the stratum "never seen in training" is empty by construction. Here item 2 occurs only in the test:

# %%
everything = train_counts + np.bincount([2, 2, 2], minlength=7)
int(popularity_strata(train_counts, 3).stratum[2]), int(popularity_strata(everything, 3).stratum[2])

# %% [markdown]
# ### 6 Padding and batches
#
# The padding column scored 9.0 in the smallest case above, more than any item, and no rank noticed. A user's rank is the same alone and in company:

# %%
torch.testing.assert_close(torch.cat([ranks(scores[u : u + 1], targets[u : u + 1]) for u in range(3)]), ranks(scores, targets))

# %% [markdown]
# ### 8 Choosing on the test
#
# Thirty epochs of a model that does not change, measured on 500 validation and 500 test users at a true hit rate of 8 %. The best test epoch (first number, a mean of 400 repetitions) is not a result; the test at the best *validation* epoch (second) is:

# %%
rng = np.random.default_rng(1)
valid, test = rng.binomial(500, 0.08, (2, 400, 30)) / 500
honest = test[np.arange(400), valid.argmax(1)].mean()
round(float(test.max(1).mean()), 3), round(float(honest), 3)

# %% [markdown]
# ## Assumptions, and where they break
#
# - There is one relevant item per user: with several, NDCG needs an ideal list and HR a definition.
# - The average rank is the expected rank under random tie breaking, not the expected hit rate: in a catalogue smaller than $2K$ a constant model would be ranked inside $K$ for everybody, so $K$ must stay well below half the catalogue.
# - Bootstrap intervals cover the choice of users, not the seed of the training: that takes several seeds.
#
# ## Summary
#
# - The rank of the target in the whole catalogue is one sum of signs; ties are shared, seen items and padding are out, undefined scores are refused.
# - HR, NDCG and MRR are functions of that rank, and a `Ranking` metric adds them up over batches and processes.
# - Every number comes with its protocol, its interval, and its strata counted on training data.
#
# ## Exercises
#
# **1.** What HR@10 does a random ranking of 12,101 items reach, and what does `Ranking` give it?
#
# <details><summary>Answer</summary>
#
# $10/12101 = 0.0008$:

# %%
chance = Ranking(k=(10,), filter_seen=False)
chance.update(torch.randint(1, 12_102, (100_000,), generator=torch.Generator().manual_seed(0)))
round(10 / 12_101, 4), round(float(chance.compute()["hr@10"]), 4)

# %% [markdown]
# </details>
#
# **2.** Model B of the figure ranks every target better than the median of A. Why does A win?
#
# <details><summary>Answer</summary>
#
# Because a list of ten is all a user sees: ranks 300 and 12,000 are the same failure. A metric that pays for the middle of the list (AUC, or any sampled one) answers another question:

# %%
float(np.median(rank_a)), float(np.median(rank_b))

# %% [markdown]
# </details>
