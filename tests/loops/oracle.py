"""The oracle: what a loop released, against one record at a time in float64, one record left out, and the noise due."""

from __future__ import annotations

import itertools
import math
import traceback
from collections.abc import Callable

import torch
from torch import Tensor

from ghostclip.errors import GhostClipError
from tests.loops.judge import (
    DELTA,
    clipped_parts,
    judge_account,
    judge_additivity,
    judge_moves,
    judge_noise,
    judge_sums,
)
from tests.loops.loop import EXACT, Loop, Outcome, Seen
from tests.loops.world import World

_UNCLIPPED = 1e3


def see(loop: Loop, world: World) -> Seen:
    """Run a loop once."""
    seen = Seen()
    with world.recording():
        try:
            loop.run(world)
            seen.epsilon = world.epsilon(DELTA) if world.sigma and loop.kind == "training" else math.nan
        except Exception as problem:  # noqa: BLE001 - whatever a user would see is the result
            seen.error = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
            seen.refused = isinstance(problem, GhostClipError)
            frames = traceback.extract_tb(problem.__traceback__)
            seen.where = " < ".join(f"{frame.name}:{frame.lineno}" for frame in frames[:-5:-1])
    seen.releases, seen.drawn, seen.passes = _releases(world)
    seen.draws, seen.moved, seen.said, seen.listed = world.draws, world.moved, world.said, world.listed
    seen.accounted = world.accounted()
    if world.model is not None:
        seen.trainable = {name: tuple(p.shape) for name, p in world.model.named_parameters() if p.requires_grad}
    if world.losses is not None and not world.sigma and not world.drop and seen.releases:
        seen.parts = clipped_parts(world, seen.trainable)
    return seen


def _releases(world: World) -> tuple[list[dict[str, Tensor]], list[int], list[int]]:
    """Put updates of different parameters together: several optimizers that are stepped in turn make one release."""
    releases: list[dict[str, Tensor]] = []
    drawn: list[int] = []
    passes: list[int] = []
    for event in world.events:
        if releases and not releases[-1].keys() & event.gradients.keys() and event.draws == drawn[-1]:
            releases[-1].update(event.gradients)
            passes[-1] = max(passes[-1], event.passes)
        else:
            releases.append(dict(event.gradients))
            drawn.append(event.draws)
            passes.append(event.passes)
    return releases, drawn, passes


Run = Callable[[Loop, World], Seen]


def measure(loop: Loop, run: Run = see, *, left_out: int = 6) -> Outcome:
    """Say what a loop is."""
    outcome = Outcome(loop.name)
    noisy = run(loop, World(sigma=1.0, clip=loop.clips[0], sampling=loop.sampling))
    outcome.applied, outcome.accounted = len(noisy.releases), noisy.accounted
    outcome.message, outcome.where = noisy.error, noisy.where
    _take_down(outcome, noisy)
    if noisy.error:
        late = " later" if noisy.releases or noisy.moved else ""
        outcome.outcome = ("refused" if noisy.refused else "fails") + late
        if not late or loop.kind == "script":
            return outcome
    if loop.kind == "training":
        repeats = _repeats(noisy)
        _leave_out(noisy, repeats)
        outcome.applied = len(noisy.releases)
        for clip in loop.clips:
            _measure_at(loop, outcome, noisy, run, clip, (repeats, left_out))
        if not loop.unseen:
            _measure_unclipped(loop, outcome, run)
        elif outcome.outcome == "exact":
            outcome.outcome = "out of sight"
        judge_account(loop, outcome, noisy)
        outcome.note = _note(loop, noisy)
    if outcome.problems:
        outcome.outcome = "wrong"
        outcome.problems = list(dict.fromkeys(outcome.problems))
    return outcome


def _take_down(outcome: Outcome, noisy: Seen) -> None:
    """What is plain from one run."""
    if noisy.said:
        outcome.problems.append(noisy.said)
    if noisy.listed:
        outcome.outcome, outcome.note = "listed", f"a listed difference from Opacus: {noisy.listed}"
    if noisy.moved:
        outcome.problems.append(f"parameters changed outside a step: {', '.join(noisy.moved[:3])}")


def _note(loop: Loop, noisy: Seen) -> str:
    """What a reader has to know of how a loop was measured."""
    notes = []
    if loop.uneven:
        notes.append(f"{loop.uneven}: {len(noisy.releases)} of {len(noisy.draws)} batches drawn were released")
    if loop.tolerance > EXACT:
        notes.append(f"computed in fewer bits than 64: errors and moves up to {loop.tolerance:g} are rounding")
    if loop.unseen:
        notes.append(loop.unseen)
    return "; ".join(notes)


def _measure_at(
    loop: Loop, outcome: Outcome, noisy: Seen, run: Run, clip: float, options: tuple[list[int], int]
) -> None:
    """Everything that is measured without noise, at one C."""
    repeats, left_out = options
    # Of releases that only a run without a record gets to, there is none with noise to compare.
    seen_with_noise = len(noisy.releases) + len(repeats)

    def quiet(*drop: int) -> Seen:
        seen = run(loop, World(clip=clip, drop=drop, sampling=loop.sampling))
        later = [number for number in _repeats(seen) if number >= seen_with_noise] if loop.uneven else []
        _leave_out(seen, repeats + later)
        return seen

    clean = quiet()
    if clean.error and not noisy.error:
        outcome.message, outcome.where = clean.error, clean.where
        outcome.outcome = "refused later" if clean.refused else "fails later"
    judge_sums(loop, outcome, clean)
    if clip == loop.clips[0]:
        judge_noise(loop, outcome, clean, noisy)
    if not loop.unseen:
        judge_moves(loop, outcome, clean, {record: quiet(record) for record in _some(clean, left_out)}, clip)


def _measure_unclipped(loop: Loop, outcome: Outcome, run: Run) -> None:
    """Whether records add to the first sum apart from each other, at a C that clips none of them."""

    def without(*drop: int) -> Seen:
        return run(loop, World(clip=_UNCLIPPED, drop=drop, sampling=loop.sampling))

    clean = without()
    pair = sorted(clean.draws[0] if clean.draws else (), key=lambda record: record % 5 != 4)[:2]
    if len(pair) == 2 and clean.releases:
        judge_additivity(loop, outcome, clean, [without(pair[0]), without(pair[1]), without(*pair)], _UNCLIPPED)


def _repeats(noisy: Seen) -> list[int]:
    """Releases that are the one before them, noise and all: what is public already may be applied again."""
    pairs = zip(noisy.releases, noisy.releases[1:], strict=False)
    return [
        number
        for number, (one, two) in enumerate(pairs, start=1)
        if one and one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    ]


def _leave_out(seen: Seen, repeats: list[int]) -> None:
    seen.releases = [release for number, release in enumerate(seen.releases) if number not in repeats]
    seen.drawn = [drawn for number, drawn in enumerate(seen.drawn) if number not in repeats]
    seen.passes = [passes for number, passes in enumerate(seen.passes) if number not in repeats]


def _some(seen: Seen, most: int) -> list[int]:
    """Records to leave out: of the batches that were drawn, long ones (see `World.lengths`) first."""
    records = list(dict.fromkeys(itertools.chain(*seen.draws)))
    return sorted(records, key=lambda record: record % 5 != 4)[:most]
