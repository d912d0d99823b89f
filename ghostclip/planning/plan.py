"""Choice of layers that keep per-sample gradients beyond those where that costs nothing: a knapsack under a budget.

A layer with p·d <= T·(p+d) always keeps them. Elsewhere keeping saves the norm's Gram and the second contraction, for
B·p·d elements in the place of the layer's input and output gradient. What is free for that at every moment of the
backward follows from its footprint; what it saves from a cost model.

For less memory than an ordinary step has, blocks are run again in the backward, and some get a second backward. Of a
chain of blocks the first ones have their gradients last, when factors of all others have gathered: it is they that keep
their inputs alone, and the first of them whose factors are dropped once their norms are known, to be formed again by a
second backward of that part. Price: the forward of every block that keeps its inputs alone, once; of a block with a
second backward twice, and its input gradients again.

Shape letters: N samples, T positions, I inputs, O outputs.
"""

import math
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ghostclip import _torch, kernels
from ghostclip.capture.blocks import BLOCK_KEY
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.nodes import nodes_behind
from ghostclip.capture.param_use import ParamUse
from ghostclip.capture.sample_axis import METADATA_KEY
from ghostclip.errors import InvalidOptionError
from ghostclip.factors import planner
from ghostclip.planning import timeline
from ghostclip.planning.timeline import Shape, Timeline, read_from, read_whole


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


MEMORY_BUDGET: Final = 1.05
"""The most that book-keeping holds by default, over what an ordinary backward holds."""

_CACHED: Final = 256
# Into how many parts of the budget sizes are rounded up.
_UNITS: Final = 1024
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
    needed: int  # bytes of the per-sample gradients
    added: int  # the same less what is dropped instead, at least 0


class Planner:
    """Decides once for every batch's sizes which layers store per-sample gradients."""

    def __init__(self, budget: float = MEMORY_BUDGET) -> None:
        if not budget >= 1:
            raise InvalidOptionError(f"memory_budget={budget}: expected 1 or more times an ordinary step's memory.")
        self.budget = budget  # peak of a private backward over that of an ordinary one; infinite for no bound
        self.latest: frozenset[str] = frozenset()  # names of the parameters that the latest plan adds to the rule
        self._plans: OrderedDict[Any, frozenset[str]] = OrderedDict()
        self._asked: tuple[Any, frozenset[str]] = None, frozenset()

    def before(self, loss: Tensor, forward: ForwardContext, parameters: Mapping[str, Tensor]) -> frozenset[str]:
        """Return the parameters whose per-sample gradients a backward stores although they are the larger form."""
        # None under activation checkpointing, where reading the graph would run it again.
        return self._plan("before", forward, parameters, lambda: read_whole(loss.grad_fn, forward, parameters.values()))

    def during(self, use: ParamUse, grad: Tensor, parameters: Mapping[str, Tensor]) -> frozenset[str]:
        """Return the same for a backward that the user has begun, at the first use whose gradient arrives."""
        # What the loss itself stored is not known, so that there may be fewer.
        return self._plan("during", use.forward, parameters, lambda: read_from(use, grad, parameters.values()))

    def _plan(
        self, when: str, forward: ForwardContext, parameters: Mapping[str, Tensor], backward: Callable[[], Timeline]
    ) -> frozenset[str]:
        if forward.runs_again:
            self.latest = frozenset()
            return self.latest
        asked = (when, forward.batch_size, forward.uses, forward.unplanned, self.budget)
        if asked == self._asked[0]:
            # Step after step, and compared more quickly than hashed.
            self.latest = self._asked[1]
            return self.latest
        key = (when, forward.batch_size, tuple(forward.sizes), forward.unplanned, self.budget)
        if key not in self._plans:
            with torch.no_grad():
                pays = _may_pay(forward, parameters)
                self._plans[key] = self._decide(backward(), forward) if pays else frozenset()
            if len(self._plans) > _CACHED:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        self.latest = self._plans[key]
        self._asked = (when, forward.batch_size, [*forward.uses], forward.unplanned, self.budget), self.latest
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
        return _knapsack([(item, _estimated(item.shape)) for item in items], free, limit)


def _items(backward: Timeline) -> Iterator[Item]:
    """Yield the layers that could store per-sample gradients although the rule has them store factors."""
    owners = Counter(key for step in backward.steps for key in step.inputs)
    for number, step in enumerate(backward.steps):
        if step.memory.matrix is None or not step.memory.with_inputs:
            continue
        name, shape = step.memory.matrix
        if shape.positions > 1:
            inputs = sum(size for key, size in step.inputs.items() if owners[key] == 1)
            needed = shape.gradient_bytes
            yield Item(name, shape, number, needed, max(0, needed - step.arriving - inputs))


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
    by_rule = positions <= 1 or planner.stores_per_sample(positions, inputs, outputs, dtype.itemsize)
    return not by_rule and _estimated(shape) > 0


def _knapsack(items: Sequence[tuple[Item, float]], free: Any, limit: float) -> frozenset[str]:
    """Choose the items that save most while, at every moment, what was added so far fits."""
    # Dynamic programming over sizes in parts of the budget, rounded up, in the order in which items arrive: exact but
    # for the rounding.
    unit = max(1.0, limit / _UNITS)
    wanted = [(item, saving) for item, saving in items if saving > 0 and item.needed <= free[item.moment]]
    best = np.full(_UNITS + 1, -np.inf)
    best[0] = 0.0
    taken = []
    for item, saving in wanted:
        best[int(free[item.moment] // unit) + 1 :] = -np.inf
        size = math.ceil(item.added / unit)
        with_it = np.full_like(best, -np.inf)
        with_it[size:] = best[: len(best) - size] + saving
        with_it[int(free[item.moment] // unit) + 1 :] = -np.inf
        taken.append(with_it > best)
        best = np.maximum(best, with_it)
    index, chosen = int(np.argmax(best)), []
    for (item, _), took in zip(reversed(wanted), reversed(taken), strict=True):
        if took[index]:
            chosen.append(item.name)
            index -= math.ceil(item.added / unit)
    return frozenset(chosen)


def _estimated(shape: Shape) -> float:
    """Return the savings in FLOPs, moved elements counted as such."""
    positions, inputs, outputs, by_units = shape.positions, shape.inputs, shape.outputs, shape.by_units
    moved, call = 4 * shape.moving, _CALL_BY_UNITS if by_units else _CALL
    product = 2 * positions * inputs * outputs
    norm = min(planner.gram_flops(positions, inputs, outputs, by_units=by_units), product)
    factored = norm + product + moved * _PASSES_FACTORED * positions * (inputs + outputs)
    stored = product + moved * _PASSES_KEPT * inputs * outputs
    levels = kernels.gram_levels(positions, inputs, outputs, by_units=by_units)
    calls = _CALLS_A_LEVEL * (levels + 1) - _CALLS_KEPT
    return float(shape.samples * (factored - stored) + call * calls)
