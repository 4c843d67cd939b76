"What a user meets who hands in the wrong thing: an error that names the value and what is allowed, and nothing half-written."

import gzip
import json
import os
import time
import zipfile
from math import inf, nan

import jaxtyping
import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from torch import nn

from bft_nb import cli, download, formats, interactions, results, runner
from bft_nb.attention import observe
from bft_nb.backbones import SASRec
from bft_nb.core import Belief, check_belief, check_count, check_flag, check_positive
from bft_nb.dynamics import activation_and_slope, fixed_point, propagate
from bft_nb.encoder import BFTEncoder, BFTEncoderLayer, ConstantPrecision, ItemPrecision, MLPPrecision
from bft_nb.interactions import from_frame, leave_one_out, popularity_strata, read
from bft_nb.kalman import gain, joseph_precision, update
from bft_nb.kriging import kriging_weights, ordinary_kriging_weights
from bft_nb.ranking import Ranking, by_stratum, paired_bootstrap, ranks, wilson_interval
from bft_nb.reml import observation_variance
from bft_nb.sandwich import claimed_variance, sandwich_variance
from bft_nb.training import LengthBatches, evaluate, fit, last_checkpoint
from bft_nb.world import make_world, rate


@pytest.fixture(autouse=True)
def without_the_shape_checker(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


ONE = torch.ones(3)


@pytest.mark.parametrize("value", [nan, inf, -1, 0, "1", None, True, torch.ones(2)])
def test_numbers(value):
    with pytest.raises(ValueError, match="nu0 must be positive and finite, got "):
        check_positive("nu0", value)
    with pytest.raises(ValueError, match="nu0"):
        observation_variance(ONE, ONE, ONE, nu0=value)


def test_counts_and_flags():
    check_count("d", np.int64(3))
    check_positive("q", 0.0, zero=True)
    for bad in (1.5, True, "3", None):
        with pytest.raises(TypeError, match="d must be a whole number, at least 1, got "):
            check_count("d", bad)
    with pytest.raises(TypeError, match="kalman must be True or False, got 'false'"):
        check_flag("kalman", "false")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: check_belief(Belief(ONE, ONE.long())), TypeError, "precision must be a floating-point tensor, got torch.int64"),
        (lambda: check_belief(Belief(ONE.numpy(), ONE)), TypeError, "mean must be a floating-point tensor, got ndarray"),
        (lambda: kriging_weights(torch.zeros(2, 3, 4), torch.ones(3, 4)), ValueError, r"\(3, 4\) does not broadcast to logits of shape \(2, 3, 4\)"),
        (lambda: ordinary_kriging_weights(torch.ones(2, 3)), ValueError, r"square .*got shape \(2, 3\)"),
        (lambda: ordinary_kriging_weights(torch.ones(0, 0)), ValueError, "at least one neighbour"),
        (lambda: gain(1.0, 1.0), TypeError, "a tensor is needed, got 1.0"),
        (lambda: update(Belief(ONE, -ONE), Belief(ONE, ONE)), ValueError, "prior precision must be ≥ 0 everywhere, got -1.0"),
        (lambda: update(Belief(ONE, ONE), Belief(ONE, nan * ONE)), ValueError, "observation precision must be .* got nan"),
        (lambda: update((ONE, ONE), Belief(ONE, ONE)), TypeError, "two Beliefs, got tuple"),
        (lambda: update(Belief(ONE, 0 * ONE), Belief(ONE, 0 * ONE)), ValueError, "must not both have precision 0"),
        (lambda: check_belief((ONE, ONE)), TypeError, "a Belief is needed, got tuple"),
        (lambda: joseph_precision(ONE, 0 * ONE, ONE), ValueError, "lam_obs must be positive"),
        (lambda: propagate(-ONE, ONE, ONE), ValueError, "precision must be ≥ 0"),
        (lambda: propagate(ONE, ONE, -ONE), ValueError, "process noise must be ≥ 0 everywhere, got -1.0"),
        (lambda: fixed_point(0 * ONE, ONE, ONE), ValueError, "lam_obs must be positive"),
        (lambda: activation_and_slope(["relu"]), ValueError, "activation must be"),
        (lambda: sandwich_variance(torch.ones(1, 3), -ONE, torch.ones(3, 1)), ValueError, "lam_bar must be positive"),
        (lambda: claimed_variance(torch.ones(1, 3), torch.tensor(1.0)), ValueError, "one entry per key"),
    ],
)
def test_formulas(call, error, message):
    with pytest.raises(error, match=message):
        call()


def attend(**change):
    q, k, v = torch.randn(3, 1, 2, 4, 3).unbind(0)
    return observe(**(dict(q=q, k=k, v=v, lam_bar=torch.ones(1, 4)) | change))


@pytest.mark.parametrize("impl", ["blocked", "explicit"])
@pytest.mark.parametrize("weights", ["reliability", "precision"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(lam_bar=torch.tensor([[1.0, 1.0, -2.0, 1.0]])), ValueError, "lam_bar must be positive and finite everywhere, got -2.0"),
        (dict(lam_bar=torch.full((1, 4), nan)), ValueError, "lam_bar must be positive and finite everywhere, got nan"),
        (dict(lam_bar=torch.tensor([[1.0, 0.0, 1.0, 1.0]])), ValueError, "lam_bar must be positive and finite everywhere, got 0.0"),
        (dict(lam_bar=torch.tensor([[1.0, 0.0, 1.0, 1.0]]), mask=torch.tensor([True, False, True, True])[None, None, None]), ValueError, "lam_bar must be positive"),
        (dict(v=torch.full((1, 2, 4, 3), nan)), ValueError, "v must be finite, got nan"),
        (dict(v=torch.full((1, 2, 4, 3), -inf)), ValueError, "v must be finite, got -inf"),
        (dict(v=torch.randn(1, 2, 4, 3) * 1e30), ValueError, "v must be small enough for finite squares"),
        (dict(lam_bar=torch.ones(1, 4).long()), TypeError, "lam_bar must be a floating-point tensor, got torch.int64"),
        (dict(q=torch.full((1, 2, 4, 3), nan)), ValueError, "q must be finite, got nan"),
        (dict(k=torch.full((1, 2, 4, 3), inf)), ValueError, "k must be finite, got inf"),
        (dict(q=torch.full((1, 2, 4, 3), 1e30), k=torch.full((1, 2, 4, 3), -1e30)), ValueError, "overflow"),
        (dict(mask=torch.full((1, 1, 4, 4), nan)), ValueError, "mask must be finite, got nan"),
        (dict(mask=np.ones((1, 1, 4, 4), bool)), TypeError, "mask must be boolean .* got bool"),
        (dict(q=torch.randn(2, 4, 3)), ValueError, r"four dimensions .* got \(2, 4, 3\)"),
        (dict(v=torch.ones(1, 2, 4, 3).long()), TypeError, "v must be a floating-point tensor"),
        (dict(q=torch.randn(1, 2, 4, 0), k=torch.randn(1, 2, 4, 0)), ValueError, "a width"),
        (dict(k=torch.randn(1, 2, 0, 3), v=torch.randn(1, 2, 0, 3), lam_bar=torch.ones(1, 0)), ValueError, "at least one key"),
        (dict(scale=nan), ValueError, "scale must be"),
        (dict(nu0=inf), ValueError, "nu0 must be positive and finite, got inf"),
    ],
)
def test_observe(impl, weights, change, error, message):
    with pytest.raises(error, match=message):
        attend(**change, impl=impl, weights=weights)


@pytest.mark.parametrize("impl", ["blocked", "explicit"])
@pytest.mark.parametrize("wide", ["q", "v", "lam_bar"])
def test_mixed_dtypes_meet_in_the_widest(impl, wide):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 4, 3).unbind(0)
    given = dict(q=q, k=k, v=v, lam_bar=torch.ones(1, 4))
    want, got = observe(**given, impl=impl), observe(**given | {wide: given[wide].double()}, impl=impl)
    torch.testing.assert_close(got.precision, want.precision.double(), rtol=1e-5, atol=1e-6)


LAYER = BFTEncoderLayer(8, 2, 16, batch_first=True)
X = torch.randn(2, 5, 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: BFTEncoderLayer(8, 0), ValueError, "nhead must be at least 1, got 0"),
        (lambda: BFTEncoderLayer(8.0, 2), TypeError, "d_model must be a whole number, at least 1, got 8.0"),
        (lambda: BFTEncoderLayer(8, 2, 0), ValueError, "dim_feedforward must be at least 1, got 0"),
        (lambda: BFTEncoderLayer(8, 2, dropout=nan), ValueError, "dropout must lie in 0 … 1, got nan"),
        (lambda: BFTEncoderLayer(8, 2, process_noise=nan), ValueError, "process_noise must be ≥ 0 and finite, got nan"),
        (lambda: BFTEncoderLayer(8, 2, process_noise="0.1"), ValueError, "process_noise must be ≥ 0 and finite, got '0.1'"),
        (lambda: BFTEncoderLayer(8, 2, kalman="false"), TypeError, "kalman must be True or False, got 'false'"),
        (lambda: BFTEncoder(LAYER, 0), ValueError, "num_layers must be at least 1, got 0"),
        (lambda: BFTEncoder(LAYER, 1, nn.BatchNorm1d(8)), TypeError, "norm must be a LayerNorm or RMSNorm over 8 features"),
        (lambda: BFTEncoder(LAYER, 1, nn.LayerNorm(7)), TypeError, "over 8 features"),
        (lambda: LAYER(X[..., :7]), ValueError, r"d_model=8 features, got shape \(2, 5, 7\)"),
        (lambda: LAYER(X.long()), TypeError, "mean must be a floating-point tensor, got torch.int64"),
        (lambda: LAYER(X.numpy()), TypeError, "src must be a tensor or a Belief, got ndarray"),
        (lambda: LAYER((X, X.exp())), TypeError, "got tuple"),
        (lambda: LAYER(X * nan), ValueError, "q must be finite, got nan"),
        (lambda: LAYER(X, [[True]]), TypeError, "mask must be a tensor, got list"),
        (lambda: BFTEncoder(LAYER, 1)(X, precision=1.0), TypeError, "precision must be a floating-point tensor, got float"),
        (lambda: ItemPrecision(2.5), TypeError, "num_items must be a whole number, at least 1, got 2.5"),
        (lambda: ItemPrecision(3, inf), ValueError, "init must be a positive, finite number .* got inf"),
        (lambda: ItemPrecision(3, [1.0, 2.0, 3.0]), ValueError, "a tensor of 3 of them"),
        (lambda: ItemPrecision(3)(torch.tensor([[4]]), X[:1, :1]), ValueError, r"ids 0 \(padding\) … 3, got 4"),
        (lambda: ItemPrecision(3)(torch.tensor([[1]]), X[:1]), ValueError, r"agree in batch and time, got \(1, 1\) and \(1, 5, 8\)"),
        (lambda: ConstantPrecision(inf), ValueError, "init must be positive and finite, got inf"),
        (lambda: MLPPrecision(0), ValueError, "d_model must be at least 1, got 0"),
    ],
)
def test_encoder(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_whole_number_starts_every_item_and_the_padding():
    items = torch.tensor([[1, 0, 2]])
    torch.testing.assert_close(ItemPrecision(3, 1)(items, X[:1, :3]), ItemPrecision(3, 1.0)(items, X[:1, :3]))


def test_a_large_process_noise_is_kept():
    torch.testing.assert_close(BFTEncoderLayer(8, 2, process_noise=1e3).process_noise, torch.full((8,), 1e3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("make", [lambda: ItemPrecision(9), lambda: MLPPrecision(8), ConstantPrecision])
def test_initial_precisions_in_every_dtype(dtype, make):
    tau = make().to(dtype)(torch.ones(2, 5, dtype=torch.long), X.to(dtype))
    assert tau.dtype == torch.promote_types(dtype, torch.float32)
    out = BFTEncoder(LAYER, 2).to(dtype)(X.to(dtype), precision=tau)
    assert out.dtype == dtype and torch.isfinite(out).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("lam", [1e-6, 1e6, None])
def test_twelve_layers_stand_the_extremes(dtype, norm_first, lam):
    torch.manual_seed(0)
    layer = BFTEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    model, x = BFTEncoder(layer, 12, nn.LayerNorm(8)).to(dtype), X.to(dtype).clone().requires_grad_()
    precision = torch.where(torch.arange(8) < 4, 1e-6, 1e6).expand(2, 5, 8) if lam is None else torch.full((2, 5, 8), lam)
    out = model(Belief(x, precision))
    out.mean.float().square().sum().backward()
    for name, found in {"mean": out.mean, "precision": out.precision, "gradient": x.grad}.items():
        assert torch.isfinite(found).all(), name


@pytest.mark.parametrize("impl", ["blocked", "explicit"])
def test_narrow_models_and_one_token(impl):
    for d, heads, t in ((1, 1, 5), (4, 4, 5), (8, 2, 1), (8, 2, 0)):
        model = BFTEncoder(BFTEncoderLayer(d, heads, 4, batch_first=True, impl=impl), 2)
        out = model(Belief(torch.randn(2, t, d), torch.rand(2, t, d) + 0.1))
        assert all(torch.isfinite(part).all() for part in out)


FRAME = dict(user=[1, 1, 1, 2, 2, 2], item=[1, 2, 3, 3, 2, 1])


@pytest.mark.parametrize(
    ("change", "arguments", "error", "message"),
    [
        (dict(user=np.full(6, 2**63 + 1, np.uint64)), {}, ValueError, "holds 9223372036854775809: ids must fit into 64 bits"),
        (dict(user=["a", "a\0", "b", "b", "b", "b"]), {}, ValueError, "null character"),
        (dict(p=[0, 1, inf, 0, 1, 2]), dict(position="p"), ValueError, "holds inf: positions must be integers ≥ 0"),
        (dict(p=[0, 1, 1e30, 0, 1, 2]), dict(position="p"), ValueError, "1e[+]30: positions must fit"),
        (dict(p=np.full(6, 2**64 - 1, np.uint64)), dict(timestamp="p"), ValueError, "times must fit into 64 bits"),
        (dict(p=[1e30] * 6), dict(timestamp="p"), ValueError, "times must fit into 64 bits"),
        ({}, dict(item="user"), ValueError, "'user' is named for two purposes"),
        ({}, dict(user=None), TypeError, "user must be the name of a column, a string, got None"),
    ],
)
def test_frames(change, arguments, error, message):
    with pytest.raises(error, match=message):
        from_frame(pd.DataFrame(FRAME | change), **arguments)


@pytest.mark.parametrize(
    ("frame", "error", "message"),
    [
        ([1], TypeError, "must be a pandas, polars .* got list"),
        (pl.LazyFrame(FRAME), TypeError, "not lazy.* got LazyFrame"),
        (pd.DataFrame([[1, 2, 3]], columns=["user", "item", "item"]), ValueError, "distinct names"),
    ],
)
def test_things_that_are_no_frames(frame, error, message):
    with pytest.raises(error, match=message):
        from_frame(frame)


def test_nanoseconds_order_events():
    frame = pl.DataFrame({"user": [1, 1], "item": [7, 8], "t": [5, 4]}).with_columns(pl.col("t").cast(pl.Datetime("ns")))
    assert from_frame(frame, timestamp="t").sequences.items.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ragged.csv", b"user,item\n1,2\n1,2,3\n"), ("empty.csv", b""), ("latin.csv", b"user,item\n\xe9,2\n"), ("not.csv.gz", b"user,item\n"),
        ("cut.csv.gz", gzip.compress(b"user,item\n1,2\n" * 50)[:30]), ("bad.parquet", b"garbage"), ("twice.csv", b"user,item,item\n1,2,3\n"),
        ("semicolons.csv", b"user;item\n1;2\n"),
    ],
)  # fmt: skip
def test_damaged_files_are_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="missing columns .* the frame has" if name.startswith("semi") else name):
        read(tmp_path / name)


def test_byte_order_mark_is_read_over(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfuser,item\n1,2\n")
    assert read(tmp_path / "a.csv").n_interactions == 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: leave_one_out(from_frame(pd.DataFrame(FRAME)), 3.5), TypeError, "min_events must be a whole number, at least 3, got 3.5"),
        (lambda: popularity_strata(np.arange(500), 200), ValueError, "n must be at most 127, got 200"),
        (lambda: popularity_strata(np.array([0])), ValueError, "at least one item"),
        (lambda: popularity_strata(np.array([0.0, nan])), TypeError, "float64"),
        (lambda: interactions.global_time(from_frame(pd.DataFrame(FRAME | {"t": range(6)}), timestamp="t"), (0.5, 0.6, 0.7)), ValueError, "quantiles must satisfy"),
        (lambda: interactions.from_lengths(np.array([2, 2]), np.array([1])), ValueError, "add up to 1 items, got a sum of 4"),
        (lambda: interactions.from_lengths(np.array([2]), np.array([1, 2]), np.array([5])), ValueError, "each of the 2 items needs a time, got 1 times"),
        (lambda: interactions.load(["beauty"]), ValueError, "unknown data set"),
        (lambda: make_world(n_items="a"), TypeError, "n_items must be a whole number, got 'a'"),
        (lambda: make_world(seed=None), TypeError, "seed must be a whole number, got None"),
        (lambda: make_world(stay=nan), ValueError, "stay must lie in 0 … 0.95, got nan"),
        (lambda: make_world(stay=0.99), ValueError, "got 0.99"),
        (lambda: make_world(exponent=inf), ValueError, "exponent must lie in 0 … 20, got inf"),
        (lambda: rate(np.zeros((1, 3)), np.array([0])), ValueError, "targets must be item ids 1 … 2"),
        (lambda: rate(np.zeros((1, 3)), np.array([1]), 0), ValueError, "k must be at least 1, got 0"),
        (lambda: rate(np.zeros((0, 3)), np.zeros(0, int)), ValueError, "one at least"),
    ],
)
def test_data(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("text", ['{"user_id": 1}\n', "[1]\n", "", "\xff\n", '{"user_id": "1", "business_id": "b", "date": "2019-05-40"}\n'])
def test_official_files_that_are_not_what_they_should_be(tmp_path, monkeypatch, text):
    monkeypatch.setenv("BFT_DATA", str(tmp_path))
    monkeypatch.setenv("BFT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "yelp_academic_dataset_review.json").write_bytes(text.encode("latin-1"))
    with pytest.raises((download.DownloadError, ValueError), match="yelp_academic_dataset_review.json|frame is empty"):
        interactions.load("yelp", progress=False)
    assert not (tmp_path / "cache").exists()


def test_archives_with_flipped_bytes(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("u.data", "1\t2\t3\t4\n" * 999)
    raw = bytearray((tmp_path / "a.zip").read_bytes())
    raw[45:47] = b"\xff\xff"
    (tmp_path / "a.zip").write_bytes(raw)
    with pytest.raises(download.DownloadError, match="a.zip is not a whole zip archive"):
        download.unzip(tmp_path / "a.zip", tmp_path / "out")
    with pytest.raises(download.DownloadError, match="a.zip is not a whole zip archive"), download.member(tmp_path / "a.zip", "u.data") as f:
        f.read()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zip"]


def test_json_lines_in_other_encodings(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xff\xfe\n")
    with pytest.raises(download.DownloadError, match="a.json is damaged"):
        list(formats.json_lines(tmp_path / "a.json"))


def test_what_a_killed_download_left_is_swept(tmp_path):
    old, live = tmp_path / ".a.bin.x1.part", tmp_path / ".a.bin.x2.part"
    for path in (old, live):
        path.write_text("half")
    os.utime(old, (time.time() - 2 * download.STALE,) * 2)
    with download.written(tmp_path / "a.bin") as part:
        part.write_text("whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a.bin.x2.part", "a.bin"]


@pytest.mark.parametrize("url", ["", "nonsense", "http://127.0.0.1:9/"])
def test_addresses_that_are_none(tmp_path, url):
    with pytest.raises(download.DownloadError, match="names no file|could not download"):
        download.fetch(download.Source(url), tmp_path / "in", progress=False)


SCORES = torch.randn(4, 6)
TARGETS = torch.tensor([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ranks(SCORES, TARGETS.float()), TypeError, "targets must be a tensor of integers, got torch.float32"),
        (lambda: ranks(SCORES, TARGETS.numpy()), TypeError, "got ndarray"),
        (lambda: ranks(SCORES > 0, TARGETS), TypeError, "scores must be a floating-point tensor, got torch.bool"),
        (lambda: ranks(SCORES[0], TARGETS[:1]), ValueError, r"one item at least, got \(6,\)"),
        (lambda: ranks(SCORES, TARGETS, torch.ones(2, 1).long()), ValueError, r"one row per row of scores, \(4, any\), got \(2, 1\)"),
        (lambda: ranks(SCORES, TARGETS, torch.full((4, 1), 9)), ValueError, "seen must hold item ids 0 .filler. or 1..5, got 9"),
        (lambda: ranks(SCORES, TARGETS, torch.ones(4, 1)), TypeError, "seen must be a tensor of integers"),
        (lambda: Ranking(k=10, filter_seen=True), ValueError, r"like \(10, 20\), got 10"),
        (lambda: Ranking(k=(2.5,), filter_seen=True), ValueError, "got .2.5"),
        (lambda: Ranking(filter_seen="no"), TypeError, "filter_seen must be True or False, got 'no'"),
        (lambda: Ranking(filter_seen=False).compute(), ValueError, "call update first"),
        (lambda: wilson_interval(5, 3), ValueError, "got 5 of 3"),
        (lambda: wilson_interval(1.7, 3), ValueError, "got 1.7 of 3"),
        (lambda: by_stratum(TARGETS[:2], np.array([nan, nan])), TypeError, "strata must be integers, got float64"),
        (lambda: paired_bootstrap(TARGETS, TARGETS, strata=np.array([0])), ValueError, r"one entry per user, \(4,\), got \(1,\)"),
        (lambda: paired_bootstrap(TARGETS, TARGETS, confidence=95), ValueError, "confidence"),
        (lambda: paired_bootstrap(TARGETS[:0], TARGETS[:0]), ValueError, "one at least"),
    ],
)
def test_ranking(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_no_user_is_no_error_and_a_refused_batch_leaves_no_trace():
    assert ranks(SCORES[:0], TARGETS[:0]).tolist() == []
    metric = Ranking(filter_seen=False)
    with pytest.raises(ValueError, match="finite"):
        metric.update(SCORES * nan, TARGETS, TARGETS[:, None])
    assert metric.repeats == metric.count == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(n_items=2.5), TypeError, "n_items must be a whole number"),
        (dict(d_ff=0), ValueError, "d_ff must be at least 1, got 0"),
        (dict(bft="no"), TypeError, "bft must be True or False, got 'no'"),
        (dict(precision="foo"), ValueError, "'item', 'mlp', 'constant', got 'foo'"),
        (dict(bft=True, precision_init=inf), ValueError, "precision_init must be positive and finite, got inf"),
        (dict(bft=True, kalmann=True), TypeError, "unknown option 'kalmann' .allowed: kriging, kalman, jacobian"),
        (dict(bft=True, d_model=4), TypeError, "unknown option 'd_model'"),
        (dict(bft=True, kalman="false"), TypeError, "kalman must be True or False"),
    ],
)
def test_backbone_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        SASRec(**dict(n_items=9, d=8) | arguments)


def test_backbone_input():
    model = SASRec(9, max_length=5, d=8, n_layers=1)
    with pytest.raises(ValueError, match="one position at least"):
        model.last(torch.zeros(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="got -1"):
        model.scores(torch.randn(1, 8), torch.tensor([[-1]]))
    with pytest.raises(ValueError, match="8 features"):
        model.scores(torch.randn(1, 7))


def small(bft=False):
    rng = np.random.default_rng(0)
    split = leave_one_out(from_frame(pd.DataFrame({"user": np.repeat(np.arange(8), 6), "item": rng.integers(1, 9, 48)})))
    torch.manual_seed(0)
    return SASRec(split.n_items, max_length=5, d=8, n_layers=1, bft=bft), split


QUICK = dict(epochs=2, batch_size=4, negatives=4, device="cpu", patience=9)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(epochs=1.5), TypeError, "epochs must be a whole number, at least 1, got 1.5"),
        (dict(lr=inf), ValueError, "lr must be positive and finite, got inf"),
        (dict(weight_decay=-1.0), ValueError, "weight_decay must be ≥ 0 and finite, got -1.0"),
        (dict(seed=-1), ValueError, "seed must be at least 0, got -1"),
        (dict(seed=2**40), ValueError, "seed must be below 2³²"),
        (dict(eval_batch_size=0), ValueError, "eval_batch_size must be at least 1, got 0"),
        (dict(filter_seen="no"), TypeError, "filter_seen must be True or False"),
        (dict(device=["cpu"]), ValueError, "device must be"),
        (dict(out_dir=__file__), NotADirectoryError, "is a file"),
    ],
)
def test_training_arguments(change, error, message):
    with pytest.raises(error, match=message):
        fit(*small(), **QUICK | change)


def test_training_objects():
    model, split = small()
    with pytest.raises(TypeError, match="split must be a Split .* got DataFrame"):
        fit(model, pd.DataFrame(FRAME), **QUICK)
    with pytest.raises(TypeError, match="model must be a backbone .* got Linear"):
        fit(nn.Linear(1, 1), split, **QUICK)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        LengthBatches(np.array([1]), 0)


def test_a_filter_that_diverges_says_so():
    with pytest.raises(FloatingPointError, match="diverged .*finite.* smaller lr"):
        fit(*small(bft=True), **QUICK | dict(lr=1e6, epochs=3))


def test_a_failed_evaluation_leaves_the_mode():
    model, split = small()
    with torch.no_grad():
        model.item_embedding.weight[2] = nan
    with pytest.raises(ValueError, match="finite"):
        evaluate(model.train(), split.test)
    assert model.training


@pytest.mark.slow
def test_checkpoints_that_lost_a_part_are_not_gone_on_from(tmp_path):
    whole = fit(*small(), **QUICK, out_dir=tmp_path)
    for name in ("model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"):
        newest = last_checkpoint(tmp_path)
        path = tmp_path / newest / name
        path.write_bytes(path.read_bytes()[:20])
        again = fit(*small(), **QUICK, out_dir=tmp_path)
        assert [row["ndcg@10"] for row in again.history] == [row["ndcg@10"] for row in whole.history], name


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-best" / "theirs.txt").write_text("theirs")
    assert last_checkpoint(tmp_path) is None and (tmp_path / "checkpoint-best" / "theirs.txt").exists()
    (tmp_path / "checkpoint-7").mkdir()
    with pytest.raises(ValueError, match="holds a run with other settings"):
        fit(*small(), **QUICK, out_dir=tmp_path)
    assert (tmp_path / "checkpoint-7").exists()


def test_damaged_results_are_named(tmp_path):
    for n, content in enumerate((b"", b"garbage", b"PK\3\4")):
        path = tmp_path / f"{n}.npz"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{n}.npz is damaged"):
            results.load_ranks(path)
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="a.csv is not text in UTF-8"):
        results.read_rows(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="part of a file name .* got '../x'"):
        results.ranks_path(tmp_path, dict(exp="../x", dataset="d", model="m", params={}, seed=0))


@pytest.mark.parametrize("text", ["{", '{"a": 1}', "[1]"])
def test_files_that_are_no_notebooks(tmp_path, capsys, text):
    (tmp_path / "a.ipynb").write_text(text)
    for arguments in ([], ["-p", "a", "1"], ["--list"]):
        assert cli.main(["run", str(tmp_path / "a.ipynb"), "--out", str(tmp_path / "out"), *arguments]) == 2
        assert "a.ipynb is not a notebook" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_is_a_file(tmp_path, capsys):
    (tmp_path / "a.ipynb").write_text(json.dumps(dict(cells=[], metadata={}, nbformat=4, nbformat_minor=5)))
    assert cli.main(["run", str(tmp_path / "a.ipynb"), "--out", str(tmp_path / "a.ipynb")]) == 2
    assert "out must be a folder" in capsys.readouterr().err


def test_null_is_no_number():
    with pytest.raises(TypeError, match="'d' must be of type int like its default 64, got None"):
        runner.check_parameters({"d": None}, {"d": 64})
    runner.check_parameters({"d": None}, {"d": None})
