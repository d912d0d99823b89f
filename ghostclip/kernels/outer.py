"""Sums of outer products: squared norms of gradients that are formed and not kept, and weighted sums over samples.

Shape letters: N samples (times slots), T positions, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ghostclip.kernels import products, runtime
from ghostclip.kernels.bounds import (
    SPLIT_ROUNDINGS,
    Bounded,
    Reduced,
    Unfinished,
    block_norms,
    dots,
    finished_one,
    formed_error,
    masses,
    position_norms,
    sum_of_squares,
    widened,
)
from ghostclip.kernels.runtime import Twins, generator, is_half

SHORT: Final = 16
"""Positions below which a tile of the kernel would be mostly empty."""

FORMED: Final = 512
"""Positions from which it is quicker to form each sample's gradient, and to weigh that in float32, than to multiply
weighted terms in two parts: 8 bytes of memory for every entry in the place of 2·T operations of matrix units."""

# Matrices that one start of the kernel adds to: CUDA counts programs to 65,535 along this axis.
_MOST_SUMS: Final = (1 << 16) - 1

# The narrower side of a matrix up to which a CPU's product with it is not formed in parts that are added up.
_NARROW: Final = 16

# Positions whose weighted terms are formed and added at a time.
_POSITIONS: Final = 1 << 14


def outer_square(a_NTI: Tensor, g_NTO: Tensor, *, samples_at_once: int = 1) -> Bounded:
    """Return squared norms of ``Σ_t g_t ⊗ a_t``, formed and squared.

    Cost: 2·T·I·O per sample. The kernel has each tile of a gradient in registers; the twin stores ``samples_at_once``
    whole gradients.

    Privacy:
        ``value_N + error_N`` is at least the true squared norm, whichever way it was formed.
    """
    return SQUARE.pick(a_NTI, g_NTO, pays=_pays(a_NTI, g_NTO))(a_NTI, g_NTO, samples_at_once)


def is_fused(a_NTI: Tensor, g_NTO: Tensor) -> bool:
    """Return whether the kernel would form the norms of gradients, so that none is stored."""
    return SQUARE.pick(a_NTI, g_NTO, pays=_pays(a_NTI, g_NTO)) is not _naive_square


def _pays(a_NTI: Tensor, g_NTO: Tensor) -> bool:
    """Return whether the kernel is expected to be faster than the twin."""
    return is_half(a_NTI, g_NTO) and a_NTI.shape[1] >= SHORT


def square_sums(a_NTI: Tensor, g_NTO: Tensor, *, samples_at_once: int = 1) -> Unfinished | Reduced | None:
    """Return squared norms as `outer_square` does, with errors to be worked out for many layers at once."""
    # None where nothing is to be formed, or where the two tensors are rounded differently.
    by_units = products.on_units(a_NTI, g_NTO)
    if not len(a_NTI) or by_units != any(products.on_units(x_NTF, x_NTF) for x_NTF in (a_NTI, g_NTO)):
        return None
    if is_fused(a_NTI, g_NTO):
        return _reduced_square(a_NTI, g_NTO)
    norms = position_norms(a_NTI), position_norms(g_NTO)
    value_N = _squares(a_NTI, g_NTO, samples_at_once)
    sizes = a_NTI.shape[2], g_NTO.shape[2]
    return Unfinished(value_N, *norms, sizes, by_units=by_units, weighting=weighting(a_NTI, g_NTO))


def weighted_sum(a_NTI: Tensor, g_NTO: Tensor, coef_N: Tensor, out_OI: Tensor, *, fresh: bool = False) -> Tensor:
    """Add ``Σ_n c_n Σ_t g_nt ⊗ a_nt`` to a matrix, in place; ``fresh`` overwrites it.

    Cost: 2·N·T·I·O. The kernel weighs each sample's gradient in registers and takes 16-bit tensors as they are; the
    twin makes a weighted copy of the smaller factor, and one of each in ``out_OI``'s dtype.
    """
    if out_OI.dtype != torch.float32 or not out_OI.is_contiguous():
        return _naive_sum(a_NTI, g_NTO, coef_N, out_OI, fresh=fresh)
    return SUM.pick(a_NTI, g_NTO, coef_N, out_OI, pays=_pays(a_NTI, g_NTO))(a_NTI, g_NTO, coef_N, out_OI, fresh=fresh)


def adds_in_a_row(a_NTI: Tensor, g_NTO: Tensor) -> bool:
    """Return whether a CPU's product over all samples would add the terms one by one."""
    # Samples then need products of their own. Matrices with a narrow side, and all of float64, are products in which
    # MKL adds one term after the other to a sum that grows with the batch: of 256 samples at 500 equal positions each,
    # leaving one out moved the sum by 1.004 times its gradient.
    narrow, wide = min(a_NTI.shape[2], g_NTO.shape[2]), a_NTI.dtype in (torch.float64, torch.complex128)
    return a_NTI.device.type == "cpu" and 1 < a_NTI.shape[1] >= narrow and (wide or narrow <= _NARROW)


def sums_by_kernel(
    a_NTI: Tensor, g_NTO: Tensor, coef_B: Tensor, out_SOI: Tensor, *, side_by_side: bool, fresh: bool = False
) -> bool:
    """Add what `weighted_sum` adds to S matrices at once, and return whether the kernel did it."""
    # `side_by_side`: the rows of one sample are neighbours, rather than those of one matrix.
    if out_SOI.dtype != torch.float32 or not out_SOI.is_contiguous() or len(out_SOI) > _MOST_SUMS:
        return False
    if SUM.pick(a_NTI, g_NTO, coef_B, out_SOI, pays=_pays(a_NTI, g_NTO)) is _naive_sum:
        return False
    _by_kernel(a_NTI, g_NTO, coef_B, out_SOI, stride=1 if side_by_side else len(coef_B), fresh=fresh)
    return True


def _naive_square(a_NTI: Tensor, g_NTO: Tensor, samples_at_once: int) -> Bounded:
    """Plain-PyTorch twin: squared norms of gradients that are formed a few samples at a time."""
    return formed(_squares(a_NTI, g_NTO, samples_at_once), a_NTI, g_NTO)


def _squares(a_NTI: Tensor, g_NTO: Tensor, samples_at_once: int) -> Tensor:
    """Return the squared norms of gradients that are formed a few samples at a time."""
    pieces = []
    for start in range(0, a_NTI.shape[0], samples_at_once):
        piece = slice(start, start + samples_at_once)
        grad_NOI = products.batched(g_NTO[piece].mT, a_NTI[piece])
        pieces.append(sum_of_squares(block_norms(grad_NOI.flatten(1))))
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces) if pieces else widened(a_NTI.new_zeros(0))


def formed(value_N: Tensor, a_NTI: Tensor, g_NTO: Tensor) -> Bounded:
    """Return squared norms of formed gradients with bounds on their rounding error."""
    measured = masses(position_norms(a_NTI), position_norms(g_NTO), a_NTI.shape[2], g_NTO.shape[2])
    error_N = formed_error(value_N, measured, a_NTI.shape[1] if products.on_units(a_NTI, g_NTO) else 0)
    return Bounded(value_N, error_N, measured.mass_N, measured.scale_N)


def weighting(a_NTI: Tensor, g_NTO: Tensor) -> int:
    """Return how often `weighted_sum` rounds a term at most, in units of 2^-24 of the term."""
    return SPLIT_ROUNDINGS if _by_units(a_NTI, g_NTO) and not _is_formed(a_NTI) else 1


def _by_units(a_NTI: Tensor, g_NTO: Tensor) -> bool:
    """Return whether matrix units multiply the two tensors."""
    # One position is added whole, rounded once: in float32, which costs little there.
    return a_NTI.shape[1] > 1 and products.on_units(a_NTI, g_NTO)


def _is_formed(a_NTI: Tensor) -> bool:
    """Return whether gradients are formed and then weighted, instead of weighting the terms."""
    # Weighted numbers of float16 may be too small or too large for it.
    return a_NTI.shape[1] >= FORMED or a_NTI.dtype == torch.float16


def summed_by_units(a_NTI: Tensor, g_NTO: Tensor, coef_B: Tensor, out: Tensor, *, fresh: bool = False) -> bool:
    """Add the weighted sum of gradients in slots (sample-major), and return whether matrix units could do it."""
    if out.dtype != torch.float32 or not _by_units(a_NTI, g_NTO) or not len(a_NTI):
        return False
    slots, row = len(a_NTI) // len(coef_B), out.view(1, -1)
    samples_at_once = max(1, runtime.elements(out.device) // max(1, out.numel()))
    for start in range(0, len(coef_B), samples_at_once):
        piece = slice(start * slots, (start + samples_at_once) * slots)
        some_B = coef_B[start : start + samples_at_once]
        a, g = products.aligned(a_NTI[piece]), products.aligned(g_NTO[piece])
        grad_BP = products.batched(g.mT, a).view(len(some_B), -1)
        if fresh and start == 0:
            torch.mm(some_B.unsqueeze(0), grad_BP, out=row)
        else:
            torch.addmm(row, some_B.unsqueeze(0), grad_BP, out=row)
    return True


def _split_sum(a_NTI: Tensor, g_NTO: Tensor, coef_N: Tensor, out_OI: Tensor, *, fresh: bool) -> None:
    """Add what `weighted_sum` does from two bfloat16 parts of the weighted terms, on matrix units."""
    at_once = max(1, _POSITIONS // a_NTI.shape[1])
    for start in range(0, len(a_NTI), at_once):
        piece = slice(start, start + at_once)
        coef, sides = coef_N[piece].view(-1, 1, 1), [products.aligned(x[piece]) for x in (g_NTO, a_NTI)]
        # The coefficients go to the smaller side.
        smaller = 1 if a_NTI.shape[2] < g_NTO.shape[2] else 0
        whole = sides[smaller]
        high = torch.mul(whole, coef, out=torch.empty_like(whole))
        # Less the term: what is left over, its sign turned.
        low = torch.addcmul(high, whole, coef, value=-1, out=torch.empty_like(whole))
        for part, sign in ((high, 1), (low, -1)):
            sides[smaller] = part
            g_TO, a_TI = (side.flatten(0, 1) for side in sides)
            products.add_product_(out_OI, g_TO.mT, a_TI, fresh=fresh and start == 0 and sign == 1, sign=sign)


def _naive_sum(a_NTI: Tensor, g_NTO: Tensor, coef_N: Tensor, out_OI: Tensor, *, fresh: bool = False) -> Tensor:
    """Plain-PyTorch twin: add the weighted sum to a matrix in the cheapest precise way."""
    if len(a_NTI) and out_OI.dtype == torch.float32 and out_OI.is_contiguous() and _by_units(a_NTI, g_NTO):
        if not _is_formed(a_NTI):
            _split_sum(a_NTI, g_NTO, coef_N, out_OI, fresh=fresh)
        else:
            summed_by_units(a_NTI, g_NTO, coef_N, out_OI, fresh=fresh)
        return out_OI
    if a_NTI.dtype != out_OI.dtype or g_NTO.dtype != out_OI.dtype:
        return _widened_sum(a_NTI, g_NTO, coef_N, out_OI, fresh=fresh)
    if out_OI.is_contiguous() and adds_in_a_row(a_NTI, g_NTO):
        formed_BP, row = dots(g_NTO.mT, a_NTI.mT).flatten(1), out_OI.view(1, -1)
        some = coef_N.unsqueeze(0), formed_BP
        return (torch.mm(*some, out=row) if fresh else torch.addmm(row, *some, out=row)).view(out_OI.shape)
    coef = coef_N.view(-1, 1, 1)
    # The coefficients go to the smaller side: fewer elements to multiply and to copy.
    if a_NTI.shape[2] < g_NTO.shape[2]:
        a_NTI = a_NTI * coef
    else:
        g_NTO = g_NTO * coef
    factors = g_NTO.flatten(0, -2).mT, a_NTI.flatten(0, -2)
    return torch.mm(*factors, out=out_OI) if fresh else torch.addmm(out_OI, *factors, out=out_OI)


def _widened_sum(a_NTI: Tensor, g_NTO: Tensor, coef_N: Tensor, out_OI: Tensor, *, fresh: bool) -> Tensor:
    """Add a weighted sum of outer products to a matrix of another dtype, widening a few samples at a time."""
    samples, dtype = len(a_NTI), out_OI.dtype
    elements = a_NTI.shape[1] * (a_NTI.shape[2] + g_NTO.shape[2])
    at_once = max(1, samples if runtime.traced() else runtime.elements(out_OI.device) // max(1, elements))
    for start in range(0, max(1, samples), at_once):
        some = slice(start, start + at_once)
        _naive_sum(a_NTI[some].to(dtype), g_NTO[some].to(dtype), coef_N[some], out_OI, fresh=fresh and start == 0)
    return out_OI


def _reduced_square(a_NTI: Tensor, g_NTO: Tensor) -> Reduced:
    """Return the kernel's sums for norms of gradients."""
    from ghostclip.kernels.triton_products import outer_square as kernel

    return kernel(a_NTI, g_NTO, weighting(a_NTI, g_NTO))


def _fast_square(a_NTI: Tensor, g_NTO: Tensor, samples_at_once: int) -> Bounded:
    """As `_naive_square`, by the kernel."""
    del samples_at_once
    return finished_one(_reduced_square(a_NTI, g_NTO))


def _fast_sum(a_NTI: Tensor, g_NTO: Tensor, coef_N: Tensor, out_OI: Tensor, *, fresh: bool = False) -> Tensor:
    """As `_naive_sum`, by the kernel."""
    _by_kernel(a_NTI, g_NTO, coef_N, out_OI.unsqueeze(0), stride=0, fresh=fresh)
    return out_OI


def _by_kernel(a_NTI: Tensor, g_NTO: Tensor, coef_B: Tensor, out_SOI: Tensor, *, stride: int, fresh: bool) -> None:
    """Add the weighted sums of S matrices by the kernel."""
    from ghostclip.kernels.triton_products import weighted_sum as kernel

    kernel(a_NTI, g_NTO, coef_B, out_SOI, stride=stride, fresh=fresh)


def _factors(device: torch.device, positions: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return random inputs and output gradients for examples."""
    a, g = (torch.randn(2, positions, size, generator=generator()) for size in (width, width - 7))
    return a.to(device, dtype), g.to(device, dtype)


def _square_example(device: torch.device, positions: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Return arguments for a comparison of the norm's kernel and twin."""
    return *_factors(device, positions, width, dtype), 2


def _sum_example(
    device: torch.device, positions: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return arguments for a comparison of the sum's kernel and twin."""
    a_NTI, g_NTO = _factors(device, positions, width, dtype)
    coef_N = torch.rand(len(a_NTI), generator=generator()).to(device)
    return a_NTI, g_NTO, coef_N, torch.ones(width - 7, width, device=device)


def _examples(example: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """Return one problem for each size of tiles, and for products that are added up in several sums."""
    sizes = (
        (40, 1300, torch.bfloat16),
        (40, 1300, torch.float16),
        (40, 70, torch.bfloat16),
        (4200, 70, torch.bfloat16),
        (600, 70, torch.float32),
    )
    return tuple(partial(example, positions=positions, width=width, dtype=dtype) for positions, width, dtype in sizes)


SQUARE: Final = Twins("outer_square", _naive_square, _fast_square, _examples(_square_example))
SUM: Final = Twins("weighted_sum", _naive_sum, _fast_sum, _examples(_sum_example))
