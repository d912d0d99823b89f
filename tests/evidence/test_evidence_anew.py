"""Evidence is asked for again as training goes on: what looked right in one batch may be wrong in the next."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

from ghostclip import GhostClipper
from ghostclip.errors import GhostClipError
from ghostclip.evidence.unchecked import CheckSchedule
from tests.cases import by_name
from tests.exactness.runs import engine
from tests.reference import per_sample_gradients, whole_norm


class _SortsByLength(nn.Module):
    """Orders samples by their first value before a layer and restores the order behind it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.layer(x[order])[order.argsort()]


def test_rows_in_order_in_the_first_batch_only(strategy):
    """The first batch is sorted already; in later ones rows move, and are followed."""
    model = _SortsByLength().double()
    clipper = engine(strategy)(model, 0.1)
    x = torch.randn(5, 4, dtype=torch.float64)
    for batch in (x[x[:, 0].argsort()], *torch.randn(4, 5, 4, dtype=torch.float64)):
        clipper.backward(model(batch).square().sum(1))
        per_sample = per_sample_gradients(copy.deepcopy(model.layer), {"x": batch}, _squares, axes={})
        norms_B = torch.stack([whole_norm(gradient) for gradient in per_sample])
        assert torch.allclose(clipper.per_sample_norms, norms_B, rtol=1e-10)


def _squares(model, batch):
    return model(batch["x"]).square().sum(1)


class _MixesLater(nn.Module):
    """Subtracts the mean of the batch, once switched on."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.mixes = nn.Linear(4, 3), nn.Linear(3, 2), False

    def forward(self, x):
        h = self.first(x)
        return self.second(h - h.mean(0) if self.mixes else h)


def test_samples_that_mix_later_on(strategy):
    model = _MixesLater().double()
    clipper = engine(strategy)(model, 0.1)
    clipper.backward(model(torch.randn(5, 4, dtype=torch.float64)).square().sum(1))
    model.mixes = True

    def train_on():
        for _ in range(4):
            clipper.backward(model(torch.randn(5, 4, dtype=torch.float64)).square().sum(1))

    with pytest.raises(GhostClipError, match="depends on other samples"):
        train_on()


def test_batch_sizes_may_change_from_step_to_step(strategy):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).double()
    clipper = engine(strategy)(model, 0.1)
    for size in (3, 1, 4, 2, 5, 4, 1, 3, 4, 2, 6, 4, 4, 1, 2, 4, 7):
        clipper.backward(model(torch.randn(size, 4, 4, dtype=torch.float64)).square().sum((1, 2)))
        assert clipper.batch_size == size


def _asked(count: int) -> list[int]:
    schedule = CheckSchedule()
    return [number for number in range(1, count) if schedule.take(number)]


def test_when(unpredictable):
    """The first, often at first, then one in a hundred at most; never the same ones."""
    runs = [_asked(20_000) for _ in range(20)]
    for found in runs:
        assert found[0] == 1
        assert 2 <= found[1] <= 6
        assert sum(number <= 100 for number in found) >= 3
        late = [number for number in found if number > 100]
        assert len(late) >= 20
        assert all(100 <= after - before <= 700 for before, after in pairwise(late))
    assert len({tuple(found) for found in runs}) == len(runs)


class _RemembersRarely(nn.Module):
    """From some forward on, adds what it has kept of the forward before."""

    def __init__(self, begins):
        super().__init__()
        self.layer, self.begins, self.number, self.kept = nn.Linear(3, 4), begins, 0, 0.0

    def forward(self, x):
        self.number += 1
        h = self.layer(x)
        if self.number < self.begins:
            return h
        kept, self.kept = self.kept, h.detach().mean()
        return h + kept


def test_what_begins_late_is_met(unpredictable):
    """As nobody knows which forwards are asked about, a memory cannot stay out of their way."""
    model = _RemembersRarely(150)

    def train():
        with GhostClipper(model, max_grad_norm=0.1) as clipper:
            for _ in range(1600):
                clipper.backward(model(torch.randn(4, 3)).square().sum(1))

    with pytest.raises(GhostClipError, match=r"forward before|other samples"):
        train()
    # What a check runs once more is not counted afterwards.
    assert model.number >= 140


@pytest.mark.parametrize(
    "name",
    ["picked_brackets_second_axis", "picked_index_select_second", "product_mm_left_of_transposed_alone", "linear_3d"],
)
def test_losses_of_another_form_in_a_later_step_are_followed_to_layers_of_every_layout(name):
    """Nothing of that forward is proved again, so that the loss is followed to where layers left their rows."""
    case = by_name(name)
    model, batch = case.model(torch.float64), case.data(torch.float64)
    with GhostClipper(model, max_grad_norm=1e9, batch_first=case.batch_first) as clipper:
        clipper.backward(case.losses(model, batch))
        norms_B = clipper.per_sample_norms
        model.zero_grad()
        losses_B = case.losses(model, batch)
        clipper.backward(losses_B * (torch.arange(len(losses_B)) > 0))
        assert clipper.per_sample_norms[0] == 0
        torch.testing.assert_close(clipper.per_sample_norms[1:], norms_B[1:], rtol=1e-9, atol=1e-12)
