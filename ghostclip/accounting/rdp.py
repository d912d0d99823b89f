"""The Rényi accountant: adds divergences per order over all steps, then converts once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ghostclip._validate import non_negative, probability
from ghostclip.accounting.accountant import Accountant
from ghostclip.accounting.allocation import allocated
from ghostclip.accounting.composing import truncation_probability
from ghostclip.accounting.conversion import Array, delta_from_rdp, epsilon_from_rdp
from ghostclip.accounting.history import History
from ghostclip.accounting.pairs import Cells, DiscretePair
from ghostclip.accounting.pld import pld_delta, pld_epsilon
from ghostclip.accounting.rdp_curve import DEFAULT_ORDERS, guaranteed_curve, mixed_curves, rdp_curve, revealed_curve
from ghostclip.accounting.solve import Bounds
from ghostclip.errors import InvalidOptionError

MOST_SPLITS = 8
"""Distinct steps of least noise for which part of δ is tried."""


class RDPAccountant(Accountant):
    """Accountant for Poisson-subsampled Gaussian steps by Rényi divergence.

    Privacy:
        The ε it returns is an upper bound for every history, also when σ and q change between steps, as long as
        they do not depend on the private data. For "replace_one" it takes it as known who was sampled, which is much
        more than the other accountants need. It is not tight: a Rényi bound always lies above the best (ε, δ) curve,
        most of all for few steps with little noise and small δ.

    Reference:
        Mironov 2017; Mironov, Talwar, Zhang 2019; Canonne, Kamath, Steinke 2020.
    """

    @classmethod
    def mechanism(cls) -> str:
        return "rdp"

    def get_epsilon(self, delta: float, alphas: Sequence[float] | None = None) -> float:
        """Return an upper bound on the ε spent so far, from ``alphas`` or the default orders."""
        # Inf only for steps without noise.
        return self.get_privacy_spent(delta=delta, alphas=alphas)[0]

    def get_privacy_spent(self, *, delta: float, alphas: Sequence[float] | None = None) -> tuple[float, float]:
        """Return (ε, α), the order that proves it."""
        # Warn when α is the first or last order searched, as others may prove less.
        delta = probability(delta, "delta")
        history = self.whole_history()
        if not history.count:
            return 0.0, 0.0
        orders = np.asarray(DEFAULT_ORDERS if alphas is None else alphas, dtype=np.float64).ravel()
        if not orders.size or not np.all(np.isfinite(orders) & (orders > 1)):
            raise InvalidOptionError(f"alphas={alphas!r}: give finite orders greater than 1.")
        epsilon, best = rdp_epsilon(history, delta, tuple(orders))
        if best in {0, orders.size - 1} and 0 < epsilon < np.inf:
            warnings.warn(
                f"The best Rényi order is {orders[best]:g}, the end of the range searched; ε = {epsilon:.4g} is valid, "
                "but a wider range of alphas may prove a smaller one.",
                stacklevel=2,
            )
        return epsilon, float(orders[best])

    def epsilon_bounds(self, delta: float) -> Bounds:
        """Return this accountant's ε, and a lower bound that no accountant goes below."""
        upper = self.get_epsilon(delta)
        return Bounds(min(upper, pld_epsilon(self.whole_history(), delta).lower), upper)

    def delta_bounds(self, epsilon: float) -> Bounds:
        """Return this accountant's δ, and a lower bound that no accountant goes below."""
        history = self.whole_history()
        upper = rdp_delta(history, non_negative(epsilon, "epsilon"))
        return Bounds(min(upper, pld_delta(history, epsilon).lower), upper)


def rdp_epsilon(history: History, delta: float, orders: tuple[float, ...] = DEFAULT_ORDERS) -> tuple[float, int]:
    """Return ε of a history by Rényi divergence, and the index of the order that proves it."""
    # Part of δ may go to "the record takes part in none of these steps", which happens with probability 1 - p by coins
    # that nothing else depends on. By joint convexity of the hockey-stick divergence δ(ε) ≤ p + (1 - p)·δ'(ε), with δ'
    # of the other steps. Tried for the steps of least noise, in whose place nothing else would do if they have none.
    if history.participation <= delta:
        return 0.0, 0
    best = _all_steps_epsilon(history, delta, orders)
    for split in range(1, min(len(history.steps), MOST_SPLITS) + 1):
        missed = History(history.relation, history.steps[:split]).participation
        if missed >= delta:
            break
        rest = replace(history, steps=history.steps[split:])
        best = min(best, _all_steps_epsilon(rest, (delta - missed) * (1 - 1e-12), orders))
    return best


def _all_steps_epsilon(history: History, delta: float, orders: tuple[float, ...]) -> tuple[float, int]:
    """Return ε with all of δ for the divergence, and the index of the order that proves it."""
    left = delta - _failures(history)
    if left <= 0:
        return float("inf"), 0
    if not history.count:
        return 0.0, 0
    return epsilon_from_rdp(np.array(orders), rdp_of_history(history, orders), delta=left)


def rdp_delta(history: History, epsilon: float) -> float:
    """Return δ of a history by Rényi divergence."""
    if not history.count:
        return 0.0
    curve = rdp_of_history(history, DEFAULT_ORDERS)
    return min(
        history.participation, _failures(history) + delta_from_rdp(np.array(DEFAULT_ORDERS), curve, epsilon=epsilon)
    )


def _failures(history: History) -> float:
    """Return a bound of the probability that a release which is only (ε, δ)-private fails to be ε-private."""
    lost = sum(count * max(pair.infinite for pair in _allocated(*entry)) for entry, count in history.allocated)
    return float(lost + sum(delta * count for (_, delta), count in history.guarantees))


def rdp_of_history(history: History, orders: tuple[float, ...]) -> Array:
    """Return the sum of all releases' Rényi divergences at each order."""
    # Of (ε, δ)-private ones, that of the ε-private part.
    total = np.zeros(len(orders))
    for (sigma, rate), count in history.steps:
        total += count * _step_curve(sigma, rate, orders, history.relation)
    for (sigma, rate, records, largest), count in history.truncated:
        full = truncation_probability(int(records), rate, int(largest))
        distance = 1.0 if history.relation == "zero_out" else 2.0
        displaced = revealed_curve(sigma / distance, rate, np.array(orders))
        total += count * mixed_curves(
            _step_curve(sigma, rate, orders, history.relation), displaced, full, np.array(orders)
        )
    for (epsilon, _), count in history.guarantees:
        total += count * guaranteed_curve(epsilon, np.array(orders))
    for entry, count in history.allocated:
        total += count * np.maximum(*(_curve_of(pair, np.array(orders)) for pair in _allocated(*entry)))
    return total


def _allocated(sigma: float, steps: float) -> list[DiscretePair]:
    """Return a round of random allocation as atoms, in both directions."""
    cells = Cells(0.02, 0.02, 0.0, 9.0)
    return [allocated(sigma, int(steps), direction, cells, "upper") for direction in ("remove", "add")]


def _curve_of(pair: DiscretePair, orders: Array) -> Array:
    """Return log(E[e^{(α-1)L}; L finite]) / (α - 1) at each order α."""
    with np.errstate(divide="ignore"):
        exponent_AJ = (orders[:, None] - 1) * pair.loss_J + np.log(pair.mass_J)
    most_A = exponent_AJ.max(1)
    return np.asarray((most_A + np.log(np.exp(exponent_AJ - most_A[:, None]).sum(1))) / (orders - 1), dtype=np.float64)


@lru_cache(maxsize=2048)
def _step_curve(sigma: float, rate: float, orders: tuple[float, ...], relation: str) -> Array:
    """Return the curve of one step; for "replace_one" that of twice the distance without amplification of α."""
    if relation == "replace_one":
        return revealed_curve(sigma / 2, rate, np.array(orders))
    return rdp_curve(noise_multiplier=sigma, sample_rate=rate, orders=orders)
