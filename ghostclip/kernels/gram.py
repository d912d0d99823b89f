"""Squared norms from a symmetric Gram matrix: ``Σ_{s,t} (a_s·a_t)(g_s·g_t)``, the blocks on and above the diagonal.

Shape letters: N samples (times slots), T positions, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ghostclip.kernels import products, runtime
from ghostclip.kernels.bounds import (
    HALF,
    UNSEEN_DRIFT,
    Bounded,
    Reduced,
    Unfinished,
    dots,
    finished_one,
    masses,
    position_norms,
    samples_joined,
    unit_roundoff,
)
from ghostclip.kernels.outer import weighting
from ghostclip.kernels.runtime import LARGE, SMALL, Twins, generator, is_half
from ghostclip.kernels.sums import PositionSum

Factors: TypeAlias = tuple[Tensor, Tensor]

LEAF: Final = 16
"""Positions of the smallest blocks on the diagonal of a long sequence: thinner products are slower than they save."""

NARROW: Final = 1024
"""Inputs and outputs together up to which blocks half as large pay."""

WHOLE: Final = 64
"""Positions below which the CPU's twin forms a sample's whole Gram matrix where products are a small part of what the
layer costs: half of it takes 1.0 to 2.4 times as long in several products. Twice as many are worth another level."""

SMALL_PART: Final = 0.5
"""Share of a layer's T·I·O that the products of a whole Gram matrix are at most, to be called that."""

FEWEST_SEEN: Final = 8
"""Positions from which a diagonal is formed: of fewer it shows too little of how products are rounded."""

FEWEST_HALVED: Final = 16
"""Positions from which a diagonal is formed in blocks: of fewer these are so thin that a CPU multiplies them by other
means than the blocks beside them, whose drift may be 20 times as large."""

LARGEST_LEAF: Final = 1024
"""Positions of the largest: it must fit the workspace."""

UNDIVIDED: Final = 33
"""Products, as a power of two, up to which matrix units form a sample's whole Gram matrix: what halving it saves costs
more to start. Twice as many are worth another level."""

THINNEST: Final = 128
"""Positions of the smallest blocks on the diagonal that matrix units form."""

TRACED_LEAF: Final = 128
"""Positions of the smallest blocks on the diagonal in a graph that is written down: smaller ones save no time on a CPU,
and each is several operations to compile."""

TRACED_LEVELS: Final = 3
"""Halvings in such a graph, at most."""

HALVED_AT_ONCE: Final = 64
"""Positions of the smallest blocks on the diagonal in such a graph that a CPU forms in two products, without the upper
right quarter."""

WORKSPACE: Final = 1 << 22
"""Elements of the Gram matrices that the twin holds at a time (float32: 16 MiB)."""

CACHED: Final = 1 << 20
"""Elements of both factors that the twin reads at a time on a CPU, for each thread (float32: 4 MiB): every level of the
Gram reads them, and more would come from memory every time."""


def symmetric_gram(a_NTI: Tensor, g_NTO: Tensor, *, workspace: int = WORKSPACE) -> Bounded:
    """Return squared norms of ``Σ_t g_t ⊗ a_t`` without a T×T tensor.

    The double sum cancels when positions oppose each other; ``error_N`` bounds what rounding may have hidden.

    Cost: `gram_entries` · 2·(I+O) per sample, little more than T²·(I+O). The kernel stores no part of the Gram matrix
    and takes 16-bit tensors as they are; the twin stores at most ``workspace`` elements of it.

    Privacy:
        ``value_N + error_N`` is at least the true squared norm, whichever way it was formed.
    """
    if a_NTI.shape[1] <= 1 or not len(a_NTI):
        measured = masses(position_norms(a_NTI), position_norms(g_NTO), a_NTI.shape[2], g_NTO.shape[2])
        return Bounded(measured.scale_N, measured.lost_N.square(), measured.mass_N, measured.scale_N)
    formed: Bounded = TWINS.pick(a_NTI, g_NTO, pays=is_half(a_NTI, g_NTO))(a_NTI, g_NTO, workspace)
    return formed


@lru_cache(maxsize=4096)
def gram_levels(positions: int, inputs: int, outputs: int, *, by_units: bool = False) -> int:
    """Return how often the PyTorch twin halves the Gram matrix, as far as saved products outweigh the extra calls."""
    width = inputs + outputs
    if by_units:
        wanted = (positions * positions * width).bit_length() - UNDIVIDED
        return max(0, min(wanted, 4, (positions // THINNEST).bit_length() - 1))
    if positions >= FEWEST_SEEN and positions * width <= SMALL_PART * inputs * outputs:
        few = (positions // WHOLE).bit_length()
        if few <= 3:
            return few
    if positions < FEWEST_HALVED:
        return max(0, positions.bit_length() - 1)
    if positions < 8 * LEAF:
        return 2
    fewest = 4 if positions >= 32 * LEAF or width <= NARROW else 3
    return max(fewest, ((positions - 1) // LARGEST_LEAF).bit_length())


@lru_cache(maxsize=4096)
def gram_entries(positions: int, inputs: int, outputs: int, *, by_units: bool = False) -> int:
    """Return how many entries of one T×T Gram matrix the twin forms, about T²/2·(1 + 2^-levels)."""
    levels = gram_levels(positions, inputs, outputs, by_units=by_units)
    leaf = positions >> levels
    whole = leaf << levels
    above = sum((1 << level) * (whole >> (level + 1)) ** 2 for level in range(levels))
    return above + (leaf**2 << levels if leaf > 1 else 0) + (positions - whole) * positions


def fused_tile(positions: int, *, half: bool = True) -> int:
    """Return the rows and columns of the kernel's tile, a power of two."""
    if positions >= LARGE and half:
        return LARGE
    return next(size for size in (16, 32, SMALL) if positions <= size or size == SMALL)


def fused_entries(positions: int) -> int:
    """Return how many entries of one T×T Gram matrix the kernel forms: whole tiles on and above the diagonal."""
    tile = fused_tile(positions)
    tiles = -(-positions // tile)
    return tile**2 * tiles * (tiles + 1) // 2


class _Sums(NamedTuple):
    """Sums over blocks of a Gram matrix, and what products left on its diagonal."""

    value: Tensor  # sums of ``(a·a)(g·g)``
    absolute: Tensor  # sums of their absolute values
    squares: Tensor | None = None  # ``a_t·a_t`` and ``g_t·g_t``, its first axis; None off the diagonal


def is_fused(a_NTI: Tensor, g_NTO: Tensor) -> bool:
    """Return whether the kernel would form the norms, so that no block of the Gram matrix is stored."""
    return TWINS.pick(a_NTI, g_NTO, pays=is_half(a_NTI, g_NTO)) is not _naive


def gram_sums(
    a_NTI: Tensor, g_NTO: Tensor, *, workspace: int = WORKSPACE, also: PositionSum | None = None
) -> Unfinished | Reduced | None:
    """Return squared norms as `symmetric_gram` does, with errors to be worked out for many layers at once."""
    # None if empty. `also` is a sum over the positions of one factor, which the kernel forms on the way and the twin
    # does not.
    if a_NTI.shape[1] <= 1 or not len(a_NTI):
        return None
    return _reduced(a_NTI, g_NTO, also) if is_fused(a_NTI, g_NTO) else _unfinished(a_NTI, g_NTO, workspace)


def _naive(a_NTI: Tensor, g_NTO: Tensor, workspace: int, summed: int = 0) -> Bounded | tuple[Bounded, Tensor]:
    """Plain-PyTorch twin of the kernel: squared norms, and with `summed` one factor's sum over positions."""
    bounded = finished_one(_unfinished(a_NTI, g_NTO, workspace))
    return (bounded, PositionSum((a_NTI, g_NTO)[summed - 1]).value()) if summed else bounded


def _unfinished(a_NTI: Tensor, g_NTO: Tensor, workspace: int) -> Unfinished | Reduced:
    """Return the twin's squared norms and what their bounds follow from, as many samples at a time as fit."""
    samples, positions, inputs = a_NTI.shape
    outputs = g_NTO.shape[2]
    at_once = max(1, samples)
    if a_NTI.device.type == "cpu" and not runtime.traced():
        cached = CACHED * torch.get_num_threads()
        at_once = max(1, min(workspace, cached) // max(1, positions * (inputs + outputs)))
    elif is_half(a_NTI, g_NTO) and not (products.is_taken(a_NTI) and products.is_taken(g_NTO)):
        at_once = max(1, workspace // max(1, positions * (inputs + outputs)))
    if at_once >= samples:
        return _formed(a_NTI, g_NTO, workspace)
    parts = [
        _formed(a_NTI[start : start + at_once], g_NTO[start : start + at_once], workspace)
        for start in range(0, samples, at_once)
    ]
    return samples_joined(parts)


def _formed(a_NTI: Tensor, g_NTO: Tensor, workspace: int) -> Unfinished:
    """Return the sums over the Gram matrices of these samples."""
    rounds, by_units = 1, False
    if a_NTI.dtype != torch.float32 or g_NTO.dtype != torch.float32:
        rounds = weighting(a_NTI, g_NTO)
        a_NTI, g_NTO = products.operand(a_NTI), products.operand(g_NTO)
        by_units = a_NTI.dtype in HALF or g_NTO.dtype in HALF
    if a_NTI.numel() + g_NTO.numel() <= workspace:
        a_NTI, g_NTO = (x_NTF if _in_one_piece(x_NTF) else x_NTF.contiguous() for x_NTF in (a_NTI, g_NTO))
    a_NT, g_NT = position_norms(a_NTI), position_norms(g_NTO)
    levels = gram_levels(a_NTI.shape[1], a_NTI.shape[2], g_NTO.shape[2], by_units=by_units)
    if runtime.traced():
        levels = min(levels, TRACED_LEVELS, max(0, (a_NTI.shape[1] // TRACED_LEAF).bit_length() - 1))
    sums = _halved((a_NTI, g_NTO), (a_NT, g_NT), levels, workspace)
    unseen = None if sums.squares is not None else UNSEEN_DRIFT * unit_roundoff(a_NT.dtype)
    sizes = a_NTI.shape[2], g_NTO.shape[2]
    unfinished = Unfinished(sums.value, a_NT, g_NT, sizes, sums.absolute, square_KNT=sums.squares, drift=unseen)
    return unfinished._replace(by_units=by_units, weighting=rounds) if by_units else unfinished


def _halved(factors: Factors, norms: Factors, levels: int, workspace: int) -> _Sums:
    """Return sums over the Gram matrices, ``(N,)``, and their diagonals, ``(2, N, T)``."""
    # Where blocks on the diagonal are single entries, these are |a_t|²·|g_t|² without a product. Of float64 no diagonal
    # is read, as nothing more precise shows how it was rounded.
    (a_NTI, g_NTO), (a_NT, g_NT) = factors, norms
    samples, positions = a_NTI.shape[:2]
    leaf = positions >> levels
    whole = leaf << levels
    seen = leaf > 1 and a_NT.dtype == torch.float32
    first = (a_NTI, g_NTO) if whole == positions else _front(a_NTI, g_NTO, whole, workspace)
    above, on = [], []
    for level in range(levels):
        for a_MLI, g_MLO in _pieces(*first, whole >> level):
            upper, lower = zip(a_MLI.chunk(2, 1), g_MLO.chunk(2, 1), strict=True)
            above.append(_products(upper, lower, workspace, samples, seen=seen))
    if leaf == 1:
        square_N = (a_NT * g_NT)[:, :whole].square().sum(1)
        on.append(_Sums(square_N, square_N.clone()))
    elif seen and runtime.traced() and a_NTI.device.type == "cpu" and leaf >= HALVED_AT_ONCE and leaf % 2 == 0:
        for block in _pieces(*first, leaf):
            below, both = _in_halves(block, samples)
            above.append(below)
            on.append(both)
    else:
        on += [_products(block, block, workspace, samples, seen=seen, diagonal=seen) for block in _pieces(*first, leaf)]
    if whole < positions:
        last = a_NTI[:, whole:], g_NTO[:, whole:]
        above.append(_products(last, first, workspace, samples, seen=seen))
        on.append(_products(last, last, workspace, samples, seen=seen, diagonal=seen))
    value_N, absolute_N = _total([part.value for part in on]), _total([part.absolute for part in on])
    if above:
        value_N.add_(_total([part.value for part in above]), alpha=2)
        absolute_N.add_(_total([part.absolute for part in above]), alpha=2)
    square_KNT = [part.squares.view(2, samples, -1) for part in on if part.squares is not None]
    if not square_KNT:
        return _Sums(value_N, absolute_N)
    return _Sums(value_N, absolute_N, square_KNT[0] if len(square_KNT) == 1 else torch.cat(square_KNT, 2))


def _total(parts: list[Tensor]) -> Tensor:
    """Return the sum of all parts, each of shape ``(N,)``."""
    if len(parts) <= 2:
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return torch.stack(parts).sum(0)


def _front(a_NTI: Tensor, g_NTO: Tensor, whole: int, workspace: int) -> Factors:
    """Return the first positions of both factors; contiguous where that takes no more than the workspace."""
    a_NTI, g_NTO = a_NTI.narrow(1, 0, whole), g_NTO.narrow(1, 0, whole)
    if a_NTI.numel() + g_NTO.numel() > workspace:
        return a_NTI, g_NTO
    return a_NTI.contiguous(), g_NTO.contiguous()


def _pieces(a_NTI: Tensor, g_NTO: Tensor, size: int) -> Iterator[Factors]:
    """Yield the factors in pieces of ``size`` positions, ``(M, size, ...)``, all at once where views allow."""
    if _in_one_piece(a_NTI) and _in_one_piece(g_NTO):
        yield a_NTI.view(-1, size, a_NTI.shape[2]), g_NTO.view(-1, size, g_NTO.shape[2])
        return
    for start in range(0, a_NTI.shape[1], size):
        yield a_NTI[:, start : start + size], g_NTO[:, start : start + size]


def _in_one_piece(x_NTF: Tensor) -> bool:
    """Return whether positions of all samples lie one after the other, rows being as long as matrix units read them."""
    return x_NTF.is_contiguous() or (x_NTF.dtype in HALF and x_NTF.stride(0) == x_NTF.shape[1] * x_NTF.stride(1))


def _products(
    rows: Factors, columns: Factors, workspace: int, samples: int, *, seen: bool, diagonal: bool = False
) -> _Sums:
    """Return sums of ``(a·a)(g·g)`` over all pairs of a row and a column, ``(N,)``, and diagonals, ``(2, M, L)``."""
    # Rows and columns are M blocks of both factors, a sample's own side by side. `seen`: a diagonal shows how products
    # are rounded; otherwise sums are short.
    count, height = rows[0].shape[:2]
    width = columns[0].shape[1]
    at_once = max(1, workspace // (height * width))
    lines = height if at_once > 1 else max(1, min(height, workspace // width))
    if at_once >= count and lines == height:
        return _product(rows, columns, samples, seen=seen, offset=0 if diagonal else None)
    pieces = []
    for first in range(0, count, at_once):
        piece = slice(first, first + at_once)
        right = columns[0][piece], columns[1][piece]
        blocks = len(right[0])
        left = [
            _product(_lines(rows, piece, start, lines), right, blocks, seen=seen, offset=start if diagonal else None)
            for start in range(0, height, lines)
        ]
        pieces.append(left[0] if len(left) == 1 else _beside(left))
    value, absolute, squares = zip(*pieces, strict=True)
    value_N, absolute_N = (torch.cat(parts).view(samples, -1).sum(1) for parts in (value, absolute))
    return _Sums(value_N, absolute_N, None if squares[0] is None else torch.cat(squares, 1))


def _lines(rows: Factors, piece: slice, start: int, lines: int) -> Factors:
    """Return some rows of some blocks of both factors."""
    part = slice(start, start + lines)
    return rows[0][piece, part], rows[1][piece, part]


def _beside(parts: Sequence[_Sums]) -> _Sums:
    """Return sums over blocks of rows of the same matrices."""
    value, absolute, squares = zip(*parts, strict=True)
    square_KML = None if squares[0] is None else torch.cat(squares, 2)
    return _Sums(torch.stack(value).sum(0), torch.stack(absolute).sum(0), square_KML)


def _dots(left_NTF: Tensor, right_NUF: Tensor) -> Tensor:
    """Return all dot products of positions, in one sum each."""
    return products.batched(left_NTF, right_NUF.mT)


def _product(rows: Factors, columns: Factors, samples: int, *, seen: bool, offset: int | None) -> _Sums:
    """Return sums over the blocks of each sample, and diagonals from a column on where one is set."""
    form = _dots if seen else dots
    product, other = form(rows[0], columns[0]), form(rows[1], columns[1])
    square_KML = None
    if offset is not None:
        square_KML = torch.stack([part.diagonal(offset, dim1=1, dim2=2) for part in (product, other)])
    entry_NE = product.mul_(other).view(samples, -1)
    value_N = entry_NE.sum(1)
    if entry_NE.device.type == "cpu":
        return _Sums(value_N, entry_NE.abs_().sum(1), square_KML)
    return _Sums(value_N, torch.linalg.vector_norm(entry_NE, 1, dim=1), square_KML)


def _in_halves(block: Factors, samples: int) -> tuple[_Sums, _Sums]:
    """Return sums over diagonal blocks: of their lower left quarters, and of both quarters on the diagonal."""
    # The left half is one product, which takes less time than one for each of its quarters.
    half = block[0].shape[1] // 2
    left = [_dots(x_MLF, x_MLF[:, :half]) for x_MLF in block]
    right = [_dots(x_MLF[:, half:], x_MLF[:, half:]) for x_MLF in block]
    square_KML = torch.stack(
        [torch.cat([part.diagonal(dim1=1, dim2=2) for part in parts], 1) for parts in zip(left, right, strict=True)]
    )
    entry_MLH = left[0] * left[1]
    upper_NE, lower_NE = (x.reshape(samples, -1) for x in (entry_MLH[:, :half], entry_MLH[:, half:]))
    last_NE = (right[0] * right[1]).view(samples, -1)
    value_N, absolute_N = upper_NE.sum(1) + last_NE.sum(1), upper_NE.abs().sum(1) + last_NE.abs().sum(1)
    return _Sums(lower_NE.sum(1), lower_NE.abs().sum(1)), _Sums(value_N, absolute_N, square_KML)


def _reduced(a_NTI: Tensor, g_NTO: Tensor, also: PositionSum | None = None) -> Reduced:
    """Return the kernel's sums, and leave with `also` one factor's sum over positions."""
    from ghostclip.kernels.triton_products import symmetric_gram as kernel

    summed = 0 if also is None else also.index_among(a_NTI, g_NTO)
    if also is None or not summed or not a_NTI.numel() or not g_NTO.numel():
        return kernel(a_NTI, g_NTO, weighting(a_NTI, g_NTO))
    sum_NF = torch.empty(also.shape, dtype=torch.float32, device=a_NTI.device)
    reduced = kernel(a_NTI, g_NTO, weighting(a_NTI, g_NTO), sum_NF, summed)
    also.leave(sum_NF)
    return reduced


def _fast(a_NTI: Tensor, g_NTO: Tensor, workspace: int, summed: int = 0) -> Bounded | tuple[Bounded, Tensor]:
    """As `_naive`, by the kernel."""
    del workspace
    if not summed:
        return finished_one(_reduced(a_NTI, g_NTO))
    also = PositionSum((a_NTI, g_NTO)[summed - 1])
    return finished_one(_reduced(a_NTI, g_NTO, also)), also.value()


def _example(
    device: torch.device, positions: int, dtype: torch.dtype, width: int, summed: int = 0
) -> tuple[Tensor, Tensor, int, int]:
    """Return arguments for a comparison of kernel and twin."""
    a, g = (torch.randn(2, positions, size, generator=generator()) for size in (width, 33))
    return a.to(device, dtype), g.to(device, dtype), WORKSPACE, summed


# One for each size of tiles, and for products that are added up in several sums; with sums over positions of either.
_EXAMPLES: Final = (
    (150, torch.bfloat16, 40, 1),
    (150, torch.float16, 40, 2),
    (150, torch.bfloat16, 4200, 0),
    (70, torch.float32, 600, 0),
    (40, torch.bfloat16, 40, 1),
    (20, torch.bfloat16, 40, 2),
    (10, torch.bfloat16, 40, 0),
)
TWINS: Final = Twins(
    "symmetric_gram",
    _naive,
    _fast,
    tuple(
        partial(_example, positions=positions, dtype=dtype, width=width, summed=summed)
        for positions, dtype, width, summed in _EXAMPLES
    ),
)
