"""From a Rényi curve to (ε, δ)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def epsilon_from_rdp(orders: Array, rdp: Array, *, delta: float) -> tuple[float, int]:
    """Return the smallest ε that the Rényi curve proves at δ, and the index of the order that proves it.

    Reference:
        Canonne, Kamath, Steinke 2020, Proposition 12; Balle et al. 2020, Theorem 21; Bretagnolle, Huber 1979.
    """
    # Each order α with divergence r proves ε = r + log(1 - 1/α) - log(δα) / (α - 1). Where moreover √(1 - e^-r) ≤ δ,
    # total variation is at most δ and ε = 0 holds (r bounds the KL divergence).
    log_delta = np.log(delta)
    epsilon = rdp + np.log1p(-1 / orders) - (log_delta + np.log(orders)) / (orders - 1)
    with np.errstate(divide="ignore"):
        epsilon[np.log(-np.expm1(-rdp)) <= 2 * log_delta] = 0.0
    epsilon = np.maximum(epsilon, 0.0)
    best = int(np.argmin(epsilon))
    return float(epsilon[best]), best


def delta_from_rdp(orders: Array, rdp: Array, *, epsilon: float) -> float:
    """Return the smallest δ that the curve proves at ε.

    Reference:
        As `epsilon_from_rdp`.
    """
    log_delta = (orders - 1) * (rdp - epsilon + np.log1p(-1 / orders)) - np.log(orders)
    variation = np.sqrt(-np.expm1(-rdp.min()))
    return float(min(1.0, variation, np.exp(min(0.0, float(log_delta.min())))))
