"""Cost of clipping a parameter, priced as the passes and the factor planner run it.

FLOPs are those of products of matrices, a multiplication and an addition as two: what torch's counter and
``benchmarks.flops`` count. Elementwise work and sums are left out on both sides.

Shape letters: B samples, N samples times slots, T positions, I inputs, O outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ghostclip.capture.statistics import MatrixProduct, Statistics
from ghostclip.factors import planner

# Strategies that hold something of every layer until the backward ends.
_HOLDING = ("bookkeeping", "hooks")


@dataclass(frozen=True)
class Cost:
    """Operations and memory of one parameter in one step."""

    base: int = 0  # FLOPs of its layer's products in a non-private step: forward, weight gradient, input gradient
    private: int = 0  # FLOPs of the same layer with clipping
    held: int = 0  # bytes stored until the backward ends that a non-private step does not store

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.base + other.base, self.private + other.private, self.held + other.held)


def cost_of(statistics: Sequence[Statistics], *, count: int, strategy: str) -> Cost:
    """Return the cost of all uses of one parameter with ``count`` elements, and of the cross terms between them."""
    total = Cost()
    for arrived in statistics:
        total += _use(arrived, count=count, strategy=strategy)
    if strategy == "hooks":
        # Per-sample gradients of all uses are added up first, so that there is one sum.
        again = [item for item in statistics if item.kind != "diagonal"][1:]
        return total + Cost(private=-sum(2 * item.samples * count for item in again))
    pairs = combinations(statistics, 2)
    return total + Cost(private=sum(_cross(first, second, strategy=strategy) for first, second in pairs))


def _use(arrived: Statistics, *, count: int, strategy: str) -> Cost:
    product = sum(item.flops for item in arrived.products)
    input_gradient = product if arrived.needs_input_gradient else 0
    backwards = 1 if strategy in _HOLDING else 2
    again = product if arrived.recomputed else 0
    base = 2 * product + input_gradient + again
    run = product + backwards * (input_gradient + again)
    held = _held(arrived, count=count, strategy=strategy)
    return Cost(base, run + _clipping(arrived, count=count, strategy=strategy), held)


def _clipping(arrived: Statistics, *, count: int, strategy: str) -> int:
    """Return the FLOPs of norms and clipped sums, the backwards themselves left out."""
    dense_sum = 2 * arrived.samples * count
    product = sum(item.flops for item in arrived.products)
    if arrived.kind == "general":
        # The operation's whole backward, over all samples, once for every sample.
        passes = 1 if strategy in _HOLDING else 2
        return 2 * arrived.samples * product * passes + dense_sum
    if not arrived.products:
        nothing = arrived.kind == "diagonal" or (arrived.kind == "rows" and strategy != "hooks")
        return 0 if nothing else dense_sum
    if strategy == "hooks":
        return product + dense_sum
    total = 0
    for item in arrived.products:
        if arrived.materialised:
            total += item.flops * (1 if strategy == "bookkeeping" else 2) + 2 * item.entries
        elif strategy == "bookkeeping" and keeps(item):
            total += item.flops + 2 * item.entries
        else:
            total += norm_flops(item, instantiate=strategy == "fast") + item.flops
    return total


def keeps(item: MatrixProduct) -> bool:
    """Return whether book-keeping stores a layer's per-sample gradients instead of its two factors."""
    if item.kept is not None:
        return item.kept
    return item.positions > 0 and planner.keeps_per_sample(item.positions, item.inputs, item.outputs)


def norm_flops(item: MatrixProduct, *, instantiate: bool = False) -> int:
    """Return the FLOPs of all samples' norms of a sum of outer products, in the cheaper form or by instantiation."""
    positions, inputs, outputs = item.positions, item.inputs, item.outputs
    if positions == 0:
        return 0
    if item.norm is not None and not instantiate:
        return item.count * item.norm
    if instantiate or not planner.prefers_gram(positions, inputs, outputs):
        return item.flops
    return item.count * planner.gram_flops(positions, inputs, outputs)


def _held(arrived: Statistics, *, count: int, strategy: str) -> int:
    wide = max(arrived.itemsize, 4)
    if strategy == "hooks":
        return arrived.samples * count * wide
    if strategy != "bookkeeping":
        return 0
    if arrived.kind == "general" or (arrived.derived and arrived.materialised):
        return arrived.samples * count * wide
    if not all(map(keeps, arrived.products)) or not arrived.products or arrived.materialised:
        return arrived.elements * arrived.itemsize
    return sum(item.entries for item in arrived.products) * wide


def kept_input(arrived: Statistics, *, strategy: str) -> int:
    """Return the bytes of an operation's input that clipping keeps alive until the backward ends."""
    # Those that an ordinary backward drops when it has passed the operation; 0 where only gradients are stored.
    held = strategy == "bookkeeping" and _is_factored(arrived, strategy=strategy)
    return arrived.input_elements * arrived.itemsize if held else 0


def _cross(first: Statistics, second: Statistics, *, strategy: str) -> int:
    """Price the inner products of two uses of one parameter."""
    if first.slice_of != second.slice_of and first.slice_of and second.slice_of:
        return 0
    factored = [item for item in (first, second) if _is_factored(item, strategy=strategy)]
    if len(factored) == 2:
        return sum(map(_cross_outer, first.products, second.products))
    if not factored:
        return 0
    outer, other = (first, second) if factored[0] is first else (second, first)
    if other.kind == "rows":
        # The looked-up rows meet every position's input.
        positions = other.elements // max(1, other.samples * outer.products[0].inputs)
        return sum(2 * item.count * item.positions * item.inputs * positions for item in outer.products)
    return sum(item.flops for item in outer.products)


def _is_factored(item: Statistics, *, strategy: str) -> bool:
    if not item.products or item.materialised or item.kind == "general":
        return False
    return strategy != "bookkeeping" or not all(map(keeps, item.products))


def _cross_outer(first: MatrixProduct, second: MatrixProduct) -> int:
    gram = 2 * first.count * first.positions * second.positions * (first.inputs + first.outputs)
    return min(gram, first.flops + second.flops)


def plan_of(arrived: Statistics, *, strategy: str) -> str:
    """Return a few words on how norm and clipped sum are formed."""
    if arrived.kind == "general":
        return "one backward per sample"
    if strategy == "hooks":
        return "per-sample gradient"
    if arrived.kind == "rows":
        return "segments of rows"
    if not arrived.products:
        return "dense"
    if arrived.derived and arrived.materialised:
        return "form per-sample gradient, pull back"
    if arrived.materialised or (strategy == "bookkeeping" and all(map(keeps, arrived.products))):
        return "keep per-sample gradient" if strategy == "bookkeeping" else "form per-sample gradient"
    return _norm_plan(max(arrived.products, key=lambda item: item.flops), instantiate=strategy == "fast")


def _norm_plan(item: MatrixProduct, *, instantiate: bool) -> str:
    if item.positions == 0:
        return "no rows"
    if item.plan and not instantiate:
        return f"{item.plan}, contract"
    if instantiate or not planner.prefers_gram(item.positions, item.inputs, item.outputs):
        return "instantiate, contract"
    if item.positions <= 1:
        return "product of two norms, contract"
    return "symmetric Gram, contract"
