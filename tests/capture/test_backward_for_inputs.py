"""A backward that is not for the parameters, and a loss that samples never reach."""

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import BatchAxisError


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


class _Normed(nn.Sequential):
    """Uses a parameter without gradients, too, as reentrant checkpointing and spectral normalisation do."""

    def forward(self, x):
        with torch.no_grad():
            norm = self[0].weight.norm()
        return super().forward(x) / norm


def _normed():
    return _Normed(*_model())


def _losses(model, x):
    return model(x).square().sum(1)


@pytest.mark.parametrize("build", [_model, _normed])
@pytest.mark.parametrize("strategy", ["auto", "bookkeeping", "hooks", "ghost", "fast"])
def test_gradient_of_the_input_alone_adds_nothing(strategy, build):
    """Adversarial examples and saliency maps: otherwise every sample would contribute twice."""
    model, x = build(), torch.randn(4, 5, dtype=torch.float64)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.5, strategy=strategy)
    clipper.backward(_losses(model, x))
    want = [p.grad.clone() for p in model.parameters()]
    clipper.reset()
    seen = x.clone().requires_grad_()
    torch.autograd.grad(_losses(model, seen).sum(), seen)
    _losses(model, seen).sum().backward(inputs=[seen])
    assert all(p.grad is None for p in model.parameters())
    assert not clipper.has_clipped_sum
    clipper.backward(_losses(model, x))
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), want, strict=True))


class _Reversed(nn.Module):
    """In a way that nothing but the evidence can tell."""

    def __init__(self, undone=True):
        super().__init__()
        self.linear, self.undone, self.reorders = nn.Linear(5, 3), undone, True

    def forward(self, x):
        if not self.reorders:
            return self.linear(x)
        order = torch.arange(len(x)).flip(0)
        if not self.undone:
            return self.linear(x[order])
        return self.linear(x.gather(0, order.unsqueeze(1).expand_as(x))).flip(0)


@pytest.mark.parametrize("samples", [2, 3, 8])
def test_reordered_batch_is_refused(samples):
    """Also where the sample in the middle stays in its place."""
    model = _Reversed()
    ghostclip.GhostClipper(model, max_grad_norm=0.5)
    with pytest.raises(BatchAxisError, match="in another order than the samples"):
        model(torch.randn(samples, 5))


@pytest.mark.parametrize("samples", [2, 3, 8])
def test_outputs_in_another_order(samples):
    """A loss would bring each of them together with another sample's targets."""
    model = _Reversed(undone=False)
    ghostclip.GhostClipper(model, max_grad_norm=0.5)
    with pytest.raises(BatchAxisError, match=r"rows lie in another order than the samples.*argsort"):
        model(torch.randn(samples, 5))


def test_order_that_cannot_be_followed_is_refused_whenever_it_differs():
    """Not only in the forwards that are probed anyway."""
    model = _Reversed()
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.5)
    model.reorders = False
    for _ in range(5):
        clipper.backward(model(torch.randn(4, 5)).square().sum(1))
    model.reorders = True
    with pytest.raises(BatchAxisError, match="in another order than the samples"):
        model(torch.randn(4, 5))
