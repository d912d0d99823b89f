"""Every case of a table, every engine: check, one trial step alone, then timing in turns."""

from __future__ import annotations

import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks import timing
from benchmarks.correctness import ROUNDING, TOLERANCE, Reference, error_of, reference
from benchmarks.engines import STRATEGIES, Engine, Runner
from benchmarks.run import Row, add_times, checked
from benchmarks.tasks import Batch, Task
from ghostclip._memory import PeakMemory
from paper_repro.cases import Case, Table
from paper_repro.limits import SHARE_OF_FREE, cap, free_bytes, reason
from paper_repro.opacus_layers import needs_opacus_layers, same_function, with_opacus_layers

MAX_GRAD_NORM = 1.0
# Relative error that ours may have in float64; others, what they are allowed anyway.
EXACT = 1e-10
# Steps that an engine makes besides the trial: one to warm up, three rounds at least, two under a counter.
FEWEST_STEPS = 6
# Where one step of all engines takes longer, the trial and one step more are enough to warm up.
SLOW_CASE = 5.0
# What a case has although slow ones before it took more than their share: some rounds more where steps are quick.
LEAST_SECONDS = 10.0
# A first step that took less is followed by a second one, which tells more: the first one loads and plans.
SHORT_STEP = 2.0
# A mode of Opacus that takes so many times its fastest in a single step is not the fastest after all.
SURELY_SLOWER = 1.3
# What other libraries say at every step, of layers that they hook.
NOISE = ("Full backward hook is firing", "In CPU autocast", "There is a performance drop")


@dataclass(frozen=True)
class Plan:
    """How a run is made.

    Attributes:
        device: Where it runs.
        rounds: Most rounds of timing.
        seconds: Everything that a case takes is to be done after about this time; the least there is, a trial and
            three rounds, is done in any case.
        only: Names of the private engines wanted; empty for all.
    """

    device: torch.device
    rounds: int
    seconds: float
    only: frozenset[str]

    def engines(self, table: Table, *, check: bool) -> list[Engine]:
        """The engines that are wanted.

        Args:
            table: Knows them all.
            check: Whether for the check, or for timing.

        Returns:
            The non-private one first.
        """
        found = table.engines(check)
        return [engine for engine in found if not engine.private or not self.only or engine.name in self.only]


def say(text: str) -> None:
    """Tell the person who waits.

    Args:
        text: One line or more.
    """
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _swapped_task(task: Task) -> Task:
    return replace(task, make_model=lambda: with_opacus_layers(task.make_model()))


def _in_float64(task: Task) -> Task:
    def batch(samples: int) -> Batch:
        inputs, target = task.make_batch(samples)
        return inputs.double() if inputs.is_floating_point() else inputs, target

    return replace(task, make_model=lambda: task.make_model().double(), make_batch=batch)


def _rounding_only(engine: Engine, task: Task, device: torch.device, expected: Reference) -> Row:
    """Acquit an engine that is exact in float64: what float32 shows is then the rounding of the model's own layers."""
    try:
        error = error_of(engine, _in_float64(task), device, expected)
    except Exception as problem:  # noqa: BLE001 - what others raise in float64 acquits nobody
        return {"problem": f"not comparable in float64: {reason(problem)}"}
    if not error <= (EXACT if engine.name in STRATEGIES else ROUNDING):
        return {"error_float64": error}
    return {"error_float64": error, "status": "ok", "remark": f"float32 rounds; {error:.0e} in float64"}


def _said(row: Row) -> str:
    return str(row["problem"]) if "problem" in row else f"(error {row['error']:.0e})" if "error" in row else ""


def check(table: Table, case: Case, plan: Plan) -> list[Row]:
    """Compare every engine's clipped sum with one-sample autograd in float64, on a few samples.

    An engine that runs on swapped layers is compared with one-sample autograd through those, and it is said whether
    they compute what torch's do.

    Args:
        table: Gives the engines.
        case: Any case of a group.
        plan: How the run is made.

    Returns:
        A row for each engine, with `status`.
    """
    task = replace(case.task, batch_size=min(case.task.batch_size, table.checked_samples))
    expected = reference(task, plan.device)
    swapped, remark = expected, ""
    if needs_opacus_layers(task.make_model()):
        swapped = reference(_swapped_task(task), plan.device)
        inputs = task.batch(plan.device)[0]
        kept = same_function(task.model(plan.device), _swapped_task(task).model(plan.device), inputs)
        remark = "" if kept else "Opacus's layer computes something else than torch's"
    rows = []
    for engine in plan.engines(table, check=True):
        opacus = engine.name.startswith("opacus")
        with warnings.catch_warnings():
            # Without noise on purpose, so that the clipped sums show.
            warnings.filterwarnings("ignore", message="noise_multiplier=0")
            wanted = swapped if opacus else expected
            row = checked(engine, task, plan.device, wanted)
            if row["status"] == "wrong":
                row.update(_rounding_only(engine, task, plan.device, wanted))
        if opacus and remark:
            row["remark"] = remark
        if row["status"] == "failed":
            row["problem"] = str(row["problem"]).splitlines()[0][:200]
        rows.append(row)
        say(f"   {engine.title}: {row['status']} {_said(row)}")
        gc.collect()
    return rows


def _trial(engine: Engine, case: Case, device: torch.device, kept: dict[str, Runner]) -> dict[str, Any]:
    """One step alone: does it fit, and on a GPU, what does it take; on a CPU the runner is kept for the timing."""
    found: dict[str, Any] = {}
    meter = PeakMemory(device)
    try:
        batch = case.task.batch(device)
        runner = engine.attach(case.task.model(device), MAX_GRAD_NORM)
        if device.type == "cuda":
            runner.step(batch)
            found["loaded_bytes"] = meter.in_use()
            meter.start()
        found["trial_seconds"] = timing.steps(runner, batch, device)[0]
        if found["trial_seconds"] < SHORT_STEP:
            found["trial_seconds"] = timing.steps(runner, batch, device)[0]
        if device.type == "cuda":
            found["peak_bytes"] = meter.stop()
        else:
            # What its first steps planned and proved need not be done twice.
            kept[engine.name] = runner
    except Exception as problem:  # noqa: BLE001 - whatever an engine raises is a result
        found = {"status": "failed", "problem": reason(problem)}
    # An engine's hooks hold on to its model in circles, and the next engine needs the room.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _remembering(engine: Engine, runners: dict[str, Runner]) -> Engine:
    """The same engine, whose runner can be asked for more than the time of a step; one that is there is taken."""

    def attach(model: nn.Module, max_grad_norm: float) -> Runner:
        if engine.name not in runners:
            runners[engine.name] = engine.attach(model, max_grad_norm)
        return runners[engine.name]

    return replace(engine, attach=attach)


def _add_update_times(rows: list[Row], runners: dict[str, Runner], rounds: int) -> None:
    for row in rows:
        seconds = getattr(runners[str(row["name"])], "update_seconds", None)
        if seconds:
            # The last two steps may have been made under a counter of operations, the first ones warm up.
            row["update_seconds"] = statistics.median(seconds[-rounds - 2 : -2])


def _leave_out_slow(chosen: list[tuple[Row, Engine]], seconds: float) -> list[tuple[Row, Engine]]:
    """Drop others' slowest engines until the fewest steps of all fit; modes that may be Opacus's fastest stay."""
    opacus = [row["trial_seconds"] for row, engine in chosen if engine.name.startswith("opacus")]
    stays = SURELY_SLOWER * min(opacus, default=0.0)
    droppable = [
        row
        for row, engine in chosen
        if engine.private and engine.name not in STRATEGIES and row["trial_seconds"] > stays
    ]
    taken = sum(row["trial_seconds"] for row, _ in chosen)
    for row in sorted(droppable, key=lambda row: -row["trial_seconds"]):
        if FEWEST_STEPS * taken <= seconds:
            break
        taken -= row["trial_seconds"]
        times = row["trial_seconds"] / chosen[0][0]["trial_seconds"]
        row.update(status="slow", problem=f"one step took {row['trial_seconds']:.1f} s, {times:.0f}× the non-private")
    return [(row, engine) for row, engine in chosen if row["status"] == "ok"]


def measure_case(table: Table, case: Case, verdicts: list[Row], plan: Plan) -> dict[str, Any]:
    """Time one case.

    Args:
        table: Gives the engines.
        case: What is measured.
        verdicts: What `check` said of the case's group.
        plan: How the run is made; its seconds are for this.

    Returns:
        The case's part of the report: plain values, ready for JSON.
    """
    started = time.perf_counter()
    rows: list[Row] = [dict(row) for row in verdicts]
    chosen = []
    runners: dict[str, Runner] = {}
    for row, engine in zip(rows, plan.engines(table, check=False), strict=True):
        if case.published.get(engine.name):
            row["published"] = case.published[engine.name]
        if row["status"] == "ok":
            row.update(_trial(engine, case, plan.device, runners))
        if row["status"] == "ok":
            chosen.append((row, engine))
    if chosen and not chosen[0][0]["private"]:
        left = plan.seconds - (time.perf_counter() - started)
        chosen = _leave_out_slow(chosen, left)
        outside_rounds = (FEWEST_STEPS - 3) * sum(row["trial_seconds"] for row, _ in chosen)
        plan = replace(plan, seconds=max(0.0, left - outside_rounds))
        runners = {engine.name: runners[engine.name] for _, engine in chosen if engine.name in runners}
        rounds = _time(chosen, case, plan, runners)
    else:
        # Ratios need the non-private one; without it there are none.
        rounds = 0
    model = case.task.make_model()
    return {
        "name": case.task.name,
        "group": case.group,
        "title": case.title,
        "batch_size": case.task.batch_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trainable": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "epoch": case.epoch,
        "tolerance": {"ghostclip": TOLERANCE, "others": ROUNDING},
        "checked_samples": min(case.task.batch_size, table.checked_samples),
        "rounds": rounds,
        "engines": rows,
    }


def _time(chosen: list[tuple[Row, Engine]], case: Case, plan: Plan, runners: dict[str, Runner]) -> int:
    """Add times to the rows, in turns."""
    rows = [row for row, _ in chosen]
    engines = [_remembering(engine, runners) for _, engine in chosen]
    clipping = Reference(max_grad_norm=MAX_GRAD_NORM, clipped_sum=[])
    slow = sum(row["trial_seconds"] for row in rows) > SLOW_CASE
    limits = {"rounds": plan.rounds, "seconds": plan.seconds, "before": 1 if slow else timing.FEWEST_BEFORE}
    try:
        rounds = add_times(rows, engines, case.task, plan.device, clipping, limits=limits)
    except Exception as problem:  # noqa: BLE001 - each fits alone; together their models may not
        for row in rows:
            row.update(status="failed", problem=f"in turns with the others: {reason(problem)}")
        return 0
    _add_update_times(rows, runners, rounds)
    return rounds


def measured(table: Table, plan: Plan, after: Callable[[Case, dict[str, Any]], None]) -> Iterator[dict[str, Any]]:
    """Measure every case of a table.

    Args:
        table: The table.
        plan: How the run is made; its seconds are for the whole table, and what a case does not need is the next ones'.
        after: Called with each case and its part of the report, to add to it.

    Yields:
        Each case's part of the report.
    """
    verdicts: dict[str, list[Row]] = {}
    free = free_bytes()
    guarded = plan.device.type == "cpu" and free is not None
    begun = time.perf_counter()
    # What is loaded by now stays, and need not be searched for garbage between every two engines.
    gc.freeze()
    for text in NOISE:
        warnings.filterwarnings("ignore", message=text)
    for done, case in enumerate(table.cases):
        say(f"== {case.task.title}")
        started = time.perf_counter()
        share = table.timed_share * max(0.0, plan.seconds - (started - begun)) / (len(table.cases) - done)
        with cap(SHARE_OF_FREE * (free or 0), plan.device) if guarded else nullcontext():
            if case.group not in verdicts:
                verdicts[case.group] = check(table, case, plan)
            left = max(share - (time.perf_counter() - started), min(LEAST_SECONDS, plan.seconds / len(table.cases)))
            found = measure_case(table, case, verdicts[case.group], replace(plan, seconds=left))
        gc.collect()
        after(case, found)
        say(f"   {found['rounds']} rounds; {time.perf_counter() - started:.0f} s in all")
        yield found
