"""Privacy losses of one step as finitely many atoms: a pair that dominates the step, and one that it dominates.

A step's (P, Q) is cut into cells of the observed value z. Within a cell the loss L = log P/Q runs from l to l'.

- Pessimistic ("upper"): every z of the cell becomes l or l', at random, so that both P and Q keep their mass. The
  original is a post-processing of the result (reveal z given the coin), hence the result has no smaller δ(ε).
- Optimistic ("lower"): the cell becomes one atom. That is a post-processing, hence no larger δ(ε).

Both errors are of second order in the cell's width, so that two thousand atoms do where rounding losses up needs
millions; atoms need no common grid, because nothing below ever convolves on one (see `contour`).

Letters: J atoms or cells, G nodes of the quadrature within a cell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

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


def guaranteed(epsilon: float, delta: float) -> DiscretePair:
    """Return the pair that dominates every (ε, δ)-private mechanism, and is one.

    Reference:
        Kairouz, Oh, Viswanath 2015.
    """
    likely = 1 / (1 + math.exp(-epsilon))
    unlikely = math.exp(-epsilon) / (1 + math.exp(-epsilon))
    return DiscretePair(np.array([-epsilon, epsilon]), np.array([(1 - delta) * unlikely, (1 - delta) * likely]), delta)
