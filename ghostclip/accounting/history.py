"""Histories of releases: the events that samplers make, run-length counts of equal steps, and the checks of entries."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, cast

from ghostclip._validate import choice, fraction, non_negative, positive_int
from ghostclip.errors import InvalidOptionError

RELATIONS = ("zero_out", "add_remove", "replace_one")
"""Neighbouring relations that accountants know."""

Entry = tuple[float, float, int]
"""(noise multiplier σ, sample rate q, number of consecutive steps with both)."""

OtherEntry = tuple[str, tuple[float, ...], int]
"""(kind, parameters, number): "truncated_poisson" (σ, q, N, largest batch), "allocation" (σ, t)."""

Charge = Entry | OtherEntry

Kind = tuple[float, float] | tuple[str, tuple[float, ...]]
"""An entry without its number."""


def times(kind: Kind, count: int) -> Charge:
    """Return ``count`` equal entries as one."""
    return cast("Charge", (*kind, count))


def joined(charges: Iterable[Charge]) -> list[Charge]:
    """Return entries in order, consecutive equal ones as one."""
    runs: list[Charge] = []
    for charge in charges:
        before = runs.pop()[2] if runs and runs[-1][:2] == charge[:2] else 0
        runs.append(cast("Charge", (*charge[:2], charge[2] + before)))
    return runs


def counted(charges: Iterable[Charge]) -> Counter[Kind]:
    """Return the number of entries of each kind."""
    counts = Counter[Kind]()
    for first, second, count in charges:
        counts[cast("Kind", (first, second))] += count
    return counts


@dataclass(frozen=True)
class History:
    """Releases counted by kind, order forgotten: no bound depends on it."""

    relation: str
    steps: tuple[tuple[tuple[float, float], int], ...] = ()  # ((σ, q), count), distinct
    truncated: tuple[tuple[tuple[float, ...], int], ...] = ()  # ((σ, q, N, largest batch), count), distinct
    allocated: tuple[tuple[tuple[float, ...], int], ...] = ()  # ((σ, t), count): each record in one of t steps

    @property
    def count(self) -> int:
        """Number of releases."""
        return sum(count for group in (self.steps, self.truncated, self.allocated) for _, count in group)

    @cached_property
    def participation(self) -> float:
        """Upper bound of the probability that a record takes part in any release at all: 1 - Π(1 - q), at most Σq.

        Privacy:
            It bounds δ at every ε, ε = 0 included: with the complementary probability the outputs do not depend on the
            record, whatever the relation.
        """
        rates = [(parameters[1], count) for parameters, count in (*self.steps, *self.truncated)]
        rates += [(1.0, count) for _, count in self.allocated]
        counts = Counter[float]()
        for rate, count in rates:
            counts[rate] += count
        at_most = sum(Fraction(rate) * count for rate, count in counts.items())
        missed = math.fsum(count * math.log1p(-rate) if rate < 1 else -math.inf for rate, count in counts.items())
        # The sum is rounded upwards; the other one has a margin for its logarithms.
        return min(_float_above(at_most), -math.expm1(missed) * (1 + 1e-12), 1.0)


def _float_above(value: Fraction | int) -> float:
    """Return the smallest float that is not below a number."""
    nearest = float(value)
    return nearest if Fraction(nearest) >= value else math.nextafter(nearest, math.inf)


def totals(history: Sequence[Entry], others: Sequence[OtherEntry], relation: str) -> History:
    """Return a history in which equal releases are one entry; steps that release nothing are left out."""
    steps = Counter[tuple[float, float]]()
    for sigma, rate, count in history:
        if count and rate > 0 and sigma < math.inf:
            steps[sigma, rate] += count
    rest = defaultdict[str, Counter[tuple[float, ...]]](Counter)
    for kind, parameters, count in others:
        rest[kind][parameters] += count
    if rest["allocation"] and relation == "replace_one":
        raise InvalidOptionError("random allocation: its cost is known for relation 'zero_out' and 'add_remove' only.")
    return History(
        relation,
        tuple(sorted(steps.items())),
        tuple(sorted(rest["truncated_poisson"].items())),
        tuple(sorted((entry, count) for entry, count in rest["allocation"].items() if entry[0] < math.inf)),
    )


def checked_relation(relation: str) -> str:
    return choice(relation, "relation", RELATIONS)


def checked_others(others: Sequence[Sequence[object]], *, where: str) -> list[OtherEntry]:
    """Return checked entries (kind, parameters, count); ``where`` names the source in errors."""
    try:
        return [_checked_other(entry) for entry in others]
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise InvalidOptionError(f"{where}: others is {others!r}: {error}.") from error


def _checked_other(entry: Sequence[Any]) -> OtherEntry:
    kind, parameters, count = entry
    numbers = tuple(float(number) for number in parameters)
    checks: dict[str, Callable[..., tuple[float, ...]]] = {
        "truncated_poisson": truncated_entry,
        "allocation": allocation_entry,
    }
    return kind, checks[kind](*numbers), positive_int(count, "count")


def truncated_entry(noise_multiplier: float, sample_rate: float, records: float, largest: float) -> tuple[float, ...]:
    """Return the checked parameters (σ, q, N, largest batch) of steps on truncated Poisson samples."""
    return (
        checked_noise_multiplier(noise_multiplier),
        fraction(sample_rate, "sample_rate"),
        float(positive_int(int(records), "num_records")),
        float(positive_int(int(largest), "max_batch_size")),
    )


def allocation_entry(noise_multiplier: float, steps: float) -> tuple[float, ...]:
    """Return the checked (σ, t) of a round of random allocation."""
    return checked_noise_multiplier(noise_multiplier), float(positive_int(int(steps), "steps"))


def checked_noise_multiplier(noise_multiplier: float) -> float:
    """Return σ as a float; refuse negative values and NaN, allow 0 and inf."""
    if noise_multiplier == math.inf:
        return math.inf
    return non_negative(noise_multiplier, "noise_multiplier")


def checked_sample_rate(sample_rate: float) -> float:
    """Return the sampling probability q as a float; refuse values outside [0, 1]."""
    return 0.0 if sample_rate == 0 else fraction(sample_rate, "sample_rate")


def checked_history(history: Sequence[Sequence[float]], *, where: str) -> list[Entry]:
    """Return checked entries (σ, q, steps); ``where`` names the source in errors."""
    if not isinstance(history, (list, tuple)):
        raise InvalidOptionError(
            f"{where}: history is {history!r}; expected a list of (noise_multiplier, ...) entries."
        )
    return [_checked_entry(entry, f"{where}: entry {index} is {entry!r}") for index, entry in enumerate(history)]


def _checked_entry(entry: Sequence[Any], what: str) -> Entry:
    """Return one checked entry (σ, q, steps)."""
    try:
        sigma, rate, steps = entry
        count = int(steps)
    except (TypeError, ValueError, OverflowError):
        count = -1
    if count < 0 or count != steps:
        raise InvalidOptionError(f"{what}; expected (noise_multiplier, sample_rate, steps).")
    try:
        return checked_noise_multiplier(sigma), checked_sample_rate(rate), count
    except InvalidOptionError as error:
        raise InvalidOptionError(f"{what}: {error}") from error


def steps_per_epoch(sample_rate: float) -> int:
    """Return how many Poisson batches make one epoch: round(1 / q), at least 1, for samplers and calibration alike."""
    return max(1, round(1 / fraction(sample_rate, "sample_rate")))


KINDS = ("poisson", "truncated_poisson", "full", "shuffled", "cyclic", "cyclic_poisson", "allocation")
UNITS = ("record", "user")


@dataclass(frozen=True, kw_only=True)
class SamplingEvent:
    """Selection of the protected units by one step (of shuffled batches: one epoch).

    Privacy:
        With a sum in which every record moves by at most C and noise of standard deviation σ·C, an event is a Gaussian
        mechanism with noise multiplier σ / `records_per_unit`, on a unit that takes part

        - "poisson": with probability `sample_rate`, independently of all others;
        - "truncated_poisson": likewise, and of a sample of more than `truncation` units a uniformly random subset of
          that size is kept (so that a unit may also displace another one);
        - "full": always;
        - "shuffled": in exactly one step of an epoch; nothing is amplified, an epoch as a whole is one event with q 1;
        - "cyclic": likewise, in every epoch in the same step of it;
        - "cyclic_poisson": in one step of each round of `steps_per_event`, always the same one, and there with
          probability `sample_rate`; a round is one event;
        - "allocation": in exactly `participations` steps of each round of `steps_per_event`, drawn uniformly for each
          round and unit; a round is one event.

        Two data sets are neighbours if one unit is replaced by one without contribution ("zero_out", the number of
        units is public), or is added or removed ("add_remove").

    Reference:
        "truncated_poisson": Ganesh et al. (2025), arXiv:2508.15089. "cyclic_poisson": Choquette-Choo et al. (2023),
        arXiv:2306.08153. "allocation": Feldman and Shenfeld (2025), arXiv:2502.08202.
    """

    kind: str  # one of `KINDS`
    sample_rate: float  # q; 1 for all but the Poisson kinds
    num_units: int  # N, the number of units (public under "zero_out")
    truncation: int | None = None  # largest number of units in a batch, for "truncated_poisson" only
    relation: str = "zero_out"  # or "add_remove"
    unit: str = "record"  # a "record", or a "user" with all of theirs
    records_per_unit: int = 1  # most records of one unit in one batch: the factor on the sensitivity
    steps_per_event: int = 1  # more than 1 for rounds and epochs
    participations: int = 1  # k, a divisor of `steps_per_event`, for "allocation" only

    def __post_init__(self) -> None:
        choice(self.kind, "kind", KINDS)
        choice(self.relation, "relation", RELATIONS)
        choice(self.unit, "unit", UNITS)
        fraction(self.sample_rate, "sample_rate")
        positive_int(self.num_units, "num_units")
        positive_int(self.records_per_unit, "records_per_unit")
        positive_int(self.steps_per_event, "steps_per_event")
        positive_int(self.participations, "participations")
        if self.steps_per_event % self.participations or (self.kind != "allocation" and self.participations > 1):
            raise InvalidOptionError(
                f"participations={self.participations!r}: a divisor of steps_per_event, and 1 for {self.kind!r}."
            )
        if self.kind not in {"poisson", "truncated_poisson", "cyclic_poisson"} and self.sample_rate != 1:
            raise InvalidOptionError(f"sample_rate={self.sample_rate!r}: {self.kind!r} has no sampling; it must be 1.")
        if (self.kind == "truncated_poisson") != (self.truncation is not None):
            raise InvalidOptionError(
                f"truncation={self.truncation!r}: goes with kind='truncated_poisson', and only it."
            )
        if self.truncation is not None:
            positive_int(self.truncation, "truncation")
        if self.kind in {"shuffled", "cyclic", "cyclic_poisson"} and self.relation == "add_remove":
            raise InvalidOptionError(
                "relation='add_remove': a record more moves others to other batches. Use 'zero_out'."
            )
