"""Comparison of mechanisms for one privacy budget: how much noise each leaves in the parameters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ghostclip._validate import positive, positive_int, probability, suggests_options
from ghostclip.accounting.calibration import smallest_noise_multiplier
from ghostclip.accounting.registry import bounding_accountant
from ghostclip.data.schemes import SamplingScheme
from ghostclip.errors import InvalidOptionError
from ghostclip.mechanisms.mechanism import (
    BallsInBins,
    BandedInverse,
    BandedMatrixFactorization,
    BufferedToeplitz,
    Correlated,
    Mechanism,
    PoissonSampling,
    workload_of,
)
from ghostclip.mechanisms.toeplitz import series

BANDS = (2, 4, 8)
"""Bands of correlated noise that are compared: each is one more pass of drawing noise, or one more buffer."""
BUFFERS = 3
"""Buffers of a BLT that is compared; more leave little less."""

_LONG = 10_000
"""Steps after which noise is about as large as it becomes."""
_WORTH_SAMPLING, _WORTH_CORRELATION, _WORTH_BUFFERS = 1.01, 1.25, 1.1
"""How much more noise a simpler mechanism may leave: what less was worth in trainings (paper_repro, table F)."""


@dataclass(frozen=True, kw_only=True)
class CalibratedMechanism:
    """A mechanism, calibrated for a budget.

    Attributes:
        mechanism: Give it to `make_private_with_epsilon`.
        noise_multiplier: σ.
        epsilon: ε of the whole training, at most the target.
        noise: Root of the mean square, over all steps, of the noise in one parameter of SGD with the learning rates
            given (1 by default), in units of the clipping norm: σ·‖A·C⁻¹‖_F·s / (√T·B).
        draws: Gaussian numbers that are drawn for each parameter in a step.
        buffers: Tensors of the parameters' size that noise takes from step to step.
    """

    mechanism: Mechanism
    noise_multiplier: float
    epsilon: float
    noise: float
    draws: int
    buffers: int = 0


@suggests_options
def plan_privacy(  # noqa: PLR0913 - what a training is planned by
    *,
    num_samples: int,
    batch_size: int,
    epochs: int,
    target_epsilon: float,
    target_delta: float,
    momentum: float = 0.0,
    learning_rates: Sequence[float] | None = None,
    mechanisms: Sequence[Mechanism] | None = None,
) -> list[CalibratedMechanism]:
    """Return what mechanisms leave of noise in the parameters at one budget, the least first.

    What a training sees of the noise is its sum over the steps so far; that is what is compared. It says nothing of
    clipping, nor of how far from its optimum a training ends: of two mechanisms the one with the smaller number has the
    better accuracy where noise is what limits it.

    Args:
        num_samples: N, records of the data set.
        batch_size: Records of a batch, on average.
        epochs: Passes over the data.
        target_epsilon: ε not to be exceeded.
        target_delta: δ.
        momentum: Of the optimizer, in [0, 1).
        learning_rates: Of its steps, or of any number of steps equally far apart; None for 1 in all.
        mechanisms: What to compare; by default Poisson sampling, balls in bins, and correlated noise of 2, 4 and 8
            bands, of its inverse and with sampling, and with 3 buffers.

    Returns:
        Plans, the one with the least noise first.

    Raises:
        InvalidOptionError: If an option is out of range.
        BudgetError: If no noise keeps the budget.

    Cost:
        Some seconds for balls in bins, whose cost has no formula, and for coefficients.

    Example:
        >>> plans = ghostclip.mechanisms.plan_privacy(
        ...     num_samples=10_000, batch_size=500, epochs=5, target_epsilon=8.0, target_delta=1e-5
        ... )
        >>> type(plans[0].mechanism).__name__
        'BandedInverse'
    """
    samples, size = positive_int(num_samples, "num_samples"), positive_int(batch_size, "batch_size")
    if size > samples:
        raise InvalidOptionError(f"batch_size={size}: there are only {samples} samples.")
    target, delta = positive(target_epsilon, "target_epsilon"), probability(target_delta, "target_delta")
    length = positive_int(epochs, "epochs")
    workload = workload_of(momentum, learning_rates)
    seen: dict[str, Any] = {"momentum": momentum, "learning_rates": learning_rates}
    usual: tuple[Mechanism, ...] = (
        PoissonSampling(),
        BallsInBins(),
        *(BandedInverse(bands=bands, **seen) for bands in BANDS),
        *(BandedMatrixFactorization(bands=bands, **seen) for bands in BANDS if bands <= samples // size),
        BufferedToeplitz(buffers=BUFFERS, **seen),
    )
    plans = []
    for mechanism in (one.for_epochs(length) for one in (usual if mechanisms is None else mechanisms)):
        scheme = mechanism.scheme(samples, size)
        sigma, epsilon = calibrated(mechanism, scheme, length, (target, delta))
        correlation = mechanism.correlation(scheme)
        plan = CalibratedMechanism(
            mechanism=mechanism,
            noise_multiplier=sigma,
            epsilon=epsilon,
            noise=sigma * mechanism.error(scheme, length * scheme.steps, workload) / scheme.expected_batch_size,
            draws=1 if correlation is None or correlation.lags is None else len(correlation.lags),
            buffers=0 if correlation is None else correlation.buffers,
        )
        plans.append(plan)
    return sorted(plans, key=lambda plan: plan.noise)


def calibrated(
    mechanism: Mechanism, scheme: SamplingScheme, epochs: int, budget: tuple[float, float]
) -> tuple[float, float]:
    """Return the least σ found that keeps (ε, δ) for a number of epochs, and the ε of it."""
    event, steps, (target, delta) = scheme.event, epochs * scheme.steps, budget
    factors = mechanism.periods(scheme, 0, steps // event.steps_per_event)

    def epsilon_of(sigma: float) -> float:
        accountant = bounding_accountant(relation=event.relation)
        for factor in sorted(set(factors)):
            accountant.record(event, noise_multiplier=sigma * factor, count=factors.count(factor))
        with warnings.catch_warnings():
            # The search tries σ that nobody would use, where numbers overflow on the way to inf.
            warnings.simplefilter("ignore", RuntimeWarning)
            return accountant.get_epsilon(delta)

    sigma = smallest_noise_multiplier(epsilon_of, target=target, tolerance=1e-3 * target)
    return sigma, epsilon_of(sigma)


def recommended(plans: Sequence[CalibratedMechanism]) -> CalibratedMechanism:
    """Return the simplest mechanism that leaves about as little as the best: a larger gain must pay for more rules."""
    least = plans[0].noise
    for kind, room in (
        (PoissonSampling, _WORTH_SAMPLING),
        (BallsInBins, _WORTH_CORRELATION),
        (BandedInverse, _WORTH_BUFFERS),
    ):
        simple = [plan for plan in plans if isinstance(plan.mechanism, kind) and plan.noise <= room * least]
        if simple:
            return simple[0]
    return plans[0]


def recommendation(plans: Sequence[CalibratedMechanism]) -> str:
    """Return in one sentence what to take, what it gains over Poisson sampling, and what it asks for."""
    best = recommended(plans)
    usual = next((plan for plan in plans if isinstance(plan.mechanism, PoissonSampling)), best)
    if best is usual:
        return "Poisson sampling: nothing else leaves 1 % less noise in the parameters."
    asks = "each record is in exactly one batch of an epoch"
    if isinstance(best.mechanism, Correlated):
        drawn = "batches come from groups of records in turn"
        if not isinstance(best.mechanism, BandedMatrixFactorization):
            drawn = "batches come in the same order in every epoch"
        memory = f"holds {best.buffers} buffers of the parameters' size"
        if not best.buffers:
            memory = f"draws noise {best.draws} times, without memory"
        asks = f"{drawn}, σ stays what it is, and each step {memory}"
    gain = 100 * (1 - best.noise / usual.noise)
    return f"{described(best.mechanism)}: {gain:.0f} % less noise in parameters than Poisson sampling; {asks}."


def described(mechanism: Mechanism) -> str:
    """Return a mechanism as a line of Python, as ``BandedInverse(bands=4)``."""
    told = {
        name: value
        for name, value in vars(mechanism).items()
        if name in ("bands", "buffers", "groups", "max_batch_size") and value is not None
    }
    return f"{type(mechanism).__name__}({', '.join(f'{name}={value!r}' for name, value in told.items())})"


def noise_to_batch(plan: CalibratedMechanism, *, num_samples: int, batch_size: int) -> float:
    """Return σ·s/B: the standard deviation of a step's noise in a mean gradient, in units of the clipping norm."""
    # Of a plan that is calibrated for this batch size. At another one the same number is the same noise in each step;
    # of correlated noise in steps that have all of what they take back.
    scheme = plan.mechanism.scheme(num_samples, batch_size)
    correlation = plan.mechanism.correlation(scheme)
    norm = 1.0
    if correlation is not None:
        norm = correlation.scale * math.hypot(*series(correlation.sections, _LONG))
    return plan.noise_multiplier * norm / scheme.expected_batch_size
