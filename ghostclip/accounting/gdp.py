"""Gaussian differential privacy by the central limit theorem: an estimate, kept for comparison."""

from __future__ import annotations

import math
from functools import partial

from ghostclip._validate import non_negative, probability
from ghostclip.accounting.accountant import Accountant
from ghostclip.accounting.composing import compose
from ghostclip.accounting.history import History
from ghostclip.accounting.solve import Bounds, Build, delta_bounds, epsilon_bounds
from ghostclip.errors import InvalidOptionError


class GaussianAccountant(Accountant):
    """Estimates ε as if the composed steps were one Gaussian mechanism with μ² = Σ q²(e^{1/σ²} - 1).

    Privacy:
        None: the central limit theorem says what happens for infinitely many infinitely small steps. The
        estimate can be many times below the true ε. It must be asked for with `estimate=True`, cannot be created by
        name, and `PrivacyEngine` does not take it.

    Reference:
        Bu, Dong, Long, Su 2020, Corollary 2.
    """

    def __init__(self, *, relation: str = "zero_out", estimate: bool = False) -> None:
        super().__init__(relation=relation)
        self.estimate = estimate

    @classmethod
    def mechanism(cls) -> str:
        return "gdp"

    @property
    def mu(self) -> float:
        """μ of the Gaussian mechanism that is taken for the history."""
        self._refuse_guarantees()
        return math.sqrt(
            sum(
                count * (rate**2 * math.expm1(min(sigma**-2, 700.0)) if rate < 1 else sigma**-2)
                for (sigma, rate), count in self.whole_history().steps
            )
        )

    def epsilon_bounds(self, delta: float) -> Bounds:
        """Return the estimate of ε, twice: neither is a bound."""
        delta, history = probability(delta, "delta"), self._one_step()
        found = epsilon_bounds(_compose(history), ("remove",), delta=delta, reach=9.0, width=0.02)
        return Bounds(found.upper, found.upper)

    def delta_bounds(self, epsilon: float) -> Bounds:
        """Return the estimate of δ, twice: neither is a bound."""
        epsilon, history = non_negative(epsilon, "epsilon"), self._one_step()
        found = delta_bounds(_compose(history), ("remove",), epsilon=epsilon, reach=9.0, width=0.02)
        return Bounds(found.upper, found.upper)

    def _one_step(self) -> History:
        mu = self.mu
        return History(self.relation, steps=(((1 / mu, 1.0), 1),) if mu > 0 else ())

    def _refuse_guarantees(self) -> None:
        if not self.estimate:
            raise InvalidOptionError(
                "GaussianAccountant: its ε is a central-limit estimate that can lie far below the true one, so it "
                "guarantees nothing. Use the default accountant, or GaussianAccountant(estimate=True) to compare."
            )
        if self.others or self.relation == "replace_one":
            raise InvalidOptionError(
                "GaussianAccountant: knows Poisson and full-batch steps, and zero_out or add_remove."
            )


def _compose(history: History) -> Build:
    return partial(compose, history)
