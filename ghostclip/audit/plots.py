"""The picture of an audit: how the scores of both sides lie, and its error rates beside what a claim allows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ghostclip._files import atomic_path, require_picture
from ghostclip.audit.finding import Finding
from ghostclip.audit.scores import Scores
from ghostclip.audit.trade_off import ApproximateTradeOff, GaussianTradeOff, TradeOff

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MEMBER, _OTHER, _CLAIM, _FOUND = "#d94801", "#08519c", "#555555", "#238b45"
_MOST_BINS = 60


def plot_audit(scores: Scores, finding: Finding, path: str | Path) -> None:
    """Draw histograms of the scores and the ROC curve, and save them.

    Args:
        scores: What was audited.
        finding: What was found.
        path: The picture, .png, .pdf or .svg; replaced if it exists.

    An ending that is none of these, a missing matplotlib (``InvalidOptionError``) and a folder that cannot be written
    (``OutputError``) are refused before anything is drawn.
    """
    require_picture(Path(path), "path")
    # The object interface: pyplot would choose a window system and keep global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _histograms(left, scores, finding)
    _roc(right, scores, finding)
    figure.suptitle(f"Audit: ε ≥ {finding.epsilon:.2f} at δ = {finding.delta:g} ({finding.method})", fontsize=11)
    with atomic_path(Path(path)) as temporary:
        figure.savefig(temporary)


def _histograms(axes: Axes, scores: Scores, finding: Finding) -> None:
    finite = scores.score_M[np.isfinite(scores.score_M)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    count = int(min(_MOST_BINS, max(10, np.sqrt(len(scores)))))
    bins = np.linspace(low, high if high > low else low + 1.0, count + 1).tolist()
    for values, colour, label in (
        (scores.other, _OTHER, f"left out ({finding.left_out})"),
        (scores.member, _MEMBER, f"included ({finding.included})"),
    ):
        inside = values[np.isfinite(values)]
        axes.hist(
            inside, bins=bins, weights=np.full(inside.size, 1 / values.size), color=colour, alpha=0.5, label=label
        )
    if finding.threshold is not None and np.isfinite(finding.threshold):
        axes.axvline(finding.threshold, color=_FOUND, linewidth=1.4, label="threshold")
    axes.set_xlabel("score (higher: taken for included)")
    axes.set_ylabel("share")
    axes.legend(fontsize=8, frameon=False)
    axes.grid(alpha=0.25)


def _roc(axes: Axes, scores: Scores, finding: Finding) -> None:
    other, member = scores.other, scores.member
    thresholds = np.unique(scores.score_M)
    fpr = 1 - np.searchsorted(other, thresholds, side="right") / other.size
    tpr = 1 - np.searchsorted(member, thresholds, side="right") / member.size
    axes.step(np.r_[1.0, fpr], np.r_[1.0, tpr], where="post", color=_MEMBER, linewidth=1.6, label="this attack")
    rate = np.linspace(0.0, 1.0, 400)
    axes.plot(rate, rate, color=_CLAIM, linewidth=0.8, linestyle=":", label="a guess")
    if finding.mu is None:
        _bound(axes, ApproximateTradeOff(finding.epsilon, finding.delta), _FOUND, f"ε = {finding.epsilon:.2f}, found")
    else:
        _bound(axes, GaussianTradeOff(finding.mu), _FOUND, f"μ = {finding.mu:.2f}, found (Gaussian)")
    claimed = finding.claimed_epsilon
    if claimed is not None:
        _bound(axes, ApproximateTradeOff(claimed, finding.delta), _CLAIM, f"ε = {claimed:.2f}, claimed")
    if finding.fpr is not None and finding.fnr is not None:
        axes.plot([finding.fpr], [1 - finding.fnr], "D", color=_FOUND, markersize=6, label="where it was bounded")
    axes.set_xlim(0.0, 1.0)
    axes.set_ylim(0.0, 1.02)
    axes.set_xlabel("false positive rate")
    axes.set_ylabel("true positive rate")
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.grid(alpha=0.25)


def _bound(axes: Axes, curve: TradeOff, colour: str, label: str) -> None:
    """Draw the highest ROC curve that a trade-off curve allows: `least` gives the false positive rate."""
    tpr = np.linspace(0.0, 1.0, 2001)
    axes.plot(curve.least(tpr), tpr, color=colour, linewidth=1.2, linestyle="--", label=f"allowed by {label}")
