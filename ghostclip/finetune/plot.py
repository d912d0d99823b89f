"""The picture of a run: training loss and ε over the private steps, as PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ghostclip._files import atomic_path

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_LOSS, _SMOOTH, _EPSILON, _HELD_OUT = "#9ecae1", "#08519c", "#d94801", "#238b45"


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

    figure = Figure(figsize=(8.0, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.add_subplot()
    right = left.twinx()
    lines = [*_draw_losses(left, curves), *_draw_epsilon(right, curves)]
    left.set_xlabel("private step")
    left.set_ylabel(f"loss ({curves.unit})", color=_SMOOTH)
    right.set_ylabel(f"ε spent (δ = {curves.delta:.3g})", color=_EPSILON)
    left.set_xlim(0, max(1, len(curves.losses)))
    left.grid(alpha=0.25)
    left.set_title("Private training: loss and ε")
    left.margins(y=0.1)
    # Outside: inside, the lines of one of the two axes would run through it.
    labels = [str(line.get_label()) for line in lines]
    figure.legend(lines, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")


def _draw_losses(axes: Axes, curves: Curves) -> list[Artist]:
    steps = [step for step, loss in enumerate(curves.losses, start=1) if loss is not None]
    losses = [loss for loss in curves.losses if loss is not None]
    (raw,) = axes.plot(steps, losses, color=_LOSS, linewidth=0.8, label="training loss per step")
    (smooth,) = axes.plot(steps, smoothed(losses), color=_SMOOTH, linewidth=1.8, label="training loss, smoothed")
    ends = [0, max(1, len(curves.losses))]
    (held,) = axes.plot(
        ends,
        curves.held_out,
        "D",
        color=_HELD_OUT,
        markersize=6,
        clip_on=False,
        zorder=5,
        label="held-out loss before, after",
    )
    return [raw, smooth, held]


def _draw_epsilon(axes: Axes, curves: Curves) -> list[Artist]:
    steps, epsilons = zip(*curves.epsilons, strict=True)
    (spent,) = axes.plot(steps, epsilons, color=_EPSILON, linewidth=1.8, label="ε spent")
    label = f"ε asked for ({curves.target_epsilon:g})"
    target = axes.axhline(curves.target_epsilon, color=_EPSILON, linewidth=1.0, linestyle="--", label=label)
    axes.set_ylim(0.0, 1.15 * max(curves.target_epsilon, *epsilons))
    return [spent, target]


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
