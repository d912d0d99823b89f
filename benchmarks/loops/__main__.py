"""Measure the table of loops, or search for loops that get through: `python -m benchmarks.loops --help`."""

from __future__ import annotations

import argparse
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, head, write
from benchmarks.loops.report import markdown
from benchmarks.loops.search import search
from benchmarks.loops.table import FAMILIES, missing_hosts, outcome_of, shortfall

HOSTS = ("torch", "transformers", "accelerate", "trl", "peft", "lightning", "opacus")


def main(arguments: list[str] | None = None) -> int:
    """Measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loops", description=__doc__)
    parser.add_argument("--only", default="", help="measure only loops whose name holds this, and write nothing")
    parser.add_argument("--search", type=int, metavar="N", help="try N random loops instead")
    parser.add_argument("--seed", type=int, default=0, help="of the search (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    begun = time.monotonic()
    words = sys.argv[1:] if arguments is None else arguments
    report = head("benchmarks.loops", words, torch.device("cpu"), quick=False) | {
        "hosts": {name: _version(name) for name in HOSTS}
    }
    if options.search:
        return search(report, options.search, seed=options.seed, out=options.out)
    families: dict[str, list[dict[str, Any]]] = {}
    for family, loops in FAMILIES.items():
        families[family] = []
        for loop in loops:
            if options.only not in loop.name or missing_hosts(loop):
                continue
            outcome = outcome_of(loop)
            short = shortfall(loop, outcome)
            families[family].append(outcome.plain() | {"about": loop.about, "shortfall": short})
            print(f"{loop.name}: {outcome.outcome}{' - ' + short if short else ''}", flush=True)
    report |= {"seconds": time.monotonic() - begun, "families": families}
    if not options.only:
        print(f"written: {write(options.out, 'loops', report, markdown(report))}.json, .md")
    return int(any(row["shortfall"] for rows in families.values() for row in rows))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
