"""Losses, length-bucketed batches, training and evaluation of the recommendation backbones.

Training runs on `transformers.Trainer` through its documented hooks only (`compute_loss_func`, `optimizers`,
callbacks, and the methods it names for overriding: `get_train_dataloader`, `evaluate`). Measured against a bare loop over the
same model, batches and optimiser (`python benchmarks/training.py`; one CPU thread, d = 64, two layers, 512 negatives), it costs
1.02–1.03 times the bare loop's CPU time per step at T = 50 (128 and 256 sequences a batch) and 1.02–1.07 times on
length-bucketed batches of short histories (25 ms a step, the worst case here): less than ten percent, so no engine of our own.
"""

import contextlib
import hashlib
import json
import math
import shutil
import signal
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.data import Dataset

from bft_nb.core import check_count, check_flag, check_option, check_positive
from bft_nb.download import written
from bft_nb.processes import join, number_of_processes, process, train_together
from bft_nb.ranking import ranks

IGNORE = -100  # label of a position without a target (padding); what `transformers` counts as "no label"


# ---- losses ----------------------------------------------------------------------------------------------------


def cross_entropy(
    hidden: Float[Tensor, "n d"],  # states
    targets: Int[Tensor, " n"],  # next items, 1..n_items
    weights: Float[Tensor, "v d"],  # output embedding, row 0 padding
) -> Float[Tensor, " n"]:  # [nat]
    "Full softmax cross-entropy over the catalogue; padding is no class."
    logits = hidden.float() @ weights[1:].float().T
    return F.cross_entropy(logits, targets.long() - 1, reduction="none")


def sampled_softmax(
    hidden: Float[Tensor, "n d"],  # states
    targets: Int[Tensor, " n"],  # next items, 1..n_items
    weights: Float[Tensor, "v d"],  # output embedding, row 0 padding
    negatives: Int[Tensor, " s"],  # drawn uniformly from 1..n_items with replacement, shared by all rows
) -> Float[Tensor, " n"]:  # [nat]
    """Sampled softmax [@jean2015sampled], an estimate of `cross_entropy` at the cost of s instead of v scores.

    A negative that is the row's own target is masked. The s' that remain stand for all v − 1 other items, so each
    gets the logit correction log((v − 1)/s') and the sum of their exponentials is an unbiased estimate of the
    softmax's denominator without its target term.
    """
    hidden, weights = hidden.float(), weights.float()
    if not len(negatives):
        raise ValueError("negatives must hold one item at least, got none")
    positive = (hidden * weights[targets]).sum(-1)
    own = targets[:, None] == negatives
    logits = (hidden @ weights[negatives].T).masked_fill_(own, -1e9)
    correction = torch.log((len(weights) - 2) / (len(negatives) - own.sum(1)).clamp(min=1))
    return F.softplus(logits.logsumexp(1) + correction - positive)


def draw_negatives(n_items: int, n: int, device: torch.device | str = "cpu") -> Int[Tensor, " n"]:
    "Uniform item ids with replacement, from torch's global generator (which checkpoints save and restore)."
    check_count("n_items", n_items)
    check_count("n", n)
    return torch.randint(1, n_items + 1, (n,), device=device)


class SequenceLoss:
    "Mean loss over all positions that have a target; every target weighs the same whatever batch it falls into."

    def __init__(self, model: nn.Module, negatives: int | None, targets_per_batch: float):
        self.model, self.negatives, self.targets_per_batch = model, negatives, targets_per_batch

    def __call__(self, hidden: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        real = labels != IGNORE
        h, y, w = hidden[real], labels[real], self.model.item_weights()
        if self.negatives is None:
            losses = cross_entropy(h, y, w)
        else:
            losses = sampled_softmax(h, y, w, draw_negatives(len(w) - 1, self.negatives, h.device))
        return losses.sum() / self.targets_per_batch


# ---- batches ---------------------------------------------------------------------------------------------------


def pad_rows(
    offsets: Int[np.ndarray, " u1"],  # CSR offsets of the sequences
    items: Int[np.ndarray, " n"],
    rows: Int[np.ndarray, " b"],  # which sequences
    max_length: int,  # the most recent this many are kept
) -> Int[np.ndarray, "b t"]:  # 0 right of each sequence
    "The most recent items of some sequences as one right-padded array."
    stop = offsets[rows + 1]
    length = np.minimum(stop - offsets[rows], max_length)
    step = np.arange(max(int(length.max(initial=0)), 1))
    index = np.minimum((stop - length)[:, None] + step, max(len(items) - 1, 0))
    return np.where(step < length[:, None], items[index] if len(items) else 0, 0).astype(np.int64)


def times_of(sequences: Any, model: nn.Module) -> Int[np.ndarray, " n"] | None:
    "Times of the items if the model has use for them; `ValueError` if there are none."
    if not getattr(model, "time_buckets", 0):
        return None
    if getattr(sequences, "times", None) is None:
        raise ValueError("the model has time_buckets, and the data have no times")
    return np.asarray(sequences.times)


class TrainingSequences(Dataset):
    """Sequences of at least two items, fetched by batches; the model says what its inputs and labels are (`training_batch`).

    What is random about a batch depends on the seed, the epoch and its first sequence alone: not on what was drawn before.
    """

    def __init__(self, sequences: Any, model: nn.Module):
        self.offsets, self.items = np.asarray(sequences.offsets), np.asarray(sequences.items)
        self.times = times_of(sequences, model)
        self.model, self.max_length = model, model.max_length
        self.order: LengthBatches | None = None
        lengths = np.diff(self.offsets)
        self.rows = np.flatnonzero(lengths > 1)
        self.lengths = np.minimum(lengths[self.rows] - 1, self.max_length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: value[0] for name, value in self.__getitems__([i]).items()}

    def __getitems__(self, batch: list[int]) -> dict[str, Tensor]:
        rows, width = self.rows[np.asarray(batch)], self.max_length + 1
        items, labels = self.model.training_batch(torch.from_numpy(pad_rows(self.offsets, self.items, rows, width)), self.generator(batch[0]))
        found = {"items": items, "labels": labels.where(labels != 0, IGNORE)}
        if self.times is not None:
            found["times"] = torch.from_numpy(pad_rows(self.offsets, self.times, rows, width))[:, : items.shape[1]]
        return found

    def batches(self, batch_size: int, seed: int) -> "LengthBatches":
        "The order in which to fetch, by seed and epoch."
        self.order = LengthBatches(self.lengths, batch_size, seed)
        return self.order

    def generator(self, first: int) -> torch.Generator:
        "Random numbers of the batch that begins with sequence `first`."
        seed, epoch = (self.order.seed, self.order.epoch) if self.order else (0, 0)
        return torch.Generator().manual_seed(int(np.random.SeedSequence([seed, epoch, first]).generate_state(1)[0]))

    def n_targets(self) -> float:
        "Expected number of targets of one epoch."
        return self.model.n_targets(self.lengths + 1)


class LengthBatches:
    """Batches of sequences of similar length, in an order given by seed and epoch alone.

    Each epoch shuffles all sequences, sorts each pool of `pool` batches by length, cuts it into batches and shuffles those.
    """

    drop_last = False

    def __init__(self, lengths: Int[np.ndarray, " n"], batch_size: int, seed: int = 0, pool: int = 50):
        check_count("batch_size", batch_size)
        self.lengths, self.batch_size, self.seed, self.pool, self.epoch = np.asarray(lengths), batch_size, seed, pool, 0

    def __len__(self) -> int:
        return math.ceil(len(self.lengths) / self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng([self.seed, self.epoch])
        order = rng.permutation(len(self.lengths))
        width = self.pool * self.batch_size
        pools = [order[i : i + width] for i in range(0, len(order), width)]
        pools = [p[np.argsort(self.lengths[p], kind="stable")] for p in pools]
        # within a pool the incomplete batch is the last one, so the number of batches never depends on the order
        batches = [p[i : i + self.batch_size] for p in pools for i in range(0, len(p), self.batch_size)]
        for b in rng.permutation(len(batches)):
            yield batches[b].tolist()


# ---- evaluation ------------------------------------------------------------------------------------------------


def resolve_device(device: str) -> torch.device:
    'The device meant by "auto", "cpu", "cuda" or "mps"; `ValueError` if unknown or not on this machine.'
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device == "auto":
        return torch.device(next(d for d in ("cuda", "mps", "cpu") if available[d]))
    if not isinstance(device, str) or device not in available:
        raise ValueError(f'device must be "auto", "cpu", "cuda" or "mps", got {device!r}')
    if not available[device]:
        raise ValueError(f"device {device!r} is not available on this machine")
    return torch.device(device)


def history_rows(histories: Any, rows: Int[np.ndarray, " b"]) -> Int[Tensor, "b t"]:
    "Whole histories as a right-padded tensor."
    offsets, items = np.asarray(histories.offsets), np.asarray(histories.items)
    return torch.from_numpy(pad_rows(offsets, items, rows, int(np.diff(offsets).max(initial=1))))


def model_inputs(model: nn.Module, histories: Any, rows: Int[np.ndarray, " b"]) -> tuple[Int[Tensor, "b t"], ...]:
    "What a model reads of some histories: their most recent `max_length` items, right-padded, and the times of these if it has use for them. Raises as `times_of`."
    times, offsets = times_of(histories, model), np.asarray(histories.offsets)
    read = [np.asarray(histories.items)] + ([] if times is None else [times])
    return tuple(torch.from_numpy(pad_rows(offsets, values, rows, model.max_length)) for values in read)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    examples: Any,  # `Examples`: histories and targets
    *,
    filter_seen: bool = True,  # are items of the history out of competition?
    batch_size: int = 128,  # users scored at a time
    device: str | torch.device | None = None,  # None: where the model is
) -> Int[Tensor, " m"]:  # on the CPU, in the order of the examples
    """Rank of each target in the full catalogue.

    Users are scored in chunks of similar length; no users × items matrix is kept. Histories are cut to the model's
    `max_length`, seen items are those of the whole history.
    """
    check_count("batch_size", batch_size)
    if device is not None:
        model.to(resolve_device(device) if isinstance(device, str) else device)
    return ranks_of(model, examples, np.arange(len(examples.targets)), filter_seen, batch_size)


@torch.no_grad()
def ranks_of(
    model: nn.Module,
    examples: Any,  # `Examples`
    which: Int[np.ndarray, " m"],  # of the examples
    filter_seen: bool,
    batch_size: int,
) -> Int[Tensor, " m"]:
    "`evaluate`, for some of the examples."
    place = next(model.parameters()).device
    targets = torch.as_tensor(np.asarray(examples.targets)).long()
    order = np.argsort(np.diff(np.asarray(examples.histories.offsets))[which], kind="stable")
    found = torch.empty(len(which), dtype=torch.int64)
    training = model.training
    model.eval()
    try:
        for start in range(0, len(order), batch_size):
            at = order[start : start + batch_size]
            rows = which[at]
            read = (values.to(place) for values in model_inputs(model, examples.histories, rows))
            scores = model.scores(model.last(*read)).float()
            seen = history_rows(examples.histories, rows).to(place) if filter_seen else None
            found[at] = ranks(scores, targets[rows].to(place), seen).cpu()
    finally:
        model.train(training)
    return found


# ---- training --------------------------------------------------------------------------------------------------


class FitResult(NamedTuple):
    "What training did; the model itself carries the weights of the best epoch."

    history: list[dict[str, float]]  # per validation: epoch, loss, ndcg@10, hr@10 on validation, seconds
    best_epoch: int  # by ndcg@10 on validation
    seconds: float  # wall clock of all epochs with their validation, resumed parts included


def parameter_groups(model: nn.Module, lr: float, precision_lr: float | None, weight_decay: float) -> list[dict[str, Any]]:
    "Two groups: precision parameters with a learning rate of their own and no weight decay, and the rest."
    special: list[nn.Parameter] = []
    if getattr(model, "bft", False):
        from bft_nb.encoder import precision_parameters

        special = [p for p in precision_parameters(model) if p.requires_grad]
    ids = {id(p) for p in special}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in ids]
    groups = [{"params": rest, "lr": lr, "weight_decay": weight_decay}]
    if special:
        groups.append({"params": special, "lr": lr if precision_lr is None else precision_lr, "weight_decay": 0.0})
    return groups


def numbered(out_dir: Path) -> list[Path]:
    "What `Trainer` calls a checkpoint, newest first; anything else in the folder is not ours."
    found = [p for p in out_dir.glob("checkpoint-*") if p.is_dir() and p.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("checkpoint-")), reverse=True)


def _has_weights(checkpoint: Path) -> bool:
    "Are the weights there, and all of them?"
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(checkpoint / "model.safetensors", "pt") as weights:
            return bool(weights.keys())
    except (OSError, SafetensorError):
        return False


def _is_whole(checkpoint: Path) -> bool:
    "Can a run go on from here bit for bit: weights, optimiser, generators and state, and the weights of the best epoch?"
    random = list(checkpoint.glob("rng_state*.pth"))
    archives = [checkpoint / "optimizer.pt", checkpoint / "scheduler.pt", *random]
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        best = checkpoint.parent / Path(state["best_model_checkpoint"]).name
        known = any("eval_ndcg@10" in row for row in state["log_history"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return known and bool(random) and all(zipfile.is_zipfile(p) for p in archives) and _has_weights(checkpoint) and _has_weights(best)


def last_checkpoint(out_dir: Path) -> str | None:
    "Newest whole checkpoint; half-written and half-deleted ones are removed."
    found = numbered(out_dir)
    whole = [p for p in found if _is_whole(p)]
    for path in found:
        if path not in whole:
            shutil.rmtree(path, ignore_errors=True)  # another process of the same run may be at it, too
    return str(whole[0]) if whole else None


def _settings_hash(model: nn.Module, split: Any, settings: dict[str, Any]) -> str:
    "Identifies a run: what is trained (class and shapes; a run that goes on takes its weights from the checkpoint), on what (times as well, where the model reads them) and how."
    shapes, times = {name: list(p.shape) for name, p in model.state_dict().items()}, times_of(split.train, model)
    known = {"model": type(model).__name__, "shapes": shapes, "split": str(getattr(split, "hash", ""))}
    if times is not None:
        known["times"] = hashlib.sha256(times.tobytes()).hexdigest()
    text = json.dumps(settings | known | {"config": getattr(model, "_hub_mixin_config", None)}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_out_dir(out_dir: Path, key: str) -> None:
    "Raise `ValueError` if the folder holds a run with other settings, or of somebody else; `NotADirectoryError` if it is a file."
    if out_dir.exists() and not out_dir.is_dir():
        raise NotADirectoryError(f"out_dir must be a folder, {out_dir} is a file")
    mark = out_dir / "settings.hash"
    if mark.read_text() != key if mark.exists() else numbered(out_dir):
        raise ValueError(f"{out_dir} holds a run with other settings or data: give another out_dir or remove it")
    with written(mark) as part:
        part.write_text(key)


def _history(log: list[dict[str, float]]) -> list[dict[str, float]]:
    "One row per validated epoch from the trainer's log."
    rows: dict[int, dict[str, float]] = {}
    for entry in log:
        row = rows.setdefault(round(entry["epoch"]), {"epoch": round(entry["epoch"])})
        row.update({k.removeprefix("eval_"): v for k, v in entry.items() if k == "loss" or k.startswith("eval_")})
    return [row for row in rows.values() if "ndcg@10" in row]


def _check_settings(settings: dict[str, Any]) -> None:
    "Raise `ValueError` or `TypeError` naming the argument that can't be."
    for name in ("epochs", "batch_size", "patience", "validate_every", "eval_batch_size"):
        check_count(name, settings[name])
    if settings["epochs"] % settings["validate_every"]:
        raise ValueError(f"validate_every must divide epochs={settings['epochs']}, got {settings['validate_every']}")
    if settings["negatives"] is not None:
        check_count("negatives", settings["negatives"])
    check_count("seed", settings["seed"], 0)
    if settings["seed"] >= 2**32:
        raise ValueError(f"seed must be below 2³², got {settings['seed']}")
    check_positive("lr", settings["lr"])
    if settings["precision_lr"] is not None:
        check_positive("precision_lr", settings["precision_lr"])
    check_positive("weight_decay", settings["weight_decay"], zero=True)
    check_flag("filter_seen", settings["filter_seen"])
    check_option("dtype", settings["dtype"], ("float32", "bfloat16"))
    check_option("schedule", settings["schedule"], ("constant", "linear"))


def _check_data(model: nn.Module, split: Any) -> None:
    "Raise `ValueError` unless there is something to learn and the model knows the items, `TypeError` for another kind of model or split."
    if not (hasattr(model, "item_weights") and hasattr(model, "n_items")):
        raise TypeError(f"model must be a backbone like SASRec, got {type(model).__name__}")
    if not (hasattr(split, "train") and hasattr(split, "valid")):
        raise TypeError(f"split must be a Split (of leave_one_out or global_time), got {type(split).__name__}")
    if model.n_items != split.n_items:
        raise ValueError(f"the model's n_items={model.n_items} is not the split's {split.n_items}")
    items = np.asarray(split.train.items)
    if len(items) and not 1 <= items.min() <= items.max() <= split.n_items:
        raise ValueError(f"training items must be ids 1..{split.n_items}, got {items.min()}..{items.max()}")
    if not (np.diff(np.asarray(split.train.offsets)) > 1).any():
        raise ValueError("no training sequence has two or more items, so there is no next item to learn")
    if not len(split.valid.targets):
        raise ValueError("the split has no validation examples, and early stopping needs them")


def fit(
    model: nn.Module,  # trained in place; holds the weights of the best epoch afterwards
    split: Any,  # `Split`: train sequences and validation examples are used, test is never looked at
    *,
    seed: int = 0,  # order of batches, dropout and negatives (the model was initialised before)
    epochs: int = 100,  # at most
    batch_size: int = 128,  # sequences of a step, of all processes together
    lr: float = 3e-3,  # of AdamW, at the start
    schedule: str = "constant",  # of both learning rates: "constant", or "linear" down to zero after the last of `epochs`
    precision_lr: float | None = None,  # of the precision parameters; None: `lr`
    weight_decay: float = 0.0,  # of all other parameters
    negatives: int | None = 512,  # of the sampled softmax, per batch; None: full cross-entropy
    patience: int = 5,  # validations without a better ndcg@10 before stopping
    validate_every: int = 1,  # epochs between validations; a divisor of `epochs`
    device: str = "auto",  # "auto", "cpu", "cuda", "mps"
    dtype: str = "float32",  # "float32" or "bfloat16" (autocast; precision and losses stay float32)
    out_dir: str | Path | None = None,  # checkpoints; a second call with the same settings resumes. None: none are kept
    progress: bool = False,  # bar with loss and validation metric
    filter_seen: bool = True,  # in validation
    eval_batch_size: int = 128,
    processes: int | None = None,  # that share each batch; None: one for each visible GPU
) -> FitResult:
    """Train on all positions of the training sequences, stop early, restore the best epoch.

    Deterministic by `seed` on a CPU, and a killed run that is called again ends bit for bit where an uninterrupted one does
    (checkpoints are written at every validation). Several processes (`bft_nb.processes`) take the steps of one: without dropout their losses are the same
    but for rounding, and either can go on where the other was killed. Raises `ValueError` for impossible arguments and for an `out_dir` of another run,
    `FloatingPointError` if the loss becomes NaN or infinite.
    """
    settings = dict(
        seed=seed, epochs=epochs, batch_size=batch_size, lr=lr, precision_lr=precision_lr, weight_decay=weight_decay,
        negatives=negatives, patience=patience, dtype=dtype, filter_seen=filter_seen, schedule=schedule, validate_every=validate_every,
    )  # fmt: skip
    _check_settings({**settings, "eval_batch_size": eval_batch_size})
    _check_data(model, split)
    place, (rank, world) = resolve_device(device), process()
    n = number_of_processes(processes, place, batch_size)
    if world > 1 and out_dir is None:
        raise ValueError(f"out_dir must be a folder that all {world} processes see, got None")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(out_dir or scratch).absolute()
        check_out_dir(folder, _settings_hash(model, split, settings))
        checkpoint, task = last_checkpoint(folder), (split, folder, place.type, settings, eval_batch_size, progress)
        if checkpoint and _finished(Path(checkpoint), epochs, patience):
            log = _restore_best(Path(checkpoint), model.to(place))
        else:
            log = train_together(_train, model, task, n, place) if n > 1 else _train(model, *task)
        if out_dir is not None and rank == 0 and hasattr(model, "save_pretrained"):
            model.save_pretrained(folder / "model")
    return _result(log)


def _train(model, split, folder: Path, place: str, settings: dict[str, Any], eval_batch_size: int, progress: bool) -> list[dict[str, float]]:
    "Train in this process, from the newest checkpoint on if there is one; the trainer's log."
    join(torch.device(place))
    trainer = _trainer(model, split, folder, torch.device(place), settings, eval_batch_size, progress)
    run_trainer(trainer, last_checkpoint(folder))
    return trainer.state.log_history


def run_trainer(trainer: Any, checkpoint: str | None) -> None:
    "Run a trainer of `transformers`. A filter refuses the NaN of a diverged model before the loss could show it: that is named what it is, a `FloatingPointError`."
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except ValueError as e:
        if not any(word in str(e) for word in ("finite", "got nan", "got inf")):
            raise
        raise FloatingPointError(f"training diverged after step {trainer.state.global_step}: {e}. Try a smaller lr or precision_lr") from e


@contextlib.contextmanager
def interrupted_later() -> Iterator[None]:
    "A Ctrl-C meanwhile comes at the end: an import that is broken off leaves a half-imported package, and this process could not train again."
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    earlier = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier or signal.default_int_handler)  # None: of another language than Python
    if came:
        signal.raise_signal(signal.SIGINT)


def _trainer(model, split, folder: Path, place: torch.device, settings: dict[str, Any], eval_batch_size: int, progress: bool):
    "A trainer ready to run."
    with interrupted_later():  # importing transformers takes seconds, and only training needs it
        from transformers import EarlyStoppingCallback, PrinterCallback, set_seed

        from bft_nb._trainer import Every, OneDevice, Progress, RankingTrainer

    data = TrainingSequences(split.train, model)
    batches = data.batches(settings["batch_size"], settings["seed"])
    groups = parameter_groups(model.to(place), settings["lr"], settings["precision_lr"], settings["weight_decay"])
    loss = SequenceLoss(model, settings["negatives"], data.n_targets() / len(batches) / process()[1])  # gradients are averaged over processes
    callbacks = [Every(settings["validate_every"]), EarlyStoppingCallback(settings["patience"])]
    if progress:
        callbacks.append(Progress(len(batches) * settings["epochs"]))
    set_seed(settings["seed"])
    trainer = RankingTrainer(
        model, _arguments(OneDevice, folder, place, settings), train_dataset=data, eval_dataset=[0], compute_loss_func=loss,
        optimizers=(torch.optim.AdamW(groups, fused=True), None), callbacks=callbacks,
        batches=batches, valid=split.valid, eval_batch_size=eval_batch_size, filter_seen=settings["filter_seen"],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def _arguments(arguments: type, folder: Path, place: torch.device, settings: dict[str, Any]):
    "What `transformers` is asked to do at the end of an epoch: log, validate, save."
    return arguments(
        output_dir=str(folder), num_train_epochs=settings["epochs"], per_device_train_batch_size=settings["batch_size"],
        seed=settings["seed"], lr_scheduler_type=settings["schedule"], use_cpu=place.type == "cpu", bf16=settings["dtype"] == "bfloat16",
        eval_strategy="epoch", save_strategy="epoch", logging_strategy="epoch", logging_nan_inf_filter=False,
        metric_for_best_model="ndcg@10", greater_is_better=True, load_best_model_at_end=True, save_total_limit=2,
        average_tokens_across_devices=False, restore_callback_states_from_checkpoint=True, remove_unused_columns=False, dataloader_pin_memory=False,
        disable_tqdm=True, report_to="none", label_names=["labels"],
    )  # fmt: skip


def _state(checkpoint: Path):
    from transformers import TrainerState

    return TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))


def _finished(checkpoint: Path, epochs: int, patience: int) -> bool:
    "Does this checkpoint end a run, by its number of epochs or of validations without a better one?"
    rows = _history(_state(checkpoint).log_history)
    since_best = sum(row["epoch"] > _best(rows) for row in rows)
    return rows[-1]["epoch"] >= epochs or since_best >= patience


def _restore_best(checkpoint: Path, model: nn.Module) -> list[dict[str, float]]:
    "Load the weights of the best epoch of a finished run; its log."
    from safetensors.torch import load_model

    state = _state(checkpoint)
    load_model(model, checkpoint.parent / Path(state.best_model_checkpoint).name / "model.safetensors")
    return state.log_history


def _best(rows: list[dict[str, float]]) -> int:
    "First epoch with the largest ndcg@10 on validation."
    return int(max(rows, key=lambda row: (row["ndcg@10"], -row["epoch"]))["epoch"])


def _result(log: list[dict[str, float]]) -> FitResult:
    rows = _history(log)
    return FitResult(rows, _best(rows), sum(row["seconds"] for row in rows))
