"""Noise that cancels earlier noise: step t of a training adds w_t = (C⁻¹z)_t instead of a fresh z_t.

C⁻¹ is a lower triangular Toeplitz matrix, applied by a cascade of rational filters. A filter that only looks back at z,
as Σ_j c_j·z_{t-j}, needs no memory: every z is a function of (key, step, place), and is drawn again. Filters that look
back at their own output hold it in buffers of the parameter's size. These are a function of the key as well: they are
in no checkpoint, and a process that has none goes through the earlier steps again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ghostclip.errors import InvalidOptionError, ResumeError

Section = tuple[tuple[float, ...], tuple[float, ...]]
"""Coefficients (b, a), both beginning with 1: w_t = Σ_j b_j·u_{t-j} with u_t = z_t - Σ_{j≥1} a_j·u_{t-j}."""


@dataclass(frozen=True)
class Correlation:
    """Coefficients of C⁻¹, a lower triangular Toeplitz matrix: step t adds w_t = (C⁻¹z)_t of independent noise z.

    Attributes:
        sections: Filters, applied one after the other.
        scale: Factor on the noise: the sensitivity of the inverse matrix for the steps that a record takes part in.
    """

    sections: tuple[Section, ...]
    scale: float

    def __post_init__(self) -> None:
        for polynomial in sum(self.sections, ()) or ((),):
            if not polynomial or polynomial[0] != 1 or not all(map(math.isfinite, polynomial)):
                raise InvalidOptionError(f"coefficients={polynomial!r}: finite numbers, the first one 1, are needed.")

    @property
    def lags(self) -> tuple[float, ...] | None:
        """c_0, c_1, … where a step adds Σ_j c_j·z_{t-j}, drawn again; None where buffers are needed."""
        (first, feedback), *others = self.sections
        return None if others or len(feedback) > 1 else first

    @property
    def buffers(self) -> int:
        """Tensors of the parameter's size that are held from step to step."""
        return 0 if self.lags else sum(max(map(len, section)) - 1 for section in self.sections)

    def advance(self, z_N: Tensor, buffers: list[list[Tensor]]) -> Tensor:
        """Return w_t for z_t, which is overwritten, and change what is held, for each section u_{t-1}, u_{t-2}, ….

        Products and sums are rounded one by one, so that any part of a tensor gets the numbers of the whole.
        """
        for (ahead, feedback), past in zip(self.sections, buffers, strict=True):
            for factor, u_N in zip(feedback[1:], past, strict=False):
                z_N.sub_(u_N.to(z_N.dtype, copy=True).mul_(factor))
            newest = z_N.to(past[0].dtype, copy=True) if past else None
            for factor, u_N in zip(ahead[1:], past, strict=False):
                z_N.add_(u_N.to(z_N.dtype, copy=True).mul_(factor))
            if newest is not None:
                past.pop()
                past.insert(0, newest)
        return z_N


def plain(correlation: Correlation) -> list[list[list[float]]]:
    """Return the filters of a correlation as JSON holds them."""
    return [[list(polynomial) for polynomial in section] for section in correlation.sections]


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
    row: int = -1  # the present step
    base: int | None = None  # the first step with this key; None before it
    layout: dict[int, str] = field(default_factory=dict)
    _held: dict[tuple[int, ...], tuple[int, list[list[Tensor]]]] = field(default_factory=dict)
    """The step that is next, and what it needs of those before, of each part of a call's tensor."""

    def begin(self, row: int) -> int:
        """Begin step ``row``, above all before; return the position of its first noise."""
        if row <= self.row:
            raise InvalidOptionError(
                f"noise of step {row} was drawn already (the latest is step {self.row}): correlated noise hides one "
                "sum for each step. Go on with the next batch of the loader."
            )
        self.row = row
        if self.base is None:
            self.base = row
            self.layout.clear()
            self._held.clear()
        return row * self.stride

    def filtered(
        self, position: int, span: tuple[int, int], draw: Callable[[int], Tensor], buffer_dtype: torch.dtype
    ) -> Tensor:
        """Return the noise of a part of a call's tensor; `draw` returns z of a position, buffers are of `buffer_dtype`.

        Cost:
            A draw for each lag; with buffers one, and one for each earlier step that this process has not gone through,
            as all of them after a resume.
        """
        if not self.row * self.stride <= position < (self.row + 1) * self.stride:
            raise InvalidOptionError(
                f"correlated noise for more than {self.stride} tensors of one step: leave the trainable parameters as "
                "they were when the model was made private."
            )
        assert self.base is not None, "begin() was called"
        lags, noise_N = self.correlation.lags, draw(position)
        if lags is not None:
            for lag, factor in enumerate(lags[1 : self.row - self.base + 1], start=1):
                if factor:
                    noise_N.add_(draw(position - lag * self.stride).mul_(factor))
            return noise_N.mul_(self.correlation.scale)
        key = (position - self.row * self.stride, *span)
        if key not in self._held:
            depths = [max(map(len, section)) - 1 for section in self.correlation.sections]
            zeros = [[torch.zeros_like(noise_N, dtype=buffer_dtype) for _ in range(depth)] for depth in depths]
            self._held[key] = (self.base, zeros)
        following, buffers = self._held[key]
        for row in range(following, self.row):
            self.correlation.advance(draw(position + (row - self.row) * self.stride), buffers)
        self._held[key] = (self.row + 1, buffers)
        return self.correlation.advance(noise_N, buffers).mul_(self.correlation.scale)

    def require(self, position: int, about: str) -> None:
        """Refuse to add noise to other tensors than in the steps before."""
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
            "sections": plain(self.correlation), "row": self.row, "base": self.base, "layout": layout
        }  # fmt: skip

    def load(self, state: Any) -> None:
        """Continue from a saved place of the same correlation."""
        if state is None or state["sections"] != plain(self.correlation):
            raise ResumeError("noise state: saved of another correlation. Resume with the mechanism of before.")
        self.row, self.base = int(state["row"]), None if state["base"] is None else int(state["base"])
        self.layout = {int(call): str(about) for call, about in state["layout"].items()}
        self._held.clear()
