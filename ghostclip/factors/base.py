"""What every factor can do: the contract between rules, norms and clipped sums.

Shape letters: B samples, ``*P`` the parameter's own shape.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Final, NamedTuple

import torch
from torch import Tensor

# Equal values round alike: a sum of this many of their squares in float32 loses less than a norm is rounded up by.
# On a GPU thousands of threads share a sum, so that each rounds less often.
_BLOCK: Final = 256
_BLOCK_IN_THREADS: Final = 4096
# So many numbers of blocks are tried for one that divides the values evenly.
_MORE_BLOCKS: Final = 8


class SquaredNorm(NamedTuple):
    """Squared norms of per-sample gradients with a bound on their rounding error.

    Attributes:
        value_B: Squared norms, shape ``(B,)``, float32 or float64.
        error_B: How far ``value_B`` may lie below the true value because of rounding, same shape; added to the
            norm before clipping so that a norm is over-estimated, never under-estimated. None where the relative margin
            of the clip factor covers it.
    """

    value_B: Tensor
    error_B: Tensor | None


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

    def block_norms(self) -> list[Tensor] | None:
        """Return norms whose squares add up to `sqnorm`: cheaper to add up over many parameters than a sum for each.

        Returns:
            Norms, each of shape ``(B, K)``; None where the squared norm is not made of such.
        """
        return None

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

    def write_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        """Set ``out`` to ``sum_b coef_B[b] * g_b``, whatever it held: where nothing was added yet, that is cheaper.

        Args:
            coef_B: As for `add_clipped_sum_`.
            out: As for `add_clipped_sum_`.
        """
        self.add_clipped_sum_(coef_B, out.zero_())

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
    """Return the dtype in which norms and sums are accumulated: 64 bits for float64, else 32; complex stays complex."""
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    return torch.float64 if dtype == torch.float64 else torch.float32


def to_accumulation(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in its accumulation dtype (no copy when it is there already)."""
    return tensor if tensor.dtype == torch.float32 else tensor.to(accumulation_dtype(tensor.dtype))


def over_positions(x_BTF: Tensor) -> Tensor:
    """Return the sum over positions.

    Args:
        x_BTF: Shape ``(B, T, *F)``.

    Returns:
        Shape ``(B, *F)``, the same dtype; a view where there is one position.
    """
    return x_BTF.squeeze(1) if x_BTF.shape[1] == 1 else x_BTF.sum(1)


def where_kept(keep_B: Tensor, tensor: Tensor) -> Tensor:
    """Return ``tensor`` with dropped samples set to zero; unlike a product, this removes NaN.

    Args:
        keep_B: Which samples stay, shape ``(B,)``, bool.
        tensor: Shape ``(B, ...)``.

    Returns:
        A new tensor of the same shape and dtype.
    """
    keep = keep_B.to(tensor.device).view(-1, *[1] * (tensor.dim() - 1))
    return torch.where(keep, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def no_error(value_B: Tensor) -> SquaredNorm:
    """Return a squared norm whose rounding is covered by the relative margin of the clip factor alone."""
    return SquaredNorm(value_B, None)


def block_norms(flat_BP: Tensor) -> list[Tensor]:
    """Return norms of blocks of values, whose squares add up to ``Σ_p x[b,p]²``, without a squared copy.

    Torch's float32 norm on a CPU comes out 2e-5 too small for a million random values and 4e-6 for 4096 equal ones,
    which would let a sample through above the bound; over blocks of 256 the error stays below 4e-7.

    Args:
        flat_BP: Values, shape ``(B, P)``, float32 or float64, real or complex.

    Returns:
        Norms, each of shape ``(B, K)``, same dtype (real for complex values).
    """
    size, values = _BLOCK_IN_THREADS if flat_BP.is_cuda else _BLOCK, flat_BP.shape[1]
    if values <= size:
        return [torch.linalg.vector_norm(flat_BP, dim=1, keepdim=True)]
    fewest = -(-values // size)
    # Blocks of one size where they come out even, and one operation does.
    even = next((count for count in range(fewest, fewest + _MORE_BLOCKS) if values % count == 0), 0)
    if even:
        return [torch.linalg.vector_norm(flat_BP.unflatten(1, (even, values // even)), dim=2)]
    blocks, rest = divmod(values, size)
    whole_BKP = flat_BP[:, : blocks * size].unflatten(1, (blocks, size))
    last_BP = flat_BP[:, -rest:]
    return [torch.linalg.vector_norm(whole_BKP, dim=2), torch.linalg.vector_norm(last_BP, dim=1, keepdim=True)]


def sum_of_squares(norms: Sequence[Tensor]) -> Tensor:
    """Return ``Σ_k n[b,k]²`` over several norms, added up in float64: hundreds of squares drift in float32.

    Args:
        norms: At least one tensor, each of shape ``(B, K)``, float32 or float64, all of one device.

    Returns:
        Sums of squares, shape ``(B,)``; float64 if one of them is.
    """
    norms_BK = _side_by_side(norms)
    if norms_BK.shape[1] == 1:
        return norms_BK.squeeze(1).square()
    return torch.linalg.vector_norm(norms_BK, dim=1, dtype=torch.float64).square_().to(norms_BK.dtype)


def root_of_squares(norms: Sequence[Tensor]) -> Tensor:
    """Return ``√(Σ_k n[b,k]²)`` over several norms, see `sum_of_squares`.

    Args:
        norms: As for `sum_of_squares`.

    Returns:
        Roots, shape ``(B,)``, in memory of their own; float64 if one of the norms is.
    """
    norms_BK = _side_by_side(norms)
    if norms_BK.shape[1] == 1:
        return norms_BK.squeeze(1).clone()
    return torch.linalg.vector_norm(norms_BK, dim=1, dtype=torch.float64).to(norms_BK.dtype)


def rounded_up_(norms: Tensor) -> Tensor:
    """Make norms larger in place, by more than their rounding.

    Args:
        norms: float32 or float64, any shape.

    Returns:
        The tensor itself.
    """
    return norms.add_(norms, alpha=8 * torch.finfo(norms.dtype).eps)


def _side_by_side(norms: Sequence[Tensor]) -> Tensor:
    return norms[0] if len(norms) == 1 else torch.cat(list(norms), 1)


def square_sums(flat_BP: Tensor) -> Tensor:
    """Return ``Σ_p x[b,p]²`` without a squared copy and without the drift of one long float32 sum.

    Args:
        flat_BP: As for `block_norms`.

    Returns:
        Sums of squares, shape ``(B,)``, same dtype (real for complex values).
    """
    return sum_of_squares(block_norms(flat_BP))


def dot_products(first_BP: Tensor, second_BP: Tensor) -> Tensor:
    """Return ``Σ_p x[b,p]·y[b,p]``, summed pairwise (a BLAS dot product of a million float32 values drifts by 1e-3).

    Args:
        first_BP: Values, shape ``(B, P)``.
        second_BP: Values of the same shape.

    Returns:
        Dot products, shape ``(B,)``.
    """
    return (first_BP * second_BP).sum(1)
