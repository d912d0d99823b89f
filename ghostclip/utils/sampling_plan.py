"""How records get into batches, and what a step therefore costs: the two belong together.

Each plan owns its loader, the public constant that sums are divided by, and the accounting event of a step, so that no
other place computes a rate.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from ghostclip.accounting import Accountant
from ghostclip.data_loader import DPDataLoader
from ghostclip.data_loader.workers import worker_options
from ghostclip.errors import DataError
from ghostclip.optimizers import DPOptimizer
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

    def charge(self, accountant: Accountant, optimizer: DPOptimizer) -> None:
        """Write the step that is about to be released into the ledger.

        Args:
            accountant: Keeps the ledger.
            optimizer: Is about to release.
        """


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
        self.loader: DataLoader[Any] = private
        self.sample_rate = private.sample_rate
        self.events_per_epoch = len(private)
        self.expected_batch_size = float(private.expected_batch_size)

    def charge(self, accountant: Accountant, optimizer: DPOptimizer) -> None:
        """Write the step that is about to be released into the ledger.

        Args:
            accountant: Keeps the ledger.
            optimizer: Is about to release.
        """
        rate = min(1.0, optimizer.accumulated_iterations * self.sample_rate)
        accountant.step(noise_multiplier=_noise_multiplier(optimizer), sample_rate=rate)


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

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._passes = _CountedPasses(_without_repetition(loader))
        self._passes_seen = 0
        # As if a pass had ended, so that the first step is charged whatever loader it comes from.
        self._steps_in_pass = len(self._passes)
        self._charged_at = float("inf")
        self.loader: DataLoader[Any] = DataLoader(
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

    def charge(self, accountant: Accountant, optimizer: DPOptimizer) -> None:
        """Write what this step adds to the cost of its pass into the ledger.

        Args:
            accountant: Keeps the ledger.
            optimizer: Is about to release.
        """
        sigma = _noise_multiplier(optimizer)
        begun = self._passes.count - self._passes_seen
        self._passes_seen = self._passes.count
        self._steps_in_pass += 1
        # More steps than batches come from another loader, whose batches may show every record again.
        if begun > 0 or self._steps_in_pass > len(self._passes):
            events, self._steps_in_pass = max(1, begun), 1
        else:
            events = int(sigma < self._charged_at)
        for _ in range(events):
            accountant.step(noise_multiplier=sigma, sample_rate=self.sample_rate)
            self._charged_at = sigma


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
