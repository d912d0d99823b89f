"""A kernel and its twin in plain PyTorch under one name, and the choice between them.

A kernel is compared with its twin on a small problem before it is first used on a device. If they differ, or the kernel
does not compile there, the twin is used from then on and a warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from ghostclip.kernels import switch
from ghostclip.kernels.bounds import Bounded
from ghostclip.kernels.products import HALF

_log = logging.getLogger(__name__)

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
    naive: Callable[..., Any]
    fast: Callable[..., Any]
    # each makes new arguments for the check on a device: odd sizes, one for every way of starting the kernel
    examples: tuple[Callable[[torch.device], tuple[Any, ...]], ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, *HALF)
    _trusted: dict[torch.device, bool] = field(default_factory=dict)

    def pick(self, *tensors: Tensor, pays: bool = True) -> Callable[..., Any]:
        """Return the kernel where it is allowed, can run and agrees with the twin; otherwise the twin."""
        # `pays`: the kernel is expected to be faster; ignored in mode "on".
        device = tensors[0].device
        # Triton starts a kernel on the current device, wherever its tensors are.
        if not switch.runs_on(device) or (device.type == "cuda" and device.index != torch.cuda.current_device()):
            return self.naive
        mode = switch.mode()
        if mode == "off" or not (pays or mode == "on"):
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
        try:
            difference = self.difference(device)
        except Exception as problem:  # noqa: BLE001 - whatever a compiler or driver raises, the twin still works
            _log.warning("kernel %s does not run on %s (%s); plain PyTorch is used.", self.name, device, problem)
            return False
        if not difference <= AGREEMENT:
            _log.warning(
                "kernel %s is off by %.1e on %s; plain PyTorch is used. %s=off turns every kernel off.",
                *(self.name, difference, device, switch.VARIABLE),
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
    """Return the largest difference over the largest wanted value; infinite for other shapes or non-finite values."""
    if got.shape != wanted.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    if got.numel() == 0:
        return 0.0
    largest = max(wanted.double().abs().max().item(), 1e-30)
    return (got.double() - wanted.double()).abs().max().item() / largest


def generator() -> torch.Generator:
    """Return a generator for examples: the user's global one is left as it is."""
    return torch.Generator().manual_seed(20_24)


def is_half(*tensors: Tensor) -> bool:
    """Return whether all tensors are 16-bit: matrix units take them as they are, the twin copies them to 32 bits."""
    return all(tensor.dtype in HALF for tensor in tensors)
