"""Elementwise operations: the parameter is broadcast over the batch, and autograd itself sums over the rest.

``x * weight`` runs as ``x * weight.expand(B, ...)`` with the expanded tensor as a graph node of its own: the gradient
that arrives there is the per-sample gradient. The same holds for whatever already has a batch axis of its own
(``cls_token.expand(B, -1, -1)``), which may then enter any operation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ghostclip.capture.row_maps import FOLDED, WHOLE, RowMap
from ghostclip.factors import Dense, Diagonal, Factor
from ghostclip.factors.base import to_accumulation

ELEMENTWISE = {
    "add", "sub", "rsub", "mul", "multiply", "subtract", "div", "divide", "true_divide", "pow", "maximum", "minimum",
    "fmax", "fmin", "where", "addcmul", "addcdiv", "lerp", "atan2", "hypot", "clamp", "clip", "copysign", "xlogy",
    "float_power", "logaddexp", "logaddexp2", "remainder", "fmod", "cosine_similarity", "pairwise_distance", "vecdot",
    "linalg_vecdot",
}  # fmt: skip
_DUNDERS = {
    f"__{prefix}{name}__" for prefix in ("", "r", "i") for name in ("add", "sub", "mul", "truediv", "pow", "div")
}


def is_elementwise(name: str) -> bool:
    """Return whether an operation (also in-place) acts entry by entry with broadcasting."""
    return name in ELEMENTWISE or name in _DUNDERS or (name.endswith("_") and name[:-1] in ELEMENTWISE)


@dataclass(frozen=True)
class RowAxis:
    """The axis of an operation's result along which rows of samples lie."""

    axis: int
    size: int  # number of rows
    maps: list[RowMap]  # how rows may map to samples, the likeliest first
    batch_size: int  # B

    @property
    def whole(self) -> bool:
        """Whether one sample owns everything."""
        return self.maps[0].kind == "whole"


class Expanded:
    """One tracked tensor expanded over the rows of the data it meets."""

    def __init__(self, value: Tensor, dims: int, rows: RowAxis) -> None:
        # `dims`: number of axes of the operation's result.
        self.shape, self.rows, self.row_axis = value.shape, rows, rows.axis
        aligned = value.reshape([1] * (dims - value.dim()) + list(value.shape))
        self.per_sample_rows = not rows.whole and aligned.shape[rows.axis] != 1
        if self.per_sample_rows or rows.whole:
            self.row_axis -= dims - value.dim()
            self.tensor = value  # replaces it in the operation, before it enters the graph
        else:
            sizes = list(aligned.shape)
            sizes[rows.axis] = rows.size
            self.tensor = aligned.expand(sizes)

    def factor(self, grad: Tensor, row_map: RowMap) -> Factor:
        """Return the tracked tensor's per-sample gradients from the gradient of the expanded one."""
        batch_size = self.rows.batch_size
        if row_map.kind == "whole":
            return Dense(grad.reshape(1, *self.shape))
        moved = to_accumulation(grad).movedim(self.row_axis, 0)
        if not self.per_sample_rows:
            rows_BT = (
                moved.unsqueeze(1)
                if row_map.kind == "axis"
                else RowMap(row_map.kind, 0, row_map.samples).split(moved, 1, batch_size)
            )
            return Dense(rows_BT.sum(1).reshape(batch_size, *self.shape))
        if row_map.kind == "axis":
            return Diagonal(moved, axis=self.row_axis)
        return Dense(per_sample_rows(moved, row_map, batch_size).movedim(1, self.row_axis + 1))


def per_sample_rows(moved: Tensor, row_map: RowMap, batch_size: int) -> Tensor:
    """Return a gradient ``(rows, ...)`` as ``(B, rows, ...)``, with zeros for rows of other samples."""
    sample = row_map.samples_of(moved.shape[0], batch_size).to(moved.device)
    full = moved.new_zeros(batch_size, *moved.shape)
    full[sample, torch.arange(moved.shape[0], device=moved.device)] = moved
    return full


def row_axis_of(data: Sequence[Tensor], dims: int, batch_size: int, axis: int) -> tuple[int, int, Tensor] | None:
    """Return the row axis of a broadcast result, its size and the tensor that shows it, or None where no size fits."""
    # Of constants, the one with most axes: a mask of shape (T,) says nothing about the samples when T equals B.
    ordered = sorted(data, key=lambda tensor: (not tensor.requires_grad, -tensor.dim()))
    for exact in (True, False):
        for tensor in ordered:
            for candidate in dict.fromkeys((axis, 0)):
                if candidate >= tensor.dim():
                    continue
                size = tensor.shape[candidate]
                if size == batch_size or (
                    not exact and (tensor.requires_grad or size % max(1, batch_size) == 0) and size > 1
                ):
                    return dims - tensor.dim() + candidate, size, tensor
    return None


def map_of_rows(size: int, batch_size: int, axis: int, followed: RowMap | None = None) -> list[RowMap]:
    """Return the row maps possible for one row axis, the preferred one first."""
    # `axis` is the model's batch axis: folded rows keep a sample together for 0, alternate for 1. `followed`: what is
    # known of rows that were followed, or routed. Empty when the samples cannot share the rows evenly.
    if batch_size == 1:
        return [WHOLE]
    known = [] if followed is None else [replace(followed, axis=0)]
    if size == batch_size:
        return [*known, RowMap("axis")]
    if batch_size == 0 or size % batch_size:
        return known
    return [*known, *(RowMap(kind) for kind in (FOLDED if axis == 0 else FOLDED[::-1]))]
