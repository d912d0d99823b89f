"""Factors held in 16 bits: what is added has the norm that was taken of it."""

import gc

import pytest
import torch
from torch import nn

from ghostclip import GhostClipper
from ghostclip.clipping.held_factors import Keeper, restored
from ghostclip.factors import Dense, Outer
from tests.exactness.sensitivity.known import KNOWN
from tests.exactness.sensitivity.measure import ALLOWED, NUMERICS, reduced_products


def _outer(samples=3, positions=5, inputs=4, outputs=6, scale=1.0):
    a_NTI = torch.randn(samples, positions, inputs)
    return Outer(a_NTI, scale * torch.randn(samples, positions, outputs), shape=(outputs, inputs))


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


def test_norm_and_sum_are_those_of_the_rounded_factor():
    keeper, factor = Keeper({"weight"}), _outer(samples=4, positions=9)
    a_NTI, g_NTO = factor.a_NTI.bfloat16().double(), factor.g_NTO.bfloat16().double()
    grad_NOI = torch.einsum("nto,nti->noi", g_NTO, a_NTI)
    for arrived in (factor, Dense(factor.materialize())):
        if isinstance(arrived, Dense):
            grad_NOI = arrived.grad_BP.bfloat16().double()
        rounded = keeper.rounded("weight", arrived)
        held = keeper.stored("weight", rounded)
        assert {tensor.dtype for tensor in _tensors(held)} == {torch.bfloat16}
        back = restored(held)
        torch.testing.assert_close(rounded.sqnorm().value_B.double(), grad_NOI.square().sum((1, 2)), rtol=1e-6, atol=0)
        out = torch.zeros(6, 4)
        back.add_clipped_sum_(torch.tensor([0.5, 0.0, 2.0, 1.0]), out)
        wanted = torch.einsum("n,noi->oi", torch.tensor([0.5, 0.0, 2.0, 1.0]).double(), grad_NOI)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
        assert keeper.rounded("bias", arrived) is arrived
        assert keeper.stored("bias", arrived) is arrived


def _tensors(held):
    return (held,) if isinstance(held, torch.Tensor) else (held.a_NTI, held.g_NTO)


def test_numbers_that_somebody_else_reads_are_not_rounded_where_they_lie():
    keeper, numbers = Keeper({"weight"}), torch.randn(3, 4)
    before = numbers.clone()
    keeper.rounded("weight", Dense(numbers))
    assert torch.equal(numbers, before)
    keeper.rounded("weight", Dense(numbers), own=True)
    assert torch.equal(numbers, before.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_only_float32_is_rounded(dtype):
    factor = Outer(torch.randn(2, 3, 4).to(dtype), torch.randn(2, 3, 5).to(dtype), shape=(5, 4))
    keeper = Keeper({"weight"})
    assert keeper.stored("weight", keeper.rounded("weight", factor)) is factor


def test_one_number_that_is_shown_often_is_not_written_out():
    """The gradient of a sum is one number, expanded."""
    factor = Outer(torch.randn(2, 3, 4), torch.ones(()).expand(2, 3, 50), shape=(50, 4))
    keeper = Keeper({"weight"})
    assert keeper.rounded("weight", factor) is factor


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


def test_copies_count_only_while_what_they_are_of_lives_unchanged():
    keeper = Keeper({"weight"})
    first, g_NTO = _outer(), torch.randn(3, 5, 6)
    one = keeper.rounded("weight", first)
    same = keeper.rounded("weight", Outer(first.a_NTI.view(3, 5, 4), g_NTO, shape=(6, 4)))
    assert same.a_NTI is one.a_NTI
    first.a_NTI.add_(1)
    changed = keeper.rounded("weight", first)
    assert torch.equal(changed.a_NTI, first.a_NTI.bfloat16())
    place, shape = first.a_NTI.data_ptr(), first.a_NTI.shape
    del first, same
    gc.collect()
    # Memory that was freed is what is given out next, sooner or later.
    others = [torch.randn(shape) for _ in range(50)]
    again = [other for other in others if other.data_ptr() == place]
    for other in again or others:
        fresh = keeper.rounded("weight", Outer(other, g_NTO, shape=(6, 4)))
        assert torch.equal(fresh.a_NTI, other.bfloat16())
    if not again:
        pytest.skip("memory was not used again")
