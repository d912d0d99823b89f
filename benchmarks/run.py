"""One task, all engines: check, time in turns, count operations, measure memory."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks import flops, memory, timing
from benchmarks.correctness import ROUNDING, TOLERANCE, Reference, error_of, reference
from benchmarks.engines import STRATEGIES, CannotDo, Engine
from benchmarks.tasks import Task

Row = dict[str, object]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def checked(engine: Engine, task: Task, device: torch.device, expected: Reference) -> Row:
    """An engine's row: its error, and "ok", "wrong", "failed", or "cannot" where it says so itself: may it be timed?"""
    row: Row = {"name": engine.name, "title": engine.title, "private": engine.private, "status": "ok"}
    if not engine.private:
        return row
    try:
        error = error_of(engine, task, device, expected)
    except CannotDo as problem:
        return {**row, "status": "cannot", "problem": str(problem)}
    except Exception as problem:  # noqa: BLE001 - whatever an engine raises is a result of the comparison
        return {**row, "status": "failed", "problem": f"{type(problem).__name__}: {problem}"[:300]}
    # Where float32 itself is further off (a norm's branch taken the other way), twice that.
    limit = max(TOLERANCE if engine.name in STRATEGIES else ROUNDING, 2 * expected.rounding)
    return {**row, "status": "ok" if error <= limit else "wrong", "error": error}


def add_times(
    rows: Sequence[Row],
    chosen: Sequence[Engine],
    task: Task,
    device: torch.device,
    expected: Reference,
    *,
    limits: dict[str, float],
) -> int:
    """Time engines in turns and count their operations."""
    batch = task.batch(device)
    runners = [engine.attach(task.model(device), expected.max_grad_norm) for engine in chosen]
    before = int(limits.get("before", timing.FEWEST_BEFORE))
    times = timing.measure(
        runners, batch, device, rounds=int(limits["rounds"]), seconds=limits["seconds"], before=before
    )
    # Nobody counts inside torch's fused recurrent kernels, which the non-private step runs.
    fused = any(isinstance(module, torch.nn.RNNBase) for module in task.make_model().modules())
    operations = [None if fused else flops.count(runner, batch) for runner in runners]
    for row, taken, counted in zip(rows, times, operations, strict=True):
        row["wall_seconds"] = statistics.median(taken.wall)
        row["cpu_seconds"] = statistics.median(taken.cpu)
        row["wall_ratio"] = timing.ratio(taken.wall, times[0].wall)
        row["cpu_ratio"] = timing.ratio(taken.cpu, times[0].cpu)
        row["flops"] = counted
        # A norm or a table alone has no products at all, and not everybody counts.
        row["flops_ratio"] = counted / operations[0] if counted is not None and operations[0] else None
        row["rounds"] = {"wall": taken.wall, "cpu": taken.cpu}
    return len(times[0].wall)


@dataclass(frozen=True)
class Limits:
    """How much is spent on a task.

    Attributes:
        rounds: Most rounds of timing.
        seconds: Timing stops after about this time.
        with_memory: Whether memory is measured, each engine in a process of its own.
        alone_seconds: How long an engine's own process may take.
    """

    rounds: int
    seconds: float
    with_memory: bool = True
    alone_seconds: float = memory.SECONDS


def _alone(engine: Engine, task: Task, device: torch.device, *, seconds: float, quick: bool) -> Row:
    """An engine's memory, by steps on the whole batch in a process of its own.

    What dies or takes too long there is not let into this process, which it would take with it.
    """
    row: Row = {"name": engine.name, "title": engine.title, "private": engine.private}
    found = memory.measure(task.name, engine.name, device, quick=quick, seconds=seconds)
    if "cannot" in found:
        return {**row, "status": "cannot", "problem": found["cannot"]}
    if "process_problem" in found:
        return {**row, "status": "failed", "problem": found["process_problem"]}
    return {**row, "status": "ok", **found}


def _verdict(
    engine: Engine, task: Task, device: torch.device, expected: Reference, *, limits: Limits, quick: bool
) -> Row:
    """The row of an engine that is right and gets through the whole batch, or of one that is not."""
    row: Row = {"status": "ok"}
    if limits.with_memory:
        row = _alone(engine, task, device, seconds=limits.alone_seconds, quick=quick)
    if row["status"] == "ok":
        row |= checked(engine, task, device, expected)
    if row["status"] == "ok" and not limits.with_memory:
        try:
            engine.attach(task.model(device), 1.0).step(task.batch(device))
        except Exception as problem:  # noqa: BLE001 - as in `checked`
            row |= {"status": "failed", "problem": f"{type(problem).__name__}: {problem}"[:300]}
    _say(f"   {engine.title}: {row['status']} {row.get('error', '')} {row.get('problem', '')}")
    return row


def _timed(
    rows: Sequence[Row],
    wanted: Sequence[Engine],
    task: Task,
    device: torch.device,
    expected: Reference,
    *,
    limits: Limits,
) -> int:
    """Time those whose status is "ok", beside the non-private one; return the number of rounds."""
    right = [(row, engine) for row, engine in zip(rows, wanted, strict=True) if row["status"] == "ok"]
    if not right or right[0][1].private:
        for row, _ in right:
            row.update(status="failed", problem="nothing to compare with: the non-private engine failed")
        return 0
    _say(f"   timing {len(right)} engines in turns, about {limits.seconds:.0f} s")
    chosen = [engine for _, engine in right]
    turns = {"rounds": limits.rounds, "seconds": limits.seconds}
    done = add_times([row for row, _ in right], chosen, task, device, expected, limits=turns)
    _say(f"   {done} rounds")
    return done


def measure_task(
    task: Task, wanted: Sequence[Engine], device: torch.device, limits: Limits, *, quick: bool
) -> dict[str, object]:
    """Measure one task."""
    _say(f"== {task.title}\n   one-sample reference in float64")
    expected = reference(task, device)
    rows = [_verdict(engine, task, device, expected, limits=limits, quick=quick) for engine in wanted]
    done = _timed(rows, wanted, task, device, expected, limits=limits)
    parameters = sum(parameter.numel() for parameter in task.model(torch.device("cpu")).parameters())
    return {
        "name": task.name,
        "title": task.title,
        "batch_size": task.batch_size,
        "parameters": parameters,
        "max_grad_norm": expected.max_grad_norm,
        "tolerance": {"ghostclip": TOLERANCE, "others": ROUNDING},
        "rounds": done,
        "engines": rows,
    }
