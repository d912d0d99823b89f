"""Peak memory of a piece of work, and the memory that is left.

On CUDA the allocator tells. On the CPU `PeakMemory` reads the resident set, which finds out what fits, and `peak_bytes`
the events of torch's allocator, which compares steps of one process: the C library hands out again what earlier steps
have freed, so that the resident set hardly moves.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

_SELF = Path("/proc/self")
_SAMPLING_SECONDS = 0.002
# What libraries below torch say, which raise no error of its own class: they ask for memory beside its allocator.
_MESSAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory ran out, so that a smaller piece of work may succeed."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


def status_bytes(field: str, file: Path = _SELF / "status") -> int | None:
    """Return a field of `/proc/self/status`, such as "VmRSS", or of a file like it, in bytes; None without the file."""
    try:
        text = file.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def glibc() -> ctypes.CDLL | None:
    """Return the C library that this process allocates with, if it is glibc."""
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def _return_freed() -> None:
    """Return to the system what the allocator keeps of freed memory: a step would take it unseen."""
    if (library := glibc()) is not None:
        library.malloc_trim(0)


def _high_water_since_start() -> int:
    """Return the largest resident set of this process so far, in bytes, where there is no /proc."""
    import resource  # only where it is called: the module does not exist on Windows

    kilo = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilo


def available_bytes(device: torch.device) -> int | None:
    """Return how many more bytes this process can allocate on a device; None where the system does not say."""
    # On the CPU the smaller of what the system and the control group leave, on CUDA what the driver has free plus what
    # torch's allocator has cached.
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    rooms = status_bytes("MemAvailable", Path("/proc/meminfo")), _cgroup_room()
    return min((room for room in rooms if room is not None), default=None)


def _cgroup_room() -> int | None:
    """Return how much this process's control group may still take, in bytes; None without a limit."""
    root = Path("/sys/fs/cgroup")
    pairs = ("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
    for limit_name, used_name in pairs:
        try:
            limit, used = (root / limit_name).read_text().strip(), (root / used_name).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            return max(0, int(limit) - int(used))
    return None


class PeakMemory:
    """Peak of memory between `start()` and `stop()`."""

    # On CUDA the allocator's own counter is reset. On Linux the kernel's high-water mark of the resident set is reset;
    # where that is not allowed a thread samples the resident set, and elsewhere the mark since the process began is
    # used, which can only be too high.
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sampler: _ResidentSampler | None = None

    def in_use(self) -> int:
        """Return the bytes in use now."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        _return_freed()
        return status_bytes("VmRSS") or _high_water_since_start()

    def start(self) -> None:
        """Begin to measure; an unfinished measurement is dropped."""
        if self._sampler is not None:
            self._sampler.finish()
            self._sampler = None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        _return_freed()
        try:
            (_SELF / "clear_refs").write_text("5")
        except OSError:
            if status_bytes("VmRSS") is not None:
                self._sampler = _ResidentSampler()
                self._sampler.start()

    def stop(self) -> int:
        """Return the peak since `start()`, in bytes."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_allocated(self._device)
        if self._sampler is not None:
            sampler, self._sampler = self._sampler, None
            return sampler.finish()
        return status_bytes("VmHWM") or _high_water_since_start()

    def above(self, work: Callable[[], object]) -> int:
        """Run a piece of work and return its peak above what is in use before it, in bytes."""
        self.start()
        before = self.in_use()
        work()
        return max(0, self.stop() - before)


class _ResidentSampler(threading.Thread):
    """Reads the resident set every few milliseconds; torch's operations let other threads run meanwhile."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._done = threading.Event()
        self._peak = 0

    def run(self) -> None:
        """Sample until `finish` is called."""
        while not self._done.wait(_SAMPLING_SECONDS):
            self._look()

    def _look(self) -> None:
        self._peak = max(self._peak, status_bytes("VmRSS") or 0)

    def finish(self) -> int:
        """Stop and return the largest resident set, in bytes."""
        self._done.set()
        self.join()
        self._look()
        return self._peak


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
