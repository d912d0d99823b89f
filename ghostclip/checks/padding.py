"""Axes as long as the longest record of a batch: what one record gives must not follow how far it was padded.

An axis is known to follow the batch where the collate function pads along it, or where an earlier forward had another
length there. Records that end (or begin) in padding are then run twice, as they are and with the padding cut off, as if
longer records had not been drawn: every output that remains must be the same. A loss of such outputs must have no
gradient at padded positions, and no mean over that axis, which divides by the longest record's length.

What counts as padding. One value (one column) at the end of several records that hardly occurs elsewhere, or the one
that the collate function was seen to add. Padding that looks like data, as noise, cannot be told from it.

Shape letters: B samples, L positions, F features.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from itertools import chain, islice
from math import exp, isfinite, lgamma, log, prod
from operator import add
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ghostclip import _tree
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.inputs import packed_inputs
from ghostclip.capture.nodes import Edge
from ghostclip.capture.row_maps import RowMap, samples_axis
from ghostclip.checks.batches import Batch, Randomness
from ghostclip.checks.dependence import batch_axis_of, first_difference
from ghostclip.checks.independence import FEWER_TOLERANCE, TOLERANCE, Run, plainly, tried
from ghostclip.checks.linear_paths import Path, ReducedAxes, looks_plain
from ghostclip.checks.loss_graph import outputs_at
from ghostclip.checks.unchecked import PADDING, Unchecked
from ghostclip.errors import LossReductionError, SampleMixingError

# Forwards after which an axis that never ended in padding is looked at in proved forwards alone.
_PATIENCE: Final = 64
# Lengths of padding that are tried until the model runs without it, and ways through a loss that are looked at.
_CUTS: Final = 4
_WAYS: Final = 16
# Axes of what holds a value for each position, and the label of positions that are left out.
_WITH_POSITIONS: Final = 2
_IGNORED: Final = -100
# Forwards that prove an axis, beside the scheduled ones: which output a record's padding reaches may depend on it.
_PROOFS: Final = 3
# A value that so many entries at the ends have, a run of it included, and at most a fourth as many others, is padding.
_ENTRIES: Final = {True: 2, False: 3}
_RUN: Final = {True: 1, False: 2}
_ELSEWHERE: Final = 4
# Whole numbers stand at the ends alone by chance, where there are few: so rarely at most that it is taken for padding.
_CHANCE: Final = 1e-2
# Values that are met at the ends most often are looked for in records that end otherwise.
_LEADING: Final = 8
_FIXED: Final = (
    "Or pad all records to one fixed length: so, too, where lengths are given as shares of the longest record's, which "
    "stand for other positions once padding is cut off, or give them as numbers of positions."
)
_OWN: Final = (
    "For classes: ghostclip.losses.token_losses(logits, labels, ignore_index=the padding's label), shift=False if "
    "each position has its own label. For other losses: losses = (each * mask / mask.sum(1, keepdim=True)).sum(1), "
    "with each position's loss (B, positions), and a mask that is 1 at a record's own positions and 0 at padding. "
    f"{_FIXED}"
)
_FOLLOWS: Final = (
    "{model}: outputs of a record changed when {count} {side} padded position(s) were cut off that it has only because "
    "a longer record is in the batch (axis {axis} of an input of shape {shape}), so that its gradient depends on its "
    "company and no bound holds.{place} Give the model the records' mask and use it: attention masks; a mean over a "
    "record's own positions ((h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)); the last own position in place "
    "of h[:, -1]; positions counted from the mask (mask.cumsum(1) - 1); zeros at padding before each convolution; "
    f"packed sequences. {_FIXED}"
)
_TAKEN_IN: Final = (
    "the loss has a gradient at {count} padded position(s), which a record has only because a longer one is in the "
    "batch: its gradient depends on its company, and no bound holds. Leave them out, and average each record over its "
    "own positions; where padding is on the left, a causal model predicts a record's first token at a padded position: "
    "give that token the padding's label. {own}"
)
_DIVIDED: Final = (
    "the loss is {how}, which is as long as the longest record of the batch: each record's gradient depends on the "
    "others' lengths, and no bound holds. Average each record over its own positions. {own}"
)


@dataclass(frozen=True)
class Padded:
    """An axis of a batch along which a collate function pads."""

    name: str  # the key, or the place, of the tensor in the batch
    dims: int  # how many axes it has
    axis: int  # the one
    value: float | None  # the number that fills it up; None where it is not one
    leading: bool | None  # whether in front of a record; None where that is not known
    is_float: bool  # whether it holds floating-point numbers


class _InputAxis(NamedTuple):
    """An axis of one of the inputs."""

    part: int  # of the model that was called, by its `id`: lengths of one say nothing of those of another
    leaf: int  # number of the input among the flattened ones
    dims: int  # its number of axes
    axis: int


@dataclass(frozen=True)
class _Ends:
    """Padding found at one end of the records, along all inputs of one length."""

    places: tuple[_InputAxis, ...]  # the axes
    length: int  # L
    leading: bool  # whether records begin with it
    run_B: list[int]  # padded positions of each record


@dataclass(frozen=True)
class _Beyond:
    """Positions of an output that some records have only because a longer record is in the batch."""

    number: int  # which of the outputs
    row_map: RowMap  # how its rows map to samples
    axis: int  # the axis of positions, with samples first
    count: int  # how many positions
    length: int  # of how many
    leading: bool  # whether the first ones
    samples: Sequence[int]  # the records
    edge: Edge | None = None  # the output's place in the graph, once it is at hand

    def reached_by(self, grad: Tensor, batch_size: int) -> bool:
        """Return whether a gradient of the output is anything but zero there."""
        rows = _by_sample(grad, self.row_map, batch_size)
        assert rows is not None, "it was split when the forward ended"
        padded = rows[list(self.samples)].narrow(self.axis, 0 if self.leading else self.length - self.count, self.count)
        return bool((padded.nan_to_num(nan=0.0) != 0).any())


class Padding:
    """What is known of the axes of a model's inputs that follow the batch, and what was proved of them."""

    def __init__(self) -> None:
        """Begin without any axis known to follow the batch."""
        self.declared: Sequence[Padded] = ()  # padding that the loader has added
        # By model part, number of the input and of its axes: the first shape seen.
        self._shapes: dict[tuple[int, int, int], torch.Size] = {}
        self._following: set[_InputAxis] = set()  # axes whose length differs from batch to batch
        self._proofs: Counter[_InputAxis] = Counter()  # how often each was proved
        # By axis and whether leading: what records end in.
        self._ends_in: defaultdict[tuple[_InputAxis, bool], _EndValues] = defaultdict(_EndValues)
        # By path through a loss: lengths of the inputs then, and what it was divided by.
        self._seen: dict[Any, tuple[tuple[int, ...], tuple[float, ...]]] = {}
        self._lengths: tuple[int, ...] = ()  # of the latest inputs' axes but the samples'
        self._inputs, self._part = list[weakref.ref[Tensor]](), 0
        self._waited = 0  # forwards in which padding was looked for

    def renew(self) -> None:
        """Prove anew: the model was changed."""
        self._proofs.clear()
        self._waited = 0

    def begin(self, part: nn.Module, inputs: Sequence[Tensor], forward: ForwardContext) -> None:
        """Record the lengths of a forward's inputs; an axis whose length differs from before follows the batch."""
        size, batch_axis, lengths = forward.batch_size, forward.batch_axis, []
        self._inputs, self._part = list(map(weakref.ref, inputs)), id(part)
        for number, tensor in enumerate(inputs):
            shape, samples = tensor.shape, batch_axis_of(tensor, batch_size=size, axis=batch_axis)
            # Ragged rows have no padding.
            if samples is None or tensor.is_nested:
                continue
            before = self._shapes.setdefault((self._part, number, len(shape)), shape)
            for axis, length in enumerate(shape):
                if axis == samples:
                    continue
                lengths.append(length)
                if length != before[axis]:
                    self._following.add(_InputAxis(self._part, number, len(shape), axis))
        self._lengths = tuple(lengths)

    def counts(self) -> Iterator[int]:
        """Yield numbers of positions without padding in the latest inputs, which a loss may have divided by."""
        # Of tensors with a value for each position, of floating-point ones those of zeros and ones; also without the
        # first position, which nothing predicts. As many for each sample are no count of the batch.
        for tensor in [tensor for reference in self._inputs if (tensor := reference()) is not None]:
            fits = tensor.dim() == _WITH_POSITIONS and tensor.numel() > 0
            if not fits or (tensor.is_floating_point() and not bool(((tensor == 0) | (tensor == 1)).all())):
                continue
            for part in (tensor, tensor[:, 1:]):
                counts = (int((part != value).sum()) for value in {0, _IGNORED, *tensor[:_CUTS, -1].tolist()})
                yield from (count for count in counts if count % len(tensor))

    def is_pending(self) -> bool:
        """Return whether an axis that follows the batch is not proved yet."""
        axes, waits = self._following or self._proofs, self._waited < _PATIENCE
        return waits and (any(self._proofs[axis] < _PROOFS for axis in axes) if axes else bool(self.declared))

    def refuse(self, model: nn.Module, run: Run, batch: Batch, forward: ForwardContext, unchecked: Unchecked) -> None:
        """Refuse a model whose outputs for a record change when its padding is cut off."""
        input_axes = self._input_axes(batch)
        if not input_axes or next(iter(packed_inputs(batch.inputs)), None) is not None:
            return
        self._waited += 1
        forward.padded = []
        for length in sorted({shape for _, shape in input_axes}):
            chosen = tuple(input_axis for input_axis, shape in input_axes if shape == length)
            for leading in (False, True):
                ends = self._ends(batch, chosen, length, leading=leading)
                if ends is not None:
                    self._refuse_one(model, plainly(run), batch, ends, forward, unchecked)

    def _input_axes(self, batch: Batch) -> list[tuple[_InputAxis, int]]:
        """Return the axes of the inputs that follow the batch, with their lengths."""
        axes = []
        for number, (name, tensor) in enumerate(_named(batch.inputs)):
            samples = None if tensor.is_nested else batch_axis_of(tensor, batch_size=batch.size, axis=batch.axis)
            for axis, length in enumerate(tensor.shape):
                key = _InputAxis(self._part, number, tensor.dim(), axis)
                follows = key in self._following or any(one.axis == axis for one in self._declared_of(name, tensor))
                if samples is not None and axis != samples and follows:
                    axes.append((key, length))
        return axes

    def _declared_of(self, name: str, tensor: Tensor) -> list[Padded]:
        """Return the axes of the loader's tensor of this name; of all that look like it where none has the name."""
        alike = [
            one for one in self.declared if one.dims == tensor.dim() and one.is_float == tensor.is_floating_point()
        ]
        return [one for one in alike if one.name == name] or alike

    def _ends(self, batch: Batch, input_axes: tuple[_InputAxis, ...], length: int, *, leading: bool) -> _Ends | None:
        """Return the padding at one end of the records, along inputs of one length; None where there is none."""
        tensors = list(_named(batch.inputs))
        columns: dict[_InputAxis, _Column] = {}
        for input_axis in input_axes:
            name, tensor = tensors[input_axis.leaf]
            if sum(other.leaf == input_axis.leaf for other in input_axes) > 1:
                # A mask for each pair of positions.
                continue
            seen = [self._at_end(name, tensor, input_axis, leading=end) for end in (False, True)]
            if seen[not leading].padding() and not seen[leading].padding():
                return None
            samples = batch_axis_of(tensor, batch_size=batch.size, axis=batch.axis)
            assert samples is not None, "such axes lie beside one for samples"
            rows_BLF = tensor.detach().movedim((samples, input_axis.axis), (0, 1)).reshape(batch.size, length, -1)
            columns[input_axis] = _Column(rows_BLF.flip(1) if leading else rows_BLF, seen[leading])
        decided = [column for column in columns.values() if column.is_padded]
        masked = any(column.is_flags for column in decided)
        runs = [run_B for column in columns.values() if (run_B := column.runs(masked=masked)) is not None]
        run_B = [min(lengths) for lengths in zip(*runs, strict=True)]
        if not decided or not any(0 < run < length for run in run_B):
            return None
        return _Ends(input_axes, length, leading, run_B)

    def _at_end(self, name: str, tensor: Tensor, input_axis: _InputAxis, *, leading: bool) -> "_EndValues":
        """Return what is known of one end of an input, the padding that the loader has declared included."""
        declared = [one.value for one in self._declared_of(name, tensor) if one.leading is leading]
        seen = self._ends_in[input_axis, leading]
        seen.declared = {value for value in declared if value is not None}
        return seen

    def _refuse_one(
        self, model: nn.Module, run: Run, batch: Batch, ends: _Ends, forward: ForwardContext, unchecked: Unchecked
    ) -> None:
        """Run records with and without their padding, for a few lengths of it; refuse outputs that differ."""
        raised, proved, longest = "", False, min(range(batch.size), key=ends.run_B.__getitem__)
        for count in sorted({run for run in ends.run_B if 0 < run < ends.length}, reverse=True)[:_CUTS]:
            samples = [sample for sample, run in enumerate(ends.run_B) if run == count]
            order = [samples[number % len(samples)] for number in range(batch.size)]
            # One that is longer keeps the others' company, in the first place.
            pair = batch.with_lists([longest, *order[1:]]), self._cut(batch.with_lists(order), ends, count, batch)
            comparison, raised = tried(model, batch, partial(_compare_cut, run, pair, batch, ends))
            if comparison is None:
                continue
            if comparison.drew:
                unchecked.missed("random numbers are drawn", PADDING)
                return
            if comparison.differ:
                raise SampleMixingError(self._refusal(model, run, pair, ends, count, batch))
            proved = proved or bool(comparison.lost)
            maps = batch.maps_of(batch.outputs)
            for number, (output, lost, row_map) in enumerate(zip(batch.outputs, comparison.lost, maps, strict=False)):
                known = row_map or batch.map_by_shape(output)
                if lost is not None and known is not None:
                    forward.padded.append(_Beyond(number, known, *lost, ends.leading, samples))
        if proved:
            unchecked.ran(PADDING)
            self._proofs.update(ends.places)
            return
        why = f"the model raised {raised} without padding" if raised else "no output has one row per sample"
        unchecked.missed(why, PADDING)

    def _cut(self, inputs: Any, ends: _Ends, count: int, batch: Batch) -> Any:
        """Return inputs without some padded positions, along what follows the batch and masks of the same length."""
        numbers = iter(range(len(_tree.leaves(inputs))))
        padded = {input_axis.leaf for input_axis in ends.places}
        follows = {(input_axis.leaf, input_axis.axis) for input_axis in ends.places}
        others = {input_axis.leaf for input_axis in self._following}

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            number = next(numbers)
            samples = batch_axis_of(leaf, batch_size=batch.size, axis=batch.axis)
            for axis, length in enumerate(leaf.shape):
                shared = number not in padded and number not in others and length == ends.length and axis != samples
                if (number, axis) in follows or shared:
                    leaf = leaf.narrow(axis, count if ends.leading else 0, length - count)
            return leaf

        return _tree.mapped(cut, inputs)

    @staticmethod
    def _refusal(model: nn.Module, run: Run, pair: tuple[Any, Any], ends: _Ends, count: int, batch: Batch) -> str:
        """Say where outputs begin to follow padding, and what to do."""
        # `pair`: inputs as they are and with the padding cut. The first record is a longer one in the former.

        def compare(before: Randomness, coarsest: torch.dtype) -> str:
            def differs(one: Tensor, two: Tensor) -> bool:
                known = batch.map_by_shape(one)
                folded = RowMap("major") if one.dim() and one.shape[0] % batch.size == 0 else None
                remaining = _remaining(one, two, known or folded, batch.size, ends.leading)
                return remaining is not None and _differs(remaining, coarsest)

            before.restore()
            return first_difference(model, run, pair, differs)

        location, _ = tried(model, batch, compare)
        tensor = _tree.tensors(batch.inputs)[ends.places[0].leaf]
        return _FOLLOWS.format(
            model=type(model).__name__,
            count=count,
            side="leading" if ends.leading else "trailing",
            axis=ends.places[0].axis,
            shape=tuple(tensor.shape),
            place=f" It starts in {location}." if location else "",
        )

    # -- losses -------------------------------------------------------------------------------------------------

    def refuse_losses(
        self,
        path_groups: Iterable[Sequence[Path]],
        forward: ForwardContext,
        gradients: Callable[[Sequence[Edge]], Sequence[Tensor | None]],
        is_of_one: Callable[[Path], bool],
        *,
        roots: Sequence[Edge],
    ) -> None:
        """Refuse a loss that takes padded positions in, or divides by a length that follows the batch.

        Cost:
            Where nothing follows the batch, a few numbers are kept of the first loss of each form.
        """
        # `gradients` returns the loss's gradients at edges, `is_of_one` whether the values at the end of a path are one
        # sample's. What the loss does not take may be on another output's way.
        beyond = [one for one in forward.padded if one.edge is not None] if forward.padded else []
        beyond = _taken(beyond, roots) if beyond else []
        edges = [one.edge for one in beyond if one.edge is not None]
        for one, grad in zip(beyond, gradients(edges) if edges else (), strict=True):
            if grad is not None and one.reached_by(grad, forward.batch_size):
                raise LossReductionError(_TAKEN_IN.format(count=one.count, own=_OWN))
        rows, sizes = list[int](), set[int]()
        for number, path in enumerate(islice(chain.from_iterable(path_groups), _WAYS)):
            taken = _taken(beyond, path.ends) if beyond else []
            sizes = {length for one in taken for length in (one.length, one.length - 1)} if taken else set[int]()
            self._refuse_divisors((number, *path.key), path, forward, sizes, is_of_one)
            last = path.reduced[-1:] if path.loss is None and not path.picked else ()
            rows += [step.count for step in last if step.kind == "mean" and len(step.sizes) == 1]
        # Of rows that were cut to their own positions one may be as long as the longest, and not all.
        if len(rows) > 1 and sizes.issuperset(rows) and forward.batch_size not in rows:
            raise LossReductionError(_DIVIDED.format(how=f"a mean over {rows[0]} positions of each row", own=_OWN))

    def _refuse_divisors(
        self, key: Any, path: Path, forward: ForwardContext, sizes: set[int], is_of_one: Callable[[Path], bool]
    ) -> None:
        """Refuse a mean over, or division by, a number of positions that follows the batch."""
        lengths, before = self._seen.get(key, ((), ()))
        if lengths == self._lengths and not sizes:
            return
        # Of one sample's values a mean is over its own.
        means = [] if is_of_one(path) else list(_inner_means(path, forward))
        divisors = list(_divisors(path))
        now = (*(float(count) for count, _, _ in means), *divisors)
        if not lengths:
            self._seen[key] = self._lengths, now
        # What was another number when the inputs had other lengths follows them; what was the same does not.
        varied = bool(self._following) and lengths != self._lengths and len(before) == len(now)
        others = before if varied else now
        stayed = {number for number, other in zip(now, others, strict=True) if varied and number == other}
        sizes = sizes - (stayed - {near for length in lengths for near in (length, length - 1)})
        for (count, step, axes), other in zip(means, others, strict=False):
            # Or over the first axis that is as long as positions of outputs that follow the batch.
            is_over = next((is_reduced for size, is_reduced in axes if size in sizes), False)
            if count != other or is_over:
                how = f"a mean over {count} positions of a tensor of shape {step.sizes}"
                raise LossReductionError(_DIVIDED.format(how=how, own=_OWN))
        for number, other in zip(divisors, others[len(means) :], strict=True):
            is_length = any(length > 1 and min(abs(number - length), number % length) <= 1 for length in self._lengths)
            # The number of records is no length, though it may be near one.
            if number != forward.batch_size and ((number != other and is_length) or number in sizes):
                raise LossReductionError(_DIVIDED.format(how=f"divided by {number:g}, a number of positions", own=_OWN))


def _taken(padded: Sequence[_Beyond], begun: Sequence[Edge]) -> list[_Beyond]:
    """Return the padded outputs that a loss reads directly, not through other outputs; all if its graph is long."""
    ends = outputs_at(begun)
    return [one for one in padded if ends is None or one.edge in ends]


@dataclass(frozen=True)
class _CutResult:
    """What cutting padding off changed."""

    drew: bool = False  # random numbers were drawn: nothing can be told
    differ: bool = False  # outputs changed
    # for each output along which axis, samples first, it lost how many positions of how many; None for none
    lost: Sequence[tuple[int, int, int] | None] = ()


class _Ended(NamedTuple):
    """How often a value was met, in records that do not consist of it: in entries."""

    at_ends: int = 0  # in runs at the end
    elsewhere: int = 0
    longest: int = 0  # of the runs
    records: int = 0  # looked at
    entries: int = 0  # of these records

    def by_chance(self) -> float:
        """Return a bound on the chance that one of the values is met as this one is, if they stood anywhere."""
        ends = _choices(self.at_ends + self.records - 1, self.at_ends) + log(max(1, self.records))
        anywhere = _choices(self.entries, self.at_ends + self.elsewhere)
        return exp(min(0.0, ends + _choices(self.entries - self.at_ends, self.elsewhere) - anywhere))


def _choices(among: int, count: int) -> float:
    """Return the logarithm of in how many ways some may be chosen."""
    return lgamma(among + 1) - lgamma(count + 1) - lgamma(among - count + 1)


class _EndValues:
    """What stood at one end of an input's records, in all batches, and which value of it is padding."""

    def __init__(self) -> None:
        self.declared: set[float] = set()  # padding that the loader is known to add
        self._met: dict[float, _Ended] = {}
        self._is_float = self._is_flags = False

    def add(self, runs: dict[float, list[int]], column: "_Column", inside_BLF: Tensor) -> None:
        """Count the runs of values at the end of records, and what else they hold."""
        features, self._is_float, self._is_flags = inside_BLF.shape[2], column.is_float, column.is_flags
        for value in {*runs, *nlargest(_LEADING, self._met, key=self._met.__getitem__)}:
            before, run_N = self._met.get(value, _Ended()), runs.get(value, [])
            at_ends = sum(run_N) * features
            elsewhere, longest = int((inside_BLF == value).sum()) - at_ends, max(before.longest, *run_N, 0)
            now = at_ends, elsewhere, 0, len(inside_BLF), inside_BLF.numel()
            self._met[value] = _Ended(*map(add, before, now))._replace(longest=longest)

    def padding(self) -> set[float]:
        """Return the values that are padding: what is declared, and the one that most entries at the end hold."""
        found = [(met.at_ends, value) for value, met in self._met.items() if self._is_padding(value, met)]
        return self.declared | ({max(found)[1]} if found else set())

    def _is_padding(self, value: float, met: _Ended) -> bool:
        if self._is_flags:
            return value == 0 and not met.elsewhere
        enough = met.at_ends >= _ENTRIES[self._is_float] and met.longest >= _RUN[self._is_float]
        alone = enough and met.at_ends >= _ELSEWHERE * met.elsewhere
        return value in self.declared or (alone and (self._is_float or met.by_chance() < _CHANCE))


class _Column:
    """The values at the end of the records in one input, and which of them are padding."""

    def __init__(self, rows_BLF: Tensor, seen: _EndValues) -> None:
        """Find the runs of one value at the end of each record, and which values are padding."""
        # `rows_BLF`: padding is looked for at the end. `seen`: what stood there in batches before; noted in it.
        self._rows_BLF = rows_BLF
        last_B1F = rows_BLF[:, -1:]
        self._same_B = (rows_BLF == last_B1F).all(2).flip(1).long().cumprod(1).sum(1)
        whole_B = self._same_B == rows_BLF.shape[1]
        value_B, single_B = last_B1F[:, 0, 0], (last_B1F == last_B1F[..., :1]).all(2).squeeze(1)
        self.is_float = rows_BLF.is_floating_point()
        # the input holds zeros and ones alone, as masks do
        self.is_flags = not self.is_float and bool(((rows_BLF == 0) | (rows_BLF == 1)).all())
        inside_BLF, ends = rows_BLF[~whole_B], value_B[single_B].unique().tolist()
        runs = {value: self._same_B[single_B & (value_B == value) & ~whole_B].tolist() for value in ends}
        seen.add({value: run_N for value, run_N in runs.items() if run_N}, self, inside_BLF)
        self.known = seen.padding()  # values that are padding, here or in other batches
        # Columns that were made from padding, by an embedding outside of the model.
        padded_B = ~single_B & ~whole_B & (self._same_B > 1) & self.is_float
        for value in self.known.intersection(ends):
            padded_B |= single_B & (value_B == value)
        self.is_padded = bool((padded_B & single_B & ~whole_B).any())
        self._run_B = torch.where(padded_B, self._same_B, 0)

    def runs(self, *, masked: bool) -> list[int] | None:
        """Return how many positions at the end of each record may be padding; None where this input says nothing."""
        # `masked`: a mask decides which are.
        if not (self.known or self.is_flags) and self._counts_positions():
            return None
        lenient = (self.is_flags and not self.known) or (masked and not self.is_flags)
        counts: list[int] = (self._same_B if lenient else self._run_B).tolist()
        return counts

    def _counts_positions(self) -> bool:
        """Return whether an input counts positions, says which segment they are of, or holds one value per record."""
        rows = self._rows_BLF
        if rows.shape[1] < 2 or bool((self._same_B == rows.shape[1]).all()):
            return True
        return not self.is_float and int(rows.long().diff(dim=1).abs().max()) <= 1


def _named(inputs: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (keyword or key, tensor) of a model's inputs, in order."""
    args, kwargs = inputs
    for name, part in [*(("", arg) for arg in args), *kwargs.items()]:
        parts = part.items() if isinstance(part, dict) else [(name, part)]
        for key, inner in parts:
            for tensor in _tree.tensors(inner):
                yield str(key), tensor


def _compare_cut(
    run: Run, inputs: tuple[Any, Any], batch: Batch, ends: _Ends, before: Randomness, coarsest: torch.dtype
) -> _CutResult:
    """Run records with and without their padding, and return how the outputs differ."""
    before.restore()
    long = run(inputs[0])
    if before.drawn():
        return _CutResult(drew=True)
    short, lost, compared = run(inputs[1]), list[Any](), False
    if len(long) != len(short):
        return _CutResult()
    for one, two, known in zip(long, short, batch.maps_of(long), strict=True):
        pair = _remaining(one, two, known or batch.map_by_shape(one), batch.size, ends.leading)
        if pair is not None and _differs(pair, coarsest):
            return _CutResult(differ=True)
        compared |= pair is not None
        lost.append(None if pair is None else pair.lost)
    return _CutResult(lost=lost if compared else ())


class _Pair(NamedTuple):
    """A value of the records with padding and without, at the positions that both have."""

    one: Tensor  # with padding
    two: Tensor  # without
    lost: tuple[int, int, int] | None  # as in `_CutResult`


def _remaining(one: Tensor, two: Tensor, row_map: RowMap | None, batch_size: int, leading: bool) -> _Pair | None:  # noqa: FBT001 - which end
    """Return a value, with padding and without, at the positions that remain; None where rows are unknown."""
    alike = one.dtype == two.dtype and one.dim() == two.dim()
    if row_map is None or row_map.kind == "whole" or one.dtype not in TOLERANCE or not alike:
        return None
    long, short, lost = _by_sample(one, row_map, batch_size), _by_sample(two, row_map, batch_size), None
    if long is None or short is None:
        return None
    for axis, length in enumerate(short.shape):
        less = long.shape[axis] - length
        if less < 0:
            return None
        if less:
            lost = lost or (axis, less, long.shape[axis])
            long = long.narrow(axis, less if leading else 0, length)
    first = 1 if batch_size > 1 else 0
    return _Pair(long[first:], short[first:], lost)


def _by_sample(value: Tensor, row_map: RowMap, batch_size: int) -> Tensor | None:
    """Return a value with its samples first, positions beside them; None where rows lie otherwise."""
    axis = row_map.axis
    if row_map.kind not in ("axis", "major", "minor") or axis >= value.dim() or value.shape[axis] % batch_size:
        return None
    if row_map.kind == "axis":
        return value.movedim(axis, 0) if value.shape[axis] == batch_size else None
    if row_map.kind == "major":
        return value.unflatten(axis, (batch_size, -1)).movedim(axis, 0)
    return value.unflatten(axis, (-1, batch_size)).movedim(axis + 1, 0)


def _differs(pair: _Pair, coarsest: torch.dtype) -> bool:
    """Return whether the two values of a pair differ by more than rounding."""
    one, two, _ = pair
    if not one.numel():
        return False
    kind = TOLERANCE if one.device.type == "cpu" else FEWER_TOLERANCE
    tolerance, scale = max(kind[one.dtype], kind[coarsest]), float(two.abs().nan_to_num(posinf=0.0).max())
    # A record at a time: logits may be the largest tensors of a step.
    pairs = zip(one, two, strict=True)
    return any(bool(((first - second).abs().nan_to_num() > tolerance * scale).any()) for first, second in pairs)


def _inner_means(path: Path, forward: ForwardContext) -> Iterator[tuple[int, ReducedAxes, list[tuple[int, bool]]]]:
    """Yield each mean over positions in a loss: its count, the reduction, and (size, whether reduced) of its axes."""
    # Means over picked samples are left out: they are each sample's own.
    size, axis = forward.batch_size, forward.batch_axis
    for step in (*path.picked, *path.reduced):
        sample_axis = samples_axis(step.sizes, size, axis)
        if step.kind == "picked" and (not step.axes or sample_axis in step.axes):
            return
        if step.kind == "mean" and sample_axis is not None:
            # Positions may be folded into the axis of samples.
            sizes = [length // (size if other == sample_axis else 1) for other, length in enumerate(step.sizes)]
            axes = [(length, other in step.axes) for other, length in enumerate(sizes) if length > 1]
            yield prod(length for length, is_reduced in axes if is_reduced), step, axes


def _divisors(path: Path) -> Iterator[float]:
    """Yield the constants that a loss is divided by, those that it is multiplied by as their reciprocals."""
    for number in path.numbers:
        if not isfinite(number.factor):
            continue
        # As it stands in the code, or one over the multiplier: only a whole number may be a count.
        whole = float(number.given) if number.divides else (1 / number.factor if 0 < number.factor < 1 else 0.0)
        if number.plain and (number.divides or not looks_plain(number.factor)) and abs(whole - round(whole)) < 1e-6:
            yield abs(whole)
