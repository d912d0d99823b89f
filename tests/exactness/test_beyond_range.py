"""Inputs and gradients whose squares float32 cannot hold: clipped as others where float64 can, harmless elsewhere."""

import pytest
import torch
from torch import nn

from ghostclip import GhostClipper
from ghostclip.clipping import policies

KINDS = {
    "positions": (lambda: nn.Linear(3, 4, bias=False), (9, 3)),
    "one position": (lambda: nn.Linear(3, 4, bias=False), (1, 3)),
    "wide": (lambda: nn.Linear(40, 50, bias=False), (5, 40)),
    "convolution": (lambda: nn.Conv1d(3, 4, 3, padding=1, bias=False), (3, 16)),
}
POLICIES = {"flat": lambda: policies.flat(0.5), "normalised": policies.normalised}


def _sum_of(build, policy, strategy, x, weight):
    torch.manual_seed(0)
    model = build()
    clipper = GhostClipper(model, policy=policy(), strategy=strategy, probe=False)
    y = model(x)
    clipper.backward((y * weight.view(-1, *[1] * (y.dim() - 1))).flatten(1).sum(1))
    return model.weight.grad.double(), clipper


def _reference(build, policy, x, weight):
    torch.manual_seed(0)
    model = build().double()
    total = torch.zeros_like(model.weight)
    for one, factor in zip(x.double(), weight.double(), strict=True):
        (gradient,) = torch.autograd.grad((model(one[None]) * factor).sum(), model.weight)
        total += policy().coefficients([gradient.norm()[None]], (policy().max_grad_norm,))[0].item() * gradient
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("size", "weight"), [(1e36, 0.0), (1e25, 1e-20), (1e-25, 1e20), (1e15, 1.0), (1e30, 1e-35)])
def test_a_sample_of_any_size_is_clipped_as_in_float64(kind, policy, size, weight, strategy):
    build, shape = KINDS[kind]
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    x[1] *= size
    weights = torch.tensor([1.0, weight, 2.0])
    found, clipper = _sum_of(build, POLICIES[policy], strategy, x, weights)
    expected = _reference(build, POLICIES[policy], x, weights)
    alone = _reference(build, POLICIES[policy], x[1:2], weights[1:2])
    if clipper.non_finite_samples:
        # What float32 cannot form whole contributes nothing.
        expected = expected - alone
    torch.testing.assert_close(found, expected, rtol=3e-5, atol=3e-6)
