"""Opacus in its four modes, as its own `PrivacyEngine` sets them up."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engines import trainable
from benchmarks.tasks import Batch, PerSampleCrossEntropy, per_sample_losses

# Opacus hooks modules whose inputs need no gradient; torch says so at every step.
warnings.filterwarnings("ignore", message="Full backward hook is firing")


def _with_its_own_lstm(model: nn.Module) -> list[nn.Parameter]:
    """Swap LSTMs for Opacus's, in place, and return the trainable parameters in the order they had before."""
    from opacus.validators.module_validator import ModuleValidator

    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.LSTM):
            above, _, last = name.rpartition(".")
            swapped = ModuleValidator.FIXERS[nn.LSTM](module).to(next(module.parameters()).device)
            setattr(model.get_submodule(above), last, swapped)
    named = model.state_dict(keep_vars=True)
    return [named[name] for name in names]


def _optimizer(kind: type[Any], model: nn.Module, max_grad_norm: float) -> Any:
    return kind(
        torch.optim.SGD(trainable(model), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=max_grad_norm,
        expected_batch_size=1,
    )


class _Kept:
    """Per-sample gradients are kept in `grad_sample` and clipped by Opacus's optimizer."""

    def __init__(self, model: nn.Module, max_grad_norm: float) -> None:
        from opacus.optimizers import DPOptimizer

        self.parameters = _with_its_own_lstm(model)
        self.model = self.wrapped(model)
        self.optimizer = _optimizer(DPOptimizer, self.model, max_grad_norm)

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return the model inside Opacus's."""
        raise NotImplementedError

    def step(self, batch: Batch) -> None:
        """Clip one batch, as `Runner` says."""
        self.optimizer.zero_grad(set_to_none=True)
        per_sample_losses(self.model, batch).mean().backward()
        self.optimizer.clip_and_accumulate()

    def result(self) -> list[Tensor | None]:
        """Return what the last step computed, as `Runner` says."""
        return [parameter.summed_grad for parameter in self.parameters]


class Hooks(_Kept):
    """Opacus's default: a rule for each kind of layer."""

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return the model inside Opacus's."""
        from opacus.grad_sample import GradSampleModule

        return GradSampleModule(model, loss_reduction="mean")


class Functorch(_Kept):
    """Every layer by `torch.func`, none by a rule."""

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return the model inside Opacus's."""
        from opacus.grad_sample import GradSampleModule

        return GradSampleModule(model, loss_reduction="mean", force_functorch=True)


class ExpandedWeights(_Kept):
    """torch's own expanded weights."""

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return the model inside Opacus's."""
        from opacus.grad_sample import GradSampleModuleExpandedWeights

        return GradSampleModuleExpandedWeights(model, loss_reduction="mean")


class Ghost:
    """Ghost clipping: two backward passes behind its own loss object."""

    def __init__(self, model: nn.Module, max_grad_norm: float) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

        self.parameters = _with_its_own_lstm(model)
        self.model = GradSampleModuleFastGradientClipping(
            model, loss_reduction="mean", max_grad_norm=max_grad_norm, use_ghost_clipping=True
        )
        self.optimizer = _optimizer(DPOptimizerFastGradientClipping, self.model, max_grad_norm)
        self.criterion = DPLossFastGradientClipping(self.model, self.optimizer, PerSampleCrossEntropy(), "mean")

    def step(self, batch: Batch) -> None:
        """Clip one batch, as `Runner` says."""
        inputs, target = batch
        self.optimizer.zero_grad(set_to_none=True)
        self.criterion(self.model(inputs), target).backward()

    def result(self) -> list[Tensor | None]:
        """Return what the last step computed, as `Runner` says."""
        return [parameter.grad for parameter in self.parameters]
