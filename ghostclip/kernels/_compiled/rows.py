"""Squared norms of table rows: each run of equal row numbers is added up and squared where it is read."""
# Triton reads the annotations of kernels: only its own mean something to it.
# ruff: noqa: ANN001, ANN202, PLR0913, PLR0917
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS: Final = 4096


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
                place = near + tl.arange(0, BLOCK_R)
                row = tl.load(order_ptr + base + place, mask=place < end, other=0)
                mask = (place[:, None] < end) & (i[None, :] < features)
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
    programs = min(positions, triton.cdiv(_PROGRAMS, samples))
    value_BP = torch.empty(samples, programs, dtype=torch.float64, device=g_BTI.device)
    tables = (order_BT.contiguous(), first_BT.contiguous(), end_BT.contiguous())
    block = min(1024, triton.next_power_of_2(features))
    sizes = (positions, features, programs)
    _row_squares[(samples, programs)](
        g_BTI.contiguous(), *tables, value_BP, *sizes, BLOCK_R=4, BLOCK_I=block, num_warps=4
    )
    return value_BP.sum(1).float()
