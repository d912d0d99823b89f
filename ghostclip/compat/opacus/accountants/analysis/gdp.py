"""Gaussian differential privacy: what a μ means in ε and δ (exact), and a μ for sampled steps (an estimate).

The central limit theorem gives a sampled training its μ. What follows from that μ can lie far below the true ε, so
nothing here turns steps into an ε; `ghostclip.accounting.GaussianAccountant(estimate=True)` does, under that name.
"""

from __future__ import annotations

import math

from ghostclip._validate import non_negative, positive, positive_int, probability
from ghostclip.accounting import GaussianAccountant
from ghostclip.compat.opacus._refused import refusing

__getattr__ = refusing(__name__)


def compute_mu_poisson(*, steps: int, noise_multiplier: float, sample_rate: float) -> float:
    """Estimate the μ of a number of steps on Poisson samples: q·√(T·(e^{1/σ²} - 1)).

    Privacy:
        No bound; see the module.

    Args:
        steps: T.
        noise_multiplier: σ.
        sample_rate: q.

    Returns:
        μ.

    Reference:
        Bu, Dong, Long, Su 2020, Corollary 2.
    """
    estimate = GaussianAccountant(estimate=True)
    for _ in range(positive_int(steps, "steps")):
        estimate.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    return estimate.mu


def delta_eps_mu(*, eps: float, mu: float) -> float:
    """Return the exact δ of a μ-Gaussian mechanism: Φ(μ/2 - ε/μ) - e^ε·Φ(-μ/2 - ε/μ).

    Args:
        eps: ε ≥ 0.
        mu: μ > 0.

    Returns:
        δ in [0, 1].

    Reference:
        Balle and Wang 2018, Theorem 8; Dong, Roth, Su 2022, Corollary 1.
    """
    # Imported when it is used: scipy.special takes long to load.
    from scipy.special import log_ndtr, ndtr

    eps, mu = non_negative(eps, "eps"), positive(mu, "mu")
    # e^ε overflows before Φ vanishes; their product does not.
    return max(0.0, float(ndtr(mu / 2 - eps / mu) - math.exp(eps + float(log_ndtr(-mu / 2 - eps / mu)))))


def eps_from_mu(*, mu: float, delta: float) -> float:
    """Return the ε of a μ-Gaussian mechanism, exact up to rounding.

    Args:
        mu: μ > 0.
        delta: δ in (0, 1).

    Returns:
        ε ≥ 0.
    """
    from scipy.optimize import brentq

    delta = probability(delta, "delta")
    if delta_eps_mu(eps=0.0, mu=mu) <= delta:
        return 0.0
    high = 1.0
    while delta_eps_mu(eps=high, mu=mu) > delta:
        high *= 2
    return float(brentq(lambda eps: delta_eps_mu(eps=eps, mu=mu) - delta, 0.0, high, xtol=1e-12))
