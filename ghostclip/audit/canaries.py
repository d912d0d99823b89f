"""Canaries in input space: records that are made for the audit, each included in the training data by a coin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ghostclip._validate import positive_int, probability
from ghostclip.errors import DataError, InvalidOptionError


def flip_coins(count: int, *, inclusion: float = 0.5, seed: int | None = None) -> NDArray[np.bool_]:
    """Decide for every canary independently whether it is included.

    Args:
        count: m, canaries.
        inclusion: Probability of inclusion; the one-run methods need 1/2.
        seed: Makes the coins repeatable; fresh entropy by default.

    Returns:
        Booleans, shape [m].
    """
    chance = probability(inclusion, "inclusion")
    return np.asarray(np.random.default_rng(seed).random(positive_int(count, "count")) < chance)


class CanaryDataset(Dataset[Any]):
    """A data set followed by those canaries that were included.

    The number of records of the result depends on the coins, and a private loader takes its sampling rate from that
    number; both count as public, so print neither beside the canaries' own coins if those are to be secret.

    Args:
        dataset: The training data, map-style with a length.
        canaries: Records of the same form.
        included: Which of them take part, shape [m], as `flip_coins` returns it.

    Raises:
        DataError: If there are not as many coins as canaries.
    """

    def __init__(self, dataset: Dataset[Any], canaries: Sequence[Any] | Dataset[Any], included: Sequence[bool]) -> None:
        count = len(canaries)  # type: ignore[arg-type]
        if len(included) != count:
            raise DataError(f"{count} canaries and {len(included)} coins: one coin for each.")
        self.dataset, self.canaries = dataset, canaries
        self._chosen = [int(index) for index in np.flatnonzero(np.asarray(included, dtype=bool))]
        self._records = len(dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self._records + len(self._chosen)

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return self.dataset[index] if index < self._records else self.canaries[self._chosen[index - self._records]]


def mislabelled(
    dataset: Dataset[Any], *, count: int, classes: int, seed: int | None = None
) -> tuple[list[tuple[Any, Any]], list[int]]:
    """Make canaries that only memory can explain: records with a wrong label, drawn at random.

    Leave the originals out of the training data: `torch.utils.data.Subset` with the indices that are not returned.

    Args:
        dataset: Records (x, y) with y a class number.
        count: How many.
        classes: Number of classes, at least 2.
        seed: Makes the choice repeatable.

    Returns:
        The canaries, and the indices of the records they were made from.

    Raises:
        InvalidOptionError: If there is no other class.
        DataError: If the data set has fewer records.
    """
    length = len(dataset)  # type: ignore[arg-type]
    if positive_int(classes, "classes") < 2:
        raise InvalidOptionError(f"classes={classes}: a wrong label needs at least two classes.")
    if positive_int(count, "count") > length:
        raise DataError(f"count={count}: the data set has only {length} records.")
    stream = np.random.default_rng(seed)
    chosen = sorted(int(index) for index in stream.choice(length, count, replace=False))
    canaries = []
    for index in chosen:
        x, y = dataset[index]
        shift = int(stream.integers(1, classes))
        wrong = (int(y) + shift) % classes
        canaries.append((x, torch.tensor(wrong) if isinstance(y, torch.Tensor) else wrong))
    return canaries, chosen
