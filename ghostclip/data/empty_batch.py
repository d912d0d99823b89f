"""Batches without records: the structure of a real batch, with zero rows.

The batch axis of every tensor is found by evidence: one record is collated once, and twice, and the axis that grew is
the batch axis. That needs no convention, and covers batch-second and folded layouts as well as tensors without one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset

from ghostclip.errors import DataError


class EmptyBatchCollate:
    """Collate function that also accepts an empty list of records.

    Privacy:
        An empty batch has the types, dtypes and trailing shapes that the first record of the data set gives a batch,
        and none of its rows. Parts whose size does not depend on the number of records are kept as they are for that
        record; without rows no loss depends on them.

    Args:
        dataset: Where one record is read from, when the first empty batch occurs.
        collate_fn: The user's function, never called with an empty list.
    """

    def __init__(self, dataset: Dataset, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self.wrapped = collate_fn
        self._pair: tuple[Any, Any] | None = None

    def __call__(self, records: list[Any]) -> Any:
        """Collate records.

        Args:
            records: Any number of them.

        Returns:
            What the user's function returns, or that structure with zero rows.

        Raises:
            DataError: If the batch is empty and the structure has no empty form.
        """
        if len(records):
            return self.wrapped(records)
        if self._pair is None:
            record = self._dataset[0]
            self._pair = self.wrapped([record]), self.wrapped([record, record])
        return empty_like(*self._pair)


def empty_like(one: Any, two: Any, *, path: str = "batch") -> Any:
    """Return the batch of zero records, from those of one record and of that record twice."""
    # `path`: this part of the batch, for the error message.
    if isinstance(one, torch.Tensor):
        return one[tuple(_cuts(one.shape, two.shape, path))].detach().clone()
    if isinstance(one, np.ndarray):
        return one[tuple(_cuts(one.shape, two.shape, path))].copy()
    if isinstance(one, PackedSequence):
        raise DataError(
            f"{path}: torch has no empty PackedSequence; collate padded tensors and pack them in the model."
        )
    if isinstance(one, Mapping):
        return _empty_mapping(one, two, path)
    if one is None or isinstance(one, (str, bytes, bool)):
        return one
    if isinstance(one, (int, float, complex, np.number)):
        # A number that counts the records (1, then 2) counts none of them.
        return type(one)() if one == 1 and two == 2 else one
    if isinstance(one, Sequence):
        return _empty_sequence(one, two, path)
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in dataclasses.fields(one) if field.init]
        parts = {n: empty_like(getattr(one, n), getattr(two, n), path=f"{path}.{n}") for n in names}
        return dataclasses.replace(one, **parts)
    own: Any = getattr(one, "__dict__", None)
    if own and not isinstance(one, type) and not callable(one) and own.keys() == vars(two).keys():
        made = copy.copy(one)
        vars(made).update({n: empty_like(own[n], vars(two)[n], path=f"{path}.{n}") for n in own})
        return made
    raise DataError(
        f"{path}: a Poisson batch may hold no record, and an empty {type(one).__name__} cannot be built; collate "
        "tensors, mappings, sequences, objects with these as attributes, strings or numbers."
    )


def _cuts(one: Sequence[int], two: Sequence[int], path: str) -> list[slice]:
    """Return the slices that remove only the axis on which two records are longer than one."""
    if len(one) != len(two):
        raise DataError(f"{path}: shape {tuple(one)} for one record, {tuple(two)} for two; the batch axis is unclear.")
    return [slice(None) if single == double else slice(0, 0) for single, double in zip(one, two, strict=True)]


def _empty_mapping(one: Any, two: Any, path: str) -> Any:
    if len(one) != len(two):
        return type(one)()
    parts = {key: empty_like(value, two[key], path=f"{path}[{key!r}]") for key, value in one.items()}
    if isinstance(one, MutableMapping):
        # A copy keeps what a mapping type carries beside its items (BatchEncoding: the encodings' metadata).
        result = copy.copy(one)
        result.update(parts)
        return result
    return type(one)(parts)


def _empty_sequence(one: Any, two: Any, path: str) -> Any:
    if len(one) != len(two):
        return type(one)()
    parts = [empty_like(a, b, path=f"{path}[{i}]") for i, (a, b) in enumerate(zip(one, two, strict=True))]
    return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
