"""Samplers, collate functions and loaders of physical batches that scripts for Opacus put together themselves."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import distributed
from torch.utils.data import BatchSampler, DataLoader, Sampler

from ghostclip import BatchMemoryManager, DPDataLoader, DPOptimizer
from ghostclip._validate import defaults, positive_int, takes
from ghostclip.data import Poisson, PrivateSampler
from ghostclip.data.collation import empty_like
from ghostclip.data.loader import refuse_invented_records, share_sampler, worker_options
from ghostclip.data.physical_batches import FixedSize, PhysicalBatchLoader, SplittingSampler
from ghostclip.errors import DataError, InvalidOptionError, MissingGradientError
from ghostclip.optim import BatchToken, private_optimizer

_EMPTY = defaults({"batch_first": True, "rand_on_empty": False, "sample_empty_shapes": None, "dtypes": None})


class CollateFnWithEmpty:
    """Collate function that also accepts an empty list, once it has seen two records or was told the shapes.

    `DPDataLoader` needs no such thing: it reads a record of the data set.

    Args:
        collator_fn: The function to call with records; None returns the list as it is.
        options: `batch_first`, not needed: the batch axis is the one on which two records are longer than one;
            `rand_on_empty`, refused: invented records double the sensitivity; `sample_empty_shapes` and `dtypes` of a
            batch without records, for one before the first record.

    Raises:
        InvalidOptionError: If `rand_on_empty` is True, or shapes and dtypes differ in number.
    """

    @takes(*_EMPTY)
    def __init__(self, collator_fn: Callable[[list[Any]], Any] | None, options: dict) -> None:
        refuse_invented_records(rand_on_empty=options["rand_on_empty"])
        self.sample_empty_shapes, self.dtypes = shapes, dtypes = options["sample_empty_shapes"], options["dtypes"]
        if (shapes is None) != (dtypes is None) or len(shapes or ()) != len(dtypes or ()):
            raise InvalidOptionError("sample_empty_shapes and dtypes: give both, one dtype for each shape.")
        self.wrapped_collator_fn = collator_fn
        self._record: Any = None

    def __call__(self, batch: list[Any]) -> Any:
        """Collate records: what the wrapped function returns, or that structure with zero rows."""
        collate = self.wrapped_collator_fn
        if collate is None:
            return batch
        if len(batch):
            self._record = batch[0] if self._record is None else self._record
            return collate(batch)
        if self._record is not None:
            return empty_like(collate([self._record]), collate([self._record, self._record]))
        if self.sample_empty_shapes is None:
            raise DataError(
                "an empty batch before the first record: its structure is unknown. Give sample_empty_shapes and "
                "dtypes, or use DPDataLoader, which reads a record of the data set."
            )
        return [
            torch.zeros(s, dtype=_torch_dtype(d)) for s, d in zip(self.sample_empty_shapes, self.dtypes, strict=True)
        ]


def _torch_dtype(kind: torch.dtype | type) -> torch.dtype:
    if isinstance(kind, torch.dtype):
        return kind
    if kind not in (float, int, bool, complex):
        raise InvalidOptionError(f"dtypes: {kind!r} is no dtype.")
    return torch.tensor(kind()).dtype


@takes(*_EMPTY)
def wrap_collate_with_empty(*, collate_fn: Callable[[list[Any]], Any] | None, options: dict) -> CollateFnWithEmpty:
    """Return a collate function that also accepts an empty list.

    Args:
        collate_fn: The function to wrap.
        options: As for `CollateFnWithEmpty`.

    Returns:
        The function.
    """
    return CollateFnWithEmpty(collate_fn, **options)


def shape_safe(x: Any) -> tuple[int, ...]:
    """Return the shape of a tensor or an array; () for what has none."""
    return tuple(getattr(x, "shape", ()))


def dtype_safe(x: Any) -> torch.dtype | type:
    """Return the dtype of a tensor or an array; its type for what has none."""
    return getattr(x, "dtype", type(x))


def switch_generator(*, data_loader: DataLoader[Any], generator: torch.Generator) -> DataLoader[Any]:
    """Return a loader over the same data whose batches follow from a generator.

    Privacy:
        Whoever knows the generator knows who was sampled; of a private loader it warns.

    Args:
        data_loader: A private loader, which stays one, or torch's with a sampler that draws.
        generator: Where a private loader draws its key from, once; what another one's sampler draws from.

    Returns:
        A new loader.

    Raises:
        InvalidOptionError: If the loader's sampler draws nothing.
    """
    if not isinstance(data_loader, DPDataLoader):
        batches = copy.copy(data_loader.batch_sampler)
        if not hasattr(getattr(batches, "sampler", None), "generator"):
            raise InvalidOptionError(
                f"data_loader {type(data_loader).__name__}: its sampler draws nothing, so that there is no generator "
                "to switch. Give shuffle=True, or make it private."
            )
        batches.sampler = copy.copy(batches.sampler)  # type: ignore[union-attr]
        batches.sampler.generator = generator  # type: ignore[union-attr]
        return DataLoader(
            data_loader.dataset, batch_sampler=batches, collate_fn=data_loader.collate_fn, generator=generator,
            **worker_options(data_loader),
        )  # fmt: skip
    collate_fn = data_loader.collate_fn.wrapped  # type: ignore[union-attr]
    plain = DataLoader(data_loader.dataset, collate_fn=collate_fn, **worker_options(data_loader))
    return DPDataLoader.from_data_loader(plain, scheme=data_loader.private_sampler.scheme, generator=generator)


class DistributedUniformWithReplacementSampler(PrivateSampler):
    """Each rank's part of Poisson batches that all ranks draw together; made on all of them.

    An empty part is a batch too: every rank steps on every logical batch.

    Args:
        total_size: Records in the data set.
        sample_rate: Probability with which each joins a batch.
        generator: Fixes the sampling, and warns.
        options: `steps`, batches per epoch (round(1 / sample_rate) by default); `shuffle` and `shuffle_seed`, of no
            effect: which rank takes a record changes nothing of what is released.

    Raises:
        InvalidOptionError: If torch.distributed is not running.
    """

    @takes(*defaults({"shuffle": True, "shuffle_seed": 0, "steps": None}))
    def __init__(
        self, *, total_size: int, sample_rate: float, generator: torch.Generator | None = None, options: dict
    ) -> None:
        if not (distributed.is_available() and distributed.is_initialized()):
            raise InvalidOptionError(
                "DistributedUniformWithReplacementSampler: call torch.distributed.init_process_group first."
            )
        poisson = Poisson(num_samples=total_size, sample_rate=sample_rate, epoch_steps=options["steps"])
        super().__init__(poisson, generator=generator)
        share_sampler(self)

    def set_epoch(self, epoch: int) -> None:
        """Nothing to set: every epoch draws anew."""


def wrap_data_loader(
    *, data_loader: DataLoader[Any], max_batch_size: int | str, optimizer: DPOptimizer
) -> PhysicalBatchLoader:
    """Return the loader of physical batches that a `BatchMemoryManager` hands out.

    A loop over it that is left early is cleaned up at the next one only; `with BatchMemoryManager(...)` does at once.

    Args:
        data_loader: The loader of logical batches.
        max_batch_size: The largest physical batch, or "auto".
        optimizer: The private optimizer.

    Returns:
        The loader.
    """
    manager = BatchMemoryManager(data_loader=data_loader, max_physical_batch_size=max_batch_size, optimizer=optimizer)
    return manager.__enter__()


class BatchSplittingSampler(Sampler[list[int]]):
    """Yields parts of logical batches and tells the optimizer which of them complete one.

        loader = DataLoader(dataset, batch_sampler=BatchSplittingSampler(
            sampler=private_loader.batch_sampler, max_batch_size=64, optimizer=optimizer),
            collate_fn=private_loader.collate_fn)

    `BatchMemoryManager` does this with any number of workers. Here the optimizer is told when a part is asked for, so
    parts must be asked for one at a time: `num_workers=0`.

    Privacy:
        As for `BatchMemoryManager`. A part that is asked for before the step on the one before could be taken for part
        of a wrong logical batch, so that is an error.

    Args:
        sampler: Yields the indices of logical batches, as a private loader's `batch_sampler` does.
        max_batch_size: The largest part.
        optimizer: The private optimizer.

    Raises:
        InvalidOptionError: If an option is out of range, or the optimizer is not private.
    """

    def __init__(self, *, sampler: Sampler[list[int]], max_batch_size: int, optimizer: DPOptimizer) -> None:
        self.sampler, self.optimizer = sampler, private_optimizer(optimizer)
        self.max_batch_size = positive_int(max_batch_size, "max_batch_size")

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the parts of all logical batches, refusing to run ahead of the optimizer's steps."""
        optimizer, token, before = self.optimizer, None, None
        optimizer.discard_pending()
        try:
            for token, indices in self._parts():
                if before == self._progress():
                    raise MissingGradientError(
                        "BatchSplittingSampler: a batch was asked for before optimizer.step() was called on the last "
                        "one. Step on every batch, also on an empty one, and make the loader with num_workers=0; "
                        "BatchMemoryManager works with any number."
                    )
                optimizer.begin_physical_batch(token)
                before = self._progress()
                yield indices
            optimizer.require_released()
        finally:
            # By identity: a loop that is finalised late must not drop what a newer one has accumulated.
            if token is not None:
                optimizer.discard_pending(token=token)

    def __len__(self) -> int:
        """Return about how many parts a pass has; sampled batches differ in size."""
        logical: Any = self.sampler
        size = logical.batch_size if isinstance(logical, BatchSampler) else getattr(logical, "expected_batch_size", 0)
        return math.ceil(len(logical) * max(1.0, size / self.max_batch_size))

    def _progress(self) -> tuple[int, int]:
        """Numbers that every step changes: of the times sums were dropped, and of the backwards in them."""
        return self.optimizer.clipper.generation, self.optimizer.clipper.backward_passes

    def _parts(self) -> Iterator[tuple[BatchToken, list[int]]]:
        """Split; a private sampler is told what was handed out, so that a checkpoint knows where to resume."""
        private = self.sampler if isinstance(self.sampler, PrivateSampler) else None
        with private.tracking() if private else nullcontext():
            for chunk in SplittingSampler(self.sampler, FixedSize(self.max_batch_size)):
                if private and chunk.token.chunk == 0:
                    private.mark_delivered()
                yield chunk
