"""Squared norms from the upper triangle of a Gram matrix that is never stored, and what bounds their rounding."""
# Triton reads the annotations of kernels: only its own mean something to it.
# ruff: noqa: ANN001, ANN202, PLR0913, PLR0915, PLR0917, N803, SIM102
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ghostclip.kernels._compiled.tiles import chunk, position_sums, readable, row_products, row_squares
from ghostclip.kernels.bounds import COLUMNS, Reduced
from ghostclip.kernels.gram import fused_tile
from ghostclip.kernels.products import HALF
from ghostclip.kernels.twins import LARGE, SMALL

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
    place = part_ptr + (sample * programs + program) * COLUMNS + tl.arange(0, 1)
    tl.store(place, value)
    tl.store(place + 1, mass)
    tl.store(place + 2, scale)
    tl.store(place + 3, a_sum)
    tl.store(place + 4, g_sum)
    tl.store(place + 5, absolute)
    tl.store(place + 6, a_off)
    tl.store(place + 7, a_whole)
    tl.store(place + 8, g_off)
    tl.store(place + 9, g_whole)


def symmetric_gram(
    a_NTI: Tensor, g_NTO: Tensor, weighting: int, sum_NF: Tensor | None = None, summed: int = 0
) -> Reduced:
    """Return each program's sums for the squared norms, added in a fixed order, so that runs repeat bit by bit."""
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
