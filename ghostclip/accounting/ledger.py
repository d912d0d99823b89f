"""What was released: checked values of one step, and the run-length ledger of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ghostclip._validate import fraction, non_negative
from ghostclip.errors import InvalidOptionError

Entry = tuple[float, float, int]
"""(noise multiplier σ, sample rate q, number of consecutive steps with both)."""


def checked_noise_multiplier(noise_multiplier: float) -> float:
    """Return σ as a float, or refuse it.

    Args:
        noise_multiplier: Standard deviation of the noise over the sensitivity; 0 and inf are allowed.

    Returns:
        The same value as a Python float.

    Raises:
        InvalidOptionError: If it is negative or not a number.
    """
    if noise_multiplier == math.inf:
        return math.inf
    return non_negative(noise_multiplier, "noise_multiplier")


def checked_sample_rate(sample_rate: float) -> float:
    """Return the sampling probability q as a float, or refuse it.

    Args:
        sample_rate: Probability with which each record joins a batch.

    Returns:
        The same value as a Python float.

    Raises:
        InvalidOptionError: If it lies outside [0, 1].
    """
    return 0.0 if sample_rate == 0 else fraction(sample_rate, "sample_rate")


def checked_history(history: Sequence[Sequence[float]], *, where: str) -> list[Entry]:
    """Return a ledger of checked entries.

    Args:
        history: Entries (σ, q, steps).
        where: What is being read, for the error message.

    Returns:
        A new list of tuples.

    Raises:
        InvalidOptionError: If an entry is not three numbers in range.
    """
    checked: list[Entry] = []
    for index, entry in enumerate(history):
        if len(entry) != 3 or entry[2] != int(entry[2]) or entry[2] < 0:
            raise InvalidOptionError(
                f"{where}: entry {index} is {entry!r}; expected (noise_multiplier, sample_rate, steps)."
            )
        sigma, rate, steps = entry
        checked.append((checked_noise_multiplier(sigma), checked_sample_rate(rate), int(steps)))
    return checked


def steps_per_epoch(sample_rate: float) -> int:
    """Return how many Poisson batches make one epoch: round(1 / q), at least 1.

    The same number is used by the sampler and by calibration, so that "epochs" means one thing.

    Args:
        sample_rate: Probability q with which each record joins a batch, in (0, 1].

    Returns:
        Number of steps.

    Raises:
        InvalidOptionError: If q is 0 or not a probability.
    """
    return max(1, round(1 / fraction(sample_rate, "sample_rate")))
