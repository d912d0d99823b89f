"""The search: random data, then changes to the worst that was found, for every kind of layer, dtype and strategy."""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import torch

from tests.exactness.sensitivity.data import Sample, Setting, batch_of, changed, ordinary, sample_of
from tests.exactness.sensitivity.layers import KINDS, Kind
from tests.exactness.sensitivity.layers import kind as kind_of
from tests.exactness.sensitivity.measure import ALLOWED, NUMERICS, STRATEGIES, Moves, Subject

# The share of evaluations that are drawn anew; the others change what was found.
_DRAWN: Final = 0.5
# The worst that are kept to be changed, and the samples of a batch that are tried.
_KEPT, _TRIED = 4, 2
# Data above the bound are written down with the result where they are so few numbers.
_WRITTEN: Final = 150
_BOUNDS: Final = (1.0, 1.0, 1.0, 1e-3, 1e-6, 7.3, 1e4)


@dataclass(frozen=True)
class Cell:
    """One combination that is searched.

    Attributes:
        kind: Name of the kind of layer.
        numerics: Name of what is computed in.
        strategy: How clipped sums are formed.
    """

    kind: str
    numerics: str
    strategy: str


@dataclass
class Found:
    """What the search of a cell found.

    Attributes:
        cell: Which.
        evaluations: Batches that were tried.
        failed: Of these, how many moved a sum by more than is allowed.
        moves: The largest.
        number: The evaluation that found it.
        width: Of the layers there.
        bound: C there.
        normalised: Whether every gradient was scaled to length C there.
        data: The batch.
        error: What ended the search of this cell.
        seconds: How long it took.
    """

    cell: Cell
    evaluations: int = 0
    failed: int = 0
    moves: Moves = field(default_factory=lambda: Moves(0.0, 0.0, 0.0, 0.0, 0))
    number: int = 0
    width: int = 0
    bound: float = 1.0
    normalised: bool = False
    data: Sample = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0

    def worst(self) -> float:
        """Return the largest move, over C."""
        return self.moves.worst(computed=kind_of(self.cell.kind).computed)

    def limit(self) -> float:
        """Return the largest move that is allowed, over C."""
        return 1 + ALLOWED[NUMERICS[self.cell.numerics].dtype]

    def plain(self) -> dict[str, Any]:
        """Return the result as plain values."""
        values = sum(tensor.numel() for tensor in self.data.values())
        return {
            **vars(self.cell),
            "evaluations": self.evaluations,
            "failed": self.failed,
            "worst": _number(self.worst()),
            **{name: _number(value) for name, value in vars(self.moves).items()},
            "number": self.number,
            "width": self.width,
            "bound": self.bound,
            "normalised": self.normalised,
            "shapes": {name: list(tensor.shape) for name, tensor in self.data.items()} if self.failed else {},
            "data": self._written() if self.failed and values <= _WRITTEN else None,
            "error": self.error,
            "seconds": round(self.seconds, 2),
        }

    def _written(self) -> dict[str, str]:
        """Return the batch's numbers in order, in text that does not round them."""
        return {name: " ".join(map(repr, tensor.flatten().tolist())) for name, tensor in self.data.items()}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


def cells(kind: str = "", numerics: str = "", strategy: str = "", *, medium: bool) -> Iterator[Cell]:
    """Yield the cells whose names hold the given texts."""
    for each in KINDS:
        for name in NUMERICS:
            if name == "medium" and not medium:
                continue
            for one in STRATEGIES:
                if kind in each.name and numerics in ("", name) and strategy in ("", one):
                    yield Cell(each.name, name, one)


@dataclass
class _Tried:
    """A batch, and what it is kept for: its move where that is too large, and before that how much else moved."""

    score: tuple[float, float]
    subject: Subject
    setting: Setting
    bound: float
    data: Sample


def search_cell(cell: Cell, evaluations: int, *, seed: int) -> Found:
    """Search a cell."""
    begun = time.monotonic()
    chance = Random(zlib.crc32(f"{seed}/{cell}".encode()))
    kind, numerics = kind_of(cell.kind), NUMERICS[cell.numerics]
    found = Found(cell)
    subjects = [Subject(kind, width, numerics, cell.strategy) for width in kind.widths]
    subjects.append(Subject(kind, kind.widths[0], numerics, cell.strategy, normalised=True))
    kept: list[_Tried] = []
    for number in range(evaluations):
        if kept and chance.random() > _DRAWN:
            tried = _mutated(chance.choice(kept), chance)
        else:
            tried = _drawn(kind, chance.choice(subjects), chance)
        try:
            moves = _judge(tried, chance)
        except Exception as problem:  # noqa: BLE001 - what an engine does not survive is a result
            found.error = f"{type(problem).__name__}: {problem}"[:300]
            break
        worst = moves.worst(computed=kind.computed)
        tried.score = (worst if worst > found.limit() else 0.0, moves.others)
        found.evaluations += 1
        found.failed += worst > found.limit()
        if worst >= found.worst():
            found.moves, found.number, found.data = moves, number, tried.data
            found.width, found.bound, found.normalised = tried.subject.width, tried.bound, tried.subject.normalised
        kept = sorted([*kept, tried], key=lambda each: each.score, reverse=True)[:_KEPT]
    found.seconds = time.monotonic() - begun
    return found


def _drawn(kind: Kind, subject: Subject, chance: Random) -> _Tried:
    positions = chance.choice(kind.positions)
    setting = Setting(subject.shapes(positions), kind.ids, positions, subject.numerics.dtype)
    samples = [sample_of(setting, chance) for _ in range(chance.choice([1, 1, 2]))]
    others = [ordinary(setting, chance) for _ in range(chance.choice([0, 0, 1, 2]))]
    if others and chance.random() < 0.5:
        # Equal samples add up to the longest sum, of which rounding may take the most.
        others = [others[0]] * chance.choice([2, 5])
    samples += others
    chance.shuffle(samples)
    return _Tried((0.0, 0.0), subject, setting, chance.choice(_BOUNDS), batch_of(samples))


def _mutated(before: _Tried, chance: Random) -> _Tried:
    data = changed(before.data, before.setting, chance)
    return _Tried((0.0, 0.0), before.subject, before.setting, before.bound, data)


def _judge(tried: _Tried, chance: Random) -> Moves:
    size = len(tried.data["w"])
    samples = list(range(size)) if size <= _TRIED else chance.sample(range(size), _TRIED)
    return tried.subject.moves(tried.data, samples, bound=tried.bound)


def search(chosen: Iterable[Cell], evaluations: int, *, seed: int, processes: int) -> Iterator[Found]:
    """Search cells, several at a time."""
    if processes <= 1:
        yield from (search_cell(cell, evaluations, seed=seed) for cell in chosen)
        return
    work = [(cell, evaluations, seed) for cell in chosen]
    with torch.multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(_work, work)


def _work(given: tuple[Cell, int, int]) -> Found:
    torch.set_num_threads(1)
    # Every clipper would say that it was not asked to prove whose rows are whose.
    logging.getLogger("ghostclip").setLevel(logging.ERROR)
    cell, evaluations, seed = given
    return search_cell(cell, evaluations, seed=seed)
