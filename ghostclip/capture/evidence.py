"""When a session asks for evidence: of the model's outputs in its first forwards, of the first per-sample losses."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.backward_entry import is_output
from ghostclip.capture.batch_axis import RowMap, candidates, samples_axis
from ghostclip.capture.chain import PICKED, Edge, shape_at
from ghostclip.capture.places import Place, place_at
from ghostclip.capture.probe import Probe, Start, ask, sample_sets, starts
from ghostclip.capture.provenance import METADATA_KEY, only_sample, samples_at
from ghostclip.capture.unchecked import LOSSES
from ghostclip.capture.usage import Record, Site
from ghostclip.errors import LossReductionError, SampleMixingError

if TYPE_CHECKING:
    from ghostclip.capture.session import Session


# How far below a value that mixes samples the operation that does so is looked for.
_MAX_DESCENT: Final = 24
MIXED: Final = (
    "the loss of one sample depends on other samples' outputs (a contrastive loss, or one normalised over the batch), "
    "so removing a sample changes every other's gradient and no bound holds.{} Write the loss of each sample from its "
    "own outputs."
)

_NO_SUM: Final = (
    "the loss is no sum over samples: several samples enter '{}' together, so removing one changes every other's "
    "gradient and no bound holds. {}"
)
# Operations whose gradient goes to the picked entries alone.
_PICKING: Final = frozenset(
    {
        "TopkBackward0", "SortBackward0", "SortBackward1", "KthvalueBackward0", "MedianBackward1", "NanmedianBackward1",
        "ModeBackward0", "MaxBackward0", "MinBackward0", "CummaxBackward0", "CumminBackward0", "AminBackward0",
        "AmaxBackward0",
    }
)  # fmt: skip
_MAX_NODES: Final = 4096


# Operations of one value, entry by entry; others of their operands have no gradient.
_ENTRYWISE: Final = frozenset(
    {
        "Abs",
        "Celu",
        "Clamp",
        "ClampMax",
        "ClampMin",
        "Clone",
        "Cos",
        "Div",
        "Elu",
        "Erf",
        "Erfc",
        "Exp",
        "Exp2",
        "Expm1",
        "Gelu",
        "Hardshrink",
        "Hardsigmoid",
        "Hardswish",
        "Hardtanh",
        "LeakyRelu",
        "Log",
        "Log10",
        "Log1p",
        "Log2",
        "LogSigmoid",
        "MaskedFill",
        "Maximum",
        "Minimum",
        "Mish",
        "Mul",
        "NanToNum",
        "Neg",
        "Pow",
        "Reciprocal",
        "Relu",
        "Rsqrt",
        "Sigmoid",
        "Silu",
        "Sin",
        "Softplus",
        "Softshrink",
        "Sqrt",
        "Tanh",
        "Threshold",
        "ToCopy",
        "Where",
    }
)


@dataclass(frozen=True)
class Ends:
    """Values that a loss is linear in, of one shape, whose rows belong together.

    Attributes:
        edges: Their places in the graph.
        name: The operation that made them or consumed them.
        classes: Axes that cannot be samples.
        passed: The values between the scalar and these.
    """

    edges: tuple[Edge, ...]
    name: str
    classes: tuple[int, ...] = ()
    passed: Sequence[Edge] = ()


@contextmanager
def _listening(session: "Session", probe: Probe) -> Iterator[None]:
    session.listener = probe
    try:
        yield
    finally:
        session.listener = None


def is_to_prove(session: "Session") -> bool:
    """Return whether the latest forward is one that evidence is asked for."""
    return session.probes and session.record.unproven and session.record.batch_size > 1


def probe_outputs(session: "Session", outputs: list[Tensor]) -> Probe | None:
    """Probe the latest forward from the model's outputs if it passed call sites that are not proven.

    Args:
        session: Whose forward it was.
        outputs: The model's output tensors.

    Returns:
        The probe with what it found; None where there was nothing to prove or no output to start from.

    Raises:
        BatchAxisError: No output has an axis that could hold the samples.
    """
    record = session.record
    if not is_to_prove(session):
        return None
    first: Probe | None = None
    states = [(site, site.chosen, site.attempts) for site in session.sites.table.values()]
    for begun in starts(outputs, record=record, known=session.sites.outputs):
        probe = Probe(set(), session.describe_module, begun=begun)
        if first is not None:
            _restore(states)
        with _listening(session, probe):
            ask(probe, begun, batch_size=record.batch_size, run=session.run_backward)
        if not probe.failures:
            return probe
        first = first or probe
    return first


def _restore(states: list[tuple[Site, tuple[str, int] | None, int]]) -> None:
    """Forget what a wrong reading of the outputs seemed to show."""
    for site, chosen, attempts in states:
        site.chosen, site.attempts = chosen, attempts


def probe_losses(session: "Session", losses: Tensor) -> None:
    """Prove that one sample's loss touches that sample's rows only.

    Args:
        session: Whose forward the losses come from.
        losses: Per-sample losses, shape ``(B,)``.

    Raises:
        SampleMixingError: It touches others' (a loss that compares samples, or one normalised over the batch).
    """
    sample = session.record.batch_size // 2
    begun = [Start(Place.of(losses), RowMap("axis", 0))]
    if not _keeps_apart(session, begun, [{sample}], session.record.batch_size):
        raise SampleMixingError(MIXED.format(""))
    session.unchecked.ran(LOSSES)


def rows_of_terms(
    session: "Session", ends: Sequence[Ends], record: Record, *, advice: str
) -> list[tuple[RowMap, int | None]]:
    """Prove that each of the values that a loss is linear in belongs to one sample, and tell to which.

    Any assignment of the values to samples will do, if no sample's values touch another sample's rows; so will one of
    values nearer to the scalar.

    Args:
        session: Whose forward the loss comes from.
        ends: The values.
        record: The forward.
        advice: What to do about a loss that is refused.

    Returns:
        For each of them how its rows map to samples, or those of which value before it (None for its own).

    Raises:
        LossReductionError: Some value has no rows of samples: the loss is no sum over them.
        SampleMixingError: There is no such assignment.
    """
    for end in ends:
        picking = _picks_among_samples(end, record)
        if picking:
            raise LossReductionError(_NO_SUM.format(in_words(picking), advice))
    ends = [replace(end, edges=tuple(map(_beneath, end.edges))) for end in ends]
    readings = [_readings(end, record) for end in ends]
    first = [start for end, maps in zip(ends, readings, strict=True) for start in _starts(end, maps[:1])]
    sets, size = sample_sets(record.batch_size), record.batch_size
    if session.probes:
        session.unchecked.ran(LOSSES)
    if all(readings) and (not session.probes or _keeps_apart(session, first, sets, size)):
        return [(maps[0], None) for maps in readings]
    return [_rows_of(session, end, record, sets, advice) for end in ends]


def _beneath(edge: Edge) -> Edge:
    """Return the value that one was made from entry by entry, by operations whose slope may be zero.

    A hinge that is not active, or a weight that happens to be zero, sends no gradient in one batch and may in the next.
    """
    while edge[0] is not None and not is_output(edge):
        behind = [following for following in edge[0].next_functions if following[0] is not None]
        name = re.sub(r"Backward\d*$", "", edge[0].name())
        if name not in _ENTRYWISE or len(behind) != 1 or shape_at(behind[0]) != shape_at(edge):
            break
        if place_at(*behind[0]) is None:
            break
        edge = behind[0]
    return edge


def _rows_of(
    session: "Session", end: Ends, record: Record, sets: Sequence[set[int]], advice: str
) -> tuple[RowMap, int | None]:
    tried = False
    before = [(Ends((edge,), end.name), number) for number, edge in enumerate(end.passed) if shape_at(edge)]
    for values, number in [(end, None), *reversed(before)]:
        for row_map in _readings(values, record):
            tried = True
            if not session.probes or _keeps_apart(session, _starts(values, [row_map]), sets, record.batch_size):
                return row_map, number
    if not tried:
        raise LossReductionError(_NO_SUM.format(in_words(end.name), advice))
    raise SampleMixingError(f"{MIXED.format(_where(session, end, record, sets))} {advice}")


def _picks_among_samples(ends: Ends, record: Record) -> str:
    """Return the name of an operation before some values that picks among samples; '' where there is none.

    A gradient tells which entry was picked, not that the others took part.
    """
    pending: list[Any] = [node for node, _ in ends.edges]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or len(seen) > _MAX_NODES:
            continue
        seen.add(node)
        axis = _torch.saved_or(node, "dim", None)
        if node.name() in _PICKING and isinstance(axis, int):
            sizes = shape_at(node.next_functions[0]) or ()
            if sizes and _torch.signed(axis) % len(sizes) == samples_axis(sizes, record.batch_size, record.axis):
                return str(node.name())
        if METADATA_KEY not in node.metadata:
            pending += [following for following, _ in node.next_functions]
    return ""


def _keeps_apart(session: "Session", begun: list[Start], sets: Sequence[set[int]], batch_size: int) -> bool:
    """Return whether gradients from each set of samples leave zeros in all other samples' rows."""
    states = [(site, site.chosen, site.attempts) for site in session.sites.table.values()]
    probe = Probe(set(), session.describe_module)
    with _listening(session, probe):
        ask(probe, begun, batch_size=batch_size, run=session.run_backward, sets=sets)
    # What layers' rows are was decided by the model's own outputs.
    _restore(states)
    return not probe.failures


def _starts(ends: Ends, maps: Sequence[RowMap]) -> list[Start]:
    places = [place_at(*edge) for edge in ends.edges]
    return [Start(place, row_map) for row_map in maps for place in places if place is not None]


def _readings(ends: Ends, record: Record) -> list[RowMap]:
    """List the ways in which values may belong to the samples, the likeliest first."""
    (node, number), size = ends.edges[0], record.batch_size
    only = only_sample(node, number, size, is_output)
    if only is not None:
        return [RowMap("one", 0, torch.tensor([only]))]
    shape = shape_at((node, number)) or ()
    maps = candidates(shape, size, axis=record.axis)
    listed = listing_at((node, number), record)
    if listed is not None:
        maps = [RowMap("listed", 0, listed), *maps]
    # A loss over classes is one term; its classes are no samples.
    return [row_map for row_map in maps if row_map.axis not in ends.classes]


def is_picked(edge: Edge) -> bool:
    """Return whether a value was picked from a model's output by an index or a mask.

    Args:
        edge: Its place in the graph.

    Returns:
        True also where that cannot be told.
    """
    pending, seen = [edge], 0
    while pending and seen < _MAX_NODES:
        current = pending.pop()
        if current[0] is None or is_output(current):
            continue
        seen += 1
        if current[0].name() in PICKED:
            return True
        pending += current[0].next_functions
    return bool(pending)


def listing_at(edge: Edge, record: Record) -> Tensor | None:
    """Return the sample of every row of a value that was put together from picked rows.

    Args:
        edge: Its place in the graph.
        record: The forward.

    Returns:
        Shape ``(n,)``, int64; None where rows lie as they come.
    """
    shape, size = shape_at(edge), record.batch_size
    return samples_at(*edge, shape[0], size, record.axis) if shape and shape[0] != size else None


def _where(session: "Session", ends: Ends, record: Record, sets: Sequence[set[int]]) -> str:
    """Name the operation that brings samples together, as far as the graph tells."""
    current, name = ends, ends.name
    for _ in range(_MAX_DESCENT):
        below = [
            Ends((edge,), edge[0].name())
            for node, _ in current.edges
            for edge in node.next_functions
            if edge[0] is not None and place_at(*edge) is not None
        ]
        name = current.edges[0][0].name()
        mixed = [end for end in below if not _any_fits(session, end, record, sets)]
        if not mixed or is_output(mixed[0].edges[0]):
            break
        current = mixed[0]
    return f" They meet in '{in_words(name)}'."


def _any_fits(session: "Session", end: Ends, record: Record, sets: Sequence[set[int]]) -> bool:
    maps = _readings(end, record)
    return any(_keeps_apart(session, _starts(end, [row_map]), sets, record.batch_size) for row_map in maps)


def in_words(name: str) -> str:
    """Return the name of a node as its operation is called.

    Args:
        name: The node's name, as ``TopkBackward0``.

    Returns:
        As ``topk``.
    """
    plain = re.sub(r"Backward\d*$", "", name.rpartition("::")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower()
