"""Scalars that a model computes over the batch: means over samples, or refused where a loss goes through them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

import ghostclip
from ghostclip.errors import LossReductionError, SampleMixingError

B = 12


def balancing(h):
    """Return what mixtures of experts add, with h as the router's logits."""
    load_E = functional.one_hot(h.argmax(1), h.shape[1]).to(h).mean(0)
    return h.shape[1] * (load_E * h.softmax(1).mean(0)).sum()


# Scalars of hidden values (B, 6), and whether each sample adds something of its own.
SCALARS = {
    "a mean": (lambda h: h.square().mean(), True),
    "nothing of the data": (lambda h: (h * 0).sum(), True),
    "a divergence": (lambda h: (h.exp() - h - 1).sum(1).mean(), True),
    "noise of each sample": (lambda h: (h * torch.rand_like(h)).square().mean(), True),
    "in a random order": (lambda h: (h * h.detach()[torch.randperm(len(h))]).mean(), False),
    "off the batch's mean": (lambda h: (h - h.detach().mean(0)).square().mean(), False),
    "standardised": (lambda h: ((h - h.detach().mean(0)) / h.detach().std(0)).pow(3).mean(), False),
    "over its own size": (lambda h: h.square().mean() / h.square().mean().detach(), False),
    "the harder half": (lambda h: (h.square().mean(1) * (h.detach()[:, 0] > h.detach()[:, 0].median())).mean(), False),
    "targets off the mean": (
        lambda h: -((h.detach() - h.detach().mean(0)).softmax(1) * h.log_softmax(1)).sum(1).mean(),
        False,
    ),
    "a balancing loss": (balancing, False),
    "usage of a code book": (lambda h: balancing(-torch.cdist(h, torch.eye(5, h.shape[1]).to(h))), False),
}


class Model(nn.Module):
    """Gives a scalar to the loss beside its outputs, in one of these ways."""

    def __init__(self, scalar, how):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.scalar, self.how, self.kept = scalar, how, []

    def forward(self, x):
        h = torch.tanh(self.first(x))
        y, found = self.last(h), self.scalar(h)
        if self.how == "in an attribute":
            self.aux = found
        elif self.how == "in a list":
            self.kept = [found]
        elif self.how == "returned":
            return y, found
        elif self.how == "in its loss":
            return {"logits": y, "loss": y.square().mean() + found}
        return y


def loss_of(model, output):
    if model.how == "returned":
        return output[0].square().mean() + output[1]
    if model.how == "in its loss":
        return output["loss"]
    return output.square().mean() + (model.aux if model.how == "in an attribute" else model.kept[0])


HOW = ("returned", "in its loss", "in an attribute", "in a list")


@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.parametrize("how", HOW)
def test_a_scalar_is_of_each_sample_or_refused(how, name):
    scalar, is_own = SCALARS[name]
    torch.manual_seed(0)
    model = Model(scalar, how).double()
    with ghostclip.GhostClipper(model, max_grad_norm=0.1):
        for samples in (B, 9, 10):
            loss = loss_of(model, model(torch.randn(samples, 4).double()))
            if is_own:
                loss.backward()
                continue
            with pytest.raises(LossReductionError):
                loss.backward()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["standardised", "a divergence"])
def test_in_16_bits_gradients_of_halves_are_held_against_what_rounding_does(name, seed):
    scalar, is_own = SCALARS[name]
    torch.manual_seed(seed)
    model = Model(lambda h: h.square().mean() + 0.03 * scalar(h), "in its loss")
    with ghostclip.GhostClipper(model, max_grad_norm=0.1), torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, model(torch.randn(B, 4)))
        with nullcontext() if is_own else pytest.raises(LossReductionError, match="neither a mean nor a sum"):
            loss.backward()


def test_what_one_sample_alone_gives_is_no_constant():
    # One half gives as much as the whole, whichever it lies in.
    for seed in range(4):
        torch.manual_seed(seed)
        model = Model(lambda h: (h.square().mean(1) * (h.detach()[:, 0] >= h.detach()[:, 0].max())).sum(), "returned")
        with ghostclip.GhostClipper(model.double(), max_grad_norm=0.1, loss_reduction="sum"):
            y, hardest = model(torch.randn(B, 4).double())
            with pytest.raises(LossReductionError, match="neither a mean nor a sum"):
                (y.square().sum() + hardest).backward()


@pytest.mark.parametrize("how", HOW)
def test_a_loss_that_leaves_the_scalar_out_may_be(how):
    model = Model(SCALARS["off the batch's mean"][0], how).double()
    with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
        for _ in range(2):
            output = model(torch.randn(B, 4).double())
            output = output.get("logits") if isinstance(output, dict) else output
            (output[0] if how == "returned" else output).square().mean().backward()
        assert "scalars" not in str(clipper.unchecked)


def test_steps_that_are_not_checked_remember_what_follows():
    model = Model(SCALARS["off the batch's mean"][0], "returned").double()
    with ghostclip.GhostClipper(model, max_grad_norm=0.1):
        for _ in range(3):
            model(torch.randn(B, 4).double())[0].square().mean().backward()
        output = model(torch.randn(B, 4).double())
        with pytest.raises(LossReductionError, match="neither a mean nor a sum"):
            loss_of(model, output).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_of_a_mean_is_none(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 50)).to(dtype)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, ids):
            logits = self.inner(ids)
            return logits, functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    whole = Whole()
    with ghostclip.GhostClipper(whole, max_grad_norm=1.0):
        for samples in (8, 5):
            whole(torch.randint(50, (samples, 16)))[1].backward()


# Outputs of parameters alone, which no sample has a part in.
OWN = {
    "a parameter": lambda model: model.scale,
    "a scale": lambda model: model.scale.exp(),
    "a weight": lambda model: model.last.weight,
    "a norm": lambda model: model.last.weight.norm(),
}


class WithOwn(nn.Module):
    def __init__(self, mix, own):
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.mix, self.own = mix, own

    def forward(self, x):
        return self.last(self.mix(torch.tanh(self.first(x)))), self.own(self)


@pytest.mark.parametrize("own", OWN)
def test_outputs_of_parameters_alone_switch_no_check_off(own):
    for mix in (lambda h: h * len(h), lambda h: h / len(h) ** 0.5, lambda h: h - h.detach().mean(0)):
        model = WithOwn(mix, OWN[own]).double()
        with ghostclip.GhostClipper(model, max_grad_norm=0.1), pytest.raises(SampleMixingError):
            model(torch.randn(B, 4).double())
    model = WithOwn(lambda h: h, OWN[own]).double()
    with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
        model(torch.randn(B, 4).double())[0].square().mean().backward()
        assert not str(clipper.unchecked)


def test_complex_outputs_are_compared():
    class Complex(nn.Module):
        def __init__(self, mix):
            super().__init__()
            self.layer, self.mix = nn.Linear(4, 6), mix

        def forward(self, x):
            return torch.view_as_complex(self.mix(self.layer(x)).unflatten(1, (3, 2)))

    model = Complex(lambda h: h - h.detach().mean(0)).double()
    with ghostclip.GhostClipper(model, max_grad_norm=0.1), pytest.raises(SampleMixingError):
        model(torch.randn(B, 4).double())
    model = Complex(torch.tanh).double()
    with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
        model(torch.randn(B, 4).double()).abs().square().mean().backward()
        assert "replaced" not in str(clipper.unchecked)


def test_distributions_with_a_matrix_of_parameters():
    class Normal(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.scale = nn.Linear(4, 3), nn.Parameter(torch.eye(3))

        def forward(self, x):
            return torch.distributions.MultivariateNormal(self.mean(x), scale_tril=torch.tril(self.scale))

    model, x, y = Normal().double(), torch.randn(B, 4).double(), torch.randn(B, 3).double()
    expected = torch.zeros(3, 3).double()
    for one in range(B):
        grads = torch.autograd.grad(-model(x[one : one + 1]).log_prob(y[one : one + 1]).sum(), list(model.parameters()))
        norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]))
        expected += grads[0 if grads[0].shape == (3, 3) else 2] * min(1.0, 0.5 / float(norm))
    with ghostclip.GhostClipper(model, max_grad_norm=0.5) as clipper:
        clipper.backward(-model(x).log_prob(y))
        torch.testing.assert_close(model.scale.grad, expected)


def test_a_loop_over_rows_of_running_sums_is_no_crash():
    model = nn.Linear(4, 3).double()

    def loss(samples):
        return sum(row.sum() for row in model(torch.randn(samples, 4).double()).cumsum(0)) / samples

    with ghostclip.GhostClipper(model, max_grad_norm=0.1):
        loss(5).backward()
        other = loss(6)
        with pytest.raises(LossReductionError, match="earlier steps"):
            other.backward()
