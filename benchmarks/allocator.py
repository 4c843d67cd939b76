"""What `bft run` gains on Linux by keeping freed memory (`bft_nb.runner.ALLOCATOR`): CPU time of training with it, over without.

    python benchmarks/allocator.py [--items 12101] [--rounds 3]

Synthetic sequences, one thread. Each pair is two processes that train an epoch in turn; the median of the per-round ratios is printed, a first round is not counted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from bft_nb.runner import ALLOCATOR

PROGRAM = Path(__file__).parent / "peers" / "ours.py"
MODEL = dict(d=64, n_layers=2, n_heads=2, max_length=50, dropout=0.5, batch_size=128)
CASES = [(backbone, negatives, bft) for backbone, negatives in (("sasrec", 0), ("sasrec", 512), ("hstu", 512)) for bft in (False, True)]


def start(settings: Path, kept: bool) -> subprocess.Popen:
    "A program that trains an epoch for every line it reads."
    env = {name: value for name, value in os.environ.items() if name not in ALLOCATOR} | (ALLOCATOR if kept else {}) | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([sys.executable, PROGRAM, settings], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    child.stdout.readline()
    return child


def epoch(child: subprocess.Popen) -> float:
    "CPU seconds of one epoch."
    print(file=child.stdin, flush=True)
    return json.loads(child.stdout.readline())["seconds"]


def ratio(settings: Path, rounds: int) -> float:
    "With over without."
    pair = [start(settings, kept) for kept in (True, False)]
    seconds = [[epoch(child) for child in pair] for _ in range(rounds + 1)][1:]
    for child in pair: child.communicate()
    return statistics.median(kept / given_back for kept, given_back in seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=12_101)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    lengths = np.resize([5, 8, 12, 30, 51], 1280)
    items = np.random.default_rng(0).integers(1, args.items + 1, lengths.sum())
    with tempfile.TemporaryDirectory() as folder:
        sequences, settings = Path(folder) / "sequences.npz", Path(folder) / "settings.json"
        np.savez(sequences, offsets=np.concatenate([[0], np.cumsum(lengths)]), items=items)
        for backbone, negatives, bft in CASES:
            settings.write_text(json.dumps(MODEL | dict(backbone=backbone, bft=bft, negatives=negatives, sequences=str(sequences), n_items=args.items)))
            loss = f"{negatives} negatives" if negatives else "full loss"
            print(f"{backbone:8} {'filter' if bft else 'plain':7} {loss:14} {ratio(settings, args.rounds):.2f}", flush=True)


if __name__ == "__main__":
    main()
