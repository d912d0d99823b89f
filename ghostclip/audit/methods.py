"""`audit_scores`: from scores to a finding, by the method that fits how the scores came about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from ghostclip import _validate
from ghostclip.audit.one_run import epsilon_of_guesses, guesses_of
from ghostclip.audit.operating_points import split_point, union_points
from ghostclip.audit.scores import Scores
from ghostclip.audit.trade_off import gaussian_epsilon
from ghostclip.errors import InvalidOptionError

METHODS: Final = ("one-run", "one-run-f-dp", "one-run-gaussian", "clopper-pearson", "gaussian")
"""The first three for canaries of one training, the last two for scores of independent runs."""

THRESHOLDS: Final = ("split", "union")
"""How a threshold is chosen without fooling oneself: on a held-out half, or from a fixed list, each paid for."""


_ABOUT = {
    "clopper-pearson": "independent runs; exact bounds on both error rates",
    "gaussian": "independent runs; exact bounds on both error rates, converted as if the trade-off curve were Gaussian",
    "one-run": "canaries of one run, included by coin",
    "one-run-f-dp": "canaries of one run, included by coin; trade-off curve of (epsilon, delta)-DP",
    "one-run-gaussian": "canaries of one run, included by coin; converted as if the trade-off curve were Gaussian",
}


@dataclass(frozen=True)
class Finding:
    """A lower bound on ε with its method and measurements."""

    epsilon: float  # lower bound on ε at `delta`; 0 when nothing was proved
    delta: float
    confidence: float  # probability with which the bound is right, over the mechanism's and the attack's randomness
    method: str  # how it was found
    included: int  # rows that were included
    left_out: int  # rows that were not
    mu: float | None = None  # lower bound on μ of Gaussian DP, for the Gaussian methods
    threshold: float | None = None  # score at which the attack decides, for independent runs
    fpr: float | None = None  # measured false positive rate there
    fnr: float | None = None  # measured false negative rate there
    guesses: int | None = None  # guesses the attack made, for one run
    correct: int | None = None  # right ones among them
    claimed_epsilon: float | None = None

    @property
    def contradicts(self) -> bool:
        """Whether the bound exceeds the claim."""
        return self.claimed_epsilon is not None and self.epsilon > self.claimed_epsilon

    def sentence(self) -> str:
        """Return the result, and what it says about the claim, in one line."""
        found = f"epsilon >= {self.epsilon:.3f} at delta = {self.delta:g} with {100 * self.confidence:g} % confidence"
        if self.claimed_epsilon is None:
            return f"{found} ({self.method})."
        claim = f"the claim epsilon <= {self.claimed_epsilon:g}"
        if self.contradicts:
            return f"{found} ({self.method}): {claim} is contradicted."
        return f"{found} ({self.method}): {claim} is not contradicted, which does not prove it."

    def basis(self) -> str:
        """Return what the bound assumes and what was measured, in one line."""
        measured = ""
        if self.guesses is not None:
            measured = f"; {self.correct} of {self.guesses} guesses right"
        elif self.fpr is not None:
            measured = f"; at score {self.threshold:.6g} false positives {self.fpr:.4f}, false negatives {self.fnr:.4f}"
        return f"{self.included} included, {self.left_out} left out; {_ABOUT[self.method]}{measured}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without what does not apply."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return {**values, "contradicts": self.contradicts, "sentence": self.sentence()}


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
        bounds = _by_guesses(scores, delta, alpha, method, guesses)
    elif guesses is None:
        bounds = _by_points(scores, delta, alpha, threshold, gaussian=method == "gaussian")
    else:
        raise InvalidOptionError(f"guesses={guesses}: method={method!r} makes none; leave it out.")
    best = max(bounds, key=lambda values: values["epsilon"])
    members = int(scores.included_M.sum())
    return Finding(
        delta=delta, confidence=1 - alpha, method=method, included=members, left_out=len(scores) - members,
        claimed_epsilon=claimed_epsilon, **best,
    )  # fmt: skip


def _by_points(
    scores: Scores, delta: float, alpha: float, threshold: str, *, gaussian: bool
) -> Iterator[dict[str, Any]]:
    if threshold == "split":
        points = [split_point(scores, alpha=alpha, gaussian=gaussian, delta=delta)]
    else:
        points = union_points(scores, alpha=alpha)
    for point in points:
        mu = point.mu() if gaussian else None
        epsilon = point.epsilon(delta=delta) if mu is None else gaussian_epsilon(mu, delta=delta)
        yield {"epsilon": epsilon, "mu": mu, "threshold": point.threshold, "fpr": point.fpr, "fnr": point.fnr}


def _by_guesses(
    scores: Scores, delta: float, alpha: float, method: str, guesses: int | None
) -> Iterator[dict[str, Any]]:
    tried = guesses_of(scores, guesses)
    for made in tried:
        epsilon, mu = epsilon_of_guesses(made, method=method, delta=delta, alpha=alpha / len(tried))
        yield {"epsilon": epsilon, "mu": mu, "guesses": made.made, "correct": made.correct}
