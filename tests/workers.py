"What tests run in processes of their own, which import this and not the tests."

import os
import signal
import time
from pathlib import Path

import torch.distributed as dist


def mark(folder):
    (Path(folder) / f"{os.getpid()}.pid").touch()


class Halt:
    "A hook that leaves a mark of its process and stops it before one of its steps."

    def __init__(self, folder, step):
        self.folder, self.left = folder, step

    def __call__(self, module, _):
        if module.training:
            mark(self.folder)
            self.left -= 1
            if not self.left:
                time.sleep(600)


def refuse(model, folder):
    "The second process fails, the first waits for it."
    if dist.get_rank():
        raise ValueError("not this one")
    mark(folder)
    dist.barrier()


def die(model, folder):
    if dist.get_rank():
        print("so long", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep(model, folder):
    mark(folder)
    time.sleep(600)
