"""Where samples lie in the arguments of an operation: as shapes have shown, as rows were followed, as sizes suggest.

Shape letter: B samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ghostclip import _torch, _tree
from ghostclip.capture.broadcast import is_elementwise
from ghostclip.capture.call_sites import NEVER, counted_as, key_of
from ghostclip.capture.derive import broadcast_over
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.sample_axis import UNKNOWN_ORDER
from ghostclip.capture.sizes import CONSTANT, UNKNOWN, Key, Shapes, shapes_of
from ghostclip.capture.tracked import Operation, TrackedTensor


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
