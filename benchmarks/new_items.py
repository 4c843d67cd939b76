"""What is a new item worth that nobody has trained on? Appends the answer to data/results/new_items.csv.

    python benchmarks/new_items.py ml100k --seed 0

A random share of the items is new: none of their events is trained on. The users are split into two halves at random. From the *informants*
we know everything but their last event, new items included; this, and nothing else, says what a new item is like. Of each *asked* user
everything from the last new item on is hidden, and that item is the question. So nobody who is asked has told, and nothing that is asked
about, nor anything later of that user, is trained on. A recommender with its own defaults is fitted to the old items of everybody; then
`add_items` lets it know the new ones. Where does it place the new item, among all items and among the new? How often are new items in
anybody's list? What does it cost the informants whose last item, hidden as well, is an old one, and is their confidence still true?
And does a new item in a history tell the model anything?

Each way to start a new item is a run of its own:

    none        nothing added: what the old items lose is compared with this
    mean        no `like`: the mean of all items
    like        `like` with so many items, as `add_items` places it
    average     the same items, at the plain mean of their embeddings
    popularity  no model: by number of informants
    again       fitted again, with the informants' events of new items

Places that tie are averaged over. The page that reads the rows is chapter 33.
"""

import argparse
import copy
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from recommender import log_loss, named

from bft_nb.interactions import Examples, Interactions, Sequences, from_end, from_lengths, load
from bft_nb.recommender import Recommender, chunks, judge, numbers_of, score_chunk, top_lists
from bft_nb.report import results_folder
from bft_nb.results import append_rows, has_rows, run_rows

K = 10  # length of the lists
STARTS = [("none", 0), ("popularity", 0), ("mean", 0), ("like", 1), ("like", 5), ("like", 20), ("average", 5), ("average", 20)]  # and how many items a new one is like
RECENT = 5  # a history tells of a new item if one is among so many of its last
Found = dict[str, tuple[float, int]]  # metric -> value, what it is a mean of


class Plan(NamedTuple):
    "What is trained on, what is known of the new items, and what is asked."

    train: pd.DataFrame  # events (user, item) of old items, in order
    told: pd.DataFrame  # events of informants, old and new items
    asked_new: pd.Series  # user -> new item that is hidden
    asked_old: pd.Series  # user -> old item that is hidden
    new: np.ndarray  # own ids of the new items, in random order


def plan(data: Interactions, share: float, seed: int) -> Plan:
    "Draw the new items and the informants, and hide what is asked."
    rng = np.random.default_rng(seed)
    new = rng.permutation(data.item_ids)[: round(share * data.n_items)]
    events = pd.DataFrame({"user": np.repeat(data.user_ids, data.sequences.lengths), "item": data.item_ids[data.sequences.items - 1], "end": from_end(data.sequences)})
    informs, is_new = events["user"].isin(rng.permutation(data.user_ids)[: data.n_users // 2]), events["item"].isin(new)
    after_old = (~is_new).groupby(events["user"]).cumsum() > ~is_new  # is there an old item before?
    asked = events[~informs & is_new & after_old].groupby("user")["end"].min()
    cut = events["user"].map(asked).fillna(0).where(~informs, 1)  # `end` of the first event that is hidden
    known, question = events["end"] > cut, (events["end"] == cut) & after_old
    ask = lambda which: events[question & which].set_index("user")["item"]
    pick = lambda which: events.loc[which, ["user", "item"]]
    return Plan(pick(known & ~is_new), pick(known & informs), ask(~informs), ask(informs & ~is_new), new)


def resemblance(told: pd.DataFrame, new: np.ndarray, old: np.ndarray, most: int) -> dict[Any, list[Any]]:
    "Of each new item that an informant chose: the old items whose users resemble its own most (cosine of the two sets)."
    known, users_of = told[told["item"].isin(old)], told.groupby("item")["user"].nunique()
    found = {}
    for item, users in told[told["item"].isin(new)].groupby("item")["user"]:
        together = known.loc[known["user"].isin(users), "item"].value_counts()
        cosine = (together / np.sqrt(users_of[together.index])).sort_values(ascending=False, kind="stable")
        if len(cosine):
            found[item] = cosine.index[:most].tolist()
    return found


def grown(made: Recommender, start: str, likes: int, p: Plan) -> Recommender:
    "The recommender with the new items; the one that is given stays as it is."
    like = resemblance(p.told, p.new, made.item_ids, likes) if likes else {}
    bigger = copy.copy(made).add_items(p.new.tolist(), like)
    if start == "average":
        old, weights = made.model.item_weights().detach(), bigger.model.item_embedding.weight
        with torch.no_grad():
            for item, others in like.items():
                weights[numbers_of(np.array([item]), bigger.item_ids)] = old[numbers_of(np.array(others), made.item_ids)].mean(0)
    return bigger


def tau_of_likes(bigger: Recommender, like: Mapping[Any, list[Any]]) -> Recommender:
    "Each new item with the geometric mean τ of those it is like, in place of the least there is."
    other = copy.copy(bigger)
    other.model = copy.deepcopy(bigger.model)
    log_tau = other.model.precision.log_tau.weight
    with torch.no_grad():
        for item, others in like.items():
            log_tau[numbers_of(np.array([item]), bigger.item_ids)] = log_tau[numbers_of(np.array(others), bigger.item_ids)].mean()
    return other


def histories(made: Recommender, known: pd.DataFrame) -> tuple[pd.Index, Sequences]:
    "Users, in the order of the events, and their items in the model's numbers."
    told = known[known["item"].isin(made.item_ids)]
    lengths = told.groupby("user", sort=False).size()
    return lengths.index, from_lengths(lengths.to_numpy(), numbers_of(told["item"].to_numpy(), made.item_ids))


def examples(made: Recommender, known: pd.DataFrame, asked: pd.Series) -> Examples:
    "Histories and hidden items in the model's numbers; users whose item the model does not know, or who have no history, are left out."
    users, read = histories(made, known[known["user"].isin(asked.index[asked.isin(made.item_ids)])])
    return Examples(np.arange(len(users), dtype=np.int32), read, numbers_of(asked[users].to_numpy(), made.item_ids).astype(np.int32))


def places(made: Recommender, asked: Examples, allowed: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    "How many competitors are ahead of each hidden item, and how many are level with it."
    ahead, level = np.zeros(len(asked)), np.zeros(len(asked))
    for users in chunks(asked.histories, made.model.n_items):
        chunk, targets = score_chunk(made.model, asked.histories, users, True, allowed), torch.from_numpy(asked.targets[users].astype(np.int64))[:, None]
        own = chunk.scores.gather(1, targets)
        lead, rounding = chunk.candidates.scatter(1, targets, -torch.inf) - own, 1e-5 * (1 + own.abs())
        ahead[users], level[users] = (lead > rounding).sum(1).numpy(), (lead.abs() <= rounding).sum(1).numpy()
    return ahead, level


def by_count(count: pd.Series, asked: pd.Series, seen: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    "The same for a ranking by a count that is one for all users; `seen`: user -> items out of competition."
    found = []
    for user, item in asked.items():
        left = count.drop([*seen.get(user, []), item], errors="ignore")
        found.append(((left > count[item]).sum(), (left == count[item]).sum()))
    return tuple(np.array(found, float).T)


def expected(ahead: np.ndarray, level: np.ndarray, missing: int = 0) -> tuple[np.ndarray, np.ndarray]:
    "HR and NDCG of each user if those that are level come in random order, and zero for each of the missing."
    gain = np.concatenate([[0], np.cumsum(1 / np.log2(np.arange(K) + 2))])
    until = lambda place: gain[np.minimum(place, K).astype(int)]
    values = np.clip((K - ahead) / (level + 1), 0, 1), (until(ahead + level + 1) - until(ahead)) / (level + 1)
    return tuple(np.concatenate([v, np.zeros(missing)]) for v in values)


def averages(place: tuple[np.ndarray, np.ndarray], name: str = "", missing: int = 0) -> Found:
    "Mean and spread over users of HR and NDCG."
    values = dict(zip((f"hr@{K}{name}", f"ndcg@{K}{name}"), expected(*place, missing)))
    return {key: (float(v.mean()), len(v)) for key, v in values.items()} | {f"{key}.sd": (float(v.std(ddof=1)), len(v)) for key, v in values.items()}


def of_new(made: Recommender, p: Plan) -> Found:
    "The hidden new items among all, and among the new ones."
    asked, allowed = examples(made, p.train, p.asked_new), np.r_[False, np.isin(made.item_ids, p.new)]
    missing = len(p.asked_new) - len(asked)
    return averages(places(made, asked), ".all", missing) | averages(places(made, asked, allowed), ".new", missing)


def changes(later: tuple[np.ndarray, np.ndarray], earlier: tuple[np.ndarray, np.ndarray], name: str) -> Found:
    "Mean and spread over users of later minus earlier HR and NDCG."
    found: Found = {}
    for metric, a, b in zip((f"hr@{K}", f"ndcg@{K}"), later, earlier, strict=True):
        found |= {f"{metric}.{name}": (float((a - b).mean()), len(a)), f"{metric}.{name}.sd": (float((a - b).std(ddof=1)), len(a))}
    return found


def of_old(made: Recommender, p: Plan, before: Recommender | None = None) -> Found:
    "The hidden old items, what was said of them, and what the new ones changed, if it is known where they were before."
    asked = examples(made, p.train, p.asked_old)
    known = judge(made.model, asked, True)
    said, hits = made.confidence(known.evidence, K), known.ranks <= K
    n = len(hits)
    found = {"confidence": said.mean(), "log_loss": log_loss(said, hits), "sharpness": known.evidence[:, 0].mean()}
    place = places(made, asked)
    change = {} if before is None else changes(expected(*place), expected(*places(before, examples(before, p.train, p.asked_old))), "change")
    return averages(place) | change | {name: (float(value), n) for name, value in found.items()}


def of_everybody(made: Recommender, p: Plan) -> Found:
    "New items in the lists of all users: their share, how many of them are in any, and the share of lists that hold the most frequent one."
    lists = top_lists(made.model, histories(made, p.train)[1], K, True).items
    new = np.flatnonzero(np.r_[False, np.isin(made.item_ids, p.new)])
    times = np.bincount(lists.ravel(), minlength=len(made.item_ids) + 1)[new]
    return {
        "share": (float(times.sum() / (lists > 0).sum()), len(lists)), "listed": (float((times > 0).sum() / len(p.new)), len(p.new)),
        "most": (float(times.max(initial=0) / len(lists)), len(lists)), "share.events": (float(p.told["item"].isin(p.new).mean()), len(p.told)),
    }  # fmt: skip


def of_reading(made: Recommender, likes: int, p: Plan) -> Found:
    "The hidden old items of informants who chose a new one lately: histories without new items, with them, and with them at the τ of those they are like."
    lately = p.told.groupby("user").tail(RECENT)
    asked = p.asked_old[p.asked_old.index.isin(lately.loc[lately["item"].isin(p.new), "user"]) & p.asked_old.index.isin(p.train["user"])]
    other = tau_of_likes(made, resemblance(p.told, p.new, p.train["item"].unique(), likes))
    ways = {"without": (made, p.train), "with": (made, p.told), "like": (other, p.told)}
    found: Found = {}
    values = {}
    for name, (which, known) in ways.items():
        place = places(which, examples(which, known, asked))
        found |= averages(place, f".{name}")
        values[name] = expected(*place)
    return found | changes(values["with"], values["without"], "with-without") | changes(values["like"], values["with"], "like-with")


def of_counts(p: Plan) -> dict[str, Found]:
    "Popularity among the informants, in place of a model."
    count = p.told.groupby("item")["user"].nunique().reindex(pd.Index([*p.train["item"].unique(), *p.new]).unique()).fillna(0)
    asked = p.asked_new
    seen = p.train[p.train["user"].isin(asked.index)].groupby("user")["item"].unique()
    found = averages(by_count(count, asked, seen), ".all") | averages(by_count(count[p.new], asked, pd.Series(dtype=object)), ".new")
    return {"new": found | {"chance.new": (K / len(p.new), len(asked)), "told": (float((count[asked] > 0).mean()), len(asked))}}


def measured(made: Recommender, start: str, likes: int, p: Plan) -> dict[str, Found]:
    "Everything about one way to start."
    if start == "none":
        return {"old": of_old(made, p)}
    if start == "popularity":
        return of_counts(p)
    bigger, before = (made, None) if start == "again" else (grown(made, start, likes, p), made)
    found = {"new": of_new(bigger, p), "old": of_old(bigger, p, before), "everybody": of_everybody(bigger, p)}
    return found | ({"reading": of_reading(bigger, likes, p)} if start == "like" and bigger.settings["bft"] else {})


def runs(name: str, settings: Mapping[str, Any], share: float, seed: int, starts: list[tuple[str, int]]) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
    "Ways to start that are not stored, and what names them."
    for start, likes in starts:
        run = dict(exp="new_items", dataset=name, model="sasrec", params={**settings, "share": share, "start": start, "likes": likes, "k": K}, seed=seed)
        if not has_rows(results_folder() / "new_items.csv", run):
            yield (start, likes), run


def measure(name: str, bft: bool, seed: int, share: float, again: bool) -> None:
    "One draw of new items, fitted once (twice with `again`), and all ways to start them."
    p, fresh = plan(load(name), share, seed), lambda: Recommender(bft=bft, seed=seed, device="cpu")
    informants = p.train["user"].isin(p.told["user"])
    for frame, starts in ((p.train, STARTS), (pd.concat([p.train[~informants], p.told]), [("again", 0)] if again else [])):
        missing = list(runs(name, named(fresh()), share, seed, starts))
        if not missing:
            continue
        began = time.perf_counter()
        made = fresh().fit(frame, progress=True)
        for (start, likes), run in missing:
            found = measured(made, start, likes, p)
            append_rows(results_folder() / "new_items.csv", run_rows(run, found, seconds=round(time.perf_counter() - began, 1), device="cpu"))
            print(start, likes, {f"{part}.{metric}": round(value, 4) for part, values in found.items() for metric, (value, _) in values.items() if not metric.endswith("sd")})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", nargs="?", default="ml100k")
    parser.add_argument("--plain", action="store_true", help="the plain backbone")
    parser.add_argument("--seed", type=int, default=0, help="of the draw and of the training")
    parser.add_argument("--share", type=float, default=0.05, help="of the items that is new")
    parser.add_argument("--again", action="store_true", help="also fit again with the informants' events of new items")
    a = parser.parse_args()
    torch.set_num_threads(1)
    measure(a.dataset, not a.plain, a.seed, a.share, a.again)
