"""Time, memory and largest batch of large models: `python -m benchmarks.gpu.large --help`.

Each engine runs in a process of its own, which first checks it on a small model of the same class in float32. The file
is written after every engine, so that a run that is cut short has what it measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import machine
from benchmarks.capacity import Bounds, search
from benchmarks.correctness import reference
from benchmarks.engines import Engine
from benchmarks.files import RESULTS, head, stem, write
from benchmarks.gpu.models import Large, large_models
from benchmarks.memory import in_new_process, load_what_a_step_loads, peaks
from benchmarks.peers import every_engine
from benchmarks.report import MEGABYTE, heading, times, why_not
from benchmarks.run import checked
from benchmarks.tasks import Task
from benchmarks.timing import synchronize

ENGINES = ("bookkeeping", "ghost", "opacus-ghost")
CAP = 48 * 1024.0
QUICK_CAP = 16.0
ROUNDS = 5


def _made_on(device: torch.device, make: Callable[[], nn.Module]) -> nn.Module:
    """The weights drawn where they are used: on a CPU, a billion of them takes longer than the measurement."""
    with torch.device(device):
        return make()


def _seconds(engine: Engine, task: Task, device: torch.device) -> dict[str, Any]:
    """Peaks of first and later steps, then the median time of further ones."""
    batch = task.batch(device)
    runner = engine.attach(task.model(device), 1.0)
    found: dict[str, Any] = peaks(runner, batch, device)
    taken = []
    for _ in range(ROUNDS):
        synchronize(device)
        started = time.perf_counter()
        runner.step(batch)
        synchronize(device)
        taken.append(time.perf_counter() - started)
    return {**found, "wall_seconds": statistics.median(taken), "rounds": taken}


def _in_this_process(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    machine.exact_float32()
    case = next(case for case in large_models() if case.name == options.case[0])
    engine = next(engine for engine in every_engine() if engine.name == options.one)
    row: dict[str, Any] = checked(engine, case.small, device, reference(case.small, device))
    if row["status"] != "ok":
        return row
    task = case.quick if options.quick else case.task
    task = replace(task, make_model=partial(_made_on, device, task.make_model))
    load_what_a_step_loads(engine, case.small, device)
    try:
        row.update(_seconds(engine, task, device))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        row.update(search(engine, task, device, Bounds(options.cap * MEGABYTE, options.most, first=task.batch_size)))
    except Exception as problem:  # noqa: BLE001 - whatever an engine raises on a large model is a result
        row |= {"status": "failed", "problem": f"{type(problem).__name__}: {problem}"[:300]}
    return row


def _measured(case: Large, engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    arguments = ["--one", engine.name, "--case", case.name, "--cap", str(options.cap), "--most", str(options.most)]
    arguments += ["--device", options.device, *(["--quick"] if options.quick else [])]
    row = {"name": engine.name, "title": engine.title, "private": engine.private}
    found = in_new_process("benchmarks.gpu.large", arguments, seconds=options.limit)
    problem = found.pop("process_problem", None)
    return {**row, "status": "failed", "problem": problem} if problem else found


def _line(row: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    if row["status"] != "ok":
        return f"| {row['title']} | {why_not(row)} | | | | | | |\n"
    held, own = (other.get("steady_bytes", other["peak_bytes"]) for other in (base, row))
    cells = [
        row["title"],
        f"{row['wall_seconds'] * 1e3:.1f}",
        times(row["wall_seconds"] / base["wall_seconds"]),
        f"{own / MEGABYTE:.0f}",
        times(own / held),
        str(row["largest_batch"]),
        times(row["largest_batch"] / base["largest_batch"]) if base["largest_batch"] else "",
        f"{row['error']:.0e}" if "error" in row else "",
    ]
    return f"| {' | '.join(cells)} |\n"


def markdown(report: Mapping[str, Any]) -> str:
    """The report as tables.

    Args:
        report: A report as read from its file.

    Returns:
        One table a model.
    """
    parts = [f"# Large models\n\n{heading(report)}"]
    for case in report["cases"]:
        rows = case["engines"]
        base = rows[0] if rows and rows[0]["status"] == "ok" else None
        header = (
            f"**{case['title']}**, B {case['batch_size']}; largest batch within {report['cap_megabytes']:g} MB above "
            "the loaded model\n\n"
            "| engine | step, ms | time | memory, MB | memory | largest batch | of non-private | error |\n"
            "|---|---:|---:|---:|---:|---:|---:|---:|\n"
        )
        body = (
            [_line(row, base) for row in rows] if base else [f"| {why_not(row)} | | | | | | | |\n" for row in rows[:1]]
        )
        parts.append(header + "".join(body))
    parts.append(
        "time, memory: times the non-private step; memory: peak of the whole process's tensors, weights included, in "
        "later steps. error: of the clipped sum on a small model of the same class in float32.\n"
    )
    return "\n".join(parts)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.large", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--case", action="append", choices=[case.name for case in large_models()], help="only this one")
    parser.add_argument("--engine", action="append", help=f"beside the non-private one (default: {', '.join(ENGINES)})")
    parser.add_argument("--cap", type=float, help=f"MB above the loaded model (default: {CAP:g})")
    parser.add_argument("--most", type=int, default=512, help="try no larger batch (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=75.0, help="seconds for each engine (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="the small models: does it run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files (default: %(default)s)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.cap = options.cap or (QUICK_CAP if options.quick else CAP)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure every engine on every large model.

    Args:
        arguments: The command line; that of the process by default.

    Returns:
        The exit status: 1 if an engine of ghostclip failed or computed something wrong.
    """
    options = _options(arguments)
    device = torch.device(options.device)
    if options.one:
        print(json.dumps(_in_this_process(options, device)))
        return 0
    names = options.engine or ENGINES
    wanted = [engine for engine in every_engine() if not engine.private or engine.name in names]
    given = sys.argv[1:] if arguments is None else arguments
    report = head("benchmarks.gpu.large", given, device, quick=options.quick)
    report |= {"cap_megabytes": options.cap, "cases": []}
    for case in large_models():
        if options.case and case.name not in options.case:
            continue
        task = case.quick if options.quick else case.task
        rows: list[dict[str, Any]] = []
        report["cases"].append({"title": task.title, "batch_size": task.batch_size, "engines": rows})
        for engine in wanted:
            rows.append(_measured(case, engine, options))
            write(options.out, stem("large", device, quick=options.quick), report, markdown(report))
            print(f"   {case.name}, {engine.title}: {rows[-1]['status']}", file=sys.stderr, flush=True)
    print(markdown(report))
    rows = [row for case in report["cases"] for row in case["engines"]]
    return int(any(row["status"] != "ok" and row["title"].startswith("ghostclip") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
