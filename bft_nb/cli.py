"""The command `bft`.

A subcommand is one row of `COMMANDS`: its name, its help, a function that adds its arguments and one that runs it
and returns an exit status. Exit status: 0 done, 1 a notebook or a download failed, 2 wrong usage, 130 interrupted.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bft_nb import __version__, models_command, recommend_command, runner
from bft_nb import sweep as sweeps
from bft_nb.download import DownloadError

__all__ = ["COMMANDS", "Command", "main"]


class Command(NamedTuple):
    "One subcommand of `bft`."

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _run_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("notebook", help="stem of a notebook in nbs/experiments, or a path that ends in .ipynb")
    p.add_argument("-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="set a parameter (repeatable)")
    p.add_argument("--out", metavar="DIR", help="where the executed notebook goes (default: runs/ of the checkout)")
    p.add_argument("--force", action="store_true", help="run again even if the same run is there")
    p.add_argument("--quiet", action="store_true", help="no progress bar, no output of the notebook")
    p.add_argument("--list", action="store_true", help="print the notebook's parameters with their defaults and stop")
    p.add_argument("--dry-run", action="store_true", help="say what would be needed: model, data, steps, memory; exit status 1 if something is missing")


def _typed(name: str, text: str, allowed: dict) -> object:
    "The value as JSON or YAML; as the text it is where the default is text (a data set may be called 1m). `ValueError` naming a parameter that cannot be read."
    try:
        return text if isinstance(allowed.get(name), str) else runner.parse_value(text)
    except ValueError as e:
        raise ValueError(f"parameter {name!r}: {e}") from None


def _run(a: argparse.Namespace) -> int:
    allowed = runner.allowed_parameters(runner.find_notebook(a.notebook)) if a.parameter or a.list else {}
    if a.list:
        print("\n".join(f"{name} = {default!r}" for name, default in allowed.items()) or "this notebook has no parameters")
        return 0
    names = [name for name, _ in a.parameter]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ValueError(f"parameter {twice[0]!r} is given twice")
    given = {n: _typed(n, v, allowed) for n, v in a.parameter}
    if a.dry_run:
        from bft_nb import plan

        text, could = plan.report(a.notebook, given, a.out)
        print(text)
        return int(not could)
    done = runner.run(a.notebook, given, out=a.out, force=a.force, progress=not a.quiet)
    notes = {"kept": "kept: this run is there already (--force runs it again)", "stored": "stored: the rows of this run are there already (-p store false runs it again)"}
    print(f"{notes.get(done.status, f'done in {done.seconds:.0f} s')}\n{done.output}")
    return 0


def _sweep_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("grid", help="YAML file with the keys notebook, parameters, grid, exclude, include (see bft_nb/sweep.py)")
    p.add_argument("-j", "--jobs", type=int, metavar="N", help="runs at a time on this machine (default: 1)")
    p.add_argument("--out", metavar="DIR", help="where the executed notebooks go (default: runs/ of the checkout)")
    p.add_argument("--dry-run", action="store_true", help="list the cells and which are done on this machine, and stop")
    p.add_argument("--limit", type=int, metavar="N", help="run at most N of the cells that are not done")
    p.add_argument("--retry-failed", action="store_true", help="run cells again that failed in an earlier sweep")
    p.add_argument("--ray", metavar="ADDRESS", help="run on Ray: auto (the cluster this machine belongs to), local (start one here) or an address")
    p.add_argument("--gpus", type=float, metavar="N", help="with --ray: GPUs of one run (default: 0)")
    p.add_argument("--cpus", type=float, metavar="N", help="with --ray: CPUs of one run (default: 1)")


def _executor(a: argparse.Namespace) -> Callable[[], sweeps.Executor]:
    "What starts the executor that the arguments ask for; `ValueError` for arguments that do not go together."
    if a.ray is not None:
        if a.jobs is not None:
            raise ValueError("-j is for one machine; with --ray, --cpus and --gpus decide how many run at a time")
        for name, share in (("--gpus", a.gpus), ("--cpus", a.cpus)):
            if share is not None and not 0 <= share < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {share}")
        return lambda: sweeps.OnRay(a.ray, gpus=a.gpus or 0, cpus=1 if a.cpus is None else a.cpus)
    if a.gpus is not None or a.cpus is not None:
        raise ValueError("--gpus and --cpus need --ray; without it runs share this machine")
    jobs = 1 if a.jobs is None else a.jobs
    sweeps.check_workers(jobs)
    # the runs share the cores: without this each would start as many threads as there are cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // max(1, jobs))))
    return lambda: sweeps.Local(jobs)


def _sweep(a: argparse.Namespace) -> int:
    sweeps.check_limit(a.limit)
    start, planned = _executor(a), sweeps.plans(a.grid, a.out)
    if a.dry_run:
        states = sweeps.states(planned)
        print("\n".join(f"{state:8} {plan.output.stem}" for state, plan in zip(states, planned)))
        print(f"{len(planned)} cells: " + ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states)))
        return 0
    found = sweeps.sweep(planned, start, retry_failed=a.retry_failed, limit=a.limit)
    print(f"{sweeps.summary(found, len(planned))}\n{planned[0].output.parent}")
    return int(any(outcome.status == "failed" for _, outcome in found))


COMMANDS: dict[str, Command] = {
    "run": Command("run one parameterised notebook", _run_arguments, _run),
    "sweep": Command("run a grid of parameters of one notebook", _sweep_arguments, _sweep),
    "recommend": Command("recommend from a CSV or Parquet file of interactions", recommend_command.arguments, recommend_command.run),
    "models": Command("list or fetch language models", models_command.arguments, models_command.run),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bft", description="The Bayesian Filtering Transformer: experiments from the command line")
    parser.add_argument("--version", action="version", version=__version__)
    subs = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command.arguments(subs.add_parser(name, help=command.help, description=command.help))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    "Entry point of the console script `bft`."
    a = _parser().parse_args(argv)
    try:
        return COMMANDS[a.command].run(a)
    except (OSError, ValueError, TypeError, ImportError) as e:
        print(f"bft {a.command}: {e}", file=sys.stderr)
        return 2
    except (runner.RunFailed, DownloadError) as e:
        print(f"bft {a.command}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"bft {a.command}: interrupted, nothing half-written is left", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
