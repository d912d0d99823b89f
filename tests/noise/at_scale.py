"""Tails, shape and correlations of a way to draw normal values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy import special, stats

from ghostclip.noise.keyed import BLOCK

Draw = Callable[[int], torch.Tensor]
"""How many values -> that many, meant to be independent N(0, 1)."""

THRESHOLDS = (5.0, 5.5, 5.768, 5.8, 6.0, 6.2)
_AT_ONCE = 2**21
_BINS = 1024


def tails(draw: Draw, total: int) -> dict[str, Any]:
    """Count values beyond thresholds."""
    far: list[torch.Tensor] = []
    largest = 0.0
    for _ in range(total // _AT_ONCE):
        values = draw(_AT_ONCE).abs_()
        largest = max(largest, float(values.max()))
        far.append(values[values > THRESHOLDS[0]].double())
    found = torch.cat(far)
    rows = []
    for threshold in THRESHOLDS:
        count, expected = int((found > threshold).sum()), total * 2 * stats.norm.sf(threshold)
        below, above = stats.poisson.cdf(count, expected), stats.poisson.sf(count - 1, expected)
        rows.append(
            {"beyond": threshold, "count": count, "expected": expected, "p": min(1.0, 2 * float(min(below, above)))}
        )
    return {"draws": total // _AT_ONCE * _AT_ONCE, "largest": largest, "rows": rows}


def shape(draw: Draw, total: int) -> dict[str, float]:
    """Test the distribution in bins of equal probability, and its variance."""
    counts, squares = np.zeros(_BINS), 0.0
    for _ in range(total // _AT_ONCE):
        values = draw(_AT_ONCE).double().numpy()
        squares += float(np.square(values).sum())
        bins = np.minimum((special.ndtr(values) * _BINS).astype(np.int64), _BINS - 1)
        counts += np.bincount(bins, minlength=_BINS)
    drawn = counts.sum()
    chi2 = float(((counts - drawn / _BINS) ** 2).sum() / (drawn / _BINS))
    off = (squares / drawn - 1) / math.sqrt(2 / drawn)
    return {"draws": drawn, "chi2_p": float(stats.chi2.sf(chi2, _BINS - 1)), "variance_p": _two_sided(off)}


def correlations(start: Callable[[], Draw], total: int) -> dict[str, float]:
    """Test independence within a call, between calls, and between sources; of values and of their squares."""
    draw, other = start(), start()
    first, second, third = draw(total).double(), draw(total).double(), other(total).double()
    pairs = [(first[lag:], first[:-lag]) for lag in (1, 2, 3, BLOCK // 2, BLOCK - 1, BLOCK, BLOCK + 1)]
    pairs += [(first, second), (first, third), (second[BLOCK:], first[:-BLOCK])]
    found = []
    for a, b in pairs:
        n = a.numel()
        found.append(_two_sided(float((a * b).sum()) / math.sqrt(n)))
        found.append(_two_sided(float(((a.square() - 1) * (b.square() - 1)).sum()) / (2 * math.sqrt(n))))
    return {"draws": total, "tests": len(found), "p": min(1.0, min(found) * len(found))}


def _two_sided(z: float) -> float:
    return float(2 * stats.norm.sf(abs(z)))
