"""ε at the edges: settings without limits, δ near the probability of taking part, and entries put in by hand."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch

import ghostclip
from ghostclip.accounting import GaussianAccountant, create_accountant
from ghostclip.accounting.pairs import Cells, SampledGaussian, discretised
from ghostclip.errors import InvalidOptionError
from ghostclip.privacy.budget import charges_of
from tests.engine.training import small_model

NAMES = ("best", "pld", "prv", "rdp", "dp_accounting")


def keeper(*history, name="best", others=()):
    accountant = create_accountant(name)
    accountant.history, accountant.others = list(history), list(others)
    return accountant


def bounds(sigma, rate, steps, delta):
    return keeper((sigma, rate, steps)).epsilon_bounds(delta)


BAD = [
    (math.nan, 0.1, 3),
    (-1.0, 0.1, 3),
    ("1.0", 0.1, 3),
    (None, 0.1, 3),
    (1.0, math.nan, 3),
    (1.0, -0.1, 3),
    (1.0, 1.1, 3),
    (1.0, "0.1", 3),
    (1.0, None, 3),
    (1.0, 0.1, math.nan),
    (1.0, 0.1, -3),
    (1.0, 0.1, 0.5),
    (1.0, 0.1, math.inf),
    (1.0, 0.1, None),
    (1.0, 0.1),
    None,
]


@pytest.mark.parametrize("entry", BAD, ids=map(repr, BAD))
@pytest.mark.parametrize("name", [*NAMES, "gdp"])
def test_entries_out_of_range_are_refused_when_they_are_read(name, entry):
    accountant = GaussianAccountant(estimate=True) if name == "gdp" else create_accountant(name)
    accountant.history = [(1.0, 0.1, 3), entry]
    for read in (
        lambda: accountant.get_epsilon(1e-5),
        accountant.state_dict,
        lambda: charges_of(accountant),
        lambda: create_accountant().load_state_dict({"history": accountant.history, "mechanism": "best"}),
    ):
        with pytest.raises(InvalidOptionError, match="entry 1 is"):
            read()


@pytest.mark.parametrize(
    "entry", [("allocation", (math.nan, 4.0), 1), ("allocation", (1.0, -1.0), 1), ("other", (1.0,), 1), ("allocation",)]
)
def test_other_entries_out_of_range_are_refused(entry):
    with pytest.raises(InvalidOptionError, match="others is"):
        keeper(others=[entry]).get_epsilon(1e-5)


def test_a_history_that_is_none_or_a_relation_that_is_unknown_is_refused():
    accountant = create_accountant()
    accountant.history = None
    with pytest.raises(InvalidOptionError, match="history is None"):
        accountant.get_epsilon(1e-5)
    accountant = create_accountant()
    accountant.relation = "none"
    with pytest.raises(InvalidOptionError, match="relation"):
        accountant.get_epsilon(1e-5)


def test_an_engine_refuses_them_too():
    engine, model = ghostclip.PrivacyEngine(), small_model()
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=ghostclip.DeclaredSampling(sample_rate=0.1, expected_batch_size=1.0, num_units=10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    engine.accountant.history.append((1.0, 0.1, -3))
    for read in (engine.get_epsilon, engine.epsilon_bounds, engine.summary):
        with pytest.raises(InvalidOptionError, match="entry 0 is"):
            read(1e-5)


@pytest.mark.parametrize("sigma", [0.0, 0.005, 0.05, 0.3, 1.0, 30.0])
@pytest.mark.parametrize("name", NAMES)
def test_who_hardly_ever_takes_part_is_private_without_noise(name, sigma):
    for rate, steps, delta in ((1e-5, 1, 1e-5), (1e-5, 10, 1e-4), (1e-9, 10**6, 1e-3), (0.5, 2, 0.7501)):
        if name == "dp_accounting" and sigma == 0:
            continue
        assert keeper((sigma, rate, steps), name=name).get_epsilon(delta) == 0


def test_steps_without_noise_may_use_part_of_delta():
    """One step that reveals who was in it, of rate 1e-6, and a thousand others: close to the others alone."""
    others = keeper((1.0, 0.01, 1000), name="rdp").get_epsilon(9e-6)
    assert keeper((0.0, 1e-6, 1), (1.0, 0.01, 1000), name="rdp").get_epsilon(1e-5) == pytest.approx(others, rel=1e-6)
    assert keeper((0.0, 1e-6, 11), (1.0, 0.01, 1000), name="rdp").get_epsilon(1e-5) == math.inf


@pytest.mark.parametrize("sigma", [0.5, 0.9, 1.5])
def test_epsilon_grows_with_the_steps(sigma):
    """Rounding of the mass at 0 was once larger than δ here."""
    found = [bounds(sigma, 8e-5, steps, 6e-14) for steps in (1, 2, 3, 4, 6, 13, 50)]
    assert all(after.upper >= before.upper for before, after in itertools.pairwise(found))
    assert all(at.upper - at.lower <= 1e-3 * at.upper for at in found)


def delta_of_two(sigma, rate, epsilon, side):
    """δ of two steps, all pairs of their atoms: nothing cancels."""
    deltas = []
    for direction in ("remove", "add"):
        pair = discretised(SampledGaussian(sigma, rate, direction), Cells(0.05, 0.05 * epsilon, epsilon, 10.5), side)
        loss, mass = np.add.outer(pair.loss_J, pair.loss_J), np.multiply.outer(pair.mass_J, pair.mass_J)
        finite = (mass * np.maximum(0, -np.expm1(np.minimum(epsilon - loss, 0)))).sum()
        deltas.append(finite - math.expm1(2 * math.log1p(-pair.infinite)))
    return max(deltas)


@pytest.mark.parametrize("seed", range(6))
def test_two_steps_equal_the_sum_over_all_pairs(seed):
    stream = random.Random(seed)
    sigma, rate = stream.uniform(0.3, 1.5), 10 ** stream.uniform(-9, -2)
    delta = rate * 10 ** stream.uniform(-14, -0.5)
    found = bounds(sigma, rate, 2, delta)
    assert delta_of_two(sigma, rate, found.upper, "lower") <= delta * (1 + 1e-9)
    assert delta_of_two(sigma, rate, found.lower, "upper") >= delta * (1 - 1e-9)
    assert found.upper - found.lower <= 2e-2 * found.upper


def settings(count, seed):
    stream = random.Random(seed)

    def log_uniform(low, high):
        return math.exp(stream.uniform(math.log(low), math.log(high)))

    for _ in range(count):
        rate = 1.0 if stream.random() < 0.1 else log_uniform(1e-9, 1)
        steps = round(log_uniform(1, 1e9 if stream.random() < 0.5 else 30))
        delta = min(0.5, rate) if stream.random() < 0.15 else log_uniform(1e-20, 0.5)
        yield (log_uniform(0.05, 100), rate, steps), delta, stream.choice(range(4)), stream.choice([1.01, 1.5, 4])


def check_neighbours(count, seed):
    for (sigma, rate, steps), delta, axis, factor in settings(count, seed):
        more = [
            (sigma, rate, math.ceil(steps * factor), delta),
            (sigma, min(1.0, rate * factor), steps, delta),
            (sigma / factor, rate, steps, delta),
            (sigma, rate, steps, delta / factor),
        ][axis]
        first, second = bounds(sigma, rate, steps, delta), bounds(*more)
        where = (sigma, rate, steps, delta, more)
        assert 0 <= first.lower <= first.upper, where
        # What each is known to, and what does not matter.
        slack = (first.upper - first.lower) + 1e-6
        assert second.upper >= first.upper - slack, where
        assert second.upper >= first.lower * (1 - 1e-9), where
        if -math.expm1(steps * math.log1p(-rate) if rate < 1 else -math.inf) <= delta * (1 - 1e-9):
            assert first.upper == 0, where


@pytest.mark.parametrize("seed", range(2))
def test_epsilon_grows_with_steps_rate_and_confidence_and_falls_with_noise(seed):
    check_neighbours(4, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_epsilon_grows_at_many_settings(seed):
    check_neighbours(20, seed)
