"""From a privacy budget to the noise, the sampling rate or the number of steps that meets it: never over it."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable

from ghostclip._validate import fraction, positive, positive_int, probability, suggests_options
from ghostclip.accounting.history import steps_per_epoch
from ghostclip.accounting.registry import DEFAULT_ACCOUNTANT, bounding_accountant
from ghostclip.errors import BudgetError, InvalidOptionError

_log = logging.getLogger(__name__)

MIN_SIGMA, MAX_SIGMA = 1e-3, 1e6
MIN_RATE = 1e-12
MOST_STEPS = 10**9
# What is above it bounds nothing that anybody could use.
MOST_EPSILON = 50
# How near, by the logarithm, σ comes to where ε falls to 0: numbers next to that take a minute each.
_NEAR = math.log(1.2)


@suggests_options
def get_noise_multiplier(  # noqa: PLR0913 - the arguments that existing scripts pass
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: float | None = None,
    steps: int | None = None,
    accountant: str = DEFAULT_ACCOUNTANT,
    epsilon_tolerance: float = 0.01,
    relation: str = "zero_out",
) -> float:
    """Return the smallest noise multiplier found that stays within the budget.

    Args:
        target_epsilon: ε at the end of training, > 0.
        target_delta: δ, in (0, 1).
        sample_rate: Probability q with which each record joins a batch, in (0, 1].
        epochs: Length of training in epochs of `steps_per_epoch(q)` steps; give this or `steps`.
        steps: Length of training in steps.
        accountant: Name of the accountant that will be used.
        epsilon_tolerance: How far ε may stay below the target; never more than 0.1 % of it is left.
        relation: What neighbouring data sets are.

    Returns:
        σ in [0.001, 1e6] with ε(σ) ≤ target_epsilon; where δ alone is enough for that, so that ε falls to 0, σ may be a
        fifth larger than it had to be.

    Raises:
        InvalidOptionError: If an option is out of range, or not exactly one of `epochs` and `steps` is given.
        BudgetError: If no σ up to 1e6 meets the target.

    Privacy:
        The accountant's own ε at the returned σ was computed and does not exceed the target.

    Example:
        >>> sigma = ghostclip.get_noise_multiplier(
        ...     target_epsilon=3.0, target_delta=1e-5, sample_rate=0.01, steps=1000
        ... )
        >>> print(f"{sigma:.2f}")
        0.81
    """
    target = positive(target_epsilon, "target_epsilon")
    tolerance = min(positive(epsilon_tolerance, "epsilon_tolerance"), 1e-3 * target)
    delta = probability(target_delta, "target_delta")
    rate = fraction(sample_rate, "sample_rate")
    length = _length(rate, epochs=epochs, steps=steps)

    def epsilon_of(sigma: float) -> float:
        return _epsilon((sigma, rate, length), delta, accountant, relation)

    return smallest_noise_multiplier(epsilon_of, target=target, tolerance=tolerance)


def get_sample_rate(
    *,
    target_epsilon: float,
    target_delta: float,
    noise_multiplier: float,
    steps: int,
    accountant: str = DEFAULT_ACCOUNTANT,
    relation: str = "zero_out",
) -> float:
    """Return the largest sampling rate found that stays within the budget.

    Args:
        target_epsilon: ε at the end of training, > 0.
        target_delta: δ, in (0, 1).
        noise_multiplier: σ.
        steps: Length of training in steps.
        accountant: Name of the accountant that will be used.
        relation: What neighbouring data sets are.

    Returns:
        q in (0, 1] with ε(q) ≤ target_epsilon.

    Raises:
        BudgetError: If no rate down to 1e-12 meets the target.
    """
    target, delta = positive(target_epsilon, "target_epsilon"), probability(target_delta, "target_delta")
    sigma, length = positive(noise_multiplier, "noise_multiplier"), positive_int(steps, "steps")

    def epsilon_of(rate: float) -> float:
        return _epsilon((sigma, rate, length), delta, accountant, relation)

    low, high = 1.0, 1.0
    while epsilon_of(low) > target:
        low, high = low / 4, low
        if low < MIN_RATE:
            raise BudgetError(
                f"target_epsilon={target:g}: not reached with any sample rate down to {MIN_RATE:g}; "
                "use more noise, fewer steps, or allow a larger epsilon or delta."
            )
    while high / low > 1 + 1e-5:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if epsilon_of(middle) <= target else (low, middle)
    return low


def get_steps(
    *,
    target_epsilon: float,
    target_delta: float,
    noise_multiplier: float,
    sample_rate: float,
    accountant: str = DEFAULT_ACCOUNTANT,
    relation: str = "zero_out",
) -> int:
    """Return the largest number of steps found that stays within the budget.

    Args:
        target_epsilon: ε at the end of training, > 0.
        target_delta: δ, in (0, 1).
        noise_multiplier: σ.
        sample_rate: Probability q with which each record joins a batch, in (0, 1].
        accountant: Name of the accountant that will be used.
        relation: What neighbouring data sets are.

    Returns:
        T with ε(T) ≤ target_epsilon, at most 10^9.

    Raises:
        BudgetError: If one step exceeds the target already.
    """
    target, delta = positive(target_epsilon, "target_epsilon"), probability(target_delta, "target_delta")
    sigma, rate = positive(noise_multiplier, "noise_multiplier"), fraction(sample_rate, "sample_rate")

    def fits(steps: int) -> bool:
        return _epsilon((sigma, rate, steps), delta, accountant, relation) <= target

    if not fits(1):
        raise BudgetError(
            f"target_epsilon={target:g}: one step with noise multiplier {sigma:g} exceeds it; "
            "use more noise, a smaller sample rate, or allow a larger epsilon or delta."
        )
    low, high = 1, 2
    while high < MOST_STEPS and fits(high):
        low, high = high, 4 * high
    high = min(high, MOST_STEPS)
    while high - low > 1:
        middle = round(math.sqrt(low * high)) if high > 2 * low + 2 else (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def delta_too_large(delta: float, num_samples: int | None) -> str | None:
    """Return a warning if δ is at least 1/N, else None."""
    if num_samples is None or delta * num_samples < 1:
        return None
    return (
        f"delta={delta:g} is not below 1/N = {1 / num_samples:.3g} (N = {num_samples}): publishing a random record in "
        "the clear would satisfy it. Use a delta well below 1/N."
    )


def epsilon_too_large(epsilon: float) -> str | None:
    """Return a warning, a sentence on what such an ε allows, if it is too large to mean anything, else None."""
    if epsilon <= MOST_EPSILON:
        return None
    return (
        f"an epsilon above {MOST_EPSILON} means nothing: the odds that a record was there may change by a factor of "
        "e^epsilon. Use more noise, fewer steps or smaller batches."
    )


def _epsilon(entry: tuple[float, float, int], delta: float, accountant: str, relation: str) -> float:
    keeper = bounding_accountant(accountant, relation=relation)
    keeper.history = [entry]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epsilon = keeper.get_epsilon(delta)
    _log.debug("epsilon = %.4g at noise multiplier %.5g, sample rate %.5g, %d steps", epsilon, *entry)
    return epsilon


def _length(rate: float, *, epochs: float | None, steps: int | None) -> int:
    if (epochs is None) == (steps is None):
        raise InvalidOptionError(f"epochs={epochs!r}, steps={steps!r}: give exactly one of the two.")
    if steps is not None:
        return positive_int(steps, "steps")
    # A part of an epoch counts as the next whole step, so that the history is never shorter than the training.
    return math.ceil(positive(epochs, "epochs") * steps_per_epoch(rate))


def smallest_noise_multiplier(epsilon_of: Callable[[float], float], *, target: float, tolerance: float) -> float:
    """Return σ with target - tolerance ≤ ε(σ) ≤ target by a search on log σ that keeps a safe upper end."""
    # σ lies in [0.001, 1e6] and its ε was computed; up to a fifth too large where δ alone is nearly enough.
    high, low = 1.0, 1.0
    high_epsilon = low_epsilon = epsilon_of(1.0)
    while high_epsilon > target:
        low, low_epsilon = high, high_epsilon
        high *= 2
        if high > MAX_SIGMA:
            raise BudgetError(
                f"target_epsilon={target:g}: not reached with any noise multiplier up to {MAX_SIGMA:g}; "
                "train for fewer steps, with a smaller sample rate, or allow a larger epsilon or delta."
            )
        high_epsilon = epsilon_of(high)
    while low_epsilon <= target:
        high, high_epsilon = low, low_epsilon
        low /= 2
        if low < MIN_SIGMA:
            return high
        low_epsilon = epsilon_of(low)
    bisect = False
    while target - high_epsilon > tolerance and math.log(high / low) > (_NEAR if high_epsilon <= 0 else 1e-9):
        middle = _between(low, high, low_epsilon, high_epsilon, target - tolerance / 2, bisect=bisect)
        epsilon = epsilon_of(middle)
        if epsilon <= target:
            high, high_epsilon = middle, epsilon
        else:
            low, low_epsilon = middle, epsilon
        bisect = not bisect
    return high


def _between(low: float, high: float, low_epsilon: float, high_epsilon: float, aim: float, *, bisect: bool) -> float:
    """Return the next σ: where the log-log secant meets the aim, or the geometric middle."""
    if bisect or high_epsilon <= 0 or math.isinf(low_epsilon):
        return math.sqrt(low * high)
    share = math.log(low_epsilon / aim) / math.log(low_epsilon / high_epsilon)
    return low * (high / low) ** min(max(share, 0.01), 0.99)
