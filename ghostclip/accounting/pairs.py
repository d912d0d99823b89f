"""Privacy losses of one step as finitely many atoms: a pair that dominates the step, and one that it dominates.

A step's (P, Q) is cut into cells of the observed value z. Within a cell the loss L = log P/Q runs from l to l'.

- Pessimistic ("upper"): every z of the cell becomes l or l', at random, so that both P and Q keep their mass. The
  original is a post-processing of the result (reveal z given the coin), hence the result has no smaller δ(ε).
- Optimistic ("lower"): the cell becomes one atom. That is a post-processing, hence no larger δ(ε).

Both errors are of second order in the cell's width, so that two thousand atoms do where rounding losses up needs
millions; atoms need no common grid, because nothing below ever convolves on one (see `contour`).

Random allocation: each record is in exactly one of t consecutive steps, drawn uniformly. With Gaussian noise a round of
t steps is dominated by the pair P = (1/t)·Σ_i N(e_i, σ²I), Q = N(0, σ²I), in both orders. Its likelihood ratio
L = (1/t)·Σ_i X_i is a mean of t independent lognormal numbers under Q, and both

    δ_remove(ε) = E_Q[(L - e^ε)₊],        δ_add(ε) = E_Q[(1 - e^ε·L)₊]

are expectations of convex functions of L. So whatever replaces a term by one that is larger in the convex order (mass
moved to both sides, the mean kept) can only raise them, also where rounds are composed: a product of ratios is linear
in each. Here every X is moved to the two nearest points of a geometric grid, and so is every sum of two such numbers:
sums of t terms by doubling, errors of second order in the grid's width, and never below the truth.

Reference:
    Feldman and Shenfeld (2025), Privacy amplification by random allocation, arXiv:2502.08202 (the dominating pair, and
    k of T steps as k rounds of T/k: Lemma 3.2); Chua et al. (2024), arXiv:2412.16802 (balls and bins).

Letters: J atoms or cells, G nodes of the quadrature within a cell, N points of a grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FINEST_SIGMA = 0.01
"""Steps with less noise are taken to reveal everything (upper), or to have this much noise (lower)."""

WIDEST_LOSS_CELL = 0.5
"""Cells are narrower than this in L, and than 0.1 σ in z: then 6 Gauss-Legendre nodes leave less than 1e-14."""

GROWTH = 0.02
"""Share of its distance from the ε that matters by which a cell may be wide."""

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(6)


@dataclass(frozen=True)
class DiscretePair:
    """The distribution under P of a privacy loss with finitely many values."""

    loss_J: Array  # values of log P/Q
    mass_J: Array  # probability of each under P
    infinite: float = 0.0  # probability under P of what Q cannot produce

    def mixed_with(self, other: DiscretePair, share: float) -> DiscretePair:
        """Return the pair of a step that a public coin chooses: the other one with probability ``share``."""
        return DiscretePair(
            np.concatenate((self.loss_J, other.loss_J)),
            np.concatenate(((1 - share) * self.mass_J, share * other.mass_J)),
            (1 - share) * self.infinite + share * other.infinite,
        )


@dataclass(frozen=True)
class Cells:
    """Resolution of the cells that a step is cut into."""

    width: float  # largest cell in z, in units of σ, at most 0.1
    loss_width: float  # largest cell in L at `centre`; at a distance d of it cells may be d / 50 wider
    centre: float  # the ε that matters, where δ(ε) has its kink as a function of a loss
    reach: float  # tails beyond so many σ are cut off: counted as revealed (upper), or as of smaller loss (lower)

    def count(self, loss: Array) -> Array:
        """Return how many cells lie below each loss, up to a constant, as far as losses decide."""
        far = (loss - self.centre) / self.loss_width
        near_first = np.sign(far) * np.log1p(np.abs(far) * GROWTH) / GROWTH
        return near_first + loss / WIDEST_LOSS_CELL


def sampled_gaussian_loss(z: Array, *, sigma: float, rate: float) -> Array:
    """Return log((1 - q) + q·exp((2z - 1) / 2σ²)), with its relative precision where it is close to 0."""
    exponent = (z - 0.5) / sigma**2
    if rate == 1:
        return exponent
    inside = np.minimum(exponent, 700.0)
    change = rate * np.expm1(inside)
    # 1 + change cancels where rate is close to 1 and the exponent far below 0; the two terms themselves do not.
    near = np.where(
        change > -0.5, np.log1p(np.maximum(change, -0.5)), np.log((1 - rate) + rate * np.exp(np.minimum(inside, 0.0)))
    )
    far = math.log(rate) + exponent + np.log1p((1 - rate) / rate * np.exp(-np.maximum(exponent, 700.0)))
    return np.where(exponent < 700, near, far)


@dataclass(frozen=True)
class SampledGaussian:
    """A Gaussian step on a Poisson sample, in one direction of the neighbouring relation.

    Orientation is such that the loss ascends with z:

    - "remove": P = (1-q)·N(0, σ²) + q·N(1, σ²), Q = N(0, σ²);
    - "add": P = N(0, σ²), Q = (1-q)·N(0, σ²) + q·N(-1, σ²);
    - "replace": P = (1-q)·N(0, σ²) + q·N(1, σ²), Q = (1-q)·N(0, σ²) + q·N(-1, σ²).

    Privacy:
        "remove" and "add" dominate the step for a record removed or added, and also for a record replaced by one
        without contribution: given which other records were sampled, the sum is s or s + x with ‖x‖ ≤ C on one
        side and s on the other in both cases. "replace" dominates it for any record replaced by any other: with
        advanced joint convexity H(P‖Q) = q·H'(N(x) ‖ (1-β)·N(0) + β·N(x')), and a mixture of Gaussians
        at distances ‖x‖ ≤ 1 and ‖x - x'‖ ≤ 2 from the other's centre is dominated by the one on a
        line at distances 1 and 2.

    Reference:
        Zhu, Dong, Wang 2022, Theorem 11; Balle, Barthe, Gaboardi 2018, Theorem 2; Choquette-Choo, Ganesh, Steinke,
        Thakurta 2024, Lemma 4.5 (from vectors to scalars).
    """

    sigma: float
    rate: float
    direction: str

    def loss(self, z: Array) -> Array:
        """Return L at each z."""
        if self.direction == "remove":
            return sampled_gaussian_loss(z, sigma=self.sigma, rate=self.rate)
        against = sampled_gaussian_loss(-z, sigma=self.sigma, rate=self.rate)
        if self.direction == "add":
            return -against
        return sampled_gaussian_loss(z, sigma=self.sigma, rate=self.rate) - against

    @property
    def centres(self) -> tuple[tuple[float, float], ...]:
        """(weight, mean) of the Gaussians that P is made of."""
        if self.direction == "add":
            return ((1.0, 0.0),)
        return ((1 - self.rate, 0.0), (self.rate, 1.0)) if self.rate < 1 else ((1.0, 1.0),)

    def density(self, z: Array) -> Array:
        """Return the density of P at each z."""
        scale = 1 / (self.sigma * math.sqrt(2 * math.pi))
        total = np.zeros_like(z)
        for weight, centre in self.centres:
            total += (weight * scale) * np.exp(-0.5 * ((z - centre) / self.sigma) ** 2)
        return total

    def tails(self, low: float, high: float) -> tuple[float, float]:
        """Return the mass of P below ``low`` and above ``high``."""
        from scipy.special import ndtr

        below = sum(weight * float(ndtr((low - centre) / self.sigma)) for weight, centre in self.centres)
        above = sum(weight * float(ndtr((centre - high) / self.sigma)) for weight, centre in self.centres)
        return below, above


@lru_cache(maxsize=1024)
def discretised(step: SampledGaussian, cells: Cells, side: str) -> DiscretePair:
    """Return a step's privacy loss as atoms; side "upper" dominates the step, "lower" is dominated by it.

    Cost:
        O(range of z / width + range of L / loss_width).
    """
    if step.sigma < FINEST_SIGMA:
        if side == "upper" or step.sigma == 0:
            return _all_revealed(step)
        step = SampledGaussian(FINEST_SIGMA, step.rate, step.direction)
    edge_J = _edges(step, cells)
    loss_J = step.loss(edge_J)
    node_JG = edge_J[:-1, None] + np.diff(edge_J)[:, None] * ((_NODES + 1) / 2)
    rise_JG = step.loss(node_JG) - loss_J[:-1, None]
    mass_JG = step.density(node_JG) * (np.diff(edge_J)[:, None] * (_WEIGHTS / 2))
    build = _spread if side == "upper" else _pooled
    return build(step, (float(edge_J[0]), float(edge_J[-1])), (loss_J, rise_JG, mass_JG))


def _all_revealed(step: SampledGaussian) -> DiscretePair:
    """Return the pair of a step without noise, which reveals who was sampled."""
    if step.direction == "add" and step.rate < 1:
        return DiscretePair(np.array([-math.log1p(-step.rate)]), np.ones(1))
    unseen = math.log1p(-step.rate) if step.direction == "remove" and step.rate < 1 else 0.0
    return DiscretePair(np.array([unseen]), np.array([1 - step.rate]), step.rate)


def _edges(step: SampledGaussian, cells: Cells) -> Array:
    """Return cell borders: equally spaced in z / (width·σ) + `Cells.count`."""
    low = min(centre for _, centre in step.centres) - cells.reach * step.sigma
    high = max(centre for _, centre in step.centres) + cells.reach * step.sigma
    base = np.linspace(low, high, 8193)
    loss = step.loss(base)
    count = (base - low) / (cells.width * step.sigma) + cells.count(loss) - cells.count(loss[:1])
    wanted = np.linspace(0.0, count[-1], max(2, math.ceil(count[-1])) + 1)
    edge = np.interp(wanted, count, base)
    edge[0], edge[-1] = low, high
    return edge


def _spread(step: SampledGaussian, ends: tuple[float, float], cells: tuple[Array, Array, Array]) -> DiscretePair:
    """Return the dominating pair: each cell's mass goes to its two ends, P and Q kept.

    The share of z that goes up is (1 - e^-(L - l)) / (1 - e^-(l' - l)).
    """
    loss_J, rise_JG, mass_JG = cells
    width_J = np.diff(loss_J)[:, None]
    flat_J = width_J < 1e-280
    up_JG = np.where(flat_J, 1.0, np.expm1(-rise_JG) / np.expm1(-np.where(flat_J, 1.0, width_J)))
    up_JG = np.clip(up_JG, 0.0, 1.0)
    below, above = step.tails(*ends)
    mass_J = np.zeros(loss_J.size)
    mass_J[1:] += (mass_JG * up_JG).sum(1)
    mass_J[:-1] += (mass_JG * (1 - up_JG)).sum(1)
    mass_J[0] += below
    return DiscretePair(loss_J, mass_J, above)


def _pooled(step: SampledGaussian, ends: tuple[float, float], cells: tuple[Array, Array, Array]) -> DiscretePair:
    """Return the dominated pair: one atom per cell, nothing of the lower tail, the upper one at its least loss."""
    loss_J, rise_JG, mass_JG = cells
    mass_J = mass_JG.sum(1)
    mean_J = (mass_JG * np.expm1(-rise_JG)).sum(1) / np.where(mass_J > 0, mass_J, 1.0)
    above = step.tails(*ends)[1]
    return DiscretePair(np.append(loss_J[:-1] - np.log1p(mean_J), loss_J[-1]), np.append(mass_J, above))


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
        # Entry i of one meets entry j of the other at i - j = lag.
        offset = self.first - other.first
        for lag in range(max(-most, offset + 1 - b_N.size), min(most, offset + a_N.size - 1) + 1):
            shift = lag - offset
            low, high = max(0, shift), min(a_N.size, b_N.size + shift)
            if low >= high:
                continue
            both = a_N[low:high] * b_N[low - shift : high - shift]
            above = math.log1p(math.exp(-h * abs(lag))) / h
            cells = math.floor(above)
            up = min(1.0, math.expm1(h * (above - cells)) / math.expm1(h))
            start = self.first - first + low - min(0, lag) + cells
            sum_N[start : start + both.size] += (1 - up) * both
            sum_N[start + 1 : start + 1 + both.size] += up * both
        for one, two in ((self, other), (other, self)):
            # What lies so far below that it adds nothing.
            below_N = np.concatenate(([0.0], np.cumsum(two.mass_N)))
            index_N = np.clip(one.first + np.arange(one.mass_N.size) - most - two.first, 0, two.mass_N.size)
            start = one.first - first
            sum_N[start : start + one.mass_N.size] += one.mass_N * (below_N[index_N] + two.zero)
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
