"""Checks of a trainer's loss on two records, before the first step: it is the model's own, and a record's alone.

What a record's loss is may depend on the records beside it without any mixing of rows: through the length that they are
padded to (a softmax over all positions, positions counted from a padded end), which no engine sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ghostclip.data.out_of_memory import count_rows, rows_of
from ghostclip.errors import LossReductionError, SampleMixingError
from ghostclip.language.record_losses import OWN

Loss = Callable[[dict[str, Any]], Tensor | None]


def require_own_loss(batch: Mapping[str, Any], *, own: Loss, ours: Loss, tolerance: float) -> None:
    """Check, on one record, that the loss which stands in the place of the model's own is the same.

    Args:
        batch: A few records.
        own: The model's own loss of a batch; None where it has none.
        ours: The loss in its place.
        tolerance: How far they may differ by rounding, relative.

    Raises:
        LossReductionError: If the model adds something to it, or computes another one.
    """
    for record in _records(batch):
        theirs = own(dict(record))
        if theirs is None or not bool(theirs.isfinite().all()):
            continue
        found = ours(dict(record))
        if found is not None and not _alike(theirs, found, tolerance):
            raise LossReductionError(
                f"the model's own loss of one record is {float(theirs):.5g}, that of the record's labels "
                f"{float(found):.5g}, so that it adds something (a balancing or auxiliary loss?) or computes another. "
                f"Switch that off in the model's config, or {OWN}."
            )


def require_padding_without_effect(batch: Mapping[str, Any], *, ours: Loss, tolerance: float) -> None:
    """Check that the loss of a record is the same without the padding that longer records give it.

    Args:
        batch: A few records of different lengths, with an attention mask.
        ours: The loss of a batch.
        tolerance: How far they may differ by rounding, relative.

    Raises:
        SampleMixingError: If it is not.
    """
    for record in _records(batch):
        cut = _without_padding(record)
        if cut is None:
            continue
        padded, alone = ours(dict(record)), ours(cut)
        if padded is not None and alone is not None and not _alike(padded, alone, tolerance):
            raise SampleMixingError(
                f"a record's loss is {float(alone):.5g} alone and {float(padded):.5g} with the padding of a longer "
                "record beside it, so that the longest record of a batch changes all others' gradients. Let the "
                "collator pad all records to one length (padding='max_length'), or on the side and with the positions "
                "that the model expects."
            )


def _records(batch: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    size = count_rows(batch) or 0
    for number in range(size):
        yield rows_of(dict(batch), size, slice(number, number + 1))


def _without_padding(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a record without the columns that its mask leaves out; None where that cannot be told."""
    mask = record.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or bool(mask.all()) or not bool(mask.any()):
        return None
    kept = mask[0] != 0
    cut: dict[str, Any] = {}
    for name, value in record.items():
        along = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == len(kept)
        if along and name == "labels" and bool((value[0, ~kept] != -100).any()):
            return None
        cut[name] = value[:, kept] if along else value
    return cut


def _alike(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return abs(float(one) - float(other)) <= tolerance * max(1.0, abs(float(one)))
