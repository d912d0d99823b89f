"""Gradients on an integer grid: rounding sample by sample, so that the sensitivity of the sum is a whole number.

Letters: B samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ghostclip._validate import positive, positive_int
from ghostclip.errors import InvalidOptionError

MAX_BITS = 26
"""Squared norms up to 2^(2·26) are whole numbers that float64 sums without rounding."""

_SHRINK = 1 - 2.0**-10
_FLOAT32 = 2.0**-22


@dataclass(frozen=True)
class Grid:
    """The multiples of `step`; a sample's rounded gradient has a Euclidean norm of at most `bound` steps.

    Privacy:
        What is released is the integers and what follows from them, so that the sensitivity is `bound`, a whole number
        that is enforced in whole numbers; `step` only says what they mean.
    """

    step: float  # width of the grid in units of the gradient
    bound: int  # largest norm of one sample's integers: the sensitivity of their sum, at most 2^26

    def __post_init__(self) -> None:
        positive(self.step, "step")
        if positive_int(self.bound, "bound") > 2**MAX_BITS:
            raise InvalidOptionError(f"bound={self.bound!r}: must be at most 2^{MAX_BITS}.")

    @classmethod
    def for_norm(cls, max_grad_norm: float, *, bits: int = 24) -> Grid:
        """Return the grid on which C is 2^bits steps; at 24 bits, rounding is 2^-24 of the noise at σ = 1."""
        if positive_int(bits, "bits") > MAX_BITS:
            raise InvalidOptionError(f"bits={bits!r}: must be at most {MAX_BITS}.")
        return cls(step=positive(max_grad_norm, "max_grad_norm") * 2.0**-bits, bound=2**bits)

    @torch.no_grad()
    def quantize(self, grads: Sequence[torch.Tensor], coef_B: torch.Tensor) -> list[torch.Tensor]:
        """Clip and round every sample's gradient to the grid and sum over the samples, in integers.

        z_b = round(f·c_b·g_b / step), where f = (√(bound² - d/6) - 2)/bound - 2^-22 makes room for what rounding d
        coordinates adds to a norm (d/12 to its square, and 0.3 to itself as one standard deviation) and for a factor
        c_b in float32. Whether ‖z_b‖ ≤ bound is then checked in whole numbers, over all parameters together; a sample
        that fails is rounded toward zero from a slightly smaller value, and left out if it fails again or is not
        finite.

        Privacy:
            ‖z_b‖ ≤ bound holds for whatever `grads` and `coef_B` contain, so that the sum's sensitivity to a record
            is `bound`, if the other records' gradients do not depend on it, to the last bit. They must therefore be
            computed record by record (physical batches of one), or by kernels that give a row the same result in
            batches of any size: ordinary matrix products do not promise that.

        Cost:
            Two passes over the gradients, and float64 copies of one parameter's.
        """
        size = sum(grad[0].numel() for grad in grads) if len(coef_B) else 0
        room = 1 - size / (6 * self.bound**2)
        if room < 0.5:
            raise InvalidOptionError(f"bound={self.bound}: {size} coordinates do not fit; use a grid with more bits.")
        scaled_B = coef_B.to(torch.float64) * ((math.sqrt(room) - 2 / self.bound - _FLOAT32) / self.step)
        nearest_B = self._within(grads, scaled_B, torch.round)
        toward_zero_B = self._within(grads, scaled_B * _SHRINK, torch.trunc)
        return [
            _rounded(grad, scaled_B, torch.round).where(_over(nearest_B, grad), 0)
            .add_(_rounded(grad, scaled_B * _SHRINK, torch.trunc).where(_over(toward_zero_B & ~nearest_B, grad), 0))
            .to(torch.int64).sum(0)
            for grad in grads
        ]  # fmt: skip

    def _within(self, grads: Sequence[torch.Tensor], scaled_B: torch.Tensor, rounding: Any) -> torch.Tensor:
        """Return which samples keep the bound, decided without rounding errors."""
        # Squares of whole numbers up to 2^52 and their sums are exact in float64; beyond that they exceed the bound
        # whatever the rounding. NaN compares as false.
        sqnorm_B = torch.zeros_like(scaled_B)
        for grad in grads:
            sqnorm_B += (
                _rounded(grad, scaled_B, rounding).view(len(scaled_B), math.prod(grad.shape[1:])).square().sum(1)
            )
        return sqnorm_B <= float(self.bound) ** 2

    def to_float(self, total: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return an int64 sum as gradients, total·step rounded to the dtype."""
        return total.to(torch.float64).mul_(self.step).to(dtype)


def _over(mask_B: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Reshape a mask of samples to broadcast over gradients."""
    return mask_B.view(-1, *[1] * (grad.dim() - 1))


def _rounded(grad: torch.Tensor, scaled_B: torch.Tensor, rounding: Any) -> torch.Tensor:
    """Return c_b·g_b in steps of the grid, rounded to whole numbers, float64."""
    return rounding(grad.to(torch.float64) * _over(scaled_B, grad))
