"""All trainings of a task: step sizes are chosen on some seeds and records, accuracy is reported on others."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from paper_repro.accuracy.allocation import compared
from paper_repro.accuracy.tasks import Task, found
from paper_repro.accuracy.training import READ, ROWS, Job, Row, planned, prove, quiet, trained
from paper_repro.measure import say

FIRST_TUNING_SEED = 1000
Given = TypeVar("Given")
Found = TypeVar("Found")
Mapped = Callable[[Callable[[Given], Found], Sequence[Given]], Iterator[Found]]


@dataclass(frozen=True)
class Run:
    """How the table is made.

    Attributes:
        seeds: Runs that are reported for each row and ε.
        workers: Processes, of one thread each.
        folder: The user's data.
        quick: Whether tasks are shortened.
        rows: Names of the rows wanted.
    """

    seeds: int
    workers: int
    folder: Path | None
    quick: bool
    rows: tuple[str, ...]


@contextmanager
def mapped(workers: int) -> Iterator[Any]:
    """Yield a `map` over processes; with one worker, over this one."""
    if workers == 1:
        quiet()
        yield map
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=quiet) as pool:
        yield pool.map


def _plan(asked: tuple[str, Path | None, bool, str, float]) -> dict[str, Any]:
    """Return what is known of a row at an ε before any training."""
    name, folder, quick, row, epsilon = asked
    plan = planned(found(name, folder, quick)[0], ROWS[row], epsilon)
    if plan is None:
        return {"sigma": None, "noise": None}
    return {"sigma": plan.noise_multiplier, "noise": plan.noise}


def _jobs(task: Task, cell: dict[str, Any], run: Run) -> list[Job]:
    """Return the trainings that a cell's step size and C are chosen by."""
    clips = ROWS[cell["row"]].clips
    # Three times as many settings get one run each.
    seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + (task.tuning_seeds if len(clips) == 1 else 1))
    return [
        _job(task, cell, run, seed=seed, clip=clip, step_size=step_size)
        for clip, step_size, seed in product(clips, task.step_sizes, seeds)
    ]


def _job(task: Task, cell: dict[str, Any], run: Run, *, seed: int, clip: float, step_size: float) -> Job:
    return Job(
        task=task.name,
        row=cell["row"],
        epsilon=cell["epsilon"] or 0.0,
        sigma=cell["sigma"] or 0.0,
        step_size=step_size,
        clip=clip,
        seed=seed,
        part=1 if seed >= FIRST_TUNING_SEED else 2,
        folder=run.folder,
        quick=run.quick,
        # The account is the same for each seed.
        priced=seed == 1 and cell["sigma"] is not None,
    )


def _means(jobs: Sequence[Job], results: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """Return the mean accuracy of each setting that was tried."""
    settings: dict[tuple[float, float], list[dict[str, float]]] = {}
    for job, result in zip(jobs, results, strict=True):
        settings.setdefault((job.clip, job.step_size), []).append(result)
    return [
        {"clip": clip, "step_size": step_size, **{name: statistics.fmean(one[name] for one in runs) for name in READ}}
        for (clip, step_size), runs in settings.items()
    ]


def _chosen(tried: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the best setting for each kind of weights, and whether its step is the smallest or largest one tried."""
    steps = sorted({one["step_size"] for one in tried})
    best = {name: max(tried, key=lambda one, name=name: one[name]) for name in READ}  # type: ignore[misc]
    return {
        name: {
            "clip": one["clip"],
            "step_size": one["step_size"],
            "at_edge": one["step_size"] in (steps[0], steps[-1]),
        }
        for name, one in best.items()
    }


def _reported(cell: dict[str, Any], jobs: Sequence[Job], results: Sequence[dict[str, float]]) -> None:
    """Add to each kind of weights its scores, their mean and standard error, and ε of a run to the cell."""
    by_setting: dict[tuple[float, float], list[dict[str, float]]] = {}
    for job, result in zip(jobs, results, strict=True):
        by_setting.setdefault((job.clip, job.step_size), []).append(result)
        if "epsilon" in result:
            cell["epsilon_spent"] = result["epsilon"]
    for name, chosen in cell["weights"].items():
        scores = [one[name] for one in by_setting[chosen["clip"], chosen["step_size"]]]
        spread = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else None
        chosen.update(scores=scores, mean=statistics.fmean(scores), standard_error=spread)


def _all(run_all: Any, groups: Sequence[Sequence[Job]], what: str) -> list[list[dict[str, float]]]:
    """Return the results of groups of trainings, all of them together."""
    jobs = [job for group in groups for job in group]
    results = []
    for number, result in enumerate(run_all(trained, jobs), start=1):
        results.append(result)
        if number % 50 == 0 or number == len(jobs):
            say(f"   {what}: {number} of {len(jobs)} trainings")
    taken = iter(results)
    return [[next(taken) for _ in group] for group in groups]


def _cells(task: Task, rows: Sequence[Row], run: Run, run_all: Any) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = [
        {"row": row.name, "title": row.title, "epsilon": epsilon}
        for row in rows
        for epsilon in (task.epsilons if row.mechanism is not None else (None,))
    ]
    asked = [(task.name, run.folder, run.quick, cell["row"], cell["epsilon"]) for cell in cells]
    for cell, plan in zip(cells, run_all(_plan, asked), strict=True):
        cell.update(plan)
    return cells


def measured(name: str, run: Run, run_all: Any) -> dict[str, Any]:
    """Train all rows of a task.

    Args:
        name: Of the task.
        run: How.
        run_all: Maps jobs to results.

    Returns:
        The task's part of the report: plain values, ready for JSON.
    """
    task, parts = found(name, run.folder, run.quick)
    say(f"== {task.title}")
    prove(name, run.folder, run.quick)
    cells = _cells(task, [ROWS[row] for row in run.rows], run, run_all)
    tuning = [_jobs(task, cell, run) for cell in cells]
    for cell, jobs, results in zip(cells, tuning, _all(run_all, tuning, "step sizes"), strict=True):
        cell["tried"] = _means(jobs, results)
        cell["weights"] = _chosen(cell["tried"])
    reporting = [
        [
            _job(task, cell, run, seed=seed, clip=clip, step_size=step_size)
            for clip, step_size in sorted({(one["clip"], one["step_size"]) for one in cell["weights"].values()})
            for seed in range(1, run.seeds + 1)
        ]
        for cell in cells
    ]
    for cell, jobs, results in zip(cells, reporting, _all(run_all, reporting, "reported"), strict=True):
        _reported(cell, jobs, results)
    targets = parts[2][1]
    return {
        "name": name,
        "title": task.title,
        "records": [len(part[1]) for part in parts],
        "batch_size": task.batch_size,
        "epochs": task.epochs,
        "steps": task.epochs * round(task.sizes[0] / task.batch_size),
        "delta": task.delta,
        "momentum": task.momentum,
        "parameters": sum(parameter.numel() for parameter in task.make_model().parameters()),
        "commonest": targets.bincount().max().item() / len(targets),
        "epsilons": list(task.epsilons),
        "step_sizes": list(task.step_sizes),
        "tuning_seeds": task.tuning_seeds,
        "cells": cells,
    }


def allocations(grid: Sequence[tuple[int, int, float]], run_all: Any) -> list[dict[str, float]]:
    """Return the noise of Poisson sampling and of balls in bins over a grid of steps, passes and ε."""
    say("== noise of balls in bins beside Poisson sampling")
    return list(run_all(compared, grid))
