"""Audits of one training: p-values against enumeration, coverage where they are tight, and power."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from scipy import optimize

from ghostclip.audit.methods import Guesses, approximate_dp_p_value, approximate_least, contradicts_f_dp, gaussian_least
from tests.audit.test_bounds import most_failures


@pytest.mark.parametrize("least", [partial(gaussian_least, mu=0.8), partial(approximate_least, epsilon=0.9, delta=0.0)])
@pytest.mark.parametrize(("made", "correct"), [(6, 6), (6, 5), (4, 4), (3, 2), (1, 1)])
def test_the_recursion_finds_the_largest_probability(least, made, correct):
    """The same bound by linear programming over all distributions of right guesses that meet the demands."""
    canaries = 6
    i = np.arange(made + 1)
    demands, limits = [], []
    # r_{c+1} ≤ F(h_c) for every c, where the concave F is the least of its tangents.
    for c in range(made):
        right = np.where(i > c, i / canaries, 0.0)
        wrong = np.where(i >= c, (made - i) / canaries, 0.0)
        for r in np.linspace(1e-4, 1 - 1e-4, 900):
            y = float(least(r))
            slope = 1e-6 / max(float(least(r + 1e-6)) - y, 1e-12)
            demands.append(right - slope * wrong)
            limits.append(r - slope * y)
    tail = np.where(i >= correct, -1.0, 0.0)
    found = optimize.linprog(tail, A_ub=demands, b_ub=limits, A_eq=[np.ones(made + 1)], b_eq=[1.0], bounds=(0, 1))
    largest = -found.fun
    guesses = Guesses(canaries, made, correct)
    assert contradicts_f_dp(guesses, least, alpha=largest * 1.01)
    assert not contradicts_f_dp(guesses, least, alpha=largest * 0.99)


@pytest.mark.parametrize("method", ["one-run", "one-run-f-dp"])
def test_bounds_fail_no_more_often_than_they_may_and_are_tight(method):
    """Randomised response on every canary is the worst case of both bounds: they fail nearly as often as they may."""
    stream, epsilon, alpha, repeats, failures = np.random.default_rng(3), 1.0, 0.2, 200, 0
    for _ in range(repeats):
        included = stream.random(150) < 0.5
        answer = included ^ (stream.random(150) < 1 / (1 + math.exp(epsilon)))
        # Guess exactly what was answered: as many "included" as were, which half of the guesses each would not.
        correct = int((answer == included).sum())
        guesses = Guesses(150, 150, correct)
        if method == "one-run":
            failures += approximate_dp_p_value(guesses, epsilon=epsilon, delta=0.0) <= alpha
        else:
            failures += bool(
                contradicts_f_dp(guesses, partial(approximate_least, epsilon=epsilon, delta=0.0), alpha=alpha)
            )
    assert 0.4 * alpha * repeats < failures <= most_failures(repeats, alpha)
