"""Layers that read one input have its Gram matrix formed once, and the norms they have apart."""

import pytest
import torch
from torch import Tensor, nn

from ghostclip import GhostClipper
from ghostclip.clipping import policies

B, T, INPUTS = 5, 10, 48
GHOST = ("bookkeeping", "ghost")


class Readers(nn.Module):
    """Matrices that read one input, or copies of it."""

    def __init__(self, widths=(48, 32, 32), *, inputs=INPUTS, copies=False, turned=False, skipped=()):
        super().__init__()
        self.copies, self.turned, self.skipped = copies, turned, skipped
        shapes = [(inputs, width) if turned else (width, inputs) for width in widths]
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape) / 7) for shape in shapes])
        self.first = nn.Linear(inputs, inputs)

    def outputs(self, x_BTI: Tensor) -> list[Tensor]:
        x_BTI = self.first(x_BTI).tanh()
        found = []
        for number, weight in enumerate(self.weights):
            read_BTI = x_BTI.clone() if self.copies else x_BTI
            output = read_BTI @ weight if self.turned else nn.functional.linear(read_BTI, weight)
            found.append(output.detach() if number in self.skipped else output)
        return found

    def forward(self, x_BTI: Tensor) -> Tensor:
        return torch.cat(self.outputs(x_BTI), 2).sin()


def _losses(model: nn.Module, x_BTI: Tensor) -> Tensor:
    return model(x_BTI).square().sum((1, 2))


def _clipper(model: nn.Module, strategy: str, **options: object) -> GhostClipper:
    options = options if "policy" in options else {"max_grad_norm": 1.0, **options}
    return GhostClipper(model, strategy=strategy, memory_budget=1.0, probe=False, **options)


def _norms_one_by_one(model: nn.Module, x_BTI: Tensor) -> Tensor:
    norms = []
    for sample in x_BTI.split(1):
        grads = torch.autograd.grad(_losses(model, sample).sum(), list(model.parameters()), allow_unused=True)
        norms.append(torch.cat([grad.flatten() for grad in grads if grad is not None]).norm())
    return torch.stack(norms)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("skipped", [(), (0,), (0, 2)])
@pytest.mark.parametrize("strategy", GHOST)
def test_norms_are_those_of_one_sample_at_a_time(strategy, skipped, turned):
    model = Readers(turned=turned, skipped=skipped).double()
    x_BTI = torch.randn(B, T, INPUTS, dtype=torch.float64)
    want = _norms_one_by_one(model, x_BTI)
    with _clipper(model, strategy) as clipper:
        clipper.backward(_losses(model, x_BTI))
        torch.testing.assert_close(clipper.per_sample_norms, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("strategy", GHOST)
def test_clip_groups_are_kept_apart(strategy):
    model, x_BTI = Readers().double(), torch.randn(B, T, INPUTS, dtype=torch.float64)
    one_by_one = [torch.autograd.grad(_losses(model, x).sum(), list(model.parameters())) for x in x_BTI.split(1)]
    want = torch.tensor([[grad.norm() for grad in grads] for grads in one_by_one], dtype=torch.float64)
    with _clipper(model, strategy, policy=policies.per_layer(1.0)) as clipper:
        clipper.backward(_losses(model, x_BTI))
        found = clipper.group_norms
    torch.testing.assert_close(found.square().sum(1), want.square().sum(1), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.sort(1).values, want.sort(1).values, rtol=1e-12, atol=0)
