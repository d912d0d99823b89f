"""What a history can hold besides Poisson steps, under each neighbouring relation, and what estimates are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from ghostclip.accounting import GaussianAccountant, create_accountant, get_noise_multiplier, get_sample_rate, get_steps
from ghostclip.accounting.calibration import delta_too_large
from ghostclip.accounting.history import SamplingEvent
from ghostclip.errors import BudgetError, InvalidOptionError

DELTA = 1e-5


def event(kind="poisson", rate=0.01, **options):
    return SamplingEvent(kind=kind, sample_rate=rate, num_units=10_000, **options)


def recorded(*events, relation="zero_out", name="best", count=100, sigma=1.0):
    accountant = create_accountant(name, relation=relation)
    for one in events:
        accountant.record(one, noise_multiplier=sigma, count=count)
    return accountant


def test_events_become_entries():
    accountant = recorded(
        event(), event(records_per_unit=2), event("full", 1.0), event("shuffled", 1.0, steps_per_event=7)
    )
    assert accountant.history == [(1.0, 0.01, 100), (0.5, 0.01, 100), (1.0, 1.0, 200)]
    accountant.record(event("truncated_poisson", truncation=150), noise_multiplier=1.0)
    assert accountant.others == [("truncated_poisson", (1.0, 0.01, 10_000.0, 150.0), 1)]
    assert len(accountant) == 401


@pytest.mark.parametrize(
    ("name", "relation"),
    [
        ("best", "add_remove"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("best", "zero_out"), ("rdp", "zero_out"))),
        pytest.param("rdp", "add_remove", marks=pytest.mark.slow),
    ],
)
def test_truncation_costs_more_the_more_it_cuts(name, relation):
    def spent(truncation):
        one = event("truncated_poisson", truncation=truncation, relation=relation)
        return recorded(one, relation=relation, name=name).get_epsilon(DELTA)

    plain = recorded(event(), name=name).get_epsilon(DELTA)
    costs = [spent(size) for size in (10_000, 200, 150, 130)]
    assert costs[0] == pytest.approx(plain, rel=1e-3)
    assert costs[0] <= costs[1] * (1 + 1e-6) <= costs[2] * (1 + 2e-6) < costs[3]
    assert costs[3] < recorded(event("full", 1.0), name=name).get_epsilon(DELTA) * 2


def test_the_truncated_bound_covers_a_batch_that_is_nearly_always_full():
    """One other record beside x, at most one kept: y is displaced by x. δ of one step, by integration."""
    sigma, rate = 1.0, 0.5
    z = np.linspace(-12, 14, 200_001)

    def density(mean):
        return norm.pdf(z, mean, sigma) * (z[1] - z[0])

    # Sampled sets {}, {x}, {y}, {x, y} with probability 1/4 each; of the last, one is kept. y = -1, x = 1 or 0.
    with_x = 0.25 * density(0) + 0.25 * density(1) + 0.25 * density(-1) + 0.125 * density(1) + 0.125 * density(-1)
    without = 0.25 * density(0) + 0.25 * density(0) + 0.25 * density(-1) + 0.125 * density(0) + 0.125 * density(-1)
    exact = np.maximum(with_x - math.exp(0.5) * without, 0).sum()
    one = SamplingEvent(kind="truncated_poisson", sample_rate=rate, num_units=2, truncation=1)
    assert recorded(one, count=1).get_epsilon(exact) >= 0.5


def test_replacing_costs_as_much_as_twice_the_distance_on_full_batches():
    replaced = recorded(event("full", 1.0), relation="replace_one", sigma=20.0).get_epsilon(DELTA)
    assert replaced == pytest.approx(recorded(event("full", 1.0), sigma=10.0).get_epsilon(DELTA), rel=1e-6)


def test_replacing_costs_more_than_zeroing_out_and_renyi_agrees():
    zeroed = recorded(event()).get_epsilon(DELTA)
    replaced = recorded(event(), relation="replace_one").epsilon_bounds(DELTA)
    assert zeroed < replaced.lower
    assert replaced.upper <= recorded(event(), relation="replace_one", name="rdp").get_epsilon(DELTA)


def test_state_with_everything_survives():
    accountant = recorded(event(), event("truncated_poisson", truncation=150))
    state = accountant.state_dict()
    again = create_accountant("rdp")
    again.load_state_dict(state)
    assert again.whole_history() == accountant.whole_history()
    with pytest.raises(InvalidOptionError, match="relation='zero_out'"):
        create_accountant(relation="replace_one").load_state_dict(state)
    with pytest.raises(InvalidOptionError, match="others is"):
        again.load_state_dict({**state, "others": [("laplace", (1.0,), 1)]})
    assert again.whole_history() == accountant.whole_history()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "allocation", "rate": 1.0, "steps_per_event": 7, "participations": 2}, "participations=2: a divisor"),
        ({"steps_per_event": 4, "participations": 2}, "and 1 for 'poisson'"),
        ({"kind": "shuffled", "rate": 0.5}, "sample_rate=0.5: 'shuffled' has no sampling"),
        ({"kind": "truncated_poisson"}, "truncation=None: goes with"),
        ({"truncation": 5}, "truncation=5: goes with"),
        ({"kind": "truncated_poisson", "truncation": 0}, "truncation=0: must be"),
        ({"kind": "cyclic", "rate": 1.0, "relation": "add_remove"}, "moves others to other batches"),
        ({"kind": "laplace"}, "kind=.laplace.: must be one of"),
    ],
)
def test_an_impossible_event_is_refused(given, said):
    with pytest.raises(InvalidOptionError, match=said):
        event(**given)


@pytest.mark.parametrize("steps", [math.nan, math.inf, 1.5, -1, None])
def test_a_state_with_impossible_steps_is_refused(steps):
    with pytest.raises(InvalidOptionError, match="entry 0 is"):
        create_accountant().load_state_dict({"mechanism": "rdp", "history": [(1.0, 0.1, steps)]})


def test_the_estimate_is_refused_unless_asked_for():
    with pytest.raises(InvalidOptionError, match="guarantee"):
        create_accountant("gdp")
    refused = GaussianAccountant()
    refused.step(noise_multiplier=1.0, sample_rate=0.01)
    with pytest.raises(InvalidOptionError, match="guarantees nothing"):
        refused.get_epsilon(DELTA)
    asked = GaussianAccountant(estimate=True)
    asked.history = [(1.0, 0.01, 1_000)]
    assert asked.mu == pytest.approx(0.01 * math.sqrt(1_000 * math.expm1(1)))
    assert 1 < asked.get_epsilon(DELTA) < 2
    # The true value is above 1.94: few, large losses are what a central limit theorem does not see.
    asked.history = [(0.5, 1e-4, 100)]
    assert asked.get_epsilon(1e-8) < 0.1
    asked.others = [("allocation", (1.0, 4.0), 1)]
    for estimate in (asked, GaussianAccountant(relation="replace_one", estimate=True)):
        with pytest.raises(InvalidOptionError, match="knows Poisson and full-batch steps"):
            estimate.get_epsilon(DELTA)


def test_any_one_value_is_solved_for_and_never_over_the_target():
    budget = {"target_epsilon": 2.0, "target_delta": DELTA}
    sigma = get_noise_multiplier(**budget, sample_rate=0.01, steps=1_000)
    rate = get_sample_rate(**budget, noise_multiplier=sigma, steps=1_000)
    steps = get_steps(**budget, noise_multiplier=sigma, sample_rate=0.01)
    for found in ((sigma, 0.01, 1_000), (sigma, rate, 1_000), (sigma, 0.01, steps)):
        accountant = create_accountant()
        accountant.history = [found]
        assert 1.99 < accountant.get_epsilon(DELTA) <= 2.0
    assert rate == pytest.approx(0.01, rel=2e-3)
    assert steps == pytest.approx(1_000, rel=3e-3)


def test_budgets_that_cannot_be_met(monkeypatch):
    monkeypatch.setattr("ghostclip.accounting.calibration.MIN_RATE", 0.05)
    with pytest.raises(BudgetError, match="one step"):
        get_steps(target_epsilon=0.1, target_delta=DELTA, noise_multiplier=0.5, sample_rate=1.0)
    with pytest.raises(BudgetError, match="sample rate"):
        get_sample_rate(target_epsilon=0.01, target_delta=DELTA, noise_multiplier=1.0, steps=10)


def test_delta_against_the_number_of_records():
    assert delta_too_large(1e-5, 99_999) is None
    assert "1/N" in (delta_too_large(1e-5, 100_000) or "")
    assert delta_too_large(0.5, None) is None
