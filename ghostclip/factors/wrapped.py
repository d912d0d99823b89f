"""Factors around others: with axes in another order, in a slice, of a stack's matrices; and with registered norms.

Shape letters: B samples, ``*P`` the parameter's own shape.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ghostclip.factors.base import (
    Factor,
    SquaredNorm,
    Terms,
    no_error,
    terms_side_by_side,
    to_accumulation,
    zero_dropped,
)
from ghostclip.kernels.bounds import Product, Reduced, Unfinished


class _Moved(Factor):
    """The entries of ``inner``'s gradient, elsewhere: its norm is ``inner``'s."""

    inner: Factor

    def sqnorm(self) -> SquaredNorm:
        return self.inner.sqnorm()

    def unfinished(self) -> Unfinished | Reduced | Product | None:
        return self.inner.unfinished()

    def block_norms(self) -> list[Tensor] | None:
        return self.inner.block_norms()

    def terms(self) -> Terms | None:
        return self.inner.terms()


class Permuted(_Moved):
    """The gradient is ``inner``'s with its axes permuted: axis k of the parameter is axis ``order[k]`` of ``inner``."""

    def __init__(self, inner: Factor, order: Sequence[int]) -> None:
        # As Tensor.permute takes it: parameter = inner_parameter.permute(order).
        self.inner = inner
        self.order = tuple(order)
        self.shape = torch.Size([inner.shape[axis] for axis in self.order])
        self.batch_size = inner.batch_size

    def materialize(self) -> Tensor:
        """Return the per-sample gradients, shape ``(B, *P)``, a view of the inner factor's."""
        return self.inner.materialize().permute(0, *(axis + 1 for axis in self.order))

    def add_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        """Add the inner factor's clipped sum to ``out``, permuted."""
        out += self._part(coef_B, out)

    def write_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        """Set ``out`` to the inner factor's clipped sum, permuted."""
        out.copy_(self._part(coef_B, out))

    def _part(self, coef_B: Tensor, out: Tensor) -> Tensor:
        """Return the inner factor's clipped sum, permuted."""
        part = out.new_empty(self.inner.shape)
        self.inner.write_clipped_sum_(coef_B, part)
        return part.permute(self.order)

    def _with(self, change: Callable[[Any], Any]) -> "Permuted":
        return Permuted(change(self.inner), self.order)


class AtIndex(_Moved):
    """The gradient is ``inner``'s inside ``parameter[index]`` and zero elsewhere."""

    def __init__(self, inner: Factor, index: tuple[Any, ...], *, shape: Sequence[int]) -> None:
        self.inner = inner
        self.index = index
        self.shape = torch.Size(shape)
        self.batch_size = inner.batch_size

    def materialize(self) -> Tensor:
        """Return the per-sample gradients with the zeros around the slice, shape ``(B, *P)``."""
        part = self.inner.materialize()
        full = part.new_zeros(self.batch_size, *self.shape)
        index = (slice(None), *self.index)
        full[index] = part
        return full

    def add_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        """Add the slice's clipped sum to its place in ``out``."""
        target = out[self.index]
        if target.is_contiguous():
            self.inner.add_clipped_sum_(coef_B, target)
            return
        part = torch.zeros_like(target, memory_format=torch.contiguous_format)
        self.inner.add_clipped_sum_(coef_B, part)
        target += part

    def _with(self, change: Callable[[Any], Any]) -> "AtIndex":
        return AtIndex(change(self.inner), self.index, shape=self.shape)

    def disjoint_from(self, other: "AtIndex") -> bool:
        """Return whether the two slices certainly share no entry."""
        # Different integers, or disjoint ranges, on an axis.
        pairs = zip(self.index, other.index, self.shape, strict=False)
        return any(_disjoint(mine, theirs, size) for mine, theirs, size in pairs)


def _disjoint(mine: Any, theirs: Any, size: int) -> bool:
    """Return whether two entries of indices pick no common place of an axis."""
    first, second = _span(mine, size), _span(theirs, size)
    return first[1] <= second[0] or second[1] <= first[0]


def _span(entry: Any, size: int) -> tuple[int, int]:
    """Return the (start, stop) that an entry of an index covers."""
    if isinstance(entry, int):
        start = entry % size
        return start, start + 1
    start, stop, step = entry.indices(size)
    return (start, stop) if step > 0 else (stop + 1, start + 1)


class Stacked(Factor):
    """The gradient of ``parameter[e]`` is ``parts[e]``'s; slices without a part receive nothing."""

    def __init__(self, parts: Mapping[int, Factor], *, shape: Sequence[int], like: Tensor) -> None:
        # `parts`: factor of each used slice along the first axis. `like` has the batch as first axis, and device and
        # dtype.
        self.parts = dict(parts)
        self.shape = torch.Size(shape)
        self.batch_size = like.shape[0]
        self.zero_B = like.new_zeros(like.shape[0], dtype=torch.promote_types(like.dtype, torch.float32))

    def sqnorm(self) -> SquaredNorm:
        """Return the sum of the parts' squared norms: slices do not overlap."""
        norms = [part.sqnorm() for part in self.parts.values()]
        if not norms:
            return no_error(self.zero_B)
        errors = [norm.error_B for norm in norms if norm.error_B is not None]
        value_B = sum_tensors([norm.value_B for norm in norms])
        return SquaredNorm(value_B, sum_tensors(errors) if errors else None, self._joined([n.terms for n in norms]))

    def terms(self) -> Terms | None:
        return self._joined([part.terms() for part in self.parts.values()])

    def _joined(self, parts: Sequence[Terms | None]) -> Terms | None:
        """Return the terms of all parts together."""
        return terms_side_by_side([terms for terms in parts if terms is not None], self.zero_B.device)

    def materialize(self) -> Tensor:
        full = self.zero_B.new_zeros(self.batch_size, *self.shape)
        for number, part in self.parts.items():
            full[:, number] = part.materialize()
        return full

    def add_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        for number, part in self.parts.items():
            part.add_clipped_sum_(coef_B, out[number])

    def _with(self, change: Callable[[Any], Any]) -> "Stacked":
        parts = {number: change(part) for number, part in self.parts.items()}
        return Stacked(parts, shape=self.shape, like=change(self.zero_B))


def sum_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape (at least one)."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


class ParameterGradients(Protocol):
    """Source of the gradients of one parameter."""

    def gradients(self, keep_B: Tensor) -> Tensor:
        """Return per-sample gradients ``(B, *P)``, zero where ``keep_B`` is False, whatever the data there."""

    def weighted_sum(self, coef_B: Tensor, keep_B: Tensor) -> Tensor:
        """Return ``Σ_b coef_B[b]·g_b`` over the samples where ``keep_B`` is True."""


class FromSampler(Factor):
    """A registered norm sampler's norms, and gradients that `source` forms; ``keep_B``: samples that stay."""

    def __init__(
        self, norm_B: Tensor, source: ParameterGradients, *, shape: Sequence[int], keep_B: Tensor | None = None
    ) -> None:
        self.norm_B = to_accumulation(norm_B)
        self.source = source
        self.shape = torch.Size(shape)
        self.batch_size = norm_B.shape[0]
        self.keep_B = torch.ones_like(norm_B, dtype=torch.bool) if keep_B is None else keep_B

    def sqnorm(self) -> SquaredNorm:
        """Return the squared norms of the registered function."""
        return no_error(self.norm_B.square())

    def materialize(self) -> Tensor:
        return to_accumulation(self.source.gradients(self.keep_B)).reshape(self.batch_size, *self.shape)

    def add_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        out += self.source.weighted_sum(coef_B, self.keep_B).to(out.dtype).reshape(out.shape)

    def masked(self, keep_B: Tensor) -> "FromSampler":
        keep_B = keep_B.to(self.keep_B.device) & self.keep_B
        return FromSampler(zero_dropped(keep_B, self.norm_B), self.source, shape=self.shape, keep_B=keep_B)

    def added_elements(self) -> int:
        return self.norm_B.numel()
