"""Measure everything side by side and write results, a table and a plot: `python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.engines import engines
from benchmarks.plot import plot
from benchmarks.report import markdown
from benchmarks.run import measure_task
from benchmarks.tasks import tasks

RESULTS = Path(__file__).resolve().parent / "results"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu (the default), cuda, cuda:1, ...")
    parser.add_argument("--quick", action="store_true", help="small models and few rounds: does it run, not how fast")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files (default: %(default)s)")
    parser.add_argument("--task", action="append", help="only this task; may be given several times")
    parser.add_argument("--engine", action="append", help="only this engine beside the non-private one; likewise")
    parser.add_argument("--seconds", type=float, default=120.0, help="timing of each task (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=60, help="most rounds of each task (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    options = parser.parse_args()
    for given, known in (
        (options.task, [task.name for task in tasks(quick=True)]),
        (options.engine, [engine.name for engine in engines()]),
    ):
        unknown = sorted(set(given or ()) - set(known))
        if unknown:
            parser.error(f"unknown: {', '.join(unknown)} (there are: {', '.join(known)})")
    if options.quick:
        options.seconds, options.rounds = min(options.seconds, 5.0), min(options.rounds, 3)
    return options


def main() -> int:
    """Run the whole comparison.

    Returns:
        The exit status: 1 if an engine of ghostclip failed or computed something wrong.
    """
    options = _options()
    device = torch.device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    machine.exact_float32()
    wanted = [
        engine for engine in engines() if not (options.engine and engine.private and engine.name not in options.engine)
    ]
    report = {
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "quick": options.quick,
        "machine": machine.describe(device),
        "tasks": [
            measure_task(task, wanted, device, rounds=options.rounds, seconds=options.seconds, quick=options.quick)
            for task in tasks(quick=options.quick)
            if not options.task or task.name in options.task
        ],
    }
    stem = f"report-{device.type}{'-quick' if options.quick else ''}"
    options.out.mkdir(parents=True, exist_ok=True)
    table = markdown(report)
    (options.out / f"{stem}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (options.out / f"{stem}.md").write_text(table, encoding="utf-8")
    plot(report, options.out / f"{stem}.png")
    print(f"\n{table}\nwritten: {options.out / stem}.json, .md, .png")
    rows = [row for task in report["tasks"] for row in task["engines"]]
    return int(any(row["status"] != "ok" and row["title"].startswith("ghostclip") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
