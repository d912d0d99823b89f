"""Convolutions in one, two and three dimensions, also transposed, with stride, padding, dilation and groups.

Padding modes other than zeros reach the operation as an input that is padded already.

Shape letters: B samples, K rows of a sample, S groups, I inputs of a group, O outputs of a group, N rows (samples, or
samples times frames).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ghostclip.factors import Dense, Factor, Outer, Windows
from ghostclip.factors.convolution import Geometry
from ghostclip.kernels import PositionSum
from ghostclip.rules.registry import Call, Captured, Split, register_op


def _tuple(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims if len(value) == 1 else 1)


_TRANSPOSED = "input weight bias stride padding output_padding groups dilation"


@register_op("conv1d", "conv2d", "conv3d", arguments="input weight bias stride padding dilation groups", by_form=True)
@register_op("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", arguments=_TRANSPOSED, by_form=True)
def convolution(call: Call) -> Captured | None:
    """Rule for a convolution: weight ``Windows`` of the input; None for a tracked input or one without a row axis."""
    # A transposed one's kernel gradient is a convolution's with input and output exchanged.
    transposed = call.name.startswith("conv_transpose")
    x, weight = call.values["input"], call.values["weight"]
    dims = weight.dim() - 2
    if "input" in call.tracked or x.dim() != dims + 2:
        return None
    geometry = _geometry(call, weight.shape)
    needs_weight, needs_bias = "weight" in call.tracked, "bias" in call.tracked

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        factor_of: dict[str, Factor] = {}
        if needs_bias:
            factor_of["bias"] = Dense(PositionSum(split(grad.flatten(2), 1), axes=(1, 3)))
        if needs_weight:
            inner, outer = (grad, saved[0]) if transposed else (saved[0], grad)
            factor_of["weight"] = _weight_factor(split(inner, 1), split(outer, 1), geometry)
        return factor_of

    return Captured((x,) if needs_weight else (), x, 1, factors, "outer product of windows")


def _geometry(call: Call, shape: torch.Size) -> Geometry:
    dims = len(shape) - 2
    dilation, padding = _tuple(call.get("dilation", 1), dims), call.get("padding", 0)
    if padding == "same":
        # 'same' puts the odd element behind, as torch does.
        reaches = [step * (size - 1) for size, step in zip(shape[2:], dilation, strict=True)]
        pads = [(reach // 2, reach - reach // 2) for reach in reaches]
    else:
        pads = [(pad, pad) for pad in ((0,) * dims if isinstance(padding, str) else _tuple(padding, dims))]
    return Geometry(
        shape=shape,
        stride=_tuple(call.get("stride", 1), dims),
        padding=tuple(pads),
        dilation=dilation,
        groups=call.get("groups", 1),
    )


def _weight_factor(x_BKC: Tensor, g_BKO: Tensor, geometry: Geometry) -> Factor:
    if not x_BKC.is_complex():
        return Windows(x_BKC, g_BKO, geometry)
    a_NIT, g_NOT = geometry.unfolded(x_BKC, g_BKO.shape[3:]), geometry.by_group(g_BKO)
    return Outer(a_NIT.mT, g_NOT.mT, shape=geometry.shape, slots=geometry.groups)
