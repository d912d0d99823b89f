"""Schedules of noise and clip bound: Opacus's values, one source of truth, accounted step by step, resumable."""

from __future__ import annotations

import pytest

from ghostclip.compat.opacus import schedulers
from ghostclip.errors import ResumeError
from tests.engine.training import Training, batch_of, small_data

DATA = small_data()
KINDS = {
    "ExponentialNoise": {"gamma": 0.9},
    "StepNoise": {"step_size": 2, "gamma": 0.5},
    "LambdaNoise": {"noise_lambda": lambda epoch: 1 / (1 + epoch)},
    "ExponentialGradClip": {"gamma": 1.1},
    "StepGradClip": {"step_size": 3, "gamma": 2.0},
    "LambdaGradClip": {"scheduler_function": lambda epoch: 1 + epoch},
}
every_kind = pytest.mark.parametrize("name", KINDS)


def _make(name, optimizer):
    return getattr(schedulers, name)(optimizer, **KINDS[name])


@every_kind
@pytest.mark.parametrize("last_epoch", [-1, 1])
def test_values_are_opacus_own(name, last_epoch):
    theirs = pytest.importorskip("opacus.schedulers")

    class Optimizer:
        noise_multiplier, max_grad_norm = 1.3, 0.7

    training, other = Training(sigma=1.3, bound=0.7), Optimizer()
    ours = getattr(schedulers, name)(training.optimizer, **KINDS[name], last_epoch=last_epoch)
    reference = getattr(theirs, name)(other, **KINDS[name], last_epoch=last_epoch)
    for _ in range(7):
        assert training.optimizer.noise_multiplier == pytest.approx(other.noise_multiplier, rel=1e-14)
        assert training.optimizer.max_grad_norm == pytest.approx(other.max_grad_norm, rel=1e-14)
        ours.step()
        reference.step()


@every_kind
def test_noise_follows_in_the_next_step(name):
    training = Training(sigma=1.0, bound=1.0)
    schedule = _make(name, training.optimizer)
    for _ in range(4):
        training.step(batch_of(DATA, start=0, stop=4))
        expected = training.optimizer.noise_multiplier * training.clipper.max_grad_norm
        assert training.noise.stds[-1] == pytest.approx(expected, rel=1e-12)
        schedule.step()
    assert len(set(training.noise.stds)) > 1


@every_kind
def test_state_continues_schedule_and_value(name):
    first, second = Training(), Training()
    schedule = _make(name, first.optimizer)
    for _ in range(3):
        schedule.step()
    state = schedule.state_dict()
    resumed = _make(name, second.optimizer)
    resumed.load_state_dict(state)
    for _ in range(3):
        assert getattr(second.optimizer, schedule.attribute) == getattr(first.optimizer, schedule.attribute)
        assert resumed.last_epoch == schedule.last_epoch
        schedule.step()
        resumed.step()
    with pytest.raises(ResumeError, match="value"):
        resumed.load_state_dict({"last_epoch": 1})
