"""What a step takes of memory above what is held between steps, each way in a process of its own."""

from __future__ import annotations

import argparse
import gc
import json
from typing import Any

import torch

from benchmarks.graph import speed
from benchmarks.harness import in_new_process, table
from ghostclip._memory import PeakMemory

_STEPS = 3


def measure(task: speed.Task) -> dict[str, Any]:
    """Measure one task."""
    found = {way: in_new_process("benchmarks.graph.memory", [task.name, way]) for way in speed.WAYS}
    return {"name": task.name, "title": task.title, "bytes": {way: own.get("bytes") for way, own in found.items()}}


def text(report: dict[str, Any]) -> str:
    """Return a report as Markdown."""
    about = (
        "# The private step as one graph: memory\n\n"
        f"`{report['command']}`, {report['date']}: {report['machine']['cpu']}, torch "
        f"{report['machine']['versions']['torch']}, float32. Peak of the resident set of a process in later steps, "
        "above what it holds between steps, in MB (10⁶ bytes); in brackets the ratio to book-keeping. Freed memory "
        "goes back to the system at once.\n\n"
    )
    lines = []
    for row in report["rows"]:
        own, base = row["bytes"], row["bytes"]["book-keeping"]
        cells = (
            "-" if not own[way] or not base else f"{own[way] / 1e6:.1f} ({own[way] / base:.2f}×)" for way in speed.WAYS
        )
        lines.append([row["title"], *cells])
    return about + table(" | ".join(["model", *speed.WAYS]), lines)


def main() -> None:
    """Measure one way in this process, and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graph.memory", description=main.__doc__)
    parser.add_argument("task", choices=[task.name for task in speed.TASKS])
    parser.add_argument("way", choices=speed.WAYS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = next(task for task in speed.TASKS if task.name == options.task)
    ways = speed.Ways(task, task.batch())
    for _ in range(_STEPS):
        ways.runs[options.way]()
        ways.let_go(options.way)
    gc.collect()
    meter = PeakMemory(torch.device("cpu"))
    held = meter.in_use()
    meter.start()
    for _ in range(_STEPS):
        ways.runs[options.way]()
        ways.let_go(options.way)
    print(json.dumps({"bytes": meter.stop() - held}))


if __name__ == "__main__":
    main()
