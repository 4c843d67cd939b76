"""Questions over a passage that answers them, among passages that do not: snippets of one length, training contexts, and answers over growing contexts."""

import inspect
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from bft_nb.core import check_count, check_option
from bft_nb.qa import (
    GOLD,
    Collator,
    Question,
    Retrieved,
    check_asked,
    evaluating,
    first_line,
    lookup,
    nq_retrieved,
    prompt_ids,
    room,
)  # fmt: skip
from bft_nb.qa_settings import RETRIEVED

__all__ = ["answer_growing", "check_prompts", "lookup_retrieved", "mixed", "questions", "snippet", "snippets"]

CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"  # transformers renamed it in 5.2x


def lookup_retrieved(n: int, seed: int = 0) -> list[Retrieved]:
    "The questions of `bft_nb.qa.lookup` over six facts: the sentence with the answer, and five distractors."
    found = []
    for q in lookup(n, facts=6, seed=seed):
        at, sentences = q.context[: q.span[0]].count(". "), [(s.split()[0], s) for s in re.split(r"(?<=\.) ", q.context)]
        found.append(Retrieved(q.id, q.question, q.answers, sentences[at], tuple(sentences[:at] + sentences[at + 1 :])))
    return found


def questions(data: str) -> list[Retrieved]:
    "The questions of `bft_nb.qa_settings.RETRIEVED` by name, their number verified; raises what `bft_nb.qa.nq_retrieved` does."
    check_option("data", data, RETRIEVED)
    found = lookup_retrieved(RETRIEVED[data].questions) if data == "lookup" else nq_retrieved()
    if len(found) != RETRIEVED[data].questions:
        raise ValueError(f"{data!r}: found {len(found)} questions, the data set has {RETRIEVED[data].questions}")
    return found


def snippet(
    text: str,
    words: int,  # how many
    rng: random.Random,
    answers: Sequence[str] = (),  # the first of these that is in the text will be in the snippet
) -> str:
    "A run of whole words of a text, anywhere it may lie with equal probability; longer only where an answer is."
    if not (spans := [m.span() for m in re.finditer(r"\S+", text)]):
        return ""
    low, high = 0, len(spans) - words  # where it may begin
    if kept := next((a for a in answers if a in text), ""):
        start, end = text.index(kept), text.index(kept) + len(kept)
        first, last = max(i for i, (a, _) in enumerate(spans) if a <= start), min(i for i, (_, b) in enumerate(spans) if b >= end)
        low, high, words = max(low, last + 1 - words), min(high, first), max(words, last + 1 - first)
    low = rng.randint(min(low, high), high) if high > 0 else 0
    return text[spans[low][0] : spans[min(low + words, len(spans)) - 1][1]]


def snippets(r: Retrieved, words: int, seed: int = 0) -> Retrieved:
    "Every passage cut to so many words (0: left whole) at a random place, that of the gold passage so that it still holds the answer: neither its length nor a place tells it from the others."
    check_count("words", words, 0)
    if not words:
        return r
    rng = random.Random(f"{seed}-{r.id}")
    return r._replace(
        gold=(r.gold[0], snippet(r.gold[1], words, rng, r.answers)), distractors=tuple((title, snippet(text, words, rng)) for title, text in r.distractors)
    )


def mixed(retrieved: Sequence[Retrieved], most: int, seed: int = 0) -> list[Question]:
    "Each question over 0 … `most` of its distractors, all numbers alike, the gold passage first, in the middle or last."
    check_count("most", most, 0)
    rng = random.Random(seed)
    return [r.over(rng.randint(0, most), rng.choice(GOLD)) for r in retrieved]


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    "How many tokens two rows have in common from their beginning, short of all of the first."
    return next((i for i, (x, y) in enumerate(zip(a[:-1], b)) if x != y), min(len(a) - 1, len(b)))


class Reader:
    "A batch of rows that a model reads piece by piece: what has been read stays in a cache."

    def __init__(self, model: Any, tokenizer: Any, rows: int):
        self.model, self.tokenizer, self.collate = model, tokenizer, Collator(tokenizer)
        self.cache, self.mask = DynamicCache(), torch.zeros(rows, 0, dtype=torch.long, device=model.device)

    def read(self, ids: Tensor, mask: Tensor) -> Tensor:
        "Scores after the last of more tokens; the mask is 0 where a row has none."
        self.mask = torch.cat([self.mask, mask.to(self.mask.device)], 1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        known = {"attention_mask": self.mask, "position_ids": positions, CACHE: self.cache, "use_cache": True, "logits_to_keep": 1}
        return self.model(input_ids=ids.to(self.mask.device), **known).logits[:, -1]

    def rows(self, rows: Sequence[Sequence[int]]) -> Tensor:
        "The same from rows of different lengths."
        batch = self.collate.prompts([torch.tensor(r, dtype=torch.long) for r in rows])
        return self.read(batch["input_ids"], batch["attention_mask"])

    def ask(self, rows: Sequence[Sequence[int]], max_new_tokens: int) -> list[str]:
        "First lines of what the model says after more tokens, which are forgotten again."
        before, scores, said = self.mask, self.rows(rows), []
        going = torch.ones(len(rows), dtype=torch.bool, device=before.device)
        for left in reversed(range(max_new_tokens)):
            said.append(torch.where(going, scores.argmax(-1), self.tokenizer.pad_token_id))
            going &= said[-1] != self.tokenizer.eos_token_id
            if not left or not bool(going.any()):
                break
            scores = self.read(said[-1][:, None], going[:, None].long())
        self.cache.crop(before.shape[1] - self.mask.shape[1])
        self.mask = before
        return [first_line(text) for text in self.tokenizer.batch_decode(torch.stack(said, 1), skip_special_tokens=True)]


def _grow(reader: Reader, contexts: Sequence[Sequence[Sequence[int]]], max_new_tokens: int) -> Iterator[list[str]]:
    "Answers over one context after another."
    done = [0] * len(contexts[0])
    for rows, following in zip(contexts, [*contexts[1:], None]):
        if following is not None:
            common = [shared(a, b) for a, b in zip(rows, following)]
            if any(c < d for c, d in zip(common, done)):
                raise ValueError("each context must begin as the one before: order them by length, the gold passage first")
            if any(c > d for c, d in zip(common, done)):
                reader.rows([row[d:c] for row, d, c in zip(rows, done, common)])
            done = common
        yield reader.ask([row[d:] for row, d in zip(rows, done)], max_new_tokens)


def check_prompts(
    questions: Sequence[Question],
    model: Any,  # causal language model of transformers
    tokenizer: Any,
    max_new_tokens: int,
) -> list[list[int]]:  # the tokens of each prompt
    "The prompts of questions as tokens; `ValueError` for an empty question or context, and where one does not fit into the model, with so many tokens for the answer."
    for q in questions:
        check_asked(q)
    ids = [prompt_ids(q, tokenizer) for q in questions]
    longest = max(map(len, ids), default=0)
    if longest + max_new_tokens > room(model):
        raise ValueError(f"a prompt has {longest} tokens, with {max_new_tokens} for the answer that is longer than the model's {room(model)}: take fewer distractors, or fewer words of a passage")
    return ids


def answer_growing(
    model: Any,  # causal language model of transformers
    tokenizer: Any,
    contexts: Sequence[Sequence[Question]],  # the same questions over one context after another, each beginning as the one before
    max_new_tokens: int = 32,
    batch_size: int = 16,
) -> list[list[str]]:  # for each context, first lines
    """Greedy answers like those of `bft_nb.qa.answer`, to rounding; what neighbouring contexts share is read once.

    Raises `ValueError` for empty questions or contexts, and contexts that do not fit into the model, or that do not begin alike.
    """
    check_count("max_new_tokens", max_new_tokens)
    check_count("batch_size", batch_size)
    ids = [check_prompts(questions, model, tokenizer, max_new_tokens) for questions in contexts]
    if not ids or len({len(rows) for rows in ids}) > 1 or not ids[0]:
        raise ValueError(f"contexts must hold the same questions, one at least, got {[len(rows) for rows in ids]} of them")
    order = sorted(range(len(ids[0])), key=lambda i: len(ids[-1][i]))
    out = [[""] * len(order) for _ in ids]
    with evaluating(model):
        for at in range(0, len(order), batch_size):
            part = order[at : at + batch_size]
            reader = Reader(model, tokenizer, len(part))
            for texts, said in zip(out, _grow(reader, [[rows[i] for i in part] for rows in ids], max_new_tokens)):
                for i, text in zip(part, said):
                    texts[i] = text
    return out
