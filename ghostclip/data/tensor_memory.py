"""Peak of tensor memory above what existed when a piece of work began.

Weights and optimizer state exist before a private and before an ordinary step, and are in neither figure. On a CPU the
allocator's own events are read, not the resident set as by ``PeakMemory``: within one process the C library hands out
again what earlier steps have freed, so that the resident set hardly moves.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import torch

from ghostclip._memory import PeakMemory


def peak_bytes(work: Callable[[], None], device: torch.device) -> int | None:
    """Run ``work`` once and return its peak in bytes, or None where the device offers no measure."""
    if device.type == "cpu":
        return _peak_cpu(work)
    if device.type == "cuda":
        return PeakMemory(device).above(work)
    work()
    return None


def _peak_cpu(work: Callable[[], None]) -> int | None:
    from torch.profiler import ProfilerActivity, profile

    # The profiler sees every allocation and release of torch's CPU allocator; what existed before is not in its
    # balance.
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _quiet_stderr(), profiler:
        work()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    if results is None:
        return None
    balance = peak = 0
    for event in sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        balance += event.nbytes()  # type: ignore[attr-defined]
        peak = max(peak, balance)
    return peak


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Silence torch's C++ side, which writes notes about the profiler to file descriptor 2."""
    sys.stderr.flush()
    saved = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
