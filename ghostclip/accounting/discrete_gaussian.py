"""Cost of accounting discrete Gaussian noise as if it were continuous: a δ, and next to nothing."""

from __future__ import annotations

import math

from ghostclip._validate import non_negative, positive, positive_int
from ghostclip.errors import InvalidOptionError

MIN_SCALE = 4.0
"""From here on exp(-2π²s²) < 1e-137 is neglected beside a bound that is loose by a factor of 1.8."""


def discretisation_delta(epsilon: float, *, scale: float, coordinates: int, steps: int) -> float:
    """Return the δ to add to an (ε, δ) of continuous Gaussian noise when the noise was discrete.

    δ' = (1 + e^ε)·√(d·T / 640) / s² for T steps that each add N_Z(0, s²) to d integers.

    A continuous Gaussian rounded to integers and added to an integer sum is post-processing of the continuous
    mechanism, whatever the sampling and the accountant. The discrete Gaussian differs from it by a Kullback-Leibler
    divergence of at most 1/(320 s⁴) in one coordinate: with p_r(x) = φ_s(x)·E_u[exp(-u²/2s²)·cosh(xu/s²)], u uniform in
    [-1/2, 1/2], Jensen's inequality and log cosh y ≥ y²/2 - y⁴/12 give

        KL(N_Z(0, s²), p_r) ≤ (1 - E x²/s²)/(24 s²) + E x⁴/(960 s⁸) ≤ 3/(960 s⁴) + O(exp(-2π²s²)).

    The divergences of all coordinates and steps add up, adaptively chosen sums included; Pinsker's inequality turns
    them into a total variation τ, and (ε, δ) into (ε, δ + (1 + e^ε)·τ).

    Privacy:
        An upper bound, so that any accountant of the continuous Gaussian is a guarantee for noise of level "exact".
        (Rényi divergences of whole orders need no such term.)

    Reference:
        Canonne, Kamath and Steinke (2020), The Discrete Gaussian for Differential Privacy, for N_Z and its moments.
    """
    epsilon, scale = non_negative(epsilon, "epsilon"), positive(scale, "scale")
    if scale < MIN_SCALE:
        raise InvalidOptionError(f"scale={scale!r}: must be at least {MIN_SCALE}; use a finer grid.")
    count = positive_int(coordinates, "coordinates") * positive_int(steps, "steps")
    log_distance = 0.5 * math.log(count / 640) - 2 * math.log(scale)
    log_delta = epsilon + math.log1p(math.exp(-epsilon)) + log_distance
    return math.exp(min(0.0, log_delta))
