"""A report as a picture: bars for a model at one batch size, lines over several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

COLOURS = {
    "nonprivate": "#8d99ae",
    "bookkeeping": "#012a4a",
    "ghost": "#2a6f97",
    "fast": "#61a5c2",
    "hooks": "#a9d6e5",
    "opacus-gsm": "#7f4f24",
    "opacus-hooks": "#c77d2e",
    "opacus-fast": "#e0a458",
    "opacus-ghost": "#f2cc8f",
    "opacus-functorch": "#9c6644",
    "opacus-ew": "#ddb892",
    "torch-func": "#6a994e",
}
Case = Mapping[str, Any]
Row = Mapping[str, Any]
PANELS = {
    "time, × non-private": "wall_ratio",
    "CPU time, × non-private": "cpu_ratio",
    "FLOPs, × non-private": "flops_ratio",
    "memory above the model, MB": "megabytes",
    "largest batch": "largest_batch",
}
MOST_FLOPS = 100.0


def _value(row: Row, key: str) -> float | None:
    if key == "megabytes":
        return (row["peak_bytes"] - row["loaded_bytes"]) / 2**20 if "peak_bytes" in row else None
    return row.get(key)


def _rows(case: Case) -> list[Row]:
    return [row for row in case["engines"] if _value(row, "wall_ratio") is not None or "largest_batch" in row]


def _panels(cases: Sequence[Case]) -> dict[str, str]:
    """The panels for which there is a figure."""
    rows = [row for case in cases for row in _rows(case)]
    found = {}
    for title, key in PANELS.items():
        values = [value for value in (_value(row, key) for row in rows) if value is not None]
        # A model without products, an embedding, has a base that nothing can be compared with.
        if values and not (key == "flops_ratio" and max(values) > MOST_FLOPS):
            found[title] = key
    return found


def _label(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _finish_bars(axes: Any, bars: Any, labels: Sequence[str]) -> None:
    axes.bar_label(bars, labels=labels, padding=3, fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.2)


def _finish(axes: Any, title: str, *, first: bool) -> None:
    if not first:
        axes.set_yticklabels([])
    axes.set_title(title, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _bars(axes: Any, case: Case, key: str) -> None:
    rows = _rows(case)
    values = [_value(row, key) or 0.0 for row in rows]
    bars = axes.barh([row["title"] for row in rows], values, color=[COLOURS[row["name"]] for row in rows])
    _finish_bars(axes, bars, ["–" if _value(row, key) is None else _label(_value(row, key) or 0.0) for row in rows])


def _lines(axes: Any, cases: Sequence[Case], key: str) -> None:
    for first in cases[0]["engines"]:
        points = []
        for case in cases:
            row = next(row for row in case["engines"] if row["name"] == first["name"])
            value = _value(row, key)
            if value is not None:
                points.append((case["batch_size"], value))
        if points:
            axes.plot(*zip(*points, strict=True), "o-", ms=3, label=first["title"], color=COLOURS[first["name"]])
    batch_sizes = [case["batch_size"] for case in cases]
    axes.set_xscale("log", base=2)
    axes.set_xticks(batch_sizes, [str(batch_size) for batch_size in batch_sizes])
    axes.set_xlabel("batch size", fontsize=8)
    axes.set_ylim(bottom=0)


def _draw(figure: Any, cases: Sequence[Case]) -> None:
    panels = _panels(cases)
    figure.suptitle(cases[0]["title"] + ("" if len(cases) > 1 else f", B {cases[0]['batch_size']}"), fontsize=9)
    if not panels:
        figure.text(0.5, 0.4, "no engine was timed", ha="center", fontsize=8)
        return
    every = list(figure.subplots(1, len(panels), squeeze=False).flat)
    for axes, (title, key) in zip(every, panels.items(), strict=True):
        if len(cases) > 1:
            _lines(axes, cases, key)
        else:
            _bars(axes, cases[0], key)
        _finish(axes, title, first=len(cases) > 1 or axes is every[0])
    if len(cases) > 1:
        # Beside the panels: on them it would hide lines.
        figure.legend(*every[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7, frameon=False)


def _stages(figure: Any, part: Mapping[str, Any]) -> None:
    """Memory by stage, a panel for each."""
    rows = [row for row in part["engines"] if "megabytes" in row]
    figure.suptitle(f"{part['title']}: memory above what a stage began with, MB", fontsize=9)
    if not rows:
        return
    stages = list(rows[0]["megabytes"])
    every = list(figure.subplots(1, len(stages), squeeze=False).flat)
    for axes, stage in zip(every, stages, strict=True):
        values = [row["megabytes"][stage] for row in rows]
        bars = axes.barh([row["title"] for row in rows], values, color=[COLOURS[row["name"]] for row in rows])
        _finish_bars(axes, bars, [_label(value) for value in values])
        _finish(axes, stage, first=axes is every[0])


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw a row of panels for each model, and for memory by stage.

    Args:
        report: A report as read from its file.
        path: The PNG file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = [list(cases) for _, cases in groupby(report["cases"], key=lambda case: case["group"])]
    heights = [3.2 if len(cases) > 1 else 2.3 for cases in groups]
    stages = list(report.get("stages", ()))
    heights += [2.3] * len(stages)
    figure = pyplot.figure(figsize=(13, sum(heights)), layout="constrained")
    parts = iter(figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).flat)
    for cases in groups:
        _draw(next(parts), cases)
    for stage in stages:
        _stages(next(parts), stage)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
