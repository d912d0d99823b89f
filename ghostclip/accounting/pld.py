"""The privacy-loss-distribution accountant: tight, with a lower bound beside every upper one.

A history's composed privacy loss is made for one direction and one side at a time.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial

import numpy as np

from ghostclip._validate import probability
from ghostclip.accounting.accountant import Accountant
from ghostclip.accounting.contour import Composition
from ghostclip.accounting.history import History
from ghostclip.accounting.pairs import Cells, DiscretePair, SampledGaussian, allocated, discretised
from ghostclip.accounting.solve import Bounds, epsilon_bounds

MOST_GROUPS = 1000
"""More distinct steps than this are counted as the next noisier (lower) or less noisy (upper) of so many."""

MANY = 32
"""Distinct steps above which cells are wider, and bounds of ε may lie further apart."""

NARROW, WIDE = 0.02, 0.06
"""First width of cells in σ for few, and for many, distinct steps."""

NEAR, FAR, FARTHEST = 1e-4, 8e-4, 4e-3
"""Relative distance in ε that bounds may have, for few, many, and more than `MOST_GROUPS` distinct steps."""

Group = tuple[tuple[float, float], int]


def directions(relation: str) -> tuple[str, ...]:
    """Return the directions of a neighbouring relation; the guarantee is that of the worst."""
    return ("replace",) if relation == "replace_one" else ("remove", "add")


def reach(history: History, delta: float) -> float:
    """Return where tails are cut off, in σ: the loss is below a millionth of δ over all steps."""
    from scipy.special import ndtri

    return math.ceil(2 * max(9.0, -float(ndtri(max(1e-6 * delta / max(1, history.count), 1e-300))))) / 2


def compose(history: History, direction: str, side: str, cells: Cells) -> Composition:
    """Return the total privacy loss in a direction; side "upper" dominates it, "lower" is dominated."""
    pairs: list[DiscretePair] = []
    counts: list[int] = []
    gaussian = 0.0
    for (sigma, rate), count in _few(history.steps, side):
        if rate == 1 and sigma > 0:
            gaussian += count * (_sensitivity(direction) / sigma) ** 2
        else:
            pairs.append(discretised(SampledGaussian(sigma, rate, direction), cells, side))
            counts.append(count)
    for (sigma, rate, records, largest), count in history.truncated:
        step = SampledGaussian(sigma, rate, direction)
        pairs.append(_truncated(step, (int(records), int(largest)), history.relation, cells, side))
        counts.append(count)
    for (sigma, steps), count in history.allocated:
        pairs.append(allocated(sigma, int(steps), direction, cells, side))
        counts.append(count)
    return Composition(pairs, counts, gaussian)


def _sensitivity(direction: str) -> float:
    return 2.0 if direction == "replace" else 1.0


def _few(groups: tuple[Group, ...], side: str) -> list[Group]:
    """Return at most about `MOST_GROUPS` groups: σ and q moved to the ends of intervals of equal ratio."""
    # More noise or a smaller rate is a post-processing of less noise and a larger rate.
    if len(groups) <= MOST_GROUPS:
        return list(groups)
    several_rates = len({rate for (_, rate), _ in groups}) > 32
    for log_ratio in (2.0**power for power in range(-14, 8)):
        merged: dict[tuple[float, float], int] = {}
        for (sigma, rate), count in groups:
            moved = min(1.0, _moved(rate, log_ratio, up=side == "upper")) if several_rates else rate
            key = (_moved(sigma, log_ratio, up=side == "lower"), moved)
            merged[key] = merged.get(key, 0) + count
        if len(merged) <= MOST_GROUPS:
            break
    return sorted(merged.items())


def _moved(value: float, log_ratio: float, *, up: bool) -> float:
    if value in {0.0, 1.0}:
        return value
    exponent = math.log(value) / log_ratio
    moved = math.exp((math.ceil(exponent) if up else math.floor(exponent)) * log_ratio)
    return max(value, moved) if up else min(value, moved)


def truncation_probability(records: int, rate: float, largest: int) -> float:
    """Return an upper bound of P(Binomial(N, q) ≥ largest): the other records fill the batch."""
    from scipy.special import betainc

    if largest > records:
        return 0.0
    return min(1.0, float(betainc(largest, records - largest + 1, rate)) * (1 + 1e-9))


def _truncated(step: SampledGaussian, batch: tuple[int, int], relation: str, cells: Cells, side: str) -> DiscretePair:
    """Return the pair of a step on a Poisson sample of which at most so many are kept.

    Privacy:
        Let the other records' sample A be known. If A leaves room, the step is the untruncated one. Else the record,
        sampled with probability q at most, displaces one of A: then the two sums are, given all coins, s - y + x and
        s - y for "zero_out" (at distance C), s - y + x and s for "add_remove", s - y + x and s - y + x' for
        "replace_one" (at distance 2C). Revealing the coins only adds: with probability P(A full)·q a Gaussian
        mechanism without amplification, with P(A full)·(1 - q) nothing. No factor 1 + e^ε as from total variation.
        The lower bound is that of records that contribute nothing besides one, which is kept with probability
        at least q·P(A leaves room).
    """
    full = truncation_probability(batch[0], step.rate, batch[1])
    if side == "lower":
        rate = max(step.rate * (1 - full), 1e-300)
        return discretised(SampledGaussian(step.sigma, rate, step.direction), cells, side)
    if full == 0:
        return discretised(step, cells, side)
    distance = 1.0 if relation == "zero_out" else 2.0
    revealed = discretised(SampledGaussian(step.sigma / distance, 1.0, "remove"), cells, side)
    nothing = DiscretePair(np.zeros(2), np.full(2, 0.5), 0.0)
    return discretised(step, cells, side).mixed_with(nothing.mixed_with(revealed, step.rate), full)


class PLDAccountant(Accountant):
    """Accountant by the distribution of the privacy loss, in both directions of the neighbouring relation.

    Privacy:
        ε and δ are upper bounds for every history whose parameters do not depend on the private data. Discretisation,
        truncation, smoothing and rounding are bounded and included (see `pairs` and `contour`). The lower bound
        holds for the worst data and gradients, so that no accountant can report less; for ε in [0.1, 50] the two
        usually meet within 0.01 %.
    """

    @classmethod
    def mechanism(cls) -> str:
        return "pld"

    def epsilon_bounds(self, delta: float) -> Bounds:
        return pld_epsilon(self.whole_history(), probability(delta, "delta"))


class PRVAccountant(PLDAccountant):
    """The name under which Opacus users look for a tight accountant; the same as `PLDAccountant`."""

    @classmethod
    def mechanism(cls) -> str:
        return "prv"


@lru_cache(maxsize=256)
def pld_epsilon(history: History, delta: float) -> Bounds:
    """Return bounds on ε at δ."""
    if history.participation <= delta:
        return Bounds(0.0, 0.0)
    many = len(history.steps) + len(history.truncated) + len(history.allocated) > MANY
    return epsilon_bounds(
        partial(compose, history),
        directions(history.relation),
        delta=delta,
        reach=reach(history, delta),
        width=WIDE if many else NARROW,
        tolerance=FARTHEST if len(history.steps) > MOST_GROUPS else FAR if many else NEAR,
    )
