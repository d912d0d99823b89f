"""The picture of an audit: how the scores of both sides lie, and its error rates beside what a claim allows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ghostclip._files import BLACK, BLUE, GREEN, ORANGE, picture, require_picture
from ghostclip.audit.methods import ApproximateTradeOff, Finding, GaussianTradeOff, TradeOff
from ghostclip.audit.scores import Scores

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_BINS = 60


def plot_audit(scores: Scores, finding: Finding, path: str | Path) -> None:
    """Draw histograms of the scores and the ROC curve, and save them as .png, .pdf or .svg."""
    # Another ending, a missing matplotlib and a folder that cannot be written are refused before anything is drawn.
    require_picture(Path(path), "path")
    with picture(Path(path), size=(9.0, 4.6)) as figure:
        left, right = figure.subplots(1, 2)
        _histograms(left, scores, finding)
        _roc(right, scores, finding)
        figure.suptitle(f"Audit: ε ≥ {finding.epsilon:.2f} at δ = {finding.delta:g} ({finding.method})", fontsize=11)


def _histograms(axes: Axes, scores: Scores, finding: Finding) -> None:
    finite = scores.score_M[np.isfinite(scores.score_M)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    count = int(min(_MOST_BINS, max(10, np.sqrt(len(scores)))))
    bins = np.linspace(low, high if high > low else low + 1.0, count + 1).tolist()
    sides = (
        (scores.other, BLUE, f"{finding.left_out} left out"),
        (scores.member, ORANGE, f"{finding.included} included"),
    )
    for values, colour, label in sides:
        inside = values[np.isfinite(values)]
        share = np.full(inside.size, 1 / values.size)
        axes.hist(inside, bins=bins, weights=share, color=colour, alpha=0.5, label=label)
    if finding.threshold is not None and np.isfinite(finding.threshold):
        axes.axvline(finding.threshold, color=GREEN, linewidth=1.4, label="threshold")
    axes.set(xlabel="score (higher: taken for included)", ylabel="share of each side's canaries or runs")
    axes.margins(y=0.25)
    axes.legend(loc="upper left", edgecolor="none")
    axes.grid(alpha=0.25)


def _roc(axes: Axes, scores: Scores, finding: Finding) -> None:
    other, member = scores.other, scores.member
    thresholds = np.unique(scores.score_M)
    fpr = 1 - np.searchsorted(other, thresholds, side="right") / other.size
    tpr = 1 - np.searchsorted(member, thresholds, side="right") / member.size
    axes.step(np.r_[1.0, fpr], np.r_[1.0, tpr], where="post", color=ORANGE, linewidth=2.0, label="this attack")
    rate = np.linspace(0.0, 1.0, 400)
    axes.plot(rate, rate, color="#999999", linewidth=0.8, label="guessing")
    if finding.mu is None:
        _bound(axes, ApproximateTradeOff(finding.epsilon, finding.delta), GREEN, f"ε = {finding.epsilon:.2f}, found")
    else:
        _bound(axes, GaussianTradeOff(finding.mu), GREEN, f"μ = {finding.mu:.2f}, found (Gaussian)")
    claimed = finding.claimed_epsilon
    if claimed is not None:
        _bound(axes, ApproximateTradeOff(claimed, finding.delta), BLACK, f"ε = {claimed:.2f}, claimed", dashes=":")
    if finding.fpr is not None and finding.fnr is not None:
        axes.plot([finding.fpr], [1 - finding.fnr], "D", color=GREEN, markersize=6, label="where it was bounded")
    axes.set(xlabel="false positive rate (left out, taken for included)", xlim=(0.0, 1.0))
    axes.set(ylabel="true positive rate (included, found)", ylim=(0.0, 1.03))
    axes.legend(fontsize=9, loc="lower right")
    axes.grid(alpha=0.25)


def _bound(axes: Axes, curve: TradeOff, colour: str, label: str, *, dashes: str = "--") -> None:
    """Draw the highest ROC curve that a trade-off curve allows: `least` gives the false positive rate."""
    tpr = np.linspace(0.0, 1.0, 2001)
    axes.plot(curve.least(tpr), tpr, color=colour, linewidth=1.8, linestyle=dashes, label=f"highest with {label}")
