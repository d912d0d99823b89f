"""Squared norms of gradients that are formed tile by tile and never stored, and their weighted sum over samples."""
# Triton reads the annotations of kernels: only its own mean something to it.
# ruff: noqa: ANN001, ANN202, PLR0913, PLR0917, N803
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ghostclip.kernels._compiled.tiles import gradient_tile, operand
from ghostclip.kernels.bounds import CHUNK, Bounded, matrix_unit_drift
from ghostclip.kernels.outer import formed

# Programs that keep a large GPU busy; more of them only make more partial sums.
_PROGRAMS: Final = 1024
# Elements of the partial sums of a weighted sum (float32: 256 MiB).
_WORKSPACE: Final = 1 << 26
_BLOCK: Final = 64


@triton.jit
def _square(
    a_ptr,
    g_ptr,
    value_ptr,
    positions,
    inputs,
    outputs,
    programs,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    a_ptr += sample * positions * inputs
    g_ptr += sample * positions * outputs
    across = tl.cdiv(inputs, BLOCK)
    value = tl.zeros((1,), dtype=tl.float64)
    for tile in range(program, across * tl.cdiv(outputs, BLOCK), programs):
        i = (tile % across) * BLOCK + tl.arange(0, BLOCK)
        o = (tile // across) * BLOCK + tl.arange(0, BLOCK)
        grad_OI = gradient_tile(a_ptr, g_ptr, i, o, positions, inputs, outputs, BLOCK, BLOCK_T, CHUNK)
        value += tl.sum(tl.sum(grad_OI * grad_OI, 1).to(tl.float64), 0)
    tl.store(value_ptr + sample * programs + program + tl.arange(0, 1), value)


@triton.jit
def _weighted_sum(
    a_ptr,
    g_ptr,
    coef_ptr,
    out_ptr,
    samples,
    positions,
    inputs,
    outputs,
    splits,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    ADD: tl.constexpr,
):
    across = tl.cdiv(inputs, BLOCK)
    i = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    o = (tl.program_id(0) // across) * BLOCK + tl.arange(0, BLOCK)
    split = tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for sample in range(tl.program_id(1), samples, splits):
        # 64 bits by way of a 64-bit zero: the interpreter's loop variable is a number of Python's.
        skipped = (split * 0 + sample) * positions
        a_sample = a_ptr + skipped * inputs
        g_sample = g_ptr + skipped * outputs
        grad_OI = gradient_tile(a_sample, g_sample, i, o, positions, inputs, outputs, BLOCK, BLOCK_T, CHUNK)
        total += tl.load(coef_ptr + sample) * grad_OI
    place = out_ptr + (split * outputs + o[:, None]) * inputs + i[None, :]
    mask = (o[:, None] < outputs) & (i[None, :] < inputs)
    if ADD:
        total += tl.load(place, mask=mask, other=0.0)
    tl.store(place, total, mask=mask)


def _alike(a_NTI: Tensor, g_NTO: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors contiguous and in one dtype, as a matrix unit needs them."""
    dtype = a_NTI.dtype if a_NTI.dtype == g_NTO.dtype else torch.float32
    return operand(a_NTI.to(dtype)), operand(g_NTO.to(dtype))


def outer_square(a_NTI: Tensor, g_NTO: Tensor, samples_at_once: int) -> Bounded:
    """Return squared norms and error bounds; sums are added in a fixed order, so that runs repeat bit by bit.

    Args:
        a_NTI: Layer inputs, shape ``(N, T, I)``, float32, float16 or bfloat16.
        g_NTO: Gradients of the layer outputs, shape ``(N, T, O)``, likewise.
        samples_at_once: Not used: no gradient is stored.

    Returns:
        Squared norms, float32, shape ``(N,)``, and their error bounds.
    """
    del samples_at_once
    samples, positions, inputs = a_NTI.shape
    outputs = g_NTO.shape[2]
    if a_NTI.numel() == 0 or g_NTO.numel() == 0:
        zero_N = torch.zeros(samples, device=a_NTI.device)
        return Bounded(*(zero_N.clone() for _ in Bounded._fields))
    a, g = _alike(a_NTI, g_NTO)
    tiles = triton.cdiv(inputs, _BLOCK) * triton.cdiv(outputs, _BLOCK)
    programs = min(tiles, triton.cdiv(_PROGRAMS, samples))
    value_NP = torch.empty(samples, programs, dtype=torch.float64, device=a.device)
    sizes = (positions, inputs, outputs, programs)
    _square[(samples, programs)](a, g, value_NP, *sizes, BLOCK=_BLOCK, BLOCK_T=32, CHUNK=CHUNK, num_warps=4)
    value_N = value_NP.sum(1).float()
    bounded = formed(value_N, a, g)
    return bounded._replace(error_N=bounded.error_N + 2 * matrix_unit_drift(positions) * value_N)


def weighted_sum(a_NTI: Tensor, g_NTO: Tensor, coef_N: Tensor, out_OI: Tensor, *, fresh: bool = False) -> Tensor:
    """Add ``Σ_n c_n Σ_t g_nt ⊗ a_nt`` to a matrix; no weighted copy of either tensor is made.

    Each element is added to once, by one program: a kernel that is run twice gives the same sum.

    Args:
        a_NTI: Layer inputs, shape ``(N, T, I)``, float32, float16 or bfloat16.
        g_NTO: Gradients of the layer outputs, shape ``(N, T, O)``, likewise.
        coef_N: Coefficients, float32, shape ``(N,)``.
        out_OI: What is added to, in place: contiguous, float32, shape ``(O, I)``.
        fresh: Whether it is written, whatever its memory held.

    Returns:
        ``out_OI``.
    """
    samples, positions, inputs = a_NTI.shape
    outputs = g_NTO.shape[2]
    if a_NTI.numel() == 0 or g_NTO.numel() == 0:
        return out_OI.zero_() if fresh else out_OI
    a, g = _alike(a_NTI, g_NTO)
    tiles = triton.cdiv(inputs, _BLOCK) * triton.cdiv(outputs, _BLOCK)
    splits = max(1, min(samples, _PROGRAMS // tiles, _WORKSPACE // out_OI.numel()))
    parts = out_OI if splits == 1 else torch.empty(splits, outputs, inputs, device=a.device)
    sizes = (samples, positions, inputs, outputs, splits)
    options = {"BLOCK": _BLOCK, "BLOCK_T": 32, "CHUNK": CHUNK, "ADD": splits == 1 and not fresh, "num_warps": 4}
    _weighted_sum[(tiles, splits)](a, g, coef_N.contiguous(), parts, *sizes, **options)
    if splits == 1:
        return out_OI
    return torch.sum(parts, 0, out=out_OI) if fresh else out_OI.add_(parts.sum(0))
