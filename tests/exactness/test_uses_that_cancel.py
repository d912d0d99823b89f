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


class Pair(nn.Module):
    """The difference between what two nearly equal halves of a record give, in one call of the layers."""

    def __init__(self, *, folded):
        super().__init__()
        self.folded = folded
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))

    def forward(self, x):
        halves = self.layers(x.flatten(0, 1)).view(len(x), 2, -1) if self.folded else self.layers(x)
        return 10 * (halves[:, 0] - halves[:, 1]).sum(1)


@pytest.mark.parametrize("folded", [False, True])
def test_two_halves_of_a_record_are_clipped_to_the_bound_and_no_further(folded, strategy):
    """Squares of terms are some hundred times those of their sum: float32 alone bounds the norm by 3e-4 too much."""
    torch.manual_seed(0)
    half, bound = torch.randn(6, 64), 1e-3
    x = torch.stack([half, half + 0.1 * torch.randn(6, 64)], 1)
    model, exact = Pair(folded=folded), Pair(folded=folded).double()
    exact.load_state_dict(model.state_dict())
    wanted = 0
    for one in x.double().split(1):
        grad = torch.cat([grad.flatten() for grad in torch.autograd.grad(exact(one).sum(), list(exact.parameters()))])
        wanted = wanted + grad * (bound / grad.norm()).clamp(max=1)
    clipper = GhostClipper(model, max_grad_norm=bound, strategy=strategy)
    clipper.backward(clipper.model(x))
    got = torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()
