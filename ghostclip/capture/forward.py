"""`ForwardContext`: what is known of one forward of a model. Every operation takes it, and it knows of none.

Shape letter: B samples.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ghostclip.capture.call_sites import MAX_WAYS, CallSite, CallSites, Resized, Visits
from ghostclip.capture.hooks import hooks_before_now
from ghostclip.capture.inputs import RowTracker
from ghostclip.capture.nodes import Casts


class _Counts(NamedTuple):
    """Counts of uses by parameter and by stored address, and parameters of more than one use."""

    uses: int  # how many were counted
    names: Counter[str]  # uses of each parameter
    again: frozenset[str]  # parameters of several uses
    addresses: Counter[int]  # uses that store the input at an address


_NO_COUNTS: Final = _Counts(0, Counter(), frozenset(), Counter())


@dataclass(frozen=True, eq=False)
class Surroundings:
    """State that all forwards of a model share."""

    anchor: Tensor  # a leaf at which every captured path of the graph ends
    sites: CallSites
    rows: RowTracker  # tracker of rows of data outside the graph
    deliver: Callable[[Any, Tensor], None]  # takes a use and the gradient of its output when it arrives
    describe: Callable[[str], str]  # names the module that owns a parameter, as ``path (Type)``
    buffers: Callable[[], Iterable[Tensor]]  # yields the model's buffers, which outlive a forward
    # tells whether all parameters that forwards have met are trained at the moment
    all_train: Callable[[], bool] = lambda: False


@dataclass(eq=False)
class ForwardContext:
    """One forward of a model: what all its operations share."""

    around: Surroundings  # what it shares with other forwards of the model
    batch_size: int  # B
    batch_axis: int  # the axis of samples where the running operation's arguments are, as far as it is declared
    is_dummy: bool = False  # the batch was empty and one dummy sample stands in for it
    # call site of every use, and of those of a rule the leading sizes
    uses: list[tuple[CallSite, tuple[int, ...]]] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)  # of inputs of many positions that uses store
    checkpointed: bool = False  # activation checkpointing was active somewhere in it
    ran_without_grad: bool = False  # parameters were used with gradients switched off
    # either of them: a backward may run parts of it again, on parameters that must be substituted for that
    runs_again: bool = False
    consumed: bool = False  # a backward has gone through it
    examined: bool = False  # the loss whose backward is about to go through it was examined
    summed: bool = False  # that loss is a sum over the samples, which is told where a mean was declared
    start: float = 1.0  # what the backward that runs through it began with at a loss for all samples
    is_tied: bool = False  # gradients leave the model by its inputs
    retained: bool = False  # its graph outlives that backward, for another one
    unproven: bool = False  # a use came from a call site on which there is no evidence yet
    proves: bool = True  # whether its evidence counts: not where its samples are copies of one
    compared: bool = False  # its outputs were, with those of other samples in its batch
    rehearsed: bool = False  # it was proved on a run of its own, before it ran
    # numbers (``id``) of the tensors that the model was called with, whose batch axis is declared
    inputs: frozenset[int] = frozenset()
    noted: Any = None  # the caller's note on its inputs
    losses: list[Any] = field(default_factory=list)  # how losses of its outputs were computed, where that is known
    following: list[Any] = field(default_factory=list)  # nodes of the scalars among its outputs that follow the batch
    refusal: str = ""  # why its loss is refused, where other samples changed something in it
    alone: bool = False  # its loss was computed with other samples, which changed nothing
    reordered: bool = False  # data was put into another order before a parameter met it
    gathered: bool = False  # rows that reached a parameter had been gathered on the way
    stays_small: bool = False  # the model does not run with another number of samples
    # how often each operation was called and was a use: see `call_sites.counted_as`
    visits: dict[str, Visits] = field(default_factory=dict)
    guessed: bool = False  # some operation was taken as sizes suggest, since no shapes have shown where its samples lie
    resized: Resized | None = None  # the same forward with another number of samples, where it ran
    unplanned: int = 0  # elements of the per-sample gradients of all other uses
    casts: Casts = field(default_factory=Casts)  # autocast's copies of inputs
    input_sizes: Any = None  # key of the sizes of the model's inputs, where its blocks are watched
    blocks: list[Any] = field(default_factory=list)  # calls of its repeated blocks in order, where they are watched
    checkpointed_by_model: bool = False  # activation checkpointing was active that no memory plan asked for
    # parameters on several ranks, and whether each rank has parts of their gradients only (positions of a sample are
    # divided among the ranks), by name
    spread: dict[str, bool] = field(default_factory=dict)
    latest: int | None = None  # the number of the node of the latest use; None before the first
    hooks_before: int = field(default_factory=hooks_before_now)  # number of others' hooks when it began
    hooks_until: int = field(default_factory=hooks_before_now)  # number of others' hooks when it had ended
    announced: int = -1  # the number of the latest hook when it had ended
    # numbers of the first node of the graph that proofs made after it, and of the first one behind theirs
    proofs: tuple[int, int] = (0, 0)
    # unproved ways, each with the set of proved ones that it is to join
    new_ways: list[tuple[set[Any], Any]] = field(default_factory=list)
    # ids by which rows of tables were looked up, by parameter
    looked_up: defaultdict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    # positions of its outputs that samples have only because others are longer, once computed
    padded: list[Any] = field(default_factory=list)
    has_float16: bool = False  # it may compute with numbers of float16
    # what autocast computes with where it was on at a use, be it within the model alone
    autocast: torch.dtype | None = None
    ends_on_mesh: bool = False  # the model returned tensors of a mesh, of which each rank has some classes
    _recomputing: bool = False  # whether a block runs under a checkpoint of the memory plan
    _counts: _Counts = _NO_COUNTS  # of `uses`, when they were last counted

    @property
    def use_counts(self) -> Counter[str]:
        """Number of uses of each parameter, by name."""
        if self._counts.uses != len(self.uses):
            self._count()
        return self._counts.names

    @property
    def readers(self) -> Counter[int]:
        """Number of uses that store an input of many positions, by address."""
        if self._counts.uses != len(self.uses):
            self._count()
        return self._counts.addresses

    @property
    def sizes(self) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        """Parameters and leading sizes of every use of a rule, in order."""
        return [(site.names, sizes) for site, sizes in self.uses if sizes]

    def stands_alone(self, names: Iterable[str], address: int) -> bool:
        """Return whether a use's parameters (not tied) and its input (no other layer's) have no other use."""
        # False also where a part runs again (checkpointing), which may bring another use. `address` is 0 where nobody
        # else may read the input.
        if self.runs_again:
            return False
        if self._counts.uses != len(self.uses):
            self._count()
        counts = self._counts
        return counts.again.isdisjoint(names) and (not address or counts.addresses[address] <= 1)

    def _count(self) -> None:
        """Count uses by parameter and by input, when first asked for: a forward has hundreds of them."""
        names = Counter(chain.from_iterable([site.consumed for site, _ in self.uses]))
        again = frozenset([name for name, count in names.items() if count > 1])
        self._counts = _Counts(len(self.uses), names, again, Counter(self.addresses))

    def require_evidence(self, proved: set[Any], way: Any) -> None:
        """Mark the forward as unproved: it reached a call site in a way (`Way`) not among the proved ones."""
        if len(proved) < MAX_WAYS:
            self.unproven = True
            self.new_ways.append((proved, way))

    def require_evidence_always(self) -> None:
        """Mark the forward as unproved whatever earlier ones have shown, and no later one as proved by it."""
        self.require_evidence(set(), None)

    def prove(self) -> None:
        """Mark the ways that this forward took as proved, unless its evidence does not count."""
        if not self.proves:
            return
        for proved, way in self.new_ways:
            proved.add(way)
        self.new_ways.clear()

    def merge(self, other: "ForwardContext") -> None:
        """Add another forward's losses, padding and open proofs to this one's, as one loss follows from both."""
        self.losses += other.losses
        other.losses.clear()
        self.following += other.following
        self.padded = [*self.padded, *(one for one in other.padded if one not in self.padded)]
        self.unproven |= other.unproven
        self.hooks_before = min(self.hooks_before, other.hooks_before)
        self.hooks_until = min(self.hooks_until, other.hooks_until)

    def anew(self, samples: int | None = None) -> "ForwardContext":
        """Return a context for the same batch run once more, or for so many of its samples."""
        return ForwardContext(
            self.around,
            samples or self.batch_size,
            self.batch_axis,
            self.is_dummy,
            resized=self.resized and replace(self.resized, batch_size=samples or self.batch_size),
            noted=self.noted,
            proves=self.proves,
            unproven=self.unproven,
        )

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Yield while a block runs under a checkpoint, as a memory plan says."""
        self._recomputing = True
        try:
            yield
        finally:
            self._recomputing = False

    def record_checkpointing(self, *, again: bool) -> None:
        """Record that activation checkpointing is active."""
        # ``again``: a backward reruns a part, whose checkpoint was noted before.
        self.checkpointed = self.runs_again = True
        self.checkpointed_by_model |= not (again or self._recomputing)

    @contextmanager
    def along(self, axis: int) -> Iterator[None]:
        """Yield while the operations inside a function have samples along another axis than the model's inputs."""
        outside, self.batch_axis = self.batch_axis, axis
        try:
            yield
        finally:
            self.batch_axis = outside
