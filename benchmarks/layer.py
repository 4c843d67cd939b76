"""What the filter costs: BFTEncoderLayer against torch's own layer, and the price of its import.

    python benchmarks/layer.py                  # lengths 50 to 2048
    python benchmarks/layer.py --lengths 200    # one length
    python benchmarks/layer.py --store          # also append the ratios to data/results/layer.csv, read by nbs/experiments/claims.ipynb

Both layers have the same shape and input, run in turn in one process on one thread, forward and backward; a round's ratio
divides their CPU times, and the median over rounds is printed, so that a machine that slows down slows both. Memory is the
largest number of live bytes that a step adds. torch's layer is in training mode without dropout: its fused attention. Multiplications
are counted in the matrix products of a forward pass, in torch's layer without the fused kernel, which hides its own.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would print a line per use
import torch  # noqa: E402
from memory import peak_bytes  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from bft_nb.attention import IMPLEMENTATIONS  # noqa: E402
from bft_nb.core import certain  # noqa: E402
from bft_nb.encoder import BFTEncoderLayer  # noqa: E402
from bft_nb.report import results_folder  # noqa: E402
from bft_nb.results import append_rows, run_rows  # noqa: E402


def layers(d: int, heads: int, impls: list[str]) -> dict[str, nn.Module]:
    shape = dict(d_model=d, nhead=heads, dim_feedforward=4 * d, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    torch.manual_seed(0)
    return {"sdpa": nn.TransformerEncoderLayer(**shape)} | {impl: BFTEncoderLayer(**shape, impl=impl) for impl in impls}


def step(layer: nn.Module, x: torch.Tensor, mask: torch.Tensor, backward: bool) -> None:
    "One causal pass; the filter carries its precision, as inside an encoder."
    if isinstance(layer, BFTEncoderLayer):
        mean, precision = layer(certain(x), is_causal=True)
        out = mean.sum() + precision.sum()
    else:
        out = layer(x, src_mask=mask, is_causal=True).sum()
    if backward:
        out.backward()


def cpu_seconds(run, at_least: float = 0.05) -> float:
    "CPU time of one call, averaged over as many as take `at_least` seconds."
    calls, start = 0, time.process_time()
    while (used := time.process_time() - start) < at_least:
        run()
        calls += 1
    return used / calls


def products(run) -> int:
    "Floating-point operations in the matrix products of a call."
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as count:
        run()
    return count.get_total_flops()


def compare(t: int, batch: int, d: int, heads: int, rounds: int, impls: list[str], store: bool) -> None:
    "Each implementation beside torch's layer at one length."
    start, made = time.perf_counter(), layers(d, heads, impls)
    x = torch.randn(batch, t, d, requires_grad=True)
    mask = nn.Transformer.generate_square_subsequent_mask(t)
    runs = {(name, back): lambda layer=layer, back=back: step(layer, x, mask, back) for name, layer in made.items() for back in (False, True)}
    for run in runs.values():
        run()
    times = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            times[key].append(cpu_seconds(run))
    memory = {name: peak_bytes(runs[name, True]) for name in made}
    flops = {name: products(runs[name, False]) for name in made}
    for name in impls:
        forward, both = (statistics.median(a / b for a, b in zip(times[name, back], times["sdpa", back], strict=True)) for back in (False, True))
        found = {"forward": forward, "step": both, "memory": memory[name] / memory["sdpa"], "products": flops[name] / flops["sdpa"]}
        base = 1e3 * statistics.median(times["sdpa", True])
        print(f"{name:9} T={t:5} B={batch:3} d={d:4} h={heads:2}  " + "  ".join(f"{key} {value:5.2f}×" for key, value in found.items()) + f"   (sdpa: {base:.1f} ms)", flush=True)
        if store:
            run = dict(exp="layer", dataset="random", model=name, params=dict(length=t, batch=batch, d=d, heads=heads), seed=0)
            rows = run_rows(run, {"to_sdpa": {key: (value, rounds) for key, value in found.items()}}, seconds=round(time.perf_counter() - start, 1), device="cpu")
            append_rows(results_folder() / "layer.csv", rows)


def import_seconds(rounds: int) -> float:
    "What `import bft_nb.encoder` adds to `import torch`: median over rounds, each in a fresh interpreter."
    code = "import time, torch; t = time.process_time(); import bft_nb.encoder; print(time.process_time() - t)"
    return statistics.median(float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) for _ in range(rounds))


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--lengths", type=int, nargs="+", default=[50, 200, 512, 2048])
    ap.add_argument("--tokens", type=int, default=6400, help="tokens per batch: batch = tokens / length, at least 1")
    ap.add_argument("--d", type=int, default=64)
    ap.add_argument("--heads", type=int, default=2)
    ap.add_argument("--rounds", type=int, default=9)
    ap.add_argument("--impl", nargs="+", default=list(IMPLEMENTATIONS), choices=list(IMPLEMENTATIONS))
    ap.add_argument("--store", action="store_true", help="append the ratios to data/results/layer.csv")
    a = ap.parse_args()
    torch.set_num_threads(1)
    for t in a.lengths:
        compare(t, max(a.tokens // t, 1), a.d, a.heads, a.rounds, a.impl, a.store)
    print(f"import bft_nb.encoder adds {import_seconds(5):.2f} s to import torch")


if __name__ == "__main__":
    main()
