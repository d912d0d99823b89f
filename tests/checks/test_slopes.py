"""Losses that bring samples together behind a slope that is zero in one batch: refused before it is anything else."""

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import SampleMixingError

cross_entropy = nn.functional.cross_entropy


def _each(z):
    return cross_entropy(z, torch.zeros(len(z), dtype=torch.long), reduction="none")


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, k):
        return z * k, z + k

    @staticmethod
    def backward(ctx, product, total):
        return product + total, None


MIXING = {
    "behind a Function": lambda z, k: _each(z) * (1 + k * _Scaled.apply(z, 1.0)[1].mean()),
    "centred": lambda z, k: _each(z - k * z.mean(0)),
    "weighted by the mean": lambda z, k: _each(z) + k * _each(z) * _each(z).mean(),
    "a neighbour": lambda z, k: (z - k * z.roll(1, 0)).square().sum(1),
    "a mask": lambda z, k: torch.where(torch.full((len(z),), k > 0), _each(z) * _each(z).mean(), _each(z)),
    "a bound": lambda z, k: _each(z) * (1 + _each(z).mean().clamp(0, k)),
    "a hinge": lambda z, k: _each(z) + (z[:, 0] - z[:, 0].roll(1, 0).detach() - z[:, 0].roll(1, 0) * k - 90).relu(),
    # In a batch that is in order, each entry is the sample's own.
    "sorted": lambda z, k: (_each(z) + 1e3 * torch.arange(5)).sort().values,
    "a running maximum": lambda z, k: (_each(z) + 1e3 * torch.arange(5)).cummax(0).values,
}
APART = {
    "a Function": lambda z, k: _each(_Scaled.apply(z, 1.0)[0] * (1 + k)),
    "a hinge": lambda z, k: (z[:, 0] - z[:, 1] - 90).relu() + _each(z),
    "a mask": lambda z, k: (z.square() * (torch.arange(4) > 3 * k)).sum(1),
    "its own mean": lambda z, k: _each(z - k * z.mean(1, keepdim=True)),
    "a zero of its kind": lambda z, k: _each(z) + z.sum() * 0,
    "its own median": lambda z, k: z.median(1).values + z.topk(2).values.sum(1),
    "two terms": lambda z, k: _each(z) + k * z.square().mean(1) / z.square().mean(1).detach(),
}


def _size_after(loss, *, scalar):
    """The number of samples that a backward of five has clipped, while k is zero."""
    model = nn.Linear(3, 4)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
        losses_B = loss(model(torch.randn(5, 3)), 0.0)
        losses_B.mean().backward() if scalar else clipper.backward(losses_B)
        return clipper.batch_size


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("loss", MIXING.values(), ids=MIXING)
def test_samples_together_are_refused(loss, scalar):
    with pytest.raises(SampleMixingError, match="depends on other samples' outputs"):
        _size_after(loss, scalar=scalar)


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("loss", APART.values(), ids=APART)
def test_samples_apart_are_not(loss, scalar):
    assert _size_after(loss, scalar=scalar) == 5
