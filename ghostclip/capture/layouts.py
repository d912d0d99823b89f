"""Where samples lie in the arguments of an operation: as shapes have shown, as rows were followed, as sizes suggest.

In elementwise operations the parameter is broadcast over the batch, and autograd itself sums over the rest: ``x *
weight`` runs as ``x * weight.expand(B, ...)`` with the expanded tensor as a graph node of its own: the gradient that
arrives there is the per-sample gradient. The same holds for whatever already has a batch axis of its own
(``cls_token.expand(B, -1, -1)``), which may then enter any operation.

Shape letter: B samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip import _torch, _tree
from ghostclip.capture.call_sites import CONSTANT, NEVER, UNKNOWN, Key, Shapes, counted_as, key_of, shapes_of
from ghostclip.capture.derive import broadcast_over
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.row_maps import RowMap
from ghostclip.capture.sample_axis import UNKNOWN_ORDER
from ghostclip.capture.tracked import Operation, TrackedTensor
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
        """Align a tracked tensor with an operation's result, and expand it along the result's rows."""
        # `dims`: number of axes of the operation's result.
        self.shape, self.rows, self.row_axis = value.shape, rows, rows.axis
        aligned = value.reshape([1] * (dims - value.dim()) + list(value.shape))
        self.per_sample_rows = not rows.whole and aligned.shape[rows.axis] != 1  # not one row for all
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


@dataclass(frozen=True)
class ArgumentLayout:
    """Where samples lie in the arguments of an operation."""

    place: Any  # key: the operation's parameters, the number of axes of its tensors, and the number of the call
    # an axis, `CONSTANT` or `UNKNOWN`, by the number (``id``) of the tensor; empty where nothing is known
    axes: Mapping[int, int] = field(default_factory=dict)
    resized: Shapes = ()  # shapes of its tensors for another number of samples, where they are known
    size: int = 0  # that number of samples
    call: Key = ()  # the call, as a resized forward tells calls apart
    result: int = UNKNOWN  # axis of the result that has samples, where the arguments tell

    def axis(self, tensor: Tensor) -> int:
        """Return the axis of a tensor that has samples, `CONSTANT` or `UNKNOWN`."""
        return self.axes.get(id(tensor), UNKNOWN)


def layout_of(operation: Operation, forward: ForwardContext) -> ArgumentLayout:
    """Return where samples lie in the arguments of an operation, as far as shapes have shown it."""
    # The call is counted.
    key, layouts = key_of(operation.tracked, operation.name), forward.around.sites.layouts
    tree = operation.args, operation.kwargs
    tensors = _tree.tensors(tree)
    dims = tuple([tensor.dim() for tensor in tensors])
    # What checkpointing runs again must run as it did, and its calls come in another order.
    visit = 1
    if not _torch.in_backward():
        visit_key = counted_as(key)
        calls, uses = forward.visits.get(visit_key, NEVER)
        visit = calls + 1
        forward.visits[visit_key] = visit, uses
    layout_key = key, dims, visit
    if forward.batch_size < 2:
        return ArgumentLayout(layout_key)
    rows = forward.around.rows
    layout = None if rows.resized is None else rows.resized.layout(rows.key, shapes_of(tree))
    if layout is not None:
        layouts[layout_key] = layout
    is_guessed = layout_key not in layouts
    layout = layouts.get((key, dims, 1)) if is_guessed else layouts[layout_key]
    forward.guessed = forward.guessed or is_guessed
    # A frozen parameter has no samples, whatever its sizes are.
    frozen = {id(one): CONSTANT for one in operation.plain if isinstance(one, nn.Parameter)}
    constants = {number: axis for number, axis in frozen.items() if number not in forward.inputs}
    if layout is None:
        return ArgumentLayout(layout_key, constants, call=rows.key)
    axes = {id(tensor): axis for tensor, axis in zip(tensors, layout.inputs, strict=True)}
    if is_guessed:
        # What the first call was given may be one of many pieces of the batch, all of one size.
        axes = {number: axis for number, axis in axes.items() if axis != CONSTANT} | constants
    return ArgumentLayout(layout_key, axes, layout.resized, layout.size, rows.key)


def result_axes(layout: ArgumentLayout, result: Any, forward: ForwardContext) -> tuple[int, ...]:
    """Return the axis of samples in each tensor of a result; empty where that is not known."""
    layouts, resized = forward.around.sites.layouts, forward.around.rows.resized
    axes = () if resized is None else resized.of_results(layout.call, shapes_of(result))
    known = layouts.get(layout.place)
    if axes and known is not None:
        layouts[layout.place] = replace(known, outputs=axes)
    return axes or (() if known is None else known.outputs)


def is_data(tensor: Tensor, layout: ArgumentLayout, name: str, forward: ForwardContext) -> bool:
    """Return whether a tensor among an operation's arguments has rows of samples, unlike a mask or a table."""
    if tensor.requires_grad:
        return True
    known = layout.axis(tensor)
    rows = forward.around.rows.samples_of(tensor, constant=known == CONSTANT)
    if rows is not None and rows is not UNKNOWN_ORDER:
        return True
    size, axis = forward.batch_size, forward.batch_axis
    if known != UNKNOWN:
        return known != CONSTANT
    if tensor.dim() == 0 or size == 0:
        return False
    if size == 1 or tensor.shape[0] == size or (axis < tensor.dim() and tensor.shape[axis] == size):
        return True
    # Where no shapes were asked for (probe=False), or the model runs with no other number of samples.
    return (
        not forward.around.sites.layouts
        and tensor.dim() > 1
        and tensor.shape[0] % size == 0
        and not is_elementwise(name)
    )


def per_sample_axis(tracked: TrackedTensor, layout: ArgumentLayout, forward: ForwardContext) -> int:
    """Return the axis along which a tracked tensor has copies of a parameter for each sample; `CONSTANT` if none."""
    known = layout.axis(tracked)
    if known >= 0:
        return known
    guessed = known == UNKNOWN and broadcast_over(tracked, forward.batch_size, forward.batch_axis)
    return forward.batch_axis if guessed else CONSTANT
