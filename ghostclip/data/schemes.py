"""Ways to sample: what is drawn, its public constants, and its accounting event, together in one frozen object.

A scheme knows neither positions nor ranks; `PrivateSampler` does. `DeclaredSampling` states what a user draws.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from ghostclip._validate import choice, positive, positive_int
from ghostclip.accounting.history import SamplingEvent, steps_per_epoch
from ghostclip.errors import InvalidOptionError
from ghostclip.noise.keys import RandomKey, Records, WordStream, independent_coins, permutation, subset


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
        """Average number of records in a batch, the public constant by which sums are divided."""

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
        """Return the public parameters by name, as plain values; a resumed run must have the same."""


def _whole_if_meant(value: float) -> float:
    """Return N·q without the rounding error of q = b / N: 3.0 and not 2.9999999999999996."""
    nearest = round(value)
    return float(nearest) if math.isclose(value, nearest, rel_tol=1e-12) and nearest else value


@dataclass(frozen=True, kw_only=True)
class _Scheme:
    """Base of schemes: what is public of them, and checked."""

    num_samples: int
    _public: ClassVar[tuple[str, ...]] = ()
    """Names of further parameters that a resumed run must have the same of."""

    def __post_init__(self) -> None:
        positive_int(self.num_samples, "num_samples")
        # It refuses a rate, a relation or a size that is out of range.
        _ = self.event

    @property
    def event(self) -> SamplingEvent:
        """The accounting event; each scheme's own."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return the public parameters by name."""
        return {"kind": self.event.kind, **{name: getattr(self, name) for name in ("num_samples", *self._public)}}


@dataclass(frozen=True, kw_only=True)
class Poisson(_Scheme):
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

    sample_rate: float
    epoch_steps: int | None = None
    truncation: int | None = None
    relation: str = "zero_out"
    _public = ("sample_rate", "truncation")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epoch_steps is not None:
            positive_int(self.epoch_steps, "steps")
        if self.truncation is not None and self.truncation < self.expected_batch_size:
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
        """The accounting event of one step: Poisson sampling at rate q."""
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
        # The coins of Poisson sampling, from `noise/keys.py`.
        words = WordStream(key, position)
        records = independent_coins(words, self.num_samples, self.sample_rate)
        return records if self.truncation is None else subset(words, records, self.truncation)


@dataclass(frozen=True, kw_only=True)
class FullBatch(_Scheme):
    """Every record is in every batch.

    Privacy:
        No amplification: a step is a Gaussian mechanism with q = 1.

    Attributes:
        num_samples: N.
        relation: What neighbouring data sets are; see `SamplingEvent`.

    Raises:
        InvalidOptionError: If a value is out of range.
    """

    relation: str = "zero_out"
    sample_rate: ClassVar[float] = 1.0
    _public = ("sample_rate",)

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
        """The accounting event of one step on all records."""
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


@dataclass(frozen=True, kw_only=True)
class Shuffled(_Scheme):
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

    batch_size: int
    sample_rate: ClassVar[float] = 1.0
    _public = ("sample_rate", "batch_size")
    _orders: dict[tuple[str, int], Records] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The order of the epoch drawn last, by key and epoch."""

    def __post_init__(self) -> None:
        positive_int(self.num_samples, "num_samples")
        _refuse_more(self.batch_size, self.num_samples, "batch_size")

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
        """The accounting event of one epoch, in which every record takes part once."""
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


@lru_cache(maxsize=4)
def _order_of(count: int) -> Records:
    """Return the records in an order that looks random and is the same for every training, of all ranks and resumes."""
    words = hashlib.shake_128(b"order of records").digest(8 * count)
    return np.argsort(np.frombuffer(words, dtype="<u8"), kind="stable")


def _refuse_more(value: int, num_samples: int, name: str) -> None:
    """Refuse a number below 1, or above that of the records."""
    if positive_int(value, name) > num_samples:
        raise InvalidOptionError(f"{name}={value!r}: there are only {num_samples} records.")


@dataclass(frozen=True, kw_only=True)
class _OfSteps(_Scheme):
    """Base of schemes whose epoch has t batches, by default with every record in exactly one of them."""

    epoch_steps: int
    _public: ClassVar[tuple[str, ...]] = ("epoch_steps",)

    def __post_init__(self) -> None:
        positive_int(self.num_samples, "num_samples")
        _refuse_more(self.epoch_steps, self.num_samples, "epoch_steps")
        super().__post_init__()

    @property
    def steps(self) -> int:
        """Batches per epoch."""
        return self.epoch_steps

    @property
    def expected_batch_size(self) -> float:
        """N/t."""
        return self.num_samples / self.epoch_steps


def _below(words_N: NDArray[np.uint64], count: int) -> Records:
    """Return ⌊u·count⌋ of uniform u in 32 + 32 bits, in which no product overflows: uneven by 2^-64·count at most."""
    high_N, low_N, many = words_N >> np.uint64(32), words_N & np.uint64(0xFFFFFFFF), np.uint64(count)
    return ((high_N * many + ((low_N * many) >> np.uint64(32))) >> np.uint64(32)).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class RandomAllocation(_OfSteps):
    """Every record is in exactly one batch of an epoch, in one drawn uniformly for each epoch and record.

    Or in exactly k batches of k epochs, a subset of them drawn uniformly.

    Privacy:
        Amplified, and a little more than Poisson sampling of the same size: no record is drawn twice in an epoch. Sizes
        vary as Poisson's do; an empty batch is a batch. An epoch, or k of them, begun or complete, is one event.

    Attributes:
        num_samples: N.
        epoch_steps: t, batches per epoch, at most N.
        rounds: k, epochs that k batches of a record are drawn from together.
        relation: What neighbouring data sets are; see `SamplingEvent`.

    Raises:
        InvalidOptionError: If a value is out of range.
    """

    relation: str = "zero_out"
    rounds: int = 1
    _rounds: dict[tuple[str, int], tuple[Records, Records]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The records of the epoch drawn last by their steps, and where each step begins, by key and epoch."""

    def __post_init__(self) -> None:
        positive_int(self.rounds, "rounds")
        super().__post_init__()

    @property
    def event(self) -> SamplingEvent:
        """The accounting event of one epoch, in which every record takes part in k random steps."""
        return SamplingEvent(
            kind="allocation",
            sample_rate=1.0,
            num_units=self.num_samples,
            relation=self.relation,
            steps_per_event=self.rounds * self.epoch_steps,
            participations=self.rounds,
        )

    def draw(self, key: RandomKey, position: int) -> Records:
        """Return the batch at a position.

        Args:
            key: Where the randomness follows from.
            position: Number of the batch; its event is position // (k·t).

        Returns:
            Distinct record numbers, ascending, int64.

        Cost:
            O(N·k·(k + log N)) once in k epochs, and memory for N·k numbers.

        Reference:
            Floyd's subsets: Bentley (1987), A sample of brilliance.
        """
        total = self.rounds * self.epoch_steps
        event, step = divmod(position, total)
        drawn_for = (key.fingerprint(), event)
        if drawn_for not in self._rounds:
            self._rounds.clear()
            words, step_NK = WordStream(key, event), np.empty((self.num_samples, self.rounds), np.int64)
            for taken, last in enumerate(range(total - self.rounds, total)):
                # One up to the last that may be; the last one where that is taken.
                step_N = _below(words.take(self.num_samples), last + 1)
                is_taken_N = (step_NK[:, :taken] == step_N[:, None]).any(1)
                step_NK[:, taken] = np.where(is_taken_N, last, step_N)
            flat_M = step_NK.ravel()
            order_M = np.argsort(flat_M, kind="stable")
            self._rounds[drawn_for] = order_M // self.rounds, np.searchsorted(flat_M[order_M], np.arange(total + 1))
        records_M, begins = self._rounds[drawn_for]
        return records_M[begins[step] : begins[step + 1]]

    def describe(self) -> dict[str, Any]:
        """Return the public parameters by name."""
        described = super().describe()
        return described if self.rounds == 1 else {**described, "rounds": self.rounds}


@dataclass(frozen=True, kw_only=True)
class Cyclic(_OfSteps):
    """Every record is in the same step of every epoch: batches of one size, whose records are put together once.

    Privacy:
        Nothing is amplified. Between two batches of a record lie exactly as many steps as an epoch has, which is what
        correlated noise is accounted for by. Which records are together is public, and does not depend on them.

    Attributes:
        num_samples: N.
        epoch_steps: Batches per epoch, at most N; sizes differ by at most one.

    Raises:
        InvalidOptionError: If a value is out of range.
    """

    @property
    def event(self) -> SamplingEvent:
        """The accounting event of one epoch, in which every record takes part in the same step."""
        return SamplingEvent(
            kind="cyclic", sample_rate=1.0, num_units=self.num_samples, steps_per_event=self.epoch_steps
        )

    def draw(self, key: RandomKey, position: int) -> Records:
        """Return the batch at a position.

        Args:
            key: Not needed.
            position: Number of the batch; the same in every epoch.

        Returns:
            Distinct record numbers, ascending, int64.
        """
        del key
        return np.sort(_order_of(self.num_samples)[position % self.steps :: self.steps])


@dataclass(frozen=True, kw_only=True)
class CyclicPoisson(_OfSteps):
    """Records are dealt out to b groups once; step after step draws a Poisson sample from the next group.

    Privacy:
        A record can be in one of b steps that follow each other, with probability q there: b steps are one Poisson
        event of rate q, and two batches of a record lie a multiple of b steps apart, as noise needs that is correlated
        over b steps.

    Attributes:
        num_samples: N.
        groups: b, at most N.
        sample_rate: q, of a record in its group's steps.
        epoch_steps: Batches per epoch, a multiple of b.

    Raises:
        InvalidOptionError: If a value is out of range.

    Reference:
        Choquette-Choo et al. (2023), (Amplified) banded matrix factorization, arXiv:2306.08153.
    """

    groups: int
    sample_rate: float
    _public = ("groups", "sample_rate", "epoch_steps")

    def __post_init__(self) -> None:
        _Scheme.__post_init__(self)
        _refuse_more(self.groups, self.num_samples, "groups")
        if positive_int(self.epoch_steps, "epoch_steps") % self.groups:
            raise InvalidOptionError(f"epoch_steps={self.epoch_steps!r}: no multiple of groups={self.groups!r}.")

    @property
    def expected_batch_size(self) -> float:
        """N·q/b."""
        return self.num_samples * self.sample_rate / self.groups

    @property
    def event(self) -> SamplingEvent:
        """The accounting event of one round: a step on each of the b groups."""
        return SamplingEvent(
            kind="cyclic_poisson", sample_rate=self.sample_rate, num_units=self.num_samples, steps_per_event=self.groups
        )

    def draw(self, key: RandomKey, position: int) -> Records:
        """Return the batch at a position.

        Args:
            key: Where the randomness follows from.
            position: Number of the batch; its group is position % b.

        Returns:
            Distinct record numbers, ascending, int64.
        """
        group = _order_of(self.num_samples)[position % self.groups :: self.groups]
        return np.sort(group[independent_coins(WordStream(key, position), len(group), self.sample_rate)])


@dataclass(frozen=True, kw_only=True)
class DeclaredSampling:
    """States how the user samples batches; given to `make_private` in the place of a loader.

    Privacy:
        Nothing is checked: neither that batches are drawn as stated, nor that each is released once, nor that a row of
        a batch is one unit. Whoever declares answers for it, and `PrivacyEngine.summary` says so. Shuffled batches are
        not Poisson samples; their ε is much larger (see `SamplingEvent`). On several ranks the values are those of the
        whole batch, of which each rank holds different records.

    Example:
        >>> own = ghostclip.DeclaredSampling(sample_rate=0.01, expected_batch_size=500, num_units=50_000)
        >>> model, optimizer, _ = ghostclip.PrivacyEngine().make_private(
        ...     module=model, optimizer=optimizer, data_loader=own, noise_multiplier=1.0, max_grad_norm=1.0)

    Attributes:
        sample_rate: q, the probability with which a unit joins a batch; 1 for kind="full".
        expected_batch_size: Rows of a batch on average: the public constant that a mean gradient is divided by.
        num_units: N, the number of units in the data.
        kind: "poisson" (each unit independently with probability q) or "full" (all units in each batch).
        unit: What is protected: a "record" or a "user" with all of theirs.
        records_per_unit: Most rows of one unit in a batch.
        relation: What neighbouring data sets are; see `SamplingEvent`.
        steps_per_epoch: Batches that count as an epoch; round(1/q) by default.
        data_loader: What `make_private` hands back as the loader, unchanged.

    Raises:
        InvalidOptionError: If a value is out of range.
    """

    sample_rate: float
    expected_batch_size: float
    num_units: int
    kind: str = "poisson"
    unit: str = "record"
    records_per_unit: int = 1
    relation: str = "zero_out"
    steps_per_epoch: int | None = None
    data_loader: Any = None

    def __post_init__(self) -> None:
        choice(self.kind, "kind", ("poisson", "full"))
        positive(self.expected_batch_size, "expected_batch_size")
        if self.steps_per_epoch is not None:
            positive_int(self.steps_per_epoch, "steps_per_epoch")
        _ = self.event

    @property
    def event(self) -> SamplingEvent:
        """The accounting event of a step."""
        return SamplingEvent(
            kind=self.kind,
            sample_rate=self.sample_rate,
            num_units=self.num_units,
            relation=self.relation,
            unit=self.unit,
            records_per_unit=self.records_per_unit,
        )

    @property
    def steps(self) -> int:
        """Batches per epoch."""
        return self.steps_per_epoch or max(1, round(1 / self.sample_rate))
