"""Norms of whole samples from the factors of all parameters, with cross terms and certified against rounding.

Shape letters: B samples, K factors.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from ghostclip.factors import Factor, Outer, Permuted, Placed, SquaredNorm, Stacked, inner
from ghostclip.factors.base import root_of_squares, rounded_up_, sum_of_squares
from ghostclip.factors.stacked import sum_tensors

# Rounding may add this share to a squared norm before the norm is computed again, by a form that does not cancel.
TOLERANCE: Final = {torch.float32: 1e-5, torch.float64: 1e-12}


class NormSum:
    """Adds up squared norms and their error bounds over factors.

    What is added is kept until the sum is asked for: two operations then, and not four for each factor.
    """

    def __init__(self) -> None:
        """Start at nothing."""
        self._values: list[Tensor] = []
        self._errors: list[Tensor] = []
        self._blocks: list[Tensor] = []
        self._root_B: Tensor | None = None

    def add(self, norm: SquaredNorm) -> None:
        """Add one factor's squared norms.

        Args:
            norm: Squared norms, which must not change afterwards.
        """
        self._root_B = None
        self._values.append(norm.value_B)
        if norm.error_B is not None:
            self._errors.append(norm.error_B)

    def add_blocks(self, norms: Sequence[Tensor]) -> None:
        """Add the squares of norms that need no error bound.

        Args:
            norms: Each of shape ``(B, K)``; they must not change afterwards.
        """
        self._root_B = None
        self._blocks += norms

    def total(self) -> SquaredNorm | None:
        """Return the sum of squares and the sum of error bounds, or None before the first."""
        if self._blocks:
            self._values.append(sum_of_squares(_together(self._blocks, self._blocks[0].device)))
            self._blocks = []
        if not self._values:
            return None
        if len(self._values) > 1:
            # Hundreds of squares would drift by more than a norm is rounded up by.
            device = self._values[0].device
            self._values = [_sum(self._values, device, torch.float64)]
            self._errors = [_sum(self._errors, device)] if self._errors else []
        return SquaredNorm(self._values[0], self._errors[0] if self._errors else None)

    def replace(self, norm: SquaredNorm) -> None:
        """Forget the sum and begin with another.

        Args:
            norm: What `total` returns from here on.
        """
        self._values, self._errors = [norm.value_B], [] if norm.error_B is None else [norm.error_B]
        self._blocks, self._root_B = [], None

    def of_blocks_B(self) -> Tensor | None:
        """Return the norms where all that was added are norms of blocks, the common case: nothing is done twice.

        Returns:
            Shape ``(B,)``, rounded up; None where squares or error bounds were added as well.
        """
        if self._root_B is None and self._blocks and not self._values:
            self._root_B = rounded_up_(root_of_squares(_together(self._blocks, self._blocks[0].device)))
        return self._root_B

    def norm_B(self) -> Tensor:
        """Return the norms, rounded up: the root of the sum and its error bound."""
        norm_B = self.of_blocks_B()
        if norm_B is None:
            total = self.total()
            assert total is not None
            norm_B = rounded_up_(_at_most_B(total).sqrt())
        return norm_B

    def doubtful_B(self) -> Tensor | None:
        """Return which samples' norms rounding may have changed by more than the tolerance; None where it cannot."""
        total = self.total()
        assert total is not None
        return None if total.error_B is None else total.error_B > TOLERANCE[total.value_B.dtype] * total.value_B


def _sum(parts: list[Tensor], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum of tensors of shape ``(B,)``.

    Args:
        parts: float32 or float64.
        device: Where the sum goes.
        dtype: What is summed in; None for their own.

    Returns:
        float64 if one of them is.
    """
    parts = _together(parts, device)
    if len(parts) <= 2:
        # One addition rounds once, in whatever precision.
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]
    stacked_KB = torch.stack(parts)
    return stacked_KB.sum(0, dtype=dtype).to(stacked_KB.dtype)


def _together(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    return [part.to(device) for part in parts] if any(part.device != device for part in parts) else parts


class GroupNorms:
    """One `NormSum` for every clip group.

    Attributes:
        sums: The sums, in the order of the groups' numbers.
        finite: Whether every sample's norm in every group is known to be finite.
        largest: The largest of the norms where that is known and finite, else None.
    """

    def __init__(self, group_of: Mapping[str, int]) -> None:
        """Start at nothing.

        Args:
            group_of: Number of each parameter's group by parameter name; names that are not listed belong to group 0.
        """
        self.group_of = group_of
        self.finite = False
        self.largest: float | None = None
        self.sums = [NormSum() for _ in range(1 + max(group_of.values(), default=0))]

    def add(self, name: str, norm: SquaredNorm) -> None:
        """Add the squared norms of one factor of a parameter.

        Args:
            name: The parameter's name.
            norm: Its squared norms.
        """
        self._changed()
        self.sums[self.group_of.get(name, 0)].add(norm)

    def add_norm_of(self, name: str, factor: Factor) -> None:
        """Add the squared norms of one factor of a parameter, in the cheapest form.

        Args:
            name: The parameter's name.
            factor: Its per-sample gradients through one use.
        """
        norms = factor.block_norms()
        if norms is None:
            self.add(name, factor.sqnorm())
        else:
            self._changed()
            self.sums[self.group_of.get(name, 0)].add_blocks(norms)

    def _changed(self) -> None:
        self.finite, self.largest = False, None

    def merge(self, other: "GroupNorms") -> None:
        """Add the sums of other parameters of the same groups.

        Args:
            other: Sums that are not used any more.
        """
        self._changed()
        for own, more in zip(self.sums, other.sums, strict=True):
            total = more.total()
            if total is not None:
                own.add(total)

    def refine(self, exact: "GroupNorms", doubtful_B: Tensor) -> None:
        """Replace the norms of doubtful samples, and of no others, so that no sample's norm depends on another sample.

        Args:
            exact: The norms of all samples, computed without cancellation.
            doubtful_B: Which samples are doubtful.
        """
        self._changed()
        for own, better in zip(self.sums, exact.sums, strict=True):
            before, after = own.total(), better.total()
            if before is not None and after is not None:
                # Kept in its own dtype, which tells how small a norm can be known; rounded up on the way.
                margin = 1 + 4 * torch.finfo(before.value_B.dtype).eps
                value_B = (after.value_B * margin).to(before.value_B)
                doubtful_B = doubtful_B.to(value_B.device)
                kept_B = torch.where(doubtful_B, value_B, before.value_B)
                error_B = None if before.error_B is None else before.error_B.masked_fill(doubtful_B, 0.0)
                own.replace(SquaredNorm(kept_B, error_B))

    def norm_GB(self, batch_size: int) -> list[Tensor]:
        """Return the norms of every group, rounded up; zeros for a group that nothing arrived for.

        Args:
            batch_size: B.

        Returns:
            One tensor of shape ``(B,)`` for each group.
        """
        if len(self.sums) == 1:
            return [torch.zeros(batch_size) if self.sums[0].total() is None else self.sums[0].norm_B()]
        alike = self._alike()
        like = next((norm.value_B for found in alike for norm in found.values()), torch.zeros(0))
        norm_GB = [like.new_zeros(batch_size)] * len(self.sums)
        for found in alike:
            square_KB = torch.stack([_at_most_B(norm) for norm in found.values()])
            for number, norm_B in zip(found, rounded_up_(square_KB.sqrt_()).unbind(), strict=True):
                norm_GB[number] = norm_B
        return norm_GB

    def _alike(self) -> Collection[dict[int, SquaredNorm]]:
        """Return the sums there are by their groups' numbers, those of each device and dtype by themselves."""
        found = {number: norm for number, norm in enumerate(total.total() for total in self.sums) if norm is not None}
        if len(found) == 1:
            return [found]
        alike: defaultdict[tuple[torch.device, torch.dtype], dict[int, SquaredNorm]] = defaultdict(dict)
        for number, norm in found.items():
            alike[norm.value_B.device, norm.value_B.dtype][number] = norm
        return alike.values()

    def doubtful_B(self) -> Tensor | None:
        """Return which samples' norms rounding may have changed in some group; None when there are none.

        Whether all are finite is asked at the same time and noted, so that a device is waited for once.

        Returns:
            Shape ``(B,)``, bool, on the first group's device.
        """
        norm_B = self.sums[0].of_blocks_B() if len(self.sums) == 1 else None
        if norm_B is not None and norm_B.numel() > 0:
            # Without error bounds; the largest of numbers one of which is NaN is NaN, and below nothing.
            largest = norm_B.amax().item()
            self.finite = largest < _most(norm_B.dtype) ** 0.5
            self.largest = largest if self.finite else None
            return None
        alike = self._alike()
        self.finite = len(alike) > 0 and all(_certain(list(found.values())) for found in alike)
        if self.finite:
            return None
        doubtful_B: Tensor | None = None
        for more_B in (total.doubtful_B() for total in self.sums if total.total() is not None):
            if more_B is not None:
                doubtful_B = more_B if doubtful_B is None else doubtful_B | more_B.to(doubtful_B.device)
        return None if doubtful_B is None or not bool(doubtful_B.any()) else doubtful_B


def _at_most_B(norm: SquaredNorm) -> Tensor:
    return norm.value_B if norm.error_B is None else (norm.value_B + norm.error_B).clamp_(min=0)


def _certain(norms: Sequence[SquaredNorm]) -> bool:
    """Return whether all norms are finite and changed by rounding by no more than the tolerance.

    Args:
        norms: At least one, all of one device and dtype.

    Returns:
        True or False; the device is waited for once.
    """
    value_KB = _stacked([norm.value_B for norm in norms])
    limit = _most(value_KB.dtype)
    bounded = [(norm.error_B, norm.value_B) for norm in norms if norm.error_B is not None]
    if not bounded:
        # The largest of numbers one of which is NaN is NaN, and below nothing.
        return value_KB.numel() == 0 or value_KB.amax().item() < limit
    error_KB, scale_KB = (_stacked(list(parts)) for parts in zip(*bounded, strict=True))
    small_KB = error_KB <= TOLERANCE[value_KB.dtype] * scale_KB
    return bool((value_KB < limit).all().logical_and_(small_KB.all()))


def _most(dtype: torch.dtype) -> float:
    """Return what is far enough below the largest number for whatever is added or multiplied on the way to a norm."""
    return torch.finfo(dtype).max / 4


def _stacked(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts)


def cross_terms(factors: Sequence[Factor]) -> SquaredNorm | None:
    """Return 2·Σ_{j<k} ⟨f_j, f_k⟩ of one parameter's factors, or None if no two of them meet.

    Args:
        factors: All factors of one parameter.

    Returns:
        The cross terms with their error bound. They cancel against the squared norms where uses oppose each other, so
        the bound scales with the norms themselves.
    """
    if len(factors) < 2:
        return None
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
        norm = total.total()
        if norm is not None:
            return norm
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
        total.add(name, SquaredNorm(value_B, None))
    return total
