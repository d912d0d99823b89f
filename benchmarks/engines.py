"""The ways to a gradient that are compared, behind one small interface.

A step is forward, backward, and everything until the sum of clipped gradients is there. Noise and the optimizer's
update are left out: they cost the same whatever computed the sum.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor, nn

from benchmarks.tasks import Batch, PerSampleCrossEntropy, per_sample_losses

# Opacus hooks modules whose inputs need no gradient; torch says so at every step.
warnings.filterwarnings("ignore", message="Full backward hook is firing")


class Runner(Protocol):
    """An engine at work on one model."""

    def step(self, batch: Batch) -> None:
        """Compute the gradient of the batch, from cleared gradients on.

        Args:
            batch: Inputs and targets.
        """

    def result(self) -> list[Tensor | None]:
        """What the last step computed.

        Returns:
            For each trainable parameter, in the model's order, its gradient or clipped sum.
        """


@dataclass(frozen=True)
class Engine:
    """A named way to compute gradients.

    Attributes:
        name: Short name, used on the command line and in files.
        title: What a reader of the table sees.
        private: Whether the result is a sum of clipped gradients.
        attach: Takes a model of its own and the clipping norm, gives a runner.
    """

    name: str
    title: str
    private: bool
    attach: Callable[[nn.Module, float], Runner]


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class _NonPrivate:
    """Ordinary training: one backward of the mean loss."""

    def __init__(self, model: nn.Module, max_grad_norm: float) -> None:
        del max_grad_norm  # nothing is clipped
        self.model = model

    def step(self, batch: Batch) -> None:
        self.model.zero_grad(set_to_none=True)
        per_sample_losses(self.model, batch).mean().backward()

    def result(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in _trainable(self.model)]


class _Ghostclip:
    """One of ghostclip's strategies, as a user calls it."""

    def __init__(self, model: nn.Module, max_grad_norm: float, *, strategy: str) -> None:
        import ghostclip

        self.model = model
        self.clipper = ghostclip.GhostClipper(model, max_grad_norm=max_grad_norm, strategy=strategy)

    def step(self, batch: Batch) -> None:
        self.model.zero_grad(set_to_none=True)
        self.clipper.backward(per_sample_losses(self.model, batch))

    def result(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in _trainable(self.model)]


class _OpacusHooks:
    """Opacus's default: per-sample gradients kept in `grad_sample`, clipped by its optimizer."""

    def __init__(self, model: nn.Module, max_grad_norm: float) -> None:
        from opacus.grad_sample import GradSampleModule
        from opacus.optimizers import DPOptimizer

        self.model = GradSampleModule(model, loss_reduction="mean")
        self.optimizer = DPOptimizer(
            torch.optim.SGD(_trainable(self.model), lr=0.1),
            noise_multiplier=0.0,
            max_grad_norm=max_grad_norm,
            expected_batch_size=1,
        )

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        per_sample_losses(self.model, batch).mean().backward()
        self.optimizer.clip_and_accumulate()

    def result(self) -> list[Tensor | None]:
        return [parameter.summed_grad for parameter in self.optimizer.params]


class _OpacusGhost:
    """Opacus's ghost clipping: two backward passes behind its own loss object."""

    def __init__(self, model: nn.Module, max_grad_norm: float) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

        self.model = GradSampleModuleFastGradientClipping(
            model, loss_reduction="mean", max_grad_norm=max_grad_norm, use_ghost_clipping=True
        )
        self.optimizer = DPOptimizerFastGradientClipping(
            torch.optim.SGD(_trainable(self.model), lr=0.1),
            noise_multiplier=0.0,
            max_grad_norm=max_grad_norm,
            expected_batch_size=1,
        )
        self.criterion = DPLossFastGradientClipping(self.model, self.optimizer, PerSampleCrossEntropy(), "mean")

    def step(self, batch: Batch) -> None:
        inputs, target = batch
        self.optimizer.zero_grad(set_to_none=True)
        self.criterion(self.model(inputs), target).backward()

    def result(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in _trainable(self.model)]


NON_PRIVATE = Engine("nonprivate", "PyTorch, not private", False, _NonPrivate)
STRATEGIES = ("bookkeeping", "ghost", "fast", "hooks")


def engines() -> list[Engine]:
    """Every engine that can be measured here.

    Returns:
        The non-private one first; Opacus only where it is installed.
    """
    found = [NON_PRIVATE]
    found += [Engine(name, f"ghostclip {name}", True, partial(_Ghostclip, strategy=name)) for name in STRATEGIES]
    if find_spec("opacus"):
        found.append(Engine("opacus-hooks", "Opacus hooks", True, _OpacusHooks))
        found.append(Engine("opacus-ghost", "Opacus ghost", True, _OpacusGhost))
    return found
