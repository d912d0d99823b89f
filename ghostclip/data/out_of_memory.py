"""Forward and backward of a batch in parts; where memory runs out, again in smaller ones, each sample counted once."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ghostclip._memory import is_out_of_memory
from ghostclip.clipping.store import Savepoint
from ghostclip.data.size_policies import SizePolicy
from ghostclip.errors import DataError
from ghostclip.evidence.dependence import batch_axis_of
from ghostclip.optim import DPOptimizer

_log = logging.getLogger(__name__)


def run_in_parts(
    optimizer: DPOptimizer, batch: Any, size: int, work: Callable[[Any], Any], policy: SizePolicy
) -> list[Any]:
    """Run forward and backward on a batch, in parts as small as memory requires, and return the results by part.

    Cost:
        Where other sums of the same logical batch exist, a copy of them on their device, made at the end of the first
        backward.
    """
    # Where memory runs out, wherever that is, the sums are restored to those before the batch and all of it is run
    # again in smaller parts: a sample is in the sum once or not at all. Parts share no sample, so that all of them
    # count as one pass.
    clipper = optimizer.clipper
    if clipper.is_sharded:
        raise DataError(
            "run(): parts of a batch are as many as this rank's memory asks for, and the ranks that hold the model in "
            "parts must run it equally often. Give BatchMemoryManager a max_physical_batch_size, and call the model "
            "in the loop itself."
        )
    passes = clipper.backward_passes
    with clipper.savepoint() as savepoint:
        results = _all_parts(batch, size, work, policy, (savepoint, clipper.axis))
    clipper.merge_passes(since=passes)
    return results


def _all_parts(
    batch: Any, size: int, work: Callable[[Any], Any], policy: SizePolicy, place: tuple[Savepoint, int]
) -> list[Any]:
    """Run the parts of a batch until all of them fit; ``place`` is a savepoint, and the axis of the samples."""
    savepoint, axis = place
    done = 0
    results: list[Any] = []
    while done < size or not results:
        count = _next_part(size - done, policy.size)
        part = batch if count == size else rows_of(batch, size, slice(done, done + count), axis=axis)
        policy.before()
        fits, result = _attempt(part, work, again=count > 1, undo=savepoint.restore)
        if fits:
            policy.after(count)
            done += count
            results.append(result)
            continue
        policy.failed(count)
        _log.warning("%d samples at once did not fit in memory; the batch is run again in smaller parts", count)
        done, results = 0, []
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return results


def _next_part(left: int, most: int) -> int:
    """Return the size of the next of nearly equal parts."""
    return math.ceil(left / max(1, math.ceil(left / most)))


def _attempt(part: Any, work: Callable[[Any], Any], *, again: bool, undo: Callable[[], None]) -> tuple[bool, Any]:
    """Run a part; return True and its result, or False and restored sums where memory ran out and ``again`` is set."""
    try:
        return True, work(part)
    except BaseException as error:
        undo()
        if not again or not is_out_of_memory(error):
            raise
    # Outside of the handler: the traceback kept the attempt's tensors alive until here.
    return False, None


def count_rows(batch: Any, *, axis: int = 0) -> int | None:
    """Return the number of samples of a nested batch, by its first tensor; None where there is no tensor with axes."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[axis if axis < batch.dim() else 0] if batch.dim() else None
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((found for found in (count_rows(item, axis=axis) for item in items) if found is not None), None)


def rows_of(batch: Any, size: int, rows: slice, *, axis: int = 0) -> Any:
    """Return some samples of a nested batch: rows of its tensors, entries of lists with one entry per sample."""
    found: list[bool] = []

    def pick(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            place = batch_axis_of(item, batch_size=size, axis=axis)
            if place is None:
                return item
            found.append(True)
            return item[rows] if place == 0 else item.narrow(place, rows.start, rows.stop - rows.start)
        if isinstance(item, Mapping):
            picked = {key: pick(value) for key, value in item.items()}
            return picked if type(item) is dict else type(item)(picked)  # type: ignore[call-arg]
        if isinstance(item, (list, tuple)):
            plain = len(item) == size and not any(isinstance(entry, (torch.Tensor, list, tuple)) for entry in item)
            return _like(item, item[rows] if plain else (pick(entry) for entry in item))
        return item

    picked = pick(batch)
    if not found:
        raise DataError(
            f"a batch of {size} samples is to be run in parts and cannot be split: no tensor in it has {size} rows. "
            "Use a max_physical_batch_size that takes it whole."
        )
    return picked


def _like(item: Any, entries: Iterator[Any] | Any) -> Any:
    """Return entries in a sequence of the same type, named tuples included."""
    return type(item)(*entries) if hasattr(item, "_fields") else type(item)(entries)
