"The synthetic world: what it claims is true of its draws, and the filter is the exact posterior."

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bft_nb.world import (
    bayes_ceiling,
    choose,
    emission,
    equal_reliability,
    filter_clusters,
    habits,
    ladder,
    make_world,
    next_item,
    popularity_floor,
    rate,
    signal_probability,
    with_stationary,
    zipf,
)  # fmt: skip


@pytest.fixture(scope="module")
def big():
    return make_world(n_items=60, n_clusters=6, n_users=20_000, n_events=10, seed=3)


def test_same_arguments_same_world():
    a, b, c = make_world(seed=1), make_world(seed=1), make_world(seed=2)
    for x, y in zip(a, b, strict=True): np.testing.assert_array_equal(x, y)
    assert (a.items != c.items).any()


def test_shapes_and_ranges():
    w = make_world(n_items=30, n_clusters=7, n_users=11, n_events=5)
    assert w.items.shape == w.signal.shape == w.clusters.shape == (11, 5)
    assert w.items.min() >= 1 and w.items.max() <= w.n_items == 30
    assert w.popularity[0] == w.reliability[0] == 0 and w.item_cluster[0] == -1
    assert ((w.reliability[1:] > 0) & (w.reliability[1:] < 1)).all() and ((w.user_signal > 0) & (w.user_signal < 1)).all()
    np.testing.assert_allclose(w.popularity.sum(), 1)
    assert (np.bincount(w.item_cluster[1:], minlength=7) > 0).all()


def test_signal_share_is_the_reliability(big):
    "P(signal | item) = ρ, chi-square over items: clustered within users, hence the factor"
    seen = np.bincount(big.items.ravel(), minlength=61)[1:]
    signal = np.bincount(big.items.ravel(), big.signal.ravel(), 61)[1:]
    rho = big.reliability[1:]
    z = (signal - seen * rho) / np.sqrt(seen * rho * (1 - rho))
    assert abs(z.mean()) < 0.6 and (z**2).mean() < 2.5


def test_popularity_holds_at_every_event(big):
    for t in (0, 4, 9):
        seen = np.bincount(big.items[:, t], minlength=61)[1:] / len(big.items)
        assert np.abs(seen - big.popularity[1:]).max() < 5 * np.sqrt(big.popularity.max() / len(big.items))


def test_odds_of_item_and_user_multiply(big):
    "equation 29.3 against counts for one frequent item, by user group"
    item = int(np.argmax(big.popularity))
    for group in (big.user_signal < np.median(big.user_signal), big.user_signal >= np.median(big.user_signal)):
        here = (big.items[group] == item)
        user = np.broadcast_to(big.user_signal[group][:, None], here.shape)[here]
        expected = signal_probability(np.full(user.shape, big.reliability[item]), user, big.mean_signal)
        assert abs(big.signal[group][here].mean() - expected.mean()) < 5 * np.sqrt(0.25 / here.sum())


def test_signal_stays_in_the_cluster(big):
    on = big.signal == 1
    np.testing.assert_array_equal(big.item_cluster[big.items][on], big.clusters[on])
    assert (big.item_cluster[big.items][~on] != big.clusters[~on]).any()


@given(st.integers(2, 12), st.integers(0, 10**6))
@settings(max_examples=25)
def test_stationary_distribution_is_the_one_asked_for(c, seed):
    rng = np.random.default_rng(seed)
    mu = rng.random(c) + 0.2
    mu /= mu.sum()
    A = with_stationary(habits(c, rng), mu)
    np.testing.assert_allclose(mu @ A, mu, atol=1e-10)
    np.testing.assert_allclose(A.sum(1), 1)


def test_filter_equals_enumeration():
    "the forward filter against the sum over all cluster paths"
    w = make_world(n_items=8, n_clusters=3, n_users=4, n_events=4, seed=5)
    emit, A, mu = emission(w.popularity, w.reliability, w.item_cluster, 3), w.transition, w.stationary
    got = next_item(filter_clusters(w.items[:, :3], w.user_signal, emit, A, mu), w.user_signal, emit)
    for u, pi in enumerate(w.user_signal):
        like = lambda z, i, pi=pi: pi * emit[z, i] + (1 - pi) * emit[-1, i]
        total = np.zeros(9)
        for path in itertools.product(range(3), repeat=4):
            weight = mu[path[0]] * np.prod([A[a, b] for a, b in itertools.pairwise(path)])
            weight *= np.prod([like(z, i) for z, i in zip(path, w.items[u, :3], strict=False)])
            total += weight * np.array([like(path[3], i) for i in range(9)])
        np.testing.assert_allclose(got[u], total / total.sum(), atol=1e-12)


def test_padding_on_either_side_changes_nothing():
    w = make_world(n_items=20, n_clusters=4, n_users=6, n_events=5)
    emit = emission(w.popularity, w.reliability, w.item_cluster, 4)
    run = lambda h: filter_clusters(h, w.user_signal, emit, w.transition, w.stationary)
    pad = np.zeros((6, 2), dtype=np.int64)
    np.testing.assert_allclose(run(np.hstack([pad, w.items])), run(w.items))
    np.testing.assert_allclose(run(np.hstack([w.items, pad])), run(w.items))
    np.testing.assert_allclose(run(pad), np.tile(w.stationary, (6, 1)))


def test_ladder_rises_and_is_flat_without_heterogeneity():
    "at seeds fixed beforehand; the differences are paired over 20,000 users"
    hr = [r.hr for r in ladder(make_world(n_users=20_000, two_kinds=True, seed=7)).values()]
    assert hr == sorted(hr) and hr[-1] > hr[0] + 0.05
    w = make_world(heterogeneity=0.0)
    np.testing.assert_allclose(equal_reliability(w), w.reliability)
    assert bayes_ceiling(w) == bayes_ceiling(w, filter_with=equal_reliability(w))


def test_popularity_floor_is_the_mass_of_the_head():
    w = make_world(n_users=5000)
    floor = popularity_floor(w)
    assert abs(floor.hr - np.sort(w.popularity)[-10:].sum()) < 4 * floor.standard_error
    assert floor.n == 5000


def test_rate_refuses_nan_and_gives_ties_their_average_rank():
    with pytest.raises(ValueError, match="finite"): rate(np.array([[0.0, np.nan, 1.0]]), np.array([1]))
    constant = np.zeros((10, 11))
    assert rate(constant, np.arange(1, 11), 5).hr == 0.0 and rate(constant, np.arange(1, 11), 6).hr == 1.0
    assert rate(np.array([[99.0, 1.0, 2.0]]), np.array([2]), 1).hr == 1.0  # padding is not ranked


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"n_clusters": 0}, "n_clusters must lie in 1 … n_items = 200, got 0"),
        ({"n_clusters": 201}, "got 201"),
        ({"n_users": 0}, "n_users must be at least 1, got 0"),
        ({"n_events": 2}, "n_events must be at least 3"),
        ({"heterogeneity": 1.1}, "heterogeneity must lie in 0 … 1, got 1.1"),
        ({"user_spread": -0.1}, "user_spread must lie in 0 … 1, got -0.1"),
    ],
)
def test_bad_sizes_are_named(bad, message):
    with pytest.raises(ValueError, match=message): make_world(**bad)


def test_two_kinds():
    w = make_world(two_kinds=True)
    assert set(np.round(w.reliability[1:], 6)) == {0.05, 0.95}
    assert (make_world(two_kinds=True, heterogeneity=0.0).reliability[1:] == 0.5).all()


def test_zipf_and_choose():
    np.testing.assert_allclose(zipf(3, 0.0), 1 / 3)
    np.testing.assert_allclose(zipf(2, 1.0), [2 / 3, 1 / 3])
    np.testing.assert_array_equal(choose(np.array([[0.25, 1.0]] * 3), np.array([0.0, 0.25, 0.999])), [0, 1, 1])
