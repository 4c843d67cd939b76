"""What the pages that read the attention-sinks study share: its arms, what tables call them, and which stored rows are at its budget."""

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from bft_nb.finetune import METHODS
from bft_nb.report import choose, load_rows

__all__ = ["ARMS", "BUDGETS", "method_of", "peak_memory", "sink_rows", "titled"]

ARMS = {name: "plain" if name == "sft" else METHODS[name].title for name in ("sft", "headwise", "elementwise", "sink", "bft")}  # method -> what tables call it
BUDGETS: dict[str, dict[str, Any]] = {  # study -> what its rows are made with
    "pretrained": dict(model="smollm2", dataset="qa", length=2048, windows=6),
    "tuned": dict(model="smollm2", dataset="qa", length=1024, windows=8, steps=40, batch_size=2, lr=1e-4),
    "scratch": dict(model="small", dataset="qa", length=1024, windows=24, steps=420, batch_size=2, lr=2e-3),
}


def titled(method: str, start: str | float = "", damping: float = math.nan) -> str:
    "What tables call an arm: `BFT`, `BFT, no gain`, `plain, × 0.3`. An empty start, or NaN, is the study's own."
    note = {"shipped": ", shipped start", "no gain": ", no gain"}.get(str(start), "")
    return ARMS[method] + note + ("" if math.isnan(damping) else f", × {damping:g}")


def method_of(arm: str) -> str:
    "The method of an arm that `titled` named."
    return next(name for name, title in ARMS.items() if title == arm.partition(",")[0])


def sink_rows(
    folder: Path | None = None,  # of the rows; None: those of the book
    budgets: Mapping[str, Mapping[str, Any]] = BUDGETS,  # study -> what its rows must have been made with
) -> pd.DataFrame:
    "Stored rows at these budgets, with a column `arm`. `FileNotFoundError` if nothing is stored."
    rows = load_rows("attention_sinks", folder)
    rows["arm"] = [titled(**row) for row in rows.reindex(columns=["method", "start", "damping"]).to_dict("records")]
    return pd.concat([choose(rows, study=study, **values) for study, values in budgets.items()])


def peak_memory() -> float:
    "The most memory this process has held at once [GB, 10⁹ bytes]; NaN where the system does not say (Windows)."
    try:
        import resource
    except ImportError:
        return math.nan
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most * (1 if sys.platform == "darwin" else 1024) / 1e9
