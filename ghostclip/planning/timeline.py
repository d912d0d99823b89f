"""A backward moment by moment, under any choice of blocks that are run again and of where a second backward begins.

It is read off the graph of a step that keeps the inputs alone of some blocks: of one block of each kind at least the
graph shows what it saved, and others of its kind save the same. A choice is then tried by adding up intervals, without
a measurement and without running anything.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.blocks import BLOCK_KEY, BlockCall
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.param_use import ParamUse
from ghostclip.kernels import runtime
from ghostclip.planning import footprint
from ghostclip.planning.footprint import NOTHING, Shape, Sizes, UseMemory

# What is held in 16 bits is a half of float32.
_HALF: Final = 2
# Numbers are read, and written in 16 bits, and read again to be widened.
_PASSES_ROUNDED: Final = 3
# Bytes of an output's gradient below which it is not worth holding in another form.
_SMALL: Final = 1 << 16


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

    @property
    def holdable(self) -> tuple[str, Shape] | None:
        """Parameter and sizes of a use whose factors can be stored in 16 bits."""
        if self.arriving < _SMALL or self.memory.matrix is None:
            return None
        name, shape = self.memory.matrix
        return self.names[name], shape

    def in_16_bits(self) -> "Step":
        """Return the operation with half of the bytes that are stored of its use."""
        # Gradients are rounded where they lie, and widened for the sum; the others for some samples at a time.
        memory, inputs = self.memory, sum(self.stored.values())
        widest = 4 * runtime.ON_CPU if memory.with_inputs else memory.gradient
        half = memory._replace(gradient=memory.gradient // _HALF, widened=min(widest, memory.gradient + inputs))
        return replace(self, memory=half, inputs={("rounded", key): size // _HALF for key, size in self.inputs.items()})


@dataclass
class Stretch:
    """Consecutive operations of one block, or between blocks."""

    call: int | None  # number of the block's call; None between blocks
    steps: list[Step] = field(default_factory=list)


class Timeline:
    """Memory of a backward at every moment."""

    # operations, in the order of the backward
    # of blocks in the forward, in order
    def __init__(self, calls: Sequence[BlockCall], parts: Sequence[Stretch], forward: ForwardContext) -> None:
        self.calls, self.parts = calls, parts
        self.steps = [step for part in parts for step in part.steps]
        self._unplanned = 4 * forward.unplanned

    def holdable(self) -> dict[str, tuple[int, Shape]]:
        """Return bytes and sizes of the parameters whose factors can be stored in 16 bits, in order of arrival."""
        found = dict[str, tuple[int, Shape]]()
        for step in self.steps:
            if step.holdable is not None:
                name, shape = step.holdable
                found[name] = step.memory.gradient + sum(step.stored.values()), shape
        return found

    def price(self, recomputed: Collection[int], cut: int | None, rounded: Collection[str]) -> float:
        """Return the FLOPs of a choice: of forwards that are run again, and of copies."""
        # Attention's own products and everything between blocks left out.
        total = sum(map(self._forward_of, recomputed))
        # The part behind the cut is run again in either backward, and its input gradients are formed twice.
        total += 2 * sum(map(self._forward_of, range(0 if cut is None else cut + 1)))
        for name, (size, shape) in self.holdable().items():
            total += size * shape.moving * _PASSES_ROUNDED * (name in rounded)
        return total

    def _forward_of(self, call: int) -> float:
        """Return the cost of a block's forward: products, and writing saved tensors."""
        steps = [step for part in self.parts if part.call == call for step in part.steps]
        work = sum(step.memory.work for step in steps)
        written = sum({key: size for step in steps for key, size in step.saved.items()}.values())
        moving = next((step.holdable[1].moving for step in steps if step.holdable is not None), 1.0)
        return work + written * moving

    def ordinary_peak(self) -> int:
        """Return the peak of the same backward of ordinary training, its gradients included."""
        sizes, (live, passing) = self._new_gradients(), self._live(frozenset(), None, ())
        return int(max((live + passing + sizes.cumsum() - sizes).max(), sizes.sum()))

    def _new_gradients(self) -> np.ndarray:
        """Return the bytes of the parameters' gradients that each operation is the first to add to."""
        seen, sizes = set[str](), list[int]()
        for step in self.steps:
            new = {own: name for own, name in step.names.items() if name not in seen}
            seen.update(new.values())
            sizes.append(0 if step.use is None else footprint.parameter_bytes(step.use, new))
        return np.array(sizes)

    def held(self) -> np.ndarray:
        """Return the bytes in memory as each operation begins, with what book-keeping stores of those before it."""
        live, passing = self._live(frozenset(), None, [step.stored for step in self.steps])
        gradients = np.array([step.memory.gradient for step in self.steps])
        return live + passing + gradients.cumsum() - gradients

    def peak(self, recomputed: Collection[int], cut: int | None, rounded: Collection[str] = ()) -> int:
        """Return the peak bytes of a private backward."""
        # recomputed: calls of which only inputs are stored. cut: the call at whose end the part with a second backward
        # begins. Of what norms are formed in, only a convolution's windows are counted.
        steps = [
            step.in_16_bits() if step.holdable is not None and step.holdable[0] in rounded else step
            for step in self.steps
        ]
        begin, sizes = self._begin(cut), self._new_gradients()
        live, passing = self._live(recomputed, cut, [step.stored for step in steps])
        before = np.arange(len(steps)) < begin
        gathered = self._unplanned + np.cumsum([step.memory.gradient for step in steps] * before)
        widened = [step.memory.widened for step in steps] * before
        # What is kept of a use is formed before the operation itself runs.
        forming = [step.before + step.memory.forming for step in steps] + widened
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
        self, contracted: Sequence[tuple[Step, int]], held: int, read_again: Collection[Hashable]
    ) -> int:
        """Return the peak while sums are formed one by one and their operands freed, unless they are read again."""
        most, holders = 0, Counter(key for step, _ in contracted for key in step.stored)
        for step, size in contracted:
            held += size
            most = max(most, held + step.memory.widened)
            holders.subtract(step.stored.keys())
            gone = [size for key, size in step.stored.items() if not holders[key] and key not in read_again]
            held -= step.memory.gradient + sum(gone)
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


def read(loss: Tensor, forward: ForwardContext, parameters: Iterable[Tensor]) -> Timeline | None:
    """Read the graph of a backward that will start at a loss; None where some kind of block has no unreduced call."""
    calls: Sequence[BlockCall] = forward.blocks
    constant = footprint.addresses(parameters)
    parts: list[Stretch] = []
    nodes = footprint.nodes_in_order(loss.grad_fn)
    for node, waiting in zip(nodes, footprint.passing_of(nodes), strict=True):
        order = _torch.order_of(node)
        call = next((number for number, one in enumerate(calls) if one.first <= order < one.last), None)
        if not parts or parts[-1].call != call:
            parts.append(Stretch(call))
        if call is None or calls[call].may_be_read:
            parts[-1].steps.append(_step_of(node, waiting, constant, forward))
    seen = Counter(address for call in calls for address, _ in set(call.inputs))
    shared = {address for address, count in seen.items() if count > 1}
    measured = {calls[part.call].kind: part for part in parts if part.call is not None and part.steps}
    for part in parts:
        if part.call is not None and not calls[part.call].may_be_read:
            like = measured.get(calls[part.call].kind)
            if like is None or like.call is None:
                return None
            part.steps = _translated(like.steps, part.call, calls[like.call], calls[part.call], shared)
    return Timeline(calls, parts, forward)


def read_whole(
    node: Any, forward: ForwardContext, parameters: Iterable[Tensor], *, behind: Sequence[Step] = ()
) -> Timeline:
    """Read the graph of a backward from a node on, as one stretch, behind operations that are known."""
    constant, nodes = footprint.addresses(parameters), footprint.nodes_in_order(node)
    steps = [
        _step_of(one, waiting, constant, forward)
        for one, waiting in zip(nodes, footprint.passing_of(nodes), strict=True)
    ]
    return Timeline((), [Stretch(None, [*behind, *steps])], forward)


def read_from(use: ParamUse, grad: Tensor, parameters: Collection[Tensor]) -> Timeline:
    """Read the rest of a backward from its first use on, without what the loss itself stored."""
    inputs = footprint.storages(footprint.inputs_of(use), footprint.addresses(parameters))
    size = grad.numel() * grad.element_size()
    memory = footprint.memory_of(use, size, use.forward)
    first = Step(use, inputs, inputs, size, size, size, None, _names(use), memory)
    return read_whole(use.behind, use.forward, parameters, behind=[first])


def _step_of(node: Any, waiting: tuple[int, int], constant: set[int], forward: ForwardContext) -> Step:
    use, saved, inputs, arriving = footprint.read_node(node, constant)
    step = Step(use, saved, inputs, arriving, *waiting, node.metadata.get(BLOCK_KEY))
    if use is None:
        return step
    return replace(step, names=_names(use), memory=footprint.memory_of(use, arriving, forward))


def _translated(
    steps: Sequence[Step], number: int, like: BlockCall, call: BlockCall, shared: Collection[int]
) -> list[Step]:
    """Return the operations of one block as those of another call of its kind."""
    addresses = {there: here for (there, _), (here, _) in zip(like.inputs, call.inputs, strict=True)}

    def sizes(found: Sizes) -> Sizes:
        # What is neither an input nor shared is the block's own.
        return {addresses.get(key, key if key in shared else (number, key)): size for key, size in found.items()}

    def named(name: str) -> str:
        return call.name + name.removeprefix(like.name) if name.startswith(f"{like.name}.") else name

    return [
        replace(
            step, saved=sizes(step.saved), inputs=sizes(step.inputs),
            names={own: named(name) for own, name in step.names.items()},
        )
        for step in steps
    ]  # fmt: skip


def _names(use: ParamUse) -> dict[str, str]:
    return {name: name for tracked in use.targets.values() for name in tracked.origin.names}
