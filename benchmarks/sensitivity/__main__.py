"""Search for data that move a clipped sum by more than the bound: `python -m benchmarks.sensitivity --help`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, head, write
from benchmarks.sensitivity.known import KNOWN
from benchmarks.sensitivity.measure import ALLOWED, NUMERICS, STRATEGIES, reduced_products
from benchmarks.sensitivity.report import excess, markdown
from benchmarks.sensitivity.search import cells, search


def main(arguments: list[str] | None = None) -> int:
    """Search."""
    options = _options(arguments)
    torch.set_num_threads(1)
    begun, reduced = time.monotonic(), reduced_products()
    chosen = list(cells(options.only, options.dtype, options.strategy, medium=reduced["medium"]))
    each = options.each or max(1, -(-options.evaluations // max(1, len(chosen))))
    report = head("benchmarks.sensitivity", arguments)
    report |= {"seed": options.seed, "each": each, "reduced": reduced}
    known = _known(options.strategy, medium=reduced["medium"]) if not options.only else []
    rows = []
    for found in search(chosen, each, seed=options.seed, processes=options.processes):
        rows.append(found.plain() | {"limit": found.limit()})
        shown = found.error or excess(rows[-1]["worst"], found.limit())
        print(f"{found.cell.kind}, {found.cell.numerics}, {found.cell.strategy}: {shown}", flush=True)
    report |= {"seconds": time.monotonic() - begun, "known": known, "cells": rows}
    if options.out or not (options.only or options.dtype or options.strategy):
        print(f"written: {write(options.out or RESULTS, 'sensitivity', report, markdown(report))}.json, .md")
    return int(any(row["error"] or not _holds(row) for row in [*rows, *known]))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sensitivity", description=__doc__)
    parser.add_argument("--evaluations", type=int, default=105_000, metavar="N", help="over all cells (%(default)s)")
    parser.add_argument("--each", type=int, metavar="N", help="evaluations of each cell instead")
    parser.add_argument("--seed", type=int, default=0, help="of the search (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="KIND", help="only kinds of layers whose name holds this")
    parser.add_argument("--strategy", default="", choices=("", *STRATEGIES), help="only this strategy")
    parser.add_argument("--dtype", default="", choices=("", *NUMERICS), help="only this dtype")
    parser.add_argument("--processes", type=int, default=2, help="that search at a time (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the files; a part of the search writes none without it")
    return parser.parse_args(arguments)


def _known(strategy: str, *, medium: bool) -> list[dict[str, Any]]:
    logging.getLogger("ghostclip").setLevel(logging.ERROR)
    rows = []
    for each in KNOWN:
        if each.numerics == "medium" and not medium:
            continue
        for one in STRATEGIES if not strategy else (strategy,):
            worst = each.moves(one).worst()
            limit = 1 + ALLOWED[NUMERICS[each.numerics].dtype]
            row = {"name": each.name, "numerics": each.numerics, "strategy": one, "worst": worst, "limit": limit}
            rows.append(row | {"error": ""})
            print(f"{each.name}, {one}: {excess(worst, limit)}", flush=True)
    return rows


def _holds(row: dict[str, Any]) -> bool:
    return not isinstance(row["worst"], str) and row["worst"] <= row["limit"]


if __name__ == "__main__":
    sys.exit(main())
