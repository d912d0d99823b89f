"""Thresholds of an attack with confidence bounds that hold although the thresholds were chosen from the scores.

The rows must be independent: one row per *run* of the mechanism. Canaries of one run are not (see `one_run`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from ghostclip.audit.scores import Scores

Array = NDArray[np.float64]

_SPLIT_SEED = 0
_RANK_STEP = 4


def clopper_pearson_upper(count: ArrayLike, total: int, alpha: float) -> Array:
    """Return the one-sided upper bound: the p at which so small a count has probability α.

    It is the 1 - α quantile of Beta(k + 1, n - k), and 1 for k = n. It never fails with a probability above α, whatever
    the true p and however few trials.

    Reference:
        Clopper, Pearson 1934.
    """
    count = np.asarray(count, dtype=np.float64)
    inside = np.minimum(count, total - 1.0)
    bound = special.betaincinv(inside + 1, total - inside, 1 - alpha)
    return np.where(count >= total, 1.0, bound)


@dataclass(frozen=True)
class OperatingPoint:
    """The test "included if the score is high enough", with upper confidence bounds on both of its error rates."""

    threshold: float  # scores above it (or at it, for those taken from members) are called included
    fpr: float  # share of what was left out that is called included
    fnr: float  # share of what was included that is not
    fpr_upper: float
    fnr_upper: float

    def epsilon(self, *, delta: float) -> float:
        """Return the ε below which these error rates are impossible: log((1 - fnr - δ)/fpr), or with both exchanged.

        Reference:
            Kairouz, Oh, Viswanath 2015, Theorem 2.1; Jagielski, Ullman, Oprea 2020, Section 4.
        """
        return float(_best_epsilon(np.asarray(self.fpr_upper), np.asarray(self.fnr_upper), delta))

    def mu(self) -> float:
        """Return the μ below which these error rates are impossible for a Gaussian mechanism: Φ⁻¹(1-fpr) - Φ⁻¹(fnr).

        Reference:
            Dong, Roth, Su 2022, Equation (6); Nasr et al. 2023, Section 4.2.
        """
        return float(_mu(np.asarray(self.fpr_upper), np.asarray(self.fnr_upper)))


def _best_epsilon(fpr: Array, fnr: Array, delta: float) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        by_positives = np.log(np.maximum(1 - fnr - delta, 0.0) / fpr)
        by_negatives = np.log(np.maximum(1 - fpr - delta, 0.0) / fnr)
    return np.maximum(0.0, np.maximum(by_positives, by_negatives))


def _mu(fpr: Array, fnr: Array) -> Array:
    return np.maximum(0.0, -special.ndtri(fpr) - special.ndtri(fnr))


def split_point(
    scores: Scores, *, alpha: float, gaussian: bool, delta: float, seed: int = _SPLIT_SEED
) -> OperatingPoint:
    """Choose the threshold on one random half of the scores and bound the error rates on the other."""
    # Both bounds hold at once with probability 1 - α. `gaussian`: the threshold is chosen for the best μ, not the best
    # ε. Trying several seeds and taking the best would void the confidence.
    chosen_on, held_out = scores.halves(seed=seed)
    other, member = chosen_on.other, chosen_on.member
    threshold_K = np.unique(np.r_[other, member])
    fp_K = other.size - np.searchsorted(other, threshold_K, side="right")
    fn_K = np.searchsorted(member, threshold_K, side="right")
    fpr_K = clopper_pearson_upper(fp_K, other.size, alpha / 2)
    fnr_K = clopper_pearson_upper(fn_K, member.size, alpha / 2)
    value_K = _mu(fpr_K, fnr_K) if gaussian else _best_epsilon(fpr_K, fnr_K, delta)
    # Where nothing is proved yet, the threshold that separates best.
    best = np.lexsort((fp_K / other.size + fn_K / member.size, -value_K))[0]
    return _point(float(threshold_K[best]), held_out, alpha)


def union_points(scores: Scores, *, alpha: float) -> list[OperatingPoint]:
    """Return points whose bounds all hold at once, from every score, with thresholds at ranks fixed in advance.

    The threshold is the j-th smallest score of one side. The probability of that side beyond it is at most
    Beta-distributed, which is Clopper-Pearson's bound again, exact although the threshold is random; and for the other
    side, which is independent of it, the threshold is as good as fixed. Every point takes an equal share of α.
    """
    other, member = scores.other, scores.member
    others, members = _ranks(other.size), _ranks(member.size)
    share = alpha / (len(others) + len(members))
    points = [_point(float(other[-1 - beyond]), scores, share, beyond=beyond) for beyond in others]
    return points + [_point(float(member[below]), scores, share, below=below) for below in members]


def _ranks(total: int) -> list[int]:
    """Return the number of scores beyond the threshold: none, then 1, 4, 16, ... up to half of them."""
    powers = int(math.log(max(1, total // 2), _RANK_STEP) + 1e-9)
    return [0, *(_RANK_STEP**power for power in range(powers + 1))]


def _point(
    threshold: float, scores: Scores, alpha: float, *, beyond: int | None = None, below: int | None = None
) -> OperatingPoint:
    """Return the test "above the threshold", or, for one that is a score by rank, "that score or better"."""
    other, member = scores.other, scores.member
    fp = other.size - int(np.searchsorted(other, threshold, side="right" if below is None else "left"))
    fp = fp if beyond is None else beyond
    fn = int(np.searchsorted(member, threshold, side="right")) if below is None else below
    return OperatingPoint(
        threshold=threshold,
        fpr=fp / other.size,
        fnr=fn / member.size,
        fpr_upper=float(clopper_pearson_upper(fp, other.size, alpha / 2)),
        fnr_upper=float(clopper_pearson_upper(fn, member.size, alpha / 2)),
    )
