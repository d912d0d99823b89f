"""A report as Markdown, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEADER = (
    "| engine | step, ms | time | CPU time | GFLOP | FLOPs | memory, MB | error |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|\n"
)


def _times(value: float) -> str:
    return f"{value:.2f}×"


def _row(row: Mapping[str, Any]) -> str:
    if row["status"] != "ok":
        # A wrong engine's speed would be read as a figure, so there is none.
        why = f"error {row['error']:.0e}" if row["status"] == "wrong" else row["problem"].splitlines()[0][:80]
        return f"| {row['title']} | {row['status']}: {why} | | | | | | |\n"
    error = f"{row['error']:.0e}" if "error" in row else ""
    memory = (row["peak_bytes"] - row["loaded_bytes"]) / 2**20
    cells = [
        row["title"],
        f"{row['wall_seconds'] * 1e3:.1f}",
        _times(row["wall_ratio"]),
        _times(row["cpu_ratio"]),
        f"{row['flops'] / 1e9:.2f}",
        _times(row["flops_ratio"]),
        f"{memory:.0f}",
        error,
    ]
    return f"| {' | '.join(cells)} |\n"


def machine_line(report: Mapping[str, Any]) -> str:
    """Say in one line what was measured on.

    Args:
        report: A report as read from its file.

    Returns:
        Hardware, versions and commit.
    """
    about = report["machine"]
    where = f"{about['gpu']}, " if "gpu" in about else ""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    commit = (about["commit"] or "unknown")[:10] + (" with changes" if about["changed_since_commit"] else "")
    return (
        f"{where}{about['cpu']}, {about['cores']} cores ({about['threads']} threads), {about['memory_gib']} GiB, "
        f"{about['os']}; Python {about['python']}, {versions}; commit {commit}, {report['date']}."
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of one task.

    Args:
        rows: The task's engines.

    Returns:
        Markdown.
    """
    return HEADER + "".join(_row(row) for row in rows)


def markdown(report: Mapping[str, Any]) -> str:
    """The whole report.

    Args:
        report: A report as read from its file.

    Returns:
        Markdown, one table a task.
    """
    parts = [f"`{report['command']}` on {machine_line(report)}\n"]
    if report["quick"]:
        parts.append("A quick run on small models: it shows that everything runs, not how fast.\n")
    for task in report["tasks"]:
        clipped = f"{task['parameters']:,} parameters, C = {task['max_grad_norm']:.3g}, {task['rounds']} rounds"
        parts.append(f"**{task['title']}** ({clipped})\n\n{table(task['engines'])}")
    parts.append(
        "A step is forward, backward and clipping, float32. time, CPU time, FLOPs: times the non-private step, the "
        "first two as the median over rounds in which every engine ran once. memory: peak above the loaded model, in a "
        "process of its own. error: of the clipped sum against one-sample autograd in float64, largest over "
        "parameters.\n"
    )
    return "\n".join(parts)
