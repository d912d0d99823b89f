"""Clipped sums as they were before an attempt that may fail half-way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType

from torch import Tensor, nn


class Savepoint:
    """Context that can restore what accumulated before an attempt, wherever that failed."""

    def __init__(self, *parts: Callable[[], None], forget: Callable[[], None]) -> None:
        self._parts = parts
        self._forget = forget

    def restore(self) -> None:
        for part in self._parts:
            part()

    def __enter__(self) -> Savepoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget()


class SumsBefore:
    """Present sums, each copied where it lies when something is first added to it."""

    # That is at the end of a backward, when activations have made room, and never if memory runs out before.
    def __init__(self, sums: Mapping[nn.Parameter, Tensor]) -> None:
        self._sums = dict(sums)
        self._copies: dict[nn.Parameter, Tensor] = {}
        self.released = False

    def before_change(self, parameter: nn.Parameter, buffer: Tensor) -> None:
        """Copy an accumulator that something is about to be added to, if it is one of these."""
        if self._sums.get(parameter) is buffer and parameter not in self._copies:
            self._copies[parameter] = buffer.clone()

    def put_back(self) -> dict[nn.Parameter, Tensor]:
        """Return the accumulators by parameter, changed ones replaced by their copies."""
        self._sums.update(self._copies)
        self._copies.clear()
        return dict(self._sums)

    def give_up(self) -> None:
        """Drop the sums, which were released."""
        self.released = True
        self._sums.clear()
        self._copies.clear()
