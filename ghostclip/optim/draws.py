"""Draws that a private sampler has made and no release has used yet.

A release is accounted as one draw. Batches reach the model through loaders, prefetchers and device movers that know
nothing of draws, and copy tensors on the way; but they keep the order. So the draws wait here in the order in which
they were made, and a step states how many rows its backward passes went through: rows that the next draws do not
explain were not drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Draw:
    """One draw of the sampler.

    Attributes:
        number: Its position in the whole training, from 0; the same on all ranks.
        rows: Records of it that are this rank's.
        records: Records of it on all ranks together.
    """

    number: int
    rows: int
    records: int


@dataclass(frozen=True)
class Match:
    """The draws that a step's rows come from.

    Attributes:
        draws: Distinct draws, in order, as many as it may have been; several where they were accumulated into the step.
        ends: Places in the log that the step may have got to.
        rounds: How often it may have gone through a whole draw, the same one again included.
    """

    draws: tuple[Draw, ...]
    ends: frozenset[int]
    rounds: int


class DrawLog:
    """Draws in the order in which they were made, and how far releases have used them.

    Rows are compared, not records: a loop that hands the model other records of the same number is not noticed. The
    place is a set: where several backwards of one step fit one draw as well as two, both stay possible until later rows
    tell.

    Privacy:
        Each draw is used by at most one release. Draws that no release used when a pass was abandoned are forgotten.

    Attributes:
        claimed: Whether a private optimizer uses the draws, so that what is unused is what is left to train on.
    """

    def __init__(self) -> None:
        self.claimed = False
        self._draws: list[Draw] = []
        self._places: frozenset[int] = frozenset([0])
        self._delivered: int | None = None
        self._pass_begun = 0
        self._complete = True

    def begin_pass(self) -> None:
        """Note that a pass over the data begins; what an abandoned one left unused is forgotten."""
        # A prefetcher may still hold the last batches of a pass that was drawn to its end.
        self._drop(self._pass_begun if self._complete else len(self._draws))
        self._pass_begun = len(self._draws)
        self._places |= {self._pass_begun}
        self._complete = False
        self._delivered = None

    def end_pass(self) -> None:
        """Note that a pass was drawn to its end."""
        self._complete = True

    def add(self, draw: Draw) -> None:
        """Append a draw.

        Args:
            draw: The draw.
        """
        self._draws.append(draw)

    def follow_deliveries(self) -> None:
        """Let draws count from when `deliver` says that they were handed out, not from when workers fetched them."""
        self._delivered = len(self._draws)

    def deliver(self) -> None:
        """Note that the next draw was handed out."""
        if self._delivered is not None:
            self._delivered += 1

    @property
    def waiting(self) -> tuple[Draw, ...]:
        """Draws that were handed out and that no release has used."""
        return tuple(self._draws[min(self._places) : self._delivered])

    @property
    def next_number(self) -> int | None:
        """Position of the first draw that no release has used; None where all are used."""
        unused = self._draws[min(self._places) :]
        return unused[0].number if unused else None

    @property
    def next_is_empty(self) -> bool:
        """Whether the next draw certainly has no rows on this rank."""
        following = [self._draws[place] for place in self._places if place < self._end]
        return bool(following) and all(draw.rows == 0 for draw in following)

    def match(self, passes: Sequence[int]) -> Match | None:
        """Find the draws that a step's backward passes went through; changes nothing.

        Args:
            passes: Rows of each backward pass since the last release, in order; empty where none was made.

        Returns:
            The draws; None where the rows are not those of the next draws.
        """
        states = {(start, start, 0): 0 for start in self._places if not passes and self._is_empty(start)}
        for number, rows in enumerate(passes):
            if number == 0:
                states = {(start, start, rows): 0 for start in self._places if self._begins(start, rows)}
            else:
                states = self._after(states, rows)
        complete = {
            (start, place + 1): rounds + 1
            for (start, place, taken), rounds in states.items()
            if taken == self._draws[place].rows
        }
        if not complete:
            return None
        start, end = max(complete, key=lambda reached: reached[1] - reached[0])
        ends = frozenset(end for _, end in complete)
        return Match(tuple(self._draws[start:end]), ends, max(complete.values()))

    def use(self, match: Match) -> None:
        """Mark draws as used by a release.

        Args:
            match: What `match` returned.
        """
        self._places = match.ends
        self._drop(min(match.ends))

    def forget(self) -> None:
        """Forget all draws, as after a sampler's position was set."""
        self._drop(len(self._draws))
        self._places = frozenset([0])
        self._delivered = None

    def _drop(self, count: int) -> None:
        """Forget the first draws, and places among them."""
        del self._draws[:count]
        self._places = frozenset(place - count for place in self._places if place >= count) or frozenset([0])
        self._pass_begun = max(0, self._pass_begun - count)
        self._delivered = None if self._delivered is None else max(0, self._delivered - count)

    @property
    def _end(self) -> int:
        return len(self._draws) if self._delivered is None else min(self._delivered, len(self._draws))

    def _is_empty(self, place: int) -> bool:
        return place < self._end and self._draws[place].rows == 0

    def _begins(self, place: int, rows: int) -> bool:
        """Whether a pass of so many rows may be the first one through the draw at `place`, or all of it."""
        if place >= self._end:
            return False
        drawn = self._draws[place].rows
        return rows <= drawn and (rows > 0 or drawn == 0)

    def _after(self, states: dict[tuple[int, int, int], int], rows: int) -> dict[tuple[int, int, int], int]:
        """Return where a further pass may have gone: the rest of a draw; or the same rows again, or the next draw.

        Args:
            states: Draws gone through, by the first one, the present one, and how many of its rows were taken.
            rows: Rows of the pass.

        Returns:
            As `states`.
        """
        found: dict[tuple[int, int, int], int] = {}
        for (start, place, taken), rounds in states.items():
            drawn = self._draws[place].rows
            if taken == drawn:
                ways = [((start, other, rows), rounds + 1) for other in (place, place + 1) if self._begins(other, rows)]
            else:
                ways = [((start, place, taken + rows), rounds)] if 0 < rows <= drawn - taken else []
            for state, times in ways:
                found[state] = max(times, found.get(state, 0))
        return found
