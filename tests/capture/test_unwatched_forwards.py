"""Forwards whose data reaches parameters as it came in are not watched; whatever else happens in one is seen."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ghostclip import GhostClipper
from tests.reference import per_sample_gradients, whole_norm


class Changing(nn.Module):
    """Does something else with its data from some forward on."""

    def __init__(self, change) -> None:
        super().__init__()
        self.first, self.second, self.change, self.changes = nn.Linear(4, 5), nn.Linear(5, 3), change, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.changes:
            return self.second(torch.tanh(self.first(x)))
        return self.change(self, x)


def _sorted(model, x):
    order = torch.arange(len(x) - 1, -1, -1)
    return model.second(torch.tanh(model.first(x[order])))[order]


def _mixed_type(model, x):
    return model.second(torch.tanh(model.first(x.clone())))


def _rolled_in_place(model, x):
    kept = x.clone()
    x.copy_(x.roll(1, 0))
    out = model.second(torch.tanh(model.first(x)))
    x.copy_(kept)
    return out.roll(-1, 0)


def _losses(model, batch):
    return model(batch["x"]).square().sum(1)


def _as_one_by_one(model, clipper, x):
    clipper.backward(_losses(model, {"x": x}))
    one = per_sample_gradients(copy.deepcopy(model), {"x": x}, _losses, axes={})
    expected = torch.stack([whole_norm(gradient) for gradient in one])
    model.zero_grad()
    return torch.allclose(clipper.per_sample_norms, expected, rtol=1e-9)


@pytest.mark.parametrize("change", [_sorted, _mixed_type], ids=["sorted", "copied"])
def test_a_change_in_an_unwatched_forward_is_followed(change):
    torch.manual_seed(0)
    model = Changing(change).double()
    clipper = GhostClipper(model, max_grad_norm=0.1)
    rows = clipper._capture._rows
    for forward in range(8):
        model.changes = forward in (5, 7)
        assert _as_one_by_one(model, clipper, torch.randn(5, 4, dtype=torch.float64))
        if forward == 4:
            assert not rows._watched
    assert rows._watched, "watched from now on"


@pytest.mark.parametrize("shape", [(5, 4), (5, 2, 2), (5, 1, 4)])
def test_reshaped_data_is_not_watched(shape):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    clipper = GhostClipper(model, max_grad_norm=0.1)
    for _ in range(6):
        assert _as_one_by_one(model, clipper, torch.randn(shape, dtype=torch.float64))
    assert not clipper._capture._rows._watched


def test_data_that_was_changed_in_place_is_not_as_it_came():
    """In another order than that of the batch and back again: whose rows are whose is asked of the evidence."""
    torch.manual_seed(0)
    model = Changing(_rolled_in_place).double()
    clipper = GhostClipper(model, max_grad_norm=0.1)
    for _ in range(5):
        assert _as_one_by_one(model, clipper, torch.randn(5, 4, dtype=torch.float64))
    rows = clipper._capture._rows
    x = torch.randn(5, 4, dtype=torch.float64)
    rows.begin(5, 0, [x], watched=False)
    try:
        assert rows.samples_of(x) is None
        assert rows.samples_of(x.view(5, 2, 2)) is None
        x.copy_(x.roll(1, 0))
        assert rows.samples_of(x) is not None
    finally:
        rows.end()


def test_recurrent_models_are_always_watched():
    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.lstm = nn.Embedding(7, 4), nn.LSTM(4, 3, batch_first=True)

        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(self.token(ids), lengths, batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0].sum(1)

    torch.manual_seed(0)
    model = Packs()
    clipper = GhostClipper(model, max_grad_norm=0.1)
    for _ in range(6):
        clipper.backward(model(torch.randint(7, (3, 5)), torch.tensor([5, 2, 4])).square().sum(1))
    assert clipper._capture._rows._watched


def test_inner_modules_have_no_hooks_inside_a_call_and_have_them_again():
    torch.manual_seed(0)
    inner, seen = nn.Linear(4, 4), []

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, fails: bool = False) -> Tensor:
            seen.append(len(inner._forward_pre_hooks))
            if fails:
                raise KeyError("stop")
            return functional.relu(self.inner(x))

    model = Outer()
    clipper = GhostClipper(model, max_grad_norm=0.1, probe=False)
    clipper.backward(model(torch.randn(3, 4)).sum(1))
    with pytest.raises(KeyError):
        model(torch.randn(3, 4), fails=True)
    assert seen == [0, 0]
    assert len(inner._forward_pre_hooks) == len(inner._forward_hooks) == 1
    model.zero_grad()
    clipper.backward(inner(torch.randn(3, 4)).sum(1))
    assert inner.weight.grad is not None
    clipper.remove()
    assert not inner._forward_pre_hooks
    assert not inner._forward_hooks
