"""Random allocation: its privacy loss against exact moments, a plain quadrature and drawn likelihood ratios."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ghostclip.accounting.calibration import bounding_accountant
from ghostclip.accounting.pairs import Cells, DiscretePair, allocated
from ghostclip.data import RandomAllocation
from ghostclip.errors import InvalidOptionError

# Moments of high order lie far out.
CELLS = Cells(0.02, 0.02, 0.0, 25.0)
CASES = [(1.0, 2), (0.8, 7), (0.8, 64), (1.5, 100), (3.0, 1000)]


def delta_of(pair: DiscretePair, epsilon: float) -> float:
    above = pair.loss_J > epsilon
    return pair.infinite + float(pair.mass_J[above] @ -np.expm1(epsilon - pair.loss_J[above]))


def exact_moment(sigma: float, steps: int, order: int) -> float:
    """E_Q[L^α] = α!·[z^α] (Σ_n e^{n(n-1)/2σ²}/n!·(z/t)^n)^t: the multinomial sum over which steps α draws fall into."""
    series = np.array([math.exp(n * (n - 1) / (2 * sigma**2)) / math.factorial(n) / steps**n for n in range(order + 1)])
    power = np.zeros(order + 1)
    power[0] = 1.0
    for _ in range(steps):
        power = np.convolve(power, series)[: order + 1]
    return math.factorial(order) * float(power[order])


@pytest.mark.parametrize(("sigma", "steps"), CASES)
@pytest.mark.parametrize("order", [2, 3, 5])
def test_moments_are_never_below_the_exact_ones_and_close_to_them(sigma: float, steps: int, order: int) -> None:
    pair = allocated(sigma, steps, "remove", CELLS, "upper")
    # Under P, E_P[L^{α-1}] = E_Q[L^α].
    found = float(pair.mass_J @ np.exp((order - 1) * pair.loss_J))
    exact = exact_moment(sigma, steps, order)
    assert exact * (1 - 1e-9) <= found
    assert math.log(found) <= 1.005 * math.log(exact) + 1e-9


def test_two_steps_against_a_plain_quadrature() -> None:
    sigma, epsilon = 0.8, 0.7
    z = np.linspace(-9 * sigma, 9 * sigma + 1, 4001)
    density = np.exp(-0.5 * (z / sigma) ** 2)
    density /= density.sum()
    ratio = np.exp((z - 0.5) / sigma**2)
    mean = (ratio[:, None] + ratio) / 2
    both = density[:, None] * density
    removed = float((both * np.maximum(mean - math.exp(epsilon), 0)).sum())
    added = float((both * np.maximum(1 - math.exp(epsilon) * mean, 0)).sum())
    for direction, exact in (("remove", removed), ("add", added)):
        found = delta_of(allocated(sigma, 2, direction, CELLS, "upper"), epsilon)
        assert exact * (1 - 1e-4) <= found <= exact * 1.003


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.0])
def test_any_k_of_all_steps_cost_no_more_than_k_rounds(epsilon: float) -> None:
    """The likelihood ratio of k of T steps, drawn uniformly, is e_k(X_1, ..., X_T) / (T over k)."""
    sigma, steps, rounds, drawn = 0.9, 12, 3, 200_000
    random = np.random.default_rng(7)
    symmetric = np.zeros((rounds + 1, drawn))
    symmetric[0] = 1.0
    for _ in range(steps):
        ratio = np.exp(random.standard_normal(drawn) / sigma - 0.5 / sigma**2)
        symmetric[1:] += ratio * symmetric[:-1]
    likelihood = symmetric[-1] / math.comb(steps, rounds)
    removed, added = np.maximum(likelihood - math.exp(epsilon), 0), np.maximum(1 - math.exp(epsilon) * likelihood, 0)
    accountant = bounding_accountant("pld")
    event = RandomAllocation(num_samples=100, epoch_steps=steps // rounds, rounds=rounds).event
    accountant.record(event, noise_multiplier=sigma)
    for losses in (removed, added):
        at_least = losses.mean() - 4 * losses.std() / math.sqrt(drawn)
        assert at_least <= 0 or accountant.get_epsilon(at_least) > epsilon
    # It is no bound for more participations than that.
    assert accountant.get_epsilon(1.6 * max(removed.mean(), added.mean()) + 1e-4) < epsilon


def test_one_step_is_the_gaussian_mechanism() -> None:
    one, plain = bounding_accountant(), bounding_accountant()
    one.others, plain.history = [("allocation", (1.3, 1.0), 4)], [(1.3, 1.0, 4)]
    assert one.get_epsilon(1e-5) == pytest.approx(plain.get_epsilon(1e-5), rel=2e-4)


def test_the_renyi_accountant_bounds_it_too() -> None:
    tight, renyi = bounding_accountant("pld"), bounding_accountant("rdp")
    for accountant in (tight, renyi):
        accountant.others = [("allocation", (1.0, 50.0), 10)]
    assert tight.get_epsilon(1e-5) <= renyi.get_epsilon(1e-5) <= 1.4 * tight.get_epsilon(1e-5)


def test_any_record_in_the_place_of_another_is_refused() -> None:
    accountant = bounding_accountant(relation="replace_one")
    accountant.others = [("allocation", (1.0, 20.0), 1)]
    with pytest.raises(InvalidOptionError, match="random allocation"):
        accountant.get_epsilon(1e-5)


def test_next_to_no_noise_costs_at_most_a_step_that_is_known_and_none_costs_everything() -> None:
    found = {}
    for sigma in (0.0, 0.02, 0.09, 0.11):
        one, known = bounding_accountant(), bounding_accountant()
        one.others, known.history = [("allocation", (sigma, 20.0), 1)], [(sigma, 1.0, 1)]
        found[sigma] = one.get_epsilon(1e-5)
        assert found[sigma] <= known.get_epsilon(1e-5) * 1.001
    assert found[0.0] == math.inf
    assert math.inf > found[0.02] > found[0.09] > found[0.11] > 40
