"""What carries captured tensors through autograd: nodes that take no part in the computation, and what uses store.

A use stores an input as autocast cast it, where it did, in the place of the input itself.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from ghostclip import _torch
from ghostclip.capture.sample_axis import ROWS_KEY, SampleAxis, set_metadata
from ghostclip.capture.tracked import TrackedTensor

_HALF = (torch.float16, torch.bfloat16)
# A value of the graph: the node that made it, and which of its outputs it is.
Edge = tuple[Any, int]
_CHANGED: Final = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: the input of a "
    "layer whose parameters are clipped. Change a copy of it."
)


class Casts:
    """The latest tensor that was cast for an operation: what several read (queries, keys, values) is cast once."""

    __slots__ = ("__weakref__", "_cast", "_changes", "_source")

    # The weight gradient of y = x Wᵀ, run by autocast in 16 bits, is that through the cast input: the float32 input of
    # twice the size took no part, and an ordinary backward does not store it.
    def __init__(self) -> None:
        self._source: Any = None  # weak reference to the tensor that was cast
        self._changes = -1  # its version then
        self._cast: Tensor | None = None  # the result

    def of(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an input as the operation used it."""
        # In 16 bits, outside the graph, where autocast cast it, else itself.
        if tensor.dtype != torch.float32 or dtype not in _HALF:
            return tensor
        (version,) = _torch.versions([tensor])
        cast = self._cast
        if cast is None or cast.dtype != dtype or self._changes != version or self._source() is not tensor:
            with _torch.subclasses_off():
                cast = tensor.detach().to(dtype)
            self._source, self._changes, self._cast = weakref.ref(tensor, _dropping(self)), version, cast
        return cast

    def drop(self, source: Any) -> None:
        """Drop the cast whose source, a weak reference, is gone."""
        if self._source is source:
            self._source = self._cast = None


def _dropping(casts: Casts) -> Callable[[Any], None]:
    """Return a callback that drops the cast, and holds `Casts` weakly."""
    # A bound method would hold its object, which holds the reference that holds it.
    reference = weakref.ref(casts)

    def drop(source: Any) -> None:
        alive = reference()
        if alive is not None:
            alive.drop(source)

    return drop


def may_cast(tensor: Tensor) -> bool:
    """Return whether autocast may cast an operation's input to 16 bits."""
    # The type of a device is a string that is made anew each time.
    kind = "cpu" if tensor.is_cpu else tensor.device.type
    return _torch.autocast_is_on(kind) and tensor.dtype == torch.float32 and not tensor.is_inference()


class _Save(torch.autograd.Function):
    """A side node whose context stores tensors, so that checkpointing and saved-tensor hooks treat them as usual."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise AssertionError("a side node never takes part in a backward")


class _Source(torch.autograd.Function):
    """An alias of a tensor outside the graph, as a node of the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None]:
        return None, None


class _Enter(_Source):
    """Make a fresh tensor part of the graph in place, so that in-place operations after it still work."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor


class _NoView(torch.autograd.Function):
    """An alias that is no view, so that in-place operations later on cannot bypass hooks set on it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Tie(_Source):
    """An alias of a tensor in the graph, with the anchor as second parent."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]


class InnerGraph(torch.autograd.Function):
    """Runs an operation in a small graph of its own, as one node of the user's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[Sequence[Tensor]], list[Tensor]],
        deliver: Callable[[Sequence[Tensor], Sequence[Tensor | None]], None],
        anchor: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run the operation on detached copies of its inputs, and keep its graph in the context."""
        local = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        with torch.enable_grad():
            ctx.outputs = run(local)
        ctx.local, ctx.deliver = local, deliver
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in ctx.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Deliver the output gradients to the use, and return those of the inputs through the inner graph."""
        ctx.deliver(ctx.outputs, grads)
        wanted = [tensor for tensor in ctx.local if tensor.requires_grad]
        arrived = [(output, grad) for output, grad in zip(ctx.outputs, grads, strict=True) if grad is not None]
        if not wanted or not arrived:
            return (None,) * (3 + len(ctx.local))
        outputs, output_grads = zip(*arrived, strict=True)
        gradients = iter(torch.autograd.grad(outputs, wanted, output_grads, retain_graph=True, allow_unused=True))
        return None, None, None, *(next(gradients) if tensor.requires_grad else None for tensor in ctx.local)


class SavedTensors:
    """Tensors with their versions when they were saved; what a node of the graph stores, at a tenth of its cost."""

    __slots__ = ("_tensors", "_versions", "address", "elements", "shape")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Store detached aliases of tensors with their versions, and what is known of the first."""
        # Aliases outside the graph are stored, lest a graph that refers to this refer to itself.
        first = tensors[0]
        if len(tensors) == 1:
            self._tensors: tuple[Tensor, ...] = (first.detach(),)
            self._versions = [_torch.version(first)]
        else:
            self._tensors = tuple([tensor.detach() for tensor in tensors])
            self._versions = _torch.versions(tensors)
        self.shape = first.shape
        self.elements = self.shape.numel()
        many = len(self.shape) > 2 and type(first) is Tensor and first.layout is torch.strided
        self.address: int = first.data_ptr() if many else 0
        """Where it begins, if it may hold many positions of each sample; else 0."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """The tensors; as autograd does, a RuntimeError where one was changed in place since."""
        if _torch.versions(self._tensors) != self._versions:
            raise RuntimeError(_CHANGED)
        return self._tensors


def first_saved(saved: Sequence[SavedTensors]) -> list[Tensor]:
    """Return the one tensor of each, as `SavedTensors.saved_tensors` does, all compared at once."""
    tensors = [one._tensors[0] for one in saved]
    if _torch.versions(tensors) != [one._versions[0] for one in saved]:
        raise RuntimeError(_CHANGED)
    return tensors


class _Saved:
    """Reads the tensors that autograd saved for a side node, through that node's output."""

    # It refers to the node's output: until torch 2.13, what a node of a Python function saved is freed with its last
    # tensor.
    __slots__ = ("_output",)

    def __init__(self, output: Tensor) -> None:
        self._output = output

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        node: Any = self._output.grad_fn
        return node.saved_tensors


def save_tensors(tensors: Sequence[Tensor]) -> Any:
    """Save tensors, through autograd where hooks on saved tensors are active; read them as its ``saved_tensors``."""
    if _torch.saving_hooks() is None:
        for tensor in tensors:
            if tensor.is_inference():
                break
        else:
            return SavedTensors(tensors)
    with _torch.subclasses_off():
        anchor = torch.zeros((), requires_grad=True)
        return _Saved(_Save.apply(anchor, *tensors))


def enter_graph(tensor: Tensor, anchor: Tensor) -> Tensor:
    """Return a tensor outside the graph as a non-leaf that requires grad, on the same storage, behind it the anchor."""
    # A view would drag its base into the graph; detaching makes it a tensor of its own on the same storage.
    # Every captured path of the graph ends at the anchor, so that a backward restricted to it visits all captured
    # operations and no parameter outside them. The result may be changed in place, and gradient hooks can be set on it.
    detached = tensor.detach() if _torch.is_view(tensor) else tensor
    return _Enter.apply(anchor, detached)


def source(tensor: Tensor, anchor: Tensor) -> Tensor:
    """Return an alias of an untracked tensor that is a graph node of its own, ending at the anchor."""
    return _Source.apply(anchor, tensor)


def accumulation_node(leaf: Tensor) -> Any:
    """Return the node that accumulates a leaf's gradient, the same in every graph."""
    with torch.enable_grad():
        return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def nodes_behind(starts: Iterable[Any], *, up_to: Any = None) -> list[Any]:
    """Return the nodes of a graph behind some, each once, those that accumulate leaves' gradients included."""
    # `up_to`: a node that is neither returned nor passed.
    pending = [node for node in starts if node is not None]
    seen = dict.fromkeys(pending)
    while pending:
        for following, _ in pending.pop().next_functions:
            if following is not None and following is not up_to and following not in seen:
                seen[following] = None
                pending.append(following)
    return list(seen)


def shape_at(edge: Edge) -> tuple[int, ...] | None:
    """Return the shape of an output of a node; None where the graph does not know it."""
    known = _torch.outputs_of(edge[0])
    return tuple(known[edge[1]].shape) if edge[1] < len(known) else None


def without_view(tensor: Tensor, anchor: Tensor, *, anchored: bool) -> Tensor:
    """Return a tensor that is no view of another (same storage) and leads to the anchor."""
    # Itself if it is one already. An in-place operation on a view rewrites the history of its base and drops the view's
    # own node, with the hooks on it.
    return _NoView.apply(tensor, anchor) if _torch.is_view(tensor) or not anchored else tensor


def edge_of(root: Any) -> Edge:
    """Return the edge where a backward starts, from a tensor or an edge."""
    return (root.grad_fn, root.output_nr) if isinstance(root, Tensor) else (root[0], root[1])


def is_to_tie(model: nn.Module, inputs: Iterable[Tensor]) -> bool:
    """Return whether inputs require grad and parameters train: then a backward to the inputs could miss the anchor."""
    for tensor in inputs:
        if tensor.requires_grad:
            return any(parameter.requires_grad for parameter in model.parameters())
    return False


def tied(item: Any, anchor: Tensor, batch_size: int, axis: int) -> Any:
    """Return an input that requires grad as an alias whose graph also ends at the anchor; anything else as it is."""
    # Anything else as it is.
    if not isinstance(item, Tensor) or not item.requires_grad or isinstance(item, TrackedTensor):
        return item
    alias = _Tie.apply(anchor, item)
    if axis < item.dim() and item.shape[axis] == batch_size:
        set_metadata(alias.grad_fn, ROWS_KEY, SampleAxis(axis, 1, batch_size, 1))
    return alias


def under_checkpoint() -> bool:
    """Return whether activation checkpointing of the non-reentrant kind is active right now."""
    hooks: Any = _torch.saving_hooks()
    return hooks is not None and "checkpoint" in getattr(hooks[0], "__module__", "")
