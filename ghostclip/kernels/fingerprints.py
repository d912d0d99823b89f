"""Fingerprints of rows: whole numbers by which a row is known again after copies, moves and reordering.

Shape letters: K tensors, B rows, V values of a row that are read.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

BLOCKS: Final = 8
BLOCK: Final = 16
MAX_VALUES: Final = BLOCKS * BLOCK
"""Values of a row that are read at most, in evenly spread blocks: what lies side by side is read at once."""

# An arbitrary constant: with it, numbers that differ by as much as others do not collide.
_SHIFT: Final = 0x2545F4914F6CDD1D
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def row_fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Return the fingerprints of the rows of some tensors: Σ_v w_v·x_v·(x_v + c) modulo 2^64, x_v a value's bits.

    The weights add up to zero, so that a row of one value repeated (zeros, a single number) has fingerprint 0: it says
    nothing about where it comes from. Two other rows share one with probability about 2^-64, if what is read of them
    differs. Integer arithmetic is exact, so neither device, memory layout nor the other rows matter.

    Args:
        tensors: Strided, of one shape ``(B, ...)``, dtype and device.

    Returns:
        Shape ``(K, B)``, int64, on the tensors' device.

    Cost:
        Reads at most `MAX_VALUES` values a row; no device wait.
    """
    selected = [_selected(tensor.detach()) for tensor in tensors]
    bits_KBV = (torch.stack(selected) if len(selected) > 1 else selected[0].unsqueeze(0)).to(torch.int64)
    weight_V = _weights(bits_KBV.shape[2], bits_KBV.device)
    return (bits_KBV + _SHIFT).mul_(bits_KBV).mul_(weight_V).sum(2)


def is_readable(tensor: Tensor) -> bool:
    """Return whether rows of a tensor can have fingerprints other than 0.

    Args:
        tensor: Any tensor.

    Returns:
        True for strided ones with several values a row.
    """
    strided = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    return strided and tensor.dim() > 1 and tensor.shape[0] > 0 and tensor.numel() > tensor.shape[0]


def _selected(tensor: Tensor) -> Tensor:
    """Return the bits of values of each row as integers, shape ``(B, V)``."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    count = math.prod(tensor.shape[1:])
    step = (count - BLOCK) // (BLOCKS - 1)
    if count <= MAX_VALUES:
        rows = tensor.reshape(len(tensor), -1)
    elif tensor.is_contiguous():
        rows = tensor.view(len(tensor), -1).unfold(1, BLOCK, step)[:, :BLOCKS]
    else:
        places = torch.unravel_index(_places(step, tensor.device), tensor.shape[1:])
        chosen: tuple[Any, ...] = (slice(None), *places)
        rows = tensor[chosen]
    return rows.view(_BITS[rows.element_size()]).reshape(len(tensor), -1)


@lru_cache(maxsize=64)
def _places(step: int, device: torch.device) -> Tensor:
    starts = torch.arange(BLOCKS, device=device).mul(step).unsqueeze(1)
    return (starts + torch.arange(BLOCK, device=device)).flatten()


@lru_cache(maxsize=1024)
def _weights(count: int, device: torch.device) -> Tensor:
    """Return fixed odd weights that add up to zero modulo 2^64, the last of them whatever that takes."""
    drawn = np.random.default_rng(0).integers(0, 2**64, MAX_VALUES * 2, dtype=np.uint64) | np.uint64(1)
    drawn = drawn[:count]
    # On an array, for numpy warns where a scalar overflows.
    drawn[-1:] = -drawn[:-1].sum(keepdims=True)
    return torch.from_numpy(drawn.view(np.int64)).to(device)
