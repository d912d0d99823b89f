"""The engine of Opacus 0.x: what its optimizer releases, when, and what it charges for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ghostclip.accounting import RDPAccountant
from ghostclip.compat.opacus.legacy import (
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    DPModelInspector,
    PerSampleGradientClipper,
    PrivacyEngine,
    convert_batchnorm_modules,
)
from ghostclip.errors import InvalidOptionError, MissingGradientError, UnsupportedModuleError
from tests.compat.pairs import batch, clipped_sum, small_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:sample_rate=.* is taken on trust"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
    pytest.mark.filterwarnings("ignore:2 backward passes"),
]
BOUND = 0.5


def attached(**options):
    """A model with an engine attached to plain SGD with a step length of 1."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = {"sample_rate": 0.1, "noise_multiplier": 0.0, "max_grad_norm": BOUND, **options}
    engine = PrivacyEngine(model, **given)
    engine.attach(optimizer)
    return model, optimizer, engine


def moved(model: nn.Module) -> torch.Tensor:
    before, after = ([p.detach().flatten() for p in m.parameters()] for m in (small_model(), model))
    return torch.cat(before) - torch.cat(after)


def backward(model: nn.Module, rows: slice = slice(None)) -> None:
    x, y = batch()
    nn.CrossEntropyLoss()(model(x[rows]), y[rows]).backward()


@pytest.mark.parametrize(("options", "size"), [({}, 6), ({"batch_size": 12}, 12), ({"sample_size": 40}, 4)])
def test_step_releases_the_mean_of_clipped_gradients(options, size):
    model, optimizer, engine = attached(**options)
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    torch.testing.assert_close(moved(model), clipped_sum(BOUND) / size)
    assert engine.steps == 1
    assert engine.accountant.history == [(0.0, 0.1, 1)]


def test_virtual_steps_make_one_release():
    model, optimizer, engine = attached(noise_multiplier=1e-9)
    optimizer.zero_grad()
    backward(model, slice(0, 3))
    optimizer.virtual_step()
    optimizer.zero_grad()
    backward(model, slice(3, 6))
    optimizer.step()
    torch.testing.assert_close(moved(model), clipped_sum(BOUND) / 6)
    assert engine.steps == 1


def test_divisor_stays_that_of_the_first_batch():
    model, optimizer, engine = attached()
    for rows in (slice(0, 4), slice(4, 6)):
        optimizer.zero_grad()
        backward(model, rows)
        optimizer.step()
        assert engine._attachment.private.expected_batch_size == 4


def test_empty_batch_is_a_step():
    model, optimizer, engine = attached(noise_multiplier=1.0, batch_size=6)
    optimizer.step(is_empty=True)
    assert engine.steps == 1
    assert moved(model).abs().min() > 0
    optimizer.zero_grad()
    with pytest.raises(MissingGradientError):
        optimizer.step()


def test_noise_is_as_large_as_said():
    model, optimizer, _ = attached(noise_multiplier=100.0, batch_size=1, max_grad_norm=2.0)
    backward(model)
    optimizer.step()
    # 39 normal values: their standard deviation is within 45 % of 200 but once in 10^4.
    assert 110 < moved(model).std() < 290


def test_charge_is_that_of_the_accountant():
    model, optimizer, engine = attached(noise_multiplier=1.0, alphas=[2.0, 4.0, 8.0, 32.0], target_delta=1e-5)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    accountant = RDPAccountant()
    for _ in range(3):
        accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    expected = accountant.get_privacy_spent(delta=1e-5, alphas=[2.0, 4.0, 8.0, 32.0])
    assert engine.get_privacy_spent() == expected
    assert engine.get_privacy_spent(1e-7)[0] > expected[0]


def test_two_backwards_are_charged_for():
    model, optimizer, engine = attached(noise_multiplier=1.0)
    backward(model)
    backward(model)
    optimizer.step()
    assert engine.accountant.history == [(0.5, 0.2, 1)]


def test_target_epsilon_is_kept():
    engine = PrivacyEngine(
        small_model(), batch_size=6, sample_size=60, max_grad_norm=1.0, target_epsilon=4.0, target_delta=1e-5, epochs=2
    )
    accountant = RDPAccountant()
    accountant.history = [(engine.noise_multiplier, 0.1, 20)]
    assert 3.9 < accountant.get_epsilon(1e-5) <= 4.0


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_and_detach(when):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if when == "before" else None
    own = optimizer.step
    engine = PrivacyEngine(model, sample_rate=0.1, noise_multiplier=0.0, max_grad_norm=BOUND)
    engine.attach(optimizer)
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1)
    backward(model)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    with pytest.raises(InvalidOptionError, match="attached already"):
        engine.attach(optimizer)
    engine.detach()
    assert optimizer.step == own
    with pytest.raises(MissingGradientError, match="attach"):
        engine.virtual_step()
    model.zero_grad()
    plain = copy.deepcopy(model)
    backward(model)
    backward(plain)
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sample_rate": None}, "batch_size and sample_size"),
        ({"noise_multiplier": None}, "target_epsilon and epochs"),
        ({"target_epsilon": 1.0}, "target_epsilon and epochs"),
        ({"noise_multiplier": None, "target_epsilon": 1.0}, "Give epochs"),
        ({"sample_rate": 1.5}, "sample_rate"),
    ],
)
def test_what_is_missing_is_named(options, told):
    with pytest.raises(InvalidOptionError, match=told):
        attached(**options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_clipper_by_hand(reduction):
    model = small_model()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(BOUND), loss_reduction=reduction)
    x, y = batch()
    with pytest.raises(MissingGradientError, match="nothing was clipped"):
        clipper.pre_step()
    for part in (slice(0, 2), slice(2, 6)):
        nn.CrossEntropyLoss(reduction=reduction)(model(x[part]), y[part]).backward()
        clipper.clip_and_accumulate()
    with pytest.raises(MissingGradientError, match="no backward"):
        clipper.clip_and_accumulate()
    assert clipper.pre_step() == ([BOUND], 6)
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(flat, clipped_sum(BOUND) / (6 if reduction == "mean" else 1))
    clipper.close()


def test_clipper_by_hand_per_layer():
    clipper = PerSampleGradientClipper(small_model(), ConstantPerLayerClipper([0.1, 0.2, 0.3, 0.4]))
    backward(clipper.module)
    bounds, samples = clipper.pre_step()
    assert bounds == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert samples == 6
    clipper.close()


def test_model_is_inspected_and_converted():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()))
    assert not DPModelInspector(should_throw=False).validate(model)
    with pytest.raises(UnsupportedModuleError, match="BatchNorm2d"):
        DPModelInspector().validate(model)
    assert isinstance(convert_batchnorm_modules(model)[1][0], nn.GroupNorm)
    assert isinstance(model[1][0], nn.BatchNorm2d)
    converted = convert_batchnorm_modules(model, lambda norm: nn.InstanceNorm2d(norm.num_features))
    assert isinstance(converted[1][0], nn.InstanceNorm2d)
    assert DPModelInspector().validate(converted)
