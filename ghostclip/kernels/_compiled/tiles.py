"""Pieces that the matrix kernels share: products of tiles whose sums start anew where they would grow too long.

Matrix units cut off where they accumulate, always towards zero; sums of `bounds.UNIT_CHAIN` products that are added
with rounding to nearest keep that loss within what `bounds.UNIT_LOSS` allows for. All products are full float32 or
exact products of 16-bit values.
"""
# Triton reads the annotations of kernels: only its own mean something to it.
# ruff: noqa: ANN001, ANN202, PLR0913, PLR0917, N803
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ghostclip.kernels import switch, workspace
from ghostclip.kernels.bounds import CHAIN_OF_KERNELS, UNIT_CHAIN
from ghostclip.kernels.products import HALF
from ghostclip.kernels.twins import LARGE, SMALL

# Numbers of 16 bits in what a program reads at once; rows that begin elsewhere are read number by number.
_ALIGNED: Final = 16
# Features from which a copy of such rows costs less than reading them that way.
_LONG: Final = 1 << 10


@triton.jit
def row_products(
    x_ptr,
    step,
    rows_M,
    rows_N,
    positions,
    width,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
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
    at_once = max(1, len(a_NTI)) if whole or copied == 0 else max(1, workspace.elements(a_NTI.device) // copied)
    for start in range(0, len(a_NTI), at_once):
        piece = slice(start, start + at_once)
        yield piece, _operand(a_NTI[piece]), _operand(g_NTO[piece])


def _is_copied(x_NTF: Tensor) -> bool:
    if x_NTF.shape[2] > 1 and x_NTF.stride(2) != 1:
        return True
    return x_NTF.dtype in HALF and x_NTF.shape[2] >= _LONG and x_NTF.stride(1) % _ALIGNED != 0


def _operand(x_NTF: Tensor) -> Tensor:
    if switch.interpreted() and x_NTF.dtype == torch.bfloat16:
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
