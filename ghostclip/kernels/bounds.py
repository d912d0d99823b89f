"""How far rounding may have lowered a squared norm: one definition for kernels, their twins and factors.

Shape letters: N samples (times slots), T positions, I inputs, O outputs.
"""

from __future__ import annotations

from math import sqrt
from typing import Final, NamedTuple

import torch
from torch import Tensor

MATRIX_UNIT_ROUNDINGS: Final = 16
"""Roundings towards zero that a kernel's sums may collect in matrix units, in units of the last place of the result.

A unit truncates once for every 16 products, and kernels start a new sum after `CHUNK` of them, so that at most half of
CHUNK / 16 = 32 last places are lost; sums of chunks round to nearest.
"""

CHUNK: Final = 512
"""Products that a kernel adds up before it starts a new sum."""


class Bounded(NamedTuple):
    """Squared norms with a bound on their rounding error.

    Attributes:
        value_N: Squared norms, shape ``(N,)``; a Gram sum that cancels may come out slightly negative.
        error_N: How far ``value_N`` may lie below the true value, same shape.
    """

    value_N: Tensor
    error_N: Tensor


def gram_error(scale_N: Tensor, inputs: int, outputs: int) -> Tensor:
    """Return what rounding may hide in a Gram sum.

    Rounding of T² dot products behaves like a random walk: it scales with the sum of squares, not with the result.

    Args:
        scale_N: ``Σ_t |a_t|²·|g_t|²``, shape ``(N,)``.
        inputs: I.
        outputs: O.

    Returns:
        A bound on the error of the squared norm, same shape.
    """
    unit = torch.finfo(scale_N.dtype).eps * (2 + (sqrt(inputs) + sqrt(outputs)) / 16)
    return unit * scale_N


def with_drift(value_N: Tensor, inputs: int, outputs: int) -> Tensor:
    """Raise a Gram sum by what dot products of equal values may have lost, in place.

    A random walk it is not when all terms are alike: a sum that grows rounds the same way for as long as it lies
    between two powers of two. Measured on constant inputs and gradients, the squared norm is low by (I + O) / 50 units
    in the last place where sums run along several hundred terms. Who chooses every bit of a layer's input, one large
    term and then terms that are each just rounded away, can still get above a bound by some hundred-thousandths of it;
    a margin for that would cost every other sample as much.

    Args:
        value_N: Squared norms, shape ``(N,)``, float32 or float64.
        inputs: I.
        outputs: O.

    Returns:
        ``value_N``.
    """
    return value_N.mul_(1 + torch.finfo(value_N.dtype).eps * (inputs + outputs) / 32)


def instantiated_error(value_N: Tensor, scale_N: Tensor) -> Tensor:
    """Return by how much the contraction that later forms a clipped sum may round to a larger gradient.

    It is ``(norm + δ)² - norm²``, where δ is the rounding of a sum of T products.

    Args:
        value_N: Squared norms of gradients that were formed, shape ``(N,)``.
        scale_N: ``Σ_t |a_t|²·|g_t|²``, shape ``(N,)``.

    Returns:
        A bound on the error of the squared norm, same shape.
    """
    delta_N = 4 * torch.finfo(value_N.dtype).eps * scale_N.to(value_N.dtype).sqrt()
    return delta_N * (2 * value_N.sqrt() + delta_N)


def matrix_unit_error(value_N: Tensor) -> Tensor:
    """Return what truncation in matrix units may have taken from squared norms, shape ``(N,)``."""
    return MATRIX_UNIT_ROUNDINGS * torch.finfo(value_N.dtype).eps * value_N.abs()


def position_scale(a_NTI: Tensor, g_NTO: Tensor) -> Tensor:
    """Return ``Σ_t |a_t|²·|g_t|²``: what a squared norm would be if no two positions met.

    Args:
        a_NTI: Layer inputs, shape ``(N, T, I)``.
        g_NTO: Gradients of the layer outputs, shape ``(N, T, O)``.

    Returns:
        Shape ``(N,)``, float64 for float64, float32 otherwise.
    """
    a_NT = torch.linalg.vector_norm(widened(a_NTI), dim=2)
    a_NT = (a_NT * torch.linalg.vector_norm(widened(g_NTO), dim=2)).square_()
    return a_NT.squeeze(1) if a_NT.shape[1] == 1 else a_NT.sum(1)


def widened(tensor: Tensor) -> Tensor:
    """Return a real or complex tensor in at least 32 bits a number (no copy when it is there already)."""
    return tensor if tensor.dtype == torch.float32 else tensor.to(torch.promote_types(tensor.dtype, torch.float32))
