"""The privacy-loss-distribution accountant: tight, with a lower bound beside every upper one."""

from __future__ import annotations

import math
from functools import lru_cache, partial

from ghostclip._validate import non_negative, probability
from ghostclip.accounting.accountant import Accountant
from ghostclip.accounting.composing import compose, directions, first_width, reach, tolerance
from ghostclip.accounting.history import History
from ghostclip.accounting.solve import Bounds, delta_bounds, epsilon_bounds


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

    def delta_bounds(self, epsilon: float) -> Bounds:
        return pld_delta(self.whole_history(), non_negative(epsilon, "epsilon"))


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
    return epsilon_bounds(
        partial(compose, history),
        directions(history.relation),
        delta=delta,
        reach=reach(history, delta),
        width=first_width(history),
        tolerance=tolerance(history),
    )


@lru_cache(maxsize=256)
def pld_delta(history: History, epsilon: float) -> Bounds:
    """Return bounds on δ at ε."""
    if not history.count:
        return Bounds(0.0, 0.0)
    # What is cut off counts as δ, and δ is not known yet: far enough for any δ that matters.
    found = delta_bounds(
        partial(compose, history),
        directions(history.relation),
        epsilon=epsilon,
        reach=reach(history, 1e-24),
        width=first_width(history),
    )
    upper = math.nextafter(found.upper, 1.0) if 0 < found.upper < 1 else found.upper
    return Bounds(min(found.lower, history.participation), min(upper, history.participation))
