"""Lower triangular Toeplitz matrices of correlated noise: coefficients, sensitivity, and the error that is left.

A training of n steps that releases x_t + σ·s·(C⁻¹z)_t is one Gaussian mechanism with noise multiplier σ on the whole
stream x, where s is the sensitivity of C: the most that a record with gradients of norm 1 moves Cx by. What training
sees are sums of the releases, so the noise that matters is that of A·C⁻¹z with A the matrix of prefix sums (with
momentum: of the weights that a gradient has in the parameters).

Reference:
    Denisov et al. (2022), arXiv:2202.08312; Choquette-Choo et al. (2023), arXiv:2306.08153; Kalinin and Lampert (2024),
    arXiv:2405.13763 (square roots); Kalinin et al. (2025), arXiv:2505.12128 (banded inverses).

Letters: T steps, p bands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from ghostclip.accounting.pairs import Array
from ghostclip.errors import InvalidOptionError

_ROUNDED: Final = 1 + 1e-9
"""Rounding of a few million sums in float64, and more."""


def square_root_of_inverse(bands: int) -> tuple[float, ...]:
    """Return the first coefficients of (1 - x)^½, whose matrix is the inverse square root of that of prefix sums."""
    found = [1.0]
    for power in range(1, bands):
        found.append(found[-1] * (power - 1.5) / power)
    return tuple(found)


def inverse_series(coefficients: Sequence[float], steps: int) -> Array:
    """Return the first coefficients of the inverse of a Toeplitz matrix, shape [T]."""
    from scipy.signal import lfilter

    impulse_T = np.zeros(steps)
    impulse_T[0] = 1.0
    return np.asarray(lfilter([1.0], coefficients, impulse_T), dtype=np.float64)


@lru_cache(maxsize=256)
def sensitivity(coefficients: tuple[float, ...], steps: int, *, separation: int) -> float:
    """Return s: the most that one record moves Cx by, if every `separation`-th step may be its own.

    Columns i, i + b, … of C, each with a vector of norm at most 1 of its own, move Cx by at most the norm of the sum of
    their absolute values, and no i has a larger one than 0: its rows are those of any other, and more.

    Args:
        coefficients: Of C⁻¹, the first one 1.
        steps: T.
        separation: b, the number of steps from one batch of a record to the next.

    Returns:
        s ≥ 1, rounded upwards.

    Raises:
        InvalidOptionError: If C grows beyond what numbers hold.

    Reference:
        Kalinin and Lampert (2024), Theorem 2.
    """
    total_T = np.abs(inverse_series(coefficients, steps))
    for begin in range(separation, steps, separation):
        # Each block is added to what the block before it has become.
        block = total_T[begin : begin + separation]
        block += total_T[begin - separation : begin - separation + block.size]
    with np.errstate(over="ignore", invalid="ignore"):
        squared = float(total_T @ total_T)
    if not math.isfinite(squared):
        raise InvalidOptionError(
            f"coefficients={tuple(coefficients)!r}: the inverse of this matrix grows without bound; use coefficients "
            "whose sum is at least 0, as 1, -0.5."
        )
    return math.sqrt(squared) * _ROUNDED


def error(coefficients: Sequence[float], steps: int, *, momentum: float = 0.0) -> float:
    """Return the root of the mean square of the noise in the parameters over T steps, for s = σ = 1.

    Args:
        coefficients: Of C⁻¹.
        steps: T.
        momentum: Of the optimizer, in [0, 1).

    Returns:
        ‖A·C⁻¹‖_F / √T, with A of prefix sums after momentum.
    """
    from scipy.signal import lfilter

    padded_T = np.zeros(steps)
    padded_T[: len(coefficients[:steps])] = coefficients[:steps]
    # Each gradient is averaged by momentum (1 - β in the numerator), then summed.
    seen_T = lfilter([1.0 - momentum], np.convolve([1.0, -1.0], [1.0, -momentum]), padded_T)
    return math.sqrt(float(np.cumsum(seen_T**2).mean()))


@lru_cache(maxsize=32)
def optimal_inverse(bands: int, steps: int, separation: int, momentum: float = 0.0) -> tuple[float, ...]:
    """Return the coefficients of C⁻¹ with the least error times sensitivity, found numerically.

    Args:
        bands: p.
        steps: T.
        separation: b.
        momentum: Of the optimizer.

    Returns:
        p coefficients, the first one 1.

    Reference:
        Kalinin et al. (2025), banded inverse matrix factorisation.
    """
    from scipy.optimize import minimize

    # Beyond some thousand steps the best coefficients hardly move.
    few = min(steps, max(4 * bands, 2048))
    apart = min(separation, few)

    def loss(rest: Array) -> float:
        if float(np.abs(rest).sum()) > 1:
            # C would grow.
            return 1e6 * float(np.abs(rest).sum())
        given = (1.0, *np.atleast_1d(rest).tolist())
        return math.log(error(given, few, momentum=momentum) * sensitivity(given, few, separation=apart))

    start = np.array(square_root_of_inverse(bands)[1:])
    if not start.size:
        return (1.0,)
    found = minimize(loss, start, method="Powell", options={"xtol": 1e-4, "ftol": 1e-6, "maxfev": 4000})
    best = np.atleast_1d(found.x) if found.fun <= loss(start) else start
    return (1.0, *best.tolist())
