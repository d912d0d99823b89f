"""Accountants by name, and three of them: the default one, Gaussian DP, and Google's dp-accounting."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from ghostclip._validate import did_you_mean, probability
from ghostclip.accounting.accountant import Accountant, IAccountant, PLDAccountant, PRVAccountant, compose, pld_epsilon
from ghostclip.accounting.history import History
from ghostclip.accounting.rdp import RDPAccountant, rdp_epsilon
from ghostclip.accounting.solve import Bounds, epsilon_bounds
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
        if not self.estimate:
            raise InvalidOptionError(
                "GaussianAccountant: its ε is a central-limit estimate that can lie far below the true one, so it "
                "guarantees nothing. Use the default accountant, or GaussianAccountant(estimate=True) to compare."
            )
        if self.others or self.relation == "replace_one":
            raise InvalidOptionError(
                "GaussianAccountant: knows Poisson and full-batch steps, and zero_out or add_remove."
            )
        return math.sqrt(
            sum(
                count * (rate**2 * math.expm1(min(sigma**-2, 700.0)) if rate < 1 else sigma**-2)
                for (sigma, rate), count in self.whole_history().steps
            )
        )

    def epsilon_bounds(self, delta: float) -> Bounds:
        """Return the estimate of ε, twice: neither is a bound."""
        delta, mu = probability(delta, "delta"), self.mu
        history = History(self.relation, steps=(((1 / mu, 1.0), 1),) if mu > 0 else ())
        bounds = epsilon_bounds(partial(compose, history), ("remove",), delta=delta, reach=9.0, width=0.02)
        return Bounds(bounds.upper, bounds.upper)


class DPAccountingAccountant(Accountant):
    """Accountant by dp-accounting's privacy loss distributions, with our own lower bound.

    Privacy:
        An upper bound as far as that library's own numerics go; slower and looser than the default.
    """

    @classmethod
    def mechanism(cls) -> str:
        return "dp_accounting"

    def epsilon_bounds(self, delta: float) -> Bounds:
        """Return dp-accounting's ε, and our lower bound."""
        delta = probability(delta, "delta")
        history = self.whole_history()
        epsilon = 0.0 if history.participation <= delta else float(self._composed().get_epsilon(delta))
        upper = math.inf if math.isnan(epsilon) else max(0.0, epsilon)
        return Bounds(min(upper, pld_epsilon(history, delta).lower), upper)

    def _composed(self) -> Any:
        try:
            import dp_accounting
            from dp_accounting.pld import PLDAccountant
        except ImportError as error:
            raise InvalidOptionError(
                "accountant='dp_accounting' needs the package dp-accounting: pip install dp-accounting."
            ) from error
        history = self.whole_history()
        if history.truncated or history.allocated or history.relation == "replace_one":
            raise InvalidOptionError(
                "accountant='dp_accounting': here it knows Poisson and full-batch steps, and zero_out or add_remove. "
                "Use the default accountant."
            )
        accountant = PLDAccountant()
        for (sigma, rate), count in history.steps:
            event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
            accountant.compose(event, count)
        return accountant


MATTERS = 1e-3
"""The Rényi bound lies above the true ε, so it is asked only where the tight one may be further off than this share."""

FEW = 64
"""Each distinct step's Rényi curve takes some ten milliseconds: with more of them it is asked only in need."""


class BestAccountant(Accountant):
    """Accountant by privacy loss distribution, with the Rényi bound where that proves less.

    Privacy:
        As of `PLDAccountant` and `RDPAccountant`: both are upper bounds, so the smaller one is.
    """

    @classmethod
    def mechanism(cls) -> str:
        return "best"

    def epsilon_bounds(self, delta: float) -> Bounds:
        history = self.whole_history()
        bounds = pld_epsilon(history, probability(delta, "delta"))
        enough = MATTERS if len(history.steps) <= FEW else 0.5
        if math.isfinite(bounds.upper) and bounds.upper - bounds.lower <= enough * bounds.upper:
            return bounds
        upper = min(bounds.upper, rdp_epsilon(history, delta)[0])
        return Bounds(min(bounds.lower, upper), upper)


DEFAULT_ACCOUNTANT = BestAccountant.mechanism()

_ACCOUNTANTS: dict[str, type[IAccountant]] = {
    accountant.mechanism(): accountant
    for accountant in (BestAccountant, RDPAccountant, PLDAccountant, PRVAccountant, DPAccountingAccountant)
}
_NOT_OFFERED = {
    GaussianAccountant.mechanism(): "it is a central-limit estimate that can lie far below the true ε, so it is "
    "refused as a guarantee; to compare, use ghostclip.accounting.GaussianAccountant(estimate=True)"
}


def register_accountant(mechanism: str, accountant: type[IAccountant], *, force: bool = False) -> None:
    """Register an accountant class under a name, for `create_accountant` and `PrivacyEngine(accountant=...)`.

    Args:
        mechanism: The name.
        accountant: The class, with Opacus's four methods (`IAccountant`).
        force: Whether to replace an accountant of that name.

    Raises:
        InvalidOptionError: If the name is taken and `force` is False.
    """
    # The class is built with the option `relation` only, and without any if it is no `Accountant`.
    if mechanism in _ACCOUNTANTS and not force:
        raise InvalidOptionError(f"accountant {mechanism!r} is registered already; pass force=True to replace it.")
    _ACCOUNTANTS[mechanism] = accountant


def create_accountant(mechanism: str = DEFAULT_ACCOUNTANT, *, relation: str = "zero_out") -> IAccountant:
    """Return a new accountant with an empty history.

    Args:
        mechanism: Its name: "best", "pld", "prv", "rdp", "dp_accounting", or one that was registered.
        relation: Which data sets count as neighbours: "zero_out", "add_remove" or "replace_one".

    Returns:
        The accountant.

    Raises:
        InvalidOptionError: If there is no accountant of that name.
    """
    # A registered class that is no `Accountant` is not told the relation.
    if mechanism in _ACCOUNTANTS:
        kind = _ACCOUNTANTS[mechanism]
        return kind(relation=relation) if issubclass(kind, Accountant) else kind()
    known = ", ".join(map(repr, sorted(_ACCOUNTANTS, key=lambda name: (name != DEFAULT_ACCOUNTANT, name))))
    meant = "." if mechanism in _NOT_OFFERED else did_you_mean(mechanism, _ACCOUNTANTS, otherwise=".")
    reason = f" ({_NOT_OFFERED[mechanism]})" if mechanism in _NOT_OFFERED else ""
    raise InvalidOptionError(f"accountant={mechanism!r} is not available{reason}; choose from: {known}{meant}")


def bounding_accountant(mechanism: str = DEFAULT_ACCOUNTANT, *, relation: str = "zero_out") -> Accountant:
    """Return a new accountant that bounds ε and δ of any history; refuse one that only knows ε of recorded steps."""
    made = create_accountant(mechanism, relation=relation)
    if not isinstance(made, Accountant):
        raise InvalidOptionError(
            f"accountant={mechanism!r} ({type(made).__name__}): says ε of the steps it was told of and has no "
            "epsilon_bounds. Derive it from ghostclip.accounting.Accountant, or set engine.accountant to one."
        )
    return made
