"""Backwards that make of one sample's gradient another one in other company, with every zero left a zero."""

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import GhostClipError, SampleMixingError


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
