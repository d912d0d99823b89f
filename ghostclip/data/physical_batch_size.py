"""How large a physical batch may be: given, searched by trial steps, or learned while real steps are measured."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

from ghostclip import _validate
from ghostclip._memory import PeakMemory, available_bytes, is_out_of_memory
from ghostclip.errors import InvalidOptionError

DEFAULT_SHARE = 0.5
"""Share of the memory available at the start that a search may fill when no budget is given."""

# A Poisson batch exceeds its mean by more than this many standard deviations about once in 10^9 draws.
_DEVIATIONS = 6.0

_log = logging.getLogger(__name__)


def memory_limit(device: torch.device, memory_budget: int | None) -> int | None:
    """Return the peak of memory, as `PeakMemory` counts, that a search must not exceed; None for no limit."""
    # By default `DEFAULT_SHARE` of what is available on the CPU, and no limit but the device's own on CUDA.
    if memory_budget is None:
        if device.type == "cuda":
            return None
        room = available_bytes(device)
        if room is None:
            raise InvalidOptionError(
                "max_physical_batch_size='auto': this system does not say how much memory is available. Give "
                "memory_budget in bytes, or a number of samples."
            )
        memory_budget = int(DEFAULT_SHARE * room)
    # Garbage that is collected during the search would make room that nobody gave.
    gc.collect()
    return PeakMemory(device).in_use() + _validate.positive_int(memory_budget, "memory_budget")


class LearnedSize:
    """A physical batch size that grows from one sample while steps are measured, those of a training or trial steps."""

    # Sizes double while the memory per sample, as measured between the last two sizes, says that twice as much fits;
    # then one extrapolated step goes as far as the limit. After a size that failed (out of memory, or over the limit)
    # comes the middle between it and the largest that worked. Each size is confirmed by its own measurement before it
    # counts.
    def __init__(self, *, upper: int, limit: int | None, device: torch.device) -> None:
        self._upper = _validate.positive_int(upper, "upper")
        self._limit = limit
        self._meter = PeakMemory(device)
        self._measuring = False
        self._largest = 0
        self._peak = 0
        self._too_large = self._upper + 1
        self._bytes_per_sample = 0.0
        self.size = 1
        self.peak = 0  # of the latest size that was measured, in bytes

    @property
    def settled(self) -> bool:
        """Whether `size` is the answer."""
        return self.size == self._largest

    def before(self) -> None:
        """Begin to measure, unless the size is settled."""
        self._measuring = not self.settled
        if self._measuring:
            self._meter.start()

    def after(self, size: int) -> None:
        """Learn from a processed batch."""
        if self._measuring and size > 0:
            self._measuring = False
            fitted = not self.nothing_fits
            self.peak = self._meter.stop()
            self.record(size, self.peak)
            if self.settled:
                _log.info("physical batch size settled at %d", self.size)
            elif self.nothing_fits and fitted:
                _log.warning("one sample at a time already exceeds memory_budget; continuing with one")

    def record(self, size: int, peak: int) -> None:
        """Record the peak, in bytes, of a size that ran."""
        if self._limit is not None and peak > self._limit:
            self.failed(size)
        elif size > self._largest:
            if self._largest:
                self._bytes_per_sample = max(0.0, (peak - self._peak) / (size - self._largest))
            self._largest, self._peak = size, peak
            self.size = self._next_size()

    def failed(self, size: int) -> None:
        """Learn that a size does not fit."""
        if self._measuring:
            self._measuring = False
            self._meter.stop()
        if size <= self._largest:
            # What fitted before no longer does (longer samples, new state of the optimizer): leave a margin.
            self._largest = 3 * size // 4
            self._too_large = self._largest + 1
        else:
            self._too_large = min(self._too_large, size)
        self.size = max(1, self._next_size())

    @property
    def nothing_fits(self) -> bool:
        """Whether even one sample is too much."""
        return self._too_large <= 1

    def _next_size(self) -> int:
        """Return the size to try after `largest` worked and `too_large` did not."""
        gap = self._too_large - self._largest
        if self._too_large <= self._upper:
            # Below an eighth the gain in speed is not worth another failure.
            return self._largest if gap <= max(1, self._largest // 8) else self._largest + gap // 2
        doubled = min(2 * self._largest, self._upper)
        if self._limit is None or self._bytes_per_sample == 0:
            return doubled
        fitting = self._largest + int((self._limit - self._peak) / self._bytes_per_sample)
        return max(self._largest, min(doubled, fitting))


def find_max_physical_batch_size(
    step_fn: Callable[[int], object],
    *,
    upper: int,
    memory_budget: int | None = None,
    device: torch.device | str = "cpu",
) -> int:
    """Return the largest batch that a step can process within memory, at most ``upper``."""
    # On CUDA sizes are tried until one runs out of memory, then smaller ones are; with a budget the measured peak must
    # stay within it as well. On the CPU, where running out of memory ends the process, the peak of the resident set is
    # measured at small sizes and growth stops where the next size would exceed the budget.
    device = torch.device(device)
    # The first step, and the first of several samples (which is checked), also pay for what is allocated once.
    step_fn(1)
    if _validate.positive_int(upper, "upper") > 1:
        attempt(partial(step_fn, 2), again=True)
    sizes = LearnedSize(upper=upper, limit=memory_limit(device, memory_budget), device=device)
    while not sizes.settled:
        size = sizes.size
        sizes.before()
        if attempt(partial(step_fn, size), again=size > 1)[0]:
            sizes.after(size)
        else:
            sizes.failed(size)
        if sizes.nothing_fits:
            raise InvalidOptionError(
                f"max_physical_batch_size='auto': one sample takes memory to {sizes.peak} bytes, over the budget of "
                f"{memory_budget} on top of what was in use. Raise memory_budget, or use shorter samples."
            )
    return sizes.size


def attempt(work: Callable[[], Any], *, again: bool, undo: Callable[[], None] = lambda: None) -> tuple[bool, Any]:
    """Return True and a result, or False, after ``undo``, where memory ran out and it is to be tried ``again``."""
    try:
        return True, work()
    except BaseException as error:
        undo()
        if not again or not is_out_of_memory(error):
            raise
    # Outside of the handler: the traceback kept the attempt's tensors alive until here.
    gc.collect()
    torch.cuda.empty_cache()
    return False, None


def largest_batch(expected_batch_size: float) -> int:
    """Return a size that Poisson batches practically never exceed, so that no larger one is of use."""
    return math.ceil(expected_batch_size + _DEVIATIONS * math.sqrt(expected_batch_size))


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


SizePolicy: TypeAlias = FixedSize | LearnedSize
"""Decides how large a physical batch may be."""


def given_size(max_physical_batch_size: int | str, memory_budget: int | None) -> FixedSize | None:
    """Return the size that a user has given, None for "auto"; refuse a budget that nothing is found within."""
    if max_physical_batch_size == "auto":
        return None
    size = _validate.positive_int(max_physical_batch_size, "max_physical_batch_size")
    if memory_budget is not None:
        raise InvalidOptionError("memory_budget only says how to find max_physical_batch_size='auto'.")
    return FixedSize(size)


def learned_size(expected_batch_size: float, memory_budget: int | None, device: torch.device) -> LearnedSize:
    """Return a size that is learned within a memory budget, by default `DEFAULT_SHARE` of what is available now."""
    if memory_budget is None and device.type == "cuda":
        memory_budget = int(DEFAULT_SHARE * (available_bytes(device) or 0))
    limit = memory_limit(device, memory_budget)
    return LearnedSize(upper=largest_batch(expected_batch_size), limit=limit, device=device)
