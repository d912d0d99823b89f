"""The largest physical batch of each engine under a cap of memory: `python -m benchmarks.capacity --help`.

Each engine is searched in a process of its own, by the peak that steps take above the loaded model: an engine is judged
by what it takes and not by how it fails. On a GPU the allocator refuses what is far beyond the cap. A search that its
time does not suffice for gives the largest batch that was seen to fit.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import machine, options, timing
from benchmarks.correctness import reference
from benchmarks.engines import Engine
from benchmarks.files import RESULTS, head, stem, write
from benchmarks.memory import (
    Prepares,
    give_way,
    in_new_process,
    load_what_a_step_loads,
    short_of_memory,
)
from benchmarks.peers import every_engine
from benchmarks.report import MEGABYTE, heading, times, why_not
from benchmarks.run import checked
from benchmarks.search import largest
from benchmarks.tasks import Batch, Task, find, tasks
from ghostclip._memory import PeakMemory

TASKS = ("gpt", "cnn")
ENGINES = ("bookkeeping", "ghost", "hooks", "opacus-hooks", "opacus-ghost", "torch-func", "jax")
# Above the loaded model, MB: a few times what ordinary training takes at the batch that is timed.
CAPS = {"gpt": 512.0, "cnn": 64.0}
QUICK_CAP = 6.0
# Of a search, and of its process, which loads and may be in the middle of a step.
SECONDS = 45.0
GRACE = 45.0
STEPS = 2
# At the largest batch, after those and one more.
TIMED_STEPS = 5


class Probe:
    """Measures peaks of one engine at one number of samples after the other.

    Args:
        engine: The engine.
        task: Gives model and batches.
        device: Where it runs.
    """

    def __init__(self, engine: Engine, task: Task, device: torch.device) -> None:
        self.engine, self.task, self.device = engine, task, device
        self.runner: Any = None
        self.loaded = 0
        self._meter = PeakMemory(device)

    def __call__(self, samples: int) -> float:
        """Make steps on a batch.

        Args:
            samples: Its size.

        Returns:
            Peak bytes above the loaded model; infinite where an allocator refuses.
        """
        batch = self._prepared(samples)
        gc.collect()
        self._meter.start()
        try:
            for _ in range(STEPS):
                self._step(batch)
        except (RuntimeError, MemoryError) as problem:
            if not short_of_memory(problem):
                raise
            # What a step left half done is not used again.
            self.runner = None
            return float("inf")
        finally:
            highest = self._meter.stop()
            del batch
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return highest - self.loaded

    def speed(self, samples: int) -> float:
        """Make more steps on a batch that fits.

        Args:
            samples: Its size.

        Returns:
            Samples a second in the median step: not one that loads, plans or proves.
        """
        batch = self._prepared(samples)
        self._step(batch)
        return samples / statistics.median(self._step(batch) for _ in range(TIMED_STEPS))

    def _prepared(self, samples: int) -> Batch:
        batch = replace(self.task, batch_size=samples).batch(self.device)
        if self.runner is None:
            self.runner = self.engine.attach(self.task.model(self.device), 1.0)
            self.loaded = self._meter.in_use()
        if isinstance(self.runner, Prepares):
            self.runner.prepare(batch)
            self.loaded = self._meter.in_use()
        return batch

    def _step(self, batch: Batch) -> float:
        return timing.steps(self.runner, batch, self.device)[0]


@dataclass(frozen=True)
class Bounds:
    """Of a search.

    Attributes:
        cap: Bytes above the loaded model.
        most: Look no further.
        first: The number of samples that is tried first.
        seconds: After these no further number is tried.
    """

    cap: float
    most: int
    first: int = 1
    seconds: float = SECONDS


def search(engine: Engine, task: Task, device: torch.device, bounds: Bounds) -> dict[str, Any]:
    """Search in this process.

    Args:
        engine: The engine.
        task: Gives model and batches.
        device: Where it runs.
        bounds: What ends the search.

    Returns:
        `largest_batch`, whether it may be larger yet as the limit or the time was reached, the peaks in bytes by batch,
        and the samples a second at that batch.
    """
    probe, end = Probe(engine, task, device), time.monotonic() + bounds.seconds
    number, peaks, whole = largest(
        probe, bounds.cap, most=bounds.most, first=bounds.first, go_on=lambda: time.monotonic() < end
    )
    found: dict[str, Any] = {
        "largest_batch": number,
        "largest_batch_is_limit": number >= bounds.most,
        "search_cut_short": not whole,
        "peaks": {str(samples): bytes_ for samples, bytes_ in sorted(peaks.items()) if bytes_ != float("inf")},
    }
    if number:
        found["samples_per_second"] = probe.speed(number)
    return found


def _in_this_process(given: argparse.Namespace) -> dict[str, Any]:
    machine.exact_float32()
    give_way()
    device, engine = given.device, next(engine for engine in every_engine() if engine.name == given.search)
    load_what_a_step_loads(engine, find(given.task[0], quick=True), device)
    cap = given.cap * MEGABYTE
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 2 * cap / total), device)
    task = find(given.task[0], quick=given.quick)
    return search(engine, task, device, Bounds(cap, given.most, seconds=given.seconds))


def _searched(engine: Engine, name: str, cap: float, given: argparse.Namespace) -> dict[str, Any]:
    """Search in a process of its own; return what it found, or a status that says why it found nothing."""
    arguments = ["--search", engine.name, "--task", name, "--cap", str(cap), "--most", str(given.most)]
    arguments += ["--seconds", str(given.seconds), "--device", str(given.device), *(["--quick"] if given.quick else [])]
    found = in_new_process("benchmarks.capacity", arguments, seconds=given.seconds + GRACE)
    problem = found.pop("process_problem", None)
    return {"status": "failed", "problem": problem} if problem else found


def measured(name: str, wanted: list[Engine], given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Search for every engine that is right.

    Args:
        name: Of the task.
        wanted: The engines, the non-private one first.
        given: The command line.

    Yields:
        The task's part of the report, again after every engine.
    """
    task = find(name, quick=given.quick)
    cap = given.cap or (QUICK_CAP if given.quick else CAPS.get(name, max(CAPS.values())))
    few = replace(task, batch_size=min(task.batch_size, 2))
    expected = reference(few, given.device)
    rows: list[dict[str, Any]] = []
    for engine in wanted:
        row: dict[str, Any] = checked(engine, few, given.device, expected)
        if row["status"] == "ok":
            row |= _searched(engine, name, cap, given)
        print(f"   {task.name}, {engine.title}: {row.get('largest_batch', row['status'])}", file=sys.stderr, flush=True)
        rows.append(row)
        yield {"name": name, "title": task.title.rpartition(", B")[0], "cap_megabytes": cap, "engines": rows}


def markdown(report: Mapping[str, Any]) -> str:
    """The report as tables.

    Args:
        report: A report as read from its file.

    Returns:
        One table a task.
    """
    parts = [f"# Largest batch under a cap of memory\n\n{heading(report)}"]
    for task in report["tasks"]:
        base = task["engines"][0].get("largest_batch")
        lines = [f"**{task['title']}**, at most {task['cap_megabytes']:g} MB above the loaded model\n"]
        lines.append("| engine | largest batch | of non-private | samples a second there |\n|---|---:|---:|---:|")
        for row in task["engines"]:
            if row["status"] != "ok":
                lines.append(f"| {row['title']} | {why_not(row)} | | |")
                continue
            most = "≥ " if row["largest_batch_is_limit"] or row["search_cut_short"] else ""
            share = times(row["largest_batch"] / base) if base else ""
            speed = f"{row['samples_per_second']:.0f}" if "samples_per_second" in row else ""
            lines.append(f"| {row['title']} | {most}{row['largest_batch']} | {share} | {speed} |")
        parts.append("\n".join(lines) + "\n")
    parts.append(
        "The largest batch is known to within 2 %; the peak is that of the first two steps. ≥: no larger one was "
        f"tried, as it is the search's limit, or the engine's time, {report['limits']['seconds']:g} s, was over. "
        "Samples a second: in the median step there, in a process that gives memory back at once.\n"
    )
    return "\n".join(parts)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__)
    parser.add_argument("--task", action="append", help=f"may be given several times (default: {', '.join(TASKS)})")
    parser.add_argument("--engine", action="append", help=f"beside the non-private one (default: {', '.join(ENGINES)})")
    parser.add_argument("--cap", type=options.positive, help=f"MB above the loaded model (default: {CAPS})")
    parser.add_argument("--most", type=options.count, default=4096, help="try no larger batch (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=options.positive, default=SECONDS, help="for each engine's search (default: %(default)s)"
    )
    parser.add_argument("--device", type=options.device, default="cpu", help="cpu (the default), cuda, ...")
    parser.add_argument("--quick", action="store_true", help="small models: does it run")
    parser.add_argument(
        "--out", type=options.folder, default=RESULTS, help="folder for the files (default: %(default)s)"
    )
    parser.add_argument("--search", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    options.refuse_unknown(parser, "--task", given.task, [task.name for task in tasks(quick=True)])
    given.engines = options.wanted(parser, given.engine, ENGINES)
    return given


def main(arguments: list[str] | None = None) -> int:
    """Search for every engine and write the report.

    Args:
        arguments: The command line; that of the process by default.

    Returns:
        The exit status: 1 if an engine of ghostclip failed or computed something wrong.
    """
    given = _options(arguments)
    if given.search:
        print(json.dumps(_in_this_process(given)))
        return 0
    machine.exact_float32()
    command = sys.argv[1:] if arguments is None else arguments
    report = head("benchmarks.capacity", command, given.device, quick=given.quick)
    report |= {"limits": {"seconds": given.seconds, "most": given.most}, "tasks": []}
    name = stem("capacity", given.device, quick=given.quick)
    for task in given.task or TASKS:
        report["tasks"].append({})
        for found in measured(task, given.engines, given):
            report["tasks"][-1] = found
            # After every engine, so that a run that is cut short has what it measured.
            write(given.out, name, report, markdown(report))
    print(f"\n{markdown(report)}\nwritten: {given.out / name}.json, .md")
    rows = [row for task in report["tasks"] for row in task["engines"]]
    return int(any(row["status"] != "ok" and row["title"].startswith("ghostclip") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
