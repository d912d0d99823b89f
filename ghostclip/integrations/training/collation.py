"""Proof that a collate function keeps records apart: a record's rows do not depend on whom it is collated with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ghostclip.errors import DataError
from ghostclip.language.trials import own_randomness

# Records that are tried as company of the first one, and states of the random generators.
_TRIED, _SEEDS = 32, 3


def require_apart(dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
    """Refuse a collate function that mixes records (mixup, CutMix), joins them (padding-free), or centres a batch.

    The first record is collated with one other and with another; its rows have to come out alike.

    Args:
        dataset: Where the records are read from.
        collate: The function.

    Raises:
        DataError: If they do not.
    """
    if len(dataset) < 3:
        return
    # Data sets that augment draw random numbers too.
    with own_randomness():
        _try_in_company(dataset, collate)


def _try_in_company(dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
    first, others = dataset[0], (dataset[number] for number in range(1, min(len(dataset), _TRIED)))
    company: list[Any] = []
    for other in others:
        company.append(other)
        made = [_tensors(_collated(collate, [first, one], 0)) for one in (company[0], other)]
        _refuse_joined(made[0], collate)
        if len(company) > 1 and _shapes(made[0]) == _shapes(made[1]):
            _refuse_mixed(collate, first, company[0], other)
            return


def unlike_pair(dataset: Any, collate: Callable[[list[Any]], Any]) -> tuple[Any, bool]:
    """Return a batch of two records, of different lengths if the collate function lets batches differ in length.

    Args:
        dataset: Where the records are read from.
        collate: The function.

    Returns:
        The batch (of one record where there is only one), and whether they do differ.
    """
    with own_randomness():
        first = dataset[0]
        shapes = _shapes(_tensors(_collated(collate, [first], 0)))
        numbers = range(1, min(len(dataset), _TRIED))
        other = next((n for n in numbers if _shapes(_tensors(_collated(collate, [dataset[n]], 0))) != shapes), None)
        chosen = [first] if len(dataset) == 1 else [first, dataset[1 if other is None else other]]
        return _collated(collate, chosen, 0), other is not None


def _collated(collate: Callable[[list[Any]], Any], records: list[Any], seed: int) -> Any:
    with own_randomness(seed):
        return collate([dict(record) if isinstance(record, Mapping) else record for record in records])


def _refuse_joined(batch: Mapping[str, Tensor], collate: Any) -> None:
    rows = {tensor.shape[0] for tensor in batch.values() if tensor.dim() > 1}
    if rows and not any(count % 2 == 0 for count in rows):
        raise DataError(
            f"data_collator {_name(collate)}: two records come out as {min(rows)} row(s), so that a row would count as "
            "one record (padding-free, packing). Use a collator that pads: as many rows for each record."
        )


def _refuse_mixed(collate: Any, first: Any, one: Any, other: Any) -> None:
    for seed in range(_SEEDS):
        made = [_tensors(_collated(collate, [first, company], seed)) for company in (one, other)]
        for name in made[0]:
            a, b = made[0][name], made[1][name]
            if a.dim() == 0 or a.shape[0] % 2:
                continue
            alike = sum(torch.equal(a[row], b[row]) for row in range(a.shape[0]))
            if 2 * alike < a.shape[0]:
                raise DataError(
                    f"data_collator {_name(collate)}: what becomes of a record in {name!r} depends on the record "
                    "beside it (mixup, CutMix, normalisation over the batch), so that no bound holds for either. Use a "
                    "collator that treats records one by one."
                )


def _tensors(batch: Any, name: str = "batch") -> dict[str, Tensor]:
    if isinstance(batch, Tensor):
        return {name: batch}
    if isinstance(batch, Mapping):
        items: Any = batch.items()
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        items = enumerate(batch)
    else:
        return {}
    return {found: tensor for key, value in items for found, tensor in _tensors(value, str(key)).items()}


def _shapes(batch: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in batch.items()}


def _name(collate: Any) -> str:
    # Trainer puts a collator of its own around, which removes columns.
    inner = getattr(collate, "data_collator", collate)
    return getattr(inner, "__name__", type(inner).__name__)
