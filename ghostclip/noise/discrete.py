"""Exact samples of the discrete Gaussian: every decision is the one that infinitely many random bits would give.

A float64 comparison decides where it certainly agrees with the real numbers, which is nearly always; otherwise the
uniform gets more bits and the comparison is made in decimal arithmetic of growing precision. So the samples have
exactly the stated distribution, at the speed of floating-point numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ghostclip.errors import InvalidOptionError

Words = Callable[[int, int], NDArray[np.uint64]]
"""(part, count) -> uniform uint64; parts are independent streams, addressed from their beginning."""

MAX_SCALE = 2.0**32

# Bounds on the error of the float64 arithmetic below, with room for a few units in the last place of log and exp:
# a logarithm is below 64 (unit 2^-47), a probability at most 1 (2^-53).
_LOG_ERROR = 2.0**-43
_PROBABILITY_ERROR = 2.0**-46
_BITS = 63
_MORE_BITS = 128
_MOST_ROUNDS = 128
_DIGITS = 70


def discrete_gaussian(words: Words, count: int, scale: float) -> NDArray[np.int64]:
    """Draw from the discrete Gaussian N_Z(0, s²): P(x) ∝ exp(-x² / (2 s²)) on the integers.

    A discrete Laplace value ⌊t·E⌋ with a random sign (E exponential, t the power of two from s up) is accepted with
    probability exp(-(|x| - s²/t)² / (2 s²)).

    Privacy:
        Added to an integer sum that one unit moves by at most Δ (Euclidean), the divergence of every order α is at most
        αΔ²/(2s²), that of the continuous Gaussian; the binomial expansion of the subsampled mechanism's moments at
        whole orders carries over term by term. Nothing depends on floating-point numbers.

    Reference:
        Canonne, Kamath and Steinke (2020), The Discrete Gaussian for Differential Privacy, Algorithm 3 (the rejection
        scheme), Proposition 5 and Theorem 14 (divergence).
    """
    if not 0 < scale <= MAX_SCALE:
        raise InvalidOptionError(f"scale={scale!r}: must be greater than 0 and at most 2^32 steps of the grid.")
    laplace = 2 ** max(0, math.ceil(math.log2(scale)))
    if laplace < scale:
        laplace *= 2
    accepted: list[NDArray[np.int64]] = []
    missing = count
    while missing > 0:
        number = len(accepted)
        assert number < _MOST_ROUNDS, "a third of all candidates at least is accepted, so that few rounds suffice"
        accepted.append(_round(words, number, 2 * missing + 32, (Fraction(scale), laplace)))
        missing -= len(accepted[-1])
    return np.concatenate(accepted)[:count] if accepted else np.empty(0, dtype=np.int64)


def _round(words: Words, number: int, tries: int, shape: tuple[Fraction, int]) -> NDArray[np.int64]:
    """Return the accepted values of one round of candidates; ``shape`` is (s, t)."""
    drawn = words(number, 2 * tries)
    first, second = drawn[:tries], drawn[tries:]
    bits = _MoreBits(words, _MOST_ROUNDS + number)
    size = _floor_of_exponential(first >> np.uint64(1), shape[1], bits)
    negative = (first & np.uint64(1)).astype(bool)
    keep = _accept(second >> np.uint64(1), size, shape, bits)
    # Zero has one sign only, or it would be twice as likely.
    keep &= ~(negative & (size == 0))
    return np.where(negative, -size, size)[keep]


class _MoreBits:
    """Additional bits for uniforms that 63 bits do not place on one side of a threshold."""

    def __init__(self, words: Words, part: int) -> None:
        self._words, self._part, self._used = words, part, 0

    def intervals(self, word: int) -> Iterator[tuple[Fraction, Fraction]]:
        """Yield nested intervals that contain a uniform with the given first 63 bits, each 128 bits narrower."""
        value, bits = word, _BITS
        while True:
            count = self._used + _MORE_BITS // 64
            high, low = self._words(self._part, count)[self._used :].tolist()
            self._used = count
            value, bits = (value << _MORE_BITS) | (high << 64) | low, bits + _MORE_BITS
            yield Fraction(value, 2**bits), Fraction(value + 1, 2**bits)


def _floor_of_exponential(words: NDArray[np.uint64], laplace: int, bits: _MoreBits) -> NDArray[np.int64]:
    """Return ⌊-t·log u⌋ for uniforms u with the given first 63 bits; t is a power of two."""
    with np.errstate(divide="ignore"):
        # Of the interval [w, w + 1) / 2^63; t is a power of two, so that multiplying by it does not round.
        longest = (_BITS * math.log(2) - np.log(words.astype(np.float64)) + _LOG_ERROR) * laplace
        shortest = (_BITS * math.log(2) - np.log(words.astype(np.float64) + 1) - _LOG_ERROR) * laplace
    low, high = np.floor(shortest), np.floor(longest)
    unclear = np.flatnonzero(low != high)
    result = low.astype(np.int64)
    for index in unclear.tolist():
        result[index] = _exact_floor(int(words[index]), laplace, bits)
    return result


def _exact_floor(word: int, laplace: int, bits: _MoreBits) -> int:
    """Return ⌊-t·log u⌋, with as many bits of u as that takes."""
    digits = _DIGITS
    for low, high in bits.intervals(word):
        context = Context(prec=digits)
        margin = Decimal(10) ** (20 - digits)
        least = context.multiply(Decimal(-laplace), context.ln(_decimal(high, context))) - margin
        most = None if low == 0 else context.multiply(Decimal(-laplace), context.ln(_decimal(low, context))) + margin
        if most is not None and math.floor(least) == math.floor(most):
            return math.floor(least)
        digits += _DIGITS
    raise AssertionError("the intervals shrink for ever")


def _accept(
    words: NDArray[np.uint64], size: NDArray[np.int64], shape: tuple[Fraction, int], bits: _MoreBits
) -> NDArray[np.bool_]:
    """Decide u < exp(-(|x| - s²/t)² / (2 s²)) for uniforms u with the given first 63 bits; ``shape`` is (s, t)."""
    scale, laplace = shape
    s = float(scale)
    uniform = words.astype(np.float64) * 2.0**-_BITS
    chance = np.exp(-(((size - s * s / laplace) / s) ** 2) / 2)
    unclear = np.flatnonzero(np.abs(uniform - chance) <= _PROBABILITY_ERROR)
    result = uniform < chance
    for index in unclear.tolist():
        exponent = (int(size[index]) - scale * scale / laplace) ** 2 / (2 * scale * scale)
        result[index] = _exactly_below(int(words[index]), exponent, bits)
    return result


def _exactly_below(word: int, exponent: Fraction, bits: _MoreBits) -> bool:
    """Return whether u < exp(-exponent), with as many bits of u as that takes."""
    if exponent == 0:
        return True
    digits = _DIGITS
    for low, high in bits.intervals(word):
        context = Context(prec=digits)
        margin = Decimal(10) ** (20 - digits)
        chance = context.exp(-_decimal(exponent, context))
        if _decimal(high, context) + margin < chance:
            return True
        if _decimal(low, context) - margin > chance:
            return False
        digits += _DIGITS
    raise AssertionError("the intervals shrink for ever")


def _decimal(value: Fraction, context: Context) -> Decimal:
    return context.divide(Decimal(value.numerator), Decimal(value.denominator))
