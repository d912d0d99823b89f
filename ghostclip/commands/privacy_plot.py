"""ε against the steps of a training, and against the noise it might have had."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ghostclip._files import BLACK, BLUE, PALE, atomic_path
from ghostclip.commands.privacy_options import Segment, Setting, accountant_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 12


def plot_epsilon(segments: list[Segment], setting: Setting, path: Path) -> None:
    """Draw both curves, each with the lower bound.

    Args:
        segments: (σ, q, steps) one after another.
        setting: The options.
        path: The picture.
    """
    from matplotlib.figure import Figure

    total = sum(steps for _, _, steps in segments)
    at = sorted({max(1, round(total * point / _POINTS)) for point in range(1, _POINTS + 1)})
    scales = [2.0 ** (point / 5) for point in range(-5, 6)]
    noisier = [[(sigma * scale, rate, steps) for sigma, rate, steps in segments] for scale in scales]
    by_steps = [_bounds(_until(segments, steps), setting) for steps in at]
    by_noise = [_bounds(changed, setting) for changed in noisier]
    figure = Figure(figsize=(9, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    one = len(segments) == 1
    noise = [changed[0][0] for changed in noisier] if one else scales
    label = "noise multiplier σ" if one else "factor on the noise multipliers (1: this training)"
    _curves(left, at, by_steps, setting)
    _curves(right, noise, by_noise, setting)
    left.set_xlabel("optimizer steps")
    right.set_xlabel(label)
    middle = len(noise) // 2
    for axes, place in ((left, at[-1]), (right, noise[middle])):
        axes.plot([place], [by_steps[-1][0]], "o", color=BLACK, markersize=7, zorder=5, label=_this(by_steps[-1][0]))
    left.set_xlim(left=0)
    left.set_ylim(bottom=0)
    _logarithmic(right, [noise[0], noise[middle], noise[-1]], [by_noise[place][0] for place in (0, middle, -1)])
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=150)


def _curves(axes: Axes, places: Sequence[float], curve: Sequence[tuple[float, float]], setting: Setting) -> None:
    # The bounds nearly coincide: a thin dashed line on a broad one shows both.
    axes.plot(places, [upper for upper, _ in curve], color=PALE, lw=5, label="ε, upper bound")
    lows = [lower for _, lower in curve]
    axes.plot(places, lows, color=BLUE, lw=1.4, ls="--", label="no accountant can go below")
    axes.set_ylabel(f"ε at δ = {setting.delta:g}")
    axes.grid(alpha=0.3)


def _this(epsilon: float) -> str:
    return f"this training: ε ≤ {math.ceil(epsilon * 1e3) / 1e3:g}" if math.isfinite(epsilon) else "this training"


def _logarithmic(axes: Axes, places: Sequence[float], heights: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(places, [f"{place:.3g}" for place in places])
    shown = [height for height in heights if height > 0]
    axes.set_yticks(shown, [f"{height:.3g}" for height in shown])
    axes.minorticks_off()


def _until(segments: list[Segment], steps: int) -> list[Segment]:
    """Return the part of the segments before a step."""
    kept: list[Segment] = []
    for sigma, rate, length in segments:
        if steps > 0:
            kept.append((sigma, rate, min(length, steps)))
        steps -= length
    return kept


def _bounds(segments: list[Segment], setting: Setting) -> tuple[float, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = accountant_of(segments, setting).epsilon_bounds(setting.delta)
    return (math.nan if math.isinf(found.upper) else found.upper, found.lower)
