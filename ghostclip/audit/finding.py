"""Finding of an audit, in numbers and in a sentence."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_ABOUT = {
    "clopper-pearson": "independent runs; exact bounds on both error rates",
    "gaussian": "independent runs; exact bounds on both error rates, converted as if the trade-off curve were Gaussian",
    "one-run": "canaries of one run, included by coin",
    "one-run-f-dp": "canaries of one run, included by coin; trade-off curve of (epsilon, delta)-DP",
    "one-run-gaussian": "canaries of one run, included by coin; converted as if the trade-off curve were Gaussian",
}


@dataclass(frozen=True)
class Finding:
    """A lower bound on ε, and what it rests on.

    Attributes:
        epsilon: Lower bound on ε at `delta`; 0 when nothing was proved.
        delta: δ that ε is meant at.
        confidence: Probability with which the bound is right, over the mechanism's and the attack's randomness.
        method: How it was found.
        included: Rows that were included.
        left_out: Rows that were not.
        mu: Lower bound on μ of Gaussian DP, for the Gaussian methods.
        threshold: Score at which the attack decides, for independent runs.
        fpr: Measured false positive rate there.
        fnr: Measured false negative rate there.
        guesses: Guesses the attack made, for one run.
        correct: Right ones among them.
        claimed_epsilon: The claim, if there is one.
    """

    epsilon: float
    delta: float
    confidence: float
    method: str
    included: int
    left_out: int
    mu: float | None = None
    threshold: float | None = None
    fpr: float | None = None
    fnr: float | None = None
    guesses: int | None = None
    correct: int | None = None
    claimed_epsilon: float | None = None

    @property
    def contradicts(self) -> bool:
        """Whether the bound exceeds the claim."""
        return self.claimed_epsilon is not None and self.epsilon > self.claimed_epsilon

    def sentence(self) -> str:
        """Return what was found, and what it says about the claim, in one line."""
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
