"""Tensors computed from parameters alone, and how a factor of one becomes a factor of the parameters.

A derived tensor is an ordinary autograd graph from the parameters' aliases, so any function is exact: the materialised
per-sample gradient is pulled back through it for all samples at once. Functions that only move entries (casts, views,
transposes, slices) keep the factored form.

In place (``w = zeros(n, n); w[index] = p``, ``w = 2 * p; w += 1``), a constant that a parameter is written into becomes
derived from that parameter. What was computed from the old value before must not see the new one, and what shares the
memory must; where either cannot be told, it is refused.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.tracked import Operation, Origin, TrackedTensor, become, replace_tracked, tracked_leaves, wrap
from ghostclip.errors import UnsupportedModelError
from ghostclip.factors import AtIndex, Dense, Diagonal, Factor, Outer, Permuted, Rows, Stacked
from ghostclip.rules.lookup import PICKING, Pick, of_constant, pick_of

_VIEWS = {
    "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "clone", "view_as", "reshape_as",
    "to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda", "unsqueeze_", "squeeze_", "ravel",
}  # fmt: skip
_BROADCASTS = {"expand", "expand_as", "broadcast_to", "repeat", "tile"}
# They change the form of the tensor object itself.
_RESHAPING = {"unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "resize_", "resize_as_", "set_"}


def derive(operation: Operation) -> Any:
    """Run a function of tracked tensors and constants, and track the floating tensors of its result."""
    name, args, kwargs = operation.name, operation.args, operation.kwargs
    parents = tracked_leaves((args, kwargs))
    with torch.enable_grad():
        result = operation.run(lambda tracked: tracked.origin.graph)
    by_graph = {id(parent.origin.graph): parent for parent in parents}

    def follow(tensor: Tensor, index: int | None) -> Any:
        if not tensor.requires_grad:
            return tensor
        if id(tensor) in by_graph:
            return by_graph[id(tensor)]
        leaves = {leaf_name: leaf for parent in parents for leaf_name, leaf in parent.origin.leaves.items()}
        single = parents[0] if len(parents) == 1 and (not args or isinstance(args[0], TrackedTensor)) else None
        arguments = args[1:] if index is None else (*args[1:], index)
        first = parents[0].origin
        if name == "embedding":
            single, arguments = _embedding_parent(args, kwargs)
        origin = Origin(first.interceptor, tensor, tensor.detach(), leaves, single, name, arguments, kwargs)
        origin.parent_version = 0 if single is None else _torch.version(single.origin.graph)
        origin.broadcast = name in _BROADCASTS or any(parent.origin.broadcast for parent in parents)
        return wrap(origin)

    return _follow_tree(result, follow)


def _follow_tree(result: Any, follow: Callable[[Tensor, int | None], Any]) -> Any:
    """Apply `follow` to each tensor of a result, with its index in a tuple or list."""
    if isinstance(result, Tensor):
        return follow(result, None)
    if isinstance(result, (tuple, list)):
        items = [follow(item, index) if isinstance(item, Tensor) else item for index, item in enumerate(result)]
        return type(result)(items) if not hasattr(result, "_fields") else type(result)(*items)
    return result


def _embedding_parent(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[TrackedTensor | None, tuple[Any, ...]]:
    """Return the tracked table of an embedding call, and its (ids, padding index)."""
    ids = args[0] if args else kwargs.get("input")
    table = args[1] if len(args) > 1 else kwargs.get("weight")
    padding = args[2] if len(args) > 2 else kwargs.get("padding_idx")
    return (table if isinstance(table, TrackedTensor) else None), (ids, padding)


def pull_back(tracked: TrackedTensor, factor: Factor) -> list[tuple[str, Factor]]:
    """Return (name, factor) of the parameters behind a tracked tensor; a parameter may appear once only."""
    origin = tracked.origin
    while origin.func:
        shortcut = _shortcut(origin, factor) if origin.parent is not None else None
        if shortcut is None:
            return _through_graph(origin, factor)
        assert origin.parent is not None
        origin, factor = origin.parent.origin, shortcut
    (name,) = origin.leaves
    return [(name, factor)]


def _through_graph(origin: Origin, factor: Factor) -> list[tuple[str, Factor]]:
    """Return the parameters' factors by autograd: one backward through the derivation for each sample."""
    grad_BP = factor.materialize().to(origin.graph.dtype)
    names, leaves = list(origin.leaves), [leaf.graph for leaf in origin.leaves.values()]
    grads = batched_grad(origin.graph, leaves, grad_BP)
    return [(name, Dense(grad)) for name, grad in zip(names, grads, strict=True) if grad is not None]


def batched_grad(output: Tensor, inputs: Sequence[Tensor], grads_B: Tensor) -> list[Tensor | None]:
    """Return gradients ``(B, *shape)`` of inputs for B output gradients ``(B, *S)``, one by one where vmap cannot."""
    # None for an input that the output does not depend on.
    if grads_B.shape[0] == 0:
        return [tensor.new_zeros(0, *tensor.shape) for tensor in inputs]
    with torch.enable_grad():
        try:
            return list(
                torch.autograd.grad(
                    output, inputs, grads_B, retain_graph=True, allow_unused=True, is_grads_batched=True
                )
            )
        except RuntimeError:
            rows = [torch.autograd.grad(output, inputs, grad, retain_graph=True, allow_unused=True) for grad in grads_B]
    columns = zip(*rows, strict=True)
    return [None if column[0] is None else torch.stack(column) for column in columns]


def _shortcut(origin: Origin, factor: Factor) -> Factor | None:
    """Return the parent's factor in factored form, or None where only the general way serves."""
    assert origin.parent is not None
    if _torch.version(origin.parent.origin.graph) != origin.parent_version:
        return None
    parent = origin.parent.origin.value
    name = origin.func
    if name in _VIEWS and parent.numel() == origin.value.numel():
        return _through_view(factor, parent.shape)
    if name in ("t", "T", "mT", "transpose", "swapaxes", "permute"):
        return _through_transpose(origin, factor, parent)
    if name in PICKING:
        pick = pick_of(name, parent.shape, origin.arguments, origin.keywords)
        if pick is not None:
            return of_constant(pick, factor)
    if name in ("__getitem__", "chunk", "split", "unbind"):
        index = _slice_of(origin, parent)
        return None if index is None else _through_index(factor, index, parent)
    if name in _BROADCASTS and isinstance(factor, Diagonal):
        return _through_broadcast(factor, parent)
    if name == "embedding":
        return _through_embedding(origin, factor, parent)
    return None


def _through_view(factor: Factor, shape: torch.Size) -> Factor | None:
    """Return the factor for the parent of a reshaped tensor; None where its form does not survive."""
    if isinstance(factor, (Rows, Stacked, AtIndex, Diagonal)) and shape != factor.shape:
        return None
    return factor.reshaped(shape)


def _through_transpose(origin: Origin, factor: Factor, parent: Tensor) -> Factor | None:
    """Return the factor for the parent of a transposed or permuted tensor; None where it must be formed."""
    order = list(range(parent.dim()))
    if origin.func in ("transpose", "swapaxes"):
        first, second = (*origin.arguments, *origin.keywords.values())[:2]
        order[first], order[second] = order[second], order[first]
    elif origin.func == "permute":
        dims = origin.arguments[0] if isinstance(origin.arguments[0], (tuple, list)) else origin.arguments
        order = [axis % parent.dim() for axis in dims]
    else:
        order = [*order[:-2], *reversed(order[-2:])] if origin.func == "mT" else list(reversed(order))
    if order == list(range(parent.dim())):
        return factor
    if isinstance(factor, Outer) and factor.slots == 1 and parent.dim() == 2:
        return factor.transposed()
    if isinstance(factor, Stacked) and order == [0, 2, 1]:
        parts = {number: part.transposed() for number, part in factor.parts.items() if isinstance(part, Outer)}
        return Stacked(parts, shape=parent.shape, like=factor.zero_B) if len(parts) == len(factor.parts) else None
    inverse = [order.index(axis) for axis in range(parent.dim())]
    return Permuted(factor, inverse)


def _slice_of(origin: Origin, parent: Tensor) -> tuple[Any, ...] | None:
    """Return the integers and slices that select the derived tensor from its parent, or None."""
    if origin.func == "__getitem__":
        return basic_index(origin.arguments[0], parent.dim())
    if origin.func == "unbind":
        *dims, index = origin.arguments
        axis = origin.keywords.get("dim", dims[0] if dims else 0) % parent.dim()
        return (*[slice(None)] * axis, index)
    # chunk and split of a parameter: the piece's own offset into the parent says where it lies.
    view = origin.value
    differing = [axis for axis in range(parent.dim()) if view.shape[axis] != parent.shape[axis]]
    if not differing:
        return (slice(0, parent.shape[0]),)
    (axis,) = differing
    start = (view.storage_offset() - parent.storage_offset()) // max(1, parent.stride(axis))
    return (*[slice(None)] * axis, slice(start, start + view.shape[axis]))


def basic_index(index: Any, dims: int) -> tuple[Any, ...] | None:
    """Return an index as integers and slices only, or None if it copies, repeats or adds axes."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if sum(entry is Ellipsis for entry in entries) == 1:
        at = next(position for position, entry in enumerate(entries) if entry is Ellipsis)
        entries[at : at + 1] = [slice(None)] * (dims - len(entries) + 1)
    plain: list[Any] = []
    for entry in entries:
        scalar = isinstance(entry, Tensor) and entry.dim() == 0 and entry.dtype in (torch.int64, torch.int32)
        if not scalar and (isinstance(entry, bool) or not isinstance(entry, (int, slice))):
            return None
        plain.append(int(entry) if scalar else entry)
    return tuple(plain)


def _through_index(factor: Factor, index: tuple[Any, ...], parent: Tensor) -> Factor:
    """Return the factor for the parent of an indexed tensor: zero outside the index."""
    if isinstance(factor, AtIndex):
        return Dense(AtIndex(Dense(factor.materialize()), index, shape=parent.shape).materialize())
    return AtIndex(factor, index, shape=parent.shape)


def _through_broadcast(factor: Diagonal, parent: Tensor) -> Factor | None:
    """Return the factor for the parent of a tensor expanded over the batch, one copy per sample; None otherwise."""
    axis = factor.axis - (len(factor.shape) - parent.dim())
    rest = [*factor.shape[: factor.axis], *factor.shape[factor.axis + 1 :]]
    parent_sizes = [size for dim, size in enumerate(parent.shape) if dim != axis]
    if axis >= 0 and parent.shape[axis] != 1:
        return None
    if [size for size in rest if size != 1] != [size for size in parent_sizes if size != 1]:
        return None
    return Dense(factor.grad_BR.reshape(factor.batch_size, *parent.shape))


def broadcast_over(tracked: TrackedTensor, batch_size: int, axis: int) -> bool:
    """Return whether a derived tensor was expanded or repeated to one copy per sample along the batch axis."""
    value = tracked.origin.value
    return tracked.origin.broadcast and axis < value.dim() and value.shape[axis] == batch_size


def reorders_copies(operation: Operation, batch_size: int) -> bool:
    """Return whether an operation sorts copies of a parameter, one per sample, into the order of a sorted batch."""
    # True for `index_select` along the axis of the copies: its index is no data that meets the parameter.
    copies = operation.args[0] if operation.args else None
    if operation.name != "index_select" or not isinstance(copies, TrackedTensor) or len(operation.args) != 3:
        return False
    return broadcast_over(copies, batch_size, operation.args[1])


def _through_embedding(origin: Origin, factor: Factor, parent: Tensor) -> Factor | None:
    """Return the factor for a table of which constant rows were looked up."""
    ids, padding = origin.arguments
    if not isinstance(ids, Tensor) or isinstance(ids, TrackedTensor):
        return None
    if padding is not None:
        unpadded = (ids != padding % parent.shape[0]).unsqueeze(-1)
        factor = Dense(factor.materialize().where(unpadded, 0.0))
    return of_constant(Pick(ids.long(), parent.shape, parent.shape[1]), factor)


def write(operation: Operation, buffers: Iterable[Tensor]) -> Any:
    """Run an in-place operation on parameters and constants; the tensor it writes is tracked from now on."""
    # `buffers` outlive the forward. Refused where tensors that are not tracked would see the change.
    changed = operation.args[0]
    if operation.name in _RESHAPING or not isinstance(changed, Tensor) or not changed.is_floating_point():
        raise UnsupportedModelError(_refusal(operation))
    if isinstance(changed, TrackedTensor):
        graph = changed.origin.graph
        if graph.is_leaf:
            raise UnsupportedModelError(_refusal(operation))
    else:
        outlives = any(changed is buffer for buffer in buffers)
        if outlives or changed.requires_grad or _torch.is_view(changed) or _torch.shares_memory(changed):
            raise UnsupportedModelError(_refusal(operation))
        graph = changed.detach().clone()
    arguments = replace_tracked(operation.args[1:], lambda tracked: tracked.origin.graph)
    keywords = replace_tracked(operation.kwargs, lambda tracked: tracked.origin.graph)
    with torch.enable_grad():
        result = operation.func(graph, *arguments, **keywords)
    leaves = {name: leaf for tracked in operation.tracked for name, leaf in tracked.origin.leaves.items()}
    interceptor = operation.tracked[0].origin.interceptor
    if isinstance(changed, TrackedTensor):
        # The same object, so that whoever took a view of it finds that it was changed since.
        changed.origin.leaves.update(leaves)
        changed.origin.parent, changed.origin.func = None, operation.name
    else:
        become(changed, Origin(interceptor, graph, graph.detach(), leaves, None, operation.name))
    return None if result is None else changed


def _refusal(operation: Operation) -> str:
    """Return the error text for an in-place operation that cannot be followed."""
    names = ", ".join(dict.fromkeys(name for tracked in operation.tracked for name in tracked.origin.names))
    return (
        f"parameter '{names}' takes part in an in-place {operation.name.strip('_')} on a view or buffer, on memory "
        "that other tensors share, or together with per-sample data, so that it cannot be followed. Write it out of "
        "place (torch.cat, torch.stack, index_put, w = w * x), or freeze the parameter."
    )


def refuse_data(operation: Operation) -> None:
    """Refuse to write per-sample data into what was computed from parameters alone."""
    if operation.is_in_place and isinstance(operation.args[0], TrackedTensor):
        raise UnsupportedModelError(_refusal(operation))
