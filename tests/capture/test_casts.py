"""Under autocast the factors of a layer are what was multiplied: the cast input, once for all that read it."""

import torch
from torch import nn

from ghostclip import GhostClipper


class Block(nn.Module):
    """A norm in float32, and three layers that read what it returns."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.layers = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(3))
        self.head = nn.Conv1d(24, 8, 3)

    def forward(self, x):
        x = self.norm(x)
        return self.head(sum(layer(x) for layer in self.layers).mT)


def _losses(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().sum((1, 2))


def test_norms_are_those_of_the_model_as_it_ran():
    """Against autograd under autocast, which rounds each weight's gradient to 8 bits."""
    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 9, 24)
    squares = []
    for row in x.split(1):
        grads = torch.autograd.grad(_losses(model, row).sum(), list(model.parameters()))
        squares.append(sum(grad.double().square().sum() for grad in grads))
    wanted_B = torch.stack(squares).sqrt()
    clipper = GhostClipper(model, max_grad_norm=1.0)
    clipper.backward(_losses(model, x))
    torch.testing.assert_close(clipper.per_sample_norms.double(), wanted_B, rtol=3e-3, atol=0)
