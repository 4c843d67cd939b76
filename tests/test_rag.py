"Snippets give nothing away, and growing contexts are answered as each alone."

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bft_nb import rag
from bft_nb.llama import convert
from bft_nb.models import load_model
from bft_nb.qa import Retrieved, answer, check_question
from bft_nb.rag import answer_growing, lookup_retrieved, mixed, snippet, snippets

TEXT = "one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def retrieved():
    return lookup_retrieved(30)


@given(st.integers(1, 12), st.integers(0, 9), st.integers(1, 3), st.integers(0, 99))
def test_a_snippet_is_so_many_words_and_holds_the_answer(words, at, length, seed):
    answer_ = " ".join(TEXT.split()[at : at + length])
    found = snippet(TEXT, words, random.Random(seed), [answer_])
    assert found in TEXT and answer_ in found and len(found.split()) == min(max(words, len(answer_.split())), 10)


def test_the_place_of_the_answer_is_drawn():
    rng = random.Random(0)
    begins = {snippet(TEXT, 4, rng, ["five"]).split()[0] for _ in range(200)}
    assert begins == {"two", "three", "four", "five"}
    assert {snippet(TEXT, 8, rng).split()[0] for _ in range(200)} == {"one", "two", "three"} and snippet("", 3, rng) == ""


def test_snippets_are_the_same_every_time_and_keep_the_answer(retrieved):
    for r in retrieved:
        cut = snippets(r, 5)
        assert cut == snippets(r, 5) and cut.distractors != r.distractors
        check_question(cut.over(0))
        assert {len(text.split()) for _, text in (cut.gold, *cut.distractors)} == {5}
    assert snippets(retrieved[0], 0) == retrieved[0]  # whole
    with pytest.raises(ValueError, match="words must be at least 0"):
        snippets(retrieved[0], -1)


def test_mixed_contexts(retrieved):
    found = mixed(retrieved * 20, 2)
    sizes = [q.context.count("\n") for q in found]
    assert set(sizes) == {0, 1, 2} and found == mixed(retrieved * 20, 2) != mixed(retrieved * 20, 2, seed=1)
    gold = [next(i for i, line in enumerate(q.context.split("\n")) if line.endswith(r.gold[1])) for q, r in zip(found, retrieved * 20)]
    assert {(g, n) for g, n in zip(gold, sizes)} == {(i, n) for n in range(3) for i in range(n + 1)}


@pytest.mark.parametrize("filtering", [False, True])
def test_growing_contexts_are_answered_as_each_alone(filtering, retrieved):
    model, tokenizer = load_model("tiny")
    model = convert(model, beta_a=1.0, beta_g=0.5) if filtering else model
    model.train()
    for order in ([(0, "first"), (2, "first"), (5, "first")], [(2, "middle"), (2, "last"), (5, "middle")], [(3, "last")]):
        contexts = [[r.over(k, place) for r in retrieved] for k, place in order]
        together = answer_growing(model, tokenizer, contexts, max_new_tokens=6, batch_size=7)
        assert together == [answer(model, tokenizer, questions, max_new_tokens=6) for questions in contexts]
        assert len({text for texts in together for text in texts}) > 3 and model.training


def test_what_is_shared_is_read_once(retrieved, monkeypatch):
    model, tokenizer = load_model("tiny")
    read, widths = rag.Reader.read, []

    def counting(self, ids, mask):
        widths.append(ids.shape[1])
        return read(self, ids, mask)

    monkeypatch.setattr(rag.Reader, "read", counting)
    contexts = [[r.over(k)] for r in retrieved[:1] for k in (0, 2, 5)]
    answer_growing(model, tokenizer, contexts, max_new_tokens=1)
    whole = [len(rag.prompt_ids(q[0], tokenizer)) for q in contexts]
    assert whole[-1] < sum(widths) < 0.8 * sum(whole)


def test_contexts_that_do_not_go_together(retrieved):
    model, tokenizer = load_model("tiny")
    with pytest.raises(ValueError, match="each context must begin as the one before"):
        answer_growing(model, tokenizer, [[r.over(k) for r in retrieved[:2]] for k in (2, 5, 0, 1)])
    with pytest.raises(ValueError, match=r"the same questions, one at least, got \[2, 1\]"):
        answer_growing(model, tokenizer, [[r.over(0) for r in retrieved[:2]], [retrieved[0].over(1)]])
    with pytest.raises(ValueError, match=r"the same questions, one at least, got \[\]"):
        answer_growing(model, tokenizer, [])
    for part in ("question", "context"):
        with pytest.raises(ValueError, match=f"the {part} is empty"):
            answer_growing(model, tokenizer, [[replace(r.over(0), **{part: " "}) for r in retrieved[:2]]])
    model.config.max_position_embeddings = 60
    with pytest.raises(ValueError, match="longer than the model's 60"):
        answer_growing(model, tokenizer, [[retrieved[0].over(5)]])
    with pytest.raises(ValueError, match="k must be at most 5, got 6"):
        retrieved[0].over(6)
    assert isinstance(retrieved[0], Retrieved)
