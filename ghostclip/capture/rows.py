"""Which samples the rows of an operation's data may belong to, before there is any evidence."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ghostclip.capture.batch_axis import RowMap, candidates
from ghostclip.capture.growth import UNKNOWN
from ghostclip.capture.provenance import routed_samples
from ghostclip.capture.reorder import DOUBTFUL

if TYPE_CHECKING:
    from ghostclip.capture.session import Session


def row_maps(session: "Session", rows: Tensor, sizes: Sequence[int], known: int = UNKNOWN) -> list[RowMap]:
    """List the row maps for a layer's input: routed rows by their index, others by size.

    Args:
        session: Whose forward it is.
        rows: The input.
        sizes: Sizes of its leading axes.
        known: The axis that holds samples, `CONSTANT` or `UNKNOWN`.

    Returns:
        Row maps, the preferred one first; empty when none fits.
    """
    batch_size, axis = session.record.batch_size, session.record.axis
    if batch_size > 1 and known >= 0:
        listed = listed_rows(session, rows, 0) if known == 0 else None
        return rows_along(known, sizes, batch_size, axis, listed)
    if batch_size > 1 and sizes and not (axis == 1 and len(sizes) > 1):
        listed = listed_rows(session, rows, 0)
        if listed is not None:
            # A selection along the first axis is one of samples only where that axis holds them: the evidence decides.
            return [RowMap("listed", 0, listed), *candidates(sizes, batch_size, axis=axis)]
    if batch_size > 1 and id(rows) in session.record.inputs and axis < len(sizes) and sizes[axis] == batch_size:
        # What the model was called with has its batch where that was declared, whatever other axis has that size.
        return [RowMap("axis", axis)]
    return candidates(sizes, batch_size, axis=axis)


def rows_along(axis: int, sizes: Sequence[int], batch_size: int, expected: int, listed: Tensor | None) -> list[RowMap]:
    """List the row maps along one axis.

    Args:
        axis: The axis.
        sizes: Sizes of the leading axes.
        batch_size: B.
        expected: The expected batch axis, which says in which order folded rows are likelier.
        listed: The sample of every row, where rows were selected.

    Returns:
        Row maps, the preferred one first.
    """
    maps = [row_map for row_map in candidates(sizes, batch_size, axis=expected) if row_map.axis == axis]
    return maps if listed is None else [RowMap("listed", 0, listed), *maps]


def listed_rows(session: "Session", tensor: Tensor, axis: int) -> Tensor | None:
    """Return the sample of every row of a tensor whose rows were selected or reordered on the way to it.

    Args:
        session: Whose forward it is.
        tensor: What carries rows of samples.
        axis: The axis whose rows are meant.

    Returns:
        Sample numbers, shape ``(tensor.shape[axis],)``, int64, on the tensor's device; None where rows lie as the
        batch does, or where only the evidence can tell.
    """
    record = session.record
    if tensor.requires_grad:
        listed = routed_samples(tensor, axis, record.batch_size, record.axis)
    else:
        listed = session.watch.rows_of(tensor)
        if listed is DOUBTFUL or (listed is not None and (axis != 0 or listed.numel() != tensor.shape[0])):
            record.unproven, record.reordered, listed = True, True, None
    record.reordered = record.reordered or (listed is not None and not tensor.requires_grad)
    record.routed = record.routed or listed is not None
    return None if listed is None else listed.to(tensor.device)
