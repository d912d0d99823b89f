"""The Rényi accountant: adds divergences per order over all steps, then converts once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from ghostclip._validate import probability
from ghostclip.accounting.accountant import Accountant
from ghostclip.accounting.conversion import Array, epsilon_from_rdp
from ghostclip.accounting.rdp_curve import DEFAULT_ORDERS, rdp_curve
from ghostclip.errors import InvalidOptionError


class RDPAccountant(Accountant):
    """Accountant for Poisson-subsampled Gaussian steps by Rényi divergence.

    Privacy:
        The ε it returns is an upper bound for every ledger, also when σ and q change between steps, as long as
        they do not depend on the private data. It is not tight: a Rényi bound always lies above the best (ε, δ) curve,
        most of all for few steps with little noise and small δ.

    Reference:
        Mironov 2017; Mironov, Talwar, Zhang 2019; Canonne, Kamath, Steinke 2020.
    """

    def __init__(self) -> None:
        """Start with an empty ledger."""
        super().__init__()
        self._curves: dict[tuple[float, float], Array] = {}

    @classmethod
    def mechanism(cls) -> str:
        """Return "rdp"."""
        return "rdp"

    def get_epsilon(self, delta: float, alphas: Sequence[float] | None = None) -> float:
        """Return an upper bound on the ε spent so far.

        Args:
            delta: Probability that the ε bound may fail, in (0, 1).
            alphas: Orders to search; the default range by default.

        Returns:
            ε ≥ 0; inf only if some step had no noise.

        Raises:
            InvalidOptionError: If δ or an order is out of range.
        """
        return self.get_privacy_spent(delta=delta, alphas=alphas)[0]

    def get_privacy_spent(self, *, delta: float, alphas: Sequence[float] | None = None) -> tuple[float, float]:
        """Return ε and the order that proves it.

        Warns when the best order is the first or last one searched, because another range may prove a smaller ε.

        Args:
            delta: Probability that the ε bound may fail, in (0, 1).
            alphas: Orders to search; the default range by default.

        Returns:
            (ε, α); (0, 0) for an empty ledger.

        Raises:
            InvalidOptionError: If δ or an order is out of range.
        """
        delta = probability(delta, "delta")
        if not self.history:
            return 0.0, 0.0
        orders = np.asarray(DEFAULT_ORDERS if alphas is None else alphas, dtype=np.float64).ravel()
        if not orders.size or not np.all(np.isfinite(orders) & (orders > 1)):
            raise InvalidOptionError(f"alphas={alphas!r}: give finite orders greater than 1.")
        epsilon, best = epsilon_from_rdp(orders, self._total(orders, cached=alphas is None), delta=delta)
        if best in {0, orders.size - 1} and 0 < epsilon < np.inf:
            warnings.warn(
                f"The best Rényi order is {orders[best]:g}, the end of the range searched; ε = {epsilon:.4g} is valid, "
                "but a wider range of alphas may prove a smaller one.",
                stacklevel=2,
            )
        return epsilon, float(orders[best])

    def _total(self, orders: Array, *, cached: bool) -> Array:
        steps_of: dict[tuple[float, float], int] = {}
        for sigma, rate, steps in self.history:
            steps_of[sigma, rate] = steps_of.get((sigma, rate), 0) + steps
        total = np.zeros_like(orders)
        for (sigma, rate), steps in steps_of.items():
            if steps:
                total += steps * self._curve(sigma, rate, orders, cached=cached)
        return total

    def _curve(self, sigma: float, rate: float, orders: Array, *, cached: bool) -> Array:
        if not cached:
            return rdp_curve(noise_multiplier=sigma, sample_rate=rate, orders=orders)
        key = (sigma, rate)
        if key not in self._curves:
            self._curves[key] = rdp_curve(noise_multiplier=sigma, sample_rate=rate, orders=orders)
        return self._curves[key]
