"""A report as a picture: what each engine costs, beside the non-private step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Row, memory_ratio

# ghostclip in blues, Opacus in oranges, everybody else in greens and purples.
COLOURS = {
    "nonprivate": "#8d99ae",
    "bookkeeping": "#012a4a",
    "ghost": "#2a6f97",
    "fast": "#61a5c2",
    "hooks": "#a9d6e5",
    "opacus-hooks": "#c77d2e",
    "opacus-ghost": "#7f4f24",
    "opacus-functorch": "#e0a458",
    "opacus-ew": "#f2cc8f",
    "torch-func": "#588157",
    "backpack": "#a3b18a",
    "jax": "#7b5ea7",
}
# Beyond this, bars of ordinary length would be too short to compare.
LINEAR_UP_TO = 8.0
Panels = dict[str, list[float | None]]


def _panels(rows: Sequence[Row]) -> Panels:
    """Title of each panel with its values."""
    return {
        "time, × non-private": [row["wall_ratio"] for row in rows],
        "CPU time, × non-private": [row["cpu_ratio"] for row in rows],
        "FLOPs, × non-private": [row["flops_ratio"] for row in rows],
        "memory above the model, × non-private": [memory_ratio(row, rows) for row in rows],
    }


def _draw(figure: Any, task: Mapping[str, Any]) -> None:
    """Draw one task: a panel for each measure, a bar for each engine that was right."""
    rows = [row for row in task["engines"] if row["status"] == "ok"]
    contents = _panels(rows)
    figure.suptitle(task["title"], fontsize=10)
    for index, (panel, (title, values)) in enumerate(
        zip(figure.subplots(1, len(contents)), contents.items(), strict=True)
    ):
        bars = panel.barh(
            [row["title"] for row in rows],
            [value or 0.0 for value in values],
            color=[COLOURS.get(row["name"], "#444444") for row in rows],
        )
        labels = ["no figure" if value is None else f"{value:.2f}" for value in values]
        panel.bar_label(bars, labels, padding=3, fontsize=8)
        panel.axvline(1.0, color="#d62828", linewidth=0.8, linestyle="--")
        panel.set_title(title, fontsize=9)
        panel.invert_yaxis()
        panel.spines[["top", "right", "left"]].set_visible(False)
        _scale(panel, max([value or 0.0 for value in values], default=1.0))
        panel.tick_params(labelsize=8, left=False, labelleft=index == 0)


def _scale(panel: Any, most: float) -> None:
    """Choose the axis: logarithmic, and said so, where one engine is far beyond the others."""
    if most <= LINEAR_UP_TO:
        panel.set_xlim(0, 1.22 * max(most, 1.0))
        return
    panel.set_xscale("log")
    panel.set_xlim(0.4, most**1.3)
    panel.set_xlabel("logarithmic", fontsize=7)


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw bars, a row of panels for each task."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = report["tasks"]
    heights = [0.8 + 0.2 * len(task["engines"]) for task in tasks]
    figure = pyplot.figure(figsize=(13, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(tasks), 1, squeeze=False, height_ratios=heights)
    for part, task in zip(parts.flat, tasks, strict=True):
        _draw(part, task)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
