"""RecBole's SASRec for the comparison of speed (see protocol.py); to be run in an environment with `pip install recbole "numpy<2"`.

RecBole makes a sequence of n items into n − 1 sub-sequences, each with one target, and runs the model over each of them. The
targets are those of the other programs; a batch holds `recbole_batch` of them.
"""

import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
from protocol import Clock, serve, settings
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.model.sequential_recommender import SASRec
from recbole.trainer import Trainer
from recbole.utils import init_seed


def write(folder: Path, offsets: np.ndarray, items: np.ndarray, n_items: int) -> None:
    "RecBole's atomic files. Two more events a user are what its split sets aside for validation and test."
    with open(folder / "speed.inter", "w") as file:
        file.write("user_id:token\titem_id:token\ttimestamp:float\n")
        for user, (start, stop) in enumerate(zip(offsets[:-1], offsets[1:])):
            sequence = [*items[start:stop].tolist(), 1, 1]
            file.writelines(f"{user}\t{item}\t{when}\n" for when, item in enumerate(sequence))
    with open(folder / "speed.item", "w") as file:
        file.write("item_id:token\n" + "".join(f"{item}\n" for item in range(1, n_items + 1)))


def main() -> None:
    asked, offsets, items = settings()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)  # RecBole writes logs into the working directory
        folder = Path(scratch) / "speed"
        folder.mkdir()
        write(folder, offsets, items, asked["n_items"])
        config = Config(model="SASRec", dataset="speed", config_dict={
            "data_path": scratch, "checkpoint_dir": scratch, "load_col": {"inter": ["user_id", "item_id", "timestamp"], "item": ["item_id"]},
            "MAX_ITEM_LIST_LENGTH": asked["max_length"], "eval_args": {"split": {"LS": "valid_and_test"}, "order": "TO", "mode": "full", "group_by": "user"},
            "train_neg_sample_args": None, "loss_type": "CE", "train_batch_size": asked["recbole_batch"], "use_gpu": False, "show_progress": False, "state": "ERROR",
            "hidden_size": asked["d"], "inner_size": asked["d"], "n_layers": asked["n_layers"], "n_heads": asked["n_heads"],
            "hidden_dropout_prob": asked["dropout"], "attn_dropout_prob": asked["dropout"],
        })  # fmt: skip
        init_seed(0, True)
        data = create_dataset(config)
        train = data_preparation(config, data)[0]
        trainer = Trainer(config, SASRec(config, train.dataset))

        def epoch(clock: Clock) -> None:
            clock.start()
            trainer._train_epoch(train, 0)
            clock.stop()
            clock.targets = len(train.dataset)

        serve({"engine": "RecBole", "version": version("recbole")}, epoch)


if __name__ == "__main__":
    main()
