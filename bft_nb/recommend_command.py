"""`bft recommend`: a CSV or Parquet file of interactions in, recommendations out."""

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bft_nb.download import check_writable, written

SUFFIXES = (".csv", ".parquet")  # of the file that comes out
COLUMNS = {"user": "user", "item": "item", "timestamp": None, "position": None}  # where neither the command nor a model says another
SEPARATORS = {";": "';'", "\t": "a tab", "|": "'|'"}  # that people use instead of commas
TRAINING = {"backbone": "backbone", "plain": "bft", "max_length": "max_length", "epochs": "max_epochs", "refit": "refit", "seed": "seed", "time_buckets": "time_buckets"}  # option -> argument of `Recommender`; `--keep-seen` is one of the training and of the recommendation


def arguments(p: argparse.ArgumentParser) -> None:
    "Options of `bft recommend`; importing this module loads nothing heavy."
    p.add_argument("interactions", help="CSV (.csv, .csv.gz) or Parquet: one row per interaction. With --model: histories to recommend for")
    p.add_argument("-o", "--out", required=True, metavar="FILE", help="recommendations: a name ending in .csv or .parquet")
    p.add_argument("--user", metavar="COLUMN", help="column of users' ids (default: user; with --model: as it was trained)")
    p.add_argument("--item", metavar="COLUMN", help="column of items' ids (default: item; with --model: as it was trained)")
    p.add_argument("--timestamp", metavar="COLUMN", help="column to order by (default: order of the file; with --model: as it was trained, '' for the order of the file)")
    p.add_argument("--position", metavar="COLUMN", help="column to order by within equal times (default: none; with --model: as it was trained, '' for none)")
    p.add_argument("-k", type=int, default=10, help="recommendations per user (default: 10)")
    p.add_argument("--histories", metavar="FILE", help="recommend for the users of this file instead of those of the interactions")
    p.add_argument("--candidates", metavar="FILE", help="recommend only items of this file, CSV or Parquet with the column of items' ids")
    p.add_argument("--keep-seen", action=argparse.BooleanOptionalAction, help="may items a user has seen be recommended again? (default: no; with --model: as it was trained)")
    p.add_argument("--unknown", choices=("error", "skip"), default="error", help="items of histories and candidates that were not trained on: skip leaves them out and says how many (default: error)")
    p.add_argument("--model", metavar="FILE", help="use this saved model, train nothing")
    p.add_argument("--save", metavar="FILE", help="keep the trained model in this file")
    training = p.add_argument_group("training", "not with --model")
    training.add_argument("--backbone", help="a backbone of chapter 31 (default: sasrec)")
    training.add_argument("--plain", action="store_true", default=None, help="the plain backbone, without filtering layers")
    training.add_argument("--max-length", type=int, help="most recent items of a history that the model reads (default: 50)")
    training.add_argument("--time-buckets", type=int, metavar="N", help="read the times of --timestamp too, by N intervals (128, say): --backbone hstu alone can (default: their order)")
    training.add_argument("--epochs", type=int, help="so many, of which the best is kept (default: 30, bert4rec 60)")
    training.add_argument("--refit", action="store_true", default=None, help="train once more on everything, the newest events included")
    training.add_argument("--seed", type=int, help="(default: 0)")
    p.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    p.add_argument("--quiet", action="store_true", help="no progress bars, no report")


def run(a: argparse.Namespace) -> int:
    "Train or load, recommend, write; raises `ValueError`, `TypeError` or `OSError` for what cannot be done, before training where possible."
    out = place("--out", a.out)
    check(a, out)
    made = loaded(a) if a.model else None
    a = argparse.Namespace(**vars(a) | columns(a, COLUMNS if made is None else made.columns))
    table = read(a.interactions, a)
    candidates = read(a.candidates, a) if a.candidates else None
    histories = read(a.histories, a) if a.histories else table if made is not None else None
    if candidates is not None and a.item not in candidates.column_names:
        raise ValueError(f"--candidates {a.candidates!r} has no column {a.item!r}, it has {candidates.column_names}: items' ids must be in the column of --item{separated(candidates)}")
    for path, used in ((a.interactions, table if made is None or not a.histories else None), (a.histories, histories)):
        if path and used is not None:
            check_columns(path, used, a)
    if made is None:
        made = train(a, table, histories, candidates)
    else:
        made.columns = {name: getattr(a, name) for name in COLUMNS}
        if not a.quiet:
            print(f"bft recommend: {said(made.columns)}", file=sys.stderr)
    frame = recommend(made, histories, candidates, a)
    write(frame, out)
    if not a.quiet:
        print(f"{made.report['protocol']}\nvalidation: {made.report['validation']}", file=sys.stderr)
    print(out)
    return 0


# ---- what is looked at before anything is read -------------------------------------------------------------------


def place(option: str, path: str) -> Path:
    "The path that is meant, ~ included; `ValueError` for a ~ of nobody."
    try:
        return Path(path).expanduser()
    except RuntimeError as e:
        raise ValueError(f"{option} {path!r}: {e}") from e


def same_file(a: Path, b: Path) -> bool:
    "Do two paths lead to one file, by links of either kind or by name?"
    if os.path.realpath(a) == os.path.realpath(b):
        return True
    return a.exists() and b.exists() and a.samefile(b)


def check_apart(a: argparse.Namespace) -> None:
    "`ValueError` naming both where a file that is written is one that is read, or is written twice."
    read = {"the interactions": a.interactions, "--histories": a.histories, "--candidates": a.candidates, "--model": a.model}
    written = {"--out": a.out, "--save": a.save}
    files = {name: place(name, path) for name, path in (read | written).items() if path}
    for i, new in enumerate(name for name in written if name in files):
        for other in [name for name in files if name in read] + ["--out"] * i:
            if same_file(files[new], files[other]):
                raise ValueError(f"{new} {str(files[new])!r} is the same file as {other}, which would be lost: give it another name")


def check(a: argparse.Namespace, out: Path) -> None:
    "Refuse what would fail only after the training, or destroy what is there."
    from bft_nb.core import check_seed

    if out.suffix not in SUFFIXES:
        raise ValueError(f"--out {a.out!r}: the name must end in {' or '.join(SUFFIXES)}")
    if a.model and a.save:
        raise ValueError("--model uses a saved model and --save keeps a trained one: give one of them")
    if given := [f"--{name.replace('_', '-')}" for name in TRAINING if getattr(a, name) is not None]:
        if a.model:
            raise ValueError(f"--model uses a saved model and trains nothing: leave out {', '.join(given)}")
    if a.seed is not None:
        check_seed("--seed", a.seed)
    check_apart(a)
    for path in (out, *([place("--save", a.save)] if a.save else [])):
        check_writable(path)


# ---- reading ---------------------------------------------------------------------------------------------------


def loaded(a: argparse.Namespace) -> Any:
    "The saved model; raises as `Recommender.load`."
    from bft_nb.recommender import Recommender

    return Recommender.load(place("--model", a.model), a.device)


def columns(a: argparse.Namespace, known: Mapping[str, Any]) -> dict[str, Any]:
    "Names of the columns: those of the command, else those that are known; an empty one to order by is none."
    named = {name: known[name] if getattr(a, name) is None else getattr(a, name) for name in COLUMNS}
    return {name: None if value == "" and COLUMNS[name] is None else value for name, value in named.items()}


def said(names: Mapping[str, Any]) -> str:
    "Which columns are read, and by which histories are ordered."
    order = ", ".join(repr(names[name]) for name in ("timestamp", "position") if names[name])
    return f"users in column {names['user']!r}, items in {names['item']!r}, ordered by {order or 'their place in the file'}"


def read(path: str, a: argparse.Namespace) -> Any:
    "A table with ids as they are written; `FileNotFoundError`, or `ValueError` naming a file that cannot be read."
    import pyarrow as pa

    from bft_nb.interactions import read_table

    file = place("the file", path)
    if not file.is_file():
        raise FileNotFoundError(f"no file {path!r}: give the path of a CSV or Parquet file")
    try:
        return read_table(file, [a.user, a.item])
    except (pa.ArrowException, OSError, UnicodeError) as e:
        why = next(iter(str(e).strip().splitlines()), type(e).__name__)
        raise ValueError(f"{path} cannot be read: {hint(file) or why}") from e


def hint(file: Path) -> str:
    "Why a file cannot be read, where that can be said better than Arrow does; else nothing."
    import gzip

    import pyarrow as pa
    import pyarrow.parquet

    if file.suffix == ".parquet":
        try:
            names = pa.parquet.read_schema(file).names
        except (pa.ArrowException, OSError):
            return ""
        return f"it has the column {twice[0]!r} twice" if (twice := sorted({n for n in names if names.count(n) > 1})) else ""
    try:
        with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as f:
            for n, line in enumerate(f):
                if n == 0 and b"\0" in line:
                    return "it is not text in UTF-8 (UTF-16, perhaps): save it as UTF-8"
                line.decode()
    except UnicodeDecodeError as e:
        return f"it is not text in UTF-8 (it holds the byte {e.object[e.start]:#x}; Latin-1, perhaps): save it as UTF-8"
    except (OSError, EOFError):
        return ""
    return ""


def check_columns(path: str, table: Any, a: argparse.Namespace) -> None:
    "`ValueError` naming the file, the columns it lacks and those it has, or that it has no row."
    found = table.column_names
    if missing := [name for name in dict.fromkeys(getattr(a, c) for c in COLUMNS) if name is not None and name not in found]:
        saved = ". With --model, columns have the names of its training unless --user, --item, --timestamp and --position say others; --timestamp '' takes the order of the file" if a.model else ""
        raise ValueError(f"{path}: missing columns {missing}: the file has {found}{separated(table) or saved}")
    if not len(table):
        raise ValueError(f"{path} has no row: at least one interaction is needed")


def separated(table: Any) -> str:
    "A guess at another separator, for a table of a single column; else nothing."
    (name, *more) = table.column_names or [""]
    mark = None if more else next((m for m in SEPARATORS if m in name), None)
    return f". Separated by {SEPARATORS[mark]}? This reads commas" if mark else ""


# ---- items the model knows ---------------------------------------------------------------------------------------


def catalogue(table: Any, item: str) -> Any:
    "Own ids of a table's items; None where `fit` will refuse them."
    import narwhals as nw
    import pyarrow as pa

    from bft_nb.interactions import id_column

    try:
        return id_column(nw.from_native(pa.table({item: table[item].unique().drop_null()}), eager_only=True), item)
    except (TypeError, ValueError):
        return None


def whole(text: str) -> bool:
    "Is this an integer as it is written out again, of 64 bits?"
    try:
        return str(int(text)) == text and -(2**63) <= int(text) < 2**63
    except ValueError:
        return False


def as_known(table: Any, known: Any, what: str, a: argparse.Namespace) -> Any:
    """A table with its items as the model has them, texts or integers: a file whose ids all look like numbers was read as numbers, and one in which a single id does not, as texts.

    Texts that are no integers are unknown to a model of integers: `ValueError` naming the first, or under --unknown skip left out with an `UnknownItems` warning.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from bft_nb.recommender import UnknownItems

    column = table[a.item]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if known.dtype.kind == "U":
        return with_items(table, a.item, column.cast(pa.string())) if pa.types.is_integer(column.type) else table
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return table
    odd = [text for text in column.unique().to_pylist() if text is not None and not whole(text)]
    keep = pc.invert(pc.is_in(column, value_set=pa.array(odd, column.type)))
    if odd:
        problem = f"{what}: {len(table) - pc.sum(keep).as_py()} of {len(table)} rows have items the model does not know, which are no integers as its own are (first: {odd[0]!r})"
        if a.unknown == "error":
            raise ValueError(f"{problem}: give --unknown skip to leave them out")
        warnings.warn(f"left out: {problem}", UnknownItems, stacklevel=2)
    return with_items(table.filter(keep), a.item, column.filter(keep).cast(pa.int64()))


def with_items(table: Any, item: str, column: Any) -> Any:
    "The table with another column of items."
    return table.set_column(table.column_names.index(item), item, column)


def known_histories(table: Any, known: Any, a: argparse.Namespace) -> Any:
    "Histories with their items as the model has them; `ValueError` where none of a table's is known, and what `as_known` raises."
    found = as_known(table, known, "histories", a)
    if len(table) and not len(found):
        raise ValueError("no history has an item that the model knows")
    if left := len(table[a.user].unique()) - len(found[a.user].unique()):
        warnings.warn(f"left out: {left} users without an item that is an integer", stacklevel=2)
    return found


def ids_of(table: Any, known: Any, a: argparse.Namespace) -> list[Any]:
    "Own ids of the candidates."
    return as_known(table, known, "candidates", a)[a.item].to_pylist()


@contextlib.contextmanager
def naming(path: str | None) -> Iterator[None]:
    "Say which file an error is about."
    try:
        yield
    except (TypeError, ValueError) as e:
        raise (TypeError if isinstance(e, TypeError) else ValueError)(f"{path}: {e}") from e


# ---- from the table to the file ------------------------------------------------------------------------------------


def check_ahead(settings: Mapping[str, Any], known: Any, histories: Any, candidates: Any, a: argparse.Namespace) -> None:
    "Refuse histories and candidates before a model is trained as they would be refused after it."
    from bft_nb.recommender import competitors, given_histories

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # told when something is left out
        with naming(a.candidates):
            competitors(None if candidates is None else ids_of(candidates, known, a), None, known, a.unknown)
        with naming(a.histories):
            if histories is not None:
                given_histories(known_histories(histories, known, a), {name: getattr(a, name) for name in COLUMNS}, settings, known, a.unknown)


def train(a: argparse.Namespace, table: Any, histories: Any, candidates: Any) -> Any:
    "A recommender fitted to the table, saved if asked; what it is to recommend for and from is looked at before."
    from bft_nb.recommender import Recommender

    given: dict[str, Any] = {name: getattr(a, option) for option, name in TRAINING.items() if getattr(a, option) is not None}
    if "bft" in given:
        given["bft"] = False  # --plain
    made = Recommender(**given, filter_seen=not a.keep_seen, device=a.device)
    if (known := catalogue(table, a.item)) is not None and len(known):
        if not 1 <= a.k <= len(known):
            raise ValueError(f"k must be between 1 and the number of items, {len(known)}, got {a.k}")
        check_ahead(made.settings, known, histories, candidates, a)
    made.fit(table, a.user, a.item, a.timestamp, a.position, progress=not a.quiet)
    if a.save:
        made.save(place("--save", a.save))
    return made


def recommend(made: Any, histories: Any, candidates: Any, a: argparse.Namespace) -> Any:
    "The frame of recommendations; what was left out is told on stderr."
    filter_seen = None if a.keep_seen is None else not a.keep_seen
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asked = None if histories is None else known_histories(histories, made.item_ids, a)
        among = None if candidates is None else ids_of(candidates, made.item_ids, a)
        frame = made.recommend(asked, a.k, candidates=among, filter_seen=filter_seen, unknown=a.unknown, library="pyarrow", progress=not a.quiet)
    for w in caught:
        if issubclass(w.category, UserWarning):
            print(f"bft recommend: {w.message}", file=sys.stderr)
    return frame


def write(frame: Any, out: Path) -> None:
    "CSV or Parquet, whole or not at all."
    import pyarrow.csv
    import pyarrow.parquet

    try:
        with written(out) as part:
            if out.suffix == ".csv":
                pyarrow.csv.write_csv(frame, part)
            else:
                pyarrow.parquet.write_table(frame, part)
    except OSError as e:
        raise OSError(e.errno, f"could not write {str(out)!r}: {e.strerror or e}") from e
