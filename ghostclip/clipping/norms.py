"""Norms of whole samples from the factors of all parameters, with cross terms and certified against rounding.

Shape letters: B samples.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from ghostclip.factors import Factor, Outer, Permuted, Placed, SquaredNorm, Stacked, inner
from ghostclip.factors.stacked import sum_tensors

# Rounding may add this share to a squared norm before the norm is computed again, by a form that does not cancel.
TOLERANCE: Final = {torch.float32: 1e-5, torch.float64: 1e-12}


class NormSum:
    """Adds up squared norms and their error bounds over factors.

    Attributes:
        value_B: Sum of squares, or None before the first.
        error_B: Sum of error bounds.
    """

    def __init__(self) -> None:
        """Start at nothing."""
        self.value_B: Tensor | None = None
        self.error_B: Tensor | None = None

    def add(self, norm: SquaredNorm) -> None:
        """Add one factor's squared norms."""
        if self.value_B is None or self.error_B is None:
            self.value_B, self.error_B = norm.value_B.clone(), norm.error_B.clone()
            return
        if norm.value_B.dtype == torch.float64 and self.value_B.dtype != torch.float64:
            self.value_B, self.error_B = self.value_B.double(), self.error_B.double()
        self.value_B += norm.value_B.to(self.value_B.device)
        self.error_B += norm.error_B.to(self.value_B.device)

    def norm_B(self) -> Tensor:
        """Return the norms, rounded up: the root of the sum and its error bound."""
        assert self.value_B is not None
        assert self.error_B is not None
        eps = torch.finfo(self.value_B.dtype).eps
        return (self.value_B + self.error_B).clamp(min=0).sqrt() * (1 + 8 * eps)

    def doubtful_B(self) -> Tensor:
        """Return which samples' norms rounding may have changed by more than the tolerance."""
        assert self.value_B is not None
        assert self.error_B is not None
        return self.error_B > TOLERANCE[self.value_B.dtype] * self.value_B


class GroupNorms:
    """One `NormSum` for every clip group.

    Attributes:
        sums: The sums, in the order of the groups' numbers.
    """

    def __init__(self, group_of: Mapping[str, int]) -> None:
        """Start at nothing.

        Args:
            group_of: Number of each parameter's group by parameter name; names that are not listed belong to group 0.
        """
        self.group_of = group_of
        self.sums = [NormSum() for _ in range(1 + max(group_of.values(), default=0))]

    def add(self, name: str, norm: SquaredNorm) -> None:
        """Add the squared norms of one factor of a parameter.

        Args:
            name: The parameter's name.
            norm: Its squared norms.
        """
        self.sums[self.group_of.get(name, 0)].add(norm)

    def merge(self, other: "GroupNorms") -> None:
        """Add the sums of other parameters of the same groups.

        Args:
            other: Sums that are not used any more.
        """
        for own, more in zip(self.sums, other.sums, strict=True):
            if more.value_B is not None and more.error_B is not None:
                own.add(SquaredNorm(more.value_B, more.error_B))

    def refine(self, exact: "GroupNorms", doubtful_B: Tensor) -> None:
        """Replace the norms of doubtful samples, and of no others, so that no sample's norm depends on another sample.

        Args:
            exact: The norms of all samples, computed without cancellation.
            doubtful_B: Which samples are doubtful.
        """
        for own, better in zip(self.sums, exact.sums, strict=True):
            if own.value_B is not None and own.error_B is not None and better.value_B is not None:
                # Kept in its own dtype, which tells how small a norm can be known; rounded up on the way.
                margin = 1 + 4 * torch.finfo(own.value_B.dtype).eps
                value_B = (better.value_B * margin).to(own.value_B)
                own.value_B = torch.where(doubtful_B.to(value_B.device), value_B, own.value_B)
                own.error_B = own.error_B.masked_fill(doubtful_B.to(value_B.device), 0.0)

    def norm_GB(self, batch_size: int) -> list[Tensor]:
        """Return the norms of every group, rounded up; zeros for a group that nothing arrived for.

        Args:
            batch_size: B.

        Returns:
            One tensor of shape ``(B,)`` for each group.
        """
        return [torch.zeros(batch_size) if total.value_B is None else total.norm_B() for total in self.sums]

    def doubtful_B(self) -> Tensor | None:
        """Return which samples' norms rounding may have changed in some group; None when there are none."""
        doubtful_B: Tensor | None = None
        for total in self.sums:
            if total.value_B is not None:
                more_B = total.doubtful_B()
                doubtful_B = more_B if doubtful_B is None else doubtful_B | more_B.to(doubtful_B.device)
        return None if doubtful_B is None or not bool(doubtful_B.any()) else doubtful_B


def cross_terms(factors: Sequence[Factor]) -> SquaredNorm | None:
    """Return 2·Σ_{j<k} ⟨f_j, f_k⟩ of one parameter's factors, or None if no two of them meet.

    Args:
        factors: All factors of one parameter.

    Returns:
        The cross terms with their error bound. They cancel against the squared norms where uses oppose each other, so
        the bound scales with the norms themselves.
    """
    total_B: Tensor | None = None
    for place, first in enumerate(factors):
        for second in factors[:place]:
            if isinstance(first, Placed) and isinstance(second, Placed) and first.disjoint_from(second):
                continue
            product_B = 2 * inner(first, second)
            total_B = product_B if total_B is None else total_B + product_B
    if total_B is None:
        return None
    eps = torch.finfo(total_B.dtype).eps
    return SquaredNorm(total_B, 8 * eps * total_B.abs())


def in_double(factor: Factor) -> Factor:
    """Return the factor with its outer products in float64."""
    if isinstance(factor, Outer):
        return Outer(factor.a_NTI.double(), factor.g_NTO.double(), shape=factor.shape, slots=factor.slots)
    if isinstance(factor, Placed):
        return Placed(in_double(factor.inner), factor.index, shape=factor.shape)
    if isinstance(factor, Permuted):
        return Permuted(in_double(factor.inner), factor.order)
    if isinstance(factor, Stacked):
        return factor.with_parts({number: in_double(part) for number, part in factor.parts.items()}, factor.shape)
    return factor


def exact_sqnorm(factor: Factor) -> SquaredNorm:
    """Return a factor's squared norms by instantiation in float64, where nothing cancels unseen."""
    if isinstance(factor, Outer):
        double = in_double(factor)
        assert isinstance(double, Outer)
        return double.instantiated_sqnorm()
    if isinstance(factor, (Placed, Permuted)):
        return exact_sqnorm(factor.inner)
    if isinstance(factor, Stacked):
        total = NormSum()
        for part in factor.parts.values():
            total.add(exact_sqnorm(part))
        if total.value_B is not None and total.error_B is not None:
            return SquaredNorm(total.value_B, total.error_B)
    return factor.sqnorm()


def exact_norms(by_parameter: Mapping[str, Sequence[Factor]], group_of: Mapping[str, int]) -> GroupNorms:
    """Return the norms of all samples in float64 without a Gram; shared parameters are summed before squaring.

    Args:
        by_parameter: All factors of every parameter.
        group_of: The parameters' clip groups, see `GroupNorms`.

    Returns:
        The sums.
    """
    total = GroupNorms(group_of)
    for name, factors in by_parameter.items():
        if len(factors) == 1:
            total.add(name, exact_sqnorm(factors[0]))
            continue
        summed = sum_tensors([in_double(factor).materialize().double() for factor in factors])
        value_B = summed.flatten(1).square().sum(1)
        total.add(name, SquaredNorm(value_B, torch.zeros_like(value_B)))
    return total
