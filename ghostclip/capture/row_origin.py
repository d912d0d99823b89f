"""Row origins: gathered rows followed back through the autograd graph to the samples they came from.

A mixture of experts hands each expert some rows of the batch (``x[token_idx]``). How many rows arrive says nothing
about whose they are; the index that picked them does, and autograd keeps it. The walk goes from a layer's input up to
the nearest captured layer and looks only at nodes that select rows.
"""

from collections.abc import Callable
from math import gcd, prod
from typing import Any, Final

import torch
from torch import Tensor

from ghostclip import _torch

_MAX_NODES = 256
METADATA_KEY = "ghostclip_use"
# On a node whose output's rows are known: (axis, sample of every row along it).
ROWS_KEY = "ghostclip_rows"
# The index by which a node picks rows, or one or none for each axis, as autograd saves it: activation checkpointing
# drops what the node itself saved until the backward.
INDEX_KEY = "ghostclip_index"
# Nodes that may put rows into another order, or hold fewer or more of them.
_SELECTING: Final = frozenset(
    {
        "_RecurrenceBackward", "CatBackward0", "StackBackward0", "SelectBackward0", "IndexBackward0",
        "IndexSelectBackward0", "GatherBackward0", "SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0",
        "UnbindBackward0", "FlipBackward0", "RollBackward0",
    }
)  # fmt: skip
# Nodes that give rows the places that something outside the graph says: the left factor of a product, an index.
_PLACING: Final = frozenset(
    {"MmBackward0", "BmmBackward0", "IndexPutBackward0", "IndexCopyBackward0", "IndexAddBackward0", "ScatterBackward0"}
)
_VIEWS: Final = frozenset({"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"})
_LEAVES: Final = frozenset({"AccumulateGrad", "torch::autograd::AccumulateGrad"})
# Its output has the rows of padded sequences in another order, which is noted on it by who sees it made.
_PACKED: Final = frozenset({"PackPaddedSequenceBackward0"})
# What a node tells of rows, by its class: they pass, they may be moved, a view may have folded them, or they are given
# places where the left factor is outside the graph.
_PASS, _MOVE, _FOLD, _PLACE = range(4)
_kinds: dict[type, int] = {}
# Parents of a normalisation, of which the two last are parameters.
_OF_A_NORM: Final = 3
# Stands for an order that is not known.
UNKNOWN_ORDER: Final = torch.empty(0, dtype=torch.int64)
# A node's name is made anew each time it is asked for; its class tells the same.
_names: dict[type, str] = {}
# Classes of nodes that `note` has left something on. A node makes its notes when they are first asked for, which takes
# longer than going on to the next one.
_noted_kinds: set[type] = set()


def note(node: Any, key: str, value: Any) -> None:
    """Store a value in a node's metadata: under `METADATA_KEY` its use, under `ROWS_KEY` its rows."""
    _noted_kinds.add(type(node))
    node.metadata[key] = value


def _index_of(node: Any, name: str) -> Any:
    """Return the index, or the indices, by which a node picks rows: as it was noted, or as the node saved it."""
    return node.metadata[INDEX_KEY] if INDEX_KEY in node.metadata else _torch.saved(node, name)


def _name_of(node: Any) -> str:
    kind = type(node)
    name = _names.get(kind)
    if name is None:
        name = _names[kind] = node.name()
    return name


def _name_is(node: Any, names: frozenset[str]) -> bool:
    return _name_of(node) in names


def _kind_of(node: Any) -> int:
    name = _name_of(node)
    if name in _SELECTING or name in _PACKED or name in _LEAVES:
        kind = _MOVE
    else:
        kind = _FOLD if name in _VIEWS else _PLACE if name in _PLACING else _PASS
    _kinds[type(node)] = kind
    return kind


def straight_behind(node: Any, rows: int | None) -> tuple[bool, bool]:
    """Search the nearest captured operation along first parents, the common case of two questions at once."""
    # `rows`: entries of the input's first axis, if any. The first answer is True only where `origin_of_rows` along axis
    # 0 is None: no node on the way moves rows, or says what they are. The second one is True only where `leads_to` is.
    # Where either is False it takes a closer look.
    in_order = node is None or rows is None
    for _ in range(_MAX_NODES):
        if node is None:
            break
        kind = type(node)
        if kind in _noted_kinds:
            notes = node.metadata
            use = notes.get(METADATA_KEY)
            if use is not None:
                return in_order or use.gathers_nothing, True
            if not in_order and ROWS_KEY in notes:
                break
        edges = node.next_functions
        parent = edges[0][0] if edges else None
        if not in_order and not (len(edges) == 1 and _kinds.get(kind) == _PASS and parent is not None):
            assert rows is not None, "a tensor without axes has no rows to be out of order"
            passed = None if parent is None else _passed(node, edges, rows)
            if passed is None:
                break
            in_order = not passed
        node = parent
    return False, False


def _passed(node: Any, edges: Any, rows: int) -> bool | None:
    """Return whether rows come from the first of a node's parents as they are."""
    # False where they come from none, as there are other numbers of them; None where it takes a closer look.
    kind = _kinds.get(type(node))
    if kind is None:
        kind = _kind_of(node)
    if kind == _MOVE:
        return None
    if kind == _FOLD:
        before = _torch.sizes_before_view(node)
        # A leading axis of one entry may stand before rows that were selected, a shorter one before the samples' own.
        return None if before and before[0] < rows else bool(before) and before[0] == rows
    if len(edges) == 1 or (len(edges) == _OF_A_NORM and edges[1][0] is edges[2][0] is None):
        return True
    shape = _torch.outputs_of(edges[0][0])[edges[0][1]].shape
    return True if shape and shape[0] == rows else None


def origin_of_rows(x: Tensor, axis: int, batch_size: int, expected_axis: int) -> Tensor | None:
    """Return the sample of every row of a layer's input along an axis, if rows were selected on the way to it."""
    # None when no selection was found, `UNKNOWN_ORDER` where rows were put into an order that nobody noted.
    if x.grad_fn is None or axis != 0 or x.dim() == 0:
        return None
    return _samples(x.grad_fn, x.output_nr, x.shape[0], batch_size, expected_axis)


def _samples(  # noqa: C901 - what each kind of node does to rows
    node: Any, output_nr: int, rows: int, batch_size: int, expected_axis: int
) -> Tensor | None:
    for _ in range(_MAX_NODES):
        name = _name_of(node)
        if node.metadata or name in _PACKED:
            is_known, samples = _noted(node, rows)
            if is_known:
                return samples
        if name in _SELECTING:
            if output_nr > 0 and name == "_RecurrenceBackward":
                return _of_first_step(node, rows, batch_size, expected_axis)
            joined = _joined(node, rows, batch_size, expected_axis)
            if joined is not None:
                return joined
            selection = _selection(node, output_nr, rows)
            if selection is not None:
                index, parent_rows = selection
                parent = _parent_samples(node, parent_rows, batch_size, expected_axis)
                return parent if parent is None or parent is UNKNOWN_ORDER else parent.to(index.device)[index]
        if name in _PLACING and _places_all(node, name, rows):
            return UNKNOWN_ORDER
        if name in _VIEWS:
            sizes = tuple(_torch.saved(node, "self_sym_sizes"))
            known = _of_one_block(node, rows, batch_size, expected_axis) if sizes[:2] == (1, rows) else None
            known = _between(node, sizes, rows, batch_size, expected_axis) if known is None else known
            if known is not None or sizes[:2] == (1, rows):
                return known
        following = _same_rows(node, name, rows)
        if following is None:
            return None
        node, output_nr = following
    return None


def _between(node: Any, sizes: tuple[int, ...], rows: int, batch_size: int, expected_axis: int) -> Tensor | None:
    """Return the sample of every row of a view that folded leading axes, where samples lie behind the first of them."""
    # A batch that was folded, (B·C, T), and turned, (T, B·C), as torch's attention has it: in a view of that, samples
    # alternate in runs of C rows. None where they may lie first, or alternate row by row: sizes tell of those.
    folded, left = list[int](), rows
    for size in sizes:
        # Of the last one a part may have become features: heads.
        folded.append(gcd(size, left))
        left //= folded[-1]
        if left == 1 or folded[-1] != size:
            break
    behind = [axis for axis in range(1, len(folded)) if batch_size > 1 and folded[axis] % batch_size == 0]
    if left > 1 or not behind:
        return None
    if len(behind) > 1:
        return UNKNOWN_ORDER if sizes[0] % batch_size else None
    run = prod(folded[behind[0] :]) // batch_size
    if run == 1 or sizes[0] == 1:
        return None if run == 1 else UNKNOWN_ORDER
    if sizes[0] == batch_size and not expected_axis:
        axis = _axis_of_samples(node.next_functions[0])
        if axis != 1:
            # That samples lie first is said where nobody knows, so that it is proved of these rows by themselves.
            return None if axis == 0 else torch.arange(rows) // (rows // batch_size)
    return torch.arange(rows) // run % batch_size


def _places_all(node: Any, name: str, rows: int) -> bool:
    """Return whether all rows of a node's output are rows of its second operand, in an order that is not known."""
    edges = node.next_functions
    if len(edges) < 2 or edges[0][0] is not None or edges[-1][0] is None:
        return False
    placed, number = edges[-1]
    shape = _torch.outputs_of(placed)[number].shape
    return len(shape) > 1 and shape[1 if name == "BmmBackward0" else 0] == rows


def _noted(node: Any, rows: int) -> tuple[bool, Tensor | None]:
    """Return whether a node has a note on its output's rows, and what `origin_of_rows` then returns."""
    notes = node.metadata
    use, marked = notes.get(METADATA_KEY), notes.get(ROWS_KEY)
    if use is not None:
        return True, use.gathered_samples(rows)
    if marked is not None:
        return True, marked[1] if marked[0] == 0 and marked[1].numel() == rows else None
    return (True, UNKNOWN_ORDER) if _name_is(node, _PACKED) else (False, None)


def columns_of(x: Tensor, axis: int, batch_size: int, expected_axis: int) -> Tensor | None:
    """Return the sample of every sequence of a padded batch in the graph that is about to be packed."""
    # None when there are not as many as samples and no selection was found.
    node: Any = x.grad_fn
    if axis == 0:
        gathered = origin_of_rows(x, 0, batch_size, expected_axis)
    else:
        sorted_here = node is not None and node.name() == "IndexSelectBackward0" and _torch.saved(node, "dim") == axis
        gathered = (
            _index_of(node, "index")
            if sorted_here and _torch.saved(node, "self_sym_sizes")[axis] == batch_size
            else None
        )
    if gathered is None and x.shape[axis] == batch_size:
        return torch.arange(batch_size)
    return gathered


def _of_first_step(node: Any, rows: int, batch_size: int, expected_axis: int) -> Tensor | None:
    """Return the samples of a recurrent layer's last states: those of its first step, which all sequences have."""
    gates, number = node.next_functions[0]
    if gates is None:
        return None
    total = _torch.outputs_of(gates)[number].shape[0]
    gathered = _samples(gates, number, total, batch_size, expected_axis)
    return gathered if gathered is None or gathered is UNKNOWN_ORDER else gathered[:rows]


def samples_at(node: Any, output_nr: int, rows: int, batch_size: int, expected_axis: int) -> Tensor | None:
    """Return the sample of every row on axis 0 of a value of the graph, as `origin_of_rows`."""
    samples = _samples(node, output_nr, rows, batch_size, expected_axis)
    return None if samples is UNKNOWN_ORDER else samples


def only_sample(node: Any, output_nr: int, batch_size: int, is_output: Callable[[tuple[Any, int]], bool]) -> int | None:
    """Return the one sample that a value was computed from, where each path to the model's outputs picks its rows."""
    # None where there are several, or where that cannot be told.
    samples: set[int] = set()
    pending, seen = [(node, output_nr)], 0
    while pending and seen < _MAX_NODES:
        edge = pending.pop()
        if edge[0] is None or _name_is(edge[0], _LEAVES):
            continue
        seen += 1
        picked = _picked(*edge, batch_size)
        if picked is not None:
            samples.add(picked)
        elif is_output(edge):
            return None
        else:
            pending += edge[0].next_functions
    return samples.pop() if len(samples) == 1 and not pending else None


def _picked(node: Any, output_nr: int, batch_size: int) -> int | None:
    """Return the entry of an axis of B entries that a node picks."""
    if not _name_is(node, _SELECTING):
        return None
    name = node.name()
    sizes = () if name == "UnbindBackward0" else _torch.saved_or(node, "self_sym_sizes", ())
    if name == "UnbindBackward0":
        return output_nr if len(_torch.outputs_of(node)) == batch_size else None
    if name == "SelectBackward0":
        index = _torch.signed(_torch.saved(node, "index"))
        return index % batch_size if sizes[_torch.saved(node, "dim")] == batch_size else None
    rows = _torch.outputs_of(node)[output_nr].shape
    if not sizes or not rows or sizes[0] != batch_size or rows[0] != 1:
        return None
    selection = _selection(node, output_nr, 1)
    return int(selection[0][0]) if selection is not None and selection[0].numel() == 1 else None


def leads_to(tensor: Tensor, anchor: Tensor) -> bool:
    """Return whether a captured operation, and with it the anchor, is near a layer's input in the graph behind it."""
    # False also where the search was given up: then an edge too many does no harm.
    node: Any = tensor.grad_fn
    # Nearly always it is found by way of the first parents.
    for _ in range(_MAX_NODES):
        if node is None:
            break
        if METADATA_KEY in node.metadata:
            return True
        edges = node.next_functions
        node = edges[0][0] if edges else None
    pending, seen = [tensor.grad_fn], 0
    while pending and seen < _MAX_NODES:
        node = pending.pop()
        if node is None:
            continue
        if METADATA_KEY in node.metadata or _torch.leaf_of(node) is anchor:
            return True
        seen += 1
        pending += [following for following, _ in reversed(node.next_functions)]
    return False


def _parent_samples(node: Any, rows: int, batch_size: int, expected_axis: int) -> Tensor | None:
    parent, parent_nr = node.next_functions[0]
    if parent is not None:
        gathered = _samples(parent, parent_nr, rows, batch_size, expected_axis)
        if gathered is not None:
            return gathered
    if batch_size <= 0 or rows % batch_size:
        return None
    index = torch.arange(rows)
    if rows > batch_size and _alternate(node.next_functions[0], rows, batch_size, expected_axis):
        return index % batch_size
    return index // (rows // batch_size)


def _alternate(edge: tuple[Any, int], rows: int, batch_size: int, expected_axis: int) -> bool:
    """Return whether samples alternate in folded rows: the view that folded them says which axis came first."""
    alternate = expected_axis == 1
    for _ in range(_MAX_NODES):
        node = edge[0]
        if node is None:
            break
        use = node.metadata.get(METADATA_KEY)
        if use is not None:
            if use.site.chosen is not None and use.site.chosen[0] in ("major", "minor"):
                return bool(use.site.chosen[0] == "minor")
            edge = use.behind, 0
            continue
        sizes = tuple(_torch.saved(node, "self_sym_sizes")) if _name_is(node, _VIEWS) else ()
        if sizes and sizes[0] != rows:
            if len(sizes) < 2 or sizes[0] * sizes[1] != rows or batch_size not in sizes[:2]:
                break
            if sizes[0] != sizes[1]:
                return sizes[1] == batch_size
            axis = _axis_of_samples(node.next_functions[0])
            return alternate if axis is None else axis == 1
        following = _same_rows(node, _name_of(node), rows)
        if following is None:
            break
        edge = following
    return alternate


def _axis_of_samples(edge: tuple[Any, int]) -> int | None:
    """Return which of a value's first two axes has samples, by the nearest layer behind it that knows."""
    axes = [0, 1]
    for _ in range(_MAX_NODES):
        node = edge[0]
        if node is None or edge[1] >= len(_torch.outputs_of(node)):
            break
        use, name = node.metadata.get(METADATA_KEY), node.name()
        shape = _torch.outputs_of(node)[edge[1]].shape
        if use is not None:
            known = {row_map.axis for row_map in use.maps} if use.site.chosen is None else {use.site.chosen[1]}
            return axes.index(known.pop()) if len(known) == 1 and known <= set(axes) else None
        if name in ("TransposeBackward0", "PermuteBackward0"):
            order = list(range(len(shape)))
            if name == "PermuteBackward0":
                order = [_torch.signed(axis) % len(shape) for axis in _torch.saved(node, "dims")]
            else:
                one, two = (
                    _torch.signed(axis) % len(shape)
                    for axis in (_torch.saved(node, "dim0"), _torch.saved(node, "dim1"))
                )
                order[one], order[two] = order[two], order[one]
            axes, edge = [order[axis] for axis in axes], node.next_functions[0]
            continue
        behind = [e for e in node.next_functions if e[0] is not None and not _name_is(e[0], _LEAVES)]
        if name in ("UnbindBackward0", "SelectBackward0") and _torch.saved(node, "dim") == 0 and behind:
            axes, edge = [axis + 1 for axis in axes], behind[0]
            continue
        alike = [e for e in behind if _torch.outputs_of(e[0])[e[1]].shape == shape]
        if not alike and len(behind) == 1:
            # Heads and other features are folded and cut behind the first two axes.
            alike = [e for e in behind if _torch.outputs_of(e[0])[e[1]].shape[:2] == shape[:2] and {*axes} == {0, 1}]
        if not alike:
            return _unfolded_axis(name, shape, behind, axes)
        edge = alike[0]
    return None


def _unfolded_axis(name: str, shape: Any, behind: list[tuple[Any, int]], axes: list[int]) -> int | None:
    """Return which of two axes has samples where a view has just unfolded the rows of a layer."""
    for node, number in behind if name in _VIEWS and len(behind) == 1 and {*axes} == {0, 1} else ():
        use = node.metadata.get(METADATA_KEY)
        if use is not None and use.site.chosen is not None and not use.site.chosen[1]:
            rows = _torch.outputs_of(node)[number].shape[0]
            # A batch that has its samples first is folded sample by sample, any other one otherwise.
            return axes.index(0 if use.site.chosen[0] == "major" else 1) if rows == shape[0] * shape[1] else None
    return None


def _joined(node: Any, rows: int, batch_size: int, expected_axis: int) -> Tensor | None:
    """Return the samples of parts that were selected from the batch and concatenated."""
    if node.name() not in ("CatBackward0", "StackBackward0") or _torch.saved(node, "dim") != 0:
        return None
    parts: list[Tensor] = []
    for part, number in node.next_functions:
        if part is None:
            # A constant, which may have no rows: what is left of a batch that is run to its longest sample's end.
            continue
        one = _part(part, number, node.name(), batch_size, expected_axis)
        if one is None:
            return None
        parts.append(one.cpu())
    gathered = torch.cat(parts) if parts else None
    return gathered if gathered is not None and gathered.numel() == rows else None


def _part(part: Any, number: int, joiner: str, batch_size: int, expected_axis: int) -> Tensor | None:
    if joiner == "CatBackward0":
        shape = _torch.outputs_of(part)[number].shape
        return _samples(part, number, shape[0], batch_size, expected_axis) if len(shape) else None
    if part.name() == "UnbindBackward0" and _torch.saved(part, "dim") == 0:
        parent = _parent_samples(part, len(_torch.outputs_of(part)), batch_size, expected_axis)
        return None if parent is None or parent is UNKNOWN_ORDER else parent[number][None]
    if part.name() != "SelectBackward0" or _torch.saved(part, "dim") != 0:
        return None
    size = _torch.saved(part, "self_sym_sizes")[0]
    parent = _parent_samples(part, size, batch_size, expected_axis)
    if parent is None or parent is UNKNOWN_ORDER:
        return None
    return parent[_torch.signed(_torch.saved(part, "index")) % size :][:1]


def _selection(node: Any, output_nr: int, rows: int) -> tuple[Tensor, int] | None:
    """Return (index into the parent's rows, number of the parent's rows) if the node selects rows."""
    name = node.name()
    if name == "IndexBackward0":
        return _advanced_index(node, rows)
    if name == "IndexSelectBackward0" and _torch.saved(node, "dim") == 0:
        return _index_of(node, "index"), _torch.saved(node, "self_sym_sizes")[0]
    if name == "GatherBackward0" and _torch.saved(node, "dim") == 0:
        return _gathered(node)
    if name in ("FlipBackward0", "RollBackward0"):
        return _turned(node, name, rows)
    if name in ("SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0") and _torch.saved(node, "dim") == 0:
        size = _torch.saved(node, "self_sym_sizes")[0]
        start = _start(node, name, output_nr)
        step = _torch.saved(node, "step") if name == "SliceBackward0" else 1
        index = torch.arange(size)[start::step][:rows]
        return None if rows == size else (index, size)
    return None


def _turned(node: Any, name: str, rows: int) -> tuple[Tensor, int] | None:
    """Return, as `_selection`, the index of flipped or rolled rows; None where rows stay in place."""
    flips = name == "FlipBackward0"
    axes = [_torch.signed(axis) for axis in _torch.saved(node, "dims")]
    dims = len(_torch.outputs_of(node)[0].shape)
    index = torch.arange(rows)
    turned = index
    for number, axis in enumerate(axes):
        if axis % dims == 0:
            turned = turned.flip(0) if flips else turned.roll(_torch.signed(_torch.saved(node, "shifts")[number]))
    return None if torch.equal(turned, index) else (turned, rows)


def _advanced_index(node: Any, rows: int) -> tuple[Tensor, int] | None:
    index = _index_of(node, "indices")[0]
    if index is None:
        return None
    sizes = _torch.saved(node, "self_sym_sizes")
    if index.dtype in (torch.bool, torch.uint8):
        index = index.nonzero()[:, 0]
    if index.dim() != 1 or index.numel() != rows:
        return None
    return index % sizes[0], sizes[0]


def _of_one_block(view: Any, rows: int, batch_size: int, expected_axis: int) -> Tensor | None:
    """Return the samples of rows that were selected behind a leading axis of size 1: ``h[None, index]``."""
    node = view.next_functions[0][0]
    if node is not None and node.name() == "BmmBackward0" and node.next_functions[0][0] is None:
        return UNKNOWN_ORDER
    if node is None or node.name() != "IndexBackward0" or _noted(node, rows)[0]:
        return None
    leading, index, *others = (*_index_of(node, "indices"), None, None)[:3]
    sizes = _torch.saved(node, "self_sym_sizes")
    unsqueezed = node.next_functions[0][0]
    only_rows = leading is None and index is not None and others == [None] and index.dim() == 1
    if (
        not only_rows
        or unsqueezed is None
        or unsqueezed.name() != "UnsqueezeBackward0"
        or _torch.saved(unsqueezed, "dim") != 0
    ):
        return None
    if index.dtype in (torch.bool, torch.uint8):
        index = index.nonzero()[:, 0]
    parent = _parent_samples(unsqueezed, sizes[1], batch_size, expected_axis) if index.numel() == rows else None
    return None if parent is None else parent.to(index.device)[index % sizes[1]]


def _gathered(node: Any) -> tuple[Tensor, int] | None:
    index = _index_of(node, "index")
    parent, number = node.next_functions[0]
    first = index.flatten(1)[:, :1] if index.dim() > 1 else index[:, None]
    if parent is None or not bool((index.reshape(len(index), -1) == first).all()):
        return None
    return first[:, 0], _torch.outputs_of(parent)[number].shape[0]


def _start(node: Any, name: str, output_nr: int) -> int:
    if name == "SliceBackward0":
        return int(_torch.saved(node, "start"))
    if name == "SplitBackward0":
        return int(_torch.saved(node, "split_size")) * output_nr
    return int(sum(_torch.saved(node, "split_sizes")[:output_nr]))


def _same_rows(node: Any, name: str, rows: int) -> tuple[Any, int] | None:
    if name == "SelectBackward0" and _torch.saved(node, "dim") == 0:
        # The rows lay on the second axis; of a stack, they are those of one part.
        stack, _ = node.next_functions[0]
        stacked = stack is not None and stack.name() == "StackBackward0" and _torch.saved(stack, "dim") == 0
        index = _torch.signed(_torch.saved(node, "index"))
        part = stack.next_functions[index] if stacked else (None, 0)
        return None if part[0] is None else part
    # What a view saved of its input's sizes costs less than asking the node that made it.
    if name in _VIEWS and tuple(_torch.saved(node, "self_sym_sizes")[:1]) != (rows,):
        return None
    for following, number in node.next_functions:
        if following is None or _name_of(following) in _LEAVES:
            continue
        shape = _torch.outputs_of(following)[number].shape
        if shape and shape[0] == rows:
            return following, number
    return None
