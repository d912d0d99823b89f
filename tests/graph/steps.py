"""Small models and losses that graphs are tested on, and what a step leaves behind."""

import torch
from torch import nn
from torch.nn import functional

import ghostclip

ATEN = ghostclip.GraphOptions(backend="aten")


class Net(nn.Module):
    """Two linear layers with dropout between them; `how` is what a forward does with the batch beside."""

    def __init__(self, how=None, p=0.0):
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(5, 7), nn.Dropout(p), nn.Linear(7, 3)
        self.how = how

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.how is not None:
            h = self.how(h)
        return self.second(self.dropout(h))


def losses(model, x, y):
    return functional.cross_entropy(model(x), y, reduction="none")


def batch(samples=6, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return torch.randn(samples, 5, dtype=dtype), torch.randint(3, (samples,))


def net(**options):
    torch.manual_seed(1)
    return Net(**options).double()


def step_of(model, *, loss=losses, max_grad_norm=0.3, options=ATEN, **clipper):
    return ghostclip.GraphStep(
        ghostclip.GhostClipper(model, max_grad_norm=max_grad_norm, strategy="graph", **clipper), loss, options=options
    )


def sums(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def warmed(model, **options):
    """A step whose graph was compared with the eager engine, and that holds no sum."""
    step = step_of(model, **options)
    step(*batch(seed=5))
    step.clipper.reset()
    assert step.graphs[0].verified, step.reasons
    return step


def eager_sums(model, *tensors, max_grad_norm=0.3, loss=losses):
    """What book-keeping leaves on a copy of a model."""
    import copy

    other = copy.deepcopy(model)
    other.zero_grad()
    with ghostclip.GhostClipper(other, max_grad_norm=max_grad_norm, strategy="bookkeeping") as clipper:
        clipper.backward(loss(other, *tensors))
        return sums(other), clipper.per_sample_norms
