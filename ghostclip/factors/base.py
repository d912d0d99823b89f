"""What every factor can do: the contract between rules, norms and clipped sums; and those that are tensors already.

Such are biases, affine weights, raw parameters (`Dense`).

Shape letters: B samples, ``*P`` the parameter's own shape.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ghostclip.kernels.bounds import Product, Reduced, Unfinished, block_norms, sum_of_squares
from ghostclip.kernels.sums import PositionSum


class Terms(NamedTuple):
    """What a gradient that is a sum of terms may be rounded by when it is added up anew, weighted.

    Attributes:
        mass_B: Sum of the terms' norms, shape ``(B,)``, float32 or float64: times the roundings that a term takes when
            it is weighted, where those are more than one.
        scale_B: Sum of their squared norms, same shape.
        number: Terms of a sample, at most.
        by_units: Whether matrix units form products of 16-bit numbers, for norms or for the clipped sum.
    """

    mass_B: Tensor
    scale_B: Tensor
    number: int
    by_units: bool = False


class SquaredNorm(NamedTuple):
    """Squared norms of per-sample gradients with a bound on their rounding error.

    Attributes:
        value_B: Squared norms, shape ``(B,)``, float32 or float64.
        error_B: How far ``value_B`` may lie below the true value because of rounding, same shape; added to the
            norm before clipping so that a norm is over-estimated, never under-estimated. None where the relative margin
            of the clip factor covers it.
        terms: The terms that are added up when the clipped sum is formed. None where a gradient is added whole, as it
            was when its norm was taken: nothing cancels then.
    """

    value_B: Tensor
    error_B: Tensor | None
    terms: Terms | None = None


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

    def unfinished(self) -> Unfinished | Reduced | Product | None:
        """Return squared norms whose errors are cheaper to work out for many parameters together.

        Returns:
            Those of `sqnorm`, in one slot per sample; None where its errors are worked out otherwise.
        """
        return None

    def terms(self) -> Terms | None:
        """Return what is added up for the clipped sum, as `sqnorm` does, at the cost of the terms' norms alone."""
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

    def masked(self, keep_B: Tensor) -> "Factor":
        """Return the factor with the samples where ``keep_B`` is False set to exactly zero (NaN and Inf included)."""
        return self._with(lambda x: x.masked(keep_B) if isinstance(x, Factor) else zero_dropped(keep_B, x))

    def selected(self, index_D: Tensor) -> "Factor":
        """Return the factor of a few samples.

        Args:
            index_D: Which samples, shape ``(D,)``, integer.

        Returns:
            A factor of D samples, in the order of the index.
        """
        return self._with(lambda x: x.selected(index_D) if isinstance(x, Factor) else rows_of(x, index_D))

    def in_double(self) -> "Factor":
        """Return the factor with its tensors in float64 (complex128 for complex ones)."""
        return self._with(lambda x: x.in_double() if isinstance(x, Factor) else doubled(x))

    def _with(self, change: Callable[[Any], Any]) -> "Factor":
        """Return the factor with its tensors, which have samples first, and factors inside it changed."""
        return Dense(change(self.materialize()))

    def reshaped(self, shape: Sequence[int]) -> "Factor":
        """Return the factor of the same values for a parameter viewed (row-major) as ``shape``."""
        return self if torch.Size(shape) == self.shape else Dense(self.materialize().reshape(self.batch_size, *shape))

    def added_elements(self) -> int:
        """Return how many elements the factor keeps alive that an ordinary backward would free."""
        return self.batch_size * self.shape.numel()

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


def sum_over_positions(x_BTF: Tensor) -> Tensor:
    """Return the sum over positions in the accumulation dtype, of 16-bit values without a copy of each.

    Args:
        x_BTF: Shape ``(B, T, *F)``.

    Returns:
        Shape ``(B, *F)``; a view where there is one position that is wide enough.
    """
    if x_BTF.element_size() != 2 or x_BTF.shape[1] == 1:
        return over_positions(to_accumulation(x_BTF))
    return x_BTF.sum(1, dtype=torch.float32)


def zero_dropped(keep_B: Tensor, tensor: Tensor) -> Tensor:
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


def square_sums(flat_BP: Tensor) -> Tensor:
    """Return ``Σ_p x[b,p]²`` without a squared copy and without the drift of one long float32 sum.

    Args:
        flat_BP: As for `block_norms`.

    Returns:
        Sums of squares, shape ``(B,)``, same dtype (real for complex values).
    """
    return sum_of_squares(block_norms(flat_BP))


def doubled(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, complex128 for a complex one (no copy when it is there already), indices as it is."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.to(wide) if tensor.is_floating_point() or tensor.is_complex() else tensor


def rows_of(tensor: Tensor, index_D: Tensor) -> Tensor:
    """Return the entries of a few samples.

    Args:
        tensor: Shape ``(B, ...)``.
        index_D: Which samples, shape ``(D,)``.

    Returns:
        Shape ``(D, ...)``.
    """
    return tensor.index_select(0, index_D.to(tensor.device))


def terms_side_by_side(found: Sequence[Terms], device: torch.device) -> Terms | None:
    """Return the terms of gradients that do not overlap: their roundings add up as the sides of a box do.

    Args:
        found: Terms of each, on whatever device.
        device: Where the result goes.

    Returns:
        Their terms together; None where there are none.
    """
    if len(found) <= 1:
        return found[0] if found else None
    mass_KB = torch.stack([terms.mass_B.to(device) for terms in found])
    scale_KB = torch.stack([terms.scale_B.to(device) for terms in found])
    number, by_units = max(terms.number for terms in found), any(terms.by_units for terms in found)
    return Terms(torch.linalg.vector_norm(mass_KB, dim=0), scale_KB.sum(0), number, by_units)


def end_to_end(parts: Sequence[SquaredNorm]) -> SquaredNorm:
    """Return the squared norms of all samples from those of consecutive pieces of the batch.

    Args:
        parts: One at least.

    Returns:
        Their entries end to end.
    """
    errors = [part.error_B for part in parts if part.error_B is not None]
    terms = [part.terms for part in parts if part.terms is not None]
    all_terms = (
        Terms(
            torch.cat([part.mass_B for part in terms]),
            torch.cat([part.scale_B for part in terms]),
            max(part.number for part in terms),
            any(part.by_units for part in terms),
        )
        if terms
        else None
    )
    return SquaredNorm(torch.cat([part.value_B for part in parts]), torch.cat(errors) if errors else None, all_terms)


class Dense(Factor):
    """The gradient of sample b is ``grad_BP[b]`` itself."""

    _later: PositionSum | None = None  # what forms the gradients when they are read
    _norms: list[Tensor] | None = None  # block norms that `measured` computed, until they are read

    def __init__(self, grad_BP: Tensor | PositionSum) -> None:
        """Hold gradients ``(B, *P)``, or a `PositionSum` that forms them when they are read."""
        if isinstance(grad_BP, PositionSum):
            # `PositionSum` forms the gradients when they are read.
            self._later = grad_BP
        else:
            self.grad_BP = to_accumulation(grad_BP)
        self.shape = grad_BP.shape[1:]
        self.batch_size = grad_BP.shape[0]

    @cached_property
    def grad_BP(self) -> Tensor:
        """Per-sample gradients, shape ``(B, *P)``."""
        assert self._later is not None
        return self._later.value()

    def sqnorm(self) -> SquaredNorm:
        """Return the squared norm of every sample's gradient. Cost: ``2·B·|P|``."""
        return no_error(square_sums(self._flat_BP()))

    def block_norms(self) -> list[Tensor]:
        """Return the norms of parts of every sample's gradient."""
        norms, self._norms = self._norms, None
        return block_norms(self._flat_BP()) if norms is None else norms

    def measured(self) -> list[Tensor]:
        """Return `block_norms`, computed once."""
        self._norms = self.block_norms()
        return self._norms

    def materialize(self) -> Tensor:
        return self.grad_BP

    def add_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        """Add the weighted sum of the gradients to ``out``. Cost: ``2·B·|P|``."""
        # A form that torch's own counter of operations sees.
        row = out.view(1, -1)
        torch.addmm(row, coef_B.unsqueeze(0), self._flat_BP(out.dtype), out=row)

    def write_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        """Set ``out`` to the weighted sum of the gradients. Cost: ``2·B·|P|``."""
        torch.mm(coef_B.unsqueeze(0), self._flat_BP(out.dtype), out=out.view(1, -1))

    def _flat_BP(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the gradients as a matrix ``(B, P)``, in a dtype."""
        flat_BP = self.grad_BP if self.grad_BP.dim() == 2 else self.grad_BP.reshape(self.batch_size, -1)
        return flat_BP if dtype is None or flat_BP.dtype == dtype else flat_BP.to(dtype)


class Diagonal(Factor):
    """Gradients of a tensor with a batch axis of its own, in which sample b touches only its own entries."""

    # It arises where something derived from parameters is spread over the batch before data joins it
    # (`cls_token.expand(B, -1, -1)`, an embedding of one label per sample): sample b's gradient is zero outside entry b
    # of `axis`.
    def __init__(self, grad_BR: Tensor, *, axis: int) -> None:
        """Hold ``(B, *rest)``: sample b's gradient in entry b of `axis`."""
        self.grad_BR = to_accumulation(grad_BR)
        self.axis = axis
        self.batch_size = grad_BR.shape[0]
        rest = list(grad_BR.shape[1:])
        self.shape = torch.Size([*rest[:axis], self.batch_size, *rest[axis:]])

    def sqnorm(self) -> SquaredNorm:
        return Dense(self.grad_BR).sqnorm()

    def materialize(self) -> Tensor:
        """Return the per-sample gradients with their zeros, shape ``(B, *P)``: B times the tensor."""
        index = torch.arange(self.batch_size, device=self.grad_BR.device)
        full_BBR = self.grad_BR.new_zeros(self.batch_size, self.batch_size, *self.grad_BR.shape[1:])
        full_BBR[index, index] = self.grad_BR
        return full_BBR.movedim(1, self.axis + 1)

    def add_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        coef = coef_B.view(-1, *[1] * (self.grad_BR.dim() - 1))
        out.movedim(self.axis, 0).add_(self.grad_BR.to(out.dtype) * coef)

    def _with(self, change: Callable[[Any], Any]) -> "Diagonal":
        return Diagonal(change(self.grad_BR), axis=self.axis)

    def selected(self, index_D: Tensor) -> Dense:
        """Return the factor of a few samples, materialised: the tensor's batch axis stays that of all."""
        return Dense(rows_of(self.materialize(), index_D))

    def added_elements(self) -> int:
        return self.grad_BR.numel()
