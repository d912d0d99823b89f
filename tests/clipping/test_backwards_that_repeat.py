"""With two backwards the norms are the first one's and the sums the second one's: both must be of one gradient."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ghostclip
from ghostclip.errors import TamperedGradientError

two_passes = pytest.mark.parametrize("strategy", ["ghost", "fast"])
every_strategy = pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "fast", "hooks"])
C = 0.5


class _Rounded(torch.autograd.Function):
    """Gradients that are drawn at random around the true ones, as a quantised layer has them."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.exp(3 * torch.randn_like(grad))


class _Net(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 3)
        self.between = between

    def forward(self, x):
        return self.last(self.between(self, self.first(x)).tanh())


def _dropped(net, x):
    return net.second(torch.nn.functional.dropout(x, 0.9))


BETWEEN = {
    "random backward": lambda net, x: net.second(_Rounded.apply(x)),
    "checkpointed dropout": lambda net, x: checkpoint(_dropped, net, x, use_reentrant=False, preserve_rng_state=False),
    "checkpointed dropout, kept": lambda net, x: checkpoint(_dropped, net, x, use_reentrant=False),
}


def _norm(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()


@every_strategy
@pytest.mark.filterwarnings("ignore:not checked")
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_what_is_drawn_in_a_backward_is_drawn_again_alike(between, strategy):
    model = _Net(between)
    with ghostclip.GhostClipper(model, max_grad_norm=C, strategy=strategy) as clipper:
        for _ in range(4):
            clipper.backward(model(10 * torch.randn(1, 4)).square().sum(1))
            assert 0.99 * C < _norm(model) <= C * (1 + 1e-5)
            clipper.reset()


def _in_turn(*factors):
    turns = itertools.cycle(factors)
    return lambda grad: grad * next(turns)


HOOKS = {
    "another scale": lambda: _in_turn(1.0, 100.0),
    "another scale, of one element": lambda: _in_turn(1.0, torch.tensor([100.0] + [1.0] * 63)),
    "numpy": lambda: lambda grad: grad * float(np.random.default_rng().uniform(1, 2)),
    "nothing at first": lambda: _in_turn(0.0, 1.0),
}


@two_passes
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_gradients_that_change_between_the_backwards_are_refused(hook, strategy):
    hooks = [None]

    def between(net, x):
        x = x.sin()
        if hooks[0] is not None and x.requires_grad:
            x.register_hook(hooks[0])
        return net.second(x)

    model, x = _Net(between), torch.randn(3, 4)
    with ghostclip.GhostClipper(model, max_grad_norm=C, strategy=strategy) as clipper:
        clipper.backward(model(x).square().sum(1))
        clipper.reset()
        hooks[0] = hook()
        losses = model(x).square().sum(1)
        with pytest.raises(TamperedGradientError, match=r"second backward.*bookkeeping"):
            clipper.backward(losses)
        assert not clipper.has_clipped_sum
        assert all(p.grad is None for p in model.parameters())
        hooks[0] = None
        clipper.backward(model(x).square().sum(1))
        assert 0 < _norm(model) <= 3 * C * (1 + 1e-5)
