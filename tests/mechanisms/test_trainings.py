"""Whole trainings with a mechanism: what the inner optimizer receives, what is charged, and what is refused."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.errors import BudgetExceededError, GhostClipError, InvalidOptionError, ResumeError
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

# Sums without noise are compared, and two backwards before a step are tried.
pytestmark = [
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
    pytest.mark.filterwarnings("ignore:2 backward passes were made"),
]
SAMPLES, SIZE, EPOCHS, CLIP = 24, 6, 3, 0.7
MECHANISMS: list[Mechanism] = [
    PoissonSampling(),
    PoissonSampling(max_batch_size=12),
    BallsInBins(),
    CyclicPoissonSampling(groups=2),
    BandedInverse(bands=3, epochs=EPOCHS),
    BandedInverse(bands=2, epochs=EPOCHS, coefficients=(-0.9,)),
    UnamplifiedSampling(),
    BandedMatrixFactorization(bands=2, epochs=EPOCHS),
    BandedMatrixFactorization(bands=3, groups=4, coefficients="square_root"),
    BufferedToeplitz(buffers=2, epochs=EPOCHS),
    BallsInBins(uniform=True, epochs=EPOCHS),
]


class Recorder(torch.optim.SGD):
    """What a step of the private optimizer hands to the one inside."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.received: list[Tensor] = []

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.received.append(torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]]))
        super().step(closure)


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(SAMPLES, 5, dtype=torch.float64), torch.randint(3, (SAMPLES,))


def private(
    mechanism: Mechanism | None, *, sigma: float, lr: float = 0.0, width: int = 4, ledger: Any = None, **options: Any
) -> tuple[Any, Any, Any, Any, Recorder]:
    torch.manual_seed(0)
    x, y = data()
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3)).double()
    inner = Recorder(model.parameters(), lr=lr)
    engine = ghostclip.PrivacyEngine(ledger=ledger)
    loader = DataLoader(TensorDataset(x, y), batch_size=SIZE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, optimizer, loader = engine.make_private(
            module=model, optimizer=inner, data_loader=loader, noise_multiplier=sigma, max_grad_norm=CLIP,
            loss_reduction="sum", mechanism=mechanism, **options,
        )  # fmt: skip
    return engine, module, optimizer, loader, inner


def train(parts: tuple[Any, ...], epochs: int = EPOCHS, *, without: int | None = None) -> Iterator[int]:
    _, module, optimizer, loader, _ = parts
    x, _ = data()
    for _, (inputs, targets) in itertools.chain.from_iterable(enumerate(loader) for _ in range(epochs)):
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(module(inputs), targets, reduction="none")
        if without is not None:
            # The neighbouring data set: the record contributes nothing.
            losses = losses * (inputs != x[without]).any(1)
        losses.sum().backward()
        optimizer.step()
        yield len(inputs)


def stream_of(mechanism: Mechanism, *, without: int | None = None) -> Tensor:
    """The clipped sums that the inner optimizer receives in all steps, without noise, shape [T, P]."""
    parts = private(mechanism, sigma=0.0, probe=False)
    parts[3].private_sampler._key.load("00" * 16)
    list(train(parts, without=without))
    return torch.stack(parts[4].received)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
def test_no_record_moves_the_stream_by_more_than_is_accounted_for(mechanism: Mechanism) -> None:
    whole = stream_of(mechanism)
    steps, scheme = len(whole), mechanism.scheme(SAMPLES, SIZE)
    correlation = mechanism.correlation(scheme)
    period = scheme.event.steps_per_event
    reached = 0.0
    for record in range(0, SAMPLES, 4):
        moved = (whole - stream_of(mechanism, without=record)).numpy()
        norms = np.linalg.norm(moved, axis=1)
        assert norms.max(initial=0.0) <= CLIP * (1 + 1e-9)
        # Rounds are events of one participation.
        assert ((norms.reshape(-1, period) > 0).sum(1) <= scheme.event.participations).all()
        if correlation is None:
            continue
        c = series(inverse_of(correlation.sections), steps)
        matrix = np.array([[c[i - j] if i >= j else 0.0 for j in range(steps)] for i in range(steps)])
        if isinstance(mechanism, BandedMatrixFactorization):
            # Each round by itself, in rows of its own.
            rounds = [matrix[:, one] @ moved[one] for one in np.arange(steps).reshape(-1, period)]
            assert (sum(np.linalg.norm(one, axis=1) > 1e-9 for one in rounds) <= 1).all()
            reached = max(reached, *(float(np.linalg.norm(one)) for one in rounds))
            assert reached <= correlation.scale * CLIP * (1 + 1e-9)
            continue
        assert ((norms.reshape(EPOCHS, -1) > 0).sum(1) == 1).all()
        reached = max(reached, float(np.linalg.norm(matrix @ moved)))
        assert reached <= correlation.scale * CLIP * (1 + 1e-9)
    # Gradients at fixed parameters are the same in each epoch: the bound is met by who is clipped in the first step.
    assert correlation is None or reached > 0.9 * correlation.scale * CLIP


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
def test_parts_of_the_training_cost_what_the_whole_is_planned_for(mechanism: Mechanism) -> None:
    parts = private(mechanism, sigma=1.3)
    engine = parts[0]
    before, delta = 0.0, 1e-2
    for _ in range(EPOCHS):
        list(train(parts, 1))
        now = engine.get_epsilon(delta)
        # Where records take part k times in all, all of it is charged when it begins.
        assert now == before if before and mechanism == MECHANISMS[-1] else now > before
        before = now
    if isinstance(mechanism, BandedInverse | BufferedToeplitz):
        gaussian = ghostclip.accounting.create_accountant()
        gaussian.step(noise_multiplier=1.3, sample_rate=1.0)
        assert before == pytest.approx(gaussian.get_epsilon(delta), rel=1e-6)
        list(train(parts, 1))
        assert engine.get_epsilon(delta) > before, "an epoch more than planned costs what it adds"


@pytest.mark.parametrize("mechanism", [MECHANISMS[4], *MECHANISMS[-4:-1]], ids=repr)
def test_noise_of_the_stream_is_correlated_and_as_large_as_said(mechanism: Mechanism) -> None:
    scheme = mechanism.scheme(SAMPLES, SIZE)
    correlation = mechanism.correlation(scheme)
    assert correlation is not None
    streams = []
    for sigma in (0.0, 0.8):
        parts = private(mechanism, sigma=sigma, width=1000)
        parts[3].private_sampler._key.load("00" * 16)
        list(train(parts))
        streams.append(torch.stack(parts[4].received).numpy())
    noise = streams[1] - streams[0]
    steps = len(noise)
    matrix = sum(np.diag(np.full(steps - lag, c), -lag) for lag, c in enumerate(series(correlation.sections, steps)))
    wanted = (0.8 * CLIP * correlation.scale) ** 2 * matrix @ matrix.T
    assert np.allclose(np.cov(noise), wanted, atol=0.06 * wanted.max())


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
def test_a_resumed_training_is_the_uninterrupted_one(mechanism: Mechanism, tmp_path: Path) -> None:
    whole = private(mechanism, sigma=1.0, lr=0.05)
    steps = train(whole)
    for _ in range(5):
        next(steps)
    whole[0].save_checkpoint(path=tmp_path / "state.pt", module=whole[1], optimizer=whole[2])
    list(steps)
    again = private(mechanism, sigma=1.0, lr=0.05)
    again[0].load_checkpoint(path=tmp_path / "state.pt", module=again[1], optimizer=again[2])
    list(train(again))
    assert len(again[4].received) >= len(whole[4].received) - 5
    for one, two in zip(whole[4].received[5:], again[4].received, strict=False):
        assert torch.equal(one, two)


def test_noise_for_a_budget_keeps_it_and_a_step_beyond_is_refused() -> None:
    for mechanism in (BallsInBins(), BandedMatrixFactorization(bands=2), BufferedToeplitz(buffers=2)):
        x, y = data()
        model = nn.Linear(5, 3).double()
        engine = ghostclip.PrivacyEngine()
        module, optimizer, loader = engine.make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), epochs=EPOCHS, max_grad_norm=1.0,
            data_loader=DataLoader(TensorDataset(x, y), batch_size=SIZE), target_epsilon=2.0, target_delta=1e-2,
            loss_reduction="sum", mechanism=mechanism,
        )  # fmt: skip
        parts = engine, module, optimizer, loader, None
        list(train(parts))
        assert 1.95 < engine.get_epsilon(1e-2) <= 2.0
        with pytest.raises(BudgetExceededError):
            list(train(parts, 1))


def test_a_checkpoint_of_another_mechanism_is_refused(tmp_path: Path) -> None:
    one = private(BandedInverse(bands=2, epochs=EPOCHS), sigma=1.0)
    next(train(one))
    one[0].save_checkpoint(path=tmp_path / "state.pt", module=one[1], optimizer=one[2])
    for mechanism in (BallsInBins(), None, BandedInverse(bands=3, epochs=EPOCHS)):
        other = private(mechanism, sigma=1.0)
        with pytest.raises(ResumeError):
            other[0].load_checkpoint(path=tmp_path / "state.pt", module=other[1], optimizer=other[2])


def test_a_loop_that_is_left_goes_on_with_the_batches_that_are_next() -> None:
    mechanism = BandedInverse(bands=3, epochs=EPOCHS)
    parts = private(mechanism, sigma=1.0)
    steps = train(parts, 1)
    next(steps)
    steps.close()
    assert len(list(train(parts, 1))) == mechanism.scheme(SAMPLES, SIZE).steps


def test_patterns_that_the_account_does_not_cover_are_refused_before_the_release() -> None:
    for mechanism in MECHANISMS[2:]:
        _, module, optimizer, loader, inner = private(mechanism, sigma=1.0)
        inputs, targets = next(iter(loader))
        for _ in range(2):
            nn.functional.cross_entropy(module(inputs), targets, reduction="sum").backward()
        with pytest.raises(GhostClipError):
            optimizer.step()
        assert inner.received == []


def test_noise_that_changes_on_the_way_is_refused() -> None:
    _, _, optimizer, _, inner = parts = private(BandedInverse(bands=2, epochs=EPOCHS), sigma=1.0)
    steps = train(parts)
    next(steps)
    optimizer.noise_multiplier = 0.5
    with pytest.raises(InvalidOptionError, match=r"noise_multiplier=0.5 after steps with 1.0"):
        next(steps)
    assert len(inner.received) == 1


def test_parameters_that_are_frozen_on_the_way_are_refused() -> None:
    _, module, _, _, inner = parts = private(BandedInverse(bands=2, epochs=EPOCHS), sigma=1.0)
    steps = train(parts)
    next(steps)
    next(module.parameters()).requires_grad_(False)
    with pytest.raises(InvalidOptionError, match="other parameters are trainable"):
        next(steps)
    assert len(inner.received) == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"poisson_sampling": False}, "poisson_sampling=False: the mechanism draws"),
        ({"clipping": "adaptive"}, "clipping='adaptive' with correlated noise"),
    ],
)
def test_combinations_that_nobody_accounts_for_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidOptionError, match=match):
        private(BandedInverse(bands=2, epochs=EPOCHS), sigma=1.0, **options)


@pytest.mark.parametrize("mechanism", [MECHANISMS[2], MECHANISMS[3], MECHANISMS[4], *MECHANISMS[-4:]], ids=repr)
def test_a_ledger_holds_any_mechanism_and_a_repeated_step_costs_nothing(mechanism: Mechanism, tmp_path: Path) -> None:
    begun = partial(private, mechanism, sigma=1.0, lr=0.1, ledger=tmp_path / "ledger")
    first = begun()
    steps = train(first, 1)
    next(steps)
    first[0].save_checkpoint(path=tmp_path / "state.pt", module=first[1], optimizer=first[2])
    list(steps)
    spent, weights = first[0].get_epsilon(1e-2), [p.clone() for p in first[1].parameters()]
    first[0].close()
    again = begun()
    assert again[0].get_epsilon(1e-2) == spent
    again[0].load_checkpoint(path=tmp_path / "state.pt", module=again[1], optimizer=again[2])
    list(train(again, 1))
    assert again[0].get_epsilon(1e-2) == spent
    assert all(torch.equal(*pair) for pair in zip(weights, again[1].parameters(), strict=True))
    again[0].close()
    other = begun()
    other[0].load_checkpoint(
        path=tmp_path / "state.pt", module=other[1], optimizer=other[2], fresh_randomness=True
    )  # fmt: skip
    list(train(other, 1))
    assert other[0].get_epsilon(1e-2) > spent
    other[0].close()
