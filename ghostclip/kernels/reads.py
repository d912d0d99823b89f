"""Reads of tensors' values by the host: on a device other than the CPU each waits until all that was begun is done."""

from __future__ import annotations

from torch import Tensor


def wait(tensor: Tensor) -> bool:
    """Return whether reading a value of a tensor waits for its device."""
    return tensor.device.type != "cpu"
