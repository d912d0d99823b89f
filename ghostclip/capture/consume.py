"""Run an operation that consumes tracked tensors, and leave a use behind.

Three ways, the first that fits: a registered rule (factors from the saved input and the gradient), spreading over the
batch (elementwise operations, tensors with a batch axis of their own), and the general way of ``general.py``.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ghostclip.capture import broadcast
from ghostclip.capture.attach import carry_out, delivery
from ghostclip.capture.batch_axis import RowMap
from ghostclip.capture.derive import derive, spread_over
from ghostclip.capture.general import in_general
from ghostclip.capture.nodes import source
from ghostclip.capture.operation import Operation
from ghostclip.capture.rewrite import rewritten
from ghostclip.capture.rows import listed_rows, row_maps
from ghostclip.capture.tracked import TrackedTensor, plain
from ghostclip.capture.usage import Use
from ghostclip.capture.ways import GENERAL, OWN_ROWS, RULE, RULE_ON_COPIES, SPREAD, SPREAD_ROUTED
from ghostclip.errors import BatchAxisError, GhostClipError
from ghostclip.factors import Factor
from ghostclip.rules import Call, Captured, rule_for

if TYPE_CHECKING:
    from ghostclip.capture.session import Session

# One of two tensors is brought to the other's dtype, device or shape; the other's values take no part.
_LIKE = {"to", "type_as", "view_as", "reshape_as", "expand_as"}


def consume(session: "Session", operation: Operation) -> Any:
    """Run the operation with detached parameters and register its use.

    Args:
        session: Who lent the tracked tensors.
        operation: The operation; some of its arguments are tracked, some are data.

    Returns:
        What the function returns, in the graph.

    Raises:
        BatchAxisError: No axis of the data can hold the samples.
    """
    again = rewritten(operation)
    if again is not None:
        return again()
    if operation.name in _LIKE:
        return _like(operation)
    bound = _bound(session, operation)
    session.sites.arrive(operation)
    own_rows = _own_rows(session, operation)
    stacked = all(tracked.origin.value.dim() > 2 for tracked in operation.tracked)
    if own_rows and stacked and _takes(session, OWN_ROWS):
        # One matrix for every sample is no product over letters that all samples share.
        return _with_own_rows(session, operation)
    if bound is not None:
        maps = _maps(session, bound[1])
        copied = stacked and any(tracked.origin.spread for tracked in operation.tracked)
        if maps and _takes(session, RULE_ON_COPIES if copied else RULE):
            return _by_rule(session, operation, bound, maps)
        if not maps and not _in_graph(operation):
            # The samples' number stands on an axis that cannot hold samples: a constant.
            return _derived(operation)
    return _without_rule(session, operation, own_rows=own_rows)


def _without_rule(session: "Session", operation: Operation, *, own_rows: bool) -> Any:
    if broadcast.is_elementwise(operation.name):
        spread = _by_spreading(session, operation)
        if spread is not NotImplemented:
            return spread
    if own_rows and _takes(session, OWN_ROWS):
        return _with_own_rows(session, operation)
    return _otherwise(session, operation)


def _takes(session: "Session", way: str) -> bool:
    return session.sites.ways.take(way, session.record)


def _like(operation: Operation) -> Any:
    return _derived(operation) if isinstance(operation.args[0], TrackedTensor) else operation.run_plain()


def _derived(operation: Operation) -> Any:
    return derive(operation.func, operation.name, operation.args, operation.kwargs)


def _in_graph(operation: Operation) -> bool:
    return any(tensor.requires_grad for tensor in operation.plain)


def _own_rows(session: "Session", operation: Operation) -> bool:
    """Return whether the tracked tensors have one copy a sample already."""
    record = session.record
    if record.batch_size < 2 or operation.is_in_place:
        return False
    return all(spread_over(t, record.batch_size, record.axis) for t in operation.tracked)


def _otherwise(session: "Session", operation: Operation) -> Any:
    _takes(session, GENERAL)
    try:
        return in_general(session, operation)
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


def _bind(operation: Operation) -> tuple[dict[str, TrackedTensor], Captured] | None:
    entry = rule_for(operation.name)
    if entry is None or any(tracked.origin.value.is_complex() for tracked in operation.tracked):
        # Rules multiply without conjugating.
        return None
    rule, names = entry
    given = {**dict(zip(names, operation.args, strict=False)), **operation.kwargs}
    targets = {key: value for key, value in given.items() if isinstance(value, TrackedTensor)}
    if len(targets) != len(operation.tracked):
        return None
    captured = rule(Call(operation.name, plain(given), frozenset(targets)))
    return None if captured is None else (targets, captured)


def _maps(session: "Session", captured: Captured) -> list[RowMap]:
    """Return the ways in which an axis that a rule takes for rows can hold the samples."""
    return row_maps(session, captured.rows, tuple(captured.rows.shape[: captured.lead]))


def _by_rule(
    session: "Session", operation: Operation, bound: tuple[dict[str, TrackedTensor], Captured], maps: list[RowMap]
) -> Tensor:
    captured = bound[1]
    use = _use_of(session, operation, bound, maps)
    session.settled.learn(operation, use, captured)
    rows, saved = captured.rows, captured.saved
    return carry_out(session, use, operation.run_plain, rows=rows, saved=saved, order=captured.order)


def _use_of(
    session: "Session", operation: Operation, bound: tuple[dict[str, TrackedTensor], Captured], maps: list[RowMap]
) -> Use:
    (targets, captured), record = bound, session.record
    sizes = tuple(captured.rows.shape[: captured.lead])
    routed = maps[0].kind == "listed"
    way = session.sites.ways.taken
    site = session.sites.at(targets.values(), operation.name, captured.form, way=way, routed=routed)
    use = Use(site, record, targets, captured.factors, captured.lead, maps, lead_sizes=sizes)
    use.behind = captured.rows.grad_fn
    if not captured.rows.requires_grad:
        session.sites.doubt(use, operation, [captured.rows])
    return use


def _by_spreading(session: "Session", operation: Operation) -> Any:
    """Spread every tracked argument over the batch axis of the data; ``NotImplemented`` where none is found."""
    record = session.record
    data = [tensor for tensor in operation.plain if session.sites.is_data(tensor, operation.name)]
    shapes = [t.shape for t in operation.plain] + [t.origin.value.shape for t in operation.tracked]
    dims = len(torch.broadcast_shapes(*shapes))
    found = broadcast.row_axis_of(data, dims, record.batch_size, record.axis)
    if found is None:
        return NotImplemented
    axis, size, witness = found
    listed = None
    if record.batch_size > 1:
        listed = listed_rows(session, witness, axis - dims + witness.dim())
    if listed is not None and not _takes(session, SPREAD_ROUTED):
        listed = None
    maps = broadcast.map_of_rows(size, record.batch_size, record.axis, listed)
    if not maps or (listed is None and not _takes(session, SPREAD)):
        return NotImplemented
    rows = broadcast.RowAxis(axis, size, maps[0], record.batch_size)
    doubtful = None if witness.requires_grad else (operation, witness)

    def enter(tracked: TrackedTensor) -> Tensor:
        spread = broadcast.Spread(tracked.origin.value, dims, rows)
        return _enter_spread(session, operation.name, tracked, spread, doubtful)

    return operation.run(enter)


def _with_own_rows(session: "Session", operation: Operation) -> Any:
    """Let tensors that were spread over the batch already enter any operation as they are."""
    record = session.record
    rows = broadcast.RowAxis(record.axis, record.batch_size, RowMap("axis"), record.batch_size)

    def enter(tracked: TrackedTensor) -> Tensor:
        value = tracked.origin.value
        return _enter_spread(session, operation.name, tracked, broadcast.Spread(value, value.dim(), rows))

    return operation.run(enter)


def _enter_spread(
    session: "Session",
    name: str,
    tracked: TrackedTensor,
    spread: broadcast.Spread,
    doubtful: tuple[Operation, Tensor] | None = None,
) -> Tensor:
    way, routed = session.sites.ways.taken, spread.rows.row_map.kind == "listed"
    site = session.sites.at([tracked], name, "dense", way=way, routed=routed)

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Any) -> Mapping[str, Factor]:
        return {"value": spread.factor(grad)}

    row_map = RowMap(spread.rows.row_map.kind, spread.row_axis, spread.rows.row_map.samples)
    use = Use(site, session.record, {"value": tracked}, factors, spread.row_axis + 1, [row_map])
    if doubtful is not None:
        session.sites.doubt(use, doubtful[0], [doubtful[1]])
    entered = source(spread.tensor, session.anchor)
    session.register(use)
    entered.register_hook(delivery(session, use))
    return entered
