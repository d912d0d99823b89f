"""Reentrant checkpoints over nothing trained: over inputs, or frozen layers whose outputs need a gradient."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ghostclip.errors import GhostClipError
from tests.exactness.runs import engine
from tests.reference import clip_and_sum, per_sample_gradients, trainable

_C = 1.0


class _Frozen(nn.Module):
    """A frozen layer, and a block behind it that is run again in the backward, as an adapted language model has it."""

    def __init__(self, between=lambda hidden: hidden):
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.block, self.last = nn.Linear(4, 4), nn.Linear(4, 5), nn.Linear(5, 3)
        self.frozen.requires_grad_(False)
        self._between = between
        self.double()

    def forward(self, x):
        hidden = self.frozen(x).requires_grad_()
        return self.last(
            checkpoint(lambda given: self._between(torch.tanh(self.block(given))), hidden, use_reentrant=True)
        )


def _losses(model, batch):
    return model(batch["x"]).square().sum(1)


def _batch(size):
    return {"x": torch.randn(size, 4, dtype=torch.float64)}


def test_the_first_step_is_exact(strategy):
    model, batch = _Frozen(), _batch(5)
    expected = clip_and_sum(per_sample_gradients(_Frozen(), batch, _losses, axes={}), _C).clipped
    clipper = engine(strategy)(model, _C)
    for _ in range(2):
        clipper.reset()
        clipper.backward(_losses(model, batch))
        torch.testing.assert_close({name: p.grad for name, p in trainable(model).items()}, expected)


@pytest.mark.parametrize("before", [False, True], ids=["first", "later"])
def test_a_model_inside_a_checkpoint_as_a_whole_is_refused(strategy, before):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(5, 4)
    clipper = engine(strategy)(model, _C)
    if before:
        clipper.backward(model(x).square().sum(1))
        clipper.reset()
    losses = checkpoint(model, x.requires_grad_(), use_reentrant=True).square().sum(1)
    # After another forward the loss is looked at as one of that forward.
    with pytest.raises(GhostClipError, match=None if before else "reentrant"):
        clipper.backward(losses)


def test_a_plain_backward_through_a_model_inside_a_checkpoint_is_refused(strategy):
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(5, 4)
    with engine(strategy)(model, _C), pytest.raises(GhostClipError, match="reentrant"):
        checkpoint(model, x.requires_grad_(), use_reentrant=True).square().sum(1).mean().backward()
