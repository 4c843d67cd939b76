"""bft_nb's backbones, trained as `bft_nb.training.fit` trains them, for the comparison of speed (see protocol.py)."""

import inspect
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from protocol import Clock, serve, settings
from transformers import EarlyStoppingCallback, TrainerCallback

import bft_nb.training as training
from bft_nb import __version__
from bft_nb.backbones import BACKBONES
from bft_nb.interactions import Examples, from_lengths


class EpochClock(TrainerCallback):
    def __init__(self, clock: Clock, data: training.TrainingSequences):
        self.clock, self.data = clock, data

    def on_epoch_begin(self, args, state, control, **kwargs): self.clock.start()

    def on_epoch_end(self, args, state, control, **kwargs):
        self.clock.stop()
        self.clock.targets = round(self.data.n_targets())  # what is expected where targets are drawn (BERT4Rec)


def main() -> None:
    asked, offsets, items = settings()
    few = Examples(np.arange(1, dtype=np.int32), from_lengths(np.array([1]), np.array([1])), np.array([2], np.int32))
    split = SimpleNamespace(train=from_lengths(np.diff(offsets), items), valid=few, n_items=asked["n_items"], hash="speed")
    usual = {name: p.default for name, p in inspect.signature(training.fit).parameters.items()}
    fitting = usual | dict(epochs=1, batch_size=asked["batch_size"], negatives=asked["negatives"] or None)
    model = BACKBONES[asked["backbone"]](
        split.n_items, max_length=asked["max_length"], d=asked["d"], n_layers=asked["n_layers"], n_heads=asked["n_heads"], dropout=asked["dropout"], bft=asked["bft"]
    )

    def epoch(clock: Clock) -> None:
        with tempfile.TemporaryDirectory() as folder:
            trainer = training._trainer(model, split, Path(folder), torch.device("cpu"), fitting, 128, False)
            trainer.args.eval_strategy = trainer.args.save_strategy = trainer.args.logging_strategy = "no"
            trainer.args.load_best_model_at_end = False
            trainer.pop_callback(EarlyStoppingCallback)
            trainer.add_callback(EpochClock(clock, trainer.train_dataset))
            trainer.train()

    serve({"engine": "bft_nb", "version": __version__}, epoch)


if __name__ == "__main__":
    main()
