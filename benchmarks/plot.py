"""A report as a picture: what each engine costs, beside the non-private step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = {"ghostclip": "#2a6f97", "Opacus": "#c77d2e", "PyTorch": "#8d99ae"}


def _panels(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[float], str]]:
    """Title of each panel with its values and how a value is written at its bar."""
    megabytes = [(row["peak_bytes"] - row["loaded_bytes"]) / 2**20 for row in rows]
    return {
        "time, × non-private": ([row["wall_ratio"] for row in rows], "%.2f"),
        "CPU time, × non-private": ([row["cpu_ratio"] for row in rows], "%.2f"),
        "FLOPs, × non-private": ([row["flops_ratio"] for row in rows], "%.2f"),
        "memory above the model, MB": (megabytes, "%.0f"),
    }


def _draw(figure: Any, task: Mapping[str, Any]) -> None:
    """Draw one task: a panel for each measure, a bar for each engine that was right."""
    rows = [row for row in task["engines"] if row["status"] == "ok"]
    names = [row["title"] for row in rows]
    colours = [COLOURS[name.split()[0].strip(",")] for name in names]
    contents = _panels(rows)
    figure.suptitle(task["title"], fontsize=10)
    for panel, (title, (values, form)) in zip(figure.subplots(1, len(contents)), contents.items(), strict=True):
        panel.bar_label(panel.barh(names, values, color=colours), fmt=form, padding=3, fontsize=8)
        panel.set_title(title, fontsize=9)
        panel.invert_yaxis()
        panel.margins(x=0.2)
        panel.tick_params(labelsize=8, left=False)
        panel.spines[["top", "right", "left"]].set_visible(False)
        if not panel.get_subplotspec().is_first_col():
            panel.set_yticklabels([])


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw bars, a row of panels for each task.

    Args:
        report: A report as read from its file.
        path: The PNG file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = report["tasks"]
    figure = pyplot.figure(figsize=(13, 2.6 * len(tasks)), layout="constrained")
    for part, task in zip(figure.subfigures(len(tasks), 1, squeeze=False).flat, tasks, strict=True):
        _draw(part, task)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
