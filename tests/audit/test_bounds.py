"""Audits of independent runs: exact at what they claim, honest about chosen thresholds, and not far from the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from ghostclip.audit import Scores, audit_scores
from ghostclip.audit.methods import (
    METHODS,
    ApproximateTradeOff,
    GaussianTradeOff,
    OperatingPoint,
    clopper_pearson_upper,
    gaussian_delta,
    gaussian_epsilon,
    union_points,
)
from ghostclip.errors import DataError, InvalidOptionError
from tests.audit.checks import scores_of_runs

DELTA = 1e-5
REPEATS, ALPHA = 300, 0.2


def gaussian_scores(stream, mu, runs):
    return scores_of_runs(member=stream.normal(mu, 1.0, runs), other=stream.normal(0.0, 1.0, runs))


def most_failures(repeats=REPEATS, alpha=ALPHA):
    """What failures of probability α exceed once in a thousand."""
    return int(stats.binom.ppf(0.999, repeats, alpha))


@pytest.mark.parametrize(("count", "total"), [(0, 7), (3, 7), (6, 7), (7, 7), (40, 1500)])
def test_clopper_pearson_agrees_with_an_exact_test(count, total):
    upper = float(clopper_pearson_upper(count, total, 0.03))
    assert upper == pytest.approx(stats.binomtest(count, total, alternative="less").proportion_ci(0.97).high)
    if count < total:
        assert stats.binom.cdf(count, total, upper) == pytest.approx(0.03)


@pytest.mark.parametrize("delta", [0.0, 1e-3])
def test_either_error_rate_proves_an_epsilon(delta):
    for fpr, fnr in ((0.5, 1e-3), (1e-3, 0.5)):
        found = OperatingPoint(0.0, fpr, fnr, fpr_upper=fpr, fnr_upper=fnr).epsilon(delta=delta)
        assert found == pytest.approx(math.log((0.5 - delta) / 1e-3))
    assert OperatingPoint(0.0, 0.5, 0.5, fpr_upper=0.6, fnr_upper=0.6).epsilon(delta=delta) == 0.0


def test_rates_of_a_point_are_shares_of_the_scores_on_the_wrong_side_of_its_threshold():
    scores = gaussian_scores(np.random.default_rng(1), 1.0, 40)
    for point in union_points(scores, alpha=ALPHA):
        assert point.fpr == (scores.other > point.threshold).mean() <= point.fpr_upper
        assert point.fnr == (scores.member < point.threshold).mean() <= point.fnr_upper


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 2.0, 8.0])
def test_gaussian_epsilon_inverts_delta(mu):
    epsilon = gaussian_epsilon(mu, delta=DELTA)
    likely, unlikely = stats.norm.cdf(mu / 2 - epsilon / mu), stats.norm.cdf(-mu / 2 - epsilon / mu)
    assert likely - math.exp(epsilon) * unlikely == pytest.approx(DELTA, rel=1e-6)
    assert gaussian_delta(epsilon, mu=mu) == pytest.approx(DELTA, rel=1e-6)


@pytest.mark.parametrize("curve", [GaussianTradeOff(0.7), ApproximateTradeOff(1.3, 0.01)])
def test_least_probability_inverts_the_curve(curve):
    """F(F⁻¹(r)) = r, with F written down a second time."""
    r = np.linspace(0.02, 0.98, 25)
    y = curve.least(r)
    if isinstance(curve, GaussianTradeOff):
        back = stats.norm.cdf(stats.norm.ppf(y) + 0.7)
    else:
        back = np.minimum(0.01 + np.exp(1.3) * y, 1 - np.exp(-1.3) * (1 - 0.01 - y))
    np.testing.assert_allclose(back, r, rtol=1e-9)
    assert (np.diff(y) > 0).all()


@pytest.mark.parametrize("mu", [0.0, 1.0])
def test_bounds_on_mu_fail_no_more_often_than_they_may(mu):
    stream = np.random.default_rng(5)
    failures = 0
    for _ in range(REPEATS):
        scores = gaussian_scores(stream, mu, 60)
        failures += max(point.mu() for point in union_points(scores, alpha=ALPHA)) > mu
    assert failures <= most_failures()


def test_bounds_on_epsilon_fail_no_more_often_than_they_may():
    """Randomised response is (ε, 0)-DP and no better: the scores have two values, which are ties all over."""
    stream, epsilon = np.random.default_rng(6), 1.0
    lie = 1 / (1 + math.exp(epsilon))
    found = []
    for _ in range(REPEATS):
        answers = stream.random((2, 120)) < lie
        scores = scores_of_runs(member=~answers[0], other=answers[1])
        finding = audit_scores(scores, delta=1e-9, confidence=1 - ALPHA, method="clopper-pearson")
        found.append(finding.epsilon)
    failures = sum(value > epsilon for value in found)
    assert failures <= most_failures()


def test_many_runs_come_close_to_the_truth():
    scores = gaussian_scores(np.random.default_rng(8), 1.0, 100_000)
    finding = audit_scores(scores, delta=DELTA, method="gaussian")
    assert 0.95 < finding.mu <= 1.0
    assert 4.0 < finding.epsilon <= 4.3772


def test_perfect_separation_is_bounded_by_the_number_of_runs():
    scores = scores_of_runs(member=np.ones(1500), other=np.zeros(1500))
    finding = audit_scores(scores, delta=DELTA, method="clopper-pearson", claimed_epsilon=4.38)
    # α is shared by 12 points, of two rates each.
    none = (0.05 / 24) ** (1 / 1500)
    assert finding.epsilon == pytest.approx(math.log((none - DELTA) / (1 - none)))
    assert finding.contradicts
    assert "contradicted" in finding.sentence()


def test_order_of_the_rows_tells_nothing():
    """Constant scores, members first: a stable sort would tell them apart."""
    scores = Scores.of(np.zeros(400), np.arange(400) < 200)
    for method in METHODS:
        assert audit_scores(scores, delta=DELTA, method=method).epsilon == 0.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"delta": 0.0}, "delta"),
        ({"confidence": 1.0}, "confidence"),
        ({"method": "guess"}, "method"),
        ({"claimed_epsilon": -1.0}, "claimed_epsilon"),
        ({"method": "gaussian", "guesses": 3}, "makes none"),
        ({"guesses": 41}, "only 40 canaries"),
    ],
)
def test_refuses_options(options, words):
    scores = gaussian_scores(np.random.default_rng(1), 1.0, 20)
    with pytest.raises(InvalidOptionError, match=words):
        audit_scores(scores, **{"delta": DELTA, **options})


@pytest.mark.parametrize(
    ("score", "included", "words"),
    [
        ([1.0, 2.0], [True], "one each"),
        ([1.0, math.nan, 2.0, 3.0], [1, 0, 1, 0], "1 of 4 scores are NaN"),
        ([1.0, 2.0, 3.0, 4.0], [1, 2, 1, 0], "zeros and ones"),
        ([1.0, 2.0, 3.0, 4.0], [1, 1, 1, 0], "3 of 4 were included"),
    ],
)
def test_refuses_scores(score, included, words):
    with pytest.raises(DataError, match=words):
        Scores.of(score, included)


def test_refuses_coins_that_were_not_fair():
    scores = Scores.of(np.arange(1000.0), np.arange(1000) % 4 == 0)
    with pytest.raises(DataError, match="fair coin"):
        audit_scores(scores, delta=DELTA)
