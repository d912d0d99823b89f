"""`BatchMemoryManager`, and its loader: logical batches handed out in physical ones, on a device that holds only those.

The split happens where indices are sampled, so that no worker ever holds a whole logical batch. Each batch has a token
that says where it belongs and travels with it: sampler → worker → collate → loader → optimizer. There is no queue
beside it that could outlive an aborted loop or run ahead of prefetching workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from types import TracebackType
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ghostclip import _validate
from ghostclip.data.physical_batch_size import SizePolicy, given_size, learned_size
from ghostclip.data.physical_batches import run_in_parts
from ghostclip.data.sampler import PrivateSampler, Records
from ghostclip.data.torch_loader import TakenAsItIs, started, worker_options
from ghostclip.errors import DataError, InvalidOptionError, MissingGradientError
from ghostclip.optim import BatchToken, DPOptimizer, private_optimizer
from ghostclip.optim.draws import DrawLog


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
    """The user's data set, read and collated a chunk at a time, with the token."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, chunk: Chunk) -> tuple[BatchToken, Any]:
        many = getattr(self.dataset, "__getitems__", None)
        if not chunk.indices:
            samples: Any = []
        elif callable(many):
            samples = many(chunk.indices)
        else:
            samples = [self.dataset[index] for index in chunk.indices]
        return chunk.token, self._collate_fn(samples)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)


def _collated(batch: Any) -> Any:
    """Stand for a collate function, where the data set has collated."""
    return batch


class PhysicalBatchLoader(TakenAsItIs, DataLoader[Any]):
    """Loader of physical batches that tells the optimizer which of them complete a logical batch."""

    # A loop that is left early (break, an exception) leaves nothing behind: what was accumulated of its unfinished
    # logical batch is dropped, and since nothing of it was released nothing is counted.
    def __init__(
        self, loader: DataLoader[Any], *, optimizer: DPOptimizer, policy: SizePolicy, expected_batch_size: float
    ) -> None:
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
        self._optimizer.discard_pending()
        token: BatchToken | None = None
        sampler: Any = self._logical_batches
        draws: DrawLog | None = getattr(sampler, "draws", None)
        resuming = isinstance(sampler, PrivateSampler) and sampler.resuming
        try:
            with nullcontext() if draws is None else sampler.tracking():
                # Workers fetch as soon as they are started.
                for token, batch in started(super().__iter__, resuming=resuming):
                    if draws is not None and token.chunk == 0:
                        # A checkpoint knows by it where to resume.
                        sampler.mark_delivered()
                    placed = self.placed(batch, draws)
                    if token.chunk == 0 and self.stop_when is not None and self.stop_when():
                        return
                    self._optimizer.begin_physical_batch(token)
                    self._policy.before()
                    yield placed
                    self._policy.after(token.size)
            self._optimizer.require_released()
        finally:
            # By identity: a loop that is finalised late must not drop what a newer one has accumulated.
            if token is not None:
                self._optimizer.discard_pending(token=token)

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
        self._policy: SizePolicy | None = given_size(max_physical_batch_size, memory_budget)
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
        if self._policy is None:
            device = self.optimizer.params[0].device
            self._policy = learned_size(self._expected_batch_size(), self._memory_budget, device)
        return PhysicalBatchLoader(
            self.data_loader,
            optimizer=self.optimizer,
            policy=self._policy,
            expected_batch_size=self._expected_batch_size(),
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.optimizer.discard_pending()

    def _expected_batch_size(self) -> float:
        """Return the expected size of a logical batch."""
        expected = self.optimizer.expected_batch_size
        return float(len(self.data_loader.dataset)) if expected is None else expected  # type: ignore[arg-type]
