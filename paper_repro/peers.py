"""Whole training steps of other engines: Opacus in each of its modes, and plain `torch.func`."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engines import Engine, trainable
from benchmarks.tasks import Batch, PerSampleCrossEntropy
from paper_repro.opacus_layers import with_opacus_layers
from paper_repro.trainer import Trainer, mean_loss, sgd

_backward = methodcaller("backward")


def _wrapped(model: nn.Module, mode: str) -> nn.Module:
    from opacus.grad_sample import GradSampleModule, GradSampleModuleExpandedWeights

    model = with_opacus_layers(model)
    if mode == "ew":
        return GradSampleModuleExpandedWeights(model, loss_reduction="mean")
    return GradSampleModule(model, loss_reduction="mean", force_functorch=mode == "functorch")


def _opacus_kept(model: nn.Module, max_grad_norm: float, *, sigma: float, keep: bool, mode: str) -> Trainer:
    """Per-sample gradients are kept, and clipped by the optimizer."""
    from opacus.optimizers import DPOptimizer

    wrapped = _wrapped(model, mode)
    optimizer = DPOptimizer(
        sgd(wrapped), noise_multiplier=sigma, max_grad_norm=max_grad_norm, expected_batch_size=1, loss_reduction="mean"
    )
    return Trainer(wrapped, trainable(wrapped), partial(mean_loss, wrapped), _backward, optimizer.step, keep)


def _opacus_two_pass(model: nn.Module, max_grad_norm: float, *, sigma: float, keep: bool, ghost: bool) -> Trainer:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        with_opacus_layers(model), loss_reduction="mean", max_grad_norm=max_grad_norm, use_ghost_clipping=ghost
    )
    optimizer = DPOptimizerFastGradientClipping(
        sgd(wrapped), noise_multiplier=sigma, max_grad_norm=max_grad_norm, expected_batch_size=1, loss_reduction="mean"
    )
    criterion = DPLossFastGradientClipping(wrapped, optimizer, PerSampleCrossEntropy(), "mean")

    def loss(batch: Batch) -> Any:
        return criterion(wrapped(batch[0]), batch[1])

    return Trainer(wrapped, trainable(wrapped), loss, _backward, optimizer.step, keep)


class _TorchFunc:
    """`vmap` of `grad` over the samples, then what a user would write: clip, sum, add noise."""

    def __init__(self, model: nn.Module, max_grad_norm: float, sigma: float) -> None:
        from benchmarks.peers.torch_func import TorchFunc

        self.inner = TorchFunc(model, max_grad_norm)
        self.parameters = trainable(model)
        self.deviation = sigma * max_grad_norm
        self.optimizer = sgd(model)

    def loss(self, batch: Batch) -> Batch:
        """`grad` makes forward and backward at once, so the forward is part of `backward`."""
        return batch

    def update(self) -> None:
        for parameter, summed in zip(self.parameters, self.inner.result(), strict=True):
            assert isinstance(summed, Tensor)
            parameter.grad = summed.add_(torch.randn_like(summed), alpha=self.deviation)
        self.inner.sums = []
        self.optimizer.step()


def _torch_func(model: nn.Module, max_grad_norm: float, *, sigma: float, keep: bool) -> Trainer:
    engine = _TorchFunc(model, max_grad_norm, sigma)
    return Trainer(model, engine.parameters, engine.loss, engine.inner.step, engine.update, keep)


def peers(*, every: bool, sigma: float, keep: bool) -> list[Engine]:
    """The engines of others that are installed.

    Args:
        every: Whether Opacus's modes functorch and ew, and `torch.func`, are wanted as well.
        sigma: Noise multiplier.
        keep: Whether gradients stay after a step.

    Returns:
        Opacus's first.
    """
    options = {"sigma": sigma, "keep": keep}
    found = []
    if find_spec("opacus"):
        found += [
            Engine("opacus-hooks", "Opacus hooks", True, partial(_opacus_kept, mode="hooks", **options)),
            Engine("opacus-fast", "Opacus fast", True, partial(_opacus_two_pass, ghost=False, **options)),
            Engine("opacus-ghost", "Opacus ghost", True, partial(_opacus_two_pass, ghost=True, **options)),
        ]
        if every:
            found += [
                Engine(f"opacus-{mode}", f"Opacus {mode}", True, partial(_opacus_kept, mode=mode, **options))
                for mode in ("functorch", "ew")
            ]
    if every:
        found.append(Engine("torch-func", "torch.func vmap", True, partial(_torch_func, **options)))
    return found
