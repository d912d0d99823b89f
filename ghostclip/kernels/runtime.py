"""What kernels ask of the machine they run on: the switch, a kernel or its twin, room for temporaries, host reads.

A kernel is a matter of speed alone: with the switch off every value is formed by the kernel's twin in plain PyTorch. A
kernel is compared with its twin on a small problem before it is first used on a device. If they differ, or the kernel
does not compile there, the twin is used from then on and a warning says so.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from ghostclip._memory import available_bytes
from ghostclip._validate import choice
from ghostclip.kernels.bounds import HALF, Bounded

_log = logging.getLogger(__name__)

ON_CPU: Final = 1 << 22
"""Elements on a CPU (float32: 16 MiB), where larger ones are slower, and the least elsewhere."""

MOST: Final = 1 << 27
"""The most elements (float32: 512 MiB): Gram matrices of all samples at once."""

# Of what is free: two temporaries at a time, and as much again for whatever else the backward allocates.
_SHARE: Final = 4

_found: dict[torch.device, int] = {}


def elements(device: torch.device) -> int:
    """Return how many elements a temporary may have."""
    # On a GPU a share of free memory, asked once between calls of `renew`.
    if device.type != "cuda":
        return ON_CPU
    if device not in _found:
        _found[device] = min(MOST, max(ON_CPU, (available_bytes(device) or 0) // torch.float32.itemsize // _SHARE))
    return _found[device]


def renew() -> None:
    """Drop the cached free memory, as another backward begins."""
    _found.clear()


# As deep as `none` is entered.
_none: list[None] = []


def wait(tensor: Tensor) -> bool:
    """Return whether reading a value of a tensor waits for its device, or is not allowed."""
    return bool(_none) or tensor.device.type != "cpu"


def traced() -> bool:
    """Return whether operations are written down, and none runs."""
    return bool(_none)


@contextmanager
def none() -> Iterator[None]:
    """Forbid reads of values within the block, as where operations are traced and none runs."""
    _none.append(None)
    try:
        yield
    finally:
        _none.pop()


VARIABLE: Final = "GHOSTCLIP_KERNELS"
"""Environment variable that holds the mode where `set_mode` was not called."""

MODES: Final = ("auto", "on", "off")

DEFAULT: Final = "auto"
"""Where an H100 showed that they pay: a step of two large models in 16 bits took 0.73 and 0.78 times as long."""

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


SMALL: Final = 64
"""Rows and columns of a kernel's tile that any GPU holds in registers, in float32 as well."""

LARGE: Final = 128
"""Those of a tile that keeps matrix units busy with 16-bit numbers: each that is read takes part in 128 products."""

AGREEMENT: Final = 1e-4
"""Largest relative difference of a kernel from its twin, over a tensor: rounding is far below, mistakes far above."""


_PLAIN: Final = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class Twins:
    """A kernel and its plain-PyTorch twin, with the choice between them."""

    name: str
    naive: Callable[..., Any]  # the twin in PyTorch
    fast: Callable[..., Any]  # the kernel
    # each makes new arguments for the check on a device: odd sizes, one for every way of starting the kernel
    examples: tuple[Callable[[torch.device], tuple[Any, ...]], ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, *HALF)  # that the kernel takes
    _trusted: dict[torch.device, bool] = field(default_factory=dict)  # whether kernel and twin agreed there

    def pick(self, *tensors: Tensor, pays: bool = True) -> Callable[..., Any]:
        """Return the kernel where it is allowed, can run and agrees with the twin; otherwise the twin."""
        # `pays`: the kernel is expected to be faster; ignored in mode "on".
        device = tensors[0].device
        # Triton starts a kernel on the current device, wherever its tensors are.
        if not runs_on(device) or (device.type == "cuda" and device.index != torch.cuda.current_device()):
            return self.naive
        in_force = mode()
        if in_force == "off" or not (pays or in_force == "on"):
            return self.naive
        # What stands for a tensor, where operations are traced, has no memory that a kernel could be given.
        fits = all(
            tensor.dtype in self.dtypes and tensor.device == device and type(tensor) in _PLAIN for tensor in tensors
        )
        return self.fast if fits and self.trusted(device) else self.naive

    def trusted(self, device: torch.device) -> bool:
        """Return whether the kernel agrees with its twin on a device."""
        # Compared once per process, with a warning if not.
        if device not in self._trusted:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return False
            self._trusted[device] = self._compare(device)
        return self._trusted[device]

    def _compare(self, device: torch.device) -> bool:
        """Run kernel and twin on the examples; log why the kernel is not used, if so."""
        try:
            difference = self.difference(device)
        except Exception as problem:  # noqa: BLE001 - whatever a compiler or driver raises, the twin still works
            _log.warning("kernel %s does not run on %s (%s); plain PyTorch is used.", self.name, device, problem)
            return False
        if not difference <= AGREEMENT:
            _log.warning(
                "kernel %s is off by %.1e on %s; plain PyTorch is used. %s=off turns every kernel off.",
                *(self.name, difference, device, VARIABLE),
            )
        return difference <= AGREEMENT

    def difference(self, device: torch.device) -> float:
        """Return the largest relative difference between kernel and twin on the examples."""
        return max(difference(self.fast(*make(device)), self.naive(*make(device))) for make in self.examples)


# How much smaller a kernel's error bound may be than its twin's.
_SMALLER: Final = 8


def difference(got: Any, wanted: Any) -> float:
    """Return the largest relative difference between the results of a kernel and its twin."""
    # Error bounds are not equal, as a twin measures its own rounding: infinite where one is much smaller.
    if isinstance(got, Tensor):
        return relative_difference(got, wanted)
    if isinstance(got, Bounded):
        covered = bool((got.error_N * _SMALLER >= wanted.error_N).all())
        return relative_difference(got.value_N, wanted.value_N) if covered else float("inf")
    return max(difference(one, other) for one, other in zip(got, wanted, strict=True))


def relative_difference(got: Tensor, wanted: Tensor) -> float:
    """Return the relative error, by the largest wanted value; infinite for other shapes or non-finite values."""
    if got.shape != wanted.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    if got.numel() == 0:
        return 0.0
    largest = max(wanted.double().abs().max().item(), 1e-30)
    return (got.double() - wanted.double()).abs().max().item() / largest


def generator() -> torch.Generator:
    """Return a generator for examples: the user's global one is left as it is."""
    return torch.Generator().manual_seed(20_24)


def is_half(left: Tensor, right: Tensor) -> bool:
    """Return whether both tensors are 16-bit: matrix units take them as they are, the twin copies them to 32 bits."""
    return left.dtype in HALF and right.dtype in HALF
