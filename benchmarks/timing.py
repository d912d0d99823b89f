"""Wall and CPU time of several engines, in turns, so that a busy moment of the machine hits all of them alike."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

import torch

from benchmarks.engines import Runner
from benchmarks.tasks import Batch

TURN_SECONDS: Final = 0.02
"""How long a turn of a quick engine lasts, about."""

MOST_IN_A_TURN: Final = 50
FEWEST_BEFORE: Final = 2
MOST_BEFORE: Final = 5
"""Steps before the first that is timed: more than the fewest as long as they take less than `WARM_UP_SECONDS`."""

WARM_UP_SECONDS: Final = 0.5


@runtime_checkable
class Proves(Protocol):
    """A runner whose first steps prove what later ones rely on."""

    proving_steps: int


@dataclass
class Times:
    """Seconds of a step of one engine, by the clock and of CPU time over all threads, one entry a round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall(call: Callable[[], object], device: torch.device) -> float:
    """Seconds by the clock until a call is done, on the device as well."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def seconds(work: Callable[[], object], device: torch.device, *, rounds: int) -> float:
    """The median time of a call after two that are not timed: by events on a GPU, by the clock elsewhere."""
    for _ in range(2):
        work()
    return statistics.median(_by_events(work) if device.type == "cuda" else wall(work, device) for _ in range(rounds))


def _by_events(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def steps(runner: Runner, batch: Batch, device: torch.device, count: int = 1) -> tuple[float, float]:
    """Make steps."""
    synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        runner.step(batch)
    synchronize(device)
    return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count


def _warmed_up(runner: Runner, batch: Batch, device: torch.device, before: int) -> float:
    """Let an engine plan, prove and compile; return the wall seconds of its quickest step."""
    taken: list[float] = []
    fewest = max(before, runner.proving_steps if isinstance(runner, Proves) else 0)
    while len(taken) < fewest or (len(taken) < MOST_BEFORE and sum(taken) < WARM_UP_SECONDS):
        taken.append(steps(runner, batch, device)[0])
    return min(taken)


def measure(
    runners: Sequence[Runner],
    batch: Batch,
    device: torch.device,
    *,
    rounds: int,
    seconds: float,
    before: int = FEWEST_BEFORE,
) -> list[Times]:
    """Time the runners in turns.

    A turn is one step; of quick ones it is as many in a row as fill `TURN_SECONDS`, as they would run in training: a
    step of a few hundred microseconds alone tells what the other engines left in the caches.
    """
    quickest = [_warmed_up(runner, batch, device, before) for runner in runners]
    counts = [min(MOST_IN_A_TURN, max(1, round(TURN_SECONDS / seconds_each))) for seconds_each in quickest]
    found = [Times() for _ in runners]
    # Drawn anew for every round: some engines leave threads spinning and caches full to whoever comes next.
    order = random.Random(0)
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    try:
        for index in range(rounds):
            if index >= 3 and time.perf_counter() - started > seconds:
                break
            for which in order.sample(range(len(runners)), len(runners)):
                wall, cpu = steps(runners[which], batch, device, counts[which])
                found[which].wall.append(wall)
                found[which].cpu.append(cpu)
            gc.collect()
    finally:
        gc.enable()
    return found


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """The median over rounds of time divided by the base's time in the same round."""
    return statistics.median(t / b for t, b in zip(times, base, strict=True))
