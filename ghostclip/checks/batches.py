"""Other batches than the one that a model was called with: some of its samples, in other places, or copies of others.

The forward with another number of samples shows which axes hold samples: see `ghostclip.capture.call_sites`.

A look at a model draws no numbers for what zeroes activations by chance. Dropout treats every element by itself, so
that a forward without it shows as well which samples follow which. One that draws no random numbers, or such as are
alike for all samples, can be held against a forward of fewer samples, or of samples in other places.

Shape letter: B samples.
"""

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, count, product
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ghostclip import _torch, _tree
from ghostclip.capture.call_sites import Calls, Key, Resized, Shapes, compared
from ghostclip.capture.decide import inside_of
from ghostclip.capture.nodes import edge_of, nodes_behind, under_checkpoint
from ghostclip.capture.row_maps import RowMap
from ghostclip.checks.dependence import SHARED, Alike, alike, batch_axis_of, has_lists, taken, with_lists
from ghostclip.checks.module_state import restored
from ghostclip.rules.registry import operation_name

# What turns dropout off: the name of an argument, its place, and the value.
_Off = tuple[str, int, Any]
_NO_TRAINING: Final[_Off] = ("training", 2, False)
_NO_TRAIN: Final[_Off] = ("train", 2, False)
_FUNCTIONS: Final[dict[Callable[..., Any], _Off]] = {
    functional.dropout: _NO_TRAINING,
    functional.dropout1d: _NO_TRAINING,
    functional.dropout2d: _NO_TRAINING,
    functional.dropout3d: _NO_TRAINING,
    functional.alpha_dropout: _NO_TRAINING,
    functional.feature_alpha_dropout: _NO_TRAINING,
    functional.scaled_dot_product_attention: ("dropout_p", 4, 0.0),
    functional.multi_head_attention_forward: ("dropout_p", 10, 0.0),
    torch.dropout: _NO_TRAIN,
    torch.dropout_: _NO_TRAIN,
    torch.feature_dropout: _NO_TRAIN,
    torch.feature_dropout_: _NO_TRAIN,
    torch.alpha_dropout: _NO_TRAIN,
    torch.alpha_dropout_: _NO_TRAIN,
    torch.feature_alpha_dropout: _NO_TRAIN,
    torch.feature_alpha_dropout_: _NO_TRAIN,
    torch.native_dropout: _NO_TRAIN,
}
_RECURRENT: Final = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
# They have no generator of their own.
_WITHOUT: Final = frozenset({"cpu", "meta"})


class WithoutDropout(TorchFunctionMode):
    """Turns torch's dropout off, in whatever layer or function it is an argument of."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any function, without dropout."""
        kwargs = kwargs or {}
        off = _of_recurrent(args) if func in _RECURRENT else _FUNCTIONS.get(func)
        if off is not None:
            name, position, value = off
            if position < len(args):
                args = (*args[:position], value, *args[position + 1 :])
            else:
                kwargs = {**kwargs, name: value}
        return func(*args, **kwargs)

    @contextmanager
    def behind(self, roots: Sequence[Tensor]) -> Iterator[None]:
        """Turn dropout off in a backward too: activation checkpointing runs parts of the forward again there."""
        # Autograd runs every node of the graph without the modes of the code that called it.

        def enter(_: Any) -> None:
            self.__enter__()

        handles = [node.register_prehook(enter) for node in nodes_behind(edge_of(root)[0] for root in roots)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _of_recurrent(args: tuple[Any, ...]) -> _Off:
    """Return what turns off the dropout of a recurrent layer, whose sequences are packed if their sizes come second."""
    packed = len(args) > 1 and isinstance(args[1], Tensor) and not args[1].is_floating_point()
    return "dropout", 6 if packed else 5, 0.0


class Randomness:
    """The states of all global generators at one moment: torch's (CPU and devices in use), Python's and NumPy's."""

    def __init__(self, tensors: Iterable[Tensor], *, only_torch: bool = False) -> None:
        """Read the state of every generator."""
        # `tensors`: on the devices in use. `only_torch` leaves out Python's and NumPy's, which take far longer to read
        # and to write.
        devices = {tensor.device for tensor in tensors if tensor.device.type not in _WITHOUT}
        # (read, write) of each generator's state, torch's first.
        self._generators = [_generator_of(device) for device in sorted(devices, key=str)]
        self._generators.append((torch.get_rng_state, torch.set_rng_state))
        self._of_torch = len(self._generators)  # how many of them are torch's
        if not only_torch:
            self._generators.append((random.getstate, random.setstate))
        if not only_torch and "numpy" in sys.modules:
            legacy = sys.modules["numpy"].random
            self._generators.append((lambda: legacy.get_state(legacy=False), legacy.set_state))
        self._states = [read() for read, _ in self._generators]  # of the generators, to be restored

    def restore(self) -> None:
        """Put every generator back."""
        for (_, write), state in zip(self._generators, self._states, strict=True):
            write(state)

    def drawn(self, *, outside: bool = False) -> bool:
        """Return whether a number was drawn since states were read; ``outside``: by Python's or NumPy's generator."""
        pairs = list(zip(self._generators, self._states, strict=True))[self._of_torch if outside else 0 :]
        return any(not _same(read(), state) for (read, _), state in pairs)


def _generator_of(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return what reads and what writes the state of a device's default generator."""
    module: Any = torch.get_device_module(device)
    if device.index is None:
        return module.get_rng_state, module.set_rng_state
    return lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device)


def _same(one: Any, two: Any) -> bool:
    """Return whether two states of a generator are equal."""
    if isinstance(one, Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    return bool((one == two).all()) if hasattr(one, "all") else bool(one == two)


def uncounted() -> AbstractContextManager[Any]:
    """Return a context in which a checkpoint around the call does not count what is saved."""
    return saved_tensors_hooks(lambda saved: saved, lambda saved: saved) if under_checkpoint() else nullcontext()


@contextmanager
def unnoticed(tensors: Iterable[Tensor]) -> Iterator[Randomness]:
    """Within the block, run a model without gradients or warnings; afterwards every generator is where it was."""
    # Yields the states of the generators before.
    before = Randomness(tensors)
    try:
        with torch.no_grad(), warnings.catch_warnings(), uncounted():
            warnings.simplefilter("ignore")
            yield before
    finally:
        before.restore()
        # Weights that were cast for autocast here are not in any graph: the next forward must not find them.
        torch.clear_autocast_cache()


# They draw each entry by itself, alike for all, in the place of a tensor's values or for one like it.
_EACH_ALIKE: Final = frozenset(
    {"normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"}
    | {"rand_like", "randn_like", "randint_like"}
)


class AlikeDraws(_torch.DispatchMode):
    """Gives every sample the same random numbers, wherever it stands in the batch and whatever its size."""

    # Those of one row are drawn, and repeated along the first axis and that of the samples.
    def __init__(self, axis: int) -> None:
        super().__init__()
        self._axes = 0, axis
        self.shapes: list[Any] = []  # operations that drew, and the shapes of what they returned, in order
        self.seen: list[Any] = []  # what was drawn for one row, in order; what is not known is equal to nothing

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any operation, with numbers that are repeated if it draws some."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        named = _torch.arguments_by_name(func, args, kwargs or {})
        if 0 in (named.get("dropout_p"), named.get("dropout")):
            # Attention and recurrent layers without dropout, which are marked as well.
            return func(*args, **(kwargs or {}))
        drawn = None if named.get("generator") else self._drawn(func, named, named.get("self"))
        if drawn is None:
            self.seen.append(object())
            result = func(*args, **(kwargs or {}))
        else:
            result = named["self"].copy_(drawn) if func.overloadpacket.__name__.endswith("_") else drawn
        self.shapes.append((func, [tuple(tensor.shape) for tensor in _tree.tensors(result)]))
        return result

    def _drawn(self, func: Any, named: Mapping[str, Any], given: Any) -> Tensor | None:
        """Draw the numbers of one row and repeat them for all samples; None for an operation unknown here."""
        name = func.overloadpacket.__name__
        if name in ("bernoulli", "bernoulli_"):
            # Nothing is dropped that need not be, as in `WithoutDropout`.
            return torch.ones_like(given) * (named.get("p", given) > 0)
        by_size = "size" in named
        if not by_size and name not in _EACH_ALIKE:
            return None
        shape = list(named["size"] if by_size else given.shape)
        sizes = [1 if axis in self._axes else size for axis, size in enumerate(shape)]
        self.seen.append((func, sizes))
        row = func(**{**named, **({"size": sizes} if by_size else {"self": given.new_empty(sizes)})})
        return row.expand(shape).clone()


class OtherDraws(AlikeDraws):
    """Gives samples random numbers of their own, and those in some places the ones of other samples."""

    # `whole`, `part`: `shapes` of this forward and of one of fewer samples, by which numbers of each sample are known.
    def __init__(self, axis: int, order: Sequence[int], whole: Sequence[Any], part: Sequence[Any]) -> None:
        super().__init__(axis)
        self._order, self._known = torch.tensor(order), list(zip(whole, part, strict=False))

    def _drawn(self, func: Any, named: Mapping[str, Any], given: Any) -> Any:
        """Draw numbers, and give some samples those of others."""
        drawn = func(**named)
        for (_, whole), (_, part) in self._known[len(self.shapes) :][:1]:
            axis = next((axis for axis in self._axes if whole[0][: axis + 1] != part[0][: axis + 1]), None)
            if axis is not None and isinstance(drawn, Tensor) and drawn.shape[axis] == len(self._order):
                return drawn.index_select(axis, self._order.to(drawn.device))
        return drawn


# So many samples show what lies behind a gate.
_FEW: Final = 3
# So many samples of a larger batch show which axes hold them.
_SHOW_AXES: Final = 3
# How many times as large loud samples are, on average.
LOUDER: Final = 8.0


def louder(tensor: Tensor, samples: Sequence[int], axis: int, *, seed: int, times: float) -> Tensor:
    """Return a tensor with other numbers for some samples, outside the graph; whole numbers as they are."""
    if not tensor.is_floating_point() or tensor.is_nested:
        return tensor
    # Not multiples of what they were, which norms of layers would undo.
    drawn = torch.rand(tensor.shape[-1], generator=torch.Generator().manual_seed(seed)) + 0.5
    places, factors = torch.tensor(samples, device=tensor.device), (times * drawn).to(tensor)
    rows = tensor.detach().index_select(axis, places) * (factors if axis < tensor.dim() - 1 else factors[0])
    return tensor.detach().index_copy(axis, places, rows).requires_grad_(tensor.requires_grad)


@dataclass(frozen=True)
class Batch:
    """Inputs of a forward, and other batches made of them: samples replaced, exchanged or left out."""

    inputs: Any  # its positional and its keyword inputs
    size: int  # B, at least 2
    axis: int  # the expected batch axis
    gathered: bool = False  # whether rows were selected in it, so that data decides which random number a row meets
    # how the rows of each output map to samples, None where that is not known; empty where nothing is
    maps: Sequence[RowMap | None] = ()
    trained: frozenset[int] = frozenset()  # numbers of the outputs that need gradients and may hold rows of samples
    hands_on: bool = False  # whether another part of the model takes the outputs, be they numbers of whatever type
    outputs: Sequence[Tensor] = ()  # what the forward returned, where it drew no random numbers; else empty

    seed: int = 0  # another one for every proof
    again: bool = False  # whether the same way of the model was proved before
    autocast: torch.dtype | None = None  # what autocast computed with in that forward; None where it was off
    by_place: bool = False  # whether a list among the inputs may hold one value for each sample
    shared: bool = False  # whether ranks run the model together, equally often whatever each of them finds
    rare: int = -1  # a sample that is to stand in the places of the drawn ones: few are like it; -1 for any

    @property
    def drawn(self) -> list[int]:
        """One of every two neighbours, and the last sample if it has none; not the first, so that all change places."""
        numbers = random.Random(self.seed)
        pairs = range(2, self.size - 1, 2)
        ones = [1, *(first + numbers.randrange(2) for first in pairs), *([self.size - 1] * (self.size % 2))]
        # A rare one stays, and its neighbour, where it has one, goes.
        return [one for one in (one ^ 1 if one == self.rare else one for one in ones) if one < self.size]

    @property
    def alike(self) -> list[Alike]:
        """How many samples are alike in each input."""
        place_of = partial(batch_axis_of, batch_size=self.size, axis=self.axis)
        return alike((leaf, place_of(leaf)) for leaf in _tree.tensors(self.inputs))

    @property
    def shuffled(self) -> list[int]:
        """Which sample stands at each place where all move, and the drawn ones give way to copies of one other."""
        rest = self.others(self.drawn)
        random.Random(self.seed).shuffle(rest)
        rest.sort(key=self.rare.__ne__)
        moved = dict(zip(rest, [*rest[1:], *rest[:1]], strict=True))
        return [moved.get(place, rest[0]) for place in range(self.size)]

    @property
    def replaced(self) -> list[list[int]]:
        """The sets of samples to replace, one after the other."""
        middle = (self.size + 1) // 2
        return [self.drawn, list(range(middle)), list(range(middle, self.size))]

    @property
    def subset(self) -> list[int]:
        """About half of the samples, to run by themselves, each in another place, as a share of the batch as well."""
        # Beside lists that go by places, and stay whole, the first ones.
        first = 0 if self.by_place else 1
        return list(range(first, first + (self.size + 1) // 2))

    @property
    def left(self) -> list[int]:
        """Samples for a second run of fewer, where those of `subset` come out otherwise by rounding."""
        return self.subset if self.by_place else self.drawn[: max(2, self.size // 4)]

    @property
    def has_lists(self) -> bool:
        """Whether a list among the inputs has as many values as there are samples, and may hold one for each."""
        args, kwargs = self.inputs
        return any(has_lists(one, batch_size=self.size, axis=self.axis) for one in (*args, kwargs))

    @property
    def has_places(self) -> bool:
        """Whether an input without samples may hold something by their places: flat patches, indices, states (1, B)."""
        unknown = partial(batch_axis_of, batch_size=self.size, axis=self.axis)
        leaves = (leaf for leaf in _tree.tensors(self.inputs) if leaf.dim() and unknown(leaf) is None)
        return any(len(leaf) > 1 or self.size in leaf.shape for leaf in leaves)

    def others(self, samples: Sequence[int]) -> list[int]:
        """Return all other samples, in order."""
        return sorted(set(range(self.size)).difference(samples))

    def maps_of(self, outputs: Sequence[Tensor]) -> Sequence[RowMap | None]:
        """Return how the rows of each output map to samples, None where it is not known."""
        return self.maps if len(self.maps) == len(outputs) else [None] * len(outputs)

    def map_by_shape(self, output: Tensor) -> RowMap | None:
        """Return how the rows of an output map to samples by its shape alone."""
        # None where no axis has as many rows as there are samples, and for states ``(layers, B, ...)`` with as many
        # layers as samples.
        axis = batch_axis_of(output, batch_size=self.size, axis=self.axis)
        return None if axis is None or tuple(output.shape[:2]) == (self.size, self.size) else RowMap("axis", axis)

    def few(self, most: int = _FEW) -> "Batch":
        """Return a smaller batch, of a few samples; the same one where a list among the inputs may go by places."""
        # Not with as many as something has entries that all samples share, which would be taken for theirs.
        place_of = partial(batch_axis_of, batch_size=self.size, axis=self.axis)
        lengths = {length for leaf in _tree.tensors(self.inputs) if place_of(leaf) is None for length in leaf.shape}
        most = next(number for number in count(most) if number not in lengths)
        if self.size <= most or self.has_lists:
            return self
        # Of rows that data has assigned, those of the first samples are known.
        order = [*range(most - 1), most - 1 if self.gathered else max(most - 1, self.rare)]
        known = [row_map and row_map.of_first(most) for row_map in self.maps]
        rare = min(self.rare, most - 1)
        return replace(self, inputs=self.of_samples(order), size=most, maps=known, outputs=(), rare=rare)

    def exchanged(self) -> list[Any]:
        """Return inputs with every sample replaced by another, and with other means over the batch."""
        # Of two samples that change places the mean stays the same.
        orders = [[1, 0], [1, 1]] if self.size == 2 else [[1, *[0] * (self.size - 1)]]
        return [self.of_samples(order) for order in orders]

    def copied(self, samples: Sequence[int]) -> Any:
        """Return the inputs with some samples replaced by copies of the nearest other one before them, or behind."""
        # Lengths in decreasing order stay in that order, as packing them demands.
        return self.of_samples(self.copies(samples))

    def louder(self, samples: Sequence[int], tensor: Tensor, like: Tensor | None = None) -> Tensor:
        """Return a tensor with other and larger numbers for some samples; `like`: what has its axis for them."""
        axis = batch_axis_of(tensor if like is None else like, batch_size=self.size, axis=self.axis)
        # In every other proof with the other sign: a mean over the batch moves to the other side of what is held
        # against it.
        times = LOUDER * (-1) ** (self.seed + 1)
        return tensor if axis is None else louder(tensor, samples, axis, seed=self.seed, times=times)

    def looked_up_louder(self, samples: Sequence[int], keys: set[Any], rows: Tensor, ids: Tensor) -> Tensor:
        """Return looked-up rows made louder if their ids are among the inputs (`keys`: of memory), else as they are."""
        return self.louder(samples, rows, ids) if _torch.memory_key(ids) in keys else rows

    def copies(self, samples: Sequence[int]) -> list[int]:
        """Return which sample stands at each place where some are replaced."""
        rest = self.others(samples)
        fixed = set(rest)
        latest = accumulate(range(self.size), lambda last, sample: sample if sample in fixed else last, initial=rest[0])
        return list(latest)[1:]

    def with_lists(self, samples: Sequence[int]) -> Any:
        """Return the inputs of some samples, lists of one value for each of them taken along."""
        args, kwargs = self.of_samples(samples)
        # As many arguments as samples are no list of values.
        cut = partial(with_lists, samples=samples, batch_size=self.size, axis=self.axis)
        return tuple(map(cut, args)), cut(kwargs)

    def of_samples(self, samples: Sequence[int], *, folded: bool = False) -> Any:
        """Return the inputs of some samples, those without B samples as they are; or `folded` ones taken along."""
        return taken(self.inputs, samples, batch_size=self.size, axis=self.axis, folded=folded)

    def zeros(self) -> Any:
        """Return the inputs with zeros for all samples."""
        place_of = partial(batch_axis_of, batch_size=self.size, axis=self.axis)
        copies = self.of_samples(range(self.size))
        return _tree.mapped(lambda leaf: leaf if place_of(leaf) is None else leaf * 0, copies)


class _Recorder(TorchFunctionMode):
    """Records the shapes of every call's arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.found = Calls(), dict[Key, tuple[Shapes, Shapes]]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, and its operations if it is written in Python, and record shapes."""
        kwargs = kwargs or {}
        key, before = self.calls.key(func), _tree.shapes_of((args, kwargs))
        around = key[0]
        inside = None if around and around[1] is func else inside_of(func, operation_name(func))
        if inside is None:
            result = func(*args, **kwargs)
        else:
            # Layers written out refuse parameters whose gradient nobody would take.
            args, kwargs = _tree.mapped(
                lambda item: item.detach() if isinstance(item, Tensor) else item, (args, kwargs)
            )
            with self.calls.inside(key), self:
                result = inside(*args, **kwargs)
        self.found[key] = before, _tree.shapes_of(result)
        return result


def resized(
    model: nn.Module, run: Callable[[Any], Sequence[Tensor]], inputs: Any, *, batch_size: int, axis: int
) -> Resized | None:
    """Run a model on a few samples, or on one more, and record all shapes; None where no other size runs."""
    # Buffers and random states are put back. `run` runs the model on inputs and returns its output tensors. None where
    # it runs with no other number of samples.
    one_more = [*range(batch_size), batch_size - 1]
    few = list(range(_SHOW_AXES)) if batch_size > _SHOW_AXES else one_more
    # Lists of as many values as samples may have one for each.
    batch = Batch(inputs, batch_size, axis)
    listed = (True, False) if batch.has_lists else (False,)
    used = [*model.parameters(), *model.buffers(), *_tree.tensors(inputs)]

    def rerun(order: list[int], *, with_values: bool = False, gradients: bool = False) -> Resized | None:
        altered, recorder = batch.with_lists(order) if with_values else batch.of_samples(order), _Recorder()
        try:
            with restored(model), unnoticed(used), torch.set_grad_enabled(gradients), WithoutDropout(), recorder:
                outputs = run(altered)
        except Exception:  # noqa: BLE001 - what it does on another batch is no reason to refuse this one
            return None
        return Resized(recorder.found, _tree.shapes_of(list(outputs)), batch_size, len(order))

    # With gradients where it raises without: it may differentiate within its forward.
    for gradients, order, with_values in product((False, True), (few, one_more), listed):
        if (found := rerun(order, with_values=with_values, gradients=gradients)) is not None:
            return found
    long = [one for one in _tree.tensors(inputs) if batch_axis_of(one, batch_size=batch_size, axis=axis) is not None]
    # Some may be as long as the batch by chance: the model runs with all of them, and not with a part.
    for shared in (*([leaf] for leaf in long), long[1:]):
        SHARED.update(dict.fromkeys(shared))
        fewer = rerun(few[: batch_size - 1])
        more = rerun(one_more) if fewer else None
        axes = fewer and more and compared(more.outputs, fewer.outputs, more.size, fewer.size)
        if axes and min(axes) >= 0:
            return more
        for leaf in shared:
            # One may be given twice.
            SHARED.pop(leaf, None)
    return None
