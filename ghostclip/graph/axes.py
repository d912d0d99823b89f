"""The sample axis of every value of a graph: the one that grows when the batch does.

The batch is traced twice, the second time with one sample repeated, and the two graphs are compared node by node. An
axis that has grown holds samples. Where it holds several rows of each (``view(B * T, ...)``), how they lie follows from
the order of the elements. Values that depend on samples and have no such axis have lost it: a gradient of a parameter
may (it is a sum over samples), a value that samples' losses depend on must not.

Shape letters: B samples.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

from torch import Tensor, fx

from ghostclip import _torch
from ghostclip.graph.trace import Inputs, NoGraphError, Traced, operation, outputs_of


class SampleLayout(NamedTuple):
    """The rows of samples in a value: row ``(o · B + b) · inner + i`` along the axis belongs to sample b."""

    axis: int
    # rows of a sample that lie B·inner apart; 0 while no entry depends on a sample, so that their order is all the same
    outer: int = 1
    inner: int = 1  # rows of a sample that are neighbours

    @property
    def rows(self) -> int:
        """Rows of one sample."""
        return max(1, self.outer) * self.inner


@dataclass(frozen=True)
class Axes:
    """Sample axes and dependence on samples of the values of a graph."""

    batch_size: int  # B
    layouts: dict[fx.Node, SampleLayout | None]  # by node with one value; None where it has no sample axis
    depends: frozenset[fx.Node]  # the nodes that depend on samples
    summed: frozenset[fx.Node]  # those among them without a sample axis that lead to a gradient: sums over samples


# Operations that keep the order of elements: an axis in the result is found by it.
_VIEWS: Final = frozenset({"view", "unsafe_view", "reshape", "squeeze", "unsqueeze", "alias", "detach", "clone"})
# Operations whose numbers may follow the batch: they say where something begins or ends, or how much there is.
_PLACES: Final = frozenset({"arange", "slice", "slice_backward", "native_group_norm", "native_group_norm_backward"})
# Operations that let all entries along an axis meet, and the place of that axis among their arguments.
_ALONG: Final = {
    **dict.fromkeys(("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "flip", "sort"), 1),
    **dict.fromkeys(("softmax_backward_data", "log_softmax_backward_data", "topk", "roll"), 2),
}
# Results beside the first that stand for no sample: a number of targets, states of generators.
_ASIDE: Final = ("nll_loss_forward", "nll_loss2d_forward", "scaled_dot_product")
# Operations that take nothing but sizes from what they are given.
SIZES_ALONE: Final = frozenset(
    {
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "zeros_like", "ones_like"),
        *("full_like", "empty_like", "rand_like", "randn_like"),
    }
)
# Operations that take rows by number, with the place of the axis; several axes for the first.
_TAKES: Final = frozenset({"index", "index_select"})


def analysed(traced: Traced, grown: Traced, inputs: Inputs, batch_size: int) -> Axes:
    """Compare the graph of a batch with that of one more sample; return the sample axis of every value."""
    pairs = _paired(traced.graph, grown.graph)
    reader = _Reader(batch_size, pairs, inputs)
    for node in pairs:
        reader.read(node)
    summed = _summed(traced.graph, reader, len(inputs.trainable))
    return Axes(batch_size, reader.layouts, frozenset(reader.depends), summed)


def _paired(graph: fx.GraphModule, grown: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Return each node of a graph with its counterpart in the graph of one more sample."""
    nodes, other = list(graph.graph.nodes), list(grown.graph.nodes)
    alike = len(nodes) == len(other) and all(
        (one.op, str(one.target)) == (two.op, str(two.target)) or one.op in ("placeholder", "get_attr")
        for one, two in zip(nodes, other, strict=True)
    )
    if not alike:
        raise NoGraphError("with one sample more it runs other operations, so that its sample axes are not known")
    return dict(zip(nodes, other, strict=True))


def values_of(node: fx.Node) -> list[Tensor]:
    """Return the fake tensors of a node's values."""
    return [leaf for leaf in _torch.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node with one value."""
    return tuple(node.meta["val"].shape)


def first_of(node: fx.Node) -> fx.Node:
    """Return the node that is another one's first argument."""
    first: Any = node.args[0]
    return first


def named(node: fx.Node) -> str:
    """Return the name of a node for errors."""
    # Its operation, its shapes, and the module it runs in where that is known.
    shapes = ", ".join(str(tuple(value.shape)) for value in values_of(node))
    stack = node.meta.get("nn_module_stack")
    module = "" if not stack else f" in {next(reversed(stack.values()))[0]}"
    return f"{operation(node) or node.name} of shape {shapes}{module}"


class _Reader:
    """Finds, node by node in order, where samples lie and what depends on them."""

    def __init__(self, batch_size: int, pairs: dict[fx.Node, fx.Node], inputs: Inputs) -> None:
        """Begin with the sample axes of the inputs."""
        self.layouts: dict[fx.Node, SampleLayout | None] = {}
        self.depends: set[fx.Node] = set()
        self._batch_size, self._pairs = batch_size, pairs
        axes = [None] * inputs.fixed + list(inputs.in_batch)
        self._given = {
            node: axis
            for node, axis in zip((n for n in pairs if n.op == "placeholder"), axes, strict=False)
            if axis is not None
        }

    def read(self, node: fx.Node) -> None:
        """Find a node's sample axis, and whether it depends on samples."""
        value = node.meta.get("val")
        if node.op == "output" or value is None:
            return
        self._compare_numbers(node)
        if self._depends(node, value):
            self.depends.add(node)
        if isinstance(value, Tensor):
            self.layouts[node] = self._layout(node, value)
            self._refuse_along(node)

    def _depends(self, node: fx.Node, value: Any) -> bool:
        """Return whether a node's value depends on samples."""
        if node.op != "call_function":
            return node in self._given
        if node.target is operator.getitem:
            source = first_of(node)
            aside = node.args[1] != 0 and operation(source).startswith(_ASIDE)
            empty = isinstance(value, Tensor) and (value.numel() == 0 or (aside and value.dim() == 0))
            return not empty and source in self.depends
        if operation(node) in SIZES_ALONE:
            return False
        return any(parent in self.depends for parent in node.all_input_nodes)

    def _compare_numbers(self, node: fx.Node) -> None:
        """Refuse numbers that follow the batch size: a sample's loss would depend on the number of samples."""
        name = operation(node)
        for one, other in zip(_numbers(node), _numbers(self._pairs[node]), strict=False):
            if one != other and name not in _PLACES:
                raise NoGraphError(f"{named(node)} is given {one} where one sample more makes it {other}: it follows B")

    def _layout(self, node: fx.Node, value: Tensor) -> SampleLayout | None:
        """Return where samples lie in a value: along the axis that grows with one more sample; None without one."""
        shape, grown = tuple(value.shape), tuple(self._pairs[node].meta["val"].shape)
        axes = [axis for axis, size in enumerate(shape) if len(grown) == len(shape) and grown[axis] != size]
        if not axes and shape == grown:
            return None
        axis = axes[0] if len(axes) == 1 else -1
        rows = grown[axis] - shape[axis] if axis >= 0 else 0
        if rows < 1 or shape[axis] != rows * self._batch_size:
            raise NoGraphError(
                f"{named(node)} has shape {grown} with one sample more: two axes hold samples, or a part"
            )
        # Of no entries none lies anywhere.
        return self._folded(node, axis, rows) if value.numel() else SampleLayout(axis, 0, rows)

    def _folded(self, node: fx.Node, axis: int, rows: int) -> SampleLayout:
        """Return how the rows of a sample lie along an axis."""
        name = operation(node)
        source = first_of(node) if node.target is operator.getitem else node
        above = [(parent, self.layouts.get(parent)) for parent in source.all_input_nodes]
        known = [(parent, layout) for parent, layout in above if layout is not None]
        if name in _VIEWS and len(known) == 1 and known[0][1].outer:
            return _seen_through(node, axis, rows, *known[0], batch_size=self._batch_size)
        if name in _TAKES:
            self._refuse_taken(node, name)
        if rows == 1:
            return SampleLayout(axis)
        if name == "cat" and all(layout is not None for _, layout in above):
            inside = {layout.inner for _, layout in known if layout.axis == axis}
            if len(inside) == 1 and len(known) == len(_torch.tree_leaves(node.args[0])):
                return SampleLayout(axis, rows // (inner := inside.pop()), inner)
        if name == "repeat" and len(known) == 1 and known[0][1].outer and known[0][1].axis == axis:
            times = rows // known[0][1].rows
            return SampleLayout(axis, times * known[0][1].outer, known[0][1].inner)
        folds = {(layout.outer, layout.inner) for _, layout in known if layout.rows == rows and layout.outer}
        if not folds and node not in self.depends:
            return SampleLayout(axis, 0, rows)
        if len(folds) != 1:
            raise NoGraphError(f"{named(node)}: how the {rows} rows of each sample lie along axis {axis} is not known")
        return SampleLayout(axis, *folds.pop())

    def _refuse_taken(self, node: fx.Node, name: str) -> None:
        """Refuse rows that are picked along the sample axis by values that depend on samples."""
        source = self.layouts.get(first_of(node))
        if source is None:
            return
        arguments: Any = node.args[1:]
        picked: Any = arguments[0] if name == "index" else [None] * arguments[0] + [arguments[1]]
        if source.axis < len(picked) and picked[source.axis] in self.depends:
            raise NoGraphError(f"{named(node)} gathers rows across samples by their values")

    def _refuse_along(self, node: fx.Node) -> None:
        """Refuse operations along the sample axis."""
        name = operation(node)
        layout = self.layouts[node]
        if layout is None or name not in _ALONG or len(node.args) <= _ALONG[name]:
            return
        along: Any = node.args[_ALONG[name]]
        axes = along if isinstance(along, (list, tuple)) else [along]
        if layout.axis in [axis % len(shape_of(node)) for axis in axes if isinstance(axis, int)]:
            raise NoGraphError(f"{named(node)} runs along the samples: they mix")


def _numbers(node: fx.Node) -> list[Any]:
    """Return the numbers among a node's arguments that are no sizes in a list."""
    return [item for item in (*node.args, *node.kwargs.values()) if type(item) in (int, float)]


def _seen_through(
    node: fx.Node, axis: int, rows: int, source: fx.Node, layout: SampleLayout, *, batch_size: int
) -> SampleLayout:
    """Return the sample layout of a view from that of its base."""
    before, after = shape_of(source), shape_of(node)
    outer = prod(before[: layout.axis]) * layout.outer
    lead = prod(after[:axis])
    inner = layout.inner * prod(before[layout.axis + 1 :])
    trail = prod(after[axis + 1 :])
    if outer % lead or inner % trail or (outer // lead) * (inner // trail) != rows:
        raise NoGraphError(f"{named(node)} puts samples' entries into each other's places (axis {axis}): they mix")
    assert after[axis] == rows * batch_size
    return SampleLayout(axis, outer // lead, inner // trail)


def _summed(graph: fx.GraphModule, reader: _Reader, trainable: int) -> frozenset[fx.Node]:
    """Return the values that are sums over samples and lead to gradients; refuse others that lose the sample axis."""
    ends = outputs_of(graph)[: 1 + trainable]
    summed = frozenset(_ancestors(ends[1:], lambda node: node in reader.depends and not _has_axis(node, reader)))
    of_losses = set(_ancestors(ends[:1]))
    for node in _ancestors(ends):
        if node not in reader.depends or node not in reader.layouts or reader.layouts[node] is not None:
            continue
        for user in node.users:
            if user.op != "output" and user not in summed and operation(user) not in SIZES_ALONE:
                raise NoGraphError(f"{named(node)} loses the sample axis, and {named(user)} depends on it: samples mix")
        if node in of_losses or node not in summed:
            raise NoGraphError(f"{named(node)} loses the sample axis, and losses depend on it: samples mix")
    return summed


def _has_axis(node: fx.Node, reader: _Reader) -> bool:
    """Return whether a value has a sample axis; of several results, whether the operands have one."""
    if node in reader.layouts:
        return reader.layouts[node] is not None
    return any(_has_axis(parent, reader) for parent in node.all_input_nodes if parent in reader.layouts)


def _ancestors(ends: Sequence[Any], through: Callable[[fx.Node], bool] = lambda node: True) -> Iterator[fx.Node]:
    """Yield the nodes that lead to the ends through nodes of some kind, once each, the ends among them."""
    pending, seen = [end for end in ends if end is not None], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node not in seen and through(node):
            seen.add(node)
            yield node
            pending += node.all_input_nodes
