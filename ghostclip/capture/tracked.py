"""Tracked tensors: what is substituted for parameters in a forward, and what is computed from parameters alone.

A tracked tensor behaves like the parameter it stands for. Every torch function that receives one is seen by
``__torch_function__``, and is an *operation* to the ways of consuming it: one on tracked tensors alone is *derived*
(casts, transposes, slices, ``1 + weight``); one that brings in per-sample data is *consumed*.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from ghostclip import _torch, _tree
from ghostclip.errors import UncoveredParameterError, UnsupportedModelError

# They read a parameter and compute nothing from it.
LOOKED_AT = {
    "detach", "detach_", "data", "grad", "numpy", "item", "tolist", "requires_grad_", "__deepcopy__", "__reduce_ex__",
    "dtype", "device",
}  # fmt: skip
# They set a hook on the gradient of a whole batch.
HOOKED = {"register_hook", "register_post_accumulate_grad_hook"}


class Interceptor(Protocol):
    """Receiver of the operations on tracked tensors."""

    def intercept(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], first: "TrackedTensor"
    ) -> Any:
        """Run one operation that received tracked tensors, whose classes' overrides are still on."""


@dataclass(eq=False)
class Origin:
    """Where a tracked tensor comes from."""

    interceptor: Interceptor  # runs the operations on it
    # the same value as a plain tensor that requires grad and is computed from the leaves' `graph` tensors
    graph: Tensor
    value: Tensor  # the same, detached
    leaves: dict[str, "Leaf"]  # the parameters it is computed from, with their ``graph`` tensors
    parent: "TrackedTensor | None" = None  # the tracked tensor it was made from by ``func``, when there was exactly one
    func: str = ""  # name of the function that made it; empty for a parameter
    arguments: tuple[Any, ...] = ()  # that function's other arguments
    keywords: Mapping[str, Any] = field(default_factory=dict)  # its keyword arguments
    parent_version: int = 0  # of the parent at that time
    broadcast: bool = False  # copies of a parameter were made (``expand``, ``repeat``) on the way to it

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters it is computed from."""
        return tuple(self.leaves)


@dataclass(eq=False)
class Leaf:
    """A trainable parameter and the plain alias that derived values are computed from."""

    name: str
    parameter: nn.Parameter
    graph: Tensor


class TrackedTensor(torch.Tensor):
    """A tensor whose uses are reported. Never visible outside a forward."""

    origin: Origin

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Hand the operation to the interceptor of the first tracked argument; refuse it under ``torch.vmap``."""
        kwargs = kwargs or {}
        for item in args:
            if type(item) is TrackedTensor:
                first = item
                break
        else:
            # The arguments themselves before what is inside of them.
            named = [item for item in kwargs.values() if type(item) is TrackedTensor]
            (first, *_) = named or tracked_leaves((args, kwargs))
        if _torch.transform() is not None:
            raise UnsupportedModelError(_in_transform(first.origin.names, func.__name__))
        return first.origin.interceptor.intercept(func, args, kwargs, first)


def wrap(origin: Origin) -> TrackedTensor:
    """Return the tracked tensor for an origin."""
    # Its own autograd leaf is a trap: an operation that escaped interception (a custom autograd function) delivers the
    # parameter's gradient there, which is an error instead of a parameter dropped from training.
    tracked = _torch.alias_as(TrackedTensor, origin.value)
    return _trapped(tracked, origin)


def become(tensor: Tensor, origin: Origin) -> None:
    """Turn a plain tensor outside the graph, with memory of its own, into the tracked tensor of `origin`."""
    with torch.no_grad():
        tensor.copy_(origin.value)
    tensor.requires_grad_()
    tensor.__class__ = TrackedTensor
    _trapped(cast("TrackedTensor", tensor), origin)


def _trapped(tracked: TrackedTensor, origin: Origin) -> TrackedTensor:
    """Attach the origin, and a hook that makes a gradient reaching the tracked tensor itself an error."""
    tracked.origin = origin
    names = origin.names

    def refuse(grad: Tensor) -> Tensor:
        listed = ", ".join(names)
        raise UncoveredParameterError(
            f"parameter '{listed}' is used by an operation that cannot be captured (a custom autograd.Function, a "
            "scripted function, a sparse tensor, or as an argument of a reentrant checkpoint or of a torch.func "
            "transform such as vmap). Write the operation with torch functions, give checkpoints use_reentrant=False, "
            "or freeze the parameter. Of peft's adapters LoHa, RandLora, C3A and SHiRA "
            "are exact after ghostclip.integrations.peft.use_plain_operations(); in the place of others use LoRA."
        )

    with _torch.subclasses_off():
        tracked.register_hook(refuse)
    return tracked


def tracked_parameter(name: str, parameter: nn.Parameter, interceptor: Interceptor) -> TrackedTensor:
    """Return the tracked tensor on the memory of a parameter, or of this rank's part of it."""
    value = _torch.local(parameter).detach()
    graph = value.detach().requires_grad_()
    leaf = Leaf(name, parameter, graph)
    return wrap(Origin(interceptor, graph, value, {name: leaf}))


def tracked_leaves(tree: Any) -> list[TrackedTensor]:
    """Return the tracked tensors of a tree, in order."""
    return [leaf for leaf in _tree.leaves(tree) if isinstance(leaf, TrackedTensor)]


def plain_leaves(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree that are not tracked, in order."""
    return [leaf for leaf in _tree.leaves(tree) if isinstance(leaf, Tensor) and not isinstance(leaf, TrackedTensor)]


def replace_tracked(tree: Any, replacement: Callable[[TrackedTensor], Any]) -> Any:
    """Return the tree with every tracked tensor replaced."""
    return _tree.mapped(lambda leaf: replacement(leaf) if isinstance(leaf, TrackedTensor) else leaf, tree)


def plain(tree: Any) -> Any:
    """Return the tree with tracked tensors replaced by their detached values."""
    return replace_tracked(tree, lambda tracked: tracked.origin.value)


def _in_transform(names: Sequence[str], operation: str) -> str:
    """Return the error text for parameters inside a transform of torch.func."""
    return (
        f"parameter '{', '.join(names)}' is used in {operation} inside torch.vmap, grad or another transform of "
        "torch.func, where samples cannot be told apart. Write the operation for the whole batch (the layer itself, "
        "einsum or bmm), or freeze the parameter."
    )


def _names_in(tree: Any) -> str:
    return ", ".join(dict.fromkeys(name for tracked in tracked_leaves(tree) for name in tracked.origin.names))


def without_samples(tree: Any) -> str:
    """Return the error text for parameters that were combined with nothing that has samples."""
    return (
        f"parameter '{_names_in(tree)}' met no tensor with a batch axis on its way to the loss (a part of the batch, "
        "one sample at a time in a loop, or constants only), so its gradient cannot be split into samples. Give the "
        "layer the whole batch, as the model's first input (constants later), or freeze the parameter."
    )


def asked_for_gradient(tree: Any) -> str:
    """Return the error text for ``torch.autograd.grad`` with respect to parameters in a forward, or in its backward."""
    return (
        f"the model asks torch.autograd.grad for the gradient of parameter '{_names_in(tree)}' (an inner training, or "
        "a backward function that runs a part of the model again, as odeint_adjoint of torchdiffeq does): that "
        "gradient is of all samples together. Compute the output without it (odeint in the place of odeint_adjoint), "
        "or freeze the parameter."
    )


@dataclass(frozen=True, eq=False)
class Operation:
    """A torch function with its arguments, some of them tracked."""

    func: Callable[..., Any]
    name: str  # the name under which rules know it
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def tracked(self) -> list[TrackedTensor]:
        """The tracked arguments, each once, in order."""
        return list({id(t): t for t in tracked_leaves((self.args, self.kwargs))}.values())

    @cached_property
    def plain(self) -> list[Tensor]:
        """The other tensors among the arguments."""
        return list(plain_leaves((self.args, self.kwargs)))

    def run(self, replacement: Callable[[TrackedTensor], Any]) -> Any:
        """Return the function's result with ``replacement(argument)`` in the place of every tracked argument."""
        return self.func(*replace_tracked(self.args, replacement), **replace_tracked(self.kwargs, replacement))

    def run_plain(self) -> Any:
        """Return the function's result on the detached values of its tracked arguments."""
        return self.run(lambda tracked: tracked.origin.value)

    @property
    def is_in_graph(self) -> bool:
        """Whether any of the other tensors is in the graph."""
        return any(tensor.requires_grad for tensor in self.plain)

    @property
    def is_in_place(self) -> bool:
        """Whether it changes its first argument, by its name."""
        name = self.name
        if name in ("__setitem__", "index_put_") or name.startswith("__i"):
            return True
        return name.endswith("_") and not name.endswith("__")


def sets_hook(operation: Operation) -> bool:
    """Return whether an operation sets a hook that may change a gradient, unlike torch's own module trackers."""
    return operation.name in HOOKED and not any(
        getattr(arg, "__module__", None) == "torch.autograd.graph" for arg in operation.args
    )


def hooked(operation: Operation) -> str:
    """Return the error text for a forward that sets a hook on what comes from parameters alone."""
    names = ", ".join(dict.fromkeys(name for tracked in operation.tracked for name in tracked.origin.names))
    return (
        f"the forward sets a hook on the gradient of parameter '{names}' ({operation.name}): no such gradient is "
        "formed, since samples are clipped one by one. Set the hook on an activation, or scale the parameter itself."
    )
