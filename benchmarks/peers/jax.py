"""JAX: `vmap` of `grad` under `jit`, on the same weights; compiling is not timed."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from jax import numpy as jnp
from torch import Tensor, nn

from benchmarks.engines import CannotDo
from benchmarks.peers.jax_models import Forward, written_in_jax
from benchmarks.tasks import Batch


def _clipped_sum(forward: Forward, max_grad_norm: float) -> Any:
    def loss(weights: Any, inputs: Any, target: Any) -> Any:
        scores = jax.nn.log_softmax(forward(weights, inputs).reshape(target.size, -1))
        return -jnp.take_along_axis(scores, target.reshape(-1, 1), axis=1).mean()

    def clipped(weights: Any, inputs: Any, target: Any) -> Any:
        gradients = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(weights, inputs, target)
        squares = [jnp.square(part.reshape(len(target), -1)).sum(1) for part in jax.tree.leaves(gradients)]
        factors_B = jnp.minimum(1.0, max_grad_norm / jnp.sqrt(sum(squares)))
        return jax.tree.map(lambda part: jnp.tensordot(factors_B, part, 1), gradients)

    return jax.jit(clipped)


class Jax:
    """The model written in `jax.numpy`, with the torch model's weights."""

    def __init__(self, model: nn.Module, max_grad_norm: float) -> None:
        if next(model.parameters()).is_cuda and jax.default_backend() != "gpu":
            raise CannotDo("this JAX has no GPU: pip install 'jax[cuda12]'")
        forward = written_in_jax(model)
        self.names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.weights = {name: jnp.asarray(value.detach().cpu().numpy()) for name, value in model.named_parameters()}
        # The model itself is not needed further, and in a memory measurement nobody else holds it.
        self.traced = self.clipped = _clipped_sum(forward, max_grad_norm)
        self.converted: dict[int, tuple[Batch, tuple[Any, Any]]] = {}
        self.sums: dict[str, Any] = {}

    def _batch(self, batch: Batch) -> tuple[Any, Any]:
        """The batch as JAX's arrays, copied once: a loader of JAX's would hand them over as such."""
        if id(batch) not in self.converted:
            inputs, target = (np.asarray(part.cpu()) for part in batch)
            narrow = inputs.astype(np.int32) if inputs.dtype == np.int64 else inputs
            self.converted = {id(batch): (batch, (jnp.asarray(narrow), jnp.asarray(target.astype(np.int32))))}
        return self.converted[id(batch)][1]

    def prepare(self, batch: Batch) -> None:
        """Copy the batch and compile, so that neither counts as memory of a step."""
        self.clipped = self.traced.lower(self.weights, *self._batch(batch)).compile()

    def step(self, batch: Batch) -> None:
        """Clip one batch, as `Runner` says."""
        self.sums = {}
        self.sums = jax.block_until_ready(self.clipped(self.weights, *self._batch(batch)))

    def result(self) -> list[Tensor | None]:
        """Return what the last step computed, as `Runner` says."""
        return [torch.from_numpy(np.array(self.sums[name])) for name in self.names]

    def operations(self, batch: Batch) -> int | None:
        """Floating-point operations of a step by XLA's own analysis, where it gives one."""
        analysis = self.traced.lower(self.weights, *self._batch(batch)).cost_analysis()
        found = analysis.get("flops") if isinstance(analysis, dict) else None
        return int(found) if found and found > 0 else None
