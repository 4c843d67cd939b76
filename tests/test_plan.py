"`bft run … --dry-run`: what a run needs, without a download and without a model of full size."

import ast
import json
import re
import shlex

import pytest
import torch
from memory import peak_bytes
from test_models import write_gguf
from transformers import AutoConfig

from bft_nb import cli, plan
from bft_nb.finetune import METHODS, _groups, adapted, converted
from bft_nb.models import tiny_llama, tiny_tokenizer
from bft_nb.qa import loss_func
from bft_nb.runner import find_notebook, parse_value
from bft_nb.runner import plan as planned

TINY_LLAMA = "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"


@pytest.fixture
def bare(tmp_path, monkeypatch):
    "A machine with no data, no cache, no network."
    monkeypatch.delenv("BFT_DATA", raising=False)
    monkeypatch.setenv("BFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def dry(capsys, notebook, out, **parameters):
    pairs = [word for name, value in parameters.items() for word in ("-p", name, str(value))]
    status = cli.main(["run", notebook, *pairs, "--out", str(out), "--dry-run"])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_a_smoke_run_needs_nothing_and_leaves_nothing(bare, capsys):
    for notebook in ("squad_noise", "rag_distractors", "recommendation"):
        status, out, _ = dry(capsys, notebook, bare / "out")
        assert status == 0 and f"{notebook}: to do" in out and out.rstrip().endswith("nothing is missing")
    assert not (bare / "out").exists()


def test_the_papers_model_is_counted_without_it(bare, capsys):
    status, out, _ = dry(capsys, "squad_noise", bare, model=TINY_LLAMA, data="squad_v1.1_train", adapter="full", method="sft", steps=7)
    assert status == 1 and f"hf download {TINY_LLAMA} (2.2 GB in bfloat16, 4.4 GB in float32" in out
    assert "1,100,048,384 in all; 1,100,048,384 trained (100 %), 0 of the method's own" in out
    assert "squad_v1.1_train: is downloaded from https://" in out and "7 of 4 examples, 28 in all, of at most 128 tokens" in out
    assert "weights 4.4 GB, gradients 4.4 GB, optimiser 8.8 GB" in out and "1 missing" in out


@pytest.mark.parametrize("page", ["squad_noise", "rag_distractors"])
def test_the_command_of_the_papers_size_is_the_one_that_was_dry_run(page):
    "What the page shows as a command line, and what it hands to `report`."
    twin = (find_notebook(page).parents[1] / "_py" / "experiments" / f"{page}.py").read_text(encoding="utf-8")
    model, line = re.search(rf"# M=(\S+)\n# hf download \$M\n# bft run {page} (.+?)\n# ```", twin, re.DOTALL).groups()
    words = shlex.split(line.replace("\\\n#", "").replace("$M", model))
    assert set(words[::3]) == {"-p"} and model == TINY_LLAMA
    call = ast.parse(re.search(r"^paper = (dict\(.+?^\))", twin, re.DOTALL | re.MULTILINE)[1], mode="eval").body
    assert dict(zip(words[1::3], map(parse_value, words[2::3]), strict=True)) == {k.arg: ast.literal_eval(k.value) for k in call.keywords}


def test_what_is_missing_is_named(bare, capsys, monkeypatch):
    status, out, _ = dry(capsys, "squad_noise", bare, model="smollm2", data="squad_v1.1_train_part")
    assert status == 1 and "bft models fetch smollm2 (93 MB to download, 542 MB kept)" in out and "2 missing" in out
    assert "put squad_v1.1_train_part.parquet into a folder and set BFT_DATA to it" in out
    (bare / "qa").mkdir()
    for name in ("squad_v1.1_train_part", "nq_open_bm25_distractors"):
        (bare / "qa" / f"{name}.parquet").touch()
    monkeypatch.setenv("BFT_DATA", str(bare))
    assert "squad_v1.1_train_part: in BFT_DATA" in dry(capsys, "squad_noise", bare, data="squad_v1.1_train_part")[1]
    status, out, _ = dry(capsys, "rag_distractors", bare, data="nq_open_bm25_distractors")
    assert status == 1 and "nq_open_bm25_distractors: in BFT_DATA" in out and "nq_open_distractor_passages: not found" in out


def test_a_model_nobody_knows(bare, capsys):
    status, out, _ = dry(capsys, "squad_noise", bare, model="nobody/nothing")
    assert status == 1 and "nobody/nothing, not in the hub's cache: hf download nobody/nothing" in out and "not known before" in out


def test_recommenders(bare, capsys, monkeypatch):
    plain, filtering = (dry(capsys, "recommendation", bare, dataset="beauty", bft=flag)[1] for flag in ("false", "true"))
    assert "is downloaded from https://" in plain and "774,528 of them the items' embeddings" in plain and plain != filtering
    status, out, _ = dry(capsys, "recommendation", bare, dataset="yelp")
    assert status == 1 and "not to be downloaded: put yelp.parquet" in out
    (bare / "yelp.parquet").touch()
    monkeypatch.setenv("BFT_DATA", str(bare))
    assert dry(capsys, "recommendation", bare, dataset="yelp")[0] == 0


def test_a_run_that_is_done_and_parameters_that_are_none(bare, capsys):
    run = planned(find_notebook("squad_noise"), {"seed": 3}, bare / "out")
    run.output.parent.mkdir()
    run.output.write_text(json.dumps({"metadata": {"bft_run": run.identity}}))
    assert "squad_noise-seed=3: done" in dry(capsys, "squad_noise", bare / "out", seed=3)[1]
    for wrong, says in (({"sede": 3}, "did you mean 'seed'"), ({"seed": "x"}, "must be of type int")):
        status, _, err = dry(capsys, "squad_noise", bare, **wrong)
        assert status == 2 and says in err
    assert "not known from its parameters" in dry(capsys, "cold_start", bare)[1]


def test_what_the_run_refuses_is_refused(bare, capsys):
    wrong = {"noise": 1.5, "max_length": 4096, "steps": -4, "lr": -1, "n_eval": 0, "method": "dpo", "data": "squadshifts_new_wiki", "store": "true"}
    for name, value in wrong.items():
        status, out, err = dry(capsys, "squad_noise", bare, **{name: value})
        assert status == 2 and not out and (name in err or "are not stored" in err), name
    for name, value, says in [("passages", '{"ks": [0, 25]}', "each of ks must be at most 5"), ("passages", '{"k_train": 9}', "k_train must be at most 5"), ("n_eval", -1, "n_eval")]:
        status, out, err = dry(capsys, "rag_distractors", bare, **{name: value})
        assert status == 2 and not out and says in err, says


@pytest.mark.parametrize(("name", "value", "says"), [
    ("options", "[1]", "options must be a JSON object, got '[1]'"),
    ("options", "{bad", "options must be a JSON object, got '{bad'"),
    ("options", "[" * 5000, "options must be a JSON object"),
    ("options", '{"kalman": NaN}', "options must be a JSON object"),
    ("options", '{"d": 8}', "options must not hold 'd'"),
    ("options", '{"speed": 8}', "unknown option 'speed'"),
    ("epochs", "-3", "epochs must be at least 1, got -3"),
    ("epochs", "2024-01-01", "parameter 'epochs' must be of type int"),
    ("lr", "NaN", "lr must be positive and finite, got nan"),
    ("lr", "0", "lr must be positive and finite, got 0"),
    ("precision_lr", ".inf", "precision_lr must be ≥ 0 and finite"),
    ("dropout", "1.5", "dropout must"),
    ("thin", "-0.1", "thin must"),
    ("d", "0", "d must be at least 1"),
    ("negatives", "-1", "negatives must be at least 0"),
    ("seed", "-1", "seed must be at least 0"),
    ("seed", str(10**20), "seed must be below 2³²"),
    ("dtype", "int8", "dtype must be one of"),
    ("device", "gpu", "device must be one of 'auto', 'cpu', 'cuda', 'mps', got 'gpu'"),
    ("store", "true", "rows of the synthetic world are not stored"),
    ("backbone", "gru", "got 'gru'"),
])  # fmt: skip
def test_what_no_recommender_can_be_trained_with_is_refused_by_name(bare, capsys, name, value, says):
    status, out, err = dry(capsys, "recommendation", bare, **{name: value})
    assert status == 2 and not out and says in err and err.startswith("bft run: ")


def test_a_device_that_this_machine_has_not_is_missing(bare, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, _ = dry(capsys, "recommendation", bare, device="cuda")
    assert status == 1 and "device 'cuda' is not available on this machine" in out and "1 missing" in out


def test_what_a_page_does_not_say_is_not_asked_for(bare):
    said = {"dataset": "synthetic", "backbone": "hstu", "epochs": ..., "precision_lr": None, "options": {"time_buckets": 8}}
    assert [line.name for line in plan.recommendation(said)] == ["data", "parameters"]


def test_a_model_that_is_a_path(bare, capsys, monkeypatch):
    where = bare / "m"
    status, out, _ = dry(capsys, "squad_noise", bare, model=where)
    assert status == 1 and f"no such folder or file: '{where}'" in out and "hf download" not in out and "1 missing" in out
    where.mkdir()
    assert "holds no config.json: it is no model's folder" in dry(capsys, "squad_noise", bare, model=where)[1]
    tokenizer = tiny_tokenizer()
    tiny_llama(tokenizer).save_pretrained(where)
    status, out, _ = dry(capsys, "squad_noise", bare, model=f"{where}/")
    assert status == 0 and "m, a folder or file of yours" in out
    weights = (where / "model.safetensors").read_bytes()
    (where / "model.safetensors").write_bytes(weights[:-100])
    status, _, err = dry(capsys, "squad_noise", bare, model=where)
    assert status == 2 and "are damaged" in err
    monkeypatch.chdir(bare)  # a relative path means what it will mean to the notebook
    assert "no such folder or file: './m'" in dry(capsys, "squad_noise", bare, model="./m")[1]


def test_a_model_in_the_hubs_cache_is_there_if_all_of_it_is(bare, capsys):
    kept = bare / "hub" / "models--owner--m"
    place = kept / "snapshots" / "0123"
    tiny_llama(tiny_tokenizer()).save_pretrained(place, max_shard_size="100KB")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0123")
    status, out, _ = dry(capsys, "squad_noise", bare, model="owner/m")
    assert status == 0 and "owner/m, in the hub's cache" in out
    next(place.glob("model-*.safetensors")).unlink()
    assert "owner/m, not in the hub's cache: hf download owner/m" in dry(capsys, "squad_noise", bare, model="owner/m")[1]


def test_a_model_in_a_gguf_file(bare, capsys):
    path, tokenizer = bare / "small.gguf", tiny_tokenizer()
    write_gguf(path, tiny_llama(tokenizer), tokenizer)
    status, out, _ = dry(capsys, "squad_noise", bare, model=path)
    assert status == 0 and "small.gguf, a folder or file of yours" in out and "in all" in out
    for content in (path.read_bytes()[: path.stat().st_size // 2], b"not a model", b""):
        path.write_bytes(content)
        status, out, err = dry(capsys, "squad_noise", bare, model=path)
        assert status == 2 and not out and "small.gguf is not a whole GGUF file" in err


SMALL = dict(plan.KNOWN["smollm2"]) | dict(num_hidden_layers=6, vocab_size=512, pad_token_id=0, bos_token_id=1, eos_token_id=2)


@pytest.mark.parametrize(("method", "adapter", "dtype"), [("sft", "lora", "float32"), ("bft", "lora", "bfloat16"), ("bft", "full", "float32")])
def test_the_estimate_is_the_peak_of_live_bytes(method, adapter, dtype):
    config = AutoConfig.for_model(**SMALL)
    model = adapted(converted(plan.random_model(config), method), method, adapter, 16).train()
    optimiser = torch.optim.AdamW(_groups(model, bool(METHODS[method].added), 1e-3, None))
    ids, labels = torch.ones(2, 96, dtype=torch.long), torch.ones(2, plan.ANSWER + 1, dtype=torch.long)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = loss_func("ce")(model(input_ids=ids, logits_to_keep=torch.arange(96 - plan.ANSWER, 96)), labels)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=False)

    step()
    there = 4 * sum(p.numel() for p in model.parameters()) + 12 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    ratio = (there + peak_bytes(step)) / plan.memory(config, method, adapter, dtype, 2, 96).total
    assert 0.97 < ratio < 1.2, ratio


def test_known_configurations_are_those_of_the_models():
    for name, n in (("smollm2", 134_515_008), (TINY_LLAMA, 1_100_048_384)):
        config = plan.configuration(name)
        assert plan.parameters(config, "sft", "full") == (n, n, 0)
