# ---
# jupyter:
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Questions and answers
#
# > A language model learns to answer from a text, with labels that are partly wrong: data, labels, noise, losses and scores.

# %%
#| default_exp qa

# %% [markdown]
# **So far** layers and recommenders. **Now** the task of the paper's language experiments: read a context, answer a question about it. A filter should shine where observations are unreliable, so two kinds of noise are made here:
# wrong *labels* during training (a share of the answer's tokens is replaced), and distracting *passages* in the context.
# **Why** a chapter of its own: whether a method "resists noise" depends on where exactly the noise goes, which tokens count in the loss, and how an answer is scored. All methods must share these to the letter.

# %%
#| exports
import difflib
import random
import re
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bft_nb import qa_formats
from bft_nb.core import check_count, check_option, check_positive
from bft_nb.download import DownloadError, Source, cache_dir, data_dir, fetch

# %%
import matplotlib.pyplot as plt
import pandas as pd
import sympy as sp
from fastcore.test import test_fail

from bft_nb.figures import COLOUR, use_style
from bft_nb.models import load_model
from bft_nb.ranking import bootstrap_mean
from bft_nb.symbolic import assert_same, prove

# %%
use_style()

# %% [markdown]
# ## The smallest case
#
# One sentence, one question. The form is SQuAD's [@rajpurkar2016squad]: a context, a question, and accepted answers which are spans of the context.


# %%
#| exports
@dataclass(frozen=True)
class Question:
    "A question about a context, with the answers that are accepted."

    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    start: int = -1  # where the first accepted answer begins in the context; −1: wherever it occurs first
    title: str = ""
    told: str | None = None  # what training is told instead of the truth, where labels are noisy

    @property
    def target(self) -> str:
        "The first accepted answer that occurs in the context."
        return next((a for a in self.answers if a in self.context), self.answers[0])

    @property
    def span(self) -> tuple[int, int]:
        "Where the target stands in the context; `ValueError` if it does not."
        start = self.start if self.start >= 0 else self.context.find(self.target)
        if self.context[start : start + len(self.target)] != self.target or start < 0:
            raise ValueError(f"question {self.id!r}: the answer {self.target!r} is not in its context")
        return start, start + len(self.target)


# %%
ada = Question("ada", "How many keys does Ada keep?", "Ada keeps 7 red keys in Rome.", ("7", "7 red keys"))
ada.target, ada.span


# %% [markdown]
# What cannot be learnt from is refused, with the question's id:


# %%
#| exports
def check_asked(q: Question) -> None:
    "Raise `ValueError` for an empty question or context."
    for name, text in (("question", q.question), ("context", q.context)):
        if not text.strip(): raise ValueError(f"question {q.id!r}: the {name} is empty")


# %%
#| exports
def check_question(q: Question) -> None:
    "Raise `ValueError` for an empty question, context or answer, and where no accepted answer is in the context."
    check_asked(q)
    if not q.answers or not all(a.strip() for a in q.answers): raise ValueError(f"question {q.id!r}: answers must be one text at least, none of them empty, got {q.answers!r}")
    if q.told is not None and not q.told.strip(): raise ValueError(f"question {q.id!r}: told must be a text or None, got {q.told!r}")
    q.span  # noqa: B018 - raises where the answer is not in the context


# %%
test_fail(lambda: check_question(replace(ada, context="")), contains="question 'ada': the context is empty")
test_fail(lambda: check_question(replace(ada, answers=("8",))), contains="the answer '8' is not in its context")


# %% [markdown]
# ## A task in small
#
# Real data are not part of this repository and a real model does not learn in seconds. So the book has a small task of its own, made by a generator: people keep things in places, and five kinds of question are asked about one of them. The vocabulary of all texts together is some fifty words.


# %%
#| exports
_PEOPLE = ("Ada", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Ida")
_THINGS = ("keys", "cups", "hats", "maps", "pens", "coins")
_COLOURS = ("red", "blue", "green", "black", "white", "grey")
_PLACES = ("Rome", "Oslo", "Bern", "Lima", "Cairo", "Delhi")


# %%
#| exports
def lookup(
    n: int = 600,  # how many questions
    facts: int = 1,  # sentences of the context, at most 6
    seed: int = 0,
) -> list[Question]:  # the first m are the same whatever n ≥ m is
    "Questions about who keeps how many of which things where: embedded, deterministic; `ValueError` for sizes out of range."
    check_count("n", n)
    check_count("facts", facts)
    if facts > len(_THINGS): raise ValueError(f"facts must be at most {len(_THINGS)}, the number of things, got {facts}")
    rng = random.Random(seed)
    return [_lookup_question(i, facts, rng) for i in range(n)]


# %%
#| exports
def _lookup_question(i: int, facts: int, rng: random.Random) -> Question:
    who, what = rng.sample(_PEOPLE, facts), rng.sample(_THINGS, facts)
    rest = [(str(rng.randint(2, 9)), rng.choice(_COLOURS), rng.choice(_PLACES)) for _ in range(facts)]
    context = " ".join(f"{p} keeps {n} {c} {t} in {place}." for p, t, (n, c, place) in zip(who, what, rest))
    p, t, (n, c, place) = rng.choice(list(zip(who, what, rest)))
    question, answer = rng.choice([
        (f"Who keeps the {t}?", p), (f"How many {t} does {p} keep?", n), (f"Which colour are the {t}?", c),
        (f"Where are the {t}?", place), (f"What does {p} keep?", f"{n} {c} {t}"),
    ])  # fmt: skip
    start = context.find(answer, context.find(f"{p} keeps"))
    return Question(f"lookup-{i}", question, context, (answer,), start)


# %%
[(q.context, q.question, q.target) for q in lookup(3)]

# %% [markdown]
# With one sentence, the kind of the question tells which word to copy. With several (`facts=2` …), the model must first find the right sentence, which takes a circuit of two attention layers and, for a small model, far longer to learn.
#
# ## Real data
#
# The sources come with checksums and sizes, as in chapter 30; nothing of them is part of this repository. SQuAD's publisher states no checksum: the MD5 here is the one that torchtext and ParlAI pin. *SQuADShifts* asks SQuAD's questions of other texts [@miller2020squadshifts]; the NQ-Open files of *Lost in the Middle* put one *gold* passage, which holds the answer, among retrieved ones [@kwiatkowski2019nq; @liu2024lost].


# %%
#| exports
@dataclass(frozen=True)
class QASet:
    "A question-answering data set: where it comes from, on which terms, how large it is."

    name: str  # and NAME.parquet in `BFT_DATA`
    title: str
    page: str  # the publisher's
    terms: str
    questions: int
    contexts: int | None = None  # distinct ones, where they are known
    source: Source | None = None  # official file; None: the user's own copy is needed
    reader: str = "squad_json"  # function of `bft_nb.qa_formats` for the official file


# %%
#| exports
_SQUAD = "https://rajpurkar.github.io/SQuAD-explorer/"
_SHIFTS = "https://raw.githubusercontent.com/modestyachts/squadshifts-website/master/datasets/"
_LITM = "https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/main/qa_data/"
_NQ_TERMS = "CC BY-SA 3.0 (NQ-Open), MIT (Lost in the Middle)"


# %%
#| exports
def _litm(name: str, title: str, file: str, contexts: int | None = None) -> QASet:
    page = "https://github.com/nelson-liu/lost-in-the-middle"
    return QASet(name, f"NQ-Open, {title} (Lost in the Middle)", page, _NQ_TERMS, 2_655, contexts, Source(_LITM + file), "litm_jsonl")


# %%
#| exports
_SETS = (
    QASet("squad_v1.1_train", "SQuAD v1.1, train", _SQUAD, "CC BY-SA 4.0", 87_599, None, Source(_SQUAD + "dataset/train-v1.1.json", md5="981b29407e0affa3b1b156f72073b945")),
    QASet("squad_v1.1_dev", "SQuAD v1.1, dev", _SQUAD, "CC BY-SA 4.0", 10_570, 2_067, Source(_SQUAD + "dataset/dev-v1.1.json", md5="3e85deb501d4e538b6bc56f786231552")),
    QASet("squad_v1.1_train_part", "SQuAD v1.1, 44 articles of train", _SQUAD, "CC BY-SA 4.0", 11_877, 2_429),
    QASet("squadshifts_new_wiki", "SQuADShifts, new Wikipedia", "https://modestyachts.github.io/squadshifts-website/", "none stated", 7_938, 1_581, Source(_SHIFTS + "new_wiki_v1.0.json")),
    QASet("squadshifts_amazon_reviews", "SQuADShifts, Amazon reviews", "https://modestyachts.github.io/squadshifts-website/", "none stated", 9_885, 2_050, Source(_SHIFTS + "amazon_reviews_v1.0.json")),
    _litm("nq_open_oracle_litm", "gold passage alone", "nq-open-oracle.jsonl.gz"),
    *(_litm(f"nq_open_20_gold_at_{n}", f"20 passages, gold at {n}", f"20_total_documents/nq-open-20_total_documents_gold_at_{n}.jsonl.gz") for n in (0, 9, 19)),
)  # fmt: skip
QA_SETS: dict[str, QASet] = {s.name: s for s in _SETS}


# %%
pd.DataFrame([(s.name, s.title, s.questions, s.terms) for s in QA_SETS.values()], columns=["name", "title", "questions", "terms"])


# %%
#| exports
def qa_set(
    name: str,
) -> QASet:
    "The registry's entry; `ValueError` naming all entries and the closest."
    if name in QA_SETS: return QA_SETS[name]
    close = difflib.get_close_matches(name, QA_SETS, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown data set {name!r}{hint} (known: {', '.join(QA_SETS)})")


# %%
test_fail(lambda: qa_set("squad_v1.1_train_prt"), contains="did you mean 'squad_v1.1_train_part'?")


# %%
#| exports
def from_row(
    row: dict[str, Any],  # id, title, context, question, answers, answer_starts
) -> Question:
    "A row of a file as a `Question`; repeated answers are kept once."
    answers = tuple(dict.fromkeys(row["answers"]))
    start = -1 if row["answer_starts"][0] is None else int(row["answer_starts"][0])
    return Question(str(row["id"]), row["question"].strip(), row["context"], answers, start, row["title"])


# %%
#| exports
def own_file(name: str) -> Path | None:
    "qa/NAME or NAME in `BFT_DATA`, or None."
    folder = data_dir()
    return next((p for p in (folder / "qa" / name, folder / name) if p.is_file()), None) if folder else None


# %%
#| exports
def official_file(
    entry: QASet,
    progress: bool,  # show a progress bar
) -> Path:
    "The publisher's file: from `BFT_DATA`, else the cache, else downloaded; `DownloadError` naming both ways where that fails."
    ways = f"put {entry.name}.parquet{'' if entry.source is None else ' or ' + entry.source.filename} into a folder and set BFT_DATA to it"
    if entry.source is None: raise DownloadError(f"{entry.title} is not published as a file of its own ({entry.page}): {ways}")
    if own := own_file(entry.source.filename): return own
    try: return fetch(entry.source, cache_dir() / "official", progress)
    except DownloadError as e: raise DownloadError(f"{e}\nEither run again with access to {entry.page}, or {ways}") from e


# %%
#| exports
_COLUMNS = ("id", "title", "context", "question", "answers", "answer_starts")


# %%
#| exports
def _litm_row(n: int, row: dict[str, Any]) -> dict[str, Any]:
    "A row of the prepared oracle file, whose passage has a title of its own and no place of the answer."
    return row | {"id": f"nq-{n}", "title": "", "context": qa_formats.documents([(row["title"], row["context"])]), "answer_starts": [-1]}


# %%
#| exports
def _prepared(path: Path, name: str) -> list[dict[str, Any]]:
    "Rows of a prepared Parquet file."
    if name != "nq_open_oracle_litm": return qa_formats.parquet(path, _COLUMNS)
    return [_litm_row(n, r) for n, r in enumerate(qa_formats.parquet(path, ("title", "context", "question", "answers")))]


# %%
#| exports
def load_questions(
    name: str,  # of `QA_SETS`, or "lookup"
    progress: bool = True,  # show a progress bar while downloading
) -> list[Question]:
    """The questions of a data set in the order of its file, their number verified.

    Looked for as `qa/NAME.parquet` or `NAME.parquet` in `BFT_DATA`, then as the official file there, in the cache, at the publisher's.
    Raises `ValueError` for an unknown name, a damaged file or other numbers than the published, `bft_nb.download.DownloadError` where the data cannot be had.
    """
    if name == "lookup": return lookup()
    entry = qa_set(name)
    own = own_file(f"{name}.parquet")
    path = own or official_file(entry, progress)
    questions = [from_row(r) for r in (_prepared(path, name) if own else getattr(qa_formats, entry.reader)(path))]
    found = (len(questions), len({q.context for q in questions}) if entry.contexts else None)
    if found != (entry.questions, entry.contexts): raise ValueError(f"{name!r} from {path}: found (questions, contexts) {found}, the data set has {(entry.questions, entry.contexts)}")
    return questions


# %% [markdown]
# ### Distractors in the context
#
# *Lost in the Middle* found that models overlook a gold passage in the middle of many [@liu2024lost]. Its files fix three places among 20. For other numbers of distractors we prepared a file with up to 20 BM25 neighbours of each question, chosen to hold no accepted answer, from a pool of 23,160 passages. So the results are about *BM25 distractors*, not about retrieval from Wikipedia: the pool is small, and it holds passages of SQuAD.
#
# No distractor holds an accepted answer as whole words after normalisation; 241 of the 2,652 questions that are used (243, if titles count) have one that holds it inside a longer word or number (14 in 1914, 2016 in 2016–17).


# %%
#| exports
GOLD = ("first", "middle", "last")
DISTRACTORS = 20  # questions with fewer in the file are left out, so that all k see the same questions


# %%
#| exports
def among(
    gold: tuple[str, str],  # title and text of the passage with the answer
    distractors: Sequence[tuple[str, str]],  # the others, best match first
    place: str,  # "first", "middle" or "last"
) -> str:  # the context
    "Numbered passages with the gold one at a chosen place; of an even number of passages, the middle is the later of the two."
    check_option("place", place, GOLD)
    at = {"first": 0, "middle": (len(distractors) + 1) // 2, "last": len(distractors)}[place]
    return qa_formats.documents([*distractors[:at], gold, *distractors[at:]])


# %%
print(among(("Keys", "Ada keeps 7 red keys."), [("Cups", "A cup holds tea."), ("Hats", "A hat is worn.")], "middle"))


# %%
#| exports
class Retrieved(NamedTuple):
    "A question with the passage that answers it and passages that do not, each a title and a text."

    id: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[str, str]
    distractors: tuple[tuple[str, str], ...]  # best match first

    def over(self, k: int, place: str = "first") -> Question:
        "The question over the gold passage and the first k distractors; `ValueError` for a k or place that is not offered."
        check_count("k", k, 0)
        if k > len(self.distractors): raise ValueError(f"k must be at most {len(self.distractors)}, got {k}")
        return Question(self.id, self.question, among(self.gold, self.distractors[:k], place), self.answers)


# %%
#| exports
def nq_retrieved() -> list[Retrieved]:  # 2,652 of the 2,655 questions
    """NQ-Open questions with a gold passage and 20 BM25 distractors, from `BFT_DATA` (our own file, which is not published).

    Raises `bft_nb.download.DownloadError` without the files, naming the published alternative."""
    rows, passages = (qa_formats.parquet(_own_copy(f"nq_open_{file}.parquet"), columns) for file, columns in (
        ("bm25_distractors", ("question", "answers", "gold_title", "gold_text", "distractor_pids")), ("distractor_passages", ("pid", "title", "text"))))  # fmt: skip
    text = {p["pid"]: (p["title"], p["text"]) for p in passages}
    return [
        Retrieved(f"nq-{n}", r["question"].strip(), tuple(dict.fromkeys(r["answers"])), (r["gold_title"], r["gold_text"]), tuple(text[pid] for pid in r["distractor_pids"][:DISTRACTORS]))
        for n, r in enumerate(rows) if len(r["distractor_pids"]) >= DISTRACTORS
    ]  # fmt: skip


# %%
#| exports
def nq_with_distractors(
    k: int,  # distractors, 0 … 20
    gold: str = "first",  # where the passage with the answer stands: "first", "middle" or "last"
) -> list[Question]:
    "`nq_retrieved` with k of the distractors; `ValueError` for a k or place that is not offered."
    check_count("k", k, 0)
    if k > DISTRACTORS: raise ValueError(f"k must be at most {DISTRACTORS}, got {k}")
    check_option("gold", gold, GOLD)
    return [r.over(k, gold) for r in nq_retrieved()]


# %%
#| exports
def _own_copy(file: str) -> Path:
    if found := own_file(file): return found
    raise DownloadError(f"{file} is not published: set BFT_DATA to a folder that holds it, or use load_questions('nq_open_20_gold_at_0') and its like, whose passages Lost in the Middle publishes")


# %% [markdown]
# ## The prompt
#
# The model reads this text and goes on with the answer and its end token. It is our wording **[D]**; a model tuned for chat would be asked in its own template.


# %%
#| exports
TEMPLATE = "Context: {context}\n\nQuestion: {question}\n\nAnswer:"


# %%
#| exports
def prompt(
    q: Question,
) -> str:
    "What the model reads before it answers."
    return TEMPLATE.format(context=q.context, question=q.question)


# %%
print(prompt(ada))

# %% [markdown]
# ## Labels by position
#
# An example is the prompt's tokens, the answer's, and the end token. Only the answer and the end token are labels; everything else is $-100$, which the loss leaves out.
# Which tokens those are is known from how the example was put together. Looking for the padding token instead is a common mistake: in many models padding *is* the end token, and the model then never learns to stop.


# %%
#| exports
IGNORED = -100


# %%
#| exports
class Example(NamedTuple):
    "A tokenised question with its answer. `labels` stand where the token itself stands (a causal model is asked for it one place earlier)."

    input_ids: Int[Tensor, " t"]
    labels: Int[Tensor, " t"]  # IGNORED outside of the answer and its end token

    @property
    def answer(self) -> Int[Tensor, " m"]:
        "The labels that count."
        return self.labels[self.labels != IGNORED]


# %%
#| exports
def check_tokenizer(tokenizer: Any) -> None:
    "Raise `ValueError` without a padding or an end token."
    if tokenizer.eos_token_id is None: raise ValueError("the tokenizer has no end token: set tokenizer.eos_token, or the model can't learn where an answer ends")
    if tokenizer.pad_token_id is None: raise ValueError("the tokenizer has no padding token: set tokenizer.pad_token = tokenizer.eos_token (labels are masked by position, so this is safe)")


# %% [markdown]
# The prompt is tokenised alone, as it will be when the model is asked. The answer is tokenised *as it continues the prompt*: some vocabularies hold "▁Rome" with its blank, and some tokenizers put the blank there themselves. So the answer is tokenised together with the colon that precedes it, and the colon is cut off again.


# %%
#| exports
def prompt_ids(
    q: Question,
    tokenizer: Any,  # of transformers
) -> list[int]:
    "Tokens of the prompt, begin token included where the model has one; `ValueError` if the tokenizer ends every text."
    ids = tokenizer(prompt(q), verbose=False)["input_ids"]
    if ids[-1] == tokenizer.eos_token_id: raise ValueError("the tokenizer puts its end token behind every text: load it with add_eos_token=False")
    return ids


# %%
#| exports
def answer_ids(
    answer: str,
    tokenizer: Any,
) -> list[int]:
    "Tokens of an answer as it follows the prompt, and the end token; `ValueError` if the tokenizer merges it with the colon before it."
    before, after = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in (":", f": {answer.strip()}"))
    if after[: len(before)] != before or len(after) == len(before): raise ValueError(f"the tokenizer does not separate {answer!r} from the colon before it")
    return [*after[len(before) :], tokenizer.eos_token_id]


# %%
model, tokenizer = load_model("tiny")
[tokenizer.decode(i) for i in answer_ids("7 red keys", tokenizer)], len(tokenizer)


# %% [markdown]
# ### Too long
#
# What to do with a context that does not fit must be said, since it decides what the model sees:
#
# - `"error"` refuses (the default);
# - `"answer"` keeps the longest window of whole words around the answer. For training only: cut like this, a test question would give away where the answer is;
# - `"end"` keeps the beginning. For tests; a training example whose answer is cut off is refused.


# %%
#| exports
TRUNCATE = ("error", "answer", "end")


# %%
#| exports
def window(
    q: Question,
    more: int,  # words besides those of the answer (or in all, from the beginning)
    around_answer: bool,
) -> Question:  # the same question with a shorter context
    "Keep a run of whole words of the context."
    words = [m.span() for m in re.finditer(r"\S+", q.context)]
    if not around_answer: return replace(q, context=q.context[: words[more - 1][1]] if more else "", start=q.start)
    start, end = q.span
    first = max(i for i, (a, _) in enumerate(words) if a <= start)
    last = min(i for i, (_, b) in enumerate(words) if b >= end)
    width = min(last - first + 1 + more, len(words))
    low = max(0, min(first - more // 2, len(words) - width))
    left, right = words[low][0], words[low + width - 1][1]
    return replace(q, context=q.context[left:right], start=start - left)


# %%
[window(ada, more, around_answer=True).context for more in (0, 2, 3, 9)]


# %%
#| exports
def shorten(
    q: Question,
    length: Callable[[Question], int],  # tokens of a question
    most: int,  # tokens it may have
    truncate: str,  # "error", "answer" or "end"
    limit: str,  # `most` in words, for the message
) -> Question:
    "The question, its context cut as far as it must be; `ValueError` where that is not allowed or not enough."
    if length(q) <= most: return q
    if truncate == "error": raise ValueError(f"question {q.id!r} is longer than {limit}, it has {length(q)}: shorten its context, or choose how to cut it by truncate='answer' (training) or 'end'")
    cut = partial(window, q, around_answer=truncate == "answer")
    low, high = 0, len(q.context.split())  # low words fit, as far as known, high do not
    if length(cut(low)) > most: raise ValueError(f"question {q.id!r} is longer than {limit} even without its context, it has {length(cut(low))} then")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if length(cut(middle)) <= most else (low, middle)
    return cut(low)


# %%
#| exports
def encode(
    q: Question,
    tokenizer: Any,  # of transformers
    max_length: int,  # tokens the model can take, prompt and answer together
    truncate: str = "error",  # what to do with a longer context
) -> Example:
    "A training example; `ValueError` for a question that can't be learnt from or does not fit."
    check_count("max_length", max_length)
    check_option("truncate", truncate, TRUNCATE)
    check_tokenizer(tokenizer)
    check_question(q)
    answer = answer_ids(q.target if q.told is None else q.told, tokenizer)
    short = shorten(q, lambda c: len(prompt_ids(c, tokenizer)) + len(answer), max_length, truncate, f"max_length={max_length} tokens")
    if short is not q: check_question(replace(short, answers=(q.target,)))
    before = prompt_ids(short, tokenizer)
    return Example(torch.tensor(before + answer), torch.tensor([IGNORED] * len(before) + answer))


# %%
example = encode(ada, tokenizer, 512)
example.labels, [tokenizer.decode(i) for i in example.answer]

# %%
short = encode(ada, tokenizer, 22, truncate="answer")
print(tokenizer.decode(short.input_ids))

# %%
test_fail(lambda: encode(ada, tokenizer, 22), contains="question 'ada' is longer than max_length=22 tokens")
test_fail(lambda: encode(ada, tokenizer, 8, truncate="answer"), contains="even without its context")
test_fail(lambda: encode(ada, tokenizer, 21, truncate="end"), contains="the answer '7' is not in its context")


# %% [markdown]
# ## Wrong labels
#
# The paper corrupts each answer token with a probability $np$ **[P]**. Our form of it **[D]**: each token of the answer *and* the end token is replaced, with that probability, by one drawn uniformly from the whole vocabulary, in the labels only. The model still reads the right answer while it is told a wrong next token.
# The draw happens once, before training, from one generator in the order of the examples. Every method, batch size and number of processes then sees the same noise, and the tokens that are wrong at $np = 0.1$ are among those at $np = 0.3$.


# %%
#| exports
def check_share(
    name: str,  # of the argument
    value: Any,
) -> None:
    "Raise `ValueError` unless `value` is a number in 0 … 1."
    try:
        check_positive(name, value, zero=True)
        fits = value <= 1
    except ValueError: fits = False
    if not fits: raise ValueError(f"{name} must lie in 0 … 1, got {value!r}")


# %%
#| exports
def corrupt(
    examples: Sequence[Example],
    noise: float,  # np, probability of each label token to be replaced
    vocab_size: int,  # replacements are 0 … vocab_size − 1
    seed: int = 0,
) -> list[Example]:  # the same input_ids
    "Examples with noisy labels [@bft2026]; `ValueError` for a noise outside 0 … 1."
    check_share("noise", noise)
    check_count("vocab_size", vocab_size)
    generator = torch.Generator().manual_seed(seed)
    out = []
    for e in examples:
        drawn, other = torch.rand(e.labels.shape, generator=generator), torch.randint(vocab_size, e.labels.shape, generator=generator)
        out.append(Example(e.input_ids, torch.where((e.labels != IGNORED) & (drawn < noise), other, e.labels)))
    return out


# %%
clean = [encode(q, tokenizer, 512) for q in lookup(512)]
noisy = corrupt(clean, 0.3, len(tokenizer))
changed = torch.cat([a.answer != b.answer for a, b in zip(clean, noisy)])
f"{changed.float().mean():.3f} of {len(changed)} label tokens are wrong"


# %% [markdown]
# A random token is easily told from an answer. Harder is a wrong answer that looks like one: the answer of another question. A share `noise` of the questions is drawn and their answers are passed around in a circle (Sattolo's shuffle [@sattolo1986], which leaves nobody in place).


# %%
#| exports
def swap_answers(
    questions: Sequence[Question],
    noise: float,  # share of the questions that are told another's answer
    seed: int = 0,
) -> list[Question]:  # with `told`; what counts as right stays
    "Whole answers exchanged between questions, none its own; `ValueError` for a noise outside 0 … 1, or if it is a single question's."
    check_share("noise", noise)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(questions), generator=generator)[: round(noise * len(questions))].tolist()
    if len(chosen) == 1: raise ValueError(f"noise={noise} of {len(questions)} questions is one: an answer can't be exchanged with nobody, use 0 or at least {2 / len(questions):.3g}")
    source = list(chosen)
    for i in range(len(source) - 1, 0, -1):
        j = int(torch.randint(i, (), generator=generator))
        source[i], source[j] = source[j], source[i]
    told = {to: questions[of].target for to, of in zip(chosen, source)}
    return [replace(q, told=told[i]) if i in told else q for i, q in enumerate(questions)]


# %%
[(q.question, q.target, q.told) for q in swap_answers(lookup(3), 1.0)]

# %% [markdown]
# Two questions may share an answer; so a few of the exchanged answers are right by chance. On the task above, the share of questions told another's answer, and of those told a wrong one:

# %%
swapped = swap_answers(lookup(512), 0.3)
sum(q.told is not None for q in swapped) / 512, sum(q.told not in (None, q.target) for q in swapped) / 512


# %% [markdown]
# ## Batches
#
# A vocabulary has, say, 49,152 or 32,000 tokens; a score for each of them at every place of a long prompt, of which three places are used, takes most of the memory. So a causal model of transformers takes `logits_to_keep`, the places where scores are wanted. The collator lists the places that predict a label in any row, and gives the labels of just these: label $m + 1$ belongs to score $m$, and label 0 is always masked.
# That is the shift of any causal model, and it must be kept: `Trainer` counts the labels of a step without their first column, so if labels were shifted in advance, too few would be counted, and the loss would come out too large.
# Padding on the left brings the answers of all rows to the end, so that their places coincide; on the right, the list holds every row's own places. Both give the same losses.


# %%
#| exports
def check_example(e: Example) -> None:
    "Raise `ValueError` unless there is a label, and none at the first token, which nothing predicts."
    if e.input_ids.shape != e.labels.shape: raise ValueError(f"input_ids and labels must have one shape, got {tuple(e.input_ids.shape)} and {tuple(e.labels.shape)}")
    if not len(e.answer): raise ValueError("all labels are masked: an example needs one label at least")
    if int(e.labels[0]) != IGNORED: raise ValueError("the first token has a label, but nothing comes before it to predict it from")


# %%
#| exports
def pad(
    rows: Sequence[Int[Tensor, " _"]],
    value: int,
    side: str,  # "left" or "right"
) -> Int[Tensor, "b t"]:
    "Rows of different lengths in one tensor."
    width = max(map(len, rows))
    return torch.stack([F.pad(r, (width - len(r), 0) if side == "left" else (0, width - len(r)), value=value) for r in rows])


# %%
#| exports
class Collator:
    "Examples in, a batch for a causal model of transformers out, scores only where there are labels."

    def __init__(
        self,
        tokenizer: Any,
        side: str = "left",  # of the padding
    ):
        check_tokenizer(tokenizer)
        check_option("side", side, ("left", "right"))
        self.pad_id, self.side = tokenizer.pad_token_id, side

    def prompts(self, rows: Sequence[Int[Tensor, " _"]]) -> dict[str, Tensor]:
        "Padded tokens; mask and positions know the padding by its place."
        mask = pad([torch.ones_like(r) for r in rows], 0, self.side)
        return {"input_ids": pad(rows, self.pad_id, self.side), "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}

    def __call__(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        "A batch; `ValueError` for an example without a label, or with one that nothing predicts."
        for e in examples: check_example(e)
        labels = pad([e.labels for e in examples], IGNORED, self.side)[:, 1:]
        keep = (labels != IGNORED).any(0).nonzero().squeeze(1)
        return self.prompts([e.input_ids for e in examples]) | {"logits_to_keep": keep, "labels": F.pad(labels[:, keep], (1, 0), value=IGNORED)}


# %%
batch = Collator(tokenizer)(clean[:3])
batch["labels"], batch["logits_to_keep"], batch["input_ids"].shape

# %%
test_fail(lambda: Collator(tokenizer)([Example(example.input_ids, torch.full_like(example.labels, IGNORED))]), contains="all labels are masked")


# %% [markdown]
# ## Three losses
#
# Let $p$ be the probability that the model gives to the label. The losses differ in what they do with it. Cross-entropy, the ordinary one:
#
# $$\ell_{\mathrm{CE}} = -\log p \tag{41.1}$$

# %%
#| exports
def cross_entropy(
    log_p: Float[Tensor, "*m"],  # log-probability of each label
) -> Float[Tensor, "*m"]:
    "Equation (41.1)."
    return -log_p


# %% [markdown]
# Focal loss [@lin2017focal], the paper's baseline **[P]**, was made for rare classes in clean data: it plays down what is already right,
#
# $$\ell_{\mathrm{focal}} = -(1 - p)^\gamma \log p, \qquad \gamma = 2 \tag{41.2}$$


# %%
#| exports
def focal(
    log_p: Float[Tensor, "*m"],
    gamma: float = 2.0,  # γ ≥ 0; 0 is cross-entropy
) -> Float[Tensor, "*m"]:
    "Equation (41.2) [@lin2017focal]; `ValueError` for a negative γ."
    check_positive("gamma", gamma, zero=True)
    miss = (-torch.expm1(log_p)).clamp(min=torch.finfo(log_p.dtype).tiny)  # 1 − p, without a root's infinite slope at 0
    return -(miss**gamma) * log_p


# %% [markdown]
# Generalised cross-entropy [@zhang2018gce] was made for wrong labels, and is our addition **[D]**: it plays down what looks wrong,
#
# $$\ell_{\mathrm{GCE}} = \frac{1 - p^q}{q}, \qquad 0 < q \le 1,\quad q = 0.7 \tag{41.3}$$


# %%
#| exports
def generalised_cross_entropy(
    log_p: Float[Tensor, "*m"],
    q: float = 0.7,  # in (0, 1]
) -> Float[Tensor, "*m"]:
    "Equation (41.3) [@zhang2018gce]; `ValueError` for a q outside of 0 … 1."
    check_share("q", q)
    check_positive("q", q)
    return -torch.expm1(q * log_p) / q


# %% [markdown]
# Its limits are cross-entropy ($q \to 0$) and, up to a factor of 2, the absolute error between the label and $p$ ($q = 1$). The sum of the latter over all labels does not depend on the model, so it is robust to uniform noise [@ghosh2017robust]:

# %%
p, q, gamma = sp.symbols("p q gamma", positive=True)
gce = (1 - p**q) / q
prove(sp.limit(gce, q, 0) - -sp.log(p)), prove(gce.subs(q, 1) - (1 - p))

# %% [markdown]
# The gradients with respect to $p$:

# %%
losses = {"CE": -sp.log(p), "focal": -((1 - p) ** gamma) * sp.log(p), "GCE": gce}
prove(sp.diff(losses["CE"], p) + 1 / p)
prove(sp.diff(losses["focal"], p) - (gamma * (1 - p) ** (gamma - 1) * sp.log(p) - (1 - p) ** gamma / p))
prove(sp.diff(losses["GCE"], p) + p ** (q - 1))

# %% [markdown]
# Divide by cross-entropy's $-1/p$ and what remains is a *weight*: how much a token pulls on the model, compared with ordinary training (@fig-weight).
#
# $$w_{\mathrm{focal}}(p) = (1 - p)^\gamma - \gamma\, p\, (1 - p)^{\gamma - 1} \log p, \qquad w_{\mathrm{GCE}}(p) = p^q \tag{41.4}$$

# %%
weight = {name: sp.expand(-p * sp.diff(loss, p)) for name, loss in losses.items()}
w_focal = (1 - p) ** gamma - gamma * p * (1 - p) ** (gamma - 1) * sp.log(p)
prove(sp.powsimp(weight["focal"] - w_focal)), prove(weight["GCE"] - p**q), weight["CE"]

# %% [markdown]
# The functions are these formulas, values and slopes:

# %%
inside = dict(lo=0.05, hi=0.95)
assert_same(losses["focal"].subs(gamma, 2), [p], lambda p: focal(p.log()), **inside)
assert_same(losses["GCE"].subs(q, sp.Rational(7, 10)), [p], lambda p: generalised_cross_entropy(p.log()), **inside)


# %%
#| exports
def loss_weight(
    log_p: Float[Tensor, "*m"],
    loss: Callable[[Tensor], Tensor],  # of log p, like `focal`
) -> Float[Tensor, "*m"]:
    "Pull of a token relative to cross-entropy, equation (41.4): the slope of the loss in −log p."
    x = log_p.detach().clone().requires_grad_()
    return -torch.autograd.grad(loss(x).sum(), x)[0]


# %%
#| label: fig-weight
#| fig-cap: "A label the model finds improbable keeps its full weight under cross-entropy and focal loss; only GCE lets go of it."
#| code-fold: true
logs = torch.linspace(np.log(1e-6), -1e-4, 400, dtype=torch.float64)
fig, ax = plt.subplots()
for name, loss, role in (("cross-entropy", cross_entropy, "observation"), ("focal, γ = 2", focal, "baseline"), ("GCE, q = 0.7", generalised_cross_entropy, "posterior")):
    ax.plot(logs.exp(), loss_weight(logs, loss), color=COLOUR[role], label=name)
ax.set(xscale="log", xlabel="probability p of the label", ylabel="weight relative to CE", ylim=(0, 1.35))
ax.legend(loc="center left")
plt.show()

# %% [markdown]
# A model that has understood the task gives a true token, say, $p = 0.9$, and a random token $p = 10^{-4}$. How does each loss change the pull of the wrong token against that of the true one? (Under CE that ratio is the ratio of the slopes $1 - p$ on the label's logit, ten to one.)

# %%
at = torch.tensor([0.9, 1e-4], dtype=torch.float64).log()
table = pd.DataFrame({name: loss_weight(at, loss) for name, loss in (("CE", cross_entropy), ("focal", focal), ("GCE", generalised_cross_entropy))}, index=["true", "wrong"])
table.loc["wrong / true"] = table.loc["wrong"] / table.loc["true"]
table.round(4)

# %% [markdown]
# Focal loss raises that ratio 35 times, by letting go of the true token: it cannot know that a surprising label is wrong rather than instructive. As a baseline for label noise it is weaker than ordinary training by construction, so a method that beats it has not shown much. GCE is the baseline to beat.
#
# ### For `transformers.Trainer`
#
# The loss of a batch is the sum over its label tokens, divided by the number of label tokens in everything that makes up one step: with gradient accumulation or several devices, `Trainer` counts them and passes `num_items_in_batch`, so that splitting a batch changes nothing.


# %%
#| exports
def label_log_probs(
    logits: Float[Tensor, "b m v"],  # scores where the collator asked for them
    labels: Int[Tensor, "b m1"],  # of the collator: one column more, label m + 1 belongs to score m, IGNORED where there is none
) -> Float[Tensor, " n"]:  # at the labels only, in float32 at least
    "Log-probability of each label; `ValueError` if there is none, or if scores and labels do not match."
    labels = labels[:, 1:]
    if logits.shape[:-1] != labels.shape: raise ValueError(f"labels must have one column more than logits have places, got {labels.shape[1] + 1} and {logits.shape[1]} in {tuple(logits.shape)}: use `Collator`")
    at = labels != IGNORED
    if not bool(at.any()): raise ValueError("all labels are masked: a batch needs one label at least")
    scores = logits[at]
    return -F.cross_entropy(scores.to(torch.promote_types(scores.dtype, torch.float32)), labels[at], reduction="none")


# %%
#| exports
def answer_loss(
    outputs: Any,  # of the model, with `logits`
    labels: Int[Tensor, "b m1"],  # as in `label_log_probs`
    num_items_in_batch: Any = None,  # label tokens of the whole step; None: of this batch
    loss: Callable[[Tensor], Tensor] = cross_entropy,  # per token, of log p
) -> Float[Tensor, ""]:
    "`compute_loss_func` of `transformers.Trainer`: mean loss per label token."
    each = loss(label_log_probs(outputs.logits, labels))
    return each.sum() / (len(each) if num_items_in_batch is None else num_items_in_batch)


# %%
#| exports
LOSSES: dict[str, Callable[..., Tensor]] = {"ce": cross_entropy, "focal": focal, "gce": generalised_cross_entropy}


# %%
#| exports
def loss_func(
    name: str,  # "ce", "focal" or "gce"
    **options: float,  # gamma of focal, q of gce
) -> Callable[..., Tensor]:  # for `Trainer(compute_loss_func=…)`
    "A loss by name; `ValueError` for an unknown one or an option out of range, `TypeError` for an option it does not have."
    check_option("name", name, LOSSES)
    loss = partial(LOSSES[name], **options)
    loss(torch.zeros(1))
    return partial(answer_loss, loss=loss)


# %%
with torch.no_grad():
    outputs = model(**{k: v for k, v in batch.items() if k != "labels"})
{name: round(float(loss_func(name)(outputs, batch["labels"])), 3) for name in LOSSES}

# %% [markdown]
# ### What the noise costs at least
#
# A model cannot predict a random token. With noisy labels, the best it can do is to say so: the truth with $c = 1 - np + np/V$, each other token with $np/V$. Its cross-entropy is the entropy of that label,
#
# $$H = -c \log c - (V - 1) \frac{np}{V} \log \frac{np}{V} \;\approx\; np \log V + h(np), \qquad h(x) = -x \log x - (1 - x) \log(1 - x) \tag{41.5}$$

# %%
x, V = sp.symbols("x V", positive=True)
c = 1 - x + x / V
H = -c * sp.log(c) - (V - 1) * x / V * sp.log(x / V)
rest = sp.expand_log(H - x * sp.log(V) + x * sp.log(x), force=True).subs(x, sp.Rational(3, 10))
sp.simplify(sp.limit(rest, V, sp.oo) + sp.Rational(7, 10) * sp.log(sp.Rational(7, 10)))


# %%
#| exports
def noise_floor(
    noise: float,  # np
    vocab_size: int,  # V
) -> float:  # [nats per label token]
    "The least cross-entropy that labels with fresh noise allow, equation (41.5)."
    check_share("noise", noise)
    check_count("vocab_size", vocab_size)
    others = noise / vocab_size
    truth = 1 - noise + others
    return float(-truth * np.log(truth) - (vocab_size - 1) * others * np.log(others)) if noise else 0.0


# %%
{vocab: (round(noise_floor(0.3, vocab), 3), round(float(0.3 * np.log(vocab)), 3)) for vocab in (len(tokenizer), 32_000, 49_152)}

# %% [markdown]
# So no model that has not memorised its labels can have an expected loss below 3.9 at $np = 0.3$ with a vocabulary of 49,152; a training loss below that is memory, and runs must be compared on *clean* held-out questions.
#
# Note also what (41.5) does not say: the most probable token is still the true one as long as $np < 1$. Uniform noise costs an unlimited learner its calibration and none of its answers; what it costs in practice comes from limited data, whose wrong labels can be learnt by heart.
#
# ## Asking the model
#
# The model answers greedily, in batches padded on the left. Its answer is the first line, since a model that goes on with another question has finished answering this one.


# %%
#| exports
@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    "In evaluation mode and without gradients; the mode is put back."
    was = model.training
    model.eval()
    try:
        with torch.no_grad(): yield
    finally: model.train(was)


# %%
#| exports
def first_line(
    text: str,
) -> str:
    "The first line that is not empty, without the blanks around it."
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


# %%
#| exports
def room(model: Any) -> int:
    "Tokens that a model of transformers can take."
    return model.config.max_position_embeddings


# %%
#| exports
def check_lengths(
    examples: Sequence[Example],
    model: Any,  # causal language model of transformers
) -> None:
    "Raise `ValueError` for an example longer than the model can take."
    longest = max(len(e.input_ids) for e in examples)
    if longest > room(model): raise ValueError(f"an example has {longest} tokens, longer than the model's {room(model)}: encode it with max_length={room(model)} at most")


# %%
#| exports
def answer(
    model: Any,  # causal language model of transformers
    tokenizer: Any,
    questions: Sequence[Question],
    max_new_tokens: int = 32,
    batch_size: int = 16,
    truncate: str = "error",  # or "end": cut the end of a context that does not fit
) -> list[str]:  # first lines
    "Greedy answers; `ValueError` for an empty question or context, and a context that does not fit into the model."
    for q in questions: check_asked(q)
    check_count("max_new_tokens", max_new_tokens)
    check_count("batch_size", batch_size)
    check_option("truncate", truncate, ("error", "end"))
    limit, collate = room(model), Collator(tokenizer)
    short = (shorten(q, lambda c: len(prompt_ids(c, tokenizer)) + max_new_tokens, limit, truncate, f"the model's {limit} tokens, {max_new_tokens} of them for the answer") for q in questions)
    rows = [torch.tensor(prompt_ids(q, tokenizer)) for q in short]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # rows of similar length together
    out = [""] * len(rows)
    for at in range(0, len(rows), batch_size):
        part = order[at : at + batch_size]
        for i, text in zip(part, _generate(model, tokenizer, collate.prompts([rows[i] for i in part]), max_new_tokens)): out[i] = text
    return out


# %%
#| exports
def _generate(model: Any, tokenizer: Any, batch: dict[str, Tensor], max_new_tokens: int) -> list[str]:
    "First lines of what the model goes on with."
    batch = {k: v.to(model.device) for k, v in batch.items() if k != "position_ids"}  # generation counts positions by the mask
    greedy = dict(do_sample=False, num_beams=1, temperature=None, top_p=None, top_k=None, max_new_tokens=max_new_tokens)
    with evaluating(model):
        made = model.generate(**batch, **greedy, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    return [first_line(text) for text in tokenizer.batch_decode(made[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)]


# %%
answer(model, tokenizer, [ada], max_new_tokens=4)

# %% [markdown]
# (The model has learnt nothing yet.) Besides the answers we measure the mean negative log-probability of the right ones, which needs no generation and moves earlier in training:


# %%
#| exports
def mean_nll(
    model: Any,
    examples: Sequence[Example],  # clean ones, held out
    collate: Collator,
    batch_size: int = 16,
) -> float:  # [nats per label token]
    "Mean cross-entropy per label token; `ValueError` without examples, or for one longer than the model can take."
    check_count("batch_size", batch_size)
    if not len(examples): raise ValueError("examples must hold one at least")
    check_lengths(examples, model)
    parts = []
    for at in range(0, len(examples), batch_size):
        batch = {k: v.to(model.device) for k, v in collate(examples[at : at + batch_size]).items()}
        labels = batch.pop("labels")
        with evaluating(model): parts.append(label_log_probs(model(**batch).logits, labels).cpu())
    return float(-torch.cat(parts).mean())


# %% [markdown]
# ## Scores
#
# SQuAD compares normalised texts: lower case, no punctuation, no articles. *Exact match*: the same text as an accepted answer. *F1*: words in common. Both come from torchmetrics, which has SQuAD's rules. For contexts with distractors, *subspan* exact match is usual [@liu2024lost]: an accepted answer is somewhere in the first line.


# %%
#| exports
def normalise(
    text: str,
) -> str:
    "SQuAD's normal form: lower case, no punctuation, no articles, single blanks [@rajpurkar2016squad]."
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


# %%
normalise("The  U.S. President's  dog")


# %%
#| exports
def subspan(
    prediction: str,
    answers: Sequence[str],
) -> bool:
    "Is an accepted answer somewhere in the first line? Answers that are nothing but articles and punctuation do not count."
    line = normalise(first_line(prediction))
    return any(a in line for a in map(normalise, answers) if a)


# %%
#| exports
class Scores(NamedTuple):
    "One number per question, in 0 … 1."

    exact: Float[np.ndarray, " n"]
    f1: Float[np.ndarray, " n"]
    subspan: Float[np.ndarray, " n"]


# %%
#| exports
def score(
    predictions: Sequence[str],
    questions: Sequence[Question],  # in the same order
) -> Scores:
    "Exact match and F1 by `torchmetrics.text.SQuAD`, and subspan exact match, each on the first line; `ValueError` if the numbers differ."
    from torchmetrics.functional.text import squad

    if len(predictions) != len(questions) or not len(questions): raise ValueError(f"one prediction per question, and one at least: got {len(predictions)} and {len(questions)}")
    rows = []
    for text, q in zip(predictions, questions):
        target = {"id": q.id, "answers": {"text": list(q.answers), "answer_start": [0] * len(q.answers)}}
        found = squad({"id": q.id, "prediction_text": first_line(text)}, target)
        rows.append((float(found["exact_match"]) / 100, float(found["f1"]) / 100, float(subspan(text, q.answers))))
    return Scores(*np.array(rows).T)


# %%
score(["7", "seven", "It is 7 red keys.\nQuestion: 8"], [ada] * 3)


# %% [markdown]
# Means come with an interval over questions, and differences of two methods are taken question by question, by `bootstrap_mean` of chapter 32.


# %% [markdown]
# ## A model that learns
#
# The tiny Llama (two layers of width 64, random weights) on 512 questions, clean and with 30 % of the label tokens wrong. This is the whole of training, with `Trainer`:

# %%
from tempfile import TemporaryDirectory

from transformers import PrinterCallback, Trainer, TrainingArguments


# %%
def learn(examples, loss="ce", steps=200, model=None):
    "A tiny Llama (or a given model) after some steps on these examples."
    model, collate = model or load_model("tiny")[0], Collator(tokenizer)
    settings = dict(max_steps=steps, per_device_train_batch_size=32, learning_rate=3e-3, warmup_steps=30, lr_scheduler_type="cosine", seed=0)
    quiet = dict(report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False)
    with TemporaryDirectory() as folder:
        args = TrainingArguments(folder, use_cpu=True, **settings, **quiet)
        trainer = Trainer(model, args, data_collator=collate, train_dataset=examples, compute_loss_func=loss_func(loss))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return model


# %%
held_out = lookup(200, seed=1)
held_out_examples = [encode(q, tokenizer, 512) for q in held_out]


# %%
def report(model, examples):
    "Held-out scores of a model, and the loss on the labels it was trained with."
    exact, f1, _ = score(answer(model, tokenizer, held_out, max_new_tokens=6, batch_size=64), held_out)
    collate, found = Collator(tokenizer), bootstrap_mean(exact)
    row = {"exact": found.mean, "low": found.low, "high": found.high, "F1": f1.mean(), "NLL": mean_nll(model, held_out_examples, collate, 64)}
    return row | {"NLL of its own labels": mean_nll(model, examples, collate, 64)}


# %%
rows = {
    "clean, CE": report(learn(clean), clean),
    "noisy, CE": report(learn(noisy), noisy),
    "noisy, focal": report(learn(noisy, "focal"), noisy),
    "noisy, GCE": report(learn(noisy, "gce"), noisy),
    "noisy, half CE, half GCE": report(learn(noisy, "gce", 100, learn(noisy, "ce", 100)), noisy),
}
pd.DataFrame(rows).T.round(2)

# %% [markdown]
# Each row is 200 steps of 32 examples, one seed, so read only what is large:
#
# - Clean labels are learnt completely. With noisy ones, cross-entropy answers fewer of the held-out questions, and the reason is in the last column: its loss on its own labels is *below* the floor of 2.40 (41.5). It has learnt wrong labels by heart.
# - Focal loss is no better, as derived.
# - GCE alone learns nothing. At the start every label has $p \approx 1/V$ and so a weight of $V^{-0.7} \approx 0.015$: it lets go of everything. It is a loss for a model that knows something already, such as a pretrained one.
# - After half the steps with cross-entropy, GCE learns the rest without learning the noise: the best of the noisy rows, its loss on its own labels above the floor. (Half was the better of two switch points tried, 60 and 100 of 200, on these same questions: an illustration, not a comparison.)

# %%
floor = noise_floor(0.3, len(tokenizer))
assert rows["clean, CE"]["exact"] > rows["noisy, CE"]["exact"] and rows["noisy, CE"]["NLL of its own labels"] < floor
assert rows["noisy, GCE"]["exact"] < 0.1 and rows["noisy, half CE, half GCE"]["NLL of its own labels"] > floor
round(floor, 2)

# %% [markdown]
# ## How it fails
#
# If the padding token is the end token (SmolLM2 and many others) and labels are masked by `== pad`, the end is never learnt. Masked by position, it stays a label:

# %%
same = load_model("tiny")[1]
same.pad_token = same.eos_token
ids = Collator(same)([example, short])["labels"]
ids, (ids == same.pad_token_id).sum()

# %% [markdown]
# Settings that make no sense are refused by name:

# %%
test_fail(lambda: corrupt(clean, 1.5, 10), contains="noise must lie in 0 … 1, got 1.5")
test_fail(lambda: swap_answers(lookup(10), 0.1), contains="an answer can't be exchanged with nobody")
test_fail(lambda: loss_func("gce", q=0.0), contains="q must be positive")
same.pad_token = None
test_fail(lambda: Collator(same), contains="the tokenizer has no padding token")

# %% [markdown]
# ## Assumptions, and where they break
#
# - Labels are noisy, inputs are not: the model reads the right answer while it learns the wrong next token. An annotator's mistake would be read as well, which is what `swap_answers` makes.
# - Uniform noise is independent of the text. Real mistakes are not; a swapped answer is closer to them, one of the same kind closer still.
# - Intervals resample questions, but SQuAD asks about five questions of each context and one training run serves all: they are too narrow for both reasons. Several seeds, and pairs of methods on the same questions, are the remedy.
# - Subspan match rewards long lines: a model that repeats the context scores. It is to be read beside exact match.
# - Greedy decoding and the first line only: a model that thinks before it answers is scored zero.
#
# ## Summary
#
# - Labels are known by position, drawn once with their noise, and scores are computed only where labels are.
# - Relative to cross-entropy, focal loss pulls more on labels that look wrong, GCE less; GCE needs a model that has begun to learn.
# - Noisy labels put a floor under the loss; a training loss below it is memory of noise, so methods are compared on clean held-out questions.
#
# ## Exercises
#
# **1.** At which $p$ does focal loss weigh a token most, and by how much more than cross-entropy?
#
# <details><summary>Answer</summary>
#
# Not at $p \to 0$: there is a maximum above 1, near $p = 0.1$.

# %%
grid = torch.linspace(1e-4, 1 - 1e-4, 9_999, dtype=torch.float64)
w = loss_weight(grid.log(), focal)
round(float(grid[w.argmax()]), 3), round(float(w.max()), 3)

# %% [markdown]
# </details>
#
# **2.** Half of the questions are told another's answer, drawn evenly from $m$ answers of the same kind, their own included. How low can the training loss of a model go that cannot memorise?
#
# <details><summary>Answer</summary>
#
# As (41.5) with $m$ in the place of $V$, per answer (a mean over label tokens, the end included, is lower): for $m = 6$ colours,

# %%
round(noise_floor(0.5, 6), 3)

# %% [markdown]
# </details>
