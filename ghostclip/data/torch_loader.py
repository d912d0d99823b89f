"""How a private loader takes the place of one of torch's: which it may replace, what it takes over, how it is taken.

Lightning and Fabric leave loaders alone whose sampler is a `DistributedSampler`, accelerate those that say to be
prepared: draws are not dealt out to ranks once more. Both then expect that the loader moves its batches to the device.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ghostclip.distributed.agreement import noting_each, world_size
from ghostclip.errors import DataError, InvalidOptionError
from ghostclip.optim.draws import DrawLog

_REMEDIES: tuple[tuple[type, str], ...] = (
    (WeightedRandomSampler, "weights give every record another privacy loss; leave the sampler out"),
    (SubsetRandomSampler, "pass torch.utils.data.Subset(dataset, indices) as the data set and leave the sampler out"),
)

FETCHING: Final = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
    "persistent_workers",
)  # fmt: skip
"""torch's options on how records are fetched: workers, pinning, time limit."""


def refuse_wrapped(loader: Any) -> None:
    """Refuse an object that is no loader of torch's but wraps one."""
    if not isinstance(loader, DataLoader):
        if not hasattr(loader, "dataset"):
            raise DataError(
                f"data_loader: {type(loader).__name__} is no torch.utils.data.DataLoader, whose records can be drawn. "
                "Give DataLoader(data_set, batch_size=B) with a map-style data set; a list of records is one."
            )
        raise DataError(
            f"data_loader: {type(loader).__name__} is no torch.utils.data.DataLoader, so that its sampling cannot be "
            "replaced. Call make_private with the DataLoader itself, and let a framework set up (fabric."
            "setup_dataloaders) the loader that it returns."
        )


def dataset_length(dataset: Dataset[Any]) -> int:
    """Return the number of records of a data set, at least 1; refuse a stream."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{type(dataset).__name__}: records cannot be drawn independently from a stream; "
            "use a map-style data set with __getitem__ and __len__."
        )
    length = len(dataset)
    if not length:
        raise DataError(f"{type(dataset).__name__}: the data set is empty.")
    return length


def warn_of_repetitions(dataset: Any) -> None:
    """Say which unit is protected where `Subset` or `ConcatDataset` repeat records of a data set."""
    records = _origins(dataset, {}) if isinstance(dataset, (Subset, ConcatDataset)) else np.zeros(1)
    repeated = len(records) - len(np.unique(records))
    if repeated:
        warnings.warn(
            f"data set: {repeated} of its {len(records)} records are there before ({type(dataset).__name__} with "
            "repeated indices or data sets). ε protects one position of the data set: a record that is there k times "
            "counts as k, and what they reveal together may cost k times ε. Leave repetitions out (weights belong "
            "into the loss), or "
            "protect all copies at once: ghostclip.data.UserDataset(records, users), with a number for each record.",
            stacklevel=6,
        )


def _origins(dataset: Any, firsts: dict[int, int]) -> np.ndarray:
    """Return a number for each record, the same for the same entry of the same data set."""
    if isinstance(dataset, Subset):
        return _origins(dataset.dataset, firsts)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_origins(part, firsts) for part in dataset.datasets])
    return firsts.setdefault(id(dataset), len(firsts) << 40) + np.arange(len(dataset))


def record_sampler(loader: DataLoader[Any]) -> Any:
    """Return a loader's sampler, also from inside a plain batch sampler."""
    batches = loader.batch_sampler
    return batches.sampler if type(batches) is BatchSampler else loader.sampler


def checked_batch_size(loader: DataLoader[Any]) -> int:
    """Return records per batch, over all ranks, of a loader whose sampling may be replaced by a private sampler's."""
    # Beside a `DistributedSampler` the loader's batch size is that of one rank.
    records = dataset_length(loader.dataset)
    if not getattr(loader, "in_order", True):
        raise InvalidOptionError("in_order=False: a private loader delivers batches in the order they are drawn.")
    batches = loader.batch_sampler
    if batches is None:
        raise InvalidOptionError("batch_size=None: the loader does not form batches; give it a batch_size.")
    if type(batches) is not BatchSampler:
        raise InvalidOptionError(
            f"batch_sampler {type(batches).__name__}: what it draws is not what an accountant assumes; "
            "give the loader a batch_size instead, and pass it as it is before another library prepares it."
        )
    sampler: Any = batches.sampler
    for refused, remedy in _REMEDIES:
        if isinstance(sampler, refused):
            raise InvalidOptionError(f"sampler {type(sampler).__name__}: {remedy}.")
    if type(sampler) is DistributedSampler:
        return batches.batch_size * _ranks_of(sampler, records)
    whole = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == records
    )
    if not whole:
        raise InvalidOptionError(
            f"sampler {type(sampler).__name__}: only a RandomSampler or SequentialSampler over all records can be "
            "replaced by Poisson sampling; leave the sampler out, or select records with torch.utils.data.Subset."
        )
    return batches.batch_size


def _ranks_of(sampler: Any, records: int) -> int:
    """Return the number of ranks of a `DistributedSampler`; refuse one for other ranks or records."""
    if sampler.num_replicas != world_size():
        raise InvalidOptionError(
            f"sampler DistributedSampler with num_replicas={sampler.num_replicas}: {world_size()} rank(s) train here. "
            "Call torch.distributed.init_process_group first and leave num_replicas out, or leave the sampler out: the "
            "ranks share each batch of the loader, whose batch_size is then that of all ranks together."
        )
    if len(sampler.dataset) != records:
        raise InvalidOptionError(
            f"sampler DistributedSampler over {len(sampler.dataset)} records: the loader's data set has {records}. "
            "Make both from one data set, a torch.utils.data.Subset for a part of it."
        )
    replicas: int = sampler.num_replicas
    return replicas


def worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return a loader's options for `DataLoader` on how records are fetched."""
    return {name: getattr(loader, name) for name in FETCHING}


def started(start: Callable[[], Iterator[Any]], *, resuming: bool) -> Iterator[Any]:
    """Begin a pass; one that continues an interrupted epoch leaves torch's global generator as it is."""
    # torch draws a seed for workers from that generator whenever a pass starts. The interrupted run drew it before it
    # was saved, so that drawing it again would change every dropout mask that follows.
    if not resuming:
        return start()
    state = torch.get_rng_state()
    try:
        return start()
    finally:
        torch.set_rng_state(state)


class DealtOut(DistributedSampler[Any]):
    """Marks that a loader already deals records out to ranks; nobody draws from it."""

    def __init__(self, dataset: Dataset[Any], *, rank: int, replicas: int) -> None:
        super().__init__(dataset, num_replicas=replicas, rank=rank, shuffle=False)


class TakenAsItIs:
    """A loader that frameworks take as it is.

    Attributes:
        device: Where batches are moved; None leaves them where they are.
        stop_when: Asked before each batch is handed out; True ends the pass (a privacy budget is spent).
    """

    device: torch.device | None = None
    stop_when: Callable[[], bool] | None = None
    _as_it_is = False

    def take_as_it_is(self, *, rank: int, replicas: int) -> None:
        """Let frameworks know, from now on, that nothing is left to do.

        Args:
            rank: This rank's number.
            replicas: Ranks that share each batch.
        """
        self._as_it_is = True
        if replicas > 1 and isinstance(self, DataLoader):
            # Past torch's refusal to exchange a sampler: batches come from the batch sampler.
            vars(self)["sampler"] = DealtOut(self.dataset, rank=rank, replicas=replicas)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Whether accelerate leaves the loader alone; it asks when it prepares, and then knows its device."""
        state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
        if self._as_it_is and state is not None:
            self.device = state().device
        return self._as_it_is

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Take accelerate's own mark; a loader that it has made anew is another object."""
        self._as_it_is = self._as_it_is or value

    def handed_out(self, start: Callable[[], Iterator[Any]], sampler: Any) -> Iterator[Any]:
        """Yield the batches of a pass where they belong, each counted as received, until it is stopped.

        Args:
            start: Begins the pass.
            sampler: The batch sampler, which is told what was received.

        Yields:
            The batches.
        """
        with sampler.tracking():
            for batch in noting_each(start()):
                if self.stop_when is not None and self.stop_when():
                    return
                sampler.mark_delivered()
                yield self.placed(batch, sampler.draws)

    def placed(self, batch: Any, draws: DrawLog | None) -> Any:
        """Put a batch on the loader's device, and tell a log of it.

        Args:
            batch: Tensors in nested tuples, lists, mappings.
            draws: The log that knows the batch's tensors from here on; None tells nobody.

        Returns:
            The batch, as it is where the loader has no device.
        """
        batch = batch if self.device is None else moved(batch, self.device)
        if draws is not None:
            draws.show(batch)
        return batch


def moved(batch: Any, device: torch.device) -> Any:
    """Return a nested batch moved to a device."""
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        made = {key: moved(value, device) for key, value in batch.items()}
        return made if type(batch) is dict else type(batch)(made)  # type: ignore[call-arg]
    if isinstance(batch, (list, tuple)):
        entries = [moved(entry, device) for entry in batch]
        return type(batch)(*entries) if hasattr(batch, "_fields") else type(batch)(entries)
    return batch
