"""Evidence is asked for again as training goes on: what looked right in one batch may be wrong in the next."""

import pytest
import torch
from torch import nn

from ghostclip.capture.inputs import is_power_of_four
from ghostclip.errors import GhostClipError
from tests.exactness.runs import engine


class _SortsByLength(nn.Module):
    """Orders samples by their first value before a layer and restores the order behind it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.layer(x[order])[order.argsort()]


def test_rows_in_order_in_the_first_batch_only(strategy):
    """The first batch is sorted already; the evidence of a later one shows that rows move."""
    torch.manual_seed(0)
    model = _SortsByLength().double()
    clipper = engine(strategy)(model, 0.1)
    x = torch.randn(5, 4, dtype=torch.float64)
    clipper.backward(model(x[x[:, 0].argsort()]).square().sum(1))

    def train_on():
        for _ in range(4):
            clipper.backward(model(torch.randn(5, 4, dtype=torch.float64)).square().sum(1))

    with pytest.raises(GhostClipError):
        train_on()


def test_batch_sizes_may_change_from_step_to_step(strategy):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).double()
    clipper = engine(strategy)(model, 0.1)
    for size in (3, 1, 4, 2, 5, 4, 1, 3, 4, 2, 6, 4, 4, 1, 2, 4, 7):
        clipper.backward(model(torch.randn(size, 4, 4, dtype=torch.float64)).square().sum((1, 2)))
        assert clipper.batch_size == size


def test_when():
    assert [count for count in range(70) if is_power_of_four(count)] == [1, 4, 16, 64]
