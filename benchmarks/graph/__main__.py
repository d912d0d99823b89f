"""Time, memory and compiling of private steps as one graph, a table of architectures and a picture.

`python -m benchmarks.graph --help`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.graph import compiling, memory, picture, speed, table

RESULTS = Path(__file__).resolve().parents[1] / "results"
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "use" / "graph-layer.svg"


def _speed(options: argparse.Namespace) -> None:
    device = torch.device("cpu")
    report = harness.head("benchmarks.graph", sys.argv[1:], device, quick=False)
    report |= {"rounds": options.rounds, "rows": []}
    for task in speed.TASKS:
        if options.only and task.name not in options.only:
            continue
        report["rows"].append(speed.measure(task, rounds=options.rounds))
        print(json.dumps(report["rows"][-1]), flush=True)
        harness.write(options.output, "graph-speed-cpu", report, speed.text(report))


def _memory(options: argparse.Namespace) -> None:
    report = harness.head("benchmarks.graph", sys.argv[1:], torch.device("cpu"), quick=False)
    report["rows"] = []
    for task in speed.TASKS:
        if options.only and task.name not in options.only:
            continue
        report["rows"].append(memory.measure(task))
        print(json.dumps(report["rows"][-1]), flush=True)
        harness.write(options.output, "graph-memory-cpu", report, memory.text(report))


def _compiling(options: argparse.Namespace) -> None:
    report = harness.head("benchmarks.graph", sys.argv[1:], torch.device("cpu"), quick=False)
    report["rows"] = compiling.measure()
    print(json.dumps(report["rows"]), flush=True)
    harness.write(options.output, "graph-compiling-cpu", report, compiling.text(report))


def _architectures(options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    report = harness.head("benchmarks.graph", sys.argv[1:], torch.device("cpu"), quick=False)
    rows: dict[str, Any] = {}
    earlier = options.output / "graph-architectures.json"
    if options.only and earlier.exists():
        # Some rows anew: the others stay.
        report = json.loads(earlier.read_text())
        rows = {row["name"]: row for row in report["rows"]}
        now = harness.head("benchmarks.graph", sys.argv[1:], torch.device("cpu"), quick=False)
        anew = (
            f"rows of {len(options.only)} architectures on {now['date']}, commit {str(now['machine']['commit'])[:10]}"
        )
        report["anew"] = [*report.get("anew", []), anew]
    begun = time.monotonic()
    for found in table.names():
        if options.only and found.name not in options.only:
            continue
        late = options.minutes and time.monotonic() - begun > 60 * options.minutes
        rows[found.name] = table.tried(found, rounds=0 if late else options.rounds)
        print(json.dumps(rows[found.name]), flush=True)
        report["rows"] = list(rows.values())
        harness.write(options.output, "graph-architectures", report, table.text(report))


def _picture(options: argparse.Namespace) -> None:
    del options  # its place is the page that shows it
    PICTURE.write_text(picture.draw(), encoding="utf-8")


def main() -> None:
    """Measure, and write a report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graph", description=__doc__)
    programs = {"speed": _speed, "memory": _memory, "compiling": _compiling, "architectures": _architectures}
    programs["picture"] = _picture
    parser.add_argument("what", choices=programs)
    parser.add_argument("--only", nargs="*", help="names of models or architectures; rows of other architectures stay")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=0.0, help="compile no more architectures after so long")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    harness.keep_heap()
    programs[options.what](options)


if __name__ == "__main__":
    main()
