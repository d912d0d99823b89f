"""The Rényi accountant: adds divergences per order over all steps, then converts once to (ε, δ).

Divergences are those of the Poisson-subsampled Gaussian mechanism. With z ~ N(0, σ²) and likelihood ratio
L(z) = 1 - q + q·exp((2z - 1) / 2σ²), the divergence of order α is log A(α) / (α - 1), A(α) = E[L^α]. E[L] = 1, so
A(α) - 1 is a sum (integer α) or an integral (fractional α) of terms that are never negative: nothing cancels, and
A(α) - 1 keeps its relative precision for any q and σ.

Letters: A orders, N points of the quadrature.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ghostclip._validate import probability
from ghostclip.accounting.accountant import Accountant, pld_epsilon, truncation_probability
from ghostclip.accounting.history import History
from ghostclip.accounting.pairs import Cells, DiscretePair, allocated
from ghostclip.accounting.solve import Bounds
from ghostclip.errors import InvalidOptionError

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


ROUNDING_MARGIN = 1e-9
"""Relative margin added to each divergence, well above its numerical error."""

_FINEST_SIGMA = 0.05
"""Below this the quadrature would need millions of points; fractional orders use closed bounds there."""

_COARSEST_SIGMA = 1e8
"""Above this the divergence of the whole batch, below 1e-16 α, bounds that of a subsample well enough."""


def _default_orders() -> tuple[float, ...]:
    fractional = [1 + step / 100 for step in range(1, 10)]
    fractional += [step / 10 for step in range(11, 110) if step % 10]
    integers = set(range(2, 65))
    integers |= {round(64 * 2 ** (step / 24)) for step in range(1, 97)}
    integers |= {round(1024 * 2 ** (step / 4)) for step in range(1, 17)}
    return tuple(sorted([*fractional, *map(float, integers)]))


DEFAULT_ORDERS: tuple[float, ...] = _default_orders()
"""Orders searched by default: fractional from 1.01 to 10.9, integers to 64, then geometric to 16384."""


def rdp_curve(*, noise_multiplier: float, sample_rate: float, orders: ArrayLike) -> Array:
    """Return the Rényi divergence of one step at each order, rounded upwards; inf where σ is 0 or float64 overflows.

    Privacy:
        A(α) bounds both directions (a record added and a record removed) of add-or-remove neighbours.

    Reference:
        Mironov, Talwar, Zhang 2019, "Rényi Differential Privacy of the Sampled Gaussian Mechanism", Theorems 4, 5.

    Cost:
        One pass over each whole order's α terms, and over (11 + 24σ) / h points for each fractional order.
    """
    orders = np.asarray(orders, dtype=np.float64)
    if sample_rate == 0 or math.isinf(noise_multiplier):
        return np.zeros_like(orders)
    if noise_multiplier == 0:
        return np.full_like(orders, np.inf)
    # Kept in this form because σ² underflows before (1 / σ)² overflows.
    inverse_variance = min(1 / noise_multiplier, 1e154) ** 2
    if inverse_variance >= 1e300:
        return np.full_like(orders, np.inf)
    if sample_rate == 1 or noise_multiplier > _COARSEST_SIGMA:
        return orders * (inverse_variance / 2) * (1 + ROUNDING_MARGIN)
    whole = orders == np.floor(orders)
    log_a = np.empty_like(orders)
    log_a[whole] = _log_a_whole(orders[whole], rate=sample_rate, inverse_variance=inverse_variance)
    fractional = orders[~whole]
    if fractional.size:
        if noise_multiplier >= _FINEST_SIGMA:
            log_a[~whole] = _log_a_quadrature(fractional, rate=sample_rate, sigma=noise_multiplier)
        else:
            log_a[~whole] = _log_a_bound(fractional, rate=sample_rate, inverse_variance=inverse_variance)
    return log_a / (orders - 1) * (1 + ROUNDING_MARGIN)


def revealed_curve(sigma: float, rate: float, orders: Array) -> Array:
    """Return log(1 - q + q·exp(α(α - 1) / 2σ²)) / (α - 1): the divergence where the use of a mechanism is revealed."""
    # An upper bound of the subsampled mechanism's divergence.
    if rate == 0 or math.isinf(sigma):
        return np.zeros_like(orders)
    inverse_variance = min(1 / max(sigma, 1e-300), 1e154) ** 2
    gain = orders * (orders - 1) * (min(inverse_variance, 1e290) / 2)
    if sigma == 0:
        return np.full_like(orders, np.inf)
    return np.logaddexp(0.0, math.log(rate) + _log_expm1(gain)) / (orders - 1) * (1 + ROUNDING_MARGIN)


def mixed_curves(first: Array, second: Array, share: float, orders: Array) -> Array:
    """Return log((1 - s)·e^{(α - 1)·first} + s·e^{(α - 1)·second}) / (α - 1)."""
    # A public coin chooses between mechanisms.
    if share == 0:
        return first
    log_first = math.log1p(-share) if share < 1 else -math.inf
    log_sum = np.logaddexp(log_first + (orders - 1) * first, math.log(share) + (orders - 1) * second)
    return np.maximum(log_sum, 0.0) / (orders - 1) * (1 + ROUNDING_MARGIN)


def _log_a_whole(orders: Array, *, rate: float, inverse_variance: float) -> Array:
    """Return log A(α) for whole α: A - 1 = Σ_{i=2}^α C(α,i) q^i (1-q)^(α-i) (exp((i² - i) / 2σ²) - 1)."""
    if not orders.size:
        return np.empty_like(orders)
    top = int(orders.max())
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1.0, top + 1)))))
    count = np.arange(2, top + 1)
    log_gain = _log_expm1((count * (count - 1.0)) * (inverse_variance / 2))
    log_term = count * math.log(rate) - log_factorial[2:] + log_gain
    log_miss = math.log1p(-rate)
    result = np.empty_like(orders)
    for index, order in enumerate(orders.astype(int)):
        part = log_term[: order - 1] - log_factorial[order - 2 :: -1] + (order - count[: order - 1]) * log_miss
        result[index] = np.logaddexp(0.0, log_factorial[order] + _log_sum_exp(part))
    return result


def _log_a_quadrature(orders: Array, *, rate: float, sigma: float) -> Array:
    """Return log A(α) for any α > 1 by the trapezoidal rule on E[L^α - 1 - α(L - 1)].

    The integrand is analytic for |Im z| < πσ², so the rule converges exponentially in σ²/h; h = min(σ, σ²) / 2
    leaves a relative error below e^-38. All mass lies within 12 σ of [0, α].
    """
    step = min(sigma, sigma**2) / 2
    z_N = np.arange(-12 * sigma, orders.max() + 12 * sigma + step, step)
    exponent_N = (z_N - 0.5) / sigma**2
    log_density_N = -0.5 * (z_N / sigma) ** 2 + math.log(step / sigma) - 0.5 * math.log(2 * math.pi)
    result = np.empty_like(orders)
    for index, order in enumerate(orders):
        log_f_N = _log_excess(exponent_N, rate=rate, order=float(order))
        result[index] = np.logaddexp(0.0, _log_sum_exp(log_f_N + log_density_N))
    return result


def _log_excess(exponent_N: Array, *, rate: float, order: float) -> Array:
    """Return log(L^α - 1 - α(L - 1)), L = 1 + q(e^x - 1), without cancellation, shape [N]."""
    capped_N = np.minimum(exponent_N, 700.0)
    u_N = rate * np.expm1(capped_N)
    log_ratio_N = np.where(exponent_N > 40, np.logaddexp(math.log1p(-rate), math.log(rate) + exponent_N), np.log1p(u_N))
    power_N = order * log_ratio_N
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        direct_N = np.log(np.expm1(np.minimum(power_N, 50.0)) - order * u_N)
        log_line_N = np.where(exponent_N > 40, math.log(order * rate) + exponent_N, np.log(order * u_N))
        large_N = power_N + np.log1p(-np.exp(np.logaddexp(0.0, log_line_N) - power_N))
        series_N = 1 + u_N * (order - 2) / 3 * (1 + u_N * (order - 3) / 4 * (1 + u_N * (order - 4) / 5))
        small_N = math.log(order * (order - 1) / 2) + 2 * np.log(np.abs(u_N)) + np.log(series_N)
    near_one_N = np.abs(u_N) * max(order, 1.0) < 1e-3
    return np.where(near_one_N, small_N, np.where(power_N > 50.0, large_N, direct_N))


def _log_a_bound(orders: Array, *, rate: float, inverse_variance: float) -> Array:
    """Return upper bounds of log A(α) for fractional α: the lower of two that hold at every σ.

    log A is convex with log A(1) = 0, so the chord between whole orders lies above it; and by joint convexity
    A(α) ≤ 1 - q + q·exp(α(α - 1) / 2σ²). Both are tight when σ is small.
    """
    below = np.floor(orders)
    needed = np.unique(np.concatenate((below, below + 1)))
    needed = needed[needed > 1]
    values = np.concatenate(([0.0], _log_a_whole(needed, rate=rate, inverse_variance=inverse_variance)))
    chord = np.interp(orders, np.concatenate(([1.0], needed)), values)
    mixture = np.logaddexp(0.0, math.log(rate) + _log_expm1(orders * (orders - 1) * (inverse_variance / 2)))
    return np.minimum(chord, mixture)


def _log_expm1(value: Array) -> Array:
    return np.where(value > 1, value + np.log(-np.expm1(-value)), np.log(np.expm1(np.minimum(value, 1.0))))


def _log_sum_exp(value: Array) -> float:
    peak = float(value.max())
    if math.isinf(peak):
        return peak
    return peak + math.log(float(np.exp(value - peak).sum()))


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


def _failures(history: History) -> float:
    """Return a bound of the probability that a round of random allocation has an infinite loss."""
    return float(sum(count * max(pair.infinite for pair in _allocated(*entry)) for entry, count in history.allocated))


def rdp_of_history(history: History, orders: tuple[float, ...]) -> Array:
    """Return the sum of all releases' Rényi divergences at each order."""
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
