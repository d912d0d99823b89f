"""One case: is the kernel right, and only then how fast is it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from benchmarks.kernels.cases import Case
from ghostclip._memory import PeakMemory
from ghostclip.kernels.bounds import Bounded
from ghostclip.kernels.runtime import difference, relative_difference

TOLERANCE: Final = 1e-5
"""Largest relative error of a kernel, against float64 or its twin."""


def _values(result: Any) -> Any:
    return result.value_N if isinstance(result, Bounded) else result


def _checked(case: Case, device: torch.device) -> dict[str, object]:
    """Run the kernel twice and compare: with the definition in float64, its bound, its twin and itself."""
    first, second = (case.kernel.fast(*case.make(device)) for _ in range(2))
    row: dict[str, object] = {"repeats": difference(second, first) == 0.0, "bound_holds": True}
    if case.exact is None:
        row["error"] = difference(first, case.kernel.naive(*case.make(device)))
    else:
        exact = case.exact(*case.make(device))
        row["error"] = relative_difference(_values(first), exact)
        if isinstance(first, Bounded):
            row["bound_holds"] = bool((first.value_N.double() + first.error_N.double() >= exact).all())
    right = float(str(row["error"])) <= TOLERANCE and row["repeats"] and row["bound_holds"]
    return {**row, "status": "ok" if right else "wrong"}


def seconds(work: Callable[..., Any], arguments: tuple[Any, ...], rounds: int) -> float:
    """Return the median time of a call on the GPU, in-place results accumulating.

    Args:
        work: A kernel or its twin.
        arguments: What it is called with, every time.
        rounds: How often it is timed, after three calls that are not.

    Returns:
        Seconds.
    """
    for _ in range(3):
        work(*arguments)
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work(*arguments)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure(case: Case, device: torch.device, *, rounds: int) -> dict[str, object]:
    """Check one case and, if it is right, time it.

    Args:
        case: The problem.
        device: A GPU; on a CPU, where kernels are interpreted, nothing is timed.
        rounds: How often each is timed.

    Returns:
        A row of the report; without times and speed-up where the check is red.
    """
    row: dict[str, object] = {
        "kernel": case.kernel.name,
        "title": case.title,
        "shape": list(case.shape),
        "dtype": str(case.dtype).removeprefix("torch."),
    }
    try:
        row |= _checked(case, device)
    except Exception as problem:  # noqa: BLE001 - whatever a compiler or driver raises is a result
        return {**row, "status": "failed", "problem": f"{type(problem).__name__}: {problem}"[:300]}
    if row["status"] != "ok" or device.type != "cuda":
        return row
    arguments = case.make(device)
    for name, work in (("kernel", case.kernel.fast), ("twin", case.kernel.naive)):
        row[f"{name}_seconds"] = seconds(work, arguments, rounds)
        row[f"{name}_bytes"] = PeakMemory(device).above(partial(work, *arguments))
    row["speed_up"] = float(str(row["twin_seconds"])) / float(str(row["kernel_seconds"]))
    return row
