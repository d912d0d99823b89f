"""Models that sort their samples in ways nobody follows, met first by batches that happen to lie in order."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ghostclip
from ghostclip.checks.unchecked import ORDER
from ghostclip.errors import BatchAxisError, SampleMixingError
from tests.reference import clip_and_sum, per_sample_gradients

SIZES = (2, 3, 5, 9)


def _one_hot(order, rows):
    return F.one_hot(order, len(rows)).to(rows)


def _put(order, rows):
    return torch.zeros_like(rows).put(order.argsort()[:, None] * rows.shape[1] + torch.arange(rows.shape[1]), rows)


def _by_columns(order, rows):
    placed = torch.zeros_like(rows)
    for column in range(rows.shape[1]):
        placed[order.argsort(), column] = rows[:, column]
    return placed


def _sampled(order, rows):
    down = (order + 0.5) * 2 / len(rows) - 1
    across = (torch.arange(rows.shape[1]) + 0.5) * 2 / rows.shape[1] - 1
    grid = torch.stack(torch.meshgrid(down, across, indexing="ij")[::-1], -1)
    return F.grid_sample(rows[None, None], grid[None], align_corners=False)[0, 0]


# What puts rows into an order; the inverse order undoes it.
WAYS = {
    "product": lambda order, rows: _one_hot(order, rows) @ rows,
    "product from behind": lambda order, rows: (rows.t() @ _one_hot(order, rows).t()).t(),
    "einsum": lambda order, rows: torch.einsum("ij,jk->ik", _one_hot(order, rows), rows),
    "sum of products": lambda order, rows: (_one_hot(order, rows)[:, :, None] * rows).sum(1),
    "gates": lambda order, rows: (_one_hot(order, rows) * rows.sigmoid().mean(1)) @ rows,
    "put": _put,
    "written by columns": _by_columns,
    "convolution": lambda order, rows: F.conv1d(rows[None], _one_hot(order, rows)[:, :, None])[0],
    "solved": lambda order, rows: torch.linalg.solve(_one_hot(order.argsort(), rows), rows),
    "sampled": _sampled,
    "sparse": lambda order, rows: torch.sparse.mm(_one_hot(order, rows).to_sparse(), rows),
    "masks": lambda order, rows: torch.stack([(rows * _one_hot(i, rows)[:, None]).sum(0) for i in order]),
}


class _Sorting(nn.Module):
    """Sorts its samples by data, and undoes it behind a layer."""

    def __init__(self, put, *, checks=False):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.put, self.checks = put, checks

    def forward(self, x):
        order = x[:, 0].argsort()
        if self.checks and order.tolist() != list(range(len(x))):
            raise ValueError("samples have to be sorted")
        inner = torch.tanh(self.layer(self.put(order, self.first(x))))
        return self.last(self.put(order.argsort(), inner))


def _in_order(size):
    x = torch.randn(size, 4)
    return x[x[:, 0].argsort()]


def _losses(outputs):
    return outputs.square().sum(1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_an_order_that_cannot_be_followed_is_refused_where_samples_lie_in_order_by_chance(way, size):
    model = _Sorting(WAYS[way])
    ghostclip.GhostClipper(model, max_grad_norm=0.1)
    with pytest.raises(BatchAxisError, match="another order than the samples"):
        model(_in_order(size))


@pytest.mark.parametrize("size", SIZES)
def test_an_order_that_is_not_undone_is_refused_where_samples_lie_in_order_by_chance(size):
    class Model(nn.Linear):
        def forward(self, x):
            return super().forward(x)[x[:, 0].argsort()]

    ghostclip.GhostClipper(model := Model(4, 3), max_grad_norm=0.1)
    with pytest.raises((BatchAxisError, SampleMixingError)):
        model(_in_order(size))


def test_an_order_is_refused_where_many_samples_at_the_front_have_equal_keys():
    # As texts that come by length do. A few of all samples show it, not the first ones.
    class Model(_Sorting):
        def forward(self, x):
            order = x[:, 0].argsort(stable=True)
            inner = torch.tanh(self.layer(self.put(order, self.first(x))))
            return self.last(self.put(order.argsort(), inner))

    batch = _in_order(12)
    batch[:9, 0] = batch[0, 0]
    ghostclip.GhostClipper(model := Model(WAYS["product"]), max_grad_norm=0.1)
    with pytest.raises(BatchAxisError, match="another order than the samples"):
        model(batch)


def test_an_order_that_is_followed_is_exact():
    model = _Sorting(lambda order, rows: rows[order]).double()
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.1)
    for x in (_in_order(5).double(), torch.randn(5, 4).double(), torch.randn(3, 4).double()):
        gradients = per_sample_gradients(model, {"x": x}, lambda model, batch: _losses(model(**batch)), axes={"x": 0})
        model.zero_grad()
        clipper.backward(_losses(model(x)))
        for name, wanted in clip_and_sum(gradients, 0.1).clipped.items():
            torch.testing.assert_close(model.get_parameter(name).grad, wanted, rtol=1e-9, atol=1e-12)


def test_samples_that_come_in_one_order_alone_are_accepted_and_said_to_be_unchecked(caplog):
    model = _Sorting(WAYS["product"], checks=True)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.1)
    clipper.backward(_losses(model(_in_order(5))))
    assert ORDER in caplog.text
