"""Accounting events, plain values: a sampler makes the event, an accountant consumes it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ghostclip._validate import choice, fraction, positive_int
from ghostclip.errors import InvalidOptionError

KINDS = ("poisson", "truncated_poisson", "full", "shuffled", "cyclic", "cyclic_poisson", "allocation")
RELATIONS = ("zero_out", "add_remove")
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
    relation: str = "zero_out"  # one of `RELATIONS`
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

    def as_dict(self) -> dict[str, Any]:
        """Return the event as plain Python values, from which `SamplingEvent(**mapping)` rebuilds it."""
        return asdict(self)
