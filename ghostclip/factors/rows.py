"""Per-sample gradients that touch few rows of a table: embeddings.

Shape letters: B samples, T positions, I features, V rows of the table, K distinct (sample, row) pairs, R look-ups
of a row that the same sample looks up again.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from ghostclip import kernels
from ghostclip.factors.base import Factor, SquaredNorm, no_error, square_sums, to_accumulation, where_kept


class Rows(Factor):
    """In the gradient of sample b, row ``ids[b,t]`` receives ``g[b,t]``; repeated rows add up."""

    def __init__(self, ids_BT: Tensor, g_BTI: Tensor, *, shape: Sequence[int]) -> None:
        """Keep the row numbers and the gradients.

        Args:
            ids_BT: Row numbers, shape ``(B, T)``, integer.
            g_BTI: Gradient of every looked-up row, shape ``(B, T, I)``.
            shape: The parameter's shape; V·I elements, row-major in (V, I).
        """
        self.ids_BT = ids_BT.long()
        self.g_BTI = g_BTI
        self.shape = torch.Size(shape)
        features = g_BTI.shape[-1]
        self.matrix = (prod(self.shape) // max(1, features), features)
        self.batch_size = ids_BT.shape[0]

    def sqnorm(self) -> SquaredNorm:
        """Return squared norms: of each gradient alone, or of their sum where a sample looked a row up again.

        Cost: one sort of B·T keys (none for one position), 2·B·T·I, and a copy of the repeated rows' gradients alone;
        never a T×T mask, never a B×V×I tensor.
        """
        if self.g_BTI.is_cuda:
            return no_error(kernels.row_square(self.ids_BT, self.g_BTI).value_N)
        g_BTI = to_accumulation(self.g_BTI)
        if self.ids_BT.shape[1] <= 1:
            return no_error(square_sums(g_BTI.flatten(1)))
        sample_R, position_R, pairs_R = self._repeated()
        if 2 * len(pairs_R) > self.ids_BT.numel():
            pairs_K, sums_KI = self.segments()
            return no_error(g_BTI.new_zeros(self.batch_size).index_add_(0, self._sample(pairs_K), square_sums(sums_KI)))
        alone_BT = square_sums(g_BTI.flatten(0, 1)).view(self.ids_BT.shape)
        alone_BT[sample_R, position_R] = 0
        pairs_K, segment_R = torch.unique_consecutive(pairs_R, return_inverse=True)
        sums_KI = g_BTI.new_zeros(pairs_K.numel(), g_BTI.shape[-1])
        sums_KI.index_add_(0, segment_R, g_BTI[sample_R, position_R])
        return no_error(alone_BT.sum(1).index_add_(0, self._sample(pairs_K), square_sums(sums_KI)))

    def _repeated(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return sample, position and pair of all look-ups whose row their sample looks up again, sorted by pair."""
        sorted_BT, order_BT = self.ids_BT.sort(1)
        again_BT = sorted_BT[:, 1:] == sorted_BT[:, :-1]
        repeated_BT = functional.pad(again_BT, (1, 0)) | functional.pad(again_BT, (0, 1))
        sample_R, place_R = repeated_BT.nonzero(as_tuple=True)
        return sample_R, order_BT[sample_R, place_R], sample_R * self.matrix[0] + sorted_BT[sample_R, place_R]

    def segments(self) -> tuple[Tensor, Tensor]:
        """Return the distinct pairs and the gradient added up over each.

        Returns:
            ``pairs_K`` (``sample · V + row``, sorted) and ``sums_KI`` in the accumulation dtype.
        """
        pairs_K, segment = torch.unique(self.pairs().flatten(), return_inverse=True)
        g_BTI = to_accumulation(self.g_BTI)
        sums_KI = g_BTI.new_zeros(pairs_K.numel(), g_BTI.shape[-1])
        sums_KI.index_add_(0, segment, g_BTI.reshape(-1, g_BTI.shape[-1]))
        return pairs_K, sums_KI

    def _sample(self, pairs_K: Tensor) -> Tensor:
        return pairs_K // max(1, self.matrix[0])

    def pairs(self) -> Tensor:
        """Return ``sample · V + row`` for every position, shape ``(B, T)``."""
        sample_B1 = torch.arange(self.batch_size, device=self.ids_BT.device).unsqueeze(1)
        return sample_B1 * self.matrix[0] + self.ids_BT

    def materialize(self) -> Tensor:
        """Return the per-sample gradients, shape ``(B, *P)``."""
        g_BTI = to_accumulation(self.g_BTI)
        full = g_BTI.new_zeros(self.batch_size * self.matrix[0], g_BTI.shape[-1])
        full.index_add_(0, self.pairs().flatten(), g_BTI.reshape(-1, g_BTI.shape[-1]))
        return full.view(self.batch_size, *self.shape)

    def add_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        """Add the weighted rows to ``out`` with ``index_add_``, never a one-hot product. Cost: 2·B·T·I."""
        weighted_BTI = self.g_BTI.to(out.dtype) * coef_B.view(-1, 1, 1)
        out.view(self.matrix).index_add_(0, self.ids_BT.flatten(), weighted_BTI.reshape(-1, self.matrix[1]))

    def masked(self, keep_B: Tensor) -> "Rows":
        """Return the factor with dropped samples set to zero."""
        return Rows(self.ids_BT, where_kept(keep_B, self.g_BTI), shape=self.shape)

    def reshaped(self, shape: Sequence[int]) -> "Rows":
        """Return the factor of the same values for a parameter of ``shape``."""
        return Rows(self.ids_BT, self.g_BTI, shape=shape)

    def element_count(self) -> int:
        """Return how many tensor elements the factor keeps alive."""
        return self.g_BTI.numel() + self.ids_BT.numel()
