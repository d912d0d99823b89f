"""Samples that follow others without a gradient between them: by number, by counting, by another branch."""

import copy
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.capture import randomness
from ghostclip.errors import SampleMixingError


def _by_number(model, x):
    return model.layer(x) / len(x)


def _by_counting(model, x):
    """Rows of a kind beyond the third are dropped, whichever sample they belong to."""
    kept = ((x[:, 1] > 0).cumsum(0) <= 3).to(x.dtype)
    return model.layer(x) * kept.unsqueeze(-1)


def _by_branch(model, x):
    """A mask only where some sample is padded."""
    h = model.layer(x)
    return h * 0.5 if bool((x == 0).any()) else h


def _by_each_own(model, x):
    return model.layer(x) * (x.mean(1, keepdim=True) > 0)


class _Model(nn.Module):
    def __init__(self, way, *, dropout=0.0):
        super().__init__()
        self.layer, self.way, self.dropout = nn.Linear(3, 4), way, nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.way(self, x))


def _batch():
    x = torch.randn(5, 3)
    x[0, 0] = 0.0
    x[:, 1] = torch.tensor([-1.0, 1.0, 1.0, 1.0, 1.0])
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", [_by_number, _by_counting, _by_branch])
def test_company_is_refused(way, dtype):
    model = _Model(way).to(dtype)
    ghostclip.GhostClipper(model, max_grad_norm=0.1)
    with pytest.raises(SampleMixingError, match="outputs of other samples changed"):
        model(_batch().to(dtype))


def test_own_rows_are_not():
    model = _Model(_by_each_own)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.1)
    clipper.backward(model(_batch()).square().sum(1))
    assert clipper.batch_size == 5


class _Random(_Model):
    """Draws from torch's, Python's and NumPy's generators."""

    def forward(self, x):
        h = self.way(self, x)
        return self.dropout(h) * (0.5 + random.random()) + np.random.rand() + torch.rand(len(x), 1)


@pytest.mark.parametrize("kind", [_Model, _Random])
@pytest.mark.parametrize("way", [_by_counting, _by_branch])
def test_company_is_refused_under_dropout(way, kind):
    """The same random numbers are drawn for the batch and for its neighbour."""
    model = kind(way, dropout=0.5)
    ghostclip.GhostClipper(model, max_grad_norm=0.1)
    with pytest.raises(SampleMixingError, match="one sample was replaced"):
        model(_batch())


@pytest.mark.parametrize("way", [_by_number, _by_counting, _by_branch])
@pytest.mark.parametrize("inside", [True, False])
def test_company_is_refused_in_16_bits(way, inside):
    """Under autocast, and where the model itself is in 16 bits and returns more."""
    model = _Model(way) if inside else nn.Sequential(_Model(way).bfloat16(), _Cast())
    ghostclip.GhostClipper(model, max_grad_norm=0.1)
    x = _batch() if inside else _batch().bfloat16()
    with pytest.raises(SampleMixingError), torch.autocast("cpu", torch.bfloat16, enabled=inside):
        model(x)


class _Cast(nn.Module):
    def forward(self, x):
        return x.float()


@pytest.mark.parametrize("size", [2, 5, 33])
def test_own_rows_in_16_bits_are_not(size):
    deep = [layer for _ in range(6) for layer in (nn.Linear(40, 40), nn.LayerNorm(40), nn.GELU())]
    model = nn.Sequential(*deep, nn.Dropout(0.3))
    for dropout in (False, True):
        model[-1].train(dropout)
        with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper, torch.autocast("cpu", torch.bfloat16):
            clipper.backward(model(torch.randn(size, 40)).float().square().sum(1))
            assert ("samples left out" in str(clipper.unchecked)) == dropout


class _Routed(nn.Module):
    """Experts with dropout inside: how many rows an expert has, and which numbers they meet, follows from data."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)) for _ in range(3)])

    def forward(self, x):
        chosen, out = x.argmax(1), x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out


def test_routed_rows_meet_other_numbers():
    for seed in range(10):
        torch.manual_seed(seed)
        model = _Routed()
        with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
            clipper.backward(model(torch.randn(7, 3)).square().sum(1))


def _trained(model, *, probe):
    """Return the weights after some steps of plain descent on clipped sums."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    model = copy.deepcopy(model)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1, probe=probe) as clipper:
        for _ in range(5):
            clipper.backward(model(_batch()).square().sum(1))
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad)
            clipper.reset()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", [_Model, _Random])
@pytest.mark.parametrize("autocast", [False, True])
def test_training_is_the_same_with_and_without(kind, autocast):
    model = kind(_by_each_own, dropout=0.5)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        first, second = _trained(model, probe=True), _trained(model, probe=False)
    assert all(map(torch.equal, first, second))


def test_generators_of_devices_are_put_back(monkeypatch):
    """A device in use has a generator of its own, which is read and written through its module of torch."""
    state, device = [torch.tensor([1])], torch.device("meta")

    def write(value, place):
        assert place == torch.device("meta", 0)
        state[0] = value.clone()

    fake = SimpleNamespace(get_rng_state=lambda place: state[0].clone(), set_rng_state=write)
    monkeypatch.setattr(randomness, "_WITHOUT", frozenset({"cpu"}))
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    monkeypatch.setattr(randomness, "_generator_of", partial(_of_first, randomness._generator_of))
    with randomness.unnoticed([torch.empty(1, device=device), torch.empty(1)]) as before:
        assert not before.drawn()
        state[0] += 1
        assert before.drawn()
        before.restore()
        assert not before.drawn()
        state[0] += 1
    assert int(state[0]) == 1


def _of_first(read, device):
    return read(torch.device(device.type, 0))


def test_proof_can_be_switched_off():
    model = _Model(_by_number)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.1, probe=False)
    clipper.backward(model(_batch()).square().sum(1))


def test_generators_are_where_they_would_be():
    model, x = _Model(_by_each_own), _batch()
    ghostclip.GhostClipper(model, max_grad_norm=0.1)
    torch.manual_seed(3)
    model(x)
    after = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(2))
