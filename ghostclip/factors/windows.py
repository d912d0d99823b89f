"""Per-sample gradients of a convolution's kernel, held as input and output gradient and never unfolded whole.

Shape letters: B samples, K rows of a sample (frames), S groups, N = B·S, C channels, P pixels, T positions (of all
rows), I inputs of a group times the kernel, O outputs of a group.
"""

from collections.abc import Sequence
from math import prod
from typing import Final

import torch
from torch import Tensor

from ghostclip.factors import planner
from ghostclip.factors.base import (
    Factor,
    SquaredNorm,
    Terms,
    accumulation_dtype,
    doubled,
    end_to_end,
    no_error,
    rows_of,
    square_sums,
    to_accumulation,
    where_kept,
)
from ghostclip.factors.convolution import Geometry, KernelGradients, unfolded_channels_last
from ghostclip.factors.dense import Dense
from ghostclip.factors.outer import INSTANTIATE, Outer
from ghostclip.factors.wrapped import Permuted
from ghostclip.kernels import products
from ghostclip.kernels.bounds import Masses, Reduced, Unfinished, finished_one, formed_error, masses, samples_joined

# Gradients of so few elements in all are kept whatever they replace (float32: 8 MiB).
SMALL: Final = 1 << 21
_WINDOWS: Final = "symmetric Gram of windows"
_PIXELS: Final = "Gram of pixels"


class Windows(Outer):
    """The gradient of sample b, group s, is ``sum_t g[b,s,t] ⊗ (window t of x[b,s])``, a matrix (O, I)."""

    def __init__(self, x_BKC: Tensor, g_BKO: Tensor, geometry: Geometry, *, shape: Sequence[int] | None = None) -> None:
        self.x_BKC, self.g_BKO, self.geometry = x_BKC, g_BKO, geometry
        self.shape = geometry.shape if shape is None else torch.Size(shape)
        self.slots = geometry.groups
        self.batch_size = x_BKC.shape[0]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """T, I and O."""
        shape = self.geometry.shape
        return self.g_BKO.shape[1] * prod(self.g_BKO.shape[3:]), prod(shape[1:]), shape[0] // self.slots

    @property
    def a_NTI(self) -> Tensor:  # type: ignore[override]
        """All windows, shape ``(B·S, T, I)``, unfolded at every read."""
        return self.geometry.unfolded(self.x_BKC, self.g_BKO.shape[3:]).mT

    @property
    def g_NTO(self) -> Tensor:  # type: ignore[override]
        """The output gradients by position, shape ``(B·S, T, O)``."""
        return self.geometry.by_group(self.g_BKO).mT

    def unfolded(self) -> Outer:
        """Return the same gradients over unfolded windows."""
        return Outer(self.a_NTI, self.g_NTO, shape=self.shape, slots=self.slots)

    def keeps_gradient(self) -> bool:
        """Return whether book-keeping stores the per-sample gradient instead of input and output gradient."""
        # It does where it is no larger than they are, and where it is small, or no larger than unfolded windows and
        # output gradients would be, if a Gram would cost more than half of what forming the gradients costs.
        small = 0 < self.slots * prod(self.sizes[1:]) * self.batch_size <= SMALL
        return self.keeps_in_any_batch() or (small and self._is_formed_for_norm())

    def keeps_in_any_batch(self) -> bool:
        """Return whether `keeps_gradient` holds for any number of samples."""
        positions, inputs, outputs = self.sizes
        if positions == 0 or self.batch_size == 0:
            return False
        gradient = self.slots * inputs * outputs
        sides = self.x_BKC, self.g_BKO
        if gradient * self.batch_size * max(4, self.x_BKC.element_size()) <= sum(x.nbytes for x in sides):
            return True
        itemsize = min(side.element_size() for side in sides)
        return planner.keeps_per_sample(positions, inputs, outputs, itemsize) and self._is_formed_for_norm()

    def _is_formed_for_norm(self) -> bool:
        """Return whether a Gram would cost more than half of what forming the gradients costs."""
        return self.norm_plan()[1] > prod(self.sizes) > 0

    def norm_plan(self) -> tuple[str, int]:
        """Return how the squared norm of one sample and group is formed, in a few words, and its FLOPs."""
        costs = self._costs()
        form = min(costs, key=lambda name: costs[name])
        return form, costs[form]

    def _costs(self) -> dict[str, int]:
        positions, inputs, outputs = self.sizes
        costs = {INSTANTIATE: 2 * positions * inputs * outputs}
        costs[_WINDOWS] = planner.gram_flops(positions, inputs, outputs)
        pixels = self.x_BKC.shape[1] * prod(self.x_BKC.shape[3:])
        fits = max(pixels, positions) ** 2 <= planner.workspace(self.x_BKC.device)
        if fits and all(step == 1 for step in self.geometry.stride):
            costs[_PIXELS] = 2 * (pixels**2 * self.geometry.shape[1] + positions**2 * outputs)
        return costs

    def sqnorm(self) -> SquaredNorm:
        """Return squared norms: from a Gram of pixels or of windows, or from the gradients formed and dropped.

        Cost: min(2·P²·C + 2·T²·O (stride 1), about T²·(I+O), 2·T·I·O) per sample and group.
        """
        if self.x_BKC.numel() == 0 or self.g_BKO.numel() == 0:
            return no_error(to_accumulation(self.x_BKC.new_zeros(self.batch_size)))
        forms = {INSTANTIATE: self.instantiated_sqnorm, _WINDOWS: self.gram_sqnorm, _PIXELS: self.pixel_sqnorm}
        return forms[self.norm_plan()[0]]()

    def block_norms(self) -> None:
        """Return None: norms are formed from windows or pixels, of many positions."""

    def unfinished(self) -> Unfinished | Reduced | None:
        """Return squared norms in the cheapest form, where one group's fit the workspace."""
        if self._is_of_few():
            return None
        form = self.norm_plan()[0]
        if form == INSTANTIATE:
            return self._formed_sums()
        if form == _PIXELS:
            return self._pixel_sums()
        return self._by_windows().gram_sums() if self.batch_size <= self._at_once() else None

    def pixel_sqnorm(self) -> SquaredNorm:
        """Return squared norms from dot products of pixels and of output gradients; only for a stride of 1."""
        return self._summed(finished_one(self._pixel_sums()))

    def _pixel_sums(self) -> Unfinished | Reduced:
        entries = max(self.x_BKC.shape[1] * prod(self.x_BKC.shape[3:]), self.sizes[0]) ** 2
        chunk = planner.chunk_of_samples(2 * self.slots * entries, self.x_BKC.device)
        return samples_joined([part._by_pixels() for part in self._in_parts(chunk)])

    def _by_pixels(self) -> Unfinished:
        _, inputs, outputs = self.sizes
        x_BKC, g_BKO = self._operands()
        a_NTT = self.geometry.window_gram(x_BKC, self.g_BKO.shape[3:])
        g_NOT = self.geometry.by_group(g_BKO)
        g_NTT = products.batched(g_NOT.mT, g_NOT)
        square_KNT = torch.stack([gram_NTT.diagonal(dim1=1, dim2=2) for gram_NTT in (a_NTT, g_NTT)])
        value_N = g_NTT.mul_(a_NTT).sum((1, 2))
        absolute_N = g_NTT.abs_().sum((1, 2))
        found = Unfinished(value_N, *self._position_norms(), (inputs, outputs), absolute_N, square_KNT)
        return found._replace(by_units=self._by_units())

    def gram_sqnorm(self) -> SquaredNorm:
        """Return squared norms from a Gram of windows, unfolded a few samples at a time."""
        found = [part._by_windows().gram_sqnorm() for part in self._in_parts(self._at_once())]
        return found[0] if len(found) == 1 else end_to_end(found)

    def _at_once(self) -> int:
        positions, inputs, _ = self.sizes
        return planner.chunk_of_samples(self.slots * positions * inputs, self.x_BKC.device)

    def _by_windows(self) -> Outer:
        # A norm does not depend on the order of a window's entries, and this one is the quickest to copy.
        windows = unfolded_channels_last(self.geometry, self.x_BKC, self.g_BKO.shape[3:])
        positions, inputs, _ = self.sizes
        a_NTI = windows.reshape(self.batch_size * self.slots, positions, inputs)
        return Outer(a_NTI, self.g_NTO, shape=self.shape, slots=self.slots)

    def instantiated_sqnorm(self) -> SquaredNorm:
        """Return squared norms of the gradients, formed a few samples at a time, with the error of two formings."""
        if self.sizes[0] <= 1 or self.x_BKC.numel() == 0:
            return no_error(self._formed_squares())
        if self.slots == 1:
            return self._summed(finished_one(self._formed_sums()))
        terms = self.terms()
        assert terms is not None
        value_B = self._formed_squares()
        found = Masses(terms.mass_B, terms.scale_B, torch.zeros_like(value_B))
        error_B = formed_error(value_B, found, self.sizes[0] if self._by_units() else 0)
        return SquaredNorm(value_B, error_B, terms)

    def instantiated_sums(self) -> Unfinished | None:
        """Return the sums that `instantiated_sqnorm` is worked out from; None for several groups, or one position."""
        return None if self._is_of_few() else self._formed_sums()

    def _is_of_few(self) -> bool:
        """Return whether errors are worked out otherwise: group by group, or of nothing that could cancel."""
        return self.slots > 1 or self.sizes[0] <= 1 or self.x_BKC.numel() == 0 or self.g_BKO.numel() == 0

    def _formed_sums(self) -> Unfinished:
        found = Unfinished(self._formed_squares(), *self._position_norms(), self.sizes[1:])
        return found._replace(by_units=self._by_units())

    def _formed_squares(self) -> Tensor:
        found = [square_sums(grads) for _, grads in KernelGradients(*self._operands(), self.geometry).pieces()]
        return torch.cat(found) if found else to_accumulation(self.x_BKC.new_zeros(0))

    def _operands(self) -> tuple[Tensor, Tensor]:
        """Return input and output gradient as products take them: in 16 bits where matrix units do."""
        if self._by_units():
            return self.x_BKC, self.g_BKO
        return to_accumulation(self.x_BKC), to_accumulation(self.g_BKO)

    def terms(self) -> Terms | None:
        """Return the positions' outer products; None where there is one position, or none."""
        if self.sizes[0] <= 1 or self.x_BKC.numel() == 0:
            return None
        found = masses(*self._position_norms(), *self.sizes[1:])
        return self._terms(found.mass_N, found.scale_N)

    def _position_norms(self) -> tuple[Tensor, Tensor]:
        """Return the norms of windows and of output gradients, each of shape ``(B·S, T)``, none of them unfolded."""
        a_BSKT = self.geometry.window_squares(to_accumulation(self.x_BKC), self.g_BKO.shape[3:])
        g_BSKT = to_accumulation(self.g_BKO).square().unflatten(2, (self.slots, -1)).sum(3).transpose(1, 2)
        groups = self.batch_size * self.slots
        return a_BSKT.reshape(groups, -1).sqrt(), g_BSKT.reshape(groups, -1).sqrt()

    def _by_units(self) -> bool:
        return products.takes(self.x_BKC, self.g_BKO)

    def _weighting(self) -> int:
        """Return 1: terms are weighted in float32."""
        return 1

    def materialize(self) -> Tensor:
        """Return the per-sample gradients, shape ``(B, *P)``. Cost: 2·T·I·O per sample and group."""
        formed = self._formed()
        if formed is None:
            return to_accumulation(self.x_BKC).new_zeros(self.batch_size, *self.shape)
        if not formed.channels_last:
            return formed.together().view(self.batch_size, *self.shape)
        full_BP = self.x_BKC.new_empty(
            self.batch_size, *self.geometry.shape, dtype=accumulation_dtype(self.x_BKC.dtype)
        )
        for piece, grads in formed.pieces():
            full_BP[piece] = formed.in_order(grads)
        return full_BP.view(self.batch_size, *self.shape)

    def instantiated(self) -> Factor:
        """Return the factor of the materialised gradients, their axes in the order in which they are formed."""
        formed = self._formed()
        if formed is None or not formed.channels_last or self.shape != self.geometry.shape:
            return super().instantiated()
        shape = self.geometry.shape
        inner = Dense(formed.together().view(-1, shape[0], *shape[2:], shape[1]))
        return Permuted(inner, (0, len(shape) - 1, *range(1, len(shape) - 1)))

    def _formed(self) -> KernelGradients | None:
        """Return the gradients of the kernel; None where there is nothing to sum."""
        if self.x_BKC.numel() == 0 or self.g_BKO.numel() == 0:
            return None
        return KernelGradients(*self._operands(), self.geometry)

    def add_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        """Add the weighted sum of the gradients to ``out``, formed as in a non-private backward. Cost: 2·B·T·I·O."""
        if self.x_BKC.numel() and self.g_BKO.numel() and not self._add_formed(coef_B, out):
            out += self._weighted(coef_B, out)

    def write_clipped_sum_(self, coef_B: Tensor, out: Tensor) -> None:
        """Set ``out`` to the weighted sum of the gradients. Cost: 2·B·T·I·O."""
        if not self.x_BKC.numel() or not self.g_BKO.numel() or self._adds_formed(out):
            self.add_clipped_sum_(coef_B, out.zero_())
        else:
            out.copy_(self._weighted(coef_B, out))

    def _adds_formed(self, out: Tensor) -> bool:
        """Return whether the clipped sum is one of formed gradients."""
        # By matrix units, and by a CPU where they are small. A CPU's backward of a convolution adds one position after
        # the other to a sum that grows with the batch: of 256 equal images, leaving one out moved the sum by 1.006
        # times its gradient.
        if self._by_units():
            return out.dtype == torch.float32
        return out.device.type == "cpu" and self.sizes[0] > 1 and self.keeps_in_any_batch()

    def _add_formed(self, coef_B: Tensor, out: Tensor) -> bool:
        """Add per-sample gradients in pieces, weighted in the dtype of the sum; return whether that was possible."""
        if not self._adds_formed(out):
            return False
        operands = self._operands() if self._by_units() else (self.x_BKC.to(out.dtype), self.g_BKO.to(out.dtype))
        formed = KernelGradients(*operands, self.geometry)
        row = torch.zeros_like(out) if formed.channels_last else out
        for piece, grad_BP in formed.pieces():
            torch.addmm(row.view(1, -1), coef_B[piece].unsqueeze(0), grad_BP, out=row.view(1, -1))
        if formed.channels_last:
            out += formed.in_order(row.view(1, -1)).reshape(out.shape)
        return True

    def _weighted(self, coef_B: Tensor, out: Tensor) -> Tensor:
        return self.geometry.weighted(self.x_BKC.to(out.dtype), self.g_BKO.to(out.dtype), coef_B).view(out.shape)

    def masked(self, keep_B: Tensor) -> "Windows":
        x_BKC, g_BKO = where_kept(keep_B, self.x_BKC), where_kept(keep_B, self.g_BKO)
        return Windows(x_BKC, g_BKO, self.geometry, shape=self.shape)

    def selected(self, index_D: Tensor) -> "Windows":
        x_BKC, g_BKO = rows_of(self.x_BKC, index_D), rows_of(self.g_BKO, index_D)
        return Windows(x_BKC, g_BKO, self.geometry, shape=self.shape)

    def in_double(self) -> "Windows":
        return Windows(doubled(self.x_BKC), doubled(self.g_BKO), self.geometry, shape=self.shape)

    def transposed(self) -> Outer:
        """Return the factor of the transposed matrix, over unfolded windows."""
        return self.unfolded().transposed()

    def reshaped(self, shape: Sequence[int]) -> "Windows":
        return Windows(self.x_BKC, self.g_BKO, self.geometry, shape=shape)

    def element_count(self) -> int:
        return self.x_BKC.numel() + self.g_BKO.numel()

    def _in_parts(self, chunk: int) -> "list[Windows]":
        """Return the factors of a few samples at a time."""
        if chunk >= self.batch_size:
            return [self]
        return [
            Windows(self.x_BKC[start : start + chunk], self.g_BKO[start : start + chunk], self.geometry)
            for start in range(0, self.batch_size, chunk)
        ]
