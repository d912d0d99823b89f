"""What a measurement was made on and with: a number without its machine says nothing."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from ghostclip._memory import glibc

PACKAGES = ("torch", "opacus", "jax", "jaxlib", "backpack-for-pytorch", "transformers", "numpy", "scipy", "opt_einsum")

# Of glibc's mallopt: free memory that stays, what is asked for beyond need, and the most mappings of their own.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_heap_is_kept = False


def keep_heap() -> None:
    """Keep what the C library has been given for the life of this process, where it is glibc.

    By default large tensors are given back when they are freed and asked for anew, a page fault for every 4 KiB.
    Whether that happens depends on what lies beside them in the heap: of engines that take turns in one process some
    pay for tens of thousands of faults a step and others for none, and which of them is chance.
    """
    global _heap_is_kept  # noqa: PLW0603 - it is a property of the process
    if (library := glibc()) is not None:
        options = (_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 1 << 26)
        _heap_is_kept = all(library.mallopt(*option) for option in options)


def describe(device: torch.device) -> dict[str, object]:
    """Describe the machine, the versions and the code."""
    about: dict[str, object] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "device": str(device),
        "heap_is_kept": _heap_is_kept,
        **_commit(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about["gpu"] = properties.name
        about["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        about["cuda"] = torch.version.cuda
        about["tf32"] = torch.backends.cuda.matmul.allow_tf32
    return about


def exact_float32() -> None:
    """Switch TF32 off: engines are compared, and checked, in the float32 that they are said to be in."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", information.read_text(), flags=re.MULTILINE)
        if match:
            return match.group(1).strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None  # not a POSIX system


def _commit() -> dict[str, object]:
    """The commit of the code, and whether files that git follows differ from it."""
    root = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    changed = git(
        "status", "--porcelain", "--untracked-files=no", "--", ":/ghostclip", ":/benchmarks/*.py", ":/paper_repro/*.py"
    )
    return {"commit": git("rev-parse", "HEAD"), "changed_since_commit": bool(changed) if changed is not None else None}
