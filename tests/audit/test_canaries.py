"""Canaries: who takes part, what is recorded, and a gradient canary that is a record at its strongest."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ghostclip.audit import CanaryDataset, GradientCanaries, audit_scores, mislabelled
from ghostclip.errors import DataError, InvalidOptionError
from tests.engine.training import as_if_drawn
from tests.private_run import PrivateRun

RECORDS = 30


def data():
    return TensorDataset(torch.arange(2.0 * RECORDS).view(-1, 2), torch.arange(RECORDS) % 3)


def test_a_canary_data_set_holds_what_was_included():
    canaries = [(torch.full((2,), -1.0 - k), 0) for k in range(4)]
    joined = CanaryDataset(data(), canaries, [True, False, False, True])
    assert len(joined) == RECORDS + 2
    assert torch.equal(joined[3][0], data()[3][0])
    assert joined[RECORDS][0][0] == -1.0
    assert joined[-1][0][0] == -4.0
    assert sum(1 for _ in joined) == RECORDS + 2
    with pytest.raises(IndexError):
        joined[RECORDS + 2]
    with pytest.raises(DataError, match="one coin for each"):
        CanaryDataset(data(), canaries, [True])


def test_mislabelled_records_have_another_label():
    canaries, chosen = mislabelled(data(), count=12, classes=3, seed=1)
    assert len(set(chosen)) == 12
    for (x, y), index in zip(canaries, chosen, strict=True):
        original = data()[index]
        assert torch.equal(x, original[0])
        assert y != original[1]
        assert 0 <= y < 3
        assert y.dtype == original[1].dtype
    [(_, wrong)], [index] = mislabelled(data(), count=1, classes=2)
    assert wrong == (data()[index][1] + 1) % 2
    with pytest.raises(InvalidOptionError, match="two classes"):
        mislabelled(data(), count=1, classes=1)
    with pytest.raises(DataError, match="only 30 records"):
        mislabelled(data(), count=31, classes=3)


def private(sigma=1.0, *, reduction="mean", size=40):
    records, model = TensorDataset(torch.randn(20, size)), nn.Linear(size, size)
    options = {"batch_size": 5, "sigma": sigma, "max_grad_norm": 2.0, "loss_reduction": reduction}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        run = PrivateRun(records, model=model, lr=0.0, **options)
    return run.model, run.optimizer, run.loader


def steps(model, optimizer, loader, count):
    for _ in range(count):
        optimizer.zero_grad()
        x = next(iter(loader))[0]
        losses = model(x).square().sum(1)
        (losses.mean() if optimizer.loss_reduction == "mean" and len(losses) else losses.sum()).backward()
        optimizer.step()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_gradient_canary_adds_c_to_its_coordinate(reduction):
    """Two canaries, two steps: the included one adds C over the expected batch size to its coordinate, once a step."""
    released = []
    for included in ([False, False], [True, False]):
        torch.manual_seed(0)
        model, optimizer, _ = private(0.5, reduction=reduction, size=3)
        optimizer.noise_multiplier = 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            with GradientCanaries(optimizer, count=2, sample_rate=1.0, included=included, seed=9) as canaries:
                for _ in range(2):
                    optimizer.zero_grad()
                    as_if_drawn(optimizer, 1)
                    model(torch.ones(1, 3)).sum().backward()
                    optimizer.step()
        released.append((torch.cat([p.grad.flatten() for p in optimizer.params]), canaries._score_M))
        assert canaries.steps == 2
    moved = released[1][0] - released[0][0]
    assert (moved != 0).sum() == 1
    assert moved.max().item() == pytest.approx(2.0 / (5.0 if reduction == "mean" else 1.0))
    assert released[1][1] - released[0][1] == pytest.approx([2.0, 0.0])


def test_gradient_canaries_see_noise_and_half_the_noise():
    """σ = 1 and one step: below the claim; a fifth of the noise: above it. Hooks are gone afterwards."""
    findings = []
    for sigma in (1.0, 0.2):
        model, optimizer, loader = private(sigma)
        with GradientCanaries(optimizer, count=1600, sample_rate=1.0, seed=5) as canaries:
            steps(model, optimizer, loader, 1)
        steps(model, optimizer, loader, 1)
        assert canaries.steps == 1
        findings.append(audit_scores(canaries.scores(), delta=1e-5, claimed_epsilon=4.378, method="one-run-gaussian"))
    assert findings[0].epsilon > 1.5
    assert not findings[0].contradicts
    assert findings[1].contradicts


def test_gradient_canaries_refuse():
    _, optimizer, _ = private(size=2)
    with pytest.raises(InvalidOptionError, match="private"):
        GradientCanaries(torch.optim.SGD([torch.zeros(1, requires_grad=True)]), count=1, sample_rate=0.5)
    with pytest.raises(InvalidOptionError, match="only 6 trainable"):
        GradientCanaries(optimizer, count=7, sample_rate=0.5)
    with pytest.raises(InvalidOptionError, match="sample_rate"):
        GradientCanaries(optimizer, count=3, sample_rate=1.5)
    with pytest.raises(DataError, match="one coin for each"):
        GradientCanaries(optimizer, count=3, sample_rate=0.5, included=[True])
    with pytest.raises(DataError, match="no step"):
        GradientCanaries(optimizer, count=3, sample_rate=0.5).scores()
