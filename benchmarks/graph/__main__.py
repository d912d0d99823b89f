"""Time, memory and compiling of private steps as one graph, a table of architectures and a picture.

`python -m benchmarks.graph --help`.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from functools import partial
from typing import Any

import torch

from benchmarks import harness
from benchmarks.graph import compiling, memory, picture, speed, table

PICTURE = harness.ROOT / "docs" / "use" / "graph-layer.svg"


def _by_task(what: str, given: argparse.Namespace) -> None:
    """Measure task by task, and write what is there after each."""
    report = harness.head("benchmarks.graph", None)
    report |= {"rounds": given.rounds, "rows": []} if what == "speed" else {"rows": []}
    text = speed.text if what == "speed" else memory.text
    for task in speed.TASKS:
        if given.only and task.name not in given.only:
            continue
        report["rows"].append(speed.measure(task, rounds=given.rounds) if what == "speed" else memory.measure(task))
        print(json.dumps(report["rows"][-1]), flush=True)
        harness.write(given.out, f"graph-{what}-cpu", report, text(report))


def _compiling(given: argparse.Namespace) -> None:
    report = harness.head("benchmarks.graph", None) | {"rows": compiling.measure()}
    print(json.dumps(report["rows"]), flush=True)
    harness.write(given.out, "graph-compiling-cpu", report, compiling.text(report))


def _architectures(given: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    report = harness.head("benchmarks.graph", None)
    rows: dict[str, Any] = {}
    earlier = given.out / "graph-architectures.json"
    if given.only and earlier.exists():
        # Some rows anew: the others stay.
        report = json.loads(earlier.read_text())
        rows = {row["name"]: row for row in report["rows"]}
        now = harness.head("benchmarks.graph", None)
        anew = f"rows of {len(given.only)} architectures on {now['date']}, commit {str(now['machine']['commit'])[:10]}"
        report["anew"] = [*report.get("anew", []), anew]
    begun = time.monotonic()
    for found in table.names():
        if given.only and found.name not in given.only:
            continue
        late = given.minutes and time.monotonic() - begun > 60 * given.minutes
        rows[found.name] = table.tried(found, rounds=0 if late else given.rounds)
        print(json.dumps(rows[found.name]), flush=True)
        report["rows"] = list(rows.values())
        harness.write(given.out, "graph-architectures", report, table.text(report))


def _picture(given: argparse.Namespace) -> None:
    del given  # its place is the page that shows it
    PICTURE.write_text(picture.draw(), encoding="utf-8")


def main() -> None:
    """Measure, and write a report."""
    options = harness.parser("benchmarks.graph", __doc__)
    programs = {what: partial(_by_task, what) for what in ("speed", "memory")}
    programs |= {"compiling": _compiling, "architectures": _architectures, "picture": _picture}
    options.add_argument("what", choices=programs)
    options.add_argument("--only", nargs="*", help="names of models or architectures; rows of other architectures stay")
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--minutes", type=float, default=0.0, help="compile no more architectures after so long")
    given = options.parse_args()
    torch.set_num_threads(1)
    harness.keep_heap()
    programs[given.what](given)


if __name__ == "__main__":
    main()
