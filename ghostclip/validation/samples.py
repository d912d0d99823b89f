"""Batches of any form: how many samples they have, and some of them alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ghostclip import _tree
from ghostclip.errors import DataError
from ghostclip.evidence.dependence import batch_axis_of


def plain_batch(batch: Any) -> Any:
    """Return a batch with other mappings (such as those of tokenizers) made dictionaries, inside others as well.

    Args:
        batch: A tensor, or nested tuples, lists and mappings of tensors.

    Returns:
        The same tensors.
    """
    if isinstance(batch, Mapping):
        return {key: plain_batch(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return type(batch)(plain_batch(item) for item in batch)
    return batch


def count_samples(batch: Any, *, axis: int) -> int:
    """Return the number of samples of a batch, which its first tensor with a batch axis tells.

    Args:
        batch: Nested tuples, lists and dictionaries of tensors.
        axis: The batch axis (0, or 1 with ``batch_first=False``).

    Returns:
        B, at least 2.

    Raises:
        DataError: There is no such tensor, or there are fewer than two samples, or all samples are the same.
    """
    tensors = [leaf for leaf in _tree.leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not tensors:
        raise DataError(
            "validate: the batch holds no tensor with a batch axis. Give a tensor, a tuple, a list or a dict."
        )
    first = tensors[0]
    size = first.shape[axis if axis < first.dim() else 0]
    if size < 2:
        raise DataError(
            f"validate: the batch has {size} sample(s); whether samples mix shows from two on. Give 2 to 16 samples."
        )
    if all(_are_all_alike(tensor, size=size, axis=axis) for tensor in tensors):
        raise DataError(
            f"validate: the {size} samples of the batch are all the same, so that replacing one by another shows "
            "nothing. Give samples that differ."
        )
    return size


def _are_all_alike(tensor: Tensor, *, size: int, axis: int) -> bool:
    place = batch_axis_of(tensor, batch_size=size, axis=axis)
    return place is None or torch.equal(tensor, tensor.roll(1, place))


def take(batch: Any, samples: Sequence[int], *, batch_size: int, axis: int) -> Any:
    """Return some samples of a batch, the batch axis kept.

    Args:
        batch: Nested tuples, lists and dictionaries of tensors.
        samples: Their numbers.
        batch_size: B.
        axis: The batch axis.

    Returns:
        New tensors; those without B samples as they are.
    """

    def pick(leaf: Any) -> Any:
        place = batch_axis_of(leaf, batch_size=batch_size, axis=axis)
        if place is None:
            return leaf
        return leaf.index_select(place, torch.tensor(list(samples), device=leaf.device))

    return _tree.mapped(pick, batch)
