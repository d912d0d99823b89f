"""Noise that cancels earlier noise: step t of a training adds Σ_j c_j·z_{t-j} instead of a fresh z_t.

What was added in earlier steps is not stored: every z is a function of (key, step, place), and is drawn again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ghostclip.errors import InvalidOptionError, ResumeError


@dataclass(frozen=True)
class Correlation:
    """A banded, lower triangular Toeplitz matrix that independent noise is multiplied by.

    Attributes:
        coefficients: c_0 = 1, c_1, …, c_{p-1}.
        scale: Factor on the noise: the sensitivity of the inverse matrix for the steps that a record takes part in.
    """

    coefficients: tuple[float, ...]
    scale: float

    def __post_init__(self) -> None:
        if not self.coefficients or self.coefficients[0] != 1 or not all(map(math.isfinite, self.coefficients)):
            raise InvalidOptionError(
                f"coefficients={self.coefficients!r}: finite numbers, the first one 1, are needed."
            )


@dataclass
class NoiseRows:
    """Which step of a correlated mechanism a source draws for, and where the noise of each step begins.

    Attributes:
        correlation: What steps add.
        stride: Positions of the source that a step may use.
        row: The latest step; -1 before the first.
        base: The first step of the present key: noise of another key is not added again. None for the next step.
        layout: What each call of a step adds noise to: the same in all steps, or other noise than before would be taken
            back.
    """

    correlation: Correlation
    stride: int
    row: int = -1
    base: int | None = None
    layout: dict[int, str] = field(default_factory=dict)
    _terms: list[tuple[float, int]] = field(default_factory=list)

    def begin(self, row: int) -> int:
        """Go on to a step above all before; return the position of its first noise."""
        if row <= self.row:
            raise InvalidOptionError(
                f"noise of step {row} was drawn already (the latest is step {self.row}): correlated noise hides one "
                "sum for each step. Go on with the next batch of the loader."
            )
        self.row = row
        if self.base is None:
            self.base = row
            self.layout.clear()
        lags = enumerate(self.correlation.coefficients[: row - self.base + 1])
        self._terms = [(c * self.correlation.scale, -lag * self.stride) for lag, c in lags if c]
        return row * self.stride

    def terms(self, position: int) -> list[tuple[float, int]]:
        """Return factors, and the positions whose noise they multiply, of a call at a position."""
        if not self.row * self.stride <= position < (self.row + 1) * self.stride:
            raise InvalidOptionError(
                f"correlated noise for more than {self.stride} tensors of one step: leave the trainable parameters as "
                "they were when the model was made private."
            )
        return [(factor, position + back) for factor, back in self._terms]

    def require(self, position: int, about: str) -> None:
        """Refuse a call that adds noise to something else than in the steps before."""
        before = self.layout.setdefault(position - self.row * self.stride, about)
        if before != about:
            raise InvalidOptionError(
                f"correlated noise: a step adds it to {about}, where earlier ones have added it to {before}, which it "
                "would not take back. Keep parameters, dtypes, devices and ranks as they were; to go on from a "
                "checkpoint with others, load it with fresh_randomness=True."
            )

    def state(self) -> dict[str, Any]:
        """Return the place as plain values."""
        layout = {str(call): about for call, about in self.layout.items()}
        return {
            "coefficients": list(self.correlation.coefficients), "row": self.row, "base": self.base, "layout": layout
        }  # fmt: skip

    def load(self, state: Any) -> None:
        """Continue from a saved place of the same correlation."""
        if state is None or list(state["coefficients"]) != list(self.correlation.coefficients):
            raise ResumeError("noise state: saved of another correlation. Resume with the mechanism of before.")
        self.row, self.base = int(state["row"]), None if state["base"] is None else int(state["base"])
        self.layout = {int(call): str(about) for call, about in state["layout"].items()}
