"""Factors held in 16 bits: what is added has the norm that was taken of it."""

import pytest
import torch
from torch import nn

from ghostclip import GhostClipper
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
@pytest.mark.parametrize(("scale", "positions"), [(1.0, 40), (1e4, 2), (1e8, 7)])
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
