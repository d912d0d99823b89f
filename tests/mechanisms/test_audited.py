"""Canaries against mechanisms: the best attack on a training never proves more than ε, and does on a broken one.

Every record is a canary with a parameter of its own, which is there or not by coin; the attack sees what the inner
optimizer receives in all steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.audit import Finding, Scores, audit_scores
from ghostclip.mechanisms import (
    BallsInBins,
    BandedInverse,
    BandedMatrixFactorization,
    BufferedToeplitz,
    CyclicPoissonSampling,
    Mechanism,
    PoissonSampling,
    UnamplifiedSampling,
    inverse_of,
    series,
)
from ghostclip.noise.keyed import Correlation

# δ is large for what a few thousand canaries can prove.
pytestmark = pytest.mark.filterwarnings("ignore:delta=0.01 is not below")
CANARIES, STEPS, EPOCHS, SIGMA, DELTA = 1200, 6, 2, 0.9, 1e-2
CORRELATED = [
    BandedInverse(bands=3, epochs=EPOCHS),
    BufferedToeplitz(buffers=2, epochs=EPOCHS),
    BandedMatrixFactorization(bands=3, epochs=EPOCHS),
]


def name_of(mechanism: Mechanism) -> str:
    return type(mechanism).__name__ + "-uniform" * getattr(mechanism, "uniform", False)


class _Received(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)
        self.seen: list[np.ndarray] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append(self.param_groups[0]["params"][0].grad.flatten().double().numpy().copy())


def attacked(mechanism: Mechanism, seed: int, *, copies: int = 1) -> tuple[np.ndarray, np.ndarray, float, Any]:
    """What was released, shape [T, M], which canaries were there, the ε that is claimed, and the scheme."""
    coins = np.random.default_rng(seed).random(CANARIES) < 0.5
    rows = torch.diag(torch.from_numpy(coins.astype(np.float32))).repeat(copies, 1)
    model = nn.Linear(CANARIES, 1, bias=False)
    inner = _Received(model.parameters())
    engine = ghostclip.PrivacyEngine()
    module, optimizer, loader = engine.make_private(
        module=model, optimizer=inner, noise_multiplier=SIGMA, max_grad_norm=1.0, loss_reduction="sum", probe=False,
        data_loader=DataLoader(TensorDataset(rows), batch_size=len(rows) // STEPS), mechanism=mechanism,
    )  # fmt: skip
    for _ in range(EPOCHS):
        for (inputs,) in loader:
            optimizer.zero_grad()
            module(inputs).sum().backward()
            optimizer.step()
    return np.stack(inner.seen), coins, engine.get_epsilon(DELTA), loader.private_sampler.scheme


def by_likelihood(released: np.ndarray, weight: Callable[[np.ndarray], np.ndarray], period: int) -> np.ndarray:
    """The log likelihood ratio of independent rounds, each of which a canary enters as `weight` says."""
    ratios = np.exp((released - 0.5) / SIGMA**2)
    rounds = ratios.reshape(-1, period, CANARIES)
    return np.log(weight(rounds)).sum(0)


def scores_of(mechanism: Mechanism, released: np.ndarray, scheme: Any) -> np.ndarray:
    correlation = mechanism.correlation(scheme)
    if correlation is None:
        rate, period = scheme.event.sample_rate, scheme.event.steps_per_event
        if getattr(mechanism, "uniform", False):
            return np.log(_k_of_all(np.exp((released - 0.5) / SIGMA**2), scheme.rounds))
        if isinstance(mechanism, BallsInBins):
            return by_likelihood(released, lambda rounds: rounds.mean(1), period)
        if isinstance(mechanism, PoissonSampling):
            return by_likelihood(released, lambda rounds: 1 - rate + rate * rounds[:, 0], 1)
        group = _groups(scheme)
        return by_likelihood(
            released, lambda rounds: 1 - rate + rate * np.take_along_axis(rounds, group[None, None], 1)[:, 0], period
        )
    steps = len(released)
    c = series(inverse_of(correlation.sections), steps)
    matrix = np.array([[c[i - j] if i >= j else 0.0 for j in range(steps)] for i in range(steps)])
    # Every canary's own steps.
    own = np.zeros((steps, CANARIES))
    for step in range(steps):
        np.add.at(own[step], _members(scheme, step) % CANARIES, 1)
    moved = matrix @ own
    if isinstance(mechanism, BandedMatrixFactorization) and own.sum() == CANARIES * steps / scheme.groups:
        # Rounds in rows of their own, each with the record or without.
        rate, log_ratio = scheme.sample_rate, np.zeros(CANARIES)
        for begin in range(0, steps, scheme.groups):
            one = matrix[:, begin : begin + scheme.groups] @ own[begin : begin + scheme.groups]
            shift = (one * (matrix @ released)).sum(0) - (one**2).sum(0) / 2
            log_ratio += np.log(1 - rate + rate * np.exp(shift / (SIGMA * correlation.scale) ** 2))
        return log_ratio
    return (moved * (matrix @ released)).sum(0) / np.linalg.norm(moved, axis=0) - np.linalg.norm(moved, axis=0) / 2


def _members(scheme: Any, step: int) -> np.ndarray:
    """Who may be in a step."""
    everybody = replace(scheme, sample_rate=1.0) if hasattr(scheme, "groups") else scheme
    return everybody.draw(ghostclip.noise.keys.RandomKey("sampling"), step)


def _groups(scheme: Any) -> np.ndarray:
    group = np.empty(CANARIES, int)
    for number in range(scheme.event.steps_per_event):
        group[_members(scheme, number)] = number
    return group


def _k_of_all(ratios: np.ndarray, count: int) -> np.ndarray:
    """The mean of all products of k ratios of T."""
    symmetric = np.zeros((count + 1, ratios.shape[1]))
    symmetric[0] = 1.0
    for one in ratios:
        symmetric[1:] += one * symmetric[:-1]
    return symmetric[-1] / math.comb(len(ratios), count)


def audited(mechanism: Mechanism, *, copies: int = 1, trainings: int = 2) -> Finding:
    scores, coins = [], []
    for seed in range(trainings):
        released, there, claimed, scheme = attacked(mechanism, seed, copies=copies)
        scores.append(scores_of(mechanism, released, scheme))
        coins.append(there)
    found = Scores.of(np.concatenate(scores), np.concatenate(coins))
    return audit_scores(found, delta=DELTA, confidence=0.99, method="clopper-pearson", claimed_epsilon=claimed)


@pytest.mark.parametrize(
    "mechanism",
    [
        PoissonSampling(),
        BallsInBins(),
        BallsInBins(uniform=True, epochs=EPOCHS),
        CyclicPoissonSampling(groups=3),
        UnamplifiedSampling(),
        *CORRELATED,
    ],
    ids=name_of,
)
def test_the_best_attack_proves_much_of_epsilon_and_never_more(mechanism: Mechanism) -> None:
    finding = audited(mechanism)
    assert not finding.contradicts, finding.sentence()
    assert finding.claimed_epsilon is not None
    assert finding.epsilon > 0.25 * finding.claimed_epsilon, finding.sentence()


@pytest.mark.parametrize("mechanism", [BallsInBins(), *CORRELATED], ids=name_of)
def test_records_that_take_part_more_often_than_is_accounted_for_are_caught(mechanism: Mechanism) -> None:
    # The data set holds every record four times, which the account does not know.
    released, _, _, _ = attacked(mechanism, 0, copies=4)
    assert len(released) == STEPS * EPOCHS
    finding = audited(mechanism, copies=4)
    assert finding.contradicts, finding.sentence()


@pytest.mark.parametrize("mechanism", CORRELATED, ids=name_of)
def test_noise_without_the_sensitivity_of_its_matrix_is_caught(
    mechanism: Mechanism, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = type(mechanism).correlation

    def unscaled(self: Any, scheme: Any) -> Correlation | None:
        found = honest(self, scheme)
        return None if found is None else Correlation(found.sections, scale=0.4 * found.scale)

    monkeypatch.setattr(type(mechanism), "correlation", unscaled)
    finding = audited(mechanism)
    assert finding.contradicts, finding.sentence()


@pytest.mark.parametrize("mechanism", CORRELATED[:2], ids=name_of)
def test_noise_that_is_taken_back_in_full_too_early_is_caught(
    mechanism: Mechanism, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The noise of step 0 in all steps: the difference of two of them has none.
    from ghostclip.noise.keyed import NoiseRows

    def same(self: NoiseRows, position: int, place: Any, draw: Callable[[int], Any], kept: Any) -> Any:
        return draw(position - self.row * self.stride).mul_(self.correlation.scale)

    monkeypatch.setattr(NoiseRows, "filtered", same)
    released, there, claimed, scheme = attacked(mechanism, 0)
    own = np.array([[record in set(scheme.draw(None, step)) for record in range(CANARIES)] for step in range(STEPS)])
    first = own.argmax(0)
    other = (first + 1) % STEPS
    canary = np.arange(CANARIES)
    found = Scores.of(released[first, canary] - released[other, canary], there)
    finding = audit_scores(found, delta=DELTA, confidence=0.99, method="clopper-pearson", claimed_epsilon=claimed)
    assert finding.contradicts, finding.sentence()
