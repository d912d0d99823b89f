"""Less memory than an ordinary step: which blocks are run again in the backward, and which get a second backward.

Of a chain of blocks the first ones have their gradients last, when factors of all others have gathered: it is they that
keep their inputs alone, and the first of them whose factors are dropped once their norms are known, to be formed again
by a second backward of that part. Price: the forward of every block that keeps its inputs alone, once; of a block with
a second backward twice, and its input gradients again.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ghostclip import _torch
from ghostclip.capture.blocks import BLOCK_KEY
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.nodes import nodes_behind
from ghostclip.capture.sample_axis import METADATA_KEY
from ghostclip.planning import timeline
from ghostclip.planning.timeline import Timeline


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
        # None where the graph does not show what blocks store. Saved tensors of watched blocks are freed where memory
        # is short of them.
        self.latest, self.dropped = None, frozenset()
        known = self._plans.get(forward.input_sizes)
        if known is None:
            with torch.no_grad():
                read = timeline.read(loss, forward, parameters.values())
            if read is None or not any(part.steps for part in read.parts):
                return None
            cuts = [number for number in range(len(forward.blocks)) if cut_at(number, loss, forward) is not None]
            self._plans[forward.input_sizes] = self._cheapest(read, cuts)
            known = self._of_this_step(read, cuts)
        for call in forward.blocks:
            if call.held is not None and call.name in known.blocks:
                call.held.let_go()
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
        return self._best(read, fitting, limit)

    def _of_this_step(self, read: Timeline, cuts: Sequence[int]) -> Reduction:
        """Return the best reduction for the step whose blocks were watched."""
        # Only these may still keep their saved tensors.
        again = frozenset(number for number, call in enumerate(read.calls) if call.recomputed)
        saved = frozenset(number for number in again if read.calls[number].held is not None)
        choices = [_Choice(chosen, cut) for cut in (None, *cuts) for chosen in (again - saved, again)]
        return self._best(read, choices, self.budget * read.ordinary_peak())

    def _best(self, read: Timeline, choices: Sequence["_Choice"], limit: float) -> Reduction:
        """Return the cheapest choice that fits; where none fits, the one with the least memory."""

        def cost(choice: _Choice) -> tuple[bool, float]:
            peak = read.peak(*choice)
            return peak > limit, peak if peak > limit else read.price(*choice)

        best = min(choices, key=cost)
        again = frozenset(read.calls[number].name for number in best.again)
        return Reduction(again, best.cut, read.peak(*best), read.ordinary_peak())


class _Choice(NamedTuple):
    """A choice of measures that reduce memory."""

    again: frozenset[int]  # numbers of the blocks' calls of which only inputs are stored
    cut: int | None


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
    uses = {node: node.metadata[METADATA_KEY] for node in nodes if METADATA_KEY in node.metadata}
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
    leading = _leading_to(cut, nodes)
    ends = [GradientEdge(node, 0) for node in before - leading if _ends_at(node, anchor)]
    outside = {name for node, use in uses.items() if node in before for name in use.site.names}
    inside = {name for node, use in uses.items() if node in behind for name in use.site.names}
    once = {name for name in inside - outside if forward.use_counts[name] == 1}
    return Cut(GradientEdge(cut, 0), tuple(ends), frozenset(once))


def _ends_at(node: Any, anchor: Tensor) -> bool:
    return any(following is not None and _torch.leaf_of(following) is anchor for following, _ in node.next_functions)


def _leading_to(cut: Any, nodes: Sequence[Any]) -> set[Any]:
    """Return the nodes from which a backward leads to a node."""
    above: dict[Any, list[Any]] = {}
    for node in nodes:
        for following, _ in node.next_functions:
            above.setdefault(following, []).append(node)
    pending, seen = [cut], set[Any]()
    while pending:
        for node in above.get(pending.pop(), []):
            if node not in seen:
                seen.add(node)
                pending.append(node)
    return seen
