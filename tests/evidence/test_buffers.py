"""Buffers that a forward changes: refused where they follow the samples, left alone where they follow the weights."""

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import SampleMixingError


class _Remembers(nn.Module):
    """Keeps a moving average of what it sees; or of its weights, or of noise."""

    def __init__(self, what, *, anew=False):
        super().__init__()
        self.anew = anew
        self.layer, self.head, self.what = nn.Linear(3, 4), nn.Linear(4, 2), what
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        h = self.layer(x)
        seen = {"data": h.detach().mean(0), "weights": self.layer.weight.detach().mean(1), "noise": torch.rand(4)}
        with torch.no_grad():
            if self.anew:
                self.average = self.average.lerp(seen[self.what], 0.1)
            else:
                self.average.lerp_(seen[self.what], 0.1)
        return self.head(h * (1 + 0 * self.average))


def _attached(what, *, anew=False):
    model = _Remembers(what, anew=anew)
    return model, ghostclip.GhostClipper(model, max_grad_norm=0.5)


def test_average_of_the_batch_is_refused():
    model, _ = _attached("data")
    with pytest.raises(SampleMixingError, match=r"updates the buffer 'average' from the batch"):
        model(torch.randn(4, 3))


@pytest.mark.parametrize("what", ["weights", "noise"])
def test_what_does_not_follow_the_samples_is_left(what):
    model, clipper = _attached(what)
    for _ in range(5):
        clipper.backward(model(torch.randn(4, 3)).square().sum(1))
    assert model.average.abs().sum() > 0


@pytest.mark.parametrize("anew", [False, True])
def test_buffer_ends_as_after_one_forward(anew):
    """Looking closer changes nothing that a user can see, whether a buffer is written to or assigned anew."""
    model, clipper = _attached("weights", anew=anew)
    model(torch.randn(4, 3))
    torch.testing.assert_close(model.average, 0.1 * model.layer.weight.detach().mean(1))
    clipper.remove()


def test_average_that_starts_later_is_refused():
    model, clipper = _attached("weights")
    clipper.backward(model(torch.randn(4, 3)).square().sum(1))
    model.what = "data"

    def train_on():
        for _ in range(3):
            clipper.backward(model(torch.randn(4, 3)).square().sum(1))

    with pytest.raises(SampleMixingError, match="average"):
        train_on()


def test_spectral_norm_is_left_alone():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.5)
    clipper.backward(model(torch.randn(4, 3)).square().sum(1))
    assert clipper.batch_size == 4
