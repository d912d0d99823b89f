"""BackPACK: its `BatchGrad` extension gives per-sample gradients of the layers that it has a rule for."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from benchmarks.engines import CannotDo, trainable
from benchmarks.peers.per_sample import clipped_sum
from benchmarks.tasks import Batch, per_sample_losses

# As with Opacus: torch speaks of first layers at every step.
warnings.filterwarnings("ignore", message="Full backward hook is firing")


def _without_a_rule(model: nn.Module) -> list[str]:
    """The kinds of modules that own parameters and that `BatchGrad` passes over."""
    from backpack.extensions import BatchGrad

    known = set(BatchGrad()._BackpropExtension__module_extensions)
    owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    return sorted({type(module).__name__ for module in owners if type(module) not in known})


class BackPACK:
    """One backward of the summed loss; the gradients are clipped here."""

    def __init__(self, model: nn.Module, max_grad_norm: float) -> None:
        from backpack import extend

        without = _without_a_rule(model)
        if without:
            raise CannotDo(f"BatchGrad has no rule for {', '.join(without)}")
        self.model = extend(model)
        self.max_grad_norm = max_grad_norm
        self.sums: list[Tensor] = []

    def step(self, batch: Batch) -> None:
        """Clip one batch, as `Runner` says."""
        from backpack import backpack
        from backpack.extensions import BatchGrad

        self.sums = []
        parameters = trainable(self.model)
        self.model.zero_grad(set_to_none=True)
        with backpack(BatchGrad()):
            per_sample_losses(self.model, batch).sum().backward()
        with torch.no_grad():
            self.sums = clipped_sum([parameter.grad_batch for parameter in parameters], self.max_grad_norm)
        for parameter in parameters:
            del parameter.grad_batch

    def result(self) -> list[Tensor | None]:
        """Return what the last step computed, as `Runner` says."""
        return list(self.sums)
