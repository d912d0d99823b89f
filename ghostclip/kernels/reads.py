"""Reads of tensors' values by the host: on a device other than the CPU each waits until all that was begun is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

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
