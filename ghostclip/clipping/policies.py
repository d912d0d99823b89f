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
from typing import Any, Final

import torch
from torch import Tensor

from ghostclip import _validate
from ghostclip.clipping.bounds import (
    PSAC,
    AutoS,
    ClipRule,
    Flat,
    Grouping,
    NamedGroups,
    Normalised,
    PerParameter,
    QuantileAdaptation,
    Whole,
    clip_coefficients,
)
from ghostclip.errors import InvalidOptionError, ResumeError

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
    known = RELATIONS.get(relation) if type(relation) is str else None
    return RELATIONS[_validate.choice(relation, "relation", RELATIONS)] if known is None else known


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
    return policy or ClipPolicy(_validate.positive(max_grad_norm, "max_grad_norm", allow_infinity=True))
