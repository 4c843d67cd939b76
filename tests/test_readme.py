"What README.md promises: its commands, its examples, its table."

import re
import shlex

import pytest
import torch
from helpers import ROOT, tool

from bft_nb import cli, models, plan, study
from bft_nb.ranking import ndcg
from bft_nb.report import choose, compare, load_rows, signed

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
COMMANDS = sorted({shlex.join(shlex.split(line, comments=True)[1:]) for line in [*BLOCKS.splitlines(), *re.findall(r"`(bft [^`…]+)`", README)] if line.startswith("bft ")})
SETS = {"MovieLens": "ml1m"}  # where the table does not use the name of the set
ARMS = {"torch's layer": "plain", "the null": "null", "null": "null", "filter": "filter"}
example = tool("wheel").example


@pytest.mark.parametrize("line", COMMANDS)
def test_commands(line, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("BFT_CACHE", str(tmp_path))
    monkeypatch.delenv("BFT_DATA", raising=False)
    monkeypatch.setattr(plan, "activations", lambda *_: 0)  # a minute's work, which test_plan.py looks at
    monkeypatch.chdir(ROOT)
    given = cli._parser().parse_args(shlex.split(line))
    if hasattr(given, "dry_run"):
        status = cli.main([*shlex.split(line), *([] if getattr(given, "list", False) else ["--dry-run", "--out", str(tmp_path / "out")])])
        said = capsys.readouterr()
        assert status in (0, 1) and said.out and not said.err  # 1: no data here
    assert not list(tmp_path.iterdir())


def test_the_example_of_the_layer():
    made = {}
    exec(example("BFTEncoder"), made)
    assert made["hidden"].shape == (8, 50, 64) and 0 < made["steps"][0].gain.mean() < 1


def test_the_example_of_a_language_model(monkeypatch, capsys):
    load_model = models.load_model
    monkeypatch.setattr(models, "load_model", lambda name: load_model("tiny"))
    made = {}
    exec(example("calibrate"), made)
    assert capsys.readouterr().out and torch.isfinite(made["model"](**made["tokenizer"]("7", return_tensors="pt")).logits).all()


def test_the_example_of_sinks(monkeypatch, capsys):
    load_model = models.load_model
    monkeypatch.setattr(models, "load_model", lambda name: load_model("tiny"))
    made = {}
    exec(example("measure_sinks"), made)
    rate, *lines = capsys.readouterr().out.splitlines()
    assert 0 <= float(rate) <= 1 and lines[0].split() == ["mass", "n_eff", "gate"] and lines[-1].split()[-1] == "1.0"


def table():
    "{(label, data set): what stands there} of the table of results."
    head, _, *lines = re.search(r"^\| HR@10 / NDCG@10 \|.*?(?=\n\n)", README, re.MULTILINE | re.DOTALL)[0].splitlines()
    split = lambda line: [entry.strip() for entry in line.strip("|").split("|")]
    return {(label, name): entry for label, *entries in map(split, lines) for name, entry in zip(split(head)[1:], entries, strict=True)}


def test_the_table_is_what_the_stored_rows_say():
    stored, said = study.study_rows(ROOT / "data" / "results"), table()

    def computed(label, name):
        cell = lambda arm: study.cell(stored, SETS.get(name, name.lower()), "sasrec", arm)
        if label.startswith("Δ to "):
            return signed(compare(cell("filter"), cell(ARMS[label.removeprefix("Δ to ")]), ndcg, folder=ROOT / "data" / "results", relative=True)["all"], 1)
        mean = study.metrics(cell(ARMS[label]))["mean"]
        return " / ".join(f"{mean[m]:.4f}".lstrip("0") for m in ("hr@10", "ndcg@10"))

    assert said == {key: computed(*key) for key in said}


def test_the_calibration_is_what_the_stored_rows_say():
    rows = choose(load_rows("recommender", ROOT / "data" / "results"), dataset="ml100k", bft=True, schedule="linear", seed=0).set_index("metric")["value"]
    fifths = [rows[[f"{name}.bin{b}" for b in range(5)]].to_numpy() for name in ("confidence", "hits", "n")]
    said, hit = (fifths[0] * fifths[2]).sum() / fifths[2].sum(), fifths[1].sum() / fifths[2].sum()
    assert re.search(r"on MovieLens 100K .*?\((.*?) on average\)", README)[1] == f"{said:.3f} said, {hit:.3f} hit".replace("0.", ".")
