"""Audits of one training: p-values against enumeration, coverage where they are tight, and power."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import optimize, stats

from ghostclip.audit import Scores, audit_scores, flip_coins
from ghostclip.audit.methods import (
    ApproximateTradeOff,
    GaussianTradeOff,
    Guesses,
    approximate_dp_p_value,
    contradicts_f_dp,
    make_guesses,
)
from tests.audit.test_bounds import most_failures

DELTA = 1e-5


def test_pure_dp_is_a_binomial_tail():
    guesses = Guesses(canaries=50, made=20, correct=17)
    p_value = approximate_dp_p_value(guesses, epsilon=1.0, delta=0.0)
    assert p_value == pytest.approx(stats.binom.sf(16, 20, 1 / (1 + math.exp(-1.0))))


def test_delta_adds_its_share():
    """β + 2mδ·max_i (1/i)·P[v > W ≥ v - i], written as a loop."""
    m, r, v, epsilon, delta = 50, 20, 17, 1.0, 1e-3
    right = 1 / (1 + math.exp(-epsilon))
    slope = max((stats.binom.cdf(v - 1, r, right) - stats.binom.cdf(v - i - 1, r, right)) / i for i in range(1, m + 1))
    wanted = stats.binom.sf(v - 1, r, right) + 2 * m * delta * slope
    assert approximate_dp_p_value(Guesses(m, r, v), epsilon=epsilon, delta=delta) == pytest.approx(wanted)


@pytest.mark.parametrize("curve", [GaussianTradeOff(0.8), ApproximateTradeOff(0.9, 0.0)])
@pytest.mark.parametrize(("made", "correct"), [(6, 6), (6, 5), (4, 4), (3, 2), (1, 1)])
def test_the_recursion_finds_the_largest_probability(curve, made, correct):
    """The same bound by linear programming over all distributions of right guesses that meet the demands."""
    canaries = 6
    i = np.arange(made + 1)
    demands, limits = [], []
    # r_{c+1} ≤ F(h_c) for every c, where the concave F is the least of its tangents.
    for c in range(made):
        right = np.where(i > c, i / canaries, 0.0)
        wrong = np.where(i >= c, (made - i) / canaries, 0.0)
        for r in np.linspace(1e-4, 1 - 1e-4, 900):
            y = float(curve.least(r))
            slope = 1e-6 / max(float(curve.least(r + 1e-6)) - y, 1e-12)
            demands.append(right - slope * wrong)
            limits.append(r - slope * y)
    tail = np.where(i >= correct, -1.0, 0.0)
    found = optimize.linprog(tail, A_ub=demands, b_ub=limits, A_eq=[np.ones(made + 1)], b_eq=[1.0], bounds=(0, 1))
    largest = -found.fun
    guesses = Guesses(canaries, made, correct)
    assert contradicts_f_dp(guesses, curve, alpha=largest * 1.01)
    assert not contradicts_f_dp(guesses, curve, alpha=largest * 0.99)


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
            failures += bool(contradicts_f_dp(guesses, ApproximateTradeOff(epsilon, 0.0), alpha=alpha))
    assert 0.4 * alpha * repeats < failures <= most_failures(repeats, alpha)


@pytest.mark.parametrize("method", ["one-run", "one-run-f-dp", "one-run-gaussian"])
def test_gaussian_canaries(method):
    """Below the truth (ε = 4.377 at μ = 1) and well above nothing; the Gaussian curve proves more than (ε, δ) alone."""
    stream = np.random.default_rng(4)
    included = flip_coins(3000, seed=4)
    finding = audit_scores(Scores.of(stream.normal(included, 1.0), included), delta=DELTA, method=method)
    assert (2.0 if method == "one-run-gaussian" else 1.2) < finding.epsilon < 4.377
    assert finding.guesses is not None
    assert "guesses right" in finding.basis()


@pytest.mark.parametrize("method", ["one-run", "one-run-f-dp", "one-run-gaussian"])
def test_several_numbers_of_guesses_share_the_error(method):
    stream, included = np.random.default_rng(6), flip_coins(320, seed=2)
    scores = Scores.of(stream.normal(2.0 * included, 1.0), included)
    together = audit_scores(scores, delta=DELTA, confidence=0.9, method=method)
    apart = [
        audit_scores(scores, delta=DELTA, confidence=0.98, method=method, guesses=made)
        for made in (320, 160, 80, 40, 20)
    ]
    assert together.epsilon == pytest.approx(max(finding.epsilon for finding in apart), abs=1e-6)


def test_guesses_take_the_highest_and_the_lowest():
    scores = Scores.of([5.0, 4.0, 0.0, 1.0, 2.0, 3.0], [1, 1, 1, 0, 0, 1])
    assert make_guesses(scores, made=3) == Guesses(canaries=6, made=3, correct=2)
    assert make_guesses(scores, made=6) == Guesses(canaries=6, made=6, correct=5)
