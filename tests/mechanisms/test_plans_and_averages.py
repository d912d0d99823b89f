"""Comparison of mechanisms for a budget, and averages of iterates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from ghostclip.accounting import get_noise_multiplier
from ghostclip.errors import BudgetError, ResumeError
from ghostclip.mechanisms import (
    AveragedWeights,
    BandedInverse,
    PoissonSampling,
    UnamplifiedSampling,
    described,
    noise_to_batch,
    plan_privacy,
    recommendation,
    series,
)

TRAINING = {"num_samples": 10_000, "batch_size": 500, "target_delta": 1e-5}


def test_plans_keep_the_budget_and_come_with_the_least_noise_first() -> None:
    plans = plan_privacy(**TRAINING, epochs=5, target_epsilon=8.0)
    assert {described(plan.mechanism) for plan in plans} == {
        "PoissonSampling()", "BallsInBins()", *(f"BandedInverse(bands={bands})" for bands in (2, 4, 8)),
        *(f"BandedMatrixFactorization(bands={bands})" for bands in (2, 4, 8)), "BufferedToeplitz(buffers=3)",
    }  # fmt: skip
    assert all(7.9 < plan.epsilon <= 8.0 for plan in plans)
    assert [plan.noise for plan in plans] == sorted(plan.noise for plan in plans)
    poisson = next(plan for plan in plans if isinstance(plan.mechanism, PoissonSampling))
    sigma = get_noise_multiplier(target_epsilon=8.0, target_delta=1e-5, sample_rate=0.05, steps=100)
    assert poisson.noise_multiplier == pytest.approx(sigma, rel=1e-3)
    # The mean of t·σ² over 100 steps.
    assert poisson.noise == pytest.approx(sigma * math.sqrt(101 / 2) / 500, rel=2e-3)
    assert noise_to_batch(poisson, num_samples=10_000, batch_size=500) == pytest.approx(sigma / 500, rel=1e-3)
    assert "BandedInverse(bands=8): " in recommendation(plans)


def test_noise_of_a_plan_is_that_of_drawn_streams() -> None:
    (plan,) = plan_privacy(**TRAINING, epochs=2, target_epsilon=4.0, mechanisms=[BandedInverse(bands=3)])
    scheme = plan.mechanism.scheme(10_000, 500)
    correlation = plan.mechanism.correlation(scheme)
    assert correlation is not None
    z = np.random.default_rng(1).standard_normal((40, 20_000))
    steps = sum(
        c * np.vstack([np.zeros((lag, 20_000)), z[: 40 - lag]])
        for lag, c in enumerate(series(correlation.sections, 40))
    )
    summed = np.cumsum(plan.noise_multiplier * correlation.scale * steps, axis=0) / 500
    assert plan.noise == pytest.approx(float(np.sqrt((summed**2).mean())), rel=0.02)


def test_a_budget_that_no_noise_keeps_is_an_error() -> None:
    with pytest.raises(BudgetError):
        plan_privacy(
            **{**TRAINING, "target_delta": 1e-300}, epochs=10, target_epsilon=1e-9, mechanisms=[UnamplifiedSampling()]
        )


@pytest.mark.parametrize("kind", ["exponential", "tail"])
def test_averages_are_those_of_the_iterates(kind: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaged = AveragedWeights(model, optimizer, kind=kind, decay=0.6, start=2)
    begun, iterates = model.weight.detach().clone(), []
    for step in range(12):
        optimizer.zero_grad()
        model(torch.full((1, 3), float(step))).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        iterates.append(model.weight.detach().clone())
    wanted, seen = begun, iterates[2:]
    for number, iterate in enumerate(seen, start=1):
        decay = min(0.6, (1 + number) / (10 + number)) if kind == "exponential" else 1 - 1 / number
        wanted = decay * wanted + (1 - decay) * iterate
    own = model.weight.detach().clone()
    with averaged.applied():
        torch.testing.assert_close(model.weight.detach(), wanted)
    assert torch.equal(model.weight, own)
    assert averaged.steps == 10
    averaged.detach()
    optimizer.step()
    assert averaged.steps == 10


@pytest.mark.parametrize("kind", ["exponential", "tail"])
def test_saved_averages_go_on_where_they_were(kind: str) -> None:
    models = [nn.Linear(3, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    one, other = (
        AveragedWeights(model, optimizer, kind=kind, start=2)
        for model, optimizer in zip(models, optimizers, strict=True)
    )
    for step in range(6):
        models[0](torch.full((1, 3), float(step))).square().sum().backward()
        optimizers[0].step()
        if step == 3:
            other.load_state_dict(one.state_dict())
        if step > 3:
            models[1].load_state_dict(models[0].state_dict())
            other.update()
    for saved, own in zip(one.state_dict()["averages"], other.state_dict()["averages"], strict=True):
        assert torch.equal(saved, own)
    assert one.steps == other.steps
    different = nn.Linear(3, 4)
    with pytest.raises(ResumeError, match="other parameters"):
        AveragedWeights(different, torch.optim.SGD(different.parameters(), lr=0.1)).load_state_dict(one.state_dict())
