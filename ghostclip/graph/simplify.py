"""Simpler graphs of the same values: what a compiler would follow, compute or copy more than once is there once.

Values alone are looked at, not how they lie in memory: that the compiler decides.

*Regions* are parts of a private step that recur from layer to layer (the norms of a weight), compiled once. While the
step is traced, a call of a region is one operation of our own: it takes tensors and the region's number, and is known
by the shapes of its results alone. In the end the region is a graph inside the graph, and called as often.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import Any, Final, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

from ghostclip import _torch
from ghostclip.graph.axes import first_of, shape_of
from ghostclip.graph.trace import operation

_SAME: Final = frozenset({"detach", "alias"})
_RESHAPES: Final = frozenset({"view", "unsafe_view", "reshape", "squeeze", "unsqueeze"})
_TURNS: Final = frozenset({"t", "transpose", "permute"})
_VIEWS: Final = _SAME | _RESHAPES | _TURNS | {"slice", "select", "expand", "split", "split_with_sizes", "unbind"}


def simplified(graph: fx.GraphModule) -> fx.GraphModule:
    """Return the graph simplified in place, as it is compiled."""
    for node in list(graph.graph.nodes):
        if operation(node) == "addmm":
            _bias_apart(graph.graph, node)
    for node in list(graph.graph.nodes):
        _from_what_was_computed(node)
        _in_one_copy(node)
    graph.graph.eliminate_dead_code()
    _once_each(graph.graph)
    for node in list(graph.graph.nodes):
        # What a view was of may lie otherwise once it is computed.
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
        elif operation(node) == "sum":
            _widened(graph.graph, node)
    graph.recompile()
    return graph


def _from_what_was_computed(node: fx.Node) -> None:
    """Let each view start from the computed value: a compiler follows each step of a chain several times."""
    name = operation(node)
    if name in _SAME:
        _replaced(node, first_of(node))
    elif name in _RESHAPES:
        source, shape = first_of(node), shape_of(node)
        if operation(source) in _RESHAPES:
            source = first_of(source)
            _becomes(node, torch.ops.aten.reshape.default, source, list(shape))
        if shape == shape_of(source):
            _replaced(node, source)
    elif name in _TURNS:
        axes, source = _axes_of(node), first_of(node)
        inner = first_of(source) if operation(source) == "clone" else source
        if operation(inner) in _TURNS:
            both = [_axes_of(inner)[axis] for axis in axes]
            # A copy between the two stays, unless what it was made for is undone.
            if inner is source or both == sorted(both):
                axes, source = both, first_of(inner)
        _becomes(node, torch.ops.aten.permute.default, source, axes)
        if axes == sorted(axes):
            _replaced(node, source)


def _in_one_copy(node: fx.Node) -> None:
    """Let the steps of a sequence be concatenated in the order that is read, instead of a permuted copy afterwards."""
    name = operation(node)
    if name == "cat" and len(pieces := cast("list[fx.Node]", node.args[0])) > 1:
        axis = cast("int", node.args[1]) % len(shape_of(node)) if len(node.args) > 1 else 0
        rest = shape_of(node)[:axis] + shape_of(node)[axis + 1 :]
        whole = [first_of(piece) if operation(piece) in _RESHAPES else piece for piece in pieces]
        if shape_of(node)[axis] == len(pieces) and all(shape_of(piece) == rest for piece in whole):
            _becomes(node, torch.ops.aten.stack.default, whole, axis)
    elif name == "clone" and node.kwargs.get("memory_format") == torch.contiguous_format:
        source = first_of(node)
        if source.meta["val"].is_contiguous() and source.op == "call_function":
            _replaced(node, source)
        elif operation(source) == "permute" and operation(first_of(source)) == "stack":
            pieces, *along = cast("tuple[list[fx.Node], int]", first_of(source).args)
            axes, axis = _axes_of(source), along[0] % len(shape_of(node)) if along else 0
            if [other for other in axes if other != axis] == [other for other in sorted(axes) if other != axis]:
                _becomes(node, torch.ops.aten.stack.default, pieces, axes.index(axis))


def _becomes(node: fx.Node, target: Any, *args: fx.node.Argument) -> None:
    node.target, node.args, node.kwargs = target, args, {}


def _axes_of(node: fx.Node) -> list[int]:
    """Return from which axes those of a transposed tensor come."""
    axes, name = list(range(len(shape_of(node)))), operation(node)
    if name == "permute":
        return [axis % len(axes) for axis in cast("Sequence[int]", node.args[1])]
    if len(axes) > 1:
        one, two = cast("tuple[int, int]", node.args[1:] or (0, 1))
        axes[one], axes[two] = axes[two], axes[one]
    return axes


def _once_each(graph: fx.Graph) -> None:
    """Merge operations on the same values: layers that share an input, or an output's gradient."""
    # Outputs are left as they are: each sum has memory of its own.
    returned = set(graph.output_node().all_input_nodes)
    for node in reversed(graph.nodes):
        if node in returned and (operation(node) in _VIEWS or node.target is operator.getitem):
            returned.update(node.all_input_nodes)
    known: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node in returned or not _torch.is_repeatable(node.target):
            continue
        key = node.target, repr((node.args, node.kwargs))
        same = known.setdefault(key, node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _replaced(node: fx.Node, source: fx.Node) -> None:
    """Replace a node in all but the outputs: an input that is returned is returned as a tensor of its own."""
    node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")


def _bias_apart(graph: fx.Graph, node: fx.Node) -> None:
    """Add a bias where a product is read: by itself, a product on a CPU would be written once more for it."""
    bias, *factors = cast("tuple[fx.Node, ...]", node.args)
    shape, value = shape_of(node), node.meta["val"]
    # Of 16 bits the product would be rounded before the bias is added.
    if node.kwargs or value.device.type != "cpu" or value.element_size() < 4 or shape_of(bias) != shape[1:]:
        return
    with graph.inserting_before(node):
        product = graph.call_function(torch.ops.aten.mm.default, tuple(factors))
        # Inductor puts a sum that stands right behind its product back to where it was.
        reshaped = graph.call_function(torch.ops.aten.reshape.default, (product, [1, *shape]))
        added = graph.call_function(torch.ops.aten.add.Tensor, (reshaped, bias))
    node.target, node.args = torch.ops.aten.reshape.default, (added, list(shape))
    product.meta = dict(node.meta)
    reshaped.meta = added.meta = {**node.meta, "val": value.unsqueeze(0)}


_SHORT: Final = 256
"""Numbers that are added up in float32, at most: Inductor adds up thousands in a row in each lane of a processor, and a
sum of equal numbers comes out a thousand roundings too small, which error bounds do not know of."""


def _widened(graph: fx.Graph, node: fx.Node) -> None:
    """Let a long sum on a CPU run in float64."""
    values = first_of(node).meta["val"], node.meta["val"]
    if any(value.dtype != torch.float32 or value.device.type != "cpu" for value in values):
        return
    if values[0].numel() <= _SHORT * max(1, values[1].numel()):
        return
    with graph.inserting_after(node):
        narrow = graph.call_function(torch.ops.aten.to.dtype, (node, torch.float32))
    node.replace_all_uses_with(narrow, delete_user_cb=lambda user: user is not narrow)
    narrow.meta, node.meta = dict(node.meta), {**node.meta, "val": values[1].double()}
    node.kwargs = {**node.kwargs, "dtype": torch.float64}


_LIBRARY: Final = torch.library.Library("ghostclip", "FRAGMENT")
_LIBRARY.define("region(Tensor[] inputs, int number) -> Tensor[]")
_CALL: Final = torch.ops.ghostclip.region.default
_numbers: Final = count()


class _Region:
    """A function of tensors of one form."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.number = function, next(_numbers)

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of the result, and note its other values."""
        self._leaves, self._spec = _torch.tree_flatten(self._function(*tensors))
        # Of a tuple, and no list, a compiler keeps what is known of its tensors.
        return tuple(leaf for leaf in self._leaves if isinstance(leaf, Tensor))

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """Return the result that has these tensors, once it has run."""
        values = iter(tensors)
        return _torch.tree_unflatten([next(values) if isinstance(x, Tensor) else x for x in self._leaves], self._spec)


_known: Final[WeakValueDictionary[int, _Region]] = WeakValueDictionary()


def _shapes(inputs: Sequence[Tensor], number: int) -> list[Tensor]:
    return [torch.empty_like(result) for result in _known[number].run(*inputs)]


torch.library.register_fake("ghostclip::region", _shapes, lib=_LIBRARY)


class Regions:
    """The regions of one step."""

    def __init__(self) -> None:
        self._regions: dict[Hashable, _Region] = {}

    def call(self, what: Hashable, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Call a region, while tracing."""
        # `what` is equal for functions that do the same with tensors of equal sizes, strides and dtypes. Tensors of the
        # result share no memory, with each other or with the arguments.
        region = self._regions.setdefault(what, _Region(function))
        _known[region.number] = region
        return region.result(_CALL(list(tensors), region.number))

    def placed(self, graph: fx.GraphModule, final: Callable[..., fx.GraphModule]) -> None:
        """Insert the graphs of regions where they are called, in place; ``final`` lowers a traced graph."""
        names: dict[int, str] = {}
        for node in [node for node in graph.graph.nodes if node.target is _CALL]:
            arguments, number = node.args
            if number not in names:
                # By place, not by number: a step has the same names in every process.
                names[number] = f"region_{len(names)}"
                inputs = [argument.meta["val"] for argument in arguments]
                graph.add_submodule(names[number], final(_torch.traced(_known[number].run, inputs), inputs))
            with graph.graph.inserting_before(node):
                part = graph.graph.get_attr(names[number])
                call = graph.graph.call_function(_torch.region_call(), (part, names[number], *arguments))
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            graph.graph.erase_node(node)
