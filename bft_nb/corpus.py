"""Running text for language models: the distinct contexts of question-answering sets, in the order of their files, cut into blocks.

Paragraphs of one article follow each other in those files, so a block of a thousand tokens is mostly one text. A blank line stands
between paragraphs; a block begins with the BOS token or, on request, does not.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from bft_nb.core import check_count
from bft_nb.qa import IGNORED, Example, load_questions

__all__ = ["HELD_OUT", "TAUGHT", "as_examples", "blocks", "documents", "spread", "token_stream"]

TAUGHT = ("squad_v1.1_train_part", "squadshifts_new_wiki", "squadshifts_amazon_reviews", "nq_open_oracle_litm")
HELD_OUT = ("squad_v1.1_dev",)  # other articles than those of the train part


def documents(
    names: Iterable[str],  # of `bft_nb.qa.QA_SETS`, or "lookup"
    besides: Iterable[str] = (),  # texts to leave out
) -> list[str]:
    "The distinct contexts of these sets; `ValueError` for an unknown name."
    seen = dict.fromkeys(q.context for name in names for q in load_questions(name, progress=False))
    left_out = set(besides)
    return [text for text in seen if text not in left_out]


def token_stream(texts: Sequence[str], tokenizer: Any) -> Tensor:
    "All texts as one row of tokens, a blank line between two; no BOS, no end token. `ValueError` without a text."
    if not len(texts):
        raise ValueError("texts must hold one at least")
    rows = tokenizer([f"{text}\n\n" for text in texts], add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for row in rows for token in row])


def blocks(
    tokens: Tensor,  # of `token_stream`
    length: int,  # of a block, the BOS token included
    bos: int | None = None,  # id of the token in front of each block; None: there is none
) -> Tensor:  # (n, length); what is left over at the end is dropped
    "The stream in blocks; `ValueError` if it is shorter than one."
    check_count("length", length)
    width = length - (bos is not None)
    if width < 1:
        raise ValueError(f"length must leave room for a token after BOS, got {length}")
    n = len(tokens) // width
    if not n:
        raise ValueError(f"the text has {len(tokens)} tokens, fewer than the {width} that a block of length {length} needs")
    cut = tokens[: n * width].reshape(n, width)
    return cut if bos is None else torch.cat([cut.new_full((n, 1), bos), cut], 1)


def spread(rows: Tensor, n: int) -> Tensor:
    "So many of the blocks, evenly spaced; `ValueError` if there are fewer."
    check_count("n", n)
    if n > len(rows):
        raise ValueError(f"the text makes {len(rows)} blocks, fewer than the {n} that are asked for")
    return rows[torch.linspace(0, len(rows) - 1, n).round().long()]


def as_examples(rows: Tensor) -> list[Example]:
    "Blocks to learn from: every token but the first is to be predicted."
    return [Example(row, torch.cat([row.new_full((1,), IGNORED), row[1:]])) for row in rows]
