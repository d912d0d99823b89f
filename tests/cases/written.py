"""Parameters written into other tensors in place: matrices assembled from entries, batches filled with a parameter."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.cases.table import Case, on_x


class _Assembled(nn.Module):
    """Builds a matrix in place and multiplies with it, or fills a batch."""

    def __init__(self, build: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.entries, self.layer, self.build = nn.Parameter(torch.randn(4, 6)), nn.Linear(6, 6), build

    def forward(self, x: Tensor) -> Tensor:
        return self.build(self.entries, self.layer(x).tanh())


def _rows_set(p: Tensor, h: Tensor) -> Tensor:
    w = torch.zeros(6, 6, dtype=h.dtype, device=h.device)
    w[:4] = p
    return h @ w


def _skew_symmetric(p: Tensor, h: Tensor) -> Tensor:
    w = torch.zeros(6, 6, dtype=h.dtype, device=h.device)
    upper = torch.triu_indices(6, 6, 1)
    w[upper[0], upper[1]] = p.flatten()[:15]
    return h @ (w - w.T)


def _copied(p: Tensor, h: Tensor) -> Tensor:
    w = torch.empty(4, 6, dtype=h.dtype, device=h.device)
    w.copy_(p)
    return h @ w.t()


def _put(p: Tensor, h: Tensor) -> Tensor:
    w = torch.ones(6, 6, dtype=h.dtype, device=h.device)
    w.index_put_((torch.tensor([5, 0, 2, 2]),), p, accumulate=True)
    return h @ w


def _changed_after_a_copy(p: Tensor, h: Tensor) -> Tensor:
    w = p * 2
    first = h @ w.clone().t()
    w += p.exp()
    w -= 0.5
    return first + h @ w.t()


def _row_replaced(p: Tensor, h: Tensor) -> Tensor:
    """A repeated parameter, one row of which is another's."""
    spread = p.sin()[None].repeat(h.shape[0], 1, 1)
    spread[:, 0] = p[1]
    return spread * h[:, :1]


def _batch_filled(p: Tensor, h: Tensor) -> Tensor:
    out = h.new_zeros(h.shape[0], 5, 6)
    out[:, 0] = h[:, 0]
    out[:, 1:] = p
    return out


_WAYS = (_rows_set, _skew_symmetric, _copied, _put, _changed_after_a_copy, _row_replaced, _batch_filled)


def _case(build: Callable[[Tensor, Tensor], Tensor]) -> Case:
    return Case(f"written{build.__name__}", lambda: _Assembled(build), lambda: {"x": torch.randn(3, 5, 6)}, on_x)


CASES = [_case(build) for build in _WAYS]
