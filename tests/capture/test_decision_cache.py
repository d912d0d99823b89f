"""Operations that were met before are not decided on again: the decision is the same, and holds for other batches."""

import copy

import pytest
import torch
from torch import nn

from ghostclip import GhostClipper
from tests.exactness.runs import engine
from tests.reference import per_sample_gradients, whole_norm


class _Zoo(nn.Module):
    """One layer of every kind whose rule follows from the form of its data."""

    def __init__(self):
        super().__init__()
        self.table, self.layer_norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.shared, self.rms_norm = nn.Linear(8, 8), nn.RMSNorm(8)
        self.conv1, self.conv2, self.conv3 = nn.Conv1d(8, 8, 3, padding=1), nn.Conv2d(2, 2, 2), nn.Conv3d(1, 2, 2)
        self.turned, self.groups = nn.ConvTranspose2d(2, 2, 2), nn.GroupNorm(2, 8)
        self.instances, self.last = nn.InstanceNorm1d(8, affine=True), nn.Linear(8, 3)

    def forward(self, ids):
        x = self.shared(self.layer_norm(self.table(ids)))
        x = self.rms_norm(self.shared(x.tanh())).transpose(1, 2)
        x = self.instances(self.groups(self.conv1(x)))
        planes = self.turned(self.conv2(x.unflatten(1, (2, 4))))
        cubes = self.conv3(x.unflatten(1, (1, 2, 4)))
        return self.last(x.transpose(1, 2)).mean(1).sum(1) + planes.flatten(1).mean(1) + cubes.flatten(1).mean(1)


def _losses(model, batch):
    losses = model(batch["x"]).square()
    return losses.flatten(1).sum(1) if losses.dim() > 1 else losses


def _check(clipper, model, batch):
    clipper.backward(_losses(model, {"x": batch}))
    plain = copy.deepcopy(model)
    per_sample = per_sample_gradients(plain, {"x": batch}, _losses, axes={})
    norms_B = torch.stack([whole_norm(gradient) for gradient in per_sample])
    assert torch.allclose(clipper.per_sample_norms, norms_B, rtol=1e-9)
    model.zero_grad()


def test_batches_of_changing_sizes_are_exact(strategy):
    """Sizes that suggest another reading, T == B among them, come after the decisions were made."""
    model = _Zoo().double()
    clipper = engine(strategy)(model, 0.1)
    for size, positions in ((3, 6), (4, 6), (6, 6), (8, 6), (2, 8), (12, 6), (1, 6), (6, 3), (5, 5)):
        _check(clipper, model, torch.randint(11, (size, positions)))


def test_exchanged_parameters_are_seen(strategy):
    """Another dtype, or other storage, in the middle of training."""
    model = _Zoo()
    clipper = engine(strategy)(model, 0.1)
    for _ in range(2):
        clipper.backward(model(torch.randint(11, (4, 6))))
        model.zero_grad()
    model.double()
    _check(clipper, model, torch.randint(11, (4, 6)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
    _check(clipper, model, torch.randint(11, (5, 6)))


def test_other_options_are_decided_on_anew():
    model = nn.Conv1d(2, 3, 3).double()
    with GhostClipper(model, max_grad_norm=0.1) as clipper:
        for stride in (1, 1, 2, 1, 2):
            model.stride = (stride,)
            _check(clipper, model, torch.randn(4, 2, 9, dtype=torch.float64))


class _Changes(nn.Module):
    """Does something else with its rows, once switched on."""

    def __init__(self, change):
        super().__init__()
        self.first, self.second, self.change, self.changes = nn.Linear(4, 4), nn.Linear(4, 3), change, False

    def forward(self, x):
        return self.change(self, x) if self.changes else self.second(self.first(x))


def _flipped_twice(model, x):
    return model.second(model.first(x.flip(0))[torch.arange(len(x) - 1, -1, -1)])


def _sorted(model, x):
    order = torch.arange(len(x) - 1, -1, -1)
    return model.second(torch.tanh(model.first(x[order])))[order]


_CHANGES = [(_flipped_twice, (4, 6)), (_sorted, (5, 7)), (lambda m, x: m.second(m.first(x.clone())), (5,))]


@pytest.mark.parametrize(("change", "when"), _CHANGES)
def test_rows_that_move_later_are_followed(change, when, strategy):
    """Data in and outside the graph is put into another order after the layers were decided on, and unwatched."""
    model = _Changes(change).double()
    clipper = engine(strategy)(model, 0.1)
    for forward in range(8):
        model.changes = forward in when
        _check_rows(clipper, model, torch.randn(5, 4, dtype=torch.float64))


def _losses_of_rows(model, batch):
    return model(batch["x"]).square().sum(1)


def _check_rows(clipper, model, x):
    clipper.backward(model(x).square().sum(1))
    model.zero_grad()
    per_sample = per_sample_gradients(copy.deepcopy(model), {"x": x}, _losses_of_rows, axes={})
    norms_B = torch.stack([whole_norm(gradient) for gradient in per_sample])
    assert torch.allclose(clipper.per_sample_norms, norms_B, rtol=1e-9)


# Which steps freeze the first layer, and in which the input wants a gradient.
_GRAPHS = {
    "frozen later": ("  ffff", ""), "unfrozen": ("ff", ""), "in turns": (" f f f", ""),
    "attacked first": ("", "x"), "attacked later": ("", "  xx"), "both": ("  ff", " x x"),
}  # fmt: skip


@pytest.mark.parametrize("steps", _GRAPHS)
def test_data_that_enters_or_leaves_the_graph_is_followed(steps, strategy):
    """Layers below are frozen and unfrozen, or inputs are to be attacked: the rows' way through the graph changes."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    clipper = engine(strategy)(model, 0.1)
    frozen, attacked = (text.ljust(6) for text in _GRAPHS[steps])
    for step in range(6):
        model[0].requires_grad_(frozen[step] == " ")
        x = torch.randn(5 - step % 3, 4, dtype=torch.float64, requires_grad=attacked[step] == "x")
        _check_rows(clipper, model, x)


_MAPPED = {
    "sliced": lambda row, x: row[:4] * x, "indexed": lambda row, x: row[torch.tensor([3, 0, 2, 1])] * x.flip(0),
    "sorted": lambda row, x: row.sort().values[:4] * x.cumsum(0), "rolled": lambda row, x: row.roll(1, 0)[:4] * x,
}  # fmt: skip


@pytest.mark.parametrize("change", _MAPPED)
def test_rows_that_move_inside_of_vmap_are_each_samples_own(change):
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(torch.vmap(_MAPPED[change])(self.first(x), x))

    model = Mapped().double()
    clipper = GhostClipper(model, max_grad_norm=0.1)
    for size in (4, 3, 1, 5, 2, 6, 10, 8):
        _check_rows(clipper, model, torch.randn(size, 4, dtype=torch.float64))
