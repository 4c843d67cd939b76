"""What the programs in this folder have in common: they train one epoch for every line they read, and answer with its CPU time.

    python rectools_sasrec.py settings.json

`settings.json` names an npz file with the training sequences (`offsets`, `items`; ids 1..n_items) and the configuration. Each program runs
in its own virtual environment, so this module imports nothing but the standard library, NumPy and torch.
"""

import json
import os
import sys
import time
from collections.abc import Callable

import numpy as np
import torch


def settings() -> tuple[dict, np.ndarray, np.ndarray]:
    "Configuration, offsets and items of the sequences; torch is held to one thread."
    torch.set_num_threads(1)
    with open(sys.argv[1]) as file:
        asked = json.load(file)
    with np.load(asked["sequences"]) as stored:
        return asked, stored["offsets"], stored["items"]


class Clock:
    "CPU time of this process between `start` and `stop` [s], and how many targets were trained."

    def start(self) -> None:
        self.targets, self.begun = 0, time.process_time()

    def stop(self) -> None:
        self.seconds = time.process_time() - self.begun


def serve(about: dict, epoch: Callable[[Clock], None]) -> None:
    "Say what is measured, then train an epoch per line of standard input; whatever a library prints goes to standard error."
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"torch": torch.__version__.split("+")[0], **about}), file=answers)
    for _ in sys.stdin:
        clock = Clock()
        epoch(clock)
        print(json.dumps({"seconds": clock.seconds, "targets": clock.targets}), file=answers)
