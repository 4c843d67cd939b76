"""What `bft_nb.training.fit` adds to `transformers.Trainer`; a module of its own, because importing `transformers` takes seconds."""

import logging
import math
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback, TrainingArguments

from bft_nb.ranking import Ranking
from bft_nb.training import IGNORE, LengthBatches, ranks_of

# it orders checkpoints by number where a file system's times do not tell them apart: nothing a user could act on
logging.getLogger("transformers.trainer_utils").addFilter(lambda record: "mtime may not be reliable" not in record.getMessage())


class OneDevice(TrainingArguments):
    "A single process uses a single device (several GPUs mean several processes)."

    @property
    def n_gpu(self) -> int:
        return min(1, super().n_gpu)


def share(batch: dict[str, torch.Tensor], rank: int, n: int) -> dict[str, torch.Tensor]:
    "The rows of one of `n` processes; where none is left for it, a row without labels, which has no gradient."
    if rank < len(batch["labels"]):
        return {name: x[rank::n] for name, x in batch.items()}
    row = {name: x[:1] for name, x in batch.items()}
    return row | {"labels": torch.full_like(row["labels"], IGNORE)}


class SharedBatches(Trainer):
    "Several processes share each batch: they take the steps that one process would take."

    def get_train_dataloader(self) -> DataLoader:
        rank, n = self.args.process_index, self.args.world_size
        if n == 1:
            return super().get_train_dataloader()
        return self.undivided(batch_size=self.args.per_device_train_batch_size, collate_fn=lambda batch: self.data_collator(batch[rank::n]))

    def undivided(self, **options: Any) -> DataLoader:
        "A loader that fetches whole batches in every process, so that each can take its rows."
        loader = DataLoader(self.train_dataset, **options)
        return prepare_data_loader(loader, self.accelerator.device, num_processes=1, process_index=0, put_on_device=True)


class RankingTrainer(SharedBatches):
    "Length-bucketed batches in, ranking metrics out."

    def __init__(self, *args, batches: LengthBatches, valid: Any, eval_batch_size: int, filter_seen: bool, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.valid = batches, valid
        self.eval_batch_size, self.filter_seen, self.started = eval_batch_size, filter_seen, time.perf_counter()

    def get_train_dataloader(self) -> DataLoader:
        return self.undivided(batch_sampler=self.batches, collate_fn=partial(share, rank=self.args.process_index, n=self.args.world_size))

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        "Rank the validation targets, each process its share of them; the seconds are those since the last validation, so they cover the epochs between."
        values = self.state.log_history[-1:]
        if values and not math.isfinite(values[0].get("loss", 0.0)):
            raise FloatingPointError(f"the training loss is {values[0]['loss']} after epoch {self.state.epoch:.0f}: try a smaller lr")
        metric = Ranking(k=(10,), filter_seen=self.filter_seen)
        mine = np.arange(self.args.process_index, len(self.valid.targets), self.args.world_size)
        metric.update(ranks_of(self.model, self.valid, mine, self.filter_seen, self.eval_batch_size))
        values = metric.compute()
        now = time.perf_counter()
        metrics = {f"{metric_key_prefix}_{name}": float(values[name]) for name in ("hr@10", "ndcg@10")}
        metrics[f"{metric_key_prefix}_seconds"], self.started = now - self.started, now
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class LastStep(TrainerCallback):
    "Log the last step, too, where it is no multiple of the steps of a row."

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log = control.should_log or state.global_step >= state.max_steps


class Every(TrainerCallback):
    "Validate and save at the end of every n-th epoch only."

    def __init__(self, n: int):
        self.n = n

    def on_epoch_end(self, args, state, control, **kwargs):
        if round(state.epoch) % self.n:
            control.should_evaluate = control.should_save = False


class Progress(TrainerCallback):
    "A bar with the last loss and validation metric."

    def __init__(self, total: int):
        self.total = total
        self.shown: dict[str, str] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        self.bar = tqdm(total=self.total, initial=state.global_step, unit="step", disable=not state.is_world_process_zero)

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        names = {"loss": "loss", "eval_ndcg@10": "valid ndcg@10"}
        self.shown |= {names[k]: f"{v:.4f}" for k, v in (logs or {}).items() if k in names}
        self.bar.set_postfix(self.shown)

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()
