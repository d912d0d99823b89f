"""Measure the table of loops, or search for loops that get through: `python -m benchmarks.loops --help`."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from benchmarks.harness import head, parser, version_of, write
from benchmarks.loops.programs import try_programs
from benchmarks.loops.report import markdown
from benchmarks.loops.search import search
from tests.loops.table import FAMILIES, missing_hosts, outcome_of, shortfall

HOSTS = ("torch", "transformers", "accelerate", "trl", "peft", "lightning", "opacus")


def main(arguments: list[str] | None = None) -> int:
    """Measure."""
    options = parser("benchmarks.loops", __doc__)
    options.add_argument("--only", default="", help="measure only loops whose name holds this, and write nothing")
    options.add_argument("--search", type=int, metavar="N", help="try N random loops instead")
    options.add_argument("--programs", type=int, metavar="N", help="try N random programs between loader and backward")
    options.add_argument("--seed", type=int, default=0, help="of either search (default: %(default)s)")
    given = options.parse_args(arguments)
    torch.set_num_threads(1)
    begun = time.monotonic()
    report = head("benchmarks.loops", arguments) | {"hosts": {name: version_of(name) for name in HOSTS}}
    if given.search:
        return search(report, given.search, seed=given.seed, out=given.out)
    if given.programs:
        return try_programs(report, given.programs, seed=given.seed, out=given.out)
    families: dict[str, list[dict[str, Any]]] = {}
    for family, loops in FAMILIES.items():
        families[family] = []
        for loop in loops:
            if given.only not in loop.name or missing_hosts(loop):
                continue
            outcome = outcome_of(loop)
            short = shortfall(loop, outcome)
            families[family].append(outcome.plain() | {"about": loop.about, "shortfall": short})
            print(f"{loop.name}: {outcome.outcome}{' - ' + short if short else ''}", flush=True)
    report |= {"seconds": time.monotonic() - begun, "families": families}
    if not given.only:
        print(f"written: {write(given.out, 'loops', report, markdown(report))}.json, .md")
    return int(any(row["shortfall"] for rows in families.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
