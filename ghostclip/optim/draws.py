"""Draws that a private sampler has made and no release has used yet.

A release is accounted as one draw. Batches reach the model through loaders, prefetchers and device movers that know
nothing of draws, and copy tensors on the way; but they keep the order. So the draws wait here in the order in which
they were made, and a step states how many rows its backward passes went through: rows that the next draws do not
explain were not drawn. Where the batches can be seen as they are handed out, records are compared as well as rows: see
`ghostclip.optim.records`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from ghostclip import _tree
from ghostclip.evidence.unchecked import CheckSchedule
from ghostclip.optim.records import (
    Crossed,
    Kind,
    Leaf,
    Prints,
    RecordMemory,
    Replay,
    are_same,
    counted,
    crossed_in,
    prints_of,
    read,
    replay_of,
    telling,
)

# Parts of draws, and rows in them, whose fingerprints are kept as they came: noting them takes time, and honest loops
# never need it.
_KEPT, _KEPT_ROWS = 4096, 1 << 17
# How deep tensors are looked for in batches that are objects.
_INTO_OBJECTS = 4


@dataclass(frozen=True)
class Draw:
    """One draw of the sampler."""

    number: int  # position in the whole training, from 0; the same on all ranks
    rows: int  # records of it that are this rank's
    records: int  # records of it on all ranks together
    members: Sequence[int] = ()  # numbers of this rank's records
    # fingerprints of the rows that were handed out, those of all its tensors part by part
    parts: list[list[Prints]] = field(default_factory=list, compare=False)

    @property
    def is_shown(self) -> bool:
        """Whether all of it was seen when it was handed out."""
        return self.rows == sum(_rows_of(part) for part in self.parts)


@dataclass(frozen=True)
class Match:
    """The draws that a step's rows come from."""

    # distinct draws, in order, as many as it may have been; several where they were accumulated into the step
    draws: tuple[Draw, ...]
    spans: frozenset[tuple[int, int]]  # places in the log that the step may have begun at and got to
    rounds: int  # how often it may have gone through a whole draw, the same one again included
    compared: bool = False  # whether the records were compared with those of the draws
    inputs: Sequence[Prints] = ()  # fingerprints of what went through the model, if so

    @property
    def ends(self) -> frozenset[int]:
        """Places in the log that the step may have got to."""
        return frozenset(end for _, end in self.spans)


class DrawLog:
    """Draws in the order in which they were made, and how far releases have used them.

    Privacy:
        Each draw is used by at most one release. Draws that no release used when a pass was abandoned are forgotten.
        Where an input of the model is a tensor of the loader's batch, a step's records are those of its draws.
    """

    # The position is a set: where several backwards of one step fit one draw as well as two, both stay possible until
    # later rows tell. `once_a_pass`: the account allows any record once in each pass, in whichever release of it, so
    # that only what was released in the same pass before is a replay.
    def __init__(self, *, once_a_pass: bool = False) -> None:
        # whether a private optimizer uses the draws, so that unused ones are what is left to train on
        self.claimed = False
        self.axis = 0  # of the rows of a batch's tensors
        # releases whose rows were only counted
        self.compared = self.counted = 0  # releases whose records were compared with those handed out
        self._once_a_pass = once_a_pass
        self._pass = self._several = 0
        self._schedule = CheckSchedule()
        self._kinds: set[Kind] = set()
        self._unnoted: deque[tuple[int, np.ndarray, list[Prints]]] = deque()
        self._unnoted_rows = 0
        self._released: list[tuple[Sequence[Prints], int]] = []
        self._memory: RecordMemory | None = None
        self._draws: list[Draw] = []
        self._places: frozenset[int] = frozenset([0])
        self._delivered: int | None = None
        self._pass_begun = 0
        self._complete = True

    def begin_pass(self) -> None:
        """Note that a pass over the data begins; unused draws of an abandoned one are forgotten."""
        # A prefetcher may still hold the last batches of a pass that was drawn to its end.
        self._drop(self._pass_begun if self._complete else len(self._draws))
        self._pass += 1
        self._released.clear()
        self._pass_begun = len(self._draws)
        self._places |= {self._pass_begun}
        self._complete = False
        self._delivered = None

    def end_pass(self) -> None:
        """Note that a pass was drawn to its end."""
        self._complete = True

    def add(self, draw: Draw) -> None:
        self._draws.append(draw)

    def follow_deliveries(self) -> None:
        """Count the pass's draws when `deliver` says that they are handed out, not when workers fetch them."""
        if self._delivered is None:
            self._delivered = self._pass_begun

    def deliver(self) -> None:
        """Note that the next draw was handed out."""
        if self._delivered is not None:
            self._delivered += 1

    def show(self, batch: Any, *, rows: int | None = None) -> None:
        """Take the fingerprints of a batch of the latest draw, or of its next part with ``rows`` records."""
        if not self.claimed or not self._delivered or self._delivered > len(self._draws):
            return
        draw = self._draws[self._delivered - 1]
        tensors = _tree.tensors(batch, into_objects=_INTO_OBJECTS)
        found = prints_of(tensors, draw.rows if rows is None else rows, self.axis)
        self._kinds.update(kind for kind, _ in found)
        begun, count = sum(_rows_of(part) for part in draw.parts), _rows_of(found)
        draw.parts.append(found)
        if count == 0 or begun + count > len(draw.members):
            return
        self._unnoted.append((draw.number, np.asarray(draw.members[begun : begun + count], np.int64), found))
        self._unnoted_rows += count
        while len(self._unnoted) > _KEPT or self._unnoted_rows > max(count, _KEPT_ROWS):
            self._unnoted_rows -= len(self._unnoted.popleft()[1])

    def prints_of_inputs(self, tensors: Sequence[Tensor], rows: int) -> list[Prints]:
        """Return the fingerprints of a forward's inputs that may be tensors of a batch; nothing waits for a device."""
        return prints_of(tensors, rows, self.axis, kinds=self._kinds) if self._kinds else []

    @property
    def comparison(self) -> str:
        """What releases were compared with the draws by, as one clause; empty before the first.

        Privacy:
            No numbers: those of batches without rows are not public.
        """
        if not self.compared:
            reason = "no input of the model is a tensor of the loader's batch"
            return f"records: only their number is compared with what was drawn, because {reason}" * bool(self.counted)
        return "records: compared with those drawn" + ", in some releases only their number" * bool(self.counted)

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
        """Return the draws that a step's backward passes, by rows, went through, None if they do not fit."""
        # Changes nothing.
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
        return Match(self._widest(complete), frozenset(complete), max(complete.values()))

    def crossed(self, passes: Sequence[Sequence[Sequence[Prints]]]) -> Crossed | None:
        """Return a row position with different records in two inputs of a backward, if there is one."""
        # It is looked for in the first release of several inputs, and in later ones now and then.
        several = [one for one in passes if sum(len(prints_KB) for found in one for _, prints_KB in found) > 1]
        self._several += bool(several)
        if not several or not self._schedule.take(self._several):
            return None
        memory = self._note()
        found = (crossed_in([read(forward) for forward in one], memory) for one in several)
        return next((one for one in found if one is not None), None)

    def trace(self, match: Match, passes: Sequence[Sequence[Sequence[Prints]]], *, times: int) -> Match | Replay:
        """Return the match without draws that the records contradict, or the `Replay` if none is left."""
        # passes: of each backward pass, and each forward behind it, the fingerprints of the inputs. times: how often
        # the account has a record take part.
        inputs = [prints for one in passes for forward in one for prints in forward]
        if not inputs:
            return match
        if len(match.spans) == 1 and are_same(passes, [part for draw in match.draws for part in draw.parts]):
            return replace(match, compared=True, inputs=inputs)
        memory = self._note()
        drawn = {span: self._drawn_in(span) for span in match.spans}
        widest = max(drawn.values(), key=len)
        seen = counted([own for forward in one for own in telling(read(forward), widest, memory)] for one in passes)
        if not seen:
            return match
        last = self._pass if self._once_a_pass else None
        found = {
            span: replay_of(seen, rows, self._members_of(span), memory, times=times, released_in=last)
            if self._is_shown(span)
            else None
            for span, rows in drawn.items()
        }
        spans = frozenset(span for span, replay in found.items() if replay is None)
        if not spans:
            return min((replay for replay in found.values() if replay is not None), key=lambda replay: replay.repeated)
        return replace(match, draws=self._widest(spans), spans=spans, compared=True, inputs=inputs)

    def use(self, match: Match) -> None:
        """Mark draws as used by a release."""
        if match.compared:
            self.compared += 1
            if self._once_a_pass:
                self._released.append((match.inputs, self._pass))
            if len(self._released) > _KEPT:
                self._note()
        elif any(draw.rows for draw in match.draws):
            self.counted += 1
        self._places = match.ends
        self._drop(min(match.ends))

    def forget(self) -> None:
        """Forget all draws, as after a sampler's position was set."""
        self._drop(len(self._draws))
        self._places = frozenset([0])
        self._delivered = None

    def _widest(self, spans: Iterable[tuple[int, int]]) -> tuple[Draw, ...]:
        """Return the draws of the span that has most of them."""
        return tuple(self._draws[slice(*max(spans, key=lambda span: span[1] - span[0]))])

    def _drawn_in(self, span: tuple[int, int]) -> Counter[int]:
        return counted(read(part) for draw in self._draws[slice(*span)] for part in draw.parts)

    def _members_of(self, span: tuple[int, int]) -> set[int]:
        return {record for draw in self._draws[slice(*span)] for record in draw.members}

    def _is_shown(self, span: tuple[int, int]) -> bool:
        return all(draw.is_shown for draw in self._draws[slice(*span)])

    def _note(self) -> RecordMemory:
        """Note the contents handed out and released since the last call; waits for the device of the batches."""
        memory = self._memory = self._memory or RecordMemory()
        of_leaf: dict[Leaf, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
        for number, records, found in self._unnoted:
            for leaf, own in read(found):
                of_leaf.setdefault(leaf, []).append((own, records, np.full(len(own), number)))
        for leaf, noted in of_leaf.items():
            memory.note(leaf, *map(np.concatenate, zip(*noted, strict=True)))
        for inputs, number in self._released:
            for _, own in read(inputs):
                memory.release(own, number)
        self._unnoted.clear()
        self._unnoted_rows = 0
        self._released.clear()
        return memory

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
        """Return the states after a further pass: the rest of a draw, the same rows again, or the next draw."""
        # A state is the first draw, the present one, and how many of its rows were taken.
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


def _rows_of(part: Sequence[Prints]) -> int:
    return part[0][1].shape[1] if part else 0
