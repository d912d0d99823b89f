"""How records get into batches, and what a step therefore costs: the two belong together.

Each plan owns its loader, the public constant that sums are divided by, and the accounting event of a step, so that no
other place computes a rate.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from ghostclip.accounting.events import SamplingEvent
from ghostclip.data_loader import DPDataLoader
from ghostclip.data_loader.workers import worker_options
from ghostclip.errors import DataError, InvalidOptionError
from ghostclip.optimizers import DPOptimizer
from ghostclip.utils.ledger_file import Event
from ghostclip.utils.physical_loader import splittable_batches


class SamplingPlan(Protocol):
    """Where batches come from and how a step on them is accounted."""

    name: str
    loader: DataLoader[Any]
    sample_rate: float
    """q of one accounted event."""
    events_per_epoch: int
    """Accounted events in one pass over the loader."""
    expected_batch_size: float
    relation: str
    """Which data sets count as neighbours."""

    def events(self, optimizer: DPOptimizer) -> list[Event]:
        """Return what the step that is about to be released adds to the account; changes nothing.

        Args:
            optimizer: Is about to release.

        Returns:
            (σ, q, number of equal events), none if the step is paid for already.
        """

    def settle(self, events: list[Event]) -> None:
        """Take note that the step was written into the account.

        Args:
            events: What `events` returned for it.
        """


def _refuse_other_events(event: SamplingEvent) -> None:
    """Refuse private loaders that sample in a way that an engine's accountant does not charge for.

    Args:
        event: What the loader's sampler says of a step.

    Raises:
        InvalidOptionError: If a step is more than one Gaussian mechanism on a Poisson sample of records.
    """
    if event.kind not in ("poisson", "full") or event.records_per_unit > 1:
        raise InvalidOptionError(
            f"data_loader that samples {event.kind!r} batches of {event.unit}s: the engine charges Poisson samples of "
            "records. Use such a loader with a DPOptimizer of your own, and account for its event yourself."
        )


def _noise_multiplier(optimizer: DPOptimizer) -> float:
    """Return σ over the sum's true sensitivity: k backward passes over one record add up to k·C."""
    return optimizer.noise_multiplier / optimizer.accumulated_iterations


class PoissonPlan:
    """Every record joins every batch independently with probability q.

    Privacy:
        A step is a Gaussian mechanism with noise multiplier σ under Poisson sampling of rate q, adjacent by adding,
        removing or zeroing out a record. If k undeclared backward passes went into the step, a record takes part with
        probability at most k·q and then moves the sum by at most k·C; that is what is charged, whatever the passes
        had in common.

    Args:
        loader: The user's loader; one that samples like this already is used as it is.
    """

    name = "poisson"

    def __init__(self, loader: DataLoader[Any]) -> None:
        private = DPDataLoader.from_data_loader(loader)
        _refuse_other_events(private.event)
        self.loader: DataLoader[Any] = private
        self.sample_rate = private.sample_rate
        self.events_per_epoch = len(private)
        self.expected_batch_size = float(private.expected_batch_size)
        self.relation = private.event.relation

    def events(self, optimizer: DPOptimizer) -> list[Event]:
        """Return what the step that is about to be released adds to the account.

        Args:
            optimizer: Is about to release.

        Returns:
            One event.
        """
        rate = min(1.0, optimizer.accumulated_iterations * self.sample_rate)
        return [(_noise_multiplier(optimizer), rate, 1)]

    def settle(self, events: list[Event]) -> None:
        """Nothing to remember: steps are independent.

        Args:
            events: What was written.
        """


class ShuffledPlan:
    """Every record is in exactly one batch of a pass, as ordinary loaders do it.

    Privacy:
        Sampling amplifies nothing here. A record affects one step of a pass, so a pass as a whole costs what one
        Gaussian mechanism with q = 1 costs (adjacent by zeroing out a record); it is charged in full at its first step,
        again if σ is lowered during the pass, and again if more steps are made than the pass has batches.

    Args:
        loader: The user's loader.

    Raises:
        DataError: If its sampler may show a record twice in a pass.
    """

    name = "shuffled"
    sample_rate = 1.0
    events_per_epoch = 1
    relation = "zero_out"

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._passes = _CountedPasses(_without_repetition(loader))
        self._passes_seen = 0
        # As if a pass had ended, so that the first step is charged whatever loader it comes from.
        self._steps_in_pass = len(self._passes)
        self._charged_at = float("inf")
        self.loader: DataLoader[Any] = _StoppableLoader(
            loader.dataset,
            batch_sampler=self._passes,
            collate_fn=loader.collate_fn,
            generator=loader.generator,
            **worker_options(loader),
        )
        self.expected_batch_size = float(self._passes.batch_size)
        warnings.warn(
            "poisson_sampling=False: shuffled batches have no amplification by sampling, so each pass over the data is "
            "accounted as one full participation (q = 1). ε will be much larger than with Poisson sampling.",
            stacklevel=4,
        )

    def events(self, optimizer: DPOptimizer) -> list[Event]:
        """Return what the step that is about to be released adds to the cost of its pass.

        Args:
            optimizer: Is about to release.

        Returns:
            An event for each pass that begins, or one for less noise than the pass has paid for, or none.
        """
        sigma = _noise_multiplier(optimizer)
        begun = self._passes.count - self._passes_seen
        # More steps than batches come from another loader, whose batches may show every record again.
        if begun > 0 or self._steps_in_pass + 1 > len(self._passes):
            return [(sigma, self.sample_rate, max(1, begun))]
        return [(sigma, self.sample_rate, 1)] if sigma < self._charged_at else []

    def settle(self, events: list[Event]) -> None:
        """Take note of a step.

        Args:
            events: What was written for it.
        """
        begun = self._passes.count - self._passes_seen
        self._passes_seen = self._passes.count
        self._steps_in_pass += 1
        if begun > 0 or self._steps_in_pass > len(self._passes):
            self._steps_in_pass = 1
        if events:
            self._charged_at = events[0][0]


def plan_for(loader: DataLoader[Any], *, poisson_sampling: bool, before: SamplingPlan | None) -> SamplingPlan:
    """Decide how batches are sampled and accounted.

    Args:
        loader: The user's loader.
        poisson_sampling: Whether to sample as the accountant assumes.
        before: The plan that the same account was used with before, if there is one.

    Returns:
        The plan, with the private loader.
    """
    if before is not None and before.loader.dataset is not loader.dataset:
        warnings.warn(
            "this engine has accounted for another data set object before. ε adds up as if both were the same "
            "records; use a PrivacyEngine of its own for other records.",
            stacklevel=3,
        )
    return PoissonPlan(loader) if poisson_sampling else ShuffledPlan(loader)


class _StoppableLoader(DataLoader[Any]):
    """A loader whose passes end when it is told so."""

    stop_when: Callable[[], bool] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            if self.stop_when is not None and self.stop_when():
                return
            yield batch


class _CountedPasses(Sampler[list[int]]):
    """A batch sampler that counts how often it was started.

    Args:
        batches: The batch sampler.
    """

    def __init__(self, batches: BatchSampler) -> None:
        self._batches = batches
        self.batch_size = batches.batch_size
        self.count = 0

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator: the pass counts from when it is started, not from its first batch.
        self.count += 1
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def _without_repetition(loader: DataLoader[Any]) -> BatchSampler:
    """Return the loader's batch sampler if no record can be in two batches of a pass.

    Args:
        loader: The user's loader.

    Returns:
        The batch sampler.

    Raises:
        DataError: If a record may be in several.
    """
    batches = splittable_batches(loader)
    sampler = getattr(batches, "sampler", None)
    once = isinstance(sampler, SequentialSampler) or (isinstance(sampler, RandomSampler) and not sampler.replacement)
    if once and isinstance(sampler, RandomSampler):
        once = sampler.num_samples <= len(loader.dataset)  # type: ignore[arg-type]
    if not isinstance(batches, BatchSampler) or not once:
        raise DataError(
            f"data_loader with {type(sampler or batches).__name__}: a record may be in several batches of one pass, so "
            "poisson_sampling=False has no valid account. Use shuffle=True, or poisson_sampling=True."
        )
    return batches
