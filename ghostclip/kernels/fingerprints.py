"""Fingerprints: whole numbers by which contents of tensors are known again after copies and moves.

They are sums of whole numbers, which are exact in any order: the same on every device, and made where the values lie.

Shape letters: N values of a tensor, M rows of `WIDTH` of them, V values of a row, C constants.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

WIDTH: Final = 4096
"""Values of a content that are added up at once."""

_ROWS: Final = {"cpu": 16}
_ROWS_ON_GPU: Final = 1024
# Multipliers of the mixing, and what tells a content's two numbers and the places of its rows apart.
_MIXING: Final = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_PLACES: Final = (0x1E3779B97F4A7C15, 0x5851F42D4C957F2D)

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    for index, fingerprint in enumerate(prints):
        of_device.setdefault(fingerprint.device, []).append(index)
    numbers: dict[int, list[int]] = {}
    for indices in of_device.values():
        numbers.update(zip(indices, torch.stack([prints[index] for index in indices]).tolist(), strict=True))
    return [numbers[index] for index in range(len(prints))]


@lru_cache(maxsize=16)
def _weights_of_row(device: torch.device) -> Tensor:
    """Return the odd 64-bit factors of a row's values, the same in every process."""
    drawn = np.random.default_rng(1).integers(0, 2**64, WIDTH, dtype=np.uint64) | np.uint64(1)
    return torch.from_numpy(drawn.view(np.int64)).to(device)
