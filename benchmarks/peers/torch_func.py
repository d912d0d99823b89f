"""Plain `torch.func`: `vmap` of `grad` over the samples, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.peers.per_sample import clipped_sum
from benchmarks.tasks import Batch, per_sample_losses


class _OneSample(nn.Module):
    """The model's loss on one sample without a batch axis."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        return per_sample_losses(self.model, (inputs[None], target[None])).sum()


class TorchFunc:
    """Per-sample gradients of the whole model in one call."""

    def __init__(self, model: nn.Module, max_grad_norm: float) -> None:
        one = _OneSample(model)
        self.max_grad_norm = max_grad_norm
        self.parameters = {name: value.detach() for name, value in one.named_parameters() if value.requires_grad}
        self.gradient = vmap(
            grad(lambda parameters, inputs, target: functional_call(one, parameters, (inputs, target))),
            in_dims=(None, 0, 0),
            randomness="different",
        )
        self.sums: list[Tensor] = []

    def step(self, batch: Batch) -> None:
        """Clip one batch, as `Runner` says."""
        self.sums = []
        gradients = self.gradient(self.parameters, *batch)
        with torch.no_grad():
            self.sums = clipped_sum([gradients[name] for name in self.parameters], self.max_grad_norm)

    def result(self) -> list[Tensor | None]:
        """Return what the last step computed, as `Runner` says."""
        return list(self.sums)
