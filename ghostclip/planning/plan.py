"""Choice of layers that keep per-sample gradients beyond those where that costs nothing: a knapsack under a budget.

A layer with p·d <= T·(p+d) always keeps them. Elsewhere keeping saves the norm's Gram and the second contraction, for
B·p·d elements in the place of the layer's input and output gradient. What is free for that at every moment of the
backward follows from its footprint; what it saves from a cost model.

Shape letters: N samples, T positions, I inputs, O outputs.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ghostclip import kernels
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.param_use import ParamUse
from ghostclip.errors import InvalidOptionError
from ghostclip.factors import planner
from ghostclip.planning.timeline import Shape, Timeline, read_from, read_whole

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
        free = np.minimum.accumulate((limit - backward.held())[::-1])[::-1].clip(min=0)
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
