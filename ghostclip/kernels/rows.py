"""Sums and squared norms of gradients that add up in rows of a table.

Shape letters: B samples, T positions, I features, R rows that are added.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ghostclip.kernels.bounds import Bounded, position_norms, raised, sum_rounding, unit_roundoff, widened
from ghostclip.kernels.twins import Twins, generator


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
    return TWINS.pick(g_BTI)(ids_BT, g_BTI)


def _runs(ids_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the order that sorts each sample's rows, and each place's run of equal rows: its first place, its end."""
    sorted_BT, order_BT = ids_BT.sort(dim=1)
    first_BT = torch.searchsorted(sorted_BT, sorted_BT)
    return order_BT, first_BT, torch.searchsorted(sorted_BT, sorted_BT, right=True)


def _naive(ids_BT: Tensor, g_BTI: Tensor) -> Bounded:
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
    return Bounded(value_B, raised(value_B, delta_B), mass_B, scale_B)


def _fast(ids_BT: Tensor, g_BTI: Tensor) -> Bounded:
    from ghostclip.kernels._compiled.rows import row_squares as kernel

    runs = _runs(ids_BT)
    return _bounded(kernel(g_BTI, *runs), g_BTI, runs)


def _example(device: torch.device) -> tuple[Tensor, Tensor]:
    ids_BT = torch.randint(5, (2, 13), generator=generator())
    return ids_BT.to(device), torch.randn(2, 13, 33, generator=generator()).to(device)


TWINS: Final = Twins("row_square", _naive, _fast, (_example,))
