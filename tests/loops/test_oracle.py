"""The oracle sees what is broken: engines that do not clip, add no noise, count nothing, or train on other batches."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from ghostclip.errors import DrawError
from tests.loops.loop import Loop
from tests.loops.models import cross_entropy, mlp
from tests.loops.oracle import measure

# Records that are left out one by one; record 9 is among them.
FEW = 2
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
    for x, y in loader:
        optimizer.noise_source._position = 0
        _train(model, optimizer, [(x, y)])


def _counts_nothing(world):
    _train(*_private(world))
    world.new_engine()


def _steps_on_bare_gradients(world):
    model = world.watch(mlp, cross_entropy(world))
    _train(model, torch.optim.SGD(model.parameters(), lr=0.1), world.loader())


def _fills_its_state_at_rate_zero(world):
    """Nothing moves, and the momentum holds gradients that nobody has clipped."""
    model = world.watch(mlp, cross_entropy(world))
    _train(model, torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9), world.loader())


class _Moving(torch.optim.Optimizer):
    def step(self, closure=None):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.grad.zero_()
                p.add_(1.0)


def _moves_at_rate_zero(world):
    """No gradient, no rate, and yet the parameters move."""
    model = world.watch(mlp, cross_entropy(world))
    _train(model, _Moving(model.parameters(), {"lr": 0.0}), world.loader())


def _in_halves(world, *, noise=1.0, divided=True):
    model, optimizer, loader = _private(world, noise_multiplier=noise * world.sigma)
    if not divided:
        _before_updates(optimizer, model, lambda gradient: gradient * 2)
    for x, y in loader:
        optimizer.zero_grad()
        for half in (slice(0, len(x) // 2), slice(len(x) // 2, None)):
            nn.functional.cross_entropy(model(x[half]), y[half]).backward()
        optimizer.step()


def _before_updates(optimizer, model, change):
    def hook(*_):
        for p in model.parameters():
            p.grad = change(p.grad)

    optimizer.original_optimizer.register_step_pre_hook(hook)


def _keeps_what_was_thrown_away(world):
    model, optimizer, loader = _private(world)
    optimizer.discard = lambda: None
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def _refused_without_record_9(world, error=DrawError):
    model, optimizer, loader = _private(world)
    for x, y in loader:
        if 9 in world.drop:
            raise error("the rows are not those of the next draw")
        _train(model, optimizer, [(x, y)])


def _does_not_clip_without_record_9(world):
    _train(*_private(world, max_grad_norm=world.clip * (1e6 if 9 in world.drop else 1)))


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
    _fills_its_state_at_rate_zero: "no noise",
    _moves_at_rate_zero: "no noise|without a draw",
    _keeps_what_was_thrown_away: "noise of 0.[45]",
    _refused_without_record_9: "DrawError, with it: none",
    _does_not_clip_without_record_9: "without record 9: release",
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
    outcome = measure(Loop("broken", "", broken), left_out=FEW)
    assert outcome.outcome == "wrong", outcome
    assert any(re.search(said, problem) for problem in outcome.problems), outcome.problems


@pytest.mark.parametrize(
    ("broken", "said"), [({"noise": 0.5}, "noise of 0.[45]"), ({"divided": False}, "is not the clipped sum")]
)
def test_an_engine_that_is_broken_where_passes_add_up_is_wrong(broken, said):
    outcome = measure(Loop("broken", "", lambda world: _in_halves(world, **broken), passes=2), left_out=FEW)
    assert outcome.outcome == "wrong", outcome
    assert any(re.search(said, problem) for problem in outcome.problems), outcome.problems


@pytest.mark.parametrize("broken", BROKEN, ids=lambda value: value.__name__)
def test_a_broken_engine_is_wrong_in_an_uneven_loop(broken):
    if broken is _refused_without_record_9:
        pytest.skip("this is what an uneven loop may do")
    assert measure(Loop("uneven", "", broken, uneven="skips batches"), left_out=FEW).outcome == "wrong"


@pytest.mark.parametrize("broken", [_adds_no_noise, _adds_half_the_noise, _counts_nothing, _updates_by_hand])
def test_what_is_out_of_sight_has_noise_and_an_account_all_the_same(broken):
    assert measure(Loop("unseen", "", broken, unseen="mixes records"), left_out=FEW).outcome == "wrong"
    assert measure(Loop("unseen", "", _sound, unseen="mixes records")).outcome == "out of sight"


def test_batches_that_nobody_drew_do_not_pass():
    assert measure(Loop("other", "", _draws_other_batches)).outcome in ("wrong", "refused")
