"""Convolutions in one, two and three dimensions, also transposed, with stride, padding, dilation and groups.

Padding modes other than zeros reach the operation as an input that is padded already.

Shape letters: B samples, S groups, T output positions (of all rows of a sample), I inputs of a group times the kernel,
O outputs of a group, N rows (samples, or samples times frames).
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from ghostclip.factors import Dense, Factor, Outer, planner
from ghostclip.factors.base import to_accumulation
from ghostclip.rules.registry import Call, Captured, Split, register_op


def _tuple(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims if len(value) == 1 else 1)


@register_op("conv1d", "conv2d", "conv3d", arguments="input weight bias stride padding dilation groups")
def convolution(call: Call) -> Captured | None:
    """Rule for a convolution: weight ``Outer`` over unfolded windows (or its gradient where that is smaller).

    Args:
        call: An input of shape ``(N, S·I, *space)`` before unfolding, a kernel, perhaps a bias.

    Returns:
        What it captures; None for a tracked input or one without a row axis.
    """
    return _captured(call, transposed=False)


_TRANSPOSED = "input weight bias stride padding output_padding groups dilation"


@register_op("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", arguments=_TRANSPOSED)
def transposed_convolution(call: Call) -> Captured | None:
    """Rule for a transposed convolution: the kernel's gradient is a convolution's with input and output exchanged.

    Args:
        call: An input of shape ``(N, S·O, *space)``, a kernel ``(S·O, I, *kernel)``, perhaps a bias.

    Returns:
        What it captures; None for a tracked input or one without a row axis.
    """
    return _captured(call, transposed=True)


def _captured(call: Call, *, transposed: bool) -> Captured | None:
    x, weight = call.values["input"], call.values["weight"]
    dims = weight.dim() - 2
    if "input" in call.tracked or x.dim() != dims + 2:
        return None
    geometry = _Geometry.of(call, dims)
    needs_weight, needs_bias, shape = "weight" in call.tracked, "bias" in call.tracked, weight.shape

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        found: dict[str, Factor] = {}
        if needs_bias:
            found["bias"] = Dense(to_accumulation(split(grad.flatten(2), 1)).sum((1, 3)))
        if needs_weight:
            inner, outer = (grad, saved[0]) if transposed else (saved[0], grad)
            found["weight"] = geometry.weight_factor(split(inner, 1), split(outer, 1), shape)
        return found

    return Captured((x,) if needs_weight else (), x, 1, factors, "outer product of windows")


class _Geometry:
    """Stride, padding, dilation and groups of one convolution."""

    def __init__(
        self, *, stride: tuple[int, ...], padding: Sequence[int], dilation: tuple[int, ...], groups: int
    ) -> None:
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    @classmethod
    def of(cls, call: Call, dims: int) -> "_Geometry":
        kernel = call.values["weight"].shape[2:]
        dilation = _tuple(call.get("dilation", 1), dims)
        padding = call.get("padding", 0)
        pads: list[int] = []
        for size, step, pad in zip(kernel, dilation, _pads(padding, dims), strict=True):
            reach = step * (size - 1)
            # 'same' puts the odd element behind, as torch does.
            pads = [reach // 2, reach - reach // 2, *pads] if padding == "same" else [pad, pad, *pads]
        stride = _tuple(call.get("stride", 1), dims)
        return cls(stride=stride, padding=pads, dilation=dilation, groups=call.get("groups", 1))

    def windows(self, x: Tensor, kernel: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Return a view of the windows at the first so many positions: ``(N, channels, *positions, *kernel)``."""
        if any(self.padding):
            x = functional.pad(x, self.padding)
        for axis, size in enumerate(kernel):
            reach = self.dilation[axis] * (size - 1) + 1
            x = x.unfold(axis + 2, reach, self.stride[axis])[..., :: self.dilation[axis]]
            # The output padding of a transposed convolution may leave room for a window that it does not have.
            x = x.narrow(axis + 2, 0, positions[axis])
        return x

    def weight_factor(self, x_BKC: Tensor, g_BKO: Tensor, shape: torch.Size) -> Factor:
        """Return the factor of the kernel, instantiated where that is the smaller form.

        Args:
            x_BKC: Inputs, ``(B, rows of a sample, channels, *space)``.
            g_BKO: Output gradients, ``(B, rows of a sample, S·O, *positions)``.
            shape: The kernel's shape ``(S·O, channels/S, *kernel)``.

        Returns:
            ``Outer`` with S slots, or ``Dense``.
        """
        samples, rows = x_BKC.shape[:2]
        outputs, inputs = shape[0] // self.groups, prod(shape[1:])
        positions = rows * prod(g_BKO.shape[3:])
        if not planner.keeps_per_sample(positions, inputs, outputs) or samples == 0:
            return self._outer(x_BKC, g_BKO, shape)
        chunk = planner.chunk_of_samples(self.groups * inputs * positions)
        parts = [
            self._outer(x_BKC[start : start + chunk], g_BKO[start : start + chunk], shape).materialize()
            for start in range(0, samples, chunk)
        ]
        return Dense(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _outer(self, x_BKC: Tensor, g_BKO: Tensor, shape: torch.Size) -> Outer:
        samples, rows, slots = x_BKC.shape[0], x_BKC.shape[1], self.groups
        inputs, outputs = prod(shape[1:]), shape[0] // slots
        dims, g_BKOT = len(shape) - 2, g_BKO.flatten(3)
        windows = self.windows(to_accumulation(x_BKC).flatten(0, 1), shape[2:], g_BKO.shape[3:])
        a = windows.unflatten(1, (slots, -1)).unflatten(0, (samples, rows))
        # (B, K, S, channels, *positions, *kernel) -> (B, S, K, *positions, channels, *kernel)
        order = [0, 2, 1, *range(4, 4 + dims), 3, *range(4 + dims, 4 + 2 * dims)]
        g = g_BKOT.unflatten(2, (slots, outputs)).permute(0, 2, 1, 4, 3)
        positions = rows * g_BKOT.shape[3]
        a_NTI = a.permute(order).reshape(samples * slots, positions, inputs)
        g_NTO = g.reshape(samples * slots, positions, outputs)
        return Outer(a_NTI, g_NTO, shape=shape, slots=slots)


def _pads(padding: int | str | Sequence[int], dims: int) -> tuple[int, ...]:
    return (0,) * dims if isinstance(padding, str) else _tuple(padding, dims)
