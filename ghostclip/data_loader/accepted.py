"""Which loaders a private loader can stand for: everything else is refused with what to do instead."""

from __future__ import annotations

from typing import Any

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

from ghostclip.errors import DataError, InvalidOptionError

_REMEDIES: tuple[tuple[type, str], ...] = (
    (WeightedRandomSampler, "weights give every record another privacy loss; leave the sampler out"),
    (DistributedSampler, "it repeats and fixes records; leave it out: ranks share each batch, see distributed=True"),
    (SubsetRandomSampler, "pass torch.utils.data.Subset(dataset, indices) as the data set and leave the sampler out"),
)


def refuse_wrapped(loader: Any) -> None:
    """Refuse what is no loader of torch's but stands around one.

    Args:
        loader: What the user gave as a loader.

    Raises:
        DataError: It is such a thing.
    """
    if not isinstance(loader, DataLoader):
        raise DataError(
            f"data_loader: {type(loader).__name__} is no torch.utils.data.DataLoader, so that its sampling cannot be "
            "replaced. Call make_private with the DataLoader itself, and let a framework set up (fabric."
            "setup_dataloaders) the loader that it returns."
        )


def dataset_length(dataset: Dataset[Any]) -> int:
    """Return the number of records of a data set that can be sampled from.

    Args:
        dataset: The user's data set.

    Returns:
        N, at least 1.

    Raises:
        DataError: If it is a stream, has no length, or is empty.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{type(dataset).__name__}: records cannot be drawn independently from a stream; "
            "use a map-style data set with __getitem__ and __len__."
        )
    length = len(dataset)
    if not length:
        raise DataError(f"{type(dataset).__name__}: the data set is empty.")
    return length


def record_sampler(loader: DataLoader[Any]) -> Any:
    """Return what a loader draws records from.

    Args:
        loader: The user's loader.

    Returns:
        Its sampler, also where it sits inside a plain batch sampler.
    """
    batches = loader.batch_sampler
    return batches.sampler if type(batches) is BatchSampler else loader.sampler


def checked_batch_size(loader: DataLoader[Any]) -> int:
    """Return the batch size of a loader whose sampling may be replaced by a private sampler's.

    Args:
        loader: The user's loader.

    Returns:
        Records per batch.

    Raises:
        InvalidOptionError: If the loader does not batch, or samples in a way that Poisson sampling cannot stand for.
    """
    records = dataset_length(loader.dataset)
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
