"""Per-sample gradients of a parameter whose axes stand in another order than the factored form's."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ghostclip.factors.base import Factor, SquaredNorm, Terms
from ghostclip.factors.dense import Dense
from ghostclip.kernels.bounds import Product, Reduced, Unfinished


class Permuted(Factor):
    """The gradient is ``inner``'s with its axes permuted: axis k of the parameter is axis ``order[k]`` of ``inner``."""

    def __init__(self, inner: Factor, order: Sequence[int]) -> None:
        # As Tensor.permute takes it: parameter = inner_parameter.permute(order).
        self.inner = inner
        self.order = tuple(order)
        self.shape = torch.Size([inner.shape[axis] for axis in self.order])
        self.batch_size = inner.batch_size

    def sqnorm(self) -> SquaredNorm:
        """Return the inner factor's squared norms: a permutation changes none."""
        return self.inner.sqnorm()

    def unfinished(self) -> Unfinished | Reduced | Product | None:
        return self.inner.unfinished()

    def block_norms(self) -> list[Tensor] | None:
        return self.inner.block_norms()

    def terms(self) -> Terms | None:
        return self.inner.terms()

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
        part = out.new_empty(self.inner.shape)
        self.inner.write_clipped_sum_(coef_B, part)
        return part.permute(self.order)

    def masked(self, keep_B: Tensor) -> "Permuted":
        return Permuted(self.inner.masked(keep_B), self.order)

    def selected(self, index_D: Tensor) -> "Permuted":
        return Permuted(self.inner.selected(index_D), self.order)

    def in_double(self) -> "Permuted":
        return Permuted(self.inner.in_double(), self.order)

    def reshaped(self, shape: Sequence[int]) -> Factor:
        return self if tuple(shape) == tuple(self.shape) else Dense(self.materialize()).reshaped(shape)

    def element_count(self) -> int:
        return self.inner.element_count()
