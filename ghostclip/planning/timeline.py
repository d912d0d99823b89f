"""A backward moment by moment, under any choice of blocks that are run again and of where a second backward begins.

It is read off the graph of a step that keeps the inputs alone of some blocks: of one block of each kind at least the
graph shows what it saved, and others of its kind save the same. A choice is then tried by adding up intervals, without
a measurement and without running anything.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ghostclip.capture.blocks import BLOCK_KEY, BlockCall
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.param_use import ParamUse
from ghostclip.planning import footprint
from ghostclip.planning.plan import held_by, workspace_of

Sizes = dict[Hashable, int]


@dataclass(frozen=True)
class Step:
    """One operation of a backward.

    Attributes:
        use: The use whose gradient arrives there, or None.
        saved: Memory that it reads: address and bytes.
        inputs: The part of it that its use keeps.
        arriving: Bytes of the gradient that it takes.
        before: Bytes of all gradients that are on their way when it begins.
        passing: The same while it runs.
        ends: Number of the block's call that ends there in the forward, or None.
    """

    use: ParamUse | None
    saved: Sizes
    inputs: Sizes
    arriving: int
    before: int
    passing: int
    ends: int | None


@dataclass
class Part:
    """Consecutive operations of one block, or between blocks.

    Attributes:
        call: Number of the block's call; None between blocks.
        steps: In the order in which they will run.
    """

    call: int | None
    steps: list[Step] = field(default_factory=list)


class Timeline:
    """What a backward holds at every moment.

    Attributes:
        calls: The calls of blocks in the forward, in order.
        parts: The operations, in the order of the backward.
    """

    def __init__(self, calls: Sequence[BlockCall], parts: Sequence[Part], forward: ForwardContext) -> None:
        """Keep what was read.

        Args:
            calls: See the class.
            parts: Likewise.
            forward: The forward.
        """
        self.calls, self.parts = calls, parts
        self._unplanned = 4 * forward.unplanned
        self._kept = dict[int, tuple[int, bool]]()
        self._formed = dict[int, int]()
        for use, arriving in ((step.use, step.arriving) for part in parts for step in part.steps):
            if use is not None:
                self._kept[id(use)] = held_by(use, arriving, forward)
                self._formed[id(use)] = workspace_of(use, arriving, forward)

    def ordinary_peak(self) -> int:
        """Return the most that the same backward of ordinary training holds, its gradients included."""
        built, seen, increments = 0, set[str](), []
        for part in self.parts:
            for step in part.steps:
                increments.append(built)
                if step.use is not None:
                    new = set(_names(step.use)) - seen
                    built += footprint.parameter_bytes(step.use, new)
                    seen |= new
        live, passing = self._live(frozenset(), None)
        return max(int((live + passing + np.array(increments)).max()), built)

    def peak(self, recomputed: Collection[int], cut: int | None) -> int:
        """Return the most that a private backward holds.

        Args:
            recomputed: Numbers of the calls whose inputs alone are kept.
            cut: The call at whose end the part begins of which a second backward is run; None where there is none.

        Returns:
            Bytes; of what norms are formed in, only a convolution's windows are counted.
        """
        live, passing = self._live(recomputed, cut)
        begin = self._begin(cut)
        gathered, forming = np.zeros(len(live)), np.zeros(len(live))
        held, sums = self._unplanned, list[tuple[int, int]]()
        seen, again = set[str](), 0
        for number, step in enumerate(step for part in self.parts for step in part.steps):
            if step.use is not None:
                new = set(_names(step.use)) - seen
                seen |= new
                size = footprint.parameter_bytes(step.use, new)
                kept, _ = self._kept[id(step.use)]
                if number < begin:
                    held += kept
                    sums.append((size, kept))
                else:
                    again += size
            gathered[number] = held
            forming[number] = step.before + (0 if step.use is None else self._formed[id(step.use)])
        # What is kept of a use is formed before the operation itself runs.
        first = int((live + np.maximum(passing, forming) + gathered).max())
        now = int(live[-1]) + held
        for size, kept in sums:
            now += size
            first = max(first, now)
            now -= kept
        built = sum(size for size, _ in sums)
        second = int((live + passing)[begin:].max()) + built + again if begin < len(live) else 0
        return max(first, second)

    def _begin(self, cut: int | None) -> int:
        """Return the number of the first operation behind a cut; that of all operations where there is none."""
        steps = [step for part in self.parts for step in part.steps]
        if cut is None:
            return len(steps)
        return next(number for number, step in enumerate(steps) if step.ends == cut)

    def _live(self, recomputed: Collection[int], cut: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of saved memory, and of passing gradients, at every operation."""
        begin, total = self._begin(cut), sum(len(part.steps) for part in self.parts)
        spans: dict[Hashable, tuple[int, int, int]] = {}

        def hold(sizes: Sizes, start: int, end: int) -> None:
            for key, size in sizes.items():
                before = spans.get(key, (start, end, size))
                spans[key] = min(before[0], start), max(before[1], end), size

        private = bool(recomputed) or cut is not None
        number = 0
        for part in self.parts:
            start, last = number, number + len(part.steps) - 1
            again = part.call is not None and part.call in recomputed
            if again:
                assert part.call is not None
                hold(dict(self.calls[part.call].inputs), 0, total if start >= begin else last)
            for step in part.steps:
                stays = number >= begin and not again
                hold(step.saved, start if again else 0, total if stays else number)
                if private and step.use is not None and number < begin and self._kept[id(step.use)][1]:
                    hold(step.inputs, start if again else 0, total)
                number += 1
        change = np.zeros(total + 1)
        for start, end, size in spans.values():
            change[start] += size
            if end < total:
                change[end + 1] -= size
        passing = [step.passing for part in self.parts for step in part.steps]
        return change.cumsum()[:total], np.array(passing, dtype=float)


def read(loss: Tensor, forward: ForwardContext, parameters: Iterable[Tensor]) -> Timeline | None:
    """Read the graph of a backward that will start at a loss.

    Args:
        loss: A tensor in the graph.
        forward: The forward, whose blocks were watched.
        parameters: Tensors that are alive whatever the backward does.

    Returns:
        The timeline; None where of some kind of block none was left as it is.
    """
    calls: Sequence[BlockCall] = forward.blocks
    constant = footprint.addresses(parameters)
    parts: list[Part] = []
    nodes = footprint.nodes_in_order(loss.grad_fn)
    for node, waiting in zip(nodes, footprint.passing_of(nodes), strict=True):
        order = footprint.order(node)
        call = next((number for number, one in enumerate(calls) if one.first <= order < one.last), None)
        if not parts or parts[-1].call != call:
            parts.append(Part(call))
        if call is None or calls[call].may_be_read:
            use, saved, inputs, arriving = footprint.read_node(node, constant)
            parts[-1].steps.append(Step(use, saved, inputs, arriving, *waiting, node.metadata.get(BLOCK_KEY)))
    seen = Counter(address for call in calls for address, _ in set(call.inputs))
    shared = {address for address, count in seen.items() if count > 1}
    measured = {calls[part.call].kind: part for part in parts if part.call is not None and part.steps}
    for part in parts:
        if part.call is not None and not calls[part.call].may_be_read:
            like = measured.get(calls[part.call].kind)
            if like is None or like.call is None:
                return None
            names = dict(zip(_addresses(calls[like.call]), _addresses(calls[part.call]), strict=True))
            part.steps = [_renamed(step, part.call, names, shared) for step in like.steps]
    return Timeline(calls, parts, forward)


def _addresses(call: BlockCall) -> list[int]:
    return [address for address, _ in call.inputs]


def _renamed(step: Step, call: int, names: dict[int, int], shared: set[int]) -> Step:
    """Return an operation of one block as it is in another of its kind."""

    def other(sizes: Sizes) -> Sizes:
        found: Sizes = {}
        for key, size in sizes.items():
            known = key in names or key in shared
            found[names.get(key, key) if known else (call, key)] = size  # type: ignore[call-overload]
        return found

    return Step(step.use, other(step.saved), other(step.inputs), step.arriving, step.before, step.passing, step.ends)


def _names(use: ParamUse) -> list[str]:
    return [name for tracked in use.targets.values() for name in tracked.origin.names]
