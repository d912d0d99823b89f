"""Lower triangular Toeplitz matrices of correlated noise: coefficients, sensitivity, and the error that is left.

A training of n steps that releases x_t + σ·s·(C⁻¹z)_t is one Gaussian mechanism with noise multiplier σ on the whole
stream x, where s is the sensitivity of C: the most that a record with gradients of norm 1 moves Cx by. What training
sees are sums of the releases, so the noise that matters is that of A·C⁻¹z with A the workload: the weights that a
gradient has in the parameters, all 1 (prefix sums), or as momentum and learning rates make them.

All matrices here are cascades of rational filters (`Section`), as noise is drawn by: C⁻¹ is one polynomial ("banded
inverse"), one over a polynomial (C is banded), or d factors (1 - λx) / (1 - μx) (buffered linear Toeplitz, BLT).

Reference:
    Denisov et al. (2022), arXiv:2202.08312; Choquette-Choo et al. (2023), arXiv:2306.08153; Kalinin and Lampert (2024),
    arXiv:2405.13763 (square roots); Kalinin et al. (2025), arXiv:2505.12128 (banded inverses); Dvijotham et al. (2024),
    arXiv:2404.16706, and McMahan et al. (2024), arXiv:2408.08868 (BLT).

Letters: T steps, p bands, d buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from ghostclip.accounting.pairs import Array
from ghostclip.errors import InvalidOptionError
from ghostclip.noise.correlated import Section

Filter = tuple[Section, ...]

_WORST: Final = 1e6
_ROUNDED: Final = 1 + 1e-9
"""Rounding of a few million sums in float64, and more."""
_FEW: Final = {"inverse": 2048, "banded": 2048, "buffered": 16384}
"""Steps that coefficients are chosen for at most: beyond, the best hardly move."""
_COLUMNS, _TRIED = 2048, 24
"""Columns that an error with learning rates is summed over, equally many apart, and as it is tried."""


class Workload(NamedTuple):
    """What an optimizer makes of gradients.

    Attributes:
        momentum: β in [0, 1): steps are along v_t = β·v_{t-1} + (1 - β)·g_t.
        learning_rates: Of each step; None for 1 in all.
    """

    momentum: float = 0.0
    learning_rates: tuple[float, ...] | None = None

    def over(self, steps: int) -> Workload:
        """Return it with as many learning rates, of steps equally far apart."""
        if self.learning_rates is None or len(self.learning_rates) == steps:
            return self
        place_T = np.linspace(0, len(self.learning_rates) - 1, steps)
        rates_T = np.interp(place_T, np.arange(len(self.learning_rates)), self.learning_rates)
        return self._replace(learning_rates=tuple(rates_T.tolist()))


PREFIX_SUMS: Final = Workload()


def of_inverse(coefficients: Sequence[float]) -> Filter:
    """Return C⁻¹ with these coefficients."""
    return ((tuple(coefficients), (1.0,)),)


def inverse_of(matrix: Filter) -> Filter:
    """Return the inverse of a matrix."""
    return tuple((below, above) for above, below in matrix)


def buffered(poles: Sequence[float], zeros: Sequence[float]) -> Filter:
    """Return C⁻¹ of a BLT: Π_i (1 - λ_i·x) / (1 - μ_i·x), with the poles λ and zeros μ of C."""
    return tuple(((1.0, -pole), (1.0, -zero)) for pole, zero in zip(poles, zeros, strict=True))


def square_root_of_inverse(bands: int) -> tuple[float, ...]:
    """Return the first coefficients of (1 - x)^½, whose matrix is the inverse square root of that of prefix sums."""
    return _binomial(0.5, bands)


def square_root(bands: int) -> tuple[float, ...]:
    """Return the first coefficients of (1 - x)^-½, whose matrix is the square root of that of prefix sums."""
    return _binomial(-0.5, bands)


def _binomial(exponent: float, count: int) -> tuple[float, ...]:
    coefficients = [1.0]
    for power in range(1, count):
        coefficients.append(coefficients[-1] * (power - 1 - exponent) / power)
    return tuple(coefficients)


def series(matrix: Filter, steps: int) -> Array:
    """Return the first coefficients of a Toeplitz matrix, shape [T]."""
    from scipy.signal import lfilter

    found_T = np.zeros(steps)
    found_T[0] = 1.0
    for above, below in matrix:
        found_T = lfilter(above, below, found_T)
    return np.asarray(found_T, dtype=np.float64)


@lru_cache(maxsize=256)
def sensitivity(matrix: Filter, steps: int, *, separation: int) -> float:
    """Return s ≥ 1, rounded upwards: the most that one record moves Cx by, if every b-th step may be its own.

    Columns i, i + b, … of C, each with a vector of norm at most 1 of its own, move Cx by at most the norm of the sum of
    their absolute values, and no i has a larger one than 0: its rows are those of any other, and more.

    Reference:
        Kalinin and Lampert (2024), Theorem 2.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        total_T = np.abs(series(inverse_of(matrix), steps))
        for begin in range(separation, steps, separation):
            # Each block is added to what the block before it has become.
            block = total_T[begin : begin + separation]
            block += total_T[begin - separation : begin - separation + block.size]
        squared = float(total_T @ total_T)
    if not math.isfinite(squared):
        raise InvalidOptionError(
            f"coefficients={matrix!r}: the inverse of this matrix grows without bound; use coefficients whose sum is "
            "at least 0, as 1, -0.5."
        )
    return math.sqrt(squared) * _ROUNDED


def error(matrix: Filter, steps: int, workload: Workload = PREFIX_SUMS, *, columns: int = _COLUMNS) -> float:
    """Return ‖A·C⁻¹‖_F / √T: the root mean square of the noise in the parameters over T steps, for s = σ = 1."""
    # `columns` of A·C⁻¹, equally far apart, are looked at where there are learning rates.
    # Each gradient is averaged by momentum (1 - β in the numerator), then weighted and summed.
    averaged = ((1.0 - workload.momentum,), (1.0, -workload.momentum))
    seen_T = series((*matrix, averaged), steps)
    rates = workload.over(steps).learning_rates
    if rates is None:
        return math.sqrt(float(np.cumsum(np.cumsum(seen_T) ** 2).mean()))
    rates_T, spacing = np.asarray(rates), -(-steps // columns)
    looked_at = range(spacing // 2, steps, spacing)
    column_sums = (np.cumsum(rates_T[j:] * seen_T[: steps - j]) for j in looked_at)
    return math.sqrt(sum(float(one_T @ one_T) for one_T in column_sums) / len(looked_at))


@lru_cache(maxsize=32)
def optimal(family: str, size: int, steps: int, separation: int, workload: Workload = PREFIX_SUMS) -> Filter:
    """Return C⁻¹ with the least error times sensitivity of a family, found numerically.

    Families are "inverse" (C⁻¹ has p bands), "banded" (C has), and "buffered" (BLT with d buffers).

    Reference:
        Choquette-Choo et al. (2023); Kalinin et al. (2025); McMahan et al. (2024), which chooses poles and zeros.
    """
    from scipy.optimize import minimize

    few = min(steps, max(4 * size, _FEW[family]))
    capped = min(separation, few)
    seen = workload.over(few)
    make, start = _FAMILIES[family](size, capped)
    starts = [np.array(start)]
    if family != "buffered" and size > 3:
        half = optimal(family, size // 2, steps, separation, workload)
        starts.append(np.array([*max(half[0], key=len)[1:], *[0.0] * (size - size // 2)]))

    def loss(values: Array) -> float:
        matrix = make(values.tolist())
        with np.errstate(all="ignore"):
            try:
                value = math.log(error(matrix, few, seen, columns=_TRIED) * sensitivity(matrix, few, separation=capped))
            except (InvalidOptionError, OverflowError, ValueError):
                return _WORST
        return min(value, _WORST)

    candidates = [one for first in starts for one in (first, minimize(loss, first, method="L-BFGS-B").x)]
    return make(min(candidates, key=loss).tolist())


Made = tuple[Callable[[list[float]], Filter], list[float]]


def _inverses(size: int, separation: int) -> Made:
    del separation
    return lambda rest: of_inverse((1.0, *rest)), list(square_root_of_inverse(size)[1:])


def _bandeds(size: int, separation: int) -> Made:
    del separation
    return lambda rest: inverse_of(of_inverse((1.0, *rest))), list(square_root(size)[1:])


def _buffereds(size: int, separation: int) -> Made:
    """Poles and zeros of C take turns in (0, 1), a pole the nearest to 1: all of its coefficients are positive."""

    def make(logs: list[float]) -> Filter:
        # Their logarithms are sums of positive numbers.
        roots = np.exp(-np.cumsum(np.exp(np.clip(logs, -40.0, 5.0)))).tolist()
        return buffered(roots[::2], roots[1::2])

    # From 5/b to 1 away from 1, equally far apart by their logarithm.
    distances = -np.log1p(-np.geomspace(min(0.3, 5 / separation), 0.8, 2 * size))
    return make, np.log(np.diff(distances, prepend=0.0)).tolist()


_FAMILIES: Final = {"inverse": _inverses, "banded": _bandeds, "buffered": _buffereds}
