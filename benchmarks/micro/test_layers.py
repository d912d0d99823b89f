"""Time of forward, backward and clipping of single layers; shapes as in the layer benchmarks of Opacus.

Not collected by the default test run: it says how fast, not whether right.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.engines import Engine, engines

BATCH_SIZE = 16
# About how long each is timed; the longest take seconds a step, and get the fewest rounds that have a median.
SECONDS = 0.4
FEWEST, MOST = 3, 200
LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(512, 512), lambda: torch.randn(BATCH_SIZE, 512)),
    "linear-long": (lambda: nn.Linear(256, 256), lambda: torch.randn(BATCH_SIZE, 512, 256)),
    "head": (lambda: nn.Linear(256, 5000), lambda: torch.randn(BATCH_SIZE, 32, 256)),
    "conv": (lambda: nn.Conv2d(64, 64, 8), lambda: torch.randn(BATCH_SIZE, 64, 50, 100)),
    "conv-small": (lambda: nn.Conv2d(16, 32, 3), lambda: torch.randn(BATCH_SIZE, 16, 16, 16)),
    "conv-grouped": (lambda: nn.Conv2d(32, 32, 3, groups=8), lambda: torch.randn(BATCH_SIZE, 32, 16, 16)),
    "conv-depthwise": (lambda: nn.Conv2d(64, 64, 3, groups=64), lambda: torch.randn(BATCH_SIZE, 64, 32, 32)),
    "conv1d": (lambda: nn.Conv1d(64, 64, 3), lambda: torch.randn(BATCH_SIZE, 64, 256)),
    "layernorm": (lambda: nn.LayerNorm(64), lambda: torch.randn(BATCH_SIZE, 64)),
    "layernorm-long": (lambda: nn.LayerNorm(256), lambda: torch.randn(BATCH_SIZE, 512, 256)),
    "rmsnorm-long": (lambda: nn.RMSNorm(256), lambda: torch.randn(BATCH_SIZE, 512, 256)),
    "groupnorm": (lambda: nn.GroupNorm(16, 256), lambda: torch.randn(BATCH_SIZE, 256, 64)),
    "embedding": (lambda: nn.Embedding(20_000, 100), lambda: torch.randint(0, 20_000, (BATCH_SIZE, 1))),
    "embedding-long": (lambda: nn.Embedding(20_000, 100), lambda: torch.randint(0, 20_000, (BATCH_SIZE, 256))),
}


@pytest.mark.parametrize("engine", engines(), ids=lambda engine: engine.name)
@pytest.mark.parametrize("layer", LAYERS)
def test_layer(benchmark: Any, layer: str, engine: Engine) -> None:
    """One step of a layer whose flattened output serves as logits.

    Args:
        benchmark: Fixture of pytest-benchmark.
        layer: Which layer.
        engine: Which way to its gradient.
    """
    torch.manual_seed(3)
    make_layer, make_input = LAYERS[layer]
    runner = engine.attach(nn.Sequential(make_layer(), nn.Flatten()), 1.0)
    batch = (make_input(), torch.zeros(BATCH_SIZE, dtype=torch.int64))
    runner.step(batch)
    started = time.perf_counter()
    runner.step(batch)
    rounds = int(SECONDS / (time.perf_counter() - started))
    benchmark.group = layer
    benchmark.pedantic(runner.step, args=(batch,), rounds=min(MOST, max(FEWEST, rounds)))
