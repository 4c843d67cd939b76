"""Arms of the attention-sinks study: their names, and which rows are at its budget."""

import math

import pytest
import torch

from bft_nb.results import append_rows, run_rows
from bft_nb.sink_study import ARMS, BUDGETS, method_of, peak_memory, sink_rows, titled


@pytest.mark.parametrize("start, damping, note", [("letter", math.nan, ""), ("no gain", math.nan, ", no gain"), ("shipped", math.nan, ", shipped start"), (math.nan, 0.3, ", × 0.3")])
def test_an_arm_is_named_by_what_sets_it_apart(start, damping, note):
    for method, title in ARMS.items():
        arm = titled(method, start, damping)
        assert arm == title + note
        assert method_of(arm) == method


def test_rows_at_other_budgets_are_left_out(tmp_path):
    of = BUDGETS["scratch"]
    for lr in (of["lr"], 2 * of["lr"]):
        for more in (dict(method="sft"), dict(method="sft", damping=0.3), dict(method="bft", start="letter")):
            params = {**{k: v for k, v in of.items() if k not in ("model", "dataset")}, "study": "scratch", "lr": lr, **more}
            run = dict(exp="attention_sinks", dataset=of["dataset"], model=of["model"], params=params, seed=0)
            append_rows(tmp_path / "attention_sinks.csv", run_rows(run, {"bos": {"loss": (1.0, 24)}}, seconds=1.0, device="cpu"))
    rows = sink_rows(tmp_path)
    assert list(rows["arm"]) == ["plain", "plain, × 0.3", "BFT"]
    assert set(rows["lr"]) == {of["lr"]}
    assert len(sink_rows(tmp_path, {"scratch": {}})) == 6


def test_without_rows_it_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="attention_sinks"):
        sink_rows(tmp_path)


def test_peak_memory_is_in_units_of_a_billion_bytes():
    before = peak_memory()
    held = torch.ones(int(before * 1e9) // 4 + 50_000_000)  # more than all that was ever held, by 0.2 GB
    assert peak_memory() >= held.nbytes / 1e9
    assert peak_memory() < 2 * before + 1
