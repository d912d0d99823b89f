"""Whether ghostclip was faster than the fastest mode of Opacus, cell by cell: a model at a batch size is a cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.engines import STRATEGIES
from benchmarks.timing import ratio

DEFAULT = "bookkeeping"
# It forms per-sample gradients and clips nothing, so it does less than the others.
UNCLIPPED = "opacus-gsm"
CLOCKS = ("cpu", "wall")
Row = Mapping[str, Any]


def _fastest(rows: Sequence[Row], clock: str) -> Row:
    return min(rows, key=lambda row: row[f"{clock}_ratio"])


def _by_clock(ours: Sequence[Row], opacus: Sequence[Row], clock: str) -> dict[str, Any]:
    mode, best = _fastest(opacus, clock), _fastest(ours, clock)
    base = mode["rounds"][clock]
    default = [ratio(row["rounds"][clock], base) for row in ours if row["name"] == DEFAULT]
    return {
        "mode": mode["title"],
        "default": default[0] if default else None,
        "best": ratio(best["rounds"][clock], base),
        "best_title": best["title"],
    }


def cells(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare in every cell where both were timed.

    Args:
        cases: As in a report.

    Returns:
        For each cell its title and, by clock ("cpu", "wall"), the fastest mode of Opacus and what book-keeping and the
        best strategy took, as multiples of that mode (median over rounds).
    """
    found = []
    for case in cases:
        timed = [row for row in case["engines"] if row["status"] == "ok" and "wall_ratio" in row]
        ours = [row for row in timed if row["name"] in STRATEGIES]
        opacus = [row for row in timed if row["name"].startswith("opacus") and row["name"] != UNCLIPPED]
        if ours and opacus:
            cell: dict[str, Any] = {"title": case["title"], "batch_size": case["batch_size"]}
            found.append(cell | {clock: _by_clock(ours, opacus, clock) for clock in CLOCKS})
    return found


def _count(found: Sequence[Mapping[str, Any]], what: str, clock: str) -> str:
    values = [cell[clock][what] for cell in found if cell[clock][what] is not None]
    return f"{sum(value < 1 for value in values)} of {len(values)}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def markdown(found: Sequence[Mapping[str, Any]]) -> str:
    """The comparison, for people.

    Args:
        found: What `cells` gave.

    Returns:
        Markdown: a line for each cell, then how many of them ghostclip was faster in; empty if there are none.
    """
    if not found:
        return ""
    lines = [
        "## Beside Opacus's fastest mode\n\n",
        "Time of that mode's step is 1×; below 1× ghostclip is faster. Wall time in brackets.\n\n",
        "| cell | Opacus's fastest | ghostclip bookkeeping | ghostclip's fastest | faster? |\n",
        "|---|---|---:|---:|---|\n",
    ]
    for cell in found:
        cpu, wall = cell["cpu"], cell["wall"]
        faster = "yes" if (cpu["default"] or cpu["best"]) < 1 else "another strategy" if cpu["best"] < 1 else "no"
        modes = cpu["mode"] if cpu["mode"] == wall["mode"] else f"{cpu['mode']} ({wall['mode']})"
        default = f"{_times(cpu['default'])} ({_times(wall['default'])})" if cpu["default"] else "not timed"
        best = f"{cpu['best_title'].removeprefix('ghostclip ')} {_times(cpu['best'])} ({_times(wall['best'])})"
        lines.append(f"| {cell['title']}, B {cell['batch_size']} | {modes} | {default} | {best} | {faster} |\n")
    lines.append(
        f"\n**Faster than Opacus's fastest mode, by CPU time: book-keeping in {_count(found, 'default', 'cpu')} cells, "
        f"ghostclip's fastest strategy in {_count(found, 'best', 'cpu')}. By wall time: "
        f"{_count(found, 'default', 'wall')} and {_count(found, 'best', 'wall')}.**\n"
    )
    return "".join(lines)
