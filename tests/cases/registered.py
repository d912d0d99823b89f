"""Layers that cannot be captured (custom autograd functions), with samplers registered for them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.rules.registry import register_grad_sampler, register_norm_sampler
from tests.cases.table import Case, layer_case, probe_loss


class Affine(torch.autograd.Function):
    """``x Wᵀ + b`` with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Run it."""
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pass gradients back."""
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2), grad.flatten(0, -2).sum(0)


class ByGradients(nn.Module):
    """A layer with a gradient sampler."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs)."""
        return Affine.apply(x, self.weight, self.bias)


class ByNorms(ByGradients):
    """The same layer with a norm sampler only."""


class ByBoth(ByGradients):
    """The same layer with both."""


class WithChild(nn.Module):
    """A layer with a norm sampler whose parameters belong to a child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(5, 5)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Map (B, ..., 5) to itself."""
        return torch.sin(self.child(x) * scale)


def _per_sample(activations: list[Tensor], backprops: Tensor) -> tuple[Tensor, Tensor]:
    a, g = (x.reshape(len(x), -1, x.shape[-1]) for x in (activations[0], backprops))
    return torch.einsum("nto,nti->noi", g, a), g.sum(1)


@register_grad_sampler([ByGradients, ByBoth])
def affine_gradients(module: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    """Return the gradients of every sample."""
    weight, bias = _per_sample(activations, backprops)
    return {module.weight: weight, module.bias: bias}


@register_norm_sampler([ByNorms, ByBoth])
def affine_norms(module: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    """Return their norms."""
    weight, bias = _per_sample(activations, backprops)
    return {module.weight: weight.flatten(1).norm(dim=1), module.bias: bias.norm(dim=1)}


@register_norm_sampler(WithChild)
def child_norms(module: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    """Return the norms of the child's gradients."""
    x = activations[0]
    scaled = backprops * torch.cos(module.child(x) * 2.0) * 2.0
    weight, bias = _per_sample([x], scaled)
    return {module.child.weight: weight.flatten(1).norm(dim=1), module.child.bias: bias.norm(dim=1)}


class Around(nn.Module):
    """A layer between two others."""

    def __init__(self, kind: type[ByGradients], *, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.layer = kind(5, 5)
        self.last = nn.Linear(5, 3)
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., 5) to (..., 3)."""
        x = self.layer(self.first(x).tanh())
        return self.last(x @ self.layer.weight + self.layer.bias if self.tied else x)


class Folded(Around):
    """The layer sees the rows of all samples at once."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, 5) to (B, T, 3)."""
        return self.last(self.layer(self.first(x).tanh().view(-1, 5)).view_as(x))


class Child(nn.Module):
    """A layer with a child, called with an option."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.layer = WithChild()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, 5) to itself."""
        return self.layer(self.first(x), scale=2.0)


def _second(case: Case) -> Case:
    def loss(model: nn.Module, batch: dict) -> Tensor:
        return probe_loss(model(batch["x"]), axis=1)

    return replace(case, loss=loss, axes={"x": 1, "weight": 0}, batch_first=False)


_KINDS = {"gradients": ByGradients, "norms": ByNorms, "both": ByBoth}


def _case(name: str, build: Callable[[type[ByGradients]], nn.Module], kind: str) -> Case:
    return layer_case(f"registered_{kind}{name}", lambda: build(_KINDS[kind]), 4, 3, 5)


CASES = [
    *(_case("", Around, kind) for kind in _KINDS),
    *(_case("_folded", Folded, kind) for kind in _KINDS),
    *(_case("_tied", lambda kind: Around(kind, tied=True), kind) for kind in _KINDS),
    layer_case("registered_gradients_alone", lambda: ByGradients(5, 4), 4, 5),
    layer_case("registered_norms_one_sample", lambda: Around(ByNorms), 1, 3, 5),
    layer_case("registered_norms_samples_equal_tokens", lambda: Around(ByNorms), 3, 3, 5),
    layer_case("registered_with_child", Child, 4, 3, 5),
    _second(layer_case("registered_batch_second", lambda: Around(ByGradients), 4, 3, 5)),
]
