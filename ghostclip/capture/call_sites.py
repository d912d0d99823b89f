"""Call sites: the places in a model's code where parameters are consumed, and what was shown of each."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from ghostclip.capture.sizes import CallLayout
from ghostclip.capture.statistics import Statistics
from ghostclip.capture.tracked import TrackedTensor

# A call site that no gradient reaches (zero-initialised layers) is asked again in this many forwards.
MAX_ATTEMPTS: Final = 3
# How a forward comes from one place to the next: over how many nodes of the graph, by which kind of node at last, and
# outside the graph over how many calls. Whatever puts rows into another order on the way makes another one.
Way: TypeAlias = tuple[int, type, int]
# Of a place that is come to in more ways than these no further one is asked about by itself.
MAX_WAYS: Final = 16


@dataclass(eq=False, slots=True)
class CallSite:
    """A place in the model's code where parameters are consumed, told apart by parameters and operation.

    Attributes:
        names: The parameters.
        operation: The torch function.
        consumed: The parameters, each as often as it is consumed.
        forms: What each parameter's factors are there.
        chosen: The row map that evidence confirmed (its key), once there was evidence.
        attempts: How many probes passed it without a gradient to judge by.
        at_once: Gradients could be formed there for all samples at once, without a rule.
        statistics: What came in for each of its arguments in the last backward.
        sizes: The sizes that this was worked out for.
        ways: The ways to it that were proved.
        way: The one of them that a forward came last.
    """

    names: tuple[str, ...]
    operation: str
    consumed: tuple[str, ...]
    forms: dict[str, str] = field(default_factory=dict)
    chosen: tuple[str, int] | None = None
    attempts: int = 0
    at_once: bool = False
    statistics: dict[str, Statistics] = field(default_factory=dict)
    sizes: tuple[Any, ...] = ()
    ways: set[Any] = field(default_factory=set)
    way: Any = None

    @property
    def proven(self) -> bool:
        """Whether there is evidence on it, or none is to be had."""
        return self.attempts >= MAX_ATTEMPTS

    def describe(self) -> str:
        """Return the name of the place for an error message."""
        return f"parameter '{', '.join(self.names)}' in {self.operation}"


@dataclass(frozen=True, eq=False)
class OperationForm:
    """What operations have in common that may differ in their parameters alone.

    Attributes:
        elements: Elements of the parameters of one of them.
    """

    elements: int


class CallSites:
    """What is remembered from forward to forward.

    Attributes:
        table: Every call site seen so far.
        layouts: Where samples lie in the arguments of operations, as resized forwards have shown.
        outputs: The same for the model's outputs.
        reentrant: Activation checkpointing of the reentrant kind was met.
        told: Parameters of whose slow sites the user was told.
        forms: Forms of operations that may differ in their parameters alone, by what makes each: one object each.
        ends: The ways from the last use to the outputs that were proved.
    """

    def __init__(self) -> None:
        """Make an empty memory."""
        self.table: dict[Any, CallSite] = {}
        self.layouts: dict[Any, CallLayout] = {}
        self.outputs: tuple[int, ...] = ()
        self.reentrant = False
        self.told: set[tuple[str, ...]] = set()
        self.forms: dict[Any, OperationForm] = {}
        self.ends: set[Any] = set()

    def forget(self) -> None:
        """Ask for all evidence anew: the model was changed."""
        self.table.clear()
        self.layouts.clear()
        self.ends.clear()
        self.outputs = ()

    def forget_since(self, count: int) -> None:
        """Forget the call sites of a forward that was misread.

        Args:
            count: How many sites there were before it.
        """
        for number in list(self.table)[count:]:
            del self.table[number]

    def at(self, number: tuple[Any, int], tracked: Iterable[TrackedTensor], form: str, gathered: str) -> CallSite:
        """Return a call site, made on first sight.

        Args:
            number: The key of the operation, see `key_of`, and its number in the forward.
            tracked: The tracked tensors it consumes.
            form: What its factors are, for the coverage table.
            gathered: How rows seem to have been gathered on the way to it, see `RowMap.gathered`.

        Returns:
            The site; a layer called several times in a forward has one for each call, since layouts may differ, and
            what is consumed in another way than before has one of its own: its evidence says nothing about the other.
        """
        tracked, (key, _) = list(tracked), number
        numbered = (*number, form, gathered)
        if numbered not in self.table:
            consumed = tuple(leaf for t in tracked for leaf in t.origin.names)
            self.table[numbered] = CallSite(tuple(dict.fromkeys(consumed)), key[1], consumed)
        site = self.table[numbered]
        for t in tracked:
            shown = "dense" if form.startswith("outer") and t.origin.value.dim() < 2 else form
            site.forms.update(dict.fromkeys(t.origin.names, shown))
        return site

    def states(self) -> list[tuple[CallSite, tuple[str, int] | None, int]]:
        """Return what is known of every site, for `restore`."""
        return [(site, site.chosen, site.attempts) for site in self.table.values()]

    @staticmethod
    def restore(states: Iterable[tuple[CallSite, tuple[str, int] | None, int]]) -> None:
        """Forget what was learnt of sites since.

        Args:
            states: What `states` returned.
        """
        for site, chosen, attempts in states:
            site.chosen, site.attempts = chosen, attempts


def key_of(tracked: Iterable[TrackedTensor], name: str) -> tuple[Any, ...]:
    """Return what tells an operation on parameters from others.

    Args:
        tracked: Its tracked arguments.
        name: Its name.

    Returns:
        The names of the parameters, and its own.
    """
    return tuple(t.origin.names for t in tracked), name


# How often an operation was called in a forward, and how often it was a use.
Visits: TypeAlias = tuple[int, int]
NEVER: Final[Visits] = (0, 0)
FIRST: Final[Visits] = (1, 1)


def counted_as(key: tuple[Any, ...]) -> str:
    """Return under what a forward counts an operation.

    Args:
        key: See `key_of`.

    Returns:
        A string: it keeps its hash, nested tuples work theirs out at each look-up.
    """
    return f"{key}"
