"""A loader that hands out logical batches in physical ones, each with the token that says where it belongs.

The split happens where indices are sampled, so that no worker ever holds a whole logical batch. The token travels with
its batch: sampler → worker → collate → loader → optimizer. There is no queue beside it that could outlive an aborted
loop or run ahead of prefetching workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ghostclip.data.dealt import TakenAsItIs
from ghostclip.data.out_of_memory import run_in_parts
from ghostclip.data.resumed import started
from ghostclip.data.sampler import PrivateSampler, Records
from ghostclip.data.size_policies import SizePolicy
from ghostclip.data.workers import worker_options
from ghostclip.errors import DataError, MissingGradientError
from ghostclip.optim import BatchToken, DPOptimizer
from ghostclip.optim.draws import DrawLog


class Chunk(NamedTuple):
    """Message of the sampler to a worker: the indices of one physical batch."""

    token: BatchToken
    indices: list[int]


class _Samples(NamedTuple):
    """Message of the data set to the collate function: the samples of one physical batch."""

    token: BatchToken
    samples: Any


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
    """The user's data set, read a chunk at a time."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, chunk: Chunk) -> _Samples:
        many = getattr(self.dataset, "__getitems__", None)
        if not chunk.indices:
            samples: Any = []
        elif callable(many):
            samples = many(chunk.indices)
        else:
            samples = [self.dataset[index] for index in chunk.indices]
        return _Samples(chunk.token, samples)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)


class _TokenCollate:
    """The user's collate function, which passes the token on."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, fetched: Any) -> tuple[BatchToken, Any]:
        return fetched.token, self._collate_fn(fetched.samples)


class PhysicalBatchLoader(TakenAsItIs, DataLoader[Any]):
    """Loader of physical batches that tells the optimizer which of them complete a logical batch."""

    # A loop that is left early (break, an exception) leaves nothing behind: what was accumulated of its unfinished
    # logical batch is dropped, and since nothing of it was released nothing is counted.
    def __init__(
        self, loader: DataLoader[Any], *, optimizer: DPOptimizer, policy: SizePolicy, expected_batch_size: float
    ) -> None:
        self._logical_batches = splittable_batches(loader)
        self._stop_when: Callable[[], bool] | None = getattr(loader, "stop_when", None)
        self._optimizer = optimizer
        self._policy = policy
        self._physical_per_logical = lambda: max(1, math.ceil(expected_batch_size / policy.size))
        super().__init__(
            _TokenDataset(loader.dataset),
            batch_sampler=SplittingSampler(self._logical_batches, policy),
            collate_fn=_TokenCollate(loader.collate_fn),
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
        try:
            sampler = self._logical_batches
            resuming = isinstance(sampler, PrivateSampler) and sampler.resuming
            # Workers fetch as soon as they are started.
            start = partial(started, super().__iter__, resuming=resuming)
            for token, batch in self._delivered(start):
                if token.chunk == 0 and self._stop_when is not None and self._stop_when():
                    return
                self._optimizer.begin_physical_batch(token)
                self._policy.before()
                yield self.placed(batch)
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

    def _delivered(self, start: Callable[[], Iterator[tuple[BatchToken, Any]]]) -> Iterator[tuple[BatchToken, Any]]:
        """Tell a private sampler which logical batches were handed out, so that a checkpoint knows where to resume."""
        sampler: Any = self._logical_batches
        draws: DrawLog | None = getattr(sampler, "draws", None)
        if draws is None:
            yield from start()
            return
        with sampler.tracking():
            for token, batch in start():
                if token.chunk == 0:
                    sampler.mark_delivered()
                draws.show(batch, rows=token.size)
                yield token, batch

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
    if not getattr(loader, "in_order", True):
        raise DataError("data_loader(in_order=False): parts of a logical batch must come in order. Use in_order=True.")
    return loader.batch_sampler
