"""Engines whose account, ledger, copies or arithmetic are broken on purpose, as `mutations` breaks noise and sums."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ghostclip import GhostClipper
from ghostclip.accounting import Accountant
from ghostclip.factors.base import SquaredNorm
from ghostclip.factors.rows import Rows
from ghostclip.noise import FastNoise, make_noise_source
from ghostclip.optimizers import DPOptimizer
from ghostclip.optimizers.foreign import Releases
from ghostclip.optimizers.virtual import LogicalBatch
from ghostclip.utils.ledger_file import LedgerFile
from tests.privacy.mutations import Mutation, _all_gradients, _clip, _finite, _norms, _sums, _weighted
from tests.privacy.subject import BOUND


def steps_forgotten() -> Any:
    """Every second release is not charged."""
    original, calls = Accountant.step, [0]

    def step(self: Accountant, *, noise_multiplier: float, sample_rate: float) -> None:
        calls[0] += 1
        if calls[0] % 2:
            original(self, noise_multiplier=noise_multiplier, sample_rate=sample_rate)

    return mock.patch.object(Accountant, "step", step)


def draws_not_followed() -> Any:
    """A step does not ask which draw its rows come from."""
    return mock.patch.object(DPOptimizer, "require_draws", return_value=None)


def passes_over_a_draw_counted_once() -> Any:
    """Virtual steps are taken for parts of one draw, whatever they went through."""
    return mock.patch.object(LogicalBatch, "participations", property(lambda _: 1))


@contextlib.contextmanager
def copies_keep_the_key() -> Iterator[None]:
    """A copy of a noise source has the same key and the same position."""

    def twin(self: FastNoise, _memo: Any = None) -> FastNoise:
        other = make_noise_source(level="fast")
        other.load_state_dict(copy.deepcopy(self.state_dict()))
        return other

    with (
        mock.patch.object(FastNoise, "__copy__", twin, create=True),
        mock.patch.object(FastNoise, "__deepcopy__", twin, create=True),
    ):
        yield


def ledger_read_without_its_chain() -> Any:
    """Each line of a ledger is believed by itself: what is missing between two lines is not seen."""

    def read(self: LedgerFile) -> None:
        if self.path.exists():
            for line in self.path.read_bytes().splitlines():
                self._take(json.loads(line[: line.rindex(b"}") + 1]))

    return mock.patch.object(LedgerFile, "_read", read)


def rows_without_a_bound() -> Any:
    """The squared norm of table rows is taken as computed: no bound of its rounding is added."""
    original = Rows.sqnorm
    return mock.patch.object(Rows, "sqnorm", lambda self: SquaredNorm(original(self).value_B, None))


def norms_of_reduced_precision() -> Any:
    """Norms are of products in TF32: ten bits of each value, the rest cut off; the sums are in full precision."""

    def cut(grad_BP: Tensor) -> Tensor:
        whole = grad_BP.float().contiguous()
        return (whole.view(torch.int32) & ~0x1FFF).view(torch.float32)

    def replace(clipper: GhostClipper, _parameter: nn.Parameter, grad_BP: Tensor) -> Tensor:
        norm_B = _norms(*(cut(g_BP) for g_BP in _all_gradients(clipper)))
        keep_B = _norms(*_all_gradients(clipper)).isfinite()
        return _weighted(_clip(norm_B[keep_B], BOUND), _finite(grad_BP, keep_B))

    return _sums(replace)


def loss_scale_left_in_the_sums() -> Any:
    """Sums of a scaled loss are released with the scale, behind clipping."""
    original = GhostClipper.summed_gradient

    def summed_gradient(self: GhostClipper, parameter: nn.Parameter) -> Tensor | None:
        honest = original(self, parameter)
        return None if honest is None else 1024 * honest

    return mock.patch.object(GhostClipper, "summed_gradient", summed_gradient)


@contextlib.contextmanager
def sums_within_reach() -> Iterator[None]:
    """The clipped sums wait in `p.grad` for the step, and the step takes what is there."""
    backward, original = GhostClipper.backward, GhostClipper.summed_gradient

    def expose(self: GhostClipper, *arguments: Any, **options: Any) -> Any:
        result = backward(self, *arguments, **options)
        for p in self.trainable_parameters():
            p.grad = original(self, p)
        return result

    def summed_gradient(self: GhostClipper, parameter: nn.Parameter) -> Tensor | None:
        return original(self, parameter) if parameter.grad is None else parameter.grad

    with (
        mock.patch.object(GhostClipper, "backward", expose),
        mock.patch.object(GhostClipper, "summed_gradient", summed_gradient),
        mock.patch.object(Releases, "refuse_strangers", return_value=None),
    ):
        yield


SURROUNDING_MUTATIONS: dict[str, Mutation] = {
    mutation.__name__: mutation
    for mutation in (
        steps_forgotten,
        draws_not_followed,
        passes_over_a_draw_counted_once,
        copies_keep_the_key,
        ledger_read_without_its_chain,
        rows_without_a_bound,
        norms_of_reduced_precision,
        loss_scale_left_in_the_sums,
        sums_within_reach,
    )
}
