"""Squared norms of gradients that are formed tile by tile and never stored, and their weighted sum over samples."""
# Triton reads the annotations of kernels: only its own mean something to it.
# ruff: noqa: ANN001, ANN202, PLR0913, PLR0917, N803
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ghostclip.kernels._compiled.tiles import chunk, gradient_tile, readable, row_squares, tile_size
from ghostclip.kernels.bounds import FORMED_COLUMNS, Reduced
from ghostclip.kernels.products import HALF
from ghostclip.kernels.twins import LARGE

# Programs that keep a large GPU busy; more of them only make more partial sums.
_PROGRAMS: Final = 1024
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
    place = part_ptr + (sample * programs + program) * COLUMNS + tl.arange(0, 1)
    tl.store(place, value)
    tl.store(place + 1, mass)
    tl.store(place + 2, scale)
    tl.store(place + 3, a_sum)
    tl.store(place + 4, g_sum)


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
    apart,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    ADD: tl.constexpr,
):
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
        row = sum_number * 0 + sample * between + sum_number * apart
        a_row = a_ptr + row * a_sample
        g_row = g_ptr + row * g_sample
        grad_OI = gradient_tile(a_row, g_row, a_step, g_step, i, o, positions, inputs, outputs, BLOCK, BLOCK_T, CHUNK)
        total += tl.load(coef_ptr + sample) * grad_OI
    place = ((sum_number * splits + split) * outputs + o[:, None]) * inputs + i[None, :]
    mask = (o[:, None] < outputs) & (i[None, :] < inputs)
    if ADD:
        total += tl.load(out_ptr + place, mask=mask, other=0.0)
    tl.store(out_ptr + place, total, mask=mask)


def _alike(a_NTI: Tensor, g_NTO: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors in one dtype, as a matrix unit needs them."""
    if a_NTI.dtype == g_NTO.dtype:
        return a_NTI, g_NTO
    return a_NTI.float(), g_NTO.float()


def _block(inputs: int, outputs: int, sums: int, *, half: bool) -> int:
    return tile_size(inputs, outputs, half=half, tiles=sums * triton.cdiv(inputs, LARGE) * triton.cdiv(outputs, LARGE))


def outer_square(a_NTI: Tensor, g_NTO: Tensor, weighting: int) -> Reduced:
    """Return each program's sums for the squared norms, added in a fixed order, so that runs repeat bit by bit."""
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
    deep = 64 if block == LARGE else 32
    return {"BLOCK": block, "BLOCK_T": deep, "CHUNK": chunk(positions, half=half), "num_warps": block // 16}


def weighted_sum(a_NTI: Tensor, g_NTO: Tensor, coef_B: Tensor, out_SOI: Tensor, *, apart: int, fresh: bool) -> Tensor:
    """Add ``Σ_b c_b Σ_t g_nt ⊗ a_nt`` to each of S matrices in place, without a weighted copy of either tensor."""
    # Rows are (S·B, T, ...); `apart` is the distance of the first samples of two sums: 1 where the slots of a sample
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
            sums if apart == 1 else 1,
            apart,
            **_options(block, a.shape[1], half=half),
            GROUP=8,
            ADD=splits == 1 and not fresh,
        )
        if splits > 1:
            torch.sum(parts, 1, out=out_SOI) if fresh else out_SOI.add_(parts.sum(1))
        fresh = False
    return out_SOI
