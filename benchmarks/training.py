"""What `transformers.Trainer` costs per step, against a bare loop over the same model, batches and optimiser.

    python benchmarks/training.py [--steps 30] [--rounds 3]

CPU time of this process, one thread; trainer and bare loop take turns, and the median of the per-round ratios is printed.
"""

import argparse
import statistics
import tempfile
import time
from types import SimpleNamespace

import numpy as np
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

import bft_nb.training as training
from bft_nb.backbones import SASRec
from bft_nb.interactions import Examples, from_lengths

WARM = 3


class Clock(TrainerCallback):
    "CPU time from the end of step WARM to the end of the last step."

    def __init__(self, steps): self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == WARM: self.start = time.process_time()
        if state.global_step == self.steps:
            self.seconds = (time.process_time() - self.start) / (self.steps - WARM)
            control.should_training_stop = True
            control.should_evaluate = control.should_save = False


def world(batch_size, steps, lengths, n_items=12_101):
    lengths = np.resize(lengths, batch_size * steps)
    items = np.random.default_rng(0).integers(1, n_items + 1, lengths.sum())
    few = Examples(np.arange(2, dtype=np.int32), from_lengths(np.array([1, 1]), np.array([1, 2])), np.array([1, 2], dtype=np.int32))
    return SimpleNamespace(train=from_lengths(lengths, items), valid=few, n_items=n_items, hash="bench")


def settings(batch_size):
    return dict(seed=0, epochs=1, batch_size=batch_size, lr=1e-3, precision_lr=None, weight_decay=0.0, negatives=512, patience=1, dtype="float32", filter_seen=True, schedule="constant", validate_every=1)


def with_trainer(split, batch_size, steps, folder):
    model = SASRec(split.n_items)
    trainer = training._trainer(model, split, folder, torch.device("cpu"), settings(batch_size), 128, False)
    clock = Clock(steps)
    trainer.add_callback(clock)
    trainer.args.eval_strategy = trainer.args.save_strategy = trainer.args.logging_strategy = "no"
    trainer.args.load_best_model_at_end = False
    trainer.pop_callback(EarlyStoppingCallback)
    trainer.train()
    return clock.seconds


def bare(split, batch_size, steps):
    model = SASRec(split.n_items).train()
    data = training.TrainingSequences(split.train, model)
    batches = data.batches(batch_size, 0)
    loss = training.SequenceLoss(model, 512, data.n_targets() / len(batches))
    optimizer = torch.optim.AdamW(training.parameter_groups(model, 1e-3, None, 0.0), fused=True)
    for step, rows in enumerate(batches, 1):
        batch = data.__getitems__(rows)
        loss(model(batch["items"]), batch["labels"]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == WARM: start = time.process_time()
    return (time.process_time() - start) / (steps - WARM)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)


    short = np.random.default_rng(0).geometric(1 / 5, 4096) + 2  # like the Amazon sets: mean near 7, cut at 50
    for name, batch_size, lengths in [("T=50", 128, [51]), ("T=50", 256, [51]), ("bucketed, mean 7", 128, short), ("bucketed, mean 7", 256, short)]:
        split = world(batch_size, args.steps, lengths)
        rounds = []
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                rounds.append((with_trainer(split, batch_size, args.steps, folder), bare(split, batch_size, args.steps)))
        ratio = statistics.median(a / b for a, b in rounds)
        a, b = (statistics.median(x) for x in zip(*rounds, strict=True))
        print(f"{name:>18}  B={batch_size}  trainer {1e3 * a:6.1f} ms/step  bare {1e3 * b:6.1f} ms/step  ratio {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
