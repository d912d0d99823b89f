"""Under autocast the factors of a layer are what was multiplied: the cast input, once for all that read it."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ghostclip import GhostClipper
from ghostclip.capture.nodes import Casts
from ghostclip.factors import Outer


class Block(nn.Module):
    """A norm in float32, and three layers that read what it returns."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.layers = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(3))
        self.head = nn.Conv1d(24, 8, 3)

    def forward(self, x):
        x = self.norm(x)
        return self.head(sum(layer(x) for layer in self.layers).mT)


class Recomputed(nn.Module):
    """The same under activation checkpointing."""

    def __init__(self, reentrant):
        super().__init__()
        self.block, self.reentrant, self.again = Block(), reentrant, False

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant) if self.again else self.block(x)


@pytest.fixture
def made(monkeypatch):
    """Note the factors that are made."""
    found, before = [], Outer.__init__

    def noted(self, a_NTI, g_NTO, **options):
        found.append((a_NTI.dtype, g_NTO.dtype, a_NTI.data_ptr()))
        before(self, a_NTI, g_NTO, **options)

    monkeypatch.setattr(Outer, "__init__", noted)
    return found


def _losses(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().sum((1, 2))


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
def test_factors_are_what_was_multiplied(made, strategy):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 9, 24)
    clipper = GhostClipper(model, max_grad_norm=1.0, strategy=strategy)
    for _ in range(2):
        made.clear()
        clipper.backward(_losses(model, x))
        kinds = {kind[:2] for kind in made}
        assert kinds == {(torch.bfloat16, torch.bfloat16)}
        assert len({kind[2] for kind in made[-3:]}) == 1


def test_norms_are_those_of_the_model_as_it_ran():
    """Against autograd under autocast, which rounds each weight's gradient to 8 bits."""
    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 9, 24)
    squares = []
    for row in x.split(1):
        grads = torch.autograd.grad(_losses(model, row).sum(), list(model.parameters()))
        squares.append(sum(grad.double().square().sum() for grad in grads))
    wanted_B = torch.stack(squares).sqrt()
    clipper = GhostClipper(model, max_grad_norm=1.0)
    clipper.backward(_losses(model, x))
    torch.testing.assert_close(clipper.per_sample_norms.double(), wanted_B, rtol=3e-3, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_runs_again_is_cast_again(reentrant):
    torch.manual_seed(0)
    model, x = Recomputed(reentrant), torch.randn(4, 9, 24, requires_grad=True)

    def run(inside):
        clipper = GhostClipper(model, max_grad_norm=1.0)
        model.again = inside
        clipper.backward(_losses(model, x))
        found = clipper.per_sample_norms.clone()
        clipper.remove()
        return found

    torch.testing.assert_close(run(True), run(False), rtol=1e-5, atol=0)


def test_a_cast_goes_with_its_source_and_is_made_anew_after_a_change():
    casts, x = Casts(), torch.randn(3, 4)
    first = casts.of(x, torch.bfloat16)
    assert casts.of(x, torch.bfloat16) is first
    assert casts.of(x, torch.float32) is x
    assert casts.of(x, torch.float16).dtype == torch.float16
    x.add_(1)
    again = casts.of(x, torch.float16)
    assert torch.equal(again, x.half())
    held = weakref.ref(again)
    gc.disable()
    try:
        del again, x
        assert held() is None
    finally:
        gc.enable()
