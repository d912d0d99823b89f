"""From a privacy budget to the noise that meets it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

from ghostclip._validate import fraction, positive, positive_int, probability
from ghostclip.accounting.ledger import steps_per_epoch
from ghostclip.accounting.registry import create_accountant
from ghostclip.errors import BudgetError, InvalidOptionError

MIN_SIGMA, MAX_SIGMA = 1e-3, 1e6


def get_noise_multiplier(  # noqa: PLR0913 - the arguments that existing scripts pass
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: float | None = None,
    steps: int | None = None,
    accountant: str = "rdp",
    epsilon_tolerance: float = 0.01,
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

    Returns:
        σ in [0.001, 1e6] with ε(σ) ≤ target_epsilon.

    Raises:
        InvalidOptionError: If an option is out of range, or not exactly one of `epochs` and `steps` is given.
        BudgetError: If no σ up to 1e6 meets the target.

    Privacy:
        The accountant's own ε at the returned σ was computed and does not exceed the target.
    """
    target = positive(target_epsilon, "target_epsilon")
    tolerance = min(positive(epsilon_tolerance, "epsilon_tolerance"), 1e-3 * target)
    delta = probability(target_delta, "target_delta")
    rate = fraction(sample_rate, "sample_rate")
    length = _length(rate, epochs=epochs, steps=steps)

    def epsilon_of(sigma: float) -> float:
        ledger = create_accountant(accountant)
        ledger.history = [(sigma, rate, length)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ledger.get_epsilon(delta)

    return _smallest_sigma(epsilon_of, target=target, tolerance=tolerance)


def _length(rate: float, *, epochs: float | None, steps: int | None) -> int:
    if (epochs is None) == (steps is None):
        raise InvalidOptionError(f"epochs={epochs!r}, steps={steps!r}: give exactly one of the two.")
    if steps is not None:
        return positive_int(steps, "steps")
    # A part of an epoch counts as the next whole step, so that the ledger is never shorter than the training.
    return math.ceil(positive(epochs, "epochs") * steps_per_epoch(rate))


def _smallest_sigma(epsilon_of: Callable[[float], float], *, target: float, tolerance: float) -> float:
    """Return σ with target - tolerance ≤ ε(σ) ≤ target by a search on log σ that keeps a safe upper end."""
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
    while target - high_epsilon > tolerance and math.log(high / low) > 1e-9:
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
