"""In-place changes that cannot be followed are refused by name, and none is silently left out."""

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import UnsupportedModelError


def _diagonal(model, h):
    w = torch.zeros(6, 6)
    w.diagonal().copy_(model.entries[0])
    return h @ w


def _view_taken_before(model, h):
    w = torch.zeros(6, 6)
    row = w[0]
    w[:4] = model.entries
    return h * row


def _buffer(model, h):
    model.table.copy_(model.entries)
    return h @ model.table.t()


def _data_into_repeated(model, h):
    spread = model.entries[None].repeat(h.shape[0], 1, 1)
    spread[..., 3:] *= h[:, None, 3:]
    return spread


def _turned(model, h):
    w = model.entries * 2
    w.t_()
    return h @ w


class _Model(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.entries, self.layer, self.way = nn.Parameter(torch.randn(4, 6)), nn.Linear(6, 6), way
        self.register_buffer("table", torch.zeros(4, 6))

    def forward(self, x):
        return self.way(self, self.layer(x))


@pytest.mark.parametrize("way", [_diagonal, _view_taken_before, _buffer, _data_into_repeated, _turned])
def test_in_place_change_that_cannot_be_followed(way):
    model = _Model(way)
    ghostclip.GhostClipper(model, max_grad_norm=1.0)
    with pytest.raises(UnsupportedModelError, match=r"parameter 'entries' takes part in an in-place"):
        model(torch.randn(3, 6))
    assert type(model.table) is torch.Tensor


def test_change_after_use(strategy):
    model = _Model(_changed_after_use).double()
    clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy=strategy)

    def step():
        clipper.backward(model(torch.randn(3, 6, dtype=torch.float64)).square().sum(1))

    # Autograd itself refuses where it had saved the old value.
    with pytest.raises((UnsupportedModelError, RuntimeError), match=r"in[- ]?place"):
        step()


def _changed_after_use(model, h):
    w = model.entries * 2
    out = h[:, :4] + w[:, 0]
    w += 1
    return out + w[:, 1]
