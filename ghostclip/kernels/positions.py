"""Sums over positions that are formed when they are asked for, or left by a kernel which reads the positions anyway.

Shape letters: N samples, T positions, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PositionSum:
    """Sum of a tensor over its positions, formed when it is asked for unless a kernel has left it by then.

    A bias's gradients are such a sum, of what the norm of the layer's weight is formed of: read once, in one launch. A
    second backward whose bias gradients were kept from the first does not ask.
    """

    def __init__(self, x_NTF: Tensor, axes: tuple[int, ...] = (1,)) -> None:
        """Form nothing yet.

        Args:
            x_NTF: Floating or complex, shape ``(N, T, F)``; it must not change before the sum is asked for.
            axes: Where the positions lie; other axes may follow the features then, ``(N, T, F, T)``.
        """
        self.shape = torch.Size(size for axis, size in enumerate(x_NTF.shape) if axis not in axes)
        self._axes = axes
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
        """Return the sum, in 32 bits a number at least, shape ``(N, F)``."""
        if self._sum_NF is None:
            assert self._x_NTF is not None
            wide = torch.promote_types(self._x_NTF.dtype, torch.float32)
            self.leave(self._x_NTF.sum(self._axes, dtype=wide))
        assert self._sum_NF is not None
        return self._sum_NF
