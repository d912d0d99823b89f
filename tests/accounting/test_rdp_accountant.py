"""The accountant: composition, conversion, history, state."""

from __future__ import annotations

import math
import warnings

import pytest
from scipy.special import log_ndtr

from ghostclip.accounting import Accountant, RDPAccountant, create_accountant, register_accountant
from ghostclip.accounting.calibration import _ACCOUNTANTS
from ghostclip.accounting.rdp import rdp_of_history
from ghostclip.errors import InvalidOptionError

# (σ, q, steps, δ, ε of a certified privacy-loss-distribution accountant, how far above it Rényi bounds lie)
SETTINGS = [
    (1.0, 0.01, 1_000, 1e-5, 1.828, 1.16),
    (0.5, 1e-3, 10_000, 1e-5, 5.227, 1.24),
    (0.5, 1e-4, 100, 1e-8, 1.942, 2.08),
    (4.0, 0.01, 100_000, 1e-8, 4.541, 1.06),
    (4.0, 1e-4, 1_000_000, 1e-5, 0.0763, 1.13),
    (1.0, 0.1, 10_000, 1e-5, 127.9, 1.06),
    (0.5, 1e-3, 1_000_000, 1e-5, 52.34, 1.07),
]


def spent(history, delta=1e-5, **options):
    accountant = RDPAccountant()
    accountant.history = list(history)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return accountant.get_privacy_spent(delta=delta, **options)


def epsilon(sigma, rate, steps, delta=1e-5):
    return spent([(sigma, rate, steps)], delta)[0]


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta", "best_known", "factor"), SETTINGS)
def test_epsilon_is_an_upper_bound_and_close(sigma, rate, steps, delta, best_known, factor):
    assert 0.999 * best_known <= epsilon(sigma, rate, steps, delta) <= factor * best_known


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta", "_best", "_factor"), SETTINGS)
def test_equal_to_dp_accounting_at_the_same_orders(sigma, rate, steps, delta, _best, _factor):
    orders = [2.0, 3.0, 4.0, 5.0, 8.0, 20.0, 64.0, 144.0]
    oracle = pytest.importorskip("dp_accounting.rdp").RdpAccountant(orders=orders)
    dp_accounting = pytest.importorskip("dp_accounting")
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    oracle.compose(dp_accounting.SelfComposedDpEvent(step, steps))
    ours = spent([(sigma, rate, steps)], delta, alphas=orders)[0]
    assert ours == pytest.approx(oracle.get_epsilon(delta), rel=1e-8)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0, 20.0])
def test_gaussian_mechanism_is_never_below_its_exact_epsilon(sigma):
    """Balle and Wang 2018: δ(ε) of the Gaussian mechanism, so the ε we claim must have at most the δ asked for."""
    claimed = epsilon(sigma, 1.0, 1, 1e-6)
    first = math.exp(log_ndtr(1 / (2 * sigma) - claimed * sigma))
    second = math.exp(claimed + log_ndtr(-1 / (2 * sigma) - claimed * sigma))
    assert 1e-8 < first - second <= 1e-6


def test_edges():
    accountant = RDPAccountant()
    assert accountant.get_privacy_spent(delta=1e-5) == (0.0, 0.0)
    assert accountant
    assert epsilon(0.0, 0.5, 1) == math.inf
    assert epsilon(0.0, 0.0, 1) == 0.0
    assert epsilon(math.inf, 1.0, 10) == 0.0
    assert epsilon(1.0, 0.0, 10) == 0.0
    assert epsilon(1e9, 1.0, 1) == 0.0
    assert 0 < epsilon(1e-10, 0.5, 10) < math.inf
    assert 0 < epsilon(1.0, 0.5, 10, delta=5e-324) < math.inf


@pytest.mark.parametrize("delta", [0, 1, -1e-5, math.nan, 1.5])
def test_refuses_delta(delta):
    with pytest.raises(InvalidOptionError, match="delta"):
        RDPAccountant().get_epsilon(delta)


@pytest.mark.parametrize("alphas", [[], [1.0, 2.0], [2.0, math.inf], [math.nan]])
def test_refuses_orders(alphas):
    with pytest.raises(InvalidOptionError, match="alphas="):
        spent([(1.0, 0.1, 1)], alphas=alphas)


@pytest.mark.parametrize(
    ("sigma", "rate", "match"),
    [
        (-1, 0.1, "noise_multiplier"),
        (math.nan, 0.1, "noise_multiplier"),
        (1, 1.1, "sample_rate"),
        (1, math.nan, "sample"),
    ],
)
def test_refused_steps_are_not_recorded(sigma, rate, match):
    accountant = RDPAccountant()
    with pytest.raises(InvalidOptionError, match=match):
        accountant.step(noise_multiplier=sigma, sample_rate=rate)
    assert accountant.history == []


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({}, "missing history, mechanism"),
        ({"history": []}, "missing mechanism"),
        ({"history": [], "mechanism": "rdp", "relation": "replace_one"}, "saved for relation"),
        ({"history": [(1.0, 0.1)], "mechanism": "rdp"}, "entry 0"),
        ({"history": [(1.0, 0.1, 1), (1.0, 2.0, 1)], "mechanism": "rdp"}, "sample_rate"),
        ({"history": [(1.0, 0.1, -1)], "mechanism": "rdp"}, "entry 0"),
    ],
)
def test_refuses_foreign_state(state, match):
    accountant = RDPAccountant()
    accountant.step(noise_multiplier=1.0, sample_rate=0.5)
    with pytest.raises(InvalidOptionError, match=match):
        accountant.load_state_dict(state)
    assert len(accountant) == 1


class FakeOptimizer:
    def __init__(self, noise_multiplier, accumulated_iterations=1):
        self.noise_multiplier = noise_multiplier
        self.accumulated_iterations = accumulated_iterations


def test_hook_records_what_the_optimizer_released():
    accountant = RDPAccountant()
    hook = accountant.get_optimizer_hook_fn(0.01)
    hook(FakeOptimizer(1.5))
    hook(FakeOptimizer(1.5))
    hook(FakeOptimizer(1.5, accumulated_iterations=3))
    assert accountant.history == [(1.5, 0.01, 2), (0.5, 0.03, 1)]


def test_accumulation_is_covered_by_what_the_hook_records():
    """Two independent batches under one draw: the divergence of the true pair at order 2, in closed form."""
    sigma, rate = 1.0, 0.05
    weights = {0: (1 - rate) ** 2, 1: 2 * rate * (1 - rate), 2: rate**2}
    moment = sum(a * b * math.exp(i * j / sigma**2) for i, a in weights.items() for j, b in weights.items())
    accountant = RDPAccountant()
    accountant.get_optimizer_hook_fn(rate)(FakeOptimizer(sigma, accumulated_iterations=2))
    (recorded,) = rdp_of_history(accountant.whole_history(), (2.0,))
    assert math.log(moment) <= recorded
    accountant.history = [(sigma, 2 * rate, 1)]
    (often_reported,) = rdp_of_history(accountant.whole_history(), (2.0,))
    assert often_reported < math.log(moment)


@pytest.mark.parametrize(("name", "match"), [("gdp", "estimate"), ("PRV", "choose from: 'best'")])
def test_unknown_accountants_are_refused_with_what_exists(name, match):
    with pytest.raises(InvalidOptionError, match=match):
        create_accountant(name)


def test_accountants_can_be_registered(monkeypatch):
    monkeypatch.setattr("ghostclip.accounting.calibration._ACCOUNTANTS", dict(_ACCOUNTANTS))

    class Other(RDPAccountant):
        @classmethod
        def mechanism(cls):
            return "other"

    register_accountant("other", Other)
    assert isinstance(create_accountant("other"), Accountant)
    with pytest.raises(InvalidOptionError, match="registered already"):
        register_accountant("rdp", Other)
