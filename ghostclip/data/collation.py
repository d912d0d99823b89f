"""Collate functions: batches without records, and proof that records are kept apart.

The batch axis of every tensor of an empty batch is found by evidence: one record is collated once, and twice, and the
axis that grew is the batch axis. That needs no convention, and covers batch-second and folded layouts as well as
tensors without one. What a function mixes or pads shows where a few records are collated in other company; the global
random generators, those of the data set and of the function, and what else these hold are put back.

Shape letter: n records.
"""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset

from ghostclip import _tree
from ghostclip.checks.module_state import Reachable
from ghostclip.checks.padding import Padded
from ghostclip.errors import DataError
from ghostclip.language import seeded_generators

logger = logging.getLogger(__name__)

# Records that are read, and seconds after which no further one is; states of the random generators that are tried.
_TRIED: Final = 32
_PATIENCE: Final = 0.5
_SEEDS: Final = 8
# Records that are read in any case, as far as there are so many; and where reading them is quick.
_LEAST: Final = 4
_COMPANY: Final = 8
# Entries of a container up to which it is put back; objects of objects that are looked into.
_KEPT: Final = 4096
_INSIDE: Final = 4

# Between the keys of a name.
_WITHIN: Final = "."

Collate = Callable[[list[Any]], Any]
_Batch = dict[str, Tensor]


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
        self._pair: tuple[Any, Any] | None = None  # batches of the first record, once and twice, when first needed

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
    names = _attributes(one)
    if names and not isinstance(one, type) and not callable(one) and names == _attributes(two):
        made = copy.copy(one)
        for name in names:
            # Also of a frozen data class.
            object.__setattr__(made, name, empty_like(getattr(one, name), getattr(two, name), path=f"{path}.{name}"))
        return made
    raise DataError(
        f"{path}: a Poisson batch may hold no record, and an empty {type(one).__name__} cannot be built; collate "
        "tensors, mappings, sequences, objects with these as attributes, strings or numbers."
    )


def _attributes(item: Any) -> list[str]:
    """Return the names of what an object holds, with or without a `__dict__`."""
    return sorted(getattr(item, "__dict__", getattr(item, "__dataclass_fields__", ())))


def _cuts(one: Sequence[int], two: Sequence[int], path: str) -> list[slice]:
    """Return the slices that remove only the axis on which two records are longer than one."""
    if len(one) != len(two):
        raise DataError(f"{path}: shape {tuple(one)} for one record, {tuple(two)} for two; the batch axis is unclear.")
    return [slice(None) if single == double else slice(0, 0) for single, double in zip(one, two, strict=True)]


def _empty_mapping(one: Any, two: Any, path: str) -> Any:
    """Return a mapping without records, its other items kept."""
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
    """Return a sequence whose entries have no records; an empty one if it is a list of records."""
    if len(one) != len(two):
        return type(one)()
    parts = [empty_like(a, b, path=f"{path}[{i}]") for i, (a, b) in enumerate(zip(one, two, strict=True))]
    return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)


def padding_of(dataset: Dataset[Any], collate: Collate, *, may_be_empty: bool = False) -> tuple[Padded, ...]:
    """Return the axes that a collate function pads; refuse one that mixes, joins or centres records."""
    # `may_be_empty`: make a batch without records, so that it is known now whether there are any.
    # The longest of a few records is collated with one other and with another; its rows have to come out alike.
    records: Any = dataset
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return ()
    # Data sets that augment draw random numbers too.
    with seeded_generators(), _put_back(dataset, getattr(collate, "wrapped", collate)):
        try:
            if may_be_empty:
                _collated(collate, [], 0)
            return _padding_in(_Company(records, collate)) if len(records) > 2 else ()
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001 - what records or functions need elsewhere is no reason to refuse them
            logger.warning(
                "not checked whether %s keeps records apart: %s for two records.", _name(collate), type(error).__name__
            )
            return ()


def unlike_pair(dataset: Any, collate: Collate) -> tuple[Any, bool]:
    """Return a batch of two records, and whether they differ in length, as far as the collate function allows it."""
    with seeded_generators():
        first = dataset[0]
        shapes = _shapes(_tensors(_collated(collate, [first], 0)))
        numbers = range(1, min(len(dataset), _TRIED))
        other = next((n for n in numbers if _shapes(_tensors(_collated(collate, [dataset[n]], 0))) != shapes), None)
        chosen = [first] if len(dataset) == 1 else [first, dataset[1 if other is None else other]]
        return _collated(collate, chosen, 0), other is not None


class _Company:
    """Some records, the longest of them first, and the collate function's batches of them."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        """Read a few records, collate each alone, and order them by length."""
        self._collate, self.name, begun = collate, _name(collate), time.monotonic()
        tried: list[tuple[int, Any, _Batch]] = []
        for number in range(min(len(dataset), _TRIED)):
            lengths = len({size for size, _, _ in tried})
            slow = time.monotonic() - begun > _PATIENCE
            if (len(tried) >= _LEAST and slow) or (len(tried) >= _COMPANY and lengths > 1):
                break
            record = dataset[number]
            batch = _tensors(_collated(collate, [record], 0))
            tried.append((sum(tensor.numel() for tensor in batch.values()), record, batch))
        tried.sort(key=lambda one: -one[0])
        self.records = [record for _, record, _ in tried]  # all of one length only if no other length was met
        self.alone = tried[0][2], tried[-1][2]  # the first one, and the last one, collated alone

    def of(self, *indices: int, seed: int = 0) -> _Batch:
        """Return the tensors of a batch of some of the records."""
        return _tensors(_collated(self._collate, [self.records[index] for index in indices], seed))


def _name(collate: Any) -> str:
    """Return the collate function's name for an error message."""
    # Trainer puts a collator of its own around, which removes columns.
    for attribute in ("wrapped", "data_collator"):
        collate = getattr(collate, attribute, collate)
    name = getattr(collate, "__name__", type(collate).__name__)
    return f"collate_fn {name} (the data_collator of a Trainer)"


def _padding_in(company: _Company) -> tuple[Padded, ...]:
    """Refuse a collate function whose rows for a record change with the others; return the axes that it pads."""
    longest, shortest = company.alone
    pair = company.of(0, 1)
    axes = {name: _axis_of_records(longest.get(name), tensor) for name, tensor in pair.items()}
    stacked = {name for name, axis in axes.items() if axis is not None}
    separated = stacked | {name for name in pair if name not in longest or _listed(name, pair, longest)}
    _refuse_joined(pair, separated, company)
    count = len(company.records) - 1
    for seed in range(_SEEDS):
        indices = 1 + seed % count, 1 + (seed + 1 + seed // count) % count
        one, other = (company.of(0, index, seed=seed) for index in indices)
        if any(name in other and tensor.shape != other[name].shape for name, tensor in one.items() if name in stacked):
            continue
        mixed = _mixed_in(one, other, axes, longest)
        if mixed:
            raise DataError(
                f"{company.name}: what becomes of a record in {mixed!r} depends on the record beside it (mixup, "
                "CutMix, normalisation over the batch, row numbers in the whole batch as those of graphs), so that no "
                "bound holds for either. Use a collate function that treats records one by one; graphs padded to (B, "
                "nodes, ...), with (B, nodes, nodes) for the edges and a mask of the nodes."
            )
    last = len(company.records) - 1
    return tuple(_padded(shortest, company.of(last, 0), axes))


def _axis_of_records(one: Tensor | None, pair: Tensor) -> int | None:
    """Return the axis that has one entry for a record, and two for two; None where rows are several for each."""
    if one is None or one.dim() != pair.dim():
        return None
    return next((axis for axis in range(pair.dim()) if (one.shape[axis], pair.shape[axis]) == (1, 2)), None)


def _refuse_joined(pair: _Batch, separated: Collection[str], company: _Company) -> None:
    """Refuse two records in an odd number of rows, where no part of the batch shows that they are separate."""
    rows = [tensor.shape[0] for name, tensor in pair.items() if tensor.dim() > 1 and name not in separated]
    shown = any(tensor.dim() > 1 and name in separated for name, tensor in pair.items())
    if rows and not shown and not any(count % 2 == 0 for count in rows):
        raise DataError(
            f"{company.name}: two records come out as {min(rows)} row(s), so that a row would count as "
            "one record (padding-free, packing). Use a collator that pads: as many rows for each record."
        )


def _mixed_in(one: _Batch, other: _Batch, axes: Mapping[str, int | None], alone: _Batch) -> str:
    """Return where the rows of the record that two batches share differ; '' where they do not."""
    matches = {(i, j) for i in range(2) for j in range(2)}
    for name, tensor in one.items():
        axis, beside = axes.get(name), other.get(name)
        listed = _listed(name, one, alone), _listed(name, other, alone)
        if name not in alone or beside is None:
            continue
        if axis is None and not all(listed):
            several = tensor.shape == beside.shape and tensor.dim() and tensor.shape[0] % 2 == 0
            if several and sum(map(_same, tensor, beside)) * 2 < tensor.shape[0]:
                return name or "batch"
            continue
        rows = listed if axis is None else (tensor.movedim(axis, 0), beside.movedim(axis, 0))
        # Records may come in another order, all of their values together.
        matches = {(i, j) for i, j in matches if _same(rows[0][i], rows[1][j])}
        if not matches:
            return name or "batch"
    return ""


def _listed(name: str, pair: _Batch, alone: _Batch) -> list[Tensor]:
    """Return the values of two records where a batch is a list of them; empty where it is none."""
    parts = name.split(_WITHIN)
    for index, part in enumerate(parts):
        second = _WITHIN.join([*parts[:index], "1", *parts[index + 1 :]])
        if part == "0" and second in pair and second not in alone:
            return [pair[name], pair[second]]
    return []


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, NaN included."""
    if one.shape == other.shape and (one.is_floating_point() or one.is_complex()):
        return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    return torch.equal(one, other)


def _padded(short: _Batch, beside: _Batch, axes: Mapping[str, int | None]) -> Iterator[Padded]:
    """Yield the axes that a record has longer beside a longer one, each with the padding value, if any."""
    for name, tensor in beside.items():
        before, records = short.get(name), axes.get(name)
        if records is None or before is None or before.dim() != tensor.dim():
            continue
        key, dims, is_float = name.rpartition(_WITHIN)[2], tensor.dim(), tensor.is_floating_point()
        for axis in range(dims):
            if axis != records and tensor.shape[axis] > before.shape[axis]:
                one, other = (batch.movedim((records, axis), (0, -1)) for batch in (before, tensor))
                value, leading = _filled(one[0], other)
                yield Padded(key, dims, axis, value, leading=leading, is_float=is_float)


def _filled(alone: Tensor, beside: Tensor) -> tuple[float | None, bool | None]:
    """Return the padding value of a record and whether it is in front, from it alone and beside a longer one."""
    # None where it cannot be told; positions are last.
    length = alone.shape[-1]
    for row in beside:
        for leading in (False, True):
            more = row.shape[-1] - length
            content, added = (row[..., more:], row[..., :more]) if leading else (row[..., :length], row[..., length:])
            if length and _same(content, alone):
                first = added.flatten()[0]
                return (float(first) if bool((added == first).all()) else None), leading
    return None, None


def _collated(collate: Collate, records: list[Any], seed: int) -> Any:
    """Collate copies of records at fixed random numbers, leaving no trace."""
    # What a function warns of one record is nothing that its user has asked for.
    with seeded_generators(seed), _put_back(getattr(collate, "wrapped", collate)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return collate([_copied(record) for record in records])


def _copied(record: Any) -> Any:
    """Return a copy of a record, which a collate function may change; the record itself where it has none."""
    try:
        # A row of a tensor is a view, of which `deepcopy` would copy all of the tensor.
        return copy.deepcopy(record, {id(tensor): tensor.clone() for tensor in _tree.tensors(record)})
    except Exception:  # noqa: BLE001 - records may hold what cannot be copied (files)
        return dict(record) if isinstance(record, Mapping) else record


def _tensors(batch: Any, name: str = "", depth: int = 0) -> _Batch:
    """Return the tensors, arrays and numbers of a batch by their paths."""
    if isinstance(batch, Tensor):
        return {name: batch} if not batch.is_sparse and not batch.is_nested else {}
    if isinstance(batch, np.ndarray):
        return {name: torch.from_numpy(batch)} if batch.dtype.kind in "biuf" and batch.dtype != np.uint16 else {}
    if isinstance(batch, (bool, int, float)):
        return {name: torch.tensor(batch)}
    if depth > _INSIDE:
        return {}
    items: Any = ()
    if isinstance(batch, Mapping):
        items = batch.items()
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        items = enumerate(batch)
    else:
        items = ((attribute, getattr(batch, attribute)) for attribute in _attributes(batch))
    return {
        path: tensor
        for key, value in items
        for path, tensor in _tensors(value, f"{name}{_WITHIN}{key}" if name else str(key), depth + 1).items()
    }


def _shapes(batch: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shapes of a batch's tensors by path."""
    return {name: tensor.shape for name, tensor in batch.items()}


class _Changeable(Reachable):
    """State that collating may change, long containers left out: they hold data, and take long to compare."""

    def _record(self, item: Any, *, passed: bool) -> Iterable[Any]:
        """Record one object's state, long containers left out."""
        return () if isinstance(item, (list, set, dict)) and len(item) > _KEPT else super()._record(item, passed=passed)


@contextmanager
def _put_back(*owners: Any) -> Iterator[None]:
    """Within the block objects may change: their attributes, containers and generators are restored."""
    before = _Changeable((), arguments=owners)
    try:
        yield
    finally:
        before.restore()
