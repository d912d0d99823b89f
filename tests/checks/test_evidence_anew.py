"""Evidence is asked for again as training goes on: what looked right in one batch may be wrong in the next."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from ghostclip import GhostClipper
from ghostclip.checks.unchecked import CheckSchedule
from ghostclip.errors import GhostClipError
from tests.cases import by_name


def _asked(count: int) -> list[int]:
    schedule = CheckSchedule()
    return [number for number in range(1, count) if schedule.advance(number)]


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
