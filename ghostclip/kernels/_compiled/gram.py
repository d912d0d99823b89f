"""Squared norms from the upper triangle of a Gram matrix that is never stored."""
# Triton reads the annotations of kernels: only its own mean something to it.
# ruff: noqa: ANN001, ANN202, PLR0913, PLR0917, N803
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ghostclip.kernels._compiled.tiles import operand, row_products
from ghostclip.kernels.bounds import CHUNK, DRIFT_MARGIN, Bounded, gram_error, masses, matrix_unit_drift, position_norms

# Programs that keep a large GPU busy, over all samples; more of them only make more partial sums.
_PROGRAMS: Final = 1024


@triton.jit
def _gram(
    a_ptr,
    g_ptr,
    value_ptr,
    absolute_ptr,
    positions,
    inputs,
    outputs,
    tiles,
    programs,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    a_ptr += sample * positions * inputs
    g_ptr += sample * positions * outputs
    value = tl.zeros((1,), dtype=tl.float64)
    absolute = tl.zeros((1,), dtype=tl.float64)
    for tile in range(program, tiles * (tiles + 1) // 2, programs):
        # Rows r and tiles-1-r of the triangle have tiles+1 tiles between them: together they fill a rectangle.
        r = tile // (tiles + 1)
        c = tile % (tiles + 1)
        upper = c < tiles - r
        row = tl.where(upper, r, tiles - 1 - r)
        column = tl.where(upper, r + c, c - 1)
        rows_M = row * BLOCK + tl.arange(0, BLOCK)
        rows_N = column * BLOCK + tl.arange(0, BLOCK)
        product = row_products(a_ptr, rows_M, rows_N, positions, inputs, BLOCK, BLOCK_K, CHUNK)
        product *= row_products(g_ptr, rows_M, rows_N, positions, outputs, BLOCK, BLOCK_K, CHUNK)
        weight = tl.where(row == column, 1.0, 2.0)
        value += tl.sum(tl.sum(product, 1).to(tl.float64), 0) * weight
        absolute += tl.sum(tl.sum(tl.abs(product), 1).to(tl.float64), 0) * weight
    place = sample * programs + program + tl.arange(0, 1)
    tl.store(value_ptr + place, value)
    tl.store(absolute_ptr + place, absolute)


def symmetric_gram(a_NTI: Tensor, g_NTO: Tensor, workspace: int) -> Bounded:
    """Return squared norms and error bounds; sums are added in a fixed order, so that runs repeat bit by bit.

    Args:
        a_NTI: Layer inputs, shape ``(N, T, I)``, float32, float16 or bfloat16.
        g_NTO: Gradients of the layer outputs, shape ``(N, T, O)``, likewise.
        workspace: Not used: no block of the Gram matrix is stored.

    Returns:
        Squared norms, float32, shape ``(N,)``, and their error bounds.
    """
    del workspace
    samples, positions, inputs = a_NTI.shape
    outputs = g_NTO.shape[2]
    if a_NTI.numel() == 0 or g_NTO.numel() == 0:
        zero_N = torch.zeros(samples, device=a_NTI.device)
        return Bounded(*(zero_N.clone() for _ in Bounded._fields))
    block = 64 if positions > 32 else 32 if positions > 16 else 16
    tiles = triton.cdiv(positions, block)
    programs = min(tiles * (tiles + 1) // 2, triton.cdiv(_PROGRAMS, samples))
    value_NP, absolute_NP = torch.empty(2, samples, programs, dtype=torch.float64, device=a_NTI.device)
    _gram[(samples, programs)](
        operand(a_NTI),
        operand(g_NTO),
        value_NP,
        absolute_NP,
        positions,
        inputs,
        outputs,
        tiles,
        programs,
        BLOCK=block,
        BLOCK_K=32,
        CHUNK=CHUNK,
        num_warps=8 if block == 64 else 4,
    )
    value_N, absolute_N = value_NP.sum(1).float(), absolute_NP.sum(1).float()
    found = masses(position_norms(a_NTI), position_norms(g_NTO), inputs, outputs)
    # The kernel keeps no diagonal; what its sums may lose is known instead.
    drift = (matrix_unit_drift(inputs) + matrix_unit_drift(outputs)) / DRIFT_MARGIN
    error_N = gram_error(absolute_N, drift, found, inputs + outputs)
    return Bounded(value_N, error_N, found.mass_N, found.scale_N)
