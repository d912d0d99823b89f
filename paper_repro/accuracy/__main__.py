"""Measure table F: `python -m paper_repro F --help`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from paper_repro.accuracy.allocation import GRID, QUICK_GRID
from paper_repro.accuracy.report import markdown, plot
from paper_repro.accuracy.search import Run, allocations, mapped, measured
from paper_repro.accuracy.tasks import TASKS
from paper_repro.accuracy.training import ROWS
from paper_repro.data import DataError
from paper_repro.published import CORRELATED

RESULTS = Path(__file__).resolve().parent.parent / "results"
SEEDS, QUICK_SEEDS = 5, 2
OF_USER = "cifar10"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m paper_repro F", description=__doc__)
    parser.add_argument("--seeds", type=int, help=f"runs reported for each mechanism and ε (default: {SEEDS})")
    parser.add_argument("--quick", action="store_true", help="does it run, in a minute; not what is better")
    parser.add_argument("--data", type=Path, help="folder with cifar-10-batches-bin, for CIFAR-10 too (hours on a CPU)")
    parser.add_argument("--task", action="append", choices=tuple(TASKS), help="only this task; repeatable")
    parser.add_argument("--row", action="append", choices=tuple(ROWS), help="only this mechanism; likewise")
    parser.add_argument(
        "--workers", type=int, help="processes of one thread each (default: as many as cores, at most 8)"
    )
    parser.add_argument("--add", action="store_true", help="other tasks and rows stay as they are in the folder's file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files (default: %(default)s)")
    return parser


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Run:
    for name in ("seeds", "workers"):
        given = getattr(options, name)
        if given is not None and given < 1:
            parser.error(f"argument --{name}: {given} is not at least 1")
    return Run(
        seeds=options.seeds or (QUICK_SEEDS if options.quick else SEEDS),
        workers=options.workers or min(8, os.cpu_count() or 1),
        folder=options.data,
        quick=options.quick,
        rows=tuple(name for name in ROWS if not options.row or name in options.row),
    )


def _head(given: Sequence[str], run: Run, names: Sequence[str]) -> dict[str, Any]:
    about: dict[str, Any] = harness.describe(torch.device("cpu"))
    about["threads"] = run.workers
    with suppress(metadata.PackageNotFoundError):
        about["versions"] = {**about["versions"], "scikit-learn": metadata.version("scikit-learn")}
    notes = []
    if OF_USER not in names:
        notes.append("CIFAR-10 is left out: no package ships it. `--data FOLDER` reads it from files.")
    return {
        "command": shlex.join(["python", "-m", "paper_repro", "F", *given]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "table": "F",
        "size": "tiny" if run.quick else "small",
        "seeds": run.seeds,
        "machine": about,
        "notes": notes,
        "references": [vars(CORRELATED)],
    }


def _stem(report: dict[str, Any], folder: Path) -> Path:
    return folder / f"table-f-cpu{'-tiny' if report['size'] == 'tiny' else ''}"


def _added(report: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Return an earlier report with the tasks and rows of another in the place of its own."""
    if report["seeds"] != earlier["seeds"]:
        raise DataError(f"the rows that stay have {earlier['seeds']} seeds, these {report['seeds']}")
    by_name = {task["name"]: dict(task) for task in earlier["tasks"]}
    for task in report["tasks"]:
        before = by_name.get(task["name"])
        if before is None:
            by_name[task["name"]] = task
            continue
        settings = [{key: value for key, value in one.items() if key != "cells"} for one in (task, before)]
        if settings[0] != settings[1]:
            raise DataError(f"task {task['name']} has other settings than in the rows that stay")
        anew = {cell["row"] for cell in task["cells"]}
        cells = [*task["cells"], *(cell for cell in before["cells"] if cell["row"] not in anew)]
        by_name[task["name"]] = {**task, "cells": sorted(cells, key=lambda cell: list(ROWS).index(cell["row"]))}
    rows = sorted({cell["row"] for task in report["tasks"] for cell in task["cells"]}, key=list(ROWS).index)
    commit, of = str(report["machine"]["commit"])[:10], ", ".join(task["name"] for task in report["tasks"])
    which = "all" if len(rows) == len(ROWS) else ", ".join(rows)
    note = f"Measured later: {which} of {of}, by `{report['command']}`, commit {commit}, {report['date']}."
    tasks = [by_name[name] for name in TASKS if name in by_name]
    return {**earlier, "notes": [*earlier["notes"], note], "tasks": tasks}


def _write(report: dict[str, Any], folder: Path) -> Path:
    stem = _stem(report, folder)
    folder.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
    return stem


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the table.

    Args:
        arguments: The command line after the letter; the process's own by default.

    Returns:
        The exit status: 1 if a training cost more than its ε.
    """
    parser = _parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    run = _run(parser, options)
    names = options.task or [name for name in TASKS if name != OF_USER or options.data]
    head = {**_head(given, run, names), "tasks": [], "allocation": []}
    earlier = _stem(head, options.out).with_suffix(".json") if options.add else None
    before = json.loads(earlier.read_text(encoding="utf-8")) if earlier is not None and earlier.exists() else None
    threads = torch.get_num_threads()
    try:
        with mapped(run.workers) as run_all:
            head["allocation"] = allocations(QUICK_GRID if run.quick else GRID, run_all)
            for name in names:
                head["tasks"].append(measured(name, run, run_all))
                report = head if before is None else _added(head, before)
                stem = _write(report, options.out)
    except DataError as problem:
        parser.error(str(problem))
    finally:
        torch.set_num_threads(threads)
    plot(report, stem.with_suffix(".png"))
    sys.stdout.write(f"\n{markdown(report)}\nwritten: {stem}.json, .md, .png\n")
    cells = [cell for task in head["tasks"] for cell in task["cells"] if "epsilon_spent" in cell]
    return int(any(cell["epsilon_spent"] > cell["epsilon"] for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
