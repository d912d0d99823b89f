"""Choice of layers that keep per-sample gradients beyond those where that costs nothing, under a budget.

A layer with p·d <= T·(p+d) always keeps them. Elsewhere keeping saves the norm's Gram and the second contraction, for
B·p·d elements in the place of the layer's input and output gradient. What is free for that at every moment of the
backward follows from its footprint; what it saves from a cost model.

For less memory than an ordinary step has, blocks are run again in the backward, and some get a second backward. Of a
chain of blocks the first ones have their gradients last, when factors of all others have gathered: it is they that keep
their inputs alone, and the first of them whose factors are dropped once their norms are known, to be formed again by a
second backward of that part. Price: one forward of every block that keeps its inputs alone, and of a block with a
second backward two more.

A backward moment by moment, under any choice of blocks that are run again and of where a second backward begins. It is
read off the graph of a step that keeps the inputs alone of some blocks: of one block of each kind at least the graph
shows what it saved, and others of its kind save the same. A choice is then tried by adding up intervals, without a
measurement and without running anything: a measurement of the allocator would differ from run to run, and a plan made
of it with it; the graph is the same each time.

Shape letters: N samples, T positions, I inputs, O outputs.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ghostclip import _torch, kernels
from ghostclip.capture.blocks import BLOCK_KEY, BlockCall
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.nodes import nodes_behind
from ghostclip.capture.param_use import ParamUse
from ghostclip.capture.sample_axis import USE_KEY
from ghostclip.errors import InvalidOptionError
from ghostclip.factors import convolution, outer
from ghostclip.factors.base import accumulation_dtype
from ghostclip.factors.convolution import CHUNK_ELEMENTS, CHUNK_ELEMENTS_ON_GPU
from ghostclip.kernels import products
from ghostclip.kernels.bounds import HALF

# Bytes by address.
Sizes = dict[Any, int]
# Operations whose input's gradient is the memory of their output's.
_VIEWS: Final = (
    "View", "UnsafeView", "Transpose", "T", "Permute", "Unsqueeze", "Squeeze", "Add", "Alias", "Reshape", "Expand",
    "Select", "Slice", "Unbind", "_Own", "_Enter", "_Source", "_Tie", "Clone",
)  # fmt: skip

# What reading or writing one element of 4 bytes costs, in FLOPs: products of layers run at this many for each.
_MOVED: Final = 64


@dataclass(eq=False)
class _Gradient:
    """Memory of a gradient on its way through a backward; several operations may wait for it."""

    size: int


def passing_of(nodes: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the bytes of gradients that are alive before and while each operation of a backward runs."""
    # Those that it takes and makes, what it needs beside that (`workspace` of a function of ours), and those that wait
    # for later operations: of a residual connection the gradient that goes around.
    waiting, passing = dict[tuple[Any, int], _Gradient](), []
    for node in nodes:
        outputs = _torch.outputs_of(node)
        arrived = [waiting.pop((node, number)) for number in range(len(outputs)) if (node, number) in waiting]
        arrived = arrived or [_Gradient(_bytes_of(outputs))]
        before = _alive(waiting, arrived)
        added = _pass_on(node, waiting, arrived)
        passing.append((before, _alive(waiting, arrived) + added + int(getattr(node, "workspace", 0))))
        use = node.metadata.get(USE_KEY)
        # A use of a matrix or a kernel may store the gradient of its output as it arrives: it is counted as the use's.
        if use is not None and any(tracked.origin.value.dim() > 1 for tracked in use.targets.values()):
            for gradient in arrived:
                gradient.size = 0
    return passing


def _alive(waiting: dict[tuple[Any, int], _Gradient], arrived: Sequence[_Gradient]) -> int:
    return sum(gradient.size for gradient in {*waiting.values(), *arrived})


def _pass_on(node: Any, waiting: dict[tuple[Any, int], _Gradient], arrived: Sequence[_Gradient]) -> int:
    """Let the gradients that an operation makes wait; return the bytes of those that do not wait themselves."""
    added, is_view = 0, node.name().removesuffix("Backward0").removesuffix("Backward") in _VIEWS
    for following, number in node.next_functions:
        if following is None:
            continue
        size = _bytes_of([_torch.outputs_of(following)[number]])
        same = is_view and size == arrived[0].size
        if _torch.leaf_of(following) is not None:
            added += 0 if is_view else size
            continue
        there = waiting.get((following, number))
        if there is None:
            waiting[following, number] = arrived[0] if same else _Gradient(size)
            continue
        # What comes is added in place where nobody else holds what is there.
        added += 0 if same else size
        if not there.size or sum(gradient is there for gradient in (*waiting.values(), *arrived)) > 1:
            waiting[following, number] = _Gradient(size)
    return added


def nodes_in_order(start: Any) -> list[Any]:
    """Return a node and those behind it in the engine's order, the latest operation first, without leaves."""
    nodes = [node for node in nodes_behind([start]) if _torch.leaf_of(node) is None]
    return sorted(nodes, key=lambda node: -_torch.order_of(node))


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of tensors' memory."""
    return {_torch.local(tensor).untyped_storage().data_ptr() for tensor in tensors}


def inputs_of(use: ParamUse | None) -> Sequence[Tensor]:
    """Return the tensors that a use stores of its operation's input."""
    return () if use is None or use.node is None else use.node.saved_tensors


def storages(tensors: Iterable[Tensor], constant: set[int]) -> Sizes:
    """Return the bytes of tensors' memory by address, without what is at constant addresses."""
    sizes: Sizes = {}
    for tensor in map(_torch.local, tensors):
        if tensor.layout is torch.strided and not _torch.is_arriving(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in constant:
                sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def _bytes_of(metadata: Iterable[Any]) -> int:
    return sum(prod(item.shape) * item.dtype.itemsize for item in metadata if item.shape is not None)


def parameter_bytes(use: ParamUse, names: Iterable[str]) -> int:
    """Return the bytes of some parameters' gradients."""
    leaves = {name: leaf for tracked in use.targets.values() for name, leaf in tracked.origin.leaves.items()}
    parameters = [leaves[name].parameter for name in names]
    return sum(int(parameter.numel() * parameter.element_size()) for parameter in parameters)


class Shape(NamedTuple):
    """Sizes that decide on a layer's costs."""

    samples: int
    positions: int
    inputs: int
    outputs: int
    dtype: torch.dtype  # of its input and of its output's gradient
    device: torch.device

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the layer's per-sample gradients."""
        return self.samples * self.inputs * self.outputs * accumulation_dtype(self.dtype).itemsize

    @property
    def by_units(self) -> bool:
        """Whether its products run on matrix units."""
        return self.dtype in HALF and products.has_units(self.device)

    @property
    def moving(self) -> float:
        """Cost of reading or writing one byte of its tensors, in FLOPs of its products."""
        return outer.BYTE if self.by_units else _MOVED / 4


class UseMemory(NamedTuple):
    """What book-keeping stores of a use until the end, and what its forward costs."""

    gradient: int  # bytes besides its inputs: of its output's gradient, or of per-sample gradients
    with_inputs: bool  # whether its inputs are stored as well
    matrix: tuple[str, Shape] | None = None  # parameter and sizes of a product with a matrix that is used once
    forming: int = 0  # temporary bytes of forming per-sample gradients, those of a convolution's windows


NOTHING: Final = UseMemory(0, with_inputs=False)


def memory_of(use: ParamUse, arriving: int, forward: ForwardContext) -> UseMemory:
    """Return what book-keeping stores of a use, for the bytes of its output's gradient."""
    matrix, kernel = _matrix_of(use, arriving, forward), _kernel_of(use)
    if matrix is not None:
        name, (samples, positions, inputs, outputs, dtype, _) = matrix
        by_rule = outer.stores_per_sample(positions, inputs, outputs, dtype.itemsize)
        stored = (matrix[1].gradient_bytes, False) if by_rule else (arriving, True)
        once = matrix if forward.use_counts[name] == 1 else None
        return UseMemory(*stored, once)
    dense = _dense_bytes(use, forward)
    if kernel is None or not forward.batch_size:
        return UseMemory(dense or arriving, not dense)
    samples, size = forward.batch_size, kernel.element_size()
    positions = arriving // (samples * kernel.shape[0] * size)
    small = samples * kernel.numel() <= convolution.SMALL
    if not dense and (small or outer.stores_per_sample(positions, kernel[0].numel(), kernel.shape[0], size)):
        dense = samples * kernel.numel() * max(4, size)
    forming = _windows(use, samples * positions * kernel[0].numel())
    return UseMemory(dense or arriving, not dense, forming=forming)


def _windows(use: ParamUse, unfolded: int) -> int:
    """Return the bytes of a convolution's windows, of so many elements, that are laid out at once."""
    if not inputs_of(use):
        return 0
    rows = inputs_of(use)[0]
    at_once = CHUNK_ELEMENTS if rows.device.type == "cpu" else CHUNK_ELEMENTS_ON_GPU
    laid_out = rows.numel() if rows.numel() <= at_once else 0
    return (laid_out + unfolded // max(1, -(-unfolded // at_once))) * accumulation_dtype(rows.dtype).itemsize


def _kernel_of(use: ParamUse) -> Tensor | None:
    """Return the kernel of a convolution; None for any other use."""
    kernels = [tracked.origin.value for tracked in use.targets.values() if tracked.origin.value.dim() > 2]
    return kernels[0] if len(kernels) == 1 else None


def _dense_bytes(use: ParamUse, forward: ForwardContext) -> int:
    """Return the bytes of per-sample gradients where all factors of a use are such; else 0."""
    if any(not form.startswith("dense") for form in use.site.forms.values()):
        return 0
    return sum(forward.batch_size * tracked.origin.value.numel() * 4 for tracked in use.targets.values())


def _matrix_of(use: ParamUse, arriving: int, forward: ForwardContext) -> tuple[str, Shape] | None:
    """Return the parameter and sizes of a use that is one product of a matrix with rows of samples."""
    if not inputs_of(use):
        return None
    rows = inputs_of(use)[0]
    for tracked in use.targets.values():
        weight = tracked.origin.value
        if tracked.origin.func or weight.dim() != 2 or rows.dim() < 2 or not rows.numel():
            continue
        inputs = rows.shape[-1]
        positions, rest = divmod(rows.numel() // inputs, max(1, forward.batch_size))
        outputs, other = divmod(weight.numel(), inputs)
        same = arriving == forward.batch_size * positions * outputs * rows.element_size()
        if rest or other or not same or inputs not in weight.shape:
            continue
        shape = Shape(forward.batch_size, positions, inputs, outputs, rows.dtype, rows.device)
        return tracked.origin.names[0], shape
    return None


@dataclass(frozen=True)
class Step:
    """One operation of a backward."""

    use: ParamUse | None  # the use whose gradient arrives there, or None
    saved: Sizes  # memory that it reads: address and bytes
    inputs: Sizes  # the part of it that its use keeps
    arriving: int  # bytes of the gradient that it takes
    before: int  # bytes of all gradients that are on their way when it begins
    passing: int  # the same while it runs
    ends: int | None  # number of the block's call that ends there in the forward, or None
    names: dict[str, str] = field(default_factory=dict)  # its use's parameters, by the names that they have in the use
    memory: UseMemory = NOTHING  # what book-keeping stores of its use

    @property
    def stored(self) -> Sizes:
        """Memory of inputs from the gradient's arrival on, one copy for all that read them."""
        return self.inputs if self.memory.with_inputs else {}


@dataclass
class Stretch:
    """Consecutive operations of one block, or between blocks."""

    call: int | None  # number of the block's call; None between blocks
    steps: list[Step] = field(default_factory=list)


class Timeline:
    """Memory of a backward at every moment."""

    def __init__(self, parts: Sequence[Stretch], forward: ForwardContext) -> None:
        self.calls: Sequence[BlockCall] = forward.blocks  # of blocks, in the order of the forward
        self.parts = parts
        self.steps = [step for part in parts for step in part.steps]  # operations, in the order of the backward
        self._unplanned = 4 * forward.unplanned

    def ordinary_peak(self) -> int:
        """Return the peak of the same backward of ordinary training, its gradients included."""
        sizes, (live, passing) = self._new_gradients(), self._live(frozenset(), None, ())
        return int(max((live + passing + sizes.cumsum() - sizes).max(), sizes.sum()))

    def _new_gradients(self) -> np.ndarray:
        """Return the bytes of the parameters' gradients that each operation is the first to add to."""
        seen, sizes = set[str](), list[int]()
        for step in self.steps:
            new = {argument: name for argument, name in step.names.items() if name not in seen}
            seen.update(new.values())
            sizes.append(0 if step.use is None else parameter_bytes(step.use, new))
        return np.array(sizes)

    def live_bytes(self) -> np.ndarray:
        """Return the bytes in memory as each operation begins, with what book-keeping stores of those before it."""
        live, passing = self._live(frozenset(), None, [step.stored for step in self.steps])
        gradients = np.array([step.memory.gradient for step in self.steps])
        return live + passing + gradients.cumsum() - gradients

    def peak(self, recomputed: Collection[int], cut: int | None) -> int:
        """Return the peak bytes of a private backward."""
        # recomputed: calls of which only inputs are stored. cut: the call at whose end the part with a second backward
        # begins. Of what norms are formed in, only a convolution's windows are counted.
        steps, begin, sizes = self.steps, self._begin(cut), self._new_gradients()
        live, passing = self._live(recomputed, cut, [step.stored for step in steps])
        before = np.arange(len(steps)) < begin
        gathered = self._unplanned + np.cumsum([step.memory.gradient for step in steps] * before)
        # What is kept of a use is formed before the operation itself runs.
        forming = [step.before + step.memory.forming for step in steps]
        first = (live + np.maximum(passing, forming) + gathered).max()
        contracted = list(zip(steps[:begin], sizes[:begin], strict=True))
        first = max(first, self._most_contracting(contracted, live[-1] + gathered[-1], self._read_behind(begin, cut)))
        again = np.where(before, 0, sizes)
        second = (live + passing + again.cumsum() - again)[begin:].max(initial=0) + sizes[:begin].sum()
        return int(first if cut is None else max(first, second))

    def _read_behind(self, begin: int, cut: int | None) -> set[Hashable]:
        """Return the memory that is read behind a cut, by the second backward."""
        calls = () if cut is None else self.calls[: cut + 1]
        read = {address for call in calls for address, _ in call.inputs}
        return read.union(*(step.saved for step in self.steps[begin:]))

    def _most_contracting(
        self, contracted: Sequence[tuple[Step, int]], live: int, read_again: Collection[Hashable]
    ) -> int:
        """Return the peak while sums are formed one by one and their operands freed, unless they are read again."""
        most, holders = 0, Counter(key for step, _ in contracted for key in step.stored)
        for step, size in contracted:
            live += size
            most = max(most, live)
            holders.subtract(step.stored.keys())
            gone = [size for key, size in step.stored.items() if not holders[key] and key not in read_again]
            live -= step.memory.gradient + sum(gone)
        return most

    def _begin(self, cut: int | None) -> int:
        """Return the number of the first operation behind a cut; that of all operations where there is none."""
        if cut is None:
            return len(self.steps)
        return next(number for number, step in enumerate(self.steps) if step.ends == cut)

    def _live(
        self, recomputed: Collection[int], cut: int | None, stored: Sequence[Sizes]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of saved memory, and of passing gradients, at every operation."""
        # stored: inputs that are held for each operation's use; empty in ordinary training.
        begin, total = self._begin(cut), len(self.steps)
        spans: dict[Hashable, tuple[int, int, int]] = {}

        def hold(sizes: Sizes, start: int, end: int) -> None:
            for key, size in sizes.items():
                before = spans.get(key, (start, end, size))
                spans[key] = min(before[0], start), max(before[1], end), size

        number = 0
        for part in self.parts:
            start, last = number, number + len(part.steps) - 1
            recomputes = part.call is not None and part.call in recomputed
            if recomputes:
                assert part.call is not None
                hold(dict(self.calls[part.call].inputs), 0, total if start >= begin else last)
            for step in part.steps:
                stays = number >= begin and not recomputes
                hold(step.saved, start if recomputes else 0, total if stays else number)
                if stored and number < begin:
                    hold(stored[number], number, total)
                number += 1
        live = np.zeros(total)
        for start, end, size in spans.values():
            live[start : end + 1] += size
        return live, np.array([step.passing for step in self.steps], dtype=float)


def timeline_of(node: Any, forward: ForwardContext, parameters: Iterable[Tensor]) -> Timeline | None:
    """Read the graph of a backward from a node on; None where some kind of block has no call that can be read."""
    calls: Sequence[BlockCall] = forward.blocks
    constant = addresses(parameters)
    parts: list[Stretch] = []
    nodes = nodes_in_order(node)
    for one, waiting in zip(nodes, passing_of(nodes), strict=True):
        order = _torch.order_of(one)
        call = next((number for number, block in enumerate(calls) if block.first <= order < block.last), None)
        if not parts or parts[-1].call != call:
            parts.append(Stretch(call))
        if call is None or calls[call].may_be_read:
            parts[-1].steps.append(_step_of(one, waiting, constant, forward))
    seen = Counter(address for call in calls for address, _ in set(call.inputs))
    shared = {address for address, count in seen.items() if count > 1}
    measured = {calls[part.call].kind: part for part in parts if part.call is not None and part.steps}
    for part in parts:
        if part.call is not None and not calls[part.call].may_be_read:
            like = measured.get(calls[part.call].kind)
            if like is None or like.call is None:
                return None
            part.steps = _translated(like.steps, part.call, calls[like.call], calls[part.call], shared)
    return Timeline(parts, forward)


def timeline_behind(use: ParamUse, grad: Tensor, parameters: Collection[Tensor]) -> Timeline | None:
    """Read the rest of a backward from its first use on, without what the loss itself stored."""
    rest = timeline_of(use.behind, use.forward, parameters)
    inputs = storages(inputs_of(use), addresses(parameters))
    size = grad.numel() * grad.element_size()
    memory = memory_of(use, size, use.forward)
    first = Step(use, inputs, inputs, size, size, size, None, _names(use), memory)
    return rest and Timeline([Stretch(None, [first]), *rest.parts], use.forward)


def _step_of(node: Any, waiting: tuple[int, int], constant: set[int], forward: ForwardContext) -> Step:
    use, arriving = node.metadata.get(USE_KEY), _bytes_of(_torch.outputs_of(node))
    inputs = storages(inputs_of(use), constant)
    saved = storages(_torch.saved_tensors(node), constant) | inputs
    step = Step(use, saved, inputs, arriving, *waiting, node.metadata.get(BLOCK_KEY))
    return step if use is None else replace(step, names=_names(use), memory=memory_of(use, arriving, forward))


def _translated(
    steps: Sequence[Step], number: int, like: BlockCall, call: BlockCall, shared: Collection[int]
) -> list[Step]:
    """Return the operations of one block as those of another call of its kind."""
    addresses = {there: here for (there, _), (here, _) in zip(like.inputs, call.inputs, strict=True)}

    def sizes(by_address: Sizes) -> Sizes:
        # What is neither an input nor shared is the block's own.
        return {addresses.get(key, key if key in shared else (number, key)): size for key, size in by_address.items()}

    def named(name: str) -> str:
        return call.name + name.removeprefix(like.name) if name.startswith(f"{like.name}.") else name

    return [
        replace(
            step, saved=sizes(step.saved), inputs=sizes(step.inputs),
            names={argument: named(name) for argument, name in step.names.items()},
        )
        for step in steps
    ]  # fmt: skip


def _names(use: ParamUse) -> dict[str, str]:
    return {name: name for tracked in use.targets.values() for name in tracked.origin.names}


@dataclass(frozen=True)
class Reduction:
    """Measures to stay within the budget at some sizes of inputs."""

    blocks: frozenset[str]  # paths of the blocks of which only inputs are stored
    cut: int | None  # number of the block's call at whose end the part with a second backward begins; None for none
    peak: int  # bytes that the backward is expected to take
    ordinary: int  # bytes that the same backward of ordinary training takes

    @property
    def share(self) -> float:
        """Expected memory of the backward over that of an ordinary one."""
        return self.peak / max(1, self.ordinary)


@dataclass(frozen=True)
class Cut:
    """Interruption of a backward."""

    edge: GradientEdge  # the value of the graph whose gradient is all that the rest needs
    ends: tuple[GradientEdge, ...]  # other ends of the first part: captured paths that do not lead to the edge
    names: frozenset[str]  # parameters that are used only behind it, each once


class BlockPlanner:
    """Decides once for every size of inputs."""

    def __init__(self, budget: float) -> None:
        """Begin with a budget below 1, in units of an ordinary backward."""
        self.budget = budget
        self.latest: Reduction | None = None  # reduction in the latest backward; None before the first
        # the reduction at the sizes of the latest backward from the next one on; None before the first
        self.least: Reduction | None = None
        # parameters whose factors the latest backward has dropped and formed again
        self.dropped: frozenset[str] = frozenset()
        self._plans: dict[Any, Reduction] = {}

    def choose(self, sizes: Any, kinds: Mapping[str, Any]) -> Mapping[str, bool]:
        """Return the blocks of which a forward stores only inputs, by path, each with whether it is watched."""
        # At new sizes all of them, the last of each kind watched. `kinds`: what blocks of one kind have in common, by
        # path.
        if sizes in self._plans:
            return dict.fromkeys(self._plans[sizes].blocks, False)
        last = {kind: name for name, kind in kinds.items()}
        return {name: last[kind] == name for name, kind in kinds.items()}

    def decide(self, loss: Tensor, forward: ForwardContext, parameters: Mapping[str, Tensor]) -> Reduction | None:
        """Return the reduction for a backward that is about to run."""
        # None where the graph does not show what blocks store. This once all blocks run again, those that are watched
        # too.
        self.latest, self.dropped = None, frozenset()
        known = self._plans.get(forward.input_sizes)
        if known is None:
            with torch.no_grad():
                read = timeline_of(loss.grad_fn, forward, parameters.values())
            if read is None or not any(part.steps for part in read.parts):
                return None
            cuts = [number for number in range(len(forward.blocks)) if cut_at(number, loss, forward) is not None]
            self._plans[forward.input_sizes] = self._cheapest(read, cuts)
            again = frozenset(number for number, call in enumerate(read.calls) if call.recomputed)
            known = self._best(read, [_Choice(again, cut) for cut in (None, *cuts)])
        for call in forward.blocks:
            if call.held is not None:
                call.held.drop_saved()
        self.latest, self.least = known, self._plans[forward.input_sizes]
        return known

    def interrupt(self, loss: Tensor, forward: ForwardContext) -> Cut | None:
        """Return where the planned backward is interrupted; None where it is not, or the graph has another form."""
        at = None if self.latest is None else self.latest.cut
        cut = None if at is None else cut_at(at, loss, forward)
        self.dropped = frozenset() if cut is None else cut.names
        return cut

    def _cheapest(self, read: Timeline, cuts: Sequence[int]) -> Reduction:
        """Return the best reduction from the next step on."""
        limit = self.budget * read.ordinary_peak()
        able = [number for number, call in enumerate(read.calls) if call.may_be]
        fitting: list[_Choice] = []
        for cut in (None, *cuts):
            behind = 0 if cut is None else sum(number <= cut for number in able)
            choices = [_Choice(frozenset(able[:count]), cut) for count in range(behind, len(able) + 1)]
            fitting.append(_first_that_fits(read, choices, limit))
        return self._best(read, fitting)

    def _best(self, read: Timeline, choices: Sequence["_Choice"]) -> Reduction:
        """Return the cheapest choice that fits; where none fits, the one with the least memory."""
        limit = self.budget * read.ordinary_peak()

        def cost(choice: _Choice) -> tuple[bool, float]:
            peak = read.peak(*choice)
            return peak > limit, peak if peak > limit else choice.price

        best = min(choices, key=cost)
        again = frozenset(read.calls[number].name for number in best.again)
        return Reduction(again, best.cut, read.peak(*best), read.ordinary_peak())


class _Choice(NamedTuple):
    """A choice of measures that reduce memory."""

    again: frozenset[int]  # numbers of the blocks' calls of which only inputs are stored
    cut: int | None

    @property
    def price(self) -> int:
        """How many more forwards of blocks it takes; behind a cut they run again, and gradients are formed twice."""
        return len(self.again) + (0 if self.cut is None else 2 * (self.cut + 1))


def _first_that_fits(read: Timeline, choices: Sequence[_Choice], limit: float) -> _Choice:
    """Return the first choice that fits, the last where none does; each takes less memory than those before."""
    first = bisect_left(range(len(choices) - 1), True, key=lambda number: read.peak(*choices[number]) <= limit)
    return choices[first]


def cut_at(number: int, loss: Tensor, forward: ForwardContext) -> Cut | None:
    """Return the cut at the end of a block's call."""
    # None where something else leads from the loss to what is behind it, which would be gone through twice, or to a
    # leaf outside the model.
    nodes = nodes_behind([loss.grad_fn])
    ending = [node for node in nodes if node.metadata.get(BLOCK_KEY) == number]
    uses = {node: node.metadata[USE_KEY] for node in nodes if USE_KEY in node.metadata}
    if len(ending) != 1 or any(use.forward is not forward for use in uses.values()):
        return None
    cut = ending[0]
    behind = set(nodes_behind([cut]))
    before = set(nodes_behind([loss.grad_fn], up_to=cut))
    anchor = forward.around.anchor
    for node in before:
        leaf = _torch.leaf_of(node)
        if (leaf is None and node in behind) or (leaf is not None and leaf is not anchor):
            return None
    # From these a backward leads to the cut.
    leading = {cut}
    for node in reversed(nodes_in_order(loss.grad_fn)):
        if any(following in leading for following, _ in node.next_functions):
            leading.add(node)
    ends = [GradientEdge(node, 0) for node in before - leading if _ends_at(node, anchor)]
    outside = {name for node, use in uses.items() if node in before for name in use.site.names}
    inside = {name for node, use in uses.items() if node in behind for name in use.site.names}
    once = {name for name in inside - outside if forward.use_counts[name] == 1}
    return Cut(GradientEdge(cut, 0), tuple(ends), frozenset(once))


def _ends_at(node: Any, anchor: Tensor) -> bool:
    return any(following is not None and _torch.leaf_of(following) is anchor for following, _ in node.next_functions)


MEMORY_BUDGET: Final = 1.05
"""The most that book-keeping holds by default, over what an ordinary backward holds."""

_CACHED: Final = 256
# A per-sample gradient is written into fresh memory, and read for its norm and its sum.
_PASSES_KEPT: Final = 4
# Input and output gradient are read by every level of the Gram, and by the contraction.
_PASSES_FACTORED: Final = 5
# What calling one torch function costs, in FLOPs, and how many there are: small layers are all calls.
_CALL: Final = 250_000
# The same where 5 microseconds go by on matrix units.
_CALL_BY_UNITS: Final = 3_000_000_000
_CALLS_KEPT: Final = 4
_CALLS_A_LEVEL: Final = 6


@dataclass(frozen=True)
class Item:
    """A layer that could store its per-sample gradients."""

    name: str
    shape: Shape
    moment: int  # when its gradient arrives
    added: int  # bytes of the per-sample gradients less what is dropped instead, at least 0


class Planner:
    """Decides once for every batch's sizes which layers store per-sample gradients."""

    def __init__(self, budget: float = MEMORY_BUDGET) -> None:
        if not budget >= 1:
            raise InvalidOptionError(f"memory_budget={budget}: expected 1 or more times an ordinary step's memory.")
        self.budget = budget  # peak of a private backward over that of an ordinary one; infinite for no bound
        self.latest: frozenset[str] = frozenset()  # names of the parameters that the latest plan adds to the rule
        self._plans: dict[Any, frozenset[str]] = {}

    def before(self, loss: Tensor, forward: ForwardContext, parameters: Mapping[str, Tensor]) -> frozenset[str]:
        """Return the parameters whose per-sample gradients a backward stores although they are the larger form."""
        # None under activation checkpointing, where reading the graph would run it again.
        values = parameters.values()
        return self._plan("before", forward, parameters, lambda: timeline_of(loss.grad_fn, forward, values))

    def during(self, use: ParamUse, grad: Tensor, parameters: Mapping[str, Tensor]) -> frozenset[str]:
        """Return the same for a backward that the user has begun, at the first use whose gradient arrives."""
        # What the loss itself stored is not known, so that there may be fewer.
        return self._plan("during", use.forward, parameters, lambda: timeline_behind(use, grad, parameters.values()))

    def _plan(
        self, when: str, forward: ForwardContext, parameters: Mapping[str, Tensor], read: Callable[[], Timeline | None]
    ) -> frozenset[str]:
        if forward.runs_again:
            self.latest = frozenset()
            return self.latest
        key = (when, forward.batch_size, tuple(forward.uses), forward.unplanned)
        if key not in self._plans:
            if len(self._plans) == _CACHED:
                self._plans.clear()
            with torch.no_grad():
                backward = read() if _may_pay(forward, parameters) else None
                self._plans[key] = frozenset() if backward is None else self._decide(backward, forward)
        self.latest = self._plans[key]
        return self.latest

    def _decide(self, backward: Timeline, forward: ForwardContext) -> frozenset[str]:
        items = list(_items(backward))
        seen = sum(step.use is not None for step in backward.steps)
        if not items or seen < len(forward.sizes):
            # What another branch of the model will hold is not known.
            return frozenset()
        limit = self.budget * backward.ordinary_peak() - 4 * forward.unplanned
        if math.isinf(limit):
            return frozenset(item.name for item in items if _estimated(item.shape) > 0)
        # What is added stays until the end, so that the tightest later moment counts.
        free = np.minimum.accumulate((limit - backward.live_bytes())[::-1])[::-1].clip(min=0)
        return _chosen([(item, _estimated(item.shape)) for item in items], free)


def _items(backward: Timeline) -> Iterator[Item]:
    """Yield the layers that could store per-sample gradients although the rule has them store factors."""
    owners = Counter(key for step in backward.steps for key in step.inputs)
    for number, step in enumerate(backward.steps):
        if step.memory.matrix is None or not step.memory.with_inputs:
            continue
        name, shape = step.memory.matrix
        if shape.positions > 1:
            inputs = sum(size for key, size in step.inputs.items() if owners[key] == 1)
            yield Item(name, shape, number, max(0, shape.gradient_bytes - step.arriving - inputs))


def _may_pay(forward: ForwardContext, parameters: Mapping[str, Tensor]) -> bool:
    """Return whether any layer could gain by a plan: to read a backward's graph takes longer than all else in a step.

    Batches drawn at random have another size each, and those of texts another length.
    """
    seen = set[Any]()
    for site, sizes in forward.uses:
        for weight in (parameters[name] for name in site.names if name in parameters):
            kind = (weight.shape, weight.dtype, sizes)
            if weight.dim() != 2 or kind in seen:
                continue
            seen.add(kind)
            positions, rest = divmod(math.prod(sizes), max(1, forward.batch_size))
            if not sizes or rest or any(_pays(shape) for shape in _shapes_of(weight, positions, forward.batch_size)):
                return True
    return False


def _shapes_of(weight: Tensor, positions: int, samples: int) -> Iterator[Shape]:
    """Yield the sizes that a product with a matrix may turn out to have."""
    kind, (inputs, outputs) = weight.device.type, weight.shape
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    for dtype in {weight.dtype, torch.get_autocast_dtype(kind) if autocast else weight.dtype}:
        yield Shape(samples, positions, inputs, outputs, dtype, weight.device)
        yield Shape(samples, positions, outputs, inputs, dtype, weight.device)


def _pays(shape: Shape) -> bool:
    """Return whether a layer that the rule does not cover would save something."""
    _, positions, inputs, outputs, dtype, _ = shape
    by_rule = positions <= 1 or outer.stores_per_sample(positions, inputs, outputs, dtype.itemsize)
    return not by_rule and _estimated(shape) > 0


def _chosen(items: Sequence[tuple[Item, float]], free: np.ndarray) -> frozenset[str]:
    """Choose the items that save most for their bytes while, at every moment, what was added so far fits."""
    added, chosen = np.zeros_like(free), set[str]()
    for item, saving in sorted(items, key=lambda one: one[1] / max(1, one[0].added), reverse=True):
        more = np.where(np.arange(len(free)) < item.moment, 0, item.added)
        needed = item.shape.gradient_bytes
        if saving > 0 and needed <= free[item.moment] and (added + more <= free)[item.moment :].all():
            added += more
            chosen.add(item.name)
    return frozenset(chosen)


def _estimated(shape: Shape) -> float:
    """Return the savings in FLOPs, moved elements counted as such."""
    positions, inputs, outputs, by_units = shape.positions, shape.inputs, shape.outputs, shape.by_units
    moved, call = 4 * shape.moving, _CALL_BY_UNITS if by_units else _CALL
    product = 2 * positions * inputs * outputs
    norm = min(outer.gram_flops(positions, inputs, outputs, by_units=by_units), product)
    factored = norm + product + moved * _PASSES_FACTORED * positions * (inputs + outputs)
    stored = product + moved * _PASSES_KEPT * inputs * outputs
    levels = kernels.gram_levels(positions, inputs, outputs, by_units=by_units)
    calls = _CALLS_A_LEVEL * (levels + 1) - _CALLS_KEPT
    return float(shape.samples * (factored - stored) + call * calls)
