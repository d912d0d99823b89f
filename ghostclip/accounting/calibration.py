"""From a privacy budget to the noise, the sampling rate or the number of steps that meets it: never over it.

Accountants by name, and three of them: the default one, Gaussian DP, and Google's dp-accounting.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from ghostclip._validate import did_you_mean, fraction, positive, positive_int, probability, suggests_options
from ghostclip.accounting.accountant import Accountant, IAccountant, PLDAccountant, PRVAccountant, compose, pld_epsilon
from ghostclip.accounting.history import History, steps_per_epoch
from ghostclip.accounting.rdp import RDPAccountant, rdp_epsilon
from ghostclip.accounting.solve import Bounds, epsilon_bounds
from ghostclip.errors import BudgetError, InvalidOptionError


class GaussianAccountant(Accountant):
    """Estimates ε as if the composed steps were one Gaussian mechanism with μ² = Σ q²(e^{1/σ²} - 1).

    Privacy:
        None: the central limit theorem says what happens for infinitely many infinitely small steps. The
        estimate can be many times below the true ε. It must be asked for with `estimate=True`, cannot be created by
        name, and `PrivacyEngine` does not take it.

    Reference:
        Bu, Dong, Long, Su 2020, Corollary 2.
    """

    def __init__(self, *, relation: str = "zero_out", estimate: bool = False) -> None:
        super().__init__(relation=relation)
        self.estimate = estimate

    @classmethod
    def mechanism(cls) -> str:
        return "gdp"

    @property
    def mu(self) -> float:
        """μ of the Gaussian mechanism that is taken for the history."""
        if not self.estimate:
            raise InvalidOptionError(
                "GaussianAccountant: its ε is a central-limit estimate that can lie far below the true one, so it "
                "guarantees nothing. Use the default accountant, or GaussianAccountant(estimate=True) to compare."
            )
        if self.others or self.relation == "replace_one":
            raise InvalidOptionError(
                "GaussianAccountant: knows Poisson and full-batch steps, and zero_out or add_remove."
            )
        return math.sqrt(
            sum(
                count * (rate**2 * math.expm1(min(sigma**-2, 700.0)) if rate < 1 else sigma**-2)
                for (sigma, rate), count in self.whole_history().steps
            )
        )

    def epsilon_bounds(self, delta: float) -> Bounds:
        """Return the estimate of ε, twice: neither is a bound."""
        delta, mu = probability(delta, "delta"), self.mu
        history = History(self.relation, steps=(((1 / mu, 1.0), 1),) if mu > 0 else ())
        bounds = epsilon_bounds(partial(compose, history), ("remove",), delta=delta, reach=9.0, width=0.02)
        return Bounds(bounds.upper, bounds.upper)


class DPAccountingAccountant(Accountant):
    """Accountant by dp-accounting's privacy loss distributions, with our own lower bound.

    Privacy:
        An upper bound as far as that library's own numerics go; slower and looser than the default.
    """

    @classmethod
    def mechanism(cls) -> str:
        return "dp_accounting"

    def epsilon_bounds(self, delta: float) -> Bounds:
        """Return dp-accounting's ε, and our lower bound."""
        delta = probability(delta, "delta")
        history = self.whole_history()
        epsilon = 0.0 if history.participation <= delta else float(_by_dp_accounting(history).get_epsilon(delta))
        upper = math.inf if math.isnan(epsilon) else max(0.0, epsilon)
        return Bounds(min(upper, pld_epsilon(history, delta).lower), upper)


def _by_dp_accounting(history: History) -> Any:
    """Return dp-accounting's accountant of a history."""
    try:
        import dp_accounting
        from dp_accounting.pld import PLDAccountant
    except ImportError as error:
        raise InvalidOptionError(
            "accountant='dp_accounting' needs the package dp-accounting: pip install dp-accounting."
        ) from error
    if history.truncated or history.allocated or history.relation == "replace_one":
        raise InvalidOptionError(
            "accountant='dp_accounting': here it knows Poisson and full-batch steps, and zero_out or add_remove. "
            "Use the default accountant."
        )
    accountant = PLDAccountant()
    for (sigma, rate), count in history.steps:
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        accountant.compose(event, count)
    return accountant


MATTERS = 1e-3
"""The Rényi bound lies above the true ε, so it is asked only where the tight one may be further off than this share."""

FEW = 64
"""Each distinct step's Rényi curve takes some ten milliseconds: with more of them it is asked only in need."""


class BestAccountant(Accountant):
    """Accountant by privacy loss distribution, with the Rényi bound where that proves less.

    Privacy:
        As of `PLDAccountant` and `RDPAccountant`: both are upper bounds, so the smaller one is.
    """

    @classmethod
    def mechanism(cls) -> str:
        return "best"

    def epsilon_bounds(self, delta: float) -> Bounds:
        history = self.whole_history()
        bounds = pld_epsilon(history, probability(delta, "delta"))
        enough = MATTERS if len(history.steps) <= FEW else 0.5
        if math.isfinite(bounds.upper) and bounds.upper - bounds.lower <= enough * bounds.upper:
            return bounds
        upper = min(bounds.upper, rdp_epsilon(history, delta)[0])
        return Bounds(min(bounds.lower, upper), upper)


DEFAULT_ACCOUNTANT = BestAccountant.mechanism()

_ACCOUNTANTS: dict[str, type[IAccountant]] = {
    accountant.mechanism(): accountant
    for accountant in (BestAccountant, RDPAccountant, PLDAccountant, PRVAccountant, DPAccountingAccountant)
}
_NOT_OFFERED = {
    GaussianAccountant.mechanism(): "it is a central-limit estimate that can lie far below the true ε, so it is "
    "refused as a guarantee; to compare, use ghostclip.accounting.GaussianAccountant(estimate=True)"
}


def register_accountant(mechanism: str, accountant: type[IAccountant], *, force: bool = False) -> None:
    """Register an accountant class under a name, for `create_accountant` and `PrivacyEngine(accountant=...)`.

    Args:
        mechanism: The name.
        accountant: The class, with Opacus's four methods (`IAccountant`).
        force: Whether to replace an accountant of that name.

    Raises:
        InvalidOptionError: If the name is taken and `force` is False.
    """
    # The class is built with the option `relation` only, and without any if it is no `Accountant`.
    if mechanism in _ACCOUNTANTS and not force:
        raise InvalidOptionError(f"accountant {mechanism!r} is registered already; pass force=True to replace it.")
    _ACCOUNTANTS[mechanism] = accountant


def create_accountant(mechanism: str = DEFAULT_ACCOUNTANT, *, relation: str = "zero_out") -> IAccountant:
    """Return a new accountant with an empty history.

    Args:
        mechanism: Its name: "best", "pld", "prv", "rdp", "dp_accounting", or one that was registered.
        relation: Which data sets count as neighbours: "zero_out", "add_remove" or "replace_one".

    Returns:
        The accountant.

    Raises:
        InvalidOptionError: If there is no accountant of that name.
    """
    # A registered class that is no `Accountant` is not told the relation.
    if mechanism in _ACCOUNTANTS:
        kind = _ACCOUNTANTS[mechanism]
        return kind(relation=relation) if issubclass(kind, Accountant) else kind()
    known = ", ".join(map(repr, sorted(_ACCOUNTANTS, key=lambda name: (name != DEFAULT_ACCOUNTANT, name))))
    meant = "." if mechanism in _NOT_OFFERED else did_you_mean(mechanism, _ACCOUNTANTS, otherwise=".")
    reason = f" ({_NOT_OFFERED[mechanism]})" if mechanism in _NOT_OFFERED else ""
    raise InvalidOptionError(f"accountant={mechanism!r} is not available{reason}; choose from: {known}{meant}")


def bounding_accountant(mechanism: str = DEFAULT_ACCOUNTANT, *, relation: str = "zero_out") -> Accountant:
    """Return a new accountant that bounds ε and δ of any history; refuse one that only knows ε of recorded steps."""
    made = create_accountant(mechanism, relation=relation)
    if not isinstance(made, Accountant):
        raise InvalidOptionError(
            f"accountant={mechanism!r} ({type(made).__name__}): says ε of the steps it was told of and has no "
            "epsilon_bounds. Derive it from ghostclip.accounting.Accountant, or set engine.accountant to one."
        )
    return made


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
    return most_that_fit(fits, most=MOST_STEPS - 1)


def most_that_fit(fits: Callable[[int], bool], *, most: int) -> int:
    """Return the largest number of steps, up to `most`, of which `fits` says so, by doubling and halving."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
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
