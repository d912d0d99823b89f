"""Factors held in 16 bits: what is added has the norm that was taken of it."""

import pytest
import torch
from torch import nn

from ghostclip import GhostClipper
from ghostclip.clipping.held_factors import Keeper
from tests.exactness.sensitivity.known import KNOWN
from tests.exactness.sensitivity.measure import ALLOWED, NUMERICS, reduced_products


@pytest.mark.usefixtures("all_rounded")
@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)
def test_data_that_broke_the_bound_does_not_where_it_is_rounded(known):
    """Positions that cancel, products of large and small numbers, sums that drift."""
    if known.numerics == "medium" and not reduced_products()["medium"]:
        pytest.skip("float32 products are computed in float32 on this machine, whatever precision is asked for")
    moves = known.moves("bookkeeping")
    assert moves.worst() <= 1 + ALLOWED[NUMERICS[known.numerics].dtype], moves


@pytest.mark.usefixtures("all_rounded")
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e8])
@pytest.mark.parametrize("positions", [2, 7, 40])
def test_what_cancels_before_it_is_rounded_does_not_pass_the_bound_afterwards(scale, positions):
    """Two positions of each sample are opposite but for a part that 8 bits cannot show."""
    model = nn.Linear(30, 20)
    x = torch.randn(6, positions, 30)
    x[:, 1] = x[:, 0] * (1 + 2.0**-10)
    sign = torch.ones(positions)
    sign[1] = -1.0
    with GhostClipper(model, max_grad_norm=1.0, strategy="bookkeeping", probe=False) as clipper:

        def summed(chosen):
            model.zero_grad(set_to_none=True)
            clipper.backward(scale * (clipper.model(x[chosen]).sum(2) * sign).sum(1))
            return torch.cat([p.grad.double().flatten() for p in model.parameters()])

        whole = summed(slice(0, 6))
        for sample in range(6):
            assert summed([sample]).norm() <= 1 + 1e-5
            assert (whole - summed([one for one in range(6) if one != sample])).norm() <= 1 + 1e-5


class _Attention(nn.Module):
    """Three layers that read one activation."""

    def __init__(self, width=96):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x_BTI):
        h_BTI = self.first(x_BTI).tanh()
        return self.q(h_BTI) * self.k(h_BTI) + self.v(h_BTI)


@pytest.mark.usefixtures("all_rounded")
def test_what_several_layers_read_is_held_once_and_its_gram_formed_once(monkeypatch):
    held, stored = {}, Keeper.stored
    monkeypatch.setattr(
        Keeper, "stored", lambda self, name, factor: held.update({name: factor}) or stored(self, name, factor)
    )
    # So few positions that no gradient is smaller than its two factors.
    model, x_BTI = _Attention(), torch.randn(2, 24, 96)
    with GhostClipper(model, max_grad_norm=1.0, strategy="bookkeeping") as clipper:
        for _ in range(3):
            clipper.backward(clipper.model(x_BTI).square().mean((1, 2)))
        plans = {row.name: row.plan for row in clipper.coverage()}
    assert all("shared by 3" in plans[f"{name}.weight"] for name in "qkv")
    q, k, v = (held[f"{name}.weight"].a_NTI for name in "qkv")
    assert q.dtype == torch.bfloat16
    assert q is k is v
