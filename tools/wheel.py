"""Build the wheel, look into it, install it into an empty virtual environment and use it there.

The environment gets the wheel and what the wheel asks for, nothing of ours: a module of the layer that needs a development package fails here.
PIP_ARGS (environment) is handed to pip, as in the Makefile.
"""
import argparse
import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CFG = configparser.ConfigParser(delimiters=["="])
CFG.read(ROOT / "settings.ini", encoding="utf-8")
LIB = CFG["DEFAULT"]["lib_path"]
LAST_OF_THE_LAYER = 22  # chapters up to this number work with `requirements` alone,
NOT_THE_LAYER = {"symbolic", "figures"}  # but for the book's own tools
PLAIN = {"runner", "sweep", "cli"}


def layer():
    "modules of the chapters that work with `requirements` alone"
    return [m for m, n in exported().items() if n <= LAST_OF_THE_LAYER and m not in NOT_THE_LAYER]


def exported():
    "{module: chapter number} from the text twins"
    found = {}
    for p in sorted((ROOT / "nbs" / "_py").glob("[0-9]*.py")):
        if m := re.search(r"^#\s?\|\s*default_exp\s+(\w+)", p.read_text(encoding="utf-8"), re.MULTILINE): found[m[1]] = int(re.match(r"\d+", p.name)[0])
    return found


def build(folder):
    "the wheel of the working tree; from a copy, since setuptools puts whatever an old build/ holds into a wheel"
    src = folder / "src"
    src.mkdir()
    for name in ("settings.ini", "setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"): shutil.copy(ROOT / name, src)
    shutil.copytree(ROOT / LIB, src / LIB, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, src], check=True)
    return next(folder.glob("*.whl"))


def contents(wheel):
    "problems of what is in the wheel"
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        entry, meta = (next((z.read(n).decode() for n in names if n.endswith(f".dist-info/{file}")), "") for file in ("entry_points.txt", "METADATA"))
    info = f"{LIB}-{CFG['DEFAULT']['version']}.dist-info/"
    yield from (f"{n} does not belong into the wheel" for n in names if not n.startswith((f"{LIB}/", info)))
    if f"{LIB}/py.typed" not in names: yield "py.typed is missing"
    if not any(n.startswith(info) and n.endswith("LICENSE") for n in names): yield "LICENSE is missing"
    for line in (f"bft = {LIB}.cli:main", f"{LIB} = {LIB}._modidx:d"):
        if line not in entry and line.replace(" = ", "=") not in entry: yield f"entry point missing: {line}"
    yield from (f"METADATA holds no {line}" for line in ("Classifier: Development Status", "Project-URL: Documentation") if f"\n{line}" not in meta)
    have = {p.relative_to(ROOT).as_posix() for p in (ROOT / LIB).rglob("*.py")}
    yield from (f"{n} is missing" for n in sorted(have - set(names)))


def example(word=""):
    "the first Python block of README.md that holds a word"
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return next((b for b in blocks if word in b), "")


def interactions(path):
    "a small table for the README's recommender: sixty users who walk along a ring of items"
    lines = ["user,item,timestamp", *(f"u{u},i{(7 * u + t) % 24:02d},{t}" for u in range(60) for t in range(5 + u % 4))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main():
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        wheel = build(tmp)
        bad = list(contents(wheel))
        for b in bad: print(f"{wheel.name}: {b}")
        if bad: return 1
        env = tmp / "venv"
        subprocess.run([sys.executable, "-m", "venv", env], check=True)
        python = env / "bin" / "python"
        pip = [python, "-m", "pip", "install", "-q", *shlex.split(os.environ.get("PIP_ARGS", "")), "-c", ROOT / "constraints.txt"]
        subprocess.run([*pip, wheel], check=True)
        modules = layer()
        names = [f"{LIB}.{m}" for m in [*modules, *sorted(PLAIN)]]
        code = f"import importlib, sys\nfor m in {names!r}: importlib.import_module(m)\n"
        if "encoder" in modules: code += example()
        for cmd in ([python, "-I", "-c", code], [env / "bin" / "bft", "--help"]):
            r = subprocess.run(cmd, cwd=tmp, capture_output=True, text=True)
            if r.returncode:
                print(f"in an empty environment: {r.stderr.strip()}")
                return 1
        print(f"{wheel.name}: in an empty environment {', '.join(names)} import" + (" and the example of the README runs" if "encoder" in modules else ""), flush=True)
        return recommend(python, pip, wheel, tmp) if "recommender" in exported() else 0


def recommend(python, pip, wheel, tmp):
    "the same environment with the extra `rec`: the README's recommender, and the command"
    subprocess.run([*pip, f"{wheel}[rec]"], check=True)
    interactions(tmp / "interactions.csv")
    command = [python.parent / "bft", "recommend", "interactions.csv", "-o", "out.parquet", "--timestamp", "timestamp", "--epochs", "1", "--quiet"]
    for cmd in ([python, "-I", "-c", example("Recommender")], command):
        r = subprocess.run(cmd, cwd=tmp, capture_output=True, text=True)
        if r.returncode:
            print(f"with [rec]: {r.stderr.strip()}")
            return 1
    print(f"{wheel.name}[rec]: the recommender of the README trains, saves, loads, recommends and explains; bft recommend works")
    return 0


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sys.exit(main())
