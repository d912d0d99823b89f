"""The private loader, and which loaders it can stand for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ghostclip._validate import positive_int
from ghostclip.data_loader.empty_batch import EmptyBatchCollate
from ghostclip.data_loader.workers import worker_options
from ghostclip.errors import DataError, InvalidOptionError
from ghostclip.sampling import PoissonSampler

logger = logging.getLogger(__name__)

_REMEDIES: tuple[tuple[type, str], ...] = (
    (WeightedRandomSampler, "weights give every record another privacy loss; leave the sampler out"),
    (DistributedSampler, "it repeats and fixes records; leave it out, and pass distributed=True"),
    (SubsetRandomSampler, "pass torch.utils.data.Subset(dataset, indices) as the data set and leave the sampler out"),
)


class DPDataLoader(DataLoader):
    """Loader in which every record joins every batch independently with probability `sample_rate`.

    Everything else (workers, pinned memory, collate function) is torch's. A batch without records is delivered too,
    with the structure of the others and zero rows: a step on it releases noise alone.

    Privacy:
        Draws the batches that the accountants assume (see `PoissonSampler`). The number of records, the structure of a
        batch and `expected_batch_size` count as public; the size and the content of a batch do not, and a loop must
        not treat an empty batch differently from the outside.

    Attributes:
        sample_rate: q, the probability with which a record joins a batch.
        batch_sampler: The `PoissonSampler`.

    Args:
        dataset: Map-style data set with a length.
        batch_size: Expected number of records in a batch, at most the length.
        steps: Batches per epoch; round(length / batch_size) by default.
        collate_fn: As torch's, never called with an empty list.
        generator: Fixes the sampling and the workers' seeds; warns.
        num_workers: As torch's.
        pin_memory: As torch's.
        timeout: As torch's.
        worker_init_fn: As torch's.
        multiprocessing_context: As torch's.
        prefetch_factor: As torch's.
        persistent_workers: As torch's.
        pin_memory_device: As torch's.

    Raises:
        DataError: If the data set is empty, has no length, or is smaller than a batch.
        InvalidOptionError: If an option is out of range.
    """

    def __init__(  # noqa: PLR0913 - torch's own options, named instead of swallowed
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        steps: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        generator: torch.Generator | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        length = _length(dataset)
        self._expected_batch_size = positive_int(batch_size, "batch_size")
        if batch_size > length:
            raise DataError(f"batch_size={batch_size}: the data set has only {length} records; use a smaller batch.")
        self.sample_rate = batch_size / length
        sampler = PoissonSampler(num_samples=length, sample_rate=self.sample_rate, generator=generator, steps=steps)
        super().__init__(
            dataset,
            batch_sampler=sampler,
            collate_fn=EmptyBatchCollate(dataset, collate_fn or torch.utils.data.default_collate),
            num_workers=num_workers,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            generator=generator,
        )

    @property
    def expected_batch_size(self) -> int:
        """Records in a batch on average, over all replicas: the public divisor of a mean gradient."""
        return self._expected_batch_size

    @property
    def poisson_sampler(self) -> PoissonSampler:
        """The sampler, under its own type."""
        assert isinstance(self.batch_sampler, PoissonSampler)
        return self.batch_sampler

    @classmethod
    def from_data_loader(
        cls,
        data_loader: DataLoader,
        *,
        generator: torch.Generator | None = None,
        distributed: bool = False,
        rand_on_empty: bool = False,
    ) -> DPDataLoader:
        """Return a loader over the same data with the same options, but with Poisson batches.

        Random and sequential samplers are replaced, which is logged. `drop_last` means nothing here: an epoch has
        round(records / batch_size) batches.

        Args:
            data_loader: Any loader whose sampling a Poisson sampler can stand for; a `DPDataLoader` is returned as is.
            generator: Fixes the sampling, and warns; the loader's own generator by default, if it has one.
            distributed: All replicas draw one batch and share its records.
            rand_on_empty: Refused: an invented record in place of an empty batch doubles the sensitivity.

        Returns:
            The private loader.

        Raises:
            InvalidOptionError: If the sampling or an option breaks the privacy analysis.
            DataError: If the data set cannot be sampled from.
        """
        if rand_on_empty:
            raise InvalidOptionError(
                "rand_on_empty=True: an invented record that appears only when nobody was drawn makes one person's "
                "influence twice the clipping bound; leave it out, empty batches are supported."
            )
        if isinstance(data_loader, DPDataLoader):
            return data_loader
        batch_size = _checked_batch_size(data_loader)
        logger.info("%s and drop_last are replaced by Poisson sampling.", type(_sampler(data_loader)).__name__)
        private = cls(
            data_loader.dataset,
            batch_size=batch_size,
            collate_fn=data_loader.collate_fn,
            generator=data_loader.generator if generator is None else generator,
            **worker_options(data_loader),
            pin_memory_device=data_loader.pin_memory_device,
        )
        if distributed:
            _share_with_all_ranks(private.poisson_sampler)
        return private

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield one epoch of batches, or what was left of an interrupted one.

        Yields:
            What the collate function made of a batch.
        """
        sampler = self.poisson_sampler
        with sampler.tracking():
            for batch in super().__iter__():
                sampler.mark_delivered()
                yield batch

    def empty_batch(self) -> Any:
        """Return a batch without records.

        Returns:
            The structure of a collated batch, with zero rows.

        Raises:
            DataError: If the collate function returns something that has no empty form.
        """
        assert isinstance(self.collate_fn, EmptyBatchCollate)
        return self.collate_fn([])

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's key and how many batches were delivered (not: prefetched).

        Privacy:
            Contains the sampling key; see `PoissonSampler.state_dict`.

        Returns:
            Plain Python values.
        """
        return self.poisson_sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the batch after the last one delivered.

        Args:
            state: What `state_dict` returned.
        """
        self.poisson_sampler.load_state_dict(state)


def _length(dataset: Dataset) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{type(dataset).__name__}: records cannot be drawn independently from a stream; "
            "use a map-style data set with __getitem__ and __len__."
        )
    length = len(dataset)
    if not length:
        raise DataError(f"{type(dataset).__name__}: the data set is empty.")
    return length


def _sampler(loader: DataLoader) -> Any:
    batches = loader.batch_sampler
    return batches.sampler if type(batches) is BatchSampler else loader.sampler


def _checked_batch_size(loader: DataLoader) -> int:
    """Return the batch size of a loader whose sampling may be replaced by Poisson sampling.

    Args:
        loader: The user's loader.

    Returns:
        Records per batch.

    Raises:
        InvalidOptionError: If the loader does not batch, or samples in a way that Poisson sampling cannot stand for.
    """
    records = _length(loader.dataset)
    if not getattr(loader, "in_order", True):
        raise InvalidOptionError("in_order=False: a private loader delivers batches in the order they are drawn.")
    batches = loader.batch_sampler
    if batches is None:
        raise InvalidOptionError("batch_size=None: the loader does not form batches; give it a batch_size.")
    if type(batches) is not BatchSampler:
        raise InvalidOptionError(
            f"batch_sampler {type(batches).__name__}: what it draws is not what an accountant assumes; "
            "give the loader a batch_size instead."
        )
    sampler = batches.sampler
    for kind, remedy in _REMEDIES:
        if isinstance(sampler, kind):
            raise InvalidOptionError(f"sampler {type(sampler).__name__}: {remedy}.")
    whole = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == records
    )
    if not whole:
        raise InvalidOptionError(
            f"sampler {type(sampler).__name__}: only a RandomSampler or SequentialSampler over all records can be "
            "replaced by Poisson sampling; leave the sampler out, or select records with torch.utils.data.Subset."
        )
    return batches.batch_size


def _share_with_all_ranks(sampler: PoissonSampler) -> None:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        raise InvalidOptionError("distributed=True: call torch.distributed.init_process_group first.")
    message = [sampler.state_dict()["key"]]
    distributed.broadcast_object_list(message, src=0)
    sampler.share(rank=distributed.get_rank(), num_replicas=distributed.get_world_size(), key=message[0])
