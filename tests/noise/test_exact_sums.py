"""The exact level on a real model: integers whose sensitivity is checked to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ghostclip import GhostClipper
from ghostclip.errors import InvalidOptionError
from ghostclip.noise import ExactNoise
from ghostclip.noise.exact import ExactRelease, Grid

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
    (x, y), source = records, Silent()
    with GhostClipper(model, max_grad_norm=C, strategy="hooks", loss_reduction="sum") as clipper:
        parameters, exact = clipper.trainable_parameters(), ExactRelease(clipper, source)
        for start in range(0, len(x), batch):
            loss = nn.functional.cross_entropy(
                model(x[start : start + batch]), y[start : start + batch], reduction="sum"
            )
            loss.backward()
            exact.collect()
        exact.release(parameters, std=sigma * C)
    assert all(0 <= std - sigma * 2**24 < 1e-6 for _, std in source.seen)
    return [total for total, _ in source.seen]


@pytest.fixture
def records():
    return torch.randn(7, 6) * 3, torch.randint(4, (7,))


def test_no_record_moves_the_integers_by_more_than_the_bound(records):
    """Every other record's integers stay the same to the last bit, so that the difference is one record's alone."""
    x, y = records
    whole = integers(records, batch=1)
    for left_out in range(7):
        keep = [i for i in range(7) if i != left_out]
        without = integers((x[keep], y[keep]), batch=1)
        alone = integers((x[[left_out]], y[[left_out]]), batch=1)
        moved = [a - b for a, b in zip(whole, without, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(moved, alone, strict=True))
        assert 0 < sum(int(v) ** 2 for part in moved for v in part.flatten().tolist()) <= 2**48


def test_refuses_what_would_be_lost():
    with pytest.raises(InvalidOptionError, match=r"\(2,\) clip factors"):
        Grid.for_norm(1.0).quantize([torch.zeros(3, 5)], torch.ones(2))
    model = nn.Linear(6, 4)
    with GhostClipper(model, max_grad_norm=C, strategy="hooks", loss_reduction="sum") as clipper:
        exact = ExactRelease(clipper, ExactNoise())
        model(torch.randn(3, 6)).sum().backward()
        exact.collect()
        with pytest.raises(InvalidOptionError, match="not released"):
            exact.release([model.weight], std=1.0)
