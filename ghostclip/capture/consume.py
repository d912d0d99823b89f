"""Run an operation that consumes tracked tensors, and leave a use behind.

Three ways, the first that fits: a registered rule (factors from the saved input and the gradient), spreading over the
batch (elementwise operations, tensors with a batch axis of their own), and the general way, which asks autograd for the
gradient of one sample after the other through this one operation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ghostclip.capture import broadcast
from ghostclip.capture.batch_axis import RowMap, candidates
from ghostclip.capture.derive import batched_grad, spread_over
from ghostclip.capture.nodes import Region, enter_graph, keep, own, source
from ghostclip.capture.probe import MAX_ATTEMPTS
from ghostclip.capture.provenance import METADATA_KEY, routed_samples
from ghostclip.capture.tracked import TrackedTensor, plain, plain_leaves, replace_tracked, tracked_leaves
from ghostclip.capture.usage import Record, Site, Use
from ghostclip.errors import BatchAxisError, GhostClipError
from ghostclip.factors import Dense, Factor
from ghostclip.rules import Call, Captured, rule_for

if TYPE_CHECKING:
    from ghostclip.capture.session import Session

# Recurrent kernels: the batch axis of the output, and of the states behind it, is known from the call.
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


def consume(session: "Session", func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operation with detached parameters and register its use.

    Args:
        session: Who lent the tracked tensors.
        func: The torch function.
        name: Its name.
        args: Its arguments, some of them tracked, some of them data.
        kwargs: Its keyword arguments.

    Returns:
        What the function returns, in the graph.

    Raises:
        BatchAxisError: No axis of the data can hold the samples.
    """
    record = session.record
    try:
        bound = _bind(name, args, kwargs)
    except GhostClipError as error:
        place = session.describe_module(next(tracked_leaves((args, kwargs))).origin.names[0])
        raise type(error)(f"{place}: {error}") from None
    if bound is not None:
        use, captured = _use_of(session, record, name, args, kwargs, *bound)
        return _by_rule(session, use, captured, func, plain(args), plain(kwargs))
    if broadcast.is_elementwise(name):
        spread = _by_spreading(session, record, func, name, args, kwargs)
        if spread is not NotImplemented:
            return spread
    return _in_general(session, record, func, name, args, kwargs)


def _bind(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, TrackedTensor], Captured] | None:
    entry = rule_for(name)
    if entry is None:
        return None
    rule, names = entry
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    targets = {key: value for key, value in given.items() if isinstance(value, TrackedTensor)}
    if len(targets) != sum(1 for _ in tracked_leaves((args, kwargs))):
        return None
    call = Call(name, plain(given), frozenset(targets))
    captured = rule(call)
    return None if captured is None else (targets, captured)


def _use_of(
    session: "Session",
    record: Record,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: dict[str, TrackedTensor],
    captured: Captured,
) -> tuple[Use, Captured]:
    site = session.site(targets.values(), name, captured.form)
    sizes = captured.rows.shape[: captured.lead]
    maps = row_maps(captured.rows, sizes, record)
    if not maps:
        raise BatchAxisError(_no_axis(site, captured.rows, record))
    use = Use(site, record, targets, captured.factors, captured.lead, maps, lead_sizes=tuple(sizes))
    if not captured.rows.requires_grad:
        use.constant_key = session.constant_key(name, args, kwargs)
        if site.attempts < MAX_ATTEMPTS:
            session.witness(use.constant_key, captured.rows)
    return use, captured


def _by_rule(
    session: "Session", use: Use, captured: Captured, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    # Kept before the operation runs, which may change its input in place (then reading it back is an error).
    use.node = keep(captured.saved) if captured.saved else None
    output = func(*args, **kwargs)
    output = own(output) if output.requires_grad else enter_graph(output, session.anchor)
    session.register(use)
    output.register_hook(_deliver(session, use))
    output.grad_fn.metadata[METADATA_KEY] = use
    return output


def _deliver(session: "Session", use: Use) -> Callable[[Tensor], Tensor]:
    def hook(grad: Tensor) -> Tensor:
        # Handed on to autograd as well: one copy serves the norm, the clipped sum and the layer's own backward.
        grad = grad.contiguous()
        session.deliver(use, grad)
        return grad

    return hook


def row_maps(rows: Tensor, sizes: Sequence[int], record: Record) -> list[RowMap]:
    """List the row maps for a layer's input: routed rows by their index, others by size.

    Args:
        rows: The input.
        sizes: Sizes of its leading axes.
        record: The forward.

    Returns:
        Row maps, the preferred one first; empty when none fits.
    """
    batch_size, axis = record.batch_size, record.axis
    if batch_size > 1 and sizes and not (axis == 1 and len(sizes) > 1):
        listed = routed_samples(rows, 0, batch_size, axis)
        if listed is not None:
            return [RowMap("listed", 0, listed.to(rows.device))]
    return candidates(sizes, batch_size, axis=axis)


def _no_axis(site: Site, rows: Tensor, record: Record) -> str:
    return (
        f"{site.describe()}: an input of shape {tuple(rows.shape)} has no axis for the {record.batch_size} samples of this "
        "batch, so its rows cannot be assigned to samples. Give every sample its own rows (batch axis first, or "
        "batch_first=False for axis 1), or freeze the parameter."
    )


def _by_spreading(
    session: "Session", record: Record, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Spread every tracked argument over the batch axis of the data; ``NotImplemented`` where none is found."""
    tree = (args, kwargs)
    data = [tensor for tensor in plain_leaves(tree) if session.is_data(tensor, name)]
    shapes = [tensor.shape for tensor in plain_leaves(tree)] + [t.origin.value.shape for t in tracked_leaves(tree)]
    dims = len(torch.broadcast_shapes(*shapes))
    found = broadcast.row_axis_of(data, dims, record.batch_size, record.axis)
    if found is None:
        return NotImplemented
    axis, size, witness = found
    listed = routed_samples(witness, axis - dims + witness.dim(), record.batch_size, record.axis)
    if record.batch_size == 1:
        listed = None
    maps = broadcast.map_of_rows(size, record.batch_size, record.axis, listed)
    if not maps:
        return NotImplemented

    def enter(tracked: TrackedTensor) -> Tensor:
        spread = broadcast.Spread(
            tracked.origin.value,
            dims=dims,
            row_axis=axis,
            rows=size,
            row_map=maps[0],
            batch_size=record.batch_size,
        )
        return _spread_use(session, record, name, tracked, spread, maps)

    return func(*replace_tracked(args, enter), **replace_tracked(kwargs, enter))


def _spread_use(
    session: "Session",
    record: Record,
    name: str,
    tracked: TrackedTensor,
    spread: broadcast.Spread,
    maps: list[RowMap],
) -> Tensor:
    site = session.site([tracked], name, "dense")

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Any) -> Mapping[str, Factor]:
        return {"value": spread.factor(grad)}

    moved = [RowMap(m.kind, spread.row_axis, m.samples) for m in maps[:1]]
    use = Use(site, record, {"value": tracked}, factors, spread.row_axis + 1, moved)
    entered = source(spread.tensor, session.anchor)
    session.register(use)
    entered.register_hook(_deliver(session, use))
    return entered


def _in_general(
    session: "Session", record: Record, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let any other operation be consumed exactly: one gradient a sample, through this operation alone.

    The operation runs once, in a small graph of its own behind one node of the user's graph, so that random operations are
    not repeated and nothing upstream is touched.
    """
    if is_in_place(name):
        return _in_place(session, record, func, name, args, kwargs)
    tracked = list({id(t): t for t in tracked_leaves((args, kwargs))}.values())
    if record.batch_size > 1 and all(spread_over(t, record.batch_size, record.axis) for t in tracked):
        return _with_own_rows(session, record, func, name, args, kwargs)
    site = session.site(tracked, name, "one gradient a sample")
    leaves, structure = tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if _is_plain(leaf)]
    entered = {id(t): t.origin.value.detach().requires_grad_() for t in tracked}
    shape_of_result: list[Any] = []

    def run(local: Sequence[Tensor]) -> list[Tensor]:
        own = [entered.get(id(leaf), leaf) for leaf in leaves]
        for place, tensor in zip(places, local, strict=True):
            own[place] = tensor
        local_args, local_kwargs = tree_unflatten(own, structure)
        items, spec = tree_flatten(func(*local_args, **local_kwargs))
        shape_of_result[:] = [items, spec]
        return [item for item in items if isinstance(item, Tensor) and item.requires_grad]

    inputs = list(entered.values())
    targets = {str(number): t for number, t in enumerate(tracked)}
    use = Use(site, record, targets, _unset, 1, [])

    def deliver(outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        pairs = zip(outputs, grads, use.maps, strict=True)
        arrived = [(output, grad, row_map) for output, grad, row_map in pairs if grad is not None]
        use.factors = lambda saved, grad, split: _one_by_one(arrived, inputs, record.batch_size)
        if arrived:
            session.deliver(use, arrived[0][1])

    session.register(use)
    results = list(Region.apply(run, deliver, session.anchor, *[leaves[place] for place in places]))
    use.maps = [_output_map(output, place, name, args, record, site) for place, output in enumerate(results)]
    use.lead = use.maps[0].axis + 1
    items, spec = shape_of_result
    fresh = iter(results)
    merged = [next(fresh) if isinstance(item, Tensor) and item.requires_grad else item for item in items]
    return tree_unflatten(merged, spec)


def _with_own_rows(
    session: "Session", record: Record, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let tensors that were spread over the batch already enter any operation as they are."""

    def enter(tracked: TrackedTensor) -> Tensor:
        value = tracked.origin.value
        rows = RowMap("axis")
        axis = record.axis
        spread = broadcast.Spread(
            value, dims=value.dim(), row_axis=axis, rows=value.shape[axis], row_map=rows, batch_size=record.batch_size
        )
        return _spread_use(session, record, name, tracked, spread, [rows])

    return func(*replace_tracked(args, enter), **replace_tracked(kwargs, enter))


def is_in_place(name: str) -> bool:
    """Return whether an operation changes its first argument, by its name."""
    return name in ("__setitem__", "index_put_") or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _in_place(
    session: "Session", record: Record, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an in-place operation on a copy of its first argument, then write the result back."""
    changed = args[0]

    def on_copy(first: Tensor, *rest: Any, **named: Any) -> Tensor:
        copy = first.clone()
        func(copy, *rest, **named)
        return copy

    result = _in_general(session, record, on_copy, f"copied {name}", args, kwargs)
    changed.copy_(result)
    return None if name == "__setitem__" else changed


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, TrackedTensor)


def _unset(saved: Sequence[Tensor], grad: Tensor, split: Any) -> Mapping[str, Factor]:
    raise AssertionError("set when the gradient arrives")


def _output_map(output: Tensor, place: int, name: str, args: tuple[Any, ...], record: Record, site: Site) -> RowMap:
    axis = record.axis
    if name in _RECURRENT:
        axis = 0 if (place == 0 and bool(args[-1])) else 1
        if output.dim() == 3 and output.shape[axis] == record.batch_size:
            return RowMap("whole") if record.batch_size == 1 else RowMap("axis", axis)
    maps = candidates(output.shape, record.batch_size, axis=axis) if output.dim() else []
    if not maps:
        raise BatchAxisError(_no_axis(site, output, record))
    return maps[0]


def _one_by_one(
    arrived: Sequence[tuple[Tensor, Tensor, RowMap]], inputs: Sequence[Tensor], batch_size: int
) -> Mapping[str, Factor]:
    """Return per-sample gradients of ``inputs`` by masking the output gradient to one sample at a time."""
    totals: dict[str, Tensor] = {}
    for output, grad, row_map in arrived:
        if row_map.kind == "whole":
            masked_B = grad.unsqueeze(0)
        else:
            moved = broadcast.own_rows(grad.movedim(row_map.axis, 0), row_map, batch_size)
            masked_B = moved.movedim(1, row_map.axis + 1)
        for number, found in enumerate(batched_grad(output, inputs, masked_B)):
            if found is not None:
                key = str(number)
                totals[key] = totals[key] + found if key in totals else found
    return {key: Dense(total) for key, total in totals.items()}
