"""What a loop is, what is seen of one run of it, and what becomes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from tests.loops.world import BATCH, World

EXACT = 1e-10
"""Largest relative error of an exact sum in float64."""


@dataclass(frozen=True)
class Loop:
    """One way to train.

    Attributes:
        name: Short, the same for ever.
        about: What its author does, in a line.
        run: Trains for a few steps in the world it is given.
        expect: "exact", "refused", "either" (both are sound), or "listed" (as a difference from Opacus).
        match: What a refusal has to say, as a regular expression; empty asks for nothing.
        kind: "training", or "script": it has no released sums to compare and says itself what is wrong.
        ranks: Processes.
        reduction: How its loss is reduced over the batch: "mean" or "sum".
        sampling: "poisson" or "shuffled", as the engine was asked for.
        passes: Backward passes at most that its author adds up before a step; a record may move the sum by C in each
            that is seen.
        hosts: Libraries that it needs.
        tolerance: Of the error, relative; more than float64 allows only where the host computes in less.
        clips: Values of C; everything is measured with the first, the move with all of them.
        releases: How many its author means to make; None where any number is right.
        uneven: Why the loop may be refused, or end, at another step without a record, each release up to there exact
            and accounted for (it skips, reorders or drops batches, or counts physical ones); empty where it may not.
        unseen: Why no engine can see what a record does (the batch is changed before the model, or losses are weighted
            by detached numbers of the batch), so that sums are not judged, only noise and account; else empty.
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
    releases: int | None = None
    uneven: str = ""
    unseen: str = ""
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
        passes: How many backward passes the loop had added up for each release.
        draws: The records of each batch.
        accounted: Releases that the engine counted.
        epsilon: ε that it prints; nan where it prints none.
        moved: Parameters that changed outside a step.
        said: What the loop says itself.
        listed: The listed difference from Opacus that it has met.
        trainable: Shapes of what is trained at the end.
        parts: Clipped gradient of every record, computed alone, (N, P); None where no reference is defined.
    """

    error: str = ""
    refused: bool = False
    where: str = ""
    releases: list[dict[str, Tensor]] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    draws: list[list[int]] = field(default_factory=list)
    accounted: int = 0
    epsilon: float = math.nan
    moved: list[str] = field(default_factory=list)
    said: str = ""
    listed: str = ""
    trainable: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parts: Tensor | None = None


@dataclass
class Outcome:
    """What became of a loop.

    Attributes:
        name: The loop's.
        outcome: "exact", "refused", "refused later", "fails" (another error before the first release), "fails later",
            "listed" (a difference from Opacus, as listed), "out of sight" (see `Loop.unseen`), or "wrong".
        problems: What is wrong, in words.
        error: Of the sums against one record at a time, the largest; None where no reference is defined.
        move: Largest move of a sum, over C, when one record is left out; None where it was not measured.
        applied: Releases that optimizers applied.
        accounted: Releases that the engine counted.
        epsilon: That the engine prints.
        epsilon_due: What these releases cost, computed apart from the engine.
        message: The error's text.
        where: Where it was raised.
        note: What else there is to say.
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
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return asdict(self)


def divisor(loop: Loop, passes: int) -> float:
    """What a private mean is divided by: as in Opacus, of several accumulated means the mean is released."""
    return float(BATCH * passes) if loop.reduction == "mean" else 1.0
