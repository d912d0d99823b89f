"""Per-sample gradients that touch few rows of a table: embeddings.

Shape letters: B samples, T positions, I features, V rows of the table, K distinct (sample, row) pairs, R look-ups
of a row that the same sample looks up again.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ghostclip import kernels
from ghostclip.factors.base import Factor, SquaredNorm, Terms, no_error, square_sums, to_accumulation
from ghostclip.kernels import runtime
from ghostclip.kernels.bounds import position_norms, sum_of_squares
from ghostclip.kernels.sums import add_rows_


class _Repeated(NamedTuple):
    """Look-ups of rows that the same sample looks up again."""

    place: tuple[Tensor, Tensor]
    """Sample and position of each, ``(R,)``."""
    segment_R: Tensor
    """Which of the K pairs of a sample and a row each belongs to."""
    sample_K: Tensor  # sample of each pair
    row_K: Tensor  # row of the table


class Rows(Factor):
    """Of an embedding: in the gradient of sample b, row ``ids[b,t]`` gets ``g[b,t]``; repeated tokens add up."""

    def __init__(self, ids_BT: Tensor, g_BTI: Tensor, *, shape: Sequence[int]) -> None:
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
        # Of each gradient alone, or of their sum where a sample looked a row up again. On a CPU such sums are formed in
        # float64, here and for the clipped sum alike. On a GPU a clipped sum adds the gradients one by one, and their
        # terms say what that may round.
        if runtime.wait(self.g_BTI):
            measured = kernels.row_square(self.ids_BT, self.g_BTI)
            terms = Terms(measured.mass_N, measured.scale_N, self.ids_BT.shape[1])
            return SquaredNorm(measured.value_N, measured.error_N, terms)
        g_BTI = to_accumulation(self.g_BTI)
        repeated = self._repeated
        if repeated is None:
            return no_error(square_sums(g_BTI.flatten(1)))
        norm_BT = position_norms(g_BTI).index_put(repeated.place, g_BTI.new_zeros((), dtype=g_BTI.dtype))
        square_B = sum_of_squares([norm_BT]).double()
        add_rows_(square_B, repeated.sample_K, self._added_up(repeated).square_().sum(1))
        return no_error(square_B.to(norm_BT.dtype))

    def terms(self) -> Terms | None:
        """Return the gradients of rows that their sample looks up again; the others are added as they are."""
        if runtime.wait(self.g_BTI):
            return self.sqnorm().terms
        repeated = self._repeated
        if repeated is None:
            return None
        norm_R = position_norms(self.g_BTI)[repeated.place]
        mass_K = add_rows_(norm_R.new_zeros(len(repeated.row_K)), repeated.segment_R, norm_R)
        mass_B, scale_B = norm_R.new_zeros(2, self.batch_size).unbind()
        # Rows do not overlap: their roundings add up as the sides of a box do.
        mass_B = add_rows_(mass_B, repeated.sample_K, mass_K.square()).sqrt_()
        return Terms(mass_B, add_rows_(scale_B, repeated.place[0], norm_R.square()), self.ids_BT.shape[1])

    @cached_property
    def _repeated(self) -> "_Repeated | None":
        """Return all look-ups whose row their sample looks up again, by sample and row; None if there are none."""
        if self.ids_BT.shape[1] <= 1:
            return None
        sorted_BT, order_BT = self.ids_BT.sort(dim=1, stable=True)
        again_BT = sorted_BT[:, 1:] == sorted_BT[:, :-1]
        repeated_BT = functional.pad(again_BT, (1, 0)) | functional.pad(again_BT, (0, 1))
        sample_R, place_R = repeated_BT.nonzero(as_tuple=True)
        if not len(sample_R):
            return None
        pairs_R = sample_R * max(1, self.matrix[0]) + sorted_BT[sample_R, place_R]
        pairs_K, segment_R = torch.unique_consecutive(pairs_R, return_inverse=True)
        sample_K = pairs_K // max(1, self.matrix[0])
        row_K = pairs_K - sample_K * max(1, self.matrix[0])
        return _Repeated((sample_R, order_BT[sample_R, place_R]), segment_R, sample_K, row_K)

    def _added_up(self, repeated: "_Repeated") -> Tensor:
        """Return the sums of the repeated rows' gradients, shape ``(K, I)``, float64."""
        sums_KI = torch.zeros(len(repeated.row_K), self.g_BTI.shape[-1], dtype=torch.float64, device=self.g_BTI.device)
        return add_rows_(sums_KI, repeated.segment_R, self.g_BTI[repeated.place].double())

    def segments(self) -> tuple[Tensor, Tensor]:
        """Return sorted pairs ``sample · V + row``, ``(K,)``, and the gradient added up over each, ``(K, I)``."""
        # Where counting the pairs would wait for a device, there are as many as positions, the last ones of no sample.
        if runtime.wait(self.g_BTI):
            return self._padded_segments()
        pairs_K, segment = torch.unique(self.pairs().flatten(), return_inverse=True)
        g_BTI = to_accumulation(self.g_BTI)
        sums_KI = g_BTI.new_zeros(pairs_K.numel(), g_BTI.shape[-1])
        add_rows_(sums_KI, segment, g_BTI.reshape(-1, g_BTI.shape[-1]))
        return pairs_K, sums_KI

    def _padded_segments(self) -> tuple[Tensor, Tensor]:
        """As `segments`, without waiting for a device: K is the number of positions."""
        g_NI = to_accumulation(self.g_BTI).reshape(-1, self.g_BTI.shape[-1])
        sorted_N, order_N = self.pairs().flatten().sort()
        place_N = torch.nn.functional.pad((sorted_N.diff() != 0).long(), (1, 0))[: len(sorted_N)].cumsum(0)
        nothing = self.batch_size * max(1, self.matrix[0])
        pairs_N = torch.full_like(sorted_N, nothing).scatter_(0, place_N, sorted_N)
        return pairs_N, add_rows_(torch.zeros_like(g_NI), place_N, g_NI.index_select(0, order_N))

    def pairs(self) -> Tensor:
        """Return ``sample · V + row`` for every position, shape ``(B, T)``."""
        sample_B1 = torch.arange(self.batch_size, device=self.ids_BT.device).unsqueeze(1)
        return sample_B1 * self.matrix[0] + self.ids_BT

    def materialize(self) -> Tensor:
        """Return the per-sample gradients as whole tables, ``(B, V, I)``."""
        g_BTI = to_accumulation(self.g_BTI)
        full = g_BTI.new_zeros(self.batch_size * self.matrix[0], g_BTI.shape[-1])
        add_rows_(full, self.pairs().flatten(), g_BTI.reshape(-1, g_BTI.shape[-1]))
        return full.view(self.batch_size, *self.shape)

    def add_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        """Add the weighted rows to those of ``out``, never by a one-hot product; Cost: 2·B·T·I."""
        # On a CPU what a sample adds to one row is added up before.
        matrix = out.view(self.matrix)
        weighted_BTI = self.g_BTI.to(out.dtype) * coef_B.view(-1, 1, 1)
        repeated = None if runtime.wait(self.g_BTI) else self._repeated
        if repeated is not None:
            weighted_BTI[repeated.place] = 0
            weighted_KI = self._added_up(repeated).mul_(coef_B[repeated.sample_K].unsqueeze(1))
            add_rows_(matrix, repeated.row_K, weighted_KI.to(out.dtype))
        add_rows_(matrix, self.ids_BT.flatten(), weighted_BTI.reshape(-1, self.matrix[1]))

    def _with(self, change: Callable[[Any], Any]) -> "Rows":
        return Rows(change(self.ids_BT), change(self.g_BTI), shape=self.shape)

    def reshaped(self, shape: Sequence[int]) -> "Rows":
        return Rows(self.ids_BT, self.g_BTI, shape=shape)

    def added_elements(self) -> int:
        return self.g_BTI.numel() + self.ids_BT.numel()
