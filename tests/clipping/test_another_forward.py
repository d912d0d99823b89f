"""Several forwards around one loss: those that have no part in it, and what is noted of each that has."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.errors import LossReductionError, SampleMixingError

B, C = 9, 5.0


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, 6, dtype=torch.float64, generator=generator), torch.arange(B) % 3


def _expected(model, x, y):
    total = 0
    for n in range(B):
        loss = functional.cross_entropy(model(x[n : n + 1]), y[n : n + 1])
        grad = nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
        total = total + grad * min(1.0, C / float(grad.norm()))
    return total


def _losses(logits, y):
    return functional.cross_entropy(logits, y, reduction="none")


# Ways to go backward from losses (B,).
BACKWARDS = {
    "a mean in a plain loop": lambda clipper, losses: losses.mean().backward(),
    "a mean": lambda clipper, losses: clipper.backward(losses.mean()),
    "losses": lambda clipper, losses: clipper.backward(losses),
}


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("strategy", ["bookkeeping", "hooks", "ghost", "fast"])
def test_losses_that_are_run_again_are_exact(strategy, use_reentrant):
    """A loss under activation checkpointing is proved as any, and what its proof accumulates is taken back."""
    model, (x, y) = _model(), _batch()
    with ghostclip.GhostClipper(model, max_grad_norm=C, strategy=strategy) as clipper:
        clipper.backward(checkpoint(lambda logits: _losses(logits, y), model(x), use_reentrant=use_reentrant))
        found = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
    torch.testing.assert_close(found, _expected(model, x, y), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("strategy", ["bookkeeping", "hooks", "ghost", "fast"])
@pytest.mark.parametrize("rows", [1, 4, 40])
@pytest.mark.parametrize("way", BACKWARDS)
def test_the_sum_is_that_of_the_loss(way, rows, strategy):
    """The number of samples that a mean has divided by is that of the forward which the loss is of."""
    model, (x, y) = _model(), _batch()
    with ghostclip.GhostClipper(model, max_grad_norm=C, strategy=strategy) as clipper:
        losses = _losses(model(x), y)
        model(torch.randn(rows, 6, dtype=torch.float64))
        BACKWARDS[way](clipper, losses)
        found = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
    torch.testing.assert_close(found, _expected(model, x, y), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_a_loss_that_compares_samples_is_refused(rows):
    """The samples are those of the forward which the loss is of."""
    model, (x, _) = _model(), _batch()
    with ghostclip.GhostClipper(model, max_grad_norm=C):
        h = functional.normalize(model(x), dim=1)
        model(torch.randn(rows, 6, dtype=torch.float64))
        with pytest.raises(SampleMixingError):
            functional.cross_entropy(h @ h.T, torch.arange(B).roll(1)).backward()


def _off_the_median(logits, y):
    losses = _losses(logits, y)
    return (losses * (losses.detach() - losses.detach().median())).mean()


def _private():
    """Return a private model, its criterion, and a batch."""
    model, data = _model(), TensorDataset(*_batch())
    model, _, criterion, loader = ghostclip.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=B),
        criterion=_off_the_median,
        noise_multiplier=1.0,
        max_grad_norm=C,
    )
    return model, criterion, *next(iter(loader))


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_a_known_loss_is_looked_at(rows):
    """A known loss is one of the outputs that it was computed from, not of those that came last."""
    model, criterion, x, y = _private()
    logits = model(x)
    model(torch.randn(rows, 6, dtype=torch.float64))
    with pytest.raises(LossReductionError, match="criterion _off_the_median"):
        criterion(logits, y).backward()


# Orders of the terms of a loss over two forwards.
ORDERS = {"in order": lambda one, other: one + other, "the other first": lambda one, other: other + one}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("of_first", [True, False])
def test_a_known_loss_beside_another_forward(of_first, order):
    """A known loss is looked at, whichever of two forwards it is of."""
    model, criterion, x, y = _private()
    first, second = model(x), model(x + 0.1)
    known, other = (first, second) if of_first else (second, first)
    with pytest.raises(LossReductionError, match="criterion _off_the_median"):
        ORDERS[order](criterion(known, y), other.square().mean()).backward()


class Balanced(nn.Module):
    """Returns logits, and a scalar that follows the batch."""

    def __init__(self):
        super().__init__()
        self.body, self.router = _model(), nn.Linear(6, 4)

    def forward(self, x):
        shares = self.router(x).softmax(1)
        load = functional.one_hot(shares.argmax(1), 4).to(x).mean(0)
        return self.body(x), (load * shares.mean(0)).sum()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("of_first", [True, False])
def test_a_scalar_beside_another_forward(of_first, order):
    """A scalar that follows the batch is refused, whichever of two forwards it is of."""
    (x, y), model = _batch(), Balanced().double()
    with ghostclip.GhostClipper(model, max_grad_norm=C):
        (first, scalar), (second, other) = model(x), model(x + 0.1)
        logits = functional.cross_entropy(first, y) + functional.cross_entropy(second, y)
        with pytest.raises(LossReductionError, match="a scalar that the model computes"):
            ORDERS[order](logits, scalar if of_first else other).backward()
