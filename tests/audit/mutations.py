"""Engines that are broken on purpose, one fault each: context managers that patch public methods of the library.

The faults are those that were seen in the wild, or that a refactoring could bring.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from ghostclip import GhostClipper
from ghostclip.accounting.history import Charge
from ghostclip.data import PrivateSampler
from ghostclip.noise import FastNoise
from ghostclip.optim import DPOptimizer
from ghostclip.privacy.account import Account
from tests.audit.subject import BOUND, CLASSES

Mutation = Callable[[], contextlib.AbstractContextManager[Any]]


def _noise(add: Callable[[FastNoise, Tensor, float, Callable[..., None]], None]) -> Any:
    """Replace the noise by `add(source, tensor, std, true_noise)`."""
    original = FastNoise.add_

    def add_(self: FastNoise, tensor: Tensor, std: float) -> None:
        add(self, tensor, std, original)

    return mock.patch.object(FastNoise, "add_", add_)


def no_noise_on_one_bias() -> Any:
    """The last layer's bias is released as it is."""

    def add(source: FastNoise, tensor: Tensor, std: float, original: Callable[..., None]) -> None:
        if tensor.shape != (CLASSES,):
            original(source, tensor, std)

    return _noise(add)


def half_the_noise() -> Any:
    """Noise for half the sensitivity."""
    return _noise(lambda source, tensor, std, original: original(source, tensor, std / 2))


def noise_reused_between_steps() -> Any:
    """Noise is drawn once for every shape."""
    kept: dict[tuple[int, ...], Tensor] = {}

    def add(source: FastNoise, tensor: Tensor, std: float, original: Callable[..., None]) -> None:
        shape = tuple(tensor.shape)
        if shape not in kept:
            kept[shape] = torch.zeros(shape, dtype=torch.float64)
            original(source, kept[shape], 1.0)
        tensor.copy_(tensor.double() + std * kept[shape])

    return _noise(add)


def noise_of_truncated_float32_normals() -> Any:
    """A float32 normal of torch normal on the CPU: 24-bit uniforms, cut off at 5.77 standard deviations."""

    def add(source: FastNoise, tensor: Tensor, std: float, original: Callable[..., None]) -> None:
        tensor.add_(torch.randn(tensor.shape, dtype=torch.float32), alpha=std)

    return _noise(add)


def noise_cut_at_three_deviations() -> Any:
    """A generator with shorter tails still."""

    def add(source: FastNoise, tensor: Tensor, std: float, original: Callable[..., None]) -> None:
        noise = torch.zeros(tensor.shape, dtype=torch.float64)
        original(source, noise, 1.0)
        tensor.copy_(tensor.double() + std * noise.clamp(-3, 3))

    return _noise(add)


@contextlib.contextmanager
def same_noise_on_two_ranks() -> Iterator[None]:
    """Keys follow from the global seed, which ranks set alike."""

    def from_the_seed(length: int = 16) -> bytes:
        return np.random.default_rng(torch.initial_seed() % 2**63).bytes(length)

    with mock.patch.object(secrets, "token_bytes", from_the_seed), mock.patch.object(os, "urandom", from_the_seed):
        yield


def same_noise_on_both_shards() -> Any:
    """Every shard takes the noise from the beginning of the parameter."""
    original = FastNoise.add_shard_

    def add_shard_(self: FastNoise, tensor: Tensor, std: float, *, offset: int, total: int) -> None:
        original(self, tensor, std, offset=0, total=total)

    return mock.patch.object(FastNoise, "add_shard_", add_shard_)


def _sums(replace: Callable[[GhostClipper, nn.Parameter, Tensor], Tensor]) -> Any:
    """Replace a parameter's clipped sum by `replace(clipper, parameter, per_sample_gradients)`; strategy "hooks"."""
    original = GhostClipper.hand_over_sums

    def sum_of(self: GhostClipper, parameter: nn.Parameter, honest: Tensor | None) -> Tensor | None:
        per_sample = getattr(parameter, "grad_sample", None)
        if honest is None or per_sample is None:
            return honest
        grad_BP = torch.cat(per_sample) if isinstance(per_sample, list) else per_sample
        return replace(self, parameter, grad_BP).to(honest.dtype)

    def hand_over_sums(self: GhostClipper, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        honest = original(self, parameters)
        return [sum_of(self, parameter, kept) for parameter, kept in zip(parameters, honest, strict=True)]

    return mock.patch.object(GhostClipper, "hand_over_sums", hand_over_sums)


def _weighted(coef_B: Tensor, grad_BP: Tensor) -> Tensor:
    return torch.tensordot(coef_B.to(grad_BP), grad_BP, dims=1)


def _norms(*grads_BP: Tensor) -> Tensor:
    return torch.stack([g_BP.flatten(1).norm(dim=1) for g_BP in grads_BP]).norm(dim=0)


def _all_gradients(clipper: GhostClipper) -> list[Tensor]:
    every = [p.grad_sample for p in clipper.trainable_parameters()]
    return [torch.cat(g) if isinstance(g, list) else g for g in every]


def _clip(norm_B: Tensor, bound: float) -> Tensor:
    return (bound / norm_B).clamp(max=1.0).nan_to_num(0.0)


def _finite(grad_BP: Tensor, keep_B: Tensor) -> Tensor:
    return grad_BP[keep_B]


def clip_three_times_too_loose() -> Any:
    """Samples are clipped at 3C, the noise is for C."""

    def replace(clipper: GhostClipper, _parameter: nn.Parameter, grad_BP: Tensor) -> Tensor:
        norm_B = _norms(*_all_gradients(clipper))
        keep_B = norm_B.isfinite()
        return _weighted(_clip(norm_B[keep_B], 3 * BOUND), _finite(grad_BP, keep_B))

    return _sums(replace)


def every_tensor_clipped_at_c() -> Any:
    """Per-layer clipping at C each, with the noise of one C."""

    def replace(clipper: GhostClipper, _parameter: nn.Parameter, grad_BP: Tensor) -> Tensor:
        keep_B = _norms(*_all_gradients(clipper)).isfinite()
        kept_BP = _finite(grad_BP, keep_B)
        return _weighted(_clip(_norms(kept_BP), BOUND), kept_BP)

    return _sums(replace)


def column_losses_broadcast() -> Any:
    """Losses of shape (B, 1) times coefficients of shape (B,): every sample gets the sum of all coefficients."""

    def replace(clipper: GhostClipper, _parameter: nn.Parameter, grad_BP: Tensor) -> Tensor:
        norm_B = _norms(*_all_gradients(clipper))
        keep_B = norm_B.isfinite()
        coef = _clip(norm_B[keep_B], BOUND).sum()
        return coef * _finite(grad_BP, keep_B).sum(0)

    return _sums(replace)


def clipped_once_after_accumulation() -> Any:
    """The sum over all samples is clipped, to C for each of them, instead of every sample."""

    def replace(clipper: GhostClipper, _parameter: nn.Parameter, grad_BP: Tensor) -> Tensor:
        every = _all_gradients(clipper)
        keep_B = _norms(*every).isfinite()
        total = torch.cat([_finite(g_BP, keep_B).sum(0).flatten() for g_BP in every]).norm()
        factor = min(1.0, BOUND * max(1, int(keep_B.sum())) / max(total.item(), 1e-30))
        return factor * _finite(grad_BP, keep_B).sum(0)

    return _sums(replace)


def nan_samples_not_masked() -> Any:
    """A NaN sample's coefficient is 0, and 0 times NaN is added."""

    def replace(clipper: GhostClipper, _parameter: nn.Parameter, grad_BP: Tensor) -> Tensor:
        return _weighted(_clip(_norms(*_all_gradients(clipper)), BOUND), grad_BP)

    return _sums(replace)


def divided_by_the_actual_batch() -> Any:
    """The release is divided by the size of the batch that was drawn."""
    original = DPOptimizer.step

    def step(self: DPOptimizer, closure: Any = None) -> Any:
        self.expected_batch_size = max(1, self.clipper.batch_size)
        return original(self, closure)

    return mock.patch.object(DPOptimizer, "step", step)


def shuffled_while_poisson_is_accounted() -> Any:
    """Batches of one size that take turns through a permutation."""

    def in_turns(self: PrivateSampler, position: int) -> list[int]:
        epoch, step = divmod(position, self.steps)
        order = np.random.default_rng(epoch).permutation(self.num_samples).tolist()
        size = round(self.num_samples * self.sample_rate)
        return order[step * size : (step + 1) * size]

    return mock.patch.object(PrivateSampler, "draw", in_turns)


def steps_forgotten() -> Any:
    """Every second release is not charged."""
    original, calls = Account._add, [0]

    def add(self: Account, events: Sequence[Charge]) -> None:
        calls[0] += 1
        if calls[0] % 2:
            original(self, events)

    return mock.patch.object(Account, "_add", add)


MUTATIONS: dict[str, Mutation] = {
    mutation.__name__: mutation
    for mutation in (
        no_noise_on_one_bias,
        half_the_noise,
        noise_reused_between_steps,
        noise_of_truncated_float32_normals,
        noise_cut_at_three_deviations,
        same_noise_on_two_ranks,
        same_noise_on_both_shards,
        clip_three_times_too_loose,
        every_tensor_clipped_at_c,
        column_losses_broadcast,
        clipped_once_after_accumulation,
        nan_samples_not_masked,
        divided_by_the_actual_batch,
        shuffled_while_poisson_is_accounted,
    )
}
