"""Several uses of one parameter whose gradients nearly cancel: what is added of a sample has the norm it was given."""

import pytest
import torch
from torch import nn

from ghostclip import GhostClipper


class Turned(nn.Module):
    """Multiplies by the transpose of a parameter, entry by entry, once for each weight."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.ones(3, 4))

    def forward(self, x, weights):
        return sum((x * self.p.t() * weight[:, None, None]).sum((1, 2)) for weight in weights.unbind(1))


class Plain(Turned):
    """The same without the transpose."""

    def forward(self, x, weights):
        return sum((x.mT * self.p * weight[:, None, None]).sum((1, 2)) for weight in weights.unbind(1))


class Layer(nn.Module):
    """Calls a linear layer once for each weight."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x, weights):
        return sum((self.layer(x) * weight[:, None, None]).sum((1, 2)) for weight in weights.unbind(1))


@pytest.mark.parametrize("build", [Turned, Plain, Layer])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e8, 1e15])
def test_a_sample_is_within_the_bound_and_leaves_the_others(build, scale, strategy):
    torch.manual_seed(0)
    x, pairs = torch.randn(6, 4, 3), 0.1 + 3 * torch.rand(6, 2)
    weights = scale * torch.cat([pairs, -pairs.sum(1, keepdim=True)], 1)
    clipper = GhostClipper(build(), max_grad_norm=1.0, strategy=strategy, probe=False)

    def sums(chosen, values):
        clipper.reset()
        clipper.backward(clipper.model(x[chosen], values[chosen]))
        return torch.cat([p.grad.double().flatten() for p in clipper.model.parameters()])

    usual = weights.clone()
    usual[1:] = torch.tensor([1.0, 2.0, 0.5])
    rest = sums(slice(1, 6), usual)
    assert sums(slice(0, 1), usual).norm() <= 1 + 1e-5
    assert (sums(slice(0, 6), usual) - rest).norm() <= 1 + 1e-5
    for i in range(6):
        assert sums(slice(i, i + 1), weights).norm() <= 1 + 1e-5
