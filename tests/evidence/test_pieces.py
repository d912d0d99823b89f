"""Layers that meet pieces of the batch, or its rows one by one: what comes of samples is followed, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ghostclip
from ghostclip.errors import BatchAxisError, SampleMixingError, UncoveredParameterError

B = 9
PIECES = {
    "split": lambda x: x.split(2),
    "chunk": lambda x: x.chunk(4),
    "slices": lambda x: [x[number : number + 2] for number in range(0, len(x), 2)],
    "rows": lambda x: [row.unsqueeze(0) for row in x],
}
# They let samples meet, the last two in gradients alone.
MIXED = {
    "centred": lambda h: h - h.mean(0),
    "centred by a constant": lambda h: h - h.mean(0).detach(),
    "mean of gradients": lambda h: h + (h.mean(0) - h.mean(0).detach()),
    "gradients of neighbours": lambda h: h + (h.roll(1, 0) - h.roll(1, 0).detach()),
}


class InPieces(nn.Module):
    """Runs its layers on pieces of the batch, and puts the pieces together."""

    def __init__(self, pieces, afterwards, *, beside):
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.pieces, self.afterwards, self.beside = pieces, afterwards, beside

    def forward(self, x):
        h = self.afterwards(torch.cat([torch.tanh(self.first(piece)) for piece in self.pieces(x)]))
        return (self.last(h), self.last(self.first(x))) if self.beside else self.last(h)


class OneByOne(nn.Module):
    """Gives its layer each row without an axis for samples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return torch.stack([self.layer(x[number]) for number in range(len(x))])


def _losses(model, x):
    found = model(x)
    logits = sum(found) if isinstance(found, tuple) else found
    return cross_entropy(logits, torch.arange(len(x)) % 3, reduction="none")


def per_sample_norms(model, x):
    """Return the norm of each sample's gradient, of its loss in the whole batch."""
    losses_B, parameters = _losses(model, x), [*model.parameters()]
    grads = (torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses_B)
    return torch.stack([torch.cat([grad.flatten() for grad in found]).norm() for found in grads])


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
def test_samples_that_meet_behind_pieces_are_refused(strategy, pieces):
    for afterwards in MIXED.values():
        for beside in (False, True):
            torch.manual_seed(0)
            model = InPieces(PIECES[pieces], afterwards, beside=beside).double()
            clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy=strategy)
            with pytest.raises((BatchAxisError, SampleMixingError)):
                clipper.backward(_losses(model, torch.randn(B, 5, dtype=torch.float64)))


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
def test_norms_are_those_of_each_sample_alone(strategy):
    """Also where the number of pieces, and of calls of a layer before it meets the whole batch, follows its size."""
    torch.manual_seed(0)
    x = torch.randn(B, 5, dtype=torch.float64)
    for pieces in PIECES.values():
        for beside in (False, True):
            model = InPieces(pieces, lambda h: h, beside=beside).double()
            alone_B = per_sample_norms(model, x)
            with ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy=strategy) as clipper:
                for size in (B, 4, 1, 5):
                    clipper.backward(_losses(model, x[:size]))
                    torch.testing.assert_close(clipper.per_sample_norms, alone_B[:size])


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
def test_rows_without_an_axis_are_refused(strategy):
    model = OneByOne().double()
    clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy=strategy)
    with pytest.raises(UncoveredParameterError, match=r"single rows of the batch .* x\[i:i\+1\]"):
        clipper.backward(_losses(model, torch.randn(B, 5, dtype=torch.float64)))


class Repeated(nn.Module):
    """Returns parameters that were repeated for each sample, beside what it computes of the samples."""

    def __init__(self):
        super().__init__()
        self.layer, self.token, self.table = nn.Linear(5, 3), nn.Parameter(torch.randn(1, 3)), nn.Embedding(B, 3)

    def forward(self, x):
        return self.layer(x), self.token.expand(len(x), -1), self.token.repeat(len(x), 1), self.table.weight


def test_parameters_repeated_for_each_sample_are_not():
    """A parameter that every sample has a copy of, or that is as long as the batch by chance, is no row of it."""
    model = Repeated().double()
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        clipper.backward(_losses(model, torch.randn(B, 5, dtype=torch.float64)))
