"""The few figures of a report that a reader looks for: book-keeping beside ordinary training and the fastest peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.engines import STRATEGIES
from benchmarks.report import LEGEND, Row, absent, heading, memory_ratio, table, task_title, times, why_not

OURS = "bookkeeping"
HEADER = (
    "| model and batch | not private, ms | ghostclip: time | FLOPs | memory | fastest other | time | FLOPs | memory |\n"
    "|---|---:|---:|---:|---:|---|---:|---:|---:|\n"
)


def fastest_peer(rows: Sequence[Row]) -> Row | None:
    """The private engine of others that was right and took the least time.

    Args:
        rows: A task's rows.

    Returns:
        Its row; None if there is none.
    """
    others = [row for row in rows if row["private"] and row["name"] not in STRATEGIES and row["status"] == "ok"]
    return min(others, key=lambda row: row["wall_ratio"], default=None)


def _cells(row: Row | None, rows: Sequence[Row]) -> list[str]:
    if row is None or row["status"] != "ok":
        return ["", "", ""]
    return [times(row["wall_ratio"]), times(row["flops_ratio"]), times(memory_ratio(row, rows))]


def summary(report: Mapping[str, Any]) -> str:
    """One line for each task.

    Args:
        report: A report as read from its file.

    Returns:
        A Markdown table.
    """
    lines = []
    for task in report["tasks"]:
        rows = task["engines"]
        peer = fastest_peer(rows)
        base = next(row for row in rows if not row["private"])
        ours = next((row for row in rows if row["name"] == OURS), None)
        title = peer["title"] if peer else "none"
        plain = f"{base['wall_seconds'] * 1e3:.1f}" if base["status"] == "ok" else why_not(base)
        cells = [task["title"], plain, *_cells(ours, rows), title, *_cells(peer, rows)]
        lines.append(f"| {' | '.join(cells)} |\n")
    return HEADER + "".join(lines)


def headline(report: Mapping[str, Any]) -> str:
    """The summary of all tasks and the whole table of the first one.

    Args:
        report: A report as read from its file.

    Returns:
        Markdown.
    """
    first = report["tasks"][0]
    parts = [heading(report), summary(report), f"{task_title(first)}\n\n{table(first['engines'])}", LEGEND]
    return "\n".join([*parts, absent(report)] if absent(report) else parts)
