"Tables in, splits out: order, ties, repeats, hash, strata, and every error by name."

import datetime
import os
from dataclasses import replace

import jaxtyping
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bft_nb import interactions as I
from bft_nb.interactions import (
    Examples,
    Interactions,
    from_frame,
    from_lengths,
    global_time,
    item_counts,
    leave_one_out,
    load,
    popularity_strata,
    read,
    repeats,
    ties,
)
from bft_nb.world import make_world

ROWS = {"user": ["b", "a", "a", "b", "a", "b"], "item": ["x", "y", "x", "z", "w", "y"], "time": [5, 2, 1, 5, 2, 4], "place": [1, 1, 0, 2, 2, 0]}
MAKERS = {"pandas": pd.DataFrame, "polars": pl.DataFrame, "pyarrow": pa.table}


def own(data): return {u: data.item_ids[data.sequences[n] - 1].tolist() for n, u in enumerate(data.user_ids.tolist())}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_any_frame_by_time_position_and_file(maker):
    frame = maker(ROWS)
    assert own(from_frame(frame, timestamp="time")) == {"b": ["y", "x", "z"], "a": ["x", "y", "w"]}
    assert own(from_frame(frame, position="place")) == {"b": ["y", "x", "z"], "a": ["x", "y", "w"]}
    assert own(from_frame(frame)) == {"b": ["x", "z", "y"], "a": ["y", "x", "w"]}
    assert own(Interactions.from_frame(frame, timestamp="time", position="place")) == own(from_frame(frame, timestamp="time"))


def test_ids_stay_int_or_str_and_items_start_at_one():
    data = from_frame(pl.DataFrame({"user": [7, 7, -1], "item": [100, 50, 100]}))
    assert data.user_ids.tolist() == [7, -1] and data.item_ids.tolist() == [50, 100]
    assert data.sequences.items.tolist() == [2, 1, 2] and data.sequences.items.dtype == np.int32
    categorical = from_frame(pd.DataFrame({"user": pd.Categorical(["u", "v"]), "item": ["i", "j"]}))
    assert categorical.user_ids.tolist() == ["u", "v"]


def coded(maker, **columns):
    "A frame whose columns are categorical."
    if maker is pd.DataFrame: return pd.DataFrame(columns).astype("category")
    if maker is pl.DataFrame: return pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.Categorical))
    return pa.table({name: pa.chunked_array([pa.array(values[:2]).dictionary_encode(), pa.array(values[2:]).dictionary_encode()]) for name, values in columns.items()})


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_categories_are_read_as_what_they_are(maker):
    texts = from_frame(coded(maker, user=["10", "2", "10"], item=["x", "y", "y"]))
    assert texts.user_ids.tolist() == ["10", "2"] and texts.item_ids.tolist() == ["x", "y"]
    if maker is pl.DataFrame: return  # its categories are texts
    numbers = from_frame(coded(maker, user=[10, 2, 10], item=[7, 100, 7]))
    assert numbers.user_ids.tolist() == [10, 2] and numbers.item_ids.tolist() == [7, 100] and numbers.item_ids.dtype == np.int64
    with pytest.raises(TypeError, match="column 'item' has type Float64: ids must be integers or strings"): from_frame(coded(maker, user=[1, 1, 1], item=[1.5, 2.0, 2.0]))


def test_categories_without_rows_do_not_count():
    frame = pd.DataFrame({"user": [1, 1], "item": pd.Categorical([3, 1], categories=["a", 1, 3])})
    assert from_frame(frame).item_ids.tolist() == [1, 3]


def test_columns_of_objects_are_read_as_what_they_hold():
    data = from_frame(pd.DataFrame({"user": [1, np.int32(2), 1], "item": ["x", "y", "x"]}, dtype=object))
    assert data.user_ids.tolist() == [1, 2] and data.user_ids.dtype == np.int64 and data.item_ids.tolist() == ["x", "y"]


@pytest.mark.parametrize(("values", "error", "message"), [
    ([7, "x", 8, "y", 7, "x"], TypeError, r"column 'item': ids must be integers or strings, all of one kind, got int \(as 7\), str \(as 'x'\)$"),
    ([True, 2, 3, 4, 5, 6], TypeError, r"got bool \(as True\), int \(as 2\)$"),
    ([b"x"] * 6, TypeError, "got bytes"),
    ([1, 2**70, 3, 4, 5, 6], ValueError, f"column 'item' holds {2**70}: ids must fit into 64 bits"),
    ([-(2**63) - 1, 2, 3, 4, 5, 6], ValueError, "ids must fit into 64 bits"),
    (["a", "b\0", "c", "d", "e", "f"], ValueError, r"column 'item': id 'b\\x00' holds a null character"),
    (["a", "b\ud800", "ü", "d", "e", "f"], ValueError, r"column 'item': id 'b\\ud800' holds .*a lone surrogate"),
])  # fmt: skip
def test_ids_that_cannot_be_kept_are_named(values, error, message):
    with pytest.raises(error, match=message): from_frame(pd.DataFrame(ROWS | {"item": pd.Series(values, dtype=object)}))


def test_the_largest_and_smallest_ids_are_kept():
    ends = [-(2**63), 2**63 - 1]
    assert from_frame(pd.DataFrame({"user": [1, 1], "item": pd.Series(ends, dtype=object)})).item_ids.tolist() == ends
    assert I.ids_array(["日本", "😀", ""], "ids").tolist() == ["日本", "😀", ""]


@pytest.mark.parametrize("names", [dict(user=0, item=1), dict(item=1), dict(timestamp=2), dict(position=2), dict(timestamp=["time"])], ids=str)
def test_columns_have_names_that_are_strings(names, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    frame = pd.DataFrame([[1, 2, 3], [1, 3, 4]])
    with pytest.raises(TypeError, match="(user|item|timestamp|position) must be the name of a column, a string, got"): from_frame(frame, **names)


def test_the_empty_name_is_a_name():
    frame = pd.DataFrame(ROWS).rename(columns={"time": ""})
    assert own(from_frame(frame, timestamp="")) == own(from_frame(pd.DataFrame(ROWS), timestamp="time"))
    for order in ("timestamp", "position"):
        with pytest.raises(ValueError, match=r"missing columns \[''\]"): from_frame(pd.DataFrame(ROWS), **{order: ""})


def test_dates_become_seconds():
    day = datetime.datetime(1970, 1, 2)
    for frame in (pd.DataFrame({"user": [1, 1], "item": [1, 2], "t": [day, day - datetime.timedelta(seconds=1)]}), pl.DataFrame({"user": [1, 1], "item": [1, 2], "t": [day, day - datetime.timedelta(seconds=1)]})):
        data = from_frame(frame, timestamp="t")
        assert data.times.tolist() == [86399, 86400] and data.sequences[0].tolist() == [2, 1]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=60))
@settings(max_examples=80)
def test_order_is_stable_and_complete(events):
    frame = pd.DataFrame(events, columns=["user", "item", "time"])
    data = from_frame(frame, timestamp="time")
    for n, user in enumerate(data.user_ids):
        mine = frame[frame.user == user].sort_values("time", kind="stable")
        assert data.item_ids[data.sequences[n] - 1].tolist() == mine.item.tolist()
    assert data.n_interactions == len(events) and data.sequences.items.min() >= 1


@pytest.mark.parametrize(
    "change, order, error, message",
    [
        ({"item": None}, {}, ValueError, "column 'item' has 6 missing values"),
        ({"user": [1.0, 2, 3, 4, 5, np.nan]}, {}, ValueError, "column 'user' has 1 missing values"),
        ({"user": [1.5, 2, 3, 4, 5, 6]}, {}, TypeError, "ids must be integers or strings"),
        ({"time": [1, 2, 3, 4, 5, np.nan]}, {"timestamp": "time"}, ValueError, "column 'time' has 1 missing times"),
        ({"time": [1, 2, 3, 4, 5, np.inf]}, {"timestamp": "time"}, ValueError, "infinite time"),
        ({"time": [1, 2, 3, 4, 5, 5.25]}, {"timestamp": "time"}, ValueError, "column 'time' holds 5.25: times must be dates, or whole numbers"),
        ({"time": list("abcdef")}, {"timestamp": "time"}, TypeError, "times must be numbers or dates"),
        ({"place": [0, 1, 2, 3, 4, -1]}, {"position": "place"}, ValueError, "holds -1: positions must be integers ≥ 0"),
        ({"place": [0, 1, 2, 3, 4, 1.5]}, {"position": "place"}, ValueError, "holds 1.5: positions must be integers ≥ 0"),
        ({"place": list("abcdef")}, {"position": "place"}, ValueError, "positions must be integers ≥ 0"),
        ({"place": [0, 1, 1, 3, 4, 5]}, {"position": "place"}, ValueError, "has position 1 twice"),
    ],
)
def test_bad_columns_are_named(change, order, error, message):
    with pytest.raises(error, match=message): from_frame(pd.DataFrame(ROWS | change), **order)


def test_nan_in_polars_is_missing_too():
    with pytest.raises(ValueError, match="1 missing times"): from_frame(pl.DataFrame({"user": [1, 1], "item": [1, 2], "t": [1.0, float("nan")]}), timestamp="t")


def test_missing_columns_and_empty_frame():
    with pytest.raises(ValueError, match=r"missing columns \['when'\]: the frame has \['user', 'item', 'time', 'place'\]"): from_frame(pd.DataFrame(ROWS), timestamp="when")
    with pytest.raises(ValueError, match="the frame is empty"): from_frame(pl.DataFrame(ROWS).head(0))


# files ---------------------------------------------------------------------------------------------------------------


def test_read_csv_and_parquet(tmp_path):
    pd.DataFrame(ROWS).to_csv(tmp_path / "a.csv", index=False)
    pd.DataFrame(ROWS).to_csv(tmp_path / "a.csv.gz", index=False)
    pl.DataFrame(ROWS).write_parquet(tmp_path / "a.parquet")
    got = [read(tmp_path / f"a.{kind}", timestamp="time") for kind in ("csv", "csv.gz", "parquet")]
    assert own(got[0]) == own(got[1]) == own(got[2]) and got[0].name == "a"


def test_leading_zeros_survive_csv(tmp_path):
    (tmp_path / "a.csv").write_text("user,item\n1,0205616461\n2,12\n")
    data = read(tmp_path / "a.csv")
    assert data.item_ids.tolist() == ["0205616461", "12"] and data.user_ids.tolist() == [1, 2]


def test_ids_that_look_missing_survive_csv(tmp_path):
    (tmp_path / "a.csv").write_text("user,item,t\nNA,nan,1\nnull,N/A,2\nNA,7,3\n")
    assert own(read(tmp_path / "a.csv", timestamp="t")) == {"NA": ["nan", "7"], "null": ["N/A"]}
    (tmp_path / "a.csv").write_text('user,item,t\n1,2,NA\n"",3,2\n1,4,3\n')
    with pytest.raises(ValueError, match="column 'user' has 1 missing"): read(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text("user,item,t\n1,2,NA\n1,3,2\n")
    with pytest.raises(ValueError, match="column 't' has 1 missing times"): read(tmp_path / "a.csv", timestamp="t")
    assert read(tmp_path / "a.csv").user_ids.tolist() == [1]


def test_read_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file .*none.csv"): read(tmp_path / "none.csv")
    (tmp_path / "a.txt").write_text("user,item\n")
    with pytest.raises(ValueError, match="expected a name ending in .parquet, .csv or .csv.gz"): read(tmp_path / "a.txt")
    (tmp_path / "a.csv").write_text("user,item\n1,\n")
    with pytest.raises(ValueError, match="column 'item' has 1 missing"): read(tmp_path / "a.csv")


# reports -------------------------------------------------------------------------------------------------------------


def test_ties_and_repeats():
    data = from_frame(pd.DataFrame(ROWS), timestamp="time")
    assert ties(data) == I.Ties(last_two=1.0, events=pytest.approx(1 / 3))
    assert ties(from_frame(pd.DataFrame(ROWS))) is None
    histories = from_lengths(np.array([3, 0, 2]), np.array([1, 1, 2, 3, 3]))
    asked = Examples(np.arange(3, dtype=np.int32), histories, np.array([1, 1, 2], np.int32))
    assert I.is_repeat(asked).tolist() == [True, False, False] and repeats(asked) == 1


def test_first_event_of_a_user_is_no_tie_with_the_last_of_another():
    data = from_frame(pd.DataFrame({"user": [1, 2], "item": [1, 2], "t": [5, 5]}), timestamp="t")
    assert ties(data) == I.Ties(0.0, 0.0)


# splits --------------------------------------------------------------------------------------------------------------


def make(lengths, seed=0, n_items=9, times=True):
    rng = np.random.default_rng(seed)
    items = rng.integers(1, n_items + 1, sum(lengths))
    when = np.concatenate([np.sort(rng.integers(0, 50, n)) for n in lengths]) if times else None
    return Interactions("t", from_lengths(np.array(lengths), items), np.arange(len(lengths)), np.arange(1, n_items + 1), when)


@given(st.lists(st.integers(3, 9), min_size=1, max_size=12), st.integers(0, 99))
@settings(max_examples=60)
def test_leave_one_out_puts_everything_in_its_place(lengths, seed):
    data = make(lengths, seed)
    split = leave_one_out(data)
    for u in range(data.n_users):
        full = data.sequences[u].tolist()
        assert split.train[u].tolist() == split.valid.histories[u].tolist() == full[:-2]
        assert split.test.histories[u].tolist() == full[:-1]
        assert [int(split.valid.targets[u]), int(split.test.targets[u])] == full[-2:]
    assert split.dropped == 0 and item_counts(split).sum() == data.n_interactions - 2 * data.n_users and item_counts(split)[0] == 0


@pytest.mark.parametrize("split_of", [leave_one_out, global_time])
def test_times_stay_with_their_events(split_of):
    data = make([5, 3, 8, 4])
    split = split_of(data)
    when = {(u, n): t for u, (a, b) in enumerate(zip(data.sequences.offsets[:-1], data.sequences.offsets[1:], strict=True)) for n, t in enumerate(data.times[a:b])}
    for users, part in ((split.users, split.train), (split.valid.users, split.valid.histories), (split.test.users, split.test.histories)):
        want = [when[u, n] for u, length in zip(users.tolist(), part.lengths.tolist(), strict=True) for n in range(length)]
        assert part.times.tolist() == want
    assert leave_one_out(make([5, 3], times=False)).train.times is None
    assert split_of is global_time or leave_one_out(replace(data, times=None)).hash == leave_one_out(data).hash  # a split is what it asks, whenever that happened


def test_short_users():
    data = make([3, 2, 4, 1])
    with pytest.raises(ValueError, match="2 of 4 users have fewer than 3 events .*short='drop'"): leave_one_out(data)
    split = leave_one_out(data, short="drop")
    assert split.users.tolist() == [0, 2] == split.test.users.tolist() and split.dropped == 2
    assert split.train[1].tolist() == data.sequences[2][:-2].tolist()
    with pytest.raises(ValueError, match="short must be 'error' or 'drop', got 'skip'"): leave_one_out(data, short="skip")
    with pytest.raises(ValueError, match="no user has 9"): leave_one_out(data, min_events=9, short="drop")
    with pytest.raises(ValueError, match="at least 3, got 2"): leave_one_out(data, min_events=2)


@given(st.lists(st.integers(1, 9), min_size=4, max_size=12), st.integers(0, 99))
@settings(max_examples=60)
def test_global_time_never_looks_ahead(lengths, seed):
    data = make(lengths, seed)
    try: split = global_time(data, (0.5, 0.75))
    except ValueError as e:
        assert "choose other quantiles than (0.5, 0.75)" in str(e)  # no user on both sides: nothing to look at
        assume(False)
    start, stop = split.settings["valid_from"], split.settings["test_from"]
    for n, u in enumerate(split.users):
        when = data.times[data.sequences.offsets[u] : data.sequences.offsets[u + 1]]
        assert split.train[n].tolist() == data.sequences[u][when < start].tolist() != []
    for examples, lo, hi in ((split.valid, start, stop), (split.test, stop, np.inf)):
        for n, u in enumerate(examples.users):
            when = data.times[data.sequences.offsets[u] : data.sequences.offsets[u + 1]]
            place = int((when < lo).sum())
            assert examples.histories[n].tolist() == data.sequences[u][:place].tolist() != []
            assert int(examples.targets[n]) == data.sequences[u][place] and lo <= when[place] < hi


def test_global_time_errors():
    with pytest.raises(ValueError, match="has no times"): global_time(make([5, 5], times=False))
    with pytest.raises(ValueError, match=r"0 < valid < test < 1, got \(0.9, 0.8\)"): global_time(make([5, 5]), (0.9, 0.8))


def test_hash_is_stable_and_sees_every_change():
    "the digits are fixed: another machine, another version of a library, another name for an id must not move them"
    rows = {"user": ["u", "u", "u", "u", "v", "v", "v"], "item": ["c", "a", "b", "a", "a", "c", "b"], "time": [1, 2, 3, 4, 1, 2, 3]}
    base = leave_one_out(from_frame(pd.DataFrame(rows), timestamp="time")).hash
    assert base == "cea8465a7d9cd1e4f3f11e386dd9185bcb198850a98e71d5d2e32e155d9be758"
    names = pd.DataFrame(rows).replace({"a": "z", "u": "user one"})
    assert leave_one_out(from_frame(names, timestamp="time")).hash == base
    assert leave_one_out(from_frame(pa.table(rows))).hash == base
    swapped = rows | {"item": ["c", "a", "a", "b", "a", "c", "b"]}
    assert leave_one_out(from_frame(pd.DataFrame(swapped))).hash != base
    assert global_time(from_frame(pd.DataFrame(rows), timestamp="time"), (0.4, 0.7)).hash != base


def test_hash_of_the_synthetic_world_is_the_documented_one():
    assert leave_one_out(load("synthetic")).hash[:16] == I.describe("synthetic").hash


# popularity ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 20), min_size=4, max_size=60), st.integers(1, 6))
@settings(max_examples=80)
def test_strata_keep_ties_together_and_rise(counts, n):
    counts = np.array([0, *counts])
    strata = popularity_strata(counts, n)
    assert strata.stratum[0] == -1 and strata.sizes.sum() == len(counts) - 1 and len(strata.sizes) == n
    order = np.argsort(counts[1:], kind="stable") + 1
    assert (np.diff(strata.stratum[order]) >= 0).all()
    for value in np.unique(counts[1:]): assert len(np.unique(strata.stratum[1:][counts[1:] == value])) == 1


def test_strata_are_quartiles_where_counts_differ():
    strata = popularity_strata(np.arange(101))
    assert strata.sizes.tolist() == [25, 25, 25, 25] and strata.edges.tolist() == [25, 50, 75]
    with pytest.raises(ValueError, match="n must be at least 1, got 0"): popularity_strata(np.arange(5), 0)


def test_counts_do_not_see_the_targets():
    data = make([3, 3])
    assert item_counts(leave_one_out(data)).sum() == 2


# registry ------------------------------------------------------------------------------------------------------------


def test_unknown_name():
    with pytest.raises(ValueError, match="unknown data set 'ml-1m', did you mean 'ml1m'"): load("ml-1m")
    with pytest.raises(ValueError, match="known: beauty, sports, toys, instruments, yelp, ml1m, ml100k, synthetic"): load("??")


def test_synthetic_keeps_the_worlds_numbers():
    world, data = make_world(), load("synthetic")
    np.testing.assert_array_equal(data.sequences.items.reshape(world.items.shape), world.items)
    assert data.item_ids.tolist() == list(range(1, world.n_items + 1))


def test_own_folder_comes_first_and_is_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("BFT_DATA", str(tmp_path))
    table = pa.table({"user": [1, 1], "item": [1, 2], "position": [0, 1]})
    pq.write_table(table, tmp_path / "beauty.parquet")
    with pytest.raises(ValueError, match=r"found .* \(1, 2, 2, 0\), the published data set has \(22363, 12101, 198502, 0\)"): load("beauty")
    (tmp_path / "beauty.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(ValueError, match="cannot be read as Parquet"): load("beauty")
    pq.write_table(table.drop_columns(["position"]), tmp_path / "beauty.parquet")
    with pytest.raises(ValueError, match="neither a column 'position' nor 'timestamp'"): load("beauty")


def test_describe_is_a_table_row():
    text = str(I.describe("synthetic"))
    assert "| synthetic | 600 | 200 | 12,000 | 0.1 | 20 |" in text and "leave_one_out" in text


def test_registry_is_complete():
    for entry in I.REGISTRY.values():
        assert entry.title and entry.page.startswith("https://") and entry.terms and entry.users and entry.max_length in (50, 200)
        assert entry.name == "synthetic" or hasattr(I.formats, entry.reader)
        assert entry.files or entry.own_copy or entry.name == "synthetic"
        for source in entry.files: assert source.url.startswith("https://") and (source.md5 is None or len(source.md5) == 32)


REAL = [n for n in I.REGISTRY if n != "synthetic"]


@pytest.mark.skipif(not os.environ.get("BFT_DATA"), reason="BFT_DATA is not set: no copy of the real data sets to check")
@pytest.mark.parametrize("name", REAL)
def test_real_statistics(name):
    entry = I.dataset(name)
    if not I.find(entry, I.data_dir()): pytest.skip(f"BFT_DATA holds no {name}.parquet")
    data = load(name)  # checks users, items, interactions and repeats
    split = leave_one_out(data)
    assert len(split.test) == entry.users and data.sequences.lengths.min() >= 5
    if name == "yelp": assert repeats(split.test) > 0
    if entry.name in ("beauty", "sports") and data.times is not None: assert 0.40 < split.ties.last_two < 0.50
