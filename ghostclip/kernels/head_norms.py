"""Squared norms of a vocabulary head's per-sample gradients, from the tiles of `ghostclip.kernels.head`.

A Gram matrix of the logits' gradients is additive over tiles, ``G_s·G_t = Σ_tiles G_s[tile]·G_t[tile]``, and so is the
square of the gradient itself, ``‖GᵀA‖² = Σ_tiles ‖G[tile]ᵀA‖²``: neither needs the logits of a sample at once.

Shape letters: C samples of a chunk, T positions, I features of a hidden state, V entries of the vocabulary, K of those
in a tile.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from ghostclip.kernels.bounds import (
    UNSEEN_DRIFT,
    Bounded,
    Product,
    Unfinished,
    block_norms,
    dots,
    finished_one,
    masses,
    position_norms,
    product_norms,
    raised,
    root_of_squares,
    sum_of_squares,
    sum_rounding,
    unit_roundoff,
)
from ghostclip.kernels.gram import WORKSPACE
from ghostclip.kernels.head import Collector

LARGEST: Final = 4 * WORKSPACE
"""Entries of the largest Gram matrix that is held while tiles are added to it (float32: 64 MiB, at 4096 positions)."""

SUBTILE: Final = WORKSPACE // 4
"""Elements of gradients that are formed at a time."""

_SEEN: Final = 8
"""Positions from which on a diagonal shows how products are rounded."""


@lru_cache(maxsize=4096)
def bands(positions: int) -> tuple[slice, ...]:
    """Return slices of the rows of a symmetric matrix, each of which is formed up to its own diagonal block."""
    # More bands for longer sequences, up to 16: products thinner than 32 rows cost more than they save.
    count = max(1, min(16, positions // 32))
    height = -(-positions // count)
    return tuple(slice(start, min(start + height, positions)) for start in range(0, positions, height))


def norm_flops(positions: int, inputs: int, vocabulary: int) -> int:
    """Return the FLOPs of one sample's squared norm."""
    if positions <= 1:
        return 0
    return min(_gram_flops(positions, inputs, vocabulary), 2 * positions * inputs * vocabulary)


def prefers_gram(positions: int, inputs: int, vocabulary: int) -> bool:
    """Return whether the Gram matrix costs less than the gradient and fits `LARGEST`."""
    return _gram_flops(positions, inputs, vocabulary) < 2 * positions * inputs * vocabulary


def _gram_flops(positions: int, inputs: int, vocabulary: int) -> int:
    if positions**2 > LARGEST:
        return 1 << 62
    return 2 * (inputs + vocabulary) * sum((band.stop - band.start) * band.stop for band in bands(positions))


class Norms(Collector):
    """Accumulator of squared norms over the tiles of one chunk."""

    @abstractmethod
    def found(self) -> Bounded:
        """Return the squared norms once all tiles are in, each of shape ``(C,)``."""


def norms_of(a_CTI: Tensor, vocabulary: int) -> Norms:
    """Return the accumulator of a chunk's squared norms in the cheaper form."""
    if a_CTI.shape[1] <= 1:
        return _OnePosition(a_CTI, vocabulary)
    if prefers_gram(a_CTI.shape[1], a_CTI.shape[2], vocabulary):
        return _Gram(a_CTI, vocabulary)
    return _Formed(a_CTI, vocabulary)


class _Measured(Norms):
    """Norms of positions, which every form needs for its error."""

    def __init__(self, a_CTI: Tensor, vocabulary: int) -> None:
        self._a_CTI, self._sizes = a_CTI, (a_CTI.shape[2], vocabulary)
        self._a_CT = position_norms(a_CTI)
        self._tiles: list[Tensor] = []

    def take(self, tile: slice, g_CTK: Tensor) -> None:
        """Note the norms of a tile's positions."""
        self._tiles.append(position_norms(g_CTK).flatten().unsqueeze(1))

    @property
    def _g_CT(self) -> Tensor:
        return root_of_squares(self._tiles).view_as(self._a_CT)


class _OnePosition(_Measured):
    """Products of two norms: one position meets no other."""

    def found(self) -> Bounded:
        norms = product_norms([Product([self._a_CT], self._g_CT, self._sizes)])
        measured = masses(self._a_CT, self._g_CT, *self._sizes)
        value_C = sum_of_squares(norms)
        return Bounded(value_C, torch.zeros_like(value_C), measured.mass_N, measured.scale_N)


class _Gram(_Measured):
    """``Σ_{s,t} (a_s·a_t)(g_s·g_t)``, the bands on and below the diagonal. Cost: `norm_flops`."""

    def __init__(self, a_CTI: Tensor, vocabulary: int) -> None:
        super().__init__(a_CTI, vocabulary)
        self._seen = a_CTI.dtype == torch.float32 and a_CTI.shape[1] >= _SEEN
        samples, self._bands = a_CTI.shape[0], bands(a_CTI.shape[1])
        self._sums = [a_CTI.new_zeros(samples, band.stop - band.start, band.stop) for band in self._bands]

    def take(self, tile: slice, g_CTK: Tensor) -> None:
        """Add a tile's dot products."""
        super().take(tile, g_CTK)
        for band, sum_CRU in zip(self._bands, self._sums, strict=True):
            if self._seen:
                sum_CRU.baddbmm_(g_CTK[:, band], g_CTK[:, : band.stop].mT)
            else:
                sum_CRU.add_(dots(g_CTK[:, band], g_CTK[:, : band.stop]))

    def found(self) -> Bounded:
        values, absolutes, squares = [], [], []
        for band, g_CRU in zip(self._bands, self._sums, strict=True):
            left_CRI, right_CUI = self._a_CTI[:, band], self._a_CTI[:, : band.stop]
            a_CRU = torch.bmm(left_CRI, right_CUI.mT) if self._seen else dots(left_CRI, right_CUI)
            if self._seen:
                squares.append(torch.stack([part.diagonal(band.start, 1, 2) for part in (a_CRU, g_CRU)]))
            # Entries before the diagonal block stand for those behind it as well.
            a_CRU[:, :, : band.start] *= 2
            entry_CE = a_CRU.mul_(g_CRU).flatten(1)
            values.append(entry_CE.sum(1))
            absolutes.append(entry_CE.abs_().sum(1))
        value_C, absolute_C = (torch.stack(parts).sum(0) for parts in (values, absolutes))
        square_KCT = torch.cat(squares, 2) if squares else None
        unseen = None if self._seen else UNSEEN_DRIFT * unit_roundoff(value_C.dtype)
        return finished_one(Unfinished(value_C, self._a_CT, self._g_CT, self._sizes, absolute_C, square_KCT, unseen))


class _Formed(_Measured):
    """Gradients formed a few entries of the vocabulary at a time, squared and dropped. Cost: 2·T·I·V per sample."""

    def __init__(self, a_CTI: Tensor, vocabulary: int) -> None:
        super().__init__(a_CTI, vocabulary)
        self._norms: list[Tensor] = []
        self._width = max(16, SUBTILE // max(1, a_CTI.shape[0] * a_CTI.shape[2]))

    def take(self, tile: slice, g_CTK: Tensor) -> None:
        """Form a tile's gradients."""
        super().take(tile, g_CTK)
        for part_CTK in g_CTK.split(self._width, 2):
            grad_CKI = torch.bmm(part_CTK.mT, self._a_CTI)
            self._norms += [root_of_squares(block_norms(grad_CKI.flatten(1))).unsqueeze(1)]

    def found(self) -> Bounded:
        value_C = sum_of_squares(self._norms)
        measured = masses(self._a_CT, self._g_CT, *self._sizes)
        delta_C = sum_rounding(measured.lost_N, measured.scale_N, unit_roundoff(value_C.dtype))
        return Bounded(value_C, raised(value_C, delta_C), measured.mass_N, measured.scale_N)
