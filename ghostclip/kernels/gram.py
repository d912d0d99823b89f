"""Squared norms from a symmetric Gram matrix: ``Σ_{s,t} (a_s·a_t)(g_s·g_t)``, the blocks on and above the diagonal.

Shape letters: N samples (times slots), T positions, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final, TypeAlias

import torch
from torch import Tensor

from ghostclip.kernels.bounds import Bounded, gram_error, position_scale, widened
from ghostclip.kernels.twins import Twins, generator, is_half

Factors: TypeAlias = tuple[Tensor, Tensor]

LEAF: Final = 16
"""Positions of the smallest blocks on the diagonal of a long sequence: thinner products are slower than they save."""

NARROW: Final = 1024
"""Inputs and outputs together up to which blocks half as large pay."""

LARGEST_LEAF: Final = 1024
"""Positions of the largest: it must fit the workspace."""

WORKSPACE: Final = 1 << 22
"""Elements of the Gram matrices that the twin holds at a time (float32: 16 MiB)."""

CACHED: Final = 1 << 20
"""Elements of both factors that the twin reads at a time on a CPU, for each thread (float32: 4 MiB): every level of the
Gram reads them, and more would come from memory every time."""


def symmetric_gram(a_NTI: Tensor, g_NTO: Tensor, *, workspace: int = WORKSPACE) -> Bounded:
    """Return squared norms of ``Σ_t g_t ⊗ a_t`` without a T×T tensor.

    The double sum cancels when positions oppose each other; ``error_N`` bounds what rounding may have hidden.

    Cost: `gram_entries` · 2·(I+O) a sample, little more than T²·(I+O). The kernel stores no part of the Gram matrix
    and takes 16-bit tensors as they are; the twin stores at most ``workspace`` elements of it.

    Args:
        a_NTI: Layer inputs, shape ``(N, T, I)``, floating-point or complex.
        g_NTO: Gradients of the layer outputs, shape ``(N, T, O)``.
        workspace: Elements that the twin may hold at a time, of Gram matrices and of widened copies each.

    Returns:
        Squared norms, which may be slightly negative, and a bound in proportion to ``Σ_t |a_t|²·|g_t|²``; float64 for
        float64, else float32.

    Privacy:
        ``value_N + error_N`` is at least the true squared norm, whichever way it was formed.
    """
    if a_NTI.shape[1] <= 1 or not len(a_NTI):
        value_N = position_scale(a_NTI, g_NTO)
        return Bounded(value_N, torch.zeros_like(value_N))
    return TWINS.pick(a_NTI, g_NTO, pays=is_half(a_NTI, g_NTO))(a_NTI, g_NTO, workspace)


@lru_cache(maxsize=4096)
def gram_levels(positions: int, width: int) -> int:
    """Return how often the twin halves the Gram matrix.

    Args:
        positions: T.
        width: I + O.

    Returns:
        Three times or more for long sequences, so that at most an eighth of the lower triangle is formed; twice for
        shorter ones, as often as possible for the shortest.
    """
    if positions < 8 * LEAF:
        return min(2, max(0, positions.bit_length() - 1))
    fewest = 4 if positions >= 32 * LEAF or width <= NARROW else 3
    return max(fewest, ((positions - 1) // LARGEST_LEAF).bit_length())


@lru_cache(maxsize=4096)
def gram_entries(positions: int, width: int) -> int:
    """Return how many entries of one T×T Gram matrix the twin forms.

    Args:
        positions: T.
        width: I + O.

    Returns:
        The blocks above the diagonal, those on it, and the last rows where T cannot be halved evenly; about
        T²/2·(1 + 2^-levels). A diagonal of single entries needs no product.
    """
    levels = gram_levels(positions, width)
    leaf = positions >> levels
    whole = leaf << levels
    above = sum((1 << level) * (whole >> (level + 1)) ** 2 for level in range(levels))
    return above + (leaf**2 << levels if leaf > 1 else 0) + (positions - whole) * positions


def _naive(a_NTI: Tensor, g_NTO: Tensor, workspace: int) -> Bounded:
    samples, positions, inputs = a_NTI.shape
    outputs = g_NTO.shape[2]
    at_once = max(1, samples)
    if a_NTI.device.type == "cpu":
        cached = CACHED * torch.get_num_threads()
        at_once = max(1, min(workspace, cached) // max(1, positions * (inputs + outputs)))
    elif is_half(a_NTI, g_NTO):
        at_once = max(1, workspace // max(1, positions * (inputs + outputs)))
    found = [
        _halved(widened(a_NTI[start : start + at_once]), widened(g_NTO[start : start + at_once]), workspace)
        for start in range(0, max(1, samples), at_once)
    ]
    value_N, scale_N = (torch.cat(parts) for parts in zip(*found, strict=True)) if len(found) > 1 else found[0]
    return Bounded(value_N, gram_error(scale_N, inputs, outputs))


def _halved(a_NTI: Tensor, g_NTO: Tensor, workspace: int) -> tuple[Tensor, Tensor]:
    """Return the sum over the Gram matrices, ``(N,)``, and over their diagonals, of which rounding is a share."""
    samples, positions = a_NTI.shape[:2]
    levels = gram_levels(positions, a_NTI.shape[2] + g_NTO.shape[2])
    leaf = positions >> levels
    whole = leaf << levels
    first = _front(a_NTI, g_NTO, whole, workspace)
    above = []
    for level in range(levels):
        half = whole >> (level + 1)
        for a_MLI, g_MLO in _pieces(*first, 2 * half):
            upper, lower = (a_MLI[:, :half], g_MLO[:, :half]), (a_MLI[:, half:], g_MLO[:, half:])
            above.append(_sums(upper, lower, workspace).view(samples, -1))
    value, scale = [], []
    if leaf == 1:
        scale.append(position_scale(*first).view(samples, 1))
        value.append(scale[0])
    else:
        for block in _pieces(*first, leaf):
            parts = _products(block, block, workspace)
            value.append(parts[0].view(samples, -1))
            scale.append(parts[1].view(samples, -1))
    if whole < positions:
        last = a_NTI[:, whole:], g_NTO[:, whole:]
        above.append(_sums(last, first, workspace).view(samples, 1))
        inside = _products(last, last, workspace)
        value.append(inside[0].view(samples, 1))
        scale.append(inside[1].view(samples, 1))
    value_N = _total(value)
    return torch.add(value_N, _total(above), alpha=2) if above else value_N, _total(scale)


def _total(parts: list[Tensor]) -> Tensor:
    """Return sums over all parts, each of shape ``(N, m)``."""
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).sum(1)


def _front(a_NTI: Tensor, g_NTO: Tensor, whole: int, workspace: int) -> Factors:
    """Return the first positions of both factors; contiguous where that takes no more than the workspace."""
    a_NTI, g_NTO = a_NTI.narrow(1, 0, whole), g_NTO.narrow(1, 0, whole)
    if a_NTI.numel() + g_NTO.numel() > workspace:
        return a_NTI, g_NTO
    return a_NTI.contiguous(), g_NTO.contiguous()


def _pieces(a_NTI: Tensor, g_NTO: Tensor, size: int) -> Iterator[Factors]:
    """Yield the factors in pieces of ``size`` positions, ``(M, size, ...)``, all together where views allow."""
    if a_NTI.is_contiguous() and g_NTO.is_contiguous():
        yield a_NTI.view(-1, size, a_NTI.shape[2]), g_NTO.view(-1, size, g_NTO.shape[2])
        return
    for start in range(0, a_NTI.shape[1], size):
        yield a_NTI[:, start : start + size], g_NTO[:, start : start + size]


def _sums(rows: Factors, columns: Factors, workspace: int) -> Tensor:
    """Return sums of ``(a·a)(g·g)`` over all pairs of a row and a column, ``(M,)``."""
    return _products(rows, columns, workspace, trace=False)[0]


def _products(rows: Factors, columns: Factors, workspace: int, *, trace: bool = True) -> tuple[Tensor, Tensor]:
    """Return sums and, if wanted, traces of ``(a·a)(g·g)`` over all pairs of a row and a column, each ``(M,)``."""
    count, height = rows[0].shape[:2]
    width = columns[0].shape[1]
    at_once = max(1, workspace // (height * width))
    lines = height if at_once > 1 else max(1, min(height, workspace // width))
    if at_once >= count and lines == height:
        return _product(rows, columns, offset=0, trace=trace)
    sums = rows[0].new_zeros(2, count)
    for first in range(0, count, at_once):
        piece = slice(first, first + at_once)
        right = columns[0][piece], columns[1][piece]
        for start in range(0, height, lines):
            part = slice(start, start + lines)
            left = rows[0][piece, part], rows[1][piece, part]
            sums[:, piece] += torch.stack(_product(left, right, offset=start, trace=trace))
    return sums[0], sums[1]


def _product(rows: Factors, columns: Factors, *, offset: int, trace: bool) -> tuple[Tensor, Tensor]:
    product = torch.bmm(rows[0], columns[0].mT)
    product *= torch.bmm(rows[1], columns[1].mT)
    sum_M = product.flatten(1).sum(1)
    return sum_M, product.diagonal(offset, dim1=1, dim2=2).sum(1) if trace else sum_M


def _fast(a_NTI: Tensor, g_NTO: Tensor, workspace: int) -> Bounded:
    from ghostclip.kernels._compiled.gram import symmetric_gram as kernel

    return kernel(a_NTI, g_NTO, workspace)


def _example(device: torch.device) -> tuple[Tensor, Tensor, int]:
    a, g = (torch.randn(2, 70, width, generator=generator()) for width in (40, 33))
    return a.to(device, torch.bfloat16), g.to(device, torch.bfloat16), WORKSPACE


TWINS: Final = Twins("symmetric_gram", _naive, _fast, _example)
