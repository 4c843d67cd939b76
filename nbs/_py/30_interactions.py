# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Interactions
#
# > Who chose what, in which order: data sets with their sources, splits with a hash, and reports on what a split hides.

# %%
#| default_exp interactions

# %% [markdown]
# **So far** a layer and a synthetic world. **Now** the data a recommender learns from, real or synthetic, in one form.
# **Why**: most disagreements between published numbers come from the data: a different filter, a different order of ties, a different split. So every data set is checked against its published
# statistics on each load, and every split carries a hash.

# %%
#| exports
import difflib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import narwhals as nw
import numpy as np
from jaxtyping import Bool, Int, Int8, Int32, Int64, Shaped

from bft_nb import formats
from bft_nb.download import DownloadError, Source, cache_dir, data_dir, fetch, written
from bft_nb.world import World, make_world

# %%
import matplotlib.pyplot as plt
import pandas as pd
from fastcore.test import test_fail
from bft_nb.figures import COLOUR, use_style

# %%
use_style()

# %% [markdown]
# ## The smallest case
#
# Three readers, eight purchases. The rows of a shop's table come in any order and with the shop's own ids:

# %%
shop = pd.DataFrame({
    "reader": ["ann", "bob", "ann", "ann", "cid", "bob", "bob", "ann"],
    "book": ["A7", "B1", "B1", "C3", "A7", "C3", "A7", "D9"],
    "day": [3, 1, 1, 2, 5, 1, 4, 3],
})  # fmt: skip
shop


# %% [markdown]
# Ann bought two books on day 3. Nothing says which came first; the order of the file is all we have. We keep it, and count such ties.
#
# ## Sequences
#
# The users' lists differ in length, so they stand one after the other in one flat array, beside the places where each user begins. Items are numbered from 1; 0 is padding and never an item.

# %%
#| exports
@dataclass(frozen=True, eq=False)
class Sequences:
    "Lists of items, one for each user, in one flat array (compressed rows)."

    offsets: Int64[np.ndarray, " bounds"]  # user u owns items[offsets[u] : offsets[u + 1]]
    items: Int32[np.ndarray, " events"]  # 1 … n_items
    times: Int64[np.ndarray, " events"] | None = None  # of each event, where they are known and wanted

    def __len__(self) -> int: return len(self.offsets) - 1

    def __getitem__(self, user: int | np.integer) -> Int32[np.ndarray, " length"]:
        "The items of one user, in order; `IndexError` outside 0 … len − 1."
        if not 0 <= user < len(self): raise IndexError(f"user {user} is not in 0 … {len(self) - 1}")
        return self.items[self.offsets[user] : self.offsets[user + 1]]

    @property
    def lengths(self) -> Int64[np.ndarray, " users"]:
        "How many items each user has."
        return np.diff(self.offsets)


# %%
two = Sequences(np.array([0, 2, 5]), np.array([4, 1, 2, 2, 3], dtype=np.int32))
len(two), two[1], two.lengths


# %%
#| exports
def from_lengths(
    lengths: Int[np.ndarray, " users"],  # items per user
    items: Int[np.ndarray, " events"],  # all items, user after user
    times: Int64[np.ndarray, " events"] | None = None,  # of each event
) -> Sequences:
    "Sequences from their lengths; `ValueError` where they are negative or do not add up to the number of items, or items and times are not equally many."
    if (lengths < 0).any() or lengths.sum() != len(items): raise ValueError(f"lengths must be ≥ 0 and add up to {len(items)} items, got a sum of {lengths.sum()}, the least {lengths.min(initial=0)}")
    if times is not None and len(times) != len(items): raise ValueError(f"each of the {len(items)} items needs a time, got {len(times)} times")
    return Sequences(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), items.astype(np.int32), times)


# %% [markdown]
# Cutting events off the ends of all sequences at once is the one operation every split needs:


# %%
#| exports
def take(
    sequences: Sequences,
    keep: Shaped[np.ndarray, " events"],  # True where an event stays
) -> Sequences:  # the same users
    "Keep some events of each user."
    row = np.repeat(np.arange(len(sequences)), sequences.lengths)
    times = None if sequences.times is None else sequences.times[keep]
    return from_lengths(np.bincount(row[keep], minlength=len(sequences)), sequences.items[keep], times)


# %%
#| exports
def from_end(
    sequences: Sequences,
) -> Int64[np.ndarray, " events"]:  # 1 for the last event of each user, 2 for the last but one, …
    "How far each event is from the end of its user's sequence."
    return np.repeat(sequences.offsets[1:], sequences.lengths) - np.arange(len(sequences.items))


# %%
take(two, from_end(two) > 1)[1], from_end(two)

# %% [markdown]
# ## Interactions
#
# Sequences with a name, with times where they are known, and with the ids their owner uses.


# %%
#| exports
@dataclass(frozen=True, eq=False)
class Interactions:
    "Who chose what, in which order."

    name: str
    sequences: Sequences
    user_ids: Shaped[np.ndarray, " users"]  # own id of each user
    item_ids: Shaped[np.ndarray, " items"]  # own id of item i is item_ids[i - 1]
    times: Int64[np.ndarray, " events"] | None = None  # non-decreasing within a user, [s] where the source says seconds

    @property
    def n_users(self) -> int: return len(self.sequences)

    @property
    def n_items(self) -> int: return len(self.item_ids)

    @property
    def n_interactions(self) -> int: return len(self.sequences.items)

    @property
    def timed(self) -> Sequences:
        "The sequences with their times, as far as these are known."
        return replace(self.sequences, times=self.times)

    @property
    def density(self) -> float:
        "Share of the users × items table that is filled."
        return self.n_interactions / (self.n_users * self.n_items)

    @staticmethod
    def from_frame(frame: Any, user: str = "user", item: str = "item", timestamp: str | None = None, position: str | None = None, name: str = "frame") -> "Interactions":
        "See `from_frame`."
        return from_frame(frame, user, item, timestamp, position, name)


# %% [markdown]
# ### From any table
#
# pandas, polars and pyarrow tables are read through narwhals. First, what may go wrong with a column:


# %%
#| exports
def check_names(
    names: Mapping[str, Any],  # of columns, by purpose; None for one that is not used
) -> None:
    "Raise `TypeError` unless all names are strings, `ValueError` for a column with two purposes."
    used = {purpose: name for purpose, name in names.items() if name is not None or purpose in ("user", "item")}
    for purpose, name in used.items():
        if not isinstance(name, str): raise TypeError(f"{purpose} must be the name of a column, a string, got {name!r}")
    given = list(used.values())
    if twice := sorted({c for c in given if given.count(c) > 1}): raise ValueError(f"column {twice[0]!r} is named for two purposes: user, item, timestamp and position are four columns")


# %%
#| exports
def check_columns(
    frame: nw.DataFrame,
    wanted: list[str],  # column names
) -> None:
    "Raise `ValueError` for missing columns (naming those found) or an empty frame."
    if missing := [c for c in wanted if c not in frame.columns]:
        raise ValueError(f"missing columns {missing}: the frame has {frame.columns}")
    if len(frame) == 0: raise ValueError("the frame is empty: at least one interaction is needed")


# %%
#| exports
def missing_values(
    column: nw.Series,
) -> int:  # nulls and NaN
    "How many values are null or NaN."
    missing = column.is_null() | column.is_nan() if column.dtype.is_float() else column.is_null()
    return int(missing.sum())


# %%
#| exports
def whole_numbers(
    values: Shaped[np.ndarray, " rows"],  # numbers, whole ones
    name: str,  # column
    what: str,  # for the message
) -> Int64[np.ndarray, " rows"]:
    "As int64; `ValueError` naming the first number that does not fit."
    big = values > np.iinfo(np.int64).max if values.dtype.kind == "u" else np.abs(values) >= 2.0**63 if values.dtype.kind == "f" else np.zeros(len(values), bool)
    if big.any(): raise ValueError(f"column {name!r} holds {values[big][0]}: {what} must fit into 64 bits")
    return values.astype(np.int64)


# %% [markdown]
# Ids are integers or texts. A text is kept as it is, so one that an array or a file would change is refused: with a null character, or with half of a pair of surrogates, which is no character.


# %%
#| exports
def storable(
    text: str,
) -> bool:
    "Does a text come out of an array and of UTF-8 as it went in?"
    return not re.search(r"[\x00\ud800-\udfff]", text)


# %%
#| exports
def ids_array(
    values: list[Any],
    what: str,  # for the message
) -> Shaped[np.ndarray, " n"]:  # int64, or strings
    "Ids as an array; `TypeError` unless all are integers or all strings, `ValueError` for integers beyond 64 bits and strings that are lost in storage."
    if all(isinstance(v, str) for v in values):
        if not storable("".join(values)): raise ValueError(f"{what}: id {next(v for v in values if not storable(v))!r} holds a null character or a lone surrogate, which is lost in storage")
        return np.array(values, dtype=str)
    values = [v.item() if isinstance(v, np.generic) else v for v in values]
    if all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        if big := [v for v in values if not -(2**63) <= v < 2**63]: raise ValueError(f"{what} holds {big[0]}: ids must fit into 64 bits")
        return np.array(values, dtype=np.int64)
    first = {type(v).__name__: v for v in reversed(values)}
    raise TypeError(f"{what}: ids must be integers or strings, all of one kind, got {', '.join(f'{kind} (as {first[kind]!r})' for kind in sorted(first))}")


# %%
[ids_array(ids, "items").dtype.kind for ids in (["A7", "B1"], [7, 1])]


# %% [markdown]
# A categorical column holds what its categories are, numbers or texts:


# %%
#| exports
def from_categories(
    column: nw.Series,  # categorical
) -> nw.Series:  # not categorical
    "The same values as a column of their own kind."
    if all(isinstance(v, str) for v in column.unique().to_list()): return column.cast(nw.String)
    return nw.new_series(column.name, column.to_numpy(), backend=column.implementation)


# %%
#| exports
def id_column(
    frame: nw.DataFrame,
    name: str,  # column
) -> Shaped[np.ndarray, " rows"]:  # int64, or strings
    "Own ids; `ValueError` for missing values, and what `ids_array` raises."
    column = frame[name]
    if n := missing_values(column): raise ValueError(f"column {name!r} has {n} missing values (null or NaN): every interaction needs an id")
    if column.dtype in (nw.Categorical, nw.Enum): column = from_categories(column)
    if column.dtype.is_integer(): return whole_numbers(column.to_numpy(), name, "ids")
    if column.dtype not in (nw.String, nw.Object): raise TypeError(f"column {name!r} has type {column.dtype}: ids must be integers or strings")
    return ids_array(column.to_list(), f"column {name!r}")


# %%
id_column(nw.from_native(shop.astype({"day": "category"})), "day")


# %%
#| exports
def time_column(
    frame: nw.DataFrame,
    name: str,  # column
) -> tuple[Shaped[np.ndarray, " rows"], Int64[np.ndarray, " rows"]]:  # what to sort by, seconds
    "Times as whole numbers (kept as they are) or dates (whole seconds since 1970); `ValueError` for missing, infinite or fractional, `TypeError` for other types."
    column = frame[name]
    if n := missing_values(column): raise ValueError(f"column {name!r} has {n} missing times (null or NaN)")
    if column.dtype in (nw.Datetime, nw.Date):
        if column.dtype == nw.Date: column = column.cast(nw.Datetime("us"))
        fine = getattr(column.dtype, "time_unit", "us") == "ns"
        key = column.dt.timestamp("ns" if fine else "us").to_numpy().astype(np.int64)
        return key, key // (1_000_000_000 if fine else 1_000_000)
    if not column.dtype.is_numeric(): raise TypeError(f"column {name!r} has type {column.dtype}: times must be numbers or dates")
    key = column.to_numpy()
    if key.dtype.kind not in "iuf": raise TypeError(f"column {name!r} has type {column.dtype}: times must be numbers or dates")
    if not np.isfinite(key).all(): raise ValueError(f"column {name!r} holds an infinite time")
    if key.dtype.kind == "f" and (bad := key != np.floor(key)).any():
        raise ValueError(f"column {name!r} holds {key[bad][0]}: times must be dates, or whole numbers in a unit that tells events apart (of seconds with a fraction, make milliseconds)")
    return key, whole_numbers(key, name, "times")


# %%
#| exports
def position_column(
    frame: nw.DataFrame,
    name: str,  # column
) -> Int64[np.ndarray, " rows"]:  # 0, 1, 2, … within a user (gaps allowed)
    "Positions; `ValueError` naming the first value that is missing, negative or not an integer."
    column = frame[name]
    if n := missing_values(column): raise ValueError(f"column {name!r} has {n} missing positions")
    if not column.dtype.is_numeric(): raise ValueError(f"column {name!r} has type {column.dtype}: positions must be integers ≥ 0")
    value = column.to_numpy()
    if value.dtype.kind not in "iuf": raise ValueError(f"column {name!r} has type {column.dtype}: positions must be integers ≥ 0")
    if (bad := (value < 0) | (value != np.floor(value)) | np.isinf(value)).any():
        raise ValueError(f"column {name!r} holds {value[bad][0]}: positions must be integers ≥ 0")
    return whole_numbers(value, name, "positions")


# %% [markdown]
# Then the order: users as they first appear; the events of a user by time, at equal times by position, and otherwise as in the file. Items are numbered in the order of their ids.


# %%
#| exports
def first_appearance(
    ids: Shaped[np.ndarray, " rows"],
) -> tuple[Shaped[np.ndarray, " distinct"], Int64[np.ndarray, " rows"]]:  # distinct ids, number of each row's id
    "Number ids in the order in which they first appear."
    distinct, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return distinct[order], rank[inverse.ravel()]


# %%
#| exports
def from_frame(
    frame: Any,  # pandas, polars or pyarrow
    user: str = "user",  # column of users' ids, int or str
    item: str = "item",  # column of items' ids, int or str
    timestamp: str | None = None,  # column to order by, ties as in the file
    position: str | None = None,  # column to order by (within equal times, where both are given)
    name: str = "frame",  # what reports call it
) -> Interactions:
    """Interactions from a table; without `timestamp` and `position` the order of the file counts.

    Raises `ValueError` for missing columns, an empty frame, missing ids or times, positions that are negative, fractional or repeated within a user; `TypeError` for other types.
    """
    check_names({"user": user, "item": item, "timestamp": timestamp, "position": position})
    try: table = nw.from_native(frame, eager_only=True)
    except TypeError as e: raise TypeError(f"frame must be a pandas, polars (not lazy) or pyarrow table, got {type(frame).__name__}") from e
    except nw.exceptions.NarwhalsError as e: raise ValueError(f"the frame's columns must have distinct names: {e}") from e
    check_columns(table, [user, item, *(c for c in (timestamp, position) if c is not None)])
    user_ids, users = first_appearance(id_column(table, user))
    item_ids, items = np.unique(id_column(table, item), return_inverse=True)
    key, times = time_column(table, timestamp) if timestamp is not None else (np.zeros(len(users)), None)
    place = position_column(table, position) if position is not None else np.arange(len(users))
    order = np.lexsort((place, key, users))
    if position is not None: check_distinct_positions(users[order], key[order], place[order], position)
    sequences = from_lengths(np.bincount(users, minlength=len(user_ids)), items.ravel()[order] + 1)
    return Interactions(name, sequences, user_ids, item_ids, None if times is None else times[order])


# %%
#| exports
def check_distinct_positions(
    users: Int[np.ndarray, " rows"],
    key: Shaped[np.ndarray, " rows"],  # times, in order
    place: Int64[np.ndarray, " rows"],  # positions, in order
    name: str,  # column
) -> None:
    "Raise `ValueError` where two events of a user claim the same place."
    same = (users[1:] == users[:-1]) & (key[1:] == key[:-1]) & (place[1:] == place[:-1])
    if same.any(): raise ValueError(f"column {name!r}: a user has position {place[1:][same][0]} twice, so their order is not known")


# %%
small = from_frame(shop, "reader", "book", timestamp="day", name="shop")
[small.item_ids[small.sequences[u] - 1].tolist() for u in range(3)]

# %% [markdown]
# Ann's tie on day 3 stays in the order of the file: `A7` before `D9`. The errors name what was found and what is allowed:

# %%
test_fail(lambda: from_frame(shop, "reader", "title"), contains="missing columns ['title']: the frame has ['reader', 'book', 'day']")
test_fail(lambda: from_frame(shop.head(0), "reader", "book"), contains="empty")
test_fail(lambda: from_frame(shop.assign(day=-1), "reader", "book", position="day"), contains="holds -1")
test_fail(lambda: from_frame(shop.assign(day=np.nan), "reader", "book", timestamp="day"), contains="8 missing times")
test_fail(lambda: from_frame(shop.assign(book=None), "reader", "book"), contains="8 missing values")
test_fail(lambda: from_frame(shop.assign(book=["A7", 1] * 4), "reader", "book"), contains="got int (as 1), str (as 'A7')")


# %% [markdown]
# ### From a file
#
# An id such as `0205616461` is text that looks like a number. Reading it as a number loses the leading zero, so in CSV files a column of ids becomes integers only if every value survives the round trip. An id such as `NA` is text, too: in a column of ids only an empty field is missing.


# %%
#| exports
def read(
    path: str | Path,  # .csv, .csv.gz or .parquet
    user: str = "user",
    item: str = "item",
    timestamp: str | None = None,
    position: str | None = None,
    name: str | None = None,  # default: the file's stem
) -> Interactions:
    "Interactions from CSV or Parquet; `FileNotFoundError`, `ValueError` for another kind of file, else as `from_frame`."
    path = Path(path).expanduser()
    if not path.is_file(): raise FileNotFoundError(f"no file {str(path)!r}: give the path of a CSV or Parquet file")
    import pyarrow

    try: table = read_table(path, [user, item])
    except (pyarrow.ArrowException, OSError) as e: raise ValueError(f"{path} cannot be read: {e}") from e
    return from_frame(table, user, item, timestamp, position, name or path.name.split(".")[0])


# %%
#| exports
def read_table(
    path: Path,  # .csv, .csv.gz or .parquet
    ids: list[str],  # columns of ids, read as text first
) -> Any:  # a pyarrow table
    "A table; `ValueError` unless the name ends in .parquet, .csv or .csv.gz."
    import pyarrow.csv
    import pyarrow.parquet

    if path.suffix == ".parquet": return pyarrow.parquet.read_table(path)
    if not path.name.endswith((".csv", ".csv.gz")): raise ValueError(f"{path.name!r}: expected a name ending in .parquet, .csv or .csv.gz")
    text = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(ids, pyarrow.string()), strings_can_be_null=False)
    table = pyarrow.csv.read_csv(path, convert_options=text)
    if twice := sorted({c for c in table.column_names if table.column_names.count(c) > 1}): raise ValueError(f"{path} has the column {twice[0]!r} twice")
    for name in set(ids) & set(table.column_names):
        table = table.set_column(table.column_names.index(name), name, integers_if_faithful(without_empty(table[name])))
    return table


# %%
#| exports
def without_empty(
    column: Any,  # pyarrow strings
) -> Any:  # the same, null where a text is empty
    "Empty texts as missing values."
    import pyarrow.compute as pc

    return pc.if_else(pc.equal(column, ""), None, column)


# %%
#| exports
def integers_if_faithful(
    column: Any,  # pyarrow strings
) -> Any:  # pyarrow integers, or the same strings
    "Integers where writing them out again gives the same text."
    import pyarrow as pa
    import pyarrow.compute as pc

    try: number = pc.cast(column, pa.int64())
    except pa.ArrowInvalid: return column
    return number if pc.all(pc.equal(pc.cast(number, pa.string()), column)).as_py() else column


# %%
import pyarrow as pa

# %%
[integers_if_faithful(pa.chunked_array([x])).type for x in (["12", "7"], ["12", "007"])]


# %% [markdown]
# ## Ties and repeats
#
# Amazon's times are dates. If the last two events of a user share a date, which of them is "the next item" is an accident of the file.


# %%
#| exports
class Ties(NamedTuple):
    "How much of the order the times leave open."

    last_two: float  # share of users whose last two events share a time
    events: float  # share of events that share a time with the event before


# %%
#| exports
def ties(
    data: Interactions,
) -> Ties | None:  # None where there are no times
    "Count ties in time within users."
    if data.times is None: return None
    same = np.append(False, data.times[1:] == data.times[:-1])
    same[data.sequences.offsets[:-1][data.sequences.lengths > 0]] = False
    last = same[data.sequences.offsets[1:][data.sequences.lengths > 1] - 1]
    return Ties(float(last.sum() / data.n_users), float(same.mean()))


# %%
ties(small)


# %% [markdown]
# One of three readers (Ann) ends on a tie.
#
# A target the user has chosen before is a *repeat*. It matters because many evaluations remove seen items from the ranking, which makes a repeat impossible to hit.


# %%
#| exports
@dataclass(frozen=True, eq=False)
class Examples:
    "What is asked of a model: given this history, which item comes next?"

    users: Int32[np.ndarray, " m"]  # row of `Interactions`
    histories: Sequences  # what the user chose before, in order
    targets: Int32[np.ndarray, " m"]  # 1 … n_items

    def __len__(self) -> int: return len(self.targets)


# %%
#| exports
def is_repeat(
    examples: Examples,
) -> Bool[np.ndarray, " m"]:
    "Has the user chosen the target before? It cannot be hit where seen items are removed from the ranking, unless it is kept in (chapter 32)."
    row = np.repeat(np.arange(len(examples)), examples.histories.lengths)
    seen = examples.histories.items == examples.targets[row]
    return np.bincount(row[seen], minlength=len(examples)) > 0


# %%
#| exports
def repeats(
    examples: Examples,
) -> int:  # of len(examples)
    "How many targets their user has chosen before."
    return int(is_repeat(examples).sum())


# %%
repeats(Examples(np.array([0, 1], np.int32), two, np.array([1, 4], np.int32)))

# %% [markdown]
# ## Splits
#
# A split says which events a model may learn from and which questions it is asked. Its **hash** is a fingerprint of exactly that: kind of split and its settings, users, number of items, every training sequence, every history and every target. Items enter it numbered
# in the order in which they appear, so the hash is the same whatever ids a copy of the data uses, on every machine.


# %%
#| exports
@dataclass(frozen=True, eq=False)
class Split:
    "Training sequences, validation and test examples, and the reports that belong beside a result."

    kind: str  # "leave_one_out" or "global_time"
    name: str
    n_items: int
    users: Int32[np.ndarray, " rows"]  # row of `Interactions` of each training sequence
    train: Sequences
    valid: Examples
    test: Examples
    ties: Ties | None = None
    dropped: int = 0  # users left out
    settings: dict = field(default_factory=dict)  # what defines the split, part of the hash
    hash: str = ""  # sha256, filled in by `with_hash`


# %%
#| exports
def split_hash(
    split: Split,
) -> str:  # 64 hexadecimal digits
    "Sha256 of the split's content, with items numbered as they appear."
    parts = [split.train.items, split.valid.histories.items, split.valid.targets, split.test.histories.items, split.test.targets]
    _, renumbered = first_appearance(np.concatenate(parts))
    head = f"bft_nb split 1|{split.kind}|{sorted(split.settings.items())}|{split.n_items}|{[len(p) for p in parts]}"
    digest = hashlib.sha256(head.encode())
    for array in (split.train.offsets, split.users, split.valid.users, split.valid.histories.offsets, split.test.users, split.test.histories.offsets, renumbered):
        digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return digest.hexdigest()


# %%
#| exports
def with_hash(
    split: Split,
) -> Split:
    "The split with its hash filled in."
    return replace(split, hash=split_hash(split))


# %% [markdown]
# ### Leave one out
#
# The last item of each user is the test target, the last but one the validation target, the rest is for training [@kang2018sasrec]. So a user needs at least three events.


# %%
#| exports
def users_with(
    data: Interactions,
    min_events: int,  # fewest events a user must have
    short: str,  # "error" or "drop": what to do with users who have fewer
) -> Int64[np.ndarray, " kept"]:  # rows of `data`
    "Users with enough events; `ValueError` naming how many have too few, unless they are to be dropped."
    if short not in ("error", "drop"): raise ValueError(f"short must be 'error' or 'drop', got {short!r}")
    kept = np.flatnonzero(data.sequences.lengths >= min_events)
    if (n := data.n_users - len(kept)) and short == "error":
        first = data.user_ids[np.flatnonzero(data.sequences.lengths < min_events)[0]].item()
        raise ValueError(f"{n} of {data.n_users} users have fewer than {min_events} events (first: {first!r}): drop them with short='drop'")
    if not len(kept): raise ValueError(f"no user has {min_events} or more events")
    return kept


# %%
#| exports
def leave_one_out(
    data: Interactions,
    min_events: int = 3,  # ≥ 3: one each for training, validation and test
    short: str = "error",  # users with fewer: "error" or "drop" (counted in `Split.dropped`)
) -> Split:
    "Last item test, last but one validation [@kang2018sasrec]; `ValueError` for users with too few events."
    if not isinstance(min_events, int | np.integer): raise TypeError(f"min_events must be a whole number, at least 3, got {min_events!r}")
    if min_events < 3: raise ValueError(f"min_events must be at least 3, got {min_events}")
    users = users_with(data, min_events, short)
    sequences = rows(data.timed, users)
    end, last = from_end(sequences), sequences.offsets[1:] - 1
    ids = users.astype(np.int32)
    train = take(sequences, end > 2)
    valid = Examples(ids, train, sequences.items[last - 1])
    test = Examples(ids, take(sequences, end > 1), sequences.items[last])
    return with_hash(Split("leave_one_out", data.name, data.n_items, ids, train, valid, test, ties(data), data.n_users - len(users)))


# %%
#| exports
def rows(
    sequences: Sequences,
    users: Int[np.ndarray, " kept"],  # rows to keep, ascending
) -> Sequences:
    "The sequences of some users."
    if len(users) == len(sequences): return sequences
    keep = np.isin(np.repeat(np.arange(len(sequences)), sequences.lengths), users)
    times = None if sequences.times is None else sequences.times[keep]
    return from_lengths(sequences.lengths[users], sequences.items[keep], times)


# %%
test_fail(lambda: leave_one_out(small), contains="1 of 3 users have fewer than 3 events (first: 'cid')")

# %%
split = leave_one_out(small, short="drop")
[(split.test.histories[n].tolist(), int(t)) for n, t in enumerate(split.test.targets)], split.dropped

# %% [markdown]
# Renaming ids leaves the hash as it is; a different order changes it:

# %%
renamed = from_frame(shop.replace({"A7": "zz"}), "reader", "book", timestamp="day")
other = from_frame(shop.iloc[::-1], "reader", "book", timestamp="day")
[leave_one_out(x, short="drop").hash[:12] for x in (small, renamed, other)]


# %% [markdown]
# ### The same world, seen less often
#
# A claim about sparse data needs one data set at several densities, all else equal. Removing users or items would change who is asked what. Removing *events* does not, as long as each user keeps the last two, which are the targets, and the one before them. Every event has its own random number, so a thinner set is contained in a thicker one.


# %%
#| exports
def thin(
    data: Interactions,
    keep: float,  # share of the earlier events that stay, 0 … 1
    seed: int = 0,
) -> Interactions:  # the same users, items and last three events
    "Drop events at random, never one of a user's last three; `ValueError` for a share outside 0 … 1."
    if not 0 <= keep <= 1: raise ValueError(f"keep must lie in 0 … 1, got {keep}")
    stay = (from_end(data.sequences) <= 3) | (np.random.default_rng(seed).random(data.n_interactions) < keep)
    return replace(data, sequences=take(data.sequences, stay), times=None if data.times is None else data.times[stay])


# %%
rng = np.random.default_rng(0)
whole = Interactions("ten events each", from_lengths(np.full(200, 10), rng.integers(1, 31, 2000)), np.arange(200), np.arange(30))
half, quarter = thin(whole, 0.5), thin(whole, 0.25)
whole.n_interactions, half.n_interactions, quarter.n_interactions

# %%
np.testing.assert_array_equal(leave_one_out(whole).test.targets, leave_one_out(quarter).test.targets)
np.testing.assert_array_equal(leave_one_out(whole).valid.targets, leave_one_out(quarter).valid.targets)
np.testing.assert_array_equal(thin(whole, 1.0).sequences.items, whole.sequences.items)
assert quarter.sequences.lengths.min() >= 3 and (quarter.sequences.lengths <= half.sequences.lengths).all()
test_fail(lambda: thin(whole, 1.5), contains="got 1.5")

# %% [markdown]
# ### Global time
#
# Leave-one-out lets a model learn from events that lie after some test targets. A split at two moments does not. Everything before the first moment is for training. A user's first event
# between the two is a validation target, the first event after the second a test target; the history of a target is all that came before it.


# %%
#| exports
def cut_times(
    data: Interactions,
    quantiles: tuple[float, float],  # shares of all events before validation and before test
) -> tuple[int, int]:  # moments, unit of `data.times`
    "The two moments of a global split; `ValueError` without times or for quantiles out of order."
    if data.times is None: raise ValueError(f"{data.name!r} has no times: a global split needs them")
    pair = isinstance(quantiles, tuple | list) and len(quantiles) == 2 and all(isinstance(q, float) for q in quantiles)
    if not pair or not 0 < quantiles[0] < quantiles[1] < 1: raise ValueError(f"quantiles must satisfy 0 < valid < test < 1, got {quantiles}")
    valid, test = (int(t) for t in np.quantile(data.times, quantiles, method="higher"))
    if valid >= test: raise ValueError(f"validation and test would start at the same time {test}: choose other quantiles than {quantiles}")
    return valid, test


# %%
#| exports
def next_after(
    data: Interactions,
    start: int,  # first moment of the window
    stop: int | None,  # first moment after it; None: open
) -> Examples:  # users with something before and something in the window
    "Each user's first event at or after `start` (and before `stop`), with everything before it."
    assert data.times is not None
    row = np.repeat(np.arange(data.n_users), data.sequences.lengths)
    before = np.bincount(row[data.times < start], minlength=data.n_users)
    target = data.sequences.offsets[:-1] + before
    has_next = (before > 0) & (before < data.sequences.lengths)
    inside = has_next & (data.times[np.where(has_next, target, 0)] < (np.inf if stop is None else stop))
    users = np.flatnonzero(inside)
    history = take(rows(data.timed, users), (data.times < start)[np.isin(row, users)])
    return Examples(users.astype(np.int32), history, data.sequences.items[target[users]])


# %%
#| exports
def global_time(
    data: Interactions,
    quantiles: tuple[float, float] = (0.8, 0.9),  # shares of all events before validation and before test
) -> Split:
    "Split at two moments; users without history or without a next event ask nothing. `ValueError` without times or where a part is empty."
    start, stop = cut_times(data, quantiles)
    past = take(data.timed, np.asarray(data.times) < start)
    users = np.flatnonzero(past.lengths > 0)
    valid, test = next_after(data, start, stop), next_after(data, stop, None)
    if not len(valid) or not len(test): raise ValueError(f"no user has events on both sides of {start} and {stop}: choose other quantiles than {quantiles}")
    settings = {"valid_from": start, "test_from": stop}
    return with_hash(Split("global_time", data.name, data.n_items, users.astype(np.int32), rows(past, users), valid, test, ties(data), data.n_users - len(users), settings))


# %%
by_time = global_time(small, (0.4, 0.7))
by_time.settings, [by_time.train[n].tolist() for n in range(len(by_time.train))], by_time.test.targets

# %% [markdown]
# ## Popularity, counted on train only
#
# How popular a target is must be counted without the target. Items are grouped into *strata*, cut at quantiles of their counts. Items with the same count always share a stratum, so a stratum can be empty; edges and sizes are therefore part of the report.


# %%
#| exports
def item_counts(
    split: Split,
) -> Int64[np.ndarray, " padded"]:  # row 0 (padding) is 0
    "How often each item occurs in the training sequences."
    return np.bincount(split.train.items, minlength=split.n_items + 1).astype(np.int64)


# %%
item_counts(split)


# %%
#| exports
class Strata(NamedTuple):
    "Items grouped by popularity, rarest first."

    stratum: Int8[np.ndarray, " padded"]  # of each item, 0 … n − 1; −1 for padding
    edges: Int64[np.ndarray, " cuts"]  # largest count of each stratum but the last
    sizes: Int64[np.ndarray, " n"]  # items in each stratum


# %%
#| exports
def popularity_strata(
    counts: Int[np.ndarray, " padded"],  # from `item_counts`
    n: int = 4,  # strata
) -> Strata:
    "Cut items at quantiles of their counts, equal counts together; `ValueError` unless 1 ≤ n ≤ 127 and there are items, `TypeError` unless counts are whole."
    if n < 1: raise ValueError(f"n must be at least 1, got {n}")
    if n > 127: raise ValueError(f"n must be at most 127, got {n}")
    if counts.dtype.kind not in "iu": raise TypeError(f"counts must be whole numbers, got {counts.dtype}")
    if len(counts) < 2: raise ValueError("counts must hold padding and at least one item, got none")
    edges = np.quantile(counts[1:], np.arange(1, n) / n, method="lower").astype(np.int64)
    stratum = np.searchsorted(edges, counts, side="left").astype(np.int8)
    stratum[0] = -1
    return Strata(stratum, edges, np.bincount(stratum[1:], minlength=n))


# %%
popularity_strata(np.array([0, 1, 1, 1, 2, 3, 4, 9, 9]), n=4)

# %% [markdown]
# ## The data sets of the book
#
# Each entry names the official source, its terms, the statistics the field uses, and how long a history models usually see. Nothing of the data is part of this repository.


# %%
#| exports
@dataclass(frozen=True)
class Dataset:
    "A data set: where it comes from, on which terms, and what it must contain."

    name: str
    title: str  # official name
    page: str  # the publisher's page
    terms: str  # licence, as the publisher states it
    users: int
    items: int
    interactions: int
    repeats: int = 0  # events whose user has chosen the item before
    max_length: int = 50  # how much of a history models usually see, stated with results
    files: tuple[Source, ...] = ()  # official files; empty: the user's own copy is needed
    own_copy: str = ""  # file name of the user's own copy
    reader: str = ""  # function of `bft_nb.formats`
    note: str = ""


# %% [markdown]
# GroupLens publishes an MD5 sum beside each archive. For the Amazon files no sum is published, so there the exact statistics are the check.


# %%
#| exports
_AMAZON14 = "https://snap.stanford.edu/data/amazon/productGraph/categoryFiles/reviews_{}_5.json.gz"
_AMAZON18 = "https://mcauleylab.ucsd.edu/public_datasets/data/amazon_v2/"
_MOVIELENS = "https://files.grouplens.org/datasets/movielens/"
_MOVIELENS_TERMS = "GroupLens usage licence: research use, no redistribution, no commercial use without permission"
_AMAZON_TERMS = "no licence stated; offered by its authors for research, to be cited; not redistributed here"


# %%
#| exports
def amazon_2014(
    name: str,  # registry name
    category: str,  # as in the file name
    users: int,
    items: int,
    interactions: int,
) -> Dataset:
    "A 5-core category of Amazon product data 2014 [@mcauley2015image; @he2016ups], all stars, as used by S3-Rec [@zhou2020s3rec]."
    title = f"Amazon product data 2014, {category.replace('_', ' ')}, 5-core"
    page = "https://cseweb.ucsd.edu/~jmcauley/datasets/amazon/links.html"
    return Dataset(name, title, page, _AMAZON_TERMS, users, items, interactions, files=(Source(_AMAZON14.format(category)),), reader="amazon_2014")


# %%
#| exports
_ENTRIES = (
    amazon_2014("beauty", "Beauty", 22_363, 12_101, 198_502),
    amazon_2014("sports", "Sports_and_Outdoors", 35_598, 18_357, 296_337),
    amazon_2014("toys", "Toys_and_Games", 19_412, 11_924, 167_597),
    Dataset("instruments", "Amazon review data 2018, Musical Instruments, 5-core of titled items", "https://nijianmo.github.io/amazon/index.html", _AMAZON_TERMS, 24_772, 9_922, 206_153,
            files=(Source(_AMAZON18 + "categoryFilesSmall/Musical_Instruments.csv"), Source(_AMAZON18 + "metaFiles2/meta_Musical_Instruments.json.gz")), reader="amazon_2018",
            note="recipe of LC-Rec [@zheng2024lcrec; @ni2019justifying]; its order within ties is not reproducible from the source"),
    Dataset("yelp", "Yelp Open Dataset, reviews of 2019, 5-core", "https://business.yelp.com/data/resources/open-dataset/", "Yelp Dataset Terms of Use, accepted by the user at download: academic, non-commercial, no redistribution",
            30_431, 20_033, 316_354, repeats=11_830, own_copy="yelp_academic_dataset_review.json", reader="yelp_2019", note="recipe of S3-Rec [@zhou2020s3rec]"),
    Dataset("ml1m", "MovieLens 1M", "https://grouplens.org/datasets/movielens/1m/", _MOVIELENS_TERMS, 6_040, 3_706, 1_000_209, max_length=200,
            files=(Source(_MOVIELENS + "ml-1m.zip", md5="c4d9eecfca2ab87c1945afe126590906"),), reader="movielens_1m", note="[@harper2015movielens]"),
    Dataset("ml100k", "MovieLens 100K", "https://grouplens.org/datasets/movielens/100k/", _MOVIELENS_TERMS, 943, 1_682, 100_000,
            files=(Source(_MOVIELENS + "ml-100k.zip", md5="0e33842e24a9c977be4e0107933c0723"),), reader="movielens_100k", note="[@harper2015movielens]"),
    Dataset("synthetic", "The synthetic world of chapter 29, default arguments", "https://bft-nb.github.io/bft_nb/world.html", "generated", 600, 200, 12_000, repeats=2_489),
)  # fmt: skip
REGISTRY: dict[str, Dataset] = {entry.name: entry for entry in _ENTRIES}


# %%
pd.DataFrame([(d.name, d.title, d.users, d.items, d.interactions, d.max_length) for d in REGISTRY.values()], columns=["name", "title", "users", "items", "interactions", "length"])


# %%
#| exports
def dataset(
    name: str,
) -> Dataset:
    "The registry's entry; `ValueError` naming all entries and the closest."
    if isinstance(name, str) and name in REGISTRY: return REGISTRY[name]
    close = difflib.get_close_matches(str(name), REGISTRY, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown data set {name!r}{hint} (known: {', '.join(REGISTRY)})")


# %%
test_fail(lambda: dataset("beuaty"), contains="did you mean 'beauty'? (known: beauty, sports")


# %% [markdown]
# ### Checked on every load


# %%
#| exports
def count_repeats(
    data: Interactions,
) -> int:  # events whose user has chosen the item before
    "How many events repeat an item within their user."
    row = np.repeat(np.arange(data.n_users), data.sequences.lengths)
    return data.n_interactions - len(np.unique(row * (data.n_items + 1) + data.sequences.items))


# %%
#| exports
def check_statistics(
    data: Interactions,
    entry: Dataset,
    origin: str,  # where the data came from, for the message
) -> None:
    "Raise `ValueError` naming found and expected numbers unless users, items, interactions and repeats are the published ones."
    found = (data.n_users, data.n_items, data.n_interactions, count_repeats(data))
    wanted = (entry.users, entry.items, entry.interactions, entry.repeats)
    if found != wanted:
        raise ValueError(f"{entry.name!r} from {origin}: found (users, items, interactions, repeats) {found}, the published data set has {wanted}")


# %% [markdown]
# ### Where data are looked for
#
# First the folder in `BFT_DATA`, then the cache of an earlier download, then the publisher. Whatever is found is checked; nothing is guessed or replaced.


# %%
#| exports
def find(
    entry: Dataset,
    folder: Path | None,  # `BFT_DATA` or the cache
) -> Path | None:  # a Parquet file, or None
    "rec/NAME_ts.parquet (the version with timestamps, where there is one), NAME_ts.parquet, rec/NAME.parquet or NAME.parquet."
    if folder is None: return None
    places = (folder / sub / f"{entry.name}{suffix}.parquet" for suffix in ("_ts", "") for sub in ("rec", "."))
    return next((p for p in places if p.is_file()), None)


# %%
#| exports
def load_parquet(
    path: Path,
    entry: Dataset,
) -> Interactions:
    "A prepared file: columns user, item, and position or timestamp or both; `ValueError` if it is damaged or is not the published data set."
    try: table = read_table(path, ["user", "item"])
    except (OSError, ValueError) as e: raise ValueError(f"{path.name!r} cannot be read as Parquet: {e}") from e
    order = {c: c for c in ("timestamp", "position") if c in table.column_names}
    if not order: raise ValueError(f"{path.name!r} has neither a column 'position' nor 'timestamp' (it has {table.column_names})")
    data = from_frame(table, name=entry.name, **order)
    check_statistics(data, entry, str(path))
    return data


# %%
#| exports
def official_files(
    entry: Dataset,
    progress: bool,  # show a progress bar
) -> list[Path]:
    "The publisher's files: from `BFT_DATA`, else the cache, else downloaded; `DownloadError` naming both ways where that fails."
    names = [s.filename for s in entry.files] or [entry.own_copy]
    if (folder := data_dir()) and all((folder / n).is_file() for n in names): return [folder / n for n in names]
    ways = f"put {entry.name}.parquet or {' and '.join(names)} into a folder and set BFT_DATA to it"
    if not entry.files:
        raise DownloadError(f"{entry.title} may only be had from its publisher ({entry.page}), after accepting the terms: {ways}")
    try: return [fetch(source, cache_dir() / "official", progress) for source in entry.files]
    except DownloadError as e: raise DownloadError(f"{e}\nEither run again with access to {entry.page}, or {ways}") from e


# %%
#| exports
def forget(
    files: list[Path],
) -> None:
    "Remove downloaded files, so that the next run fetches them again; the user's own copies stay."
    for path in files:
        if path.parent == cache_dir() / "official": path.unlink(missing_ok=True)


# %% [markdown]
# Where a publisher states neither length nor checksum, a download that was cut off shows only when it is read or, if cut at the end of a line, when its events are counted. Such a file must not stay in the cache.


# %%
#| exports
def read_official(
    entry: Dataset,
    files: list[Path],  # from `official_files`
) -> tuple[Any, Interactions]:  # a pyarrow table with columns user, item, position, timestamp; the same, read
    "The publisher's files; `DownloadError` naming them where they cannot be read."
    import pyarrow

    try:
        table = pyarrow.table(formats.by_user(getattr(formats, entry.reader)(files)))
        return table, from_frame(table, timestamp="timestamp", position="position", name=entry.name)
    except (ValueError, TypeError, LookupError) as e:
        raise DownloadError(f"{', '.join(map(str, files))}: not as {entry.page} describes it ({type(e).__name__}: {e})") from e


# %%
#| exports
def prepare(
    entry: Dataset,
    progress: bool = True,  # show a progress bar
) -> Interactions:
    "Read the official files, check the statistics, and keep the result in the cache; downloads that turn out wrong are removed, so that the next run fetches them again."
    import pyarrow.parquet

    files = official_files(entry, progress)
    try:
        table, data = read_official(entry, files)
        check_statistics(data, entry, ", ".join(map(str, files)))
    except (DownloadError, ValueError):
        forget(files)
        raise
    with written(cache_dir() / "rec" / f"{entry.name}.parquet") as part: pyarrow.parquet.write_table(table, part, compression="zstd")
    return data


# %%
#| exports
def load(
    name: str,  # of `REGISTRY`
    progress: bool = True,  # show a progress bar while downloading
) -> Interactions:
    """A data set of the registry, its statistics verified.

    Raises `ValueError` for an unknown name or wrong statistics, `bft_nb.download.DownloadError` where the data cannot be had, naming both ways to provide them.
    """
    entry = dataset(name)
    if name == "synthetic": return synthetic(entry)
    for folder in (data_dir(), cache_dir()):
        if path := find(entry, folder): return load_parquet(path, entry)
    return prepare(entry, progress)


# %% [markdown]
# ### The synthetic world, as interactions
#
# All items keep their number, even one that never occurs, so that row $i$ of the world's truth is row $i$ of a model's embedding.


# %%
#| exports
def from_world(
    world: World,
    name: str = "synthetic",
) -> Interactions:
    "A world's events; time is the number of the event."
    users, events = world.items.shape
    sequences = from_lengths(np.full(users, events), world.items.ravel())
    times = np.tile(np.arange(events), users)
    return Interactions(name, sequences, np.arange(1, users + 1), np.arange(1, world.n_items + 1), times)


# %%
#| exports
def synthetic(
    entry: Dataset,
) -> Interactions:
    "The world of chapter 29 with its default arguments; `ValueError` if it is not the one this library was released with."
    data = from_world(make_world(), entry.name)
    check_statistics(data, entry, "make_world()")
    return data


# %%
data = load("synthetic")
data.n_users, data.n_items, data.n_interactions, round(data.density, 3)

# %% [markdown]
# ## The protocol beside each number
#
# Results can be compared only if they agree in this row:


# %%
#| exports
@dataclass(frozen=True)
class Protocol:
    "What a result depends on, in one row."

    name: str
    users: int
    items: int
    interactions: int
    density: float
    mean_length: float
    ties: float | None  # share of users whose last two events share a time
    asked: int  # test targets
    repeats: int  # those among them that the user has chosen before
    dropped: int  # users left out
    split: str
    hash: str

    def __str__(self) -> str:
        cells = {k: f"{v:.4g}" if isinstance(v, float) else "–" if v is None else f"{v:,}" if isinstance(v, int) else v for k, v in vars(self).items()}
        return "| " + " | ".join(cells) + " |\n|" + "---|" * len(cells) + "\n| " + " | ".join(cells.values()) + " |"

    def _repr_markdown_(self) -> str: return str(self)


# %%
#| exports
def describe(
    data: Interactions | str,  # or a name of the registry
    split: Split | None = None,  # default: leave one out
) -> Protocol:  # prints as a table row
    "The protocol of a data set and its split; raises what `load` and `leave_one_out` raise."
    if isinstance(data, str): data = load(data)
    split = split or leave_one_out(data)
    order = split.ties.last_two if split.ties else None
    return Protocol(
        data.name, data.n_users, data.n_items, data.n_interactions, data.density, float(data.sequences.lengths.mean()),
        order, len(split.test.targets), repeats(split.test), split.dropped, split.kind, split.hash[:16],
    )  # fmt: skip


# %%
describe("synthetic")

# %% [markdown]
# There are many repeats here because users return to clusters of ten items. Results on this world are therefore ranked over all items, seen ones included.
#
# ## What the popularity strata look like
#
# Edges and sizes in the synthetic world, and in @fig-strata the counts behind them (Q0: the rarest):

# %%
split = leave_one_out(data)
counts = item_counts(split)
strata = popularity_strata(counts)
strata.edges, strata.sizes

# %%
#| label: fig-strata
#| fig-cap: "A quarter of the items, the most popular, receives far more than a quarter of the training events."
#| code-fold: true
fig, ax = plt.subplots()
ordered = np.sort(counts[1:])[::-1]
ax.plot(np.arange(1, len(ordered) + 1), ordered, color=COLOUR["observation"])
for edge in np.cumsum(strata.sizes[::-1])[:-1]: ax.axvline(edge + 0.5, color=COLOUR["prior"], linestyle=":")
for n, (edge, size) in enumerate(zip(np.cumsum(strata.sizes[::-1]), strata.sizes[::-1], strict=True)):
    ax.text(edge - size / 2, ordered[0], f"Q{len(strata.sizes) - 1 - n}", ha="center", color=COLOUR["prior"])
ax.set(xlabel="rank of the item", ylabel="training events", yscale="log")
plt.show()

# %% [markdown]
# ## Assumptions, and where they break
#
# - File order is meaningful. Where an Amazon file is sorted by product, ties in time are ordered by product, not by purchase.
# - Leave-one-out targets lie at different moments for different users, so a model may have learned from the future of others. `global_time` is the check.
# - The hash covers the split, not the model's cut to `max_length`, which belongs in the result's parameters.
#
# ## Summary
#
# - Every table becomes `Interactions`: sequences of items numbered from 1, the owner's ids, times where known.
# - `load` looks in `BFT_DATA`, then in the cache, then at the publisher, and verifies the exact statistics.
# - A `Split` carries its hash, its ties and what was dropped; popularity is counted on train only.
#
# ## Exercises
#
# **1.** In the shop, which targets of Ann would change if the file were sorted by book, descending?
#
# <details><summary>Answer</summary>
#
# Both: `A7` and `D9` share a day, so the file decides; they change places as validation and test target.

# %%
resorted = from_frame(shop.sort_values("book", ascending=False), "reader", "book", timestamp="day")
ann = list(resorted.user_ids).index("ann")
resorted.item_ids[resorted.sequences[ann][-2:] - 1].tolist()

# %% [markdown]
# </details>
