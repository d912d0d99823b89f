"""Sums over positions, each read once: rows of a table, the affine part of a norm, and sums left by another kernel.

Shape letters: B, N samples, T positions, F, I features, R rows that are added.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from ghostclip.kernels.bounds import Bounded, error_of_raised, position_norms, sum_rounding, unit_roundoff, widened
from ghostclip.kernels.runtime import Twins, generator


class PositionSum:
    """Lazy sum of a tensor over its positions, unless a kernel that reads the tensor anyway has already left it."""

    def __init__(self, x_NTF: Tensor, axes: tuple[int, ...] = (1,)) -> None:
        # A bias's gradients are such a sum. The tensor must not change before the sum is read.
        self.shape = torch.Size([size for axis, size in enumerate(x_NTF.shape) if axis not in axes])
        self._axes = axes
        self._x_NTF: Tensor | None = x_NTF
        self._sum_NF: Tensor | None = None

    def index_among(self, *tensors: Tensor) -> int:
        """Return the number, from 1, of the tensor whose sum is still missing; 0 for none of them."""
        return next((number for number, one in enumerate(tensors, start=1) if one is self._x_NTF), 0)

    def leave(self, sum_NF: Tensor) -> None:
        """Set the sum that a kernel has formed, float32, ``(N, F)``."""
        self._sum_NF, self._x_NTF = sum_NF, None

    def value(self) -> Tensor:
        """Return the sum, in 32 bits a number at least, shape ``(N, F)``."""
        if self._sum_NF is None:
            assert self._x_NTF is not None
            wide = torch.promote_types(self._x_NTF.dtype, torch.float32)
            self.leave(self._x_NTF.sum(self._axes, dtype=wide))
        assert self._sum_NF is not None
        return self._sum_NF


def is_parallel(tensor: Tensor) -> bool:
    """Return whether ``index_add_`` would add to a tensor in another order in every run: on a GPU, with atomics."""
    return tensor.is_cuda


def add_rows_(out: Tensor, index_R: Tensor, source: Tensor) -> Tensor:
    """Add rows to those with given numbers, in place; what meets in one row in the same order in every run.

    Cost:
        On a GPU a sort of R keys beside the additions; nothing waits for the device.

    Reference:
        torch.use_deterministic_algorithms: ``index_put_`` with ``accumulate=True`` depends on the order on CPUs alone.
    """
    # A release is then bit-identical when a step is repeated, as a ledger asks after a crash.
    if is_parallel(out):
        return out.index_put_((index_R,), source, accumulate=True)
    return out.index_add_(0, index_R, source)


def _add_in_samples(out: Tensor, place_BT: Tensor, source: Tensor) -> Tensor:
    """Add to places within each sample, in place; ``out`` and source of shape ``(B, T)`` or ``(B, T, I)``."""
    samples, positions = place_BT.shape
    start_B1 = torch.arange(samples, device=place_BT.device).unsqueeze(1) * positions
    add_rows_(out.view(samples * positions, *out.shape[2:]), (start_B1 + place_BT).flatten(), source.flatten(0, 1))
    return out


def row_square(ids_BT: Tensor, g_BTI: Tensor) -> Bounded:
    """Return squared norms of gradients in which row ``ids[b,t]`` receives ``g[b,t]``.

    Cost: one sort of T keys per sample. The kernel reads every row once and stores no sum, the twin stores all sums.

    Privacy:
        ``value_N + error_N`` is at least the squared norm of what is summed.
    """
    return ROW_SQUARE.pick(g_BTI)(ids_BT, g_BTI)


def _runs(ids_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the order that sorts each sample's rows, and each place's run of equal rows: its first place, its end."""
    sorted_BT, order_BT = ids_BT.sort(dim=1)
    first_BT = torch.searchsorted(sorted_BT, sorted_BT)
    return order_BT, first_BT, torch.searchsorted(sorted_BT, sorted_BT, right=True)


def _naive_square(ids_BT: Tensor, g_BTI: Tensor) -> Bounded:
    """Plain-PyTorch twin: squared norms with equal rows added up before."""
    order_BT, first_BT, _ = runs = _runs(ids_BT)
    sorted_BTI = widened(g_BTI).take_along_dim(order_BT.unsqueeze(2), 1)
    sums_BTI = _add_in_samples(torch.zeros_like(sorted_BTI), first_BT, sorted_BTI)
    return _bounded(sums_BTI.square().sum((1, 2)), g_BTI, runs)


def _bounded(value_B: Tensor, g_BTI: Tensor, runs: tuple[Tensor, Tensor, Tensor]) -> Bounded:
    """Return squared norms with their masses: single rows are not rounded, sums of several are."""
    order_BT, first_BT, end_BT = runs
    norm_BT = position_norms(g_BTI).take_along_dim(order_BT, 1) * (end_BT - first_BT > 1)
    mass_B = torch.linalg.vector_norm(_add_in_samples(torch.zeros_like(norm_BT), first_BT, norm_BT), dim=1)
    scale_B = norm_BT.square().sum(1)
    delta_B = sum_rounding(torch.zeros_like(scale_B), scale_B, unit_roundoff(scale_B.dtype))
    return Bounded(value_B, error_of_raised(value_B, delta_B), mass_B, scale_B)


def _fast_square(ids_BT: Tensor, g_BTI: Tensor) -> Bounded:
    """As `_naive_square`, by the kernel."""
    from ghostclip.kernels.triton_sums import row_squares as kernel

    runs = _runs(ids_BT)
    return _bounded(kernel(g_BTI, *runs), g_BTI, runs)


def _square_example(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return arguments for a comparison of kernel and twin."""
    ids_BT = torch.randint(5, (2, 13), generator=generator())
    return ids_BT.to(device), torch.randn(2, 13, 33, generator=generator()).to(device)


ROW_SQUARE: Final = Twins("row_square", _naive_square, _fast_square, (_square_example,))


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
    return x_BTF.shape[2] <= MAX_FEATURES and NORM_AFFINE.pick(x_BTF, g_BTF) is not _naive_affine


def _either(x_BTF: Tensor, g_BTF: Tensor, eps: float, *, centred: int) -> NormAffine:
    """Return the gradients by kernel or twin."""
    if x_BTF.shape[2] > MAX_FEATURES:
        return _naive_affine(x_BTF, g_BTF, eps, centred)
    return NORM_AFFINE.pick(x_BTF, g_BTF)(x_BTF, g_BTF, eps, centred)


def _naive_affine(x_BTF: Tensor, g_BTF: Tensor, eps: float, centred: int) -> NormAffine:
    """Plain-PyTorch twin: gradients of weight and bias of layer norm, or of RMS norm if not `centred`."""
    x_BTF, g_BTF = widened(x_BTF), widened(g_BTF)
    if centred:
        x_BTF = x_BTF - x_BTF.mean(2, keepdim=True)
    x_BTF = x_BTF / (x_BTF.square().mean(2, keepdim=True) + eps).sqrt()
    return NormAffine((g_BTF * x_BTF).sum(1), g_BTF.sum(1))


def _fast_affine(x_BTF: Tensor, g_BTF: Tensor, eps: float, centred: int) -> NormAffine:
    from ghostclip.kernels.triton_sums import norm_affine as kernel

    return NormAffine(*kernel(x_BTF, g_BTF, eps, centred))


def _affine_example(device: torch.device) -> tuple[Tensor, Tensor, float, int]:
    x, g = torch.randn(2, 3, 13, 33, generator=generator()).to(device)
    return x, g, 1e-5, 1


NORM_AFFINE: Final = Twins("norm_affine", _naive_affine, _fast_affine, (_affine_example,))
