"""Privacy loss of random allocation: each record in exactly one of t consecutive steps, drawn uniformly.

With Gaussian noise a round of t steps is dominated by the pair P = (1/t)·Σ_i N(e_i, σ²I), Q = N(0, σ²I), in both
orders. Its likelihood ratio L = (1/t)·Σ_i X_i is a mean of t independent lognormal numbers under Q, and both

    δ_remove(ε) = E_Q[(L - e^ε)₊],        δ_add(ε) = E_Q[(1 - e^ε·L)₊]

are expectations of convex functions of L. So whatever replaces a term by one that is larger in the convex order (mass
moved to both sides, the mean kept) can only raise them, also where rounds are composed: a product of ratios is linear
in each. Here every X is moved to the two nearest points of a geometric grid, and so is every sum of two such numbers:
sums of t terms by doubling, errors of second order in the grid's width, and never below the truth.

Reference:
    Feldman and Shenfeld (2025), Privacy amplification by random allocation, arXiv:2502.08202 (the dominating pair, and
    k of T steps as k rounds of T/k: Lemma 3.2); Chua et al. (2024), arXiv:2412.16802 (balls and bins).

Letters: N points of a grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from ghostclip.accounting.pairs import Array, Cells, DiscretePair, SampledGaussian, discretised

_SPREAD: Final = 6e-4
"""Share of L's variance that one rounding to the grid may add, times 6: some 1e-3 of ε in all."""
_LEAST_SIGMA: Final = 0.1
"""Ratios of steps with less noise leave the range of float64."""
_COARSEST, _FINEST = 0.125, 2.0**-14
_APART: Final = 40.0
"""The smaller of two numbers e^40 apart is no part of their sum in float64."""
_ROUNDED: Final = 2.0**-46
"""Relative error of a mass by rounding, for each of t terms."""
_LOST: Final = 1e-20
"""Mass that is cut off at either end in each step of the doubling, as revealed."""


@dataclass(frozen=True)
class _Ratio:
    """A non-negative random number with values on a geometric grid, 0 and infinity.

    Attributes:
        width: Distance h of the grid's points by their logarithm.
        first: The least point is e^(first·h).
        mass_N: Probabilities of the points under Q.
        zero: Probability of 0 under Q.
        infinite: What the mean lacks: mass under P of values that Q never has.
    """

    width: float
    first: int
    mass_N: Array
    zero: float
    infinite: float

    @property
    def log_N(self) -> Array:
        """Logarithms of the points."""
        return np.asarray(self.width * (self.first + np.arange(self.mass_N.size)), dtype=np.float64)

    def halved(self) -> _Ratio:
        """Return the same on a grid of half the width."""
        mass_N = np.zeros(2 * self.mass_N.size - 1)
        mass_N[::2] = self.mass_N
        return _Ratio(self.width / 2, 2 * self.first, mass_N, self.zero, self.infinite)

    def plus(self, other: _Ratio) -> _Ratio:
        """Return the sum with another, independent one on the same grid, moved to the grid.

        Cost:
            O(N·min(N, 40/h)) in as many vector operations as points can lie apart.
        """
        a_N, b_N, h = self.mass_N, other.mass_N, self.width
        first = min(self.first, other.first)
        last = max(self.first + a_N.size, other.first + b_N.size) + math.ceil(math.log(2) / h) + 1
        sum_N = np.zeros(last - first + 1)
        most = math.ceil(_APART / h)
        # Entry i of one meets entry j of the other at i - j = apart.
        offset = self.first - other.first
        for apart in range(max(-most, offset + 1 - b_N.size), min(most, offset + a_N.size - 1) + 1):
            shift = apart - offset
            low, high = max(0, shift), min(a_N.size, b_N.size + shift)
            if low >= high:
                continue
            both = a_N[low:high] * b_N[low - shift : high - shift]
            above = math.log1p(math.exp(-h * abs(apart))) / h
            cells = math.floor(above)
            up = min(1.0, math.expm1(h * (above - cells)) / math.expm1(h))
            start = self.first - first + low - min(0, apart) + cells
            sum_N[start : start + both.size] += (1 - up) * both
            sum_N[start + 1 : start + 1 + both.size] += up * both
        for one, two in ((self, other), (other, self)):
            # What lies so far below that it adds nothing.
            below_N = np.concatenate(([0.0], np.cumsum(two.mass_N)))
            place_N = np.clip(one.first + np.arange(one.mass_N.size) - most - two.first, 0, two.mass_N.size)
            start = one.first - first
            sum_N[start : start + one.mass_N.size] += one.mass_N * (below_N[place_N] + two.zero)
        infinite = self.infinite + other.infinite
        return _Ratio(h, first, sum_N, self.zero * other.zero, infinite).trimmed()

    def trimmed(self) -> _Ratio:
        """Return the same without points at both ends that have next to no mass, which goes to 0 and infinity."""
        value_N = self.mass_N * np.exp(np.minimum(self.log_N, 700.0))
        below_N = np.cumsum(self.mass_N)
        above_N = np.cumsum(value_N[::-1])[::-1]
        low = int(np.searchsorted(below_N, _LOST))
        high = int(above_N.size - np.searchsorted(above_N[::-1], _LOST * max(1.0, float(above_N[0]))))
        low = min(low, high - 1)
        # A value between 0 and the least point becomes one of the two; one above the last becomes 0 or infinite.
        share = float(value_N[:low] @ np.ones(low)) / math.exp(self.width * (self.first + low)) if low else 0.0
        mass_N = self.mass_N[low:high].copy()
        mass_N[0] += share
        zero = self.zero + (float(below_N[low - 1]) - share if low else 0.0) + float(self.mass_N[high:].sum())
        infinite = self.infinite + (float(above_N[high]) if high < above_N.size else 0.0)
        return _Ratio(self.width, self.first + low, mass_N, zero, infinite)


def _lognormal(sigma: float, width: float, reach: float) -> _Ratio:
    """Return e^l with l ~ N(-1/2σ², 1/σ²), moved to a grid: the likelihood ratio of one Gaussian step."""
    from scipy.special import ndtr

    middle, spread = 0.5 / sigma**2, 1 / sigma
    first, last = math.floor((-middle - reach * spread) / width), math.ceil((middle + reach * spread) / width)
    edge_N = width * np.arange(first, last + 1)

    def between(centre: float) -> Array:
        z_N = (edge_N - centre) / spread
        # Differences of the smaller tails.
        return np.where(z_N[1:] <= 0, ndtr(z_N[1:]) - ndtr(z_N[:-1]), ndtr(-z_N[:-1]) - ndtr(-z_N[1:]))

    cell_N, value_N = between(-middle), between(middle)
    # With q_i + q_{i+1} = Q and q_i·g_i + q_{i+1}·g_{i+1} = P of a cell.
    up_N = np.clip((value_N * np.exp(-edge_N[:-1]) - cell_N) / math.expm1(width), 0.0, cell_N)
    mass_N = np.zeros(edge_N.size)
    mass_N[1:] += up_N
    mass_N[:-1] += cell_N - up_N
    below = float(ndtr((edge_N[0] + middle) / spread))
    share = float(ndtr((edge_N[0] - middle) / spread)) / math.exp(edge_N[0])
    mass_N[0] += share
    above = float(ndtr((middle - edge_N[-1]) / spread))
    return _Ratio(width, first, mass_N, max(0.0, below - share) + float(ndtr(-(edge_N[-1] + middle) / spread)), above)


@lru_cache(maxsize=64)
def _mean_ratio(sigma: float, steps: int, reach: float) -> _Ratio:
    """Return Σ_i X_i over t steps: t times the likelihood ratio of a round."""
    variance = math.expm1(min(700.0, 1 / sigma**2))

    def width_for(terms: int) -> float:
        wanted = math.sqrt(_SPREAD / (1 + terms / variance))
        return 2.0 ** math.floor(math.log2(min(max(wanted, _FINEST), _COARSEST)))

    power, total, terms = _lognormal(sigma, width_for(1), reach), None, 1
    rest = steps
    while True:
        if rest & 1:
            if total is None:
                total = power
            else:
                while total.width > power.width:
                    total = total.halved()
                total = total.plus(power)
        rest >>= 1
        if not rest:
            assert total is not None, "steps is at least 1"
            return total
        while power.width > width_for(2 * terms):
            power = power.halved()
        power, terms = power.plus(power), 2 * terms


def allocated(sigma: float, steps: int, direction: str, cells: Cells, side: str) -> DiscretePair:
    """Return the privacy loss of a round of random allocation as atoms.

    Args:
        sigma: σ of each step.
        steps: t ≥ 1.
        direction: "remove" or "add".
        cells: Where tails are cut off.
        side: "upper" for a pair that dominates the round's; "lower" for one that is dominated: what the sum of the
            round's t releases shows, a Gaussian mechanism with σ·√t.

    Returns:
        The atoms.
    """
    if side == "lower" or steps == 1:
        return discretised(SampledGaussian(sigma * math.sqrt(steps), 1.0, direction), cells, side)
    if sigma < _LEAST_SIGMA:
        # Told which step each record is in, a round is one Gaussian step: no less private, and ratios stay in range.
        return discretised(SampledGaussian(sigma, 1.0, direction), cells, side)
    ratio = _mean_ratio(sigma, steps, cells.reach)
    loss_N = ratio.log_N - math.log(steps)
    # Each mass is a sum of products of up to t others, whose errors add up.
    mass_N = ratio.mass_N * (1 + steps * _ROUNDED)
    infinite = ratio.infinite / steps
    if direction == "remove":
        return DiscretePair(loss_N, mass_N * np.exp(loss_N), infinite)
    return DiscretePair(-loss_N[::-1], mass_N[::-1].copy(), ratio.zero)
