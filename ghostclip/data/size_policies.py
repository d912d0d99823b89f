"""How large a physical batch may be: given, or learned from the memory that the batches so far took."""

from __future__ import annotations

import logging
import math
from typing import Protocol

import torch

from ghostclip._memory import PeakMemory, available_bytes
from ghostclip.data.physical_batch_size import DEFAULT_SHARE, BatchSizeSearch, memory_limit

_log = logging.getLogger(__name__)

# A Poisson batch exceeds its mean by more than this many standard deviations about once in 10^9 draws.
_DEVIATIONS = 6.0


def largest_batch(expected_batch_size: float) -> int:
    """Return a size that Poisson batches practically never exceed, so that no larger one is of use."""
    return math.ceil(expected_batch_size + _DEVIATIONS * math.sqrt(expected_batch_size))


class SizePolicy(Protocol):
    """Decides how large a physical batch may be."""

    @property
    def size(self) -> int:
        """The largest physical batch to hand out now."""

    def before(self) -> None:
        """A physical batch is about to be processed."""

    def after(self, size: int) -> None:
        """A physical batch was processed."""

    def failed(self, size: int) -> None:
        """A physical batch did not fit in memory."""


class FixedSize:
    """A physical batch size that was set or computed before the loop."""

    def __init__(self, size: int) -> None:
        self.size = size

    def before(self) -> None:
        """Nothing to measure."""

    def after(self, size: int) -> None:
        """Nothing to learn."""

    def failed(self, size: int) -> None:
        """Hand out batches of half that size from now on."""
        self.size = min(self.size, max(1, size // 2))


class LearnedSize:
    """A physical batch size that grows from one sample while the real training steps are measured."""

    def __init__(self, search: BatchSizeSearch, device: torch.device) -> None:
        self._search = search
        self._meter = PeakMemory(device)
        self._measuring = False
        self._warned = False

    @property
    def size(self) -> int:
        """The largest physical batch that the measurements so far allow."""
        return self._search.size

    def before(self) -> None:
        """Begin to measure, unless the size is settled."""
        self._measuring = not self._search.settled
        if self._measuring:
            self._meter.start()

    def after(self, size: int) -> None:
        """Learn from a processed batch."""
        if self._measuring and size > 0:
            self._measuring = False
            self._search.record(size, self._meter.stop())
            if self._search.settled:
                _log.info("physical batch size settled at %d", self._search.size)
            elif self._search.nothing_fits and not self._warned:
                self._warned = True
                _log.warning("one sample at a time already exceeds memory_budget; continuing with one")

    def failed(self, size: int) -> None:
        """Learn that a size does not fit."""
        self._measuring = False
        self._search.record_failure(size)


def learned_size(*, upper: int, memory_budget: int | None, device: torch.device) -> LearnedSize:
    """Return a size that is learned within a memory budget, by default `DEFAULT_SHARE` of what is available now."""
    if memory_budget is None and device.type == "cuda":
        memory_budget = int(DEFAULT_SHARE * (available_bytes(device) or 0))
    return LearnedSize(BatchSizeSearch(upper=upper, limit=memory_limit(device, memory_budget)), device)
