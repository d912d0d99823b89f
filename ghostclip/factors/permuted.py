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
        """Keep the inner factor and the order.

        Args:
            inner: Factor of ``parameter.permute(inverse of order)``.
            order: As ``Tensor.permute`` takes it: ``parameter = inner_parameter.permute(order)``.
        """
        self.inner = inner
        self.order = tuple(order)
        self.shape = torch.Size([inner.shape[axis] for axis in self.order])
        self.batch_size = inner.batch_size

    def sqnorm(self) -> SquaredNorm:
        """Return the inner factor's squared norms: an order of axes changes none."""
        return self.inner.sqnorm()

    def unfinished(self) -> Unfinished | Reduced | Product | None:
        """Return the squared norms of the inner factor."""
        return self.inner.unfinished()

    def block_norms(self) -> list[Tensor] | None:
        """Return the inner factor's norms."""
        return self.inner.block_norms()

    def terms(self) -> Terms | None:
        """Return the inner factor's terms."""
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
        """Return the factor with dropped samples set to zero."""
        return Permuted(self.inner.masked(keep_B), self.order)

    def selected(self, index_D: Tensor) -> "Permuted":
        """Return the factor of a few samples."""
        return Permuted(self.inner.selected(index_D), self.order)

    def in_double(self) -> "Permuted":
        """Return the factor in float64."""
        return Permuted(self.inner.in_double(), self.order)

    def reshaped(self, shape: Sequence[int]) -> Factor:
        """Return the factor of the same values for a parameter of ``shape``."""
        return self if tuple(shape) == tuple(self.shape) else Dense(self.materialize()).reshaped(shape)

    def element_count(self) -> int:
        """Return how many tensor elements the factor keeps alive."""
        return self.inner.element_count()
