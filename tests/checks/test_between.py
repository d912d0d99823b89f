"""Between two forwards of one model, called part by part: samples that meet there are refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ghostclip
from ghostclip.errors import SampleMixingError

B = 9


class Parts(nn.Module):
    """Parts that a loop, or a method other than forward, calls one after another."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 3)
        self.middle = nn.Linear(5, 5)
        self.pairs, self.memory = nn.Bilinear(5, 5, 3), nn.GRU(5, 5, 2, batch_first=True)
        self.layer = nn.GRU(5, 5, batch_first=True)


def _over_time(model, h):
    state, found = None, []
    for _ in range(3):
        output, state = model.memory(h.unsqueeze(1), state)
        found.append(output[:, 0])
    return model.decoder(torch.stack(found, 1)).mean(1)


def _from_states(layers, model, states):
    output, _ = layers(torch.zeros_like(states[0].unsqueeze(1)), states)
    return model.decoder(output[:, 0])


def _again(function, *, use_reentrant):
    """A function that is run again for its backward; of one sample, for the expected sum, it is run once."""
    return lambda h: function(h) if len(h) == 1 else checkpoint(function, h, use_reentrant=use_reentrant)


def _run_again(model, h, *, use_reentrant):
    return model.decoder(_again(lambda h: model.middle(h.relu()), use_reentrant=use_reentrant)(h))


def _together_again(model, h, *, use_reentrant):
    return model.decoder(_again(lambda h: h - h.mean(0), use_reentrant=use_reentrant)(h))


# What becomes of the encoder's outputs (B, 5), up to logits.
APART = {
    "as they are": lambda model, h: model.decoder(h),
    "each normalised": lambda model, h: model.decoder(functional.normalize(h, dim=1)),
    "in positions": lambda model, h: model.decoder(h.unsqueeze(1).expand(-1, 4, -1).cumsum(1)).mean(1),
    "detached": lambda model, h: model.decoder(h) + model.decoder(h.detach()),
    "states of time": _over_time,
    "a layer's state": lambda model, h: _from_states(model.layer, model, h[None]),
    "the state of another layer": lambda model, h: _from_states(model.layer, model, model.memory(h[:, None])[1][:1]),
    "states of layers": lambda model, h: _from_states(model.memory, model, torch.stack([h, h.tanh()])),
    "a checkpoint": partial(_run_again, use_reentrant=False),
    "a reentrant checkpoint": partial(_run_again, use_reentrant=True),
}
TOGETHER = {
    "centred": lambda model, h: model.decoder(h - h.mean(0)),
    "centred, outside the graph": lambda model, h: model.decoder(h - h.detach().mean(0)),
    "scaled by the largest": lambda model, h: model.decoder(h / h.detach().abs().max()),
    "by gradients alone": lambda model, h: model.decoder(h.detach() + (h - h.detach()) * h.detach().std()),
    "standardised": lambda model, h: model.decoder((h - h.mean(0)) / h.std(0)),
    "beside the mean": lambda model, h: model.pairs(h, h.mean(0).expand_as(h)),
    "beside a shuffled copy": lambda model, h: model.pairs(h, torch.tanh(h).roll(1, 0)),
    "a layer's state": lambda model, h: _from_states(model.layer, model, (h - h.mean(0))[None]),
    "states of layers": lambda model, h: _from_states(model.memory, model, torch.stack([h, h.cumsum(0)])),
    "after all before": lambda model, h: model.decoder(h.cumsum(0)),
    "in a checkpoint": partial(_together_again, use_reentrant=False),
    "in a reentrant checkpoint": partial(_together_again, use_reentrant=True),
}


def _step(way, strategy):
    torch.manual_seed(0)
    model, x = Parts().double(), torch.randn(B, 6, dtype=torch.float64)
    labels = torch.arange(B) % 3
    with ghostclip.GhostClipper(model, max_grad_norm=0.1, strategy=strategy) as clipper:
        logits = way(model, model.encoder(x))
        clipper.backward(functional.cross_entropy(logits, labels, reduction="none"))
        sums = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for n in range(B):
        loss = functional.cross_entropy(way(model, model.encoder(x[n : n + 1])), labels[n : n + 1])
        grads = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True, allow_unused=True)
        share = min(1.0, 0.1 / float(sum(g.detach().square().sum() for g in grads).sqrt()))
        for total, grad in zip(expected.values(), grads, strict=True):
            total.add_(grad, alpha=share)
    return sums, expected


@pytest.mark.parametrize("strategy", ["bookkeeping", "hooks", "ghost", "fast"])
@pytest.mark.parametrize("name", APART)
def test_apart_is_exact(name, strategy):
    """Inputs that each belong to one sample are accepted, and the sum is that of one sample at a time."""
    sums, expected = _step(APART[name], strategy)
    for parameter, total in expected.items():
        torch.testing.assert_close(sums.get(parameter, torch.zeros_like(total)), total, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("strategy", ["bookkeeping", "hooks", "ghost", "fast"])
@pytest.mark.parametrize("name", TOGETHER)
def test_together_is_refused(name, strategy):
    """Inputs in which samples have met are refused in the forward that takes them."""
    with pytest.raises(SampleMixingError, match=r"brings samples together|rows changed"):
        _step(TOGETHER[name], strategy)
