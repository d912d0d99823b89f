"""What a gradient is made of must not change between its norm and its sum."""

import pytest
import torch
from torch import nn

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
