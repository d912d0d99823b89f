"""Run an operation that consumes tracked tensors, and leave a use behind.

Three ways, the first that fits: a registered rule (factors from the saved input and the gradient), spreading over the
batch (elementwise operations, tensors with a batch axis of their own), and the general way of ``general.py``.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture import broadcast
from ghostclip.capture.attach import carry_out, delivery
from ghostclip.capture.batch_axis import RowMap
from ghostclip.capture.derive import derive
from ghostclip.capture.general import in_general
from ghostclip.capture.growth import CONSTANT, UNKNOWN, compared, tensors_in
from ghostclip.capture.nodes import source
from ghostclip.capture.operation import Operation
from ghostclip.capture.rewrite import rewritten
from ghostclip.capture.rows import listed_rows, row_maps
from ghostclip.capture.sites import Reading
from ghostclip.capture.tracked import TrackedTensor, plain
from ghostclip.capture.usage import Use
from ghostclip.errors import BatchAxisError, GhostClipError
from ghostclip.factors import Factor
from ghostclip.rules import Call, Captured, rule_for

if TYPE_CHECKING:
    from ghostclip.capture.session import Session

# One of two tensors is brought to the other's dtype, device or shape; the other's values take no part.
_LIKE = {"to", "type_as", "view_as", "reshape_as", "expand_as"}


def consume(session: "Session", operation: Operation, reading: Reading) -> Any:
    """Run the operation with detached parameters and register its use.

    Args:
        session: Who lent the tracked tensors.
        operation: The operation; some of its arguments are tracked, some are data.
        reading: Where samples lie in them.

    Returns:
        What the function returns, in the graph.

    Raises:
        BatchAxisError: No axis of the data can hold the samples.
    """
    again = rewritten(operation)
    if again is not None:
        with session.watch.inside():
            return again()
    if operation.name in _LIKE:
        return _like(operation)
    bound = _bound(session, operation)
    own = _own_axes(session, operation, reading)
    if own and all(tracked.origin.value.dim() > 2 for tracked in operation.tracked):
        # One matrix for every sample is no product over letters that all samples share.
        return _with_own_rows(session, operation, own)
    if bound is not None:
        captured = bound[1]
        sizes = tuple(captured.rows.shape[: captured.lead])
        known = _axis_of_rows(session, operation, captured, reading)
        maps = row_maps(session, captured.rows, sizes, known)
        if maps:
            return _by_rule(session, operation, bound, maps, known)
        if known < 0 and not _in_graph(operation):
            # The samples' number stands on an axis that cannot hold samples: a constant.
            return _derived(operation)
    if broadcast.is_elementwise(operation.name):
        spread = _by_spreading(session, operation, reading)
        if spread is not NotImplemented:
            return spread
    return _with_own_rows(session, operation, own) if own else _otherwise(session, operation, reading)


def _like(operation: Operation) -> Any:
    return _derived(operation) if isinstance(operation.args[0], TrackedTensor) else operation.run_plain()


def _derived(operation: Operation) -> Any:
    return derive(operation.func, operation.name, operation.args, operation.kwargs)


def _in_graph(operation: Operation) -> bool:
    return any(tensor.requires_grad for tensor in operation.plain)


def _own_axes(session: "Session", operation: Operation, reading: Reading) -> dict[int, int]:
    """Return the axis along which each tracked tensor has one copy a sample; empty where one has not."""
    if session.record.batch_size < 2 or operation.is_in_place:
        return {}
    axes = {id(tracked): session.sites.own_axis(tracked, reading) for tracked in operation.tracked}
    return {} if CONSTANT in axes.values() else axes


def _otherwise(session: "Session", operation: Operation, reading: Reading) -> Any:
    try:
        return in_general(session, operation, reading)
    except BatchAxisError:
        if _in_graph(operation) or operation.is_in_place:
            raise
        # As many entries as samples, and no room for samples in the result: a constant as well.
        return _derived(operation)


def _bound(session: "Session", operation: Operation) -> tuple[dict[str, TrackedTensor], Captured] | None:
    try:
        return _bind(operation)
    except GhostClipError as error:
        place = session.describe_module(operation.tracked[0].origin.names[0])
        raise type(error)(f"{place}: {error}") from None


def _bind(
    operation: Operation, in_place_of: Mapping[int, Tensor] | None = None
) -> tuple[dict[str, TrackedTensor], Captured] | None:
    """Ask the rule of an operation, of other tensors in the place of its own where some are given."""
    entry = rule_for(operation.name)
    if entry is None or any(tracked.origin.value.is_complex() for tracked in operation.tracked):
        # Rules multiply without conjugating.
        return None
    rule, names = entry
    given = {**dict(zip(names, operation.args, strict=False)), **operation.kwargs}
    targets = {key: value for key, value in given.items() if isinstance(value, TrackedTensor)}
    if len(targets) != len(operation.tracked):
        return None
    values = plain(given)
    if in_place_of is not None:
        values = _torch.tree_map(lambda item: in_place_of.get(id(item), item), given)
    captured = rule(Call(operation.name, values, frozenset(targets)))
    return None if captured is None else (targets, captured)


def _axis_of_rows(session: "Session", operation: Operation, captured: Captured, reading: Reading) -> int:
    """Return the axis of a rule's rows that holds samples, `CONSTANT` or `UNKNOWN`.

    Rows that the rule has turned are asked for once more, of tensors with the shapes for one sample more.
    """
    known = reading.axis(captured.rows)
    if known != UNKNOWN or not reading.grown or any(tensor is captured.rows for tensor in operation.plain):
        return known
    pairs = zip(tensors_in((operation.args, operation.kwargs)), reading.grown, strict=True)
    dummies = {id(tensor): _dummy(tensor, shape) for tensor, shape in pairs}
    try:
        more = _bind(operation, dummies)
    except (RuntimeError, ValueError, IndexError, GhostClipError):
        return UNKNOWN
    if more is None:
        return UNKNOWN
    axes = compared((tuple(captured.rows.shape),), (tuple(more[1].rows.shape),), session.record.batch_size)
    return UNKNOWN if axes is None else axes[0]


def _dummy(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    with _torch.subclasses_off():
        value = tensor.origin.value if isinstance(tensor, TrackedTensor) else tensor.detach()
        return value.new_zeros(()).expand(shape)


def _by_rule(
    session: "Session",
    operation: Operation,
    bound: tuple[dict[str, TrackedTensor], Captured],
    maps: list[RowMap],
    known: int,
) -> Tensor:
    (targets, captured), record = bound, session.record
    sizes = tuple(captured.rows.shape[: captured.lead])
    site = session.sites.at(targets.values(), operation.name, captured.form, routed=maps[0].routed)
    use = Use(site, record, targets, captured.factors, captured.lead, maps, lead_sizes=sizes)
    use.behind = captured.rows.grad_fn
    use.wants_input_gradient = _wants_gradient(session, [captured.rows])
    session.settled.learn(operation, use, captured, known)
    rows, saved = captured.rows, captured.saved
    return carry_out(session, use, operation.run_plain, rows=rows, saved=saved, order=captured.order)


def _wants_gradient(session: "Session", rows: Sequence[Tensor]) -> bool:
    return any(tensor.requires_grad or session.watch.rows_of(tensor) is not None for tensor in rows)


def _by_spreading(session: "Session", operation: Operation, reading: Reading) -> Any:
    """Spread every tracked argument over the batch axis of the data; ``NotImplemented`` where none is found."""
    record = session.record
    data = [tensor for tensor in operation.plain if session.sites.is_data(tensor, reading, operation.name)]
    shapes = [t.shape for t in operation.plain] + [t.origin.value.shape for t in operation.tracked]
    dims = len(torch.broadcast_shapes(*shapes))
    found = _grown_axis(data, dims, reading) or broadcast.row_axis_of(data, dims, record.batch_size, record.axis)
    if found is None:
        return NotImplemented
    axis, size, witness = found
    listed = None
    if record.batch_size > 1:
        listed = listed_rows(session, witness, axis - dims + witness.dim())
    maps = broadcast.map_of_rows(size, record.batch_size, record.axis, listed)
    if not maps:
        return NotImplemented
    rows = broadcast.RowAxis(axis, size, maps, record.batch_size)
    wants_gradient = _wants_gradient(session, [witness])

    def enter(tracked: TrackedTensor) -> Tensor:
        spread = broadcast.Spread(tracked.origin.value, dims, rows)
        return _enter_spread(session, operation.name, tracked, spread, wants_gradient=wants_gradient)

    return operation.run(enter)


def _grown_axis(data: Sequence[Tensor], dims: int, reading: Reading) -> tuple[int, int, Tensor] | None:
    """Return the axis of a broadcast result that holds samples, its size, and the tensor that shows it."""
    for tensor in sorted(data, key=lambda tensor: not tensor.requires_grad):
        axis = reading.axis(tensor)
        if axis >= 0:
            return dims - tensor.dim() + axis, tensor.shape[axis], tensor
    return None


def _with_own_rows(session: "Session", operation: Operation, own: Mapping[int, int]) -> Any:
    """Let tensors that were spread over the batch already enter any operation as they are."""
    record = session.record

    def enter(tracked: TrackedTensor) -> Tensor:
        value, axis = tracked.origin.value, own[id(tracked)]
        maps = broadcast.map_of_rows(value.shape[axis], record.batch_size, record.axis, None)
        rows = broadcast.RowAxis(axis, value.shape[axis], maps, record.batch_size)
        return _enter_spread(
            session, operation.name, tracked, broadcast.Spread(value, value.dim(), rows), wants_gradient=True
        )

    return operation.run(enter)


def _enter_spread(
    session: "Session", name: str, tracked: TrackedTensor, spread: broadcast.Spread, *, wants_gradient: bool
) -> Tensor:
    maps = [RowMap(row_map.kind, spread.row_axis, row_map.samples) for row_map in spread.rows.maps]
    site = session.sites.at([tracked], name, "dense", routed=maps[0].routed)

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Any) -> Mapping[str, Factor]:
        return {"value": spread.factor(grad, use.row_map)}

    use = Use(site, session.record, {"value": tracked}, factors, spread.row_axis + 1, maps)
    use.wants_input_gradient = wants_gradient
    entered = source(spread.tensor, session.anchor)
    session.register(use)
    entered.register_hook(delivery(session, use))
    return entered
