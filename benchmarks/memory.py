"What a computation needs at its most, counted and not sampled: for the benchmarks and the tests."

from collections.abc import Callable

import torch


def peak_bytes(run: Callable[[], object]) -> int:
    "Largest number of live bytes that `run` adds on the CPU, by the profiler's allocation events."
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as p:
        run()
    live = peak = 0
    for event in p.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak
