"Chapters build upwards, and the layer loads torch and nothing heavy."

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TWINS = sorted((ROOT / "nbs" / "_py").glob("[0-9]*.py"))
HEAVY = ["sympy", "matplotlib", "seaborn", "pandas", "polars", "pyarrow", "scipy", "sklearn", "transformers", "torchmetrics", "accelerate", "IPython", "fastcore", "papermill"]
LAST_OF_THE_LAYER = 22


def number(twin: Path) -> int:
    return int(twin.name[:2])


def module(twin: Path) -> str | None:
    found = re.search(r"^#\s?\|\s*default_exp\s+(\w+)", twin.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def cells(twin: Path) -> list[str]:
    return [c for c in re.split(r"^# %%.*$", twin.read_text(encoding="utf-8"), flags=re.MULTILINE) if not c.lstrip().startswith("# #")]


def imported(source: str) -> set[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return set()
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.module and not n.level:
            names |= {n.module} | ({f"bft_nb.{a.name}" for a in n.names} if n.module == "bft_nb" else set())
    return names


RANK = {module(t): number(t) for t in TWINS if module(t)}


@pytest.mark.parametrize("twin", TWINS, ids=lambda t: t.stem)
def test_a_chapter_imports_only_lower_chapters(twin):
    for name in imported(twin.read_text(encoding="utf-8")):
        stem = name.split(".")[1] if name.startswith("bft_nb.") else None
        if stem in RANK:
            assert RANK[stem] < number(twin), f"{twin.name} imports bft_nb.{stem}, chapter {RANK[stem]}"


@pytest.mark.parametrize("twin", [t for t in TWINS if number(t) <= LAST_OF_THE_LAYER and module(t) not in (None, "symbolic", "figures")], ids=lambda t: t.stem)
def test_exported_cells_of_the_layer_import_nothing_heavy(twin):
    exported = [c for c in cells(twin) if re.search(r"^#\s?\|\s*exports?\b", c, re.MULTILINE)]
    names = set().union(*map(imported, exported)) if exported else set()
    assert not {n.split(".")[0] for n in names} & set(HEAVY)
    assert not names & {"bft_nb.symbolic", "bft_nb.figures"}


@pytest.mark.parametrize("name", [m for m, n in RANK.items() if n <= LAST_OF_THE_LAYER and m not in ("symbolic", "figures")])
def test_importing_the_layer_loads_torch_alone(name):
    code = (
        "import sys, torch, jaxtyping\n"
        f"before = set(sys.modules)\nimport bft_nb.{name}\n"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert not set(out) & set(HEAVY), f"bft_nb.{name} loads {set(out) & set(HEAVY)}"


def test_the_command_line_starts_without_heavy_imports():
    code = "import sys, bft_nb.cli; print(*{m.split('.')[0] for m in sys.modules})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert not set(out) & {*HEAVY, "torch", "numpy", "yaml"}


def test_module_stems_are_unique_and_exported():
    stems = [m for t in TWINS if (m := module(t))]
    assert len(stems) == len(set(stems))
    for twin in TWINS:
        if name := module(twin):
            assert name == re.sub(r"^\d+_", "", twin.stem), f"{twin.name} exports to {name}: module and file have one name"
            assert (ROOT / "bft_nb" / f"{name}.py").is_file()
