"""What every factor can do: the contract between rules, norms and clipped sums.

Shape letters: B samples, ``*P`` the parameter's own shape.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class SquaredNorm(NamedTuple):
    """Squared norms of per-sample gradients with a bound on their rounding error.

    Attributes:
        value_B: Squared norms, shape ``(B,)``, float32 or float64.
        error_B: How far ``value_B`` may lie below the true value because of rounding, same shape; added to the
            norm before clipping so that a norm is over-estimated, never under-estimated.
    """

    value_B: Tensor
    error_B: Tensor


class Factor(ABC):
    """One parameter's per-sample gradients in a factored form.

    Attributes:
        shape: The parameter's shape ``*P``.
        batch_size: The number of samples B.
    """

    shape: torch.Size
    batch_size: int

    @abstractmethod
    def sqnorm(self) -> SquaredNorm:
        """Return the squared Euclidean norm of every sample's gradient."""

    @abstractmethod
    def materialize(self) -> Tensor:
        """Return the per-sample gradients themselves, shape ``(B, *P)``, float32 or float64."""

    @abstractmethod
    def add_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        """Add ``sum_b coef_B[b] * g_b`` to ``out`` in place.

        Args:
            coef_B: Coefficients, shape ``(B,)``, in ``out``'s dtype.
            out: Accumulator of shape ``*P``, float32 or float64.
        """

    @abstractmethod
    def masked(self, keep_B: Tensor) -> "Factor":
        """Return the factor with the samples where ``keep_B`` is False set to exactly zero (NaN and Inf included)."""

    @abstractmethod
    def reshaped(self, shape: Sequence[int]) -> "Factor":
        """Return the factor of the same values for a parameter viewed (row-major) as ``shape``."""

    @abstractmethod
    def element_count(self) -> int:
        """Return how many tensor elements the factor keeps alive."""

    def numel(self) -> int:
        """Return the number of elements of the parameter."""
        return prod(self.shape)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which norms and sums are accumulated: float64 for float64, else float32."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def to_accumulation(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in its accumulation dtype (no copy when it is there already)."""
    return tensor.to(accumulation_dtype(tensor.dtype))


def where_kept(keep_B: Tensor, tensor: Tensor) -> Tensor:
    """Return ``tensor`` (first axis B) with dropped samples set to zero; unlike a product, this removes NaN."""
    keep = keep_B.to(tensor.device).view(-1, *[1] * (tensor.dim() - 1))
    return torch.where(keep, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def no_error(value_B: Tensor) -> SquaredNorm:
    """Return a squared norm whose rounding is covered by the relative margin of the clip factor alone."""
    return SquaredNorm(value_B, torch.zeros_like(value_B))
