"""Forwards after the proofs: whatever goes another way than those that were proved is asked about anew."""

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.errors import BatchAxisError, SampleMixingError
from tests.exactness.runs import engine

B, C = 5, 2.0
REFUSED = (BatchAxisError, SampleMixingError)


class _Net(nn.Module):
    """Does something else with its rows, once data says so."""

    def __init__(self, where, change):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(B, 4), nn.Linear(4, 3)
        self.where, self.change = where, change

    def _at(self, where, rows, *, on):
        return self.change(rows, on) if where == self.where else rows

    def forward(self, x):
        on = bool((x[:, 0] > 1).any()) and len(x) > 1
        hidden = torch.tanh(self.first(self._at("before", x, on=on)))
        return self._at("after", self.second(self._at("between", hidden, on=on)), on=on)


def _moved(rows):
    return torch.eye(len(rows), dtype=rows.dtype).roll(1, 0)


_OTHER_WAYS = {
    "flip": lambda rows: rows.flip(0),
    "roll": lambda rows: rows.roll(1, 0),
    "index": lambda rows: rows[torch.arange(len(rows)).roll(1)],
    "matrix": lambda rows: _moved(rows) @ rows,
    "einsum": lambda rows: torch.einsum("ij,jd->id", _moved(rows), rows),
    "unbind": lambda rows: torch.stack(rows.unbind(0)[::-1]),
    "cat": lambda rows: torch.cat([rows[1:], rows[:1]]),
    "put": lambda rows: torch.zeros_like(rows).index_put((torch.arange(len(rows)).roll(1),), rows),
    "layout": lambda rows: rows.mT.reshape(rows.shape),
    "mean": lambda rows: rows + rows.mean(0),
    "detached mean": lambda rows: rows + rows.detach().mean(0),
    "sort": lambda rows: rows.sort(0).values,
}
_SAME_WAYS = {
    "flip": lambda rows, on: rows.flip([0] if on else []),
    "roll": lambda rows, on: rows.roll(int(on), 0),
    "matrix": lambda rows, on: (_moved(rows) if on else torch.eye(len(rows), dtype=rows.dtype)) @ rows,
    "einsum": lambda rows, on: torch.einsum("ij,jd->id", _moved(rows) if on else _moved(rows).roll(-1, 0), rows),
    "unbind": lambda rows, on: torch.stack(rows.unbind(0)[::-1] if on else rows.unbind(0)),
    "put": lambda rows, on: torch.zeros_like(rows).index_put((torch.arange(len(rows)).roll(int(on)),), rows),
    "index": lambda rows, on: rows[torch.arange(len(rows)).roll(int(on))],
}


def _data(on=False):
    x = torch.randn(B, B, dtype=torch.float64).clamp(max=0.9)
    x[:, 0] = 3.0 if on else 0.0
    return x


def _refused_once_on(model):
    clipper = ghostclip.GhostClipper(model, max_grad_norm=C)
    for _ in range(2):
        clipper.backward(model(_data()).square().sum(1))
    with pytest.raises(REFUSED):
        clipper.backward(model(_data(on=True)).square().sum(1))
    return clipper


@pytest.mark.parametrize("where", ["before", "between", "after"])
@pytest.mark.parametrize("way", _OTHER_WAYS)
def test_rows_that_are_mixed_in_a_later_forward_are_refused(way, where):
    _refused_once_on(_Net(where, lambda rows, on: _OTHER_WAYS[way](rows) if on else rows).double())


@pytest.mark.parametrize("where", ["before", "between", "after"])
@pytest.mark.parametrize("way", _SAME_WAYS)
def test_an_operation_that_was_harmless_is_refused_once_it_is_not(way, where):
    _refused_once_on(_Net(where, _SAME_WAYS[way]).double())


def test_what_was_refused_is_asked_about_again():
    """The user catches the refusal and goes on."""
    model = _Net("between", lambda rows, on: rows.flip(0) if on else rows).double()
    clipper = _refused_once_on(model)
    for _ in range(3):
        with pytest.raises(REFUSED):
            model(_data(on=True))
        model(_data())
    assert all(p.grad is not None for p in model.parameters()), "what was clipped before"
    clipper.remove()


def test_a_loss_that_was_refused_is_refused_again(strategy):
    model = nn.Linear(B, 3).double()
    clipper = engine(strategy)(model, C)
    for _ in range(3):
        output = model(_data())
        with pytest.raises(SampleMixingError):
            clipper.backward((output - output.mean(0)).square().sum(1))


@pytest.mark.parametrize("scalar", [False, True])
def test_a_loss_that_mixes_samples_later_is_refused(scalar):
    model = nn.Linear(B, 3).double()
    clipper = ghostclip.GhostClipper(model, max_grad_norm=C)
    for step in range(3):
        output = model(_data())
        losses = (output - output.mean(0) if step == 2 else output).square().sum(1)
        if step < 2:
            clipper.backward(losses.mean() if scalar else losses)
            continue
        with pytest.raises(SampleMixingError):
            clipper.backward(losses.mean() if scalar else losses)


_BOX = [0]


class _Counts(nn.Module):
    """Mixes samples in every fifth call."""

    def __init__(self, kind, mix):
        super().__init__()
        self.first, self.second, self.kind, self.mix = nn.Linear(B, 4), nn.Linear(4, 3), kind, mix
        self.number, self.calls = 0, []
        self.register_buffer("counted", torch.zeros((), dtype=torch.int64))

    def _count(self):
        if self.kind == "attribute":
            self.number += 1
            return self.number
        if self.kind == "list":
            self.calls.append(0)
            return len(self.calls)
        if self.kind == "buffer":
            self.counted += 1
            return int(self.counted)
        _BOX[0] += 1
        return _BOX[0]

    def forward(self, x):
        hidden = self.first(x)
        return self.second(self.mix(hidden) if self._count() % 5 == 0 and len(x) > 1 else hidden)


@pytest.mark.parametrize("mix", ["mean", "detached mean", "flip"])
@pytest.mark.parametrize("kind", ["attribute", "list", "buffer", "outside"])
def test_samples_that_are_mixed_in_every_fifth_call(kind, mix):
    _BOX[0] = 0
    model = _Counts(kind, _OTHER_WAYS[mix])
    clipper = ghostclip.GhostClipper(model, max_grad_norm=C)
    done = []

    def train():
        for step in range(5):
            clipper.backward(model(torch.randn(B, B)).square().sum(1))
            done.append(step)

    with pytest.raises(REFUSED):
        train()
    assert kind == "outside" or len(done) == 4, "runs that are not the user's are not counted"


def test_forwards_that_prove_leave_nothing_in_the_modules():
    """A term of the loss that a module holds, a list of such, a cache, a buffer that is exchanged."""

    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.terms = nn.Linear(B, 3), []
            self.register_buffer("last", torch.zeros(1))

        def forward(self, x):
            output = self.layer(x)
            self.term = output.square().sum(1)
            self.terms.append(self.term)
            self.size, self.last = len(x), torch.ones(1)
            return output

    model, bare, x = Holds().double(), nn.Linear(B, 3).double(), _data()
    bare.load_state_dict(model.layer.state_dict())
    clipper = ghostclip.GhostClipper(model, max_grad_norm=1e6, loss_reduction="sum")
    for step in range(1, 5):
        clipper.reset()
        output = model(x)
        assert (len(model.terms), model.size) == (step, B)
        assert model.terms[-1] is model.term
        clipper.backward(output.sum(1) + model.term)
        bare.zero_grad()
        found = bare(x)
        (found.sum(1) + found.square().sum(1)).sum().backward()
        torch.testing.assert_close(model.layer.weight.grad, bare.weight.grad)


def test_an_output_that_is_changed_in_place():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        output = model(torch.randn(B, 3))
        output += output.detach().sum(0)
        output *= output.roll(1, 0)
        with pytest.raises(SampleMixingError):
            clipper.backward(output.square().sum(1))
