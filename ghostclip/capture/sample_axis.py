"""Sample axes: where samples lie in a value, followed back through the autograd graph to the nearest captured layer.

How many rows arrive at a layer says nothing about whose they are: a model folds positions into the batch, turns axes,
sorts, or hands each of its experts some rows (``x[token_idx]``). The operations between two layers say it, and autograd
keeps them. The walk goes from a value up to the nearest captured layer, whose rows are known, and back down again.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from math import gcd, prod
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ghostclip import _torch

_MAX_NODES = 256  # that are searched for a captured operation; for rows, of which there may be many parts, more
_MAX_STEPS, _NEARBY = 2048, 6
USE_KEY = "ghostclip_use"
# On a node whose output's rows are known: a `SampleAxis`.
ROWS_KEY = "ghostclip_rows"
# The index by which a node picks rows, or one or none for each axis, as autograd saves it: activation checkpointing
# drops what the node itself saved until the backward. On a node that writes rows: that it may be asked for its index.
INDEX_KEY = "ghostclip_index"
# Stands for an order that is not known.
UNKNOWN_ORDER: Final = torch.empty(0, dtype=torch.int64)
# Their entries are those of their operands' at the same place, whose axes are counted from the last one.
_ENTRYWISE: Final = re.compile(
    r"(Add|Sub|RSub|Mul|Div|Pow|Where|Maximum|Minimum|Fmax|Fmin|Lerp|Addcmul|Addcdiv|Atan2|Hypot|Copysign|Remainder|Fmod"
    r"|Logaddexp2?|MaskedFill|Expand|Clamp|Xlogy)Backward\d*$"
)
_BATCHES_OF_PRODUCTS: Final = frozenset({"BmmBackward0", "BaddbmmBackward0", "CdistBackward0"})
# Classes of nodes whose metadata `set_metadata` has set. A node makes its metadata when it is first read, which takes
# longer than going on to the next one.
_noted_kinds: set[type] = set()


class SampleAxis(NamedTuple):
    """Where samples lie in a value: along one axis of ``outer * entries * inner`` rows, in this order."""

    axis: int  # -1: the whole value belongs to one sample
    outer: int  # how often the entries recur along the axis
    entries: int  # each of one sample: all in order, or as `order` says
    inner: int  # neighbouring rows of one entry
    order: Tensor | None = None  # sample of each of the entries, int64; None: the samples in the batch's order
    of: int = 0  # how many samples the batch has, where it is known of rows in some order

    @property
    def size(self) -> int:
        """The size of the axis."""
        return self.outer * self.entries * self.inner

    @property
    def num_samples(self) -> int:
        """How many samples the batch has; 0 where that is not known."""
        return self.entries if self.order is None else self.of

    def samples(self) -> Tensor:
        """Return the sample of every entry of the axis, int64; `UNKNOWN_ORDER` of `LOST`."""
        if self.order is UNKNOWN_ORDER:
            return UNKNOWN_ORDER
        order = torch.arange(self.entries) if self.order is None else self.order
        return order[None, :, None].expand(self.outer, -1, self.inner).reshape(-1)

    def picked(self, index: Tensor) -> "SampleAxis":
        """Return the rows at some entries of the axis."""
        samples = self.samples().to(index.device)[index]
        return SampleAxis(self.axis, 1, len(samples), 1, samples, self.num_samples)

    def cut(self, start: int, size: int, step: int) -> "SampleAxis":
        """Return the rows of a piece of the axis."""
        block = self.entries * self.inner
        if step == 1 and self.outer > 1 and block and not start % block and not size % block:
            return self._replace(outer=size // block)
        return self if size == self.size else self.picked(torch.arange(self.size)[start::step][:size])

    def alone(self, entry: int) -> "SampleAxis":
        """Return the rows of one entry of the axis."""
        return SampleAxis(-1, 1, 1, 1, self.samples()[entry : entry + 1], self.num_samples)


# What stands for notes on a node that has none.
_NOTHING: Final = object()
# Rows of samples in an order that is not known.
LOST: Final = SampleAxis(0, 1, 0, 1, UNKNOWN_ORDER)
# A value of the graph: the node that made it, and which of its outputs it is.
_Edge: TypeAlias = tuple[Any, int]


class Walk:
    """Budget and record of a search through the graph: how many nodes it may still visit, and what it came to."""

    __slots__ = ("is_far", "left", "visited")

    def __init__(self, visited: dict[_Edge, Any] | None = None) -> None:
        """Begin a far search, or with `visited` of another one a short search nearby."""
        # A walk to what is nearby belongs to a far one. Of each value: what was noted on its node by then.
        self.is_far = visited is None
        self.left = _MAX_STEPS if visited is None else _NEARBY  # nodes that may still be visited
        self.visited: dict[_Edge, Any] = {} if visited is None else visited


# (rows of a node's first parent, the node, number of its output) -> rows of that output, None where unknown.
_Step: TypeAlias = Callable[[SampleAxis, Any, int], SampleAxis | None]
# (the node, number of its output, the walk to it) -> rows of that output, None where unknown.
_Meeting: TypeAlias = Callable[[Any, int, Walk], SampleAxis | None]
# What nodes do to rows, by their class.
_kinds: dict[type, tuple[_Step | None, _Meeting | None]] = {}


def set_metadata(node: Any, key: str, value: Any) -> None:
    """Store a value in a node's metadata: under `USE_KEY` its use, under `ROWS_KEY` its rows."""
    _noted_kinds.add(type(node))
    node.metadata[key] = value


def sample_axis_at(edge: _Edge, walk: Walk | None = None) -> SampleAxis | None:
    """Return where samples lie in an output of a node; `LOST` where the order is unknown, None where nothing is."""
    walk = walk or Walk()
    way: list[tuple[_Step, Any, int]] = []
    while walk.left > 0:
        walk.left -= 1
        rows, step, edges = _rows_or_parents(*edge, walk)
        if rows is not None:
            return _follow_back(rows, way, notes=walk.is_far) if way else rows
        if len(edges) > 1 and step is None:
            step = partial(_joined_with, edges[0])
        if not edges:
            break
        if step is not _same:
            way.append((step or partial(_through_operation, edges[0]), *edge))
        edge = edges[0]
    return None


def _rows_or_parents(node: Any, number: int, walk: Walk) -> tuple[SampleAxis | None, _Step | None, Sequence[_Edge]]:
    """Return (rows if the node has them noted, how it moves its parent's rows, the parents to search, best first)."""
    noted = _noted(node)
    walk.visited.setdefault((node, number), noted)
    if node is None:
        return None, None, ()
    if noted is not _NOTHING:
        return noted, _same, ()
    step, meeting = _kinds.get(type(node)) or _kind_of(node)
    if meeting is not None:
        return meeting(node, number, walk), _same, ()
    edges = node.next_functions
    if step is not None or len(edges) < 2:
        return None, step, edges[:1]
    return None, None, _likely_first(node, walk)


def _noted(node: Any) -> Any:
    """Return the sample axis stored on a node, or that of its use; `_NOTHING` where there is none."""
    if type(node) not in _noted_kinds:
        return _NOTHING
    use = node.metadata.get(USE_KEY)
    return node.metadata.get(ROWS_KEY, _NOTHING) if use is None else use.sample_axis()


def _likely_first(node: Any, walk: Walk) -> list[_Edge]:
    """Return a node's parents in the order in which they are searched for samples."""
    # The output of a layer before what was added up over many of them. What a constant went through has the batch's
    # order whatever it meets: rows that were put into another one are looked for nearby, but for one that meets all.
    parents = _parents(node)
    if len(parents) > 1:
        if type(parents[0][0]) not in _noted_kinds and type(parents[1][0]) in _noted_kinds:
            parents[:2] = parents[1::-1]
        for place, edge in enumerate(parents if walk.left > _NEARBY else ()):
            rows = sample_axis_at(edge, Walk(walk.visited))
            if rows is None or rows is LOST or rows.order is None or rows.axis < 0:
                continue
            if not _ENTRYWISE.match(_name_of(node)) or _through_operation(edge, rows, node, 0) is not None:
                return [edge, *parents[:place], *parents[place + 1 :]]
    return parents


def _follow_back(rows: SampleAxis | None, way: list[tuple[_Step, Any, int]], *, notes: bool) -> SampleAxis | None:
    """Carry a sample axis from where it was found through the steps of `way` to where it was asked for."""
    while way and rows is not None and rows is not LOST:
        step, node, number = way.pop()
        if rows.axis < 0 and (type(step) is not partial or step.func is not _joined_with):
            continue
        after = step(rows, node, number)
        # Sizes say nothing of rows that were put into an order.
        rows = LOST if after is None and rows.order is not None and rows.axis >= 0 else after
        # Where most layers have no parameter that is trained, all of them are between one that has and the one before.
        is_sum = notes and type(step) is partial and step.func is _joined_with and _ENTRYWISE.match(_name_of(node))
        if is_sum and rows is not None and rows.order is None and rows.axis >= 0:
            set_metadata(node, ROWS_KEY, rows)
    return rows


def _name_of(node: Any) -> str:
    return type(node).__name__


def _table(table: Mapping[str, Any], name: str) -> Any:
    """Return a table's entry for a node's class, whatever number an in-place variant has."""
    # Operations in place have numbers of their own.
    return table.get(name) or table.get(re.sub(r"\d+$", "0", name))


def _kind_of(node: Any) -> tuple[_Step | None, _Meeting | None]:
    """Return (how nodes of this class move rows, how they join rows of several parents), cached by class."""
    name = _name_of(node)
    _kinds[type(node)] = kind = _table(_STEPS, name), _table(_MEETINGS, name)
    return kind


def _parents(node: Any) -> list[_Edge]:
    """Return the edges to a node's parents in the graph, parameters and other leaves left out."""
    parents = []
    for edge in node.next_functions:
        parent = edge[0]
        if parent is not None and _name_of(parent) != "AccumulateGrad":
            parents.append(edge)
    return parents


# -- what nodes do to rows: they keep their form, pass by it, or move them ------------------------------------------


def _same(rows: SampleAxis, node: Any, number: int) -> SampleAxis:
    return rows


def _joined_with(edge: _Edge, rows: SampleAxis, node: Any, number: int) -> SampleAxis | None:
    """Return the sample axis of a value computed from several, by one of them; None if that is one sample's."""
    # Of two samples' rows it may be.
    return None if rows.axis < 0 else _through_operation(edge, rows, node, number)


def _through_operation(edge: _Edge, rows: SampleAxis, node: Any, number: int) -> SampleAxis | None:
    """Return the sample axis behind an operation that moves no rows but may broadcast or reduce other axes."""
    axis, before, after = rows.axis, _torch.shape_of(*edge), _torch.shape_of(node, number)
    if axis < 0 or before == after:
        return rows
    more = len(after) - len(before)
    if _ENTRYWISE.match(_name_of(node)):
        moved = axis + more
        return rows._replace(axis=moved) if 0 <= moved < len(after) and after[moved] == rows.size else None
    over = _torch.saved_or(node, "dim", None) if more <= 0 else None
    if over is not None:
        axes = _axes(over if isinstance(over, Sequence) else [over], len(before))
        return None if axis in axes else rows._replace(axis=axis - sum(one < axis for one in axes)) if more else rows
    return rows if before[: axis + 1] == after[: axis + 1] else None


def _along(rows: SampleAxis, node: Any, number: int) -> SampleAxis | None:
    """Carry rows through an operation among the entries of one axis (softmax, sort, cumsum)."""
    (axis,) = _axes([_torch.saved(node, "dim")], len(_torch.shape_of(node, number)))
    if axis != rows.axis:
        return rows
    return LOST if _name_of(node).startswith(("Sort", "Topk", "Cummax", "Cummin")) else None


def _axes(axes: Iterable[int], dims: int) -> list[int]:
    return [_torch.signed(axis) % dims for axis in axes]


def _viewed(rows: SampleAxis, node: Any, number: int) -> SampleAxis | None:
    """Carry rows through a reshape; None where they do not lie along one axis any more."""
    before, after = _torch.sizes_before_view(node), list(_torch.shape_of(node, number))
    if not after or 0 in after:
        return SampleAxis(after.index(0), 1, 0, 1, rows.samples()[:0]) if after else rows.alone(0)
    if rows.entries == 1:
        return rows._replace(axis=0, outer=after[0], inner=1)
    found = _unfolded(rows, before, after)
    if found is not None or rows.order is None:
        return found
    return _unfolded(_in_runs(rows, rows.order.cpu()), before, after)


def _unfolded(rows: SampleAxis, before: Sequence[int], after: Sequence[int]) -> SampleAxis | None:
    """Return the axis of the new shape along which samples lie, by their distance in memory; None if none fits."""
    # How many elements lie between one sample and the next, and between one turn of them and the next.
    near = rows.inner * prod(before[rows.axis + 1 :])
    far, stride = near * rows.entries, 1
    for axis in reversed(range(len(after))):
        end = stride * after[axis]
        if stride <= near and far <= end:
            whole = not near % stride and not end % far
            return rows._replace(axis=axis, outer=end // far, inner=near // stride) if whole else None
        stride = end
    return None


def _in_runs(rows: SampleAxis, order: Tensor) -> SampleAxis:
    """Return rows in some order as turns of runs: those of several that each sample has."""
    starts = (order[1:] != order[:-1]).nonzero()[:, 0] + 1
    run = gcd(len(order), *starts.tolist())
    order = order[::run]
    turn = next(size for size in range(1, len(order) + 1) if not len(order) % size and _repeats(order, size))
    return rows._replace(
        outer=rows.outer * len(order) // turn, entries=turn, inner=rows.inner * run, order=order[:turn]
    )


def _repeats(order: Tensor, size: int) -> bool:
    return torch.equal(order, order[:size].repeat(len(order) // size))


def _turned(rows: SampleAxis, node: Any, number: int) -> SampleAxis:
    """Carry rows through a transpose or permutation of axes."""
    dims = len(_torch.shape_of(node, number))
    order = list(range(dims))
    if _torch.has_saved(node, "dims"):
        order = _axes(_torch.saved(node, "dims"), dims)
    else:
        swapped = [_torch.saved(node, name) for name in ("dim0", "dim1")] if _torch.has_saved(node, "dim0") else [0, 1]
        one, two = _axes(swapped, dims)
        order[one], order[two] = two, one
    return rows if rows.axis < 0 else rows._replace(axis=order.index(rows.axis))


def _unsqueezed(rows: SampleAxis, node: Any, number: int) -> SampleAxis:
    """Carry rows through a new axis of size 1."""
    (new,) = _axes([_torch.saved(node, "dim")], len(_torch.shape_of(node, number)))
    return rows._replace(axis=rows.axis + (new <= rows.axis))


def _squeezed(rows: SampleAxis, node: Any, number: int) -> SampleAxis | None:
    """Carry rows through the removal of axes of size 1."""
    sizes = _torch.sizes_before_view(node)
    dims = _torch.saved_or(node, "dim", range(len(sizes)))
    axes = [axis for axis in _axes(dims if isinstance(dims, Sequence) else [dims], len(sizes)) if sizes[axis] == 1]
    if rows.axis in axes:
        return rows.alone(0)
    return rows._replace(axis=rows.axis - sum(axis < rows.axis for axis in axes))


def _selected(rows: SampleAxis, node: Any, number: int) -> SampleAxis:
    """Carry rows through the selection of one entry of an axis (select, unbind)."""
    unbound = not _torch.has_saved(node, "index")
    dims = len(_torch.shape_of(node, number)) + 1
    (axis,) = _axes([_torch.saved(node, "dim")], dims)
    if axis == rows.axis:
        return rows.alone(number if unbound else _torch.signed(_torch.saved(node, "index")) % rows.size)
    return rows._replace(axis=rows.axis - (axis < rows.axis))


def _cut(rows: SampleAxis, node: Any, number: int) -> SampleAxis:
    """Carry rows through a slice or split of an axis."""
    # Along another axis it is a piece of all of them.
    name, shape = _name_of(node), _torch.shape_of(node, number)
    if name == "SliceBackward0":
        start, step = _torch.signed(_torch.saved(node, "start")), _torch.signed(_torch.saved(node, "step"))
        return rows.cut(start + rows.size if start < 0 else start, shape[rows.axis], step)
    if name == "SplitBackward0":
        return rows.cut(number * _torch.saved(node, "split_size"), shape[rows.axis], 1)
    return rows.cut(sum(_torch.saved(node, "split_sizes")[:number]), shape[rows.axis], 1)


def _mirrored(rows: SampleAxis, node: Any, number: int) -> SampleAxis | None:
    """Carry rows through a flip or roll."""
    axes = _axes(_torch.saved(node, "dims"), len(_torch.shape_of(node, number)))
    if not axes:
        return None
    index = torch.arange(rows.size)
    for place, axis in enumerate(axes):
        if axis == rows.axis:
            shifts = _torch.saved_or(node, "shifts", None)
            index = index.flip(0) if shifts is None else index.roll(_torch.signed(shifts[place]))
    return rows.picked(index) if rows.axis in axes else rows


def _repeated(rows: SampleAxis, node: Any, number: int) -> SampleAxis:
    """Carry rows through ``repeat``."""
    repeats = _torch.saved(node, "repeats")
    axis = rows.axis + len(repeats) - len(_torch.sizes_before_view(node))
    return rows if rows.axis < 0 else rows._replace(axis=axis, outer=rows.outer * repeats[axis])


def _index_of(node: Any, name: str) -> Any:
    """Return the index, or the indices, by which a node picks rows: as it was noted, or as the node saved it."""
    return node.metadata[INDEX_KEY] if INDEX_KEY in node.metadata else _torch.saved(node, name)


def _chosen(rows: SampleAxis, node: Any, number: int) -> SampleAxis | None:
    """Carry rows through an index along one axis: ``index_select``, ``gather``."""
    index, after = _index_of(node, "index"), _torch.shape_of(node, number)
    if _axes([_torch.saved(node, "dim")], len(after))[0] != rows.axis:
        return rows if rows.axis < 0 or after[rows.axis] == rows.size else None
    return _at(rows, index.movedim(rows.axis, 0) if index.dim() > 1 else index)


def _at(rows: SampleAxis, index: Tensor) -> SampleAxis:
    """Return the rows at an index whose first axis alone says which."""
    # A single row may have an index without axes: `index_select` takes `nonzero().squeeze()` as it is.
    index = index.reshape(-1, 1) if index.dim() < 2 else index.flatten(1)
    first = index[:, :1]
    if index.shape[1] > 1 and not bool((index == first).all()):
        return LOST
    return rows.picked(first[:, 0] % max(1, rows.size)) if index.shape[1] else LOST


def _indexed(rows: SampleAxis, node: Any, number: int) -> SampleAxis | None:
    """Carry rows through indices or masks: ``x[index]``, ``x[mask]``, ``x[:, index]``."""
    spans: list[tuple[int, int, Tensor]] = []
    axis, axes = rows.axis, 0
    for index in _index_of(node, "indices"):
        over = index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
        if index is not None:
            spans.append((axes, over, index))
        axes += over
    after = _torch.shape_of(node, number)
    if axis < 0 or not spans:
        return rows
    before = sum(over for begin, over, _ in spans if begin < axis)
    adjoin = all(one[0] + one[1] == two[0] for one, two in pairwise(spans))
    first = spans[0][0] if adjoin else 0
    dims = max(1 if over > 1 or index.dtype in (torch.bool, torch.uint8) else index.dim() for _, over, index in spans)
    for begin, over, index in spans:
        if begin <= axis < begin + over:
            entries = index.nonzero()[:, axis - begin] if index.dtype in (torch.bool, torch.uint8) else index
            if not entries.dim():
                return None
            picked, place = _at(rows, entries), first + dims - entries.dim()
            if picked is LOST or place >= len(after) or after[place] != picked.size:
                return picked if picked is LOST else None
            return picked._replace(axis=place)
    place = axis - before + (dims if not adjoin or first < axis else 0)
    return rows._replace(axis=place) if place < len(after) and after[place] == rows.size else None


def _chosen_by_data(rows: SampleAxis, node: Any, number: int) -> SampleAxis:
    return LOST


def _untold(rows: SampleAxis, node: Any, number: int) -> None:
    return None


_STEPS: Final[Mapping[str, _Step]] = {
    "TBackward0": _turned, "TransposeBackward0": _turned, "PermuteBackward0": _turned,
    "UnsqueezeBackward0": _unsqueezed, "SelectBackward0": _selected, "UnbindBackward0": _selected,
    "SliceBackward0": _cut, "SplitBackward0": _cut, "SplitWithSizesBackward0": _cut,
    "FlipBackward0": _mirrored, "RollBackward0": _mirrored, "RepeatBackward0": _repeated,
    "IndexBackward0": _indexed, "IndexSelectBackward0": _chosen, "GatherBackward0": _chosen,
    **dict.fromkeys(("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"), _viewed),
    **{f"SqueezeBackward{number}": _squeezed for number in range(3)},
    "_OwnBackward": _same, "NotImplemented": _untold,
    **{f"{name}Backward0": _same for name in (
        "Clone", "ToCopy", "Alias", "Relu", "Gelu", "Tanh", "Sigmoid", "Silu", "NativeDropout", "Exp", "Neg",
    )},
    **{f"{name}Backward0": _along for name in (
        "Softmax", "LogSoftmax", "Sort", "Topk", "Cumsum", "Cumprod", "Cummax", "Cummin", "Logcumsumexp", "Glu",
    )},
    **{f"{name}Backward0": _untold for name in (
        "AsStrided", "MaskedSelect", "Rot90", "ChannelShuffle", "DiagEmbed", "Diagonal",
        "Cdist",
    )},
    **{f"{name}Backward0": _chosen_by_data for name in ("Take", "Put", "Embedding", "EmbeddingBag")},
}  # fmt: skip


# -- where several values meet --------------------------------------------------------------------------------------


def _concatenated(node: Any, number: int, walk: Walk) -> SampleAxis | None:
    """Return the rows of `torch.cat`: those of all parts one after the other along their own axis, else the parts'."""
    after = _torch.shape_of(node, number)
    (axis,) = _axes([_torch.saved(node, "dim")], len(after))
    # A constant may have no rows: what is left of a batch that is run to its longest sample's end.
    known = [sample_axis_at(edge, walk) for edge in node.next_functions if edge[0] is not None]
    parts = [one for one in known if one is not None]
    rows = _rows_of_joined(parts)
    if rows is None or rows is LOST or rows.axis < 0 or rows.axis != axis:
        return rows if rows is LOST or (rows is not None and rows.axis >= 0) else None
    if len(parts) < len(known) or sum(part.size for part in parts) != after[axis]:
        return None
    if all(_alike(part, rows) and part.inner == 1 for part in parts):
        return rows._replace(outer=sum(part.outer for part in parts))
    samples = torch.cat([part.samples().cpu() for part in parts])
    return SampleAxis(axis, 1, len(samples), 1, samples, parts[0].num_samples)


def _stacked(node: Any, number: int, walk: Walk) -> SampleAxis | None:
    """Return the rows of `torch.stack`: the new axis if each part is one sample's, else the parts' own axis, moved."""
    (axis,) = _axes([_torch.saved(node, "dim")], len(_torch.shape_of(node, number)))
    known = [sample_axis_at(edge, walk) for edge in node.next_functions if edge[0] is not None]
    parts = [one for one in known if one is not None]
    if len(parts) == len(node.next_functions) and all(part.axis < 0 for part in parts):
        samples = torch.cat([part.samples().cpu() for part in parts])
        return SampleAxis(axis, 1, len(samples), 1, samples, parts[0].num_samples)
    rows = _rows_of_joined(parts)
    if rows is None or rows is LOST or rows.axis < 0:
        return rows if rows is LOST else None
    if not all(part[:4] == rows[:4] and _alike(part, rows) for part in parts):
        return LOST
    return rows._replace(axis=rows.axis + (axis <= rows.axis))


def _rows_of_joined(parts: Sequence[SampleAxis]) -> SampleAxis | None:
    """Return the rows of one of several values, those in an order first; None where they lie along different axes."""
    if any(part is LOST for part in parts):
        return LOST
    rows = next((part for part in parts if part.order is not None), parts[0] if parts else None)
    return rows if all(part.axis == rows.axis for part in parts if rows is not None) else None


def _alike(part: SampleAxis, other: SampleAxis) -> bool:
    """Return whether two values have rows of the same samples in the same order, one after the other."""
    if part.entries != other.entries or part.order is other.order:
        return part.entries == other.entries
    return part.order is not None and other.order is not None and torch.equal(part.order.cpu(), other.order.cpu())


def _multiplied(node: Any, number: int, walk: Walk) -> SampleAxis | None:
    """Return the rows of a product of matrices, or of batches of them."""
    *_, one, two = node.next_functions
    summed = len(_torch.shape_of(node, number)) - 1
    rows = sample_axis_at(one, walk)
    if rows is not None:
        return rows if rows is LOST or rows.axis < summed else None
    rows = sample_axis_at(two, walk)
    if rows is not None and (rows is LOST or rows.axis != summed - 1):
        return rows
    # A left factor from outside the graph may give rows any place.
    shape = () if two[0] is None else _torch.shape_of(*two)
    places = one[0] is None and bool(shape) and shape[summed - 1] == _torch.shape_of(node, number)[summed - 1]
    return LOST if places else None


def _rows_of_written(node: Any, number: int, walk: Walk) -> SampleAxis | None:
    """Return the rows of a value into which others were written where an index says."""
    base, written, after = node.next_functions[0], node.next_functions[-1], _torch.shape_of(node, number)
    rows = sample_axis_at(base, walk) if base[0] is not None else None
    among = base[0] is None or (rows is None and is_written(base[0]))
    if not among and (rows is None or rows is LOST or written[0] is None or not _writes_along(node, rows.axis)):
        return rows if rows is None or rows is LOST else _through_operation(base, rows, node, number)
    few = rows is None and (written[0] is None or list(_torch.shape_of(*written)[:1]) != list(after[:1]))
    if few and (written[0] is None or INDEX_KEY not in node.metadata):
        return None
    values = sample_axis_at(written, walk)
    if rows is None and values is not None and values is not LOST and not _writes_along(node, values.axis):
        return _through_operation(written, values, node, number) if base[0] is None else None
    placed = _at_places(node, rows, after[0], walk)
    # Among constants a few rows in an unknown order are left to sizes.
    return LOST if placed is None and not few else placed


def _written(node: Any, walk: Walk, *, among: bool) -> tuple[Tensor, Tensor, int] | None:
    """Return the rows that a node writes, the sample of each and B; those written before `among` constants as well."""
    base, index = node.next_functions[0][0], _index_of_places(node)
    values = sample_axis_at(node.next_functions[-1], walk)
    if index is None or values is None or values is LOST:
        return None
    samples = values.samples().to(index.device)
    if values.entries == 1:
        samples = samples[:1].expand(index.numel())
    elif values.axis or index.numel() != values.size:
        return None
    if not among or base is None:
        return index, samples, values.num_samples
    before = _written(base, walk, among=True) if is_written(base) else None
    return before and (torch.cat([before[0], index]), torch.cat([before[1], samples]), before[2])


def _at_places(node: Any, rows: SampleAxis | None, size: int, walk: Walk) -> SampleAxis | None:
    """Return the rows of a value with some written among ``rows``, those of constants if None; None if unknown."""
    written = _written(node, walk, among=rows is None)
    if written is None:
        return None
    index, samples, batch_size = written
    if rows is not None:
        # Each row where that sample has one.
        alike = not rows.axis and torch.equal(rows.samples().to(index.device)[index], samples)
        return rows if alike else None
    several = 0 if not batch_size or size % batch_size else size // batch_size
    if several:
        # Each row where the batch has that sample, beside what is in the batch's order or in none.
        together, alternating = torch.equal(index // several, samples), torch.equal(index % batch_size, samples)
        if together and (several == 1 or not alternating):
            return SampleAxis(0, 1, batch_size, several)
        if alternating and not together:
            return SampleAxis(0, several, batch_size, 1)
    # Each row once: where no other one is left.
    once = torch.equal(index.sort().values, torch.arange(size, device=index.device))
    return SampleAxis(0, 1, len(samples), 1, samples[index.argsort()], batch_size) if once else None


def is_written(node: Any) -> bool:
    """Return whether a node writes values into others where an index says."""
    return (_kinds.get(type(node)) or _kind_of(node))[1] is _rows_of_written


def _writes_along(node: Any, axis: int) -> bool:
    """Return whether a node writes into places of an axis that data says."""
    if not _torch.has_saved(node, "indices"):
        return _axes([_torch.saved(node, "dim")], len(_torch.shape_of(node, 0)))[0] == axis
    first = 0
    for index in _torch.saved(node, "indices") if _torch.saving_hooks() is None else ():
        over = index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
        if index is not None and first <= axis < first + over:
            return True
        first += over
    return _torch.saving_hooks() is not None


def _index_of_places(node: Any) -> Tensor | None:
    """Return the rows of its result into which a node writes, one after the other; None where that is not known."""
    if _torch.saving_hooks() is not None:
        # Whoever asks for it would have a checkpoint run its part again, in the middle of the forward.
        return None
    indices = _torch.saved_or(node, "indices", None)
    index = _torch.saved_or(node, "index", None) if indices is None else indices[0] if len(indices) == 1 else None
    if index is None or (indices is None and _torch.signed(_torch.saved(node, "dim"))):
        return None
    index = index.nonzero()[:, 0] if index.dtype in (torch.bool, torch.uint8) and index.dim() == 1 else index
    return index if index.dim() == 1 else None


def _recurred(node: Any, number: int, walk: Walk) -> SampleAxis | None:
    """Return the rows of a recurrent layer's outputs, or of its last states: those of its first step."""
    gates = node.next_functions[0]
    rows = None if gates[0] is None else sample_axis_at(gates, walk)
    if rows is None or rows is LOST or not number:
        return rows
    return rows.cut(0, _torch.shape_of(node, number)[0], 1)


def _packed(node: Any, number: int, walk: Walk) -> SampleAxis:
    """Return `LOST`: the row tracker, which sees sequences packed, stores their order on the node."""
    # Its output has the rows of padded sequences in another order, which is noted on it by who sees it made.
    return LOST


_MEETINGS: Final[Mapping[str, _Meeting]] = {
    "CatBackward0": _concatenated, "StackBackward0": _stacked, "_RecurrenceBackward": _recurred,
    "PackPaddedSequenceBackward0": _packed,
    **dict.fromkeys(("MmBackward0", "AddmmBackward0", "BmmBackward0", "BaddbmmBackward0"), _multiplied),
    **{f"{name}Backward0": _rows_of_written for name in (
        "IndexPut", "IndexCopy", "IndexAdd", "IndexReduce", "Scatter", "ScatterAdd", "ScatterReduce",
    )},
}  # fmt: skip


# -- what a walk saw, to know the same way again -----------------------------------------------------------------------

# Saved attributes that are read of a node beside parents and shape, by what it does to rows; else ``dim``.
_ASKED_FOR: Final[Mapping[Any, tuple[str, ...]]] = {
    _turned: ("dims", "dim0", "dim1"), _selected: ("dim", "index"), _mirrored: ("dims", "shifts"),
    _cut: ("dim", "start", "step", "split_size", "split_sizes"), _repeated: ("repeats",),
}  # fmt: skip
_BY_DATA: Final = frozenset({_indexed, _chosen, _rows_of_written})
# What reads that of a node, by its class; None where there is nothing.
_readers: dict[type, Callable[[Any], Any] | None] = {}


class _Visit(NamedTuple):
    """One value that a search visited, as it must be found again for the same result."""

    child: int  # number of the visit from which it was reached, -1 of the first, and the place of the edge there
    place: int
    number: int  # of the output
    kind: type
    shape: Sequence[int] | None  # None where what its child saved tells it
    rows: Any  # as noted on the node, or `_NOTHING`; where they are noted, no more is looked at
    parents: int = 0  # how many
    passed_by: tuple[tuple[int, type], ...] = ()  # places and classes of parents where the walk did not go
    again: tuple[tuple[int, int, int], ...] = ()  # (place, child, place) of parents that other visits lead to as well
    read: Callable[[Any], Any] | None = None  # reads the saved attributes that must be equal, and what it read
    saved: Any = None


# Rows to note on a value, by the number of the visit from which it is reached and the place there.
_Note: TypeAlias = tuple[int, int, SampleAxis]


class Followed:
    """Result of a search for samples with all that it visited, so that an equal graph need not be searched again."""

    __slots__ = ("_notes", "_visits", "rows")

    def __init__(self, edge: _Edge) -> None:
        """Search for samples from an edge, and record what was visited."""
        walk = Walk()
        self.rows = sample_axis_at(edge, walk)
        self._visits, self._notes = _one_of_all(*_record_of(edge, walk.visited))

    def matches(self, edge: _Edge) -> bool:
        """Return whether the graph behind another edge equals the recorded one, so that the result holds for it."""
        seen = list[Any]()
        for child, place, number, kind, shape, rows, parents, passed_by, again, read, saved in self._visits:
            node, at = edge if child < 0 else seen[child][place]
            if type(node) is not kind or at != number:
                return False
            if shape is not None and tuple(_torch.shape_of(node, at)) != shape:
                return False
            noted = _noted(node) if kind in _noted_kinds else _NOTHING
            if noted is not _NOTHING or rows is not _NOTHING:
                if rows is not noted and (rows is LOST or rows != noted):
                    return False
                seen.append(())
                continue
            edges: Any = getattr(node, "next_functions", ())
            seen.append(edges)
            if len(edges) != parents or (read is not None and read(node) != saved):
                return False
            if (passed_by or again) and not _are_as_before(edges, passed_by, again, seen):
                return False
        for child, place, rows in self._notes:
            set_metadata((edge if child < 0 else seen[child][place])[0], ROWS_KEY, rows)
        return bool(self._visits)


def _are_as_before(
    edges: Sequence[_Edge],
    passed_by: tuple[tuple[int, type], ...],
    again: tuple[tuple[int, int, int], ...],
    seen: Sequence[Sequence[_Edge]],
) -> bool:
    """Return whether unvisited parents have the recorded classes, and shared ones are the recorded values."""
    for place, kind in passed_by:
        if type(edges[place][0]) is not kind:
            return False
    return not again or all(edges[place] == seen[child][there] for place, child, there in again)


@lru_cache(maxsize=4096)
def _one_of_all(*seen: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
    """Return its arguments, one object for all equal ones: most layers of a model are reached alike."""
    return seen


def _record_of(start: _Edge, visited: Mapping[_Edge, Any]) -> tuple[tuple[_Visit, ...], tuple[_Note, ...]]:
    """Return a search's record for `Followed`: (visits, rows it noted); empty where values of tensors decide it."""
    visits, notes = list[_Visit](), list[_Note]()
    # By edge: from which visit it was reached, the place there, and whether its shape follows from that one.
    reached = {start: (-1, 0, True)}
    for edge, rows in visited.items():
        node: Any = edge[0]
        if edge not in reached or (isinstance(rows, SampleAxis) and rows is not LOST and rows.order is not None):
            return (), ()
        child, place, known = reached[edge]
        if rows is _NOTHING and (noted := _noted(node)) is not _NOTHING:
            notes.append((child, place, noted))
        visit = _Visit(child, place, edge[1], type(node), None if known else tuple(_torch.shape_of(*edge)), rows)
        if rows is _NOTHING and node is not None:
            kind, edges, again = _kinds.get(type(node)) or _kind_of(node), node.next_functions, []
            if not _BY_DATA.isdisjoint(kind):
                return (), ()
            follows = len(edges) == 1 and (kind[0] in (_same, _turned) or _torch.has_saved(node, "self_sym_sizes"))
            for at, one in enumerate(edges):
                first = reached.setdefault(one, (len(visits), at, follows))
                if first[:2] != (len(visits), at):
                    again.append((at, *first[:2]))
            if type(node) not in _readers:
                asked = _ASKED_FOR.get(kind[0], ("dim",))
                _readers[type(node)] = _torch.saved_reader(node, (*asked, "self_sym_sizes"))
            read = _readers[type(node)]
            passed_by = tuple((at, type(one[0])) for at, one in enumerate(edges) if one not in visited)
            saved = None if read is None else read(node)
            visit = _Visit(*visit[:6], len(edges), passed_by, tuple(again), read, saved)
        visits.append(visit)
    return tuple(visits), tuple(notes)


# -- other questions of the graph --------------------------------------------------------------------------------------


def columns_of(x: Tensor, axis: int, batch_size: int) -> Tensor | None:
    """Return the sample of every sequence of a padded batch in the graph that is about to be packed."""
    # None where they are not as many as samples, and nothing is known of them.
    rows, node = sample_axis_at((x.grad_fn, x.output_nr)), x.grad_fn
    if rows is None and x.shape[axis] == batch_size:
        rows = SampleAxis(axis, 1, batch_size, 1)
        if (_kinds.get(type(node)) or _kind_of(node))[0] is _chosen:
            # Packing sorts them by their lengths first.
            rows = _chosen(rows, node, x.output_nr)
    return None if rows is None or (rows.axis != axis and rows is not LOST) else rows.samples()


def has_one_axis(node: Any) -> bool:
    """Return whether all of what a node brings together is in the graph, with samples along one axis of the result."""
    edges, dims = node.next_functions, len(_torch.shape_of(node, 0))
    # A product sums over one of the last two axes of each factor, of which it makes two.
    last = dims if _ENTRYWISE.match(_name_of(node)) else dims - 2 if _name_of(node) in _BATCHES_OF_PRODUCTS else 0
    axes = set[int | None]()
    for edge in edges if last and len(edges) > 1 else ():
        rows = None if edge[0] is None else sample_axis_at(edge)
        after = None if rows is None or rows is LOST or rows.axis < 0 else _through_operation(edge, rows, node, 0)
        axes.add(None if after is None or after.axis >= last else after.axis)
    return len(axes) == 1 and None not in axes


def only_sample(node: Any, output_nr: int, batch_size: int, is_output: Callable[[tuple[Any, int]], bool]) -> int | None:
    """Return the one sample that a value was computed from, where each path to the model's outputs picks its rows."""
    # None where there are several, or where that cannot be told.
    rows = sample_axis_at((node, output_nr))
    if rows is not None and rows is not LOST:
        samples = set() if rows.order is None else {*rows.order.tolist()}
        return samples.pop() if len(samples) == 1 else None
    samples = set[int]()
    pending, seen = [(node, output_nr)], 0
    while pending and seen < _MAX_NODES:
        edge = pending.pop()
        if edge[0] is None or _name_of(edge[0]) == "AccumulateGrad":
            continue
        seen += 1
        picked = _picked_entry(*edge, batch_size)
        if picked is not None:
            samples.add(picked)
        elif is_output(edge):
            return None
        else:
            pending += edge[0].next_functions
    return samples.pop() if len(samples) == 1 and not pending else None


def _picked_entry(node: Any, output_nr: int, batch_size: int) -> int | None:
    """Return the entry that a node picks of B: of any axis, or of a piece of the first one; None where it does not."""
    step, _ = _kinds.get(type(node)) or _kind_of(node)
    if step not in (_selected, _cut, _indexed, _chosen) or node.next_functions[0][0] is None:
        return None
    sizes = _torch.shape_of(*node.next_functions[0])
    axis = _axes([_torch.saved(node, "dim")], len(sizes))[0] if step is _selected else 0
    if sizes[axis] != batch_size:
        return None
    rows = step(SampleAxis(axis, 1, batch_size, 1), node, output_nr)
    return None if rows is None or rows.order is None or rows.order.numel() != 1 else int(rows.order[0])


def sample_picked(rows: SampleAxis, way: Sequence[_Edge]) -> int | None:
    """Return the one sample whose rows are left on a way, from a value with these rows on; None where others are."""
    for came, (node, number) in pairwise(way):
        step, _ = _kinds.get(type(node)) or _kind_of(node)
        after = (step or partial(_through_operation, came))(rows, node, number)
        if after is None or after is LOST:
            return None
        rows = after
        if rows.order is not None and rows.order.numel() == 1:
            return int(rows.order[0])
    return None


def leads_to(tensor: Tensor, anchor: Tensor) -> bool:
    """Return whether a captured operation, and with it the anchor, is near a layer's input in the graph behind it."""
    # False also where the search was given up: then an edge too many does no harm.
    # Nearly always it is found by way of the first parents, which are looked at first.
    pending: list[Any] = [tensor.grad_fn]
    seen = 0
    while pending and seen < _MAX_NODES:
        node = pending.pop()
        if node is None:
            continue
        if USE_KEY in node.metadata or _torch.leaf_of(node) is anchor:
            return True
        seen += 1
        pending += [following for following, _ in reversed(node.next_functions)]
    return False
