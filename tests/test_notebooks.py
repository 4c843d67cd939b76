"Hygiene of the committed notebooks."

import ast
import base64
import re

import nbformat
import pytest
from helpers import ROOT, tool

NBS = ROOT / "nbs"
NOTEBOOKS = sorted(p for p in NBS.rglob("*.ipynb") if not any(x[0] in "._" for x in p.relative_to(NBS).parts))
CHAPTERS = [p for p in NOTEBOOKS if re.match(r"\d", p.name)]
EXPERIMENTS = [p for p in NOTEBOOKS if p.parent.name == "experiments"]
# a home folder, a temporary file, a drive: what no output may show
MACHINE_PATH = re.compile(r"(?<![\w/.:])/(?:home|root|Users|tmp|work|workspace|mnt|opt|var/folders|private|content)/\w|\b[A-Z]:\\\\?Users")
BASE64 = re.compile(r"[A-Za-z0-9+/=\n]{200,}")


nb_tool = tool("nb")


def each(notebooks):
    return pytest.mark.parametrize("path", notebooks, ids=lambda p: p.stem)


def read(path):
    return nbformat.read(path, 4)


def code_cells(path):
    return [c for c in read(path).cells if c.cell_type == "code"]


def texts(output):
    if output.output_type == "stream":
        yield output.text
    for kind, data in output.get("data", {}).items():
        if not kind.startswith("image/"):
            yield data if isinstance(data, str) else "".join(data)


@each(NOTEBOOKS)
def test_pair_outputs_and_import_cells(path):
    twin = NBS / "_py" / path.relative_to(NBS).with_suffix(".py")
    assert list(nb_tool.problems(path, twin)) == []


@each(NOTEBOOKS)
def test_small(path):
    assert path.stat().st_size <= 500_000
    for c in code_cells(path):
        for o in c.outputs:
            if "image/png" in o.get("data", {}):
                assert len(base64.b64decode(o.data["image/png"])) <= 60_000, c.source[:80]


@each(NOTEBOOKS)
def test_no_error_no_warning_no_machine_path(path):
    for c in code_cells(path):
        for o in c.outputs:
            assert o.output_type != "error", c.source
            assert not (o.output_type == "stream" and o.name == "stderr"), f"something on stderr: {o.get('text', '')[:200]}"
            for text in texts(o):
                assert not MACHINE_PATH.search(text), MACHINE_PATH.search(text)[0]
    for c in read(path).cells:
        assert not MACHINE_PATH.search(BASE64.sub("", c.source)), MACHINE_PATH.search(c.source)[0]


@each(NOTEBOOKS)
def test_metadata(path):
    nb = read(path)
    assert set(nb.metadata) <= {"kernelspec", "executed", "jupytext", "language_info"}
    assert nb.metadata.kernelspec.name == "python3"
    assert all(set(c.metadata) <= {"tags"} for c in nb.cells)
    assert len({c.id for c in nb.cells}) == len(nb.cells)


@each(NOTEBOOKS)
def test_title_and_subtitle(path):
    first = read(path).cells[0]
    assert first.cell_type == "markdown"
    assert re.match(r"# .+\n\n> .+", first.source), "a chapter opens with its title and, as a quotation, one line of subtitle"


@each(CHAPTERS)
def test_chapter_ends_with_summary_and_exercises(path):
    headings = [h for c in read(path).cells if c.cell_type == "markdown" for h in re.findall(r"^## +(.+?)\s*$", c.source, re.MULTILINE)]
    assert "Summary" in headings and "Exercises" in headings
    assert headings.index("Summary") < headings.index("Exercises")
    whole = "\n".join(c.source for c in read(path).cells if c.cell_type == "markdown")
    assert whole.count("<details") == whole.count("</details>")


@each(NOTEBOOKS)
def test_every_figure_has_label_and_caption(path):
    labels = []
    for c in code_cells(path):
        if any("image/png" in o.get("data", {}) or "image/svg+xml" in o.get("data", {}) for o in c.outputs):
            label = re.search(r"^#\| label: (fig-[\w-]+)$", c.source, re.MULTILINE)
            assert label, f"figure without `#| label: fig-…`:\n{c.source[:200]}"
            assert re.search(r"^#\| fig-cap: *\S", c.source, re.MULTILINE), f"{label[1]} has no caption"
            labels.append(label[1])
    assert len(labels) == len(set(labels))


@each(NOTEBOOKS)
def test_cells_are_short(path):
    lengths = [len([ln for ln in c.source.splitlines() if ln.strip() and not ln.startswith("#|")]) for c in code_cells(path)]
    if len(lengths) >= 8:
        assert sorted(lengths)[len(lengths) // 2] <= 10, "median cell: one idea, a few lines"


@each(EXPERIMENTS)
def test_experiment_has_one_parameters_cell(path):
    tagged = [c for c in code_cells(path) if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert "default_exp" not in "".join(c.source for c in code_cells(path))
    values = {s.targets[0].id: ast.literal_eval(s.value) for s in ast.parse(tagged[0].source).body}  # fails for what is no literal
    assert 1 <= len(values) <= 15 and values.get("store", False) is False
