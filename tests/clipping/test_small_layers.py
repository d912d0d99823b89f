"""Layers of one form are put together: sums and norms are those of each by itself, whatever else the batch holds."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ghostclip import GhostClipper
from ghostclip.clipping import joint
from ghostclip.clipping.passes import BookKeeping
from ghostclip.errors import TamperedGradientError
from tests.reference import Reference, clip_and_sum, per_sample_gradients

BOUND = 0.3


class Stack(nn.Module):
    """Blocks of one form, some of whose parameters may be frozen, shared or of another size."""

    def __init__(self, blocks: int = 4, *, odd: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(6), "up": nn.Linear(6, 7), "down": nn.Linear(7, 6)})
            for _ in range(blocks)
        )
        self.odd = nn.Linear(6, 6) if odd else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block["down"](torch.tanh(block["up"](block["norm"](x))))
        return self.odd(x)


def _losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).square().flatten(1).sum(1)


def _together(clipper: GhostClipper, losses: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run a backward; returns how many layers were put together each time."""
    found: list[int] = []
    joined = joint.SmallLayers._joined

    def noted(self, waiting):
        done = joined(self, waiting)
        if done:
            found.append(len(waiting))
        return done

    monkeypatch.setattr(joint.SmallLayers, "_joined", noted)
    clipper.backward(losses)
    return found


def _reference(model: nn.Module, x: torch.Tensor, losses=_losses) -> Reference:
    double = copy.deepcopy(model).double()
    return clip_and_sum(per_sample_gradients(double, {"x": x.double()}, losses, axes={}), BOUND)


def _check(model: nn.Module, clipper: GhostClipper, batch: dict[str, torch.Tensor]) -> None:
    expected = _reference(model, batch["x"])
    assert torch.allclose(clipper.per_sample_norms.double(), expected.norms_B, rtol=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad.double(), expected.clipped[name], rtol=1e-5, atol=1e-6)


@pytest.fixture(params=["layers", "gradients"])
def what(request, monkeypatch):
    """What is put together: whole layers, or, as of layers that are too large for it, gradients of one shape."""
    if request.param == "gradients":
        monkeypatch.setattr(joint.SmallLayers, "hold", lambda self, use, grad, kept: False)
    return request.param


@pytest.mark.parametrize(
    ("positions", "dtype"), [(None, torch.float32), (1, torch.float64), (5, torch.float32), (40, torch.float64)]
)
def test_sums_and_norms_are_those_of_each(dtype, positions, monkeypatch):
    torch.manual_seed(0)
    model = Stack().to(dtype)
    x = torch.randn(3, *([] if positions is None else [positions]), 6, dtype=dtype)
    clipper = GhostClipper(model, max_grad_norm=BOUND, strategy="bookkeeping")
    for _ in range(2):
        model.zero_grad()
        assert _together(clipper, _losses(model, {"x": x}), monkeypatch) == [4, 4, 4]
        _check(model, clipper, {"x": x})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sample_that_is_not_finite_adds_nothing(bad, what, monkeypatch):
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(4, 5, 6)
    x[1, 2, 3] = bad
    clipper = GhostClipper(model, max_grad_norm=BOUND, strategy="bookkeeping", probe=False)
    assert bool(_together(clipper, _losses(model, {"x": x}), monkeypatch)) is (what == "layers")
    assert clipper.non_finite_samples == 1
    got = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    clipper.backward(_losses(model, {"x": x[[0, 2, 3]]}))
    for one, parameter in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-5, atol=1e-6)


def test_an_ill_conditioned_sample_is_measured_by_itself(monkeypatch):
    """Positions that oppose each other but for a few digits: formed in float64, as for layers that are left apart."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    x, weight = torch.randn(3, 2, 6), torch.randn(3, 2, 6)
    x[1, 1], weight[1, 1] = x[1, 0] * (1 + 3e-7), -weight[1, 0]
    found = []
    for at_once in (True, False):
        monkeypatch.setattr(BookKeeping, "puts_together", at_once)
        own = copy.deepcopy(model)
        clipper = GhostClipper(own, max_grad_norm=1e-7, strategy="bookkeeping", probe=False)
        assert bool(_together(clipper, (own(x) * weight).sum((1, 2)), monkeypatch)) is at_once
        found.append([clipper.per_sample_norms, *(parameter.grad for parameter in own.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-12)


def test_a_gradient_that_changes_while_it_waits_is_refused():
    torch.manual_seed(0)
    model, kept = Stack(), []

    def tamper(grad: torch.Tensor) -> torch.Tensor:
        if kept:
            kept[0].mul_(2)
        kept.append(grad)
        return grad

    for block in model.blocks:
        block["up"].register_forward_hook(lambda module, args, output: output.register_hook(tamper) and None)
    clipper = GhostClipper(model, max_grad_norm=BOUND, strategy="bookkeeping", probe=False)
    with pytest.raises(TamperedGradientError, match="changed in place"):
        clipper.backward(_losses(model, {"x": torch.randn(3, 5, 6)}))


def test_one_sample_left_out_moves_what_is_released_by_no_more_than_the_bound(what):
    torch.manual_seed(0)
    x = torch.randn(5, 4, 6)

    def released(rows: list[int]) -> torch.Tensor:
        torch.manual_seed(1)
        model = Stack()
        clipper = GhostClipper(model, max_grad_norm=BOUND, strategy="bookkeeping", probe=False)
        clipper.withhold_gradients()
        clipper.backward(_losses(model, {"x": x[rows]}))
        return torch.cat([clipper.summed_gradient(parameter).flatten() for parameter in model.parameters()])

    whole = released(list(range(5)))
    for sample in range(5):
        moved = whole - released([row for row in range(5) if row != sample])
        assert moved.double().norm() <= BOUND * (1 + 1e-6)
