"""Squared norms from a symmetric Gram matrix: ``Σ_{s,t} (a_s·a_t)(g_s·g_t)``, the blocks on and above the diagonal.

Shape letters: N samples (times slots), T positions, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ghostclip.kernels.bounds import Bounded, gram_error, position_scale, widened
from ghostclip.kernels.twins import Twins, generator, is_half

ROWS: Final = 128
"""Rows of the Gram matrix that the twin forms at a time."""


def symmetric_gram(a_NTI: Tensor, g_NTO: Tensor, *, rows: int = ROWS) -> Bounded:
    """Return squared norms of ``Σ_t g_t ⊗ a_t`` without a T×T tensor.

    The double sum cancels when positions oppose each other; ``error_N`` bounds what rounding may have hidden.

    Cost: (1 + 1/n)·T²·(I+O) a sample, for n blocks of rows. The kernel stores no part of the Gram matrix and takes
    16-bit tensors as they are; the twin stores ``(N, rows, T)`` of it.

    Args:
        a_NTI: Layer inputs, shape ``(N, T, I)``, floating-point or complex.
        g_NTO: Gradients of the layer outputs, shape ``(N, T, O)``.
        rows: Rows of the Gram matrix that the twin forms at a time.

    Returns:
        Squared norms, which may be slightly negative, and a bound in proportion to ``Σ_t |a_t|²·|g_t|²``; float64 for
        float64, else float32.

    Privacy:
        ``value_N + error_N`` is at least the true squared norm, whichever way it was formed.
    """
    if a_NTI.shape[1] == 1:
        value_N = position_scale(a_NTI, g_NTO)
        return Bounded(value_N, torch.zeros_like(value_N))
    return TWINS.pick(a_NTI, g_NTO, pays=is_half(a_NTI, g_NTO))(a_NTI, g_NTO, rows)


def _naive(a_NTI: Tensor, g_NTO: Tensor, rows: int) -> Bounded:
    a_NTI, g_NTO = widened(a_NTI), widened(g_NTO)
    positions = a_NTI.shape[1]
    total_N = a_NTI.new_zeros(a_NTI.shape[0])
    for start in range(0, positions, rows):
        stop = min(start + rows, positions)
        product = torch.bmm(a_NTI[:, start:stop], a_NTI[:, start:].mT)
        product *= torch.bmm(g_NTO[:, start:stop], g_NTO[:, start:].mT)
        total_N += product[:, :, : stop - start].sum((1, 2)) + 2 * product[:, :, stop - start :].sum((1, 2))
    return Bounded(total_N, gram_error(position_scale(a_NTI, g_NTO), a_NTI.shape[2], g_NTO.shape[2]))


def _fast(a_NTI: Tensor, g_NTO: Tensor, rows: int) -> Bounded:
    from ghostclip.kernels._compiled.gram import symmetric_gram as kernel

    return kernel(a_NTI, g_NTO, rows)


def _example(device: torch.device) -> tuple[Tensor, Tensor, int]:
    a, g = (torch.randn(2, 70, width, generator=generator()) for width in (40, 33))
    return a.to(device, torch.bfloat16), g.to(device, torch.bfloat16), 32


TWINS: Final = Twins("symmetric_gram", _naive, _fast, _example)
