"""Two networks, each with a clipper of its own, trained in turns against each other.

Shape suffix: B samples.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.exactness.runs import STRATEGIES, engine, gradients, relative_error
from tests.reference import clip_and_sum, per_sample_gradients

F64 = torch.float64
C = 0.05


def _generator():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(inplace=True), nn.Linear(8, 12), nn.Unflatten(1, (3, 4))).double()


def _discriminator():
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.LeakyReLU(0.2, inplace=True), nn.Flatten(), nn.Linear(8, 1)).double()


def _losses(scores, *, real):
    wanted = torch.full_like(scores, float(real))
    return functional.binary_cross_entropy_with_logits(scores, wanted, reduction="none")[:, 0]


def _copied(model, build):
    """Return the same network without a clipper."""
    twin = build()
    twin.load_state_dict(model.state_dict())
    return twin


def _expected(model, x, losses):
    per_sample = per_sample_gradients(model, {"x": x}, lambda m, b: losses(m(b["x"])), axes={})
    return clip_and_sum(per_sample, C).clipped


def _learn_to_tell(discriminator, clipper, examples):
    """Real examples, then made ones; each batch's clipped sum is added to what is there."""
    discriminator.zero_grad(set_to_none=True)
    twin = _copied(discriminator, _discriminator)
    want = {name: torch.zeros_like(p) for name, p in discriminator.named_parameters()}
    for x, real in examples:
        clipper.backward(_losses(discriminator(x), real=real))
        added = _expected(twin, x, lambda scores, real=real: _losses(scores, real=real))
        want = {name: total + added[name] for name, total in want.items()}
    assert relative_error(gradients(discriminator), want) <= 1e-10


def _learn_to_deceive(generator, clipper, discriminator, noise):
    """Back through a discriminator that is frozen, and whose own clipper is to hear nothing."""
    generator.zero_grad(set_to_none=True)
    discriminator.zero_grad(set_to_none=True)
    discriminator.requires_grad_(False)
    clipper.backward(_losses(discriminator(generator(noise)), real=True))
    assert all(p.grad is None for p in discriminator.parameters())
    judge = _copied(discriminator, _discriminator).requires_grad_(False)
    want = _expected(_copied(generator, _generator), noise, lambda made: _losses(judge(made), real=True))
    discriminator.requires_grad_(True)
    assert relative_error(gradients(generator), want) <= 1e-10


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_generator_and_a_discriminator_with_a_clipper_each(strategy):
    generator, discriminator = _generator(), _discriminator()
    make = engine(strategy)
    of_generator, of_discriminator = make(generator, C), make(discriminator, C)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (generator, discriminator)]
    for _ in range(3):
        real, noise = torch.randn(5, 3, 4, dtype=F64), torch.randn(5, 3, dtype=F64)
        made = generator(noise).detach()
        _learn_to_tell(discriminator, of_discriminator, [(real, True), (made, False)])
        _learn_to_deceive(generator, of_generator, discriminator, noise)
        for optimizer in optimizers:
            optimizer.step()
