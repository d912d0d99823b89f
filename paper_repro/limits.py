"""A limit on this process's memory: an engine that wants too much fails by itself, and takes nobody with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.harness import short_of_memory
from ghostclip._memory import status_bytes

# Of what the machine has free when a run starts.
SHARE_OF_FREE = 0.85


def free_bytes() -> int | None:
    """Count what the machine could still give.

    Returns:
        Bytes, or None where Linux's table is missing.
    """
    table = Path("/proc/meminfo")
    if not table.exists():
        return None
    fields = dict(line.split(":", 1) for line in table.read_text(encoding="utf-8").splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


@contextmanager
def cap(limit: float, device: torch.device) -> Iterator[None]:
    """Let allocations fail beyond a limit, as on a smaller machine.

    Args:
        limit: Bytes above what the process holds now; on a GPU, of everything its allocator gives out.
        device: Where tensors are.

    Yields:
        Nothing.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((status_bytes("VmData") or 0) + int(limit), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def reason(problem: BaseException) -> str:
    """Say in one line why an engine failed.

    Args:
        problem: What it raised.

    Returns:
        "out of memory", or the error's class and first line.
    """
    if short_of_memory(problem):
        return "out of memory"
    lines = str(problem).strip().splitlines() or [""]
    return f"{type(problem).__name__}: {lines[0]}"[:200]
