"""Sampling of batches together with the cost of a step on them: the two belong together.

Each sampling owns its loader, the public constant that sums are divided by, and the accounting event of a step, so
that no other place computes a rate.
"""

from __future__ import annotations

import hashlib
import math
import numbers
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from ghostclip import _tree
from ghostclip.accounting.history import Charge, SamplingEvent, joined
from ghostclip.checks.batches import unnoticed
from ghostclip.checks.padding import Padded
from ghostclip.data import DeclaredSampling, DPDataLoader, PrivateSampler, Shuffled
from ghostclip.data.collation import padding_of
from ghostclip.data.loader import (
    TakenAsItIs,
    checked_batch_size,
    dataset_length,
    record_sampler,
    refuse_wrapped,
    warn_of_repetitions,
    worker_options,
)
from ghostclip.data.physical_batches import splittable_batches
from ghostclip.distributed.agreement import announcing_error, gathered, refusals_shared, require_equal, world_size
from ghostclip.errors import DataError, InvalidOptionError
from ghostclip.language import seeded_generators
from ghostclip.mechanisms import Mechanism
from ghostclip.noise.keyed import Correlation
from ghostclip.noise.keys import Owner
from ghostclip.optim import DPOptimizer
from ghostclip.optim.draws import Draw, DrawLog
from ghostclip.privacy.budget import cost_of

_OF_ANY_SIZE = ("poisson", "truncated_poisson", "cyclic_poisson", "allocation")
_PERIODIC = ("shuffled", "cyclic", "cyclic_poisson", "allocation")

# How rarely a draw is without a record where nobody has to see that.
_NEVER = 1e-12


class Sampling:
    """Source of batches, and the cost of a step on them."""

    padded: Sequence[Padded] = ()
    """Axes of a batch along which its collate function pads records to the length of their company."""
    correlation: Correlation | None = None
    """How the noise of steps is correlated; None for independent noise."""

    def __init__(self, loader: Any, source: Any, *, replicas: int = 1) -> None:
        """Serve a loader whose batches come from a source: a private sampler, the user's own, or a declaration."""
        self.loader = loader
        self.event: SamplingEvent = source.event  # for one backward pass in a step
        self.expected_batch_size = float(source.expected_batch_size)
        # the draws that no release has used yet; None where the user samples
        self.draws: DrawLog | None = getattr(source, "draws", None)
        # holds the position in the data; None where nothing does
        self.sampler = source if isinstance(source, PrivateSampler) else None
        self.replicas = replicas if self.sampler is None else self.sampler.num_replicas  # ranks that share each batch

    @cached_property
    def records(self) -> str | None:
        """Digest of a few records of the data set, to know it again; None where there is none."""
        return content_digest(getattr(self.loader, "dataset", None))

    def examine(self) -> None:
        """Read a few records: refuse other records on other ranks, and a collate function that mixes them."""
        loader, empty = self.loader, 0.0
        if not isinstance(loader, DataLoader):
            return
        warn_of_repetitions(loader.dataset)
        if isinstance(loader, DPDataLoader) and loader.event.kind in _OF_ANY_SIZE:
            # A rank's share of a draw is as often empty as a draw of that size.
            most = 1 - loader.event.sample_rate if "poisson" in loader.event.kind else 1.0
            empty = min(most, math.exp(-loader.expected_batch_size / world_size()))
        with announcing_error("records") if self.replicas > 1 else nullcontext():
            self.padded = padding_of(loader.dataset, loader.collate_fn, may_be_empty=empty > _NEVER)
        if self.replicas > 1:
            _require_same_records(self)

    def planned(self, noise_multiplier: float, *, epochs: int) -> list[Charge]:
        """Return what whole passes over the loader will cost."""
        raise NotImplementedError

    def events(self, optimizer: DPOptimizer) -> list[Charge]:
        """Return the charges of the step that is about to be released, none if it is paid for; changes nothing."""
        raise NotImplementedError

    def record_step(self, events: list[Charge]) -> None:
        """Record that the charges of a step were written into the account."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know of steps that are paid for already, in plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, empty if nothing is paid for; the sampler has continued already."""


class EventSampling(Sampling):
    """Each step is an event of its own, as the private loader's sampler says: Poisson, truncated, or a full batch.

    Privacy:
        A step is a Gaussian mechanism on a sample as `SamplingEvent` describes it; where a unit is a user with up to r
        records in a batch, its noise multiplier is σ/r. If k undeclared backward passes went into the step, a unit
        takes part with probability at most k·q and then moves the sum by at most k times as much; that is what is
        charged, whatever the passes had in common. Truncated batches have no such bound (a unit may displace others
        in each of them), so that several passes are refused there.
    """

    def __init__(self, loader: DPDataLoader | DeclaredSampling) -> None:
        """Serve a private loader, or a sampling that the user declares."""
        if isinstance(loader, DeclaredSampling):
            # What is declared is the batch of all ranks together.
            super().__init__(loader.data_loader, loader, replicas=world_size())
            self._steps = loader.steps
        else:
            super().__init__(loader, loader.private_sampler)
            self._steps = len(loader)

    def events(self, optimizer: DPOptimizer) -> list[Charge]:
        """Return one event; refuse several undeclared backward passes on a truncated batch."""
        passes, event = optimizer.accumulated_iterations, self.event
        if passes > 1 and event.kind == "truncated_poisson":
            raise InvalidOptionError(
                f"{passes} backward passes before one step() on truncated batches (max_batch_size={event.truncation}): "
                "no account of that is known. Use one backward pass for each batch and BatchMemoryManager for batches "
                "that do not fit, or leave max_batch_size out."
            )
        if passes > 1:
            rate = min(1.0, passes * event.sample_rate)
            event = replace(event, sample_rate=rate, records_per_unit=passes * event.records_per_unit)
        return [cost_of(event, noise_multiplier=optimizer.noise_multiplier)]

    def planned(self, noise_multiplier: float, *, epochs: int) -> list[Charge]:
        """Return the charge of all steps of so many passes."""
        return [cost_of(self.event, noise_multiplier=noise_multiplier, count=epochs * self._steps)]


class PeriodSampling(Sampling):
    """Several steps are one event together: an epoch in which every record is in exactly one batch, or a round of it.

    Privacy:
        Without a mechanism that says otherwise sampling amplifies nothing: a record affects one step of a pass, so that
        a pass as a whole costs what one Gaussian mechanism with q = 1 costs (adjacent by zeroing out a record). A
        period is charged in full at its first step, again if σ is lowered in it, and again if more steps are made than
        it has.
    """

    def __init__(self, loader: TakenAsItIs, mechanism: Mechanism | None = None) -> None:
        """Serve a loader whose batches are charged by epoch or round."""
        self._source: Any = loader.batch_sampler
        super().__init__(loader, self._source)
        self._mechanism = mechanism
        self._scheme = None if self.sampler is None else self.sampler.scheme
        self._epoch_steps, self._steps = len(loader), self.event.steps_per_event
        if mechanism is not None and self._scheme is not None:
            self.correlation = mechanism.correlation(self._scheme)
        self._sigma: float | None = None  # noise multiplier of earlier steps, fixed where noise is correlated
        self._trainable: list[bool] | None = None  # which parameters trained then
        # Periods charged, steps in the present one, and the noise multiplier that it was charged with.
        self._passes_seen, self._steps_in_pass, self._charged_at = 0, 0, math.inf
        self.load_state_dict({})

    def events(self, optimizer: DPOptimizer) -> list[Charge]:
        """Return the charges of the coming step: those of a period that begins, or of less noise than was paid for."""
        # An event for each pass that begins, or one for less noise than the pass has paid for, or none.
        passes, sigma = optimizer.accumulated_iterations, optimizer.noise_multiplier
        if passes > 1 and self.event.kind != "shuffled":
            raise InvalidOptionError(
                f"{passes} backward passes before one step() on {self.event.kind} batches: no account of that is "
                "known. Use one backward pass for each batch, and BatchMemoryManager for batches that do not fit."
            )
        if self.correlation is not None and sigma != (self._sigma or sigma):
            raise InvalidOptionError(
                f"noise_multiplier={sigma!r} after steps with {self._sigma!r}: correlated noise is of one σ for all of "
                "the training. Leave it as it was."
            )
        begun = self._source.periods_begun - self._passes_seen
        # More steps than batches come from another loader, whose batches may show every record again.
        if begun > 0 or self._steps_in_pass + 1 > self._steps:
            return self._charges(sigma, passes, self._passes_seen, max(1, begun))
        (charge,) = self._charges(sigma, passes, max(0, self._passes_seen - 1), 1)
        return [charge] if _sigma_of(charge) < self._charged_at else []

    def _charges(self, sigma: float, passes: int, first: int, count: int) -> list[Charge]:
        """Return the charges of `count` periods from number `first` on."""
        # k undeclared backward passes over one record add up to k times its bound.
        event, factors = replace(self.event, records_per_unit=passes), [1.0] * count
        if self._mechanism is not None and self._scheme is not None:
            factors = self._mechanism.periods(self._scheme, first, count)
        return joined([cost_of(event, noise_multiplier=sigma * factor) for factor in factors])

    def planned(self, noise_multiplier: float, *, epochs: int) -> list[Charge]:
        """Return a charge for each kind of period of whole passes."""
        return self._charges(noise_multiplier, 1, 0, -(-epochs * self._epoch_steps // self._steps))

    def row(self, optimizer: DPOptimizer) -> int:
        """Return which step of a correlated mechanism the next release is: the number of its draw."""
        number = None if self.draws is None else self.draws.next_number
        if number is None:
            raise InvalidOptionError("correlated noise: the step is of no batch of the private loader.")
        trainable = [p.requires_grad for p in optimizer.params]
        if trainable != (self._trainable or trainable):
            raise InvalidOptionError(
                "correlated noise: other parameters are trainable than in the steps before, whose noise this one takes "
                "back. Freeze and unfreeze before the first step."
            )
        self._sigma, self._trainable = optimizer.noise_multiplier, trainable
        return number

    def record_step(self, events: list[Charge]) -> None:
        """Record a step and its charges: a period may have begun."""
        begun = self._source.periods_begun - self._passes_seen
        self._passes_seen += begun
        self._steps_in_pass += 1
        if begun > 0 or self._steps_in_pass > self._steps:
            self._steps_in_pass = 1
        if events:
            self._charged_at = _sigma_of(events[0])

    def state_dict(self) -> dict[str, Any]:
        """Return what is paid for, where a resumed run continues the pass that was interrupted."""
        # Empty for a user's own loader: whoever resumes begins another pass over it.
        if self.sampler is None:
            return {}
        return {
            "passes_seen": self._passes_seen,
            "steps_in_pass": self._steps_in_pass,
            "charged_at": self._charged_at,
            **({} if self._sigma is None else {"sigma": self._sigma, "trainable": self._trainable}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; after an empty one the next step is charged as one of another pass."""
        # As if a pass had ended, so that the first step is charged whatever loader it comes from.
        self._passes_seen, self._steps_in_pass, self._charged_at = (
            int(state.get("passes_seen", self._source.periods_begun)),
            int(state.get("steps_in_pass", self._steps)),
            float(state.get("charged_at", math.inf)),
        )
        self._sigma, self._trainable = state.get("sigma", self._sigma), state.get("trainable", self._trainable)


def _sigma_of(charge: Charge) -> float:
    """Return the noise multiplier of a charge."""
    # (σ, t) of a round.
    return float(charge[1][0] if isinstance(charge[1], tuple) else charge[0])


def _require_same_records(sampling: Sampling) -> None:
    """Refuse data sets of which ranks have other records, or in another order, as far as three of them show it."""
    digests = gathered("records", sampling.records)
    if None not in digests:
        # Not the hashes: contents of records follow from them.
        require_equal(
            "data set, numbered by its first, middle and last record,",
            [digests.index(digest) for digest in digests],
            "Ranks draw records by their numbers: one that has another number on each would take part in a step twice. "
            "Give all ranks the same records in the same order: seed random_split, shuffle and the like alike, sort "
            "lists of files, and let the private loader deal records out to ranks.",
        )


def _drawn_by(
    mechanism: Mechanism, loader: DataLoader[Any] | DeclaredSampling, *, poisson_sampling: bool
) -> DPDataLoader:
    """Return the private loader of a mechanism."""
    if isinstance(loader, DeclaredSampling) or not poisson_sampling:
        option = "a DeclaredSampling" if poisson_sampling else "poisson_sampling=False"
        raise InvalidOptionError(
            f"mechanism={type(mechanism).__name__} with {option}: the mechanism draws the batches. Leave one out."
        )
    if isinstance(loader, DPDataLoader):
        scheme = loader.private_sampler.scheme
        if scheme != mechanism.scheme(scheme.num_samples, round(scheme.expected_batch_size)):
            raise InvalidOptionError(
                f"mechanism={type(mechanism).__name__}: data_loader is private already and draws otherwise "
                f"({scheme.event.kind}). Give the ordinary loader."
            )
        return loader
    with refusals_shared("loader"):
        refuse_wrapped(loader)
        scheme = mechanism.scheme(dataset_length(loader.dataset), checked_batch_size(loader))
    return DPDataLoader.from_data_loader(loader, scheme=scheme)


def sampling_for(
    loader: DataLoader[Any] | DeclaredSampling,
    *,
    poisson_sampling: bool,
    before: Sampling | None,
    mechanism: Mechanism | None = None,
) -> Sampling:
    """Decide how batches are sampled and accounted; return the sampling, with the private loader."""
    # A private loader samples as its scheme says, a `DeclaredSampling` as it states; a mechanism draws in place of
    # Poisson sampling. `before`: the sampling that the same account was used with.
    if mechanism is not None:
        loader = _drawn_by(mechanism, loader, poisson_sampling=poisson_sampling)
    if isinstance(loader, DeclaredSampling):
        return EventSampling(loader)
    # A private loader was agreed on when it was made; ranks that train apart bring one of their own.
    with nullcontext() if isinstance(loader, DPDataLoader) else refusals_shared("loader"):
        refuse_wrapped(loader)
    if before is not None and getattr(before.loader, "dataset", None) is not loader.dataset:
        warnings.warn(
            "this engine has accounted for another data set object before. ε adds up as if both were the same "
            "records; use a PrivacyEngine of its own for other records.",
            stacklevel=4,
        )
    if isinstance(loader, DPDataLoader) and loader.event.kind in _PERIODIC:
        return PeriodSampling(loader, mechanism)
    if poisson_sampling:
        return EventSampling(DPDataLoader.from_data_loader(loader))
    distributed = world_size() > 1 or isinstance(record_sampler(loader), DistributedSampler)
    sampling = _shuffled_on_all_ranks(loader) if distributed else _shuffled(loader)
    warnings.warn(
        "poisson_sampling=False: shuffled batches have no amplification by sampling, so each pass over the data is "
        "accounted as one full participation (q = 1). ε will be much larger than with Poisson sampling.",
        stacklevel=4,
    )
    return sampling


def _shuffled_on_all_ranks(loader: DataLoader[Any]) -> PeriodSampling:
    """Return the sampling of shuffled batches that all ranks share: each rank's own would be another training."""
    with refusals_shared("loader without Poisson sampling"):
        scheme = Shuffled(num_samples=dataset_length(loader.dataset), batch_size=checked_batch_size(loader))
        return PeriodSampling(DPDataLoader.from_data_loader(loader, scheme=scheme))


def _shuffled(loader: DataLoader[Any]) -> PeriodSampling:
    """Return the sampling of a user's own loader without Poisson sampling; refuse one that may repeat records."""
    stoppable = TakenAsItIs(
        loader.dataset,
        batch_sampler=_CountedPasses(_without_repetition(loader), dataset_length(loader.dataset)),
        collate_fn=loader.collate_fn,
        generator=loader.generator,
        **worker_options(loader),
    )
    return PeriodSampling(stoppable)


class _CountedPasses(Sampler[list[int]]):
    """Batch sampler that counts its passes and logs what it hands out.

    Privacy:
        A record that comes a second time in a pass is refused when it comes: the user may have exchanged the sampler.
    """

    def __init__(self, batches: BatchSampler, records: int) -> None:
        self._batches = batches
        self.batch_size = self.expected_batch_size = batches.batch_size
        self.event = SamplingEvent(kind="shuffled", sample_rate=1.0, num_units=records, steps_per_event=len(batches))
        self.periods_begun = 0
        self._owner = Owner(self)  # a copy's passes are nowhere charged
        self.draws = DrawLog(once_a_pass=True)  # the batches that no release has used yet
        self._drawn = 0

    def tracking(self) -> AbstractContextManager[None]:
        """Let a loader say by `mark_delivered` which batches its user has received, as a `PrivateSampler` does."""
        return nullcontext()

    def mark_delivered(self) -> None:
        """Count one batch as received by the user."""
        self.draws.follow_deliveries()
        self.draws.deliver()

    def __iter__(self) -> Iterator[list[int]]:
        """Begin a pass, which counts from now on, and return its batches."""
        # Not a generator: the pass counts from when it is started, not from its first batch.
        self._owner.require(self, remedy="Iterate over the one that make_private() returned, in its process.")
        self.periods_begun += 1
        self.draws.begin_pass()
        return self._logged()

    def _logged(self) -> Iterator[list[int]]:
        """Yield the batches of a pass, each logged as a draw; refuse a record that comes twice."""
        taken = bytearray()
        for batch in self._batches:
            _mark_taken(batch, taken)
            self.draws.add(Draw(self._drawn, len(batch), len(batch)))
            self._drawn += 1
            yield batch
        self.draws.end_pass()

    def __len__(self) -> int:
        return len(self._batches)


def _mark_taken(batch: list[int], taken: bytearray) -> None:
    """Mark the records of a batch as taken in a pass; refuse one that was taken before."""
    for index in batch:
        if index >= len(taken):
            taken.extend(bytes(index + 1 - len(taken) + len(taken) // 2))
        if taken[index]:
            raise DataError(
                f"data_loader: record {index} comes twice in one pass, which the account of poisson_sampling=False has "
                "no room for. Leave the loader's sampler as it was when make_private() checked it."
            )
        taken[index] = 1


def _without_repetition(loader: DataLoader[Any]) -> BatchSampler:
    """Return the loader's batch sampler if no record can be in two batches of a pass."""
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


def content_digest(dataset: Any) -> str | None:
    """Return a digest of three records' content; None where it cannot be told, or another reading has another content.

    Of floating-point numbers the mean counts, to four digits, and no text that may be a path: what another computer
    reads otherwise. Generators stay where they are.
    """
    readings: list[list[list[object]]] = []
    try:
        places = sorted({0, len(dataset) // 2, len(dataset) - 1})
        for _ in range(2):
            # Augmentations draw alike, here and in another process.
            with unnoticed([]), seeded_generators(0):
                readings.append([list(_content(dataset[number])) for number in places])
    except Exception:  # noqa: BLE001 - whatever a data set raises, a training may go on without this
        return None
    one, other = readings
    return hashlib.sha256(repr(one).encode()).hexdigest() if any(one) and one == other else None


def _content(record: Any) -> Iterator[object]:
    """Yield plain values that identify a record's content."""
    for leaf in _tree.leaves(record):
        if isinstance(leaf, (Tensor, np.ndarray, np.generic)):
            values = torch.as_tensor(leaf).detach().cpu()
            exact = not (values.is_floating_point() or values.is_complex())
            yield tuple(values.shape), _bytes(values) if exact else _rounded(values.abs().double().mean().item())
        elif isinstance(leaf, (bool, numbers.Integral, bytes)):
            yield leaf
        elif isinstance(leaf, numbers.Real):
            yield _rounded(float(leaf))
        elif isinstance(leaf, str):
            yield None if os.sep in leaf else leaf
        elif hasattr(leaf, "tobytes"):
            yield hashlib.sha256(leaf.tobytes()).hexdigest()


def _bytes(values: Tensor) -> str:
    """Return a hash of a tensor's bytes."""
    return hashlib.sha256(values.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def _rounded(value: float) -> str:
    return f"{value:.4g}"  # digits of a mean that computers agree on
