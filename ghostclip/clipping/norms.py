"""Per-sample gradient norms over all parameters, from their factors, with cross terms and certified against rounding.

Shape letters: B samples, K factors, G clip groups; R, N rows and columns of what ranks exchange.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from ghostclip.factors import AtIndex, Dense, Factor, Permuted, SquaredNorm, Windows, inner
from ghostclip.factors.base import Terms, terms_side_by_side
from ghostclip.factors.wrapped import sum_tensors
from ghostclip.kernels import runtime
from ghostclip.kernels.bounds import (
    CROSS_ROUNDINGS,
    SUM_ROUNDINGS,
    Bounded,
    Product,
    Reduced,
    Unfinished,
    error_of_raised,
    finished,
    product_norms,
    root_of_squares,
    rounded_up_,
    sum_of_squares,
    sum_rounding,
    unit_roundoff,
)

# Rounding may add this share to a squared norm before the norm is computed again, in float64. Half of it is what a norm
# may come out too large by, which with all other rounding stays below the 1e-5 that clipped sums in float32 promise.
TOLERANCE: Final = {torch.float32: 1.2e-5, torch.float64: 1e-12}
# The same where matrix units formed products of 16-bit numbers, each of which was rounded to 2^-8 of itself before.
TOLERANCE_BY_UNITS: Final = 2.0**-9
# What a sample's contribution, formed in float64, may be off by, as a share of its norm: 2^-21.
UNBOUNDED: Final = 2.0**-21


# By what share the squared norms of what all ranks have may differ between them: what rounding does.
_ALIKE: Final = 1e-5
# Share of a sample's squared norm that is no more than rounding.
_NOTHING: Final = 1e-10


class SharedSamples(Protocol):
    """Ranks that work on the same samples, each with a part of every sample's gradient: squares of parts add up."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that the squares of whole parameters count on."""

    def is_divided(self, name: str) -> bool:
        """Return whether each rank has a part of a parameter; whole ones must have the same gradients on all."""

    def refuse_difference(self) -> None:
        """Refuse gradients that differ between ranks, unless sums of this step will be compared; called on all."""

    def add_up(self, local: Tensor) -> Tensor:
        """Return the sum over the ranks, the same on all to the bit; called on all of them, consumes its argument."""

    def shape_of(self, name: str) -> torch.Size:
        """Return the shape of a parameter that every rank has whole."""

    @property
    def dtype(self) -> torch.dtype:
        """What norms are in: the same on all ranks."""

    @property
    def device(self) -> torch.device:
        """Where this rank's part of the model is."""


class NormSum:
    """Sum over factors of per-sample squared norms, with bounds on its rounding and the masses of its terms."""

    # Parts are stored until the sum is asked for: a few operations then, and not as many for each factor.
    def __init__(self) -> None:
        """Start with nothing added."""
        self._values: list[Tensor] = []  # squared norms (B,)
        self._errors: list[Tensor] = []  # bounds on their rounding
        self._terms: list[Terms] = []  # what the clipped sum may round of them
        self._blocks: list[Tensor] = []  # norms (B, K) that need no bound, of blocks of a gradient
        # Each with the number of layers that it is of.
        self._unfinished: list[tuple[Unfinished | Reduced, int]] = []
        self._products: list[Product] = []  # outer products without positions: a norm is a product of two
        self._root_B: Tensor | None = None  # cached by `of_blocks_B`
        self._found: SquaredNorm | None = None  # cached by `total`
        self._overridden: tuple[Tensor, Tensor] | None = None  # (samples, their norms) in place of the sums

    def add(self, norm: SquaredNorm | Unfinished | Reduced | Product, *, layers: int = 1) -> None:
        """Add one factor's squared norms, or what they follow from; the argument must not change afterwards."""
        # `layers`: of how many layers it is, those of one layer side by side.
        self._root_B = self._found = None
        if isinstance(norm, (Unfinished, Reduced)):
            self._unfinished.append((norm, layers))
        elif isinstance(norm, Product):
            self._products.append(norm)
        else:
            self._values.append(norm.value_B)
            if norm.error_B is not None:
                self._errors.append(norm.error_B)
            if norm.terms is not None:
                self._terms.append(norm.terms)

    def add_blocks(self, norms: Sequence[Tensor]) -> None:
        """Add the squares of norms ``(B, K)`` that need no error bound."""
        self._root_B = self._found = None
        self._blocks += norms

    def _finish(self) -> None:
        """Compute the squares and error bounds of Gram sums that were added unfinished."""
        for same_kind in _of_kinds(self._unfinished, lambda one: (one[0].kind, one[1])):
            first, layers = same_kind[0]
            bounded = finished([norm for norm, _ in same_kind])
            if layers > 1:
                bounded = Bounded(*(part.unflatten(1, (layers, -1)).flatten(0, 1) for part in bounded))
            self._values += bounded.value_N.unbind()
            self._errors.append(bounded.error_N.sum(0))
            mass_B = torch.linalg.vector_norm(bounded.mass_N, dim=0)
            if first.weighting > 1:
                mass_B = mass_B * first.weighting
            self._terms.append(Terms(mass_B, bounded.scale_N.sum(0), first.positions, first.by_units))
        self._unfinished = []

    def _multiply(self) -> None:
        """Compute the norms of factors that were added as products."""
        for products in _of_kinds(self._products, lambda one: (one.g_N1.device, one.g_N1.dtype, one.a_NK[0].dtype)):
            self._blocks += product_norms(products)
        self._products = []

    def total(self) -> SquaredNorm | None:
        """Return the sum of squares with its error bound, that of the clipped sum included; None before the first."""
        self._finish()
        self._multiply()
        if self._blocks:
            self._values.append(sum_of_squares(_on_device(self._blocks, self._blocks[0].device)))
            self._blocks = []
        if not self._values:
            return None
        if self._found is None:
            device = self._values[0].device
            # Hundreds of squares would drift by more than a norm is rounded up by.
            value_B = _sum(self._values, device, torch.float64)
            terms = terms_side_by_side(self._terms, device)
            errors = list(self._errors)
            if terms is not None:
                delta_B = sum_rounding(terms.mass_B, terms.scale_B, unit_roundoff(value_B.dtype))
                errors.append(error_of_raised(value_B, delta_B))
            self._values, self._terms = [value_B], [] if terms is None else [terms]
            self._found = SquaredNorm(value_B, _sum(errors, device) if errors else None, terms)
        return self._found

    def replace(self, norm: SquaredNorm) -> None:
        """Set the sum to one that ranks have added up."""
        self._errors, self._terms, self._root_B = [], [], None
        self._values, self._found = [norm.value_B], norm

    def override(self, index_D: Tensor, norm_D: Tensor) -> None:
        """Override the norms of a few samples with ones rounded up, computed in float64."""
        self._overridden = index_D, norm_D

    def with_overridden(self, norm_B: Tensor) -> Tensor:
        """Return norms ``(B,)`` with the overridden ones put in."""
        if self._overridden is None:
            return norm_B
        index_D, norm_D = self._overridden
        return norm_B.index_copy(0, index_D.to(norm_B.device), norm_D.to(norm_B))

    def of_blocks_B(self) -> Tensor | None:
        """Return the norms, rounded up, if only norms without error bounds were added (the common case); else None."""
        if self._root_B is None and not (self._values or self._unfinished) and (self._blocks or self._products):
            self._multiply()
            self._root_B = rounded_up_(root_of_squares(_on_device(self._blocks, self._blocks[0].device)))
        return self._root_B

    def norm_B(self) -> Tensor | None:
        """Return the norms, rounded up: the root of the sum and its error bound; None where nothing was added."""
        norm_B = self.of_blocks_B()
        if norm_B is None:
            total = self.total()
            if total is None:
                return None
            norm_B = rounded_up_(_at_most_B(total).sqrt())
        return self.with_overridden(norm_B)

    def imprecise_B(self) -> Tensor:
        """Return which samples' norms are not finite, or rounded by more than the tolerance."""
        total = self.total()
        assert total is not None
        imprecise_B = ~(total.value_B < _most(total.value_B.dtype))
        if total.error_B is not None:
            imprecise_B |= ~(total.error_B <= _tolerance(total) * total.value_B)
        return imprecise_B


_T = TypeVar("_T")
_device: Final[Callable[[Tensor], torch.device]] = attrgetter("device")


def _of_kinds(items: Sequence[_T], kind: Callable[[_T], object]) -> Collection[list[_T]]:
    """Return items grouped by kind, so that each group is computed in one operation."""
    if len(items) < 2:
        return [list(items)] if items else []
    alike: defaultdict[object, list[_T]] = defaultdict(list)
    for one in items:
        alike[kind(one)].append(one)
    return alike.values()


def _sum(parts: list[Tensor], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum of float32 or float64 tensors ``(B,)``; float64 if one of them is."""
    parts = _on_device(parts, device)
    if len(parts) <= 2:
        # One addition rounds once, in whatever precision.
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]
    stacked_KB = torch.stack(parts)
    return stacked_KB.sum(0, dtype=dtype).to(stacked_KB.dtype)


def _on_device(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    return parts if {device}.issuperset(map(_device, parts)) else [part.to(device) for part in parts]


class GroupNorms:
    """One `NormSum` for every clip group."""

    def __init__(self, group_of: Mapping[str, int], ranks: SharedSamples | None = None) -> None:
        # Names that `group_of` does not list belong to group 0.
        self.group_of, self._ranks = group_of, ranks
        self.finite = False  # whether every norm in every group is known to be finite
        self.largest: float | None = None  # the largest of the norms where that is known and finite, else None
        self.sums = [NormSum() for _ in range(1 + max(group_of.values(), default=0))]
        # Of parameters that all ranks have whole: all measure them, one counts them.
        self._whole = [] if ranks is None else [NormSum() for _ in self.sums]

    def add(self, name: str, norm: SquaredNorm | Unfinished | Reduced | Product) -> None:
        """Add the squared norms of one factor of a parameter, or what they will be computed from."""
        self._sum_of(name).add(norm)

    def _sum_of(self, name: str) -> "NormSum":
        """Return the sum that a parameter's norms are added to: its group's, or that of whole parameters on ranks."""
        self.finite, self.largest = False, None
        return (self._whole if self._ranks is not None and self.is_whole(name) else self.sums)[
            self.group_of.get(name, 0)
        ]

    def add_norm_of(self, name: str, factor: Factor) -> None:
        """Add the squared norms of one factor of a parameter, in the cheapest form."""
        norm = factor.unfinished()
        norms = factor.block_norms() if norm is None else None
        if norms is None:
            self._sum_of(name).add(factor.sqnorm() if norm is None else norm)
        else:
            self._sum_of(name).add_blocks(norms)

    def add_norms_of(self, names: Sequence[str], factor: Factor) -> None:
        """Add the squared norms of several parameters' factors that were formed as one, all of the first group."""
        self.finite, self.largest = False, None
        layers = len(names)
        norm = factor.unfinished()
        blocks = factor.block_norms() if norm is None else None
        for total, numbers in self._by_sum(names):
            if isinstance(norm, (Unfinished, Reduced)) and len(numbers) == layers:
                total.add(norm, layers=layers)
            elif norm is not None:
                parts = _split_norm(norm, layers)
                for number in numbers:
                    total.add(parts[number])
            else:
                assert blocks is not None  # but for empty ones, which are not put together
                by_layer = [norm_NK.unflatten(0, (layers, -1)) for norm_NK in blocks]
                selected = by_layer if len(numbers) == layers else [norm_LBK[numbers] for norm_LBK in by_layer]
                total.add_blocks([norm_LBK.transpose(0, 1).flatten(1) for norm_LBK in selected])

    def _by_sum(self, names: Sequence[str]) -> list[tuple["NormSum", list[int]]]:
        """Return the sums that parameters of the first group belong to, with the numbers of these parameters."""
        if self._ranks is None:
            return [(self.sums[0], list(range(len(names))))]
        whole = [number for number, name in enumerate(names) if self.is_whole(name)]
        parts = [number for number in range(len(names)) if number not in whole]
        sums = [(self.sums[0], parts)]
        return [(total, numbers) for total, numbers in (*sums, *((norm, whole) for norm in self._whole[:1])) if numbers]

    def is_whole(self, name: str) -> bool:
        """Return whether several ranks measure a parameter that each of them has whole."""
        return self._ranks is not None and not self._ranks.is_divided(name)

    def empty_like(self) -> "GroupNorms":
        """Return empty sums of the same groups and ranks."""
        return GroupNorms(self.group_of, self._ranks)

    def complete(self, batch_size: int) -> None:
        """Add up the sums of ranks that share samples; called on all of them, once nothing is added any more.

        Cost:
            One exchange of six numbers per sample and clip group: the square, its error, whether the sample must be
            measured again, and whether the ranks agree on what each has whole.
        """
        if self._ranks is None:
            return
        self.finite, self.largest = False, None
        local_GRN = torch.zeros(len(self.sums), 6, batch_size + 2, dtype=torch.float64, device=self._ranks.device)
        for rows_RN, norm_sum, whole in zip(local_GRN, self.sums, self._whole, strict=True):
            measured = whole.total()
            if measured is not None and self._ranks.is_first:
                norm_sum.add(measured)
            _write_rows(rows_RN, norm_sum.total())
            if measured is not None:
                rows_RN[4, :-2] = measured.value_B
                rows_RN[5, :-2] = measured.value_B.double().square()
        total_GRN = self._ranks.add_up(local_GRN)
        if bool(torch.stack([_differ_B(rows_RN, self._ranks.size) for rows_RN in total_GRN]).any()):
            self._ranks.refuse_difference()
        for norm_sum, rows_RN in zip(self.sums, total_GRN, strict=True):
            norm_sum.replace(_read_rows(rows_RN, self._ranks.dtype))

    def merge(self, other: "GroupNorms") -> None:
        """Add the sums of other parameters of the same groups, and consume them."""
        self.finite, self.largest = False, None
        for norm_sum, more in zip([*self.sums, *self._whole], [*other.sums, *other._whole], strict=True):
            total = more.total()
            if total is not None:
                norm_sum.add(total)

    def refine(self, exact: "GroupNorms", index_D: Tensor) -> Tensor | None:
        """Put float64 norms of a few samples in; return which samples are ill-conditioned, None without any."""
        # Of no others, so that no sample's norm depends on another sample. A sample whose clipped sum, too, would be
        # rounded by more than the tolerance is ill-conditioned: its contribution must be formed in float64. Where not
        # even that bounds it, its norm becomes infinite, so that it contributes nothing.
        self.finite, self.largest = False, None
        ill_GB: list[Tensor] = []
        for norm_sum, better in zip(self.sums, exact.sums, strict=True):
            before, after = norm_sum.total(), better.total()
            if before is not None and after is not None:
                norm_D, ill_D = _refined(after, before, index_D)
                norm_sum.override(index_D, norm_D)
                # Numbers whose squares are beyond float32 are not multiplied in float32 either.
                ill_B = ~(_at_most_B(before) < _most(before.value_B.dtype))
                ill_GB.append(ill_B.index_copy(0, index_D.to(ill_B.device), ill_D.to(ill_B.device) | ill_B[index_D]))
        if not ill_GB:
            return None
        ill_B = torch.stack(_on_device(ill_GB, ill_GB[0].device)).any(0)
        return ill_B if bool(ill_B.any()) else None

    def norm_GB(self, batch_size: int, device: torch.device | None = None) -> list[Tensor]:
        """Return the norms ``(B,)`` of every group, rounded up; zeros for a group that nothing arrived for."""
        found = list(map(NormSum.norm_B, self.sums))
        like = next(filter(torch.is_tensor, found), torch.zeros(0, device=device))
        return [like.new_zeros(batch_size) if norm_B is None else norm_B for norm_B in found]

    def _imprecise_B(self) -> Tensor | None:
        """Return which samples' norms are not finite or precise enough in some group; None where nothing arrived."""
        found = [total.imprecise_B() for total in self.sums if total.total() is not None]
        if len(found) <= 1:
            return found[0] if found else None
        return torch.stack(_on_device(found, found[0].device)).any(0)

    def certain_B(self, batch_size: int) -> Tensor:
        """Return which samples' norms are finite and precise enough, without waiting for the device."""
        self.finite, self.largest = False, None
        norm_B = self.sums[0].of_blocks_B() if len(self.sums) == 1 else None
        if norm_B is not None:
            return norm_B < _most(norm_B.dtype) ** 0.5
        imprecise_B = self._imprecise_B()
        return torch.ones(batch_size, dtype=torch.bool) if imprecise_B is None else ~imprecise_B

    def imprecise_B(self, doubt: Tensor | None = None) -> Tensor | None:
        """Return which samples' norms need float64 in some group; None without any. Sets `finite` and `largest`."""
        # Squares beyond float32 may be finite in float64; what is not finite there never was. Finiteness, and `doubt`,
        # one bool of the caller's, are read with the same wait for the device.
        norm_B = self.sums[0].of_blocks_B() if len(self.sums) == 1 and doubt is None else None
        if norm_B is not None and norm_B.numel() > 0:
            # Without error bounds; the largest of numbers one of which is NaN is NaN, and below nothing.
            largest = norm_B.amax().item()
            self.finite = largest < _most(norm_B.dtype) ** 0.5
            self.largest = largest if self.finite else None
            return None if self.finite else ~(norm_B < _most(norm_B.dtype) ** 0.5)
        imprecise_B = self._imprecise_B()
        if imprecise_B is None:
            return None
        certain = (~imprecise_B).all()
        self.finite = bool(certain if doubt is None else certain & ~doubt.to(certain.device))
        return None if self.finite or (doubt is not None and bool(certain)) else imprecise_B


def _write_rows(rows_RN: Tensor, total: SquaredNorm | None) -> None:
    """Write a rank's sum and its bounds into rows that can be added up over ranks."""
    # rows_RN: zeros, two columns more than samples.
    if total is None:
        return
    rows_RN[0, :-2] = total.value_B
    if total.error_B is not None:
        rows_RN[1, :-2] = total.error_B
    if total.terms is not None:
        rows_RN[2, :-2] = total.terms.mass_B.double().square_()
        rows_RN[3, :-2] = total.terms.scale_B
        rows_RN[0, -2], rows_RN[0, -1] = total.terms.number, float(total.terms.by_units)


def _differ_B(rows_RN: Tensor, ranks: int) -> Tensor:
    """Return which samples' gradients of whole parameters differ between ranks, by sum and variance of squares."""
    # What is next to nothing of the sample's norm may differ: rounding leaves that of gradients that vanish.
    total_B, sum_B, square_B = rows_RN[0, :-2], rows_RN[4, :-2], rows_RN[5, :-2]
    spread_B = square_B - sum_B.square() / ranks
    return (spread_B > _ALIKE**2 * square_B).logical_and_(sum_B > ranks * _NOTHING * total_B)


def _read_rows(rows_RN: Tensor, dtype: torch.dtype) -> SquaredNorm:
    """Return the sum from rows that were added up over ranks."""
    value_B, error_B, square_B, scale_B, whole_B, _ = rows_RN[:, :-2].unbind()
    # What is not finite on one rank is added to sums there.
    value_B = value_B + whole_B * 0
    number, by_units = rows_RN[0, -2:].tolist()
    terms = Terms(square_B.sqrt().to(dtype), scale_B.to(dtype), int(number), by_units > 0)
    return SquaredNorm(value_B.to(dtype), error_B.to(dtype), terms)


def _split_norm(norm: Unfinished | Reduced | Product, layers: int) -> Sequence[Unfinished | Reduced | Product]:
    """Return the norms of each of several layers that were computed as one."""
    if isinstance(norm, Reduced):
        return [norm._replace(part_NPK=part_NPK) for part_NPK in norm.part_NPK.chunk(layers)]
    if isinstance(norm, Product):
        blocks = zip(*(a_NK.chunk(layers) for a_NK in norm.a_NK), strict=True)
        return [
            Product(list(a_NK), g_N1, norm.sizes) for a_NK, g_N1 in zip(blocks, norm.g_N1.chunk(layers), strict=True)
        ]
    parts = {name: getattr(norm, name).chunk(layers) for name in ("value_N", "a_NT", "g_NT")}
    if norm.absolute_N is not None:
        parts["absolute_N"] = norm.absolute_N.chunk(layers)
    if norm.square_KNT is not None:
        parts["square_KNT"] = norm.square_KNT.chunk(layers, 1)
    return [norm._replace(**{name: part[number] for name, part in parts.items()}) for number in range(layers)]


def _at_most_B(norm: SquaredNorm) -> Tensor:
    """Return an upper bound on squared norms: value plus error bound."""
    return norm.value_B if norm.error_B is None else (norm.value_B + norm.error_B).clamp_(min=0)


def _most(dtype: torch.dtype) -> float:
    """Return the largest squared norm that is taken for finite: nothing overflows on the way to its root."""
    return torch.finfo(dtype).max / 4


def _tolerance(norm: SquaredNorm) -> float:
    """Return the share of a squared norm that its error may be."""
    by_units = norm.terms is not None and norm.terms.by_units
    return TOLERANCE_BY_UNITS if by_units else TOLERANCE[norm.value_B.dtype]


def _refined(norm: SquaredNorm, before: SquaredNorm, index_D: Tensor) -> tuple[Tensor, Tensor]:
    """Return (norms of a few samples from float64, rounded up, which of them are ill-conditioned)."""
    # `before` are the squared norms of all samples, in the dtype that contributions would be summed in otherwise.
    square_D, terms, dtype = norm.value_B, norm.terms, before.value_B.dtype
    error_D = torch.zeros_like(square_D) if norm.error_B is None else norm.error_B
    ill_D = torch.zeros_like(square_D, dtype=torch.bool)
    if terms is not None:
        mass_D = terms.mass_B
        if before.terms is not None and before.terms.by_units:
            # Weighted in less than float32.
            mass_D = torch.maximum(mass_D, before.terms.mass_B[index_D.to(before.value_B.device)].to(mass_D))
        narrow_D = error_of_raised(square_D, sum_rounding(mass_D, terms.scale_B, unit_roundoff(dtype)))
        ill_D = ~(narrow_D <= _tolerance(before) * square_D)
        # Every term is weighted and added once, in any order: twice as often as there are terms, whatever else is.
        wide_D = unit_roundoff(torch.float64) * (2 * terms.number + 64) * terms.mass_B
        unbounded_D = ill_D & ~(wide_D <= UNBOUNDED * square_D.sqrt())
        error_D = error_D + torch.where(ill_D, error_of_raised(square_D, wide_D), narrow_D)
        square_D = square_D.masked_fill(unbounded_D, torch.inf)
    return rounded_up_((square_D + error_D).sqrt().to(dtype)), ill_D


def loses_nothing(factor: Factor, instantiated: Factor) -> bool:
    """Return whether rounding makes no sample ill-conditioned in this form, so that formed gradients may replace it."""
    # Formed gradients then say the same. True without a look where a device would be waited for.
    inside = instantiated
    while isinstance(inside, (Permuted, AtIndex)):
        inside = inside.inner
    assert isinstance(inside, Dense)
    if runtime.wait(inside.grad_BP):
        return True
    norm_B = root_of_squares(inside.measured())
    unit, tolerance = unit_roundoff(norm_B.dtype), TOLERANCE[norm_B.dtype]
    # Mostly the quicker of two bounds tells: of the rounding, no more than 0.49 of the tolerance of the norm.
    share = 0.49 * tolerance / (unit * (1 + SUM_ROUNDINGS))
    if isinstance(factor, Windows) and bool((factor.mass_at_most() <= share * norm_B).all()):
        return True
    terms = factor.terms()
    if terms is None:
        return True
    square_B, delta_B = norm_B.square(), sum_rounding(terms.mass_B, terms.scale_B, unit)
    return bool((error_of_raised(square_B, delta_B) <= tolerance * square_B).all())


def cross_terms(factors: Sequence[Factor]) -> SquaredNorm | None:
    """Return 2·Σ_{j<k} ⟨f_j, f_k⟩ of one parameter's factors, or None for fewer than two."""
    # The terms are those of all factors: what cancels between uses is rounded in proportion to the uses.
    if len(factors) < 2:
        return None
    parts = [
        inner(first, second)
        for index, first in enumerate(factors)
        for second in factors[:index]
        if not (isinstance(first, AtIndex) and isinstance(second, AtIndex) and first.disjoint_from(second))
    ]
    if not parts:
        return None
    value_B = 2 * sum_tensors([part.value_B for part in parts])
    error_B = 2 * sum_tensors([part.absolute_B for part in parts])
    terms = terms_of_uses(factors)
    unit = unit_roundoff(value_B.dtype)
    # Of the walk of a Gram of all uses, see `ghostclip.kernels.bounds.gram_error`.
    error_B = unit * (CROSS_ROUNDINGS * error_B + SUM_ROUNDINGS * terms.scale_B)
    return SquaredNorm(value_B, error_B, terms)


def terms_of_uses(factors: Sequence[Factor]) -> Terms:
    """Return the sums of the terms of several uses of one parameter, each of which is at least one term."""
    all_terms = [factor.terms() or _whole(factor) for factor in factors]
    mass_B, scale_B = (sum_tensors(list(parts)) for parts in zip(*(terms[:2] for terms in all_terms), strict=True))
    return Terms(mass_B, scale_B, sum(terms.number for terms in all_terms), any(terms.by_units for terms in all_terms))


def _whole(factor: Factor) -> Terms:
    """Return the one term of a factor that is added as a whole."""
    value_B = factor.sqnorm().value_B
    return Terms(value_B.sqrt(), value_B, 1)


def exact_sqnorm(factor: Factor, index_D: Tensor) -> SquaredNorm:
    """Return squared norms of a few samples in float64, from a Gram matrix where its error allows."""
    # From a certain Gram matrix where cheaper, else from gradients.
    few = factor.selected(index_D).in_double()
    norm = few.sqnorm()
    if norm.error_B is None or bool((norm.error_B <= UNBOUNDED * norm.value_B).all()):
        return norm
    return exact_sqnorm_of_uses([factor], index_D)


def exact_sqnorm_of_uses(factors: Sequence[Factor], index_D: Tensor) -> SquaredNorm:
    """Return squared norms of a few samples' sums over several uses of a parameter, formed in float64."""
    few = [factor.selected(index_D).in_double() for factor in factors]
    formed = []
    for index in torch.arange(len(index_D), device=index_D.device).split(1):
        summed = sum_tensors([factor.selected(index).materialize().flatten(1) for factor in few])
        formed.append(summed.square().sum(1))
    return SquaredNorm(torch.cat(formed), None, terms_of_uses(few))


def exact_norms(by_parameter: Mapping[str, Sequence[Factor]], like: GroupNorms, index_D: Tensor) -> GroupNorms:
    """Return the norms of a few samples in float64; shared parameters are summed before squaring."""
    total = like.empty_like()
    for name, factors in by_parameter.items():
        if len(factors) == 1:
            total.add(name, exact_sqnorm(factors[0], index_D))
        else:
            total.add(name, exact_sqnorm_of_uses(factors, index_D))
    return total
