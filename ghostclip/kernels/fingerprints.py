"""Fingerprints: whole numbers by which rows, and contents of tensors, are known again after copies, moves, reordering.

They are sums of whole numbers, which are exact in any order: the same on every device, and made where the values lie.

Shape letters: K tensors, B rows, V values of a row that are read, N values of a tensor, M rows of `WIDTH` of them,
C constants.
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

WIDTH: Final = 4096
"""Values of a content that are added up at once."""

_ROWS: Final = {"cpu": 16}
_ROWS_ON_GPU: Final = 1024
# Multipliers of the mixing, and what tells a content's two numbers and the places of its rows apart.
_MIXING: Final = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_PLACES: Final = (0x1E3779B97F4A7C15, 0x5851F42D4C957F2D)

# An arbitrary constant: with it, numbers that differ by as much as others do not collide.
_SHIFT: Final = 0x2545F4914F6CDD1D
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def row_fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Return fingerprints of rows, int64, ``(K, B)``: ``Σ_v w_v·x_v·(x_v + c)`` modulo 2^64, x_v a value's bits.

    Cost:
        Reads at most `MAX_VALUES` values a row; no device wait.
    """
    # The weights add up to zero, so that a row of one repeated value has fingerprint 0: it does not tell where it comes
    # from. Two other rows share one with probability about 2^-64 if the values read differ.
    selected = [_selected(tensor.detach()) for tensor in tensors]
    bits_KBV = (torch.stack(selected) if len(selected) > 1 else selected[0].unsqueeze(0)).to(torch.int64)
    weight_V = _weights(bits_KBV.shape[2], bits_KBV.device)
    return (bits_KBV + _SHIFT).mul_(bits_KBV).mul_(weight_V).sum(2)


def content_prints(flats: Sequence[Tensor]) -> Tensor:
    """Return two fingerprints of the tensors' content: ``Σ_m mix(Σ_v w_v·x_mv + (m + 1)·c)`` modulo 2^64 for two c.

    Cost:
        One pass, two operations and 20 bytes of traffic a 32-bit value; bounded temporary memory; no device wait.
    """
    # x_mv are the bits of value v of row m; rows are `WIDTH` values and are counted over all tensors. Contents that
    # differ by chance agree with probability about 2^-64; an adversary can construct two that agree.
    parts = [part for flat_N in flats for part in _row_sums(flat_N.detach())]
    if not parts:
        return torch.zeros(2, dtype=torch.int64).to(flats[0].device)
    sums_M = torch.cat(parts)
    place_M = torch.ones_like(sums_M).cumsum_(0)
    mixed_CM = torch.stack([place_M * c for c in _PLACES]).add_(sums_M)
    for multiplier in _MIXING:
        mixed_CM = (mixed_CM ^ ((mixed_CM >> 31) & (2**33 - 1))).mul_(multiplier)
    return (mixed_CM ^ ((mixed_CM >> 32) & (2**32 - 1))).sum(1)


def _row_sums(flat_N: Tensor) -> list[Tensor]:
    """Return the weighted sums of a tensor's rows, one after the other."""
    bits_N = flat_N.view(_BITS.get(flat_N.element_size(), torch.int64))
    weight_V = _weights_of_row(flat_N.device)
    whole, rest = divmod(len(bits_N), WIDTH)
    parts = []
    if whole:
        rows_MV = bits_N.narrow(0, 0, whole * WIDTH).view(whole, WIDTH)
        step = min(whole, _ROWS.get(flat_N.device.type, _ROWS_ON_GPU))
        product_MV = bits_N.new_empty((step, WIDTH), dtype=torch.int64)
        for part_MV in rows_MV.split(step):
            # Of different types, so that no copy in 64 bits is made first.
            product = torch.mul(part_MV, weight_V, out=product_MV.narrow(0, 0, len(part_MV)))
            parts.append(product.sum(1))
    if rest:
        parts.append((bits_N.narrow(0, whole * WIDTH, rest) * weight_V.narrow(0, 0, rest)).sum(0, keepdim=True))
    return parts


def read_prints(prints: Sequence[Tensor]) -> list[list[int]]:
    """Copy the results of `content_prints` to the host, once for each device."""
    of_device: dict[torch.device, list[int]] = {}
    for place, found in enumerate(prints):
        of_device.setdefault(found.device, []).append(place)
    numbers: dict[int, list[int]] = {}
    for places in of_device.values():
        numbers.update(zip(places, torch.stack([prints[place] for place in places]).tolist(), strict=True))
    return [numbers[place] for place in range(len(prints))]


def is_readable(tensor: Tensor) -> bool:
    """Return whether rows can have fingerprints other than 0: strided tensors with several values per row."""
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


@lru_cache(maxsize=16)
def _weights_of_row(device: torch.device) -> Tensor:
    drawn = np.random.default_rng(1).integers(0, 2**64, WIDTH, dtype=np.uint64) | np.uint64(1)
    return torch.from_numpy(drawn.view(np.int64)).to(device)
