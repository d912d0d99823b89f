"""Clipped sums as they were before an attempt that may fail half-way."""

from __future__ import annotations

from collections.abc import Callable


class Savepoint:
    """Puts back what accumulated before an attempt; the attempt's own share is gone, wherever it failed.

    Args:
        *parts: Functions that each put back one part of the state.
    """

    def __init__(self, *parts: Callable[[], None]) -> None:
        self._parts = parts

    def restore(self) -> None:
        """Put everything back."""
        for part in self._parts:
            part()
