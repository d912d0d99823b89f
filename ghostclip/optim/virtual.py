"""Virtual steps: which physical batches belong to one logical batch, and how far it has come.

A logical batch is what was sampled and what the accountant counts. When it does not fit in memory it is processed in
physical batches; every one but the last ends in a *virtual* step, which keeps the clipped sum and releases nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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

    def enter(self, token: BatchToken) -> None:
        """Note the token of the physical batch that is about to be processed; refuse one out of order."""
        if token.chunk > 0:
            if self.skip_next:
                raise MissingGradientError(
                    f"physical batch {token.chunk - 1} of logical batch {token.logical_id} was handed out and never "
                    "stepped on (an exception that was caught?): the logical batch is incomplete. Start a new loop."
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
