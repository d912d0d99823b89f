"""What a loop is, what is seen of one run of it, and what becomes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from benchmarks.loops.world import BATCH, World

EXACT = 1e-10
"""Largest relative error of an exact sum in float64."""


@dataclass(frozen=True)
class Loop:
    """One way to train.

    Attributes:
        name: Short, the same for ever.
        about: What its author does, in a line.
        run: Trains for a few steps in the world it is given.
        expect: "exact", "refused" or "either" (both are sound).
        match: What a refusal has to say, as a regular expression; empty asks for nothing.
        kind: "training", or "script": it has no released sums to compare and says itself what is wrong.
        ranks: Processes.
        reduction: How its loss is reduced over the batch: "mean" or "sum".
        sampling: "poisson" or "shuffled", as the engine was asked for.
        passes: Backward passes that its author adds up before a step; a record may move the sum by C in each.
        hosts: Libraries that it needs.
        tolerance: Of the error, relative; more than float64 allows only where the host computes in less.
        clips: Values of C; everything is measured with the first, the move with all of them.
        scale: By what the release is divided beyond the expected batch size, for a loop that adds several batches up.
        releases: How many its author means to make; None where any number is right.
        slow: Whether it takes longer than a test should.
    """

    name: str
    about: str
    run: Callable[[World], None]
    expect: str = "either"
    match: str = ""
    kind: str = "training"
    ranks: int = 1
    reduction: str = "mean"
    sampling: str = "poisson"
    passes: int = 1
    hosts: tuple[str, ...] = ()
    tolerance: float = EXACT
    clips: tuple[float, ...] = (1.0, 0.2)
    scale: float = 1.0
    releases: int | None = None
    slow: bool = False


@dataclass
class Seen:
    """One run of a loop, in plain values.

    Attributes:
        error: The exception's text, or "".
        refused: Whether the exception is one that ghostclip raises on purpose.
        where: The last lines of its traceback.
        releases: For each release, what was applied, by parameter; updates of several optimizers are one release.
        drawn: How many batches had been drawn by each release.
        draws: The records of each batch.
        accounted: Releases that the engine counted.
        epsilon: ε that it prints; nan where it prints none.
        moved: Parameters that changed outside a step.
        said: What the loop says itself.
        trainable: Shapes of what is trained at the end.
        parts: Clipped gradient of every record, computed alone, (N, P); None where no reference is defined.
    """

    error: str = ""
    refused: bool = False
    where: str = ""
    releases: list[dict[str, Tensor]] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    draws: list[list[int]] = field(default_factory=list)
    accounted: int = 0
    epsilon: float = math.nan
    moved: list[str] = field(default_factory=list)
    said: str = ""
    trainable: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parts: Tensor | None = None


@dataclass
class Outcome:
    """What became of a loop.

    Attributes:
        name: The loop's.
        outcome: "exact", "refused", "refused later", "fails" (another error before the first release), "fails later",
            or "wrong".
        problems: What is wrong, in words.
        error: Of the sums against one record at a time, the largest; None where no reference is defined.
        move: Largest move of a sum, over C, when one record is left out; None where it was not measured.
        applied: Releases that optimizers applied.
        accounted: Releases that the engine counted.
        epsilon: That the engine prints.
        epsilon_due: What these releases cost, computed apart from the engine.
        message: The error's text.
        where: Where it was raised.
    """

    name: str
    outcome: str = "exact"
    problems: list[str] = field(default_factory=list)
    error: float | None = None
    move: float | None = None
    applied: int = 0
    accounted: int = 0
    epsilon: float | None = None
    epsilon_due: float | None = None
    message: str = ""
    where: str = ""

    def plain(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return asdict(self)


def divisor(loop: Loop) -> float:
    """What a private mean is divided by.

    Args:
        loop: The loop.
    """
    return loop.scale * (BATCH if loop.reduction == "mean" else 1.0)
