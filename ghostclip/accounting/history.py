"""History of releases: what an accountant composes, run-length counts of equal steps, and the checks of its entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from ghostclip._validate import choice, fraction, non_negative, positive_int
from ghostclip.errors import InvalidOptionError

RELATIONS = ("zero_out", "add_remove", "replace_one")
"""Neighbouring relations that accountants know."""

Entry = tuple[float, float, int]
"""(noise multiplier σ, sample rate q, number of consecutive steps with both)."""

OtherEntry = tuple[str, tuple[float, ...], int]
"""(kind, parameters, number): "truncated_poisson" (σ, q, N, largest batch), "allocation" (σ, t), "guarantee" (ε, δ)."""


Kind = tuple[float, float] | tuple[str, tuple[float, ...]]
"""An entry without its number."""


@dataclass(frozen=True)
class History:
    """Releases counted by kind, order forgotten: no bound depends on it."""

    relation: str
    steps: tuple[tuple[tuple[float, float], int], ...] = ()  # ((σ, q), count), distinct
    truncated: tuple[tuple[tuple[float, ...], int], ...] = ()  # ((σ, q, N, largest batch), count), distinct
    guarantees: tuple[tuple[tuple[float, ...], int], ...] = ()  # ((ε, δ), count), distinct
    allocated: tuple[tuple[tuple[float, ...], int], ...] = ()  # ((σ, t), count): each record in one of t steps

    @property
    def count(self) -> int:
        """Number of releases."""
        groups = (self.steps, self.truncated, self.guarantees, self.allocated)
        return sum(count for group in groups for _, count in group)

    @cached_property
    def participation(self) -> float:
        """Upper bound of the probability that a record takes part in any release at all: 1 - Π(1 - q), at most Σq.

        Privacy:
            It bounds δ at every ε, ε = 0 included: with the complementary probability the outputs do not depend on the
            record, whatever the relation. An (ε, δ)-private release is 0-private with probability 1 - δ if ε is 0, and
            else one in which every record takes part.
        """
        rates = [(parameters[1], count) for parameters, count in (*self.steps, *self.truncated)]
        rates += [(delta if epsilon == 0 else 1.0, count) for (epsilon, delta), count in self.guarantees]
        rates += [(1.0, count) for _, count in self.allocated]
        counts: dict[float, int] = {}
        for rate, count in rates:
            counts[rate] = counts.get(rate, 0) + count
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
    steps: dict[tuple[float, float], int] = {}
    for sigma, rate, count in history:
        if count and rate > 0 and sigma < math.inf:
            steps[sigma, rate] = steps.get((sigma, rate), 0) + count
    rest: dict[str, dict[tuple[float, ...], int]] = {"truncated_poisson": {}, "guarantee": {}, "allocation": {}}
    for kind, parameters, count in others:
        rest[kind][parameters] = rest[kind].get(parameters, 0) + count
    if rest["allocation"] and relation == "replace_one":
        raise InvalidOptionError("random allocation: its cost is known for relation 'zero_out' and 'add_remove' only.")
    return History(
        relation,
        tuple(sorted(steps.items())),
        tuple(sorted(rest["truncated_poisson"].items())),
        tuple(sorted(rest["guarantee"].items())),
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
        "guarantee": guarantee_entry,
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


def guarantee_entry(epsilon: float, delta: float) -> tuple[float, ...]:
    """Return the checked (ε, δ) of a release with a known guarantee."""
    if not non_negative(delta, "delta") < 1:
        raise InvalidOptionError(f"delta={delta!r}: must be below 1.")
    return (non_negative(epsilon, "epsilon"), float(delta))


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
