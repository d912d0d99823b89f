"""Exact random selections from uniform 64-bit words: independent coins, subsets and permutations.

Everything takes its randomness from a cryptographic key stream, which is cheap here: what is selected is a batch.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ghostclip.noise.keys import WordStream

Records = NDArray[np.int64]


def independent_coins(words: WordStream, count: int, rate: float) -> Records:
    """Select each of ``count`` records independently with probability ``rate``, ascending, int64.

    Cost:
        O(1 + N·q), whatever the number of records.

    Reference:
        Devroye (1986), Non-Uniform Random Variate Generation, XII.2: geometric waiting times.
    """
    # The gaps between selected records are geometric: ⌊log u / log(1 - q)⌋ records are passed over for a uniform u.
    if rate == 1:
        return np.arange(count, dtype=np.int64)
    found = []
    last = -1
    while last < count:
        mean = (count - 1 - last) * rate
        # Enough at the first try in all but one case in 1e9; the loop goes on where it is not.
        tries = int(mean + 6 * math.sqrt(mean)) + 8
        uniform = unit_interval(words.take(tries))
        # A gap beyond the end is beyond the end: capped before the conversion, which would overflow.
        gaps = np.minimum(np.floor(np.log(uniform) / math.log1p(-rate)), count).astype(np.int64)
        found.append(last + np.cumsum(gaps + 1))
        last = int(found[-1][-1])
    selected = np.concatenate(found)
    return selected[selected < count]


def unit_interval(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return (k + 1/2) / 2^64, rounded: never 0, and with full precision near 0, where rare events are decided."""
    return (words.astype(np.float64) + 0.5) * 2.0**-64


def permutation(words: WordStream, count: int) -> Records:
    """Return the records in uniformly random order.

    Cost:
        O(N log N).
    """
    # Sorts random 64-bit words; two equal ones (less than once in 1e5 permutations of 1e7 records) keep their order.
    return np.argsort(words.take(count), kind="stable")


def subset(words: WordStream, records: Records, size: int) -> Records:
    """Return a uniformly random subset of at most ``size`` records, in their order."""
    if len(records) <= size:
        return records
    return records[np.sort(permutation(words, len(records))[:size])]
