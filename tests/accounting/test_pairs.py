"""Atoms of a step: masses of P and Q kept exactly from above, pooled from below."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ghostclip.accounting.pairs import Cells, SampledGaussian, discretised, sampled_gaussian_loss

CELLS = Cells(0.1, 0.2, 0.5, 10.0)
STEPS = [(1.0, 0.3), (0.5, 0.01), (4.0, 0.9), (0.3, 1e-3)]


@pytest.mark.parametrize("direction", ["remove", "add", "replace"])
@pytest.mark.parametrize(("sigma", "rate"), STEPS)
def test_both_masses_are_kept_from_above(sigma, rate, direction):
    pair = discretised(SampledGaussian(sigma, rate, direction), CELLS, "upper")
    assert math.fsum(pair.mass_J) + pair.infinite == pytest.approx(1, abs=1e-13)
    # What rounding the loss to the nearest, or splitting it evenly, would not keep.
    assert math.fsum(pair.mass_J * np.exp(-pair.loss_J)) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("direction", ["remove", "add", "replace"])
@pytest.mark.parametrize(("sigma", "rate"), STEPS)
def test_one_step_lies_between(sigma, rate, direction):
    step = SampledGaussian(sigma, rate, direction)
    upper, lower = (discretised(step, CELLS, side) for side in ("upper", "lower"))
    z = np.linspace(-12 * sigma - 1, 1 + 12 * sigma, 400_001)
    loss, mass = step.loss(z), step.density(z) * (z[1] - z[0])
    for epsilon in np.linspace(0.0, 3.0, 7):
        exact = (mass * -np.expm1(np.minimum(epsilon - loss, 0.0))).sum()
        above, below = (pair.mass_J @ -np.expm1(np.minimum(epsilon - pair.loss_J, 0.0)) for pair in (upper, lower))
        assert below <= exact + 1e-9
        assert exact <= above + 1e-9


@pytest.mark.parametrize(
    ("rate", "exponent"), [(1 - 1e-12, -30.0), (1 - 1e-15, -40.0), (1e-20, 31.0), (1e-7, 20.0), (0.3, -5.0)]
)
def test_losses_are_precise_at_extreme_rates(rate, exponent):
    from fractions import Fraction

    found = float(sampled_gaussian_loss(np.array([exponent + 0.5]), sigma=1.0, rate=rate)[0])
    weighed = (1 - Fraction(rate)) + Fraction(rate) * Fraction(math.exp(exponent))
    exact = math.log1p(float(weighed - 1)) if abs(weighed - 1) < 0.5 else math.log(weighed)
    assert found == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize("direction", ["remove", "add", "replace"])
def test_a_step_without_noise_is_known_exactly(direction):
    pair = discretised(SampledGaussian(0.0, 0.25, direction), CELLS, "lower")
    in_Q = float(pair.mass_J @ np.exp(-pair.loss_J))
    assert in_Q == pytest.approx(0.75 if direction != "remove" else 1.0)
    assert pair.infinite == (0.0 if direction == "add" else 0.25)
