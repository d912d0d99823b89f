"""Factors held in 16 bits or on the host: what is added has the norm that was taken of it, and memory falls."""

import gc

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from benchmarks.live import LiveBytes
from benchmarks.sensitivity.known import KNOWN
from benchmarks.sensitivity.measure import ALLOWED, NUMERICS, reduced_products
from ghostclip import GhostClipper
from ghostclip.clipping.keeper import Keeper, Stored
from ghostclip.clipping.norms import GroupNorms
from ghostclip.errors import TamperedGradientError
from ghostclip.factors import Dense, Outer
from ghostclip.planning.timeline import Holding
from tests.devices.pretended import CUDA, MemoryUsedAgainError, PretendedDevice


def _outer(samples=3, positions=5, inputs=4, outputs=6, scale=1.0):
    a_NTI = torch.randn(samples, positions, inputs)
    return Outer(a_NTI, scale * torch.randn(samples, positions, outputs), shape=(outputs, inputs))


# ---------------------------------------------------------------- 16 bits


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)
def test_data_that_broke_the_bound_does_not_where_it_is_rounded(known, hold):
    """Positions that cancel, products of large and small numbers, sums that drift."""
    if known.numerics == "medium" and not reduced_products()["medium"]:
        pytest.skip("float32 products are computed in float32 on this machine, whatever precision is asked for")
    hold(rounded=True)
    moves = known.moves("bookkeeping")
    assert moves.worst() <= 1 + ALLOWED[NUMERICS[known.numerics].dtype], moves


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e8])
@pytest.mark.parametrize("positions", [2, 7, 40])
def test_what_cancels_before_it_is_rounded_does_not_pass_the_bound_afterwards(scale, positions, hold):
    """Two positions of each sample are opposite but for a part that 8 bits cannot show."""
    hold(rounded=True)
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
    keeper, factor = Keeper(Holding(rounded=frozenset({"weight"}))), _outer(samples=4, positions=9)
    a_NTI, g_NTO = factor.a_NTI.bfloat16().double(), factor.g_NTO.bfloat16().double()
    grad_NOI = torch.einsum("nto,nti->noi", g_NTO, a_NTI)
    for arrived in (factor, Dense(factor.materialize())):
        if isinstance(arrived, Dense):
            grad_NOI = arrived.grad_BP.bfloat16().double()
        rounded = keeper.rounded("weight", arrived)
        held = keeper.stored("weight", rounded)
        assert {tensor.dtype for tensor in _tensors(held)} == {torch.bfloat16}
        back = keeper.restored(held)
        torch.testing.assert_close(rounded.sqnorm().value_B.double(), grad_NOI.square().sum((1, 2)), rtol=1e-6, atol=0)
        out = torch.zeros(6, 4)
        back.add_clipped_sum_(torch.tensor([0.5, 0.0, 2.0, 1.0]), out)
        wanted = torch.einsum("n,noi->oi", torch.tensor([0.5, 0.0, 2.0, 1.0]).double(), grad_NOI)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
        assert keeper.rounded("bias", arrived) is arrived
        assert keeper.stored("bias", arrived) is arrived


def _tensors(held):
    return held.tensors if isinstance(held, Stored) else (held.a_NTI, held.g_NTO)


def test_numbers_that_somebody_else_reads_are_not_rounded_where_they_lie():
    keeper, numbers = Keeper(Holding(rounded=frozenset({"weight"}))), torch.randn(3, 4)
    before = numbers.clone()
    keeper.rounded("weight", Dense(numbers))
    assert torch.equal(numbers, before)
    keeper.rounded("weight", Dense(numbers), own=True)
    assert torch.equal(numbers, before.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_only_float32_is_rounded(dtype):
    factor = Outer(torch.randn(2, 3, 4).to(dtype), torch.randn(2, 3, 5).to(dtype), shape=(5, 4))
    keeper = Keeper(Holding(rounded=frozenset({"weight"})))
    assert keeper.stored("weight", keeper.rounded("weight", factor)) is factor


def test_one_number_that_is_shown_often_is_not_written_out():
    """The gradient of a sum is one number, expanded."""
    factor = Outer(torch.randn(2, 3, 4), torch.ones(()).expand(2, 3, 50), shape=(50, 4))
    keeper = Keeper(Holding(rounded=frozenset({"weight"})))
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


def test_what_several_layers_read_is_held_once_and_its_gram_formed_once(hold, monkeypatch):
    hold(rounded=True)
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
    keeper = Keeper(Holding(rounded=frozenset({"weight"})))
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


# ---------------------------------------------------------------- the host


class _Layers(nn.Sequential):
    """A chain of layers whose factors are smaller than their gradients."""

    def __init__(self, layers=6, *, width=128):
        super().__init__(*(module for _ in range(layers) for module in (nn.Linear(width, width), nn.Tanh())))


class _OnDevice(LiveBytes):
    """Counts what lies on the pretended device alone."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                self._count(leaf.untyped_storage())
        return result


class _Past(nn.Module):
    """What the blocks begin with goes past them, so that no part of them can get a second backward."""

    def __init__(self, width=256):
        super().__init__()
        self.first = nn.Linear(width, width)
        parts = [[nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)] for _ in range(6)]
        self.blocks = nn.ModuleList(nn.Sequential(*part) for part in parts)

    def forward(self, x_BTI):
        past_BTI = x_BTI = self.first(x_BTI)
        for block in self.blocks:
            x_BTI = block(x_BTI)
        return x_BTI + past_BTI


def _there(make=_Layers, samples=4, width=128, positions=16, **options):
    """Return sums, norms and device bytes of a step on a pretended GPU."""
    torch.manual_seed(0)
    with PretendedDevice():
        model, x = make(width=width).to(CUDA), torch.randn(samples, positions, width).to(CUDA)
        with GhostClipper(model, max_grad_norm=1e-3, **options) as clipper:
            # The fifth is no step that is proved, which holds a copy of the batch besides.
            for _ in range(5):
                model.zero_grad(set_to_none=True)
                with _OnDevice(beside=[*model.parameters(), x]) as live:
                    clipper.backward(clipper.model(x).square().mean((1, 2)))
            reduction = None if clipper._reducer is None else clipper._reducer.latest
            grads = [p.grad.cpu() for p in model.parameters()]
            return grads, clipper.per_sample_norms.cpu(), live, reduction, clipper.coverage()


@pytest.mark.parametrize("rounded", [False, True])
def test_contents_come_back_equal_and_the_device_holds_less(rounded, hold, monkeypatch):
    """Copies are made no sooner than they are waited for, and what they write is NaN until then."""
    monkeypatch.setattr("ghostclip.kernels.products.has_units", lambda device: False)
    forms = {"rounded": True} if rounded else {}
    hold(**forms)
    wanted, norms_B, before, *_ = _there()
    hold(**forms, offloaded=True)
    found, same_B, after, *_ = _there()
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(same_B, norms_B)
    if not rounded:
        # Inputs of layers are held until their backward anyway; what gathers behind it are two tensors of one layer.
        assert after.peak < before.peak - 0.6 * 6 * 4 * 16 * 128 * 4


def test_a_budget_is_kept_with_factors_on_the_host_where_nothing_else_is_left():
    sizes = {"make": _Past, "samples": 16, "width": 256, "positions": 64}
    wanted, *_ = _there(**sizes, memory_budget=1.0)
    found, _, live, reduction, coverage = _there(**sizes, memory_budget=0.8)
    assert reduction.cut is None
    assert reduction.holding.offloaded
    assert live.peak <= 1.05 * 0.8 * reduction.ordinary
    assert live.peak == pytest.approx(reduction.peak, rel=0.1)
    rows = {row.name: row for row in coverage}
    assert {name for name, row in rows.items() if "held on the host" in row.plan} == reduction.holding.offloaded
    assert all(rows[name].cost.held == 0 for name in reduction.holding.offloaded)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9)


def test_the_host_is_not_filled(monkeypatch):
    monkeypatch.setattr("ghostclip.planning.below.host_room", lambda: 1000)
    *_, reduction, _ = _there(make=_Past, samples=16, width=256, positions=64, memory_budget=0.8)
    assert not reduction.holding.offloaded


def test_norms_in_float64_are_of_what_comes_back(hold, monkeypatch):
    """Of samples that rounding may have changed, and whose contributions are formed by themselves."""
    hold()
    wanted, norms_B, *_ = _there()
    hold(offloaded=True)
    imprecise_B = torch.tensor([True, False, True, False])
    monkeypatch.setattr(GroupNorms, "imprecise_B", lambda self, doubt=None: imprecise_B)
    monkeypatch.setattr(GroupNorms, "refine", _as_ill_conditioned(GroupNorms.refine))
    found, same_B, *_ = _there()
    torch.testing.assert_close(same_B, norms_B, rtol=1e-5, atol=0)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-9)


def _as_ill_conditioned(refine):
    def refined(self, exact, index_D):
        refine(self, exact, index_D)
        return torch.tensor([True, False, True, False])

    return refined


def test_what_is_changed_while_it_is_copied_is_refused():
    with PretendedDevice():
        keeper, factor = Keeper(Holding(offloaded=frozenset({"weight"}))), _outer()
        there = Outer(factor.a_NTI.to(CUDA), factor.g_NTO.to(CUDA), shape=factor.shape)
        held = keeper.stored("weight", there)
        there.g_NTO.add_(1)
        with pytest.raises(TamperedGradientError, match="'weight'"):
            keeper.complete()
        del held


def test_memory_of_a_copy_that_nobody_waits_for_is_found_out():
    """What the pretended streams are for."""
    with PretendedDevice():
        side = torch.cuda.Stream()
        there = torch.ones(3).to(CUDA)
        here = torch.zeros(3)
        with torch.cuda.stream(side):
            here.copy_(there, non_blocking=True)
        assert here.isnan().all()
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(here, torch.ones(3))
        with torch.cuda.stream(side):
            here.copy_(there, non_blocking=True)
        del there
        with pytest.raises(MemoryUsedAgainError):
            torch.cuda.current_stream().wait_stream(side)


def test_on_the_cpu_nothing_is_copied():
    keeper, factor = Keeper(Holding(offloaded=frozenset({"weight"}))), _outer()
    assert keeper.stored("weight", factor) is factor


@pytest.mark.cuda
@pytest.mark.parametrize("rounded", [False, True])
def test_a_gpu_holds_less_and_adds_the_same(rounded, hold):
    device, found = torch.device("cuda"), []
    for forms in ({}, {"offloaded": True}):
        torch.manual_seed(0)
        model, x = _Layers(8, width=1024).to(device), torch.randn(8, 256, 1024, device=device)
        hold(**({"rounded": True} if rounded else {}), **forms)
        with GhostClipper(model, max_grad_norm=1e-3, strategy="bookkeeping") as clipper:
            for _ in range(4):
                model.zero_grad(set_to_none=True)
                losses_B = clipper.model(x).square().mean((1, 2))
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                clipper.backward(losses_B)
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated()
        found.append(([p.grad.clone() for p in model.parameters()], peak))
    (wanted, before), (same, after) = found
    for one, other in zip(same, wanted, strict=True):
        assert torch.equal(one, other)
    assert after < before
