"""The picture of a run: loss above and ε below, over the private steps, as PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ghostclip._files import BLACK, BLUE, ORANGE, PALE, atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Curves:
    """Values to draw: loss per step (``None`` for an empty batch), (step, ε), held-out losses before and after."""

    losses: Sequence[float | None]
    epsilons: Sequence[tuple[int, float]]
    held_out: tuple[float, float]
    target_epsilon: float
    delta: float
    unit: str = "nats per token"


def draw(curves: Curves, path: Path) -> None:
    """Draw and save the picture atomically.

    Privacy:
        The losses are exact functions of the private data; the picture is for whoever may see the data.

    Args:
        curves: What to draw.
        path: The PNG file.
    """
    # The object interface: pyplot would choose a window system and keep global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_losses(upper, curves)
    _draw_epsilon(lower, curves)
    lower.set_xlabel("private step")
    lower.set_xlim(0, max(1, len(curves.losses)))
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")


def _draw_losses(axes: Axes, curves: Curves) -> None:
    steps = [step for step, loss in enumerate(curves.losses, start=1) if loss is not None]
    losses = [loss for loss in curves.losses if loss is not None]
    axes.plot(steps, losses, color=PALE, linewidth=1.0, label="training, each step (not private)")
    axes.plot(steps, smoothed(losses), color=BLUE, linewidth=2.0, label="training, smoothed")
    ends = [0, max(1, len(curves.losses))]
    axes.plot(
        ends,
        curves.held_out,
        "D",
        color=BLACK,
        markersize=7,
        clip_on=False,
        zorder=5,
        label="held out, first and last",
    )
    axes.set_ylabel(f"loss ({curves.unit})")
    axes.margins(y=0.1)


def _draw_epsilon(axes: Axes, curves: Curves) -> None:
    steps, epsilons = zip(*curves.epsilons, strict=True)
    axes.plot(steps, epsilons, color=ORANGE, linewidth=2.0, label=f"spent: ε ≤ {_up(epsilons[-1])}")
    label = f"most that may be spent: {curves.target_epsilon:g}"
    axes.axhline(curves.target_epsilon, color=BLACK, linewidth=1.2, linestyle="--", label=label)
    axes.set_ylim(0.0, 1.15 * max(curves.target_epsilon, *epsilons))
    axes.set_ylabel(f"ε at δ = {curves.delta:.3g}")


def _up(epsilon: float) -> str:
    return f"{math.ceil(epsilon * 1e3) / 1e3:g}" if math.isfinite(epsilon) else "∞"


def smoothed(values: Sequence[float]) -> list[float]:
    """Average exponentially over about a fortieth of the run, without pulling the start towards zero.

    Args:
        values: A series.

    Returns:
        A series of the same length.
    """
    keep = math.exp(-1.0 / max(1.0, len(values) / 40.0))
    total = weight = 0.0
    averages: list[float] = []
    for value in values:
        total = keep * total + value
        weight = keep * weight + 1.0
        averages.append(total / weight)
    return averages
