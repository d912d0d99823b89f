"""User-level sampling: users are drawn, not records, and what one user can move is bounded and stated."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from ghostclip._validate import positive, positive_int
from ghostclip.accounting.history import SamplingEvent
from ghostclip.data.schemes import Poisson
from ghostclip.errors import DataError
from ghostclip.noise.keys import RandomKey, Records, WordStream, independent_coins, subset

_SIZE = "expected_batch_size"


def records_by_user(users: Sequence[Hashable] | torch.Tensor | np.ndarray) -> list[Records]:
    """Return the records of each user.

    Args:
        users: Whose each record is, in the order of the data set.

    Returns:
        One ascending array of record numbers per user, in the order of first appearance.

    Raises:
        DataError: If there are no records.
    """
    owners = users.tolist() if isinstance(users, (torch.Tensor, np.ndarray)) else users
    records_of: dict[Hashable, list[int]] = {}
    for record, user in enumerate(owners):
        records_of.setdefault(user, []).append(record)
    if not records_of:
        raise DataError("users: empty; give the user of each record.")
    return [np.array(records, dtype=np.int64) for records in records_of.values()]


class UserPoisson:
    """Every user joins every batch independently with probability q, with at most k of their records.

    Records are still clipped one by one, each to C, so that a user moves the sum by up to k·C: the event says
    `records_per_unit=k`, and an accountant divides σ by it. (`UserDataset` clips users as a whole instead.)

    Privacy:
        Covers all records of a user at once. Of a user with more than k records, k are chosen anew in each batch.

    Args:
        users: Whose each record is, in the order of the data set; any hashable ids, which are not kept.
        sample_rate: q in (0, 1].
        max_records: k, the most records of one user in a batch.
        expected_batch_size: The public constant to divide sums by. By default q times what users contribute, which
            takes the number of records of each user for public.
        relation: What neighbouring data sets are; see `SamplingEvent`.

    Raises:
        InvalidOptionError: If a value is out of range.
        DataError: If there are no records.
    """

    def __init__(
        self,
        users: Sequence[Hashable] | torch.Tensor | np.ndarray,
        *,
        sample_rate: float,
        max_records: int,
        expected_batch_size: float | None = None,
        relation: str = "zero_out",
    ) -> None:
        self._records = records_by_user(users)
        self._max_records = positive_int(max_records, "max_records")
        self._over_users = Poisson(num_samples=len(self._records), sample_rate=sample_rate, relation=relation)
        self._expected = expected_batch_size if expected_batch_size is None else positive(expected_batch_size, _SIZE)

    @property
    def num_samples(self) -> int:
        """Records of all users."""
        return sum(map(len, self._records))

    @property
    def num_users(self) -> int:
        """Users of the data set."""
        return len(self._records)

    steps = property(attrgetter("_over_users.steps"), doc="Batches per epoch: each user is in one of them on average.")

    @property
    def expected_batch_size(self) -> float:
        """Records in a batch on average; counts as public."""
        if self._expected is not None:
            return self._expected
        per_epoch = sum(min(len(records), self._max_records) for records in self._records)
        return per_epoch * self._over_users.sample_rate

    @property
    def event(self) -> SamplingEvent:
        """The accounting event of one step: Poisson sampling of users, with at most k records of each."""
        return replace(self._over_users.event, unit="user", records_per_unit=self._max_records)

    def draw(self, key: RandomKey, position: int) -> Records:
        """Return the batch at a position.

        Args:
            key: Where the randomness follows from.
            position: Number of the batch.

        Returns:
            Distinct record numbers, ascending, int64.
        """
        words = WordStream(key, position)
        users = independent_coins(words, self.num_users, self._over_users.sample_rate)
        chosen = [subset(words, self._records[user], self._max_records) for user in users.tolist()]
        return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, dtype=np.int64)

    def describe(self) -> dict[str, Any]:
        """Return the public parameters by name."""
        return {
            "kind": "user_poisson",
            "num_samples": self.num_samples,
            "sample_rate": self._over_users.sample_rate,
            "num_users": self.num_users,
            "max_records": self._max_records,
        }


class UserDataset(Dataset[Any]):
    """One item per user: k of their records, stacked, so that a "sample" is a user and clipping bounds users.

    The item has a leading axis of length k; a model folds it into the batch (`x.flatten(0, 1)`) and the loss is
    averaged over each user's rows. A user with fewer than k records has them repeated in turn; one with more shows k of
    them, chosen at each visit by torch's generator, as an augmentation would be.

    Privacy:
        With a Poisson loader over this data set the event's unit is a user and no factor k is paid: whatever the rows,
        a user's whole gradient is clipped to C. What is repeated is the user's own.

    Args:
        dataset: Map-style data set of records.
        users: Whose each record is.
        max_records: k.

    Raises:
        DataError: If there is not one user for each record.
        InvalidOptionError: If k is out of range.
    """

    def __init__(
        self, dataset: Dataset[Any], users: Sequence[Hashable] | torch.Tensor | np.ndarray, *, max_records: int
    ) -> None:
        if len(users) != len(dataset):  # type: ignore[arg-type]
            raise DataError(f"users: {len(users)} given for {len(dataset)} records; give one each.")  # type: ignore[arg-type]
        self._dataset = dataset
        self._records = records_by_user(users)
        self._max_records = positive_int(max_records, "max_records")

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, user: int) -> Any:
        mine = self._records[user]
        if len(mine) > self._max_records:
            mine = mine[torch.randperm(len(mine))[: self._max_records].numpy()]
        rows = [int(mine[row % len(mine)]) for row in range(self._max_records)]
        return default_collate([self._dataset[row] for row in rows])
