"""Per-sample gradients of the affine part of a norm over features.

Shape letters: B samples, T positions, F features.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from ghostclip.kernels.bounds import widened
from ghostclip.kernels.twins import Twins, generator

MAX_FEATURES: Final = 1 << 13
"""Features that the kernel keeps in registers; for more the twin is used."""


class NormAffine(NamedTuple):
    """Gradients of weight and bias, which are what is measured, clipped and summed.

    Attributes:
        weight_BF: ``Σ_t g·x̂``, float32 or float64.
        bias_BF: ``Σ_t g``, likewise.
    """

    weight_BF: Tensor
    bias_BF: Tensor


def layer_norm_affine(x_BTF: Tensor, g_BTF: Tensor, *, eps: float) -> NormAffine:
    """Return what layer norm's weight and bias receive from each sample.

    Cost: the kernel reads each tensor once and stores neither the normalised input nor a product.

    Args:
        x_BTF: The layer's input, floating-point, shape ``(B, T, F)``.
        g_BTF: Gradient of its output, same shape.
        eps: Added to the variance.

    Returns:
        Gradients.
    """
    return _either(x_BTF, g_BTF, eps, centred=1)


def rms_norm_affine(x_BTF: Tensor, g_BTF: Tensor, *, eps: float) -> NormAffine:
    """Return what RMS norm's weight (and a bias, where there is one) receives from each sample.

    Args:
        x_BTF: The layer's input, floating-point, shape ``(B, T, F)``.
        g_BTF: Gradient of its output, same shape.
        eps: Added to the mean square.

    Returns:
        Gradients.
    """
    return _either(x_BTF, g_BTF, eps, centred=0)


def is_fused(x_BTF: Tensor, g_BTF: Tensor) -> bool:
    """Return whether the kernel would form the gradients, which reads each tensor once.

    Without it what was normalised, and its product with the gradient, are written and read again: 40 bytes for each
    value of 16 bits in the place of 4, in six operations in the place of one.

    Args:
        x_BTF: The layer's input, shape ``(B, T, F)``.
        g_BTF: Gradient of its output, same shape.

    Returns:
        False on a CPU.
    """
    return x_BTF.shape[2] <= MAX_FEATURES and TWINS.pick(x_BTF, g_BTF) is not _naive


def _either(x_BTF: Tensor, g_BTF: Tensor, eps: float, *, centred: int) -> NormAffine:
    if x_BTF.shape[2] > MAX_FEATURES:
        return _naive(x_BTF, g_BTF, eps, centred)
    return TWINS.pick(x_BTF, g_BTF)(x_BTF, g_BTF, eps, centred)


def _naive(x_BTF: Tensor, g_BTF: Tensor, eps: float, centred: int) -> NormAffine:
    x_BTF, g_BTF = widened(x_BTF), widened(g_BTF)
    if centred:
        x_BTF = x_BTF - x_BTF.mean(2, keepdim=True)
    x_BTF = x_BTF / (x_BTF.square().mean(2, keepdim=True) + eps).sqrt()
    return NormAffine((g_BTF * x_BTF).sum(1), g_BTF.sum(1))


def _fast(x_BTF: Tensor, g_BTF: Tensor, eps: float, centred: int) -> NormAffine:
    from ghostclip.kernels._compiled.affine import norm_affine as kernel

    return NormAffine(*kernel(x_BTF, g_BTF, eps, centred))


def _example(device: torch.device) -> tuple[Tensor, Tensor, float, int]:
    x, g = torch.randn(2, 3, 13, 33, generator=generator()).to(device)
    return x, g, 1e-5, 1


TWINS: Final = Twins("norm_affine", _naive, _fast, (_example,))
