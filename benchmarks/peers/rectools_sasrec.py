"""RecTools' SASRec for the comparison of speed (see protocol.py); to be run in an environment with `pip install "rectools[torch]"`.

Sequences are padded to the full length, as RecTools does, and every position after which something follows is a target.
"""

from importlib.metadata import version

import numpy as np
import pandas as pd
from protocol import Clock, serve, settings
from pytorch_lightning import Callback, Trainer
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel
from rectools.models.nn.transformers.sasrec import SASRecDataPreparator
from torch.utils.data import Subset


class EpochClock(Callback):
    def __init__(self, clock: Clock): self.clock = clock

    def __deepcopy__(self, memo): return self  # RecTools trains with a copy of the trainer

    def on_train_epoch_start(self, trainer, module): self.clock.start()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx): self.clock.targets += int((batch["y"] != 0).sum())

    def on_train_epoch_end(self, trainer, module): self.clock.stop()


def main() -> None:
    asked, offsets, items = settings()
    lengths = np.diff(offsets)
    # users after the measured ones bring in the rest of the catalogue, one item each and therefore no target
    rest = np.setdiff1d(np.arange(1, asked["n_items"] + 1), items)
    users = np.concatenate([np.repeat(np.arange(len(lengths)), lengths), np.full(len(rest), len(lengths))])
    when = np.concatenate([np.concatenate([np.arange(n) for n in lengths]), np.arange(len(rest))])
    frame = pd.DataFrame({Columns.User: users, Columns.Item: np.concatenate([items, rest]), Columns.Weight: 1.0, Columns.Datetime: pd.Timestamp(0) + pd.to_timedelta(when, "D")})
    clock_of_now: list[Clock] = []

    class Measured(SASRecDataPreparator):
        "All users but the one who holds the rest of the catalogue."

        def _filter_train_interactions(self, interactions): return interactions

        def get_dataloader_train(self):
            loader = super().get_dataloader_train()
            kept = Subset(loader.dataset, range(len(lengths)))
            return type(loader)(kept, batch_size=self.batch_size, collate_fn=self._collate_fn_train, shuffle=True)

    def trainer() -> Trainer:
        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        return Trainer(accelerator="cpu", max_epochs=1, callbacks=[EpochClock(clock_of_now[-1])], **quiet)

    def epoch(clock: Clock) -> None:
        clock_of_now.append(clock)
        model = SASRecModel(
            n_blocks=asked["n_layers"], n_heads=asked["n_heads"], n_factors=asked["d"], dropout_rate=asked["dropout"], session_max_len=asked["max_length"],
            batch_size=asked["batch_size"], loss="sampled_softmax" if asked["negatives"] else "softmax", n_negatives=asked["negatives"] or 1,
            data_preparator_type=Measured, get_trainer_func=trainer,
        )  # fmt: skip
        model.fit(Dataset.construct(frame))

    serve({"engine": "RecTools", "version": version("rectools")}, epoch)


if __name__ == "__main__":
    main()
