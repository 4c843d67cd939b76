"""Fine-tuning a language model to answer questions, plain, filtering or gated, by `transformers.Trainer` alone.

What a method is: `METHODS`. All share data, prompts, adapter, batches, steps and schedule; a filtering or gated model differs by its layers,
focal and GCE by their loss.
"""

import contextlib
import hashlib
import io
import json
import math
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from bft_nb.core import check_count, check_option, check_positive
from bft_nb.models import load_model
from bft_nb.processes import join, number_of_processes, process, train_together
from bft_nb.qa import Collator, Example, Question, check_lengths, evaluating, loss_func, prompt_ids, room

__all__ = ["ADAPTERS", "DTYPES", "LEARNT", "METHODS", "Method", "PARTS", "Prepared", "Tuned", "adapted", "added_parameters", "answering", "converted", "finetune", "learnt", "length_grouped", "prepare"]


class Method(NamedTuple):
    "A way of fine-tuning."

    loss: str  # a name of `bft_nb.qa.LOSSES`
    added: str  # name of the modules that a conversion adds to the layers: "bft", "gate", or "" for none
    title: str
    start: Mapping[str, float] = MappingProxyType({})  # of the filter: keywords of `bft_nb.llama.convert`, the rest as shipped


METHODS: dict[str, Method] = {
    "sft": Method("ce", "", "SFT"),
    "focal": Method("focal", "", "focal loss"),
    "gce": Method("gce", "", "GCE"),
    "bft": Method("ce", "bft", "BFT"),
    "bft_strong": Method("ce", "bft", "BFT, strong", {"beta_a": 1.0, "beta_g": 0.1}),  # more of a filter than what is shipped, at the price of some perplexity
    "headwise": Method("ce", "gate", "headwise gate"),
    "elementwise": Method("ce", "gate", "elementwise gate"),
    "sink": Method("ce", "gate", "sink logits"),
}
ADAPTERS = ("lora", "full")
DTYPES = ("float32", "bfloat16")  # of a step: float32 throughout, or autocast
PARTS = {"kriging": "beta_a", "kalman": "root_beta_g"}  # of a filter -> the dial that is 0 in every layer where the part is switched off
LEARNT = ("gain", "beta_g", "beta_a", "log_lam_bar")  # what `learnt` measures
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Prepared(NamedTuple):
    "A model ready to be tuned."

    model: Any
    tokenizer: Any
    trainable: int  # parameters
    added: int  # parameters of the filter, or of the gates, among them


def converted(model: nn.Module, method: str, **start: Any) -> nn.Module:
    "The model with the layers of a method; a filter is not calibrated yet. `start` as for `prepare`."
    if METHODS[method].added == "gate":
        from bft_nb.gates import convert_gated

        return convert_gated(model, method)
    if METHODS[method].added == "bft":
        from bft_nb.llama import convert

        return convert(model, **{**METHODS[method].start, **start})
    return model


def added_parameters(model: nn.Module, method: str) -> int:
    "Parameters that a converted model has beyond the plain one."
    if not METHODS[method].added:
        return 0
    from bft_nb.llama import added

    return sum(p.numel() for part in added(model) for p in part.parameters())


def adapted(model: nn.Module, method: str, adapter: str, rank: int) -> nn.Module:
    "The model with what is trained set to require a gradient."
    if adapter == "full":
        return model
    from peft import LoraConfig, get_peft_model

    saved = [METHODS[method].added] if METHODS[method].added else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft asks by the old name
        return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=PROJECTIONS, modules_to_save=saved, task_type="CAUSAL_LM"))


def prepare(
    name: str | tuple[Any, Any],  # of `bft_nb.models.load_model`, or what it gave
    method: str,  # a key of `METHODS`
    calibration: Sequence[str] = (),  # texts that set the scales of the filter
    *,
    adapter: str = "lora",  # "lora": matrices of low rank beside all projections; "full": every weight
    rank: int = 16,  # of the low-rank matrices
    dtype: str = "float32",  # of the weights of a model by name; the precision stays float32
    max_length: int = 256,  # tokens of a calibration text
    seed: int = 0,  # of what starts at random: the network of τ, the low-rank matrices
    **start: Any,  # of the filter: keywords of `bft_nb.llama.convert`
) -> Prepared:
    "Load, convert and calibrate where the method filters, convert where it has gates, add the adapter. Raises `ValueError` for unknown names, and what `load_model` does."
    check_option("method", method, METHODS)
    check_option("adapter", adapter, ADAPTERS)
    check_count("rank", rank)
    if METHODS[method].added == "bft" and not calibration:
        raise ValueError("calibration must hold one text at least: the filter's scales are measured on it")
    model, tokenizer = load_model(name, dtype) if isinstance(name, str) else name
    torch.manual_seed(seed)
    model = converted(model, method, **start)
    if METHODS[method].added == "bft":
        from bft_nb.llama import calibrate

        if max_length > room(model):
            raise ValueError(f"max_length must be at most {room(model)}, the tokens that the model can take, got {max_length}")
        calibrate(model, tokenizer(list(calibration), return_tensors="pt", padding=True, truncation=True, max_length=max_length))
    more = added_parameters(model, method)
    torch.manual_seed(seed)  # again: the matrices are those of every other method
    model = adapted(model, method, adapter, rank)
    return Prepared(model, tokenizer, sum(p.numel() for p in model.parameters() if p.requires_grad), more)


class Tuned(NamedTuple):
    "What training did; the model carries its last weights."

    losses: list[dict[str, float]]  # step, mean loss per label since the row before [nat]
    seconds: float  # wall clock of this call, what a resumed run did before is not in it


def _groups(model: nn.Module, converted: bool, lr: float, precision_lr: float | None) -> list[dict[str, Any]]:
    "What the optimiser is given, without weight decay."
    if converted:
        from bft_nb.llama import parameter_groups

        return parameter_groups(model, lr, precision_lr, weight_decay=0.0)
    return [{"params": [p for p in model.parameters() if p.requires_grad], "lr": lr, "weight_decay": 0.0}]


def length_grouped(lengths: Sequence[int], n_batches: int, batch_size: int, seed: int = 0) -> list[int]:
    """Indices of the examples of so many batches, in order: each example equally often, give or take one, rows of similar length together.

    Examples are shuffled pass by pass, the examples of a pass in every fifty batches' worth are sorted by length, and these batches are shuffled
    among themselves. A batch holds an example twice only where one pass ends and the next begins, or where there are fewer examples than it needs.
    """
    rng, needed = np.random.default_rng(seed), n_batches * batch_size
    passes = np.arange(needed) // len(lengths)
    drawn = np.concatenate([rng.permutation(len(lengths)) for _ in range(int(passes[-1]) + 1)])[:needed]
    blocks = [slice(at, at + 50 * batch_size) for at in range(0, needed, 50 * batch_size)]
    ordered = np.concatenate([drawn[b][np.lexsort((np.asarray(lengths)[drawn[b]], passes[b]))] for b in blocks]).reshape(n_batches, batch_size)
    return np.concatenate([rng.permutation(ordered[at : at + 50]) for at in range(0, n_batches, 50)]).ravel().tolist()


def finetune(
    model: nn.Module,  # from `prepare`
    examples: Sequence[Example],  # to learn from, their labels noisy or not
    collate: Collator,
    method: str,  # that of `prepare`
    *,
    steps: int,
    lr: float,  # at its highest: it rises over a twentieth of the steps and falls linearly to zero
    precision_lr: float | None = None,  # of what the method adds to the layers; None: the same
    batch_size: int = 4,  # examples of a step, of all processes together
    seed: int = 0,  # order of examples and dropout
    dtype: str = "float32",  # "bfloat16": autocast
    device: str = "auto",
    out_dir: str | Path | None = None,  # checkpoints, four over the run; called again with the same folder and arguments, a killed run goes on. None: none are kept
    progress: bool = False,
    processes: int | None = None,  # that share each batch; None: one for each visible GPU
) -> Tuned:
    """Train for a number of steps, in place. Several processes (`bft_nb.processes`) take the steps of one; without dropout their losses are the same but for rounding.

    Raises `ValueError` for impossible arguments, examples longer than the model can take and an `out_dir` of another run, `FloatingPointError` if a loss or a weight is no longer finite.
    """
    from bft_nb.training import check_out_dir, resolve_device

    check_option("method", method, METHODS)
    check_option("dtype", dtype, DTYPES)
    for name, value in {"steps": steps, "batch_size": batch_size}.items():
        check_count(name, value)
    check_positive("lr", lr)
    if not len(examples):
        raise ValueError("examples must hold one at least")
    check_lengths(examples, model)
    settings = dict(method=method, steps=steps, lr=lr, precision_lr=lr if precision_lr is None else precision_lr, batch_size=batch_size, seed=seed, dtype=dtype)
    if out_dir is not None:
        check_out_dir(Path(out_dir), _settings_hash(model, examples, settings))
    place = resolve_device(device)
    flat = [len(e.input_ids) for e in examples], *(torch.cat(parts) for parts in zip(*examples))  # many small tensors would travel slowly
    n, task = number_of_processes(processes, place, batch_size), (flat, collate, settings, place.type, out_dir, progress)
    with contextlib.nullcontext() if out_dir is None or process()[1] > 1 else _alone(Path(out_dir)):
        return train_together(_train, model, task, n, place) if n > 1 else _train(model, *task)


def _alone(out_dir: Path) -> contextlib.AbstractContextManager:
    "Whoever else trains in this folder waits, and then finds the run done: two evaluations of one training may start together."
    from filelock import FileLock

    return FileLock(out_dir / ".lock")


def _train(model: nn.Module, flat: tuple, collate: Collator, how: dict[str, Any], place: str, out_dir: str | Path | None, progress: bool) -> Tuned:
    "Train in this process, from the newest checkpoint on if there is one."
    from bft_nb.training import run_trainer

    join(torch.device(place))
    lengths, tokens, labels = flat
    examples = [Example(*row) for row in zip(tokens.split(lengths), labels.split(lengths), strict=True)]
    with tempfile.TemporaryDirectory() as scratch:
        trainer = _trainer(model.to(place).train(), examples, collate, how, str(out_dir or scratch), place == "cpu", bool(out_dir), progress)
        checkpoint = _last_checkpoint(Path(out_dir)) if out_dir else None
        with contextlib.redirect_stdout(io.StringIO()) if not progress else contextlib.nullcontext():
            run_trainer(trainer, checkpoint)
    steps = how["steps"]
    losses = [{"step": row["step"], "loss": row["loss"]} for row in trainer.state.log_history if "loss" in row]
    if bad := [row for row in losses if not math.isfinite(row["loss"])]:
        raise FloatingPointError(f"the training loss is {bad[0]['loss']} after {bad[0]['step']} steps: try a smaller lr")
    if any(not bool(p.isfinite().all()) for p in model.parameters() if p.requires_grad):
        raise FloatingPointError(f"a weight is no longer finite after {steps} steps: try a smaller lr")
    return Tuned(losses, float(next((row["train_runtime"] for row in reversed(trainer.state.log_history) if "train_runtime" in row), math.nan)))


def _trainer(model: nn.Module, examples: list[Example], collate: Collator, how: dict[str, Any], folder: str, on_cpu: bool, save: bool, progress: bool):
    "A trainer ready to run."
    from transformers import PrinterCallback

    from bft_nb._trainer import LastStep, OneDevice, SharedBatches

    method, steps, seed = METHODS[how["method"]], how["steps"], how["seed"]
    arguments = OneDevice(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=how["batch_size"], seed=seed, data_seed=seed, bf16=how["dtype"] == "bfloat16",
        use_cpu=on_cpu, lr_scheduler_type="linear", warmup_steps=math.ceil(steps / 20), max_grad_norm=1.0, logging_steps=max(1, steps // 20), logging_nan_inf_filter=False,
        save_strategy="steps" if save else "no", save_steps=max(1, steps // 4), save_total_limit=2, report_to="none", disable_tqdm=not progress,
        remove_unused_columns=False, label_names=["labels"], dataloader_pin_memory=False, train_sampling_strategy="sequential",
    )  # fmt: skip
    order = length_grouped([len(e.input_ids) for e in examples], steps, how["batch_size"], seed)
    trainer = SharedBatches(
        model, arguments, train_dataset=[examples[i] for i in order], data_collator=collate, compute_loss_func=loss_func(method.loss),
        optimizers=(torch.optim.AdamW(_groups(model, bool(method.added), how["lr"], how["precision_lr"])), None),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(LastStep)
    return trainer


def _settings_hash(model: nn.Module, examples: Sequence[Example], settings: dict[str, Any]) -> str:
    "Identifies a run: what is trained (shapes; a run that goes on takes its weights from the checkpoint), on what and how."
    shapes = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    found = hashlib.sha256(json.dumps(settings | {"shapes": shapes}, sort_keys=True).encode())
    for e in examples:
        found.update(e.input_ids.numpy().tobytes() + e.labels.numpy().tobytes())
    return found.hexdigest()[:16]


def _is_whole(checkpoint: Path) -> bool:
    "Can a run go on from here: weights or low-rank matrices, optimiser, schedule, generators and state?"
    from safetensors import SafetensorError, safe_open

    weights, random = list(checkpoint.glob("*.safetensors")), list(checkpoint.glob("rng_state*.pth"))
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
        for path in weights:
            with safe_open(path, "pt") as tensors:
                tensors.keys()
    except (OSError, ValueError, SafetensorError):
        return False
    return bool(weights and random) and all(map(zipfile.is_zipfile, (checkpoint / "optimizer.pt", checkpoint / "scheduler.pt", *random)))


def _last_checkpoint(out_dir: Path) -> str | None:
    "Newest whole checkpoint; half-written ones are removed."
    from bft_nb.training import numbered

    found = {path: _is_whole(path) for path in numbered(out_dir)}
    for path, whole in found.items():
        if not whole:
            shutil.rmtree(path, ignore_errors=True)
    return next((str(path) for path, whole in found.items() if whole), None)


@contextlib.contextmanager
def _switched_off(model: nn.Module, parts: Sequence[str]) -> Iterator[None]:
    "`PARTS` of a filter at zero while the block runs."
    from bft_nb.llama import layer_filters

    dials = [getattr(layer, PARTS[part]) for layer in layer_filters(model) for part in parts] if parts else []
    kept = [dial.detach().clone() for dial in dials]
    try:
        with torch.no_grad():
            for dial in dials:
                dial.zero_()
        yield
    finally:
        with torch.no_grad():
            for dial, value in zip(dials, kept):
                dial.copy_(value)


@contextlib.contextmanager
def answering(
    model: nn.Module,  # tuned
    dtype: str = "float32",  # as in training
    without: Sequence[str] = (),  # keys of `PARTS`, of a filter: switched off in every layer, attention that of the plain model, K = 1
) -> Iterator[nn.Module]:
    """The model as it is asked: low-rank matrices added to the weights they stand beside, computing in the precision it was trained in.

    All is as before when the block ends. Raises `ValueError` for an unknown name, `TypeError` for parts of a model that is no filter.
    """
    check_option("dtype", dtype, DTYPES)
    for part in without:
        check_option("each of without", part, PARTS)
    mergeable = hasattr(model, "merge_adapter")
    with _switched_off(model, without), torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        if mergeable:
            model.merge_adapter()
        try:
            yield model
        finally:
            if mergeable:
                model.unmerge_adapter()


def learnt(
    model: nn.Module,  # from `prepare`, tuned or not
    method: str,  # that of `prepare`
    tokenizer: Any,
    questions: Sequence[Question],  # whose prompts are read, one by one
) -> dict[str, float]:
    "Means over prompts, tokens and layers of a filter: gain K, weights of the prior β_g and of the precision in attention β_a, log λ̄. Nothing where the method is no filter."
    if METHODS[method].added != "bft":
        return {}
    from bft_nb.llama import trace

    found = []
    with evaluating(model):
        for q in questions:
            records = trace(model, input_ids=torch.tensor([prompt_ids(q, tokenizer)], device=model.device))
            found += [(r.gain.mean(), r.beta_g, r.beta_a, r.lam_bar.log().mean()) for r in records]
    return {name: float(np.mean([float(x) for x in values])) for name, values in zip(LEARNT, zip(*found))}
