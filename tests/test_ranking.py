"""Full ranking: the eight traps, and agreement with independent implementations."""

import inspect
import math

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import hypergeom
from sklearn.metrics import ndcg_score
from torchmetrics.retrieval import RetrievalHitRate, RetrievalMRR, RetrievalNormalizedDCG

import bft_nb.ranking as ranking
from bft_nb.interactions import popularity_strata
from bft_nb.ranking import Ranking, bootstrap_mean, bootstrap_ratio, by_stratum, hit_rate, ndcg, paired_bootstrap, protocol, ranks, reciprocal_rank, repeated, wilson_interval

close = torch.testing.assert_close


def world(users=40, n_items=60, seen=7, seed=0):
    gen = torch.Generator().manual_seed(seed)
    scores = torch.randn(users, n_items + 1, generator=gen)
    targets = torch.randint(1, n_items + 1, (users,), generator=gen)
    return scores, targets, torch.randint(0, n_items + 1, (users, seen), generator=gen)


def slow_rank(scores, target, seen):
    "By definition, in exact arithmetic: 1 + higher + half of the equal ones, a half rounded up."
    rivals = [i for i in range(1, len(scores)) if i != target and i not in seen]
    higher = sum(scores[i] > scores[target] for i in rivals)
    equal = sum(scores[i] == scores[target] for i in rivals)
    return 1 + higher + math.ceil(equal / 2)


@settings(max_examples=200)
@given(st.data())
def test_rank_by_definition(data):
    n = data.draw(st.integers(1, 12))
    scores = data.draw(st.lists(st.integers(-2, 2), min_size=n + 1, max_size=n + 1))
    target = data.draw(st.integers(1, n))
    seen = data.draw(st.lists(st.integers(0, n), max_size=5))
    want = slow_rank(scores, target, seen)
    seen_rows = torch.tensor([seen], dtype=torch.long) if seen else None
    assert int(ranks(torch.tensor([scores], dtype=torch.float32), torch.tensor([target]), seen_rows)) == want


def test_scores_are_not_changed():
    scores, targets, seen = world()
    before = scores.clone()
    ranks(scores, targets, seen)
    close(scores, before, atol=0, rtol=0)


# ---- independent implementations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 5, 10])
def test_against_torchmetrics(k):
    scores, targets, _ = world()
    index = torch.arange(40).repeat_interleave(60)
    relevant = torch.zeros(40, 61, dtype=torch.bool).scatter_(1, targets[:, None], True)[:, 1:]
    # torchmetrics' MRR drops a target whose score is not positive: it expects probabilities
    got, flat = ranks(scores, targets), scores[:, 1:].double().sigmoid().reshape(-1)
    for metric, value in [
        (RetrievalHitRate(top_k=k), hit_rate(got, k)), (RetrievalNormalizedDCG(top_k=k), ndcg(got, k)), (RetrievalMRR(), reciprocal_rank(got)),
    ]:  # fmt: skip
        close(metric(flat, relevant.reshape(-1), indexes=index).double(), value.mean(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("k", [1, 5, 10, 60])
def test_against_sklearn(k):
    scores, targets, _ = world(seed=1)
    truth = np.zeros((40, 60))
    truth[np.arange(40), targets.numpy() - 1] = 1
    assert float(ndcg(ranks(scores, targets), k).mean()) == pytest.approx(ndcg_score(truth, scores[:, 1:].numpy(), k=k), abs=1e-9)


def test_metric_is_the_mean_whatever_the_batches():
    scores, targets, seen = world()
    whole, parts, from_ranks = (Ranking(k=(5, 10), filter_seen=True) for _ in range(3))
    whole.update(scores, targets, seen)
    for rows in torch.arange(40).split(7):
        parts.update(scores[rows], targets[rows], seen[rows])
    got = ranks(scores, targets, seen)
    from_ranks.update(got)
    for name, value in whole.compute().items():
        close(parts.compute()[name], value)
        if name != "repeats":
            close(from_ranks.compute()[name], value)
    close(whole.compute()["ndcg@5"], ndcg(got, 5).mean())
    assert float(whole.compute()["n"]) == 40


def test_states_add_up_like_processes():
    scores, targets, seen = world()
    a, b, both = (Ranking(filter_seen=True) for _ in range(3))
    a.update(scores[:15], targets[:15], seen[:15])
    b.update(scores[15:], targets[15:], seen[15:])
    both.update(scores, targets, seen)
    assert {fx.__name__ for fx in a._reductions.values()} == {"dim_zero_sum"}
    a.merge_state(b)
    for name, value in both.compute().items():
        close(a.compute()[name], value)


# ---- the traps ---------------------------------------------------------------------------------------------------


def test_1_no_sampled_metric_exists_and_it_would_mislead():
    assert not [name for name in dir(ranking) if "sampl" in name.lower()]
    good, vague = np.r_[[5] * 10, [6000] * 90], np.full(100, 500)
    full = [float(hit_rate(torch.from_numpy(r)).mean()) for r in (good, vague)]
    sampled = [hypergeom.cdf(9, 11_999, r - 1, 100).mean() for r in (good, vague)]
    assert full[0] > full[1] and sampled[0] < sampled[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_2_undefined_scores_are_refused(bad):
    scores, targets, seen = world()
    scores[3, 7] = bad
    with pytest.raises(ValueError, match="got 1 NaN or infinite of 2400"):
        ranks(scores, targets, seen)


@pytest.mark.parametrize("n_items", [20, 21, 1000])
def test_2_constant_scores_are_no_better_than_chance(n_items):
    targets = torch.arange(1, n_items + 1)
    got = ranks(torch.zeros(n_items, n_items + 1), targets)
    assert bool((got == math.ceil((n_items + 1) / 2)).all())
    for k in (1, 5, 10):
        assert float(hit_rate(got, k).mean()) <= k / n_items
        assert float(ndcg(got, k).mean()) <= sum(1 / math.log2(1 + r) for r in range(1, k + 1)) / n_items


def test_3_filtering_is_explicit():
    with pytest.raises(TypeError, match="filter_seen"):
        Ranking()
    with pytest.raises(ValueError, match="needs `seen`"):
        Ranking(filter_seen=True).update(*world()[:2])


def test_3_seen_items_are_out_whatever_the_sign_of_the_scores():
    scores, targets, seen = world()
    close(ranks(scores - 100, targets, seen), ranks(scores + 100, targets, seen))
    assert bool((ranks(scores, targets, seen) <= ranks(scores, targets)).all())
    everything = torch.arange(61).repeat(40, 1)
    assert bool((ranks(scores, targets, everything) == 1).all())


def test_3_padding_is_never_ranked():
    scores, targets, seen = world()
    for value in (1e6, -1e6, -math.inf, math.nan):
        changed = scores.clone()
        changed[:, 0] = value
        close(ranks(changed, targets, seen), ranks(scores, targets, seen))
    with pytest.raises(ValueError, match="1..60, got 0"):
        ranks(scores, torch.zeros(40, dtype=torch.long))


def test_3_a_repeated_target_stays_and_is_counted():
    scores, targets, seen = world()
    seen[:, 0] = torch.where(torch.arange(40) < 11, targets, 0)
    seen[11:] = seen[11:].masked_fill(seen[11:] == targets[11:, None], 0)
    without = seen.clone()
    without[:11] = without[:11].masked_fill(without[:11] == targets[:11, None], 0)
    close(ranks(scores, targets, seen), ranks(scores, targets, without))
    metric = Ranking(filter_seen=True)
    metric.update(scores, targets, seen)
    assert float(metric.compute()["repeats"]) == 11 == int(repeated(targets, seen).sum())


def test_5_strata_come_from_training_counts_and_keep_ties_together():
    counts = np.array([0, 5, 5, 1, 1, 1, 9])
    strata = popularity_strata(counts, 3)
    for count in (1, 5, 9):
        assert len(set(strata.stratum[counts == count].tolist())) == 1
    rows = by_stratum(torch.tensor([1, 50, 2]), strata.stratum[[6, 1, 3]])
    assert [row.n for row in rows] == [1, 1, 1] and sum(row.hr for row in rows) == 2
    assert all(0 <= row.low <= row.hr <= row.high <= 1 for row in rows)


def test_6_rows_do_not_depend_on_their_batch_or_on_filler():
    scores, targets, seen = world()
    alone = torch.cat([ranks(scores[u : u + 1], targets[u : u + 1], seen[u : u + 1]) for u in range(40)])
    close(ranks(scores, targets, seen), alone)
    close(ranks(scores, targets, torch.nn.functional.pad(seen, (3, 5))), alone)


def test_4_7_the_protocol_says_it_all():
    text = protocol(split="leave_one_out 0123abcd", n_items=12_101, filter_seen=True, max_length=50, n=22_363, repeats=4)
    for part in ("full ranking of 12101", "0123abcd", "filtered (−inf)", "4 of 22363", "last 50", "average rank"):
        assert part in text
    assert "compete" in protocol(split="s", n_items=1, filter_seen=False, max_length=1, n=1)


# ---- intervals ---------------------------------------------------------------------------------------------------


def test_wilson_by_formula():
    hits, n, z = 7, 90, 1.959963984540054
    p = hits / n
    centre, half = (p + z**2 / (2 * n)) / (1 + z**2 / n), z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert wilson_interval(hits, n) == pytest.approx((centre - half, centre + half))
    assert wilson_interval(0, 10)[0] == 0 and math.isnan(wilson_interval(0, 0)[0])


def test_interval_of_a_mean():
    values = np.random.default_rng(0).random(300)
    found = bootstrap_mean(values)
    assert found.low < found.mean < found.high and found.n == 300 and found.mean == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * values.std() / 300**0.5, rel=0.15)
    assert bootstrap_mean(np.ones(4)) == (1, 1, 1, 4)
    alone = bootstrap_mean(np.array([0.3]))
    assert alone.mean == 0.3 and np.isnan([alone.low, alone.high]).all()  # one user says nothing of others
    with pytest.raises(ValueError, match="one number at least"):
        bootstrap_mean(np.zeros(0))
    with pytest.raises(ValueError, match="confidence must lie in 0 … 1, got 95"):
        bootstrap_mean(np.zeros(3), confidence=95.0)


def test_bootstrap_of_a_ratio_draws_both_together():
    rng = np.random.default_rng(1)
    base = (rng.random(500) < 0.1).astype(float)
    found = bootstrap_ratio(2 * base, base, n=200)
    assert found == (2, 2, 2, 500)  # every user doubles: the ratio is certain, however few the hits
    values = (rng.random(500) < 0.12).astype(float)
    found, mean = bootstrap_ratio(values, base), bootstrap_mean(values)
    draws = [values[i].mean() / base[i].mean() for i in rng.integers(0, 500, (4000, 500))]
    np.testing.assert_allclose([found.low, found.high], np.percentile(draws, [2.5, 97.5]), rtol=0.05)
    assert found.high - found.low > (mean.high - mean.low) / base.mean()  # the base is not known, either
    assert np.isnan(bootstrap_ratio(values, np.zeros(500)).mean)
    few = np.eye(1, 30)[0]
    assert bootstrap_ratio(np.ones(30), few, n=200).high == np.inf  # a resample may miss the only hit
    with pytest.raises(ValueError, match=r"one for each user, got \[3, 2\]"):
        inspect.unwrap(bootstrap_ratio)(np.ones(3), np.ones(2))


def test_relative_difference():
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.integers(1, 40, 400)) for _ in range(2))
    plain, percent = (paired_bootstrap(a, b, hit_rate, strata=np.repeat([0, 1], 200), relative=r) for r in (False, True))
    for group, part in (("all", slice(None)), ("0", slice(200)), ("1", slice(200, None))):
        np.testing.assert_allclose(percent[group].mean, 100 * plain[group].mean / hit_rate(b[part]).mean())


def test_bootstrap_covers_and_is_seeded():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(60):
        a = torch.from_numpy(rng.geometric(0.1, 150))
        b = torch.from_numpy(rng.geometric(0.08, 150))
        truth = (1 - 0.9**10) - (1 - 0.92**10)
        d = paired_bootstrap(a, b, hit_rate, n=300, seed=trial)["all"]
        covered += d.low <= truth <= d.high
    assert covered >= 51
    assert paired_bootstrap(a, b, n=100) == paired_bootstrap(a, b, n=100)


def test_bootstrap_is_paired_and_by_stratum():
    ranks_a = torch.from_numpy(np.random.default_rng(1).integers(1, 100, 400))
    same = paired_bootstrap(ranks_a, ranks_a)["all"]
    assert (same.mean, same.low, same.high) == (0, 0, 0)
    better = torch.where(torch.arange(400) < 40, 1, ranks_a)
    groups = paired_bootstrap(better, ranks_a, strata=np.repeat([0, 1], 200), n=200)
    assert set(groups) == {"all", "0", "1"} and groups["1"].mean == 0 and groups["0"].low > 0 and groups["0"].n == 200


# ---- bad input ---------------------------------------------------------------------------------------------------


def test_bootstrap_averages_over_seeds():
    gen = np.random.default_rng(2)
    a, b = (torch.from_numpy(gen.integers(1, 30, (seeds, 200))) for seeds in (3, 2))
    d = paired_bootstrap(a, b, n=100)["all"]
    assert d.mean == pytest.approx(float(ndcg(a).mean() - ndcg(b).mean())) and d.n == 200
    assert paired_bootstrap(a[:1], b[:1], n=100) == paired_bootstrap(a[0], b[0], n=100)


def test_bad_input(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # what a user meets: the library's own message
    scores, targets, _ = world()
    with pytest.raises(ValueError, match="1..60, got 61"):
        ranks(scores, targets * 0 + 61)
    with pytest.raises(ValueError, match=r"\(40,\)"):
        ranks(scores, targets[:5])
    with pytest.raises(ValueError, match="positive list lengths"):
        Ranking(k=(0,), filter_seen=True)
    for bad in (torch.tensor([0, 1]), torch.tensor([1.5]), torch.ones(2, 2, dtype=torch.long)):
        with pytest.raises(ValueError, match="positive integers"):
            Ranking(filter_seen=True).update(bad)
    with pytest.raises(ValueError, match="same users"):
        paired_bootstrap(torch.tensor([1, 2]), torch.tensor([1]))
    with pytest.raises(ValueError, match="one shape"):
        by_stratum(torch.tensor([1, 2]), np.array([0]))
