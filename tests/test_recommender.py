"The recommender: own ids in and out, confidence, explanations, growing, saving, and every kind of bad input."

import errno
import os
import re
import subprocess
import sys
import warnings
from fractions import Fraction

import jaxtyping
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from helpers import ROOT, tool
from hypothesis import given, settings
from hypothesis import strategies as st

from bft_nb import cli, recommend_command, recommender as module
from bft_nb.archive import read_archive, write_archive
from bft_nb.download import data_dir
from bft_nb.interactions import dataset, find, from_frame, from_lengths, load
from bft_nb.recommender import (
    MIN_CALIBRATION, STUDIED, Recommender, UnknownItems, add_rows, asked, backbone_classes, beliefs, build, calibrate, confidence, effects, explanation, hold_back_last, judge, last_weights, numbers_of, placed_like, plot_explanation, reliability_bins, sharpness, top_lists,
    user_state, without_duplicates,
)  # fmt: skip
from bft_nb.training import fit, history_rows
from bft_nb.world import make_world

close = torch.testing.assert_close
QUICK = dict(d=16, max_length=10, max_epochs=2, device="cpu", negatives=16, batch_size=32)


def ring(users=80, n_items=24, seed=0):
    "Users who walk along a ring of items."
    rng = np.random.default_rng(seed)
    rows = [(f"u{u}", f"i{(s + t) % n_items:02d}", t) for u in range(users) for s in [rng.integers(n_items)] for t in range(rng.integers(4, 9))]
    return pd.DataFrame(rows, columns=["user", "item", "t"])


@pytest.fixture(scope="module", params=[True, False], ids=["bft", "plain"])
def made(request):
    return Recommender(bft=request.param, **QUICK).fit(ring(), timestamp="t")


@pytest.fixture(scope="module")
def filtering():
    return Recommender(**QUICK).fit(ring(), timestamp="t")


@pytest.fixture
def unchecked(monkeypatch):
    "As a user runs it: annotations are not checked."
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


# ---- confidence ------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(2, 9), st.integers(0, 99))
def test_sharpness_is_minus_scipys_entropy(users, items, seed):
    from scipy.stats import entropy

    scores = torch.randn(users, items, generator=torch.Generator().manual_seed(seed)) * 3
    want = -entropy(torch.softmax(scores.double(), 1).numpy(), axis=1)
    np.testing.assert_allclose(sharpness(scores).numpy(), want, atol=1e-5)
    masked = torch.cat([torch.full((users, 2), -torch.inf), scores], 1)
    close(sharpness(masked), sharpness(scores))


def test_calibration_is_scikit_learns_regression():
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2)) * [1, 5] + [3, -2]
    hits = rng.random(300) < 1 / (1 + np.exp(1 - x[:, 0] + 3))
    made = calibrate(x, hits)
    plus, minus = hits.sum(), (~hits).sum()
    high, low = (plus + 1) / (plus + 2), 1 / (minus + 2)
    share = np.where(hits, high, low)  # a target between 0 and 1 is a weighted pair of a hit and a miss
    z = (x - x.mean(0)) / x.std(0)
    other = LogisticRegression(C=1.0, tol=1e-10, max_iter=1000).fit(np.vstack([z, z]), np.r_[np.ones(300), np.zeros(300)], np.r_[share, 1 - share])
    np.testing.assert_allclose(made.slopes, other.coef_[0], atol=1e-5)
    np.testing.assert_allclose(confidence(made, x), other.predict_proba(z)[:, 1], atol=1e-5)
    np.testing.assert_allclose(confidence(made, x).mean(), share.mean(), atol=1e-6)


@pytest.mark.parametrize("hits", [[True] * 5, [False] * 5, [True]])
def test_calibration_is_finite_without_variation(hits):
    made = calibrate(np.ones((len(hits), 2)), np.array(hits))
    got = confidence(made, np.zeros((3, 2)))
    assert np.isfinite(got).all() and (got > 0).all() and (got < 1).all()


def test_calibration_and_bins_refuse():
    with pytest.raises(ValueError, match="at least one user"):
        calibrate(np.zeros((0, 1)), np.zeros(0, bool))
    with pytest.raises(ValueError, match="evidence must be finite, got nan"):
        calibrate(np.array([[1.0], [np.nan]]), np.zeros(2, bool))
    with pytest.raises(ValueError, match="between 1 and the number of users, 3, got 4"):
        reliability_bins(np.ones(3), np.ones(3, bool), 4)


def test_bins_partition_the_users():
    rng = np.random.default_rng(0)
    c, y = rng.random(103), rng.random(103) < 0.3
    bins = reliability_bins(c, y, 4)
    assert sum(b.n for b in bins) == 103 and all(b.low <= b.hit_rate <= b.high for b in bins)
    assert [b.confidence for b in bins] == sorted(b.confidence for b in bins)
    assert sum(b.hit_rate * b.n for b in bins) == pytest.approx(y.sum())


def held_out(frame, **arguments):
    "Confidence and hits on the last event of each user, which the fitted recommender has not seen."
    last = ~frame.user.duplicated(keep="last")
    made = Recommender(device="cpu", **arguments).fit(frame[~last])
    lists = made.recommend(k=10)
    hidden = frame[last].set_index("user").item
    hit = (lists.item == lists.user.map(hidden)).groupby(lists.user, sort=False).any()
    return made, lists.groupby("user", sort=False).confidence.first().to_numpy(), hit.to_numpy()


def assert_confidence_orders_hits(said, hit):
    bins = reliability_bins(said, hit, 3)
    assert bins[0].high < bins[-1].hit_rate and bins[0].hit_rate < bins[-1].low
    return bins


def test_low_confidence_means_fewer_hits_and_is_calibrated():
    world = make_world(n_users=1000)
    user, _ = np.indices(world.items.shape)
    frame = pd.DataFrame({"user": user.ravel(), "item": world.items.ravel()})
    made, said, hit = held_out(frame, filter_seen=False, d=32, max_epochs=4)
    bins = assert_confidence_orders_hits(said, hit)
    assert abs(said.mean() - hit.mean()) < 0.06  # four standard errors of two samples of 1,000
    assert all(b.low - 0.03 < b.confidence < b.high + 0.03 for b in bins)
    assert made.confidence_from == "posterior"


@pytest.mark.slow
def test_low_confidence_means_fewer_hits_on_real_data():
    if not find(dataset("ml100k"), data_dir()):
        pytest.skip("BFT_DATA is not set, or holds no ml100k.parquet")
    data = load("ml100k")
    frame = pd.DataFrame({"user": np.repeat(data.user_ids, data.sequences.lengths), "item": data.item_ids[data.sequences.items - 1]})
    _, said, hit = held_out(frame, max_epochs=15, dropout=0.5)
    bins = reliability_bins(said, hit, 2)
    assert bins[0].high < bins[1].low


def test_confidence_is_one_number_per_user_and_grows_with_k(made):
    got = {k: made.recommend(k=k).groupby("user", sort=False).confidence.agg(["min", "max"]) for k in (1, 5, 20)}
    for table in got.values():
        assert ((table["min"] == table["max"]) & (table["min"] > 0) & (table["max"] < 1)).all()
    assert got[1]["min"].mean() < got[5]["min"].mean() < got[20]["min"].mean()


def test_a_seen_target_is_no_hit_where_seen_items_are_filtered():
    frame = ring()
    again = frame.assign(item=np.where(frame.user.duplicated(keep="last"), frame.item, frame.groupby("user").item.transform("first")))  # the last is the first once more
    counted = {}
    for filter_seen in (True, False):
        made = Recommender(filter_seen=filter_seen, **QUICK).fit(again, timestamp="t")
        assert made.known.repeated.all()
        counted[filter_seen] = made.calibration(24).hit_rate
    assert counted == {True: 0.0, False: 1.0}  # among all 24 items; what was seen is never recommended


def test_who_has_seen_everything_does_not_spoil_the_confidence_of_others():
    frame = ring(users=MIN_CALIBRATION + 1)
    items = frame.item.unique()
    hoarder = pd.DataFrame({"user": "hoarder", "item": [*items, items[0]], "t": range(len(items) + 1)})
    made = Recommender(**QUICK | {"max_length": 30}).fit(pd.concat([frame, hoarder]), timestamp="t")
    assert np.isnan(made.known.evidence).any() and made.calibration().n == MIN_CALIBRATION + 1
    assert made.recommend(k=2).confidence.notna().all()


def test_few_validation_users_give_nan():
    made = Recommender(**QUICK).fit(ring(users=MIN_CALIBRATION - 1), timestamp="t")
    assert made.calibration() is None and made.recommend(k=2).confidence.isna().all()


# ---- recommendations -------------------------------------------------------------------------------------------


def test_lists_are_the_ranking_of_the_scores(made):
    n = made.histories.lengths
    examples = hold_back_last(from_frame(ring(), timestamp="t")).valid
    known = judge(made.model, examples, True)
    lists = top_lists(made.model, examples.histories, 24, True)
    place = (lists.items == examples.targets[:, None]).argmax(1) + 1
    np.testing.assert_array_equal(known.ranks, place)  # no ties among trained scores
    assert known.ranks.tolist() == made.known.ranks.tolist() and len(n) == len(examples)


def test_small_chunks_give_the_same(made, monkeypatch):
    whole = made.recommend(k=5)
    widths = []
    scores = type(made.model).scores
    monkeypatch.setattr(module, "SCORES_IN_MEMORY", 60)  # two users of 25 scores
    monkeypatch.setattr(type(made.model), "scores", lambda self, h, items=None: widths.append(len(h)) or scores(self, h, items))
    part = made.recommend(k=5)
    assert max(widths) == 2
    pd.testing.assert_frame_equal(part, whole, rtol=1e-4)


def test_seen_items_are_filtered_or_not():
    for filter_seen in (True, False):
        made = Recommender(filter_seen=filter_seen, **QUICK).fit(ring(), timestamp="t")
        history = ["i00", "i01", "i02", "i03"]
        got = made.recommend({"x": history}, k=24)
        assert (set(history) & set(got.item) == set()) == filter_seen
        assert got["rank"].tolist() == list(range(1, len(got) + 1)) and len(got) == (20 if filter_seen else 24)
        assert got.score.is_monotonic_decreasing and np.isfinite(got.score).all()


def test_who_has_seen_everything_gets_no_rows(filtering):
    everything = filtering.item_ids.tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = filtering.recommend({"all": everything, "one": everything[:1]}, k=3)
    assert set(got.user) == {"one"}
    with pytest.raises(ValueError, match="seen every item"):
        filtering.explain("all", history=everything)


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_a_frame_comes_out_as_it_went_in(library):
    make = {"pandas": lambda x: x, "polars": pl.from_pandas, "pyarrow": pa.Table.from_pandas}[library]
    frame = make(ring(users=60).rename(columns={"user": "who", "item": "what"}))
    made = Recommender(**QUICK).fit(frame, user="who", item="what", timestamp="t")
    type_ = {"pandas": pd.DataFrame, "polars": pl.DataFrame, "pyarrow": pa.Table}[library]
    for got in (made.recommend(k=2), made.recommend(frame, k=2), made.recommend({"x": ["i03"]}, k=2), made.explain("u0")):
        assert isinstance(got, type_)
    assert list(library_columns(made.recommend(k=1))) == ["who", "what", "rank", "score", "confidence"]
    assert isinstance(made.recommend({"x": ["i03"]}, k=2, library="pyarrow"), pa.Table)


def library_columns(frame):
    return frame.column_names if isinstance(frame, pa.Table) else frame.columns


def test_fitted_frame_and_histories_give_the_same(filtering):
    by_frame, by_none = filtering.recommend(ring(), k=3), filtering.recommend(k=3)
    lists = ring().groupby("user", sort=False).item.agg(list).to_dict()
    pd.testing.assert_frame_equal(by_frame, by_none)
    pd.testing.assert_frame_equal(filtering.recommend(lists, k=3), by_none)
    alone = filtering.recommend({"u7": lists["u7"]}, k=3)
    pd.testing.assert_frame_equal(alone, by_none[by_none.user == "u7"].reset_index(drop=True), rtol=1e-4)


def test_integer_ids_numpy_lists_and_order_of_users():
    frame = ring(users=60)
    frame["user"], frame["item"] = frame.user.str[1:].astype(int) + 1000, frame.item.str[1:].astype(int) * 7 - 3
    made = Recommender(**QUICK).fit(frame, timestamp="t")
    got = made.recommend({2: np.array([4, 11], dtype=np.int32), 1: pd.Series([18])}, k=2)
    assert got.user.tolist() == [2, 2, 1, 1] and set(got.item) <= set(frame.item)


def test_same_seed_same_recommender(filtering):
    again = Recommender(**QUICK).fit(ring(), timestamp="t")
    pd.testing.assert_frame_equal(again.recommend(k=3), filtering.recommend(k=3))


# ---- which items compete ---------------------------------------------------------------------------------------


def test_candidates_and_exclude_are_the_list_without_the_others(filtering, monkeypatch):
    whole = filtering.recommend(k=24)
    stock = ["i03", "i04", "i11", "i12", "i13"]
    for asked_for, keep in (
        (dict(candidates=stock), set(stock)), (dict(exclude=iter(stock)), set(filtering.item_ids.tolist()) - set(stock)),
        (dict(candidates=np.array(stock), exclude=["i04", "i20"]), set(stock) - {"i04"}), (dict(exclude=[]), set(filtering.item_ids.tolist())),
    ):  # fmt: skip
        got, want = filtering.recommend(k=24, **asked_for), whole[whole.item.isin(keep)]
        pd.testing.assert_frame_equal(got[["user", "item", "score"]], want[["user", "item", "score"]].reset_index(drop=True), rtol=1e-4)
        assert got["rank"].tolist() == [r for _, g in got.groupby("user", sort=False) for r in range(1, len(g) + 1)]
    small = filtering.recommend(k=3, candidates=stock)
    assert small.groupby("user", sort=False).size().le(3).all() and set(small.item) <= set(stock)
    monkeypatch.setattr(module, "SCORES_IN_MEMORY", 60)
    pd.testing.assert_frame_equal(filtering.recommend(k=3, candidates=stock), small, rtol=1e-4)


def test_seen_items_by_call(filtering):
    history = {"x": ["i00", "i01", "i02", "i03"]}
    for filter_seen in (True, False, None):
        got = filtering.recommend(history, k=24, filter_seen=filter_seen)
        assert len(got) == (24 if filter_seen is False else 20)
    assert filtering.settings["filter_seen"] is True
    open_ = Recommender(filter_seen=False, **QUICK).fit(ring(), timestamp="t")
    got = open_.recommend(history, k=24, filter_seen=True)
    want = open_.recommend(history, k=24).query("item not in @history['x']")
    assert got.item.tolist() == want.item.tolist()


def test_confidence_among_other_items_is_learnt_among_them(filtering, monkeypatch):
    stock = filtering.item_ids.tolist()[:12]
    examples = hold_back_last(from_frame(ring(), timestamp="t")).valid
    before = [filtering.item_ids[row - 1].tolist() for row in (examples.histories[i] for i in range(len(examples)))]
    lists = filtering.recommend(dict(enumerate(before)), k=3, candidates=stock)
    target = pd.Series(filtering.item_ids[examples.targets - 1])
    hits = (lists.item == lists.user.map(target)).groupby(lists.user).any().reindex(range(len(examples)), fill_value=False)
    known = filtering._known(True, module.competitors(stock, None, filtering.item_ids, "error"))
    assert ((known.ranks <= 3) & ~known.repeated).tolist() == hits.tolist()
    assert (known.ranks[~target.isin(stock)] == 25).all() and known.ranks[target.isin(stock)].max() <= 12
    made = calibrate(known.evidence, hits.to_numpy())
    assert lists.confidence[0] == pytest.approx(confidence(made, known.evidence[:1])[0], rel=1e-4)
    asked_again = []
    monkeypatch.setattr(module, "judge", lambda *given: asked_again.append(given) or judge(*given))
    filtering.recommend(k=3, candidates=stock)
    assert not asked_again  # the same question
    assert filtering.recommend(k=3, filter_seen=False).confidence.notna().all() and len(asked_again) == 1
    monkeypatch.setattr(module, "CALIBRATION_USERS", MIN_CALIBRATION)
    filtering.recommend(k=3, candidates=stock[:5])
    assert len(asked_again[1][1]) == MIN_CALIBRATION


def test_confidence_among_other_items_is_nan_where_it_cannot_be_known(filtering, tmp_path):
    again = Recommender.load(filtering.save(tmp_path / "m.safetensors", histories=False), device="cpu")
    assert again.recommend({"x": ["i01"]}, k=2, exclude=["i03"]).confidence.isna().all()
    assert again.recommend({"x": ["i01"]}, k=2).confidence.notna().all()


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (dict(candidates=["i01", "x1", "x2"]), ValueError, r"candidates: 2 of 3 items the model does not know \('x1', 'x2'\): give unknown=\"skip\""),
    (dict(exclude=[f"x{i}" for i in range(9)]), ValueError, r"exclude: 9 of 9 items .*\('x0', 'x1', 'x2', 'x3', 'x4', …\)"),
    (dict(candidates=[]), ValueError, "no item is left to recommend"),
    (dict(candidates=["i01"], exclude=["i01", "i02"]), ValueError, "no item is left to recommend"),
    (dict(candidates=[3]), TypeError, "candidates: ids are integers .* but were strings"),
    (dict(candidates="i01"), TypeError, "candidates must be a list of ids, got the single text 'i01'"),
    (dict(exclude=5), TypeError, "exclude must be a list of ids, got 5"),
    (dict(exclude=["i01", None]), ValueError, "exclude: 1 of 2 ids are missing"),
    (dict(filter_seen="no"), TypeError, "filter_seen must be True or False, got 'no'"),
    *[(dict(candidates=make({"item": ["i01"]})), TypeError, "candidates must be a list of ids, got a frame: give one column of it") for make in (pd.DataFrame, pl.DataFrame, pa.table)],
    (dict(exclude=pd.DataFrame({"item": ["i01"]})), TypeError, "exclude must be a list of ids, got a frame"),
    (dict(exclude={"i01": 3}), TypeError, "exclude must be a list of ids, got a mapping"),
    (dict(candidates=[2**70]), ValueError, f"candidates holds {2**70}: ids must fit into 64 bits"),
])  # fmt: skip
def test_bad_candidates(filtering, unchecked, arguments, error, message):
    with pytest.raises(error, match=message):
        filtering.recommend(k=1, **arguments)


def test_unknown_candidates_are_skipped_with_a_report(filtering):
    with pytest.warns(UnknownItems, match=r"left out: candidates: 1 of 2 items the model does not know \('\?\?'\)"):
        got = filtering.recommend({"a": ["i01"]}, k=2, candidates=["i05", "??"], unknown="skip")
    assert got.item.tolist() == ["i05"]
    with pytest.raises(ValueError, match="no item is left"), pytest.warns(UnknownItems):
        filtering.recommend({"a": ["i01"]}, candidates=["??"], unknown="skip")


@pytest.mark.parametrize("make", [list, tuple, set, iter, np.array, pd.Series, pd.Index, pl.Series, pa.array, lambda ids: pa.chunked_array([ids[:1], ids[1:]]), lambda ids: pa.array(ids).dictionary_encode(), lambda ids: [pa.scalar(i) for i in ids]])
def test_lists_of_ids_of_every_kind(filtering, make):
    stock = ["i03", "i07", "i11"]
    pd.testing.assert_frame_equal(filtering.recommend({"x": ["i01"]}, k=2, candidates=make(stock)), filtering.recommend({"x": ["i01"]}, k=2, candidates=stock))
    if make is not set:
        pd.testing.assert_frame_equal(filtering.recommend({"x": make(stock)}, k=2), filtering.recommend({"x": stock}, k=2))
        pd.testing.assert_frame_equal(filtering.explain(history=make(stock)), filtering.explain(history=stock))


# ---- training --------------------------------------------------------------------------------------------------


def test_what_is_not_said_is_what_the_study_chose(unchecked):
    said = lambda **arguments: Recommender(**arguments).settings
    assert {n: said()[n] for n in ("lr", "schedule", "max_epochs", "patience", "refit")} == {"lr": 6e-3, "schedule": "linear", "max_epochs": 30, "patience": 30, "refit": False}
    assert said()["options"] == said(backbone="hstu")["options"] == {"dropout": 0.5}
    bert = said(backbone="bert4rec", d=16)
    assert bert["options"] == {"dropout": 0.3, "mask_probability": 0.3, "last_probability": 0.5, "d": 16} and bert["patience"] == bert["max_epochs"] == 60
    assert said(backbone="bert4rec", schedule="constant")["patience"] == 20 and said(schedule="constant")["patience"] == 5
    given = dict(lr=1e-3, max_epochs=7, patience=3, schedule="constant", dropout=0.1)
    assert given.items() <= {**said(**given), **said(**given)["options"]}.items()
    assert said(max_epochs=7)["patience"] == 7 and said(backbone="bert4rec", last_probability=0.0)["options"]["last_probability"] == 0
    from bft_nb.study import BACKBONE_OPTIONS, epochs

    for name, chosen in STUDIED.items():
        assert chosen["max_epochs"] == epochs("beauty", name) and BACKBONE_OPTIONS.get(name, {}).items() <= chosen["options"].items()
    assert set(STUDIED) == set(backbone_classes())


def test_the_defaults_are_settings_that_the_study_tried():
    from bft_nb.study import study_rows, tuning

    rows = study_rows(ROOT / "data" / "results")
    for name, chosen in STUDIED.items():
        table = tuning(rows, name, "filter", "toys" if name == "bert4rec" else "beauty")
        assert np.isfinite(table.loc[chosen["options"]["dropout"], chosen["lr"]]), name


def test_the_schedule_reaches_the_training_and_the_file(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "fit", lambda *given, **settings: seen.append(settings) or fit(*given, **settings))
    made = Recommender(**QUICK | {"max_epochs": 1}, schedule="constant", lr=1e-3).fit(ring(users=20), timestamp="t")
    assert {n: seen[0][n] for n in ("schedule", "lr", "epochs", "patience", "validate_every")} == {"schedule": "constant", "lr": 1e-3, "epochs": 1, "patience": 5, "validate_every": 1}
    again = Recommender.load(made.save(tmp_path / "m.safetensors"), device="cpu")
    assert again.settings == made.settings and again.settings["schedule"] == "constant" and again.settings["options"]["dropout"] == 0.5


def newest():
    "The ring, and an item that occurs only as the last choice of one user, and another that somebody with one event has."
    return pd.concat([ring(users=60), pd.DataFrame({"user": ["u3", "single"], "item": ["i98", "i99"], "t": [99, 0]})])


@pytest.mark.parametrize("arguments", [dict(), dict(bft=False), dict(backbone="bert4rec"), dict(precision="mlp")], ids=str)
def test_items_that_only_held_out_events_have_are_unknown(arguments):
    made = Recommender(**QUICK | {"max_epochs": 1}, **arguments).fit(newest(), timestamp="t")
    assert made.report["items_never_trained"] == 2 and made.item_ids[-2:].tolist() == ["i98", "i99"]
    weights = made.model.item_weights().detach()
    close(weights[25:], weights[1:25].mean(0).expand(2, -1))
    if made.settings["bft"] and "precision" not in arguments:
        tau = made.model.item_precision().detach()[1:]
        close(tau[24:], tau[:24].min().expand(2))
    if made.settings["backbone"] == "bert4rec":
        assert not torch.equal(made.model.item_embedding.weight[27], weights[26])  # the mask is no item
    assert made.known.ranks.tolist() == judge(made.model, module.last_choices(made.histories), True).ranks.tolist()
    made.add_items(["new"])
    close(made.model.item_weights()[-1].detach(), weights[25])


def test_what_training_reads():
    sequences = from_lengths(np.array([4, 1, 2]), np.array([1, 2, 3, 4, 5, 6, 2]))
    assert module.trained_items(sequences, 7, 2).tolist() == [False, True, True, True, False, True, False]
    assert module.trained_items(sequences, 7, 3).tolist() == [True, True, True, True, False, True, False]


def test_refit_trains_once_more_on_everything(tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(module, "fit", lambda model, split, **settings: runs.append((split, settings, fit(model, split, **settings))) or runs[-1][2])
    quick = QUICK | {"max_epochs": 3}
    first = Recommender(**quick).fit(newest(), timestamp="t")
    made = Recommender(**quick, refit=True).fit(newest(), timestamp="t")
    (_, _, fitted), (split, settings, again) = runs[1:]
    assert len(split.train.items) == len(newest()) and settings["epochs"] == fitted.best_epoch == again.best_epoch == made.report["best_epoch"]
    assert len(again.history) == 1 and settings["validate_every"] == settings["epochs"]
    assert made.report["items_never_trained"] == 1 and made.report["refit"] and not first.report["refit"]  # that of the user with one event
    assert made.known.ranks.tolist() == first.known.ranks.tolist() and made.report["validation"] == first.report["validation"]
    np.testing.assert_array_equal(made.calibration().slopes, first.calibration().slopes)
    assert not torch.equal(made.model.item_weights(), first.model.item_weights())
    got = made.recommend(k=2)
    assert got.confidence.notna().all() and made.recommend(k=2, exclude=["i03"]).confidence.isna().all()
    pd.testing.assert_frame_equal(Recommender.load(made.save(tmp_path / "m.safetensors"), device="cpu").recommend(k=2), got)


# ---- bad input -------------------------------------------------------------------------------------------------


def test_long_history_is_read_from_its_most_recent_items(filtering):
    long = [f"i{t % 24:02d}" for t in range(40)]
    state = lambda items: filtering.recommend({"x": items}, k=1)
    assert filtering.report["histories_cut"] == 0
    open_ = Recommender(filter_seen=False, **QUICK).fit(ring(), timestamp="t")
    pd.testing.assert_frame_equal(open_.recommend({"x": long}, k=5), open_.recommend({"x": long[-10:]}, k=5))
    with pytest.raises(ValueError, match="seen every item"):
        filtering.explain("x", history=long)
    assert len(state(long)) == 0  # seen items are those of the whole history
    cut = Recommender(**QUICK | {"max_length": 5}).fit(ring(), timestamp="t")
    assert cut.report["histories_cut"] == (ring().groupby("user").size() > 5).sum() and "last 5" in cut.report["protocol"]


def test_unknown_items_are_refused_or_skipped_with_a_report(filtering):
    histories = {"a": ["i01", "??", "i02", "!!"], "b": ["??"], "c": []}
    with pytest.raises(ValueError, match=r"3 events of 2 items .*first: '!!'.* 2 users without a known item \(first: 'b'\).*unknown=\"skip\""):
        filtering.recommend(histories, k=1)
    with pytest.warns(UnknownItems, match="3 events of 2 items"):
        got = filtering.recommend(histories, k=2, unknown="skip")
    pd.testing.assert_frame_equal(got, filtering.recommend({"a": ["i01", "i02"]}, k=2))
    with pytest.raises(ValueError, match="no history has an item"), pytest.warns(UnknownItems):
        filtering.recommend({"b": ["??"]}, k=2, unknown="skip")
    with pytest.raises(ValueError, match="'error', 'skip', got 'drop'"):
        filtering.recommend({"a": ["i01"]}, unknown="drop")


@pytest.mark.parametrize(("histories", "error", "message"), [
    ({"a": [3]}, TypeError, "ids are integers .* but were strings"),
    ({"a": ["i01"], "b": [3]}, TypeError, "mix integers and strings"),
    ({"a": [1.5]}, TypeError, "got float"),
    ({"a": [True]}, TypeError, "got bool"),
    ({"a": "i01"}, TypeError, "single text 'i01'"),
    ({"a": ["i01", None]}, ValueError, "1 of 2 ids are missing"),
    ({"a": ["i01", float("nan")]}, ValueError, "missing"),
    ({None: ["i01"]}, ValueError, "users: 1 of 1 ids are missing"),
    ({"a": {"i01", "i02"}}, TypeError, "history of user 'a' must be a list of ids, oldest first, got a set, which has no order"),
    ({"a": frozenset(["i01"])}, TypeError, "got a frozenset, which has no order"),
    ({"a": {"i01": 1}}, TypeError, "history of user 'a' must be a list of ids, got a mapping"),
    ({"a": pd.DataFrame({"item": ["i01"]})}, TypeError, "history of user 'a' must be a list of ids, got a frame: give one column"),
    ({"a": [2**70]}, ValueError, f"history of user 'a' holds {2**70}: ids must fit into 64 bits"),
    ({2**64: ["i01"]}, ValueError, "users holds .* ids must fit into 64 bits"),
    ({"a\0": ["i01"], "a": ["i02"]}, ValueError, r"users: id 'a\\x00' holds a null character"),
    ({"a": ["i01\ud800"]}, ValueError, r"id 'i01\\ud800' holds .*a lone surrogate"),
    ({}, ValueError, "empty"),
    ([["i01"]], TypeError, "expected a pandas, polars or pyarrow frame, got list"),
    (pd.DataFrame({"user": ["a"], "item": ["i01"]}), ValueError, r"missing columns \['t'\]"),
    (pd.DataFrame({"user": ["a"], "item": [1], "t": [0]}), TypeError, "ids are integers"),
])  # fmt: skip
def test_bad_histories(filtering, histories, error, message):
    with pytest.raises(error, match=message):
        filtering.recommend(histories, k=1)


@pytest.mark.parametrize("k", [0, -1, 25])
def test_k_outside_of_the_catalogue(filtering, k):
    with pytest.raises(ValueError, match=f"k must be .*, got {k}"):
        filtering.recommend(k=k)


@pytest.mark.parametrize(("call", "error", "message"), [
    *[(lambda m, k=k: m.recommend(k=k), TypeError, f"k must be a whole number, at least 1, got {k!r}") for k in ("3", 2.5, True, None)],
    (lambda m: m.calibration(2.5), TypeError, "k must be a whole number"),
    (lambda m: m.confidence(np.zeros((1, 2)), "3"), TypeError, "k must be a whole number"),
    (lambda m: m.recommend({"a": 5}), TypeError, "history of user 'a' must be a list of ids, got 5"),
    (lambda m: m.recommend({"a": [pd.NA]}), TypeError, "history of user 'a': ids must be .* got NAType"),
    (lambda m: m.recommend(library="numpy"), ValueError, "library must be one of 'pandas'"),
    (lambda m: m.explain("u1", library="numpy"), ValueError, "library must be one of 'pandas'"),
    (lambda m: m.explain("u1", history=5), TypeError, "history of user 'u1' must be a list of ids, got 5"),
    (lambda m: m.explain("u1", item=["i01"]), TypeError, "item: ids must be .* got list"),
    *[(lambda m, user=user: m.explain(user, history={"i03": ["i01", "i02"]}), TypeError, "history must be a list of items, oldest first, or a frame, got a mapping") for user in (None, "u1")],
    (lambda m: m.explain(history={"i01", "i02"}), TypeError, "oldest first, got a set, which has no order"),
    (lambda m: m.save("x", histories="no"), TypeError, "histories must be True or False, got 'no'"),
    (lambda m: m.add_items(pd.DataFrame({"item": ["n1", "n2"]})), TypeError, "new items must be a list of ids, got a frame: give one column of it"),
    (lambda m: m.add_items({"n1": ["i01"]}), TypeError, "new items must be a list of ids, got a mapping"),
    (lambda m: m.add_items(["a"], like={"a": pd.DataFrame({"item": ["i01"]})}), TypeError, "like must be a list of ids, got a frame"),
    (lambda m: m.add_items(5), TypeError, "new items must be a list of ids, got 5"),
    (lambda m: m.add_items(["a"], like=["i01"]), TypeError, r"like must map new items to lists of known ones, got \['i01'\]"),
    (lambda m: m.add_items(["a"], like={"a": 5}), TypeError, "like must be a list of ids, got 5"),
])  # fmt: skip
def test_an_argument_that_cannot_be_is_named(filtering, unchecked, call, error, message):
    with pytest.raises(error, match=message):
        call(filtering)


@pytest.mark.parametrize(("change", "error", "message"), [
    (lambda f: f.drop(columns="item"), ValueError, r"missing columns \['item'\]"),
    (lambda f: f.head(0), ValueError, "empty"),
    (lambda f: f.assign(item=f.item.where(f.index != 3)), ValueError, "1 missing values"),
    (lambda f: f.assign(user=np.where(f.index == 0, np.nan, 1.0)), ValueError, "1 missing values"),
    (lambda f: f.assign(item=f.t + 0.5), TypeError, "ids must be integers or strings"),
    (lambda f: f.assign(t=np.nan), ValueError, "missing times"),
    (lambda f: f.groupby("user").head(2), ValueError, "no user has three or more events"),
    (lambda f: f.to_dict(), TypeError, "got dict"),
])  # fmt: skip
def test_bad_frames(change, error, message):
    with pytest.raises(error, match=message):
        Recommender(**QUICK).fit(change(ring(users=20)), timestamp="t")


@pytest.mark.parametrize("taken", module.GIVEN)
@pytest.mark.parametrize("purpose", ["user", "item"])
def test_names_that_recommendations_need_are_refused(monkeypatch, purpose, taken):
    monkeypatch.setattr(module, "fit", lambda *_, **__: pytest.fail("it was trained"))
    with pytest.raises(ValueError, match=f"{purpose} can't be the column '{taken}': recommendations have a {taken} of their own"):
        Recommender(**QUICK).fit(ring(users=20).rename(columns={purpose: taken}), **{purpose: taken})


def test_times_may_be_called_as_a_column_of_recommendations_is():
    made = Recommender(**QUICK | {"max_epochs": 1}).fit(ring(users=20).rename(columns={"t": "rank"}), timestamp="rank")
    assert list(made.recommend(k=1)) == ["user", "item", "rank", "score", "confidence"]


def test_categories_that_are_numbers_stay_numbers():
    frame = ring(users=20)
    frame["user"], frame["item"] = frame.user.str[1:].astype(int).astype("category"), frame.item.str[1:].astype(int).astype("category")
    made = Recommender(**QUICK | {"max_epochs": 1}).fit(frame, timestamp="t")
    got = made.recommend({1: [3, 4]}, k=2)
    assert got.user.tolist() == [1, 1] and got.item.dtype == np.int64 and len(made.recommend(frame, k=1)) == 20


NUMBERS = dict(
    max_epochs=np.int64(1), patience=np.int32(2), batch_size=np.int64(32), d=np.int64(16), max_length=np.int16(10), negatives=np.int32(16), seed=np.int64(1), n_layers=torch.tensor(1),
    lr=np.float32(0.5), precision_lr=torch.tensor(0.25), dropout=np.array(0.125), filter_seen=np.bool_(True), refit=np.bool_(False), bft=np.bool_(True), schedule=np.str_("linear"),
)  # fmt: skip


def test_settings_of_numpy_and_torch_become_plain_and_are_saved(unchecked, tmp_path):
    plain = {name: value.item() for name, value in NUMBERS.items()}
    made, want = Recommender(device="cpu", **NUMBERS), Recommender(device="cpu", **plain)
    assert made.settings == want.settings
    kinds = lambda settings: {name: type(value) for name, value in {**settings, **settings["options"]}.items()}
    assert kinds(made.settings) == kinds(want.settings)
    made = Recommender(device="cpu", **NUMBERS | {"lr": np.float32(0.006), "precision_lr": None}).fit(ring(users=20), timestamp="t")
    again = Recommender.load(made.save(tmp_path / "m.safetensors"), device="cpu")
    assert again.settings == made.settings


def test_single_user():
    made = Recommender(**QUICK).fit(ring(users=1), timestamp="t")
    assert made.report["users"] == 1 and made.calibration() is None
    got = made.recommend({"new": [made.item_ids[0].item()]}, k=2)
    assert len(got) == 2 and got.confidence.isna().all()
    assert len(made.explain(history=[made.item_ids[0].item()]))


def test_duplicate_rows_count_once():
    frame = ring(users=30)
    twice = pd.concat([frame, frame.iloc[:7]])
    data, n = without_duplicates(from_frame(twice, timestamp="t"))
    once = from_frame(frame, timestamp="t")
    assert n == 7 and data.sequences.items.tolist() == once.sequences.items.tolist() and data.times.tolist() == once.times.tolist()
    made = Recommender(**QUICK | {"max_epochs": 1}).fit(twice, timestamp="t")
    assert made.report["duplicates_left_out"] == 7 and made.report["interactions"] == len(frame)
    assert without_duplicates(from_frame(twice))[1] == 0  # without times a repeat may be a choice


def test_users_with_few_events_are_trained_on_and_not_validated():
    frame = pd.DataFrame({"user": list("aaabbcddd"), "item": [1, 2, 3, 4, 5, 6, 1, 2, 7]})
    split = hold_back_last(from_frame(frame))
    assert [row.tolist() for row in map(split.train.__getitem__, range(4))] == [[1, 2], [4, 5], [6], [1, 2]]
    assert split.valid.users.tolist() == [0, 3] and split.valid.targets.tolist() == [3, 7]
    assert [split.valid.histories[i].tolist() for i in range(2)] == [[1, 2], [1, 2]]
    assert Recommender(**QUICK).fit(frame).report["users_not_validated"] == 2


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (dict(backbone="gru"), ValueError, "'sasrec'.* got 'gru'"),
    (dict(d=7), ValueError, "d=7 and n_heads=2"),
    (dict(dropout=2.0), ValueError, "dropout"),
    (dict(depth=3), TypeError, "depth"),
    (dict(bft=False, nu0=2.0), TypeError, "nu0"),
    (dict(max_length=0), ValueError, "max_length"),
    *[(dict(bft=bft, time_buckets=8), TypeError, r"unknown option 'time_buckets' \(allowed: ") for bft in (True, False)],
    (dict(backbone="hstu", time_buckets=-1), ValueError, "time_buckets must be at least 0, got -1"),
    *[(dict([(name, 0)]), ValueError, f"{name} must be at least 1, got 0") for name in ("max_epochs", "patience", "batch_size", "negatives")],
    (dict(max_epochs="3"), TypeError, "max_epochs must be a whole number"),
    (dict(lr=-1.0), ValueError, "lr must be positive"),
    (dict(precision_lr="fast"), ValueError, "precision_lr must be positive"),
    (dict(seed=-1), ValueError, "seed must be at least 0"),
    *[(dict(seed=seed), ValueError, f"seed must be below 2³², got {seed}") for seed in (2**32, np.int64(2**40), 2**64)],
    (dict(lr=Fraction(1, 1000)), TypeError, r"lr must be a number, a text, True, False or None, so that it can be saved, got Fraction\(1, 1000\)"),
    (dict(precision_init=Fraction(1, 2)), TypeError, "precision_init must be a number, a text"),
    (dict(lr=torch.ones(2)), ValueError, "lr must be positive"),
    (dict(device=torch.device("cpu")), ValueError, "device must be"),
    (dict(filter_seen="no"), TypeError, "filter_seen must be True or False"),
    (dict(refit=1), TypeError, "refit must be True or False, got 1"),
    (dict(schedule="cosine"), ValueError, "schedule must be one of 'constant', 'linear', got 'cosine'"),
    (dict(device="tpu"), ValueError, "device"),
])  # fmt: skip
def test_bad_arguments_are_refused_at_once(unchecked, arguments, error, message):
    with pytest.raises(error, match=message):
        Recommender(**arguments)


def test_a_fit_that_fails_changes_nothing():
    made = Recommender(**QUICK | {"max_epochs": 1}).fit(ring(users=20), timestamp="t")
    before = made.recommend(k=3)
    with pytest.raises(ValueError, match="missing columns"):
        made.fit(ring(users=20).rename(columns={"user": "who"}), user="who", item="what")
    pd.testing.assert_frame_equal(made.recommend(k=3), before)


def test_not_fitted():
    fresh = Recommender()
    for call in (fresh.recommend, lambda: fresh.explain("a"), lambda: fresh.add_items(["a"]), lambda: fresh.save("x"), fresh.calibration):
        with pytest.raises(ValueError, match="not fitted"):
            call()
    assert "not fitted" in repr(fresh)


@given(st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=20, unique=True), st.data())
def test_numbers_of_finds_what_is_there(catalogue, data):
    catalogue = np.array(catalogue)
    wanted = np.array(data.draw(st.lists(st.sampled_from([*catalogue.tolist(), "long unknown"]), min_size=1)))
    got = numbers_of(wanted, catalogue)
    place = {c: i + 1 for i, c in enumerate(catalogue.tolist())}
    assert got.tolist() == [place.get(w, 0) for w in wanted.tolist()]


# ---- explanations ----------------------------------------------------------------------------------------------


def test_explanation_table(made):
    table = made.explain("u3")
    history = ring().query("user == 'u3'").item.tolist()
    layers = 2
    assert table.neighbour.tolist() == history * layers and table.layer.tolist() == [1] * len(history) + [2] * len(history)
    np.testing.assert_allclose(table.groupby("layer").weight.sum(), 1, atol=1e-5)
    assert table.item.unique().tolist() == [made.recommend(k=1).query("user == 'u3'").item.item()]
    bft = made.settings["bft"]
    assert table.precision.isna().all() != bft and ((table.gain == 1).all() != bft) and ((table.gain > 0) & (table.gain <= 1)).all()
    if bft:
        tau = made.model.precision.tau.detach().numpy()
        np.testing.assert_allclose(table.precision[: len(history)], tau[numbers_of(np.array(history), made.item_ids) - 1], rtol=1e-5)


def test_weights_give_what_the_layer_observed(filtering):
    x = torch.tensor([[3, 1, 4, 1, 5]])
    steps = filtering.model.filter(x)[1]
    for layer, step in zip(filtering.model.encoder.layers, steps, strict=True):
        w = last_weights(layer, step.prior)
        attn, d = layer.self_attn, 16
        v = (layer.norm1(step.prior.mean) @ attn.in_proj_weight[2 * d :].T + attn.in_proj_bias[2 * d :]).unflatten(-1, (2, 8))
        e = attn.out_proj(torch.einsum("hj,jhk->hk", w, v[0]).flatten())
        close(e, step.observation.mean[0, -1], atol=1e-5, rtol=1e-4)


def test_plain_weights_are_torchs():
    torch.manual_seed(0)
    model = build("sasrec", 9, {"bft": False, "d": 16, "max_length": 6}).eval()
    x = torch.tensor([[3, 1, 4]])
    entered, gains = beliefs(model, x)
    layer = model.encoder.layers[1]
    y = layer.norm1(entered[1].mean)
    want = layer.self_attn(y, y, y, average_attn_weights=False)[1][0, :, -1]
    close(last_weights(layer, entered[1]), want, atol=1e-6, rtol=1e-5)
    assert gains == [1.0, 1.0]


def test_effects_are_differences_of_scores(filtering):
    model, items = filtering.model, torch.tensor([3, 1, 4])
    score = lambda *ids: model.scores(model.last(torch.tensor([ids])))[0, 7].item()
    want = [score(3, 1, 4) - s for s in (score(1, 4), score(3, 4), score(3, 1))]
    np.testing.assert_allclose(effects(model, items, 7), want, atol=1e-5)
    np.testing.assert_allclose(effects(model, items[:1], 7), [score(3) - score(0)], atol=1e-5)
    torch.manual_seed(0)
    two_sided = build("bert4rec", 9, {"d": 16, "max_length": 6}).eval()  # its empty history is a lone mask, not zero
    score = lambda *ids: two_sided.scores(two_sided.last(torch.tensor([ids])))[0, 7].item()
    assert abs(score(0)) > 1e-4
    np.testing.assert_allclose(effects(two_sided, torch.tensor([3]), 7), [score(3) - score(0)], atol=1e-5)


def test_explain_any_history_and_item(filtering):
    table = filtering.explain(history=["i05", "i06"], item="i09")
    assert table.item.unique().tolist() == ["i09"] and table.neighbour.tolist() == ["i05", "i06"] * 2 and (table.user == "").all()
    long = [f"i{t % 20:02d}" for t in range(30)]
    assert filtering.explain(history=long).neighbour.tolist() == long[-10:] * 2
    for arguments, message in (
        (dict(user="nobody"), "'nobody' is not one of the 80 fitted users"), (dict(user="u1", item="i99"), "'i99' is not one of the 24"),
        (dict(), "needs a user, or a history"), (dict(history=["??"]), "does not know"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            filtering.explain(**arguments)
    with pytest.raises(TypeError, match="user: ids are integers"):
        filtering.explain(3)


def test_plot_explanation(made):
    import matplotlib

    matplotlib.use("Agg")
    fig = plot_explanation(made.explain("u3"), most=3)
    assert len(fig.axes) == (3 if made.settings["bft"] else 2) and len(fig.axes[0].patches) == 3
    assert [t.get_text() for t in fig.axes[0].get_yticklabels()] == ring().query("user == 'u3'").item.tolist()[-3:]
    matplotlib.pyplot.close(fig)


# ---- every backbone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(backbone_classes()))
@pytest.mark.parametrize("bft", [False, True])
def test_every_backbone_answers(name, bft):
    torch.manual_seed(0)
    model = build(name, 9, {"bft": bft, "d": 16, "max_length": 6}).eval()
    histories = from_lengths(np.array([3, 1, 6]), np.arange(1, 11) % 9 + 1)
    mean, log_precision = user_state(model, history_rows(histories, np.arange(3)))
    close(mean, model.last(history_rows(histories, np.arange(3))), atol=1e-5, rtol=1e-4)
    assert (log_precision is None) != bft
    lists = top_lists(model, histories, 3, True)
    assert lists.items.min() > 0 and lists.evidence.shape == (3, 1 + bft) and np.isfinite(lists.evidence).all()
    table = explanation(model, torch.tensor([1, 2, 3]), 5)
    assert len(table["weight"]) == 3 * len(model.encoder.layers) and np.isfinite(table["weight"]).all()
    x = asked(model, torch.tensor([[1, 2, 3]]))
    bigger = add_rows(model, build(name, 11, {"bft": bft, "d": 16, "max_length": 6}), model.item_weights()[1:3].detach())
    close(bigger.last(torch.tensor([[1, 2, 3]])), model.last(torch.tensor([[1, 2, 3]])))
    assert x.shape[1] in (3, 4) and bigger.n_items == 11


# ---- times -----------------------------------------------------------------------------------------------------

TIMED = QUICK | dict(backbone="hstu", time_buckets=64)


def spaced(seconds=1, **of):
    "The ring, its events so far apart."
    return ring(**of).assign(t=lambda frame: frame.t * seconds)


@pytest.fixture(scope="module", params=[True, False], ids=["bft", "plain"])
def timed(request):
    return Recommender(bft=request.param, **TIMED).fit(spaced(), timestamp="t")


@pytest.fixture(scope="module")
def untimed():
    return Recommender(**TIMED | {"time_buckets": 0}).fit(spaced(), timestamp="t")


def test_the_same_items_at_other_times_have_other_scores(timed, untimed):
    near, far = (spaced(seconds, users=5) for seconds in (1, 86_400))
    scores = lambda made, frame: made.recommend(frame, k=24).sort_values(["user", "item"]).score.to_numpy()
    assert np.abs(scores(timed, near) - scores(timed, far)).max() > 1e-4
    pd.testing.assert_frame_equal(timed.recommend(near.assign(t=near.t + 10**9), k=24), timed.recommend(near, k=24))  # intervals count, not dates
    np.testing.assert_array_equal(scores(untimed, near), scores(untimed, far))


def test_what_is_said_of_fitted_users_is_what_is_said_of_their_frame(timed):
    frame = spaced()
    pd.testing.assert_frame_equal(timed.recommend(frame, k=3), timed.recommend(k=3))
    shuffled = frame.sample(frac=1, random_state=0)
    got = timed.recommend(pd.concat([shuffled, shuffled.iloc[:9]]), k=3)  # out of order, and some of it twice
    alone = lambda table, user: table[table.user == user].reset_index(drop=True)
    for user in ("u0", "u7"):
        pd.testing.assert_frame_equal(alone(got, user), alone(timed.recommend(k=3), user), rtol=1e-4)
    table = timed.explain("u7")
    pd.testing.assert_frame_equal(timed.explain("u7", history=frame), table)
    assert table.neighbour.tolist() == frame.query("user == 'u7'").item.tolist() * 2 and np.isfinite(table[["weight", "gain", "effect"]].to_numpy()).all()
    with pytest.warns(UnknownItems, match="1 events of 1 items"):
        timed.explain("u7", history=pd.concat([frame, pd.DataFrame({"user": ["u7"], "item": ["??"], "t": [99]})]), unknown="skip")
    assert timed.known.ranks.tolist() == judge(timed.model, module.last_choices(timed.histories), True).ranks.tolist()
    other = timed.recommend(k=3, exclude=["i03"])
    assert other.confidence.notna().all() and "i03" not in set(other.item)


def test_dates_are_read_in_seconds(timed):
    dates = spaced().assign(t=lambda frame: pd.to_datetime(frame.t, unit="s"))
    made = Recommender(bft=timed.settings["bft"], **TIMED).fit(dates, timestamp="t")
    pd.testing.assert_frame_equal(made.recommend(dates, k=3), timed.recommend(k=3))


def test_times_are_saved_where_they_are_read(timed, untimed, tmp_path):
    path = timed.save(tmp_path / "timed.safetensors")
    again = Recommender.load(path, device="cpu")
    np.testing.assert_array_equal(again.histories.times, timed.histories.times)
    pd.testing.assert_frame_equal(again.recommend(k=4), timed.recommend(k=4))
    pd.testing.assert_frame_equal(again.explain("u3"), timed.explain("u3"))
    pd.testing.assert_frame_equal(again.recommend(k=4, exclude=["i03"]), timed.recommend(k=4, exclude=["i03"]))
    assert untimed.histories.times is None and "histories.times" not in read_archive(untimed.save(path), "recommender", module.FORMAT)[0]
    bare = Recommender.load(timed.save(path, histories=False), device="cpu")
    pd.testing.assert_frame_equal(bare.recommend(spaced(), k=4), timed.recommend(k=4))


@pytest.mark.parametrize(("left", "message"), [(None, "'histories.times'$"), (slice(1, None), "items needs a time, got")])
def test_a_file_whose_times_do_not_fit_is_refused(timed, unchecked, tmp_path, left, message):
    path = timed.save(tmp_path / "m.safetensors")
    tensors, meta = read_archive(path, "recommender", module.FORMAT)
    times = tensors.pop("histories.times")
    write_archive(path, tensors | ({} if left is None else {"histories.times": times[left]}), {k: v for k, v in meta.items() if k not in ("kind", "version")}, "recommender", module.FORMAT)
    with pytest.raises(ValueError, match=f"m.safetensors' does not hold what save writes: .*{message}"):
        Recommender.load(path, device="cpu")


@pytest.mark.parametrize(("call", "message"), [
    (lambda made: made.recommend({"x": ["i03"]}, k=2), "time_buckets: this backbone reads times, and there are none: give a frame with a column of times, and its name as timestamp"),
    (lambda made: made.explain(history=["i03"]), "reads times, and there are none: give a frame"),
    (lambda made: made.explain(history=spaced()), "needs a user, or a history that is a list of items"),
    (lambda made: made.explain("x", history=spaced()), "user 'x' is not one of the 80 users of the frame"),
    (lambda made: made.recommend(spaced().drop(columns="t")), r"missing columns \['t'\]: the frame has \['user', 'item'\]"),
])  # fmt: skip
def test_histories_without_times_are_refused(timed, call, message):
    with pytest.raises(ValueError, match=message):
        call(timed)


def test_a_fit_without_times_is_refused_before_it_trains(monkeypatch):
    monkeypatch.setattr(module, "fit", lambda *_, **__: pytest.fail("it was trained"))
    for columns in (dict(), dict(position="t")):
        with pytest.raises(ValueError, match="time_buckets: this backbone reads times, and there are none"):
            Recommender(**TIMED).fit(spaced(), **columns)


def test_refit_and_new_items_keep_the_times(monkeypatch):
    read = []
    monkeypatch.setattr(module, "fit", lambda model, split, **settings: read.append(split.train) or fit(model, split, **settings))
    made = Recommender(refit=True, **TIMED | {"max_epochs": 1}).fit(spaced(), timestamp="t")
    np.testing.assert_array_equal(read[1].times, spaced().t)  # of all events
    assert read[0].times.tolist() == spaced().groupby("user", sort=False).t.apply(lambda t: t[:-1]).tolist()
    before = made.recommend(k=24)
    after = made.add_items(["new"], like={"new": ["i03"]}).recommend(k=25)
    old = after[after.item != "new"].drop(columns=["rank", "confidence"]).reset_index(drop=True)
    pd.testing.assert_frame_equal(old, before.drop(columns=["rank", "confidence"]), rtol=1e-4)
    assert len(made.recommend(pd.DataFrame({"user": "x", "item": ["new", "i04"], "t": [1, 5]}), k=3)) == 3


@pytest.mark.parametrize("bft", [True, False])
def test_effects_and_weights_with_times(bft):
    torch.manual_seed(0)
    model = build("hstu", 9, {"bft": bft, "d": 16, "max_length": 6, "time_buckets": 64}).eval()
    items, times = torch.tensor([3, 1, 4]), torch.tensor([0, 5, 99_999])
    score = lambda *keep: model.scores(model.last(items[None, list(keep)], times[None, list(keep)]))[0, 7].item()
    want = [score(0, 1, 2) - s for s in (score(1, 2), score(0, 2), score(0, 1))]
    np.testing.assert_allclose(effects(model, items, 7, times), want, atol=1e-5)
    np.testing.assert_allclose(effects(model, items[:1], 7, times[:1]), [score(0)], atol=1e-5)  # of an empty history HSTU says nothing
    near, far = (explanation(model, items, 7, t) for t in (torch.tensor([0, 1, 2]), times))
    assert np.isfinite(near["weight"]).all() and np.abs(near["weight"] - far["weight"]).max() > 1e-6
    with pytest.raises(ValueError, match="needs the times"):
        explanation(model, items, 7)


# ---- new items -------------------------------------------------------------------------------------------------


def test_new_items_change_nothing_else_and_are_unknown():
    made = Recommender(**QUICK).fit(ring(), timestamp="t")
    before, tau = made.recommend(k=24), made.model.precision.tau.detach().clone()
    made.add_items(["new", "i99"], like={"new": ["i03", "i04"]})
    after = made.recommend(k=26)
    old = after[~after.item.isin(["new", "i99"])].drop(columns=["rank", "confidence"]).reset_index(drop=True)
    pd.testing.assert_frame_equal(old, before.drop(columns=["rank", "confidence"]), rtol=1e-4)
    weights, grown = made.model.item_weights().detach(), made.model.precision.tau.detach()
    i03, i04 = numbers_of(np.array(["i03", "i04"]), made.item_ids)
    mean, away = weights[1:25].mean(0), lambda numbers: (weights[numbers] - weights[1:25].mean(0)).norm(dim=-1)
    close(away([25])[0], away([i03, i04]).mean())
    close(torch.nn.functional.cosine_similarity(weights[25] - mean, weights[[i03, i04]].mean(0) - mean, dim=0), torch.tensor(1.0))
    close(weights[26], mean)
    close(grown[:24], tau)
    close(grown[24:], tau.min().expand(2))
    assert len(made.recommend({"x": ["new", "i99"]}, k=3)) == 3
    assert "new" in made.recommend({"x": ["i02"]}, k=26).item.tolist()


def test_new_item_is_recommended_where_its_like_is():
    made = Recommender(filter_seen=False, **QUICK).fit(ring(), timestamp="t")
    first = made.recommend({"x": ["i02"]}, k=1).item.item()
    made.add_items(["twin"], like={"twin": [first]})
    assert set(made.recommend({"x": ["i02"]}, k=2).item) == {first, "twin"}


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(1, 6), st.floats(0.1, 10), st.integers(0, 99))
def test_the_place_of_a_new_item(n, d, scale, seed):
    g = torch.Generator().manual_seed(seed)
    like, mean, move = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((n, d), (d,), (d,)))
    place = placed_like(like, mean)
    close(placed_like(like.repeat(3, 1), mean), place)  # naming items thrice says nothing new
    close(placed_like(like * scale + move, mean * scale + move), place * scale + move)
    close(placed_like(like[:1], mean), like[0])
    close((place - mean).norm(), (like - mean).norm(dim=-1).mean())
    close(placed_like(torch.stack([mean + move, mean - move]), mean), mean)


@pytest.mark.parametrize(("ids", "like", "error", "message"), [
    (["i03"], None, ValueError, "'i03' is known already"),
    (["a", "a"], None, ValueError, "given twice"),
    ([7], None, TypeError, "integers .* but were strings"),
    (["a"], {"b": ["i01"]}, ValueError, "like names 'b'"),
    (["a"], {"a": ["??"]}, ValueError, "item '\\?\\?' is not known"),
    (["a"], {"a": []}, ValueError, "at least one known item"),
    (["q\0"], None, ValueError, r"new items: id 'q\\x00' holds a null character"),
    (["s\ud800"], None, ValueError, r"new items: id 's\\ud800' holds .*a lone surrogate"),
    ([2**64], None, ValueError, "new items holds .* ids must fit into 64 bits"),
])  # fmt: skip
def test_bad_new_items(filtering, ids, like, error, message):
    with pytest.raises(error, match=message):
        filtering.add_items(ids, like)
    assert len(filtering.item_ids) == filtering.model.n_items == 24


# ---- saving ----------------------------------------------------------------------------------------------------


def test_saved_and_loaded_is_the_same(made, tmp_path):
    path = made.save(tmp_path / "deep" / "m.safetensors")
    again = Recommender.load(path, device="cpu")
    pd.testing.assert_frame_equal(again.recommend(k=4), made.recommend(k=4))
    pd.testing.assert_frame_equal(again.explain("u3"), made.explain("u3"))
    assert again.report == made.report and again.settings == made.settings and repr(again) == repr(made)
    again.add_items(["new"]).save(path)
    assert Recommender.load(path).item_ids[-1] == "new"


def test_saving_without_histories(made, tmp_path):
    path = made.save(tmp_path / "m.safetensors", histories=False)
    assert not {n for n in read_archive(path, "recommender", module.FORMAT)[0] if n.startswith(("user_ids", "histories"))}
    again = Recommender.load(path)
    pd.testing.assert_frame_equal(again.recommend({"x": ["i01"]}, k=4), made.recommend({"x": ["i01"]}, k=4))
    with pytest.raises(ValueError, match="without histories"):
        again.recommend()
    with pytest.raises(ValueError, match="0 fitted users"):
        again.explain("u3")


def test_bad_files(made, tmp_path, monkeypatch):
    path = made.save(tmp_path / "m.safetensors")
    data = path.read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="truncated"):
        Recommender.load(tmp_path / "cut.safetensors")
    with pytest.raises(FileNotFoundError, match="nothing.safetensors"):
        Recommender.load(tmp_path / "nothing.safetensors")
    with pytest.raises(IsADirectoryError, match="is a folder, give the name of a file"):
        Recommender.load(tmp_path)
    with pytest.raises(OSError, match="could not save"):
        made.save(path / "below.safetensors")
    this = module.FORMAT
    monkeypatch.setattr(module, "FORMAT", this + 1)
    with pytest.raises(ValueError, match=f"format {this}, this version of the library reads format {this + 1}"):
        Recommender.load(path)
    assert path.read_bytes() == data


def without_last_user(tensors):
    "Leave out one user id, so that the others are still whole."
    ends = tensors["user_ids.ends"]
    tensors.update({"user_ids.ends": ends[:-1].clone(), "user_ids.utf8": tensors["user_ids.utf8"][: ends[-2]].clone()})


def as_numbers(tensors, ids):
    "Put numbers in the place of the item ids."
    tensors.update(item_ids=ids)
    del tensors["item_ids.utf8"], tensors["item_ids.ends"]


@pytest.mark.parametrize(("change", "message"), [
    (lambda meta, tensors: meta["settings"]["options"].update(d=8), r"its model.item_embedding.weight must be torch.float32 of shape \(25, 8\), got torch.float32 of shape \(25, 16\)$"),
    (lambda meta, tensors: meta["settings"].pop("lr"), r"its settings lack \['lr'\]"),
    (lambda meta, tensors: meta["settings"].update(width=3), r"its settings hold \['width'\], which"),
    (lambda meta, tensors: meta["settings"].update(lr="fast"), "lr must be positive"),
    (lambda meta, tensors: meta["settings"].pop("schedule"), r"its settings lack \['schedule'\]"),
    (lambda meta, tensors: meta.update(settings=list(meta["settings"])), "its settings must be an object of JSON, not list"),
    (lambda meta, tensors: meta["settings"].update(options=[1]), "must be"),
    (lambda meta, tensors: meta.update(report="protocol, validation"), "its report must be an object of JSON, not str"),
    (lambda meta, tensors: meta.pop("columns"), "it has no 'columns'"),
    (lambda meta, tensors: meta["columns"].pop("item"), r"its columns lack \['item'\]"),
    (lambda meta, tensors: meta.update(library="numpy"), "library must be one of"),
    (lambda meta, tensors: tensors.pop("known.ranks"), "known.ranks"),
    (lambda meta, tensors: tensors.update({"histories.lengths": tensors["histories.lengths"][1:]}), "its lengths must be those of its 80 users, got 79"),
    (lambda meta, tensors: meta.update(evil=1), r"it holds \['evil'\], which"),
    (lambda meta, tensors: meta["columns"].update(name="q"), r"its columns hold \['name'\], which"),
    (lambda meta, tensors: meta["columns"].update(user=["a"]), r"user must be the name of a column, a string, got \['a'\]"),
    (lambda meta, tensors: meta["columns"].update(user="item"), "'item' is named for two purposes"),
    (lambda meta, tensors: meta["columns"].update(user="score"), "user can't be the column 'score'"),
    (lambda meta, tensors: meta["settings"].update(bft=False), "its known.evidence must be torch.float64 of shape"),
    (lambda meta, tensors: without_last_user(tensors), "its lengths must be those of its 79 users, got 80"),
    *[(lambda meta, tensors, n=n: tensors["histories.items"][5:6].fill_(n), rf"its histories.items must lie in 1 … 24, got {least}") for n, least in ((0, "0 … 24"), (-1, "-1 … 24"), (25, "1 … 25"))],
    (lambda meta, tensors: (tensors["histories.lengths"][0].sub_(10), tensors["histories.lengths"][1].add_(10)), "its histories.lengths must lie in 1 … "),
    (lambda meta, tensors: tensors["histories.lengths"].add_(1), "lengths must be ≥ 0 and add up to"),
    (lambda meta, tensors: tensors.update({"histories.items": tensors["histories.items"].long()}), "its histories.items must be torch.int32"),
    (lambda meta, tensors: tensors.pop("histories.lengths"), "it has no 'histories.lengths'"),
    (lambda meta, tensors: tensors.pop("histories.items"), "it has no 'histories.items'"),
    (lambda meta, tensors: tensors.update({"histories.times": tensors["histories.items"].long()}), r"it holds \['histories.times'\], which"),
    (lambda meta, tensors: tensors.update({"known.ranks": tensors["known.ranks"][:10].clone()}), r"its known.evidence must be torch.float64 of shape \(10, 2\), got torch.float64 of shape \(80, 2\)"),
    (lambda meta, tensors: tensors.update({"known.ranks": torch.full((80,), torch.nan)}), "its known.ranks must be torch.int64"),
    (lambda meta, tensors: tensors["known.ranks"][:1].fill_(0), "its known.ranks must lie in 1 … inf, got 0"),
    (lambda meta, tensors: tensors["known.evidence"][3, 1].fill_(torch.nan), "its known.evidence must be finite, got nan"),
    (lambda meta, tensors: tensors["known.evidence"][3, 0].fill_(torch.inf), "its known.evidence must be finite, got inf"),
    (lambda meta, tensors: (meta["settings"].update(filter_seen=False), tensors["known.evidence"][3, 0].fill_(torch.nan)), "its known.evidence must be finite, got nan"),
    (lambda meta, tensors: tensors.update({"known.repeated": tensors["known.repeated"].long()}), "its known.repeated must be torch.bool"),
    (lambda meta, tensors: tensors["item_ids.utf8"].fill_(105), "its item_ids hold 'iii' twice"),
    (lambda meta, tensors: tensors["item_ids.utf8"][5].fill_(0), "its item_ids.utf8 holds a null character"),
    (lambda meta, tensors: tensors["item_ids.utf8"].fill_(255), "its item_ids.utf8 is no text in UTF-8"),
    (lambda meta, tensors: tensors.update({"item_ids.ends": tensors["item_ids.ends"].flip(0)}), "its item_ids.ends must rise to 72, the length"),
    (lambda meta, tensors: tensors["item_ids.ends"][3].fill_(2**40), "its item_ids.ends must rise to 72"),
    (lambda meta, tensors: tensors.update(item_ids=torch.arange(24)), r"it holds \['item_ids.ends', 'item_ids.utf8'\], which"),
    (lambda meta, tensors: as_numbers(tensors, torch.arange(24.0)), "its item_ids must be torch.int64"),
    (lambda meta, tensors: as_numbers(tensors, torch.arange(48).view(24, 2)), r"its item_ids must be torch.int64 of shape \(any\), got torch.int64 of shape \(24, 2\)"),
    (lambda meta, tensors: as_numbers(tensors, torch.zeros(0, dtype=torch.int64)), "its item_ids are empty"),
    (lambda meta, tensors: tensors.update(junk=torch.zeros(1)), r"it holds \['junk'\], which"),
    (lambda meta, tensors: tensors.update({"model.junk": torch.zeros(1)}), r"it holds \['model.junk'\], which"),
    (lambda meta, tensors: tensors.update({"item_ids.more": torch.zeros(1)}), r"it holds \['item_ids.more'\], which"),
    (lambda meta, tensors: tensors["model.item_embedding.weight"][3].fill_(torch.nan), "its model.item_embedding.weight must be finite, got nan"),
    (lambda meta, tensors: tensors.update({"model.item_embedding.weight": tensors["model.item_embedding.weight"].long()}), r"its model.item_embedding.weight must be torch.float32"),
])  # fmt: skip
def test_parts_that_do_not_fit_are_named(filtering, unchecked, tmp_path, change, message):
    path = filtering.save(tmp_path / "m.safetensors")
    tensors, meta = read_archive(path, "recommender", module.FORMAT)
    change(meta, tensors)
    write_archive(path, tensors, {k: v for k, v in meta.items() if k not in ("kind", "version")}, "recommender", module.FORMAT)
    with pytest.raises(ValueError, match=f"m.safetensors' does not hold what save writes: .*{message}"):
        Recommender.load(path, device="cpu")


@pytest.mark.parametrize("backbone", list(backbone_classes()))
@pytest.mark.parametrize("bft", [True, False])
def test_every_backbone_is_read_again_with_integer_ids_and_new_items(tmp_path, backbone, bft):
    frame = ring(users=20)
    frame["user"], frame["item"] = frame.user.str[1:].astype(int), frame.item.str[1:].astype(int)
    made = Recommender(backbone, bft, **{n: v for n, v in QUICK.items() if n != "max_epochs"}, max_epochs=1).fit(frame, timestamp="t").add_items([99, 98])
    again = Recommender.load(made.save(tmp_path / "m.safetensors"), device="cpu")
    pd.testing.assert_frame_equal(again.recommend(k=3), made.recommend(k=3))


def test_full_disk_while_saving_leaves_the_earlier_file(made, tmp_path, monkeypatch):
    path = made.save(tmp_path / "m.safetensors")
    before = path.read_bytes()

    def full(self, data):
        with open(self, "wb") as file:
            file.write(data[:1000])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("bft_nb.archive.Path.write_bytes", full)
    with pytest.raises(OSError, match="could not save to .*No space left on device. What was there before is untouched"):
        made.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]
    pd.testing.assert_frame_equal(Recommender.load(path, device="cpu").recommend(k=2), made.recommend(k=2))


# ---- the command -----------------------------------------------------------------------------------------------

FAST = ["--epochs", "1", "--device", "cpu", "--timestamp", "t", "--max-length", "10"]


def test_command_trains_saves_and_recommends(tmp_path, capsys):
    table, out, model = tmp_path / "in.csv", tmp_path / "out.csv", tmp_path / "m.safetensors"
    ring().to_csv(table, index=False)
    assert cli.main(["recommend", str(table), "-o", str(out), "-k", "3", "--save", str(model), *FAST]) == 0
    got = pd.read_csv(out)
    assert len(got) == 240 and list(got) == ["user", "item", "rank", "score", "confidence"] and got.user[0] == "u0"
    said = capsys.readouterr()
    assert str(out) in said.out and "full ranking of 24 items" in said.err and "recommend: 100%" in said.err
    new = tmp_path / "new.parquet"
    pd.DataFrame({"user": [7, 7], "item": ["i03", "??"], "t": [1, 2]}).to_parquet(new)
    again = tmp_path / "again.parquet"
    arguments = ["recommend", str(new), "-o", str(again), "--model", str(model), "-k", "2", "--timestamp", "t", "--quiet"]
    assert cli.main(arguments) == 2
    assert "does not know" in capsys.readouterr().err and not again.exists()
    assert cli.main([*arguments, "--unknown", "skip"]) == 0
    assert pd.read_parquet(again).user.tolist() == [7, 7] and "left out: 1 events" in capsys.readouterr().err


def test_command_recommends_what_is_in_stock(tmp_path, capsys):
    frame = ring(users=60)
    frame["item"] = frame.item.str.replace("i", "")
    frame.to_csv(tmp_path / "in.csv", index=False)
    (tmp_path / "stock.csv").write_text("item\n12\n13\n14\n")  # read as numbers, meant as texts
    out, model = tmp_path / "out.csv", str(tmp_path / "m.safetensors")
    assert cli.main(["recommend", str(tmp_path / "in.csv"), "-o", str(out), "--save", model, "--candidates", str(tmp_path / "stock.csv"), "--refit", "--quiet", *FAST]) == 0
    assert Recommender.load(model).settings["refit"] and set(pd.read_csv(out, dtype=str).item) == {"12", "13", "14"}
    (tmp_path / "stock.csv").write_text("item\n12\n99\n")
    again = ["recommend", str(tmp_path / "in.csv"), "-o", str(out), "--model", model, "--timestamp", "t", "--quiet", "--candidates", str(tmp_path / "stock.csv")]
    assert cli.main(again) == 2 and "1 of 2 items the model does not know ('99')" in capsys.readouterr().err
    assert cli.main([*again, "--unknown", "skip"]) == 0
    assert set(pd.read_csv(out, dtype=str).item) == {"12"} and "left out: candidates" in capsys.readouterr().err


@pytest.mark.parametrize("trained", [True, False])
def test_command_keeps_seen_items_of_a_saved_model(tmp_path, trained):
    model = Recommender(**QUICK | {"max_epochs": 1}, filter_seen=trained).fit(ring(users=10), timestamp="t").save(tmp_path / "m.safetensors")
    pd.DataFrame({"user": ["x"], "item": ["i01"], "t": [0]}).to_csv(tmp_path / "in.csv", index=False)
    for flags, filtered in (([], trained), (["--keep-seen"], False), (["--no-keep-seen"], True)):
        assert cli.main(["recommend", str(tmp_path / "in.csv"), "-o", str(tmp_path / "out.csv"), "--model", str(model), "-k", "20", "--timestamp", "t", "--device", "cpu", "--quiet", *flags]) == 0
        assert ("i01" in set(pd.read_csv(tmp_path / "out.csv").item)) != filtered


def test_command_reads_times(tmp_path, capsys):
    spaced(users=60).to_csv(tmp_path / "in.csv", index=False)
    near, far = (spaced(seconds, users=5) for seconds in (1, 86_400))
    model, out = str(tmp_path / "m.safetensors"), str(tmp_path / "out.csv")
    assert cli.main(["recommend", str(tmp_path / "in.csv"), "-o", out, "--save", model, "--backbone", "hstu", "--time-buckets", "32", "--quiet", *FAST]) == 0
    assert Recommender.load(model).settings["options"]["time_buckets"] == 32
    found = []
    for frame in (near, far):
        frame.to_csv(tmp_path / "new.csv", index=False)
        assert cli.main(["recommend", str(tmp_path / "new.csv"), "-o", out, "--model", model, "--timestamp", "t", "-k", "24", "--device", "cpu", "--quiet"]) == 0
        found.append(pd.read_csv(out).sort_values(["user", "item"]).score.to_numpy())
    assert np.abs(found[0] - found[1]).max() > 1e-5
    assert cli.main(["recommend", str(tmp_path / "new.csv"), "-o", out, "--model", model, "--timestamp", "", "--quiet"]) == 2
    assert "this backbone reads times, and there are none" in capsys.readouterr().err


def test_command_keeps_ids_as_they_are_written(tmp_path):
    frame = ring(users=60)
    frame["item"] = frame.item.str.replace("i", "")  # "00" … "23": text that looks like numbers
    frame.to_csv(tmp_path / "in.csv", index=False)
    frame[frame.item.isin(["12", "13"])].to_csv(tmp_path / "new.csv", index=False)
    assert cli.main(["recommend", str(tmp_path / "in.csv"), "--histories", str(tmp_path / "new.csv"), "-o", str(tmp_path / "out.csv"), "-k", "24", "--quiet", *FAST]) == 0
    assert "00" in set(pd.read_csv(tmp_path / "out.csv", dtype=str).item)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("when", ["written", "flushed"])
def test_full_disk_leaves_the_earlier_recommendations(tmp_path, monkeypatch, suffix, when):
    import pyarrow.csv
    import pyarrow.parquet

    out = tmp_path / f"out.{suffix}"
    frame = pa.table({"user": ["u1"], "item": ["i01"]})
    recommend_command.write(frame, out)
    before = out.read_bytes()

    def full(*given):
        if when == "written":
            given[1].write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*{"written": ({"csv": pyarrow.csv, "parquet": pyarrow.parquet}[suffix], {"csv": "write_csv", "parquet": "write_table"}[suffix]), "flushed": (os, "fsync")}[when], full)
    with pytest.raises(OSError, match=f"could not write .*out.{suffix}': No space left on device") as e:
        recommend_command.write(frame, out)
    monkeypatch.undo()
    assert e.value.errno == errno.ENOSPC and out.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [out.name]


@pytest.mark.parametrize(("arguments", "message"), [
    (["nothing.csv", "-o", "out.csv"], "no file 'nothing.csv'"),
    (["in.csv", "-o", "out.xlsx"], "must end in .csv or .parquet"),
    (["in.csv", "-o", "out.csv", "--item", "thing"], r"missing columns \['thing'\]"),
    (["in.csv", "-o", "in.csv/out.csv"], "cannot be written"),
    (["in.csv", "-o", "out.csv", "--model", "in.csv"], "truncated or not a safetensors file"),
    (["in.csv", "-o", "out.csv", "--model", "m", "--save", "n"], "give one of them"),
    (["in.csv", "-o", "out.csv", "--model", "m", "--keep-seen", "--plain", "--epochs", "3", "--refit", "--seed", "0"], "trains nothing: leave out --plain, --epochs, --refit, --seed"),
    (["in.csv", "-o", "out.csv", "--candidates", "nothing.csv"], "no file 'nothing.csv'"),
    (["in.csv", "-o", "out.csv", "--candidates", "other.csv"], r"--candidates 'other.csv' has no column 'item', it has \['what'\]"),
    (["in.csv", "-o", "out.csv", "--candidates", "unknown.csv"], r"candidates: 1 of 2 items the model does not know \('i99'\): give unknown"),
    (["in.csv", "-o", "out.csv", "--candidates", "numbers.csv"], r"candidates: 2 of 2 items the model does not know \('3', '4'\)"),
    (["in.csv", "-o", "/proc/out.csv"], "'/proc/out.csv' cannot be written"),
    (["in.csv", "-o", "out.csv", "--save", "/proc/new/m.safetensors"], "'/proc/new/m.safetensors' cannot be written"),
    (["in.csv", "-o", "out.csv", "--save", "/dev/null"], "'/dev/null' cannot be written: it is a device"),
    (["in.csv", "-o", "out.csv", "-k", "25"], "k must be between 1 and the number of items, 24, got 25"),
    (["in.csv", "-o", "out.csv", "--backbone", "gru"], "got 'gru'"),
    (["in.csv", "-o", "out.csv", "--backbone", "hstu", "--time-buckets", "8"], "time_buckets: this backbone reads times, and there are none"),
    (["in.csv", "-o", "out.csv", "--time-buckets", "8", "--timestamp", "t"], "unknown option 'time_buckets'"),
    (["in.csv", "-o", "out.csv", "--model", "m", "--time-buckets", "8"], "trains nothing: leave out --time-buckets"),
])  # fmt: skip
def test_command_refuses_before_training(tmp_path, capsys, monkeypatch, arguments, message):
    ring(users=40).to_csv(tmp_path / "in.csv", index=False)
    for name, text in {"other": "what\ni01\n", "unknown": "item\ni01\ni99\n", "numbers": "item\n3\n4\n"}.items():
        (tmp_path / f"{name}.csv").write_text(text)
    monkeypatch.setattr(module, "fit", lambda *_, **__: pytest.fail("it was trained"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["recommend", *arguments, "--quiet"]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out.csv").exists()


# ---- the README ------------------------------------------------------------------------------------------------


def test_readme_example_runs_on_a_csv(tmp_path):
    block = tool("wheel").example("Recommender")
    assert sum(bool(ln.strip()) and not ln.strip().startswith("#") for ln in block.splitlines()) <= 10
    frame = ring(users=60).rename(columns={"t": "timestamp"})
    frame.to_csv(tmp_path / "interactions.csv", index=False)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{block}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "confidence" in done.stdout and (tmp_path / "shop.safetensors").exists()
