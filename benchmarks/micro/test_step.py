"""Time of what a private training step adds after the clipped sum: noise and the optimizer.

Not collected by the default test run, as its neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ghostclip
from benchmarks.engines import trainable
from benchmarks.tasks import find, per_sample_losses
from ghostclip.noise import make_noise_source
from ghostclip.noise.keyed import add_noise_
from ghostclip.optim import DPOptimizer

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


@pytest.mark.parametrize("private", [False, True], ids=["plain", "private"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["cnn-64", "gpt"])
def test_optimizer_step(benchmark: Any, name: str, optimizer: str, private: bool) -> None:  # noqa: FBT001 - a parameter
    """One call of `optimizer.step()`; the backward before it is not timed.

    Args:
        benchmark: Fixture of pytest-benchmark.
        name: Of the task whose parameters are updated.
        optimizer: Which one.
        private: Whether noise is added first.
    """
    task = find(name, quick=name == "gpt")
    model, batch = task.model(CPU), task.batch(CPU)
    inner = OPTIMIZERS[optimizer](model.parameters(), lr=1e-3)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0) if private else None
    stepped = DPOptimizer(inner, noise_multiplier=1.0, expected_batch_size=16, clipper=clipper) if private else inner

    def backward() -> None:
        stepped.zero_grad()
        losses_B = per_sample_losses(model, batch)
        losses_B.mean().backward() if clipper is None else clipper.backward(losses_B)

    benchmark.group = f"{optimizer} step, {name}"
    benchmark.pedantic(stepped.step, setup=backward, rounds=10, warmup_rounds=2)


@pytest.mark.parametrize("level", ["fast", "secure"])
@pytest.mark.parametrize("name", ["cnn-64", "gpt"])
def test_noise(benchmark: Any, name: str, level: str) -> None:
    """Noise for every parameter of a model, as a release adds it.

    Args:
        benchmark: Fixture of pytest-benchmark.
        name: Of the task whose parameters get noise.
        level: Of `make_noise_source`.
    """
    tensors = [torch.zeros_like(parameter) for parameter in trainable(find(name, quick=False).model(CPU))]
    source = make_noise_source(level=level)
    benchmark.group = f"noise, {name}"
    benchmark(add_noise_, source, tensors, 1.0)
