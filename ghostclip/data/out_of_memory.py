"""Out of memory in the middle of a logical batch: the same samples again, in smaller parts, each counted once."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ghostclip.errors import DataError
from ghostclip.optim import DPOptimizer

_log = logging.getLogger(__name__)

_MESSAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory ran out, on whatever device.

    Args:
        error: The exception.

    Returns:
        Whether a smaller piece of the same work may succeed.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


def run_in_parts(
    optimizer: DPOptimizer, batch: Any, size: int, work: Callable[[Any], Any], failed: Callable[[int], None]
) -> list[Any]:
    """Run forward and backward on a physical batch, on halves of it where memory runs out.

    Before each attempt the state of the sums is kept, and put back if the attempt fails, wherever it failed: a sample
    is in the sum once or not at all. Parts share no sample, so that together they count as one pass.

    Args:
        optimizer: The private optimizer.
        batch: What the loader handed out.
        size: Its number of samples.
        work: Runs forward and backward on a part of the batch.
        failed: Is told the size of each part that did not fit.

    Returns:
        What `work` returned, part by part.

    Raises:
        DataError: If the batch cannot be split.

    Cost:
        While other sums of the same logical batch exist, a copy of them in the memory of the CPU.
    """
    clipper = optimizer.clipper
    passes = clipper.backward_passes
    results: list[Any] = []
    waiting = [(batch, size)]
    while waiting:
        part, count = waiting.pop(0)
        fits, result = _attempt(optimizer, part, count, work)
        if fits:
            results.append(result)
            continue
        failed(count)
        _log.warning("a physical batch did not fit in memory; it is run again in two parts")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        half = (count + 1) // 2
        waiting[:0] = [
            (rows_of(part, count, slice(0, half)), half),
            (rows_of(part, count, slice(half, count)), count - half),
        ]
    clipper.merge_passes(since=passes)
    return results


def _attempt(optimizer: DPOptimizer, part: Any, count: int, work: Callable[[Any], Any]) -> tuple[bool, Any]:
    """Run a part; on success return its result, otherwise leave the sums as they were."""
    savepoint = optimizer.clipper.savepoint()
    try:
        return True, work(part)
    except BaseException as error:
        savepoint.restore()
        if count <= 1 or not is_out_of_memory(error):
            raise
    # Outside of the handler: the traceback kept the attempt's tensors alive until here.
    return False, None


def rows_of(batch: Any, size: int, rows: slice) -> Any:
    """Return some samples of a batch: of its tensors the rows, of lists with one entry a sample the entries.

    Args:
        batch: Tensors, in tuples, lists and mappings of any depth; anything else is kept as it is.
        size: Its number of samples.
        rows: Which samples.

    Returns:
        A batch of the same structure.

    Raises:
        DataError: If nothing in it has that many rows.
    """
    found: list[bool] = []

    def pick(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if item.dim() == 0 or item.shape[0] != size:
                return item
            found.append(True)
            return item[rows]
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
            f"a batch of {size} samples did not fit in memory and cannot be split: no tensor in it has {size} rows. "
            "Use a smaller max_physical_batch_size."
        )
    return picked


def _like(item: Any, entries: Iterator[Any] | Any) -> Any:
    """Return entries in a sequence of the same type, named tuples included."""
    return type(item)(*entries) if hasattr(item, "_fields") else type(item)(entries)
