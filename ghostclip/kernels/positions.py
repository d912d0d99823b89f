"""Sums over positions that are formed when they are asked for, or left by a kernel which reads the positions anyway.

Shape letters: N samples, T positions, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PositionSum:
    """Lazy sum of a tensor over its positions, unless a kernel that reads the tensor anyway has already left it."""

    def __init__(self, x_NTF: Tensor, axes: tuple[int, ...] = (1,)) -> None:
        # A bias's gradients are such a sum. The tensor must not change before the sum is read.
        self.shape = torch.Size(size for axis, size in enumerate(x_NTF.shape) if axis not in axes)
        self._axes = axes
        self._x_NTF: Tensor | None = x_NTF
        self._sum_NF: Tensor | None = None

    def place_among(self, *tensors: Tensor) -> int:
        """Return the number, from 1, of the tensor whose sum is still missing; 0 for none of them."""
        return next((number for number, one in enumerate(tensors, start=1) if one is self._x_NTF), 0)

    def leave(self, sum_NF: Tensor) -> None:
        """Set the sum that a kernel has formed, float32, ``(N, F)``."""
        self._sum_NF, self._x_NTF = sum_NF, None

    def value(self) -> Tensor:
        """Return the sum, in 32 bits a number at least, shape ``(N, F)``."""
        if self._sum_NF is None:
            assert self._x_NTF is not None
            wide = torch.promote_types(self._x_NTF.dtype, torch.float32)
            self.leave(self._x_NTF.sum(self._axes, dtype=wide))
        assert self._sum_NF is not None
        return self._sum_NF
