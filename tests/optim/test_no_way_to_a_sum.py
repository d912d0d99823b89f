"""Whatever a loop does between backward and step, the inner optimizer receives the clipped sum as it was formed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ghostclip
from ghostclip.errors import InvalidOptionError, MissingGradientError
from ghostclip.optim import DPOptimizer
from tests.engine.training import clipped_sum, declared, small_data, small_model
from tests.optim.test_sums_out_of_reach import BATCH, STRATEGIES, Run

pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0", "ignore:.*not in the optimizer")
DATA = small_data(40)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def _sums(run):
    return [run.optimizer.clipper.summed_gradient(p) for p in run.bare.parameters()]


def _samples(run):
    found = [getattr(p, "grad_sample", None) for p in run.bare.parameters()]
    return [kept for kept in found if kept is not None]


def _shown(run):
    """What can be reached by public names, of any strategy."""
    clipper = run.optimizer.clipper
    grads = [p.grad for p in run.bare.parameters() if p.grad is not None]
    return [*grads, *_sums(run), *_samples(run), clipper.clip_coefficients, clipper.per_sample_norms]


def _with_hook(run, register):
    for p in run.bare.parameters():
        register(p)


def _refill(tensor):
    tensor.data = torch.full_like(tensor, 9)


AFTER = {
    "in place": lambda run: [shown.mul_(9) for shown in _shown(run)],
    "data": lambda run: [shown.data.mul_(9) for shown in _shown(run)],
    "numpy": lambda run: [shown.numpy().fill(9) for shown in _shown(run)],
    "storage": lambda run: [shown.untyped_storage().fill_(7) for shown in _shown(run)],
    "freed": lambda run: [shown.untyped_storage().resize_(0) for shown in _shown(run)],
    "set_": lambda run: [shown.set_(torch.full((3,), 9.0, dtype=shown.dtype)) for shown in _shown(run)],
    "other data": lambda run: [_refill(shown) for shown in _shown(run)],
    "from_numpy": lambda run: [torch.from_numpy(shown.numpy()).fill_(9) for shown in _shown(run)],
    "dlpack": lambda run: [torch.from_dlpack(shown).fill_(9) for shown in _shown(run)],
    "vector_to_parameters": lambda run: nn.utils.vector_to_parameters(torch.full((999,), 9.0).double(), _sums(run)),
    "foreach": lambda run: torch._foreach_mul_(_shown(run), 9),
    "grad_sample taken off": lambda run: [setattr(p, "grad_sample", None) for p in run.bare.parameters()],
    "grad_sample exchanged": lambda run: [setattr(p, "grad_sample", 9 * p[None]) for p in run.bare.parameters()],
    "summed_grad put in": lambda run: [setattr(p, "summed_grad", 9 * p) for p in run.bare.parameters()],
    "policy": lambda run: setattr(run.optimizer.clipper.policy, "max_grad_norm", 99.0),
    "hook on a parameter": lambda run: _with_hook(run, lambda p: p.register_hook(lambda grad: 9 * grad)),
}
BEFORE = {
    "hook on a parameter": lambda p: p.register_hook(lambda grad: 9 * grad),
    "hook after accumulation": lambda p: p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(9)),
    "hook on the accumulating node": lambda p: (
        p.view_as(p).grad_fn.next_functions[0][0].register_hook(lambda *_: p.grad.mul_(9))
    ),
    "hook before the accumulating node": lambda p: (
        p.view_as(p).grad_fn.next_functions[0][0].register_prehook(lambda grads: tuple(9 * grad for grad in grads))
    ),
}


@every_strategy
@pytest.mark.parametrize("way", AFTER)
def test_nothing_that_is_shown_is_what_is_released(way, strategy):
    run = Run(strategy)
    want = clipped_sum(run.bare, BATCH, 0.5)
    run.backward()
    AFTER[way](run)
    run.optimizer.step()
    torch.testing.assert_close(run.applied[-1], want, rtol=1e-10, atol=1e-12)


@every_strategy
@pytest.mark.parametrize("way", BEFORE)
def test_hooks_of_parameters_never_meet_a_sum(way, strategy):
    run = Run(strategy)
    want = clipped_sum(run.bare, BATCH, 0.5)
    _with_hook(run, BEFORE[way])
    run.backward()
    run.optimizer.step()
    torch.testing.assert_close(run.applied[-1], want, rtol=1e-10, atol=1e-12)


@every_strategy
def test_steps_taken_apart_release_the_sum_too(strategy):
    run = Run(strategy)
    want = clipped_sum(run.bare, BATCH, 0.5)
    run.backward()
    run.optimizer.clip_and_accumulate()
    for p in run.bare.parameters():
        if getattr(p, "summed_grad", None) is not None:
            p.summed_grad.data.mul_(9)
    run.optimizer.add_noise()
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in run.bare.parameters()]), want)


@every_strategy
def test_hooks_of_a_step_meet_copies_before_the_noise_and_releases_after_it(strategy):
    run = Run(strategy)
    want, met = clipped_sum(run.bare, BATCH, 0.5), []
    run.optimizer.attach_step_hook(lambda _: [total.data.mul_(9) for total in _sums(run)])
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: met.append((optimizer, run.engine.accountant)))
    try:
        run.backward()
        run.optimizer.step()
    finally:
        handle.remove()
    torch.testing.assert_close(run.applied[-1], want, rtol=1e-10, atol=1e-12)
    assert [(optimizer, len(accountant)) for optimizer, accountant in met] == [(run.inner, 1)]


@pytest.mark.parametrize("change", ["noise_multiplier", "max_grad_norm"])
def test_a_step_hook_changes_neither_noise_nor_bound(change):
    """The first hook, the budget's, has seen the old ones."""
    run = Run()
    run.optimizer.attach_step_hook(lambda optimizer: setattr(optimizer, change, 50.0))
    run.backward()
    with pytest.raises(InvalidOptionError, match=change):
        run.optimizer.step()
    assert not run.applied
    assert len(run.engine.accountant) == 0


def test_per_sample_gradients_that_are_released_are_not_shown():
    """At level "exact" the sum is formed of them when the step is taken."""
    model = small_model()
    _, optimizer, _ = ghostclip.PrivacyEngine(noise_level="exact").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=declared(DATA, 8),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        grad_sample_mode="hooks",
        wrap_model=False,
        probe=False,
    )
    inputs, targets = BATCH
    want = clipped_sum(model, BATCH, 0.5)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    assert all(p.grad_sample is None for p in model.parameters())
    for p in model.parameters():
        p.grad_sample = torch.full((8, *p.shape), 9.0)
    optimizer.clipper.clip_coefficients.fill_(9.0)
    optimizer.pre_step()
    got = 8 * torch.cat([p.grad.flatten() for p in model.parameters()]).double()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@every_strategy
def test_what_lay_in_the_gradients_before_is_not_taken_over(strategy):
    """A clipper that nobody owned has shown its sums; nothing tells what became of them."""
    model = small_model()
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.5, strategy=strategy)
    clipper.backward(nn.functional.cross_entropy(model(BATCH[0]), BATCH[1], reduction="none"))
    for p in model.parameters():
        p.grad.data.mul_(100)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DPOptimizer(inner, noise_multiplier=0.0, expected_batch_size=8, clipper=clipper)
    with pytest.raises(MissingGradientError):
        optimizer.step()
    want = clipped_sum(model, BATCH, 0.5)
    clipper.backward(nn.functional.cross_entropy(model(BATCH[0]), BATCH[1], reduction="none"))
    optimizer.pre_step()
    got = 8 * torch.cat([p.grad.flatten() for p in model.parameters()]).double()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
