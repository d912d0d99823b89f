"""Search for data that move a clipped sum by more than the bound: `python -m benchmarks.sensitivity --help`."""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, head, short_line, write
from tests.exactness.sensitivity.known import KNOWN
from tests.exactness.sensitivity.measure import ALLOWED, NUMERICS, STRATEGIES, reduced_products
from tests.exactness.sensitivity.search import cells, search

_ABOUT = """
*Move* is how far the clipped sum moves, over C, when a sample is left out of its batch, when its loss is multiplied by
0, or when it is alone in the batch: the largest of the three, minus 1. Bold is above what is allowed: 1e-5 in float32
and bfloat16, 1e-12 in float64. Where a layer's input comes from another layer's product, a batch of another size may
round that product otherwise, before the engine sees it; there the first of the three is not counted. "autocast" is a
float32 model under autocast to bfloat16, "medium" the setting of `torch.set_float32_matmul_precision`.

Samples are drawn to cancel, to drift, to overflow or to vanish, some beside ordinary ones; half of the batches are
changes to the worst of the cell. Most clip at C; a third scale every gradient to length C (`normalised`), which makes
most of what rounding leaves. Everything follows from the seed, the cell and the number of evaluations of a cell:
`python -m benchmarks.sensitivity --each N --seed S --only KIND --dtype D --strategy X` repeats a cell. The JSON holds
the worst batch of every cell that is above the bound, where it is small.
""".lstrip()


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


def excess(value: float | str, limit: float) -> str:
    """Return a move minus 1."""
    number = math.inf if isinstance(value, str) else value
    text = "inf" if math.isinf(number) else f"{number - 1:+.1e}"
    return f"**{text}**" if number > limit else text


def _table(rows: Iterable[tuple[str, str, Mapping[str, str]]], head: str) -> list[str]:
    lines = [f"| {head} | dtype | " + " | ".join(STRATEGIES) + " |", "|---|---|" + "---|" * len(STRATEGIES)]
    for name, numerics, by_strategy in rows:
        cells = (by_strategy.get(strategy, "") for strategy in STRATEGIES)
        lines.append(f"| {name} | {numerics} | " + " | ".join(cells) + " |")
    return lines


def _gathered(rows: Sequence[Mapping[str, Any]], name: str) -> Iterable[tuple[str, str, Mapping[str, str]]]:
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        shown = row["error"].partition(":")[0] if row["error"] else excess(row["worst"], row["limit"])
        found.setdefault((row[name], row["numerics"]), {})[row["strategy"]] = shown
    return [(*key, by_strategy) for key, by_strategy in found.items()]


def _largest(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| dtype | evaluations | batches above the bound | largest move | where |", "|---|---|---|---|---|"]
    for numerics in dict.fromkeys(row["numerics"] for row in rows):
        own = [row for row in rows if row["numerics"] == numerics]
        worst = max(own, key=lambda row: math.inf if isinstance(row["worst"], str) else row["worst"])
        counts = f"{sum(row['evaluations'] for row in own)} | {sum(row['failed'] for row in own)}"
        shown = excess(worst["worst"], worst["limit"])
        lines.append(f"| {numerics} | {counts} | {shown} | {worst['kind']}, {worst['strategy']} |")
    return lines


def _beyond(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        if row["error"]:
            lines.append(f"- {row['kind']}, {row['numerics']}, {row['strategy']}: ended by {row['error']}")
        elif isinstance(row["worst"], str) or row["worst"] > row["limit"]:
            numbers = ", ".join(
                f"{name.replace('_', ' ')} {excess(row[name], row['limit'])}"
                for name in ("left_out", "silenced", "alone")
            )
            bound = f"C = {row['bound']:g}{', normalised' if row['normalised'] else ''}"
            lines.append(
                f"- {row['kind']}, {row['numerics']}, {row['strategy']}: {numbers}; evaluation {row['number']}, width "
                f"{row['width']}, {bound}, {row['failed']} of {row['evaluations']} above the bound"
            )
    return lines or ["None."]


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report of a search."""
    rows = report["cells"]
    parts = [
        "# Search for data that move a clipped sum by more than the bound\n",
        f"{short_line(report, 'torch ' + report['machine']['versions']['torch'])} Seed {report['seed']}, "
        f"{report['each']} evaluations in each of {len(rows)} cells, {sum(row['evaluations'] for row in rows)} "
        "together. Settings that change a float32 product on this machine: "
        f"{', '.join(name for name, changes in report['reduced'].items() if changes) or 'none'}.\n",
        _ABOUT,
        *_largest(rows),
        "\n## Data by name\n",
        *_table(_gathered(report["known"], "name"), "data"),
        "\n## By kind of layer\n",
        *_table(_gathered(rows, "kind"), "kind of layer"),
        "\n## Above the bound\n",
        *_beyond(rows),
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
