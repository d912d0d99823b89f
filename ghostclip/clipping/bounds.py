"""Clip bounds: groups of parameters that share a norm and a bound, and a bound that follows a quantile of the norms.

A group is the whole model, each parameter alone, or named by the user. The adaptation's privacy cost is part of the
step's.

Shape letters: B samples, G clip groups.
"""

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import Tensor

from ghostclip import _validate
from ghostclip.errors import InvalidOptionError

_NAMES_SHOWN = 5


class Grouping(Protocol):
    """Assignment of every trainable parameter to one clip group."""

    @property
    def name(self) -> str:
        """Name of the grouping in a checkpoint."""

    def assign(self, names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Return ({parameter name: number of its group}, names of the groups in the order of their numbers)."""

    def describe(self) -> dict[str, list[str]]:
        """Return the user's choice in plain values."""


class Whole:
    """One norm over all parameters."""

    name = "whole"

    def assign(self, names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        del names
        return {}, ("all",)

    def describe(self) -> dict[str, list[str]]:
        return {}


class PerParameter:
    """A norm for every parameter tensor; a parameter that several layers share is one."""

    name = "per_layer"

    def assign(self, names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        return {name: number for number, name in enumerate(names)}, tuple(names)

    def describe(self) -> dict[str, list[str]]:
        return {}


class NamedGroups:
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
