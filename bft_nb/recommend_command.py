"""`bft recommend`: a CSV or Parquet file of interactions in, recommendations out."""

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

from bft_nb.download import check_writable, written

SUFFIXES = (".csv", ".parquet")  # of the file that comes out
TRAINING = {"backbone": "backbone", "plain": "bft", "max_length": "max_length", "epochs": "max_epochs", "refit": "refit", "seed": "seed", "time_buckets": "time_buckets"}  # option -> argument of `Recommender`; `--keep-seen` is one of the training and of the recommendation


def arguments(p: argparse.ArgumentParser) -> None:
    "Options of `bft recommend`; importing this module loads nothing heavy."
    p.add_argument("interactions", help="CSV (.csv, .csv.gz) or Parquet: one row per interaction. With --model: histories to recommend for")
    p.add_argument("-o", "--out", required=True, metavar="FILE", help="recommendations: a name ending in .csv or .parquet")
    p.add_argument("--user", default="user", metavar="COLUMN", help="column of users' ids (default: user)")
    p.add_argument("--item", default="item", metavar="COLUMN", help="column of items' ids (default: item)")
    p.add_argument("--timestamp", metavar="COLUMN", help="column to order by (default: order of the file)")
    p.add_argument("--position", metavar="COLUMN", help="column to order by within equal times")
    p.add_argument("-k", type=int, default=10, help="recommendations per user (default: 10)")
    p.add_argument("--histories", metavar="FILE", help="recommend for the users of this file instead of those of the interactions")
    p.add_argument("--candidates", metavar="FILE", help="recommend only items of this file, CSV or Parquet with the column of items' ids")
    p.add_argument("--keep-seen", action=argparse.BooleanOptionalAction, help="may items a user has seen be recommended again? (default: no; with --model: as it was trained)")
    p.add_argument("--unknown", choices=("error", "skip"), default="error", help="items of histories and candidates that were not trained on (default: error)")
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
    out = Path(a.out).expanduser()
    check(a, out)
    from bft_nb.recommender import Recommender

    table = read(a.interactions, a.user, a.item)
    candidates = read(a.candidates, a.user, a.item) if a.candidates else None
    if candidates is not None and a.item not in candidates.column_names:
        raise ValueError(f"--candidates {a.candidates!r} has no column {a.item!r}, it has {candidates.column_names}: items' ids must be in the column of --item")
    if a.model:
        made = Recommender.load(a.model, a.device)
        made.columns = {"user": a.user, "item": a.item, "timestamp": a.timestamp, "position": a.position}
    else:
        check_candidates(candidates, table, a)
        made = train(a, table)
    histories = read(a.histories, a.user, a.item) if a.histories else table if a.model else None
    frame = recommend(made, None if histories is None else as_known(histories, a.item, made.item_ids), candidates, a)
    write(frame, out)
    if not a.quiet:
        print(f"{made.report['protocol']}\nvalidation: {made.report['validation']}", file=sys.stderr)
    print(out)
    return 0


def check(a: argparse.Namespace, out: Path) -> None:
    "Refuse what would fail only after the training."
    if out.suffix not in SUFFIXES:
        raise ValueError(f"--out {a.out!r}: the name must end in {' or '.join(SUFFIXES)}")
    if a.model and a.save:
        raise ValueError("--model uses a saved model and --save keeps a trained one: give one of them")
    if given := [f"--{name.replace('_', '-')}" for name in TRAINING if getattr(a, name) is not None]:
        if a.model:
            raise ValueError(f"--model uses a saved model and trains nothing: leave out {', '.join(given)}")
    for path in (out, *([Path(a.save).expanduser()] if a.save else [])):
        check_writable(path)


def read(path: str, user: str, item: str) -> Any:
    "A table with ids as they are written; `FileNotFoundError`, or `ValueError` for a file that cannot be read."
    from bft_nb.interactions import read_table

    place = Path(path).expanduser()
    if not place.is_file():
        raise FileNotFoundError(f"no file {path!r}: give the path of a CSV or Parquet file")
    return read_table(place, [user, item])


def check_candidates(candidates: Any, table: Any, a: argparse.Namespace) -> None:
    "Refuse candidates that the model would not know before it is trained; a table that `fit` refuses is left to it."
    import pyarrow as pa

    from bft_nb.recommender import UnknownItems, competitors, own_ids

    if candidates is None or a.item not in table.column_names or not (pa.types.is_integer(t := table[a.item].type) or pa.types.is_string(t) or pa.types.is_large_string(t)):
        return
    items = own_ids(table[a.item].unique().drop_null().to_pylist(), "items")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnknownItems)  # told when they are left out
        competitors(ids_of(candidates, a.item, items), None, items, a.unknown)


def ids_of(table: Any, item: str, known: Any) -> list[Any]:
    "Own ids of a table's items."
    return as_known(table, item, known)[item].to_pylist()


def train(a: argparse.Namespace, table: Any) -> Any:
    "A recommender fitted to the table, saved if asked."
    from bft_nb.recommender import Recommender

    given: dict[str, Any] = {name: getattr(a, option) for option, name in TRAINING.items() if getattr(a, option) is not None}
    if "bft" in given:
        given["bft"] = False  # --plain
    made = Recommender(**given, filter_seen=not a.keep_seen, device=a.device)
    if not 1 <= a.k <= (items := len(table[a.item].unique()) if a.item in table.column_names else a.k):
        raise ValueError(f"k must be between 1 and the number of items, {items}, got {a.k}")
    made.fit(table, a.user, a.item, a.timestamp, a.position, progress=not a.quiet)
    if a.save:
        made.save(a.save)
    return made


def as_known(table: Any, item: str, known: Any) -> Any:
    "Item ids as text if the model knows texts: a file whose ids all look like numbers was read as numbers."
    import pyarrow as pa

    if item in table.column_names and known.dtype.kind == "U" and pa.types.is_integer(table[item].type):
        return table.set_column(table.column_names.index(item), item, table[item].cast(pa.string()))
    return table


def recommend(made: Any, histories: Any, candidates: Any, a: argparse.Namespace) -> Any:
    "The frame of recommendations; what was left out is told on stderr."
    among = None if candidates is None else ids_of(candidates, a.item, made.item_ids)
    filter_seen = None if a.keep_seen is None else not a.keep_seen
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frame = made.recommend(histories, a.k, candidates=among, filter_seen=filter_seen, unknown=a.unknown, library="pyarrow", progress=not a.quiet)
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
