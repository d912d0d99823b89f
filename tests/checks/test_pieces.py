"""Layers that meet pieces of the batch, or its rows one by one: what comes of samples is followed, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ghostclip
from ghostclip.errors import BatchAxisError, SampleMixingError, UncoveredParameterError

B, PLACES = 9, 6
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


class OverPositions(nn.Module):
    """Takes positions one by one, beside a table with a row for each."""

    def __init__(self, over):
        super().__init__()
        self.over, self.layer, self.last = over, nn.Linear(5, 4), nn.Linear(4, 3)
        self.register_buffer("table", torch.randn(PLACES, 5, dtype=torch.float64))

    def forward(self, x):
        return self.last(sum(self.layer(position) for position in self.over(x, self.table)).tanh())


# There are as many positions as samples: sizes do not tell rows of one from those of the other.
POSITIONS = {
    "rows": lambda x, table: [*x.transpose(0, 1)],
    "of a copy": lambda x, table: [*x.transpose(0, 1).contiguous()],
    "split": lambda x, table: [piece.squeeze(0) for piece in x.transpose(0, 1).split(1)],
    "slices": lambda x, table: [x.transpose(0, 1)[place : place + 1].squeeze(0) for place in range(PLACES)],
    "beside a table": lambda x, table: [part + row for part, row in zip(x.unbind(1), table, strict=True)],
    "beside pieces of a table": lambda x, table: [
        part + row for part, row in zip(x.unbind(1), table.split(1), strict=True)
    ],
    "beside slices of a table": lambda x, table: [x[:, place] + table[place : place + 1] for place in range(PLACES)],
}


@pytest.mark.parametrize("sizes", [(PLACES,), (PLACES - 2, PLACES)])
@pytest.mark.parametrize("over", POSITIONS)
def test_as_many_positions_as_samples(over, sizes):
    """A loop over positions, or over the rows of a constant table, is none over the rows of the batch."""
    torch.manual_seed(0)
    model = OverPositions(POSITIONS[over]).double()
    batches = [torch.randn(size, PLACES, 5, dtype=torch.float64) for size in sizes]
    expected = [per_sample_norms(model, x) for x in batches]
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        for x, norms_B in zip(batches, expected, strict=True):
            _losses(model, x).mean().backward()
            torch.testing.assert_close(clipper.per_sample_norms, norms_B)
