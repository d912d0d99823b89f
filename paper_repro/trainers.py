"""Whole training steps, as published times mean them: forward, backward, clipping, noise and the SGD update.

The learning rate is 0: the same operations run, and every engine stays at the same weights for as long as it is timed.
Shape suffix: B samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engines import STRATEGIES, Engine
from benchmarks.tasks import Batch, PerSampleCrossEntropy, per_sample_losses
from paper_repro.opacus_layers import with_opacus_layers


@dataclass
class Trainer:
    """One engine in training.

    Attributes:
        model: What the engine made of the model.
        parameters: The trainable parameters, in the order of the model that was given.
        loss: Forward: the loss of a batch, in the form that `backward` wants.
        backward: From the loss to (clipped sums of) gradients.
        update: Noise and the optimizer's step.
        keep: Whether gradients stay after a step, for `result`; else they are freed, so that an engine that waits for
            its turn holds no more than its model.
        update_seconds: Seconds that `update` took, one entry a step.
    """

    model: nn.Module
    parameters: list[nn.Parameter]
    loss: Callable[[Batch], Any]
    backward: Callable[[Any], None]
    update: Callable[[], object]
    keep: bool = False
    update_seconds: list[float] = field(default_factory=list)

    def step(self, batch: Batch) -> None:
        """Train on a batch.

        Args:
            batch: Inputs and targets.
        """
        if self.keep:
            self.clear()
        self.backward(self.loss(batch))
        self.timed_update(batch[1].device)
        if not self.keep:
            self.clear()

    def timed_update(self, device: torch.device) -> None:
        """Make the update and note how long it took.

        Args:
            device: Where the model is.
        """
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        self.update()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.update_seconds.append(time.perf_counter() - started)

    def clear(self) -> None:
        """Free all gradients."""
        for parameter in self.parameters:
            parameter.grad = None
            for kept in ("grad_sample", "summed_grad"):
                if getattr(parameter, kept, None) is not None:
                    setattr(parameter, kept, None)

    def result(self) -> list[Tensor | None]:
        """The clipped sum that the last update was made of: without noise, and with the divisor 1, it is the gradient.

        Returns:
            One entry for each parameter.
        """
        return [parameter.grad for parameter in self.parameters]


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(_trainable(model), lr=0.0)


def _mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return per_sample_losses(model, batch).mean()


_backward = methodcaller("backward")


def _plain(model: nn.Module, max_grad_norm: float, *, sigma: float, keep: bool) -> Trainer:
    del max_grad_norm, sigma  # nothing is clipped or noised
    return Trainer(model, _trainable(model), partial(_mean_loss, model), _backward, _sgd(model).step, keep)


def _ghostclip(model: nn.Module, max_grad_norm: float, *, sigma: float, keep: bool, strategy: str) -> Trainer:
    import ghostclip
    from ghostclip.noise import make_noise_source
    from ghostclip.optimizers import DPOptimizer

    clipper = ghostclip.GhostClipper(model, max_grad_norm=max_grad_norm, strategy=strategy)
    optimizer = DPOptimizer(
        _sgd(model), noise_multiplier=sigma, expected_batch_size=1, clipper=clipper, noise_source=make_noise_source()
    )
    loss = partial(per_sample_losses, model)
    return Trainer(model, _trainable(model), loss, clipper.backward, optimizer.step, keep)


def _opacus_hooks(model: nn.Module, max_grad_norm: float, *, sigma: float, keep: bool) -> Trainer:
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(with_opacus_layers(model), loss_reduction="mean")
    optimizer = DPOptimizer(
        _sgd(wrapped), noise_multiplier=sigma, max_grad_norm=max_grad_norm, expected_batch_size=1, loss_reduction="mean"
    )
    return Trainer(wrapped, _trainable(wrapped), partial(_mean_loss, wrapped), _backward, optimizer.step, keep)


def _opacus_two_pass(model: nn.Module, max_grad_norm: float, *, sigma: float, keep: bool, ghost: bool) -> Trainer:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        with_opacus_layers(model), loss_reduction="mean", max_grad_norm=max_grad_norm, use_ghost_clipping=ghost
    )
    optimizer = DPOptimizerFastGradientClipping(
        _sgd(wrapped), noise_multiplier=sigma, max_grad_norm=max_grad_norm, expected_batch_size=1, loss_reduction="mean"
    )
    criterion = DPLossFastGradientClipping(wrapped, optimizer, PerSampleCrossEntropy(), "mean")

    def loss(batch: Batch) -> Any:
        return criterion(wrapped(batch[0]), batch[1])

    return Trainer(wrapped, _trainable(wrapped), loss, _backward, optimizer.step, keep)


def trainers(*, sigma: float, keep: bool = False) -> list[Engine]:
    """Every engine, making whole training steps.

    Args:
        sigma: Noise multiplier; 0 to see the clipped sums.
        keep: Whether gradients stay after a step.

    Returns:
        The non-private one first; Opacus only where it is installed.
    """
    options = {"sigma": sigma, "keep": keep}
    found = [Engine("nonprivate", "PyTorch, not private", False, partial(_plain, **options))]
    found += [
        Engine(name, f"ghostclip {name}", True, partial(_ghostclip, strategy=name, **options)) for name in STRATEGIES
    ]
    if find_spec("opacus"):
        found += [
            Engine("opacus-hooks", "Opacus hooks", True, partial(_opacus_hooks, **options)),
            Engine("opacus-fast", "Opacus fast", True, partial(_opacus_two_pass, ghost=False, **options)),
            Engine("opacus-ghost", "Opacus ghost", True, partial(_opacus_two_pass, ghost=True, **options)),
        ]
    return found
