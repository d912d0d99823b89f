"""Forward and backward of a batch in parts; where memory runs out, again in smaller ones, each sample counted once."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ghostclip.clipping.savepoint import Savepoint
from ghostclip.data.memory import is_out_of_memory
from ghostclip.data.size_policies import SizePolicy
from ghostclip.errors import DataError
from ghostclip.evidence.dependence import batch_axis_of
from ghostclip.optim import DPOptimizer

_log = logging.getLogger(__name__)


def run_in_parts(
    optimizer: DPOptimizer, batch: Any, size: int, work: Callable[[Any], Any], policy: SizePolicy
) -> list[Any]:
    """Run forward and backward on a batch, in parts as small as memory asks for.

    Where memory runs out, wherever that is, the sums are put back as they were before the batch and all of it is run
    again in smaller parts: a sample is in the sum once or not at all. Parts share no sample, so that together they
    count as one pass.

    Args:
        optimizer: The private optimizer.
        batch: What the loader handed out.
        size: Its number of samples.
        work: Runs forward and backward on a part of the batch.
        policy: How large a part may be.

    Returns:
        What `work` returned, part by part, of the run that succeeded.

    Raises:
        DataError: If the batch cannot be split.

    Cost:
        Where other sums of the same logical batch exist, a copy of them on their device, made at the end of the first
        backward.
    """
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
    """Run the parts of a batch until all of them fit.

    Args:
        batch: What the loader handed out.
        size: Its number of samples.
        work: Runs forward and backward on a part of the batch.
        policy: How large a part may be.
        place: What puts the sums back as they were before the batch, and the axis of the samples.

    Returns:
        What `work` returned, part by part, of the run that succeeded.
    """
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
    """Return the size of the next of nearly equal parts.

    Args:
        left: Samples that are left.
        most: The largest part.

    Returns:
        Samples.
    """
    return math.ceil(left / max(1, math.ceil(left / most)))


def _attempt(part: Any, work: Callable[[Any], Any], *, again: bool, undo: Callable[[], None]) -> tuple[bool, Any]:
    """Run a part.

    Args:
        part: Some samples.
        work: Runs forward and backward on them.
        again: Whether fewer of them may be tried where memory runs out.
        undo: Puts the sums back as they were.

    Returns:
        True and its result, or False where memory ran out.
    """
    try:
        return True, work(part)
    except BaseException as error:
        undo()
        if not again or not is_out_of_memory(error):
            raise
    # Outside of the handler: the traceback kept the attempt's tensors alive until here.
    return False, None


def count_rows(batch: Any, *, axis: int = 0) -> int | None:
    """Return the number of samples of a batch, which its first tensor tells.

    Args:
        batch: Tensors, in tuples, lists and mappings of any depth.
        axis: Where its samples lie.

    Returns:
        The number; None where there is no tensor with axes.
    """
    if isinstance(batch, torch.Tensor):
        return batch.shape[axis if axis < batch.dim() else 0] if batch.dim() else None
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((found for found in (count_rows(item, axis=axis) for item in items) if found is not None), None)


def rows_of(batch: Any, size: int, rows: slice, *, axis: int = 0) -> Any:
    """Return some samples of a batch: of its tensors the rows, of lists with one entry a sample the entries.

    Args:
        batch: Tensors, in tuples, lists and mappings of any depth; anything else is kept as it is.
        size: Its number of samples.
        rows: Which samples.
        axis: Where its samples lie; axis 0 in tensors that have no such axis of that size.

    Returns:
        A batch of the same structure.

    Raises:
        DataError: If nothing in it has that many rows.
    """
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
