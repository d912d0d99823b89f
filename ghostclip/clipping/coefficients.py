"""The clip factor, defined once: how a sample's gradient norm becomes the share of it that is kept.

A rule is asked for coefficients and promises one thing: coefficient · norm ≤ C for every sample, in floating point.
Which parameters share a norm and a bound is not its business (see `policies`).

| norm | max_grad_norm | `Flat` | `AutoS`, `Normalised`, `PSAC` | why |
|---|---|---|---|---|
| 0 | any finite | 1 | C / s, with s the rule's denominator at norm 0 | the product is 0; 0/0 never arises |
| at most C | C | 1 | C / s(norm) | inside the ball only `Flat` keeps a gradient as it is |
| above C | C | C / norm, rounded down | C / s(norm), rounded down | must not exceed C in floating point |
| above C / tiny | any | 0 | 0 | the quotient would be no normal number, and could be rounded up |
| NaN or Inf | any | 0 | 0 | such a sample contributes nothing (`decisions` masks its values) |
| any finite | Inf | 1 | refused | no clipping asked for; C is a scale in the other rules |
| any | 0, negative, NaN | refused | refused | by the policy that holds C |
| below the floor | any | as at 0 | C / s(floor) | squares of so small values lose digits, so the norm is not known |

The floor is 1e-12 for float32 norms and 1e-150 for float64: down to it a norm is exact even where the loss was divided
by a batch of ten thousand and the values' squares leave the range of normal numbers. A bound C below the floor clips
every sample as if its norm were at least the floor.

Shape letters: B samples.
"""

import math
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from ghostclip import _validate

_FLOOR: Final = {torch.float32: 1e-12, torch.float64: 1e-150}
# A coefficient is multiplied by the scale of the loss later; it must not become infinite there.
_HEADROOM: Final = 2.0**-40


class ClipRule(Protocol):
    """Rule from norms to coefficients with coefficient · norm ≤ C."""

    @property
    def name(self) -> str:
        """Name of the rule in a checkpoint."""

    @property
    def bounded(self) -> bool:
        """Whether C must be finite."""

    def coefficients(self, norm_B: Tensor, max_grad_norm: float) -> Tensor:
        """Return the coefficient of every sample, ``(B,)``, from norms that are already rounded up.

        Privacy:
            Each coefficient may depend on its own norm alone; else one sample moves what is kept of the others.
        """

    def describe(self) -> dict[str, float]:
        """Return the rule's own constants by name."""


def clip_coefficients(norm_B: Tensor, max_grad_norm: float, *, largest: float = math.inf) -> Tensor:
    """Return min(1, C/‖g_b‖) for every sample, never above the true value; the table above has the edge cases.

    Reference: Abadi et al. 2016 (arXiv 1607.00133), algorithm 1.

    Privacy:
        ``coefficient · norm <= C`` holds in floating point for every sample with a finite norm, and a sample
        with a non-finite norm has coefficient 0: adding or removing one sample moves the clipped sum by at most C.
    """
    # `largest` is the largest norm where all are known to be finite: it spares the cases that cannot arise then.
    dtype = norm_B.dtype
    if max_grad_norm < _FLOOR[dtype]:
        return _rounded_down(max_grad_norm, norm_B.clamp(min=_FLOOR[dtype]), at_most=1.0)
    # No floor from here on: whatever lies below it lies below C, and is kept whole.
    if max_grad_norm > torch.finfo(dtype).max:
        # Infinity is below no bound but one that is infinite in this dtype.
        return (norm_B < math.inf).to(dtype)
    bound = _margin(max_grad_norm, dtype)
    # Norms inside the ball become the bound, and their quotient 1, with nothing rounded.
    outside_B = torch.threshold(norm_B, max_grad_norm, bound)
    quotient_B = torch.div(torch.scalar_tensor(bound, dtype=dtype, device="cpu"), outside_B)
    tiny = torch.finfo(dtype).tiny
    if largest * 2 * tiny < bound:
        # No quotient is below the normal numbers, and none is undefined.
        return quotient_B
    return torch.threshold_(quotient_B, tiny, 0.0).nan_to_num_(nan=0.0)


def _margin(max_grad_norm: float, dtype: torch.dtype) -> float:
    """Return C so much smaller that three roundings up (of two factors of a quotient, of its product) stay below C."""
    return max_grad_norm * (1 - 4 * torch.finfo(dtype).eps)


def _quotient(max_grad_norm: float, denominator_B: Tensor) -> Tensor:
    """Return C over the denominator, rounded down, finite; 0 where the denominator is not finite."""
    dtype = denominator_B.dtype
    at_most = torch.finfo(dtype).max * _HEADROOM
    return _rounded_down(max_grad_norm, denominator_B.clamp(min=_FLOOR[dtype]), at_most=at_most)


def _rounded_down(max_grad_norm: float, denominator_B: Tensor, *, at_most: float) -> Tensor:
    """Return C over the denominator, never above the true value; 0 where that is no normal number, or NaN."""
    limits = torch.finfo(denominator_B.dtype)
    bound = _margin(max_grad_norm, denominator_B.dtype)
    quotient_B = denominator_B.reciprocal().mul_(bound).clamp_(max=at_most)
    # Below the normal numbers a quotient has few digits and may be rounded up by half of itself.
    return torch.where(quotient_B >= limits.tiny, quotient_B, 0.0)


class _Rule:
    """Base of the rules: their constants are their fields."""

    def describe(self) -> dict[str, float]:
        return dict(vars(self))


@dataclass(frozen=True)
class Flat(_Rule):
    """Clipping: min(1, C/‖g‖).

    Reference: Abadi et al. 2016 (arXiv 1607.00133), algorithm 1.
    """

    name = "flat"
    bounded = False

    def coefficients(self, norm_B: Tensor, max_grad_norm: float) -> Tensor:
        return clip_coefficients(norm_B, max_grad_norm)


@dataclass(frozen=True)
class AutoS(_Rule):
    """Automatic clipping with a stabiliser: C / (‖g‖ + γ).

    Reference: Bu et al. 2022 (arXiv 2206.07136), AUTO-S.
    """

    # Every gradient is scaled to a length just below C; γ lets small gradients, and with them the direction of the true
    # gradient near a minimum, keep some of their size. C can be merged with the learning rate, so it needs no tuning.
    gamma: float = 0.01
    name = "automatic"
    bounded = True

    def __post_init__(self) -> None:
        _validate.positive(self.gamma, "gamma")

    def coefficients(self, norm_B: Tensor, max_grad_norm: float) -> Tensor:
        return _quotient(max_grad_norm, norm_B + self.gamma)


@dataclass(frozen=True)
class Normalised(_Rule):
    """Every gradient is scaled to length C: C / ‖g‖ (AUTO-V); below the floor as if its norm were the floor.

    Reference: Bu et al. 2022 (arXiv 2206.07136), AUTO-V; Das et al. 2021 (arXiv 2106.07094), normalised updates.
    """

    name = "normalised"
    bounded = True

    def coefficients(self, norm_B: Tensor, max_grad_norm: float) -> Tensor:
        return _quotient(max_grad_norm, norm_B)


@dataclass(frozen=True)
class PSAC(_Rule):
    """Per-sample adaptive clipping: C / (‖g‖ + r/(‖g‖ + r)).

    Reference: Xia et al. 2023 (arXiv 2212.00328), equation for the weight of DP-PSAC.
    """

    # Unlike `Normalised` it does not give tiny gradients the weight of large ones: the weight has its maximum at a norm
    # of about √r and falls towards C at norm 0.
    r: float = 0.1
    name = "psac"
    bounded = True

    def __post_init__(self) -> None:
        _validate.positive(self.r, "r")

    def coefficients(self, norm_B: Tensor, max_grad_norm: float) -> Tensor:
        return _quotient(max_grad_norm, norm_B + self.r / (norm_B + self.r))
