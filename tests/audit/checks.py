"""Checks that a private engine must pass, cheap ones first; each raises AssertionError where the engine is broken.

Every check takes only public objects, so that it also tells when a patched engine (`mutations`) is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy import stats
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.audit import Finding, Scores, audit_scores
from ghostclip.noise import make_noise_source
from tests.audit.subject import (
    BOUND,
    CLAIMED_EPSILON,
    DELTA,
    SIGMA,
    Batch,
    Subject,
    adversarial_records,
    distance,
    quietly,
    records,
)

STEPS = 250
# Of a fixed noise stream: a check either always passes or never does. About one stream in 1e5 would fail a check.
LEAST_P = 1e-6
ROUNDING = 1e-5


def scores_of_runs(*, member: np.ndarray, other: np.ndarray) -> Scores:
    """Join the scores of runs with the record and of runs without it."""
    return Scores.of(np.concatenate((member, other)), np.r_[np.ones(len(member), bool), np.zeros(len(other), bool)])


def noise_of(subject: Subject, steps: int = STEPS) -> list[np.ndarray]:
    """Every tensor's noise in each step in units of σ·C, shape [steps, entries]."""
    releases = [subject.noise() for _ in range(steps)]
    return [torch.stack(tensors).flatten(1).numpy() / (SIGMA * BOUND) for tensors in zip(*releases, strict=True)]


def noise_has_its_scale() -> None:
    """χ² of every tensor, as large as σ·C says."""
    for index, noise in enumerate(noise_of(Subject())):
        total = (noise**2).sum()
        p_value = 2 * min(stats.chi2.cdf(total, noise.size), stats.chi2.sf(total, noise.size))
        measured = math.sqrt(total / noise.size)
        assert p_value > LEAST_P, f"noise of tensor {index}: {measured:.3f} of its standard deviation"


def noise_is_independent() -> None:
    """No correlation between steps, between coordinates of one step, or between squares; no value twice."""
    # In float64: of ten thousand float32 values two are equal by chance every other time.
    noise_SP = np.concatenate(noise_of(Subject(dtype=torch.float64)), axis=1)
    steps, entries = noise_SP.shape
    assert np.unique(noise_SP).size == noise_SP.size, "the same noise twice"
    for lag in (1, 2, 3, 7):
        for power in (1, 2):
            values = noise_SP**power - (power == 2)
            product = values[lag:] * values[:-lag]
            z = product.sum() / math.sqrt(product.size * 4 ** (power - 1))
            assert abs(z) < 6, f"steps {lag} apart: correlation {product.mean():.3f} of their power {power}"
    correlation = np.corrcoef(noise_SP.T) - np.eye(entries)
    assert np.abs(correlation).max() * math.sqrt(steps) < 6, "coordinates of a step are correlated"


def noise_has_its_tails() -> None:
    """The distribution as far out as these draws reach, and values finer than a float32 generator's."""
    noise = np.concatenate([n.ravel() for n in noise_of(Subject(dtype=torch.float64), 3 * STEPS)])
    shape = stats.kstest(noise, "norm")
    assert shape.pvalue > LEAST_P, f"the distribution is {shape.statistic:.3f} away from the normal one"
    for reach in (2.5, 3.0, 3.5):
        beyond = int((np.abs(noise) > reach).sum())
        p_value = stats.binomtest(beyond, noise.size, 2 * stats.norm.sf(reach)).pvalue
        assert p_value > LEAST_P, f"{beyond} of {noise.size} draws beyond {reach} standard deviations"
    coarse = float((noise.astype(np.float32).astype(np.float64) == noise).mean())
    assert coarse < 0.01, (
        f"{100 * coarse:.0f} % of the noise is float32: a generator of 24-bit uniforms, whose tails end at 5.77"
    )


def noise_ignores_global_seeds() -> None:
    """Two processes that seed torch and numpy alike, as ranks do, still draw unrelated noise."""
    draws = []
    for _rank in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        draw = torch.zeros(4000, dtype=torch.float64)
        make_noise_source(level="fast").add_(draw, 1.0)
        draws.append(draw)
    z = (draws[0] * draws[1]).sum().item() / math.sqrt(draws[0].numel())
    assert abs(z) < 6, f"noise of two ranks has correlation {z / math.sqrt(draws[0].numel()):.3f}"


def noise_of_shards_is_independent() -> None:
    """Two ranks that share a key and hold halves of a parameter do not share noise."""
    first, second = make_noise_source(level="fast"), make_noise_source(level="fast")
    second.load_state_dict(first.state_dict())
    halves = [torch.zeros(4000, dtype=torch.float64) for _ in range(2)]
    for source, half, offset in zip((first, second), halves, (0, 4000), strict=True):
        source.add_shard_(half, 1.0, offset=offset, total=8000)
    z = (halves[0] * halves[1]).sum().item() / math.sqrt(4000)
    assert abs(z) < 6, f"noise of two shards has correlation {z / math.sqrt(4000):.3f}"


def participation_is_poisson() -> None:
    """Sizes as Binomial(N, q), and a record in two batches of an epoch as often as q² says."""
    n, batch, epochs = 60, 12, 40
    loader = DataLoader(TensorDataset(torch.arange(n)), batch_size=batch, shuffle=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private = quietly(
        ghostclip.PrivacyEngine().make_private,
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )[-1]
    drawn = []
    for _ in range(epochs):
        present_TN = np.zeros((n // batch, n), dtype=np.int64)
        for step, (members,) in enumerate(private):
            present_TN[step, members.numpy()] += 1
        drawn.append(present_TN)
    taken = np.stack(drawn)
    assert taken.max() == 1, "a record is in a batch twice"
    q, cells = batch / n, epochs * (n // batch)
    sizes = taken.sum(2).ravel()
    spread = ((sizes - batch) ** 2).sum() / (n * q * (1 - q))
    p_value = 2 * min(stats.chi2.cdf(spread, cells), stats.chi2.sf(spread, cells))
    assert p_value > LEAST_P, f"batch sizes vary {math.sqrt(spread / cells):.2f} times as much as Poisson sampling's"
    meetings = int((taken[:, 1:] * taken[:, :-1]).sum())
    chances = epochs * (n // batch - 1) * n
    p_value = stats.binomtest(meetings, chances, q * q).pvalue
    assert p_value > LEAST_P, (
        f"{meetings} of {chances} records are in two batches in a row, {chances * q * q:.0f} expected"
    )


def one_record_moves_at_most_c(strategy: str = "hooks", loss: str = "per_sample") -> None:
    """Without noise: releases on D and D with one more record, for the worst records and D of several sizes."""
    subject = Subject(sigma=0.0, strategy=strategy, loss=loss)
    usual = records()
    for size in (0, 1, 4, 8):
        batch = Batch(usual.x[:size], usual.y[:size])
        before = subject.release(batch)
        for name, record in adversarial_records().items():
            moved = distance(subject.release(batch.with_record(record)), before)
            assert moved <= 1 + ROUNDING, f"record '{name}' moves a release on {size} records by {moved:.4g} C"


def one_record_moves_at_most_c_when_accumulated(strategy: str = "hooks", loss: str = "per_sample") -> None:
    """The same where the step accumulates two backwards and the record is part of the second."""
    subject = Subject(sigma=0.0, strategy=strategy, loss=loss)
    first, second = records(4), records(3, seed=1)
    before = subject.release(first, second)
    for name, record in adversarial_records().items():
        moved = distance(subject.release(first, second.with_record(record)), before)
        assert moved <= 1 + ROUNDING, f"record '{name}' moves an accumulated release by {moved:.4g} C"


def _neighbours(quiet: Subject) -> tuple[Batch, Batch, list[torch.Tensor]]:
    """The neighbouring batches to tell apart, and what moves between them without noise.

    An ordinary record on the usual batch, unless a pair is moved further than C: an attacker would take that one. It
    is chosen without noise, so that nothing has to be paid for the choice.
    """
    usual, adversaries = records(), adversarial_records()
    furthest, chosen = 1.01, (usual, usual.with_record(adversaries["ordinary"]))
    for size in (8, 4, 1, 0):
        batch = Batch(usual.x[:size], usual.y[:size])
        before = quiet.release(batch)
        for record in adversaries.values():
            moved = distance(quiet.release(batch.with_record(record)), before)
            if moved > furthest:
                furthest, chosen = moved, (batch, batch.with_record(record))
    without, with_it = chosen
    moved_by = [a - b for a, b in zip(quiet.release(with_it), quiet.release(without), strict=True)]
    return without, with_it, [torch.nan_to_num(d, nan=0.0, posinf=0.0, neginf=0.0) for d in moved_by]


def _projections(release: list[torch.Tensor], moved: list[torch.Tensor]) -> list[float]:
    """A score per tensor; a release that is not finite could not be more telling."""
    scores = [float((g * d).sum()) for g, d in zip(release, moved, strict=True)]
    return [score if math.isfinite(score) else math.inf for score in scores]


def audit_of_a_step(runs: int, *, confidence: float = 0.95, seed: int = 7) -> dict[str, Finding]:
    """Release a step on D and on D with one more record many times, and bound ε from every tensor and from the whole.

    The attack knows everything but the noise: its score is the projection on the direction in which the record moves
    the release. The findings hold together with the confidence asked for.

    Args:
        runs: Of each side.
        confidence: That all findings hold.
        seed: Of the noise.

    Returns:
        {tensor or "all": finding}.
    """
    subject = Subject(seed=seed)
    *batches, moved = _neighbours(Subject(sigma=0.0))
    sides = [np.asarray([_projections(subject.release(batch), moved) for _ in range(runs)]) for batch in batches]
    names = [*(f"tensor {index}" for index in range(len(moved))), "all"]
    share = 1 - (1 - confidence) / len(names)
    without, with_it = (np.column_stack((side, side.sum(1))) for side in sides)
    return {
        name: audit_scores(
            scores_of_runs(member=with_it[:, index], other=without[:, index]),
            delta=DELTA,
            confidence=share,
            method="gaussian",
            claimed_epsilon=CLAIMED_EPSILON,
        )
        for index, name in enumerate(names)
    }


def audit_stays_below_the_claim(runs: int = 250) -> None:
    """The statistical audit of whole steps finds no more than is claimed."""
    for name, finding in audit_of_a_step(runs).items():
        assert not finding.contradicts, f"{name}: {finding.sentence()}"


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        noise_has_its_scale,
        noise_is_independent,
        noise_has_its_tails,
        noise_ignores_global_seeds,
        noise_of_shards_is_independent,
        participation_is_poisson,
        one_record_moves_at_most_c,
        one_record_moves_at_most_c_when_accumulated,
        audit_stays_below_the_claim,
    )
}
"""By name, in the order of their cost."""
