"""Sums over positions, each read once: rows of a table, the affine part of a norm, a tensor's content.

*Fingerprints* are whole numbers by which contents of tensors are known again after copies and moves. They are sums of
whole numbers, which are exact in any order: the same on every device, and made where the values lie.

Shape letters: B, N samples, T positions, F, I features, R rows that are added; of fingerprints, N values of a tensor, M
rows of `WIDTH` of them, V values of a row, C constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ghostclip.kernels.bounds import Bounded, error_of_raised, position_norms, sum_rounding, unit_roundoff, widened
from ghostclip.kernels.runtime import Twins, generator

WIDTH: Final = 4096
"""Values of a content that are added up at once."""

_ROWS: Final = {"cpu": 16}
_ROWS_ON_GPU: Final = 1024
# Multipliers of the mixing, and what tells a content's two numbers and the places of its rows apart.
_MIXING: Final = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_PLACES: Final = (0x1E3779B97F4A7C15, 0x5851F42D4C957F2D)

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def content_prints(flats: Sequence[Tensor]) -> Tensor:
    """Return two fingerprints of the tensors' content: ``Σ_m mix(Σ_v w_v·x_mv + (m + 1)·c)`` modulo 2^64 for two c.

    Cost:
        One pass, two operations and 20 bytes of traffic a 32-bit value; bounded temporary memory; no device wait.
    """
    # x_mv are the bits of value v of row m; rows are `WIDTH` values and are counted over all tensors. Contents that
    # differ by chance agree with probability about 2^-64; an adversary can construct two that agree.
    parts = [part for flat_N in flats for part in _row_sums(flat_N.detach())]
    if not parts:
        return torch.zeros(2, dtype=torch.int64).to(flats[0].device)
    sums_M = torch.cat(parts)
    place_M = torch.ones_like(sums_M).cumsum_(0)
    mixed_CM = torch.stack([place_M * c for c in _PLACES]).add_(sums_M)
    for multiplier in _MIXING:
        mixed_CM = (mixed_CM ^ ((mixed_CM >> 31) & (2**33 - 1))).mul_(multiplier)
    return (mixed_CM ^ ((mixed_CM >> 32) & (2**32 - 1))).sum(1)


def _row_sums(flat_N: Tensor) -> list[Tensor]:
    """Return the weighted sums of a tensor's rows, one after the other."""
    bits_N = flat_N.view(_BITS.get(flat_N.element_size(), torch.int64))
    weight_V = _weights_of_row(flat_N.device)
    whole, rest = divmod(len(bits_N), WIDTH)
    parts = []
    if whole:
        rows_MV = bits_N.narrow(0, 0, whole * WIDTH).view(whole, WIDTH)
        step = min(whole, _ROWS.get(flat_N.device.type, _ROWS_ON_GPU))
        product_MV = bits_N.new_empty((step, WIDTH), dtype=torch.int64)
        for part_MV in rows_MV.split(step):
            # Of different types, so that no copy in 64 bits is made first.
            product = torch.mul(part_MV, weight_V, out=product_MV.narrow(0, 0, len(part_MV)))
            parts.append(product.sum(1))
    if rest:
        parts.append((bits_N.narrow(0, whole * WIDTH, rest) * weight_V.narrow(0, 0, rest)).sum(0, keepdim=True))
    return parts


def read_prints(prints: Sequence[Tensor]) -> list[list[int]]:
    """Copy the results of `content_prints` to the host, once for each device."""
    of_device: dict[torch.device, list[int]] = {}
    for index, fingerprint in enumerate(prints):
        of_device.setdefault(fingerprint.device, []).append(index)
    numbers: dict[int, list[int]] = {}
    for indices in of_device.values():
        numbers.update(zip(indices, torch.stack([prints[index] for index in indices]).tolist(), strict=True))
    return [numbers[index] for index in range(len(prints))]


@lru_cache(maxsize=16)
def _weights_of_row(device: torch.device) -> Tensor:
    """Return the odd 64-bit factors of a row's values, the same in every process."""
    drawn = np.random.default_rng(1).integers(0, 2**64, WIDTH, dtype=np.uint64) | np.uint64(1)
    return torch.from_numpy(drawn.view(np.int64)).to(device)


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
