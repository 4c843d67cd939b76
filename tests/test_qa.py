"Questions, labels, noise, losses and scores: properties, independent routes to the same number, and what must be refused."

import inspect
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bft_nb import qa, qa_formats
from bft_nb.download import DownloadError, Source
from bft_nb.models import load_model, tiny_llama, tiny_tokenizer
from bft_nb.qa import IGNORED, Collator, Example, Question, answer, answer_loss, corrupt, encode, focal, generalised_cross_entropy, lookup, swap_answers

ADA = Question("ada", "How many keys does Ada keep?", "Ada keeps 7 red keys in Rome.", ("7", "7 red keys"))


def tokenizers():
    words, letters = load_model("tiny")[1], tiny_tokenizer()
    shared = tiny_tokenizer()
    shared.pad_token = shared.eos_token
    return {"words": words, "bytes": letters, "pad is end": shared}


TOKENIZERS = tokenizers()
WORDS = TOKENIZERS["words"]
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


@pytest.fixture(scope="module")
def model():
    return load_model("tiny")[0]


def examples(n=8, facts=2, seed=0, tokenizer=WORDS):
    return [encode(q, tokenizer, 512) for q in lookup(n, facts, seed)]


# labels -----------------------------------------------------------------------------------------------------------------

text = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
some = text.filter(lambda s: s.strip())


@settings(max_examples=60)
@given(before=text, inside=some, after=text, question=some, name=st.sampled_from(sorted(TOKENIZERS)))
def test_labels_are_the_answer_and_the_end_after_any_prompt(before, inside, after, question, name):
    tokenizer = TOKENIZERS[name]
    q = Question("q", question, f"{before} {inside} {after}", (inside,))
    e = encode(q, tokenizer, 4096)
    n = len(e.answer)
    assert (e.labels[:-n] == IGNORED).all() and torch.equal(e.labels[-n:], e.input_ids[-n:])
    assert e.answer[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(e.answer[:-1]).strip() == inside.strip()
    assert tokenizer.decode(e.input_ids[:-n], skip_special_tokens=True) == qa.prompt(q)
    assert qa.prompt_ids(q, tokenizer) == e.input_ids[:-n].tolist()


@each_tokenizer
def test_end_tokens_inside_the_context_get_no_label_and_the_last_one_does(tokenizer):
    q = replace(ADA, context=f"{tokenizer.eos_token} {ADA.context} {tokenizer.pad_token}")
    e = encode(q, tokenizer, 512)
    assert int((e.input_ids == tokenizer.eos_token_id).sum()) >= 2
    batch = Collator(tokenizer)([e, encode(lookup(1, 3)[0], tokenizer, 512)])
    assert all((row == tokenizer.eos_token_id).sum() == 1 for row in batch["labels"])


def test_the_model_is_told_what_told_says():
    e = encode(replace(ADA, told="grey"), WORDS, 512)
    assert WORDS.decode(e.answer[:-1]).strip() == "grey"


class Merging:
    "a tokenizer that knows no boundary before an answer"

    eos_token_id, pad_token_id = 0, 1

    def __call__(self, text, **_): return {"input_ids": [len(text) + 2]}


class Ending(Merging):
    def __call__(self, text, **_): return {"input_ids": [5, self.eos_token_id]}


def test_tokenizers_that_cannot_be_used():
    with pytest.raises(ValueError, match="does not separate '7' from the colon"):
        encode(ADA, Merging(), 512)
    with pytest.raises(ValueError, match="add_eos_token=False"):
        qa.prompt_ids(ADA, Ending())
    bare = tiny_tokenizer()
    bare.pad_token = None
    with pytest.raises(ValueError, match="no padding token: set tokenizer.pad_token = tokenizer.eos_token"):
        encode(ADA, bare, 512)
    bare.eos_token = None
    with pytest.raises(ValueError, match="no end token"):
        Collator(bare)


# too long ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(words=st.lists(st.sampled_from("aa b  ccc d.".split(" ")), min_size=1, max_size=40), at=st.integers(0, 40), size=st.integers(60, 200))
def test_the_window_around_the_answer_is_the_longest_that_fits(words, at, size):
    words = [*words[:at], "zeta eta", *words[at:]]
    q = Question("q", "Which?", " ".join(words), ("zeta eta",))
    byte = TOKENIZERS["bytes"]
    whole = encode(q, byte, 4096)
    e = encode(q, byte, size, truncate="answer")
    assert len(e.input_ids) <= size and torch.equal(e.answer, whole.answer)
    shown = byte.decode(e.input_ids, skip_special_tokens=True).split("\n")[0].removeprefix("Context: ")
    assert shown in q.context and "zeta eta" in shown
    if shown.split() != q.context.split():
        assert len(e.input_ids) + 1 + max(map(len, words)) + 8 > size  # one more word would not have fitted


def test_the_end_is_cut_and_must_not_hold_the_answer():
    long = replace(ADA, context=ADA.context + " And so on." * 50)
    e = encode(long, WORDS, 60, truncate="end")
    assert len(e.input_ids) <= 60 and "Ada keeps 7 red keys" in WORDS.decode(e.input_ids)
    hidden = replace(ADA, context="And so on. " * 50 + ADA.context)
    with pytest.raises(ValueError, match="'7' is not in its context"):
        encode(hidden, WORDS, 60, truncate="end")


def test_the_window_keeps_the_occurrence_that_was_annotated():
    q = Question("q", "Which?", "x7 " * 30 + "the year 7 of " + "y " * 30, ("7",), start=99)
    assert q.context[99] == "7"
    e = encode(q, TOKENIZERS["bytes"], 90, truncate="answer")
    assert "year 7 of" in TOKENIZERS["bytes"].decode(e.input_ids)


# noise ------------------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(low=st.floats(0, 1), high=st.floats(0, 1), seed=st.integers(0, 99), n=st.integers(1, 6))
def test_noise_touches_labels_only_and_grows_with_np(low, high, seed, n):
    low, high = sorted((low, high))
    clean = examples(6)
    less, more = corrupt(clean, low, 10_000, seed), corrupt(clean, high, 10_000, seed)
    for c, a, b in zip(clean, less, more):
        assert a.input_ids is c.input_ids and torch.equal(a.labels == IGNORED, c.labels == IGNORED)
        hit = a.labels != c.labels
        assert torch.equal(a.labels[hit], b.labels[hit])
    assert all(torch.equal(x.labels, y.labels) for x, y in zip(corrupt(clean[:n], low, 10_000, seed), less))


def test_rate_and_distribution_of_noise():
    clean = examples(2000)
    noisy = corrupt(clean, 0.3, 1000)
    new = torch.cat([b.answer[a.answer != b.answer] for a, b in zip(clean, noisy)])
    total = sum(len(e.answer) for e in clean)
    wanted = 0.3 * (1 - 1 / 1000)
    assert abs(len(new) / total - wanted) < 4 * (wanted * (1 - wanted) / total) ** 0.5
    ends = sum(int(b.answer[-1] != a.answer[-1]) for a, b in zip(clean, noisy))
    assert abs(ends / 2000 - wanted) < 4 * (wanted * (1 - wanted) / 2000) ** 0.5
    counts = torch.bincount(new // 100, minlength=10).double()
    assert ((counts - len(new) / 10) ** 2 / (len(new) / 10)).sum() < 27.9  # χ² of 9 degrees of freedom, 0.1 %
    assert 0 <= new.min() and new.max() < 1000


def test_no_noise_and_nothing_but_noise():
    clean = examples()
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(clean, corrupt(clean, 0, 50)))
    assert all((b.answer == 0).all() for b in corrupt(clean, 1, 1))


@settings(max_examples=60)
@given(n=st.integers(2, 30), noise=st.floats(0, 1), seed=st.integers(0, 99))
def test_a_swap_is_a_derangement(n, noise, seed):
    questions = [Question(str(i), "Which?", f"It is a{i}.", (f"a{i}",)) for i in range(n)]
    if round(noise * n) == 1:
        with pytest.raises(ValueError, match="can't be exchanged with nobody"):
            swap_answers(questions, noise, seed)
        return
    swapped = swap_answers(questions, noise, seed)
    moved = [q for q in swapped if q.told is not None]
    assert len(moved) == round(noise * n) and all(q.told != q.target for q in moved)
    assert sorted(q.told for q in moved) == sorted(q.target for q in moved)
    assert [replace(q, told=None) for q in swapped] == questions
    assert swap_answers(questions, noise, seed) == swapped


# batches ----------------------------------------------------------------------------------------------------------------


def losses_of(model, batch):
    labels = batch.pop("labels")
    return qa.label_log_probs(model(**batch).logits, labels)


def test_padding_side_and_company_change_nothing(model):
    es = [*examples(3, 1), *examples(3, 4), encode(replace(lookup(1)[0], question="What?"), WORDS, 512)]
    with torch.no_grad():
        alone = torch.cat([losses_of(model, Collator(WORDS)([e])) for e in es])
        for side in ("left", "right"):
            torch.testing.assert_close(losses_of(model, Collator(WORDS, side)(es)), alone, rtol=1e-4, atol=1e-5)


def test_padding_side_changes_no_gradient(model):
    es = [*examples(2, 1), *examples(2, 4)]
    found = []
    for side in ("left", "right"):
        model.zero_grad()
        losses_of(model, Collator(WORDS, side)(es)).sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_the_loss_is_that_of_the_model_itself(model):
    es = examples(4)
    batch = Collator(WORDS, "right")(es)
    ours = -losses_of(model, dict(batch)).mean()
    theirs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=qa.pad([e.labels for e in es], IGNORED, "right")).loss
    torch.testing.assert_close(ours, theirs)


def test_the_collator_asks_for_few_scores():
    batch = Collator(WORDS)(examples(20, 4))
    assert len(batch["logits_to_keep"]) == max(len(e.answer) for e in examples(20, 4)) < batch["input_ids"].shape[1] / 4
    assert int((batch["labels"] != IGNORED).sum()) == sum(len(e.answer) for e in examples(20, 4))


# losses -----------------------------------------------------------------------------------------------------------------


def test_limits_of_the_losses():
    log_p = -torch.rand(100, dtype=torch.float64) * 10
    torch.testing.assert_close(generalised_cross_entropy(log_p, 1e-7), -log_p, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(generalised_cross_entropy(log_p, 1.0), 1 - log_p.exp())
    torch.testing.assert_close(focal(log_p, 0.0), -log_p)
    torch.testing.assert_close(focal(log_p, 2.0), (1 - log_p.exp()) ** 2 * -log_p)


@pytest.mark.parametrize("loss", [qa.cross_entropy, focal, lambda x: focal(x, 0.5), lambda x: focal(x, 0.0), generalised_cross_entropy])
def test_losses_are_finite_at_the_ends(loss):
    x = torch.tensor([0.0, -1e-30, -1e-8, -5.0, -1e4], requires_grad=True)
    out = loss(x)
    assert torch.isfinite(out).all() and (out >= 0).all() and out[0] == 0
    assert torch.isfinite(torch.autograd.grad(out.sum(), x)[0]).all()
    y = -torch.rand(8, dtype=torch.float64) - 0.01
    assert torch.autograd.gradcheck(loss, (y.requires_grad_(),))


def test_wrong_tokens_pull_more_under_focal_and_less_under_gce():
    at = torch.tensor([0.9, 1e-4]).log()
    f, g = qa.loss_weight(at, focal), qa.loss_weight(at, generalised_cross_entropy)
    assert f[1] / f[0] > 10 and g[1] / g[0] < 0.01
    torch.testing.assert_close(g, at.exp() ** 0.7)


@pytest.mark.parametrize("vocab", [2, 7, 300])
@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
def test_noise_floor_is_the_entropy_of_the_label(noise, vocab):
    p = torch.full((vocab,), noise / vocab, dtype=torch.float64)
    p[0] += 1 - noise
    assert qa.noise_floor(noise, vocab) == pytest.approx(float(torch.special.entr(p).sum()))


def train(folder, batch_size, accumulation, loss):
    from transformers import Trainer, TrainingArguments

    made = load_model("tiny")[0]
    args = TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation, learning_rate=1e-3, use_cpu=True,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False, seed=0,
    )  # fmt: skip
    Trainer(made, args, data_collator=Collator(WORDS), train_dataset=examples(8, 1), compute_loss_func=loss).train()
    return made


def test_splitting_a_step_changes_nothing(tmp_path):
    whole, parts = train(tmp_path / "a", 8, 1, qa.loss_func("focal")), train(tmp_path / "b", 2, 4, qa.loss_func("focal"))
    start = load_model("tiny")[0]
    moved = [float((a - b).detach().abs().max()) for a, b in zip(whole.parameters(), start.parameters())]
    assert max(moved) > 1e-4
    for a, b in zip(whole.parameters(), parts.parameters()):
        assert float((a - b).detach().abs().mean()) < 1e-5


def test_the_trainer_counts_every_label(tmp_path):
    counts = []

    def loss(outputs, labels, num_items_in_batch=None):
        counts.append(int(num_items_in_batch))
        return answer_loss(outputs, labels, num_items_in_batch)

    train(tmp_path, 4, 2, loss)
    assert counts == [sum(len(e.answer) for e in examples(8, 1))] * 4


def test_a_loss_without_a_count_is_the_mean(model):
    batch = Collator(WORDS)(examples(3))
    labels = batch.pop("labels")
    outputs = model(**batch)
    n = int((labels != IGNORED).sum())
    torch.testing.assert_close(answer_loss(outputs, labels), answer_loss(outputs, labels, torch.tensor(n)))
    torch.testing.assert_close(answer_loss(outputs, labels, 2 * n), answer_loss(outputs, labels) / 2)


def test_half_precision_scores_are_compared_in_single():
    logits = torch.randn(1, 2, 50).bfloat16()
    got = qa.label_log_probs(logits, torch.tensor([[IGNORED, 3, IGNORED]]))
    torch.testing.assert_close(got, logits.float().log_softmax(-1)[0, 0, 3:4])


# answers and scores -----------------------------------------------------------------------------------------------------


def test_answers_do_not_depend_on_their_company(model):
    questions = [*lookup(4, 1), *lookup(4, 5, seed=3)]
    model.train()
    alone = [answer(model, WORDS, [q], max_new_tokens=5)[0] for q in questions]
    assert answer(model, WORDS, questions, max_new_tokens=5, batch_size=3) == alone
    assert model.training and len(set(alone)) > 1
    model.eval()
    assert answer(model, WORDS, [], max_new_tokens=5) == []


def test_answers_stop_at_the_end_token_and_the_first_line():
    made = tiny_llama(WORDS)
    newline = WORDS("\n", add_special_tokens=False)["input_ids"][0]
    with torch.no_grad():
        for p in made.parameters(): p.zero_()
    made.lm_head.weight = torch.nn.Parameter(torch.zeros(len(WORDS), 64))  # constant scores: the first token wins, padding
    made.config.tie_word_embeddings = False
    assert answer(made, WORDS, [ADA], max_new_tokens=3) == [""]
    assert qa.first_line(f" \n 7 {WORDS.decode([newline])} 8") == "7" and qa.first_line(" \n ") == ""


def test_contexts_that_do_not_fit_the_model(model):
    long = replace(ADA, context=ADA.context * 100)
    with pytest.raises(ValueError, match=r"'ada' is longer than the model's 512 tokens, 4 of them for the answer, it has \d{3}"):
        answer(model, WORDS, [long], max_new_tokens=4)
    with pytest.raises(ValueError, match=r"an example has \d{3,} tokens, longer than the model's 512: encode it with max_length=512 at most"):
        qa.mean_nll(model, [encode(long, WORDS, 9999)], Collator(WORDS))
    for empty in ("question", "context"):
        with pytest.raises(ValueError, match=f"'ada': the {empty} is empty"):
            answer(model, WORDS, [replace(ADA, **{empty: " "})])
    assert len(answer(model, WORDS, [long], max_new_tokens=4, truncate="end")) == 1
    with pytest.raises(ValueError, match="truncate must be one of 'error', 'end', got 'answer'"):
        answer(model, WORDS, [ADA], truncate="answer")


def test_mean_nll(model):
    es = examples(5)
    batch = Collator(WORDS)(es)
    labels = batch.pop("labels")
    with torch.no_grad(): wanted = answer_loss(model(**batch), labels)
    assert qa.mean_nll(model, es, Collator(WORDS), 2) == pytest.approx(float(wanted), rel=1e-4)
    with pytest.raises(ValueError, match="one at least"):
        qa.mean_nll(model, [], Collator(WORDS))


@settings(max_examples=200)
@given(text)
def test_normalise_is_that_of_torchmetrics(s):
    from torchmetrics.functional.text.squad import _normalize_text

    assert qa.normalise(s) == _normalize_text(s)


def test_scores_are_those_of_torchmetrics():
    from torchmetrics.text import SQuAD

    questions = lookup(30, 2)
    predictions = [q.target if i % 3 else f"the {q.context}" for i, q in enumerate(questions)]
    found, metric = qa.score(predictions, questions), SQuAD()
    metric.update([{"id": q.id, "prediction_text": p} for p, q in zip(predictions, questions)], [{"id": q.id, "answers": {"text": list(q.answers), "answer_start": [0]}} for q in questions])
    means = metric.compute()
    assert 100 * found.exact.mean() == pytest.approx(float(means["exact_match"])) and 100 * found.f1.mean() == pytest.approx(float(means["f1"]), rel=1e-5)
    assert (found.subspan == 1).all() and 0 < found.exact.mean() < 1


@pytest.mark.parametrize(
    ("prediction", "answers", "wanted"),
    [("it is Rome, Italy", ("rome italy",), True), ("\n\nRome\nOslo", ("Oslo",), False), ("Rome", ("the",), False), ("", ("Rome",), False), ("The U.S.", ("us",), True)],
)
def test_subspan(prediction, answers, wanted):
    assert qa.subspan(prediction, answers) is wanted


# the embedded task ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("facts", [1, 3, 6])
def test_lookup(facts):
    questions = lookup(50, facts)
    for q in questions:
        qa.check_question(q)
        assert len(q.context.split(". ")) == facts
    assert lookup(20, facts) == questions[:20] and lookup(20, facts, seed=1) != questions[:20]
    assert {q.question.split()[0] for q in questions} == {"Who", "How", "Which", "Where", "What"}
    # the answer stands in the sentence that the question is about
    for q in questions:
        named = [w for w in q.question.rstrip("?").split() if w in (*qa._PEOPLE, *qa._THINGS)]
        sentence = q.context[q.context.rfind(".", 0, q.span[0]) + 1 :].split(".")[0]
        assert all(w in sentence for w in named)


# files ------------------------------------------------------------------------------------------------------------------


SQUAD = {"data": [{"title": "Keys", "paragraphs": [{"context": ADA.context, "qas": [
    {"id": "a", "question": " How many? ", "answers": [{"text": "7", "answer_start": 10}, {"text": "7", "answer_start": 10}]},
    {"id": "b", "question": "Where?", "answers": [{"text": "Rome", "answer_start": 24}]}]}]}]}  # fmt: skip


def register(monkeypatch, source, reader="squad_json", n=2, contexts=1):
    monkeypatch.setitem(qa.QA_SETS, "small", qa.QASet("small", "Small", "https://example.org", "test", n, contexts, source, reader))


def test_official_squad_is_downloaded_checked_and_kept(publisher, home, monkeypatch):
    root, url = publisher
    (root / "s.json").write_text(json.dumps(SQUAD))
    register(monkeypatch, Source(url + "s.json"))
    questions = qa.load_questions("small", progress=False)
    assert questions[0] == Question("a", "How many?", ADA.context, ("7",), 10, "Keys") and questions[1].target == "Rome"
    (root / "s.json").unlink()
    assert qa.load_questions("small", progress=False) == questions
    assert [p.name for p in home.rglob("*") if p.is_file()] == ["s.json"]


def test_lost_in_the_middle(publisher, monkeypatch):
    root, url = publisher
    line = {"question": "Where is it?", "answers": ["in Rome"], "ctxs": [{"title": "A", "text": "no\nthing"}, {"title": "B", "text": "It is in Rome."}]}
    (root / "n.jsonl").write_text(json.dumps(line) + "\n")
    register(monkeypatch, Source(url + "n.jsonl"), "litm_jsonl", n=1)
    (q,) = qa.load_questions("small", progress=False)
    assert q.context == "[1] A: no thing\n[2] B: It is in Rome." and q.target == "in Rome"


def test_files_that_are_something_else(publisher, home, monkeypatch):
    root, url = publisher
    (root / "s.json").write_text('{"data": [1]}')
    register(monkeypatch, Source(url + "s.json"))
    with pytest.raises(DownloadError, match="s.json is not in the format of SQuAD"): qa.load_questions("small", progress=False)
    register(monkeypatch, Source(url + "s.json", md5="0" * 32))
    with pytest.raises(DownloadError, match="(?s)wrong checksum.*Either run again with access to https://example.org, or put small.parquet or s.json"): qa.load_questions("small", progress=False)
    (root / "t.json").write_text(json.dumps(SQUAD))
    register(monkeypatch, Source(url + "t.json"), n=3)
    with pytest.raises(ValueError, match=r"found .questions, contexts. \(2, 1\), the data set has \(3, 1\)"): qa.load_questions("small", progress=False)
    (root / "n.jsonl").write_text('{"question": "?"}\n')
    with pytest.raises(DownloadError, match="not in the format of Lost in the Middle"): qa_formats.litm_jsonl(root / "n.jsonl")


def test_what_is_not_published(home, monkeypatch):
    with pytest.raises(DownloadError, match="put squad_v1.1_train_part.parquet into a folder and set BFT_DATA"): qa.load_questions("squad_v1.1_train_part")
    with pytest.raises(DownloadError, match=r"nq_open_bm25_distractors.parquet is not published.*nq_open_20_gold_at_0"): qa.nq_with_distractors(2)
    register(monkeypatch, Source("http://127.0.0.1:9/s.json"))
    with pytest.raises(DownloadError, match="could not download"): qa.load_questions("small", progress=False)


def test_own_files(home, tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "mine" / "qa"
    folder.mkdir(parents=True)
    monkeypatch.setenv("BFT_DATA", str(tmp_path / "mine"))
    register(monkeypatch, None)
    rows = [{"id": str(i), "title": "", "context": ADA.context, "question": "How many?", "answers": ["7"], "answer_starts": [10]} for i in range(2)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "small.parquet")
    assert [q.span for q in qa.load_questions("small")] == [(10, 11)] * 2
    pq.write_table(pa.Table.from_pylist(rows).drop(["answers"]), folder / "small.parquet")
    with pytest.raises(ValueError, match="small.parquet has no column 'answers'"): qa.load_questions("small")
    (folder / "small.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="small.parquet cannot be read as Parquet"): qa.load_questions("small")


@pytest.mark.parametrize(("place", "at"), [("first", 0), ("middle", 2), ("last", 3)])
def test_the_gold_passage_stands_where_it_should(place, at):
    lines = qa.among(("G", "gold"), [("A", "1"), ("B", "2"), ("C", "3")], place).split("\n")
    assert lines[at] == f"[{at + 1}] G: gold" and [line.split(": ")[1] for line in lines if "gold" not in line] == ["1", "2", "3"]


def skip_unless_there(*files):
    if not any(map(qa.own_file, files)): pytest.skip(f"BFT_DATA is not set, or holds no {files[0]}")


@pytest.mark.parametrize("name", ["squad_v1.1_dev", "squad_v1.1_train_part", "squadshifts_new_wiki", "squadshifts_amazon_reviews", "nq_open_oracle_litm"])
def test_real_files(name):
    source = qa.QA_SETS[name].source
    skip_unless_there(f"{name}.parquet", *([source.filename] if source else []))
    for q in qa.load_questions(name): qa.check_question(q)


def test_real_distractors():
    skip_unless_there("nq_open_bm25_distractors.parquet")
    alone, far = qa.nq_with_distractors(0), qa.nq_with_distractors(20, "last")
    assert [q.id for q in alone] == [q.id for q in far] and len(alone) == 2652
    for q, r in zip(alone[:200], far[:200]):
        qa.check_question(r)
        assert r.context.split("\n")[-1].split(": ", 1)[1] == q.context.split(": ", 1)[1] and r.context.count("\n") == 20


# what is refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: encode(replace(ADA, context=" "), WORDS, 99), ValueError, "'ada': the context is empty"),
        (lambda: encode(replace(ADA, question=""), WORDS, 99), ValueError, "the question is empty"),
        (lambda: encode(replace(ADA, answers=()), WORDS, 99), ValueError, "answers must be one text at least"),
        (lambda: encode(replace(ADA, answers=("7", " ")), WORDS, 99), ValueError, "none of them empty"),
        (lambda: encode(replace(ADA, answers=("eight",)), WORDS, 99), ValueError, "the answer 'eight' is not in its context"),
        (lambda: encode(replace(ADA, start=3), WORDS, 99), ValueError, "not in its context"),
        (lambda: encode(replace(ADA, told=" "), WORDS, 99), ValueError, "told must be a text or None"),
        (lambda: encode(ADA, WORDS, 10), ValueError, r"longer than max_length=10 tokens, it has \d\d: shorten its context, or choose"),
        (lambda: encode(ADA, WORDS, 10, "answer"), ValueError, "even without its context"),
        (lambda: encode(ADA, WORDS, 99, "start"), ValueError, "truncate must be one of 'error', 'answer', 'end', got 'start'"),
        (lambda: encode(ADA, WORDS, 0), ValueError, "max_length must be at least 1, got 0"),
        (lambda: corrupt(examples(1), 1.5, 9), ValueError, "noise must lie in 0 … 1, got 1.5"),
        (lambda: corrupt(examples(1), -0.1, 9), ValueError, "noise must lie in 0 … 1, got -0.1"),
        (lambda: corrupt(examples(1), float("nan"), 9), ValueError, "noise must lie in 0 … 1, got nan"),
        (lambda: qa.check_share("noise", "0.3"), ValueError, "noise must lie in 0 … 1, got '0.3'"),
        (lambda: corrupt(examples(1), True, 9), ValueError, "noise must lie in 0 … 1, got True"),
        (lambda: corrupt(examples(1), 0.5, 0), ValueError, "vocab_size must be at least 1, got 0"),
        (lambda: swap_answers(lookup(3), 2.0), ValueError, "noise must lie in 0 … 1, got 2.0"),
        (lambda: Collator(WORDS, "top"), ValueError, "side must be one of 'left', 'right', got 'top'"),
        (lambda: Collator(WORDS)([Example(torch.tensor([1, 2]), torch.tensor([IGNORED, IGNORED]))]), ValueError, "all labels are masked"),
        (lambda: Collator(WORDS)([Example(torch.tensor([1, 2]), torch.tensor([1, 2]))]), ValueError, "the first token has a label"),
        (lambda: focal(torch.zeros(1), -1.0), ValueError, "gamma must be ≥ 0 and finite, got -1.0"),
        (lambda: generalised_cross_entropy(torch.zeros(1), 0.0), ValueError, "q must be positive"),
        (lambda: generalised_cross_entropy(torch.zeros(1), 2.0), ValueError, "q must lie in 0 … 1, got 2.0"),
        (lambda: qa.loss_func("mae"), ValueError, "name must be one of 'ce', 'focal', 'gce', got 'mae'"),
        (lambda: qa.loss_func("ce", gamma=1.0), TypeError, "gamma"),
        (lambda: qa.label_log_probs(torch.randn(1, 3, 9), torch.full((1, 4), IGNORED)), ValueError, "all labels are masked"),
        (lambda: qa.label_log_probs(torch.randn(1, 4, 9), torch.ones(1, 4).long()), ValueError, r"one column more than logits have places, got 4 and 4 in \(1, 4, 9\): use `Collator`"),
        (lambda: inspect.unwrap(qa.check_example)(Example(torch.tensor([1]), torch.tensor([1, 2]))), ValueError, "must have one shape"),
        (lambda: qa.score([], []), ValueError, "one at least: got 0 and 0"),
        (lambda: qa.score(["7"], [ADA, ADA]), ValueError, "got 1 and 2"),
        (lambda: lookup(3, 7), ValueError, "facts must be at most 6, the number of things, got 7"),
        (lambda: lookup(0), ValueError, "n must be at least 1, got 0"),
        (lambda: qa.load_questions("squad_v1.1_dv"), ValueError, "did you mean 'squad_v1.1_dev'"),
        (lambda: qa.nq_with_distractors(21), ValueError, "k must be at most 20, got 21"),
        (lambda: qa.nq_with_distractors(2, "second"), ValueError, "gold must be one of 'first', 'middle', 'last', got 'second'"),
        (lambda: qa.noise_floor(-1.0, 9), ValueError, "noise must lie in 0 … 1, got -1.0"),
    ],
)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
