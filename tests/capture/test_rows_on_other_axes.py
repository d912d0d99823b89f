"""Selections along an axis that is not the batch's, and orders that only a later batch shows.

Positions, levels or heads first: what is sliced there has rows of all samples, whether or not the sizes divide evenly.
And a model may put its rows into an order that the first batch happened to have already.
"""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import ghostclip
from tests.cases.table import probe_loss
from tests.exactness.runs import Outcome, check_norms, check_sum, gradients
from tests.reference import clip_and_sum, per_sample_gradients

F64 = torch.float64
BOUND = 0.2


class _Two(nn.Module):
    """Two layers and a scale."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))


class _PositionsFirst(_Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x).transpose(0, 1)
        return torch.cat([self.leave(part) * self.scale for part in h.split(4)]).transpose(0, 1)


class _PositionsPicked(_Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x.transpose(0, 1)[:6])
        return (h[torch.tensor([0, 2, 3, 5])] * self.scale).transpose(0, 1)


class _Levels(_Two):
    def forward(self, x: Tensor) -> Tensor:
        levels = torch.stack([self.enter(x), x, x.sin(), x.cos()])
        return self.leave(levels[1:]).mean(0) + (levels[:2] * self.scale).sum(0)


class _Sorted(_Two):
    """Sorts the samples by what is in them; one way to say it each."""

    def __init__(self, pick):
        super().__init__()
        self.pick = pick

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        order = h.sum(1).argsort()
        return (self.leave(self.pick(h, order)) * self.scale)[order.argsort()]


_PICKS = {
    "gather": lambda h, order: h.gather(0, order[:, None].expand(-1, 4)),
    "take_along_dim": lambda h, order: h.take_along_dim(order[:, None], 0),
    "stack": lambda h, order: torch.stack([h[int(place)] for place in order]),
    "cat": lambda h, order: torch.cat([h[place : place + 1] for place in order.tolist()]),
}


def _check(model: nn.Module, batches: list[Tensor], strategy: str) -> None:
    copy = deepcopy(model)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=BOUND, strategy=strategy)
    for x in batches:
        reference = clip_and_sum(per_sample_gradients(copy, {"x": x}, _losses, axes={}), BOUND)
        model.zero_grad(set_to_none=True)
        clipper.backward(_losses(model, {"x": x}))
        outcome = Outcome(gradients(model), clipper.per_sample_norms, clipper.clip_coefficients, clipper.batch_size)
        check_norms(outcome, reference, F64)
        check_sum(outcome, reference, F64)


def _losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return probe_loss(model(batch["x"]))


@pytest.mark.parametrize("sizes", [(3, 2, 4, 8, 6, 1), (2, 3, 4), (4, 8, 2), (5, 6, 3)], ids=str)
@pytest.mark.parametrize("kind", [_PositionsFirst, _PositionsPicked, _Levels])
def test_selected_along_another_axis(kind, sizes, strategy):
    torch.manual_seed(4)
    _check(kind().double(), [torch.randn(size, 8, 4, dtype=F64) for size in sizes], strategy)


@pytest.mark.parametrize("pick", list(_PICKS))
def test_order_that_the_first_batch_had_already(pick, strategy):
    torch.manual_seed(5)
    model = _Sorted(_PICKS[pick]).double()
    first, later = torch.randn(2, 4, dtype=F64), torch.randn(3, 4, dtype=F64)
    first, later = (
        x[model.enter(x).sum(1).argsort(descending=turned)] for x, turned in ((first, False), (later, True))
    )
    _check(model, [first, later, later.flip(0)], strategy)
