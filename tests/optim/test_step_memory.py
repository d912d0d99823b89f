"""What a private step holds beside the clipped sums: the noise of less than one parameter, and nothing afterwards."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ghostclip import GhostClipper
from ghostclip.noise import make_noise_source
from ghostclip.noise.keyed import BLOCK
from ghostclip.optim import DPOptimizer

WIDTH, LAYERS = 400, 6
NOISE = 2 * 8 * BLOCK
"""Bytes of two blocks of float64, the noise that is drawn at once and what is copied of it."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations see, until they are freed."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known = weakref.WeakSet()

    def watch(self, tensor):
        storage = tensor.untyped_storage()
        if storage not in self._known:
            self._known.add(storage)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, storage.nbytes())

    def _freed(self, count):
        self.live -= count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                self.watch(leaf)
        return result


class Run:
    """Layers of 640 kB each, with small biases, ready for a step."""

    def __init__(self, dtype, level, strategy="auto"):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers).to(dtype)
        self.dtype = dtype
        self.clipper = GhostClipper(self.model, max_grad_norm=1.0, strategy=strategy)
        self.optimizer = DPOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.01),
            noise_multiplier=1.0,
            expected_batch_size=4.0,
            clipper=self.clipper,
            noise_source=make_noise_source(level=level),
        )

    def backward(self):
        self.clipper.backward(self.model(torch.randn(4, WIDTH, dtype=self.dtype)).square().sum(1))

    def watched(self):
        memory = LiveBytes()
        for p in self.model.parameters():
            memory.watch(p)
            if p.grad is not None:
                memory.watch(p.grad)
            if self.clipper.has_clipped_sum:
                memory.watch(self.clipper._store._sums[p])
        memory.peak = memory.live
        return memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", ["fast", "secure"])
def test_a_step_holds_the_noise_of_less_than_one_parameter(level, dtype):
    run = Run(dtype, level)
    parameters = sum(p.untyped_storage().nbytes() for p in run.model.parameters())
    largest = WIDTH * WIDTH * 4
    for _ in range(2):
        run.backward()
        with run.watched() as memory:
            sums = memory.live - parameters
            assert sums >= sum(4 * p.numel() for p in run.model.parameters())
            run.optimizer.step()
            temporary = 4 if level == "secure" else 1
            assert memory.peak - parameters - sums <= max(largest, temporary * NOISE)
            run.optimizer.zero_grad()
        assert memory.live == parameters


def test_per_sample_gradients_last_until_zero_grad_or_the_next_backward():
    run = Run(torch.float32, "fast", strategy="hooks")
    for discard in (lambda: None, run.optimizer.zero_grad, run.model.zero_grad):
        run.backward()
        run.optimizer.step()
        assert all(p.grad_sample.shape == (4, *p.shape) for p in run.model.parameters())
        discard()
    assert all(p.grad_sample is None for p in run.model.parameters())
