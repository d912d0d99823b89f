"""Forward, loss and backward of a batch, traced into one graph of aten operations.

Values are fake tensors, which know shapes and dtypes alone. What reads a number, and shapes that depend on data, cannot
be traced and stay eager. Which way a branch on data goes (``if mask.any()``) is found by running what was traced before
it: the graph is for batches that go the same way, and returns the flags for the caller to compare.

Shape letters: B samples, ``*P`` a parameter's own shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
