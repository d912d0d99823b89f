"""Curves over the length and the number of samples, one transformer block: `python -m benchmarks.scaling --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.curves import plot
from benchmarks.engines import Engine
from benchmarks.files import RESULTS, head, stem, write
from benchmarks.peers import every_engine
from benchmarks.report import heading, memory_ratio, times, why_not
from benchmarks.run import Limits, measure_task
from benchmarks.tasks import block

ENGINES = ("bookkeeping", "ghost", "opacus-hooks", "opacus-ghost", "torch-func", "jax")
# B·T is the same at every length, so that ordinary training costs the same but for attention.
LENGTHS, TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192), 8192
SAMPLES, LENGTH = (1, 4, 16, 64), 128
QUICK_LENGTHS, QUICK_TOKENS = (8, 32, 64), 64
QUICK_SAMPLES, QUICK_LENGTH = (1, 8), 16
MEASURES = {"time": "wall_ratio", "CPU time": "cpu_ratio", "FLOPs": "flops_ratio"}


def points(over: str, *, quick: bool) -> list[dict[str, int]]:
    """The places of a curve.

    Args:
        over: "T" or "B".
        quick: Whether few and small ones are meant.

    Returns:
        T and B of each.
    """
    if over == "T":
        lengths, tokens = (QUICK_LENGTHS, QUICK_TOKENS) if quick else (LENGTHS, TOKENS)
        return [{"T": length, "B": tokens // length} for length in lengths]
    samples, length = (QUICK_SAMPLES, QUICK_LENGTH) if quick else (SAMPLES, LENGTH)
    return [{"T": length, "B": number} for number in samples]


def measured(over: str, wanted: list[Engine], device: torch.device, limits: Limits, *, quick: bool) -> dict[str, Any]:
    """Measure one curve.

    Args:
        over: "T" or "B".
        wanted: The engines, the non-private one first.
        device: Where they run.
        limits: How much is spent on each point.
        quick: Whether few and small points are meant.

    Returns:
        The curve's part of the report.
    """
    places = points(over, quick=quick)
    found = []
    for place in places:
        task = block(place["T"], place["B"], quick=quick)
        found.append({**place, **measure_task(task, wanted, device, limits, quick=quick)})
    fixed = f"B·T = {places[0]['B'] * places[0]['T']}" if over == "T" else f"T = {places[0]['T']}"
    return {"over": over, "title": f"{over} ({fixed})", "points": found}


def _rows(curve: Mapping[str, Any], measure: str) -> Iterator[str]:
    """A line for each engine, a column for each point."""
    rows_of = [point["engines"] for point in curve["points"]]
    for index, first in enumerate(rows_of[0]):
        cells = []
        for rows in rows_of:
            row = rows[index]
            if row["status"] != "ok":
                cells.append(why_not(row))
            else:
                cells.append(times(memory_ratio(row, rows) if measure == "memory" else row[MEASURES[measure]]))
        yield f"| {' | '.join([first['title'], *cells])} |\n"


def markdown(report: Mapping[str, Any]) -> str:
    """The curves as tables.

    Args:
        report: A report as read from its file.

    Returns:
        A table for each measure of each curve.
    """
    parts = [f"# Scaling\n\n{heading(report)}"]
    for curve in report["curves"]:
        shown = curve["points"]
        parts.append(f"## Over {curve['title']}\n\n{shown[0]['title']} to {shown[-1]['title']}.\n")
        for measure in (*MEASURES, "memory"):
            columns = [f"{curve['over']} = {point[curve['over']]}" for point in shown]
            rule = "---|" + "---:|" * len(columns)
            table = f"| {' | '.join([f'{measure}, × non-private', *columns])} |\n|{rule}\n"
            parts.append(table + "".join(_rows(curve, measure)))
    parts.append(
        "Correctness is checked at every point on at most two samples. An empty cell: no count, or too little memory "
        "to compare.\n"
    )
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Measure the curves and write them.

    Args:
        arguments: The command line; that of the process by default.

    Returns:
        The exit status: 1 if an engine of ghostclip failed or computed something wrong.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--over", choices=("T", "B"), action="append", help="only this curve")
    parser.add_argument("--device", default="cpu", help="cpu (the default), cuda, ...")
    parser.add_argument("--quick", action="store_true", help="few and small points: does it run, not how fast")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files (default: %(default)s)")
    parser.add_argument("--engine", action="append", help=f"beside the non-private one (default: {', '.join(ENGINES)})")
    parser.add_argument("--seconds", type=float, default=25.0, help="timing of each point (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="most rounds of each point (default: %(default)s)")
    parser.add_argument("--no-memory", action="store_true", help="no process of its own for each engine and point")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    machine.exact_float32()
    names = options.engine or ENGINES
    wanted = [engine for engine in every_engine() if not engine.private or engine.name in names]
    rounds, seconds = (2, 1.0) if options.quick else (options.rounds, options.seconds)
    limits = Limits(rounds, seconds, with_memory=not (options.no_memory or options.quick), checked_samples=2)
    report = head("benchmarks.scaling", sys.argv[1:] if arguments is None else arguments, device, quick=options.quick)
    report["curves"], name = [], stem("scaling", device, quick=options.quick)
    for over in options.over or ("T", "B"):
        report["curves"].append(measured(over, wanted, device, limits, quick=options.quick))
        path = write(options.out, name, report, markdown(report))
        plot(report, path.with_suffix(".png"))
    print(f"\n{markdown(report)}\nwritten: {options.out / name}.json, .md, .png")
    rows = [row for curve in report["curves"] for point in curve["points"] for row in point["engines"]]
    return int(any(row["status"] != "ok" and row["title"].startswith("ghostclip") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
