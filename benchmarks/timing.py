"""Wall and CPU time of several engines, in turns, so that a busy moment of the machine hits all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.engines import Runner
from benchmarks.tasks import Batch


@dataclass
class Times:
    """Times of the steps of one engine, one entry a round.

    Attributes:
        wall: Seconds by the clock.
        cpu: Seconds of CPU time of the process, over all threads.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _one_step(runner: Runner, batch: Batch, device: torch.device) -> tuple[float, float]:
    _synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    runner.step(batch)
    _synchronize(device)
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(
    runners: Sequence[Runner], batch: Batch, device: torch.device, *, rounds: int, seconds: float
) -> list[Times]:
    """Time the runners in turns.

    Args:
        runners: The engines at work, the one that ratios refer to first.
        batch: Given to each of them.
        device: Where they run.
        rounds: Most rounds.
        seconds: Start no further round after this time, but finish three at least.

    Returns:
        The times of each runner.
    """
    for runner in runners:
        for _ in range(2):
            runner.step(batch)
    found = [Times() for _ in runners]
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    try:
        for index in range(rounds):
            if index >= 3 and time.perf_counter() - started > seconds:
                break
            # The order rotates, so that nobody always runs after the same neighbour.
            for turn in range(len(runners)):
                which = (turn + index) % len(runners)
                wall, cpu = _one_step(runners[which], batch, device)
                found[which].wall.append(wall)
                found[which].cpu.append(cpu)
            gc.collect()
    finally:
        gc.enable()
    return found


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """The median over rounds of time divided by the base's time in the same round.

    Args:
        times: Seconds, one a round.
        base: Seconds, of the same rounds.

    Returns:
        The median ratio.
    """
    return statistics.median(t / b for t, b in zip(times, base, strict=True))
