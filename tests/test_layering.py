"Chapters build upwards, and the layer loads torch and nothing heavy."

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, tool

wheel = tool("wheel")
TWINS = sorted((ROOT / "nbs" / "_py").glob("[0-9]*.py"))
HEAVY = ["sympy", "matplotlib", "seaborn", "pandas", "polars", "pyarrow", "scipy", "sklearn", "transformers", "torchmetrics", "accelerate", "IPython", "fastcore", "papermill"]
DISTRIBUTION = {"yaml": "pyyaml", "tokenizers": "transformers"}  # where a package does not come in a distribution of its own name


def number(twin: Path) -> int:
    return int(twin.name[:2])


def module(twin: Path) -> str | None:
    found = re.search(r"^#\s?\|\s*default_exp\s+(\w+)", twin.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def cells(twin: Path) -> list[str]:
    return [c for c in re.split(r"^# %%.*$", twin.read_text(encoding="utf-8"), flags=re.MULTILINE) if not c.lstrip().startswith("# #")]


def imported(source: str, inside: str = "") -> set[str]:
    "Names a source imports, anywhere; relative ones are those of the package it is inside of."
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return set()
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and (inside or not n.level):
            module = ".".join(filter(None, [inside * (n.level > 0), n.module]))
            names |= {module} | ({f"bft_nb.{a.name}" for a in n.names} if module == "bft_nb" else set())
    return names


RANK = wheel.exported()
LAYER = wheel.layer()


@pytest.mark.parametrize("twin", TWINS, ids=lambda t: t.stem)
def test_a_chapter_imports_only_lower_chapters(twin):
    for name in imported(twin.read_text(encoding="utf-8")):
        stem = name.split(".")[1] if name.startswith("bft_nb.") else None
        if stem in RANK:
            assert RANK[stem] < number(twin), f"{twin.name} imports bft_nb.{stem}, chapter {RANK[stem]}"


@pytest.mark.parametrize("twin", [t for t in TWINS if module(t) in LAYER], ids=lambda t: t.stem)
def test_exported_cells_of_the_layer_import_nothing_heavy(twin):
    exported = [c for c in cells(twin) if re.search(r"^#\s?\|\s*exports?\b", c, re.MULTILINE)]
    names = set().union(*map(imported, exported)) if exported else set()
    assert not {n.split(".")[0] for n in names} & set(HEAVY)
    assert not names & {"bft_nb.symbolic", "bft_nb.figures"}


def test_importing_the_layer_loads_torch_alone():
    code = f"""
import importlib, sys, torch, jaxtyping
before = set(sys.modules)
for name in {LAYER}:
    importlib.import_module(f"bft_nb.{{name}}")
    for found in sorted({{m.split(".")[0] for m in set(sys.modules) - before}} & set({HEAVY})): print(f"bft_nb.{{name}} loads {{found}}")
    before |= set(sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert out == ""


def reached(roots: list[str]) -> dict[str, set[str]]:
    "{module: what it imports from elsewhere} of modules and those they import; figures and runner say themselves that they need the extra nb."
    todo, found = list(roots), {}
    while todo:
        name = todo.pop()
        names = imported((ROOT / "bft_nb" / f"{name}.py").read_text(encoding="utf-8"), "bft_nb")
        found[name] = {n.split(".")[0] for n in names} - {"bft_nb", "__future__"} - set(sys.stdlib_module_names)
        own = {n.split(".")[1] for n in names if n.startswith("bft_nb.")} - {"_modidx", "__version__"} - ({"figures", "runner"} - set(roots))
        todo += [n for n in own if n not in found]
    return found


def declared(*extras: str) -> set[str]:
    words = " ".join(wheel.CFG["DEFAULT"][f"{e}requirements"] for e in ("", *(f"{e}_" for e in extras))).split()
    return {re.match(r"[\w-]+", w)[0].lower() for w in words}


@pytest.mark.parametrize(
    ("extra", "roots"),
    [
        ("rec", [*(m for m, n in RANK.items() if 29 <= n < 40), "recommend_command", "training", "results"]),
        ("llm", [*(m for m, n in RANK.items() if n >= 40), "models_command", "finetune", "rag", "corpus", "qa_study"]),
        ("nb", ["figures", "symbolic", "runner"]),
        ("rec,nb", ["study"]),
    ],
)
def test_an_extra_declares_what_its_modules_import(extra, roots):
    missing = {(module, name) for module, names in reached(roots).items() for name in names if DISTRIBUTION.get(name, name) not in declared(*extra.split(","))}
    assert not missing


def test_what_the_tools_import_is_declared_for_development():
    tools = {p.stem for p in (ROOT / "tools").glob("*.py")}
    names = {n.split(".")[0] for p in (ROOT / "tools").glob("*.py") for n in imported(p.read_text(encoding="utf-8"))}
    assert {DISTRIBUTION.get(n, n) for n in names - tools - {"bft_nb"} - set(sys.stdlib_module_names)} <= declared("rec", "llm", "nb", "dev")


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
