"""Sums over positions that a kernel leaves which reads the positions anyway.

Shape letters: N samples, T positions, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PositionSum:
    """Sum of a tensor over its positions, formed when it is asked for unless a kernel has left it by then.

    A bias's gradients are such a sum, of what the norm of the layer's weight is formed of: read once, in one launch.
    """

    def __init__(self, x_NTF: Tensor) -> None:
        """Form nothing yet.

        Args:
            x_NTF: Of 16 or 32 bits, shape ``(N, T, F)``; it must not change before the sum is asked for.
        """
        self.shape = torch.Size((x_NTF.shape[0], x_NTF.shape[2]))
        self._x_NTF: Tensor | None = x_NTF
        self._sum_NF: Tensor | None = None

    def place_among(self, *tensors: Tensor) -> int:
        """Return which of some tensors is the one whose sum nobody has formed.

        Args:
            *tensors: Any.

        Returns:
            Its number, from 1; 0 for none of them.
        """
        return next((number for number, one in enumerate(tensors, start=1) if one is self._x_NTF), 0)

    def leave(self, sum_NF: Tensor) -> None:
        """Take the sum from who has formed it.

        Args:
            sum_NF: float32, shape ``(N, F)``.
        """
        self._sum_NF, self._x_NTF = sum_NF, None

    def value(self) -> Tensor:
        """Return the sum, float32, shape ``(N, F)``."""
        if self._sum_NF is None:
            assert self._x_NTF is not None
            self.leave(self._x_NTF.sum(1, dtype=torch.float32))
        assert self._sum_NF is not None
        return self._sum_NF
