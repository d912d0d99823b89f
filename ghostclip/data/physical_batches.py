"""A logical batch run in parts: as large as memory allows, again in smaller ones where it runs out, each sample once.

How large a part may be is given, searched by trial steps, or learned while real steps are measured. `PhysicalBatches`
is for loops that are written by others, `BatchMemoryManager` hands parts out to the user's own. The split happens where
indices are sampled, so that no worker ever holds a whole logical batch. Each batch has a token that says where it
belongs and travels with it: sampler → worker → collate → loader → optimizer. There is no queue beside it that could
outlive an aborted loop or run ahead of prefetching workers.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ghostclip import _validate
from ghostclip._memory import PeakMemory, available_bytes, is_out_of_memory
from ghostclip.checks.dependence import batch_axis_of, record_shared
from ghostclip.data.loader import PrivateSampler, Records, TakenAsItIs, started, with_entries, worker_options
from ghostclip.distributed.agreement import noting_each
from ghostclip.errors import DataError, InvalidOptionError, MissingGradientError
from ghostclip.optim import BatchToken, DPOptimizer, private_optimizer
from ghostclip.optim.draws import DrawLog

DEFAULT_SHARE = 0.5
"""Share of the memory available at the start that a search may fill when no budget is given."""

# A Poisson batch exceeds its mean by more than this many standard deviations about once in 10^9 draws.
_DEVIATIONS = 6.0


def memory_limit(device: torch.device, memory_budget: int | None) -> int | None:
    """Return the peak of memory, as `PeakMemory` counts, that a search must not exceed; None for no limit."""
    # By default `DEFAULT_SHARE` of what is available on the CPU, and no limit but the device's own on CUDA.
    if memory_budget is None:
        if device.type == "cuda":
            return None
        room = available_bytes(device)
        if room is None:
            raise InvalidOptionError(
                "max_physical_batch_size='auto': this system does not say how much memory is available. Give "
                "memory_budget in bytes, or a number of samples."
            )
        memory_budget = int(DEFAULT_SHARE * room)
    # Garbage that is collected during the search would make room that nobody gave.
    gc.collect()
    return PeakMemory(device).in_use() + _validate.positive_int(memory_budget, "memory_budget")


class LearnedSize:
    """A physical batch size that grows from one sample while steps are measured, those of a training or trial steps."""

    # Sizes double while the memory per sample, as measured between the last two sizes, says that twice as much fits;
    # then one extrapolated step goes as far as the limit. After a size that failed (out of memory, or over the limit)
    # comes the middle between it and the largest that worked. Each size is confirmed by its own measurement before it
    # counts.
    def __init__(self, *, upper: int, limit: int | None, device: torch.device) -> None:
        """Begin with one sample; `limit`: peak of memory in bytes, `upper`: largest size of use."""
        self._upper = _validate.positive_int(upper, "upper")
        self._limit = limit
        self._meter = PeakMemory(device)
        self._measuring = False  # whether `before` has started the meter
        self._largest = 0  # largest size that worked
        self._peak = 0  # its peak, in bytes
        self._too_large = self._upper + 1  # smallest size that failed
        self._bytes_per_sample = 0.0  # between the last two sizes
        self.size = 1
        self.peak = 0  # of the latest size that was measured, in bytes

    @property
    def settled(self) -> bool:
        """Whether `size` is the answer."""
        return self.size == self._largest

    def before(self) -> None:
        """Start measuring the peak of memory, unless the size is settled."""
        self._measuring = not self.settled
        if self._measuring:
            self._meter.start()

    def after(self, size: int) -> None:
        """Record the peak of a batch that was processed, and choose the next size."""
        if self._measuring and size > 0:
            self._measuring = False
            fitted = not self.nothing_fits
            self.peak = self._meter.stop()
            self.record(size, self.peak)
            if self.settled:
                _log.info("physical batch size settled at %d", self.size)
            elif self.nothing_fits and fitted:
                _log.warning("one sample at a time already exceeds memory_budget; continuing with one")

    def record(self, size: int, peak: int) -> None:
        """Record the peak, in bytes, of a size that ran."""
        if self._limit is not None and peak > self._limit:
            self.failed(size)
        elif size > self._largest:
            if self._largest:
                self._bytes_per_sample = max(0.0, (peak - self._peak) / (size - self._largest))
            self._largest, self._peak = size, peak
            self.size = self._next_size()

    def failed(self, size: int) -> None:
        """Record that a size ran out of memory, and choose a smaller one."""
        if self._measuring:
            self._measuring = False
            self._meter.stop()
        if size <= self._largest:
            # What fitted before no longer does (longer samples, new state of the optimizer): leave a margin.
            self._largest = 3 * size // 4
            self._too_large = self._largest + 1
        else:
            self._too_large = min(self._too_large, size)
        self.size = max(1, self._next_size())

    @property
    def nothing_fits(self) -> bool:
        """Whether even one sample is too much."""
        return self._too_large <= 1

    def _next_size(self) -> int:
        """Return the size to try after `largest` worked and `too_large` did not."""
        gap = self._too_large - self._largest
        if self._too_large <= self._upper:
            # Below an eighth the gain in speed is not worth another failure.
            return self._largest if gap <= max(1, self._largest // 8) else self._largest + gap // 2
        doubled = min(2 * self._largest, self._upper)
        if self._limit is None or self._bytes_per_sample == 0:
            return doubled
        fitting = self._largest + int((self._limit - self._peak) / self._bytes_per_sample)
        return max(self._largest, min(doubled, fitting))


def find_max_physical_batch_size(
    step_fn: Callable[[int], object],
    *,
    upper: int,
    memory_budget: int | None = None,
    device: torch.device | str = "cpu",
) -> int:
    """Return the largest batch that a step can process within memory, at most ``upper``."""
    # On CUDA sizes are tried until one runs out of memory, then smaller ones are; with a budget the measured peak must
    # stay within it as well. On the CPU, where running out of memory ends the process, the peak of the resident set is
    # measured at small sizes and growth stops where the next size would exceed the budget.
    device = torch.device(device)
    # The first step, and the first of several samples (which is checked), also pay for what is allocated once.
    step_fn(1)
    if _validate.positive_int(upper, "upper") > 1:
        attempt(partial(step_fn, 2), again=True)
    sizes = LearnedSize(upper=upper, limit=memory_limit(device, memory_budget), device=device)
    while not sizes.settled:
        size = sizes.size
        sizes.before()
        if attempt(partial(step_fn, size), again=size > 1)[0]:
            sizes.after(size)
        else:
            sizes.failed(size)
        if sizes.nothing_fits:
            raise InvalidOptionError(
                f"max_physical_batch_size='auto': one sample takes memory to {sizes.peak} bytes, over the budget of "
                f"{memory_budget} on top of what was in use. Raise memory_budget, or use shorter samples."
            )
    return sizes.size


def attempt(work: Callable[[], Any], *, again: bool, undo: Callable[[], None] = lambda: None) -> tuple[bool, Any]:
    """Return True and a result, or False, after ``undo``, where memory ran out and it is to be tried ``again``."""
    try:
        return True, work()
    except BaseException as error:
        undo()
        if not again or not is_out_of_memory(error):
            raise
    # Outside of the handler: the traceback kept the attempt's tensors alive until here.
    gc.collect()
    torch.cuda.empty_cache()
    return False, None


def largest_batch(expected_batch_size: float) -> int:
    """Return a size that Poisson batches practically never exceed, so that no larger one is of use."""
    return math.ceil(expected_batch_size + _DEVIATIONS * math.sqrt(expected_batch_size))


class FixedSize:
    """A physical batch size that was set or computed before the loop."""

    def __init__(self, size: int) -> None:
        self.size = size

    def before(self) -> None:
        """Nothing to measure."""

    def after(self, size: int) -> None:
        """Nothing to learn."""

    def failed(self, size: int) -> None:
        """Hand out batches of half that size from now on."""
        self.size = min(self.size, max(1, size // 2))


SizePolicy: TypeAlias = FixedSize | LearnedSize
"""Decides how large a physical batch may be."""


def fixed_size_of(max_physical_batch_size: int | str, memory_budget: int | None) -> FixedSize | None:
    """Return the size that a user has given, None for "auto"; refuse a budget that nothing is found within."""
    if max_physical_batch_size == "auto":
        return None
    size = _validate.positive_int(max_physical_batch_size, "max_physical_batch_size")
    if memory_budget is not None:
        raise InvalidOptionError("memory_budget only says how to find max_physical_batch_size='auto'.")
    return FixedSize(size)


def learned_size(optimizer: DPOptimizer, expected_batch_size: float, memory_budget: int | None) -> LearnedSize:
    """Return a size that is learned within a memory budget, by default `DEFAULT_SHARE` of what is available now."""
    device = optimizer.params[0].device
    if memory_budget is None and device.type == "cuda":
        memory_budget = int(DEFAULT_SHARE * (available_bytes(device) or 0))
    limit = memory_limit(device, memory_budget)
    return LearnedSize(upper=largest_batch(expected_batch_size), limit=limit, device=device)


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
        done, results = 0, list[Any]()
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
        one_each = isinstance(item, (list, tuple)) and not hasattr(item, "_fields") and len(item) == size
        if one_each and not any(isinstance(entry, (torch.Tensor, list, tuple)) for entry in item):
            return type(item)(item[rows])
        return with_entries(item, pick)

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
        self._optimizer, self._memory_budget = private_optimizer(optimizer), memory_budget
        self._shared = set[tuple[int, ...]]()  # by place and shape, what all samples of a batch share
        self._policy: SizePolicy | None = fixed_size_of(max_physical_batch_size, memory_budget)

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
        record_shared(batch, rows, self._shared)
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
        """Return the policy of sizes, made at the first batch."""
        if self._policy is None:
            expected = self._optimizer.expected_batch_size or 1e6
            self._policy = learned_size(self._optimizer, expected, self._memory_budget)
        return self._policy


class Chunk(NamedTuple):
    """Message of the sampler to a worker: the indices of one physical batch."""

    token: BatchToken
    indices: list[int]


class SplittingSampler(Sampler[Any]):
    """Splits each logical batch of indices into nearly equal parts, as the policy allows at that moment."""

    # Where several ranks share a batch, each has as many parts as the one with the most records, of which the last may
    # be empty: ranks that hold a model in parts run it the same number of times.
    def __init__(self, logical: Iterable[Any], policy: SizePolicy) -> None:
        self._logical = logical
        self._policy = policy

    def __iter__(self) -> Iterator[Any]:
        """Yield each logical batch in parts, with tokens that say which part is the last."""
        for logical_id, batch in enumerate(self._logical):
            indices = list(batch)
            most = batch.most if isinstance(batch, Records) else len(indices)
            start = chunk = 0
            while True:
                parts = max(1, math.ceil((most - start) / self._policy.size))
                size = math.ceil((most - start) / parts)
                part = indices[start : start + size]
                yield Chunk(BatchToken(logical_id, chunk, parts == 1, len(part)), part)
                if parts == 1:
                    break
                start, chunk = start + size, chunk + 1


class _TokenDataset(Dataset[Any]):
    """The user's data set, whose items are collated physical batches with their tokens."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, chunk: Chunk) -> tuple[BatchToken, Any]:
        """Return the token of a chunk with its collated records."""
        many = getattr(self.dataset, "__getitems__", None)
        # Of no record a data set is not asked, which may have no answer.
        if callable(many) and chunk.indices:
            return chunk.token, self._collate_fn(many(chunk.indices))
        samples = [self.dataset[index] for index in chunk.indices]
        return chunk.token, self._collate_fn(samples)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)


def _collated(batch: Any) -> Any:
    """Return what the data set has collated already, as the collate function."""
    return batch


class PhysicalBatchLoader(TakenAsItIs):
    """Loader of physical batches that tells the optimizer which of them complete a logical batch."""

    # A loop that is left early (break, an exception) leaves nothing behind: what was accumulated of its unfinished
    # logical batch is dropped, and since nothing of it was released nothing is counted.
    def __init__(
        self, loader: DataLoader[Any], *, optimizer: DPOptimizer, policy: SizePolicy, expected_batch_size: float
    ) -> None:
        """Load what `loader` would, split by `policy`."""
        self._logical_batches = splittable_batches(loader)
        self.stop_when = getattr(loader, "stop_when", None)
        self._optimizer = optimizer
        self._policy = policy
        self._physical_per_logical = lambda: max(1, math.ceil(expected_batch_size / policy.size))
        super().__init__(
            _TokenDataset(loader.dataset, loader.collate_fn),
            batch_sampler=SplittingSampler(self._logical_batches, policy),
            collate_fn=_collated,
            generator=loader.generator,
            **worker_options(loader),
        )
        # Each batch comes with a token, which no framework knows how to hand on.
        sampler = self._logical_batches
        self.take_as_it_is(rank=getattr(sampler, "rank", 0), replicas=getattr(sampler, "num_replicas", 1))
        self.device = getattr(loader, "device", None)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield physical batches, each announced to the optimizer; what is unfinished at the end is dropped."""
        self._optimizer.discard_pending()
        token: BatchToken | None = None
        sampler: Any = self._logical_batches
        draws: DrawLog | None = getattr(sampler, "draws", None)
        resuming = isinstance(sampler, PrivateSampler) and sampler.resuming
        try:
            with nullcontext() if draws is None else sampler.tracking():
                # Workers fetch as soon as they are started.
                for token, batch in noting_each(started(partial(DataLoader.__iter__, self), resuming=resuming)):
                    if token.chunk == 0 and self.stop_when is not None and self.stop_when():
                        return
                    if draws is not None and token.chunk == 0:
                        # A checkpoint knows by it where to resume.
                        sampler.mark_delivered()
                    placed = self.on_device(batch, draws)
                    self._optimizer.begin_physical_batch(token)
                    self._policy.before()
                    yield placed
                    self._policy.after(token.size)
            self._optimizer.require_released()
        finally:
            # By identity: a loop that is finalised late must not drop what a newer one has accumulated.
            if token is not None:
                self._optimizer.discard_pending(token=token)
            if draws is not None:
                draws.stop()

    def run(self, batch: Any, work: Callable[[Any], Any]) -> list[Any]:
        """Run forward and backward on the batch just handed out, in smaller parts where memory runs out."""
        # Every sample is in the clipped sum once, whatever failed on the way; batches handed out later are smaller.
        token = self._optimizer.current_token
        if token is None:
            raise MissingGradientError("run(): no batch of this loader is being processed; call it inside the loop.")
        return run_in_parts(self._optimizer, batch, token.size, work, self._policy)

    def __len__(self) -> int:
        """Return about how many physical batches a pass has; sampled batches differ in size."""
        return len(self._logical_batches) * self._physical_per_logical()  # type: ignore[arg-type]


def splittable_batches(loader: DataLoader[Any]) -> Iterable[list[int]]:
    """Return the batch sampler of a loader; refuse batches that are not of indices, or may come in another order."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise DataError(
            f"data_loader over {type(loader.dataset).__name__}: batches can only be split where indices are sampled. "
            "Use a map-style data set with a batch size or a batch_sampler."
        )
    if isinstance(loader.batch_sampler, SplittingSampler):
        raise DataError(
            "data_loader: its batches are parts of batches already, as another BatchMemoryManager hands them out. Give "
            "the loader that make_private returned."
        )
    if not getattr(loader, "in_order", True):
        raise DataError("data_loader(in_order=False): parts of a logical batch must come in order. Use in_order=True.")
    return loader.batch_sampler


class BatchMemoryManager:
    """Splits logical batches into physical ones that fit in memory, without changing what is released.

    Inside the `with` block the loader hands out physical batches. `optimizer.step()` after each of them only
    accumulates until the logical batch is complete; then it draws noise once, counts one step and updates.

    Privacy:
        The released values have the same distribution as without it. A logical batch that is left half-way is never
        released.

    With `max_physical_batch_size="auto"` the first real physical batches are measured: they start at one sample and
    grow while the budget allows, so nothing is computed twice. On CUDA that never provokes an out-of-memory error to
    recover from, so the budget is a share of the free memory there too.

    A batch that runs out of memory all the same is tried again in parts if the loop lets the loader run it::

        with BatchMemoryManager(...) as loader:
            for batch in loader:
                loader.run(batch, lambda part: criterion(model(part[0]), part[1]).backward())
                optimizer.step()
                optimizer.zero_grad()

    Args:
        data_loader: The loader of logical batches, as `PrivacyEngine.make_private` returns it.
        max_physical_batch_size: The largest physical batch, or "auto".
        optimizer: The private optimizer.
        memory_budget: Bytes that "auto" may fill on top of what is in use; None for half of what is available.

    Raises:
        InvalidOptionError: If an option is out of range, or given without "auto".
        DataError: If the loader's batches cannot be split.

    Example:
        >>> model, optimizer, loader = ghostclip.PrivacyEngine().make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        ... )
        >>> with ghostclip.BatchMemoryManager(
        ...     data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
        ... ) as parts:
        ...     for x, y in parts:  # 4 records at most; the optimizer steps after the last part of a batch
        ...         optimizer.zero_grad()
        ...         criterion(model(x), y).backward()
        ...         optimizer.step()
    """

    @_validate.suggests_options
    def __init__(
        self,
        *,
        data_loader: DataLoader[Any],
        max_physical_batch_size: int | str,
        optimizer: DPOptimizer,
        memory_budget: int | None = None,
    ) -> None:
        optimizer = private_optimizer(optimizer)
        self.data_loader = data_loader
        self.optimizer = optimizer
        self.max_physical_batch_size = max_physical_batch_size
        self._policy: SizePolicy | None = fixed_size_of(max_physical_batch_size, memory_budget)
        if self._policy is None and optimizer.clipper.is_sharded:
            raise InvalidOptionError(
                "max_physical_batch_size='auto' with a model that several ranks hold in parts: each would find its own "
                "size, and they must run the model equally often. Give a number, the same on every rank."
            )
        self._memory_budget = memory_budget

    @property
    def physical_batch_size(self) -> int:
        """The largest physical batch that is handed out at present.

        Raises:
            InvalidOptionError: Before the `with` block is entered, for "auto".
        """
        if self._policy is None:
            raise InvalidOptionError("max_physical_batch_size='auto' is found when the `with` block is entered.")
        return self._policy.size

    def __enter__(self) -> PhysicalBatchLoader:
        records: Any = self.data_loader.dataset
        expected = self.optimizer.expected_batch_size or float(len(records))
        if self._policy is None:
            self._policy = learned_size(self.optimizer, expected, self._memory_budget)
        return PhysicalBatchLoader(
            self.data_loader, optimizer=self.optimizer, policy=self._policy, expected_batch_size=expected
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.optimizer.discard_pending()
