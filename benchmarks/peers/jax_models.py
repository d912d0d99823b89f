"""The models of `benchmarks.models` once more in `jax.numpy`, on one sample without a batch axis.

Each takes the weights under torch's names. Shape suffixes: T positions, H heads, I features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import numpy as jnp
from torch import nn

from benchmarks.engines import CannotDo
from benchmarks.models import GPT, MLP, MnistCNN

Weights = Mapping[str, Any]
Forward = Callable[[Weights, Any], Any]


def _linear(weights: Weights, name: str, x: Any) -> Any:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _layer_norm(weights: Weights, name: str, x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return centred * scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _attention(query_THI: Any, key_THI: Any, value_THI: Any) -> Any:
    T, _, features = query_THI.shape
    scores_HTT = jnp.einsum("thi,shi->hts", query_THI, key_THI) / jnp.sqrt(features)
    scores_HTT = jnp.where(jnp.tril(jnp.ones((T, T), dtype=bool)), scores_HTT, -jnp.inf)
    return jnp.einsum("hts,shi->thi", jax.nn.softmax(scores_HTT), value_THI)


def _gpt(model: GPT) -> Forward:
    blocks = [(f"blocks.{index}", block.heads) for index, block in enumerate(model.blocks)]

    def forward(weights: Weights, ids_T: Any) -> Any:
        x = weights["token.weight"][ids_T] + weights["position.weight"][: len(ids_T)]
        for name, heads in blocks:
            packed = _linear(weights, f"{name}.query_key_value", _layer_norm(weights, f"{name}.attention_norm", x))
            query, key, value = packed.reshape(len(ids_T), 3, heads, -1).swapaxes(0, 1)
            mixed = _attention(query, key, value).reshape(len(ids_T), -1)
            x = x + _linear(weights, f"{name}.attention_out", mixed)
            inner = _linear(weights, f"{name}.mlp_in", _layer_norm(weights, f"{name}.mlp_norm", x))
            x = x + _linear(weights, f"{name}.mlp_out", jax.nn.gelu(inner, approximate=False))
        return _linear(weights, "head", _layer_norm(weights, "final_norm", x))

    return forward


def _convolution(weights: Weights, name: str, x_CHW: Any, layer: nn.Conv2d) -> Any:
    padding = [(size, size) for size in layer.padding]
    y = jax.lax.conv_general_dilated(x_CHW[None], weights[f"{name}.weight"], layer.stride, padding)[0]
    return y + weights[f"{name}.bias"][:, None, None]


def _pool(x_CHW: Any, layer: nn.MaxPool2d) -> Any:
    size, stride = (1, layer.kernel_size, layer.kernel_size), (1, layer.stride, layer.stride)
    return jax.lax.reduce_window(x_CHW, -jnp.inf, jax.lax.max, size, stride, "VALID")


def _sequence(model: nn.Sequential) -> Forward:
    layers = list(model.named_children())

    def forward(weights: Weights, x: Any) -> Any:
        for name, layer in layers:
            if isinstance(layer, nn.Linear):
                x = _linear(weights, name, x)
            elif isinstance(layer, nn.Conv2d):
                x = _convolution(weights, name, x, layer)
            elif isinstance(layer, nn.MaxPool2d):
                x = _pool(x, layer)
            else:
                x = jax.nn.relu(x) if isinstance(layer, nn.ReLU) else x.reshape(-1)
        return x

    return forward


def written_in_jax(model: nn.Module) -> Forward:
    """The forward of a model, for one sample."""
    if isinstance(model, GPT):
        return _gpt(model)
    if isinstance(model, MnistCNN | MLP):
        return _sequence(model)
    raise CannotDo(f"{type(model).__name__} is not written in JAX here")
