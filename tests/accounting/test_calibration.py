"""From a budget to σ: never over the target, close to it, refused where it cannot be met."""

from __future__ import annotations

import math
import warnings

import pytest

from ghostclip.accounting import create_accountant, get_noise_multiplier
from ghostclip.accounting.history import steps_per_epoch
from ghostclip.errors import BudgetError, InvalidOptionError
from tests.randomised import given, settings, st


def epsilon(sigma, rate, steps, delta):
    accountant = create_accountant()
    accountant.history = [(sigma, rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return accountant.get_epsilon(delta)


def check_setting(target, delta, rate, steps):
    sigma = get_noise_multiplier(target_epsilon=target, target_delta=delta, sample_rate=rate, steps=steps)
    reached = epsilon(sigma, rate, steps, delta)
    assert reached <= target
    # ε jumps to 0 where total variation alone meets δ, so closeness is judged by σ.
    assert reached >= target * 0.998 or epsilon(sigma * (1 - 1e-6), rate, steps, delta) > target


@pytest.mark.parametrize(("target", "delta", "rate", "steps"), [(0.5, 1e-6, 0.01, 1_000), (8.0, 1e-5, 1.0, 100)])
def test_never_over_the_target_and_close_to_it(target, delta, rate, steps):
    check_setting(target, delta, rate, steps)


@pytest.mark.slow
@settings(max_examples=20)
@given(target=st.floats(0.01, 50), delta=st.floats(1e-10, 1e-3), rate=st.floats(1e-4, 1), steps=st.integers(1, 10**6))
def test_any_setting_is_met(target, delta, rate, steps):
    check_setting(target, delta, rate, steps)


def test_epochs_are_what_the_sampler_makes_of_them():
    options = {"target_epsilon": 3.0, "target_delta": 1e-5, "sample_rate": 3 / 147}
    assert steps_per_epoch(3 / 147) == 49
    assert get_noise_multiplier(**options, epochs=2) == get_noise_multiplier(**options, steps=98)
    assert get_noise_multiplier(**options, epochs=1.999) == get_noise_multiplier(**options, steps=98)


def test_unreachable_is_an_error():
    with pytest.raises(BudgetError, match=r"target_epsilon=1e-07: not reached .* fewer steps"):
        get_noise_multiplier(target_epsilon=1e-7, target_delta=1e-12, sample_rate=1.0, steps=10**9)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"target_epsilon": 0}, "target_epsilon=0"),
        ({"target_epsilon": math.nan}, "target_epsilon"),
        ({"target_epsilon": math.inf}, "target_epsilon"),
        ({"target_delta": 0}, "target_delta"),
        ({"target_delta": 1}, "target_delta"),
        ({"sample_rate": 0}, "sample_rate"),
        ({"sample_rate": 1.5}, "sample_rate"),
        ({"steps": None}, "exactly one"),
        ({"epochs": 3}, "exactly one"),
        ({"steps": 0}, "steps"),
        ({"steps": None, "epochs": 0}, "epochs"),
        ({"accountant": "gdp"}, "gdp"),
        ({"epsilon_tolerance": 0}, "epsilon_tolerance"),
    ],
)
def test_refuses(change, match):
    options = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.1, "steps": 10} | change
    with pytest.raises(InvalidOptionError, match=match):
        get_noise_multiplier(**options)
