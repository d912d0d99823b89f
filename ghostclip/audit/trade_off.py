"""Trade-off curves: the least false negative rate that any test can have at a false positive rate.

A mechanism is f-DP if for every event S and neighbouring data P(S) ≤ F(P'(S)), where F(y) = 1 - f(y). What the audits
need is the inverse of F: how probable an event must be without the record, if it has probability r with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special

Array = NDArray[np.float64]

_LARGEST_EPSILON = 1e6
_SAFE_EXPONENT = 700.0


class TradeOff(Protocol):
    """A curve, or an array of curves of one family."""

    def least(self, probability: ArrayLike) -> Array:
        """Return F⁻¹(r): the least probability without the record of an event that has probability r with it."""


@dataclass(frozen=True)
class GaussianTradeOff:
    """μ-GDP: N(0, 1) against N(μ, 1), F(y) = Φ(Φ⁻¹(y) + μ).

    Reference:
        Dong, Roth, Su 2022, Definition 3.
    """

    mu: ArrayLike  # at least 0; an array stands for as many curves

    def least(self, probability: ArrayLike) -> Array:
        """Return F⁻¹(r) = Φ(Φ⁻¹(r) - μ)."""
        return np.asarray(special.ndtr(special.ndtri(np.clip(probability, 0.0, 1.0)) - np.asarray(self.mu)))


@dataclass(frozen=True)
class ApproximateTradeOff:
    """(ε, δ)-DP: F(y) = min(δ + e^ε·y, 1 - e^-ε·(1 - δ - y), 1).

    Reference:
        Wasserman, Zhou 2010; Dong, Roth, Su 2022, Proposition 4.
    """

    epsilon: ArrayLike  # at least 0; an array stands for as many curves
    delta: float

    def least(self, probability: ArrayLike) -> Array:
        """Return F⁻¹(r) = max(0, e^-ε·(r - δ), 1 - δ - e^ε·(1 - r))."""
        r, epsilon = np.clip(probability, 0.0, 1.0), np.minimum(self.epsilon, _SAFE_EXPONENT)
        steep = np.exp(-epsilon) * (r - self.delta)
        flat = 1 - self.delta - np.exp(epsilon) * (1 - r)
        return np.maximum(0.0, np.maximum(steep, flat))


def gaussian_delta(epsilon: float, *, mu: float) -> float:
    """Return the smallest δ of a μ-GDP mechanism: Φ(-ε/μ + μ/2) - e^ε·Φ(-ε/μ - μ/2).

    Reference:
        Balle, Wang 2018, Theorem 8; Dong, Roth, Su 2022, Corollary 1.
    """
    if mu <= 0:
        return 0.0
    first, second = -epsilon / mu + mu / 2, -epsilon / mu - mu / 2
    # In logarithms: e^ε alone would overflow where the product is harmless.
    return max(0.0, float(special.ndtr(first) - math.exp(min(0.0, epsilon + special.log_ndtr(second)))))


def gaussian_epsilon(mu: float, *, delta: float) -> float:
    """Return the smallest ε of a μ-GDP mechanism at δ."""
    if gaussian_delta(0.0, mu=mu) <= delta:
        return 0.0
    if math.isinf(mu):
        return math.inf
    highest = 1.0
    while gaussian_delta(highest, mu=mu) > delta:
        highest *= 2
        if highest > _LARGEST_EPSILON:
            return math.inf
    return float(optimize.brentq(lambda epsilon: gaussian_delta(epsilon, mu=mu) - delta, 0.0, highest, xtol=1e-12))
