"""Thresholds of an attack with confidence bounds that hold although the thresholds were chosen from the scores.

The rows must be independent: one row per *run* of the mechanism. Canaries of one run are not (see `one_run`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from ghostclip.audit.confidence import clopper_pearson_upper
from ghostclip.audit.scores import Scores

Array = NDArray[np.float64]

_SPLIT_SEED = 0
_RANK_STEP = 4


@dataclass(frozen=True)
class OperatingPoint:
    """The test "included if the score is high enough", with upper confidence bounds on both of its error rates.

    Attributes:
        threshold: Scores above it (or at it, for those taken from members) are called included.
        fpr: Share of what was left out that is called included.
        fnr: Share of what was included that is not.
        fpr_upper: Upper bound on the false positive rate.
        fnr_upper: Upper bound on the false negative rate.
    """

    threshold: float
    fpr: float
    fnr: float
    fpr_upper: float
    fnr_upper: float

    def epsilon(self, *, delta: float) -> float:
        """Return the ε below which these error rates are impossible: log((1 - fnr - δ)/fpr), or with both exchanged.

        Args:
            delta: δ.

        Returns:
            ε ≥ 0.

        Reference:
            Kairouz, Oh, Viswanath 2015, Theorem 2.1; Jagielski, Ullman, Oprea 2020, Section 4.
        """
        return float(_best_epsilon(np.asarray(self.fpr_upper), np.asarray(self.fnr_upper), delta))

    def mu(self) -> float:
        """Return the μ below which these error rates are impossible for a Gaussian mechanism: Φ⁻¹(1-fpr) - Φ⁻¹(fnr).

        Returns:
            μ ≥ 0.

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
    """Choose the threshold on one random half of the scores and bound the error rates on the other.

    Args:
        scores: Independent rows.
        alpha: Probability with which one of the two bounds may fail.
        gaussian: Whether the threshold is chosen for the best μ, instead of the best ε.
        delta: δ that ε is meant at.
        seed: Of the split; trying several and taking the best would void the confidence.

    Returns:
        The point, with bounds that hold together with probability 1 - α.
    """
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
    threshold = float(threshold_K[best])
    other, member = held_out.other, held_out.member
    fp = other.size - int(np.searchsorted(other, threshold, side="right"))
    return _point(
        threshold, (fp, other.size), (int(np.searchsorted(member, threshold, side="right")), member.size), alpha
    )


def union_points(scores: Scores, *, alpha: float) -> list[OperatingPoint]:
    """Return points whose bounds all hold together, from every score, with thresholds at ranks fixed in advance.

    The threshold is the j-th smallest score of one side. The probability of that side beyond it is at most
    Beta-distributed, which is Clopper-Pearson's bound again, exact although the threshold is random; and for the other
    side, which is independent of it, the threshold is as good as fixed. Every point takes an equal share of α.

    Args:
        scores: Independent rows.
        alpha: Probability with which any of the bounds may fail.

    Returns:
        Points at thresholds from the scores left out, then from those included.
    """
    other, member = scores.other, scores.member
    others, members = _ranks(other.size), _ranks(member.size)
    share = alpha / (len(others) + len(members))
    points = []
    for beyond in others:
        threshold = float(other[other.size - 1 - beyond])
        fn = int(np.searchsorted(member, threshold, side="right"))
        points.append(_point(threshold, (beyond, other.size), (fn, member.size), share))
    for below in members:
        threshold = float(member[below])
        fp = other.size - int(np.searchsorted(other, threshold, side="left"))
        points.append(_point(threshold, (fp, other.size), (below, member.size), share))
    return points


def _ranks(total: int) -> list[int]:
    """How many scores lie beyond the threshold: none, then 1, 4, 16, ... up to half of them."""
    powers = int(math.log(max(1, total // 2), _RANK_STEP) + 1e-9)
    return [0, *(_RANK_STEP**power for power in range(powers + 1))]


def _point(threshold: float, positives: tuple[int, int], negatives: tuple[int, int], alpha: float) -> OperatingPoint:
    (fp, others), (fn, members) = positives, negatives
    return OperatingPoint(
        threshold=threshold,
        fpr=fp / others,
        fnr=fn / members,
        fpr_upper=float(clopper_pearson_upper(fp, others, alpha / 2)),
        fnr_upper=float(clopper_pearson_upper(fn, members, alpha / 2)),
    )
