"""What a run of the language studies may be given: looked at by their pages before a model is loaded, and by `bft run … --dry-run`.

What can only be known with the data and the tokenizer at hand (do enough questions fit?) is looked at before the training.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from bft_nb.core import check_count, check_option, check_positive
from bft_nb.models import TINY, configuration
from bft_nb.results import model_name

__all__ = ["ANSWER", "ASKED", "PASSAGES", "RETRIEVED", "ROWS", "Retrieval", "check_enough", "check_length", "check_settings", "passage_settings"]

ANSWER = 16  # tokens of an answer, its end included
ROWS = 50  # questions that are asked at once
CORRUPTIONS = ("uniform", "swap")
PASSAGES: dict[str, Any] = {"ks": [0, 2, 5], "k_train": 2, "words": 12, "gold": "first"}  # of `rag_distractors`: numbers of distractors at the end, most of them in training, words of a passage (0: all), place of the gold one


class Retrieval(NamedTuple):
    "How large a set of questions with distractors is."

    questions: int
    distractors: int  # of each question


ASKED = {"lookup": 400, "squad_v1.1_train_part": 10_570, "squad_v1.1_train": 10_570}  # data to learn from -> how many questions there are to be asked
RETRIEVED = {"lookup": Retrieval(400, 5), "nq_open_bm25_distractors": Retrieval(2652, 20)}


def check_most(name: str, value: Any, low: int, most: int, of: str) -> None:
    "Raise `TypeError` unless `value` is a whole number, `ValueError` unless it lies in `low` … `most`; `of` says what the limit is."
    check_count(name, value, low)
    if value > most:
        raise ValueError(f"{name} must be at most {most}, {of}, got {value}")


def check_training(p: Mapping[str, Any]) -> None:
    "Raise `ValueError` or `TypeError` for what no model can be tuned with."
    from bft_nb.finetune import ADAPTERS, DTYPES, METHODS

    for name, allowed in (("method", METHODS), ("adapter", ADAPTERS), ("dtype", DTYPES)):
        check_option(name, p[name], allowed)
    for name, low in (("steps", 1), ("batch_size", 1), ("seed", 0), ("max_length", ANSWER + 1)):
        check_count(name, p[name], low)
    check_positive("lr", p["lr"])
    check_positive("precision_lr", p["precision_lr"], zero=True)


def check_noisy(p: Mapping[str, Any]) -> None:
    "The same for what only `squad_noise` has."
    from bft_nb.qa import check_share

    check_option("data", p["data"], ASKED)
    check_share("noise", p["noise"])
    check_option("corruption", p["corruption"], CORRUPTIONS)
    check_most("n_eval", p["n_eval"], 1, ASKED[p["data"]], "the questions there are to be asked")


def passage_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    "`PASSAGES`, some of it exchanged; `ValueError` for a name that is not in there."
    for name in given:
        check_option("a name in passages", name, PASSAGES)
    return PASSAGES | dict(given)


def check_crowded(p: Mapping[str, Any]) -> None:
    "The same for what only `rag_distractors` has."
    from bft_nb.finetune import METHODS, PARTS
    from bft_nb.qa import GOLD

    check_option("data", p["data"], RETRIEVED)
    data, passages = RETRIEVED[p["data"]], passage_settings(p["passages"])
    ks = passages["ks"]
    if not isinstance(ks, list):
        raise TypeError(f"ks must be a list of numbers of distractors, got {ks!r}")
    for name, k in (("k_train", passages["k_train"]), *(("each of ks", k) for k in ks)):
        check_most(name, k, 0, data.distractors, f"the distractors of a question of {p['data']}")
    if len(ks) < 2 or sorted(set(ks)) != ks:
        raise ValueError(f"ks must be two numbers of distractors at least, in ascending order, got {ks}")
    check_count("words", passages["words"], 0)
    check_option("gold", passages["gold"], GOLD)
    check_most("n_eval", p["n_eval"], 0, data.questions // 2, f"half of the questions of {p['data']}")
    for part in p["without"]:
        check_option("each of without", part, PARTS)
    if p["without"] and METHODS[p["method"]].added != "bft":
        raise ValueError(f"without must be empty for {p['method']}, which is no filter, got {list(p['without'])}")


def check_length(max_length: int, config: Any) -> None:
    "Raise `ValueError` for a `max_length` beyond what a model can take."
    most = getattr(config, "max_position_embeddings", max_length)
    if max_length > most:
        raise ValueError(f"max_length must be at most {most}, the tokens that the model can take, got {max_length}")


def check_settings(
    p: Mapping[str, Any],  # all parameters of the page
) -> Any | None:  # the model's configuration, None if it is not at hand
    "Raise `ValueError` or `TypeError` for a setting that the run would refuse, and what `bft_nb.models.configuration` does for a model that is none."
    check_training(p)
    if "noise" in p:
        check_noisy(p)
    if "passages" in p:
        check_crowded(p)
    model_name(p["model"])
    if p["store"] and (p["model"] == TINY or p["data"] == "lookup"):
        raise ValueError("rows of the tiny model and of made-up questions are not stored: choose model and data, or store=false")
    config = configuration(p["model"])
    if config is not None:
        check_length(p["max_length"], config)
    return config


def check_enough(
    found: Mapping[str, tuple[int, int]],  # what for -> how many questions fit, how many are needed
    max_length: int,
) -> None:
    "Raise `ValueError` where too few questions fit."
    for what, (there, needed) in found.items():
        if there < needed:
            raise ValueError(f"of the questions {what}, {there} fit into max_length={max_length} with their answers, {needed} are needed")
