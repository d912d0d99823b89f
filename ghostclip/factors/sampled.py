"""Per-sample gradients of which a registered function knows the norms, and which are formed only if they must be.

Shape letters: B samples, ``*P`` the parameter's own shape.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ghostclip.factors.base import Factor, SquaredNorm, no_error, to_accumulation, where_kept
from ghostclip.factors.dense import Dense


class ParameterGradients(Protocol):
    """Source of the gradients of one parameter."""

    def gradients(self, keep_B: Tensor) -> Tensor:
        """Return per-sample gradients ``(B, *P)``, zero where ``keep_B`` is False, whatever the data there."""

    def weighted_sum(self, coef_B: Tensor, keep_B: Tensor) -> Tensor:
        """Return ``Σ_b coef_B[b]·g_b`` over the samples where ``keep_B`` is True."""


class Sampled(Factor):
    """The gradient of sample b has the norm ``norm_B[b]``; its entries are the source's."""

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

    def masked(self, keep_B: Tensor) -> "Sampled":
        keep_B = keep_B.to(self.keep_B.device) & self.keep_B
        return Sampled(where_kept(keep_B, self.norm_B), self.source, shape=self.shape, keep_B=keep_B)

    def selected(self, index_D: Tensor) -> Dense:
        """Return the factor of a few samples, materialised."""
        keep_B = torch.zeros_like(self.keep_B)
        keep_B[index_D] = True
        return Dense(self.masked(keep_B).materialize()).selected(index_D)

    def in_double(self) -> Dense:
        """Return the factor in float64, materialised."""
        return Dense(self.materialize()).in_double()

    def reshaped(self, shape: Sequence[int]) -> Factor:
        return Dense(self.materialize()).reshaped(shape) if torch.Size(shape) != self.shape else self

    def element_count(self) -> int:
        return self.norm_B.numel()
