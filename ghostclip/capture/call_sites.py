"""Call sites: the places in a model's code where parameters are consumed, what was shown of each, and its sizes.

Of the largest backward through a site its *statistics* are kept: the sizes that say what a parameter costs, no tensor.

Which axes hold samples is read off another forward, in which they are shorter or longer (`Resized`): one that is proved
runs first without gradients on a few samples of the batch, or one more (see `ghostclip.checks.batches`). Each torch
function then knows the shapes of its arguments for N samples, and the forward itself those for B: an axis that differs
holds samples, a tensor that does not is a constant. Values play no part, so that rounding does not. Calls are told
apart by their function, its number, and the call they happen in; where two forwards do not run alike, nothing is known.

Shape letters: B samples, N of the other forward, or B·S for S slots (groups of a convolution), T positions, I inputs, O
outputs.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from ghostclip.capture.tracked import TrackedTensor

# In the place of an axis: the tensor is the same for any number of samples; its rows were selected, or several axes
# differ.
CONSTANT: Final = -1
UNKNOWN: Final = -2
# Which function, for which time, and the call around it.
Key = tuple[Any, ...]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CallLayout:
    """Where samples lie in the tensors of one call."""

    inputs: tuple[int, ...]  # for every tensor among the arguments, in order, an axis, `CONSTANT` or `UNKNOWN`
    outputs: tuple[int, ...] = ()  # the same for the results


class Calls:
    """The calls of one forward, numbered."""

    def __init__(self) -> None:
        self._around: Key = ()  # key of the call that runs; empty outside of calls
        self._counts: defaultdict[Key, int] = defaultdict(int)  # calls by key of the call around and function

    def key(self, func: Callable[..., Any]) -> Key:
        """Count a call of a function, and return its key: the call around it, the function, and its number."""
        self._counts[self._around, func] += 1
        return self._around, func, self._counts[self._around, func]

    @contextmanager
    def inside(self, key: Key) -> Iterator[None]:
        """Yield while calls happen inside another one."""
        before, self._around = self._around, key
        try:
            yield
        finally:
            self._around = before


@dataclass(frozen=True)
class Resized:
    """A forward with another number of samples."""

    calls: Mapping[Key, tuple[Shapes, Shapes]]  # shapes of the arguments and of the results of every call
    outputs: Shapes  # shapes of the model's outputs
    batch_size: int  # B
    size: int  # N, another number

    def layout(self, key: Key, shapes: Shapes) -> CallLayout | None:
        """Return where samples lie in a call of the forward itself; None where it has no counterpart."""
        recorded = self.calls.get(key)
        axes = None if recorded is None else self.compared(shapes, recorded[0])
        return None if axes is None else CallLayout(axes)

    def of_results(self, key: Key, shapes: Shapes) -> tuple[int, ...]:
        """Return the axis of samples in each tensor that a call of the forward itself returned; empty where unknown."""
        recorded = self.calls.get(key)
        return (None if recorded is None else self.compared(shapes, recorded[1])) or ()

    def compared(self, shapes: Shapes, resized: Shapes) -> tuple[int, ...] | None:
        """Compare shapes of the forward itself with those of this one."""
        return compared(shapes, resized, self.batch_size, self.size)


def compared(shapes: Shapes, resized: Shapes, batch_size: int, size: int) -> tuple[int, ...] | None:
    """Return the axis of samples in each shape, `CONSTANT` or `UNKNOWN`; None where the shapes are not alike."""
    if [len(shape) for shape in shapes] != [len(shape) for shape in resized]:
        return None
    return tuple([_axis(*pair, batch_size, size) for pair in zip(shapes, resized, strict=True)])


def _axis(shape: tuple[int, ...], resized: tuple[int, ...], batch_size: int, size: int) -> int:
    """Return the axis whose length follows the number of samples between two runs, `CONSTANT` or `UNKNOWN`."""
    axes = [axis for axis, length in enumerate(shape) if resized[axis] != length]
    if not axes:
        return CONSTANT
    (axis, *others) = axes
    fits = not others and shape[axis] > 0 and shape[axis] * size == resized[axis] * batch_size
    return axis if fits and shape[axis] % batch_size == 0 else UNKNOWN


# The form that call sites of the general way carry in the coverage table.
GENERAL_FORM: Final = "one gradient per sample"
# The same where all samples could be taken at once.
AT_ONCE_FORM: Final = "dense, sample by sample at once"
# A call site that no gradient reaches (zero-initialised layers) is asked again in this many forwards.
MAX_ATTEMPTS: Final = 3
# How a forward comes from one place to the next: over how many nodes of the graph, by which kind of node at last, and
# outside the graph over how many calls. Whatever puts rows into another order on the way makes another one.
Way: TypeAlias = tuple[int, type, int]
# Of a place that is come to in more ways than these no further one is asked about by itself.
MAX_WAYS: Final = 16
# How often an operation was called in a forward, and how often it was a use.
Visits: TypeAlias = tuple[int, int]
NEVER: Final[Visits] = (0, 0)
FIRST: Final[Visits] = (1, 1)


@dataclass(frozen=True)
class MatrixProduct:
    """A product of matrices, one for each of N = B·S: ``(O, T) x (T, I)``."""

    count: int  # N
    positions: int  # T
    inputs: int  # I
    outputs: int  # O
    kept: bool = False  # whether book-keeping stores the gradients in the place of the two factors
    norm: int = 0  # FLOPs of one of N squared norms
    plan: str = ""  # how that norm is formed, in a few words

    @property
    def flops(self) -> int:
        """What the product costs once: ``2·N·T·I·O``."""
        return 2 * self.count * self.positions * self.inputs * self.outputs

    @property
    def entries(self) -> int:
        """Elements of the per-sample gradients, ``N·I·O``."""
        return self.count * self.inputs * self.outputs


@dataclass(frozen=True)
class Statistics:
    """Sizes of one argument of one operation, as its gradient arrived."""

    names: tuple[str, ...]
    kind: str  # ``"outer"``, ``"rows"``, ``"dense"``, ``"diagonal"`` or ``"general"``
    samples: int  # B
    products: tuple[MatrixProduct, ...]  # of matrices in the operation's forward
    materialised: bool  # the per-sample gradient was formed at once, to be pulled back to the parameters
    derived: bool  # the argument was computed from parameters
    elements: int  # that the factor keeps alive and an ordinary backward would not: the gradients
    itemsize: int  # bytes of an element
    needs_input_gradient: bool  # the operation's input needs a gradient in ordinary training as well
    recomputed: bool  # activation checkpointing runs the forward again in every backward
    input_key: int  # identity of the input that an ordinary backward stores as well
    input_elements: int  # its elements; 0 where none is stored
    slice_of: str = ""  # where in the parameter a confined gradient lies, as text; empty for the whole of it


@dataclass(eq=False, slots=True)
class CallSite:
    """A place in the model's code where parameters are consumed, identified by parameters and operation."""

    names: tuple[str, ...]
    operation: str
    consumed: tuple[str, ...]  # the parameters, each as often as it is consumed
    forms: dict[str, str] = field(default_factory=dict)  # what each parameter's factors are there
    chosen: tuple[str, int] | None = None  # the row map that evidence confirmed (its key), once there was evidence
    attempts: int = 0  # how many probes passed it without a gradient to judge by
    at_once: bool = False  # gradients could be formed there for all samples at once, without a rule
    statistics: dict[str, Statistics] = field(default_factory=dict)  # of each argument in the largest backward so far
    largest: int = -1  # elements of the gradient that came in it
    ways: set[Any] = field(default_factory=set)  # proved ways by which forwards reach it
    way: Any = None  # the proved way of the latest forward
    located: Any = None  # (row maps, the chosen one, where samples lie in the output by it), as last asked for

    def describe(self) -> str:
        """Return the name of the place for an error message."""
        return f"parameter '{', '.join(self.names)}' in {self.operation}"


@dataclass(frozen=True, eq=False)
class OperationForm:
    """Common form of operations that may differ in their parameters alone."""

    elements: int  # of the parameters of one of them


class CallSites:
    """Memory of call sites from forward to forward."""

    def __init__(self) -> None:
        self.table: dict[Any, CallSite] = {}  # by `key_of` an operation and its number
        # where samples lie in the arguments of operations, as resized forwards have shown
        self.layouts: dict[Any, CallLayout] = {}
        self.outputs: tuple[int, ...] = ()  # the same for the model's outputs
        # rows of outputs with several for each sample: samples alternate where they were expected one after the other
        self.turned = False
        self.reentrant = False  # activation checkpointing of the reentrant kind was met
        self.told: set[tuple[str, ...]] = set()  # parameters of whose slow sites the user was warned
        # forms of operations that may differ in their parameters alone, by what makes each: one object each
        self.forms: dict[Any, OperationForm] = {}
        self.ends: set[Any] = set()  # proved ways from the last use to the outputs

    def forget(self) -> None:
        """Drop all evidence, as the model was changed."""
        self.table.clear()
        self.layouts.clear()
        self.ends.clear()
        self.outputs, self.turned = (), False

    def forget_since(self, count: int) -> None:
        """Forget the call sites of a misread forward, all but the first ``count``."""
        for number in list(self.table)[count:]:
            del self.table[number]

    def at(self, number: tuple[Any, int], tracked: Iterable[TrackedTensor], form: str, gathered: str) -> CallSite:
        """Return the call site of an operation at its number in the forward, made if it is new."""
        # A layer called several times in a forward has a site for each call, since layouts may differ, and one consumed
        # in another way than before has one of its own: its evidence says nothing about the other. `gathered`: see
        # `RowMap.gathered`.
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
        """Return the state of every site, for `restore`."""
        return [(site, site.chosen, site.attempts) for site in self.table.values()]

    @staticmethod
    def restore(states: Iterable[tuple[CallSite, tuple[str, int] | None, int]]) -> None:
        """Restore sites to the states that `states` returned."""
        for site, chosen, attempts in states:
            site.chosen, site.attempts = chosen, attempts


def key_of(tracked: Iterable[TrackedTensor], name: str) -> tuple[Any, ...]:
    """Return the key of an operation on parameters: their names, and its own."""
    return tuple(t.origin.names for t in tracked), name


def counted_as(key: tuple[Any, ...]) -> str:
    """Return the string under which a forward counts an operation."""
    # A string caches its hash; nested tuples compute theirs at each look-up.
    return f"{key}"
