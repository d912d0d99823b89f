"""`ForwardContext`: what is known of one forward of a model. Every operation takes it, and it knows of none.

Shape letter: B samples.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

from torch import Tensor

from ghostclip.capture import gradient_hooks
from ghostclip.capture.call_sites import MAX_WAYS, CallSite, CallSites, Visits
from ghostclip.capture.casts import Casts
from ghostclip.capture.row_tracker import RowTracker
from ghostclip.capture.sizes import Resized

# A use as its forward counts it: its call site, and the leading sizes of its rows, none of another than a rule's.
Counted: TypeAlias = tuple[CallSite, tuple[int, ...]]


class _Counts(NamedTuple):
    """How often parameters were consumed, and addresses kept, in how many uses; parameters of more than one."""

    uses: int
    names: Counter[str]
    again: frozenset[str]
    addresses: Counter[int]


_NO_COUNTS: Final = _Counts(0, Counter(), frozenset(), Counter())


def _lists() -> defaultdict[str, list[Tensor]]:
    return defaultdict(list)


@dataclass(frozen=True, eq=False)
class Surroundings:
    """What all forwards of a model share.

    Attributes:
        anchor: A leaf at which every captured path of the graph ends.
        sites: What is remembered of call sites.
        rows: Follows rows of data outside the graph.
        deliver: Takes a use and the gradient of its output when it arrives.
        describe: Names the module that owns a parameter, as ``path (Type)``.
        buffers: Yields the model's buffers, which outlive a forward.
        all_train: Tells whether all parameters that forwards have met are trained at the moment.
    """

    anchor: Tensor
    sites: CallSites
    rows: RowTracker
    deliver: Callable[[Any, Tensor], None]
    describe: Callable[[str], str]
    buffers: Callable[[], Iterable[Tensor]]
    all_train: Callable[[], bool] = lambda: False


@dataclass(eq=False)
class ForwardContext:
    """One forward of a model: what all its operations share.

    Attributes:
        around: What it shares with other forwards.
        batch_size: B.
        batch_axis: The axis of samples where the running operation's arguments are, as far as it is declared.
        is_dummy: The batch was empty and one dummy sample stands in for it.
        uses: The call site of every use, and of those of a rule the leading sizes.
        addresses: Where the inputs of many positions begin that uses keep.
        checkpointed: Activation checkpointing was active somewhere in it.
        ran_without_grad: Parameters were used with gradients switched off.
        consumed: A backward has gone through it.
        examined: The loss whose backward is about to go through it was examined.
        summed: That loss is a sum over the samples, which is told where a mean was declared.
        retained: Its graph outlives that backward, for another one.
        unproven: A use came from a call site on which there is no evidence yet.
        rehearsed: It was proved on a run of its own, before it ran.
        proves: Whether what was seen of it may be taken for proved: not where its samples are copies of one.
        inputs: Numbers (``id``) of the tensors that the model was called with, whose batch axis is declared.
        noted: What the caller noted of its inputs.
        reordered: Data was put into another order before a parameter met it.
        gathered: Rows that reached a parameter had been gathered on the way.
        stays_small: The model does not run with another number of samples.
        visits: How often each operation was called and was a use: see `call_sites.counted_as`.
        guessed: Some operation was taken as sizes suggest, since no shapes have shown where its samples lie.
        resized: The same forward with another number of samples, where it ran.
        unplanned: Elements of the per-sample gradients of all other uses.
        casts: What autocast made of inputs.
        input_sizes: What tells the sizes of the model's inputs, where its blocks are watched.
        blocks: Calls of its repeated blocks in order, likewise.
        checkpointed_by_model: Activation checkpointing was active that no memory plan asked for.
        spread: Parameters on several ranks, and whether each rank has parts of their gradients only (positions of a
            sample are divided among the ranks), by name.
        latest: The number of the node of the latest use; None before the first.
        hooks_before: How many hooks of others there had been when it began.
        hooks_until: The same when it had ended.
        announced: The number of the latest hook when it had ended.
        proofs: Numbers of the first node of the graph that proofs made after it, and of the first one behind theirs.
        met: Ways that nothing is proved of yet, each with the proved ones that it is to be among.
        looked_up: Ids by which rows of tables were looked up, by parameter.
        padded: Positions of its outputs that samples have only because others are longer, where that was looked at.
        has_float16: It may compute with numbers of float16.
        ends_on_mesh: The model returned tensors of a mesh, of which each rank has some classes.
    """

    around: Surroundings
    batch_size: int
    batch_axis: int
    is_dummy: bool = False
    uses: list[Counted] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    checkpointed: bool = False
    ran_without_grad: bool = False
    consumed: bool = False
    examined: bool = False
    summed: bool = False
    retained: bool = False
    unproven: bool = False
    proves: bool = True
    rehearsed: bool = False
    inputs: frozenset[int] = frozenset()
    noted: Any = None
    reordered: bool = False
    gathered: bool = False
    stays_small: bool = False
    visits: dict[str, Visits] = field(default_factory=dict)
    guessed: bool = False
    resized: Resized | None = None
    unplanned: int = 0
    casts: Casts = field(default_factory=Casts)
    input_sizes: Any = None
    blocks: list[Any] = field(default_factory=list)
    checkpointed_by_model: bool = False
    spread: dict[str, bool] = field(default_factory=dict)
    latest: int | None = None
    hooks_before: int = field(default_factory=gradient_hooks.by_others)
    hooks_until: int = field(default_factory=gradient_hooks.by_others)
    announced: int = -1
    proofs: tuple[int, int] = (0, 0)
    met: list[tuple[set[Any], Any]] = field(default_factory=list)
    looked_up: defaultdict[str, list[Tensor]] = field(default_factory=_lists)
    padded: list[Any] = field(default_factory=list)
    has_float16: bool = False
    ends_on_mesh: bool = False
    _recomputing: bool = False
    _counts: _Counts = _NO_COUNTS

    @property
    def use_counts(self) -> Counter[str]:
        """How often each parameter was consumed, by name."""
        return self._counted().names

    @property
    def readers(self) -> Counter[int]:
        """How many uses keep an input of many positions that begins at an address."""
        return self._counted().addresses

    @property
    def sizes(self) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        """Parameters and leading sizes of every use of a rule, in order."""
        return [(site.names, sizes) for site, sizes in self.uses if sizes]

    def stands_alone(self, names: Iterable[str], address: int) -> bool:
        """Return whether nothing else is told of a use's parameters in a backward, nor of its input.

        Args:
            names: The parameters.
            address: Where its input begins, if others may read it too; else 0.

        Returns:
            False also where a part runs again, which may bring another use.
        """
        if self.checkpointed or self.ran_without_grad:
            return False
        counts = self._counts if self._counts.uses == len(self.uses) else self._counted()
        return counts.again.isdisjoint(names) and (not address or counts.addresses[address] <= 1)

    def _counted(self) -> _Counts:
        """Count what the forward did, when that is asked for: a forward notes hundreds of uses."""
        if self._counts.uses != len(self.uses):
            names = Counter(chain.from_iterable([site.consumed for site, _ in self.uses]))
            again = frozenset([name for name, count in names.items() if count > 1])
            self._counts = _Counts(len(self.uses), names, again, Counter(self.addresses))
        return self._counts

    @property
    def runs_again(self) -> bool:
        """Whether a backward may run parts of it again, on parameters that must be substituted for that."""
        return self.checkpointed or self.ran_without_grad

    def meet(self, proved: set[Any], way: Any) -> None:
        """Ask for evidence on a forward, a part of which was come to in another way than before.

        Args:
            proved: The ways to that part that were proved.
            way: The way.
        """
        if len(proved) < MAX_WAYS:
            self.unproven = True
            self.met.append((proved, way))

    def meet_unknown(self) -> None:
        """Ask for evidence on a forward of which no other one can tell anything."""
        self.meet(set(), None)

    def prove(self) -> None:
        """Take the ways that were met for proved, unless it is a forward that proves nothing."""
        if not self.proves:
            return
        for proved, way in self.met:
            proved.add(way)
        self.met.clear()

    def begin_anew(self) -> None:
        """Count hooks from now on: those that were set before are a rehearsal's."""
        self.hooks_before = gradient_hooks.by_others()

    def anew(self) -> "ForwardContext":
        """Return a context for the same batch run once more."""
        return ForwardContext(
            self.around,
            self.batch_size,
            self.batch_axis,
            self.is_dummy,
            resized=self.resized,
            noted=self.noted,
            proves=self.proves,
            unproven=self.unproven,
        )

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Yield while a block runs whose inputs alone are kept, as a memory plan says."""
        self._recomputing = True
        try:
            yield
        finally:
            self._recomputing = False

    def note_checkpointing(self, *, again: bool) -> None:
        """Note that activation checkpointing is active.

        Args:
            again: A backward runs a checkpointed part again; who asked for it was noted before.
        """
        self.checkpointed = True
        self.checkpointed_by_model |= not (again or self._recomputing)

    @contextmanager
    def along(self, axis: int) -> Iterator[None]:
        """Yield while the operations inside a function have samples along another axis than the model's inputs.

        Args:
            axis: The axis.

        Yields:
            Nothing.
        """
        outside, self.batch_axis = self.batch_axis, axis
        try:
            yield
        finally:
            self.batch_axis = outside
