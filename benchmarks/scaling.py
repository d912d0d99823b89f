"""Curves over the length and the number of samples, one transformer block: `python -m benchmarks.scaling --help`.

The dearest points come last. An engine that does not get through a few steps in its time is left out of a point, and a
point that the budget does not reach is left out of a curve; the report says so in both places.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import machine, options
from benchmarks.curves import plot
from benchmarks.engines import Engine
from benchmarks.files import RESULTS, head, stem, write
from benchmarks.report import heading, memory_ratio, times, why_not
from benchmarks.run import Limits, measure_task
from benchmarks.tasks import Task, block

ENGINES = ("bookkeeping", "ghost", "opacus-hooks", "opacus-ghost", "torch-func", "jax")
# B·T is the same up to the length that is one sample, so that ordinary training costs the same but for attention.
LENGTHS, TOKENS = (128, 512, 1024, 2048, 4096, 8192), 4096
# The last one is a point of the other curve as well.
SAMPLES, LENGTH = (1, 4, 16, 32), 128
QUICK_LENGTHS, QUICK_TOKENS = (8, 32, 64), 64
QUICK_SAMPLES, QUICK_LENGTH = (1, 8), 8
MEASURES = {"time": "wall_ratio", "CPU time": "cpu_ratio", "FLOPs": "flops_ratio"}
# An engine's own process loads torch and makes eight steps: with less time for it, a point would show nobody's figures.
LEAST_ALONE = 8.0


def points(over: str, *, quick: bool, lengths: Sequence[int] = ()) -> list[dict[str, int]]:
    """The places of a curve.

    Args:
        over: "T" or "B".
        quick: Whether few and small ones are meant.
        lengths: The lengths of the curve over T, where others than the usual ones are meant.

    Returns:
        T and B of each.
    """
    if over == "T":
        usual, tokens = (QUICK_LENGTHS, QUICK_TOKENS) if quick else (LENGTHS, TOKENS)
        return [{"T": length, "B": max(1, tokens // length)} for length in lengths or usual]
    samples, length = (QUICK_SAMPLES, QUICK_LENGTH) if quick else (SAMPLES, LENGTH)
    return [{"T": length, "B": number} for number in samples]


class Curves:
    """Measures points, each place once.

    Args:
        wanted: The engines, the non-private one first.
        device: Where they run.
        limits: How much is spent on each point.
        quick: Whether the small model is meant.
        seconds: How much is spent on all points, about.
    """

    def __init__(
        self, wanted: list[Engine], device: torch.device, limits: Limits, *, quick: bool, seconds: float
    ) -> None:
        self.wanted, self.device, self.limits, self.quick = wanted, device, limits, quick
        self.end = time.monotonic() + seconds
        self.found: dict[str, dict[str, Any]] = {}

    def point(self, place: Mapping[str, int]) -> dict[str, Any]:
        """Measure one place.

        Args:
            place: T and B.

        Returns:
            The point's part of the report; without figures where time or memory did not suffice.
        """
        task = block(place["T"], place["B"], quick=self.quick)
        if task.name not in self.found:
            self.found[task.name] = self._measured(task)
        return {**place, **self.found[task.name]}

    def _measured(self, task: Task) -> dict[str, Any]:
        # Half of what is left is for processes of their own, the other half for rounds.
        share = (self.end - time.monotonic()) / (2 * len(self.wanted))
        if share < LEAST_ALONE:
            return self._without(task, "the budget of time was spent")
        limits = replace(self.limits, alone_seconds=min(self.limits.alone_seconds, share))
        try:
            return measure_task(task, self.wanted, self.device, limits, quick=self.quick)
        except (RuntimeError, MemoryError) as problem:
            return self._without(task, f"{type(problem).__name__}: {problem}"[:300])
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _without(self, task: Task, problem: str) -> dict[str, Any]:
        print(f"== {task.title}\n   not measured: {problem}", file=sys.stderr, flush=True)
        rows = [
            {"name": engine.name, "title": engine.title, "private": engine.private, "status": "left out"}
            for engine in self.wanted
        ]
        engines = [{**row, "problem": problem} for row in rows]
        return {"name": task.name, "title": task.title, "batch_size": task.batch_size, "rounds": 0, "engines": engines}


def title(over: str, places: Sequence[Mapping[str, int]]) -> str:
    """What is said below a curve.

    Args:
        over: "T" or "B".
        places: Its points.

    Returns:
        The variable, and what is fixed.
    """
    if over == "B":
        return f"B (T = {places[0]['T']})"
    tokens = places[0]["B"] * places[0]["T"]
    # Where a single sample is longer than that, it is the batch.
    single = any(place["T"] > tokens for place in places)
    return f"T (B·T = {tokens}{', B = 1 beyond' if single else ''})"


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
    limits = report["limits"]
    parts.append(
        "Correctness is checked at every point on at most two samples. An empty cell: no count, or too little memory "
        f"to compare. An engine that is not through eight steps of a point in {limits['alone_seconds']:g} s, its "
        f"loading included, has no figures there; it has less time where that of the whole run, "
        f"{limits['budget_minutes']:g} minutes, is nearly spent.\n"
    )
    return "\n".join(parts)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--over", choices=("B", "T"), action="append", help="only this curve")
    parser.add_argument(
        "--length", type=options.count, action="append", help="only these T; may be given several times"
    )
    parser.add_argument("--device", type=options.device, default="cpu", help="cpu (the default), cuda, ...")
    parser.add_argument("--quick", action="store_true", help="few and small points: does it run, not how fast")
    parser.add_argument(
        "--out", type=options.folder, default=RESULTS, help="folder for the files (default: %(default)s)"
    )
    parser.add_argument("--engine", action="append", help=f"beside the non-private one (default: {', '.join(ENGINES)})")
    parser.add_argument(
        "--seconds", type=options.positive, default=10.0, help="timing of each point (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=options.count, default=20, help="most rounds of each point (default: %(default)s)"
    )
    parser.add_argument(
        "--alone",
        type=options.positive,
        default=25.0,
        help="seconds in which an engine must get through eight steps in its own process (default: %(default)s)",
    )
    parser.add_argument(
        "--budget", type=options.positive, default=14.0, help="minutes for everything, about (default: %(default)s)"
    )
    parser.add_argument("--no-memory", action="store_true", help="no process of its own for each engine and point")
    given = parser.parse_args(arguments)
    given.engines = options.wanted(parser, given.engine, ENGINES)
    if given.quick:
        given.rounds, given.seconds, given.no_memory = min(given.rounds, 2), min(given.seconds, 1.0), True
    return given


def main(arguments: list[str] | None = None) -> int:
    """Measure the curves and write them.

    Args:
        arguments: The command line; that of the process by default.

    Returns:
        The exit status: 1 if an engine of ghostclip failed or computed something wrong.
    """
    given = _options(arguments)
    machine.exact_float32()
    limits = Limits(
        given.rounds,
        given.seconds,
        with_memory=not given.no_memory,
        checked_samples=2,
        alone_seconds=given.alone,
    )
    curves = Curves(given.engines, given.device, limits, quick=given.quick, seconds=60 * given.budget)
    command = sys.argv[1:] if arguments is None else arguments
    report = head("benchmarks.scaling", command, given.device, quick=given.quick)
    report |= {"limits": {"alone_seconds": given.alone, "budget_minutes": given.budget}, "curves": []}
    name = stem("scaling", given.device, quick=given.quick)
    for over in given.over or ("B", "T"):
        places = points(over, quick=given.quick, lengths=given.length or ())
        curve: dict[str, Any] = {"over": over, "title": title(over, places), "points": []}
        report["curves"].append(curve)
        for place in places:
            curve["points"].append(curves.point(place))
            # After every point, so that a run that is cut short has what it measured.
            path = write(given.out, name, report, markdown(report))
            plot(report, path.with_suffix(".png"))
    print(f"\n{markdown(report)}\nwritten: {given.out / name}.json, .md, .png")
    rows = [row for curve in report["curves"] for point in curve["points"] for row in point["engines"]]
    return int(any(row["status"] in ("failed", "wrong") and row["title"].startswith("ghostclip") for row in rows))


if __name__ == "__main__":
    machine.keep_heap()
    sys.exit(main())
