"""The default accountant: the smaller of what the tight and the Rényi accountant prove."""

from __future__ import annotations

import math

from ghostclip._validate import non_negative, probability
from ghostclip.accounting.accountant import Accountant
from ghostclip.accounting.pld import pld_delta, pld_epsilon
from ghostclip.accounting.rdp import rdp_delta, rdp_epsilon
from ghostclip.accounting.solve import Bounds

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

    def delta_bounds(self, epsilon: float) -> Bounds:
        history = self.whole_history()
        bounds = pld_delta(history, non_negative(epsilon, "epsilon"))
        upper = min(bounds.upper, rdp_delta(history, epsilon))
        return Bounds(min(bounds.lower, upper), upper)
