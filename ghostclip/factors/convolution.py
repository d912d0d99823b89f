"""Convolutions: their geometry, and each sample's gradient of a kernel, held as input and output gradient.

It is never unfolded whole, none of `Geometry`'s contractions unfolds a whole batch, and where a gradient is formed,
that is done in the way that is cheapest for its sizes. On a CPU most of the cost beyond the products is that of copying
windows, and that depends on how many elements lie side by side: the layouts of `KernelGradients` differ in nothing
else.

Shape letters: B samples, K rows of a sample (frames), S groups, N = B·S, C channels, P pixels (in ``_BP``: a
gradient's S·O·I entries), T output positions (of all rows), I inputs of a group times the kernel, O outputs of a group.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from ghostclip.factors.base import (
    Dense,
    Factor,
    SquaredNorm,
    Terms,
    accumulation_dtype,
    end_to_end,
    no_error,
    square_sums,
    to_accumulation,
)
from ghostclip.factors.outer import INSTANTIATE, Outer, chunk_of_samples, gram_flops, stores_per_sample
from ghostclip.factors.wrapped import Permuted
from ghostclip.kernels import products, runtime
from ghostclip.kernels.bounds import (
    Masses,
    Reduced,
    Unfinished,
    finished_one,
    formed_error,
    masses,
    samples_joined,
    vanished,
)
from ghostclip.kernels.products import full_convolutions


@dataclass(frozen=True)
class Geometry:
    """Shape and settings of one convolution: S groups, O outputs and C inputs of each, ``(S·O, C, *kernel)``."""

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
        for dim, (before, behind) in enumerate(self.padding):
            seen = (positions[dim] - 1) * self.stride[dim] + self.dilation[dim] * (self.kernel[dim] - 1) + 1
            missing = seen - x.shape[x.dim() - len(positions) + dim] - before
            regular = regular and before == behind and missing > behind - self.stride[dim]
            amounts.append((before, missing))
        if regular:
            return x, [before for before, _ in amounts]
        return functional.pad(x, [n for pair in reversed(amounts) for n in pair]), [0] * len(amounts)

    def windows(self, x: Tensor, positions: Sequence[int]) -> Tensor:
        """Return windows ``(..., *kernel, *positions)``, a view of the padded input."""
        lead, dims = x.dim() - len(positions), len(positions)
        x = self._padded(x)
        for dim in range(dims):
            x = self.unfolded_along(x, lead + dim, dim, positions[dim])
        return x.permute(*range(lead), *range(lead + dims, lead + 2 * dims), *range(lead, lead + dims))

    def _padded(self, x: Tensor) -> Tensor:
        """Return the input with the convolution's zero padding."""
        amounts = [n for pair in reversed(self.padding) for n in pair]
        return functional.pad(x, amounts) if any(amounts) else x

    def unfolded_along(self, x: Tensor, axis: int, dim: int, count: int) -> Tensor:
        """Return the first ``count`` windows along one axis of the padded input, their entries as last axis."""
        step = self.dilation[dim]
        windows = x.unfold(axis, step * (self.kernel[dim] - 1) + 1, self.stride[dim])
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
        """Return the gradient of a kernel by torch's own backward of a convolution."""
        settings = (self.stride, pads, self.dilation, False, [0] * len(pads), groups)
        with full_convolutions():
            gradients: Any = torch.ops.aten.convolution_backward(g, x, kernel, None, *settings, [False, True, False])
        gradient: Tensor = gradients[1]
        return gradient

    def window_squares(self, x_BKC: Tensor, positions: Sequence[int]) -> Tensor:
        """Return the squared norm of every window, ``(B, S, K, *positions)``."""
        squares = self._padded(x_BKC.square().unflatten(2, (self.groups, -1)).sum(3).transpose(1, 2))
        for dim, count in enumerate(positions):
            squares = self.unfolded_along(squares, 3 + dim, dim, count).sum(-1)
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
        for dim in range(dims):
            if self.kernel[dim] > 1 or space[dim] != positions[dim]:
                gram = self._along(gram, dim, positions[dim])
        return gram.reshape(-1, rows * prod(positions), rows * prod(positions))

    def _along(self, gram: Tensor, dim: int, count: int) -> Tensor:
        """Return a Gram of windows along one more axis of space from a Gram of pixels there."""
        axes = (2 + dim, 3 + dim + len(self.kernel))
        size, pad = gram.shape[axes[0]], self.padding[dim][0]
        shape = list(gram.shape)
        shape[axes[0]] = shape[axes[1]] = count
        total = gram.new_zeros(shape)
        for offset in range(0, self.kernel[dim] * self.dilation[dim], self.dilation[dim]):
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
        """Choose how gradients are formed: pointwise, by a grouped convolution, or from unfolded windows."""
        self._x_BKC, self._g_BKO, self._geometry = x_BKC, g_BKO, geometry
        self._layout: _Layout = unfolded  # forms windows
        # Not bound to itself: the tensors go with the last name for them, not when cycles are collected.
        self._form: _Form = KernelGradients._by_windows
        self._views: Tensor | None = None  # the windows of all samples, where that takes little memory
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

    def all_gradients(self) -> Tensor:
        """Return all gradients, ``(B, S·O·I)``, as `in_order` reads them. Cost: 2·T·I·O per sample and group."""
        samples, chunk = self._x_BKC.shape[0], self._chunk(self._beside)
        if chunk >= samples:
            return self._form(self, slice(0, samples), None).reshape(samples, -1)
        wide = torch.promote_types(self._x_BKC.dtype, torch.float32)
        full_BP = products.empty_rows(self._x_BKC.new_empty(0, dtype=wide), samples, self._geometry.shape.numel())
        for start in range(0, samples, chunk):
            piece = slice(start, start + chunk)
            self._form(self, piece, full_BP[piece])
        return full_BP

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of samples with their gradients, ``(b, S·O·I)``. Cost: 2·T·I·O per sample and group."""
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
        """Return how many samples are formed at a time, if each needs so many elements."""
        at_once = CHUNK_ELEMENTS if self._x_BKC.device.type == "cpu" else CHUNK_ELEMENTS_ON_GPU
        samples, chunk = self._x_BKC.shape[0], max(1, at_once // max(1, needed))
        # As many samples in every chunk: a last one of a few costs as many operations as the others.
        return -(-samples // -(-samples // chunk)) if samples else chunk

    def _suits_groups(self) -> bool:
        """Return whether one grouped convolution is the cheapest form: float32 on a CPU, many positions."""
        x_BKC, g_BKO, shape = self._x_BKC, self._g_BKO, self._geometry.shape
        narrow, outputs = shape[1], shape[0] // self._geometry.groups
        many = g_BKO.shape[1] * prod(g_BKO.shape[3:]) >= GROUPED_POSITIONS or outputs * narrow == 1
        wide = narrow >= GROUPED_CHANNELS or outputs * narrow == 1
        ours = x_BKC.device.type == "cpu" and x_BKC.dtype == torch.float32 and torch.backends.mkldnn.is_available()
        return bool(many and wide and ours)

    def _pointwise(self, piece: slice, out_BP: Tensor | None) -> Tensor:
        """Form the gradients of some samples for a kernel of one pixel."""
        return self._product(piece, self._geometry.by_group(self._x_BKC[piece]).mT, out_BP)

    def _by_windows(self, piece: slice, out_BP: Tensor | None) -> Tensor:
        """Form the gradients of some samples from their unfolded windows."""
        positions, inputs = self._g_BKO.shape[3:], prod(self._geometry.shape[1:])
        views = self._views
        views = self._layout(self._geometry, self._x_BKC[piece], positions) if views is None else views[piece]
        rows = self._x_BKC.shape[1] * prod(positions)
        windows_NTI = views.reshape(-1, rows, inputs) if self.channels_last else views.reshape(-1, inputs, rows).mT
        return self._product(piece, windows_NTI, out_BP)

    def _product(self, piece: slice, windows_NTI: Tensor, out_BP: Tensor | None) -> Tensor:
        """Return output gradients times windows, for some samples; written to ``out_BP`` if given."""
        g_NOT = self._geometry.by_group(self._g_BKO[piece])
        if out_BP is None:
            return products.pair_by_pair(g_NOT, windows_NTI)
        # Rows of `empty_rows` may have gaps, so that groups of a sample cannot be a view.
        if len(g_NOT) > len(out_BP):
            return out_BP.copy_(products.pair_by_pair(g_NOT, windows_NTI).reshape(out_BP.shape))
        return products.pair_by_pair(g_NOT, windows_NTI, out_BP.view(len(g_NOT), g_NOT.shape[1], -1))

    def _grouped(self, piece: slice, out_BP: Tensor | None) -> Tensor:
        """Form the gradients of some samples by a convolution with a group for each."""
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
    by_phase = x_BKC.unflatten(-1, (-1, stride)).mT.contiguous().unflatten(2, (geometry.groups, -1))
    windows = phases.windows(by_phase, (*positions[:-1], 1, positions[-1])).movedim(1, 5 + last)
    return windows.transpose(3 + last, 4 + last)


def unfolded_channels_last(geometry: Geometry, x_BKC: Tensor, positions: torch.Size) -> Tensor:
    """Return all windows ``(B, S, K, *positions, *kernel, C)``, a view of a channels-last copy of the padded input."""
    x_BSK = x_BKC.unflatten(2, (geometry.groups, -1)).movedim((2, 3), (1, -1))
    amounts = [n for pair in reversed(geometry.padding) for n in pair]
    windows = (functional.pad(x_BSK, [0, 0, *amounts]) if any(amounts) else x_BSK).contiguous()
    for dim, count in enumerate(positions):
        windows = geometry.unfolded_along(windows, 3 + dim, dim, count)
    return windows.movedim(3 + len(positions), -1)


def _cheapest(x_BKC: Tensor, g_BKO: Tensor, geometry: Geometry) -> _Layout:
    """Return the layout whose copies cost least; on other devices than a CPU the one that needs no second copy."""
    if x_BKC.device.type != "cpu":
        return unfolded
    positions, stride, dilation = g_BKO.shape[-1], geometry.stride[-1], geometry.dilation[-1]
    pixels = x_BKC.shape[3:].numel() / (prod(geometry.kernel) * g_BKO.shape[3:].numel())
    contiguous = geometry.shape[1] * (geometry.kernel[-1] if dilation == 1 else 1)
    costs: dict[_Layout, float] = {
        unfolded: _ELEMENT + _RUN / positions + (_STRIDED if stride > 1 else 0),
        unfolded_channels_last: _ELEMENT + _RUN / contiguous + _PIXEL_TO_LAST * pixels,
    }
    if stride > 1 and dilation == 1 and geometry.kernel[-1] % stride == 0:
        costs[unfolded_in_phases] = _ELEMENT + _RUN / positions + _PIXEL_TO_PHASE * pixels
    return min(costs, key=lambda layout: costs[layout])


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

    def stores_gradient(self) -> bool:
        """Return whether book-keeping stores the per-sample gradient instead of input and output gradient."""
        # It does where it is no larger than they are, and where it is small, or no larger than unfolded windows and
        # output gradients would be, if a Gram would cost more than half of what forming the gradients costs.
        small = 0 < self.slots * prod(self.sizes[1:]) * self.batch_size <= SMALL
        return self.stores_in_any_batch() or (small and self._is_formed_for_norm())

    def stores_in_any_batch(self) -> bool:
        """Return whether `stores_gradient` holds for any number of samples."""
        positions, inputs, outputs = self.sizes
        if positions == 0 or self.batch_size == 0:
            return False
        gradient = self.slots * inputs * outputs
        sides = self.x_BKC, self.g_BKO
        if gradient * self.batch_size * max(4, self.x_BKC.element_size()) <= sum(x.nbytes for x in sides):
            return True
        itemsize = min(side.element_size() for side in sides)
        return stores_per_sample(positions, inputs, outputs, itemsize) and self._is_formed_for_norm()

    def _is_formed_for_norm(self) -> bool:
        """Return whether a Gram would cost more than half of what forming the gradients costs."""
        return self.norm_plan()[1] > prod(self.sizes) > 0

    def norm_plan(self) -> tuple[str, int]:
        """Return how the squared norm of one sample and group is formed, in a few words, and its FLOPs."""
        costs = self._costs()
        form = min(costs, key=lambda name: costs[name])
        return form, costs[form]

    def _costs(self) -> dict[str, int]:
        """Return the FLOPs of one norm by each form that is possible."""
        positions, inputs, outputs = self.sizes
        costs = {INSTANTIATE: 2 * positions * inputs * outputs}
        costs[_WINDOWS] = gram_flops(positions, inputs, outputs)
        pixels = self.x_BKC.shape[1] * prod(self.x_BKC.shape[3:])
        fits = max(pixels, positions) ** 2 <= runtime.elements(self.x_BKC.device)
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
        """Return the sums of norms from Grams of pixels, formed a few samples at a time."""
        entries = max(self.x_BKC.shape[1] * prod(self.x_BKC.shape[3:]), self.sizes[0]) ** 2
        chunk = chunk_of_samples(2 * self.slots * entries, self.x_BKC.device)
        return samples_joined([part._by_pixels() for part in self._in_parts(chunk)])

    def _by_pixels(self) -> Unfinished:
        """Return squared norms from a Gram of pixels, without unfolding (stride 1), and what bounds their errors."""
        _, inputs, outputs = self.sizes
        x_BKC, g_BKO = self._operands()
        a_NTT = self.geometry.window_gram(x_BKC, self.g_BKO.shape[3:])
        g_NOT = self.geometry.by_group(g_BKO)
        g_NTT = products.batched(g_NOT.mT, g_NOT)
        square_KNT = torch.stack([gram_NTT.diagonal(dim1=1, dim2=2) for gram_NTT in (a_NTT, g_NTT)])
        value_N = g_NTT.mul_(a_NTT).sum((1, 2))
        absolute_N = g_NTT.abs_().sum((1, 2))
        unfinished = Unfinished(value_N, *self._position_norms(), (inputs, outputs), absolute_N, square_KNT)
        return unfinished._replace(by_units=self._by_units())

    def gram_sqnorm(self) -> SquaredNorm:
        """Return squared norms from a Gram of windows, unfolded a few samples at a time."""
        norms = [part._by_windows().gram_sqnorm() for part in self._in_parts(self._at_once())]
        return norms[0] if len(norms) == 1 else end_to_end(norms)

    def _at_once(self) -> int:
        """Return how many samples' windows fit the workspace."""
        positions, inputs, _ = self.sizes
        return chunk_of_samples(self.slots * positions * inputs, self.x_BKC.device)

    def _by_windows(self) -> Outer:
        """Return the factor over unfolded windows, their entries in the order that is quickest to copy."""
        # A norm does not depend on the order of a window's entries, and this one is the quickest to copy.
        windows = unfolded_channels_last(self.geometry, self.x_BKC, self.g_BKO.shape[3:])
        positions, inputs, _ = self.sizes
        a_NTI = windows.reshape(self.batch_size * self.slots, positions, inputs)
        return Outer(a_NTI, self.g_NTO, shape=self.shape, slots=self.slots)

    def instantiated_sqnorm(self) -> SquaredNorm:
        """Return squared norms of gradients formed a few samples at a time, with rounding bounds for norm and sum."""
        if self.sizes[0] <= 1 or self.x_BKC.numel() == 0:
            return no_error(self._formed_squares())
        if self.slots == 1:
            return self._summed(finished_one(self._formed_sums()))
        terms = self.terms()
        assert terms is not None
        value_B = self._formed_squares()
        term_masses = Masses(terms.mass_B, terms.scale_B, torch.zeros_like(value_B))
        error_B = formed_error(value_B, term_masses, self.sizes[0] if self._by_units() else 0)
        return SquaredNorm(value_B, error_B, terms)

    def instantiated_sums(self) -> Unfinished | None:
        """Return the sums that `instantiated_sqnorm` is worked out from; None for several groups, or one position."""
        return None if self._is_of_few() else self._formed_sums()

    def _is_of_few(self) -> bool:
        """Return whether errors are worked out otherwise: group by group, or of nothing that could cancel."""
        return self.slots > 1 or self.sizes[0] <= 1 or self.x_BKC.numel() == 0 or self.g_BKO.numel() == 0

    def _formed_sums(self) -> Unfinished:
        """Return the squared norms of formed gradients, with what bounds their rounding."""
        unfinished = Unfinished(self._formed_squares(), *self._position_norms(), self.sizes[1:])
        return unfinished._replace(by_units=self._by_units())

    def _formed_squares(self) -> Tensor:
        """Return the squared norms of gradients that are formed in pieces and dropped."""
        squares = [square_sums(grads) for _, grads in KernelGradients(*self._operands(), self.geometry).pieces()]
        return torch.cat(squares) if squares else to_accumulation(self.x_BKC.new_zeros(0))

    def _operands(self) -> tuple[Tensor, Tensor]:
        """Return input and output gradient as products take them: in 16 bits where matrix units do."""
        if self._by_units():
            return self.x_BKC, self.g_BKO
        return to_accumulation(self.x_BKC), to_accumulation(self.g_BKO)

    def terms(self) -> Terms | None:
        """Return the positions' outer products; None where there is one position, or none."""
        if self.sizes[0] <= 1 or self.x_BKC.numel() == 0:
            return None
        term_masses = masses(*self._position_norms(), *self.sizes[1:])
        return self._terms(term_masses.mass_N, term_masses.scale_N)

    def mass_at_most(self) -> Tensor:
        """Return no less than the masses of `terms`, shape ``(B,)``, from the norms of inputs and output gradients."""
        # By Cauchy and Schwarz; no pixel lies in more windows than `covering`. A norm comes out 2e-5 too small at most.
        axes = zip(self.geometry.kernel, self.geometry.stride, self.geometry.dilation, strict=True)
        covering = prod(size if step > 1 else -(-size // stride) for size, stride, step in axes)
        positions, inputs, outputs = self.sizes
        most = positions * self.slots * 2
        x_B, g_B = (torch.linalg.vector_norm(to_accumulation(t.flatten(1)), dim=1) for t in (self.x_BKC, self.g_BKO))
        lost_B = vanished(x_B, g_B, most * inputs, most * covering * outputs)
        return lost_B.addcmul_(x_B, g_B, value=1.001 * covering**0.5)

    def _position_norms(self) -> tuple[Tensor, Tensor]:
        """Return the norms of windows and of output gradients, each of shape ``(B·S, T)``, none of them unfolded."""
        a_BSKT = self.geometry.window_squares(to_accumulation(self.x_BKC), self.g_BKO.shape[3:])
        g_BSKT = to_accumulation(self.g_BKO).square().unflatten(2, (self.slots, -1)).sum(3).transpose(1, 2)
        groups = self.batch_size * self.slots
        return a_BSKT.reshape(groups, -1).sqrt(), g_BSKT.reshape(groups, -1).sqrt()

    def _by_units(self) -> bool:
        """Return whether matrix units form the products."""
        return products.on_units(self.x_BKC, self.g_BKO)

    def _weighting(self) -> int:
        """Return 1: terms are weighted in float32."""
        return 1

    def materialize(self) -> Tensor:
        """Return the per-sample gradients, shape ``(B, *P)``. Cost: 2·T·I·O per sample and group."""
        formed = self._formed()
        if formed is None:
            return to_accumulation(self.x_BKC).new_zeros(self.batch_size, *self.shape)
        if not formed.channels_last:
            return formed.all_gradients().view(self.batch_size, *self.shape)
        full_BP = self.x_BKC.new_empty(
            self.batch_size, *self.geometry.shape, dtype=accumulation_dtype(self.x_BKC.dtype)
        )
        for piece, grads in formed.pieces():
            full_BP[piece] = formed.in_order(grads)
        return full_BP.view(self.batch_size, *self.shape)

    def instantiated(self) -> Factor:
        """Return the factor of the materialised gradients, their axes in the order in which they are formed."""
        formed = self._formed()
        if formed is not None and not formed.channels_last:
            return Dense(formed.all_gradients().view(self.batch_size, *self.shape))
        if formed is None or self.shape != self.geometry.shape:
            return super().instantiated()
        # `Permuted` knows the kernel's axes, not those of a reshaped factor.
        shape = self.geometry.shape
        inner = Dense(formed.all_gradients().view(-1, shape[0], *shape[2:], shape[1]))
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
        return out.device.type == "cpu" and self.sizes[0] > 1 and self.stores_in_any_batch()

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
        """Return the clipped sum as torch's own backward forms it, of weighted samples."""
        return self.geometry.weighted(self.x_BKC.to(out.dtype), self.g_BKO.to(out.dtype), coef_B).view(out.shape)

    def _with(self, change: Callable[[Any], Any]) -> "Windows":
        return Windows(change(self.x_BKC), change(self.g_BKO), self.geometry, shape=self.shape)

    def transposed(self) -> Outer:
        """Return the factor of the transposed matrix, over unfolded windows."""
        return self.unfolded().transposed()

    def reshaped(self, shape: Sequence[int]) -> "Windows":
        return Windows(self.x_BKC, self.g_BKO, self.geometry, shape=shape)

    def _in_parts(self, chunk: int) -> "list[Windows]":
        """Return the factors of a few samples at a time."""
        if chunk >= self.batch_size:
            return [self]
        return [
            Windows(self.x_BKC[start : start + chunk], self.g_BKO[start : start + chunk], self.geometry)
            for start in range(0, self.batch_size, chunk)
        ]
