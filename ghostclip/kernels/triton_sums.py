"""Triton kernels of sums over positions: squared norms of table rows, and the affine part of layer and RMS norm.

Each reads what it sums once; of rows, each run of equal row numbers is added up and squared where it is read. Loaded
when a kernel is first used, as all modules that import Triton.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton reads the annotations of kernels: only its own mean something to it.
# ruff: noqa: ANN001, ANN202, PLR0913, PLR0917, N803
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

_ROW_PROGRAMS: Final = 4096


@triton.jit
def _row_squares(
    g_ptr,
    order_ptr,
    first_ptr,
    end_ptr,
    value_ptr,
    positions,
    features,
    programs,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Sum of squares over a program's runs of equal table rows of one sample, each run added up first."""
    sample = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    g_ptr += sample * positions * features
    base = sample * positions
    value = tl.zeros((1,), dtype=tl.float64)
    for t in range(program, positions, programs):
        # Only the first position of a run finds a run to add up; the others see an empty range.
        end = tl.where(tl.load(first_ptr + base + t) == t, tl.load(end_ptr + base + t), t).to(tl.int32)
        for start in range(0, tl.where(end > t, features, 0), BLOCK_I):
            i = start + tl.arange(0, BLOCK_I)
            total = tl.zeros((BLOCK_I,), dtype=tl.float32)
            for near in range(t, end, BLOCK_R):
                index = near + tl.arange(0, BLOCK_R)
                row = tl.load(order_ptr + base + index, mask=index < end, other=0)
                mask = (index[:, None] < end) & (i[None, :] < features)
                g_RI = tl.load(g_ptr + row[:, None] * features + i[None, :], mask=mask, other=0.0).to(tl.float32)
                total += tl.sum(g_RI, 0)
            value += tl.sum((total * total).to(tl.float64), 0)
    tl.store(value_ptr + sample * programs + program + tl.arange(0, 1), value)


def row_squares(g_BTI: Tensor, order_BT: Tensor, first_BT: Tensor, end_BT: Tensor) -> Tensor:
    """Return squared norms of summed table rows, float32, shape ``(B,)``."""
    # order_BT: positions sorted by row number. first_BT, end_BT: begin and end of the run of equal row numbers that
    # each sorted place belongs to.
    samples, positions, features = g_BTI.shape
    if g_BTI.numel() == 0:
        return torch.zeros(samples, device=g_BTI.device)
    programs = min(positions, triton.cdiv(_ROW_PROGRAMS, samples))
    value_BP = torch.empty(samples, programs, dtype=torch.float64, device=g_BTI.device)
    tables = (order_BT.contiguous(), first_BT.contiguous(), end_BT.contiguous())
    block = min(1024, triton.next_power_of_2(features))
    sizes = (positions, features, programs)
    _row_squares[(samples, programs)](
        g_BTI.contiguous(), *tables, value_BP, *sizes, BLOCK_R=4, BLOCK_I=block, num_warps=4
    )
    return value_BP.sum(1).float()


_AFFINE_PROGRAMS: Final = 512
_TILE: Final = 4096


@triton.jit
def _norm_affine(
    x_ptr,
    g_ptr,
    out_ptr,
    positions,
    features,
    share,
    programs,
    bias_offset,
    eps,
    CENTRED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Gradients of a norm's weight and bias over a program's share of one sample's positions."""
    sample = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    x_ptr += sample * positions * features
    g_ptr += sample * positions * features
    f = tl.arange(0, BLOCK_F)
    weight = tl.zeros((BLOCK_F,), dtype=tl.float32)
    bias = tl.zeros((BLOCK_F,), dtype=tl.float32)
    last = min(positions, (program + 1) * share)
    for first in range(program * share, last, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        mask = (t[:, None] < last) & (f[None, :] < features)
        index = t[:, None].to(tl.int64) * features + f[None, :]
        x_TF = tl.load(x_ptr + index, mask=mask, other=0.0).to(tl.float32)
        g_TF = tl.load(g_ptr + index, mask=mask, other=0.0).to(tl.float32)
        if CENTRED:
            x_TF = tl.where(mask, x_TF - (tl.sum(x_TF, 1) / features)[:, None], 0.0)
        spread_T = tl.sqrt(tl.sum(x_TF * x_TF, 1) / features + eps)
        # Rows beyond the last are zero; with eps = 0 their spread is too.
        x_TF = x_TF / tl.where(t < last, spread_T, 1.0)[:, None]
        weight += tl.sum(g_TF * x_TF, 0)
        bias += tl.sum(g_TF, 0)
    index = (sample * programs + program) * features + f
    tl.store(out_ptr + index, weight, mask=f < features)
    tl.store(out_ptr + bias_offset + index, bias, mask=f < features)


def norm_affine(x_BTF: Tensor, g_BTF: Tensor, eps: float, centred: int) -> Tensor:
    """Return per-sample gradients of weight and bias, float32, (2, B, F)."""
    # ``centred`` is 1 for layer norm, 0 for RMS norm.
    samples, positions, features = x_BTF.shape
    if x_BTF.numel() == 0:
        return torch.zeros(2, samples, features, device=x_BTF.device)
    block_f = triton.next_power_of_2(features)
    block_t = max(1, min(triton.next_power_of_2(positions), _TILE // block_f))
    wanted = min(triton.cdiv(_AFFINE_PROGRAMS, samples), triton.cdiv(positions, 4 * block_t))
    share = triton.cdiv(positions, wanted)
    programs = triton.cdiv(positions, share)
    both_KBPF = torch.empty(2, samples, programs, features, device=x_BTF.device)
    _norm_affine[samples, programs](
        x_BTF.contiguous(),
        g_BTF.contiguous(),
        both_KBPF,
        positions,
        features,
        share,
        programs,
        samples * programs * features,
        eps,
        CENTRED=bool(centred),
        BLOCK_T=block_t,
        BLOCK_F=block_f,
        num_warps=max(4, block_t * block_f // 1024),
    )
    return both_KBPF[:, :, 0] if programs == 1 else both_KBPF.sum(2)
