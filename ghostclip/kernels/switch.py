"""The one switch of all kernels, and whether this machine can run them.

A kernel is a matter of speed alone: with the switch off every value is formed by the kernel's twin in plain PyTorch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Final

import torch

from ghostclip._validate import choice

VARIABLE: Final = "GHOSTCLIP_KERNELS"
"""Environment variable that holds the mode where `set_mode` was not called."""

MODES: Final = ("auto", "on", "off")

DEFAULT: Final = "off"
"""Off until a run of `python -m benchmarks.kernels` on a GPU is committed: what they save, and that bounds hold."""

_set: list[str] = []


def mode() -> str:
    """Return the mode in force."""
    # "auto" (kernels where they are expected to pay), "on" (wherever they can run) or "off".
    return _set[-1] if _set else choice(os.environ.get(VARIABLE, DEFAULT), VARIABLE, MODES)


def set_mode(wanted: str) -> None:
    """Set the mode, one of `MODES`, for the whole process, whatever the environment says."""
    _set[:] = [choice(wanted, "mode", MODES)]


@contextmanager
def using(wanted: str) -> Iterator[None]:
    """Set the mode, one of `MODES`, within the block."""
    _set.append(choice(wanted, "mode", MODES))
    try:
        yield
    finally:
        _set.pop()


@lru_cache(maxsize=1)
def installed() -> bool:
    """Return whether Triton is installed; it is not loaded by this."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU, which is how they are tested without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_on(device: torch.device) -> bool:
    """Return whether kernels can run on a device: a GPU with Triton installed."""
    return installed() and (device.type == "cuda" or interpreted())
