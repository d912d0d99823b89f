"""The pictures of the docs: `python docs/pictures.py` draws them into docs/_static."""

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

# Told apart by the colour-blind (Okabe and Ito 2008).
INPUTS, GRADIENTS, FORMED, SMALL = "#0072B2", "#E69F00", "#D55E00", "#009E73"
HERE = Path(__file__).resolve().parent

# The rooms by what they are for, those below first; no room imports from one above it.
FLOORS = (
    ("costs", "#555555", ("accounting",)),
    ("algebra", "#0072B2", ("kernels", "factors", "rules")),
    ("reading a model", "#009E73", ("capture", "checks")),
    ("clipping", "#E69F00", ("clipping", "graph")),
    ("what is released", "#D55E00", ("noise", "distributed", "optim")),
    ("what ε rests on", "#CC79A7", ("data", "privacy")),
    ("what users call", "#333333", ("validation", "audit", "integrations")),
    ("programs and other names", "#888888", ("compat", "finetune")),
)


def _box(panel: Any, place: tuple[float, float], size: tuple[float, float], colour: str, text: str, below: str) -> None:
    (x, y), (width, height) = place, size
    panel.add_patch(Rectangle((x, y - height / 2), width, height, facecolor=colour, alpha=0.85, edgecolor="none"))
    panel.text(x + width / 2, y, text, ha="center", va="center", fontsize=10, color="white", weight="bold")
    panel.text(x + width / 2, y - height / 2 - 0.12, below, ha="center", va="top", fontsize=8.5, color="#333333")


def _words(panel: Any, x: float, y: float, text: str) -> None:
    panel.text(x, y, text, ha="center", va="center", fontsize=13, color="#333333")


def factors() -> None:
    """Draw how the norm of a linear layer's per-sample gradient is had without the gradient."""
    figure = Figure(figsize=(9, 3.6), dpi=110)
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set_xlim(0, 12)
    panel.set_ylim(0, 4.8)
    panel.axis("off")
    panel.text(0.2, 4.45, "With the per-sample gradient", fontsize=10.5, weight="bold")
    _box(panel, (0.4, 3.35), (0.5, 1.5), GRADIENTS, "y'", "O × T")
    _words(panel, 1.15, 3.35, "·")
    _box(panel, (1.4, 3.35), (1.6, 0.5), INPUTS, "x", "T × I")
    _words(panel, 3.4, 3.35, "=")
    _box(panel, (3.8, 3.35), (1.6, 1.5), FORMED, "g", "O × I, for each sample")
    _words(panel, 6.2, 3.35, "→  ‖g‖²")
    panel.text(0.2, 1.75, "Without it", fontsize=10.5, weight="bold")
    _box(panel, (0.4, 0.85), (0.5, 0.5), SMALL, "y'ᵀy'", "T × T")
    _words(panel, 1.3, 0.85, "∘")
    _box(panel, (1.7, 0.85), (0.5, 0.5), SMALL, "x xᵀ", "T × T")
    _words(panel, 3.6, 0.85, "→  sum  →  ‖g‖²")
    panel.text(8.0, 4.45, "The clipped sum", fontsize=10.5, weight="bold")
    _box(panel, (8.2, 2.6), (0.5, 1.5), GRADIENTS, "c·y'", "O × BT")
    _words(panel, 8.95, 2.6, "·")
    _box(panel, (9.2, 2.6), (1.0, 0.5), INPUTS, "x", "BT × I")
    _words(panel, 10.45, 2.6, "=")
    _box(panel, (10.7, 2.6), (1.0, 1.5), "#555555", "Σ c g", "O × I, once")
    figure.savefig(HERE / "_static" / "factors.png")


def rooms() -> None:
    """Draw the rooms of the package, wide by their lines of code, those that import least below the others."""
    sys.path.insert(0, str(HERE.parent))
    from tests.project.test_budgets import lines_of_rooms

    lines = lines_of_rooms()
    widest = max(sum(lines[room] for room in floor) for _, _, floor in FLOORS)
    figure = Figure(figsize=(9, 5.6), dpi=110)
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set_xlim(-0.36 * widest, 1.02 * widest)
    panel.set_ylim(-0.8, len(FLOORS))
    panel.axis("off")
    for height, (purpose, colour, floor) in enumerate(FLOORS):
        panel.text(-0.02 * widest, height, purpose, ha="right", va="center", fontsize=9.5, color="#333333")
        x = 0.0
        for room in floor:
            width = max(lines[room], 900)
            panel.add_patch(Rectangle((x, height - 0.36), width, 0.72, facecolor=colour, alpha=0.85, edgecolor="white"))
            panel.text(
                x + width / 2, height, f"{room}\n{lines[room]:,}", ha="center", va="center", color="white", fontsize=7.5
            )
            x += width
    panel.text(
        0, -0.62, "Lines of code. A room imports from those below it or on its left.", fontsize=8.5, color="#333333"
    )
    figure.savefig(HERE / "_static" / "rooms.png")


if __name__ == "__main__":
    factors()
    rooms()
