"""The command `bft`.

A subcommand is one row of `COMMANDS`: its name, its help, a function that adds its arguments and one that runs it
and returns an exit status. Exit status: 0 done, 1 a notebook failed, 2 wrong usage, 130 interrupted.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bft_nb import __version__, recommend_command, runner

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


def _typed(name: str, text: str, allowed: dict) -> object:
    "The value as JSON or YAML; as the text it is where the default is text (a data set may be called 1m)."
    return text if isinstance(allowed.get(name), str) else runner.parse_value(text)


def _run(a: argparse.Namespace) -> int:
    allowed = runner.allowed_parameters(runner.find_notebook(a.notebook)) if a.parameter or a.list else {}
    if a.list:
        print("\n".join(f"{name} = {default!r}" for name, default in allowed.items()) or "this notebook has no parameters")
        return 0
    names = [name for name, _ in a.parameter]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ValueError(f"parameter {twice[0]!r} is given twice")
    done = runner.run(a.notebook, {n: _typed(n, v, allowed) for n, v in a.parameter}, out=a.out, force=a.force, progress=not a.quiet)
    note = "kept: this run is there already (--force runs it again)" if done.status == "kept" else f"done in {done.seconds:.0f} s"
    print(f"{note}\n{done.output}")
    return 0


COMMANDS: dict[str, Command] = {
    "run": Command("run one parameterised notebook", _run_arguments, _run),
    "recommend": Command("recommend from a CSV or Parquet file of interactions", recommend_command.arguments, recommend_command.run),
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
    except (OSError, ValueError, TypeError) as e:
        print(f"bft {a.command}: {e}", file=sys.stderr)
        return 2
    except runner.RunFailed as e:
        print(f"bft {a.command}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"bft {a.command}: interrupted, nothing half-written is left", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
