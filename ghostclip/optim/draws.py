"""Draws that a private sampler has made and no release has used yet.

A release is accounted as one draw. Batches reach the model through loaders, prefetchers and device movers that know
nothing of draws, and copy tensors on the way; but they keep the order. So the draws wait here in the order in which
they were made, and a step states how many rows its backward passes went through: rows that the next draws do not
explain were not drawn. Where the model takes in tensors of the loader's own batches, or views of them, it is known as
well which draw they are of.

What is not seen: copies of an earlier batch in the place of one that has as many rows, records that a loop exchanges
between such batches, and a part of a batch in the place of another part of as many rows.

A *logical batch* is what was sampled and what the accountant counts. When it does not fit in memory it is processed in
physical batches; every one but the last ends in a *virtual* step, which keeps the clipped sum and releases nothing.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ghostclip import _torch, _tree
from ghostclip.checks.unchecked import CheckSchedule
from ghostclip.errors import MissingGradientError


class BatchToken(NamedTuple):
    """Position of a physical batch, which travels with it from the sampler to the optimizer."""

    logical_id: int
    """Number of the logical batch within its pass over the loader."""
    chunk: int
    """Number of this physical batch within the logical batch, from 0."""
    is_last: bool
    """Whether the logical batch is complete with this one."""
    size: int
    """Samples in this physical batch; 0 only when the whole logical batch is empty."""


class LogicalBatch:
    """Progress of the logical batch that is being accumulated."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything, as after a release or an abandoned loop."""
        # the token of the physical batch handed out last, or None when batches come without tokens
        self.token: BatchToken | None = None
        self.skip_next = False  # whether the next step() is virtual
        self.open = False  # whether a virtual step was taken and nothing has been released since
        # the largest number of backward passes that one physical batch of this logical batch went through
        self.uses = 0
        # how often virtual steps went through a whole draw of the private sampler, the same one again included; known
        # when it is released
        self.rounds = 1
        self._taken: list[int] = []
        self._passes_seen = 0
        self._generation: int | None = None

    def enter(self, token: BatchToken, *, untaken: bool) -> None:
        """Note the token of the physical batch that is about to be processed; refuse one out of order."""
        # `untaken`: a backward through the part before is not stepped on, and would count for this one.
        if token.chunk > 0:
            if self.skip_next or untaken:
                raise MissingGradientError(
                    f"physical batch {token.chunk - 1} of logical batch {token.logical_id} was handed out, or gone "
                    "back through, and never stepped on (an exception that was caught?): the logical batch is "
                    "incomplete. Start a new loop."
                )
            expected = None if self.token is None else (self.token.logical_id, self.token.chunk + 1)
            if expected != (token.logical_id, token.chunk):
                raise MissingGradientError(
                    f"physical batch {token.chunk} of logical batch {token.logical_id} does not continue what was "
                    f"accumulated ({self.token}). Iterate over one private loader at a time, and start over after a "
                    "loop that was left early."
                )
        self.token = token
        self.skip_next = not token.is_last

    @staticmethod
    def require_last_part(token: BatchToken) -> None:
        """Refuse to release a logical batch before its last part was handed out."""
        if not token.is_last:
            raise MissingGradientError(
                f"step(): physical batch {token.chunk} of logical batch {token.logical_id} was stepped on before, and "
                "other parts follow: its records would be in the sum twice. Take one step() for each physical batch; "
                "to train on the records again, go over the loader again."
            )

    def count_passes(self, total: int, generation: int, *, empty: bool) -> None:
        """Note the backward passes since the last step; refuse none, unless the batch is empty, or lost sums."""
        # `total`: backwards in the clipper since the last release; `generation`: how often it has dropped its sums.
        if self._generation is not None and generation != self._generation:
            raise MissingGradientError(
                "the sums of an earlier part of this logical batch are gone (a backward failed, or somebody reset the "
                "clipper). What is left must not be released; start with the next logical batch."
            )
        if total == self._passes_seen and total > 0 and not empty:
            raise MissingGradientError(
                "step() was called without a backward since the last, virtual step: a part of the logical batch would "
                "be missing. Call loss.backward() for every physical batch."
            )
        self.uses = max(self.uses, total - self._passes_seen)
        self._passes_seen = total
        self._taken.append(total)

    @property
    def participations(self) -> int:
        """Backward passes that one record may have contributed to."""
        return max(1, self.uses * self.rounds)

    def note_rounds(self, rounds: int) -> None:
        """Note how often the parts went through a whole draw."""
        # Passes of one step() may all be over the same records; what virtual steps added up are parts of a draw, which
        # share no record, until the draw is complete.
        self.rounds = rounds if len(self._taken) > 1 else 1

    def rows_of_parts(self, rows: Sequence[int]) -> list[int]:
        """Return the rows of every backward pass, of several over one physical batch those of one."""
        # Passes of the last step are separate where it is the only one, as they may be over batches of their own.
        if len(self._taken) < 2:
            return list(rows)
        counts: list[int] = []
        for start, end in zip([0, *self._taken[:-1]], self._taken, strict=True):
            part = rows[start:end]
            counts += part[:1] if len(set(part)) == 1 else part
        # A rank has as many parts as the one with the most records, some perhaps without any.
        return counts if self.token is None else [count for count in counts if count] or counts[:1]

    def waiting(self, total: int) -> int:
        """Return how many of `total` backward passes no step has taken up yet."""
        return total - self._passes_seen

    def includes_all(self, total: int) -> bool:
        """Whether every one of `total` backward passes since the last release belongs to a virtual step."""
        return self.open and not self.waiting(total)

    def close_virtual_step(self, generation: int) -> None:
        """Close a virtual step: the sum stays and the next physical batch adds to it."""
        self.skip_next = False
        self.open = True
        self._generation = generation


# How deep tensors are looked for in batches that are objects.
_INTO_OBJECTS = 4
# Fewer rows may be in another order in two inputs by chance: one-hot classes, say.
_FEWEST: Final = 6


@dataclass(frozen=True)
class Draw:
    """One draw of the sampler."""

    number: int  # position in the whole training, from 0; the same on all ranks
    rows: int  # records of it that are this rank's
    records: int  # records of it on all ranks together


@dataclass(frozen=True)
class Match:
    """The draws that a step's rows come from."""

    # distinct draws, in order, as many as it may have been; several where they were accumulated into the step
    draws: tuple[Draw, ...]
    spans: frozenset[tuple[int, int]]  # places in the log that the step may have begun at and got to
    rounds: int  # how often it may have gone through a whole draw, the same one again included
    known: frozenset[int] = frozenset()  # numbers of the draws that inputs were known to be of; empty where none was


class Replay(NamedTuple):
    """A draw that a step's records are of, while another one is to be released."""

    number: int
    carried: bool = False  # whether it is known by what a forward has returned


class Crossed(NamedTuple):
    """Two inputs behind one loss that have the same records in different orders."""

    places: int  # number of rows where they differ
    rows: int


class NotedInputs(NamedTuple):
    """What is known of the inputs of a forward, or of all behind a backward."""

    draws: frozenset[int] = frozenset()  # numbers of the draws whose tensors are among them
    tensors: Sequence[Tensor] = ()  # all of a forward, until the backward is over
    rows: int = 0
    crossed: Crossed | None = None
    carried: frozenset[int] = frozenset()  # numbers of earlier draws that forwards have computed some of them from
    edges: Sequence[Any] = ()  # where gradients leave the model, by its inputs


class HandedOut:
    """Which draw the tensors are of that a loader has handed out, for as long as somebody holds them."""

    def __init__(self) -> None:
        # By the tensor's `id`, with its version then: what is written into it later may be of any draw. What they are
        # views of stands for them. What is handed out with several draws is of none: constants, a tensor of all data.
        self._of: dict[int, tuple[weakref.ref[Tensor], Draw | None, int]] = {}
        self._most = 64

    def note(self, tensors: Iterable[Tensor], draw: Draw) -> None:
        """Note tensors of a draw."""
        if len(self._of) > self._most:
            self._of = {key: one for key, one in self._of.items() if one[0]() is not None}
            self._most = 64 + 2 * len(self._of)
        for tensor in tensors:
            if tensor.is_inference():
                continue
            for source in (tensor, _torch.base_of(tensor)):
                if source is not None:
                    before = self._of.get(id(source))
                    again = before is not None and before[0]() is source and before[1] != draw
                    self._of[id(source)] = weakref.ref(source), None if again else draw, _torch.version(source)

    def draw_of(self, tensor: Tensor) -> Draw | None:
        """Return the draw that a tensor, or what it is a view of, was handed out with."""
        for source in (tensor, _torch.base_of(tensor)):
            noted = self._of.get(id(source))
            if source is not None and noted is not None and noted[0]() is source:
                return noted[1] if _torch.version(source) == noted[2] else None
        return None


class DrawLog:
    """Draws in the order in which they were made, and how far releases have used them.

    Privacy:
        Each draw is used by at most one release. Draws that no release used when a pass was abandoned are forgotten.
        Tensors of the loader's batches are known to be of their draw.
    """

    # The position is a set: where several backwards of one step fit one draw as well as two, both stay possible until
    # later rows tell. `once_a_pass`: the account allows any record once in each pass, in whichever release of it, so
    # that draws of a pass may be released in any order.
    def __init__(self, *, once_a_pass: bool = False) -> None:
        # whether a private optimizer uses the draws, so that unused ones are what is left to train on
        self.claimed = False
        # called as a batch is handed out, with its tensors, and when whoever takes them takes no more
        self.on_batch: Callable[[Sequence[Tensor]], object] | None = None
        self.on_end: Callable[[], object] | None = None
        self.axis = 0  # of the rows of a batch's tensors
        # releases whose inputs were known to be of their draws, and those of which rows were counted alone
        self.known = self.counted = 0
        self._once_a_pass = once_a_pass
        self._several = 0
        self._schedule = CheckSchedule()
        self._handed_out = HandedOut()
        # of what forwards have returned, by its memory, which detach() keeps: the draw that was due, and its version;
        # made when something is, as it cannot be pickled
        self._made: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[int | None, int]] | None = None
        # numbers of the draws that may still be released, where their order is free
        self._unreleased: set[int] = set()
        self._draws: list[Draw] = []
        self._places: frozenset[int] = frozenset([0])
        self._delivered: int | None = None
        self._pass_begun = 0
        self._complete = True
        self._released_to = -1  # number of the latest draw that a release has used
        self.set_back_from = -1  # that number when an earlier position was loaded; -1 where none was

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: nobody is told of its batches."""
        return {**vars(self), "on_batch": None, "on_end": None}

    def begin_pass(self) -> None:
        """Note that a pass over the data begins; unused draws of an abandoned one are forgotten."""
        # A prefetcher may still hold the last batches of a pass that was drawn to its end.
        self._drop(self._pass_begun if self._complete else len(self._draws))
        self._unreleased &= {draw.number for draw in self._draws}
        self._pass_begun = len(self._draws)
        self._places |= {self._pass_begun}
        self._complete = False
        self._delivered = None

    def end_pass(self) -> None:
        """Note that a pass was drawn to its end."""
        self._complete = True

    def add(self, draw: Draw) -> None:
        self._draws.append(draw)
        if self._once_a_pass:
            self._unreleased.add(draw.number)

    def follow_deliveries(self) -> None:
        """Count the pass's draws when `deliver` says that they are handed out, not when workers fetch them."""
        if self._delivered is None:
            self._delivered = self._pass_begun

    def deliver(self) -> None:
        """Note that the next draw was handed out."""
        if self._delivered is not None:
            self._delivered += 1

    def show(self, batch: Any) -> None:
        """Note the tensors of a batch, or of a part of one, of the draw that was handed out last."""
        if self.claimed and self._delivered and self._delivered <= len(self._draws):
            tensors = _tree.tensors(batch, into_objects=_INTO_OBJECTS)
            self._handed_out.note(tensors, self._draws[self._delivered - 1])
            if self.on_batch is not None:
                self.on_batch(tensors)

    def stop(self) -> None:
        """Note that whoever takes batches of a pass takes no more."""
        if self.on_end is not None:
            self.on_end()

    def drawn_with(self, tensor: Tensor) -> int:
        """Return how many records were drawn, for this rank, with a tensor; 0 where it is of no draw."""
        draw = self._handed_out.draw_of(tensor)
        return 0 if draw is None else draw.rows

    def note(self, tensors: Sequence[Tensor], rows: int) -> NotedInputs:
        """Return what is known of a forward's inputs."""
        draws, carried = [self._handed_out.draw_of(tensor) for tensor in tensors], set[int]()
        made: Mapping[Any, tuple[int | None, int]] = self._made or {}
        for tensor in tensors if made else ():
            if type(tensor) is Tensor and tensor.layout is torch.strided:
                due, version = made.get(tensor.untyped_storage(), (None, 0))
                if due is not None and due != self.next_number and version == _torch.version(tensor):
                    carried.add(due)
        known = frozenset([draw.number for draw in draws if draw is not None])
        return NotedInputs(known, tensors, rows, carried=frozenset(carried))

    def hand_on(self, output: Tensor) -> None:
        """Note what a forward returns: the records of the draw that is due are in it, and in what it is given to."""
        if type(output) is Tensor and output.layout is torch.strided:
            if self._made is None:
                self._made = weakref.WeakKeyDictionary()
            self._made[output.untyped_storage()] = self.next_number, _torch.version(output)

    def join(self, forwards: Sequence[NotedInputs]) -> NotedInputs:
        """Return what is known of all inputs behind a backward: orders of rows in the first ones, and now and then."""
        inputs = itertools.chain(*map(attrgetter("tensors"), forwards))
        edges = [*map(get_gradient_edge, filter(attrgetter("requires_grad"), inputs))]
        if len(forwards) == 1 and len(forwards[0].tensors) < 2:
            return forwards[0]._replace(tensors=(), edges=edges)
        draws = frozenset().union(*(one.draws for one in forwards))
        carried = frozenset().union(*(one.carried for one in forwards))
        alike = _of_kinds([rows for one in forwards for rows in self._rows_first(one)])
        self._several += bool(alike)
        crossed = crossed_in(alike) if alike and self._schedule.advance(self._several) else None
        return NotedInputs(draws, crossed=crossed, carried=carried, edges=edges)

    def _rows_first(self, inputs: NotedInputs) -> list[Tensor]:
        """Return the inputs that have rows, along their first axis."""
        axis, rows = self.axis, inputs.rows
        moved = [t.movedim(axis, 0) if axis and axis < t.dim() and t.shape[axis] == rows else t for t in inputs.tensors]
        return [tensor for tensor in moved if tensor.dim() and len(tensor) == rows]

    @property
    def comparison(self) -> str:
        """What tells that releases were of their draws, as one clause; empty before the first.

        Privacy:
            No numbers: those of batches without rows are not public.
        """
        if not self.known:
            reason = "no input of the model is a tensor of the loader's batch"
            return f"records: only their number is compared with what was drawn, because {reason}" * bool(self.counted)
        return "records: of the batches drawn" + ", in some releases only as many" * bool(self.counted)

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
    def repeats(self) -> bool:
        """Whether the first draw that no release has used was released before, as an earlier position was loaded."""
        number = self.next_number
        return number is not None and number <= self.set_back_from and not self._once_a_pass

    @property
    def next_is_empty(self) -> bool:
        """Whether the next draw certainly has no rows on this rank."""
        end = self._end
        rows = [self._draws[index].rows for index in self._places if index < end]
        return bool(rows) and not any(rows)

    def match(self, passes: Sequence[int]) -> Match | None:
        """Return the draws that a step's backward passes, by rows, went through, None if they do not fit."""
        # Changes nothing.
        first, *others = passes or [0]
        states = {(start, start, first): 0 for start in self._places if self._begins(start, first)}
        for rows in others:
            states = self._after(states, rows)
        complete = {
            (start, index + 1): rounds + 1
            for (start, index, taken), rounds in states.items()
            if taken == self._draws[index].rows
        }
        if not complete:
            return None
        return Match(self._widest(complete), frozenset(complete), max(complete.values()))

    def trace(self, match: Match, passes: Sequence[NotedInputs | None]) -> Match | Replay:
        """Return the match without draws that its inputs are not of, or the `Replay` if none is left."""
        carried = [number for one in passes if one is not None for number in one.carried]
        if carried:
            return Replay(min(carried), carried=True)
        known = frozenset().union(*[one.draws for one in passes if one is not None])
        if not known:
            return match
        # Of each input its draws are known: what else is in a span was left out.
        whole = not self._once_a_pass and all(one is not None and one.draws for one in passes)
        fits, others = [], known
        for span in match.spans:
            draws = self._draws[slice(*span)]
            released = self._unreleased if self._once_a_pass else {draw.number for draw in draws}
            others = others - released
            if known <= released and not (whole and len(known) < sum([draw.rows > 0 for draw in draws])):
                fits.append(span)
        if not fits:
            return Replay(min(others or known))
        spans = frozenset(fits)
        return replace(match, draws=self._widest(spans), spans=spans, known=known)

    def use(self, match: Match) -> None:
        """Mark draws as used by a release."""
        if match.known:
            self.known += 1
        elif any(draw.rows for draw in match.draws):
            self.counted += 1
        self._unreleased -= match.known or {draw.number for draw in match.draws}
        self._places = frozenset([end for _, end in match.spans])
        self._released_to = max(self._released_to, self._draws[min(self._places) - 1].number)
        self._drop(min(self._places))

    def forget(self, *, anew: bool) -> None:
        """Forget all draws, as after a sampler's position was set; ``anew``: its draws are of another key."""
        self._released_to = self.set_back_from = -1 if anew else self._released_to
        self._drop(len(self._draws))
        self._places = frozenset([0])
        self._delivered = None

    def _widest(self, spans: Collection[tuple[int, int]]) -> tuple[Draw, ...]:
        """Return the draws of the span that has most of them."""
        start, end = max(spans, key=lambda span: span[1] - span[0]) if len(spans) > 1 else next(iter(spans))
        return tuple(self._draws[start:end])

    def _drop(self, count: int) -> None:
        """Forget the first draws, and places among them."""
        del self._draws[:count]
        self._places = frozenset([index - count for index in self._places if index >= count]) or frozenset([0])
        self._pass_begun = max(0, self._pass_begun - count)
        self._delivered = None if self._delivered is None else max(0, self._delivered - count)

    @property
    def _end(self) -> int:
        return len(self._draws) if self._delivered is None else min(self._delivered, len(self._draws))

    def _begins(self, index: int, rows: int) -> bool:
        """Whether a pass of so many rows may be the first one through the draw at `index`, or all of it."""
        return index < self._end and rows <= self._draws[index].rows

    def _after(self, states: dict[tuple[int, int, int], int], rows: int) -> dict[tuple[int, int, int], int]:
        """Return the states after a further pass: the rest of a draw, the same rows again, or the next draw."""
        # A state is the first draw, the present one, and how many of its rows were taken.
        reached: dict[tuple[int, int, int], int] = {}
        for (start, draw, taken), rounds in states.items():
            left = self._draws[draw].rows - taken
            # A loop that cuts a draw into parts has some without rows, where it has fewer rows than parts.
            moves = [((start, draw, taken + rows), rounds)] if rows <= left else []
            if not left:
                moves += [((start, other, rows), rounds + 1) for other in (draw, draw + 1) if self._begins(other, rows)]
            for state, times in moves:
                reached[state] = max(times, reached.get(state, 0))
        return reached


def _of_kinds(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return tensors of one dtype and shape, where several that are not the same one have enough rows."""
    kinds: defaultdict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        of_kind = kinds[tensor.dtype, tensor.shape, tensor.device]
        if type(tensor) is Tensor and tensor.layout is torch.strided and all(one is not tensor for one in of_kind):
            of_kind.append(tensor)
    return [of_kind for of_kind in kinds.values() if len(of_kind) > 1 and len(of_kind[0]) >= _FEWEST]


def crossed_in(alike: Sequence[Sequence[Tensor]]) -> Crossed | None:
    """Return where two inputs of one kind have the same rows in different orders; waits for their device."""
    for of_kind in alike:
        for one, other in itertools.combinations(map(_rows_in, of_kind), 2):
            if one != other and len(set(one)) == len(one) and set(one) == set(other):
                return Crossed(sum(a != b for a, b in zip(one, other, strict=True)), len(one))
    return None


def _rows_in(tensor: Tensor) -> list[bytes]:
    rows = tensor.detach().reshape(len(tensor), -1).contiguous().cpu()
    return [row.tobytes() for row in rows.view(torch.uint8).numpy()]
