"""ε against the steps of a training, and against the noise it might have had."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

from ghostclip._files import atomic_path
from ghostclip.commands.privacy_options import Segment, Setting, accountant_of

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
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    label = "noise multiplier" if len(segments) == 1 else "factor on the noise multipliers"
    noise = [changed[0][0] for changed in noisier] if len(segments) == 1 else scales
    for axes, places, curve, name in ((left, at, by_steps, "steps"), (right, noise, by_noise, label)):
        axes.plot(places, [upper for upper, _ in curve], color="#1f5fa8", label="epsilon (upper bound)")
        axes.plot(places, [lower for _, lower in curve], color="#c8641e", ls="--", label="no accountant goes below")
        axes.set_xlabel(name)
        axes.set_ylabel(f"epsilon at delta = {setting.delta:g}")
        axes.grid(alpha=0.3)
    right.axvline(noise[len(noise) // 2], color="grey", lw=0.8, ls=":", label="this training")
    right.set_xscale("log")
    right.set_yscale("log")
    ticks = [noise[0], noise[len(noise) // 2], noise[-1]]
    right.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    heights = [by_noise[place][0] for place in (0, len(noise) // 2, -1)]
    shown = [height for height in heights if height > 0]
    right.set_yticks(shown, [f"{height:.3g}" for height in shown])
    right.minorticks_off()
    left.set_ylim(bottom=0)
    left.legend(frameon=False, loc="lower right")
    right.legend(facecolor="white", edgecolor="none", framealpha=1)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=150)


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
