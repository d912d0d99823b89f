"""Whole training steps, as published times mean them: forward, backward, clipping, noise and the SGD update.

The learning rate is 0: the same operations run, and every engine stays at the same weights for as long as it is timed.
Shape suffix: B samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engines import trainable
from benchmarks.tasks import Batch, per_sample_losses


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
        proving_steps: How many steps are still to come that are not like others in training: the first few.
        update_seconds: Seconds that `update` took, one entry a step.
    """

    model: nn.Module
    parameters: list[nn.Parameter]
    loss: Callable[[Batch], Any]
    backward: Callable[[Any], None]
    update: Callable[[], object]
    keep: bool = False
    proving_steps: int = 0
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
        self.proving_steps = max(0, self.proving_steps - 1)

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


def sgd(model: nn.Module) -> torch.optim.SGD:
    """The optimizer of every engine.

    Args:
        model: Its trainable parameters are updated.

    Returns:
        SGD with the learning rate 0.
    """
    return torch.optim.SGD(trainable(model), lr=0.0)


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over samples.

    Args:
        model: The model.
        batch: Inputs and targets.

    Returns:
        A scalar.
    """
    return per_sample_losses(model, batch).mean()
