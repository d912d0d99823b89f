"""Per-sample gradients that are tensors already: biases, affine weights, raw parameters.

Shape letters: B samples, ``*P`` the parameter's own shape.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ghostclip.factors.base import (
    Factor,
    SquaredNorm,
    doubled,
    no_error,
    rows_of,
    square_sums,
    to_accumulation,
    zero_dropped,
)
from ghostclip.kernels.bounds import block_norms
from ghostclip.kernels.sums import PositionSum


class Dense(Factor):
    """The gradient of sample b is ``grad_BP[b]`` itself."""

    _later: PositionSum | None = None
    _norms: list[Tensor] | None = None

    def __init__(self, grad_BP: Tensor | PositionSum) -> None:
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
        """Return the squared norm of every sample's gradient. Cost: 2·B·|P|."""
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
        """Add the weighted sum of the gradients to ``out``. Cost: 2·B·|P|."""
        # A form that torch's own counter of operations sees.
        row = out.view(1, -1)
        torch.addmm(row, coef_B.unsqueeze(0), self._flat_BP(out.dtype), out=row)

    def write_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        """Set ``out`` to the weighted sum of the gradients. Cost: 2·B·|P|."""
        torch.mm(coef_B.unsqueeze(0), self._flat_BP(out.dtype), out=out.view(1, -1))

    def masked(self, keep_B: Tensor) -> "Dense":
        return Dense(zero_dropped(keep_B, self.grad_BP))

    def selected(self, index_D: Tensor) -> "Dense":
        return Dense(rows_of(self.grad_BP, index_D))

    def in_double(self) -> "Dense":
        return Dense(doubled(self.grad_BP))

    def reshaped(self, shape: Sequence[int]) -> "Dense":
        return Dense(self.grad_BP.reshape(self.batch_size, *shape))

    def element_count(self) -> int:
        return self.batch_size * self.shape.numel()

    def _flat_BP(self, dtype: torch.dtype | None = None) -> Tensor:
        flat_BP = self.grad_BP if self.grad_BP.dim() == 2 else self.grad_BP.reshape(self.batch_size, -1)
        return flat_BP if dtype is None or flat_BP.dtype == dtype else flat_BP.to(dtype)


class Diagonal(Factor):
    """Gradients of a tensor with a batch axis of its own, in which sample b touches only its own entries."""

    # It arises where something derived from parameters is spread over the batch before data joins it
    # (`cls_token.expand(B, -1, -1)`, an embedding of one label per sample): sample b's gradient is zero outside entry b
    # of `axis`.
    def __init__(self, grad_BR: Tensor, *, axis: int) -> None:
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

    def masked(self, keep_B: Tensor) -> "Diagonal":
        return Diagonal(zero_dropped(keep_B, self.grad_BR), axis=self.axis)

    def selected(self, index_D: Tensor) -> Dense:
        """Return the factor of a few samples, materialised: the tensor's batch axis stays that of all."""
        return Dense(rows_of(self.materialize(), index_D))

    def in_double(self) -> "Diagonal":
        return Diagonal(doubled(self.grad_BR), axis=self.axis)

    def reshaped(self, shape: Sequence[int]) -> Dense:
        return Dense(self.materialize().reshape(self.batch_size, *shape))

    def element_count(self) -> int:
        return self.grad_BR.numel()
