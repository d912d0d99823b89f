"""Models that keep something of a batch for the next one: what one sample left moves the sums of later steps."""

from collections import deque

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import SampleMixingError


class _Model(nn.Module):
    def __init__(self, way, *, first=0):
        super().__init__()
        self.first, self.last, self.way = nn.Linear(3, 4), nn.Linear(4, 2), way
        self.begins, self.forwards, self.held, self.queue = first, 0, None, deque(maxlen=4)
        self.list, self.scale = [], 1.0
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.forwards += 1
        h = self.first(x).tanh()
        return self.last(self.way(self, h) if self.forwards > self.begins else h)


def _attribute(m, h):
    held, m.held = m.held, h.detach().mean(0)
    return h if held is None else h + held


def _list(m, h):
    held, m.list = m.list, (m.list + list(h.detach()))[-6:]
    return h + torch.stack(held).mean(0) if held else h


def _queue(m, h):
    out = h + (h @ torch.stack(list(m.queue)).T).softmax(1) @ torch.stack(list(m.queue)) if m.queue else h
    m.queue.extend(h.detach())
    return out


def _number(m, h):
    scale, m.scale = m.scale, float(h.detach().abs().mean())
    return h * scale


def _counter(m, h):
    out = h * (1 + m.count)
    m.count = (h.detach() > 0).sum()
    return out


def _only_looked_at(m, h):
    m.held, m.list = h.detach(), [*m.list, h.detach()]
    m.scale = float(h.detach().mean())
    return h


def _own_number_of_forwards(m, h):
    return h * (1 + m.forwards)


# Two samples that change places have the mean that they had.
@pytest.mark.parametrize("samples", [2, 5])
@pytest.mark.parametrize(
    ("way", "said"),
    [
        *((way, "the forward before saw other samples") for way in (_attribute, _list, _queue, _number)),
        (_counter, "updates the buffer 'count' from the batch"),
    ],
)
def test_what_follows_the_batch_before_is_refused(way, said, samples):
    model = _Model(way)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1), pytest.raises(SampleMixingError, match=said):
        model(torch.randn(samples, 3))


@pytest.mark.parametrize("way", [_attribute, _list, _queue])
def test_also_where_that_begins_later(way):
    model = _Model(way, first=5)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
        for _ in range(5):
            clipper.backward(model(torch.randn(5, 3)).square().sum(1))
        # It writes, in a way that was proved, and a forward that reads goes another one.
        clipper.backward(model(torch.randn(5, 3)).square().sum(1))
        with pytest.raises(SampleMixingError, match="the forward before saw other samples"):
            model(torch.randn(5, 3))


@pytest.mark.parametrize("way", [_only_looked_at, _own_number_of_forwards])
def test_what_nobody_reads_again_is_not(way):
    model = _Model(way)
    with ghostclip.GhostClipper(model, max_grad_norm=0.1) as clipper:
        for number in range(1, 6):
            clipper.backward(model(torch.randn(5, 3)).square().sum(1))
            assert model.forwards == number
            assert not str(clipper.unchecked)


def test_a_model_that_cannot_run_after_another_batch_says_so():
    def strict(m, h):
        assert m.held is None or torch.equal(m.held, h.detach())
        m.held = h.detach()
        return h

    with ghostclip.GhostClipper(model := _Model(strict), max_grad_norm=0.1) as clipper:
        model(torch.randn(5, 3))
        assert "batch independence (of the batch before): the model raised AssertionError" in str(clipper.unchecked)
