"""What a loop of one's own does around a checked forward: the torch functions that it calls, to be run again.

Inputs that were mixed, a weight that was normalised over the batch, a rank, a mask of the largest losses, the counts of
the batch's labels: no gradient leads through them from one sample to the other, and the loss's graph shows a number for
each sample and not where it comes from. What the loop calls is therefore recorded, from the batch that a private loader
hands out, or from the forward on, to the backward. It is run again with half of the samples replaced by copies of
others, in batch and outputs: the model's inputs of the other samples may not change, nor may their losses and the
gradients that their outputs receive.

What a loop keeps of the batch, a queue, a running mean, a centre, is followed until the next one comes: what it would
be with one other record may move one sample of that one at most, which may be the same record.

What leaves torch on the way is a constant here: NumPy, what Python computes with a number that was read, what torch
cannot see. So is what has as many rows as there are samples, is not known to be of the batch, and without which nothing
changes.

Shape letter: B samples.
"""

import atexit
import random
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from itertools import compress, product, starmap
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ghostclip import _torch, _tree
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.hooks import suspend_compiler
from ghostclip.capture.param_use import ParamUse
from ghostclip.checks.batches import LOUDER, AlikeDraws, Batch, Randomness, WithoutDropout, louder, unnoticed
from ghostclip.checks.dependence import Alike, alike, batch_axis_of, of_samples, rare_sample
from ghostclip.checks.independence import TOLERANCE
from ghostclip.checks.unchecked import LOOP, MOST_ALIKE, Unchecked
from ghostclip.errors import LossReductionError, SampleMixingError

_REFUSED: Final = (
    "the loss: the loss of one sample, or the gradient of its output, changed when half of the samples were replaced "
    "in outputs and targets, although no gradient leads from one to the other: it weighs, centres, ranks or selects "
    "samples by what is in the batch, or counts over it. Without one sample all others' gradients would change, and no "
    "clipping bounds that. Compute each sample's loss from its own output and target, with weights that are public "
    "constants."
)
_BACKWARD: Final = (
    "the backward of the loss: one sample's gradient changed when half of the samples were replaced in what a hook, or "
    "a custom autograd function, of the loop or the model holds of the batch: it weighs, scales or selects gradients "
    "by what is in the batch, or counts over it. Without one sample all others' gradients would change, and no "
    "clipping bounds that. Change each sample's gradient by its own record and public constants."
)
_KEPT: Final = (
    "the loss, or an input of the model, follows what the loop kept of an earlier batch: with one other record in that "
    "one, several samples of this one have other gradients (a queue of outputs, a running mean or deviation, a centre, "
    "prototypes, a threshold that follows the losses). Without that record all of them would change, and no clipping "
    "bounds that. Compute it from the model's parameters, from public constants, or for each sample from what was kept "
    "of itself."
)
_MIXED_INPUTS: Final = (
    "an input of the model was computed from the batch, and one sample's rows changed when others were replaced: they "
    "were mixed, ranked, centred or scaled by what is in the batch (mixup, a mean or a deviation over the batch), or "
    "stand in another order than a second input's (y[torch.randperm(len(y))] beside x). Compute each sample's input "
    "from its own record, with public constants, as those of a fixed data set; a frozen network in front: in eval mode."
)
# Tensors of one record; a loop that makes more than that is not recorded.
_MOST: Final = 4096
# So many batches may be handed out before the forward of the first.
_AHEAD: Final = 4
# So many samples are replaced one at a time where a loop does not run with half of them.
_ALONE: Final = 8
# So many times as large samples are made where others stay: a threshold may lie on any side of them.
_TIMES: Final = (LOUDER, -LOUDER, 1 / LOUDER**2)
# So many times as far from what it is as with another record, what is kept is looked at.
_FAR: Final = 64
# Of longer rows so many entries are compared, and sums over all.
_ENTRIES: Final = 1 << 10
# Sums by which a row is known again.
_SUMS: Final = 4
# Of larger tensors (logits of a language model) as many samples are looked at as have so many elements.
_LARGE: Final = 1 << 16
_LARGEST: Final = 1 << 17  # where a loop may keep rows of all samples
_BACKWARDS: Final = frozenset({Tensor.backward, torch.autograd.backward})
_GRADIENTS: Final = frozenset({torch.autograd.grad, Tensor.grad.__get__})  # type: ignore[union-attr]
_SET_DATA: Final = Tensor.data.__set__  # type: ignore[attr-defined]
# What hands on records as they are, some of them or on another device.
_HANDS_ON: Final = frozenset(
    {"__getitem__", "chunk", "split", "tensor_split", "narrow", "to", "cuda", "clone", "detach"}
)
_MAKES: Final = frozenset(
    {"rand", "randn", "randint", "randperm", "normal", "zeros", "ones", "full", "arange", "linspace"}
)
_BY_PLACE: Final = frozenset({"arange", "linspace"})
_BETWEEN_RANKS: Final = re.compile("torch.distributed|c10d")
# Running statistics are written to without being counted.
_IN_PLACE: Final = re.compile("(.*[^_]_)|__(setitem|i[a-z]+)__|(batch|instance)_norm")


@_tree.leaf
class _At(int):
    """Stands for the tensor of a number."""


class _Call(NamedTuple):
    """One call of a torch function."""

    func: Callable[..., Any]
    arguments: Any  # positional and keyword ones, with numbers for tensors
    takes: frozenset[int]  # these numbers
    makes: list[int]  # those of what it returned
    graded: bool  # whether gradients were on
    cast: tuple[str, torch.dtype | None]  # the device's type, and what autocast computed with there
    writes: bool  # whether it writes to what it was given
    part: int  # how many records of a batch it hands on at least, in one part; 0 where it does nothing else


class _Given(NamedTuple):
    """A tensor that came from elsewhere."""

    tensor: Tensor  # or a copy from before it was written to
    version: int
    drawn: int  # records of the batch that it is known to be of; 0 where it is of none
    other: Tensor | None  # what it would be with another record in an earlier batch, if it is known to be of one
    maker: str  # the function that made it of no data: noise, constants, places; "" for none


class Kept:
    """What a loop keeps of a batch, and what it would be if one record of that batch were another."""

    def __init__(self) -> None:
        self._others: dict[int, tuple[Callable[[], Any], Any]] = {}  # by the `id` of a value: itself, and its other one

    def __bool__(self) -> bool:
        """Return whether anything is known."""
        return bool(self._others)

    def put(self, value: Any, other: Any) -> None:
        """Note what a tensor, or a float that was read of one, would be."""
        if isinstance(value, Tensor):
            if isinstance(other, Tensor) and other.shape == value.shape:
                gone = partial(self._others.pop, id(value))
                self._others[id(value)] = weakref.ref(value, lambda _: gone(None)), other.detach()
        elif type(other) is float:
            self._others[id(value)] = lambda: value, other

    def other_of(self, value: Any) -> Any:
        """Return what a value would be; None where it is no other, as far as it is known."""
        itself, other = self._others.get(id(value), (None, None))
        if itself is not None and itself() is value:
            return other
        base = _torch.base_of(value) if isinstance(value, Tensor) else None
        other = None if base is None else self.other_of(base)
        if base is None or other is None:
            return None
        return other.as_strided(value.shape, value.stride(), value.storage_offset() - base.storage_offset())

    def follow(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function, and on what its arguments would be as well; return its result."""
        tensors = _tree.tensors((args, kwargs))
        if all(self.other_of(leaf) is None for leaf in _tree.leaves((args, kwargs))) or _ends(func):
            return func(*args, **kwargs)
        randomness, made = Randomness(tensors, only_torch=True), []
        try:
            if _IN_PLACE.fullmatch(getattr(func, "__name__", "")) and isinstance(args[0], Tensor):
                self._copy(args[0])
            others = _tree.mapped(self._other, (args, kwargs))
            with torch.no_grad():
                made = _made(func(*others[0], **others[1]))
        except Exception:  # noqa: BLE001 - it is the user's code
            made = []
        randomness.restore()
        result = func(*args, **kwargs)
        for value, other in zip(_made(result), made, strict=False):
            self.put(value, other)
        return result

    def _copy(self, tensor: Tensor) -> None:
        """Note a copy of what is about to be written to."""
        if self.other_of(tensor) is None:
            base = _torch.base_of(tensor)
            written = tensor if base is None else base
            self.put(written, written.detach().clone())

    def _other(self, leaf: Any) -> Any:
        other = self.other_of(leaf)
        return _as_it_is(leaf) if other is None else other


class LoopRecord(TorchFunctionMode):
    """Record of the torch functions that a loop calls on a batch, and on what a forward made of it."""

    # The one that records, until a backward or another forward begins, and those that torch still calls.
    open: ClassVar["LoopRecord | None"] = None
    entered: ClassVar[list["LoopRecord"]] = []

    def __init__(self, loop: "Loop") -> None:
        super().__init__()
        # Torch may call a record that has ended: it keeps no training alive.
        self._loop = weakref.ref(loop)
        self.calls: list[_Call] = []
        self.given: dict[int, _Given] = {}  # by number
        self._numbers: dict[int, tuple[Callable[[], Any], int]] = {}  # by the `id` of a value: itself, and its number
        self.put: dict[int, Tensor] = {}  # those that custom functions put into the graph, by the numbers from before
        self._outside: set[int] = set()  # numbers of what was made without gradients
        self._is_open, self._last = False, 0
        self._stopped: Any = None  # the compiler

    def begin(self, outputs: Sequence[Tensor] = (), *, only_kept: bool = False) -> None:
        """Record from now on, or follow only what is kept; ``outputs``: of a forward that has ended."""
        # Not where another mode may end before this one, which it would take for itself. Compiled functions run eagerly
        # meanwhile, so that what they do is seen, and none is compiled for this mode.
        self.end()
        if not _torch.modes_may_end():
            for output in outputs:
                self._give(output)
            LoopRecord.open = None if only_kept else self
            self.entered.append(self)
            # No frame goes on being compiled: the one that calls may have ended by then.
            self._is_open, self._stopped = not only_kept, suspend_compiler() and (None,)
            _torch.begin_mode(self)

    @classmethod
    def end(cls) -> "LoopRecord | None":
        """Record no more; return the record."""
        # Where a backward is under way inside of the mode, torch puts it back once that is over.
        record, cls.open = cls.open, None
        if record is not None:
            record._is_open = False
        while cls.entered and not cls.entered[-1]._is_open and _torch.end_mode(cls.entered[-1]):
            _torch.restart_compiler(cls.entered.pop()._stopped)
        return record

    def clear(self) -> None:
        """Let go of all tensors."""
        self.calls, self.given, self._numbers, self.put = [], {}, {}, {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any function, and note it."""
        kwargs = kwargs or {}
        if func is torch.autograd.backward:
            # Torch's own, which looks it up again: what was taken from torch before is no other here.
            func = getattr(func, "__wrapped__", func)
        if not self._is_open:
            loop = self._loop()
            return loop.kept.follow(func, args, kwargs) if loop and loop.kept else func(*args, **kwargs)
        # What exchanges something with other ranks must not run again, nor what comes after it.
        if _ends(func):
            self._is_open = False
            return func(*args, **kwargs)
        if func in _GRADIENTS:
            return self._take_gradients(args[-1], func(*args, **kwargs))
        by_name = bool(_IN_PLACE.fullmatch(getattr(func, "__name__", "")) or kwargs.get("inplace") or func == _SET_DATA)
        try:
            # Before it runs: it may change either.
            graded, arguments = torch.is_grad_enabled(), _tree.mapped(self._noted, (args, kwargs))
            for one in _tree.tensors((args[:1] if by_name else (), kwargs.get("out"))):
                self._copy(one)
            taken = _tree.tensors((args, kwargs))
            versions = [*map(_torch.known_version, taken)]
        except Exception:  # noqa: BLE001 - subclasses of tensors have functions of their own
            self._is_open = False
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        writes = by_name or [*map(_torch.known_version, taken)] != versions
        self._note(func, arguments, args, _made(result), graded=graded, writes=writes)
        # Only ever closed here: it may have ended while the function ran.
        if self._last >= _MOST:
            self._is_open = False
        return result

    def _note(
        self, func: Any, arguments: Any, args: Sequence[Any], made: Sequence[Any], *, graded: bool, writes: bool
    ) -> None:
        """Note a call that has returned."""
        takes = frozenset(int(leaf) for leaf in _tree.leaves(arguments) if type(leaf) is _At)
        # Bookkeeping asks what a tensor is a view of, which copies of it are not.
        if takes and (made or writes) and func != _torch.base_read:
            makes, kind = [self.number_of(value) for value in made], _device_of(made)
            part = 0 if writes or not takes.isdisjoint(makes) else self._hands_on(func, args, made)
            # A loop that goes through a batch in parts has the records of one in what the model is called with.
            self._put(made if part else (), drawn=1)
            cast = torch.get_autocast_dtype(kind) if _torch.autocast_is_on(kind) else None
            self.calls.append(_Call(func, arguments, takes, makes, graded, (kind, cast), writes, part))
            self._outside.update(() if graded else makes)
        elif not takes and getattr(func, "__name__", "") in _MAKES:
            self._put(made, drawn=0, maker=func.__name__)

    def _hands_on(self, func: Any, args: Sequence[Any], made: Sequence[Any]) -> int:
        """Return how many records of a batch that was handed out each made tensor holds at least, in their places."""
        name, (source, index, *_) = getattr(func, "__name__", ""), (*args, None, None)
        if name not in _HANDS_ON or not (isinstance(source, Tensor) and self.knows(source) and self._is_given(source)):
            return 0
        is_part = name != "__getitem__" or isinstance(index, slice)
        given = self.given[self.number_of(source)]
        is_drawn = is_part and given.drawn > 0 and given.other is None and source.dim() > 0
        alike = is_drawn and all(one.shape[1:] == source.shape[1:] for one in made)
        return min(map(len, made)) if alike else 0

    def _noted(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return _At(self.number_of(leaf)) if type(leaf) is float and self.knows(leaf) else _as_it_is(leaf)
        if leaf.grad_fn is not None and self.knows(leaf) and self.number_of(leaf) in self._outside:
            # A custom autograd function, of which the inside was seen, has put it into the graph.
            self.put[self.number_of(leaf)] = leaf
            del self._numbers[id(leaf)]
        if not self.knows(leaf):
            self._give(leaf)
        return _At(self.number_of(leaf))

    def take(self, tensor: Tensor) -> bool:
        """Take in a tensor that is as it came from elsewhere; return whether it is."""
        if not self.knows(tensor):
            self._give(tensor)
        return self._is_given(tensor)

    def _give(self, tensor: Tensor) -> None:
        loop = self._loop()
        drawn, other = (0, None) if loop is None else (loop.drawn_with(tensor), loop.kept.other_of(tensor))
        self._put([tensor], drawn=drawn, other=other)

    def _put(self, tensors: Iterable[Tensor], *, drawn: int, other: Tensor | None = None, maker: str = "") -> None:
        for one in tensors:
            self.given[self.number_of(one)] = _Given(one, _torch.known_version(one), drawn, other, maker)

    def _take_gradients(self, inputs: Any, grads: Any) -> Any:
        """Take in gradients, which are of a batch unless they are those of parameters; return them."""
        for one, grad in zip(_tree.leaves(inputs), grads if isinstance(grads, tuple) else (grads,), strict=False):
            if isinstance(grad, Tensor) and not isinstance(one, torch.nn.Parameter):
                self._put([grad], drawn=1)
        return grads

    def _copy(self, tensor: Tensor) -> None:
        """Copy what came from elsewhere before it, or a view of it, is written to; what is a part of it is computed."""
        memory = _memory_of(tensor)
        for number, one in [(n, one) for n, one in self.given.items() if _memory_of(one.tensor) == memory]:
            if any(call.part and number in call.makes for call in self.calls):
                del self.given[number]
            else:
                copy = one.tensor.clone()
                self.given[number] = one._replace(tensor=copy, version=_torch.known_version(copy))

    def knows(self, value: Tensor | float) -> bool:
        """Return whether a tensor, or a float that was read of one, has a number."""
        return id(value) in self._numbers and self._numbers[id(value)][0]() is value

    def number_of(self, value: Tensor | float) -> int:
        """Return the number of a tensor or a float, a new one where it has none."""
        if not self.knows(value):
            self._last += 1
            self._numbers[id(value)] = weakref.ref(value) if isinstance(value, Tensor) else lambda: value, self._last
        return self._numbers[id(value)][1]

    def replay(self, roots: Sequence[Any] | None, batch: Batch) -> "LoopReplay | None":
        """Return what some tensors were computed by, to be computed again; None where it is not known of all."""
        # `roots`: None for all that was computed.
        if roots is None:
            return self._replay(self.calls, {}, batch)
        if not roots or not all(isinstance(root, Tensor) and self.knows(root) and not root.is_meta for root in roots):
            return None
        values = {**{self.number_of(root): root for root in roots}, **self.put}
        return self._replay(self._needed(set(values)), values, batch)

    def _replay(self, calls: Sequence[_Call], values: Mapping[int, Tensor], batch: Batch) -> "LoopReplay | None":
        try:
            replay = LoopReplay(self, calls, values, batch)
        except Exception:  # noqa: BLE001 - of tensors that have no values
            return None
        return replay if calls or replay.others else None

    def known(self) -> dict[int, Callable[[], Any]]:
        """Return what returns each value, None once it is gone, by its number."""
        return {number: value for value, number in self._numbers.values()}

    def made(self, tensor: Tensor) -> bool:
        """Return whether a tensor was computed, or written to, by what was recorded."""
        return self.knows(tensor) and not self._is_given(tensor)

    def _is_given(self, tensor: Tensor) -> bool:
        """Return whether a tensor is as it came from elsewhere."""
        number = self.number_of(tensor)
        return number in self.given and self.given[number].tensor is tensor

    def _needed(self, numbers: set[int]) -> list[_Call]:
        """Return the calls that some tensors were computed by; where any writes to a tensor, all of them."""
        if any(call.writes for call in self.calls):
            return self.calls
        needed: list[_Call] = []
        for call in reversed(self.calls):
            if not numbers.isdisjoint(call.makes):
                needed.append(call)
                numbers |= call.takes
        return needed[::-1]


# Modules are gone when what a script leaves unfinished ends.
atexit.register(LoopRecord.end)


def _ends(func: Any) -> bool:
    """Return whether a function ends a record: a backward, or what exchanges something with other ranks."""
    return func in _BACKWARDS or _BETWEEN_RANKS.search(f"{getattr(func, '__module__', '')} {func}") is not None


def _made(result: Any) -> list[Any]:
    """Return the tensors of a function's result, and the floats that it read of some."""
    return [leaf for leaf in _tree.leaves(result) if isinstance(leaf, Tensor) or type(leaf) is float]


def _takes_one(call: _Call) -> bool:
    """Return whether a call takes samples one by one."""
    name, args = getattr(call.func, "__name__", ""), call.arguments[0]
    index = args[1] if len(args) > 1 else None
    first = index[0] if isinstance(index, tuple) and index else index
    return name in ("unbind", "select") or (name in ("__getitem__", "__setitem__") and type(first) is int)


def _memory_of(tensor: Tensor) -> int:
    """Return a number that views of one memory share; those of other layouts and classes have their own."""
    plain = tensor.layout is torch.strided and type(tensor) in (Tensor, torch.nn.Parameter)
    return _torch.memory_key(tensor) if plain else id(tensor)


def _device_of(made: Sequence[Any]) -> str:
    return next((value.device.type for value in made if isinstance(value, Tensor)), "cpu")


def _may_be_whole(given: _Given) -> bool:
    """Return whether a tensor with as many rows as samples may have none of theirs."""
    # What is in the graph was computed from the samples; class labels come more than once.
    tensor = given.tensor
    differ = tensor.is_floating_point() or len(tensor.unique()) == tensor.numel()
    return differ and not tensor.requires_grad and not given.drawn


def _as_it_is(leaf: Any) -> Any:
    """Return an argument; of a generator a copy, which draws what it would."""
    return leaf.clone_state() if isinstance(leaf, torch.Generator) else leaf


def _brief(value: Tensor, axis: int | None) -> Tensor:
    """Return a value with samples in front, as numbers; of a long row some entries, its sum and its norm."""
    if axis is None:
        return value
    rows = value.movedim(axis, 0).reshape(value.shape[axis], -1)
    rows = rows if rows.is_floating_point() else rows.double()
    length, wide = rows.shape[1], torch.promote_types(rows.dtype, torch.float32)
    if length <= _ENTRIES:
        return rows
    places = torch.randint(length, (_ENTRIES,), generator=torch.Generator().manual_seed(0)).to(rows.device)
    sums = [rows.sum(1, dtype=wide), torch.linalg.vector_norm(rows, dim=1, dtype=wide)]
    # As large as an entry is.
    return torch.cat([rows.index_select(1, places), (torch.stack(sums, 1) / length**0.5).to(rows.dtype)], 1)


def _largest(values: Tensor) -> Tensor:
    """Return the largest absolute value, without a copy of all."""
    return torch.linalg.vector_norm(values, float("inf"))


class LoopReplay:
    """What was recorded, to be computed with other samples."""

    _most: float = _LARGEST
    _period = 0  # of patterns of samples; 0 for as long as the batch

    def __init__(self, record: LoopRecord, calls: Sequence[_Call], values: Mapping[int, Tensor], batch: Batch) -> None:
        # `values`: what is asked about, by number; nothing if all that the loop keeps is.
        axis_of = partial(batch_axis_of, batch_size=batch.size, axis=batch.axis)
        roots = list(values.values())
        # Parts of a batch that have these samples are given; others, a first row as one, are computed.
        of_these = {n for n, one in record.given.items() if axis_of(one.tensor) is not None}
        calls = [call for call in calls if not call.part or of_these.isdisjoint(call.makes)]
        computed = {number for call in calls if call.part for number in call.makes}
        self._calls, self._numbers, self._roots = calls, list(values), roots
        used = frozenset(values).union(*(call.takes for call in calls)) - computed
        noted = {n: one for n, one in record.given.items() if n in used or not (values or n in computed)}
        self._tensors = {number: one.tensor for number, one in noted.items()}
        self._made = frozenset(number for number, one in noted.items() if one.maker)
        self._placed = [number for number, one in noted.items() if one.maker in _BY_PLACE]
        self._is_stale = any(_torch.known_version(one.tensor) != one.version for one in noted.values())
        # Of what has samples, the axis: parameters have none.
        axes = {n: None if t.is_leaf and t.requires_grad else axis_of(t) for n, t in self._tensors.items()}
        self._axes = {number: axis for number, axis in axes.items() if axis is not None}
        # Tensors of the draw, of so many records, that these samples are a part of.
        self._drawn = next((one.drawn for one in noted.values() if one.drawn > batch.size), 0)
        drawn = (n for n, one in noted.items() if one.drawn == self._drawn > 0)
        self._of_draw = {n: batch.axis for n in drawn if self._drawn in self._tensors[n].shape[batch.axis :][:1]}
        self._ends = [n for n, tensor in self._tensors.items() if tensor.requires_grad and not tensor.is_leaf]
        self._compared = [*map(axis_of, roots), *(axes[number] for number in self._ends)]
        self.others = {n: one.other for n, one in noted.items() if one.other is not None}  # of an earlier batch
        self._whole = [number for number in self._axes if _may_be_whole(noted[number])]
        dtypes = {*(tensor.dtype for tensor in (*self._tensors.values(), *roots)), *(call.cast[1] for call in calls)}
        self._tolerance = max((TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE), default=0.0)
        elements = sum(self._tensors[number].numel() for number in self._axes.keys() & used)
        few = max(2, min(batch.size, batch.size * _LARGE // max(elements, 1)))
        few = few if values or elements > self._most else batch.size
        self._batch, self._is_whole = replace(batch, size=few), few == batch.size
        if not self._is_whole:
            # The others are let go of.
            self._tensors |= {n: of_samples(self._tensors[n], range(few), axis) for n, axis in self._axes.items()}
        self._tensors = {number: tensor.detach() for number, tensor in self._tensors.items()}
        self._known = {} if values else record.known()
        self._base: list[Tensor] = []
        self._draws: AlikeDraws | None = None  # what gives all samples the same random numbers
        self._times = LOUDER * (-1) ** (batch.seed + 1)
        self.has_run = False  # whether it ran with other samples
        self.is_all = False  # whether all that has samples is asked about

    @cached_property
    def _alike(self) -> list[Alike]:
        return alike((self._tensors[n], axis) for n, axis in self._axes.items() if n not in self._ends)

    def tells(self) -> bool:
        """Return whether samples differ in all that was computed with: what they are alike in shows nothing."""
        return not any(one.all for one in self._alike)

    def mixes(self) -> bool:
        """Return whether samples follow each other, as far as it is known."""
        return self._look(self._changes) or self._blends()

    def _blends(self) -> bool:
        """Return whether samples follow several records of the draw that they are a part of, as far as it is known."""
        if not (self._of_draw and self._is_whole):
            return False
        draw, size = copy(self), self._batch.size
        draw._axes, draw._whole, draw._batch = self._of_draw, [], replace(self._batch, size=self._drawn)
        # Where outputs have as many rows together, these may be several of each record, as of a pair.
        draw._period = size if self._drawn == len(self._ends) * size else 0
        if not draw._look(draw._are_of_neither):
            return False
        draw._draws = AlikeDraws(self._batch.axis)
        with WithoutDropout():
            return draw._look(draw._are_of_neither)

    def _are_of_neither(self, _: Sequence[int]) -> bool:
        """Return whether copies of two records make a sample that copies of neither alone make."""
        # So it is found in whatever part of a draw, and in whatever order, samples are.
        size, rare = self._batch.size, rare_sample(self._alike)
        period = self._period or size
        chosen = random.Random(self._batch.seed).sample(range(period), period // 2)
        first, places = int(rare == 0), [place for place in range(size) if place % period in chosen]
        for second, loud in product({rare % size, size // 2} - {first}, ((), places)):
            both = self._run([second if place in places else first for place in range(size)], (), loud)
            ones = self._run(size * [first], ()), self._run(size * [second], (), loud and range(size))
            if not bool(torch.stack([self._equal_rows(both, one) for one in ones]).any(0).all()):
                return self._draws is None or all(type(one) is tuple for one in self._draws.seen)
        return False

    def _equal_rows(self, values: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        """Return which samples have the same values, up to rounding."""
        equal = []
        for one, other, axis in zip(values, others, self._compared, strict=True):
            if axis is not None:
                least = self._tolerance * float(_largest(one.nan_to_num()))
                equal.append(torch.isclose(one, other, rtol=0.0, atol=least, equal_nan=True).all(1))
        return torch.stack(equal).all(0)

    def fate(self) -> str:
        """Return what became of samples: "mixed", "moved" to other places, or nothing that shows."""
        if not self._look(self._changes):
            return "mixed" if (self._is_parted() and self._look(self._go_by_place)) or self._blends() else ""
        # Random numbers belong to places: where samples may have moved, all get the same ones.
        self._draws = AlikeDraws(self._batch.axis)
        with WithoutDropout():
            return "mixed" if self._look(self._mixes_rows) or self._look(self._are_of_neither) else "moved"

    def _look(self, differs: Callable[[Sequence[int]], bool]) -> bool:
        """Return whether something differs when samples are replaced, as far as it is known."""
        with unnoticed(self._tensors.values()) as self._before:
            try:
                if not self._is_as_recorded() or not differs(()):
                    return False
                held = [self._whole]
                if self.is_all and len(self._whole) == len(self._axes):
                    # One of them is the samples', sooner numbers than places.
                    found = [n for n in self._whole if n not in self._made]
                    real = [n for n in found if self._tensors[n].is_floating_point()]
                    held = [[n for n in self._whole if n != own] for own in real or found] or held
                return not self._whole or all(map(differs, held))
            except Exception:  # noqa: BLE001 - it is the user's code
                return False

    def _is_as_recorded(self) -> bool:
        """Return whether everything comes out as it did, if it can: it may draw numbers, or be of fewer samples."""
        self._base = self._run(range(self._batch.size), ())
        if self._before.drawn() or self._draws is not None:
            return not self._is_stale
        for one, root, axis in zip(self._base, self._roots, self._compared, strict=False):
            # Of fewer samples one loss for all is another one.
            were = root if axis is None or self._is_whole else of_samples(root, range(self._batch.size), axis)
            is_known, were = axis is not None or self._is_whole, _brief(were.detach(), axis)
            if is_known and not torch.allclose(one, were, rtol=1e-3, atol=1e-6, equal_nan=True):
                return False
        return self._is_whole or not self._is_stale

    def _changes(self, whole: Sequence[int]) -> bool:
        """Return whether samples' values or gradients change when others are replaced; ``whole``: not in these."""
        return any(
            self._exceeds(one[rest] - other[rest], one)
            for rest, _, pairs in self._neighbours(whole)
            for one, other in pairs
        )

    def _exceeds(self, difference: Tensor, one: Tensor) -> bool:
        """Return whether a difference of values is more than rounding."""
        return bool(_largest(difference) > self._tolerance * _largest(one))

    def _is_parted(self) -> bool:
        """Return whether a batch was taken apart, and no sample alone: of that one Python may decide by itself."""
        parts = {call.part for call in self._calls} - {0, self._batch.size}
        return bool(parts) and 1 not in parts and not self._drawn and not any(map(_takes_one, self._calls))

    def _go_by_place(self, whole: Sequence[int]) -> bool:
        """Return whether samples have other values or gradients in other places of the batch."""
        size = self._batch.size
        order = random.Random(self._batch.seed).sample(range(size), size)
        # Random numbers belong to places.
        drawn_alike = copy(self)
        drawn_alike._draws = draws = AlikeDraws(self._batch.axis)
        with WithoutDropout():
            base = drawn_alike._run(range(size), whole)
            now = drawn_alike._run(order, [*whole, *self._placed])
        # What stays in its place follows none of them.
        differ = [
            all(self._exceeds(were - other, one) for were in (one, one[order]))
            for one, other, axis in zip(base, now, self._compared, strict=True)
            if axis is not None
        ]
        return any(differ) and all(type(one) is tuple for one in draws.seen)

    def _mixes_rows(self, whole: Sequence[int]) -> bool:
        """Return whether fewer samples than stay in the batch have the same values, in whatever places."""
        # Rows are compared by a few sums of theirs. Of some operations the random numbers of another place are others.
        # What stands beside each other in several inputs is one sample's.
        for rest, loud, pairs in self._neighbours(whole):
            like = torch.ones(2, self._batch.size, self._batch.size, dtype=torch.bool)
            for pair in pairs:
                rows = torch.stack(pair).reshape(2, self._batch.size, -1).double()
                seeded = torch.Generator().manual_seed(0)
                sums = rows @ torch.randn(rows.shape[2], _SUMS, generator=seeded, dtype=rows.dtype).to(rows.device)
                like &= (torch.cdist(sums[:1], sums, p=float("inf")) <= self._tolerance * sums[0].abs().max()).cpu()
            # Those that stay are there, as many of each kind, and no others but those that were made louder.
            were, are = like.sum(2)
            stay = float((are / were.clamp(min=1)).clamp(max=1).sum())
            if stay < len(rest) - 0.5 or int(like[1].any(0).sum()) < self._batch.size - len(loud):
                return self._draws is None or all(type(one) is tuple for one in self._draws.seen)
        return False

    def _neighbours(
        self, whole: Sequence[int]
    ) -> Iterator[tuple[list[int], Sequence[int], list[tuple[Tensor, Tensor]]]]:
        """Yield, of neighbours, which samples stayed, which are louder, and all values, samples first: before, now."""
        batch, ran = self._batch, False
        drawn, *halves = batch.replaced
        rare = rare_sample(self._alike)
        unlike = [(batch.others([rare]), ())] if rare >= 0 else []
        many = [(drawn, ()), (batch.others(drawn), ()), *((half, half) for half in halves for _ in _TIMES), *unlike]
        # One at a time where all others fail: a loop may go by the classes that there are.
        for number, (gone, loud) in enumerate((*many, *(([place], ()) for place in range(min(_ALONE, batch.size))))):
            if ran and number >= len(many):
                return
            rest, self._times = batch.others(gone), _TIMES[number % len(_TIMES)]
            try:
                now = self._run(batch.copies(gone), whole, loud)
            except Exception:  # noqa: BLE001 - it may take no values of that size, or no fewer classes
                continue
            ran = self.has_run = True
            triples = zip(self._base, now, self._compared, strict=True)
            yield rest, loud, [(one, other) for one, other, axis in triples if axis is not None]

    def follows_kept(self) -> bool:
        """Return whether several samples follow what was kept of an earlier batch, as far as it is known."""
        # One of them may be the record that was another one there.
        return bool(self.others) and self._look(lambda whole: self._changed(whole) > 1)

    def _changed(self, whole: Sequence[int]) -> int:
        """Return how many samples' values or gradients are others with what was kept of an earlier batch."""
        now, changed = self._run(range(self._batch.size), whole, others=True), torch.zeros(self._batch.size)
        # Of what is in the graph the gradients count, not the value.
        counts = [*(not root.requires_grad for root in self._roots), *(True for _ in self._ends)]
        for one, other, axis in compress(zip(self._base, now, self._compared, strict=True), counts):
            least = self._tolerance * _largest(one.double().nan_to_num())
            moved = one.isfinite() & ~((one.double() - other.double()).abs() <= least)
            changed += (moved.any() if axis is None else moved.any(1)).cpu()
        return int(changed.count_nonzero())

    def kept(self) -> Kept:
        """Return which values a loop keeps, and what they would be with another record in one place."""
        kept = Kept()
        alive = {number: _shape_of(value) for number, read in self._known.items() if (value := read()) is not None}
        with unnoticed(self._tensors.values()) as self._before:
            base = self._values(range(self._batch.size), self._whole, only=alive)
            # A rare and a loud sample change more than one that is alike.
            samples, rare = [*range(self._batch.size)], rare_sample(self._alike)
            samples[rare == 0] = 1 if rare < 0 else rare
            now = self._values(samples, self._whole, [int(rare == 0)], only=alive)
        for number in base.keys() & now.keys():
            one, other = base[number], now[number]
            # Subclasses of tensors have functions of their own.
            with suppress(Exception):
                is_tensor = isinstance(one, Tensor)
                if not (torch.equal(one, other) if is_tensor else one == other):
                    # So far that it is on the other side of what it is held against.
                    goes_on = not is_tensor or one.is_floating_point()
                    kept.put(self._known[number](), one + _FAR * (other - one) if goes_on else other)
        return kept

    def _run(
        self, samples: Sequence[int], whole: Sequence[int], loud: Sequence[int] = (), *, others: bool = False
    ) -> list[Tensor]:
        """Return what comes out for some samples, each in a place, and the gradients of what is in the graph."""
        with torch.enable_grad():
            values = self._values(samples, whole, loud, others=others)
            roots = [values[number] for number in self._numbers]
            leaves = [values[~number] for number in self._ends]
            totals = [root.sum() for root in roots if root.requires_grad]
            grads: Sequence[Tensor] = list(map(torch.zeros_like, leaves))
            if totals:
                grads = torch.autograd.grad(totals, leaves, allow_unused=True, materialize_grads=True)
        return list(starmap(_brief, zip([*(root.detach() for root in roots), *grads], self._compared, strict=True)))

    def _values(
        self,
        samples: Sequence[int],
        whole: Sequence[int] = (),
        loud: Sequence[int] = (),
        *,
        others: bool = False,
        only: Mapping[int, Any] | None = None,
    ) -> dict[int, Any]:
        """Return all values for some samples, each in a place, by number; what is in the graph by its complement."""
        # `loud`: places where samples have larger values; `others`: with what another record would have left in an
        # earlier batch; `only`: those with these shapes, outside of the graph, as far as it can be computed.
        self._before.restore()
        axes = {number: axis for number, axis in self._axes.items() if number not in whole}
        tensors = {**self._tensors, **self.others} if others else self._tensors
        given = {n: of_samples(t, samples, axes[n]) if n in axes else t for n, t in tensors.items()}
        for number in axes if loud else ():
            given[number] = self._louder(number, given[number], loud)
        given = {number: tensor.detach().requires_grad_(number in self._ends) for number, tensor in given.items()}
        written = any(call.writes for call in self._calls)
        values = {number: tensor.clone() for number, tensor in given.items()} if written else dict(given)
        if only is not None:
            return self._kept_values(values, only)
        with torch.enable_grad(), self._draws or nullcontext():
            for call in self._calls:
                values.update(_called_again(call, values))
        return {**values, **{~number: given[number] for number in self._ends}}

    def _louder(self, number: int, tensor: Tensor, loud: Sequence[int]) -> Tensor:
        """Return values with larger ones for some samples: of whole numbers the largest, or smallest, that there is."""
        if tensor.is_floating_point() or tensor.is_complex() or tensor.is_nested:
            return louder(tensor, loud, self._axes[number], seed=self._batch.seed, times=self._times)
        whole, places = self._tensors[number], torch.tensor(loud, device=tensor.device)
        return tensor.index_fill(self._axes[number], places, whole.max() if self._times > 0 else whole.min())

    def _kept_values(self, values: dict[int, Any], only: Mapping[int, Any]) -> dict[int, Any]:
        """Return the values with some shapes, of what was given; all others are let go of once nothing takes them."""
        last = {number: place for place, call in enumerate(self._calls) for number in (*call.takes, *call.makes)}
        for place, call in enumerate(self._calls):
            # Not all that a loop calls leads to what it keeps.
            with suppress(Exception):
                values.update(_called_again(call._replace(graded=False), values))
            for number in {*call.takes, *call.makes} & values.keys():
                if last[number] == place and _shape_of(values[number]) != only.get(number, ...):
                    del values[number]
        return {number: value for number, value in values.items() if _shape_of(value) == only.get(number, ...)}


class BackwardReplay(LoopReplay):
    """The backward of a loss, with what its hooks and functions hold of the loop as it would be with other samples."""

    # They run in autograd's engine, which no mode follows: the tensors themselves get other values for as long.
    _most = float("inf")

    def __init__(self, record: LoopRecord, batch: Batch, gradients: Callable[[], list[Tensor]]) -> None:
        # `gradients`: those of all layers, samples first.
        super().__init__(record, record.calls, {}, batch)
        self._gradients = gradients

    def mixes(self) -> bool:
        """Return whether samples' gradients change when others are replaced, as far as it is known."""
        return self._look(self._changes)

    def _is_as_recorded(self) -> bool:
        self._base = self._run(range(self._batch.size), ())
        self._compared = [0] * len(self._base)
        return True

    def _changes(self, whole: Sequence[int]) -> bool:
        # Hardly any holds anything: one that does shows where all samples are others.
        size = self._batch.size
        others = (self._run(size * [sample], whole) for sample in (0, rare_sample(self._alike) % size))
        pairs = (pair for other in others for pair in zip(self._base, other, strict=True))
        return any(self._exceeds(one - other, one) for one, other in pairs) and super()._changes(whole)

    def _run(
        self, samples: Sequence[int], whole: Sequence[int], loud: Sequence[int] = (), *, others: bool = False
    ) -> list[Tensor]:
        """Return the gradients with samples, each in a place, in what was known by then."""
        known = ((number, read()) for number, read in self._known.items())
        alive = {number: one for number, one in known if isinstance(one, Tensor) and not one.is_inference()}
        shapes = {number: one.shape for number, one in alive.items()}
        values = self._values(samples, whole, loud, others=others, only=shapes)
        with _holding([(alive[n], value) for n, value in values.items() if alive[n].dtype == value.dtype]):
            return self._gradients()


class LayerRows:
    """Receiver of the gradients of a forward's layers, samples first, as numbers that tell them."""

    def __init__(self, forward: ForwardContext) -> None:
        self.rows: list[Tensor] = []
        self._forward = forward

    def receive(self, use: ParamUse, grad: Tensor) -> None:
        """Take in a layer's."""
        if use.forward is self._forward:
            self.rows.append(_brief(use.row_map.split(grad, use.num_batch_dims, use.forward.batch_size), 0))


@contextmanager
def _holding(values: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Within the block, let tensors hold the values of others; views of their memory, and its owner, do not."""
    pairs = [(one, one.data, other.detach()) for one, other in values]
    try:
        for one, _, other in pairs:
            one.data = other
        yield
    finally:
        for one, own, _ in pairs:
            one.data = own


def _shape_of(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None


def _called_again(call: _Call, values: Mapping[int, Any]) -> Iterable[tuple[int, Any]]:
    """Return what a call makes of other values, by number."""
    args, kwargs = _tree.mapped(lambda leaf: values[leaf] if type(leaf) is _At else _as_it_is(leaf), call.arguments)
    kind, cast = call.cast
    with torch.set_grad_enabled(call.graded), torch.autocast(kind, dtype=cast, enabled=cast is not None):
        return zip(call.makes, _made(call.func(*args, **kwargs)), strict=True)


def _abandon(records: Sequence[LoopRecord]) -> None:
    """End what nobody is left to end."""
    if LoopRecord.open in (None, *records):
        LoopRecord.end()


class Loop:
    """What a loop does around the forwards of one model that are asked about."""

    def __init__(self, unchecked: Unchecked, *, is_on: bool) -> None:
        # How many records were drawn with a tensor.
        self.drawn_with: Callable[[Tensor], int] = lambda tensor: 0
        self._is_in_order = True  # whether what a model was given since then had samples where the batch had them
        self.is_on = is_on
        self._unchecked = unchecked
        self.record: LoopRecord | None = None  # from before the forward that runs
        self.kept = Kept()  # of the batch before
        self.may_keep = False  # whether there is any
        # Steps that were looked at, in a row, in which all samples were alike in something; whether that goes on.
        self._repeats, self.asks = 0, False
        self._ahead = 0  # batches that were handed out since a record began, until a forward
        self._batches: list[weakref.ref[Tensor]] = []  # their tensors
        self._latest: list[LoopRecord] = []
        weakref.finalize(self, _abandon, self._latest).atexit = False

    def take_batch(self, batch: Sequence[Tensor]) -> None:
        """Record what is done with a batch that is handed out, if the next forward is one to ask about."""
        self._batches = [one for one in self._batches if one() is not None] + [weakref.ref(one) for one in batch]
        self._is_in_order = True
        self.may_keep = self.may_keep and bool(self.kept)
        if LoopRecord.open in self._latest and 0 < self._ahead < _AHEAD:
            # Whoever fetches batches ahead has moved, or changed, the one that the next forward is of.
            self._ahead += 1
            return
        if LoopRecord.entered:
            self.end_record()
        if self.is_on and (self._unchecked.is_due or self.may_keep or self.asks):
            self._begin(LoopRecord(self))
            self._ahead = 1

    def take_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Record what is done with the outputs of a forward."""
        record, self.record, self._ahead = self.record, None, 0
        if self.is_on and self._is_in_order:
            self._begin(record or LoopRecord(self), outputs)
        else:
            self.kept, self.may_keep = Kept(), False

    def _begin(self, record: LoopRecord, outputs: Sequence[Tensor] = (), *, only_kept: bool = False) -> None:
        self._latest[:] = [record]
        record.begin(outputs, only_kept=only_kept)

    def _batch_of(self, forward: ForwardContext) -> Batch:
        return Batch(None, forward.batch_size, forward.batch_axis, seed=self._unchecked.forwards)

    def end_record(self) -> LoopRecord | None:
        """Record no more; return what was recorded."""
        self.record, self._ahead = None, 0
        return LoopRecord.end()

    def follow(self) -> None:
        """Follow what the loop keeps of a batch, after a backward that torch did not call."""
        if not LoopRecord.entered:
            self._begin(LoopRecord(self), only_kept=True)

    def rest(self) -> None:
        """Follow no longer what is kept: whoever takes batches takes no more."""
        # Through records of its own: a pass that a script leaves unfinished ends when modules are gone already.
        if any(record.open is None and record.entered for record in self._latest):
            self.end_record()

    def step(self) -> None:
        """Record no more, but of what is kept."""
        if LoopRecord.open is not None or not self.kept:
            self.end_record()

    def look_at_inputs(self, inputs: Sequence[Tensor], forward: ForwardContext) -> None:
        """Refuse inputs that were computed of a batch, where samples follow each other."""
        record = self.end_record() or (LoopRecord(self) if self.kept else None)
        if record is None or not self.is_on or forward.batch_size < 2:
            return
        self.record = record
        kept = self.kept.other_of
        made = [one for one in inputs if record.made(one) or (kept(one) is not None and record.take(one))]
        given = [tensor for tensor in inputs if self.drawn_with(tensor) and record.take(tensor)]
        replay = record.replay([*made, *given] if made else (), self._batch_of(forward))
        if replay is not None:
            replay.is_all = len(made) + len(given) == len(inputs)
        # In a step that is only followed, nothing but what was kept is looked at.
        looked_at = None if self.may_keep and not (self._unchecked.is_due or self.asks) else replay
        fate = "" if looked_at is None else looked_at.fate()
        if fate == "mixed":
            raise SampleMixingError(_MIXED_INPUTS)
        self._report(looked_at)
        if replay is not None and replay.follows_kept():
            raise SampleMixingError(_KEPT)
        # In other places nothing says which outputs go with which targets.
        self._is_in_order = not fate

    @contextmanager
    def looking_at_loss(
        self, roots: Sequence[Any], forward: ForwardContext, gradients: Callable[[], list[Tensor]] | None
    ) -> Iterator[None]:
        """Yield while a loss is examined; then refuse one that was computed with samples following each other."""
        # `gradients`: those of all layers, samples first; None where all of the backward is torch's.
        # What others see says better where. A record holds outputs that nobody else may: it is let go of before.
        record, batch = self.end_record(), self._batch_of(forward)
        # In a step that is only followed, nothing but what was kept is looked at.
        asks = forward.unproven or self.asks or not self.may_keep
        replay, later, backward, known = None, None, None, bool(forward.losses)
        if record is not None and batch.size > 1:
            replay = record.replay(roots, batch)
            backward = self._behind(record, batch, gradients) if asks and gradients is not None else None
            # What it keeps of a batch is followed to the next one, not for ever.
            later = None if self.may_keep else record.replay(None, batch)
        self.kept, self.may_keep = Kept(), False
        if record is not None:
            record.clear()
        yield
        looked_at = replay if asks and not known else None
        if looked_at is not None and looked_at.mixes():
            raise LossReductionError(_REFUSED)
        if backward is not None and backward.mixes():
            raise LossReductionError(_BACKWARD)
        if looked_at is not None:
            # Once samples differed it is for the schedule alone.
            self._repeats = MOST_ALIKE if looked_at.tells() else self._repeats + 1
            self.asks = self._unchecked.asks_after(self._repeats)
        self._report(looked_at)
        if replay is not None and replay.follows_kept():
            raise LossReductionError(_KEPT)
        if later is not None:
            self.kept = later.kept()
            self.may_keep = bool(self.kept)

    def _behind(self, record: LoopRecord, batch: Batch, gradients: Callable[[], list[Tensor]]) -> BackwardReplay:
        """Return the backward of a loss, to be run with what it holds of other batches."""
        for tensor in [tensor for read in self._batches if (tensor := read()) is not None]:
            record.take(tensor)
        return BackwardReplay(record, batch, gradients)

    def _report(self, replay: LoopReplay | None) -> None:
        """Say so where what was recorded could not be run again."""
        if replay is not None and not replay.has_run:
            self._unchecked.missed("in a step that was looked at it could not be run again", LOOP)
            self._unchecked.warn()
