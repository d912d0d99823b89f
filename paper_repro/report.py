"""A report as Markdown, for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from benchmarks.harness import machine_line
from paper_repro import beside_opacus
from paper_repro.cases import Table
from paper_repro.stages import STAGES

Row = Mapping[str, Any]
Cell = Callable[[Row, Mapping[str, Any]], str]
TINY = "Small models and few steps: it shows that everything runs, not how fast.\n"


def amount(row: Row, case: Mapping[str, Any], unit: str) -> str:
    """A row's time in its table's unit.

    Args:
        row: An engine's row.
        case: The case that it belongs to.
        unit: "step", "epoch" or "examples".

    Returns:
        Text.
    """
    seconds = row["wall_seconds"]
    if unit == "epoch":
        return _short(seconds * math.ceil(case["epoch"] / case["batch_size"]))
    return _short(case["batch_size"] / seconds) if unit == "examples" else _short(1e3 * seconds)


def _short(value: float) -> str:
    """Three digits, or all of a whole number's."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(name: str) -> Cell:
    return lambda row, _case: f"{row[name]:.2f}×" if row.get(name) is not None else ""


def _memory(row: Row, _case: Mapping[str, Any]) -> str:
    if "peak_bytes" in row:
        return _short((row["peak_bytes"] - row["loaded_bytes"]) / 2**20)
    return row.get("memory_problem", "")


def _largest(row: Row, _case: Mapping[str, Any]) -> str:
    if "largest_batch" in row:
        return f"{'≥ ' if row['largest_batch_is_limit'] else ''}{row['largest_batch']}"
    return row.get("capacity_problem", "")


def _at_largest(row: Row, _case: Mapping[str, Any]) -> str:
    rate = row.get("examples_per_second_at_largest")
    return _short(rate) if rate else ""


def _error(row: Row, _case: Mapping[str, Any]) -> str:
    return f"{row['error']:.0e}" if "error" in row else ""


UNITS = {"step": "step, ms", "epoch": "epoch, s", "examples": "examples/s"}


def _columns(table: Table) -> dict[str, Cell]:
    """Titles of the columns after the first, with what stands in them for an engine that was timed."""
    columns: dict[str, Cell] = {UNITS[table.unit]: lambda row, case: amount(row, case, table.unit)}
    columns |= {"time": _ratio("wall_ratio"), "CPU time": _ratio("cpu_ratio"), "FLOPs": _ratio("flops_ratio")}
    if table.letter != "B":
        columns["noise and update, ms"] = lambda row, _: _short(1e3 * row["update_seconds"])
    if table.memory:
        columns["memory, MB"] = _memory
    if table.extra == "capacity":
        columns |= {"largest batch": _largest, "examples/s there": _at_largest}
    columns["error"] = _error
    if table.references:
        columns["published"] = lambda row, _: row.get("published", "")
    return columns


def _why(row: Row) -> str:
    if row["status"] == "wrong":
        return f"wrong: error {row['error']:.0e}"
    said = {"slow": "left out", "cannot": "not for this model"}
    return f"{said.get(row['status'], 'failed')}: {row['problem']}"


# What still stands in the row of an engine that was not timed.
_WITHOUT_TIME = ("largest batch", "examples/s there", "published")


def _line(row: Row, case: Mapping[str, Any], columns: Mapping[str, Cell]) -> str:
    title = row["title"] + (f" ({row['remark']})" if "remark" in row else "")
    if row["status"] == "ok" and "wall_seconds" in row:
        cells = [cell(row, case) for cell in columns.values()]
    else:
        cells = [cell(row, case) if name in _WITHOUT_TIME else "" for name, cell in columns.items()]
        cells[0] = _why(row) if row["status"] != "ok" else "no time: the non-private step failed"
    return _joined([title, *cells])


def _joined(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"


def _head(titles: Sequence[str]) -> str:
    return _joined(["engine", *titles]) + "|---|" + "---:|" * len(titles) + "\n"


def _by_batch_size(cases: Sequence[Mapping[str, Any]], table: Table) -> str:
    """One table for a model at several batch sizes: rows are engines."""
    lines = []
    for index, first in enumerate(cases[0]["engines"]):
        cells = []
        for case in cases:
            row = case["engines"][index]
            timed = row["status"] == "ok" and "wall_seconds" in row
            ratios = f"{row['wall_ratio']:.2f}× ({row['cpu_ratio']:.2f}×)" if timed else ""
            cells.append(f"{amount(row, case, table.unit)}, {ratios}" if timed else _why(row))
        lines.append(_joined([first["title"], *cells, _error(first, cases[0])]))
    columns = [f"B {case['batch_size']}" for case in cases]
    said = f"{UNITS[table.unit]}, time and, in brackets, CPU time, times the non-private step"
    return f"{said}\n\n" + _head([*columns, "error"]) + "".join(lines)


def _group(cases: Sequence[Mapping[str, Any]], table: Table) -> str:
    head = f"**{cases[0]['title']}**"
    if len(cases) > 1 and not table.memory and not table.references:
        rounds = ", ".join(str(case["rounds"]) for case in cases)
        return f"{head} (rounds: {rounds})\n\n{_by_batch_size(cases, table)}"
    parts = []
    columns = _columns(table)
    for case in cases:
        lines = "".join(_line(row, case, columns) for row in case["engines"])
        parts.append(f"{head}, B {case['batch_size']} ({case['rounds']} rounds)\n\n{_head(list(columns))}{lines}")
    return "\n".join(parts)


def _stages(found: Sequence[Mapping[str, Any]]) -> str:
    """Memory of the MLP, a table for each batch size."""
    parts = []
    for part in found:
        lines = []
        for row in part["engines"]:
            cells = [_short(row["megabytes"][stage]) for stage in STAGES] if "megabytes" in row else []
            lines.append(_joined([row["title"], *(cells or [row["problem"], *[""] * (len(STAGES) - 1)])]))
        parts.append(f"**{part['title']}**: MB by which each stage's peak exceeds what it began with\n\n")
        parts.append(_head(STAGES) + "".join(lines) + "\n")
    parts.append(
        "The forward holds the loss as well, and both passes of a two-pass engine are one backward. On a CPU it is "
        "resident memory, to within a MB or so.\n"
    )
    return "".join(parts)


LEGEND = (
    "time, CPU time, FLOPs: times the non-private step, the first two as the median over rounds in which every engine "
    "ran once. error: of the clipped sum against one-sample autograd in float64, largest over parameters, on a few "
    "samples of the batch; an engine beyond the tolerance (1e-5 for ghostclip, or 1e-10 in float64 where float32 "
    "itself rounds more; 1e-3 for others) is not timed.\n"
)


def markdown(report: Mapping[str, Any], table: Table) -> str:
    """The whole report.

    Args:
        report: A report as read from its file.
        table: What was measured.

    Returns:
        Markdown: ours first, then what was published.
    """
    parts = [f"# Table {table.letter}: {table.title}\n", f"`{report['command']}` on {machine_line(report)}\n"]
    if report["size"] == "tiny":
        parts.append(TINY)
    parts += [f"{note}\n" for note in [*table.notes, *report["notes"]]]
    parts += [_group(list(cases), table) for _, cases in groupby(report["cases"], key=lambda case: case["group"])]
    if report.get("stages"):
        parts.append(_stages(report["stages"]))
    parts.append(LEGEND)
    parts.append(beside_opacus.markdown(report.get("beside_opacus", ())))
    if table.references:
        parts.append("## Published, on other hardware\n")
        parts += [reference.markdown() for reference in table.references]
    return "\n".join(parts)
