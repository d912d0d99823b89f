"""Peaks that are read off a graph, against those of live tensors counted operation by operation."""

import pytest
import torch
from torch import nn

from benchmarks.tasks import per_sample_losses
from ghostclip import GhostClipper
from ghostclip.planning import timeline
from tests.live import peak_of

B = 32


class _Branch(nn.Module):
    """The gradient that goes around waits until the branch has its own."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width),
        )  # fmt: skip
        self.around = nn.Conv2d(width, width, 1)

    def forward(self, x):
        return torch.relu(self.inner(x) + self.around(x))


def _residual():
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), _Branch(16), _Branch(16), *head), torch.randn(B, 3, 24, 24)


class _Steps(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.steps, self.head = kind(24, 48, batch_first=True), nn.Linear(48, 10)

    def forward(self, x):
        return self.head(self.steps(x)[0].mean(1))


def _recurrent(kind):
    return lambda: (_Steps(kind), torch.randn(B, 96, 24))


def _strided():
    layers = [nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, stride=2)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(800, 10)), torch.randn(B, 1, 28, 28)


def _dense():
    layers = [nn.Linear(96, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10)]
    return nn.Sequential(*layers), torch.randn(B, 96)


@pytest.mark.parametrize(
    "make", [_residual, _recurrent(nn.LSTM), _recurrent(nn.GRU), _recurrent(nn.RNN), _strided, _dense],
    ids=["residual", "lstm", "gru", "rnn", "strided", "dense"],
)  # fmt: skip
def test_a_private_peak_is_within_a_tenth(make):
    torch.manual_seed(0)
    model, x = make()
    batch = x, torch.randint(10, (B,))
    with GhostClipper(model, max_grad_norm=1.0) as clipper:

        def private():
            model.zero_grad(set_to_none=True)
            clipper.backward(per_sample_losses(model, batch))

        for _ in range(4):
            private()
        measured = peak_of(private, beside=[*model.parameters(), *batch])
        model.zero_grad(set_to_none=True)
        losses = per_sample_losses(model, batch)
        read = timeline.read(losses, clipper._capture.forward, model.parameters())
        expected = read.peak(frozenset(), None)
        clipper.backward(losses)
    assert expected == pytest.approx(measured, rel=0.1)
