"""Seconds of a call on any device: by events on a GPU, by the clock elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def seconds(work: Callable[[], object], device: torch.device, *, rounds: int) -> float:
    """The median time of a call."""
    for _ in range(2):
        work()
    return statistics.median(_once(work, device) for _ in range(rounds))


def _once(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
