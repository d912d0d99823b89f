"""What a forward that is proved costs: how often the model runs."""

import queue

import pytest
import torch
from torch import nn

import ghostclip

B = 6


# No list: what a forward reaches is put back after runs that are not the user's.
_SEEN: queue.SimpleQueue[int] = queue.SimpleQueue()


class _Counted(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 4), nn.Dropout(dropout)

    def forward(self, x):
        _SEEN.put(len(x))
        return self.dropout(self.layer(x))


def _seen() -> list[int]:
    return [_SEEN.get() for _ in range(_SEEN.qsize())]


@pytest.mark.parametrize(
    ("dropout", "extra"),
    # Three samples, the rehearsal, one of every two neighbours and the first half replaced, half of them by themselves;
    # with open gates four samples, one of every two neighbours replaced, and the other one; the forward itself.
    # With dropout also the batch without it.
    [(0.0, [3, B, B, B, B // 2, 4, 4, 4, B]), (0.5, [3, B, B, B, B, B // 2, 4, 4, 4, B])],
)
def test_how_often_the_model_runs(dropout, extra):
    model = _Counted(dropout)
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        clipper.backward(model(torch.randn(B, 3)).square().sum(1))
        assert extra == _seen()
        clipper.backward(model(torch.randn(B, 3)).square().sum(1))
        assert _seen() == [B]
        clipper.backward(model(torch.randn(B, 3)).square().sum(1))
        _seen()
        clipper.backward(model(torch.randn(B, 3)).square().sum(1))
    # The drawn half replaced and the other one, and the second half alone.
    again = [B, B, B, *([B] if dropout else []), B // 2, B]
    assert again == _seen()
