"""Coverage report: the handling of every trainable parameter and its cost, as a table."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from torch import nn

from ghostclip.capture.call_sites import CallSite
from ghostclip.capture.statistics import AT_ONCE_FORM, GENERAL_FORM, Statistics
from ghostclip.planning.below import BlockPlanner
from ghostclip.planning.cost import Cost, cost_of, plan_of
from ghostclip.planning.timeline import AS_THEY_ARE
from ghostclip.rules import rule_for

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
    plan: str = ""  # how norm and clipped sum are formed at the sizes of the last backward; empty before the first
    cost: Cost = field(default_factory=Cost)
    axes: str = ""  # which rows of its operations' data belong to which sample, where evidence has decided it

    @property
    def name(self) -> str:
        """The parameter's full name."""
        return f"{self.module}.{self.parameter}" if self.module else self.parameter

    @property
    def count(self) -> int:
        """Its number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class Coverage:
    """Table with one row for every trainable parameter, and the total cost of clipping."""

    def __init__(
        self,
        rows: Iterable[CoverageRow],
        *,
        strategy: str = "bookkeeping",
        base_bytes: int = 0,
        unchecked: str = "",
        expected_share: float | None = None,
    ) -> None:
        self.rows = list(rows)
        # what a backward is expected to hold under a memory budget below 1, over what an ordinary one holds; None
        # without such a budget
        self.expected_share = expected_share
        self.strategy = strategy  # what the plan and the costs are for
        # what a non-private step holds: parameters, gradients and, at least, the inputs of the layers
        self.base_bytes = base_bytes
        # the checks of the model that were switched off or could not run, and why; empty if all ran
        self.unchecked = unchecked
        # which graphs compute batches, and why others are eager; empty where no graph is thought of
        self.graphs = ""

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
        held = readable_bytes(self.total.held)
        return [("total", "", count, "", "", "", f"{self.strategy}, {ratios}", f"{self.flop_ratio:.2f}x", held)]


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
    kept: Collection[str] = (),
    reduced: BlockPlanner | None = None,
    unchecked: str = "",
) -> Coverage:
    """Return the coverage report, in the order of ``model.named_parameters()``."""
    # kept: parameters whose per-sample gradients the memory budget keeps. reduced: the planner of a budget below 1.
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
        path, _, own = name.rpartition(".")
        used = by_name.get(name, [])
        statistics = [item for site in used for item in site.statistics.values() if _bears(item, name, sizes)]
        bought = name in kept and strategy == "bookkeeping"
        if bought:
            statistics = [_kept(item) for item in statistics]
        measure = _Measure(name, statistics, strategy, reduced)
        statistics = measure.statistics
        inputs.update({item.input_key: item.input_elements * item.itemsize for item in statistics})
        rows.append(
            CoverageRow(
                path,
                type(model.get_submodule(path)).__name__,
                own,
                tuple(parameter.shape),
                _joined(f"{site.operation}: {site.forms.get(name, '')}" for site in used) or NOT_USED,
                _joined(_rung(site, name) for site in used),
                measure.plan + " (budget)" * bought,
                measure.cost(parameter.numel()),
                _joined(_axes(site) for site in used if site.chosen is not None),
            )
        )
    parameters = sum(p.numel() * p.element_size() * (2 if p.requires_grad else 1) for p in model.parameters())
    base_bytes = parameters + sum(inputs.values())
    share = None if reduced is None or reduced.latest is None else reduced.latest.share
    return Coverage(rows, strategy=strategy, base_bytes=base_bytes, unchecked=unchecked, expected_share=share)


class _Measure:
    """How one parameter is handled, and its cost, where a memory budget may decide."""

    def __init__(self, name: str, found: Sequence[Statistics], strategy: str, reduced: BlockPlanner | None) -> None:
        blocks = () if reduced is None or reduced.latest is None else reduced.latest.blocks
        self._again = any(name.startswith(f"{block}.") for block in blocks)
        self._twice = reduced is not None and name in reduced.dropped
        self._strategy = "ghost" if self._twice else strategy
        holding = AS_THEY_ARE if reduced is None or reduced.latest is None or self._twice else reduced.latest.holding
        self._rounded, self._away = name in holding.rounded, name in holding.offloaded
        # An ordinary step runs nothing again: the budget does.
        self.statistics = list(found) if reduced is None else [replace(item, recomputed=False) for item in found]

    @property
    def plan(self) -> str:
        """The plan in a few words."""
        plan = _joined(plan_of(item, strategy=self._strategy) for item in self.statistics)
        held = ", held in bfloat16" * self._rounded + ", held on the host" * self._away
        return plan + held + ", block run again" * (self._again and bool(plan)) + ", two backwards" * self._twice

    def cost(self, count: int) -> Cost:
        """Return the cost of ``count`` elements, with the block's forward if it is run once more in every backward."""
        product = sum(item.flops for arrived in self.statistics for item in arrived.products)
        times = self._again * (1 + self._twice)
        cost = cost_of(self.statistics, count=count, strategy=self._strategy) + Cost(private=times * product)
        return replace(cost, held=0 if self._away else cost.held // 2 if self._rounded else cost.held)


def _kept(arrived: Statistics) -> Statistics:
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


def _axes(site: CallSite) -> str:
    assert site.chosen is not None
    kind, axis = site.chosen
    folded = {"major": "folded into axis {}, sample by sample", "minor": "folded into axis {}, samples alternating"}
    return folded.get(kind, "axis {}").format(axis)
