"""The largest batch under a cap of memory, from few measured peaks."""

from __future__ import annotations

from collections.abc import Callable

# A batch is said to be the largest when it is known to within this share, which saves steps nobody would miss.
PRECISION = 0.02
# A line through two peaks is trusted to point this many times beyond the larger one.
REACH = 6


def largest(
    peak_of: Callable[[int], float],
    cap: float,
    *,
    most: int,
    first: int = 1,
    go_on: Callable[[], bool] = lambda: True,
) -> tuple[int, dict[int, float], bool]:
    """Find the largest number of samples whose peak is at most the cap.

    Memory grows nearly in proportion to the batch, so the next number is read off a line through what was measured, and
    halving is left for what the line gets wrong.

    Args:
        peak_of: Bytes of a number of samples; infinite where it does not run at all.
        cap: Bytes.
        most: Look no further.
        first: Tried first.
        go_on: Asked before every further number; when it says no, the search ends with what was seen to fit.

    Returns:
        The number, to within 2 %, 0 if not even one fits; every peak that was measured; and whether the search came to
        its end.
    """
    found: dict[int, float] = {}
    low, high = 0, most + 1
    probe = first
    while True:
        found[probe] = peak_of(probe)
        if found[probe] <= cap:
            low = probe
        else:
            high = probe
        if high - low <= max(1, int(PRECISION * low)):
            return low, found, True
        if not go_on():
            return low, found, False
        probe = _next(found, cap, low, high)


def _next(found: dict[int, float], cap: float, low: int, high: int) -> int:
    """A number between the largest that fits and the smallest that does not."""
    if low == 0:
        return max(1, high // 2)
    fitting = sorted(number for number in found if number <= low)
    if len(fitting) == 1:
        return min(2 * low, high - 1)
    before = fitting[-2]
    slope = (found[low] - found[before]) / (low - before)
    if slope <= 0:
        return min(REACH * low, (low + high) // 2 if high <= REACH * low else high - 1)
    aimed = int(low + (cap - found[low]) / slope)
    if aimed <= low:
        # The line says that this is it: only the next number that would count is left to be ruled out.
        return min(high - 1, low + max(1, int(PRECISION * low)))
    if aimed >= high:
        return (low + high) // 2
    return min(aimed, REACH * low, high - 1)
