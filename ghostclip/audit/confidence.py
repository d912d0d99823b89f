"""Exact confidence bounds on a probability that was observed as a count."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[np.float64]


def clopper_pearson_upper(count: ArrayLike, total: int, alpha: float) -> Array:
    """Return the one-sided upper bound: the p at which so small a count has probability α.

    It is the 1 - α quantile of Beta(k + 1, n - k), and 1 for k = n. It never fails with a probability above α, whatever
    the true p and however few trials.

    Args:
        count: k, successes among the trials, any shape.
        total: n, trials.
        alpha: Probability with which the bound may fail, in (0, 1).

    Returns:
        Upper bounds, of the shape of `count`.

    Reference:
        Clopper, Pearson 1934.
    """
    count = np.asarray(count, dtype=np.float64)
    inside = np.minimum(count, total - 1.0)
    bound = special.betaincinv(inside + 1, total - inside, 1 - alpha)
    return np.where(count >= total, 1.0, bound)
