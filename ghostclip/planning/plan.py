"""Choice of layers that keep per-sample gradients beyond those where that costs nothing: a knapsack under a budget.

A layer with p·d <= T·(p+d) always keeps them. Elsewhere keeping saves the norm's Gram and the second contraction, for
B·p·d elements in the place of the layer's input and output gradient. What is free for that at every moment of the
backward follows from its footprint; what it saves from a cost model.

Shape letters: N samples, T positions, I inputs, O outputs.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ghostclip import kernels
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.param_use import ParamUse
from ghostclip.errors import InvalidOptionError
from ghostclip.factors import convolution, planner
from ghostclip.factors.base import accumulation_dtype
from ghostclip.factors.convolution import CHUNK_ELEMENTS, CHUNK_ELEMENTS_ON_GPU
from ghostclip.kernels import products
from ghostclip.kernels.bounds import HALF
from ghostclip.planning.footprint import Footprint, footprint_from, footprint_of

MEMORY_BUDGET: Final = 1.05
"""The most that book-keeping holds by default, over what an ordinary backward holds."""

_CACHED: Final = 256
# Into how many parts of the budget sizes are rounded up.
_UNITS: Final = 1024
# What reading or writing one element costs, in FLOPs: products of layers run at this many for every element they move.
_MOVED: Final = 64
# A per-sample gradient is written into fresh memory, and read for its norm and its sum.
_PASSES_KEPT: Final = 4
# Input and output gradient are read by every level of the Gram, and by the contraction.
_PASSES_FACTORED: Final = 5
# The same on matrix units, an element of 4 bytes.
_MOVED_BY_UNITS: Final = 4 * planner.BYTE
SMALL: Final = 1 << 16
"""Bytes of an output's gradient below which it is not worth holding in another form."""

# What calling one torch function costs, in FLOPs, and how many there are: small layers are all calls.
_CALL: Final = 250_000
# The same where 5 microseconds go by on matrix units.
_CALL_BY_UNITS: Final = 3_000_000_000
_CALLS_KEPT: Final = 4
_CALLS_A_LEVEL: Final = 6


class Shape(NamedTuple):
    """Sizes that decide on a layer's costs."""

    samples: int
    positions: int
    inputs: int
    outputs: int
    dtype: torch.dtype  # of its input and of its output's gradient
    device: torch.device


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
        return self._plan("before", forward, parameters, lambda: footprint_of(loss, parameters.values()))

    def during(self, use: ParamUse, grad: Tensor, parameters: Mapping[str, Tensor]) -> frozenset[str]:
        """Return the same for a backward that the user has begun, at the first use whose gradient arrives."""
        # What the loss itself stored is not known, so that there may be fewer.
        return self._plan("during", use.forward, parameters, lambda: footprint_from(use, grad, parameters.values()))

    def _plan(
        self, when: str, forward: ForwardContext, parameters: Mapping[str, Tensor], footprint: Callable[[], Footprint]
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
                self._plans[key] = self._decide(footprint(), forward) if pays else frozenset()
            if len(self._plans) > _CACHED:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        self.latest = self._plans[key]
        self._asked = (when, forward.batch_size, [*forward.uses], forward.unplanned, self.budget), self.latest
        return self.latest

    def _decide(self, footprint: Footprint, forward: ForwardContext) -> frozenset[str]:
        held, items = _held(footprint, forward)
        seen = sum(moment.use is not None for moment in footprint.moments)
        if not items or seen < len(forward.sizes):
            # What another branch of the model will hold is not known.
            return frozenset()
        limit = self.budget * footprint.ordinary_peak() - 4 * forward.unplanned
        if math.isinf(limit):
            return frozenset(item.name for item in items if _estimated(item.shape) > 0)
        # What is added stays until the end, so that the tightest later moment counts.
        free = np.minimum.accumulate((limit - np.array(held))[::-1])[::-1].clip(min=0)
        return _knapsack([(item, _estimated(item.shape)) for item in items], free, limit)


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


def _held(footprint: Footprint, forward: ForwardContext) -> tuple[list[int], list[Item]]:
    """Return the bytes in memory at every moment under the rule alone, and the layers that could store more."""
    held, items, gathered = [], [], 0
    for number, moment in enumerate(footprint.moments):
        held.append(moment.live + moment.passing + gathered)
        use = moment.use
        if use is None:
            continue
        inputs = footprint.inputs.get(id(use), 0)
        kept, with_inputs = held_by(use, moment.arriving, forward)
        gathered += kept + inputs * with_inputs
        found = _shape_of(use, moment.arriving, forward)
        if found is None or not with_inputs:
            continue
        name, shape = found
        needed = _gradient_bytes(shape)
        if shape.positions > 1 and forward.use_counts[name] == 1:
            items.append(Item(name, shape, number, needed, max(0, needed - moment.arriving - inputs)))
    return held, items


def held_by(use: ParamUse, arriving: int, forward: ForwardContext) -> tuple[int, bool]:
    """Return bytes that book-keeping stores of a use until the end, without its inputs, and whether it stores these."""
    found = _shape_of(use, arriving, forward)
    if found is None:
        kept = _dense_bytes(use, forward) or _kernel_bytes(use, arriving, forward)
        return (kept, False) if kept else (arriving, True)
    shape = found[1]
    if planner.stores_per_sample(shape.positions, shape.inputs, shape.outputs, shape.dtype.itemsize):
        return _gradient_bytes(shape), False
    return arriving, True


def holdable(use: ParamUse, arriving: int, forward: ForwardContext) -> tuple[str, Shape] | None:
    """Return parameter and sizes of a use that can be stored in another form: of a matrix used once."""
    # None where it is too little to be worth it, or of another form than two tensors or their product.
    found = _shape_of(use, arriving, forward)
    if found is None or forward.use_counts[found[0]] != 1 or arriving < SMALL:
        return None
    return found


def forward_work(use: ParamUse, arriving: int, forward: ForwardContext) -> float:
    """Return the FLOPs of the product in an operation's forward; 0 where it is no product."""
    found, kernel = _shape_of(use, arriving, forward), _kernel_of(use)
    if found is not None:
        shape = found[1]
        return 2.0 * shape.samples * shape.positions * shape.inputs * shape.outputs
    if kernel is None or not forward.batch_size:
        return 0.0
    return 2.0 * forward.batch_size * _positions(kernel, arriving, forward.batch_size) * kernel.numel()


def moving(shape: Shape) -> float:
    """Return the cost of reading or writing one byte of a layer's tensors, in FLOPs of its products."""
    by_units = shape.dtype in HALF and products.has_units(shape.device)
    return (_MOVED_BY_UNITS if by_units else _MOVED) / 4


def _kernel_bytes(use: ParamUse, arriving: int, forward: ForwardContext) -> int:
    """Return the bytes of a convolution's per-sample kernel gradients; 0 where its inputs and gradients are stored."""
    kernel, samples = _kernel_of(use), forward.batch_size
    if kernel is None or not samples:
        return 0
    inputs, positions = kernel[0].numel(), _positions(kernel, arriving, samples)
    small = samples * kernel.numel() <= convolution.SMALL
    if small or planner.stores_per_sample(positions, inputs, kernel.shape[0], kernel.element_size()):
        return samples * kernel.numel() * max(4, kernel.element_size())
    return 0


def workspace_of(use: ParamUse, arriving: int, forward: ForwardContext) -> int:
    """Return the temporary bytes of forming a use's per-sample gradients, those of a convolution's windows; else 0."""
    kernel, samples = _kernel_of(use), forward.batch_size
    if kernel is None or not samples or use.node is None or not use.node.saved_tensors:
        return 0
    rows, positions = use.node.saved_tensors[0], _positions(kernel, arriving, samples)
    at_once = CHUNK_ELEMENTS if rows.device.type == "cpu" else CHUNK_ELEMENTS_ON_GPU
    unfolded = samples * positions * kernel[0].numel()
    laid_out = rows.numel() if rows.numel() <= at_once else 0
    return (laid_out + unfolded // max(1, -(-unfolded // at_once))) * accumulation_dtype(rows.dtype).itemsize


def _kernel_of(use: ParamUse) -> Tensor | None:
    """Return the kernel of a convolution; None for any other use."""
    kernels = [tracked.origin.value for tracked in use.targets.values() if tracked.origin.value.dim() > 2]
    return kernels[0] if len(kernels) == 1 else None


def _positions(kernel: Tensor, arriving: int, samples: int) -> int:
    return arriving // (samples * kernel.shape[0] * kernel.element_size())


def _gradient_bytes(shape: Shape) -> int:
    """Return the bytes of a layer's per-sample gradients."""
    return shape.samples * shape.inputs * shape.outputs * accumulation_dtype(shape.dtype).itemsize


def _dense_bytes(use: ParamUse, forward: ForwardContext) -> int:
    """Return the bytes of per-sample gradients where all factors of a use are such; else 0."""
    if any(not form.startswith("dense") for form in use.site.forms.values()):
        return 0
    return sum(forward.batch_size * tracked.origin.value.numel() * 4 for tracked in use.targets.values())


def _shape_of(use: ParamUse, arriving: int, forward: ForwardContext) -> tuple[str, Shape] | None:
    """Return the parameter and sizes of a use that is one product of a matrix with rows of samples."""
    if use.node is None or not use.node.saved_tensors:
        return None
    rows = use.node.saved_tensors[0]
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
    place, chosen = int(np.argmax(best)), []
    for (item, _), took in zip(reversed(wanted), reversed(taken), strict=True):
        if took[place]:
            chosen.append(item.name)
            place -= math.ceil(item.added / unit)
    return frozenset(chosen)


def _estimated(shape: Shape) -> float:
    """Return the savings in FLOPs, moved elements counted as such."""
    positions, inputs, outputs = shape.positions, shape.inputs, shape.outputs
    by_units = shape.dtype in HALF and products.has_units(shape.device)
    moved, call = (_MOVED_BY_UNITS, _CALL_BY_UNITS) if by_units else (_MOVED, _CALL)
    product = 2 * positions * inputs * outputs
    norm = min(planner.gram_flops(positions, inputs, outputs, by_units=by_units), product)
    factored = norm + product + moved * _PASSES_FACTORED * positions * (inputs + outputs)
    kept = product + moved * _PASSES_KEPT * inputs * outputs
    levels = kernels.gram_levels(positions, inputs, outputs, by_units=by_units)
    calls = _CALLS_A_LEVEL * (levels + 1) - _CALLS_KEPT
    return float(shape.samples * (factored - kept) + call * calls)
