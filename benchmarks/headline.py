"""The few figures of a report that a reader looks for: book-keeping beside ordinary training and the fastest peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines import STRATEGIES
from benchmarks.report import LEGEND, Row, absent, heading, memory_ratio, table, task_title, times, why_not

OURS = "bookkeeping"
HEADER = (
    "| model and batch | not private, ms | ghostclip: time | FLOPs | memory | fastest other | time | FLOPs | memory |\n"
    "|---|---:|---:|---:|---:|---|---:|---:|---:|\n"
)


def fastest_peer(rows: Sequence[Row]) -> Row | None:
    """The private engine of others that was right and took the least time."""
    others = [row for row in rows if row["private"] and row["name"] not in STRATEGIES and row["status"] == "ok"]
    return min(others, key=lambda row: row["wall_ratio"], default=None)


def _cells(row: Row | None, rows: Sequence[Row]) -> list[str]:
    if row is None or row["status"] != "ok":
        return ["", "", ""]
    return [times(row["wall_ratio"]), times(row["flops_ratio"]), times(memory_ratio(row, rows))]


def summary(report: Mapping[str, Any]) -> str:
    """One line for each task."""
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
    """The summary of all tasks and the whole table of the first one."""
    first = report["tasks"][0]
    parts = [heading(report), summary(report), f"{task_title(first)}\n\n{table(first['engines'])}", LEGEND]
    return "\n".join([*parts, absent(report)] if absent(report) else parts)


# Models of the README's table and picture: one of each kind, by what their titles begin with.
SHOWN = (
    "GPT, 4 layers, d 256, 4 heads, T 512",
    "ResNet",
    "MNIST CNN (26,010 parameters), B 256",
    "MLP",
    "Embedding, LSTM",
)
# What "auto" becomes in mid-training where the loss is known.
GRAPHS = "ghostclip, graphs"
# Beside ordinary training: (name in tables, does an engine belong to it).
SIDES: dict[str, Callable[[Row], bool]] = {
    "ghostclip": lambda row: row["name"] == OURS,
    GRAPHS: lambda row: row["name"] == "graph",
    "Opacus, its fastest mode": lambda row: row["name"].startswith("opacus"),
    "torch.func": lambda row: row["name"] == "torch-func",
}


def beside(report: Mapping[str, Any]) -> list[tuple[str, dict[str, tuple[float, float | None]]]]:
    """What a step costs, over the ordinary one, on one model of each kind."""
    found = []
    for title in SHOWN:
        task = next(task for task in report["tasks"] if task["title"].startswith(title))
        rows = [row for row in task["engines"] if row["status"] == "ok"]
        sides = {}
        for side, belongs in SIDES.items():
            fastest = min(filter(belongs, rows), key=lambda row: row["wall_ratio"], default=None)
            if fastest is not None:
                sides[side] = (fastest["wall_ratio"], memory_ratio(fastest, rows))
        found.append((task["title"], sides))
    return found


def short_table(report: Mapping[str, Any]) -> str:
    """The README's table: time and memory over ordinary training."""
    lines = [f"| time / memory, × ordinary training | {' | '.join(SIDES)} |\n", f"|---|{'---:|' * len(SIDES)}\n"]
    for title, sides in beside(report):
        cells = [" / ".join(f"{part:.2f}" for part in sides.get(side, ()) if part) or "cannot" for side in SIDES]
        lines.append(f"| {title} | {' | '.join(cells)} |\n")
    return "".join(lines)


def short_plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw the README's picture: a line a model, a point an engine, ordinary training at 1."""
    from matplotlib.figure import Figure

    rows = beside(report)
    figure = Figure(figsize=(9.5, 3.4), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    # Told apart by the colour-blind, and in print by their marks (Okabe and Ito 2008).
    looks = {
        "ghostclip": ("#0072B2", "o"),
        GRAPHS: ("#56B4E9", "D"),
        "Opacus, its fastest mode": ("#E69F00", "s"),
        "torch.func": ("#009E73", "^"),
    }
    for panel, number, name in zip(panels, (0, 1), ("time", "peak memory"), strict=True):
        for lower, (side, (colour, mark)) in enumerate(looks.items()):
            # A little below each other, so that none hides another.
            places = [(place + 0.2 * (lower - 1), sides) for place, (_, sides) in enumerate(rows) if side in sides]
            points = [(sides[side][number], place) for place, sides in places if sides[side][number]]
            panel.plot(
                [x for x, _ in points], [y for _, y in points], mark, color=colour, label=side, markersize=8, alpha=0.9
            )
        panel.axvline(1.0, color="#444444", linewidth=0.8, linestyle="--")
        panel.set_xscale("log")
        ticks = [1, 2, 5, 10, 20, 50, 100]
        panel.set_xticks(ticks, [f"{tick}×" for tick in ticks])
        panel.set_xticks([], minor=True)
        panel.set_xlabel(f"{name} of a step, × ordinary (log scale)", fontsize=9)
        panel.grid(axis="x", linewidth=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(rows)), [title.replace(", d 256, 4 heads", "") for title, _ in rows], fontsize=9)
    panels[0].invert_yaxis()
    figure.legend(
        *panels[0].get_legend_handles_labels(), fontsize=9, ncols=len(looks), loc="outside upper right", frameon=False
    )
    figure.savefig(path)
