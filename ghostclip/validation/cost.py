"""What a private step costs beside an ordinary one: time and memory of forward and backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ghostclip.clipper import GhostClipper, Reduction, Strategy
from ghostclip.data.tensor_memory import peak_bytes
from ghostclip.evidence.dependence import same_randomness
from ghostclip.validation.losses import LossFn

# Steps that prove how the model uses its parameters, and make what is made once.
_WARM_UP = 3
_SECONDS, _LEAST, _MOST = 0.5, 3, 20


@dataclass(frozen=True)
class StepCost:
    """Forward and backward of one batch.

    Attributes:
        seconds: Median time.
        peak: Bytes of tensors above what existed before; None where the device offers no measure.
    """

    seconds: float
    peak: int | None


def ordinary_cost(model: nn.Module, batch: Any, loss_fn: LossFn) -> StepCost:
    """Measure ordinary forwards and backwards.

    Args:
        model: The model, without a clipper; its gradients are left empty.
        batch: The batch.
        loss_fn: Its loss.

    Returns:
        The cost.
    """

    def step() -> None:
        loss_fn(model, batch).mean().backward()
        model.zero_grad(set_to_none=True)

    return _cost_of(step, model)


def private_cost(
    model: nn.Module, batch: Any, loss_fn: LossFn, *, strategy: Strategy, reduction: Reduction, batch_first: bool
) -> StepCost:
    """Measure forwards and backwards that end in a clipped sum.

    Args:
        model: The model, without a clipper; it has none afterwards.
        batch: The batch.
        loss_fn: Its loss.
        strategy: How gradients are clipped.
        reduction: How a scalar loss is reduced.
        batch_first: Whether samples lie along axis 0 of the model's inputs.

    Returns:
        The cost.
    """
    with GhostClipper(
        model, max_grad_norm=1.0, strategy=strategy, loss_reduction=reduction, batch_first=batch_first
    ) as clipper:

        def step() -> None:
            clipper.backward(loss_fn(model, batch))
            clipper.reset()

        return _cost_of(step, model)


def _cost_of(step: Callable[[], None], model: nn.Module) -> StepCost:
    device = next(model.parameters()).device
    with same_randomness(model.parameters()):
        for _ in range(_WARM_UP):
            step()
        peak = peak_bytes(step, device)
        times: list[float] = []
        while len(times) < _LEAST or (sum(times) < _SECONDS and len(times) < _MOST):
            _wait_for(device)
            began = time.perf_counter()
            step()
            _wait_for(device)
            times.append(time.perf_counter() - began)
    return StepCost(statistics.median(times), peak)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
