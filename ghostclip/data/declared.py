"""Sampling that the user does, stated so that it can be accounted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ghostclip._validate import choice, positive, positive_int
from ghostclip.accounting.history import SamplingEvent


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
