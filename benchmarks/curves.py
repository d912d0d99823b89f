"""Curves as pictures: a line for each engine, a panel for each measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plot import COLOURS
from benchmarks.report import memory_ratio

Points = Sequence[Mapping[str, Any]]
MEASURES = {
    "time, × non-private": lambda row, _: row.get("wall_ratio"),
    "FLOPs, × non-private": lambda row, _: row.get("flops_ratio"),
    "memory, × non-private": memory_ratio,
}
# ghostclip's lines are drawn through, those of others are broken.
OTHERS = ("opacus", "torch", "jax", "backpack")


def _lines(points: Points, measure: Any, over: str) -> dict[str, tuple[list[int], list[float]]]:
    """Each engine's name with the places where it has a value, and the values."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for point in points:
        for row in point["engines"]:
            # Ordinary training is the line at one.
            value = measure(row, point["engines"]) if row["status"] == "ok" and row["private"] else None
            if value is not None:
                places, values = found.setdefault(row["name"], ([], []))
                places.append(point[over])
                values.append(value)
    return found


def _labels(points: Points, over: str) -> dict[str, str]:
    """Each private engine's name with its title, and where it has no figures."""
    titles = {row["name"]: row["title"] for point in points for row in point["engines"] if row["private"]}
    missing: dict[str, list[str]] = {name: [] for name in titles}
    for point in points:
        for row in point["engines"]:
            if row["private"] and row["status"] != "ok":
                missing[row["name"]].append(str(point[over]))
    return {
        name: title + (f"\n(none at {over} = {', '.join(missing[name])})" if missing[name] else "")
        for name, title in titles.items()
    }


def _draw(panel: Any, points: Points, measure: Any, over: str) -> None:
    lines, labels = _lines(points, measure, over), _labels(points, over)
    if not lines:
        panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center", fontsize=9)
    most = 1.0
    for name, label in labels.items():
        places, values = lines.get(name, ([], []))
        style = "--" if name.startswith(OTHERS) else "-"
        width = 2.4 if name == "bookkeeping" else 1.4
        panel.plot(places, values, style, color=COLOURS.get(name, "#444444"), linewidth=width, marker="o", label=label)
        most = max([most, *values])
    panel.axhline(1.0, color="#d62828", linewidth=0.8, linestyle=":")
    panel.set_xscale("log", base=2)
    panel.set_xlim(points[0][over] / 1.15, points[-1][over] * 1.15)
    panel.set_xticks([point[over] for point in points], [str(point[over]) for point in points], fontsize=8)
    panel.minorticks_off()
    if most > 8:
        panel.set_yscale("log", base=2)
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw a row of panels for each curve of a report.

    Args:
        report: As `benchmarks.scaling` writes it.
        path: The PNG file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = report["curves"]
    figure, rows = pyplot.subplots(
        len(curves), len(MEASURES), figsize=(14, 3.4 * len(curves)), layout="constrained", squeeze=False
    )
    for row, curve in zip(rows, curves, strict=True):
        for panel, (title, measure) in zip(row, MEASURES.items(), strict=True):
            _draw(panel, curve["points"], measure, curve["over"])
            panel.set_title(title, fontsize=9)
            panel.set_xlabel(curve["title"], fontsize=8)
        lines, titles = row[0].get_legend_handles_labels()
        row[-1].legend(lines, titles, fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
