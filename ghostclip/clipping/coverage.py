"""Coverage report: the handling of every trainable parameter and its cost, as a table.

The cost of clipping a parameter is priced as the passes and the factor planner run it. FLOPs are those of products of
matrices, a multiplication and an addition as two: what torch's counter and ``benchmarks.flops`` count. Elementwise work
and sums are left out on both sides.

Shape letters: B samples, N samples times slots, T positions, I inputs, O outputs.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from math import prod
from typing import Final

from torch import nn

from ghostclip.capture.call_sites import AT_ONCE_FORM, GENERAL_FORM, CallSite, MatrixProduct, Statistics
from ghostclip.clipping.plan import BlockPlanner
from ghostclip.rules import rule_for

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
    total = sum((_use(arrived, count=count, strategy=strategy) for arrived in statistics), Cost())
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
    stored = _stored_bytes(arrived, count=count, strategy=strategy)
    return Cost(base, run + _clipping(arrived, count=count, strategy=strategy), stored)


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
    total = product
    for item in arrived.products:
        if arrived.materialised or (strategy == "bookkeeping" and item.kept):
            total += item.flops * (strategy != "bookkeeping") + 2 * item.entries
        else:
            total += _norm(item, instantiate=strategy == "fast")[1]
    return total


def _norm(item: MatrixProduct, *, instantiate: bool) -> tuple[str, int]:
    """Return how all samples' norms of a sum of outer products are formed, and the FLOPs of it."""
    if item.positions == 0:
        return "no rows", 0
    if instantiate:
        return "instantiate, contract", item.flops
    return f"{item.plan}, contract", item.count * item.norm


def _stored_bytes(arrived: Statistics, *, count: int, strategy: str) -> int:
    wide = max(arrived.itemsize, 4)
    if strategy == "hooks":
        return arrived.samples * count * wide
    if strategy != "bookkeeping":
        return 0
    if arrived.kind == "general" or (arrived.derived and arrived.materialised):
        return arrived.samples * count * wide
    if not all(item.kept for item in arrived.products) or not arrived.products or arrived.materialised:
        return arrived.elements * arrived.itemsize
    return sum(item.entries for item in arrived.products) * wide


def input_bytes(arrived: Statistics, *, strategy: str) -> int:
    """Return the bytes of an operation's input that clipping keeps alive until the backward ends."""
    # Those that an ordinary backward drops when it has passed the operation; 0 where only gradients are stored.
    is_stored = strategy == "bookkeeping" and _is_factored(arrived, strategy=strategy)
    return arrived.input_elements * arrived.itemsize if is_stored else 0


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
    return strategy != "bookkeeping" or not all(product.kept for product in item.products)


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
    if arrived.materialised or (strategy == "bookkeeping" and all(item.kept for item in arrived.products)):
        return "keep per-sample gradient" if strategy == "bookkeeping" else "form per-sample gradient"
    return _norm(max(arrived.products, key=lambda item: item.flops), instantiate=strategy == "fast")[0]


NOT_USED: Final = "not used yet"


@dataclass(frozen=True)
class CoverageRow:
    """One parameter of the coverage report."""

    module: str  # path of the module that owns it (empty for the model itself)
    module_type: str
    parameter: str
    shape: tuple[int, ...]
    handled: str  # operations that consumed it and the form of its factors; ``"not used yet"`` before the first forward
    # how it was captured: ``"rule"``, ``"elementwise"``, ``"general"`` (one gradient per sample), each perhaps
    # ``"derived"`` as well; empty where it was not used
    rung: str = ""
    plan: str = ""  # how norm and clipped sum are formed in the largest backward; empty before the first
    cost: Cost = field(default_factory=Cost)

    @property
    def name(self) -> str:
        """The parameter's full name."""
        return f"{self.module}.{self.parameter}" if self.module else self.parameter

    @property
    def count(self) -> int:
        """Its number of elements."""
        return prod(self.shape)


@dataclass(eq=False)
class Coverage:
    """Table with one row for every trainable parameter, and the total cost of clipping."""

    rows: list[CoverageRow]
    strategy: str = "bookkeeping"  # what the plan and the costs are for
    # what a non-private step holds: parameters, gradients and, at least, the inputs of the layers
    base_bytes: int = 0
    unchecked: str = ""  # the checks of the model that were switched off or could not run, and why; empty if all ran
    # what a backward is expected to hold under a memory budget below 1, over what an ordinary one holds; None without
    # such a budget
    expected_share: float | None = None
    graphs: str = ""  # which graphs compute batches, and why others are eager; empty where no graph is thought of

    def __iter__(self) -> Iterator[CoverageRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def total(self) -> Cost:
        """The cost of all parameters' layers."""
        return sum((row.cost for row in self.rows), Cost())

    @property
    def flop_ratio(self) -> float:
        """FLOPs of a private step over those of a non-private one, of the layers in the table; 1 where none counts."""
        # What has no trainable parameter (attention's own products, frozen layers) costs the same in both, so that the
        # ratio of the whole step is nearer to 1.
        total = self.total
        return total.private / total.base if total.base else 1.0

    @property
    def memory_ratio(self) -> float:
        """Upper bound of the bytes of a private step over those of a non-private one."""
        # An ordinary backward stores other activations as well, and frees them while factors gather; either brings the
        # ratio nearer to 1. Under a memory budget below 1 it is what the plan expects.
        if self.expected_share is not None:
            return self.expected_share
        return (self.base_bytes + self.total.held) / self.base_bytes if self.base_bytes else 1.0

    @property
    def unused(self) -> list[str]:
        """Parameters that no forward has used so far."""
        return [row.name for row in self.rows if row.handled == NOT_USED]

    def as_dict(self) -> dict[str, object]:
        """Return the table as plain numbers and texts, for JSON."""
        rows = [{"name": row.name, "count": row.count, **asdict(row)} for row in self.rows]
        return {
            "strategy": self.strategy,
            "unchecked": self.unchecked,
            "graphs": self.graphs,
            "parameters": rows,
            "total": {
                **asdict(self.total),
                "count": sum(row.count for row in self.rows),
                "flop_ratio": self.flop_ratio,
                "memory_ratio": self.memory_ratio,
            },
        }

    def __str__(self) -> str:
        header = ("module", "type", "parameter", "shape", "handled", "rung", "plan", "FLOPs", "holds")
        lines = [
            (
                row.module or "(model)",
                row.module_type,
                row.parameter,
                str(row.shape),
                row.handled,
                row.rung,
                row.plan,
                f"{row.cost.private / row.cost.base:.2f}x" if row.cost.base else "",
                readable_bytes(row.cost.held) if row.plan else "",
            )
            for row in self.rows
        ]
        table = as_table(header, [*lines, *self._last_line()])
        return "\n".join([table, *filter(None, (self.unchecked, self.graphs))])

    def _last_line(self) -> list[tuple[str, ...]]:
        if not any(row.plan for row in self.rows):
            return []
        count = f"{sum(row.count for row in self.rows):,}"
        ratios = f"memory at most {self.memory_ratio:.2f}x"
        memory = readable_bytes(self.total.held)
        return [("total", "", count, "", "", "", f"{self.strategy}, {ratios}", f"{self.flop_ratio:.2f}x", memory)]


def as_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return texts in columns, with a rule below the header."""
    widths = [max(len(row[column]) for row in [header, *lines]) for column in range(len(header))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *lines]
    ]
    return "\n".join([text[0], "  ".join("-" * width for width in widths), *text[1:]])


def readable_bytes(count: int) -> str:
    """Return a number of bytes for people, in KB, MB or GB of 1000."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def coverage_of(
    model: nn.Module,
    sites: Iterable[CallSite],
    *,
    strategy: str = "bookkeeping",
    stored: Collection[str] = (),
    reduced: BlockPlanner | None = None,
    unchecked: str = "",
) -> Coverage:
    """Return the coverage report, in the order of ``model.named_parameters()``."""
    # stored: parameters whose per-sample gradients the memory budget stores. reduced: the planner of a budget below 1.
    by_name: dict[str, list[CallSite]] = {}
    for site in sites:
        for name in site.names:
            by_name.setdefault(name, []).append(site)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    inputs: dict[int, int] = {}
    rows = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        path, _, attribute = name.rpartition(".")
        used = by_name.get(name, [])
        statistics = [item for site in used for item in site.statistics.values() if _bears(item, name, sizes)]
        bought = name in stored and strategy == "bookkeeping"
        if bought:
            statistics = [_as_stored(item) for item in statistics]
        if reduced is not None:
            # An ordinary step runs nothing again: the budget does.
            statistics = [replace(item, recomputed=False) for item in statistics]
        plan, cost = _measured(name, parameter.numel(), statistics, strategy, reduced)
        inputs.update({item.input_key: item.input_elements * item.itemsize for item in statistics})
        rows.append(
            CoverageRow(
                path,
                type(model.get_submodule(path)).__name__,
                attribute,
                tuple(parameter.shape),
                _joined(f"{site.operation}: {site.forms.get(name, '')}" for site in used) or NOT_USED,
                _joined(_rung(site, name) for site in used),
                plan + " (budget)" * bought,
                cost,
            )
        )
    parameters = sum(p.numel() * p.element_size() * (2 if p.requires_grad else 1) for p in model.parameters())
    base_bytes = parameters + sum(inputs.values())
    share = None if reduced is None or reduced.latest is None else reduced.latest.share
    return Coverage(rows, strategy=strategy, base_bytes=base_bytes, unchecked=unchecked, expected_share=share)


def _measured(
    name: str, count: int, statistics: Sequence[Statistics], strategy: str, reduced: BlockPlanner | None
) -> tuple[str, Cost]:
    """Return how one parameter of ``count`` elements is handled, in a few words, and its cost."""
    # A memory budget below 1 may drop its factors and form them again, or run its block again.
    latest = None if reduced is None else reduced.latest
    twice = reduced is not None and name in reduced.dropped
    again = latest is not None and any(name.startswith(f"{block}.") for block in latest.blocks)
    strategy = "ghost" if twice else strategy
    plan = _joined(plan_of(item, strategy=strategy) for item in statistics)
    plan += ", block run again" * (again and bool(plan)) + ", two backwards" * twice
    forward = sum(item.flops for arrived in statistics for item in arrived.products)
    return plan, cost_of(statistics, count=count, strategy=strategy) + Cost(private=again * (1 + twice) * forward)


def _as_stored(arrived: Statistics) -> Statistics:
    return replace(arrived, products=tuple(replace(item, kept=True) for item in arrived.products))


def _joined(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _bears(item: Statistics, name: str, sizes: dict[str, int]) -> bool:
    """Whether a parameter accounts for a computation from several: the largest of them does."""
    return name == max(item.names, key=lambda other: sizes.get(other, 0))


def _rung(site: CallSite, name: str) -> str:
    if site.forms.get(name) in (GENERAL_FORM, AT_ONCE_FORM):
        rung = "general"
    else:
        rung = "elementwise" if rule_for(site.operation) is None else "rule"
    derived = any(item.derived for item in site.statistics.values() if name in item.names)
    return f"{rung}, derived" if derived else rung
