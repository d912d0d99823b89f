"""Which rows of a tensor belong to which sample: how they map to samples, and the maps possible before any evidence.

Rows are the leading axes of a layer's input and output (everything but its features). A *row map* sends them to the
canonical layout ``(B, T, ...)``. Shapes, and the indices that rows were gathered by, suggest candidates; the call site
remembers which one the evidence of the probe confirmed, so that a coincidence of sizes later on cannot change it.

Where samples lie in the arguments of an operation: as shapes have shown, as rows were followed, as sizes suggest. In
elementwise operations the parameter is broadcast over the batch, and autograd itself sums over the rest: ``x * weight``
runs as ``x * weight.expand(B, ...)`` with the expanded tensor as a graph node of its own: the gradient that arrives
there is the per-sample gradient. The same holds for whatever already has a batch axis of its own (``cls_token.expand(B,
-1, -1)``), which may then enter any operation.

Shape letters: B samples, T positions of a sample, L the leading (row) axes, F features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ghostclip import _torch, _tree
from ghostclip.capture.call_sites import CONSTANT, NEVER, UNKNOWN, Key, counted_as, key_of
from ghostclip.capture.derive import broadcast_over
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.sample_axis import LOST, UNKNOWN_ORDER, SampleAxis, sample_axis_at
from ghostclip.capture.tracked import Operation, TrackedTensor
from ghostclip.errors import BatchAxisError
from ghostclip.factors import Dense, Diagonal, Factor
from ghostclip.factors.base import to_accumulation

# Kinds of rows of which every sample has several along one axis, that of consecutive ones first.
FOLDED: Final = ("major", "minor")


@dataclass(frozen=True)
class RowMap:
    """Map from the rows along one axis of a tensor to samples."""

    # "axis" (one row per sample), "major" (folded, all rows of a sample consecutive), "minor" (folded, samples
    # alternate), "whole" (one sample owns everything), "gathered", or "one" (everything belongs to one of the samples)
    kind: str
    axis: int = 0
    # for ``"gathered"`` and ``"one"``: the sample of every row, shape ``(n,)`` or ``(1,)``, int64
    samples: Tensor | None = None
    # where rows were followed through the graph to those of another operation: their place there
    followed: SampleAxis | None = field(default=None, compare=False)

    @classmethod
    def of(cls, rows: SampleAxis, batch_size: int) -> "RowMap":
        """Return the map of rows that were followed."""
        if rows.order is None and 1 in (rows.outer, rows.inner):
            kind = "major" if rows.inner > 1 else "minor" if rows.outer > 1 else "axis"
            return cls(kind, rows.axis, followed=rows)
        samples = rows.samples()
        if _in_order(samples, batch_size):
            return cls("axis", rows.axis, followed=SampleAxis(rows.axis, 1, batch_size, 1))
        return cls("gathered", rows.axis, samples, rows)

    @property
    def key(self) -> tuple[str, int]:
        """The part of the map that a call site remembers: that rows were followed, or how they lie."""
        return "followed" if self.followed is not None else self.kind, self.axis

    @property
    def is_guessed(self) -> bool:
        """Whether sizes alone suggest it."""
        return self.samples is None and self.followed is None

    def sample_axis(self, sizes: Sequence[int], batch_size: int) -> SampleAxis | None:
        """Return where samples lie, in rows of some sizes; None where one sample has them all."""
        if self.followed is not None or self.kind in ("whole", "one"):
            return self.followed
        if self.samples is not None:
            return SampleAxis(self.axis, 1, len(self.samples), 1, self.samples, batch_size)
        if self.kind == "axis":
            return SampleAxis(self.axis, 1, batch_size, 1)
        if self.axis >= len(sizes) or not batch_size:
            return None
        several = sizes[self.axis] // batch_size
        return (
            SampleAxis(self.axis, 1, batch_size, several)
            if self.kind == "major"
            else SampleAxis(self.axis, several, batch_size, 1)
        )

    def fits(self, key: tuple[str, int]) -> bool:
        """Return whether it is the map that a call site remembers, in a batch of other sizes."""
        kind, axis = key
        if axis != self.axis or self.kind == "whole":
            return self.kind == "whole"
        # A folded one becomes that of an axis where each sample has one row.
        folded = self.kind == "axis" and kind in FOLDED
        return kind == self.kind or folded or (kind == "followed" and self.followed is not None)

    @property
    def gathering(self) -> str:
        """How rows came: by sizes, followed, gathered in the batch's order or in another; each is proved for itself."""
        if self.samples is None or self.kind != "gathered":
            return "" if self.followed is None else "followed"
        in_order = torch.equal(self.samples, self.samples.sort().values)
        return "in order" if in_order else "in another order"

    def of_first(self, most: int) -> "RowMap":
        """Return the map of the first samples' rows alone."""
        return self if self.samples is None else replace(self, samples=self.samples[self.samples < most])

    def split(self, tensor: Tensor, num_batch_dims: int, batch_size: int) -> Tensor:
        """Return a tensor ``(*L, *F)`` as ``(B, T, *F)``, shorter samples padded with zeros."""
        if num_batch_dims == 1 and self.kind == "axis":
            return tensor.unsqueeze(1)
        if num_batch_dims == 2 and self.kind == "axis" and not self.axis:
            return tensor
        features = tensor.shape[num_batch_dims:]
        if self.kind == "whole":
            return tensor.reshape(1, -1, *features)
        if self.kind == "gathered":
            return self._pack(tensor.movedim(self.axis, 0), num_batch_dims, batch_size)
        axis, size = self.axis, tensor.shape[self.axis]
        if self.kind == "major":
            tensor = tensor.unflatten(axis, (batch_size, size // batch_size))
        elif self.kind == "minor":
            tensor = tensor.unflatten(axis, (size // batch_size, batch_size))
            axis += 1
        if axis:
            tensor = tensor.movedim(axis, 0)
        positions = prod(tensor.shape[1 : tensor.dim() - len(features)])
        return tensor.reshape(batch_size, positions, *features)

    def _pack(self, tensor: Tensor, num_batch_dims: int, batch_size: int) -> Tensor:
        """Return gathered rows as ``(B, T, *F)``, each sample's together, shorter ones padded with zeros."""
        assert self.samples is not None
        order = torch.argsort(self.samples, stable=True)
        counts_B = torch.bincount(self.samples, minlength=batch_size)
        first_B = torch.cumsum(counts_B, 0) - counts_B
        sample = self.samples[order]
        position = torch.arange(order.numel(), device=order.device) - first_B[sample]
        longest = int(counts_B.max()) if order.numel() else 0
        packed = tensor.new_zeros(batch_size, longest, *tensor.shape[1:])
        packed[sample, position] = tensor[order]
        inner = prod(tensor.shape[1:num_batch_dims])
        return packed.reshape(batch_size, longest * inner, *tensor.shape[num_batch_dims:])

    def samples_of(self, size: int, batch_size: int) -> Tensor:
        """Return the sample of every row along the axis, ``(size,)``, int64."""
        if self.samples is not None:
            return self.samples
        index = torch.arange(size)
        if self.kind == "minor":
            return index % batch_size
        return index // max(1, size // max(1, batch_size)) if batch_size > 1 else torch.zeros_like(index)


def samples_axis(sizes: tuple[int, ...], batch_size: int, axis: int) -> int | None:
    """Return the axis of the samples, as far as sizes tell, or None."""
    # An axis of B entries, else one of several times as many (folded), the expected one first.
    order = [dim for dim in dict.fromkeys((axis, *range(len(sizes)))) if dim < len(sizes)]
    exact = (dim for dim in order if sizes[dim] == batch_size)
    folded = (dim for dim in sorted(order) if sizes[dim] > batch_size and sizes[dim] % batch_size == 0)
    return next(exact, next(folded, None))


WHOLE = RowMap("whole")


def candidates(sizes: Sequence[int], batch_size: int, *, axis: int) -> list[RowMap]:
    """Return the row maps that the sizes allow, the expected one first."""
    return list(_candidates(tuple(sizes), batch_size, axis))


@lru_cache(maxsize=4096)
def _candidates(sizes: tuple[int, ...], batch_size: int, axis: int) -> list[RowMap]:
    """As `candidates`, cached; not to be changed."""
    if batch_size == 1:
        return [WHOLE]
    order = [axis, *(k for k in range(len(sizes)) if k != axis)] if axis < len(sizes) else list(range(len(sizes)))
    exact = [RowMap("axis", k) for k in order if sizes[k] == batch_size]
    if batch_size == 0:
        return exact
    folded = [k for k in order if sizes[k] > batch_size and sizes[k] % batch_size == 0]
    kinds = FOLDED if axis == 0 else FOLDED[::-1]
    return exact + [RowMap(kind, k) for k in folded for kind in kinds]


class RowOrder(NamedTuple):
    """Order of the rows of a tensor, after the operations on the way to it."""

    # the sample of every row where rows were gathered, int64, on the tensor's device; None where rows lie as the batch
    # does, or where only the evidence can tell
    samples: Tensor | None
    unknown: bool  # only the evidence can tell
    in_graph: bool  # whether the tensor is in the graph
    row_map: RowMap | None = None  # of rows that were followed through the graph

    def record_in(self, forward: ForwardContext) -> None:
        """Mark in a forward that rows that reach a parameter were gathered or put into another order."""
        if self.unknown:
            # Whatever it is taken for, what one forward shows of it says nothing about the next.
            forward.require_evidence_always()
            forward.reordered = True
        if self.samples is not None:
            forward.gathered = True
            forward.reordered = forward.reordered or not self.in_graph


IN_ORDER: Final = RowOrder(None, unknown=False, in_graph=True)


def order_of_rows(tensor: Tensor, axis: int | None, forward: ForwardContext) -> RowOrder:
    """Return how rows along an axis of a tensor were gathered or reordered on the way to it."""
    # None: along the first one, or whichever has samples where they were followed.
    if tensor.requires_grad:
        rows = sample_axis_at((tensor.grad_fn, tensor.output_nr))
        if rows is LOST:
            return RowOrder(None, unknown=True, in_graph=True)
        if rows is not None and rows.axis < 0:
            # All of it is one sample's, whichever axis is asked for.
            whole = rows.samples().to(tensor.device).expand(tensor.shape[axis or 0])
            row_map = RowMap("gathered", axis or 0, whole, rows)
        elif rows is None or axis not in (None, rows.axis) or rows.size != tensor.shape[rows.axis]:
            return IN_ORDER
        else:
            row_map = RowMap.of(rows, forward.batch_size)
            if row_map.samples is not None:
                row_map = replace(row_map, samples=row_map.samples.to(tensor.device))
        return RowOrder(row_map.samples, unknown=False, in_graph=True, row_map=row_map)
    samples = forward.around.rows.samples_of(tensor)
    if samples is None:
        return IN_ORDER
    known = samples is not UNKNOWN_ORDER and not axis and samples.numel() == tensor.shape[0]
    return RowOrder(samples.to(tensor.device) if known else None, unknown=not known, in_graph=False)


def _in_order(samples: Tensor | None, size: int) -> bool:
    """Return whether rows lie as the batch does; a device is not asked."""
    return samples is not None and samples.is_cpu and samples.numel() == size and samples.tolist() == list(range(size))


def refuse_other_order(model: nn.Module, outputs: Sequence[Tensor], forward: ForwardContext) -> None:
    """Refuse outputs whose rows lie in another order than the batch: targets would meet another sample's."""
    # Whatever they meet outside the model, as targets, would be another sample's.
    size, known = forward.batch_size, forward.around.sites.outputs
    if forward.batch_axis:
        return
    for number, output in enumerate(outputs):
        if output.dim() == 0 or output.shape[0] != size or (len(known) == len(outputs) and known[number] > 0):
            continue
        order = order_of_rows(output, 0, forward)
        if order.unknown:
            order.record_in(forward)
        elif order.samples is not None and order.samples.tolist() != list(range(size)):
            raise BatchAxisError(
                f"{type(model).__name__} returns an output of shape {tuple(output.shape)} whose rows lie in another "
                "order than the samples of the batch: a loss would bring each of them together with another sample's "
                "targets. Put them back, as in outputs[order.argsort()], before they are returned."
            )


def refuse_other_axis(model: nn.Module, outputs: Sequence[Tensor], forward: ForwardContext) -> None:
    """Refuse outputs of a part of a model that have samples along another axis than the next part expects."""
    # The sizes fit where samples are expected, so that the next part would take positions for samples.
    known = forward.around.sites.outputs
    if len(known) != len(outputs):
        return
    for output, axis in zip(outputs, known, strict=True):
        if axis >= 0 and axis != forward.batch_axis and output.shape[forward.batch_axis] == forward.batch_size:
            raise BatchAxisError(
                f"{type(model).__name__} returns an output of shape {tuple(output.shape)} whose samples lie along axis "
                f"{axis}, and the next stage takes them along axis {forward.batch_axis}: it would clip positions in "
                "their place. Return them along that axis (transpose before a stage ends, and again where the next "
                "one begins)."
            )


def row_maps(rows: Tensor, sizes: Sequence[int], known: int, forward: ForwardContext) -> tuple[list[RowMap], RowOrder]:
    """Return the row maps for a layer's input, the preferred one first, and the order of its rows."""
    # Followed rows go by the way they came, others by size; `known` is the axis of samples, `CONSTANT` or `UNKNOWN`.
    size, axis, order = forward.batch_size, forward.batch_axis, IN_ORDER
    maps = candidates(sizes, size, axis=axis)
    if size < 2 or not sizes:
        return maps, order
    if known >= 0:
        maps = candidates_along(known, tuple(sizes), size, axis)
    if rows.requires_grad or known == 0 or (known < 0 and not (axis == 1 and len(sizes) > 1)):
        order = order_of_rows(rows, known if known >= 0 else None, forward)
    first = order.row_map
    if first is None and order.samples is not None:
        first = RowMap("gathered", 0, order.samples)
    if first is not None and first.axis < len(sizes):
        # A selection along the first axis is one of samples only where that axis holds them: the evidence decides.
        return [first, *(one for one in maps if one.key != (first.kind, first.axis))], order
    if known < 0 and id(rows) in forward.inputs and axis < len(sizes) and sizes[axis] == size:
        # What the model was called with has its batch where that was declared, whatever other axis has that size.
        return [RowMap("axis", axis)], order
    fold = "" if rows.requires_grad else forward.around.rows.fold_of(rows)
    if fold:
        return [one for one in maps if one.kind not in FOLDED or one.kind == fold], order
    return maps, order


def axis_maps(size: int, batch_size: int, axis: int, followed: RowMap | None = None) -> list[RowMap]:
    """Return the row maps possible for an axis of the batch, or of batch and others flattened; the preferred first."""
    # `axis` is the model's batch axis: folded rows keep a sample together for 0, alternate for 1. `followed`: what is
    # known of rows that were followed, or routed. Empty when the samples cannot share the rows evenly.
    known = [] if followed is None or batch_size == 1 else [replace(followed, axis=0)]
    return [*known, *candidates((size,), batch_size, axis=axis)]


@lru_cache(maxsize=4096)
def candidates_along(axis: int, sizes: tuple[int, ...], batch_size: int, expected: int) -> list[RowMap]:
    """Return the row maps along one axis, of rows that were not gathered, the preferred one first."""
    # Not to be changed.
    return [row_map for row_map in candidates(sizes, batch_size, axis=expected) if row_map.axis == axis]


def wants_gradient(data: Sequence[Tensor], forward: ForwardContext) -> bool:
    """Return whether data is in the graph, or was put into another order on the way to an operation."""
    rows = forward.around.rows
    return any(tensor.requires_grad or rows.samples_of(tensor) is not None for tensor in data)


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
    layout = None if rows.resized is None else rows.resized.layout(rows.key, _tree.shapes_of(tree))
    if layout is not None:
        layouts[layout_key] = layout
    is_guessed = layout_key not in layouts
    layout = layouts.get((key, dims, 1)) if is_guessed else layouts[layout_key]
    forward.guessed = forward.guessed or is_guessed
    # A frozen parameter has no samples, whatever its sizes are.
    frozen = {id(one): CONSTANT for one in operation.plain if isinstance(one, nn.Parameter)}
    constants = {number: axis for number, axis in frozen.items() if number not in forward.inputs}
    if layout is None:
        return ArgumentLayout(layout_key, constants, rows.key)
    axes = {id(tensor): axis for tensor, axis in zip(tensors, layout.inputs, strict=True)}
    if is_guessed:
        # What the first call was given may be one of many pieces of the batch, all of one size.
        axes = {number: axis for number, axis in axes.items() if axis != CONSTANT} | constants
    return ArgumentLayout(layout_key, axes, rows.key)


def result_axes(layout: ArgumentLayout, result: Any, forward: ForwardContext) -> tuple[int, ...]:
    """Return the axis of samples in each tensor of a result; empty where that is not known."""
    layouts, resized = forward.around.sites.layouts, forward.around.rows.resized
    axes = () if resized is None else resized.of_results(layout.call, _tree.shapes_of(result))
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
