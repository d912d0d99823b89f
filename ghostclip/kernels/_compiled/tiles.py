"""Pieces that the matrix kernels share: products of tiles whose sums start anew every few hundred terms.

Matrix units truncate when they accumulate, always downwards; short sums that are added with rounding to nearest keep
that loss within `bounds.MATRIX_UNIT_ROUNDINGS`. All products are full float32 or exact products of 16-bit values.
"""
# Triton reads the annotations of kernels: only its own mean something to it.
# ruff: noqa: ANN001, ANN202, PLR0913, PLR0917, N803
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from ghostclip.kernels import switch


@triton.jit
def row_products(
    x_ptr,
    rows_M,
    rows_N,
    positions,
    width,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the inner products of two sets of BLOCK rows of one matrix (positions, width), float32."""
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, width, CHUNK):
        part = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        for first in range(start, min(start + CHUNK, width), BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            mask_M = (rows_M[:, None] < positions) & (k[None, :] < width)
            mask_N = (rows_N[:, None] < positions) & (k[None, :] < width)
            x_MK = tl.load(x_ptr + rows_M[:, None].to(tl.int64) * width + k[None, :], mask=mask_M, other=0.0)
            x_NK = tl.load(x_ptr + rows_N[:, None].to(tl.int64) * width + k[None, :], mask=mask_N, other=0.0)
            part = tl.dot(x_MK, tl.trans(x_NK), part, input_precision="ieee")
        total += part
    return total


@triton.jit
def gradient_tile(
    a_ptr,
    g_ptr,
    i,
    o,
    positions,
    inputs,
    outputs,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the tile (o, i) of one sample's gradient ``Σ_t g_t ⊗ a_t``, float32."""
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, positions, CHUNK):
        part = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        for first in range(start, min(start + CHUNK, positions), BLOCK_T):
            t = first + tl.arange(0, BLOCK_T)
            g_mask = (t[:, None] < positions) & (o[None, :] < outputs)
            a_mask = (t[:, None] < positions) & (i[None, :] < inputs)
            g_TO = tl.load(g_ptr + t[:, None].to(tl.int64) * outputs + o[None, :], mask=g_mask, other=0.0)
            a_TI = tl.load(a_ptr + t[:, None].to(tl.int64) * inputs + i[None, :], mask=a_mask, other=0.0)
            part = tl.dot(tl.trans(g_TO), a_TI, part, input_precision="ieee")
        total += part
    return total


def operand(tensor: Tensor) -> Tensor:
    """Return a matrix as kernels read it: contiguous, and in a type that products are defined for.

    Triton's interpreter multiplies the bits of bfloat16, not its values; in float32 the products are the same.

    Args:
        tensor: float32, float16 or bfloat16.

    Returns:
        A tensor of the same values.
    """
    if switch.interpreted() and tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.contiguous()
