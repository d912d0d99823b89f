"""The geometry of a convolution: its windows, and the contractions in which its kernel's gradient takes part.

None of these unfolds a whole batch.

Shape letters: B samples, K rows of a sample (frames), S groups, C channels, P pixels, T output positions, I inputs of a
group times the kernel, O outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ghostclip.kernels import products
from ghostclip.kernels.precision import full_convolutions


@dataclass(frozen=True)
class Geometry:
    """Geometry of the windows of one convolution, kernel ``(S·O, C, *kernel)``."""

    shape: torch.Size
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @property
    def kernel(self) -> torch.Size:
        """The kernel's size along every axis of space."""
        return self.shape[2:]

    def fitted(self, x: Tensor, positions: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Return the part of the input that the first windows see, and the padding left on both sides."""
        # A convolution of the two has exactly so many positions. A view, unless zeros before and behind differ, or a
        # transposed convolution's output padding left room for windows that it does not have.
        amounts, regular = [], True
        for place, (before, behind) in enumerate(self.padding):
            seen = (positions[place] - 1) * self.stride[place] + self.dilation[place] * (self.kernel[place] - 1) + 1
            missing = seen - x.shape[x.dim() - len(positions) + place] - before
            regular = regular and before == behind and missing > behind - self.stride[place]
            amounts.append((before, missing))
        if regular:
            return x, [before for before, _ in amounts]
        return functional.pad(x, [n for pair in reversed(amounts) for n in pair]), [0] * len(amounts)

    def windows(self, x: Tensor, positions: Sequence[int]) -> Tensor:
        """Return windows ``(..., *kernel, *positions)``, a view of the padded input."""
        lead, dims = x.dim() - len(positions), len(positions)
        x = self._padded(x)
        for place in range(dims):
            x = self.unfolded_along(x, lead + place, place, positions[place])
        return x.permute(*range(lead), *range(lead + dims, lead + 2 * dims), *range(lead, lead + dims))

    def _padded(self, x: Tensor) -> Tensor:
        amounts = [n for pair in reversed(self.padding) for n in pair]
        return functional.pad(x, amounts) if any(amounts) else x

    def unfolded_along(self, x: Tensor, axis: int, place: int, count: int) -> Tensor:
        """Return the first ``count`` windows along one axis of the padded input, their entries as last axis."""
        step = self.dilation[place]
        windows = x.unfold(axis, step * (self.kernel[place] - 1) + 1, self.stride[place])
        if step > 1:
            windows = windows[..., ::step]
        return windows if windows.shape[axis] == count else windows.narrow(axis, 0, count)

    def unfolded(self, x_BKC: Tensor, positions: Sequence[int]) -> Tensor:
        """Return copies of all windows of ``(B, K, S·C, *space)``, shape ``(B·S, I, K·T)``."""
        samples, rows = x_BKC.shape[:2]
        windows = self.windows(x_BKC.unflatten(2, (self.groups, -1)), positions).movedim(1, 3 + len(self.kernel))
        return windows.reshape(samples * self.groups, prod(self.shape[1:]), rows * prod(positions))

    def by_group(self, tensor: Tensor) -> Tensor:
        """Return ``(B, K, S·F, *space)`` as ``(B·S, F, K·P)``, a view where K is 1."""
        if tensor.shape[1] == 1:
            features, pixels = tensor.shape[2] // self.groups, tensor.shape[3:].numel()
            return tensor.reshape(tensor.shape[0] * self.groups, features, pixels)
        parts = tensor.unflatten(2, (self.groups, -1)).flatten(4).permute(0, 2, 3, 1, 4)
        return parts.reshape(-1, parts.shape[2], parts.shape[3] * parts.shape[4])

    def grouped(self, x_BKC: Tensor, g_BKO: Tensor) -> Tensor:
        """Return every sample's gradient ``(B·S·O, C, *kernel)``, by a convolution with a group for every sample.

        Cost: 2·B·T·I·O.
        """
        samples = x_BKC.shape[0]
        x, pads = self.fitted(x_BKC, g_BKO.shape[3:])
        kernel = x.new_empty(1).expand(samples * self.shape[0], *self.shape[1:])
        sides = (x.transpose(0, 1).flatten(1, 2), g_BKO.transpose(0, 1).flatten(1, 2))
        return self._kernel_gradient(*sides, kernel, pads, samples * self.groups)

    def weighted(self, x_BKC: Tensor, g_BKO: Tensor, coef_B: Tensor) -> Tensor:
        """Return ``Σ_b coef_B[b]·g_b``, ``(S·O, C, *kernel)``, as an ordinary convolution's backward does.

        Cost: 2·B·T·I·O, and a weighted copy of the smaller tensor.
        """
        positions = g_BKO.shape[3:]
        coef = coef_B.view(-1, *[1] * (g_BKO.dim() - 1))
        if x_BKC.numel() < g_BKO.numel():
            x_BKC = x_BKC * coef
        else:
            g_BKO = g_BKO * coef
        x, pads = self.fitted(x_BKC.flatten(0, 1), positions)
        return self._kernel_gradient(x, g_BKO.flatten(0, 1), x.new_empty(self.shape), pads, self.groups)

    def _kernel_gradient(self, x: Tensor, g: Tensor, kernel: Tensor, pads: list[int], groups: int) -> Tensor:
        places = (self.stride, pads, self.dilation, False, [0] * len(pads), groups)
        with full_convolutions():
            found: Any = torch.ops.aten.convolution_backward(g, x, kernel, None, *places, [False, True, False])
        gradient: Tensor = found[1]
        return gradient

    def window_squares(self, x_BKC: Tensor, positions: Sequence[int]) -> Tensor:
        """Return the squared norm of every window, ``(B, S, K, *positions)``."""
        squares = self._padded(x_BKC.square().unflatten(2, (self.groups, -1)).sum(3).transpose(1, 2))
        for place, count in enumerate(positions):
            squares = self.unfolded_along(squares, 3 + place, place, count).sum(-1)
        return squares

    def window_gram(self, x_BKC: Tensor, positions: Sequence[int]) -> Tensor:
        """Return dot products of all pairs of windows, ``(B·S, K·T, K·T)``, from those of pixels; for stride 1.

        ``A[s, t] = Σ_k G[s + k, t + k]`` with ``G[u, v] = x_u · x_v``, one axis of space after the other: each pair of
        pixels is multiplied once and not once for every pair of windows it is in.
        Cost: 2·(K·P)²·C per group, and as many additions per entry and axis as the kernel has entries there.
        """
        x_NCP = self.by_group(x_BKC)
        rows, space, dims = x_BKC.shape[1], x_BKC.shape[3:], len(positions)
        gram = products.batched(x_NCP.mT, x_NCP).view(-1, rows, *space, rows, *space)
        for place in range(dims):
            if self.kernel[place] > 1 or space[place] != positions[place]:
                gram = self._along(gram, place, positions[place])
        return gram.reshape(-1, rows * prod(positions), rows * prod(positions))

    def _along(self, gram: Tensor, place: int, count: int) -> Tensor:
        axes = (2 + place, 3 + place + len(self.kernel))
        size, pad = gram.shape[axes[0]], self.padding[place][0]
        shape = list(gram.shape)
        shape[axes[0]] = shape[axes[1]] = count
        total = gram.new_zeros(shape)
        for offset in range(0, self.kernel[place] * self.dilation[place], self.dilation[place]):
            first, last = max(0, pad - offset), min(count, size + pad - offset)
            if first < last:
                into, part = total, gram
                for axis in axes:
                    into = into.narrow(axis, first, last - first)
                    part = part.narrow(axis, first + offset - pad, last - first)
                into += part
        return total
