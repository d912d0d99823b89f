"""A logical batch run in parts: as large as memory allows, again in smaller ones where it runs out, each sample once.

`PhysicalBatches` is for loops that are written by others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ghostclip._memory import is_out_of_memory
from ghostclip.data.physical_batch_size import SizePolicy, attempt, given_size, learned_size
from ghostclip.errors import DataError
from ghostclip.evidence.dependence import batch_axis_of
from ghostclip.optim import DPOptimizer, private_optimizer

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
        done = 0
        results: list[Any] = []
        while done < size or not results:
            # Of nearly equal parts.
            count = math.ceil((size - done) / max(1, math.ceil((size - done) / policy.size)))
            part = batch if count == size else rows_of(batch, size, slice(done, done + count), axis=clipper.axis)
            policy.before()
            fits, result = attempt(partial(work, part), again=count > 1, undo=savepoint.restore)
            if fits:
                policy.after(count)
                done += count
                results.append(result)
                continue
            policy.failed(count)
            _log.warning("%d samples at once did not fit in memory; the batch is run again in smaller parts", count)
            done, results = 0, []
    clipper.merge_passes(since=passes)
    return results


def count_rows(batch: Any, *, axis: int = 0) -> int | None:
    """Return the number of samples of a nested batch, by its first tensor; None where there is no tensor with axes."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[axis if axis < batch.dim() else 0] if batch.dim() else None
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((rows for rows in (count_rows(item, axis=axis) for item in items) if rows is not None), None)


def rows_of(batch: Any, size: int, rows: slice, *, axis: int = 0) -> Any:
    """Return some samples of a nested batch: rows of its tensors, entries of lists with one entry per sample."""
    sliced: list[bool] = []

    def pick(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            dim = batch_axis_of(item, batch_size=size, axis=axis)
            if dim is None:
                return item
            sliced.append(True)
            return item[rows] if dim == 0 else item.narrow(dim, rows.start, rows.stop - rows.start)
        if isinstance(item, Mapping):
            picked = {key: pick(value) for key, value in item.items()}
            return picked if type(item) is dict else type(item)(picked)  # type: ignore[call-arg]
        if isinstance(item, (list, tuple)):
            plain = len(item) == size and not any(isinstance(entry, (torch.Tensor, list, tuple)) for entry in item)
            entries = item[rows] if plain else [pick(entry) for entry in item]
            return type(item)(*entries) if hasattr(item, "_fields") else type(item)(entries)
        return item

    picked = pick(batch)
    if not sliced:
        raise DataError(
            f"a batch of {size} samples is to be run in parts and cannot be split: no tensor in it has {size} rows. "
            "Use a max_physical_batch_size that takes it whole."
        )
    return picked


class PhysicalBatches:
    """Runs forward and backward of each logical batch in parts that fit in memory; one step releases them together.

    Where `BatchMemoryManager` hands a loop physical batches, this takes the loop's logical ones apart, so that a
    framework's steps, epochs, schedulers and logs count what they always counted: releases. Only the batch of data has
    to fit in memory as a whole.

    With `max_physical_batch_size="auto"` the first parts are measured: they start at one sample and grow while memory
    allows. Where memory runs out, given a size or not, the batch is run again in parts of half the size, and later
    batches begin with those.

    Privacy:
        The released values have the same distribution as without it. Whatever fails on the way, every record of the
        draw is in the sum once, and noise and account know of one step. How many parts there are follows from the
        size of the draw, which is not public.

    Args:
        optimizer: The private optimizer.
        max_physical_batch_size: The largest part, or "auto".
        memory_budget: Bytes that "auto" may fill on top of what is in use; None for half of what is available.

    Raises:
        InvalidOptionError: If an option is out of range, or given without "auto".

    Example:
        >>> model, optimizer, loader = ghostclip.PrivacyEngine().make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        ... )
        >>> parts = ghostclip.PhysicalBatches(optimizer)
        >>> for batch in loader:
        ...     _ = parts.run(batch, lambda part: criterion(model(part[0]), part[1]).backward())
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    def __init__(
        self, optimizer: DPOptimizer, *, max_physical_batch_size: int | str = "auto", memory_budget: int | None = None
    ) -> None:
        self._optimizer = private_optimizer(optimizer)
        self._memory_budget = memory_budget
        self._policy: SizePolicy | None = given_size(max_physical_batch_size, memory_budget)

    @property
    def size(self) -> int:
        """The largest part at present; it grows and shrinks with what memory turns out to hold."""
        return self._sizes().size

    def run(self, batch: Any, work: Callable[[Any], Any]) -> list[Any]:
        """Run forward and backward on a logical batch, or on what a loop makes its step of.

        Args:
            batch: Tensors, in tuples, lists and mappings of any depth; its first tensor tells the number of samples.
            work: Runs forward and backward on some of its samples, with a loss that is reduced over them as it was
                declared to `make_private`. It is called again for samples whose part did not fit in memory.

        Returns:
            What `work` returned, part by part, each sample in one part.

        Raises:
            DataError: If the batch has to be split and cannot be.
            torch.OutOfMemoryError: If not even one sample fits.
        """
        rows = count_rows(batch, axis=self._optimizer.clipper.axis)
        try:
            return run_in_parts(self._optimizer, batch, 1 if rows is None else rows, work, self._sizes())
        except BaseException as error:
            if rows is None and is_out_of_memory(error):
                raise DataError(
                    f"a batch ({type(batch).__name__}) did not fit in memory and cannot be split: it holds no tensors "
                    "in tuples, lists or mappings. Let BatchMemoryManager split it where records are sampled."
                ) from error
            raise

    def _sizes(self) -> SizePolicy:
        """Return the policy; learning begins at the first batch, when the model is on its device."""
        if self._policy is None:
            device = self._optimizer.params[0].device
            self._policy = learned_size(self._optimizer.expected_batch_size or 1e6, self._memory_budget, device)
        return self._policy
