# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A world whose truth is known
#
# > Users wander between clusters of items; each item has a known probability that its appearance means something.

# %%
#| default_exp world

# %% [markdown]
# **So far** a layer that tracks how well it knows each token. **Now** a world in which we know how well each token *can* be known.
# **Why**: on real data nobody can say whether a learned precision is right. Here every item carries a true reliability, every user a true noise level, and the best possible
# predictor is a filter of a few lines. It also needs no download, so everything in the book that learns from interactions runs on it. The construction is ours [D].

# %%
#| exports
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

# %%
import matplotlib.pyplot as plt
import sympy as sp
from fastcore.test import test_fail
from bft_nb.figures import COLOUR, band, use_style
from bft_nb.symbolic import assert_same, prove

# %%
use_style()

# %% [markdown]
# ## The smallest case
#
# A reader of crime novels buys four books in a year: two crime novels, a birthday present, and another crime novel. The present, an atlas, says nothing about the next purchase.
# The *reliability* $\rho$ of an item is the probability that its appearance means something. A shop that knows that atlases are mostly presents, $\rho = 0.2$, should weigh this one less than a crime novel with $\rho = 0.9$:

# %%
rho = {"crime novel": 0.9, "atlas": 0.2}
history = ["crime novel", "crime novel", "atlas", "crime novel"]
[rho[item] for item in history]

# %% [markdown]
# A model sees only the sequence of items. Whether it finds the two numbers, as the precision of its tokens, is what this world is made to test.
#
# ## Which popularity
#
# Items are chosen with very different frequencies. The $r$-th most popular of $n$ is chosen with probability $p_r \propto r^{-s}$, Zipf's law with exponent $s$:


# %%
#| exports
def zipf(
    n_items: int,  # n, how many items
    exponent: float,  # s ≥ 0; 0 makes all items equally popular
) -> Float[np.ndarray, " n"]:  # probabilities, largest first, sum 1
    "Zipf's law, $p_r \\propto r^{-s}$."
    weight = np.arange(1, n_items + 1, dtype=float) ** -exponent
    return weight / weight.sum()


# %%
zipf(4, 1.0)

# %% [markdown]
# ## What one appearance of an item tells
#
# At each step a user acts on purpose (*signal*) with probability $\pi$, and at random (*noise*) otherwise. Let $p_i$ be the popularity of item $i$, $\rho_i$ its reliability, and
#
# $$\bar\pi = \sum_i p_i \rho_i \tag{29.1}$$
#
# the mean share of signal. We let signal choose items in proportion to $p_i\rho_i$ and noise in proportion to $p_i(1-\rho_i)$, so that
#
# $$P(i \mid \text{signal}) = \frac{p_i\rho_i}{\bar\pi}, \qquad P(i \mid \text{noise}) = \frac{p_i(1-\rho_i)}{1-\bar\pi}. \tag{29.2}$$
#
# **Claim.** At $\pi = \bar\pi$ the item appears with probability $p_i$, and $P(\text{signal} \mid i) = \rho_i$. First the popularity:

# %%
p, r, pi_bar, pi = sp.symbols("p rho pibar pi", positive=True)
signal_mass = pi * p * r / pi_bar
noise_mass = (1 - pi) * p * (1 - r) / (1 - pi_bar)
prove((signal_mass + noise_mass).subs(pi, pi_bar) - p)

# %% [markdown]
# then Bayes' rule:

# %%
posterior = signal_mass / (signal_mass + noise_mass)
prove(posterior.subs(pi, pi_bar) - r)

# %% [markdown]
# **Users differ too.** A user $u$ has a signal share $\pi_u$ of their own. The odds of item and user then multiply:
#
# $$\frac{P(\text{signal}\mid i,u)}{P(\text{noise}\mid i,u)} = \frac{\rho_i}{1-\rho_i}\cdot\frac{\pi_u}{1-\pi_u}\cdot\frac{1-\bar\pi}{\bar\pi}. \tag{29.3}$$

# %%
odds = lambda x: x / (1 - x)
prove(sp.simplify(odds(posterior)) - odds(r) * odds(pi) / odds(pi_bar))

# %% [markdown]
# If the $\pi_u$ have mean $\bar\pi$, both masses keep their mean over users, because they are linear in $\pi$: averaged over users $P(\text{signal}\mid i) = \rho_i$ still holds.

# %%
prove(sp.diff(signal_mass, pi, 2)), prove(sp.diff(noise_mass, pi, 2))


# %%
#| exports
def signal_probability(
    reliability: Float[np.ndarray, "*shape"],  # $\rho_i$ in (0, 1)
    user_signal: Float[np.ndarray, "*shape"],  # $\pi_u$ in (0, 1)
    mean_signal: Float[np.ndarray, "*shape"] | float,  # $\bar\pi$ in (0, 1)
) -> Float[np.ndarray, "*shape"]:  # in (0, 1)
    "P(signal | item, user), the odds product of equation 29.3."
    signal = reliability * user_signal / mean_signal
    noise = (1 - reliability) * (1 - user_signal) / (1 - mean_signal)
    return signal / (signal + noise)


# %% [markdown]
# The function is the formula (points drawn in (0, 1), value and first derivative):

# %%
assert_same(posterior.subs(p, 1), (r, pi, pi_bar), signal_probability, lo=0.05, hi=0.95)

# %% [markdown]
# ## Where signal goes: a Markov chain over clusters
#
# On purpose, a user picks from the cluster they are in, and the cluster moves by a Markov chain with transition matrix $A$. For (29.2) to hold at every step, the chain must visit
# cluster $c$ as often as its items carry signal. Its stationary distribution has to be
#
# $$\mu_c = \frac{1}{\bar\pi}\sum_{i \in c} p_i\rho_i. \tag{29.4}$$
#
# We start from habits (stay; move to a favourite next cluster; rarely, jump anywhere) and scale rows and columns in turn until the joint distribution of two successive clusters has both margins $\mu$
# [@sinkhorn1967concerning]. Dividing by $\mu$ gives $A$.


# %%
#| exports
def habits(
    n_clusters: int,  # c
    rng: np.random.Generator,
    stay: float = 0.5,  # probability to stay
    jump: float = 0.05,  # probability to go anywhere
) -> Float[np.ndarray, "c c"]:  # positive, rows sum to 1
    "A transition matrix with memory: stay, or move to one of two favourite next clusters (2 : 1), or jump."
    first, second = (np.argsort(rng.random(n_clusters)) for _ in range(2))
    eye = np.eye(n_clusters)
    return stay * eye + (1 - stay - jump) * (2 * eye[first] + eye[second]) / 3 + jump / n_clusters


# %%
#| exports
def with_stationary(
    transition: Float[np.ndarray, "c c"],  # positive entries
    stationary: Float[np.ndarray, " c"],  # μ, positive, sums to 1
    steps: int = 2000,  # scaling rounds
) -> Float[np.ndarray, "c c"]:  # $A$ with $\mu A = \mu$, rows sum to 1
    "Scale rows and columns in turn until the chain's stationary distribution is μ [@sinkhorn1967concerning]."
    joint = transition * stationary[:, None]
    for _ in range(steps):
        joint *= stationary / joint.sum(0)
        joint *= (stationary / joint.sum(1))[:, None]
        if np.abs(joint.sum(0) - stationary).max() < 1e-15: break
    return joint / joint.sum(1, keepdims=True)


# %%
mu = np.array([0.5, 0.3, 0.2])
A = with_stationary(habits(3, np.random.default_rng(0)), mu)
np.abs(mu @ A - mu).max() < 1e-12


# %%
#| exports
def cluster_share(
    popularity: Float[np.ndarray, " padded"],  # $p_i$
    reliability: Float[np.ndarray, " padded"],  # $\rho_i$
    item_cluster: Int[np.ndarray, " padded"],  # cluster of each item, −1 for padding
    n_clusters: int,  # c
) -> Float[np.ndarray, " c"]:  # μ, sums to 1
    "How much of all signal each cluster carries, equation 29.4."
    mass = np.bincount(item_cluster[1:], (popularity * reliability)[1:], n_clusters)
    return mass / mass.sum()


# %%
cluster_share(np.array([0, 0.5, 0.25, 0.25]), np.array([0, 0.9, 0.5, 0.2]), np.array([-1, 0, 0, 1]), 2)


# %% [markdown]
# ## The world
#
# Everything that is true in this world, as plain arrays. Items are numbered from 1, and 0 is padding in every table of the book, so tables indexed by item have $n+1$ rows (axis `padded`).

# %%
#| exports
class World(NamedTuple):
    "A synthetic world and one draw of events from it."

    items: Int[np.ndarray, "users events"]  # item of every event, 1 … n_items, in order
    signal: Int[np.ndarray, "users events"]  # 1 where the event was signal, 0 where noise
    clusters: Int[np.ndarray, "users events"]  # the user's cluster at that event, 0 … n_clusters − 1
    popularity: Float[np.ndarray, " padded"]  # $p_i$, row 0 is 0
    reliability: Float[np.ndarray, " padded"]  # $\rho_i$ in (0, 1), row 0 is 0
    item_cluster: Int[np.ndarray, " padded"]  # cluster of each item, row 0 is −1
    user_signal: Float[np.ndarray, " users"]  # $\pi_u$ in (0, 1); the user's noise level is 1 − π_u
    transition: Float[np.ndarray, "c c"]  # $A$

    @property
    def n_items(self) -> int:
        "How many items there are, padding not counted."
        return len(self.popularity) - 1

    @property
    def mean_signal(self) -> float:
        r"$\bar\pi$, equation 29.1."
        return float(self.popularity @ self.reliability)

    @property
    def stationary(self) -> Float[np.ndarray, " c"]:
        r"$\mu$, equation 29.4."
        return cluster_share(self.popularity, self.reliability, self.item_cluster, len(self.transition))


# %% [markdown]
# ### Drawing it
#
# Every random choice starts from a uniform number of a seeded generator and is read off the cumulative distribution, so the same seed gives the same world on every machine.


# %%
#| exports
def choose(
    cumulative: Float[np.ndarray, "*rows k"],  # cumulative probabilities along the last axis
    uniform: Float[np.ndarray, " *rows"],  # in [0, 1)
) -> Int[np.ndarray, " *rows"]:  # 0 … k − 1
    "Inverse-transform sampling, one choice for each row."
    return np.minimum((uniform[..., None] * cumulative[..., -1:] >= cumulative).sum(-1), cumulative.shape[-1] - 1)


# %%
choose(np.array([[0.5, 1.0], [0.5, 1.0]]), np.array([0.4, 0.6]))


# %%
#| exports
def draw_clusters(
    transition: Float[np.ndarray, "c c"],  # $A$
    stationary: Float[np.ndarray, " c"],  # μ, where every user starts
    shape: tuple[int, int],  # (users, events)
    rng: np.random.Generator,
) -> Int[np.ndarray, "users events"]:  # cluster of each user at each event
    "A stationary Markov chain for each user."
    uniform = rng.random(shape)
    cumulative = transition.cumsum(1)
    state = [choose(np.broadcast_to(stationary.cumsum(), (shape[0], len(stationary))), uniform[:, 0])]
    for t in range(1, shape[1]): state.append(choose(cumulative[state[-1]], uniform[:, t]))
    return np.stack(state, 1)


# %%
#| exports
def emission(
    popularity: Float[np.ndarray, " padded"],  # $p_i$
    reliability: Float[np.ndarray, " padded"],  # $\rho_i$
    item_cluster: Int[np.ndarray, " padded"],  # cluster of each item
    n_clusters: int,  # c
) -> Float[np.ndarray, "emitters padded"]:  # row z: P(i | signal, cluster z); last row: P(i | noise)
    "Where events land, equation 29.2 within each cluster; each row sums to 1 and padding has probability 0."
    rows = (item_cluster == np.arange(n_clusters)[:, None]) * (popularity * reliability)
    rows = np.vstack([rows, popularity * (1 - reliability)])
    return rows / rows.sum(1, keepdims=True)


# %%
#| exports
def draw_items(
    clusters: Int[np.ndarray, "users events"],  # where each user is
    user_signal: Float[np.ndarray, " users"],  # $\pi_u$
    emit: Float[np.ndarray, "emitters padded"],  # from `emission`
    rng: np.random.Generator,
) -> tuple[Int[np.ndarray, "users events"], Int[np.ndarray, "users events"]]:  # items, signal
    "Signal or noise for every event, then an item from the cluster or from everywhere."
    signal = (rng.random(clusters.shape) < user_signal[:, None]).astype(np.int64)
    row, uniform = np.where(signal, clusters, len(emit) - 1), rng.random(clusters.shape)
    items = np.empty(clusters.shape, dtype=np.int64)
    for n, cumulative in enumerate(emit.cumsum(1)):
        here = row == n
        items[here] = np.searchsorted(cumulative / cumulative[-1], uniform[here], side="right")
    return items, signal


# %% [markdown]
# `heterogeneity` spreads the reliabilities around one half: 0 makes every item equally reliable, so there is nothing for a precision to learn; 1 spreads them evenly over (0.05, 0.95),
# or, with `two_kinds`, makes half of the items 0.05 and half 0.95. Reliability is independent of popularity, so counting items cannot find it. `user_spread` does the same for users.


# %%
#| exports
def draw_truth(
    n_items: int,  # n
    n_clusters: int,  # c
    heterogeneity: float,  # 0 … 1
    two_kinds: bool,  # two values of ρ instead of an even spread
    exponent: float,  # of Zipf's law
    rng: np.random.Generator,
) -> tuple[Float[np.ndarray, " padded"], Float[np.ndarray, " padded"], Int[np.ndarray, " padded"]]:  # $p$, $\rho$, cluster
    "Popularity, reliability and cluster of each item, independent of each other."
    rank, spread, place = (np.argsort(rng.random(n_items)) for _ in range(3))
    level = (spread + 0.5) / n_items - 0.5
    reliability = 0.5 + 0.9 * heterogeneity * (np.where(level < 0, -0.5, 0.5) if two_kinds else level)
    pad = lambda value, column: np.concatenate([[value], column])
    return pad(0.0, zipf(n_items, exponent)[rank]), pad(0.0, reliability), pad(-1, place % n_clusters)


# %%
#| exports
def check_sizes(
    n_items: int,
    n_clusters: int,
    n_users: int,
    n_events: int,
    heterogeneity: float,
    user_spread: float,
    exponent: float = 0.0,
    stay: float = 0.0,
    seed: int = 0,
) -> None:
    "Raise `ValueError` naming the first argument that is out of range, `TypeError` for sizes that are no whole numbers."
    for name, value in dict(n_items=n_items, n_clusters=n_clusters, n_users=n_users, n_events=n_events, seed=seed).items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool): raise TypeError(f"{name} must be a whole number, got {value!r}")
    if seed < 0: raise ValueError(f"seed must be at least 0, got {seed}")
    if not 1 <= n_clusters <= n_items: raise ValueError(f"n_clusters must lie in 1 … n_items = {n_items}, got {n_clusters}")
    if n_users < 1: raise ValueError(f"n_users must be at least 1, got {n_users}")
    if n_events < 3: raise ValueError(f"n_events must be at least 3 (train, validation and test need one each), got {n_events}")
    ranges = {"heterogeneity": (heterogeneity, 1), "user_spread": (user_spread, 1), "exponent": (exponent, 20), "stay": (stay, 0.95)}
    for name, (share, high) in ranges.items():
        if not 0 <= share <= high: raise ValueError(f"{name} must lie in 0 … {high}, got {share}")


# %%
test_fail(lambda: check_sizes(10, 20, 5, 5, 1.0, 1.0), contains="got 20")
test_fail(lambda: check_sizes(10, 2, 5, 5, 1.5, 1.0), contains="heterogeneity must lie in 0 … 1, got 1.5")


# %%
#| exports
def make_world(
    n_items: int = 200,
    n_clusters: int = 20,
    n_users: int = 600,
    n_events: int = 20,  # events per user
    heterogeneity: float = 1.0,  # spread of the items' reliability, 0 (all equal) … 1
    two_kinds: bool = False,  # reliability takes two values instead of an even spread
    user_spread: float = 0.5,  # spread of the users' signal share, 0 (all equal) … 1
    exponent: float = 0.8,  # of Zipf's law
    stay: float = 0.5,  # probability that a user stays in a cluster, at most 0.95: `habits` keeps the rest for jumps
    seed: int = 0,
) -> World:  # truth and one draw of events
    """Draw a world and its events; the same arguments give the same world.

    Raises `ValueError` for sizes or spreads out of range, naming the value.
    """
    check_sizes(n_items, n_clusters, n_users, n_events, heterogeneity, user_spread, exponent, stay, seed)
    rng = np.random.default_rng(seed)
    truth = draw_truth(n_items, n_clusters, heterogeneity, two_kinds, exponent, rng)
    mean = float(truth[0] @ truth[1])
    user_signal = mean + user_spread * (2 * rng.random(n_users) - 1) * min(mean, 1 - mean)
    mu = cluster_share(*truth, n_clusters)
    transition = with_stationary(habits(n_clusters, rng, stay), mu)
    clusters = draw_clusters(transition, mu, (n_users, n_events), rng)
    items, signal = draw_items(clusters, user_signal, emission(*truth, n_clusters), rng)
    return World(items, signal, clusters, *truth, user_signal, transition)

# %%
world = make_world()
world.items[:2]

# %% [markdown]
# ### Is it as claimed?
#
# In a large draw, the share of signal among the appearances of each item must be $\rho_i$, and the item's share of all events $p_i$, up to chance. Counts are binomial, so the differences in units of their
# standard error should look like a standard normal: mean 0, standard deviation 1 (a little more, because the events of one user are not independent). @fig-reliability shows the first of the two shares, item by item.


# %%
big = make_world(n_users=20_000, seed=1)
seen = np.bincount(big.items.ravel(), minlength=201)[1:]
share = np.bincount(big.items.ravel(), big.signal.ravel(), 201)[1:] / seen
rho, pop = big.reliability[1:], big.popularity[1:]
z_signal = (share - rho) / np.sqrt(rho * (1 - rho) / seen)
z_seen = (seen - pop * big.items.size) / np.sqrt(pop * (1 - pop) * big.items.size)
[(round(float(z.mean()), 2), round(float(z.std()), 2)) for z in (z_signal, z_seen)]

# %%
assert abs(z_signal.mean()) < 0.3 and 0.8 < z_signal.std() < 1.3
assert abs(z_seen.mean()) < 0.5 and 0.8 < z_seen.std() < 2.0

# %%
#| label: fig-reliability
#| fig-cap: "The share of signal among an item's appearances is its reliability, for frequent and rare items alike (band: ± 2 standard errors of the rarest item, 20,000 users)."
#| code-fold: true
fig, ax = plt.subplots()
grid = np.linspace(0.02, 0.98, 50)
se = 2 * np.sqrt(grid * (1 - grid) / seen.min())
ax.fill_between(grid, grid - se, grid + se, color=COLOUR["truth"], alpha=0.2, linewidth=0)
ax.plot(grid, grid, "--", color=COLOUR["truth"], label="truth")
ax.scatter(rho, share, s=60 * np.sqrt(pop / pop.max()), color=COLOUR["observation"], alpha=0.5, linewidth=0, label="item (area: popularity)")
ax.set(xlabel="reliability ρ of the item", ylabel="share of signal, counted")
ax.legend()
plt.show()

# %% [markdown]
# ## The best possible predictor
#
# The cluster is hidden and the items are seen, so this is a hidden Markov model, and its forward filter [@rabiner1989tutorial] is the exact Bayesian predictor. With $b$ the belief about the
# cluster at the next event,
#
# $$b \leftarrow A^\top\,\frac{b \circ \ell(i)}{b^\top \ell(i)}, \qquad \ell_z(i) = \pi_u P(i \mid \text{signal}, z) + (1-\pi_u) P(i \mid \text{noise}). \tag{29.5}$$
#
# The reliability enters only through $\ell$: an item with small $\rho$ has a flat likelihood and hardly moves the belief. This is what the gain $K$ has to learn.


# %%
#| exports
def filter_clusters(
    history: Int[np.ndarray, "m events"],  # items in order, 0 is padding on either side
    user_signal: Float[np.ndarray, " m"],  # $\pi_u$
    emit: Float[np.ndarray, "emitters padded"],  # from `emission`
    transition: Float[np.ndarray, "c c"],  # $A$
    stationary: Float[np.ndarray, " c"],  # μ, the belief before the first event
) -> Float[np.ndarray, "m c"]:  # belief about the cluster of the next event
    "Forward filtering, equation 29.5 [@rabiner1989tutorial]."
    belief = np.tile(stationary, (len(history), 1))
    for item in history.T:
        like = user_signal[:, None] * emit[:-1, item].T + (1 - user_signal)[:, None] * emit[-1, item][:, None]
        updated = belief * like
        total = updated.sum(1, keepdims=True)
        belief = np.where(item[:, None] > 0, updated / np.where(total > 0, total, 1) @ transition, belief)
    return belief


# %% [markdown]
# Two users with the same noise level, one event each: the more reliable the item, the further the belief moves away from the stationary distribution.

# %%
emit = emission(world.popularity, world.reliability, world.item_cluster, 20)
order = np.argsort(world.reliability[1:]) + 1
one_event = np.stack([order[:1], order[-1:]])
belief = filter_clusters(one_event, np.full(2, world.mean_signal), emit, world.transition, world.stationary)
np.abs(belief - world.stationary).sum(1).round(2)


# %%
#| exports
def next_item(
    belief: Float[np.ndarray, "m c"],  # about the cluster of the next event
    user_signal: Float[np.ndarray, " m"],  # $\pi_u$
    emit: Float[np.ndarray, "emitters padded"],  # from `emission`
) -> Float[np.ndarray, "m padded"]:  # probabilities, each row sums to 1
    "The probability of every item at the next event."
    return user_signal[:, None] * (belief @ emit[:-1]) + (1 - user_signal)[:, None] * emit[-1]


# %%
probability = next_item(belief, np.full(2, world.mean_signal), emit)
np.testing.assert_allclose(probability.sum(1), 1)
probability.shape

# %% [markdown]
# ## Ceiling and floor
#
# Hit rate at $k$: the share of users whose last item is among the $k$ most probable. Ties take their average rank, so a constant predictor earns nothing while $k$ is below half of the catalogue.


# %%
#| exports
class Rate(NamedTuple):
    "Ranking quality over users."

    hr: float  # hit rate at k
    ndcg: float  # normalised discounted cumulative gain at k
    n: int  # users

    @property
    def standard_error(self) -> float:
        "Binomial standard error of the hit rate."
        return (self.hr * (1 - self.hr) / self.n) ** 0.5


# %%
#| exports
def rate(
    scores: Float[np.ndarray, "m padded"],  # larger is better; column 0 (padding) is not ranked
    targets: Int[np.ndarray, " m"],  # 1 … n
    k: int = 10,
) -> Rate:
    "HR@k and NDCG@k with full ranking and average tie ranks; `ValueError` where scores are not finite, targets are no items or k is below 1."
    if k < 1: raise ValueError(f"k must be at least 1, got {k}")
    if not len(targets) or len(targets) != len(scores): raise ValueError(f"scores and targets must have the same users, one at least, got {len(scores)} and {len(targets)}")
    if targets.min() < 1 or targets.max() >= scores.shape[1]: raise ValueError(f"targets must be item ids 1 … {scores.shape[1] - 1}, got {targets.min()} … {targets.max()}")
    if not np.isfinite(scores[:, 1:]).all(): raise ValueError("scores must be finite, got NaN or infinity")
    own = np.take_along_axis(scores, targets[:, None], 1)
    rest = scores[:, 1:]
    rank = (rest > own).sum(1) + ((rest == own).sum(1) - 1) / 2
    hit = rank <= k - 1
    return Rate(float(hit.mean()), float((hit / np.log2(rank + 2)).mean()), len(targets))


# %%
rate(np.array([[9.0, 3.0, 2.0, 1.0]]), np.array([2]), k=1), rate(np.array([[9.0, 3.0, 2.0, 1.0]]), np.array([2]), k=2)


# %% [markdown]
# The ceiling knows everything but the future. Reliability enters it twice: it weighs the history (29.5), which is what a tracked precision can do, and it says which item a purposeful user
# picks next (29.2), which any output embedding can learn. So the function below takes, for either use, a *believed* reliability in place of the true one.


# %%
#| exports
def bayes_ceiling(
    world: World,
    k: int = 10,
    filter_with: Float[np.ndarray, " padded"] | None = None,  # ρ believed when weighing the history; None: the true one
    predict_with: Float[np.ndarray, " padded"] | None = None,  # ρ believed when ranking the next item; None: the true one
    know_users: bool = True,  # whether π_u is known; False: everyone has the mean
) -> Rate:  # of the last event given all before
    "What the exact Bayesian filter reaches at the last event of each user: no model can be expected to do better."
    emits = [
        emission(world.popularity, world.reliability if rho is None else rho, world.item_cluster, len(world.transition))
        for rho in (filter_with, predict_with)
    ]
    user_signal = world.user_signal if know_users else np.full(len(world.items), world.mean_signal)
    belief = filter_clusters(world.items[:, :-1], user_signal, emits[0], world.transition, world.stationary)
    return rate(next_item(belief, user_signal, emits[1]), world.items[:, -1], k)


# %%
#| exports
def popularity_floor(
    world: World,
    k: int = 10,
) -> Rate:  # of the last event
    "What the true popularity alone reaches, the same ranking for everyone: no model may do worse."
    return rate(np.tile(world.popularity, (len(world.items), 1)), world.items[:, -1], k)


# %%
#| exports
def equal_reliability(
    world: World,
) -> Float[np.ndarray, " padded"]:  # $\bar\pi$ for every item, row 0 is 0
    "The belief of somebody who does not track precision: every item is as reliable as the average event."
    return np.where(np.arange(world.n_items + 1) > 0, world.mean_signal, 0.0)


# %%
#| exports
def ladder(
    world: World,
    k: int = 10,
) -> dict[str, Rate]:  # from the floor to the ceiling
    "Floor, ceiling, and what each use of the reliability adds; the third step is all that weighing the history can add."
    equal = equal_reliability(world)
    return {
        "popularity": popularity_floor(world, k),
        "filter, ρ unknown": bayes_ceiling(world, k, equal, equal),
        "ρ known to the prediction": bayes_ceiling(world, k, equal),
        "ρ known to the filter too": bayes_ceiling(world, k),
    }


# %%
{name: (round(r.hr, 4), round(r.ndcg, 4)) for name, r in ladder(big).items()}

# %% [markdown]
# The last step of this ladder is small: one or two parts in a hundred. When reliabilities are spread evenly, few items mislead nearly always, and a chain that forgets half of the past at each step repairs most mistakes.
# With two kinds of items the last step is several times larger (@fig-ladder). So equal accuracy with and without a tracked precision refutes nothing in the first world; the second is the one in which to look for an advantage.
# Even there it need not appear: attention may learn to look away from a misleading item without any precision.

# %%
def filter_gain(h, two, seed):
    r = ladder(make_world(n_users=5_000, heterogeneity=h, two_kinds=two, seed=seed))
    return 100 * (r["ρ known to the filter too"].ndcg / r["ρ known to the prediction"].ndcg - 1)


levels = np.array([0.0, 0.5, 1.0])
gain = {two: np.array([[filter_gain(h, two, seed) for seed in range(4)] for h in levels]) for two in (False, True)}
{two: g.mean(1).round(1) + 0.0 for two, g in gain.items()}

# %%
assert abs(gain[True][0]).max() < 1e-6 and gain[True][2].mean() > gain[False][2].mean() > 0

# %%
#| label: fig-ladder
#| fig-cap: "What knowing each item's reliability adds to the best possible ranking, through the weighing of the history alone, grows with heterogeneity (band: ± 2 standard errors over 4 worlds of 5,000 users)."
#| code-fold: true
fig, ax = plt.subplots()
for two, role, label in ((True, "posterior", "two kinds of items"), (False, "baseline", "evenly spread")):
    band(ax, levels, gain[two].mean(1), 2 * gain[two].std(1, ddof=1) / 2, role, label)
ax.axhline(0, color=COLOUR["prior"], linestyle=":")
ax.set(xlabel="heterogeneity of the reliability", ylabel="gain in NDCG@10 [%]")
ax.legend(loc="upper left")
plt.show()

# %% [markdown]
# ## Bad input

# %%
test_fail(lambda: make_world(n_events=2), contains="at least 3")
test_fail(lambda: rate(np.array([[0.0, np.nan]]), np.array([1])), contains="finite")

# %% [markdown]
# A constant predictor earns nothing at any $k$ one would ask for:

# %%
constant = np.zeros((200, 201))
[rate(constant, np.arange(1, 201), k).hr for k in (1, 10, 100, 101)]

# %% [markdown]
# All items tie at rank 100.5, so none is a hit before $k$ passes half of the catalogue.
#
# ## Assumptions, and where they break
#
# - Users choose items from a cluster independently of what they have chosen there before, so repeats are common. Shops differ.
# - Reliability belongs to the item alone. A present for one reader is a habit of another; equation 29.3 lets users differ only in their overall share.
# - The ceiling holds on average over users: on a few hundred of them luck can exceed it. Read it with its standard error.
#
# ## Summary
#
# - Each item's appearance is signal with a known probability $\rho_i$, whatever its popularity: proved and counted.
# - The forward filter gives the best possible ranking, popularity the least acceptable one.
# - What a tracked precision can add is the last step of the ladder; it vanishes without heterogeneity.
#
# ## Exercises
#
# **1.** What does the filter do when it meets an item that is pure noise, $\rho_i \to 0$?
#
# <details><summary>Answer</summary>
#
# Its likelihood is the same for every cluster, so the belief is only propagated:

# %%
flat = np.where(np.arange(201) == 7, 1e-12, world.reliability)
emit_flat = emission(world.popularity, flat, world.item_cluster, 20)
start = filter_clusters(np.array([[7]]), np.array([0.5]), emit_flat, world.transition, world.stationary)
np.abs(start - world.stationary @ world.transition).max() < 1e-9

# %% [markdown]
# </details>
