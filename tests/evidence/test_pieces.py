"""Layers that meet pieces of the batch: nothing tells whose rows their outputs hold, and no proof looks at them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ghostclip
from ghostclip.errors import UncoveredParameterError

B = 9
PIECES = {
    "split": lambda x: x.split(2),
    "chunk": lambda x: x.chunk(4),
    "rows": lambda x: [row.unsqueeze(0) for row in x],
}
AFTERWARDS = {
    "as they are": lambda h: h,
    "centred": lambda h: h - h.mean(0),
    "centred by a constant": lambda h: h - h.mean(0).detach(),
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


def _step(model, clipper):
    found = model(torch.randn(B, 5, dtype=torch.float64))
    logits = sum(found) if isinstance(found, tuple) else found
    clipper.backward(cross_entropy(logits, torch.arange(B) % 3, reduction="none"))


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("afterwards", AFTERWARDS)
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
def test_outputs_of_pieces_are_refused(strategy, pieces, afterwards, beside):
    """Losses of such outputs are never clipped, with samples that mix or without."""
    torch.manual_seed(0)
    model = InPieces(PIECES[pieces], AFTERWARDS[afterwards], beside=beside).double()
    clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy=strategy)
    with pytest.raises(UncoveredParameterError, match="pieces of the batch"):
        _step(model, clipper)


class Repeated(nn.Module):
    """Returns parameters that were repeated for each sample, beside what it computes of the samples."""

    def __init__(self):
        super().__init__()
        self.layer, self.token, self.table = nn.Linear(5, 3), nn.Parameter(torch.randn(1, 3)), nn.Embedding(B, 3)

    def forward(self, x):
        return self.layer(x), self.token.expand(len(x), -1), self.token.repeat(len(x), 1), self.table.weight


def test_parameters_repeated_for_each_sample_are_not():
    """A parameter that every sample has a copy of, or that is as long as the batch by chance, is no piece of it."""
    model = Repeated().double()
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        _step(model, clipper)
