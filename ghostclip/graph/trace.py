"""Forward, loss and backward of a batch, traced into one graph of aten operations; where in it samples lie.

Values are fake tensors, which know shapes and dtypes alone. What reads a number, and shapes that depend on data, cannot
be traced and stay eager. Which way a branch on data goes (``if mask.any()``) is found by running what was traced before
it: the graph is for batches that go the same way, and returns the flags for the caller to compare.

The sample axis of a value is the one that grows when the batch does. The batch is traced twice, the second time with
one sample repeated, and the two graphs are compared node by node. An axis that has grown holds samples. Where it holds
several rows of each (``view(B * T, ...)``), how they lie follows from the order of the elements. Values that depend on
samples and have no such axis have lost it: a gradient of a parameter may (it is a sum over samples), a value that
samples' losses depend on must not.

Shape letters: B samples, ``*P`` a parameter's own shape.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ghostclip import _torch, _tree
from ghostclip.checks.batches import Randomness
from ghostclip.checks.module_state import ModuleState
from ghostclip.errors import UnsupportedModelError

LossFunction = Callable[..., Any]
"""From the model and a batch to the losses of its samples, ``(B,)``, or to a pair of these and anything else."""
# Branches on data that are followed, each of which takes a trace of what is before it.
_MOST_BRANCHES = 16
_OFTEN = "how often it branches on data depends on data"
# How mixtures of experts of transformers are computed, in their configuration.
_EXPERTS = "_experts_implementation_internal"
# Elements of a parameter that rows may be taken of, as many as it takes.
_MOST_TAKEN = 1 << 26
# Ways to change a tensor that a graph is given: what the model keeps from one batch to the next.
_WRITES = ("copy_", "set_", "resize_")


class NoGraphError(UnsupportedModelError):
    """A step cannot be traced into one graph whose per-sample gradients are known to be exact."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a graph, in order: trainable parameters, frozen ones, buffers, tensors of the batch."""

    trainable: tuple[str, ...]
    held: tuple[str, ...]  # names of frozen parameters and of buffers
    tensors: tuple[Tensor, ...]
    in_batch: tuple[int | None, ...]  # by tensor, whether it has samples, and along which axis
    tree: Any  # the batch, (args, kwargs)

    @property
    def fixed(self) -> int:
        """Number of inputs that are no tensors of the batch."""
        return len(self.trainable) + len(self.held)

    def flat(self, model: nn.Module) -> list[Tensor]:
        """Return all current tensors, detached, in order."""
        named = named_tensors(model)
        return [named[name].detach() for name in (*self.trainable, *self.held)] + [x.detach() for x in self.tensors]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers, each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def inputs_of(model: nn.Module, tree: Any, axes: Callable[[Tensor], int | None]) -> Inputs:
    """Return the inputs of a batch's graph; ``axes`` returns a tensor's sample axis, None for a shared tensor."""
    named = named_tensors(model)
    trainable = tuple(name for name, value in named.items() if isinstance(value, nn.Parameter) and value.requires_grad)
    frozen = tuple(name for name in named if name not in trainable)
    tensors = tuple(_tree.tensors(tree))
    return Inputs(trainable, frozen, tensors, tuple(axes(tensor) for tensor in tensors), tree)


@dataclass(frozen=True)
class Traced:
    """The graph of a batch, functional aten operations alone."""

    # outputs: the losses (B,), the gradient of their sum for every trainable parameter (None for an unused one), and
    # the loss function's other results
    graph: fx.GraphModule
    extra: Any  # the loss function's other results, tensors replaced by their numbers
    branches: tuple[bool, ...]  # which way branches on data go; as many flags are the graph's last outputs


class _Loss(nn.Module):
    """The model and its loss as one module, so that parameters can be exchanged for the time of a call."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of the model."""
        return self.loss(self.model, *args, **kwargs)


class _UnknownBranchError(Exception):
    """A branch on data was reached whose outcome is not known; the only argument is its flag."""


class _Branches(TorchFunctionMode):
    """Mode in which branches on data go known ways; their flags are collected."""

    def __init__(self, known: Sequence[bool]) -> None:
        super().__init__()
        self._known, self.flags = iter(known), list[Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; where it reads a flag, return the known way instead, or raise if none is known."""
        reads_flag = func is Tensor.__bool__ or (func is Tensor.item and args[0].dtype is torch.bool)
        if not reads_flag or args[0].numel() != 1:
            return func(*args, **(kwargs or {}))
        self.flags.append((args[0].detach() != 0).reshape(()))
        flag = next(self._known, None)
        if flag is None:
            raise _UnknownBranchError(self.flags[-1])
        return flag


@contextmanager
def _experts_in_batches(model: nn.Module) -> Iterator[None]:
    """Let each token take its experts' weights, as mixtures of transformers can: no shape depends on data then."""
    mixtures = (module for module in model.modules() if hasattr(module, "is_concatenated"))
    configs = [config for module in mixtures if hasattr(config := module.config, _EXPERTS)]
    before = [getattr(config, _EXPERTS) for config in configs]
    try:
        for config in configs:
            setattr(config, _EXPERTS, "batched_mm")
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            setattr(config, _EXPERTS, implementation)


def trace(
    model: nn.Module, loss: LossFunction, inputs: Inputs, branches: Sequence[bool] | None = None, reads: Any = None
) -> Traced:
    """Trace forward, loss and the gradient of every trainable parameter; ``branches``: the way, where it is known."""
    # `reads`: an object that the loss reads, and may write to. Refused: reading numbers, drawing from other generators
    # than torch's, changing what the model stores.
    states, state = Randomness(inputs.flat(model)), ModuleState(model, arguments=(loss, reads))
    try:
        graph, extra, known = _followed(model, loss, inputs, branches, state)
        if _torch.writes_in_place(graph):
            with _torch.overrides_off():
                graph = _torch.traced(_torch.functional(graph), inputs.flat(model))
    except NoGraphError:
        raise
    except Exception as problem:
        raise NoGraphError(f"it cannot be traced ({type(problem).__name__}: {first_line(problem)})") from problem
    finally:
        has_drawn = states.drawn() or state.drawn()
        state.restore()
        torch.clear_autocast_cache()
    if has_drawn:
        states.restore()
        raise NoGraphError(
            "it seeds a generator, or draws from Python's, NumPy's or its own, which a graph would do once for ever"
        )
    _without_strides(graph)
    graph.graph.eliminate_dead_code()
    _refuse_writes(graph)
    _refuse_sizes(graph)
    _refuse_large(graph, inputs)
    _refuse_other_losses(graph, inputs)
    return Traced(graph, extra, known)


def _followed(
    model: nn.Module, loss: LossFunction, inputs: Inputs, branches: Sequence[bool] | None, state: ModuleState
) -> tuple[fx.GraphModule, Any, tuple[bool, ...]]:
    """Trace along the branches that the batch's data takes; return (graph, other results, the branches)."""
    known, extras = list(branches or ()), list[Any]()
    joint = _joint(model, loss, inputs, extras)

    def on_its_way(*flat: Tensor) -> list[Tensor | None]:
        with _Branches(known) as met:
            try:
                outputs = joint(*flat)
            except _UnknownBranchError as unknown:
                return [unknown.args[0]]
        if branches is not None and len(met.flags) != len(known):
            raise NoGraphError(_OFTEN)
        return [*outputs, *met.flags]

    while True:
        with _as_it_was(model), _experts_in_batches(model), torch.enable_grad(), _torch.recurrence_step_by_step():
            graph = _torch.traced(on_its_way, inputs.flat(model))
        if extras:
            return graph, extras[-1], tuple(known)
        if branches is not None or len(known) == _MOST_BRANCHES:
            raise NoGraphError(_OFTEN)
        graph.graph.eliminate_dead_code()
        known.append(bool(graph(*inputs.flat(model))[0]))
        state.restore()


def _joint(
    model: nn.Module, loss: LossFunction, inputs: Inputs, extras: list[Any]
) -> Callable[..., list[Tensor | None]]:
    """Return forward, loss and backward as a function of the graph's inputs; what else there is goes to ``extras``."""
    whole, names = _Loss(model, loss), [*inputs.trainable, *inputs.held]

    def joint(*flat: Tensor) -> list[Tensor | None]:
        named = dict(zip(names, flat, strict=False))
        parameters = [named[name].detach().requires_grad_() for name in inputs.trainable]
        named.update(zip(inputs.trainable, parameters, strict=True))
        batch = iter(flat[inputs.fixed :])
        args, kwargs = _tree.mapped(lambda leaf: next(batch) if isinstance(leaf, Tensor) else leaf, inputs.tree)
        result = functional_call(whole, {f"model.{name}": value for name, value in named.items()}, args, kwargs)
        losses_B, *extra = result if isinstance(result, tuple) and len(result) == 2 else (result,)
        grads = torch.autograd.grad(losses_B, parameters, torch.ones_like(losses_B), allow_unused=True)
        extra_tensors: list[Tensor] = []
        extras.append(_tree.mapped(lambda leaf: _numbered(leaf, extra_tensors), extra))
        return [losses_B.detach(), *grads, *(tensor.detach() for tensor in extra_tensors)]

    return joint


def first_line(problem: BaseException) -> str:
    """Return the first line of an exception's message."""
    lines = str(problem).strip().splitlines()
    return lines[0][:200] if lines else ""


def _numbered(leaf: Any, tensors: list[Tensor]) -> Any:
    """Return a placeholder for a tensor, which is appended to ``tensors``; anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    tensors.append(leaf)
    return Placeholder(len(tensors) - 1)


@dataclass(frozen=True)
class Placeholder:
    """Stands for a tensor of the loss function's other results."""

    number: int


def restored(extra: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the loss function's result with its tensors in the place of numbers."""
    return _tree.mapped(lambda leaf: tensors[leaf.number] if isinstance(leaf, Placeholder) else leaf, extra)


def outputs_of(graph: fx.GraphModule) -> tuple[Any, ...]:
    """Return the nodes of a graph's outputs, None where there is none."""
    return tuple(next(iter(reversed(graph.graph.nodes))).args[0])


def name_of(target: Any) -> str:
    """Return the name of an operation, such as ``mm``, without marks of internal ones; else the empty string."""
    packet = getattr(target, "overloadpacket", None)
    return "" if packet is None else str(packet).rpartition(".")[2].lstrip("_")


def operation(node: fx.Node) -> str:
    """Return the name of a node's operation; of anything but an operation the empty string."""
    return name_of(node.target)


def draws(graph: fx.GraphModule) -> bool:
    """Return whether a graph draws random numbers."""
    return any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in graph.graph.nodes)


def _without_strides(graph: fx.GraphModule) -> None:
    """Replace views, and what is said by strides of all of a contiguous tensor, by reshapes."""
    # When the graph runs again, values need not lie as they did: convolutions choose.
    for node in list(graph.graph.nodes):
        name = operation(node)
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
        if name not in ("as_strided", "as_strided_scatter"):
            continue
        base, *values, sizes, strides = node.args[: 4 if name == "as_strided_scatter" else 3]
        whole = base.meta["val"]
        steps = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
        plain = all(size == 1 or stride == step for size, stride, step in zip(sizes, strides, steps, strict=True))
        begins = len(node.args) <= len(values) + 3 or not node.args[-1]
        if plain and begins and whole.is_contiguous() and whole.numel() == math.prod(sizes):
            shape = list(node.meta["val"].shape)
            node.target, node.args, node.kwargs = torch.ops.aten.reshape.default, ((*values, base)[0], shape), {}
    graph.recompile()


def _refuse_writes(graph: fx.GraphModule) -> None:
    """Refuse a graph that writes to its inputs or to what the model holds."""
    for node in graph.graph.nodes:
        if (
            operation(node) in _WRITES
            and isinstance(node.args[0], fx.Node)
            and node.args[0].op in ("placeholder", "get_attr")
        ):
            raise NoGraphError("it writes to a buffer or to its input, which the next batch would find changed")


def _refuse_sizes(graph: fx.GraphModule) -> None:
    """Refuse a graph with shapes that depend on data."""
    for node in graph.graph.nodes:
        for leaf in _torch.tree_leaves(node.meta.get("val")):
            if isinstance(leaf, Tensor) and not all(type(size) is int for size in leaf.shape):
                raise NoGraphError(f"the shape of what {operation(node)} returns depends on data")


def _refuse_large(graph: fx.GraphModule, inputs: Inputs) -> None:
    """Refuse weights that are taken once for every token where these are more than memory should hold."""
    weights = set(list(graph.graph.nodes)[: inputs.fixed])
    for node in graph.graph.nodes:
        # Weights in another dtype or order are weights.
        if node.op == "call_function" and operation(node) != "index" and set(node.all_input_nodes) <= weights:
            weights.add(node)
        if operation(node) == "index" and node.args[0] in weights and node.meta["val"].numel() > _MOST_TAKEN:
            raise NoGraphError("its experts' weights, once for each token, are too large")


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore afterwards what a forward leaves on its modules: values without memory, hooks that it adds once."""
    dicts = [(attrs, *(sub for sub in attrs.values() if isinstance(sub, dict))) for attrs in map(vars, model.modules())]
    before = [(attrs, dict(attrs)) for parts in dicts for attrs in parts]
    try:
        yield
    finally:
        for attrs, earlier in before:
            for key in attrs.keys() - earlier.keys():
                del attrs[key]
            attrs.update(earlier)


def _refuse_other_losses(graph: fx.GraphModule, inputs: Inputs) -> None:
    """Refuse losses that are not one per sample."""
    losses = outputs_of(graph)[0].meta["val"]
    sizes = {x.shape[axis] for x, axis in zip(inputs.tensors, inputs.in_batch, strict=True) if axis is not None}
    if losses.dim() != 1 or {losses.shape[0]} != sizes:
        raise NoGraphError(f"its losses have shape {tuple(losses.shape)}, not one entry per sample")


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
