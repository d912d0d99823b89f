"""Triton kernels of products: squared norms, from a Gram matrix or from gradients never stored, and weighted sums.

Matrix units cut off where they accumulate, always towards zero; sums of `bounds.UNIT_CHAIN` products that are added
with rounding to nearest keep that loss within what `bounds.UNIT_LOSS` allows for. All products are full float32 or
exact products of 16-bit values. Loaded when a kernel is first used, as all modules that import Triton.
"""

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ghostclip.kernels import runtime
from ghostclip.kernels.bounds import CHAIN_OF_KERNELS, COLUMNS, FORMED_COLUMNS, HALF, UNIT_CHAIN, Reduced
from ghostclip.kernels.gram import fused_tile
from ghostclip.kernels.runtime import LARGE, SMALL

# Triton reads the annotations of kernels: only its own mean something to it.
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, PLR0915, PLR0917, N803, SIM102
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

# Numbers of 16 bits in what a program reads at once; rows that begin elsewhere are read number by number.
_ALIGNED: Final = 16
# Features from which a copy of such rows costs less than reading them that way.
_LONG: Final = 1 << 10


@triton.jit
def row_products(
    x_ptr, step, rows_M, rows_N, positions, width, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr
):
    """Return inner products of two sets of BLOCK rows, `step` apart; CHUNK is 0 where one float32 sum takes a row."""
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    if CHUNK == 0:
        total = _row_products(x_ptr, step, rows_M, rows_N, positions, width, 0, width, total, BLOCK_K)
    else:
        for start in range(0, width, CHUNK):
            part = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
            end = min(start + CHUNK, width)
            total += _row_products(x_ptr, step, rows_M, rows_N, positions, width, start, end, part, BLOCK_K)
    return total


@triton.jit
def _row_products(x_ptr, step, rows_M, rows_N, positions, width, start, end, part, BLOCK_K: tl.constexpr):
    """Add the products of columns `start` to `end` of two sets of rows to ``part``."""
    for first in range(start, end, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        mask_M = (rows_M[:, None] < positions) & (k[None, :] < width)
        mask_N = (rows_N[:, None] < positions) & (k[None, :] < width)
        x_MK = tl.load(x_ptr + rows_M[:, None].to(tl.int64) * step + k[None, :], mask=mask_M, other=0.0)
        x_NK = tl.load(x_ptr + rows_N[:, None].to(tl.int64) * step + k[None, :], mask=mask_N, other=0.0)
        part = tl.dot(x_MK, tl.trans(x_NK), part, input_precision="ieee")
    return part


@triton.jit
def row_squares(x_ptr, step, rows_M, positions, width, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the squared norms of BLOCK rows, float64: no float32 sum is longer than BLOCK_K."""
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for first in range(0, width, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        mask = (rows_M[:, None] < positions) & (k[None, :] < width)
        x_MK = tl.load(x_ptr + rows_M[:, None].to(tl.int64) * step + k[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(x_MK * x_MK, 1).to(tl.float64)
    return total


@triton.jit
def position_sums(x_ptr, step, out_ptr, block, positions, width, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr):
    """Store the sums of BLOCK features over all rows, float32: BLOCK_T rows at a time, in a fixed order."""
    k = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, positions, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        mask = (t[:, None] < positions) & (k[None, :] < width)
        x_TK = tl.load(x_ptr + t[:, None].to(tl.int64) * step + k[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(x_TK, 0)
    tl.store(out_ptr + k, total, mask=k < width)


@triton.jit
def gradient_tile(
    a_ptr,
    g_ptr,
    a_step,
    g_step,
    i,
    o,
    positions,
    inputs,
    outputs,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the tile (o, i) of one sample's gradient ``Σ_t g_t ⊗ a_t``, float32; CHUNK as for `row_products`."""
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    sizes = (positions, inputs, outputs)
    if CHUNK == 0:
        total = _gradient_tile(a_ptr, g_ptr, a_step, g_step, i, o, sizes, 0, positions, total, BLOCK_T)
    else:
        for start in range(0, positions, CHUNK):
            part = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
            end = min(start + CHUNK, positions)
            total += _gradient_tile(a_ptr, g_ptr, a_step, g_step, i, o, sizes, start, end, part, BLOCK_T)
    return total


@triton.jit
def _gradient_tile(a_ptr, g_ptr, a_step, g_step, i, o, sizes, start, end, part, BLOCK_T: tl.constexpr):
    """Add the outer products of positions `start` to `end` to one tile of a gradient."""
    positions, inputs, outputs = sizes
    for first in range(start, end, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        g_mask = (t[:, None] < positions) & (o[None, :] < outputs)
        a_mask = (t[:, None] < positions) & (i[None, :] < inputs)
        g_TO = tl.load(g_ptr + t[:, None].to(tl.int64) * g_step + o[None, :], mask=g_mask, other=0.0)
        a_TI = tl.load(a_ptr + t[:, None].to(tl.int64) * a_step + i[None, :], mask=a_mask, other=0.0)
        part = tl.dot(tl.trans(g_TO), a_TI, part, input_precision="ieee")
    return part


def readable(a_NTI: Tensor, g_NTO: Tensor, *, whole: bool = False) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield slices of samples with both tensors, features contiguous; all samples at once unless copies are needed."""
    copied = sum(x_NTF.shape[1] * x_NTF.shape[2] for x_NTF in (a_NTI, g_NTO) if _is_copied(x_NTF))
    at_once = max(1, len(a_NTI)) if whole or copied == 0 else max(1, runtime.elements(a_NTI.device) // copied)
    for start in range(0, len(a_NTI), at_once):
        piece = slice(start, start + at_once)
        yield piece, _operand(a_NTI[piece]), _operand(g_NTO[piece])


def _is_copied(x_NTF: Tensor) -> bool:
    """Return whether a tensor is copied so that programs read whole vectors of it."""
    if x_NTF.shape[2] > 1 and x_NTF.stride(2) != 1:
        return True
    return x_NTF.dtype in HALF and x_NTF.shape[2] >= _LONG and x_NTF.stride(1) % _ALIGNED != 0


def _operand(x_NTF: Tensor) -> Tensor:
    """Return a tensor as the kernels read it."""
    if runtime.interpreted() and x_NTF.dtype == torch.bfloat16:
        # Triton's interpreter multiplies the bits of bfloat16, not its values; in float32 the products are the same.
        x_NTF = x_NTF.float()
    if not _is_copied(x_NTF):
        return x_NTF
    features = x_NTF.shape[2]
    width = -(-features // _ALIGNED) * _ALIGNED if features >= _LONG else features
    return x_NTF.new_empty(*x_NTF.shape[:2], width)[:, :, :features].copy_(x_NTF)


def chunk(*lengths: int, half: bool) -> int:
    """Return how many products are added up before a new sum is started; 0 where one sum takes them all."""
    most = UNIT_CHAIN if half else CHAIN_OF_KERNELS
    return 0 if max(lengths) <= most else most


def tile_size(*lengths: int, half: bool, tiles: int = 1) -> int:
    """Return the width of a tile, `LARGE` where it is filled and there are enough for a GPU, else `SMALL`."""
    return LARGE if half and min(lengths) >= LARGE and tiles >= _ENOUGH else SMALL


# Tiles that give every multiprocessor of a large GPU some work.
_ENOUGH: Final = 100


# Programs that keep a large GPU busy, over all samples; more of them only make more partial sums.
_PROGRAMS: Final = 1024
_COLUMNS: Final = len(COLUMNS)


@triton.jit
def _gram(
    a_ptr,
    g_ptr,
    part_ptr,
    sum_ptr,
    a_sample,
    a_step,
    g_sample,
    g_step,
    positions,
    inputs,
    outputs,
    tiles,
    programs,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMMED: tl.constexpr,
):
    """Sums for squared norms over a program's tiles on and above the diagonal of one sample's Gram matrices."""
    sample = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    a_ptr += sample * a_sample
    g_ptr += sample * g_sample
    if SUMMED != 0:
        # Known when this is compiled; programs beyond those of the Gram matrix form a bias's gradients.
        if program >= programs:
            block = program - programs
            if SUMMED == 1:
                position_sums(a_ptr, a_step, sum_ptr + sample * inputs, block, positions, inputs, BLOCK, BLOCK_K)
            else:
                position_sums(g_ptr, g_step, sum_ptr + sample * outputs, block, positions, outputs, BLOCK, BLOCK_K)
            return
    zero = tl.zeros((1,), dtype=tl.float64)
    value, absolute, mass, scale, a_sum, g_sum = zero, zero, zero, zero, zero, zero
    a_off, a_whole, g_off, g_whole = zero, zero, zero, zero
    for tile in range(program, tiles * (tiles + 1) // 2, programs):
        # Rows r and tiles-1-r of the triangle have tiles+1 tiles between them: together they fill a rectangle.
        r = tile // (tiles + 1)
        c = tile % (tiles + 1)
        upper = c < tiles - r
        row = tl.where(upper, r, tiles - 1 - r)
        column = tl.where(upper, r + c, c - 1)
        rows_M = row * BLOCK + tl.arange(0, BLOCK)
        rows_N = column * BLOCK + tl.arange(0, BLOCK)
        product = row_products(a_ptr, a_step, rows_M, rows_N, positions, inputs, BLOCK, BLOCK_K, CHUNK)
        other = row_products(g_ptr, g_step, rows_M, rows_N, positions, outputs, BLOCK, BLOCK_K, CHUNK)
        if row == column:
            # How products are rounded is read off the diagonal, where norms are known from short sums.
            same = rows_M[:, None] == rows_N[None, :]
            a_formed = tl.sum(tl.where(same, product, 0.0), 1).to(tl.float64)
            g_formed = tl.sum(tl.where(same, other, 0.0), 1).to(tl.float64)
            a_square = row_squares(a_ptr, a_step, rows_M, positions, inputs, BLOCK, BLOCK_K)
            g_square = row_squares(g_ptr, g_step, rows_M, positions, outputs, BLOCK, BLOCK_K)
            both = a_square * g_square
            mass += tl.sum(tl.sqrt(both), 0)
            scale += tl.sum(both, 0)
            a_sum += tl.sum(tl.sqrt(a_square), 0)
            g_sum += tl.sum(tl.sqrt(g_square), 0)
            a_off += tl.sum((a_formed - a_square) * (a_formed - a_square) * both, 0)
            g_off += tl.sum((g_formed - g_square) * (g_formed - g_square) * both, 0)
            a_whole += tl.sum(a_square * a_square * both, 0)
            g_whole += tl.sum(g_square * g_square * both, 0)
        product *= other
        weight = tl.where(row == column, 1.0, 2.0)
        value += tl.sum(tl.sum(product, 1).to(tl.float64), 0) * weight
        absolute += tl.sum(tl.sum(tl.abs(product), 1).to(tl.float64), 0) * weight
    row_ptr = part_ptr + (sample * programs + program) * COLUMNS + tl.arange(0, 1)
    tl.store(row_ptr, value)
    tl.store(row_ptr + 1, mass)
    tl.store(row_ptr + 2, scale)
    tl.store(row_ptr + 3, a_sum)
    tl.store(row_ptr + 4, g_sum)
    tl.store(row_ptr + 5, absolute)
    tl.store(row_ptr + 6, a_off)
    tl.store(row_ptr + 7, a_whole)
    tl.store(row_ptr + 8, g_off)
    tl.store(row_ptr + 9, g_whole)


def symmetric_gram(
    a_NTI: Tensor, g_NTO: Tensor, weighting: int, sum_NF: Tensor | None = None, summed: int = 0
) -> Reduced:
    """Return the sums for squared norms from two Gram matrices, by program, in a fixed order: bit by bit the same."""
    # `summed` is 1 to leave the inputs' sums over positions in `sum_NF`, 2 for the gradients', 0 for neither.
    samples, positions, inputs = a_NTI.shape
    outputs = g_NTO.shape[2]
    halves = [x_NTF.dtype in HALF for x_NTF in (a_NTI, g_NTO)]
    block = fused_tile(positions, half=all(halves))
    tiles = triton.cdiv(positions, block)
    programs = max(1, min(tiles * (tiles + 1) // 2, triton.cdiv(_PROGRAMS, max(1, samples))))
    make = torch.empty if a_NTI.numel() and g_NTO.numel() else torch.zeros
    part_NPK = make(samples, programs, _COLUMNS, dtype=torch.float64, device=a_NTI.device)
    blocks = 0 if sum_NF is None else triton.cdiv(sum_NF.shape[1], block)
    for piece, a, g in readable(a_NTI, g_NTO) if make is torch.empty else ():
        _gram[len(a), programs + blocks](
            a,
            g,
            part_NPK[piece],
            part_NPK if sum_NF is None else sum_NF[piece],
            *a.stride()[:2],
            *g.stride()[:2],
            positions,
            inputs,
            outputs,
            tiles,
            programs,
            BLOCK=block,
            BLOCK_K=64 if block == LARGE else 32,
            CHUNK=chunk(inputs, outputs, half=any(halves)),
            COLUMNS=_COLUMNS,
            SUMMED=summed,
            num_warps=8 if block >= SMALL else 4,
        )
    return Reduced(part_NPK, positions, (inputs, outputs), by_units=any(halves), weighting=weighting)


# Programs that a weighted sum is worth having: with fewer tiles samples are divided among several.
_WANTED: Final = 128
# Elements of the partial sums of a weighted sum (float32: 256 MiB).
_WORKSPACE: Final = 1 << 26


@triton.jit
def _square(
    a_ptr,
    g_ptr,
    part_ptr,
    a_sample,
    a_step,
    g_sample,
    g_step,
    positions,
    inputs,
    outputs,
    programs,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums of squares over a program's tiles of one sample's gradient, none of them stored."""
    sample = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    a_ptr += sample * a_sample
    g_ptr += sample * g_sample
    across = tl.cdiv(inputs, BLOCK)
    zero = tl.zeros((1,), dtype=tl.float64)
    value, mass, scale, a_sum, g_sum = zero, zero, zero, zero, zero
    for tile in range(program, across * tl.cdiv(outputs, BLOCK), programs):
        i = (tile % across) * BLOCK + tl.arange(0, BLOCK)
        o = (tile // across) * BLOCK + tl.arange(0, BLOCK)
        grad_OI = gradient_tile(a_ptr, g_ptr, a_step, g_step, i, o, positions, inputs, outputs, BLOCK, BLOCK_T, CHUNK)
        value += tl.sum(tl.sum(grad_OI * grad_OI, 1).to(tl.float64), 0)
    # Each program also adds up the norms of some positions.
    for first in range(program * BLOCK_T, positions, programs * BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        a_square = row_squares(a_ptr, a_step, t, positions, inputs, BLOCK_T, BLOCK)
        g_square = row_squares(g_ptr, g_step, t, positions, outputs, BLOCK_T, BLOCK)
        mass += tl.sum(tl.sqrt(a_square * g_square), 0)
        scale += tl.sum(a_square * g_square, 0)
        a_sum += tl.sum(tl.sqrt(a_square), 0)
        g_sum += tl.sum(tl.sqrt(g_square), 0)
    row_ptr = part_ptr + (sample * programs + program) * COLUMNS + tl.arange(0, 1)
    tl.store(row_ptr, value)
    tl.store(row_ptr + 1, mass)
    tl.store(row_ptr + 2, scale)
    tl.store(row_ptr + 3, a_sum)
    tl.store(row_ptr + 4, g_sum)


@triton.jit
def _weighted_sum(
    a_ptr,
    g_ptr,
    coef_ptr,
    out_ptr,
    a_sample,
    a_step,
    g_sample,
    g_step,
    samples,
    positions,
    inputs,
    outputs,
    splits,
    between,
    stride,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    ADD: tl.constexpr,
):
    """One tile of the weighted sum over a program's samples."""
    across = tl.cdiv(inputs, BLOCK)
    down = tl.cdiv(outputs, BLOCK)
    # Programs that run side by side take tiles of a few rows, so that they read the same columns.
    band = tl.program_id(0) // (GROUP * across)
    height = min(GROUP, down - band * GROUP)
    inside = tl.program_id(0) % (GROUP * across)
    i = (inside // height) * BLOCK + tl.arange(0, BLOCK)
    o = (band * GROUP + inside % height) * BLOCK + tl.arange(0, BLOCK)
    split = tl.program_id(1)
    sum_number = tl.program_id(2).to(tl.int64)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for sample in range(split, samples, splits):
        # 64 bits by way of a 64-bit zero: the interpreter's loop variable is a number of Python's.
        row = sum_number * 0 + sample * between + sum_number * stride
        a_row = a_ptr + row * a_sample
        g_row = g_ptr + row * g_sample
        grad_OI = gradient_tile(a_row, g_row, a_step, g_step, i, o, positions, inputs, outputs, BLOCK, BLOCK_T, CHUNK)
        total += tl.load(coef_ptr + sample) * grad_OI
    index = ((sum_number * splits + split) * outputs + o[:, None]) * inputs + i[None, :]
    mask = (o[:, None] < outputs) & (i[None, :] < inputs)
    if ADD:
        total += tl.load(out_ptr + index, mask=mask, other=0.0)
    tl.store(out_ptr + index, total, mask=mask)


def _alike(a_NTI: Tensor, g_NTO: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors in one dtype, as a matrix unit needs them."""
    if a_NTI.dtype == g_NTO.dtype:
        return a_NTI, g_NTO
    return a_NTI.float(), g_NTO.float()


def _block(inputs: int, outputs: int, sums: int, *, half: bool) -> int:
    """Return the width of tiles that fills a GPU."""
    return tile_size(inputs, outputs, half=half, tiles=sums * triton.cdiv(inputs, LARGE) * triton.cdiv(outputs, LARGE))


def outer_square(a_NTI: Tensor, g_NTO: Tensor, weighting: int) -> Reduced:
    """Return the sums of squares of gradients whose tiles are formed and never stored, by program, in a fixed order."""
    a_NTI, g_NTO = _alike(a_NTI, g_NTO)
    samples, positions, inputs = a_NTI.shape
    outputs, half = g_NTO.shape[2], a_NTI.dtype in HALF
    block = _block(inputs, outputs, samples, half=half)
    tiles = triton.cdiv(inputs, block) * triton.cdiv(outputs, block)
    programs = max(1, min(tiles, triton.cdiv(_PROGRAMS, max(1, samples))))
    make = torch.empty if a_NTI.numel() and g_NTO.numel() else torch.zeros
    part_NPK = make(samples, programs, FORMED_COLUMNS, dtype=torch.float64, device=a_NTI.device)
    for piece, a, g in readable(a_NTI, g_NTO) if make is torch.empty else ():
        _square[len(a), programs](
            a,
            g,
            part_NPK[piece],
            *a.stride()[:2],
            *g.stride()[:2],
            positions,
            inputs,
            outputs,
            programs,
            **_options(block, positions, half=half),
            COLUMNS=FORMED_COLUMNS,
        )
    return Reduced(part_NPK, positions, (inputs, outputs), by_units=half, weighting=weighting)


def _options(block: int, positions: int, *, half: bool) -> dict[str, int]:
    """Return a launch's tile sizes, length of sums and number of warps."""
    deep = 64 if block == LARGE else 32
    return {"BLOCK": block, "BLOCK_T": deep, "CHUNK": chunk(positions, half=half), "num_warps": block // 16}


def weighted_sum(a_NTI: Tensor, g_NTO: Tensor, coef_B: Tensor, out_SOI: Tensor, *, stride: int, fresh: bool) -> Tensor:
    """Add ``Σ_b c_b Σ_t g_nt ⊗ a_nt`` to each of S matrices in place, without a weighted copy of either tensor."""
    # Rows are (S·B, T, ...); `stride` is the distance of the first samples of two sums: 1 where the slots of a sample
    # are neighbours, else B. A gradient is formed in float32, then weighted, so that a term is rounded once; one
    # program adds to each element, so that a second run gives the same sum. `fresh` overwrites `out_SOI`.
    sums, outputs, inputs = out_SOI.shape
    if a_NTI.numel() == 0 or g_NTO.numel() == 0:
        return out_SOI.zero_() if fresh else out_SOI
    a_NTI, g_NTO = _alike(a_NTI, g_NTO)
    half = a_NTI.dtype in HALF
    block = _block(inputs, outputs, sums, half=half)
    tiles = triton.cdiv(inputs, block) * triton.cdiv(outputs, block)
    for piece, a, g in readable(a_NTI, g_NTO, whole=sums > 1):
        some_B = coef_B[piece].contiguous() if sums == 1 else coef_B.contiguous()
        splits = max(1, min(len(some_B), _WANTED // max(1, tiles * sums), _WORKSPACE // out_SOI.numel()))
        parts = out_SOI if splits == 1 else torch.empty(sums, splits, outputs, inputs, device=a.device)
        _weighted_sum[tiles, splits, sums](
            a,
            g,
            some_B,
            parts,
            *a.stride()[:2],
            *g.stride()[:2],
            len(some_B),
            a.shape[1],
            inputs,
            outputs,
            splits,
            sums if stride == 1 else 1,
            stride,
            **_options(block, a.shape[1], half=half),
            GROUP=8,
            ADD=splits == 1 and not fresh,
        )
        if splits > 1:
            torch.sum(parts, 1, out=out_SOI) if fresh else out_SOI.add_(parts.sum(1))
        fresh = False
    return out_SOI
