"""An engine is timed only if it is right: its clipped sum against one-sample autograd in float64."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.engines import Engine
from benchmarks.tasks import Batch, Task, per_sample_losses

# Largest relative error in float32 that ghostclip allows itself; beyond it, it counts as wrong.
TOLERANCE = 1e-5
# Others are allowed rounding. Measured: 1.2e-4 for the hooks mode of Opacus on the GPT, whose norms over more than a
# million values are summed one by one in float32. What is beyond this is no rounding.
ROUNDING = 1e-3
# A parameter's share of the gradient that in float64 is rounding.
VANISHES = 1e-12


@dataclass(frozen=True)
class Reference:
    """What every private engine has to compute.

    Attributes:
        max_grad_norm: The clipping norm: the median of the samples' norms, so that half of them are clipped.
        clipped_sum: One float64 tensor for each trainable parameter, in the model's order.
        rounding: The error of the same computation in float32: what no engine can be asked to fall below.
    """

    max_grad_norm: float
    clipped_sum: list[Tensor]
    rounding: float = 0.0


def _per_sample_gradients(model: nn.Module, batch: Batch) -> Iterator[list[Tensor]]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inputs, target = batch
    for i in range(len(target)):
        loss = per_sample_losses(model, (inputs[i : i + 1], target[i : i + 1])).sum()
        yield list(torch.autograd.grad(loss, parameters))


def _norm(gradient: list[Tensor]) -> float:
    return math.sqrt(sum(float(g.square().sum()) for g in gradient))


def reference(task: Task, device: torch.device) -> Reference:
    """Compute the clipped sum one sample at a time, in float64.

    Cost: 2B times forward and backward of one sample, in float64: once for the norms, once for the sum, so that one
    sample's gradient is held at a time. B times in float32.
    """
    inputs, target = task.batch(device)
    exact = (inputs.double() if inputs.is_floating_point() else inputs, target)
    model = task.model(device).double()
    norms = [_norm(gradient) for gradient in _per_sample_gradients(model, exact)]
    max_grad_norm = statistics.median_low(norms)
    clipped = _clipped_sum(model, exact, norms, max_grad_norm)
    in_float32 = _clipped_sum(task.model(device), (inputs, target), norms, max_grad_norm)
    return Reference(max_grad_norm, clipped, relative_error(in_float32, clipped))


def _clipped_sum(model: nn.Module, batch: Batch, norms: list[float], max_grad_norm: float) -> list[Tensor]:
    summed = [torch.zeros_like(parameter) for parameter in model.parameters() if parameter.requires_grad]
    for norm, gradient in zip(norms, _per_sample_gradients(model, batch), strict=True):
        for total, part in zip(summed, gradient, strict=True):
            total.add_(part, alpha=min(1.0, max_grad_norm / norm))
    return summed


def relative_error(computed: Sequence[Tensor | None], expected: list[Tensor]) -> float:
    """The largest, over parameters, of |computed - expected| / |expected| in Euclidean norm.

    Where the exact gradient vanishes, as that of an attention's key bias does, what is computed is rounding and nothing
    to divide by: it is measured against the gradient of all parameters.
    """
    worst = 0.0
    whole = max(_norm(expected), torch.finfo(torch.float64).tiny)
    for got, want in zip(computed, expected, strict=True):
        value = torch.zeros_like(want) if got is None else got.double()
        own = float(want.norm())
        error = float((value - want).norm()) / (own if own > VANISHES * whole else whole)
        worst = max(worst, float("inf") if math.isnan(error) else error)
    return worst


def error_of(engine: Engine, task: Task, device: torch.device, expected: Reference) -> float:
    """Run an engine once and compare."""
    runner = engine.attach(task.model(device), expected.max_grad_norm)
    batch = task.batch(device)
    runner.step(batch)
    runner.step(batch)
    return relative_error(runner.result(), expected.clipped_sum)
