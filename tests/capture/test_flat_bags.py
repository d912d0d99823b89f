"""Flat ids with offsets: what is a sample, what is refused, and that checks exchange bags and not ids."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from ghostclip import GhostClipper
from ghostclip.errors import BatchAxisError, SampleMixingError

BOUND = 0.05


class Model(nn.Module):
    """A bag, what `between` makes of its output, and a head."""

    def __init__(self, between=torch.tanh, *, inputs=4, **options):
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 4, **options)
        self.between = between
        self.head = nn.Linear(inputs, 3)

    def forward(self, ids, offsets):
        return self.head(self.between(self.bag(ids, offsets)))


def batch(samples=6):
    """Flat ids, offsets and targets."""
    counts = torch.tensor([3, 0, 9, 1, 5, 2])[:samples]
    return torch.randint(11, (int(counts.sum()),)), counts.cumsum(0) - counts, torch.randint(3, (samples,))


def clipped_sum(model, ids, offsets, target):
    model.zero_grad()
    with GhostClipper(model, max_grad_norm=BOUND) as clipper:
        functional.cross_entropy(model(ids, offsets), target).backward()
        return torch.cat([clipper.summed_gradient(p).flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("between", "why"),
    [
        (lambda h: h / len(h), "half of the samples were left out"),
        (lambda h: h + h.detach().sum(), "half of the samples were replaced"),
        (lambda h: h - h.mean(0), "per-sample gradients do not exist"),
    ],
)
def test_bags_that_mix_are_refused(between, why):
    with pytest.raises(SampleMixingError, match=why):
        clipped_sum(Model(between), *batch())


def test_several_bags_of_one_sample_are_refused():
    ids, offsets, target = batch()
    with pytest.raises(BatchAxisError, match="6 samples"):
        clipped_sum(Model(lambda h: h.view(-1, 8), inputs=8), ids, offsets, target[:3])


def test_ids_that_are_no_bags_are_samples():
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(11, 4), "one": nn.Embedding(11, 4), "head": nn.Linear(4, 3)})

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, ids, several):
            return self.parts["head"](self.parts["one"](ids) + self.parts["bag"](several))

    ids, target = torch.randint(11, (5,)), torch.randint(3, (5,))
    assert clipped_sum(Both(), ids, torch.randint(11, (5, 3)), target).norm() > 0
