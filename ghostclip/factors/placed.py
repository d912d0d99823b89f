"""Per-sample gradients confined to a slice of a parameter: one expert of a stack, one chunk of a fused projection."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ghostclip.factors.base import Factor, SquaredNorm, Terms
from ghostclip.factors.dense import Dense
from ghostclip.kernels.bounds import Product, Reduced, Unfinished


class Placed(Factor):
    """The gradient is ``inner``'s inside ``parameter[index]`` and zero elsewhere."""

    def __init__(self, inner: Factor, index: tuple[Any, ...], *, shape: Sequence[int]) -> None:
        self.inner = inner
        self.index = index
        self.shape = torch.Size(shape)
        self.batch_size = inner.batch_size

    def sqnorm(self) -> SquaredNorm:
        """Return the slice's squared norms: nothing lies outside it."""
        return self.inner.sqnorm()

    def unfinished(self) -> Unfinished | Reduced | Product | None:
        return self.inner.unfinished()

    def block_norms(self) -> list[Tensor] | None:
        return self.inner.block_norms()

    def terms(self) -> Terms | None:
        return self.inner.terms()

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

    def masked(self, keep_B: Tensor) -> "Placed":
        return Placed(self.inner.masked(keep_B), self.index, shape=self.shape)

    def selected(self, index_D: Tensor) -> "Placed":
        return Placed(self.inner.selected(index_D), self.index, shape=self.shape)

    def in_double(self) -> "Placed":
        return Placed(self.inner.in_double(), self.index, shape=self.shape)

    def reshaped(self, shape: Sequence[int]) -> Factor:
        if torch.Size(shape) == self.shape:
            return self
        return Dense(self.materialize()).reshaped(shape)

    def element_count(self) -> int:
        return self.inner.element_count()

    def disjoint_from(self, other: "Placed") -> bool:
        """Return whether the two slices certainly share no entry."""
        # Different integers, or disjoint ranges, on an axis.
        pairs = zip(self.index, other.index, self.shape, strict=False)
        return any(_apart(mine, theirs, size) for mine, theirs, size in pairs)


def _apart(mine: Any, theirs: Any, size: int) -> bool:
    first, second = _span(mine, size), _span(theirs, size)
    return first[1] <= second[0] or second[1] <= first[0]


def _span(entry: Any, size: int) -> tuple[int, int]:
    if isinstance(entry, int):
        start = entry % size
        return start, start + 1
    start, stop, step = entry.indices(size)
    return (start, stop) if step > 0 else (stop + 1, start + 1)
