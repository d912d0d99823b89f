"""A report as Markdown, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import machine_line

HEADER = (
    "| engine | step, ms | time | CPU time | GFLOP | FLOPs | memory, MB | memory | first steps, MB | error |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n"
)
Row = Mapping[str, Any]
MEGABYTE = 2**20


def times(value: float | None) -> str:
    """How a ratio is written."""
    return "" if value is None else f"{value:.2f}×"


def held_bytes(row: Row) -> int | None:
    """Bytes above the model in later steps, or of the first where only they were measured; None without either."""
    if "peak_bytes" not in row:
        return None
    return row.get("steady_bytes", row["peak_bytes"]) - row["loaded_bytes"]


def memory_ratio(row: Row, rows: Sequence[Row]) -> float | None:
    """Memory over that of the non-private engine."""
    own = held_bytes(row)
    base = next((held_bytes(other) for other in rows if not other["private"]), None)
    return own / base if own is not None and base and base >= MEGABYTE else None


def why_not(row: Row) -> str:
    """Why an engine has no figures."""
    # A wrong engine's speed would be read as a figure, so there is none.
    why = (
        f"error {row['error']:.0e}"
        if row["status"] == "wrong"
        else (row["problem"].splitlines() or ["no reason given"])[0][:80]
    )
    return f"{row['status']}: {why}"


def _row(row: Row, rows: Sequence[Row]) -> str:
    if row["status"] != "ok":
        return f"| {row['title']} | {why_not(row)} | | | | | | | | |\n"
    memory = held_bytes(row)
    cells = [
        row["title"],
        f"{row['wall_seconds'] * 1e3:.1f}",
        times(row["wall_ratio"]),
        times(row["cpu_ratio"]),
        "" if row["flops"] is None else f"{row['flops'] / 1e9:.2f}",
        times(row["flops_ratio"]),
        "" if memory is None else f"{memory / MEGABYTE:.0f}",
        times(memory_ratio(row, rows)),
        f"{(row['peak_bytes'] - row['loaded_bytes']) / MEGABYTE:.0f}" if "peak_bytes" in row else "",
        f"{row['error']:.0e}" if "error" in row else "",
    ]
    return f"| {' | '.join(cells)} |\n"


def table(rows: Sequence[Row]) -> str:
    """The table of one task."""
    return HEADER + "".join(_row(row, rows) for row in rows)


def heading(report: Mapping[str, Any]) -> str:
    """Command, machine, and a warning where the run was a quick one."""
    parts = [f"`{report['command']}` on {machine_line(report)}\n"]
    if report["quick"]:
        parts.append("A quick run on small models: it shows that everything runs, not how fast.\n")
    return "\n".join(parts)


def task_title(task: Mapping[str, Any]) -> str:
    """A task's title with what it was run with."""
    clipped = f"{task['parameters']:,} parameters, C = {task['max_grad_norm']:.3g}, {task['rounds']} rounds"
    return f"**{task['title']}** ({clipped})"


LEGEND = (
    "A step is forward, backward and clipping, float32. time, CPU time, FLOPs, memory: times the non-private step, the "
    "first two as the median over rounds in which every engine ran once. memory: peak of later steps above the loaded "
    "model, in a process of its own; first steps: the peak of the first four, in which a model is analysed. error: of "
    "the clipped sum against one-sample autograd in float64, largest over parameters. JAX: compiling is not timed, and "
    "its FLOPs are XLA's count before optimisation, elementwise operations included.\n"
)


def absent(report: Mapping[str, Any]) -> str:
    """Who is missing from a report, and what is quoted in their place."""
    lines = [f"Not installed: {peer['title']} (`{peer['install']}`).\n" for peer in report.get("missing", ())]
    lines += [
        f"{quoted['title']} {quoted['why']}; measured elsewhere on the first model: "
        f"{quoted['flops_ratio']}× the FLOPs, {quoted['wall_ratio']}× the time (quoted, not measured in this run).\n"
        for quoted in report.get("quoted", ())
    ]
    return "\n".join(lines)


def markdown(report: Mapping[str, Any]) -> str:
    """The whole report."""
    parts = [heading(report)]
    parts += [f"{task_title(task)}\n\n{table(task['engines'])}" for task in report["tasks"]]
    parts += [LEGEND, absent(report)]
    return "\n".join(part for part in parts if part)
