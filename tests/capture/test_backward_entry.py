"""Every backward that trains a private model passes the entry where its loss is examined."""

import inspect
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.nn import functional

import ghostclip
from ghostclip.capture import backward_entry
from ghostclip.errors import LossReductionError, SampleMixingError
from tests.reference import clip_and_sum, per_sample_gradients

DOUBLE = torch.float64
# What other tests may have left in its place.
TORCH = inspect.unwrap(torch.autograd.backward)
PLAIN = ["auto", "bookkeeping", "hooks"]


@pytest.fixture
def nobody_attached(monkeypatch):
    """Other tests' clippers may live on."""
    monkeypatch.setattr(backward_entry, "_attached", WeakSet())
    monkeypatch.setattr(torch.autograd, "backward", TORCH)


def _model(inputs=5, outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def _x(samples=4):
    return torch.randn(samples, 5, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)


def _each(model, x):
    return model(x).square().sum(1)


def _wanted(losses, x, bound=0.5):
    return clip_and_sum(
        per_sample_gradients(_model(), {"x": x}, lambda m, b: losses(m, b["x"]), axes={}), bound
    ).clipped


def _assert_clipped(model, wanted):
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name])


def test_backward_that_was_taken_from_torch_before(nobody_attached):
    kept, model = torch.autograd.backward, _model()
    with ghostclip.GhostClipper(model, max_grad_norm=1.0):
        with pytest.raises(LossReductionError, match=r"Call loss\.backward\(\)"):
            kept(_each(model, _x()).mean())
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("strategy", PLAIN)
def test_several_scalars_are_terms_of_one_sum(strategy):
    model = _model()
    with ghostclip.GhostClipper(model, max_grad_norm=0.5, strategy=strategy):
        out = model(_x())
        torch.autograd.backward([out.square().sum(1).mean(), 0.5 * out.sum(1).mean()])
    _assert_clipped(model, _wanted(lambda m, x: _each(m, x) + 0.5 * m(x).sum(1), _x()))


@pytest.mark.parametrize("declared", ["sum", "mean"])
@pytest.mark.parametrize("strategy", PLAIN)
def test_losses_with_ones_are_a_sum_whatever_was_declared(strategy, declared):
    model = _model()
    with ghostclip.GhostClipper(model, max_grad_norm=0.5, strategy=strategy, loss_reduction=declared):
        _each(model, _x()).backward(torch.ones(4, dtype=DOUBLE))
    _assert_clipped(model, _wanted(_each, _x()))


def test_losses_with_a_gradient_whose_entries_differ():
    model = _model()
    with ghostclip.GhostClipper(model, max_grad_norm=0.5), pytest.raises(LossReductionError, match="entries differ"):
        _each(model, _x()).backward(torch.tensor([1.0, 2, 3, 4], dtype=DOUBLE))
    assert all(p.grad is None for p in model.parameters())


def test_backwards_that_do_not_train_the_model():
    """A generator through a frozen private critic, and the critic's own loss that nobody back-propagates."""
    critic, generator, noise = _model(outputs=1), nn.Linear(2, 5).double(), torch.randn(4, 2, dtype=DOUBLE)
    with ghostclip.GhostClipper(critic, max_grad_norm=0.5):
        critic(_x()).mean()
        critic.requires_grad_(False)
        critic(generator(noise)).std().backward()
        critic.requires_grad_(True)
        assert generator.weight.grad is not None
        assert all(p.grad is None for p in critic.parameters())
        generator(noise).std().backward()
        critic(generator(noise)).std().backward(inputs=list(generator.parameters()))
        assert all(p.grad is None for p in critic.parameters())
        critic(_x()).mean().backward()


def test_penalty_of_parameters_alone_is_no_term_of_samples():
    model, free = _model(), nn.Parameter(torch.ones(3, dtype=DOUBLE))
    with ghostclip.GhostClipper(model, max_grad_norm=0.5):
        (_each(model, _x()).mean() + 0.37123 * free.square().sum().sqrt()).backward()
    _assert_clipped(model, _wanted(_each, _x()))


def test_factor_that_changes_from_step_to_step():
    model = _model()
    with ghostclip.GhostClipper(model, max_grad_norm=0.5):
        (_each(model, _x()).mean() / 8).backward()
        (_each(model, _x(6)).mean() / 8).backward()
        with pytest.raises(LossReductionError, match=r"0\.125 in earlier steps .* 0\.1 now.*BatchMemoryManager"):
            (_each(model, _x()).mean() / 10).backward()


def test_two_forwards_of_the_same_samples():
    model, x = _model(), _x()
    with ghostclip.GhostClipper(model, max_grad_norm=0.5):
        functional.mse_loss(model(x), model(2 * x)).backward()
        _assert_clipped(model, _wanted(lambda m, x: (m(x) - m(2 * x)).square().mean(1), x))
        with pytest.raises(SampleMixingError):
            functional.mse_loss(model(x), model(2 * x).roll(1, 0)).backward()


def test_a_loss_through_two_private_models_is_refused_by_that_name():
    encoder, decoder = nn.Linear(6, 8), nn.Linear(8, 3)
    with ghostclip.GhostClipper(encoder, max_grad_norm=0.5), ghostclip.GhostClipper(decoder, max_grad_norm=0.5):
        loss = decoder(encoder(torch.randn(4, 6))).square().sum(1).mean()
        with pytest.raises(LossReductionError, match="through two private models"):
            loss.backward()


class _OwnScalar(nn.Module):
    """Returns nothing but its loss."""

    def __init__(self, loss):
        super().__init__()
        self.inner, self.loss = _model(), loss

    def forward(self, x):
        return self.loss(self.inner(x))


@pytest.mark.parametrize("strategy", PLAIN)
def test_model_that_returns_only_its_loss(strategy):
    model = _OwnScalar(lambda out: out.square().sum(1).mean())
    with ghostclip.GhostClipper(model, max_grad_norm=0.5, strategy=strategy):
        model(_x()).backward()
    _assert_clipped(model.inner, _wanted(_each, _x()))
    model = _OwnScalar(lambda out: out.square().sum(1).mean().sqrt())
    with ghostclip.GhostClipper(model, max_grad_norm=0.5, strategy=strategy), pytest.raises(LossReductionError):
        model(_x()).backward()
