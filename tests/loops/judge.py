"""Judgements: of sums, of how far one record moves them, of noise, and of the account."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import torch
from torch import Tensor

from tests.loops.loop import Loop, Outcome, Seen, divisor
from tests.loops.world import BATCH, RECORDS, World

DELTA = 1e-3
_MOVE = 1e-6
# A root mean square over few dozens of normal numbers is above this for any seed, and below it for half the noise.
_LEAST_NOISE, _MOST_NOISE = 0.65, 1.5


def _sums(loop: Loop, seen: Seen, like: dict[str, tuple[int, ...]]) -> list[Tensor]:
    """The released sums as vectors over all that is trained."""
    vectors = []
    for release, passes in zip(seen.releases, seen.passes, strict=True):
        strange = sorted(release.keys() - like.keys())
        parts = [release.get(name, torch.zeros(shape, dtype=torch.float64)).reshape(-1) for name, shape in like.items()]
        parts += [release[name].reshape(-1) for name in strange]
        vectors.append(torch.cat(parts) * divisor(loop, passes))
    return vectors


def clipped_parts(world: World, like: dict[str, tuple[int, ...]]) -> Tensor:
    """Return the clipped gradient of every record, computed alone."""
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


# Against one record at a time


def judge_sums(loop: Loop, outcome: Outcome, clean: Seen) -> None:
    """Compare the released sums with one record at a time."""
    sums = _sums(loop, clean, clean.trainable)
    if not sums:
        if clean.error:
            return
        if not loop.uneven:
            # Who skips batches by their size may have skipped them all.
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
    _compare_sums(loop, outcome, sums, clean.parts, clean.draws)


def _compare_sums(
    loop: Loop, outcome: Outcome, sums: list[Tensor], parts: Tensor, draws: list[list[int]], *, run: str = ""
) -> None:
    """Compare each sum with that of the parts of a batch, no batch twice."""
    unused, errors = list(range(len(draws))), []
    for vector in sums:
        error, used = _nearest(loop, vector, parts, draws, unused)
        errors.append(error)
        unused = [draw for draw in unused if draw not in used]
    outcome.error = max([*errors, outcome.error or 0.0])
    if errors and max(errors) > loop.tolerance:
        worst = errors.index(max(errors))
        outcome.problems.append(
            f"{run}release {worst + 1} is not the clipped sum of a batch that was drawn and not used before "
            f"(off by {max(errors):.1e} of the nearest)"
        )


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


def judge_moves(loop: Loop, outcome: Outcome, clean: Seen, without: dict[int, Seen], clip: float) -> None:
    """Compare the released sums with those of runs with one record less."""
    sums = _sums(loop, clean, clean.trainable)
    moves, strange = [], []
    for record, other in without.items():
        if other.error and not clean.error and not (loop.uneven and other.refused):
            outcome.problems.append(f"without record {record}: {other.error.split(':')[0]}, with it: none")
            continue
        moved = _sums(loop, other, clean.trainable)
        _judge_run(loop, outcome, clean, record, other, moved)
        for first, second in _pairs(loop, clean, other):
            one, two = sums[first], moved[second]
            if one.shape == two.shape:
                allowed = min(loop.passes, max(clean.passes[first], other.passes[second]))
                moves.append((float((one - two).norm()) / clip, allowed))
            else:
                strange.append(record)
    if strange:
        outcome.problems.append(f"other parameters are released without record {strange[0]}")
    outcome.move = max([outcome.move, *(move for move, _ in moves)], key=lambda move: move or 0.0)
    beyond = [move for move, allowed in moves if move > allowed * (1 + max(_MOVE, loop.tolerance))]
    if beyond:
        outcome.problems.append(f"leaving one record out moves a sum by {max(beyond):.4f} C (C = {clip:g})")


def _judge_run(loop: Loop, outcome: Outcome, clean: Seen, record: int, other: Seen, sums: list[Tensor]) -> None:
    """Judge a run without a record by itself: what it released is exact and accounted for, and it ends as the other."""
    run = f"without record {record}: "
    told = any("is not the clipped sum" in problem for problem in outcome.problems)
    if not told and clean.parts is not None and sums and sums[0].shape == clean.parts.shape[1:]:
        draws = [[drawn for drawn in batch if drawn != record] for batch in other.draws]
        _compare_sums(loop, outcome, sums, clean.parts, draws, run=run)
    if loop.sampling == "poisson" and other.accounted < len(sums):
        outcome.problems.append(f"{run}{len(sums)} releases were applied, {other.accounted} accounted for")
    if not loop.uneven and len(sums) != len(clean.releases):
        outcome.problems.append(f"{run}{len(sums)} releases, with it: {len(clean.releases)}")
    if other.error and not clean.error and outcome.outcome == "exact":
        outcome.outcome, outcome.message = "refused later", run + other.error


def _pairs(loop: Loop, clean: Seen, other: Seen) -> list[tuple[int, int]]:
    """Releases of two runs that belong together: by their order or, where a loop skips, by what was drawn before."""
    if not loop.uneven:
        return [(number, number) for number in range(min(len(clean.releases), len(other.releases)))]
    of = {place: number for number, place in enumerate(_places(other.drawn))}
    return [(number, of[place]) for number, place in enumerate(_places(clean.drawn)) if place in of]


def _places(drawn: list[int]) -> list[tuple[int, int]]:
    return [(draws, drawn[:number].count(draws)) for number, draws in enumerate(drawn)]


def judge_additivity(loop: Loop, outcome: Outcome, clean: Seen, without: list[Seen], clip: float) -> None:
    """Ask whether what one record adds to the first sum is the same with and without another one.

    It is so for whatever clips records one by one, at any C, also where the sums happen to move by less than C. Where
    no record is clipped, nothing hides it.
    """
    sums = [_sums(loop, seen, clean.trainable)[:1] for seen in (clean, *without)]
    if all(sums) and len({found[0].shape for found in sums}) == 1:
        both, one, two, none = (found[0] for found in sums)
        mixed = float((both - one - two + none).norm()) / max(float((both - one).norm()), 1e-9)
        if mixed > max(10 * _MOVE, loop.tolerance):
            outcome.problems.append(
                f"what a record adds depends on another record, by {mixed:.1e} of it (C = {clip:g})"
            )


# Noise and account


def judge_noise(loop: Loop, outcome: Outcome, clean: Seen, noisy: Seen) -> None:
    """Measure the noise, which is what two runs differ by."""
    before = None
    for number, (one, two, passes) in enumerate(
        zip(clean.releases, noisy.releases, noisy.passes, strict=False), start=1
    ):
        both = sorted(one.keys() & two.keys())
        unit = divisor(loop, passes) / loop.clips[0]
        noise = {name: (two[name] - one[name]).reshape(-1) * unit for name in both}
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


def judge_account(loop: Loop, outcome: Outcome, noisy: Seen) -> None:
    """Compare releases with what is accounted for, and the ε that is printed with the one that is due."""
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
    # A record that may move the sum by 2 C, and does, is hidden by half the noise.
    passes = min(loop.passes, max(1, math.ceil((outcome.move or 1.0) - 1e-3)))
    outcome.epsilon_due = epsilon_of(rate, 1.0 / passes, times)
    if noisy.epsilon < outcome.epsilon_due * 0.99:
        outcome.problems.append(f"ε is printed as {noisy.epsilon:.3f} where it is {outcome.epsilon_due:.3f}")


def _participations(seen: Seen) -> int:
    """In how many releases the record that is in most of them takes part."""
    used = list(itertools.chain(*seen.draws[: max(seen.drawn, default=0)]))
    return max((used.count(record) for record in set(used)), default=1)


@lru_cache(maxsize=64)
def epsilon_of(rate: float, sigma: float, times: int, delta: float = DELTA) -> float:
    """ε of Poisson-sampled Gaussian releases, by another library's accountant."""
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(value_discretization_interval=1e-3)
    step = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma))
    accountant.compose(step, times)
    return float(accountant.get_epsilon(delta))
