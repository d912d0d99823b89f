"""Clipped sums as they were before an attempt that may fail half-way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType

from torch import Tensor, nn


class Savepoint:
    """Puts back what accumulated before an attempt; the attempt's own share is gone, wherever it failed.

    A context: what is kept for the sake of it is let go of at the end.

    Args:
        *parts: Functions that each put back one part of the state.
        forget: Lets go of what is kept.
    """

    def __init__(self, *parts: Callable[[], None], forget: Callable[[], None]) -> None:
        self._parts = parts
        self._forget = forget

    def restore(self) -> None:
        """Put everything back."""
        for part in self._parts:
            part()

    def __enter__(self) -> Savepoint:
        """Return the savepoint itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of what is kept."""
        self._forget()


class SumsBefore:
    """Sums as they are now, each copied where it lies when something is first added to it.

    That is at the end of a backward, when activations have made room, and never if memory runs out before.

    Args:
        sums: The accumulators, by parameter.

    Attributes:
        released: Whether they were released meanwhile, so that there is nothing to put back.
    """

    def __init__(self, sums: Mapping[nn.Parameter, Tensor]) -> None:
        self._sums = dict(sums)
        self._copies: dict[nn.Parameter, Tensor] = {}
        self.released = False

    def before_change(self, parameter: nn.Parameter, buffer: Tensor) -> None:
        """Copy an accumulator that something is about to be added to, if it is one of these.

        Args:
            parameter: Whose.
            buffer: The accumulator.
        """
        if self._sums.get(parameter) is buffer and parameter not in self._copies:
            self._copies[parameter] = buffer.clone()

    def put_back(self) -> dict[nn.Parameter, Tensor]:
        """Return accumulators that hold what they held; those that were changed are replaced by their copies.

        Returns:
            By parameter.
        """
        self._sums.update(self._copies)
        self._copies.clear()
        return dict(self._sums)

    def give_up(self) -> None:
        """Let go of them: they were released."""
        self.released = True
        self._sums.clear()
        self._copies.clear()
