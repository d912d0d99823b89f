"""ε of whole trainings by each mechanism, against formulas and against an accountant of others."""

from __future__ import annotations

import math

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from ghostclip.accounting.calibration import bounding_accountant
from ghostclip.mechanisms import (
    BandedInverse,
    BandedMatrixFactorization,
    BufferedToeplitz,
    CyclicPoissonSampling,
    Mechanism,
    UnamplifiedSampling,
)

dp_accounting = pytest.importorskip("dp_accounting")
pld = pytest.importorskip("dp_accounting.pld")
SAMPLES, SIZE, EPOCHS, DELTA = 2000, 100, 4, 1e-5
ROOM = 1.005


def epsilon_of(mechanism: Mechanism, sigma: float, epochs: int = EPOCHS) -> float:
    """As the engine charges it, period by period."""
    scheme, accountant = mechanism.scheme(SAMPLES, SIZE), bounding_accountant()
    event = scheme.event
    for factor in mechanism.periods(scheme, 0, epochs * scheme.steps // event.steps_per_event):
        accountant.record(event, noise_multiplier=sigma * factor)
    return accountant.get_epsilon(DELTA)


def gaussian(mu: float) -> float:
    """ε of a μ-Gaussian mechanism (Balle and Wang 2018), exact."""
    return float(
        brentq(
            lambda e: norm.cdf(mu / 2 - e / mu) - math.exp(e + norm.logcdf(-mu / 2 - e / mu)) - DELTA,
            1e-6, mu * mu / 2 + 10 * mu, xtol=1e-12,
        )
    )  # fmt: skip


@pytest.mark.parametrize("sigma", [0.8, 2.0, 6.0])
@pytest.mark.parametrize(
    "mechanism",
    [
        BandedInverse(bands=4, epochs=EPOCHS),
        BufferedToeplitz(buffers=2, epochs=EPOCHS),
        BufferedToeplitz(buffers=3, epochs=EPOCHS, learning_rates=(1.0, 0.5, 0.1)),
    ],
    ids=repr,
)
def test_a_stream_costs_one_gaussian_mechanism(mechanism: Mechanism, sigma: float) -> None:
    exact = gaussian(1 / sigma)
    assert exact <= epsilon_of(mechanism, sigma) <= ROOM * exact


@pytest.mark.parametrize("sigma", [0.8, 2.0, 6.0])
def test_without_amplification_each_epoch_costs_one(sigma: float) -> None:
    exact = gaussian(math.sqrt(EPOCHS) / sigma)
    assert exact <= epsilon_of(UnamplifiedSampling(), sigma) <= ROOM * exact
    # As many groups as batches: columns of C that share no row.
    banded = BandedMatrixFactorization(bands=5, groups=SAMPLES // SIZE, epochs=EPOCHS)
    assert exact <= epsilon_of(banded, sigma) <= ROOM * exact


@pytest.mark.parametrize("sigma", [0.8, 2.0, 6.0])
@pytest.mark.parametrize("bands", [2, 4, 5])
def test_rounds_of_groups_cost_what_others_say_of_sampled_steps(bands: int, sigma: float) -> None:
    mechanism = BandedMatrixFactorization(bands=bands, epochs=EPOCHS)
    scheme = mechanism.scheme(SAMPLES, SIZE)
    assert scheme.sample_rate == pytest.approx(bands * SIZE / SAMPLES)
    theirs = pld.PLDAccountant(value_discretization_interval=1e-4)
    step = dp_accounting.PoissonSampledDpEvent(bands * SIZE / SAMPLES, dp_accounting.GaussianDpEvent(sigma))
    theirs.compose(step, EPOCHS * scheme.steps // bands)
    found, known = epsilon_of(mechanism, sigma), theirs.get_epsilon(DELTA)
    # Theirs is an upper bound too, of the width of its grid.
    assert 0.998 * known <= found <= ROOM * known
    assert found == epsilon_of(CyclicPoissonSampling(groups=bands), sigma)
