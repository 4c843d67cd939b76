"What the language studies refuse, before a model is loaded; their pages and `--dry-run` ask the same function."

import pytest
from helpers import ROOT

from bft_nb import rag, runner
from bft_nb.qa import QA_SETS, lookup
from bft_nb.qa_settings import ASKED, PASSAGES, RETRIEVED, check_enough, check_length, check_settings, passage_settings
from bft_nb.results import model_name

DEFAULTS = {name: runner.allowed_parameters(runner.find_notebook(name, ROOT)) for name in ("squad_noise", "rag_distractors")}
SHARED = [
    (dict(method="dpo"), "method must be one of 'sft'"), (dict(adapter="ia3"), "adapter must be one of 'lora', 'full', got 'ia3'"),
    (dict(dtype="float16"), "dtype must be one of 'float32', 'bfloat16'"), (dict(data="squad"), "data must be one of 'lookup'"),
    (dict(steps=-4), "steps must be at least 1, got -4"), (dict(batch_size=0), "batch_size must be at least 1, got 0"), (dict(seed=-1), "seed must be at least 0"),
    (dict(lr=-1.0), "lr must be positive and finite, got -1.0"), (dict(precision_lr=-1.0), "precision_lr must be ≥ 0 and finite"),
    (dict(max_length=16), "max_length must be at least 17, got 16"), (dict(max_length=4096), "max_length must be at most 512, the tokens that the model can take, got 4096"),
    (dict(store=True), "are not stored"), (dict(model="/"), "the last part of model is part of a file name and must consist"), (dict(model="a model"), "the last part of model"),
]  # fmt: skip
OWN = {
    "squad_noise": [
        (dict(noise=1.5), "noise must lie in 0 … 1, got 1.5"), (dict(corruption="gauss"), "corruption must be one of 'uniform', 'swap'"),
        (dict(n_eval=0), "n_eval must be at least 1, got 0"), (dict(n_eval=-5), "n_eval must be at least 1, got -5"),
        (dict(n_eval=401), "n_eval must be at most 400, the questions there are to be asked, got 401"),
        (dict(data="squad_v1.1_train", n_eval=10_571), "n_eval must be at most 10570"),
    ],
    "rag_distractors": [
        (dict(n_eval=-1), "n_eval must be at least 0, got -1"), (dict(n_eval=201), "n_eval must be at most 200, half of the questions of lookup, got 201"),
        (dict(data="nq_open_bm25_distractors", n_eval=2000), "n_eval must be at most 1326, half of the questions of nq_open_bm25_distractors"),
        (dict(passages={"ks": [0, 6]}), "each of ks must be at most 5, the distractors of a question of lookup, got 6"), (dict(passages={"ks": [-1, 5]}), "each of ks must be at least 0, got -1"),
        (dict(data="nq_open_bm25_distractors", passages={"ks": [0, 25]}), "each of ks must be at most 20"), (dict(passages={"ks": [5]}), "ks must be two numbers"), (dict(passages={"ks": [5, 0]}), "in ascending order"),
        (dict(passages={"k_train": 6}), "k_train must be at most 5"), (dict(passages={"words": -1}), "words must be at least 0, got -1"),
        (dict(without=["gain"]), "each of without must be one of 'kriging', 'kalman', got 'gain'"), (dict(method="sft", without=["kalman"]), "without must be empty for sft, which is no filter, got ['kalman']"),
        (dict(passages={"gold": "second"}), "gold must be one of 'first', 'middle', 'last', got 'second'"), (dict(passages={"wrods": 3}), "a name in passages must be one of 'ks', 'k_train', 'words', 'gold'"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("page", "change", "says"), [(page, *case) for page in DEFAULTS for case in SHARED + OWN[page]])
def test_what_is_refused(page, change, says):
    with pytest.raises(ValueError) as raised:
        check_settings(DEFAULTS[page] | change)
    assert says in str(raised.value)


@pytest.mark.parametrize("page", DEFAULTS)
def test_what_is_of_another_type(page):
    for change in (dict(steps=2.5), dict(n_eval=1e2)):
        with pytest.raises(TypeError, match="must be a whole number"):
            check_settings(DEFAULTS[page] | change)
    if page == "rag_distractors":
        with pytest.raises(TypeError, match="ks must be a list of numbers of distractors, got 5"):
            check_settings(DEFAULTS[page] | dict(passages={"ks": 5}))
    with pytest.raises(FileNotFoundError, match="no such folder or file: '/nowhere/model'"):
        check_settings(DEFAULTS[page] | dict(model="/nowhere/model"))


@pytest.mark.parametrize("page", DEFAULTS)
def test_what_is_accepted(page):
    assert check_settings(DEFAULTS[page]).max_position_embeddings == 512  # the tiny model's
    assert check_settings(DEFAULTS[page] | dict(model="nobody/nothing", max_length=10**6)) is None  # not at hand: asked again when it is


@pytest.mark.parametrize(("page", "loads"), [("squad_noise", ("lookup(400", "load_questions(data", "load_model(model")), ("rag_distractors", ("rag.questions(data", "= prepare(model"))])
def test_a_page_asks_before_it_loads_anything(page, loads):
    code = (ROOT / "nbs" / "_py" / "experiments" / f"{page}.py").read_text(encoding="utf-8")
    places = [code.index(call) for call in ("check_settings(params", *loads, "check_length(max_length", "finetune(prepared")]
    assert places == sorted(places)


def test_the_limits_are_those_of_the_data():
    assert set(ASKED.values()) == {len(lookup(400, seed=1)), QA_SETS["squad_v1.1_dev"].questions}
    found = rag.questions("lookup")
    assert len(found) == RETRIEVED["lookup"].questions and {len(r.distractors) for r in found} == {RETRIEVED["lookup"].distractors}


def test_another_number_of_questions_is_refused(monkeypatch):
    monkeypatch.setattr(rag, "nq_retrieved", lambda: rag.lookup_retrieved(3))
    with pytest.raises(ValueError, match="found 3 questions, the data set has 2652"):
        rag.questions("nq_open_bm25_distractors")


def test_what_only_the_data_can_tell():
    check_enough({"to be asked": (3, 3)}, 128)
    with pytest.raises(ValueError, match="of the questions to be asked, 2 fit into max_length=128 with their answers, 3 are needed"):
        check_enough({"to be asked": (2, 3)}, 128)
    check_length(128, object())  # a configuration that names no limit


def test_passages_left_out_are_the_studys():
    assert passage_settings({"words": 0}) == PASSAGES | {"words": 0} and passage_settings({}) == PASSAGES == DEFAULTS["rag_distractors"]["passages"]


def test_what_rows_call_a_model(tmp_path, monkeypatch):
    names = {"smollm2": "smollm2", "owner/a-model.v1": "a-model.v1", "/a/m": "m", "/a/m/": "m", "~/m/": "m", "/a/m/../n": "n", "m.gguf": "m.gguf"}
    assert {model: model_name(model) for model in names} == names
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert model_name(".") == "mine"
    with pytest.raises(ValueError, match="the last part of model"):
        model_name("/")
