"""Clip bounds, of groups of parameters and adaptive ones, and what a gradient norm is clipped by: the coefficient.

A group is the whole model, each parameter alone, or named by the user. The adaptation's privacy cost is part of the
step's.

The clip factor is defined once. A rule is asked for coefficients and promises one thing: coefficient · norm ≤ C for
every sample, in floating point.

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

Shape letters: B samples, G clip groups.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from ghostclip import _validate
from ghostclip.errors import InvalidOptionError

_FLOOR: Final = {torch.float32: 1e-12, torch.float64: 1e-150}
# A coefficient is multiplied by the scale of the loss later; it must not become infinite there.
_HEADROOM: Final = 2.0**-40


class ClipRule(Protocol):
    """Rule from norms to coefficients with coefficient · norm ≤ C; its constants are its fields."""

    name: str  # in a checkpoint
    bounded: bool  # whether C must be finite

    def coefficients(self, norm_B: Tensor, max_grad_norm: float) -> Tensor:
        """Return the coefficient of every sample, ``(B,)``, from norms that are already rounded up.

        Privacy:
            Each coefficient may depend on its own norm alone; else one sample moves what is kept of the others.
        """

    def describe(self) -> dict[str, float]:
        """Return the rule's own constants by name."""
        return dict(vars(self))


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


@dataclass(frozen=True)
class Flat(ClipRule):
    """Clipping: min(1, C/‖g‖).

    Reference: Abadi et al. 2016 (arXiv 1607.00133), algorithm 1.
    """

    name = "flat"
    bounded = False

    def coefficients(self, norm_B: Tensor, max_grad_norm: float) -> Tensor:
        return clip_coefficients(norm_B, max_grad_norm)


@dataclass(frozen=True)
class AutoS(ClipRule):
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
class Normalised(ClipRule):
    """Every gradient is scaled to length C: C / ‖g‖ (AUTO-V); below the floor as if its norm were the floor.

    Reference: Bu et al. 2022 (arXiv 2206.07136), AUTO-V; Das et al. 2021 (arXiv 2106.07094), normalised updates.
    """

    name = "normalised"
    bounded = True

    def coefficients(self, norm_B: Tensor, max_grad_norm: float) -> Tensor:
        return _quotient(max_grad_norm, norm_B)


@dataclass(frozen=True)
class PSAC(ClipRule):
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


_NAMES_SHOWN = 5


class Grouping(Protocol):
    """Assignment of every trainable parameter to one clip group."""

    name: str  # in a checkpoint

    def assign(self, names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Return ({parameter name: number of its group}, names of the groups in the order of their numbers)."""

    def describe(self) -> dict[str, list[str]]:
        """Return the user's choice in plain values."""
        return {}


class Whole(Grouping):
    """One norm over all parameters."""

    name = "whole"

    def assign(self, names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        del names
        return {}, ("all",)


class PerParameter(Grouping):
    """A norm for every parameter tensor; a parameter that several layers share is one."""

    name = "per_layer"

    def assign(self, names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        return {name: number for number, name in enumerate(names)}, tuple(names)


class NamedGroups(Grouping):
    """Groups that a user names, by shell patterns such as "encoder.*", or full names."""

    name = "per_group"

    def __init__(self, patterns: Mapping[str, Sequence[str]]) -> None:
        self._patterns = {
            group: [listed] if isinstance(listed, str) else list(listed) for group, listed in patterns.items()
        }
        empty = [group for group, listed in self._patterns.items() if not listed]
        if empty or not self._patterns:
            raise InvalidOptionError(f"groups={patterns!r}: name at least one group, and a pattern for each.")

    def assign(self, names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Return the groups, in the user's order; refuse a parameter that belongs to no group or to several."""
        matches = {name: self._groups_of(name) for name in names}
        wrong = [f"{name} ({', '.join(groups) or 'none'})" for name, groups in matches.items() if len(groups) != 1]
        if wrong:
            more = f" and {len(wrong) - _NAMES_SHOWN} more" if len(wrong) > _NAMES_SHOWN else ""
            raise InvalidOptionError(
                f"groups: every trainable parameter belongs to exactly one group; not so: "
                f"{', '.join(wrong[:_NAMES_SHOWN])}{more}. Add a pattern such as '*' for the rest, or freeze them."
            )
        order = list(self._patterns)
        return {name: order.index(groups[0]) for name, groups in matches.items()}, tuple(order)

    def _groups_of(self, name: str) -> list[str]:
        """Return the groups with a pattern that the name matches; full names count before patterns."""
        exact = [group for group, listed in self._patterns.items() if name in listed]
        if exact:
            return exact
        return [
            group for group, listed in self._patterns.items() if any(fnmatchcase(name, pattern) for pattern in listed)
        ]

    def describe(self) -> dict[str, list[str]]:
        return {group: list(listed) for group, listed in self._patterns.items()}


# exp() of more than this is a bound at one of its ends anyway.
_LARGEST_EXPONENT = 100.0


class QuantileAdaptation:
    """Moves C after every step towards the `target_unclipped_quantile` of the norms.

        b = ½ + (Σ_b (1[‖g_b‖ ≤ C] - ½) + N(0, σ_b²)) / m,   C ← C·exp(-η·(b - target))

    with m the expected batch size, a public constant (the true size of a batch is not).

    Reference: Andrew et al. 2021 (arXiv 1905.03871), algorithm 1 and theorem 1.

    Privacy:
        A record changes the shifted count by at most ½, so the count is a Gaussian mechanism with noise multiplier
        2σ_b. Released together with a sum of noise multiplier σ_Δ = (σ⁻² - (2σ_b)⁻²)^-½ it costs exactly what one
        release with σ costs: a step is accounted with σ, the sum gets the larger σ_Δ, nothing is added to the ledger.
        Without the shift by ½ the count would have twice the sensitivity and the split would be wrong. C is a function
        of what was released, and so public. Under "replace_one" both sensitivities double, and so does σ_b.
    """

    def __init__(
        self,
        *,
        target_unclipped_quantile: float = 0.5,
        clipbound_learning_rate: float = 0.2,
        unclipped_num_std: float,
        min_clipbound: float = 1e-6,
        max_clipbound: float = 1e8,
    ) -> None:
        self.target = _validate.non_negative(target_unclipped_quantile, "target_unclipped_quantile")
        if self.target > 1:
            raise InvalidOptionError(f"target_unclipped_quantile={target_unclipped_quantile!r}: must be at most 1.")
        self.learning_rate = _validate.positive(clipbound_learning_rate, "clipbound_learning_rate")
        self.count_std = _validate.positive(unclipped_num_std, "unclipped_num_std")
        self.smallest = _validate.positive(min_clipbound, "min_clipbound")
        self.largest = _validate.positive(max_clipbound, "max_clipbound")
        if self.smallest >= self.largest:
            raise InvalidOptionError(
                f"min_clipbound={min_clipbound!r}: must lie below max_clipbound={max_clipbound!r}."
            )
        self.shifted_count: Tensor | None = None  # of the logical batch so far; not private

    def within(self, bound: float) -> float:
        """Return a bound clamped between the smallest and the largest."""
        return min(max(bound, self.smallest), self.largest)

    def gradient_noise_multiplier(self, noise_multiplier: float) -> float:
        """Return σ_Δ = (σ⁻² - (2σ_b)⁻²)^-½, the noise multiplier of the sum in a step that is accounted with σ."""
        if noise_multiplier >= 2 * self.count_std:
            raise InvalidOptionError(
                f"unclipped_num_std={self.count_std:g}: the noisy count alone costs more than a step of "
                f"noise_multiplier={noise_multiplier:g} may. Take more than half of the noise multiplier."
            )
        return (noise_multiplier**-2 - (2 * self.count_std) ** -2) ** -0.5

    def observe(self, norm_GB: Sequence[Tensor], bounds: Sequence[float], keep_B: Tensor) -> None:
        """Count the samples of one backward that stay unclipped, each as ±½."""
        # Samples that contribute nothing count 0.
        inside_B = keep_B.clone()
        for norm_B, bound in zip(norm_GB, bounds, strict=True):
            inside_B &= (norm_B <= bound).to(inside_B.device)
        shifted = inside_B.sum(dtype=torch.float64) - 0.5 * keep_B.sum(dtype=torch.float64)
        self.shifted_count = shifted if self.shifted_count is None else self.shifted_count + shifted

    def take_count(self) -> Tensor:
        """Return the shifted count of the logical batch, a float64 scalar, not private, and start the next."""
        count, self.shifted_count = self.shifted_count, None
        return torch.zeros((), dtype=torch.float64) if count is None else count

    def next_bound(self, bound: float, noisy_count: float, expected_batch_size: float) -> float:
        """Return C·exp(-η·(b - target)) for the next step, between the two ends, b from the noisy shifted count."""
        share = 0.5 + noisy_count / expected_batch_size
        exponent = -self.learning_rate * (share - self.target)
        return self.within(bound * math.exp(min(max(exponent, -_LARGEST_EXPONENT), _LARGEST_EXPONENT)))

    def describe(self) -> dict[str, Any]:
        """Return the options by name."""
        return {
            "target_unclipped_quantile": self.target,
            "clipbound_learning_rate": self.learning_rate,
            "unclipped_num_std": self.count_std,
            "min_clipbound": self.smallest,
            "max_clipbound": self.largest,
        }
