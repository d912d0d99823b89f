"""What a gradient is made of must not change between its norm and its sum, and stand-ins must follow the model."""

import pytest
import torch
from torch import nn

from ghostclip import GhostClipper
from ghostclip.errors import TamperedGradientError
from tests.exactness.runs import engine
from tests.reference import trainable

_LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "sequence": (lambda: nn.Linear(40, 30), (5, 3, 40)),
    "bias": (lambda: nn.Sequential(nn.Linear(4, 3)).requires_grad_(requires_grad=True), (5, 4)),
    "norm": (lambda: nn.LayerNorm(4), (5, 4)),
    "convolution": (lambda: nn.Conv1d(2, 30, 3), (5, 2, 6)),
}


@pytest.mark.parametrize("kind", _LAYERS)
def test_hook_that_works_in_place_is_refused_or_counted(kind, strategy):
    """A hook on a layer's output multiplies its gradient in place by a hundred."""
    make, shape = _LAYERS[kind]
    model = nn.Sequential(make())
    if kind == "bias":
        model[0][0].weight.requires_grad_(requires_grad=False)
    clipper = engine(strategy, loss_reduction="sum")(model, 1.0)
    x = torch.randn(shape)
    clipper.backward(model(x).square().flatten(1).sum(1))
    clipper.reset()
    single = torch.cat([x[:1], torch.zeros_like(x[1:])])
    output = model(single)
    output.register_hook(lambda grad: (grad.mul_(100), None)[1])
    losses = output.square().flatten(1).sum(1) * torch.eye(len(x))[0]
    try:
        clipper.backward(losses)
    except TamperedGradientError:
        assert all(parameter.grad is None for parameter in model.parameters()), "nothing of it may be released"
        return
    total = sum(parameter.grad.square().sum() for parameter in trainable(model).values())
    assert total.sqrt() <= 1.0 + 1e-5


def test_samples_of_two_layers_do_not_share_memory():
    """The gradient of a sum reaches both biases as one tensor; their per-sample gradients are two."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.a(x) + self.b(x)

    model = Sum()
    clipper = GhostClipper(model, max_grad_norm=1.0, strategy="hooks", loss_reduction="sum")
    clipper.backward(model(torch.randn(5, 4)).square().sum())
    before = model.b.bias.grad_sample.clone()
    model.a.bias.grad_sample.mul_(2)
    assert torch.equal(model.b.bias.grad_sample, before)


def test_parameter_that_comes_back_is_trained(strategy):
    """Another parameter stood at its place for one batch."""
    model = nn.Sequential(nn.Linear(4, 3))
    clipper = engine(strategy)(model, 1.0)
    x, own = torch.randn(5, 4), model[0].weight
    clipper.backward(model(x).square().sum(1))
    expected = own.grad.clone()
    clipper.reset()
    model[0].weight = nn.Parameter(torch.randn(3, 4))
    clipper.backward(model(x).square().sum(1))
    clipper.reset()
    model[0].weight = own
    clipper.backward(model(x).square().sum(1))
    torch.testing.assert_close(own.grad, expected)


def test_parameter_turned_in_place_is_lent_anew():
    """``w.data = w.data.t()`` keeps address, dtype and shape of a square weight."""
    model = nn.Linear(4, 4).double()
    GhostClipper(model, max_grad_norm=1.0)
    x = torch.randn(5, 4, dtype=torch.float64)
    model(x)
    model.weight.data = model.weight.data.t()
    torch.testing.assert_close(model(x), x @ model.weight.mT + model.bias)
