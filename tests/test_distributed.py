"Two processes (gloo, CPU) train as one does."

import json

import torch
from helpers import two_processes
from test_training import QUICK, chain_split, small

from bft_nb.training import fit

# every step sees all sequences: 64 in one batch, or 32 in each of two processes
SAME = dict(QUICK, negatives=None, epochs=4, patience=9)
SCRIPT = """
import json
import torch.distributed as dist
from test_distributed import SAME
from test_training import chain_split, small
from bft_nb.training import fit
split = chain_split(users=64)
fitted = fit(small(split, dropout=0.0), split, **SAME, out_dir={out!r})
if dist.get_rank() == 0:
    print(json.dumps([dist.get_world_size(), fitted.history]))
dist.barrier()  # or one process closes what the other still reads
dist.destroy_process_group()
"""


def test_the_loss_of_two_processes_is_that_of_one(tmp_path):
    world, two = json.loads(two_processes(tmp_path, SCRIPT.format(out=str(tmp_path / "run"))).splitlines()[-1])
    split = chain_split(users=64)
    one = fit(small(split, dropout=0.0), split, **SAME | {"batch_size": 64}).history
    assert world == 2 and len(one) == 4 and one[-1]["loss"] < one[0]["loss"]
    for name in ("loss", "ndcg@10"):
        torch.testing.assert_close([row[name] for row in two], [row[name] for row in one], rtol=1e-4, atol=1e-5)
