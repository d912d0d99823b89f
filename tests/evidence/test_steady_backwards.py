"""Backwards that make of one sample's gradient another one in other company, with every zero left a zero."""

from itertools import permutations

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import GhostClipError, SampleMixingError
from ghostclip.evidence.probe import weightings


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, change):
        ctx.change = change
        return h.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


class _Model(nn.Module):
    def __init__(self, change, *, hook):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.change, self.hook = change, hook

    def forward(self, x):
        h = self.first(x).tanh()
        if self.hook:
            h.register_hook(self.change)
        else:
            h = _Backward.apply(h, self.change)
        return self.last(h)


BATCH = {
    "unit norm": lambda grad: grad / grad.norm(),
    "clipped norm": lambda grad: grad * (0.1 / grad.norm()).clamp(max=1),
    "largest": lambda grad: grad / grad.abs().max(),
    "by another's": lambda grad: grad * (1 + grad[0].abs().sum()),
}
ROWS = {
    "unit norm": lambda grad: grad / grad.norm(dim=1, keepdim=True).clamp(min=1e-12),
    "clamped": lambda grad: grad.clamp(-0.1, 0.1),
    "reversed": lambda grad: -0.5 * grad,
}


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("change", BATCH.values(), ids=BATCH)
def test_one_that_follows_the_batch_is_refused(change, dtype, hook):
    torch.manual_seed(1)
    model = _Model(change, hook=hook).to(dtype)
    with (
        ghostclip.GhostClipper(model, max_grad_norm=0.1),
        pytest.raises(SampleMixingError, match="when other samples' gradients came with it"),
    ):
        model(torch.randn(6, 3, dtype=dtype) * torch.arange(1, 7, dtype=dtype).unsqueeze(1))


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("change", ROWS.values(), ids=ROWS)
def test_one_of_each_row_is_not(change, hook):
    model = _Model(change, hook=hook)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
        clipper.backward(model(torch.randn(6, 3)).square().sum(1))
        assert clipper.batch_size == 6


def test_one_in_the_loss_is_refused():
    model = nn.Linear(3, 4)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1):
        losses_B = _Backward.apply(model(torch.randn(6, 3)), BATCH["unit norm"]).square().sum(1)
        with pytest.raises(GhostClipError, match="loss"):
            losses_B.mean().backward()


def test_two_forwards_of_one_layer_are_two():
    model = nn.Linear(3, 4)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
        clipper.backward((model(torch.randn(6, 3)) - model(torch.randn(6, 3))).square().sum(1))
        assert clipper.batch_size == 6


@pytest.mark.parametrize("size", [2, 3, 5, 31, 32, 33, 100, 1024, 1025])
def test_any_two_samples_are_multiplied_by_other_numbers(size):
    every, *drawn = weightings(size, linear=True)
    assert every == dict.fromkeys(range(size), 1.0)
    assert len(drawn) == 1 + (size > 32) + (size > 1024)
    assert len({tuple(one.get(sample, 0.0) for one in drawn) for sample in range(size)}) == size
    assert all(torch.tensor(weight).frexp().mantissa == 0.5 for one in drawn for weight in one.values())


class _OneFollowsAnother(nn.Module):
    def __init__(self, follower, leader):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.follower, self.leader = follower, leader

    def forward(self, x):
        h = self.first(x)
        added = torch.zeros(len(x), len(x))
        added[self.follower, self.leader] = 1e-3
        return self.last(h + added @ h)


@pytest.mark.parametrize("pair", list(permutations(range(6), 2)), ids=str)
def test_one_sample_that_follows_another_by_a_thousandth(pair):
    model = _OneFollowsAnother(*pair)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1), pytest.raises(GhostClipError, match="other samples"):
        model(torch.randn(6, 3))


@pytest.mark.parametrize("scale", [2.0**-100, 1.0, 2.0**60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_any_size_are_told_apart_and_none_is_refused(dtype, scale):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)).to(dtype)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
        clipper.backward((model(torch.randn(32, 3, dtype=dtype)) * scale).square().sum(1))
        assert clipper.batch_size == 32
