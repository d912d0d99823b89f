"""The oracle sees what is broken: engines that do not clip, add no noise, count nothing, or train on other batches."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from benchmarks.loops.loop import Loop
from benchmarks.loops.models import cross_entropy, mlp
from benchmarks.loops.oracle import measure
from benchmarks.loops.search import combinations

pytestmark = pytest.mark.filterwarnings("ignore")


def _private(world, **options):
    model = world.watch(mlp, cross_entropy(world))
    return world.private(model, torch.optim.SGD(model.parameters(), lr=0.1), world.loader(), **options)


def _train(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def _sound(world):
    _train(*_private(world))


def _does_not_clip(world):
    """As much noise as is due, on sums that nobody has clipped."""
    _train(*_private(world, max_grad_norm=1e6 * world.clip, noise_multiplier=1e-6 * world.sigma))


def _adds_no_noise(world):
    _train(*_private(world, noise_multiplier=1e-9 * world.sigma))


def _adds_half_the_noise(world):
    _train(*_private(world, noise_multiplier=0.5 * world.sigma))


def _repeats_its_noise(world):
    model, optimizer, loader = _private(world)
    state = optimizer.noise_source.state_dict()
    for x, y in loader:
        optimizer.noise_source.load_state_dict(state)
        _train(model, optimizer, [(x, y)])


def _counts_nothing(world):
    _train(*_private(world))
    world.new_engine()


def _steps_on_bare_gradients(world):
    model = world.watch(mlp, cross_entropy(world))
    _train(model, torch.optim.SGD(model.parameters(), lr=0.1), world.loader())


def _draws_other_batches(world):
    model, optimizer, _ = _private(world)
    with torch.no_grad():
        batches = [(world.features[:6], world.labels[:6])] * 3
    _train(model, optimizer, batches)


def _updates_by_hand(world):
    model, optimizer, loader = _private(world)
    _train(model, optimizer, loader)
    with torch.no_grad():
        next(model.parameters()).add_(world.features.mean())


BROKEN = {
    _does_not_clip: "leaving one record out",
    _adds_no_noise: "no noise",
    _adds_half_the_noise: "noise of 0.[45]",
    _repeats_its_noise: "the noise of the release before it",
    _counts_nothing: "0 accounted for",
    _steps_on_bare_gradients: "no noise",
    _updates_by_hand: "outside a step",
}


@pytest.mark.parametrize("strategy", ["auto", "hooks"])
def test_a_sound_engine_is_exact(strategy):
    outcome = measure(Loop("sound", "", lambda world: _train(*_private(world, grad_sample_mode=strategy))))
    assert outcome.outcome == "exact", outcome
    assert outcome.error < 1e-10
    assert 0.99 < outcome.move <= 1 + 1e-6
    assert outcome.applied == outcome.accounted == 4
    assert outcome.epsilon == pytest.approx(outcome.epsilon_due, rel=1e-2)


@pytest.mark.parametrize(("broken", "said"), BROKEN.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_engine_is_wrong(broken, said):
    outcome = measure(Loop("broken", "", broken))
    assert outcome.outcome == "wrong", outcome
    assert any(re.search(said, problem) for problem in outcome.problems), outcome.problems


def test_batches_that_nobody_drew_do_not_pass():
    assert measure(Loop("other", "", _draws_other_batches)).outcome in ("wrong", "refused")


def test_a_search_is_that_of_its_seed():
    assert list(combinations(30, seed=3)) == list(combinations(30, seed=3))
    assert list(combinations(30, seed=3)) != list(combinations(30, seed=4))
