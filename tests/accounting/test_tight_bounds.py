"""The tight accountant: both bounds around closed forms and around other libraries, on a grid and at its edges."""

from __future__ import annotations

import math
import time
import warnings

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import log_ndtr

from benchmarks.accounting.grid import edges, usual
from ghostclip.accounting import RDPAccountant, create_accountant
from ghostclip.accounting.accountant import reach

SPOTS = [
    (1.0, 0.01, 1_000, 1e-5, 1.828),
    (0.5, 1e-3, 10_000, 1e-5, 5.227),
    (0.5, 1e-4, 100, 1e-8, 1.942),
    (4.0, 0.01, 100_000, 1e-8, 4.541),
    (4.0, 1e-4, 1_000_000, 1e-5, 0.0763),
    (1.0, 0.1, 10_000, 1e-5, 127.9),
    (0.5, 1e-3, 1_000_000, 1e-5, 52.34),
]
GRID = [*usual(), *edges()]
QUICK = GRID[::27]


def keeper(history, name="best", relation="zero_out"):
    accountant = create_accountant(name, relation=relation)
    accountant.history = list(history)
    return accountant


def bounds(history, delta, **options):
    return keeper(history, **options).epsilon_bounds(delta)


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta", "known"), SPOTS)
def test_known_values(sigma, rate, steps, delta, known):
    found = bounds([(sigma, rate, steps)], delta)
    assert found.lower <= found.upper
    assert found.upper == pytest.approx(known, rel=1e-3)
    assert found.upper - found.lower <= 1.2e-4 * found.upper


def gaussian_log_delta(epsilon, mu):
    """Balle and Wang 2018, Theorem 8."""
    first, second = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return first + math.log(-math.expm1(second - first))


@pytest.mark.parametrize(("sigma", "steps"), [(0.3, 1), (1.0, 1), (20.0, 1), (5.0, 100), (20.0, 10**6), (100.0, 3)])
@pytest.mark.parametrize("delta", [1e-5, 1e-12])
def test_full_batches_are_a_gaussian_mechanism(sigma, steps, delta):
    mu = math.sqrt(steps) / sigma
    exact = brentq(lambda epsilon: gaussian_log_delta(epsilon, mu) - math.log(delta), 0, mu * mu / 2 + 20 * mu)
    found = bounds([(sigma, 1.0, steps)], delta)
    assert found.lower <= exact * (1 + 1e-9)
    assert found.upper >= exact * (1 - 1e-9)
    assert found.upper == pytest.approx(exact, rel=1e-5)


def single_step_delta(epsilon, sigma, rate):
    """One step on a Poisson sample, both directions, by thresholds of the observed value."""

    def crossing(weight):
        return sigma**2 * math.log(weight) + 0.5

    def tail(z, mean):
        return math.exp(log_ndtr((mean - z) / sigma))

    def remove():
        z = crossing((math.exp(epsilon) - 1 + rate) / rate)
        return (1 - rate - math.exp(epsilon)) * tail(z, 0) + rate * tail(z, 1)

    def add():
        if math.exp(-epsilon) <= 1 - rate:
            return 0.0
        z = crossing((math.exp(-epsilon) - 1 + rate) / rate)
        below = 1 - tail(z, 0), 1 - tail(z, 1)
        return below[0] - math.exp(epsilon) * ((1 - rate) * below[0] + rate * below[1])

    return max(remove(), add())


@pytest.mark.parametrize(
    ("sigma", "rate", "delta"),
    [(0.5, 0.1, 1e-5), (1.0, 0.01, 1e-6), (2.0, 0.5, 1e-5), (0.3, 0.9, 1e-7), (5.0, 0.999, 1e-6)],
)
def test_one_step_has_a_closed_form(sigma, rate, delta):
    exact = brentq(lambda epsilon: single_step_delta(epsilon, sigma, rate) - delta, 0, 200)
    found = bounds([(sigma, rate, 1)], delta)
    assert found.lower <= exact * (1 + 1e-6) <= found.upper * (1 + 1e-5)
    assert found.upper == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("epsilon", [0.05, 0.4])
def test_one_step_under_replacement_is_its_integral(epsilon):
    sigma, rate = 1.0, 0.2

    def excess(z):
        def mixture(mean):
            return (1 - rate) * math.exp(-(z**2) / 2) + rate * math.exp(-((z - mean) ** 2) / 2)

        return max(0.0, mixture(1) - math.exp(epsilon) * mixture(-1)) / math.sqrt(2 * math.pi)

    exact = quad(excess, -12, 14, limit=400, points=[0, 0.5, 1, 2])[0]
    found = keeper([(sigma, rate, 1)], relation="replace_one").epsilon_bounds(exact)
    assert found.lower <= epsilon * (1 + 1e-6)
    assert epsilon * (1 - 1e-6) <= found.upper <= epsilon * 1.02


def convolved(sigma, rate, epsilon, steps):
    """δ of a few steps, removing a record: brute force over a product grid of observed values."""
    z = np.linspace(-8 * sigma, 1 + 8 * sigma, 241)
    base = np.exp(-0.5 * (z / sigma) ** 2)
    base /= base.sum()
    weight = base * (1 - rate + rate * np.exp((2 * z - 1) / (2 * sigma**2)))
    first, second = weight, base
    for _ in range(steps - 1):
        first, second = np.multiply.outer(first, weight).ravel(), np.multiply.outer(second, base).ravel()
    return np.maximum(first - math.exp(epsilon) * second, 0).sum()


@pytest.mark.parametrize(("sigma", "rate", "epsilon"), [(1.0, 0.3, 0.5), (0.7, 0.1, 0.3)])
def test_three_steps_equal_brute_force(sigma, rate, epsilon):
    found = keeper([(sigma, rate, 3)]).epsilon_bounds(convolved(sigma, rate, epsilon, 3))
    assert found.lower * (1 - 1e-3) <= epsilon <= found.upper * (1 + 1e-3)
    assert found.upper == pytest.approx(epsilon, rel=1e-2)


def check_grid_setting(history, delta):
    began = time.process_time()
    found = bounds(history, delta)
    seconds = time.process_time() - began
    assert 0 <= found.lower <= found.upper < math.inf
    assert seconds < 10
    if 0.1 <= found.upper <= 50:
        assert found.upper - found.lower <= 1e-3 * found.upper
    renyi = keeper(history, "rdp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert found.lower <= renyi.get_epsilon(delta)


@pytest.mark.parametrize(("history", "delta"), QUICK)
def test_the_bounds_meet(history, delta):
    check_grid_setting(history, delta)


@pytest.mark.slow
@pytest.mark.parametrize(("history", "delta"), GRID)
def test_the_bounds_meet_on_the_whole_grid(history, delta):
    check_grid_setting(history, delta)


@pytest.mark.parametrize(
    ("history", "delta"),
    [
        ([(1.0, 0.01, 1_000)], 1e-5),
        ([(0.5, 1e-3, 100)], 1e-5),
        ([(2.0, 0.1, 300)], 1e-8),
        ([(0.8, 0.01, 300), (1.5, 0.02, 300)], 1e-6),
        ([(1.0, 0.01, 500), (10.0, 1.0, 1)], 1e-6),
    ],
)
def test_close_to_dp_accounting(history, delta):
    oracle = pytest.importorskip("dp_accounting.pld").PLDAccountant()
    dp_accounting = pytest.importorskip("dp_accounting")
    for sigma, rate, steps in history:
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        oracle.compose(event, steps)
    theirs = oracle.get_epsilon(delta)
    found = bounds(history, delta)
    assert found.lower <= theirs * (1 + 1e-9)
    assert found.upper <= theirs * (1 + 1e-3)


def test_grouped_steps_stay_on_either_side(monkeypatch):
    history = [(0.8 + 0.01 * k, 0.01, 20) for k in range(12)]
    exact = bounds(history, 1e-5)
    monkeypatch.setattr("ghostclip.accounting.accountant.MOST_GROUPS", 4)
    grouped = keeper(history, "pld").whole_history()
    from ghostclip.accounting.accountant import pld_epsilon

    found = pld_epsilon.__wrapped__(grouped, 1e-5)
    assert found.lower < exact.lower <= exact.upper < found.upper


def test_never_above_the_renyi_bound_and_never_infinite():
    for history in ([(0.004, 0.01, 10)], [(0.02, 0.5, 3)], [(1e-3, 1.0, 1)], [(1e5, 0.3, 10**6)]):
        ours, renyi = keeper(history), RDPAccountant()
        renyi.history = list(history)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert 0 <= ours.get_epsilon(1e-6) <= renyi.get_epsilon(1e-6) * (1 + 1e-3) < math.inf


@pytest.mark.parametrize(("steps", "delta"), [(1, 1e-5), (10**7, 1e-10), (1, 1e-40)])
def test_tails_are_cut_where_they_hold_a_millionth_of_delta_over_all_steps(steps, delta):
    history = keeper([(1.0, 0.01, steps)]).whole_history()
    assert 9.0 <= reach(history, delta) < 20.0
    assert log_ndtr(-reach(history, delta)) <= math.log(1e-6 * delta / steps)
