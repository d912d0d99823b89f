"""Peak memory of a piece of work: tensor memory allocated above what existed when it began.

The same definition on every device, so that a private and an ordinary step can be set beside each other: weights and
optimizer state exist before either step and are in neither figure.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import torch


def peak_bytes(work: Callable[[], None], device: torch.device) -> int | None:
    """Run ``work`` once and measure its peak.

    Args:
        work: What to measure.
        device: Where it computes.

    Returns:
        Bytes, or ``None`` where the device offers no measure.
    """
    if device.type == "cuda":
        return _peak_cuda(work, device)
    if device.type == "cpu":
        return _peak_cpu(work)
    work()
    return None


def _peak_cuda(work: Callable[[], None], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


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
