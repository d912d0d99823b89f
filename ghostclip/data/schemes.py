"""Ways to sample: what is drawn, its public constants, and its accounting event, together in one frozen object.

A scheme knows neither positions nor ranks; `PrivateSampler` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ghostclip._validate import choice, fraction, positive_int
from ghostclip.accounting.events import RELATIONS, SamplingEvent
from ghostclip.accounting.history import steps_per_epoch
from ghostclip.data.selection import Records, independent_coins, permutation, subset
from ghostclip.errors import InvalidOptionError
from ghostclip.noise.keys import RandomKey, WordStream


class SamplingScheme(Protocol):
    """Rule by which the batch of each position of a training is drawn."""

    @property
    def num_samples(self) -> int:
        """Records in the data set."""

    @property
    def steps(self) -> int:
        """Batches per epoch."""

    @property
    def expected_batch_size(self) -> float:
        """Records in a batch on average: the public constant that sums are divided by."""

    @property
    def event(self) -> SamplingEvent:
        """The accounting event of a step."""

    def draw(self, key: RandomKey, position: int) -> Records:
        """Return the batch at a position, always the same one.

        Args:
            key: Where the randomness follows from.
            position: Number of the batch, counted over all epochs from 0.

        Returns:
            Distinct record numbers, ascending, int64.
        """

    def describe(self) -> dict[str, Any]:
        """Return the public parameters as plain values; a resumed run must have the same.

        Returns:
            Values by name.
        """


def _whole_if_meant(value: float) -> float:
    """Return N·q without the rounding error of q = b / N: 3.0 and not 2.9999999999999996."""
    nearest = round(value)
    return float(nearest) if math.isclose(value, nearest, rel_tol=1e-12) and nearest else value


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Every record joins every batch independently with probability q.

    Privacy:
        The sampling that accountants amplify by. Sizes vary; an empty batch is a batch.

    Attributes:
        num_samples: N.
        sample_rate: q in (0, 1].
        epoch_steps: Batches per epoch; round(1/q), at least 1, by default.
        truncation: Keep a uniformly random subset of so many where more were sampled; None keeps all.
        relation: What neighbouring data sets are; see `SamplingEvent`.

    Raises:
        InvalidOptionError: If a value is out of range, or the truncation lies below the expected size.
    """

    num_samples: int
    sample_rate: float
    epoch_steps: int | None = None
    truncation: int | None = None
    relation: str = "zero_out"

    def __post_init__(self) -> None:
        positive_int(self.num_samples, "num_samples")
        fraction(self.sample_rate, "sample_rate")
        choice(self.relation, "relation", RELATIONS)
        if self.epoch_steps is not None:
            positive_int(self.epoch_steps, "steps")
        if self.truncation is not None and positive_int(self.truncation, "truncation") < self.expected_batch_size:
            raise InvalidOptionError(
                f"truncation={self.truncation!r}: batches have {self.expected_batch_size:g} records on average: "
                "many would be cut. Use a few standard deviations (√ of that) more."
            )

    @property
    def steps(self) -> int:
        """Batches per epoch."""
        return steps_per_epoch(self.sample_rate) if self.epoch_steps is None else self.epoch_steps

    @property
    def expected_batch_size(self) -> float:
        """N·q, before any truncation."""
        return _whole_if_meant(self.num_samples * self.sample_rate)

    @property
    def event(self) -> SamplingEvent:
        """One step."""
        return SamplingEvent(
            kind="poisson" if self.truncation is None else "truncated_poisson",
            sample_rate=self.sample_rate,
            num_units=self.num_samples,
            truncation=self.truncation,
            relation=self.relation,
        )

    def draw(self, key: RandomKey, position: int) -> Records:
        """Return the batch at a position.

        Args:
            key: Where the randomness follows from.
            position: Number of the batch.

        Returns:
            Distinct record numbers, ascending, int64.

        Cost:
            Proportional to the batch, whatever the number of records.
        """
        words = WordStream(key, position)
        records = independent_coins(words, self.num_samples, self.sample_rate)
        return records if self.truncation is None else subset(words, records, self.truncation)

    def describe(self) -> dict[str, Any]:
        """Return the public parameters.

        Returns:
            Values by name.
        """
        return {
            "kind": self.event.kind,
            "num_samples": self.num_samples,
            "sample_rate": self.sample_rate,
            "truncation": self.truncation,
        }


@dataclass(frozen=True, kw_only=True)
class FullBatch:
    """Every record is in every batch.

    Privacy:
        No amplification: a step is a Gaussian mechanism with q = 1.

    Attributes:
        num_samples: N.
        relation: What neighbouring data sets are; see `SamplingEvent`.

    Raises:
        InvalidOptionError: If a value is out of range.
    """

    num_samples: int
    relation: str = "zero_out"

    def __post_init__(self) -> None:
        positive_int(self.num_samples, "num_samples")
        choice(self.relation, "relation", RELATIONS)

    @property
    def steps(self) -> int:
        """One batch is an epoch."""
        return 1

    @property
    def expected_batch_size(self) -> float:
        """N."""
        return float(self.num_samples)

    @property
    def event(self) -> SamplingEvent:
        """One step."""
        return SamplingEvent(kind="full", sample_rate=1.0, num_units=self.num_samples, relation=self.relation)

    def draw(self, key: RandomKey, position: int) -> Records:
        """Return all records.

        Args:
            key: Not needed.
            position: Not needed.

        Returns:
            Record numbers, ascending, int64.
        """
        del key, position
        return np.arange(self.num_samples)

    def describe(self) -> dict[str, Any]:
        """Return the public parameters.

        Returns:
            Values by name.
        """
        return {"kind": "full", "num_samples": self.num_samples, "sample_rate": 1.0}


@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """Every record is in exactly one batch of an epoch, in an order drawn anew for each epoch.

    Privacy:
        Nothing is amplified: an epoch, begun or complete, costs one Gaussian mechanism with q = 1. Accounting its
        steps as if they were Poisson samples reports far too little.

    Attributes:
        num_samples: N.
        batch_size: Records in a batch; the last of an epoch holds what is left.

    Raises:
        InvalidOptionError: If a value is out of range.
    """

    num_samples: int
    batch_size: int
    _orders: dict[tuple[str, int], Records] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The order of the epoch drawn last, by key and epoch."""

    def __post_init__(self) -> None:
        positive_int(self.num_samples, "num_samples")
        if positive_int(self.batch_size, "batch_size") > self.num_samples:
            raise InvalidOptionError(f"batch_size={self.batch_size!r}: there are only {self.num_samples} records.")

    @property
    def steps(self) -> int:
        """Batches per epoch, the short last one included."""
        return math.ceil(self.num_samples / self.batch_size)

    @property
    def expected_batch_size(self) -> float:
        """The size of all batches but the last."""
        return float(self.batch_size)

    @property
    def event(self) -> SamplingEvent:
        """One epoch."""
        return SamplingEvent(kind="shuffled", sample_rate=1.0, num_units=self.num_samples, steps_per_event=self.steps)

    def draw(self, key: RandomKey, position: int) -> Records:
        """Return the batch at a position.

        Args:
            key: Where the randomness follows from.
            position: Number of the batch; its epoch is position // steps.

        Returns:
            Distinct record numbers, ascending, int64.

        Cost:
            O(N log N) once an epoch.
        """
        epoch, step = divmod(position, self.steps)
        drawn_for = (key.fingerprint(), epoch)
        if drawn_for not in self._orders:
            self._orders.clear()
            self._orders[drawn_for] = permutation(WordStream(key, epoch), self.num_samples)
        order = self._orders[drawn_for]
        return np.sort(order[step * self.batch_size : (step + 1) * self.batch_size])

    def describe(self) -> dict[str, Any]:
        """Return the public parameters.

        Returns:
            Values by name.
        """
        return {
            "kind": "shuffled",
            "num_samples": self.num_samples,
            "sample_rate": 1.0,
            "batch_size": self.batch_size,
        }
