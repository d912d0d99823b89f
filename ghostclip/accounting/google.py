"""Google's dp-accounting as an accountant: optional, imported when used."""

from __future__ import annotations

import math
from typing import Any

from ghostclip._validate import non_negative, probability
from ghostclip.accounting.accountant import Accountant
from ghostclip.accounting.pld import pld_delta, pld_epsilon
from ghostclip.accounting.solve import Bounds
from ghostclip.errors import InvalidOptionError


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
        known = history.participation <= delta
        upper = 0.0 if known else _number(self._composed().get_epsilon(delta), worst=math.inf)
        return Bounds(min(upper, pld_epsilon(history, delta).lower), upper)

    def delta_bounds(self, epsilon: float) -> Bounds:
        """Return dp-accounting's δ, and our lower bound."""
        epsilon = non_negative(epsilon, "epsilon")
        upper = _number(self._composed().get_delta(epsilon), worst=1.0) if self.whole_history().count else 0.0
        return Bounds(min(upper, pld_delta(self.whole_history(), epsilon).lower), upper)

    def _composed(self) -> Any:
        try:
            import dp_accounting
            from dp_accounting.pld import PLDAccountant
        except ImportError as error:
            raise InvalidOptionError(
                "accountant='dp_accounting' needs the package dp-accounting: pip install dp-accounting."
            ) from error
        history = self.whole_history()
        if history.truncated or history.allocated or history.guarantees or history.relation == "replace_one":
            raise InvalidOptionError(
                "accountant='dp_accounting': here it knows Poisson and full-batch steps, and zero_out or add_remove. "
                "Use the default accountant."
            )
        accountant = PLDAccountant()
        for (sigma, rate), count in history.steps:
            event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
            accountant.compose(event, count)
        return accountant


def _number(value: float, *, worst: float) -> float:
    return max(0.0, float(value)) if not math.isnan(value) else worst
