"""Audits of independent runs: exact at what they claim, honest about chosen thresholds, and not far from the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from ghostclip.audit import CanaryRecorder, Scores, audit_scores
from ghostclip.audit.methods import OperatingPoint, clopper_pearson_upper, union_points
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


def test_a_recorder_refuses_what_is_no_score_for_each_canary():
    recorder = CanaryRecorder([True, False, True])
    with pytest.raises(DataError, match="2 scores for 3 canaries"):
        recorder.record([1.0, 2.0])
    with pytest.raises(DataError, match="canaries 1 to 3: there are 3"):
        recorder.record([1.0, 2.0], canaries=[1, 3])
    recorder.record([1.0, 2.0], canaries=[0, 2])
    with pytest.raises(DataError, match=r"1 canaries have no score \(the first is number 1\)"):
        recorder.scores()


def test_refuses_coins_that_were_not_fair():
    scores = Scores.of(np.arange(1000.0), np.arange(1000) % 4 == 0)
    with pytest.raises(DataError, match="fair coin"):
        audit_scores(scores, delta=DELTA)
