"""The oracle: what a loop released, against one record at a time in float64, one record left out, and the noise due."""

from __future__ import annotations

import itertools
import math
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.loops.world import BATCH, RECORDS, World
from ghostclip.errors import GhostClipError

DELTA = 1e-3
_MOVE, _EXACT = 1e-6, 1e-10
# A root mean square over few dozens of normal numbers is above this for any seed, and below it for half the noise.
_LEAST_NOISE, _MOST_NOISE = 0.65, 1.5


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
    tolerance: float = _EXACT
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


def see(loop: Loop, world: World) -> Seen:
    """Run a loop once.

    Args:
        loop: The loop.
        world: A fresh world.

    Returns:
        What was seen.
    """
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
    seen.releases, seen.drawn = _releases(world)
    seen.draws, seen.moved, seen.said = world.draws, world.moved, world.said
    seen.accounted = world.accounted()
    if world.model is not None:
        seen.trainable = {name: tuple(p.shape) for name, p in world.model.named_parameters() if p.requires_grad}
    if world.losses is not None and not world.sigma and world.drop is None and seen.releases:
        seen.parts = _clipped_parts(world, seen.trainable)
    return seen


def _releases(world: World) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Put updates of different parameters together: several optimizers that are stepped in turn make one release."""
    releases: list[dict[str, Tensor]] = []
    drawn: list[int] = []
    for event in world.events:
        if releases and not releases[-1].keys() & event.gradients.keys() and event.draws == drawn[-1]:
            releases[-1].update(event.gradients)
        else:
            releases.append(dict(event.gradients))
            drawn.append(event.draws)
    return releases, drawn


Run = Callable[[Loop, World], Seen]


def measure(loop: Loop, run: Run = see, *, left_out: int = 6) -> Outcome:
    """Say what a loop is.

    Args:
        loop: The loop.
        run: Runs it once.
        left_out: Records that are left out, one at a time.

    Returns:
        The outcome.
    """
    outcome = Outcome(loop.name)
    noisy = run(loop, World(sigma=1.0, clip=loop.clips[0], sampling=loop.sampling))
    outcome.applied, outcome.accounted = len(noisy.releases), noisy.accounted
    outcome.message, outcome.where = noisy.error, noisy.where
    if noisy.said:
        outcome.problems.append(noisy.said)
    if noisy.moved:
        outcome.problems.append(f"parameters changed outside a step: {', '.join(noisy.moved[:3])}")
    if noisy.error:
        late = " later" if noisy.releases or noisy.moved else ""
        outcome.outcome = ("refused" if noisy.refused else "fails") + late
        if not late or loop.kind == "script":
            return outcome
    if loop.kind == "training":
        for clip in loop.clips:
            clean = run(loop, World(clip=clip, sampling=loop.sampling))
            if clean.error and not noisy.error:
                outcome.message, outcome.where = clean.error, clean.where
                outcome.outcome = "refused later" if clean.refused else "fails later"
            _judge(loop, outcome, clean)
            if clip == loop.clips[0]:
                _judge_noise(loop, outcome, clean, noisy)
            without = [
                (record, run(loop, World(clip=clip, drop=record, sampling=loop.sampling)))
                for record in _some(clean, left_out)
            ]
            _judge_moves(loop, outcome, clean, without, clip)
        _judge_account(loop, outcome, noisy)
    if outcome.problems:
        outcome.outcome = "wrong"
        outcome.problems = list(dict.fromkeys(outcome.problems))
    return outcome


def _some(seen: Seen, most: int) -> list[int]:
    """Records to leave out: of the batches that were drawn, long ones (see `World.lengths`) first."""
    records = list(dict.fromkeys(itertools.chain(*seen.draws)))
    return sorted(records, key=lambda record: record % 5 != 4)[:most]


def divisor(loop: Loop) -> float:
    """What a private mean is divided by.

    Args:
        loop: The loop.
    """
    return loop.scale * (BATCH if loop.reduction == "mean" else 1.0)


def _sums(loop: Loop, seen: Seen, like: dict[str, tuple[int, ...]]) -> list[Tensor]:
    """The released sums as vectors over all that is trained."""
    vectors = []
    for release in seen.releases:
        strange = sorted(release.keys() - like.keys())
        parts = [release.get(name, torch.zeros(shape, dtype=torch.float64)).reshape(-1) for name, shape in like.items()]
        parts += [release[name].reshape(-1) for name in strange]
        vectors.append(torch.cat(parts) * divisor(loop))
    return vectors


# Against one record at a time


def _judge(loop: Loop, outcome: Outcome, clean: Seen) -> None:
    sums = _sums(loop, clean, clean.trainable)
    if not sums:
        if clean.error:
            return
        outcome.problems.append("nothing was released, and nothing said so")
        return
    if any(not vector.isfinite().all() for vector in sums):
        outcome.problems.append("a release is not finite")
        return
    idle = (
        []
        if clean.error
        else [name for name in clean.trainable if all(name not in release for release in clean.releases)]
    )
    if idle:
        outcome.problems.append(f"never trained, without a word: {', '.join(idle[:3])} ({len(idle)} parameters)")
    if not clean.draws:
        outcome.problems.append("released without a draw")
        return
    if clean.parts is None:
        return
    unused, errors = list(range(len(clean.draws))), []
    for vector in sums:
        error, used = _nearest(loop, vector, clean.parts, clean.draws, unused)
        errors.append(error)
        unused = [draw for draw in unused if draw not in used]
    outcome.error = max([*errors, outcome.error or 0.0])
    if max(errors) > loop.tolerance:
        worst = errors.index(max(errors))
        outcome.problems.append(
            f"release {worst + 1} is not the clipped sum of a batch that was drawn and not used before "
            f"(off by {max(errors):.1e} of the nearest)"
        )


def _clipped_parts(world: World, like: dict[str, tuple[int, ...]]) -> Tensor:
    """Clipped gradient of every record, (N, P)."""
    assert world.losses is not None
    model = world.reference_model()
    named = {name: p for name, p in model.named_parameters() if name in like}
    rows = []
    for record in range(RECORDS):
        loss = world.losses(model, [record]).sum()
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        by_name = dict(zip(named, gradients, strict=True))
        found = [by_name.get(name) for name in like]
        shapes = like.values()
        row = torch.cat(
            [
                (torch.zeros(s) if g is None else g.detach()).double().reshape(-1)
                for g, s in zip(found, shapes, strict=True)
            ]
        )
        norm = row.norm()
        rows.append(row * min(1.0, world.clip / float(norm)) if norm > 0 else row)
    return torch.stack(rows)


def _nearest(
    loop: Loop, vector: Tensor, parts: Tensor, draws: list[list[int]], unused: list[int]
) -> tuple[float, tuple[int, ...]]:
    """The unused batch (or batches in a row, for a loop that accumulates) whose clipped sum is nearest."""
    best: tuple[float, tuple[int, ...]] = (math.inf, ())
    for count in range(1, loop.passes + 1):
        for first in range(len(unused) - count + 1):
            used = tuple(unused[first : first + count])
            due = sum((parts[draws[draw]].sum(0) for draw in used), torch.zeros_like(vector))
            # Of an empty batch the sum is zero, and the error is measured in units of C = about one record.
            error = float((vector - due).norm() / max(float(due.norm()), 1e-3))
            if error < best[0]:
                best = (error, used)
            if error <= loop.tolerance:
                return best
    return best


# Against a run with one record less


def _judge_moves(loop: Loop, outcome: Outcome, clean: Seen, without: list[tuple[int, Seen]], clip: float) -> None:
    sums = _sums(loop, clean, clean.trainable)
    moves, strange = [], []
    for record, other in without:
        if other.error and not clean.error:
            outcome.problems.append(f"without record {record}: {other.error.split(':')[0]}, with it: none")
            continue
        moved = _sums(loop, other, clean.trainable)
        if len(moved) != len(sums):
            outcome.problems.append(f"without record {record}: {len(moved)} releases, with it: {len(sums)}")
        for one, two in zip(sums, moved, strict=False):
            if one.shape == two.shape:
                moves.append(float((one - two).norm()) / clip)
            else:
                strange.append(record)
    if strange:
        outcome.problems.append(f"other parameters are released without record {strange[0]}")
    if moves:
        outcome.move = max([*moves, outcome.move or 0.0])
        if max(moves) > loop.passes * (1 + max(_MOVE, loop.tolerance)):
            outcome.problems.append(f"leaving one record out moves a sum by {max(moves):.4f} C (C = {clip:g})")


# Noise and account


def _judge_noise(loop: Loop, outcome: Outcome, clean: Seen, noisy: Seen) -> None:
    before = None
    for number, (one, two) in enumerate(zip(clean.releases, noisy.releases, strict=False), start=1):
        both = sorted(one.keys() & two.keys())
        noise = {name: (two[name] - one[name]).reshape(-1) * divisor(loop) / loop.clips[0] for name in both}
        bare = [name for name, values in noise.items() if float(values.abs().max()) < 1e-6]
        if bare:
            outcome.problems.append(f"release {number}: no noise on {', '.join(bare[:3])} ({len(bare)} parameters)")
            return
        if not noise:
            continue
        whole = torch.cat(list(noise.values()))
        size = float(whole.square().mean().sqrt())
        if size < _LEAST_NOISE:
            outcome.problems.append(f"release {number}: noise of {size:.2f} σC")
            return
        if size > _MOST_NOISE:
            outcome.problems.append(f"release {number}: noise of {size:.2f} σC, more than is accounted for")
            return
        if before is not None and before.shape == whole.shape and float((before - whole).abs().max()) < 1e-6:
            outcome.problems.append(f"release {number}: the noise of the release before it")
            return
        before = whole


def _judge_account(loop: Loop, outcome: Outcome, noisy: Seen) -> None:
    applied = len(noisy.releases)
    if loop.releases is not None and applied != loop.releases and not noisy.error:
        outcome.problems.append(f"{applied} releases, its author means {loop.releases}")
    # A release that was counted and then interrupted is no fault.
    told = noisy.accounted if not noisy.error else min(noisy.accounted, applied)
    if loop.sampling == "poisson" and told != applied:
        outcome.problems.append(f"{applied} releases were applied, {noisy.accounted} accounted for")
    if math.isnan(noisy.epsilon) or not applied:
        return
    outcome.epsilon = noisy.epsilon
    rate, times = (BATCH / RECORDS, applied) if loop.sampling == "poisson" else (1.0, _participations(noisy))
    # A record that moves the sum by 2 C is hidden by half the noise.
    outcome.epsilon_due = epsilon_of(rate, 1.0 / max(1, math.ceil((outcome.move or 1.0) - 1e-3)), times)
    if noisy.epsilon < outcome.epsilon_due * 0.99:
        outcome.problems.append(f"ε is printed as {noisy.epsilon:.3f} where it is {outcome.epsilon_due:.3f}")


def _participations(seen: Seen) -> int:
    """In how many releases the record that is in most of them takes part."""
    used = list(itertools.chain(*seen.draws[: max(seen.drawn, default=0)]))
    return max((used.count(record) for record in set(used)), default=1)


@lru_cache(maxsize=64)
def epsilon_of(rate: float, sigma: float, times: int) -> float:
    """ε of Poisson-sampled Gaussian releases, by another library's accountant.

    Args:
        rate: q.
        sigma: Noise multiplier.
        times: Releases.

    Returns:
        ε at `DELTA`, rounded up by at most a thousandth.
    """
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(value_discretization_interval=1e-3)
    step = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma))
    accountant.compose(step, times)
    return float(accountant.get_epsilon(DELTA))
