"""Read the official files of each data set into columns of own ids and times, in the file's order."""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from bft_nb.download import DownloadError, member


class Event(NamedTuple):
    "One interaction with the publisher's own ids; time in seconds since 1970."

    user: str | int
    item: str | int
    timestamp: int


def k_core(events: Sequence[Event], k: int = 5) -> list[Event]:
    "Drop users and items with fewer than `k` events, again and again until none is left below."
    events = list(events)
    while True:
        users, items = Counter(e.user for e in events), Counter(e.item for e in events)
        kept = [e for e in events if users[e.user] >= k and items[e.item] >= k]
        if len(kept) == len(events): return kept
        events = kept


def distinct(events: Iterable[Event]) -> list[Event]:
    "Keep the first of several events of one user with one item."
    first: dict[tuple, Event] = {}
    for e in events: first.setdefault((e.user, e.item), e)
    return list(first.values())


def json_lines(path: Path) -> Iterator[dict]:
    "The objects of a JSON-lines file, gzipped or not; `DownloadError` where it is damaged."
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as f:
            for line in f:
                if line.strip(): yield json.loads(line)
    except (OSError, EOFError, zlib.error, ValueError) as e:
        if isinstance(e, FileNotFoundError): raise
        raise DownloadError(f"{path.name} is damaged: {e}") from e


def amazon_2014(paths: Sequence[Path]) -> list[Event]:
    "Amazon product data 2014, `reviews_CATEGORY_5.json.gz`: all stars, iterative 5-core."
    return k_core([Event(r["reviewerID"], r["asin"], int(r["unixReviewTime"])) for r in json_lines(paths[0])])


def amazon_2018(paths: Sequence[Path]) -> list[Event]:
    "Amazon review data 2018, `CATEGORY.csv` (item, user, stars, time) and its metadata: titled items, distinct pairs by time, 5-core."
    ratings, meta = paths
    titled = {m["asin"] for m in json_lines(meta) if m.get("title")}
    rows = (line.rstrip("\n").split(",") for line in open(ratings, encoding="utf-8"))
    events = [Event(user, item, int(time)) for item, user, _, time in rows if item in titled]
    return k_core(distinct(sorted(events, key=lambda e: e.timestamp)))


def _ratings(archive: Path, name: str, separator: str) -> list[Event]:
    with member(archive, name) as f: rows = [line.decode("latin-1").rstrip("\r\n").split(separator) for line in f]
    return sorted((Event(int(user), int(item), int(time)) for user, item, _, time in rows), key=lambda e: e.user)


def movielens_1m(paths: Sequence[Path]) -> list[Event]:
    "MovieLens 1M, `ml-1m.zip`: every rating of ratings.dat, users by id, each in file order."
    return _ratings(paths[0], "ml-1m/ratings.dat", "::")


def movielens_100k(paths: Sequence[Path]) -> list[Event]:
    "MovieLens 100K, `ml-100k.zip`: every rating of u.data, users by id, each in file order."
    return _ratings(paths[0], "ml-100k/u.data", "\t")


def yelp_2019(paths: Sequence[Path]) -> list[Event]:
    "Yelp Open Dataset, `yelp_academic_dataset_review.json`: reviews of 2019, all stars, iterative 5-core; repeats stay."
    rows = (r for r in json_lines(paths[0]) if "2019-01-01 00:00:00" <= r["date"] <= "2019-12-31 00:00:00")
    return k_core([Event(r["user_id"], r["business_id"], seconds(r["date"])) for r in rows])


def seconds(date: str) -> int:
    "Seconds since 1970 of YYYY-MM-DD hh:mm:ss, read as UTC."
    return int(datetime.strptime(date, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp())


def by_user(events: Sequence[Event]) -> dict[str, list]:
    "Columns with each user's events together, users in order of first appearance, times ascending and ties in file order."
    first = {u: n for n, u in reversed(list(enumerate(e.user for e in events)))}
    ordered = sorted(events, key=lambda e: (first[e.user], e.timestamp))
    position = [n for _, group in groupby(ordered, key=lambda e: e.user) for n, _ in enumerate(group)]
    return {
        "user": [e.user for e in ordered],
        "item": [e.item for e in ordered],
        "position": position,
        "timestamp": [e.timestamp for e in ordered],
    }
