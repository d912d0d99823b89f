"""Engines whose account, ledger, copies or arithmetic are broken on purpose, as `mutations` breaks noise and sums."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ghostclip import GhostClipper
from ghostclip.clipping.norms import GroupNorms
from ghostclip.factors.base import SquaredNorm
from ghostclip.factors.rows import Rows
from ghostclip.noise import FastNoise, make_noise_source
from ghostclip.optim import DPOptimizer
from ghostclip.optim.draws import DrawLog
from ghostclip.optim.foreign import Releases
from ghostclip.optim.virtual import LogicalBatch
from ghostclip.privacy.account import Account
from ghostclip.privacy.charges import Charge
from ghostclip.privacy.ledger_file import LedgerPosition
from tests.audit.mutations import Mutation, _all_gradients, _clip, _finite, _norms, _sums, _weighted
from tests.audit.subject import BOUND


def steps_forgotten() -> Any:
    """Every second release is not charged."""
    original, calls = Account._add, [0]

    def add(self: Account, events: Sequence[Charge]) -> None:
        calls[0] += 1
        if calls[0] % 2:
            original(self, events)

    return mock.patch.object(Account, "_add", add)


def draws_not_followed() -> Any:
    """A step does not ask which draw its rows come from."""
    return mock.patch.object(DPOptimizer, "require_draws", return_value=None)


def _draws_not_compared() -> Any:
    """A step's rows are counted, and it is not asked which draw they are of."""
    return mock.patch.object(DrawLog, "trace", lambda _self, match, _passes: match)


@contextlib.contextmanager
def passes_over_a_draw_counted_once() -> Iterator[None]:
    """Virtual steps are taken for parts of one draw, whatever they went through."""
    # Else the tensors would tell that they were not.
    with _draws_not_compared(), mock.patch.object(LogicalBatch, "participations", property(lambda _: 1)):
        yield


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


@contextlib.contextmanager
def ledger_read_without_its_chain() -> Iterator[None]:
    """Each line of a ledger is believed by itself: what is missing between two lines is not seen."""

    def decoded(line: bytes, after: LedgerPosition, *, name: str) -> tuple[dict[str, Any], LedgerPosition]:
        del name
        body, _, written = line.rpartition(b"\t")
        values = json.loads(body)
        return values, LedgerPosition(values["ledger"], after.lines + 1, written.decode())

    with (
        mock.patch("ghostclip.privacy.ledger_file.decoded", decoded),
        mock.patch("ghostclip.privacy.ledger_file.is_whole", lambda line, after: line.endswith(b"\n") or bool(line)),
    ):
        yield


@contextlib.contextmanager
def rows_without_a_bound() -> Iterator[None]:
    """What a sample adds to one row of a table is added bit by bit, and nothing bounds what that rounds."""

    def add(self: Rows, coef_B: Tensor, out: Tensor) -> None:
        weighted_BTI = self.g_BTI.to(out.dtype) * coef_B.view(-1, 1, 1)
        out.view(self.matrix).index_add_(0, self.ids_BT.flatten(), weighted_BTI.reshape(-1, self.matrix[1]))

    def sqnorm(self: Rows) -> SquaredNorm:
        pairs_K, sums_KI = self.segments()
        square_B = self.g_BTI.new_zeros(self.batch_size)
        return SquaredNorm(square_B.index_add_(0, pairs_K // self.matrix[0], sums_KI.square().sum(1)), None)

    with mock.patch.object(Rows, "add_clipped_sum_", add), mock.patch.object(Rows, "sqnorm", sqnorm):
        yield


@contextlib.contextmanager
def uses_added_one_by_one() -> Iterator[None]:
    """Nobody asks by how much rounding may have changed a norm, or the sum of the uses of a layer."""
    with (
        mock.patch.object(GroupNorms, "imprecise_B", return_value=None),
        mock.patch("ghostclip.clipping.norms._at_most_B", lambda norm: norm.value_B.clamp(min=0)),
    ):
        yield


def huge_parts_meet_the_sum() -> Any:
    """Norms are those of float64, but what they are of is added with all others' in float32."""

    def settled(norm: SquaredNorm, before: SquaredNorm, _: Tensor) -> tuple[Tensor, Tensor]:
        return norm.value_B.sqrt().to(before.value_B.dtype), torch.zeros_like(norm.value_B, dtype=torch.bool)

    return mock.patch("ghostclip.clipping.norms._settled", settled)


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
    original = GhostClipper.hand_over_sums

    def hand_over_sums(self: GhostClipper, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        return [None if honest is None else 1024 * honest for honest in original(self, parameters)]

    return mock.patch.object(GhostClipper, "hand_over_sums", hand_over_sums)


@contextlib.contextmanager
def sums_within_reach() -> Iterator[None]:
    """The clipped sums wait in `p.grad` for the step, and the step takes what is there."""
    backward, original = GhostClipper.backward, GhostClipper.hand_over_sums

    def expose(self: GhostClipper, *arguments: Any, **options: Any) -> Any:
        result = backward(self, *arguments, **options)
        for p in self.trainable_parameters():
            p.grad = self.summed_gradient(p)
        return result

    def hand_over_sums(self: GhostClipper, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        kept = original(self, parameters)
        return [own if p.grad is None else p.grad for p, own in zip(parameters, kept, strict=True)]

    with (
        mock.patch.object(GhostClipper, "backward", expose),
        mock.patch.object(GhostClipper, "hand_over_sums", hand_over_sums),
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
        uses_added_one_by_one,
        huge_parts_meet_the_sum,
        norms_of_reduced_precision,
        loss_scale_left_in_the_sums,
        sums_within_reach,
    )
}
