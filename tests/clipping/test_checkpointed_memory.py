"""Two-pass clipping under activation checkpointing holds no more than one block's activations at a time."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ghostclip.clipping.passes import NormPass, SumPass
from tests.exactness.runs import engine

BLOCKS, SHAPE = 6, (3, 5, 17)


class _Blocks(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, SHAPE[2]), nn.GELU(), nn.Linear(SHAPE[2], 4)) for _ in range(BLOCKS)
        )
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.fixture(autouse=True)
def _nothing_older():
    """What lives before the test is not looked through at every factor."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def _alive():
    return sum(1 for item in gc.get_objects() if type(item) is torch.Tensor and tuple(item.shape) == SHAPE)


@pytest.mark.parametrize(("strategy", "reentrant"), [("ghost", True), ("fast", False)])
def test_activations_alive_at_once(strategy, reentrant, monkeypatch):
    counts = []
    for kind in (NormPass, SumPass):

        def counted(self, use, name, factor, consume=kind.consume):
            counts.append(_alive())
            return consume(self, use, name, factor)

        monkeypatch.setattr(kind, "consume", counted)
    model = _Blocks(reentrant=reentrant)
    clipper = engine(strategy)(model, 1.0)
    for _ in range(2):
        clipper.backward(model(torch.randn(3, 5, 4)).square().mean((1, 2)))
    assert counts
    # One block holds its own hidden activations and gradients, a handful; six blocks would hold several times as many.
    assert max(counts) <= 8, counts
