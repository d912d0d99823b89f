"""Models that mix samples, each in one known place, and models that only look as if they did."""

import torch
from torch import nn


class CentresOnTheBatch(nn.Module):
    """Subtracts the batch's mean between two layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        h = self.first(x)
        return self.last(h - h.mean(0, keepdim=True)).sin()


class Nested(nn.Module):
    """The same, two levels down."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"stem": nn.Linear(5, 5), "mixer": CentresOnTheBatch()})

    def forward(self, x):
        return self.encoder["mixer"](self.encoder["stem"](x).relu())


class FollowsTheFirst(nn.Module):
    """Everything is compared with sample 0, which only replacing sample 0 shows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        h = self.layer(x)
        return h - h[:1]


class Rolls(nn.Module):
    """Hands every sample's features to its neighbour."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x).roll(1, 0)


class Contrasts(nn.Module):
    """Two towers and the matrix of all similarities."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(5, 4)
        self.right = nn.Linear(5, 4)

    def forward(self, x):
        return self.left(x) @ self.right(x).t()


class Routes(nn.Module):
    """Each expert sees some rows of the batch, in an order of its own; the result is in order."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))

    def forward(self, x):
        out = x.new_zeros(x.shape[0], 3)
        chosen = (x.sum(1) > 0).long()
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out


class Shuffles(nn.Module):
    """Sends tokens of a sample, folded into the batch axis, through a layer and back."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x.transpose(0, 1).reshape(-1, 5)).unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1)


def batch_norm():
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def wrong_axis():
    return nn.Sequential(nn.Linear(5, 6), nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0))


# (model, shape of its input, path where mixing starts, what the description says besides)
MIXERS = {
    "centres": (CentresOnTheBatch, (4, 5), "", "'last'"),
    "nested": (Nested, (4, 5), "encoder.mixer", "'encoder.mixer.last'"),
    "first": (FollowsTheFirst, (4, 5), "", "FollowsTheFirst"),
    "rolls": (Rolls, (4, 5), "", "Rolls"),
    "contrasts": (Contrasts, (4, 5), "", "(4, 4)"),
    "batch_norm": (batch_norm, (4, 5), "1", "BatchNorm1d"),
    "wrong_axis": (wrong_axis, (4, 7, 5), "1.self_attn", "MultiheadAttention"),
}
KEEPS_APART = {
    "routes": (Routes, (6, 5)),
    "shuffles": (Shuffles, (4, 3, 5)),
    "dropout": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 2)), (4, 5)),
    "square": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4)), (4, 4, 5)),
}


def inputs(shape):
    """Return a batch whose samples differ."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))
