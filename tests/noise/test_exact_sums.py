"""The exact level on a real model: integers whose sensitivity is checked to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ghostclip import GhostClipper
from ghostclip.errors import InvalidOptionError
from ghostclip.noise import ExactNoise, Grid
from ghostclip.noise.exact import ExactSums

C = 0.7


class Silent(ExactNoise):
    """Keeps the integers as they are and shows them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def add_(self, tensor, std):
        self.seen.append((tensor.clone(), std))


def integers(records, *, batch, sigma=2.0):
    """The integers that a release would add noise to, from physical batches of some size."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4), nn.LayerNorm(4))
    x, y = records
    sums, source = ExactSums(Grid.for_norm(C)), Silent()
    with GhostClipper(model, max_grad_norm=C, strategy="hooks", loss_reduction="sum") as clipper:
        parameters = clipper.trainable_parameters()
        for start in range(0, len(x), batch):
            loss = nn.functional.cross_entropy(
                model(x[start : start + batch]), y[start : start + batch], reduction="sum"
            )
            loss.backward()
            sums.add({p: p.grad_sample for p in parameters}, clipper.clip_coefficients)
            clipped = [p.grad.clone() for p in parameters]
            model.zero_grad()
        released = sums.release(parameters, sigma, source)
    assert all(std == sigma * 2**24 for _, std in source.seen)
    return [total for total, _ in source.seen], released, clipped


@pytest.fixture
def records():
    return torch.randn(7, 6) * 3, torch.randint(4, (7,))


def test_no_record_moves_the_integers_by_more_than_the_bound(records):
    """Every other record's integers stay the same to the last bit, so that the difference is one record's alone."""
    x, y = records
    whole, *_ = integers(records, batch=1)
    for left_out in range(7):
        keep = [i for i in range(7) if i != left_out]
        without, *_ = integers((x[keep], y[keep]), batch=1)
        alone, *_ = integers((x[[left_out]], y[[left_out]]), batch=1)
        moved = [a - b for a, b in zip(whole, without, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(moved, alone, strict=True))
        assert 0 < sum(int(v) ** 2 for part in moved for v in part.flatten().tolist()) <= 2**48


def test_refuses_what_would_be_lost():
    parameter, other = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(5))
    sums = ExactSums(Grid.for_norm(1.0))
    with pytest.raises(InvalidOptionError, match=r"\(2,\) clip factors"):
        sums.add({parameter: torch.zeros(3, 5)}, torch.ones(2))
    sums.add({parameter: torch.zeros(3, 5)}, torch.ones(3))
    with pytest.raises(InvalidOptionError, match="not released"):
        sums.release([other], 1.0, ExactNoise())
