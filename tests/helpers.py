"What several test files need: scripts of tools/, two processes, a wait, a look whether a process lives."

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def tool(name):
    "A script of tools/ as a module."
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "tools"))  # they import each other
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def until(true, seconds=120):
    "Wait for a condition; `AssertionError` if it does not come true."
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def alive(pid):
    "Does a process run? One that has ended and is not waited for does not."
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z" if os.path.isdir("/proc") else os.kill(pid, 0) is None
    except (OSError, IndexError):
        return False


def two_processes(folder, code):
    "What two processes (gloo, CPU) print that run the same code, which may import from tests/."
    script = folder / "two.py"
    leave = "import os\nsys.stdout.flush()\nos._exit(0)"  # not by torch's teardown: now and then it aborts a process that still has threads of gloo
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n{code}\n{leave}\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, f"{done.stderr[:2000]}\n…\n{done.stderr[-1000:]}"  # the cause comes first
    return done.stdout.strip()
