"""Measure everything side by side and write results, a table and a plot: `python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from benchmarks import harness
from benchmarks.engines import Engine
from benchmarks.harness import RESULTS, head, stem, write
from benchmarks.peers import QUOTED, every_engine, missing
from benchmarks.plot import plot
from benchmarks.report import markdown
from benchmarks.run import Limits, measure_task
from benchmarks.tasks import tasks


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", type=harness.device, default="cpu", help="cpu (the default), cuda, cuda:1, ...")
    parser.add_argument("--quick", action="store_true", help="small models and few rounds: does it run, not how fast")
    parser.add_argument("--out", type=harness.folder, default=RESULTS, help="folder for the files")
    parser.add_argument("--task", action="append", help="only this task; may be given several times")
    parser.add_argument("--engine", action="append", help="only this engine beside the non-private one; likewise")
    parser.add_argument("--seconds", type=harness.positive, default=60.0, help="timing of each task (60)")
    parser.add_argument("--rounds", type=harness.count, default=60, help="most rounds of each task (60)")
    parser.add_argument(
        "--with-memory", action="store_true", help="measure memory in a quick run too, which takes minutes"
    )
    parser.add_argument("--no-memory", action="store_true", help="time and operations alone")
    parser.add_argument("--add", action="store_true", help="only --engine's rows: those of others stay in the report")
    parser.add_argument("--threads", type=harness.count, help="CPU threads (default: torch's own choice)")
    given = parser.parse_args(arguments)
    if given.add and not given.engine:
        parser.error("--add without --engine: name the engines whose rows are measured anew")
    harness.refuse_unknown(parser, "--task", given.task, [task.name for task in tasks(quick=True)])
    harness.refuse_unknown(parser, "--engine", given.engine, [engine.name for engine in every_engine()])
    if given.quick:
        given.seconds, given.rounds = min(given.seconds, 5.0), min(given.rounds, 3)
    return given


def _limits(given: argparse.Namespace) -> Limits:
    with_memory = not given.no_memory and (given.with_memory or not given.quick)
    return Limits(given.rounds, given.seconds, with_memory=with_memory)


def chosen(names: list[str] | None) -> list[Engine]:
    """The engines of a run."""
    return [engine for engine in every_engine() if not (names and engine.private and engine.name not in names)]


def added(report: dict[str, Any], earlier: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Some engines' rows in an earlier report; ratios are to the non-private engine of their own run."""
    rows = {task["name"]: [row for row in task["engines"] if row["name"] in names] for task in report["tasks"]}
    tasks = [
        {
            **task,
            "engines": [row for row in task["engines"] if row["name"] not in names or task["name"] not in rows]
            + rows.get(task["name"], []),
        }
        for task in earlier["tasks"]
    ]
    return {**earlier, "command": harness.later(earlier, report), "tasks": tasks}


def main(arguments: list[str] | None = None) -> int:
    """Run the whole comparison."""
    given = _options(arguments)
    device = given.device
    if given.threads:
        torch.set_num_threads(given.threads)
    harness.exact_float32()
    wanted = chosen(given.engine)
    report = head("benchmarks", sys.argv[1:] if arguments is None else arguments, device, quick=given.quick)
    report |= {"missing": missing(), "quoted": list(QUOTED), "tasks": []}
    limits, name = _limits(given), stem("report", device, quick=given.quick)
    earlier = json.loads((given.out / f"{name}.json").read_text(encoding="utf-8")) if given.add else None
    for task in tasks(quick=given.quick):
        if given.task and task.name not in given.task:
            continue
        report["tasks"].append(measure_task(task, wanted, device, limits, quick=given.quick))
        # After every task, so that a run that is cut short has what it measured.
        whole = report if earlier is None else added(report, earlier, given.engine)
        path = write(given.out, name, whole, markdown(whole))
        plot(whole, path.with_suffix(".png"))
    print(f"\n{markdown(report)}\nwritten: {given.out / name}.json, .md, .png")
    rows = [row for task in report["tasks"] for row in task["engines"]]
    return int(any(row["status"] != "ok" and row["title"].startswith("ghostclip") for row in rows))


if __name__ == "__main__":
    harness.keep_heap()
    sys.exit(main())
