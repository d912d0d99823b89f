"""Rényi divergence of Poisson-sampled Gaussian steps, and the ε it proves; the same bounds as `RDPAccountant`'s.

Shape letters: A orders.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ghostclip._validate import positive_int, probability
from ghostclip.accounting import epsilon_from_rdp, rdp_curve
from ghostclip.accounting.history import checked_noise_multiplier, checked_sample_rate
from ghostclip.errors import InvalidOptionError


def compute_rdp(
    *, q: float, noise_multiplier: float, steps: int, orders: Sequence[float] | float
) -> list[float] | float:
    """Return the Rényi divergence of a number of equal steps.

    Args:
        q: Probability with which each record joins a batch.
        noise_multiplier: σ.
        steps: Number of steps.
        orders: α > 1, one or several.

    Returns:
        The divergence at each order; a number for a number.

    Raises:
        InvalidOptionError: If a value is out of range.
    """
    rdp_A = positive_int(steps, "steps") * rdp_curve(
        noise_multiplier=checked_noise_multiplier(noise_multiplier),
        sample_rate=checked_sample_rate(q),
        orders=_checked(orders),
    )
    return [float(value) for value in rdp_A] if isinstance(orders, Sequence) else float(rdp_A[0])


def get_privacy_spent(
    *, orders: Sequence[float] | float, rdp: Sequence[float] | float, delta: float
) -> tuple[float, float]:
    """Return the smallest ε that a Rényi curve proves, and the order that proves it.

    Args:
        orders: α > 1, one or several.
        rdp: The divergence at each of them.
        delta: δ in (0, 1).

    Returns:
        (ε, α).

    Raises:
        InvalidOptionError: If the two differ in number, or a value is out of range.
    """
    orders_A, rdp_A = _checked(orders), np.asarray(rdp, dtype=np.float64).ravel()
    if rdp_A.shape != orders_A.shape or not np.all(rdp_A >= 0):
        raise InvalidOptionError(f"rdp={rdp!r}: give one divergence of at least 0 for each of {orders_A.size} orders.")
    epsilon, best = epsilon_from_rdp(orders_A, rdp_A, delta=probability(delta, "delta"))
    return epsilon, float(orders_A[best])


def _checked(orders: Sequence[float] | float) -> np.ndarray:
    orders_A = np.asarray(orders, dtype=np.float64).ravel()
    if not orders_A.size or not np.all(np.isfinite(orders_A) & (orders_A > 1)):
        raise InvalidOptionError(f"orders={orders!r}: give finite orders greater than 1.")
    return orders_A
