"""Auditing by one training: many canaries, each included by a fair coin of its own, and an attack that guesses coins.

The canaries share the training, so their scores are not independent; what is bounded is how many coins an attack can
guess at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ghostclip._validate import positive_int
from ghostclip.audit.scores import Scores
from ghostclip.audit.trade_off import ApproximateTradeOff, GaussianTradeOff, TradeOff, gaussian_epsilon
from ghostclip.errors import DataError, InvalidOptionError

Array = NDArray[np.float64]

_TIES_SEED = 0
_FEWEST_GUESSES = 16
_DEVIATIONS = 6
_GRID = 48
_ROUNDS = 4
_HIGHEST_EPSILON, _HIGHEST_MU = 30.0, 15.0


@dataclass(frozen=True)
class Guesses:
    """An attack's guesses about coins."""

    canaries: int  # m, all of them
    made: int  # r, guesses; the attack abstains on the others
    correct: int  # v, right guesses


def make_guesses(scores: Scores, *, made: int) -> Guesses:
    """Guess "included" for the highest scores and "left out" for the lowest, half of the guesses each."""
    # The number of guesses is fixed before the scores are seen, or paid for (see `audit_scores`).
    made = positive_int(made, "guesses")
    if made > len(scores):
        raise InvalidOptionError(f"guesses={made}: there are only {len(scores)} canaries.")
    # Equal scores in random order: the order of the rows may tell who was included.
    shuffled = np.random.default_rng(_TIES_SEED).permutation(len(scores))
    order = shuffled[np.argsort(scores.score_M[shuffled], kind="stable")]
    out, top = made // 2, made - made // 2
    right = int(scores.included_M[order[-top:]].sum()) + int((~scores.included_M[order[:out]]).sum())
    return Guesses(canaries=len(scores), made=made, correct=right)


def approximate_dp_p_value(guesses: Guesses, *, epsilon: float, delta: float) -> float:
    """Return the largest probability, over all (ε, δ)-DP mechanisms and attacks, of guessing so many coins.

        β + 2mδ·max_i (1/i)·P[v > W ≥ v - i],   β = P[W ≥ v],   W ~ Binomial(r, e^ε/(1 + e^ε))

    Reference:
        Steinke, Nasr, Jagielski 2023, Theorem 5.2.
    """
    right = float(1 / (1 + np.exp(-epsilon)))
    beta = float(stats.binom.sf(guesses.correct - 1, guesses.made, right))
    if delta == 0 or guesses.correct == 0:
        return min(1.0, beta)
    below = stats.binom.pmf(np.arange(guesses.correct - 1, -1, -1), guesses.made, right)
    slope = float((np.cumsum(below) / np.arange(1, guesses.correct + 1)).max())
    return min(1.0, beta + 2 * guesses.canaries * delta * slope)


def contradicts_f_dp(guesses: Guesses, curve: TradeOff, *, alpha: float) -> NDArray[np.bool_]:
    """Whether no f-DP mechanism lets an attack guess so many coins with a probability above α.

    Let p_i be the probability of exactly i right guesses, r_c = Σ_{i≥c} (i/m)·p_i and h_c = Σ_{i≥c} ((r-i)/m)·p_i: the
    probabilities that a random canary is guessed right, or wrong, and at least c (others and it) are right. Turning
    that canary's coin over makes the one event the other, so f-DP demands r_{c+1} ≤ F(h_c). From P[V ≥ v] = α, all of
    it at v, which asks for least, the demands are followed down to c = 0, where r_0 + h_0 = r/m must hold.

    Cost:
        v evaluations of the curve.

    Reference:
        Mahloujifar, Melis, Chaudhuri 2025, the recursion on r and h.
    """
    m, made, v = guesses.canaries, guesses.made, guesses.correct
    right = np.asarray(alpha * v / m)
    wrong = np.asarray(alpha * (made - v) / m)
    for i in range(v - 1, -1, -1):
        demanded = np.maximum(wrong, curve.least(right))
        # Beyond 1 it is settled already; capped so that nothing overflows on the way down.
        right = np.minimum(right + i / (made - i) * (demanded - wrong), 2.0)
        wrong = demanded
    return np.asarray(right + wrong > made / m * (1 + 1e-12))


def guesses_of(scores: Scores, made: int | None) -> list[Guesses]:
    """Return guesses about the coins of canaries, as many as asked for, or all, half of them, ..., a sixteenth."""
    # Each is to be paid for. Coins that are plainly not fair are refused: every one-run bound would be too high.
    canaries, included = len(scores), int(scores.included_M.sum())
    if abs(included - canaries / 2) > _DEVIATIONS * (canaries / 4) ** 0.5:
        raise DataError(
            f"{included} of {canaries} canaries were included: the one-run methods need a fair coin for each "
            "(ghostclip.audit.flip_coins)."
        )
    if made is not None:
        return [make_guesses(scores, made=made)]
    counts = [n for n in (canaries // 2**power for power in range(5)) if n >= min(_FEWEST_GUESSES, canaries)]
    return [make_guesses(scores, made=count) for count in counts]


def epsilon_of_guesses(guesses: Guesses, *, method: str, delta: float, alpha: float) -> tuple[float, float | None]:
    """Return the ε up to which every claim is rejected at level ``alpha``, and μ for the Gaussian method."""

    def too_unlikely(epsilon_K: Array) -> NDArray[np.bool_]:
        p_values = [approximate_dp_p_value(guesses, epsilon=float(e), delta=delta) for e in epsilon_K]
        return np.asarray(p_values) <= alpha

    def beyond_the_curve(epsilon_K: Array) -> NDArray[np.bool_]:
        return contradicts_f_dp(guesses, ApproximateTradeOff(epsilon_K, delta), alpha=alpha)

    if method != "one-run-gaussian":
        rejected = too_unlikely if method == "one-run" else beyond_the_curve
        return _first_accepted(rejected, _HIGHEST_EPSILON), None
    mu = _first_accepted(lambda mu_K: contradicts_f_dp(guesses, GaussianTradeOff(mu_K), alpha=alpha), _HIGHEST_MU)
    return gaussian_epsilon(mu, delta=delta), mu


def _first_accepted(rejected: Callable[[Array], NDArray[np.bool_]], highest: float) -> float:
    """Return a value below which all of an ascending array are rejected, to 1e-5 of the highest; 0 if 0 is accepted."""
    low, high = 0.0, highest
    for _ in range(_ROUNDS):
        value_K = np.linspace(low, high, _GRID)
        rejected_K = rejected(value_K)
        if not rejected_K[0]:
            return 0.0 if low == 0 else low
        if rejected_K.all():
            return high
        first = int(np.argmin(rejected_K))
        low, high = float(value_K[first - 1]), float(value_K[first])
    return low
