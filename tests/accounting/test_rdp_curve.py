"""The Rényi curve against oracles that share no code with it."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from scipy.integrate import trapezoid

from ghostclip.accounting.rdp import DEFAULT_ORDERS, rdp_curve
from tests.randomised import given, st

# Numerical error is below 1e-11; what is left is the margin that rounds upwards.
MARGIN = 2e-9
FRACTIONAL = [order for order in DEFAULT_ORDERS if order % 1]


def one(sigma, rate, order):
    return float(rdp_curve(noise_multiplier=sigma, sample_rate=rate, orders=[order])[0])


def by_quadrature(sigma, rate, order):
    """The definition of the divergence, in 30 digits."""
    with mpmath.workdps(30):
        s, q, a = mpmath.mpf(sigma), mpmath.mpf(rate), mpmath.mpf(order)

        def excess(z):
            ratio = 1 + q * mpmath.expm1((2 * z - 1) / (2 * s * s))
            return mpmath.npdf(z, 0, s) * (ratio**a - 1 - a * (ratio - 1))

        crossing = s * s * mpmath.log(1 / q - 1) + 0.5
        points = {-14 * s, mpmath.mpf(0), a / 2, a, a + 14 * s}
        points |= {crossing} if -14 * s < crossing < a + 14 * s else set()
        return mpmath.log1p(mpmath.quad(excess, sorted(points))) / (a - 1)


@pytest.mark.parametrize(
    ("sigma", "rate", "order"),
    [
        (1, 0.01, 1.5),
        (1, 0.01, 1.01),
        (0.5, 1e-4, 2.5),
        (0.5, 0.9, 7.3),
        (4, 1e-8, 1.1),
        (20, 0.3, 10.9),
        (0.3, 0.1, 1.7),
    ],
)
def test_fractional_orders_equal_the_definition(sigma, rate, order):
    error = one(sigma, rate, order) / by_quadrature(sigma, rate, order) - 1
    assert 0 <= error <= MARGIN


@pytest.mark.parametrize("rate", [1e-9, 1e-4, 0.01, 0.5, 0.999])
@pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0, 7.0, 1000.0])
def test_order_two_has_a_closed_form(sigma, rate):
    expected = np.logaddexp(0.0, 2 * math.log(rate) + 1 / sigma**2 + math.log(-math.expm1(-1 / sigma**2)))
    assert one(sigma, rate, 2) == pytest.approx(expected, rel=MARGIN, abs=0)
    assert one(sigma, rate, 2) >= expected


@pytest.mark.parametrize("sigma", [0.01, 0.5, 3.0, 1e6])
def test_without_subsampling_it_is_the_gaussian_mechanism(sigma):
    orders = np.array(DEFAULT_ORDERS)
    curve = rdp_curve(noise_multiplier=sigma, sample_rate=1, orders=orders)
    np.testing.assert_allclose(curve, orders / (2 * sigma**2), rtol=MARGIN)
    nearly = rdp_curve(noise_multiplier=sigma, sample_rate=1 - 1e-12, orders=orders)
    np.testing.assert_allclose(nearly, curve, rtol=1e-6)


@pytest.mark.parametrize("rate", [1e-6, 0.01, 0.6])
def test_small_noise_uses_upper_bounds_that_meet_the_quadrature(rate):
    """Below σ = 0.05 fractional orders are bounded in closed form; just above, the exact value is known."""
    above = rdp_curve(noise_multiplier=0.05, sample_rate=rate, orders=FRACTIONAL)
    below = rdp_curve(noise_multiplier=0.05 * (1 - 1e-9), sample_rate=rate, orders=FRACTIONAL)
    assert np.all(below >= above * (1 - 1e-7))
    looseness = np.where(np.array(FRACTIONAL) < 2, 2.2, 1.12)
    assert np.all(below <= above * looseness)


@pytest.mark.parametrize(
    ("sigma", "rate", "order"), [(1.0, 0.3, 3.0), (0.7, 0.05, 2.5), (3.0, 0.9, 8.0), (0.5, 0.5, 1.3)]
)
def test_removing_a_record_costs_no_more_than_adding_one(sigma, rate, order):
    z = np.linspace(-40 * sigma, 40 * sigma + order + 1, 400_001)
    log_base = -((z / sigma) ** 2) / 2 - math.log(sigma * math.sqrt(2 * math.pi))
    log_mixture = log_base + np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * z - 1) / (2 * sigma**2))
    reverse = trapezoid(np.exp(order * log_base + (1 - order) * log_mixture), z)
    assert math.log(reverse) / (order - 1) <= one(sigma, rate, order)


@given(sigma=st.floats(1e-300, 1e300) | st.floats(0.02, 50), rate=st.floats(0, 1) | st.floats(1e-300, 1e-3))
def test_it_is_finite_for_every_noise_and_grows_with_the_order(sigma, rate):
    curve = rdp_curve(noise_multiplier=sigma, sample_rate=rate, orders=DEFAULT_ORDERS)
    assert not np.isnan(curve).any()
    assert np.all(curve >= 0)
    if sigma > 1e-140:
        assert np.isfinite(curve).all()
    # The chord bound of small σ is not monotone between its exact ends.
    if sigma >= 0.05 and sigma <= 1e8:
        assert np.all(curve[1:] >= curve[:-1] * (1 - 1e-9))
