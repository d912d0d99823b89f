"""The whole privacy profile of a history: (ε, δ) curves and the trade-off function of f-DP."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ghostclip._validate import probability
from ghostclip.accounting.accountant import Accountant
from ghostclip.accounting.pairs import Array
from ghostclip.accounting.solve import Bounds

USUAL_DELTAS = tuple(10.0**-power for power in range(1, 13))


def privacy_curve(accountant: Accountant, deltas: Sequence[float] = USUAL_DELTAS) -> list[tuple[float, Bounds]]:
    """Return (δ, bounds of ε) at several δ, in their order."""
    return [(probability(delta, "delta"), accountant.epsilon_bounds(delta)) for delta in deltas]


def trade_off(accountant: Accountant, false_positive_rate: ArrayLike, *, points: int = 24) -> Array:
    """Return a lower bound of the false negative rate that any test of membership has at each false positive rate.

    f(α) ≥ max over (ε, δ) of max(0, 1 - δ - e^ε·α, e^-ε·(1 - δ - α)), here over a finite number of (ε, δ), all of them
    guarantees: the result is one.

    Reference:
        Wasserman, Zhou 2010; Dong, Roth, Su 2022, Proposition 2.12.
    """
    alpha = np.asarray(false_positive_rate, dtype=np.float64)
    best = np.zeros_like(alpha)
    largest = accountant.get_epsilon(1e-6)
    if math.isinf(largest):
        return best
    for epsilon in np.linspace(0.0, max(largest, 1e-9), points):
        delta = accountant.get_delta(float(epsilon))
        up = 1 - delta - np.exp(min(epsilon, 700.0)) * alpha
        best = np.maximum(best, np.maximum(up, np.exp(-epsilon) * (1 - delta - alpha)))
    return np.minimum(best, 1 - alpha)
