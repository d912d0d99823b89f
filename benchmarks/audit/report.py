"""The audit's results as Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import machine_line

_BROKEN, _WHOLE, _CLAIM = "#d94801", "#08519c", "#555555"
_SHOWN = 40.0


def markdown(report: Mapping[str, Any]) -> str:
    """Write the tables.

    Args:
        report: What was measured.

    Returns:
        Markdown.
    """
    claim = report["claim"]
    lines = [
        f"`{report['command']}` on {machine_line(report)}",
        "",
        f"One step of a two-layer network, σ = {claim['sigma']:g}, whole batch: claimed ε = {claim['epsilon']:.3f} at "
        f"δ = {claim['delta']:g}. Audit: {report['runs']} steps on each of two neighbouring data sets; bounds from "
        f"every tensor and from the whole, together at {100 * claim['confidence']:.0f} % confidence, by the Gaussian "
        "trade-off curve.",
        "",
        "| engine | seen by | measured ε ≥ | claim |",
        "|---|---|---:|---|",
    ]
    for row in report["engines"]:
        seen = ", ".join(f"`{name}`" for name in row["seen_by"]) or "–"
        verdict = "contradicted" if row["contradicted"] else "stands"
        lines.append(
            f"| {row['name'].replace('_', ' ')} | {seen} | {row['epsilon']:.2f} ({row['where']}) | {verdict} |"
        )
    lines += [
        "",
        "What the broken engines are: [tests/audit/mutations.py](../../tests/audit/mutations.py) and "
        "[surrounding_mutations.py](../../tests/audit/surrounding_mutations.py); the checks: "
        "[tests/audit/checks.py](../../tests/audit/checks.py) and "
        "[surroundings.py](../../tests/audit/surroundings.py).",
        "",
        f"The audit itself, on simulated Gaussian mechanisms with μ = 1 (ε = {report['statistics'][0]['truth']:.3f}), "
        "95 % confidence: how often the bound exceeds the truth, and how near it comes.",
        "",
        "| method | scores | above the truth | median bound | 5 % to 95 % |",
        "|---|---|---:|---:|---:|",
    ]
    for row in report["statistics"]:
        lines.append(
            f"| {row['method']} | {row['rows']} | {row['above_the_truth']} of {row['repeats']} | {row['median']:.2f} | "
            f"{row['low']:.2f} to {row['high']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def picture(report: Mapping[str, Any], path: Path) -> None:
    """Draw the measured bounds beside the claim.

    Args:
        report: What was measured.
        path: The PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(reversed(report["engines"]))
    figure = Figure(figsize=(9.0, 0.5 + 0.36 * len(rows)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    values = [min(row["epsilon"], _SHOWN) for row in rows]
    colours = [_BROKEN if row["contradicted"] else _WHOLE for row in rows]
    bars = axes.barh([row["name"].replace("_", " ") for row in rows], values, color=colours)
    labels = [
        f"{row['epsilon']:.1f}{'' if row['contradicted'] or not row['seen_by'] else ', seen by a check'}"
        for row in rows
    ]
    axes.bar_label(bars, labels, padding=6, fontsize=8, zorder=3, backgroundcolor="white")
    claimed = report["claim"]["epsilon"]
    axes.axvline(claimed, color=_CLAIM, linestyle="--", linewidth=1.2)
    axes.set_xlim(0.0, 1.25 * max(values))
    axes.set_xlabel(f"measured lower bound on ε at δ = {report['claim']['delta']:g} (dashed: claimed, {claimed:.2f})")
    axes.tick_params(axis="y", labelsize=8)
    figure.savefig(path, format="png")
