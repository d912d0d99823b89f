"""The geometry of a convolution, and each sample's gradient of its kernel, formed in the cheapest way for its sizes.

On a CPU most of the cost beyond the products is that of copying windows, and that depends on how many elements lie side
by side: the layouts of `KernelGradients` differ in nothing else. None of `Geometry`'s contractions unfolds a whole
batch.

Shape letters: B samples, K rows of a sample (frames), S groups, N = B·S, C channels, P pixels, T output positions, I
inputs of a group times the kernel, O outputs (of a group).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from ghostclip.kernels import products
from ghostclip.kernels.products import full_convolutions


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


# Elements of unfolded windows, or of gradients in a layout of the backend's own, at a time (float32: 1 MiB, which a
# cache holds and an allocator keeps; 64 MiB where there are many cores to feed).
CHUNK_ELEMENTS: Final = 1 << 18
CHUNK_ELEMENTS_ON_GPU: Final = 1 << 24
# Below so many positions, or channels, a grouped backward costs more to set up than windows cost to copy (measured).
GROUPED_POSITIONS: Final = 128
GROUPED_CHANNELS: Final = 8
# What copying windows costs, in nanoseconds (measured, one core): an element; an element at a stride, more; a run of
# elements side by side; a pixel that is moved first so that runs are long, by layout.
_ELEMENT: Final = 0.2
_STRIDED: Final = 0.3
_RUN: Final = 6.0
_PIXEL_TO_LAST: Final = 1.0
_PIXEL_TO_PHASE: Final = 0.5

_Form: TypeAlias = "Callable[[KernelGradients, slice, Tensor | None], Tensor]"
_Layout: TypeAlias = Callable[[Geometry, Tensor, torch.Size], Tensor]


class KernelGradients:
    """Per-sample gradients of a convolution's kernel, in the layout that is cheapest for its sizes."""

    def __init__(self, x_BKC: Tensor, g_BKO: Tensor, geometry: Geometry) -> None:
        self._x_BKC, self._g_BKO, self._geometry = x_BKC, g_BKO, geometry
        self._layout: _Layout = unfolded
        # Not bound to itself: the tensors go with the last name for them, not when cycles are collected.
        self._form: _Form = KernelGradients._by_windows
        self._views: Tensor | None = None
        gradient = geometry.shape.numel()
        # Elements that a sample takes beside its gradient, and with a gradient that is dropped again.
        self._beside = geometry.groups * prod(geometry.shape[1:]) * prod(g_BKO.shape[3:]) * x_BKC.shape[1]
        self._dropped = max(self._beside, gradient)
        if all(size == 1 for size in geometry.kernel) and not any(map(any, geometry.padding)):
            # One pixel is a window: nothing to unfold.
            self._x_BKC = geometry.windows(x_BKC, g_BKO.shape[3:]).flatten(3, 2 + len(geometry.kernel))
            self._form, self._beside, self._dropped = KernelGradients._pointwise, 0, gradient
        elif self._suits_groups():
            # The backend works in blocks: an eighth of what it reads and writes.
            self._beside = self._dropped = max(gradient, x_BKC[0].numel() + g_BKO[0].numel()) // 8
            self._form = KernelGradients._grouped
        else:
            self._layout = _cheapest(x_BKC, g_BKO, geometry)
            if x_BKC.numel() <= CHUNK_ELEMENTS:
                # A copy of so few pixels takes no more than a chunk of windows does, and its views are made once.
                self._views = self._layout(geometry, x_BKC, g_BKO.shape[3:])
        # gradients are (S·O, *kernel, C) then: permuting one sum is cheaper than permuting every sample's gradient
        self.channels_last = self._layout is unfolded_channels_last

    def together(self) -> Tensor:
        """Return all gradients, shape ``(B, S·O·I)``. Cost: 2·T·I·O per sample."""
        samples, chunk = self._x_BKC.shape[0], self._chunk(self._beside)
        if chunk >= samples:
            return self._form(self, slice(0, samples), None).reshape(samples, -1)
        wide = torch.promote_types(self._x_BKC.dtype, torch.float32)
        full_BP = products.apart(self._x_BKC.new_empty(0, dtype=wide), samples, self._geometry.shape.numel())
        for start in range(0, samples, chunk):
            piece = slice(start, start + chunk)
            self._form(self, piece, full_BP[piece])
        return full_BP

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of samples with their gradients, ``(b, S·O·I)``. Cost: 2·T·I·O per sample."""
        chunk = self._chunk(self._dropped)
        for start in range(0, self._x_BKC.shape[0], chunk):
            piece = slice(start, start + chunk)
            yield piece, self._form(self, piece, None).reshape(-1, self._geometry.shape.numel())

    def in_order(self, grads_BP: Tensor) -> Tensor:
        """Return a view ``(b, S·O, C, *kernel)`` of gradients as they are formed."""
        shape = self._geometry.shape
        if not self.channels_last:
            return grads_BP.view(-1, *shape)
        return grads_BP.view(-1, shape[0], *shape[2:], shape[1]).movedim(-1, 2)

    def _chunk(self, needed: int) -> int:
        at_once = CHUNK_ELEMENTS if self._x_BKC.device.type == "cpu" else CHUNK_ELEMENTS_ON_GPU
        samples, chunk = self._x_BKC.shape[0], max(1, at_once // max(1, needed))
        # As many samples in every chunk: a last one of a few costs as many operations as the others.
        return -(-samples // -(-samples // chunk)) if samples else chunk

    def _suits_groups(self) -> bool:
        x_BKC, g_BKO, shape = self._x_BKC, self._g_BKO, self._geometry.shape
        narrow, outputs = shape[1], shape[0] // self._geometry.groups
        many = g_BKO.shape[1] * prod(g_BKO.shape[3:]) >= GROUPED_POSITIONS or outputs * narrow == 1
        wide = narrow >= GROUPED_CHANNELS or outputs * narrow == 1
        ours = x_BKC.device.type == "cpu" and x_BKC.dtype == torch.float32 and torch.backends.mkldnn.is_available()
        return bool(many and wide and ours)

    def _pointwise(self, piece: slice, out_BP: Tensor | None) -> Tensor:
        return self._product(piece, self._geometry.by_group(self._x_BKC[piece]).mT, out_BP)

    def _by_windows(self, piece: slice, out_BP: Tensor | None) -> Tensor:
        positions, inputs = self._g_BKO.shape[3:], prod(self._geometry.shape[1:])
        views = self._views
        views = self._layout(self._geometry, self._x_BKC[piece], positions) if views is None else views[piece]
        rows = self._x_BKC.shape[1] * prod(positions)
        windows_NTI = views.reshape(-1, rows, inputs) if self.channels_last else views.reshape(-1, inputs, rows).mT
        return self._product(piece, windows_NTI, out_BP)

    def _product(self, piece: slice, windows_NTI: Tensor, out_BP: Tensor | None) -> Tensor:
        g_NOT = self._geometry.by_group(self._g_BKO[piece])
        if out_BP is None:
            return products.pair_by_pair(g_NOT, windows_NTI)
        if len(g_NOT) > len(out_BP):
            return out_BP.copy_(products.pair_by_pair(g_NOT, windows_NTI).reshape(out_BP.shape))
        return products.pair_by_pair(g_NOT, windows_NTI, out_BP.view(len(g_NOT), g_NOT.shape[1], -1))

    def _grouped(self, piece: slice, out_BP: Tensor | None) -> Tensor:
        x_BKC = self._x_BKC[piece]
        grads = self._geometry.grouped(x_BKC, self._g_BKO[piece]).view(x_BKC.shape[0], -1)
        return grads if out_BP is None else out_BP.copy_(grads)


def unfolded(geometry: Geometry, x_BKC: Tensor, positions: torch.Size) -> Tensor:
    """Return all windows ``(B, S, C, *kernel, K, *positions)``, a view of the padded input."""
    windows = geometry.windows(x_BKC.unflatten(2, (geometry.groups, -1)), positions)
    return windows.movedim(1, 3 + len(geometry.kernel))


def unfolded_in_phases(geometry: Geometry, x_BKC: Tensor, positions: torch.Size) -> Tensor:
    """Return what `unfolded` does, from an input whose pixels one stride apart are made contiguous first."""
    # Along the last axis entry q·stride + r of window t is pixel t + q of phase r: a convolution without stride. It has
    # no dilation there, and its kernel is a multiple of its stride. In the result the kernel's last axis is in two, and
    # the first of positions' last two has size 1: a view of a copy of the padded input.
    stride, (before, _) = geometry.stride[-1], geometry.padding[-1]
    taps, last = geometry.kernel[-1] // stride, len(geometry.kernel) - 1
    width = stride * (positions[-1] + taps - 1)
    x_BKC = functional.pad(x_BKC, (before, width - before - x_BKC.shape[-1]))
    phases = Geometry(
        shape=torch.Size([*geometry.shape[:-1], stride, taps]),
        stride=(*geometry.stride[:-1], 1, 1),
        padding=(*geometry.padding[:-1], (0, 0), (0, 0)),
        dilation=(*geometry.dilation[:-1], 1, 1),
        groups=geometry.groups,
    )
    apart = x_BKC.unflatten(-1, (-1, stride)).mT.contiguous().unflatten(2, (geometry.groups, -1))
    windows = phases.windows(apart, (*positions[:-1], 1, positions[-1])).movedim(1, 5 + last)
    return windows.transpose(3 + last, 4 + last)


def unfolded_channels_last(geometry: Geometry, x_BKC: Tensor, positions: torch.Size) -> Tensor:
    """Return all windows ``(B, S, K, *positions, *kernel, C)``, a view of a channels-last copy of the padded input."""
    x_BSK = x_BKC.unflatten(2, (geometry.groups, -1)).movedim((2, 3), (1, -1))
    amounts = [n for pair in reversed(geometry.padding) for n in pair]
    windows = (functional.pad(x_BSK, [0, 0, *amounts]) if any(amounts) else x_BSK).contiguous()
    for place, count in enumerate(positions):
        windows = geometry.unfolded_along(windows, 3 + place, place, count)
    return windows.movedim(3 + len(positions), -1)


def _cheapest(x_BKC: Tensor, g_BKO: Tensor, geometry: Geometry) -> _Layout:
    """Return the layout whose copies cost least; on other devices than a CPU the one that needs no second copy."""
    if x_BKC.device.type != "cpu":
        return unfolded
    positions, stride, dilation = g_BKO.shape[-1], geometry.stride[-1], geometry.dilation[-1]
    pixels = x_BKC.shape[3:].numel() / (prod(geometry.kernel) * g_BKO.shape[3:].numel())
    together = geometry.shape[1] * (geometry.kernel[-1] if dilation == 1 else 1)
    costs: dict[_Layout, float] = {
        unfolded: _ELEMENT + _RUN / positions + (_STRIDED if stride > 1 else 0),
        unfolded_channels_last: _ELEMENT + _RUN / together + _PIXEL_TO_LAST * pixels,
    }
    if stride > 1 and dilation == 1 and geometry.kernel[-1] % stride == 0:
        costs[unfolded_in_phases] = _ELEMENT + _RUN / positions + _PIXEL_TO_PHASE * pixels
    return min(costs, key=lambda layout: costs[layout])
