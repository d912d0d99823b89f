"""Rounding in the contour integral: bounded where it accumulates, and nowhere the other way."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ghostclip.accounting.contour import Composition, Contour, Nodes, _geometric, log_chernoff
from ghostclip.accounting.pairs import Cells, DiscretePair, SampledGaussian, discretised
from ghostclip.accounting.solve import _approached, _Fineness, saddle_for_delta

PAIR = discretised(SampledGaussian(1.0, 0.01, "remove"), Cells(0.05, 0.02, 0.0, 10.0), "upper")


@pytest.mark.parametrize("c", [1e-6, 1.0, 1e6, 1e12])
def test_chernoff_does_not_cancel(c):
    exact = -c * math.log1p(1 / c) - math.log1p(c)
    assert exact <= log_chernoff(Composition([], [], 0.0), 0.0, c, 0.0) <= exact + 1e-12


def test_the_error_of_the_moment_covers_that_of_the_masses():
    count, c = 10**8, 3.0
    off = DiscretePair(PAIR.loss_J, PAIR.mass_J * (1 + 2.0**-44), PAIR.infinite)
    exact, found = (Composition([pair], [count]) for pair in (off, PAIR))
    assert abs(exact.log_moment(c)[0] - found.log_moment(c)[0]) <= found.moment_error(c) < 1e-3


def test_upper_and_lower_bounds_part_by_the_rounding_of_many_steps():
    composition = Composition([PAIR], [10**8])
    mean = composition.log_moment(1.0)[1]
    contour = Contour(composition, Nodes(1.0, 1e-6, 1e3, 64))
    assert contour.upper(mean) >= contour.lower(mean)
    assert contour._delta_error >= 10**8 * 2.0**-43 * abs(contour._delta_N[0])


def test_aliases_that_overflow_are_not_small():
    assert _geometric(2_000.0, 1_000.0) == math.exp(700.0)
    assert _geometric(800.0, 2_000.0) == 0.0
    assert _geometric(0.0, 1.0) == pytest.approx(1 / math.expm1(1.0))


def test_powers_of_a_turn_stay_within_their_bound():
    composition, nodes, step = Composition([PAIR], [1]), 4_096, 0.05
    log_N, error_N = composition.along(2.0, step, nodes)
    weight_J = composition._tilted(2.0)[1]
    at = [1, 1_000, 4_095]
    exact = [np.exp(1j * step * n * PAIR.loss_J) @ weight_J for n in at]
    size = np.abs(exact)
    assert np.all(np.abs(np.exp(log_N[at]) - exact) <= size * np.expm1(error_N[at]))


@pytest.mark.parametrize(("steps", "delta"), [(1_000, 1e-3), (1_000, 1e-6), (10**5, 1e-6)])
def test_the_search_begins_within_a_few_percent_of_where_it_ends(steps, delta):
    composition = Composition([PAIR], [steps])
    _, certified = _approached(composition, delta, _Fineness(0.01, 2e-5))
    assert saddle_for_delta(composition, delta)[1] == pytest.approx(certified, rel=0.05)
