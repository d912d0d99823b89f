"""`audit_scores`: from scores to a finding, by the method that fits how the scores came about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ghostclip import _validate
from ghostclip.audit import one_run
from ghostclip.audit.finding import Finding
from ghostclip.audit.one_run import Guesses
from ghostclip.audit.operating_points import OperatingPoint, split_point, union_points
from ghostclip.audit.scores import Scores
from ghostclip.audit.trade_off import gaussian_epsilon
from ghostclip.errors import InvalidOptionError

METHODS: Final = ("one-run", "one-run-f-dp", "one-run-gaussian", "clopper-pearson", "gaussian")
"""The first three for canaries of one training, the last two for scores of independent runs."""

THRESHOLDS: Final = ("split", "union")
"""How a threshold is chosen without fooling oneself: on a held-out half, or from a fixed list, each paid for."""


@dataclass(frozen=True)
class _Bound:
    """What a point or a number of guesses proves."""

    epsilon: float
    mu: float | None = None


def audit_scores(  # noqa: PLR0913 - what is asked of the data is the caller's to say, each by name
    scores: Scores,
    *,
    delta: float,
    confidence: float = 0.95,
    method: str = "one-run",
    threshold: str = "union",
    guesses: int | None = None,
    claimed_epsilon: float | None = None,
) -> Finding:
    """Return the lower bound on ε that an attack's scores prove.

    - "one-run": m canaries of one training, each included by a fair coin; Steinke, Nasr, Jagielski 2023.
    - "one-run-f-dp": the same, bounded through the trade-off curve of (ε, δ)-DP; Mahloujifar et al. 2025.
    - "one-run-gaussian": the same with Gaussian curves; tighter, but it takes the mechanism for a Gaussian one.
    - "clopper-pearson": one row per independent run of the mechanism; Jagielski, Ullman, Oprea 2020.
    - "gaussian": the same, fitted to Gaussian DP; Nasr et al. 2023. It needs far fewer runs, and takes the mechanism
      for a Gaussian one: one full-batch step is; a subsampled training is only about one.

    Privacy:
        Scores are functions of the canaries and the training; whether canaries are secret is the auditor's matter.

    Args:
        scores: The attack's scores.
        delta: δ that ε is meant at.
        confidence: Probability with which the bound is right.
        method: One of `METHODS`.
        threshold: One of `THRESHOLDS`, for independent runs.
        guesses: How many guesses the attack makes, for one run; None tries all canaries, half of them, ..., a
            sixteenth, each at its share of the error probability.
        claimed_epsilon: A claim to compare with.

    Returns:
        The finding.

    Raises:
        InvalidOptionError: If an option is unknown or out of range.
        DataError: If there are too few scores, or the coins of one run were plainly not fair.
    """
    _validate.choice(method, "method", METHODS)
    _validate.choice(threshold, "threshold", THRESHOLDS)
    _validate.probability(delta, "delta")
    alpha = 1 - _validate.probability(confidence, "confidence")
    if claimed_epsilon is not None:
        _validate.non_negative(claimed_epsilon, "claimed_epsilon")
    if method.startswith("one-run"):
        return _by_guesses(scores, delta, alpha, method, guesses, claimed_epsilon)
    if guesses is not None:
        raise InvalidOptionError(f"guesses={guesses}: method={method!r} makes none; leave it out.")
    return _by_points(scores, delta, alpha, method, threshold, claimed_epsilon)


def _by_points(
    scores: Scores, delta: float, alpha: float, method: str, threshold: str, claimed: float | None
) -> Finding:
    gaussian = method == "gaussian"
    if threshold == "split":
        points = [split_point(scores, alpha=alpha, gaussian=gaussian, delta=delta)]
    else:
        points = union_points(scores, alpha=alpha)

    def bound(point: OperatingPoint) -> _Bound:
        if not gaussian:
            return _Bound(point.epsilon(delta=delta))
        mu = point.mu()
        return _Bound(gaussian_epsilon(mu, delta=delta), mu)

    best, found = max(((point, bound(point)) for point in points), key=lambda pair: pair[1].epsilon)
    members = int(scores.included_M.sum())
    return Finding(
        epsilon=found.epsilon,
        delta=delta,
        confidence=1 - alpha,
        method=method,
        included=members,
        left_out=len(scores) - members,
        mu=found.mu,
        threshold=best.threshold,
        fpr=best.fpr,
        fnr=best.fnr,
        claimed_epsilon=claimed,
    )


def _by_guesses(
    scores: Scores, delta: float, alpha: float, method: str, guesses: int | None, claimed: float | None
) -> Finding:
    members = int(scores.included_M.sum())
    one_run.refuse_unfair_coins(members, len(scores))
    counts = one_run.guess_counts(len(scores)) if guesses is None else [guesses]
    share = alpha / len(counts)

    def gaussian(made: Guesses) -> _Bound:
        mu = one_run.mu_by_f_dp(made, alpha=share)
        return _Bound(gaussian_epsilon(mu, delta=delta), mu)

    ways: dict[str, Callable[[Guesses], _Bound]] = {
        "one-run": lambda made: _Bound(one_run.epsilon_by_approximate_dp(made, delta=delta, alpha=share)),
        "one-run-f-dp": lambda made: _Bound(one_run.epsilon_by_f_dp(made, delta=delta, alpha=share)),
        "one-run-gaussian": gaussian,
    }
    tried = [one_run.make_guesses(scores, made=count) for count in counts]
    best, found = max(((made, ways[method](made)) for made in tried), key=lambda pair: pair[1].epsilon)
    return Finding(
        epsilon=found.epsilon,
        delta=delta,
        confidence=1 - alpha,
        method=method,
        included=members,
        left_out=len(scores) - members,
        mu=found.mu,
        guesses=best.made,
        correct=best.correct,
        claimed_epsilon=claimed,
    )
