"""Clip policies: what is done to every sample's gradient, and how far one sample can therefore move the sum.

A policy is a rule (how a norm becomes a coefficient), a grouping (which parameters share a norm), the bounds of the
groups, and perhaps an adaptation (how the bounds follow the data). It is the only holder of C: noise is calibrated to
the sensitivity that the policy states, so that the two cannot differ.

    per group l:  g_bl → coefficient(‖g_bl‖, C_l)·g_bl,   sensitivity = √(Σ_l C_l²)

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
from ghostclip.clipping.coefficients import PSAC, AutoS, ClipRule, Flat, Normalised, clip_coefficients
from ghostclip.errors import InvalidOptionError, ResumeError

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
        found = {name: self._groups_of(name) for name in names}
        wrong = [f"{name} ({', '.join(groups) or 'none'})" for name, groups in found.items() if len(groups) != 1]
        if wrong:
            more = f" and {len(wrong) - _NAMES_SHOWN} more" if len(wrong) > _NAMES_SHOWN else ""
            raise InvalidOptionError(
                f"groups: every trainable parameter belongs to exactly one group; not so: "
                f"{', '.join(wrong[:_NAMES_SHOWN])}{more}. Add a pattern such as '*' for the rest, or freeze them."
            )
        order = list(self._patterns)
        return {name: order.index(groups[0]) for name, groups in found.items()}, tuple(order)

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
        self._shifted_count: Tensor | None = None

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
        self._shifted_count = shifted if self._shifted_count is None else self._shifted_count + shifted

    def peek(self) -> Tensor | None:
        """Return the shifted count so far, or None. Not private."""
        return self._shifted_count

    def put(self, count: Tensor | None) -> None:
        """Restore the shifted count that `peek` returned."""
        self._shifted_count = count

    def forget(self) -> None:
        """Drop the count of a logical batch that was released or abandoned."""
        self._shifted_count = None

    def take_count(self) -> Tensor:
        """Return the shifted count of the logical batch, a float64 scalar, not private, and start the next."""
        count, self._shifted_count = self._shifted_count, None
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


RELATIONS: Final = {"zero_out": 1.0, "add_remove": 1.0, "replace_one": 2.0}
"""Neighbouring relations, and how often C fits into the distance of two neighbouring clipped sums.

Under "zero_out" one record's contribution is replaced by nothing (the number of records is public), under "add_remove"
one record is added or removed, under "replace_one" one record becomes another: its contribution may turn round.
"""


def relation_factor(relation: str) -> float:
    """Return the sensitivity under a relation in units of C.

    Args:
        relation: One of `RELATIONS`.

    Returns:
        1 or 2.

    Raises:
        InvalidOptionError: If there is no such relation.
    """
    return RELATIONS[_validate.choice(relation, "relation", RELATIONS)]


@dataclass(frozen=True)
class Layout:
    """The clip groups of one model.

    Attributes:
        group_of: Number of each parameter's group by parameter name; names that are not listed belong to group 0.
        bounds: C_l of every group.
        labels: Name of every group.
    """

    group_of: Mapping[str, int]
    bounds: tuple[float, ...]
    labels: tuple[str, ...]


class ClipPolicy:
    """Grouping, bounds and rule of the clipping of every sample's gradient; see the module.

    Privacy:
        `sensitivity()` bounds the L2 distance of the clipped sums of any two neighbouring batches, in floating point.
        A sample whose gradient is not finite in any group contributes nothing to any. Bounds, constants and groups
        count as public.

    Args:
        max_grad_norm: One bound C for the whole gradient, shared equally by the groups (C_l = C/√G), or one bound C_l
            per group, in the groups' order.
        rule: How a norm becomes a coefficient.
        grouping: Which parameters share a norm.
        adaptation: How C follows a quantile of the norms; None keeps it.

    Raises:
        InvalidOptionError: If a bound is not above 0, or infinite where the rule needs a finite one.

    Example:
        >>> from ghostclip.clipping.policies import per_layer
        >>> policy = per_layer(0.5)  # each parameter by itself
        >>> clipper = ghostclip.GhostClipper(model, policy=policy)
    """

    def __init__(
        self,
        max_grad_norm: float | Sequence[float],
        *,
        rule: ClipRule | None = None,
        grouping: Grouping | None = None,
        adaptation: QuantileAdaptation | None = None,
    ) -> None:
        self.rule: ClipRule = Flat() if rule is None else rule
        self.grouping: Grouping = Whole() if grouping is None else grouping
        self.adaptation = adaptation
        self._shares: tuple[float, ...] | None = None
        if isinstance(max_grad_norm, Sequence) and not isinstance(max_grad_norm, str):
            bounds = [_validate.positive(bound, "max_grad_norm") for bound in max_grad_norm]
            if not bounds or isinstance(self.grouping, Whole):
                raise InvalidOptionError(
                    f"max_grad_norm={max_grad_norm!r}: several bounds need clipping='per_layer' or groups."
                )
            self._max_grad_norm = math.sqrt(math.fsum(bound**2 for bound in bounds))
            self._shares = tuple(bound / self._max_grad_norm for bound in bounds)
        else:
            self.max_grad_norm = _validate.positive(max_grad_norm, "max_grad_norm", allow_infinity=True)
        if adaptation is not None:
            self.max_grad_norm = adaptation.within(self._max_grad_norm)

    @property
    def max_grad_norm(self) -> float:
        """C = √(Σ_l C_l²); setting it scales all groups' bounds alike."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        several = not isinstance(self.grouping, Whole)
        finite = self.rule.bounded or several or self.adaptation is not None
        self._max_grad_norm = _validate.positive(value, "max_grad_norm", allow_infinity=not finite)

    def sensitivity(self, relation: str = "zero_out") -> float:
        """Return how far one record can move the clipped sum (L2).

        Args:
            relation: Which data sets are neighbours, one of `RELATIONS`.

        Returns:
            √(Σ_l C_l²), twice that for "replace_one".
        """
        return relation_factor(relation) * self._max_grad_norm

    def gradient_noise_multiplier(self, noise_multiplier: float) -> float:
        """Return the noise on the sum in units of the sensitivity, so that a whole step costs what σ costs.

        Args:
            noise_multiplier: σ of the step as it is accounted.

        Returns:
            σ, or more where the adaptation's noisy count takes a part of it.
        """
        if self.adaptation is None or noise_multiplier == 0:
            return noise_multiplier
        return self.adaptation.gradient_noise_multiplier(noise_multiplier)

    def layout(self, names: Sequence[str]) -> Layout:
        """Return the clip groups of a model.

        Args:
            names: Names of its trainable parameters, each shared one once, in the model's order.

        Returns:
            The groups and their bounds.

        Raises:
            InvalidOptionError: If bounds and groups differ in number, or a parameter has no group.
        """
        group_of, labels = self.grouping.assign(names)
        shares = self._shares
        if shares is None:
            shares = (1 / math.sqrt(len(labels)),) * len(labels) if len(labels) > 1 else (1.0,)
        if len(shares) != len(labels):
            shown = ", ".join(labels[:5])
            raise InvalidOptionError(
                f"max_grad_norm holds {len(shares)} bounds for {len(labels)} groups ({shown}, ...): give one bound for "
                "each, in this order, or one number for all of them together."
            )
        return Layout(group_of, tuple(share * self._max_grad_norm for share in shares), labels)

    def coefficients(
        self, norm_GB: Sequence[Tensor], bounds: Sequence[float], *, largest: float | None = None
    ) -> list[Tensor]:
        """Return the share of every sample's gradient that is kept, group by group.

        Args:
            norm_GB: Norms of each group, each of shape ``(B,)``, rounded up.
            bounds: C_l of each group, as `layout` gave them.
            largest: The largest norm of all, where it is known that all are finite.

        Returns:
            Coefficients of each group, each of shape ``(B,)``; 0 in all groups for a sample that is not finite in one.
        """
        if largest is not None and type(self.rule) is Flat:
            return [
                clip_coefficients(norm_B, bound, largest=largest) for norm_B, bound in zip(norm_GB, bounds, strict=True)
            ]
        if len(norm_GB) > 1 and len(set(bounds)) == 1 and _alike(norm_GB):
            norm = torch.stack(list(norm_GB))
            coef = self.rule.coefficients(norm.flatten(), bounds[0]).view_as(norm)
            return list((coef * (norm < math.inf).all(0)).unbind())
        coef_GB = [self.rule.coefficients(norm_B, bound) for norm_B, bound in zip(norm_GB, bounds, strict=True)]
        if len(coef_GB) == 1:
            return coef_GB
        finite_B = finite_samples(norm_GB)
        return [coef_B * finite_B.to(coef_B.device) for coef_B in coef_GB]

    def describe(self) -> dict[str, Any]:
        """Return what defines the policy, in plain values; the bound only where it does not move by itself."""
        described: dict[str, Any] = {"rule": self.rule.name, **self.rule.describe(), "groups": self.grouping.name}
        if self.grouping.describe():
            described["patterns"] = self.grouping.describe()
        if self._shares is not None:
            described["shares"] = list(self._shares)
        if self.adaptation is not None:
            described["adaptation"] = self.adaptation.describe()
        return described

    def state_dict(self) -> dict[str, float]:
        """Return what changes during training."""
        return {"max_grad_norm": self._max_grad_norm}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a saved state.

        Args:
            state: What `state_dict` returned.

        Raises:
            ResumeError: If it is incomplete.
        """
        if "max_grad_norm" not in state:
            raise ResumeError("clip policy state: missing max_grad_norm; pass what state_dict() returned.")
        self.max_grad_norm = state["max_grad_norm"]


def finite_samples(norm_GB: Sequence[Tensor]) -> Tensor:
    """Return which samples are finite in every group.

    Args:
        norm_GB: Norms of each group, each of shape ``(B,)``.

    Returns:
        Shape ``(B,)``, bool.
    """
    # A norm is at least 0, and NaN is below nothing.
    if len(norm_GB) > 1 and _alike(norm_GB):
        return (torch.stack(list(norm_GB)) < math.inf).all(0)
    finite_B = norm_GB[0] < math.inf
    for norm_B in norm_GB[1:]:
        finite_B &= (norm_B < math.inf).to(finite_B.device)
    return finite_B


def _alike(norm_GB: Sequence[Tensor]) -> bool:
    """Return whether norms have one device and one dtype, so that those of all groups can be stacked."""
    return len({(norm_B.device, norm_B.dtype) for norm_B in norm_GB}) == 1


def flat(max_grad_norm: float) -> ClipPolicy:
    """Return plain clipping of the whole gradient: min(1, C/‖g‖).

    Args:
        max_grad_norm: C.

    Returns:
        The policy.

    Example:
        >>> clipper = ghostclip.GhostClipper(model, policy=flat(1.0))  # the same as max_grad_norm=1.0
    """
    return ClipPolicy(max_grad_norm)


def automatic(max_grad_norm: float = 1.0, *, gamma: float = 0.01) -> ClipPolicy:
    """Return automatic clipping (AUTO-S): C/(‖g‖ + γ).

    Args:
        max_grad_norm: C, here a scale.
        gamma: γ, above 0.

    Returns:
        The policy.

    Example:
        >>> clipper = ghostclip.GhostClipper(model, policy=automatic(1.0, gamma=0.01))
    """
    return ClipPolicy(max_grad_norm, rule=AutoS(gamma))


def normalised(max_grad_norm: float = 1.0) -> ClipPolicy:
    """Return normalisation of every gradient to length C (AUTO-V).

    Args:
        max_grad_norm: C, here a scale.

    Returns:
        The policy.

    Example:
        >>> clipper = ghostclip.GhostClipper(model, policy=normalised(1.0))
    """
    return ClipPolicy(max_grad_norm, rule=Normalised())


def psac(max_grad_norm: float = 1.0, *, r: float = 0.1) -> ClipPolicy:
    """Return per-sample adaptive clipping: C/(‖g‖ + r/(‖g‖ + r)).

    Args:
        max_grad_norm: C, here a scale.
        r: r, above 0.

    Returns:
        The policy.

    Example:
        >>> clipper = ghostclip.GhostClipper(model, policy=psac(1.0, r=0.1))
    """
    return ClipPolicy(max_grad_norm, rule=PSAC(r))


def per_layer(max_grad_norm: float | Sequence[float], *, rule: ClipRule | None = None) -> ClipPolicy:
    """Return clipping of every parameter's gradient by itself; the sensitivity is √(Σ_l C_l²).

    Args:
        max_grad_norm: One bound per trainable parameter in the model's order, or C for all together (C_l = C/√L).
        rule: How a norm becomes a coefficient; `Flat` by default.

    Returns:
        The policy.

    Example:
        >>> bounds = [0.5, 0.1, 0.5, 0.1]  # one per parameter
        >>> clipper = ghostclip.GhostClipper(model, policy=per_layer(bounds))
    """
    return ClipPolicy(max_grad_norm, rule=rule, grouping=PerParameter())


def per_group(
    groups: Mapping[str, Sequence[str]], max_grad_norm: float | Sequence[float], *, rule: ClipRule | None = None
) -> ClipPolicy:
    """Return clipping of groups of parameters, each by its own norm.

    Args:
        groups: {group: shell patterns of parameter names}; every trainable parameter belongs to exactly one.
        max_grad_norm: One bound per group in the order given, or C for all together (C_l = C/√G).
        rule: How a norm becomes a coefficient; `Flat` by default.

    Returns:
        The policy.

    Example:
        >>> groups = {"first": ["0.*"], "last": ["2.*"]}
        >>> clipper = ghostclip.GhostClipper(model, policy=per_group(groups, [0.5, 1.0]))
    """
    return ClipPolicy(max_grad_norm, rule=rule, grouping=NamedGroups(groups))


def adaptive(max_grad_norm: float, adaptation: QuantileAdaptation) -> ClipPolicy:
    """Return plain clipping with a bound that follows a quantile of the norms.

    Args:
        max_grad_norm: C of the first step.
        adaptation: Which quantile, how fast, and the noise of the count.

    Returns:
        The policy.
    """
    return ClipPolicy(max_grad_norm, adaptation=adaptation)


def policy_of(max_grad_norm: float | None, policy: ClipPolicy | None) -> ClipPolicy:
    """Return the policy that was given, or the one that a bound stands for.

    Args:
        max_grad_norm: C, or None.
        policy: A policy, or None.

    Returns:
        The policy.

    Raises:
        InvalidOptionError: Not exactly one of them was given.
    """
    if (max_grad_norm is None) == (policy is None):
        raise InvalidOptionError("give exactly one of max_grad_norm and policy.")
    return (
        policy
        if policy is not None
        else ClipPolicy(_validate.positive(max_grad_norm, "max_grad_norm", allow_infinity=True))
    )
