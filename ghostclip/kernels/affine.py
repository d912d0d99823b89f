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
    """Per-sample gradients of weight and bias, which are measured, clipped and summed."""

    weight_BF: Tensor  # ``Σ_t g·x̂``, float32 or float64
    bias_BF: Tensor  # ``Σ_t g``, likewise


def layer_norm_affine(x_BTF: Tensor, g_BTF: Tensor, *, eps: float) -> NormAffine:
    """Return each sample's gradients of layer norm's weight and bias; the kernel reads each tensor once.

    Cost: the kernel reads each tensor once and stores neither the normalised input nor a product.
    """
    return _either(x_BTF, g_BTF, eps, centred=1)


def rms_norm_affine(x_BTF: Tensor, g_BTF: Tensor, *, eps: float) -> NormAffine:
    """Return each sample's gradients of RMS norm's weight and bias."""
    return _either(x_BTF, g_BTF, eps, centred=0)


def is_fused(x_BTF: Tensor, g_BTF: Tensor) -> bool:
    """Return whether the kernel would form the gradients."""
    # Without it, a 16-bit value costs 40 bytes of traffic instead of 4.
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
