"""Rows of a table, looked up by numbers: embeddings and bags of them, and entries of a parameter that an index picks.

Shape letters: B samples, T positions, I features of a row, V rows of the table, n bags or entries of the index, K
look-ups of the longest bag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ghostclip.errors import UnsupportedModelError
from ghostclip.factors import Dense, Diagonal, Factor, Permuted, Rows
from ghostclip.rules.registry import Call, Captured, Split, register_op


@register_op(
    "embedding", arguments="input weight padding_idx max_norm norm_type scale_grad_by_freq sparse", by_form=True
)
def embedding(call: Call) -> Captured | None:
    """Rule for a look-up: ``Rows``; rows of ``padding_idx`` receive nothing, as in torch."""
    ids, weight = call.values["input"], call.values["weight"]
    refuse_max_norm(call)
    if call.get("scale_grad_by_freq", False):
        message = (
            "embedding: scale_grad_by_freq=True divides each gradient by counts over the whole batch, so that samples "
            "depend on each other. Set scale_grad_by_freq=False."
        )
        raise UnsupportedModelError(message)
    padding = padding_row(call, weight.shape[0])
    num_batch_dims, shape = ids.dim(), weight.shape

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        ids_BT, g_BTI = split(saved[0], num_batch_dims), split(grad, num_batch_dims)
        return {"weight": rows_factor(ids_BT, g_BTI, shape, padding)}

    return Captured((ids,), ids, num_batch_dims, factors, "rows")


def refuse_max_norm(call: Call) -> None:
    """Refuse a look-up with ``max_norm``, which renormalises the rows it meets in the table itself.

    Privacy:
        Which rows of the table changed tells which ids are in the batch, without any noise.
    """
    bound = call.get("max_norm")
    if bound is not None:
        message = (
            f"{call.name}: max_norm={bound} renormalises, in the table itself, the rows that the batch looks up, so "
            "that the trained table tells without noise which ids were in it. Leave max_norm out (module.max_norm = "
            "None), and renormalise the whole table after step(), which costs no privacy: with torch.no_grad(): "
            f"weight.copy_(weight.renorm({call.get('norm_type', 2.0):g}, 0, {bound}))."
        )
        raise UnsupportedModelError(message)


def padding_row(call: Call, rows: int) -> int | None:
    """Return the number of the row that takes no gradient, counted from the front; None if there is none."""
    padding = call.get("padding_idx")
    if padding is None:
        return None
    return int(padding) % rows if padding >= -rows else None


def rows_factor(ids_BT: Tensor, g_BTI: Tensor, shape: torch.Size, padding: int | None) -> Rows:
    """Return the factor of a look-up without the padding row's gradient."""
    if padding is not None:
        g_BTI = g_BTI.masked_fill((ids_BT == padding).unsqueeze(-1), 0.0)
    return Rows(ids_BT, g_BTI, shape=shape)


_ARGUMENTS = (
    "input weight offsets max_norm norm_type scale_grad_by_freq mode sparse "
    "per_sample_weights include_last_offset padding_idx"
)


@register_op("embedding_bag", arguments=_ARGUMENTS)
def embedding_bag(call: Call) -> Captured | None:
    """Rule for a bag: each look-up receives its bag's gradient, weighted; of ``max``, the features it wins."""
    # None for trainable weights of look-ups.
    refuse_max_norm(call)
    mode = call.get("mode", "mean")
    if "per_sample_weights" in call.tracked:
        return None
    if call.get("scale_grad_by_freq", False):
        message = "embedding_bag: scale_grad_by_freq=True counts over the whole batch. Set scale_grad_by_freq=False."
        raise UnsupportedModelError(message)
    weight = call.values["weight"]
    shape, padding = weight.shape, padding_row(call, weight.shape[0])
    ids_nK, weights_nK = _bags(call, padding)
    if mode == "mean":
        weights_nK = weights_nK / weights_nK.sum(1, keepdim=True).clamp(min=1)

    to_save = (ids_nK, weights_nK, *([_winners(weight, ids_nK, weights_nK)] if mode == "max" else []))

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        bag_ids, bag_weights = saved[:2]
        g_nKI = grad.unsqueeze(1) * bag_weights.unsqueeze(-1)
        if mode == "max":
            position_K1 = torch.arange(bag_ids.shape[1], device=grad.device).unsqueeze(1)
            g_nKI = g_nKI * (saved[2].unsqueeze(1) == position_K1)
        ids_BT, g_BTI = split(bag_ids, 1).flatten(1), split(g_nKI, 1).flatten(1, 2)
        return {"weight": rows_factor(ids_BT, g_BTI, shape, padding)}

    return Captured(to_save, ids_nK, 1, factors, "rows")


def _winners(weight: Tensor, ids_nK: Tensor, weights_nK: Tensor) -> Tensor:
    """Return which look-up of every bag is the largest, shape ``(n, I)``; of repeated ids the first."""
    if ids_nK.shape[1] == 0:
        return ids_nK.new_zeros(ids_nK.shape[0], weight.shape[1])
    values_nKI = weight[ids_nK].masked_fill((weights_nK == 0).unsqueeze(-1), float("-inf"))
    return values_nKI.argmax(1)


def _bags(call: Call, padding: int | None) -> tuple[Tensor, Tensor]:
    """Return ids and weights with one row per bag; look-ups that do not exist have weight 0."""
    ids, offsets = call.values["input"], call.get("offsets")
    sample_weights = call.get("per_sample_weights")
    weights = (
        torch.ones_like(ids, dtype=torch.promote_types(call.values["weight"].dtype, torch.float32))
        if sample_weights is None
        else sample_weights.detach()
    )
    if ids.dim() == 2:
        ids_nK, weights_nK = ids, weights
    else:
        if not call.get("include_last_offset", False):
            offsets = torch.cat([offsets, offsets.new_tensor([ids.numel()])])
        starts, ends = offsets[:-1], offsets[1:]
        position_nK = starts.unsqueeze(1) + torch.arange(
            int((ends - starts).max()) if ends.numel() else 0, device=ids.device
        )
        real_nK = position_nK < ends.unsqueeze(1)
        position_nK = position_nK.clamp(max=max(ids.numel() - 1, 0))
        ids_nK, weights_nK = ids[position_nK], weights[position_nK] * real_nK
    if padding is not None:
        weights_nK = weights_nK * (ids_nK != padding)
    return ids_nK, weights_nK


PICKING = ("__getitem__", "index_select", "gather", "take")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


@dataclass(frozen=True)
class Pick:
    """The rows of a parameter, seen as a matrix ``(V, I)``, that an operation returns."""

    ids: Tensor  # row numbers, shape of the index, int64
    shape: torch.Size  # the parameter's shape once its axes are permuted so that picked ones lead
    features: int  # I
    axis: int = 0  # where the picked axis stands in the parameter (and the index's axes in the result)

    def rows(self, ids_BT: Tensor, g_BTI: Tensor) -> Factor:
        """Return the parameter's factor: ``Rows``, or the gradients themselves where they are no larger."""
        # A tensor of a GPU may be indexed by one of the host.
        factor: Factor = Rows(ids_BT.to(g_BTI.device), g_BTI, shape=self.shape)
        if ids_BT.shape[1] * self.features >= prod(self.shape):
            factor = Dense(factor.materialize())
        if not self.axis:
            return factor
        return Permuted(factor, [*range(1, self.axis + 1), 0, *range(self.axis + 1, len(self.shape))])


def pick_of(name: str, shape: torch.Size, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Pick | None:
    """Return what an operation of ``PICKING`` picks."""
    # None for indices that are no integer tensor, or mixed with slices.
    names = ("index",) if name in ("take", "__getitem__") else ("dim", "index")
    bound = {**dict(zip(names, arguments, strict=False)), **keywords}
    index = bound.get("index")
    if name == "__getitem__":
        return _of_brackets(index, shape)
    if not isinstance(index, Tensor) or index.dtype not in _INTEGERS or not shape:
        return None
    if name == "take":
        return Pick(index.long() % prod(shape), shape, 1)
    dim = bound.get("dim")
    if not isinstance(dim, int):
        return None
    dim %= len(shape)
    if name == "gather":
        return None if index.dim() != len(shape) else Pick(_entries(index.long(), dim, shape), shape, 1)
    return _along(index.reshape(-1), dim, shape)


def of_constant(pick: Pick, factor: Factor) -> Factor:
    """Return the parameter's factor from one of rows that are the same for every sample, or a ``Diagonal``."""
    samples, dims = factor.batch_size, pick.ids.dim()
    if isinstance(factor, Diagonal) and not pick.axis and factor.axis < dims:
        ids_BT = pick.ids.movedim(factor.axis, 0).reshape(samples, -1)
        return pick.rows(ids_BT, factor.grad_BR.reshape(samples, -1, pick.features))
    grad = factor.materialize()
    grad = grad.movedim([pick.axis + 1 + dim for dim in range(dims)], list(range(1, dims + 1)))
    ids_BT = pick.ids.reshape(1, -1).expand(samples, -1)
    return pick.rows(ids_BT, grad.reshape(samples, ids_BT.shape[1], pick.features))


@register_op("index_select", "gather", "take", "__getitem__", arguments="input first second")
def picked(call: Call) -> Captured | None:
    """Return the capture of entries picked by data: ``Rows``; None for other indices, and where they are tracked."""
    parameter = call.values["input"]
    if call.tracked != {"input"} or any(name in call.values for name in ("out", "sparse_grad")):
        return None
    arguments = [call.values[name] for name in ("first", "second") if name in call.values]
    keywords = {name: value for name, value in call.values.items() if name in ("dim", "index")}
    pick = pick_of(call.name, parameter.shape, arguments, keywords)
    if pick is None:
        return None
    dims, ids = pick.ids.dim(), pick.ids
    front = range(pick.axis, pick.axis + dims)
    order = (*front, *(axis for axis in range(dims + len(pick.shape) - 1) if axis not in front)) if pick.axis else ()

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        g_BTI = split(grad.flatten(dims) if grad.dim() > dims else grad.unsqueeze(-1), dims)
        return {"input": pick.rows(split(saved[0], dims), g_BTI)}

    return Captured((ids,), ids, dims, factors, "rows", order)


def _of_brackets(index: Any, shape: torch.Size) -> Pick | None:
    """Return what ``x[...]`` picks by integer tensors; None for other indices."""
    entries = list(index) if isinstance(index, tuple) else [index]
    while entries and (entries[-1] is Ellipsis or _is_whole(entries[-1])):
        entries.pop()
    skipped = 0
    while entries and _is_whole(entries[0]):
        entries.pop(0)
        skipped += 1
    if (
        not entries
        or not all(isinstance(entry, Tensor) and entry.dtype in _INTEGERS for entry in entries)
        or skipped + len(entries) > len(shape)
    ):
        return None
    if skipped:
        return _along(entries[0], skipped, shape) if len(entries) == 1 else None
    # A tensor of a GPU may be indexed by some of the GPU and some of the host together.
    device = next((entry.device for entry in entries if entry.device.type != "cpu"), entries[0].device)
    ids = torch.zeros((), dtype=torch.int64, device=device)
    for entry, size in zip(entries, shape, strict=False):
        ids = ids * size + entry.to(device).long() % size
    return Pick(ids, shape, prod(shape[len(entries) :])) if ids.dim() else None


def _is_whole(entry: Any) -> bool:
    """Return whether an entry of an index is ``:``."""
    return isinstance(entry, slice) and entry == slice(None)


def _along(index: Tensor, dim: int, shape: torch.Size) -> Pick:
    """Return what an index picks along one axis."""
    moved = torch.Size([shape[dim], *shape[:dim], *shape[dim + 1 :]])
    return Pick(index.long() % max(1, shape[dim]), moved, prod(moved[1:]), dim)


def _entries(index: Tensor, dim: int, shape: torch.Size) -> Tensor:
    """Return the number of every entry that ``gather`` returns, counted over the whole parameter, row-major."""
    total = torch.zeros((), dtype=torch.int64, device=index.device)
    for axis, size in enumerate(shape):
        if axis == dim:
            coordinate = index % size
        else:
            coordinate = torch.arange(index.shape[axis], device=index.device)
            coordinate = coordinate.view([-1 if other == axis else 1 for other in range(index.dim())])
        total = total * size + coordinate
    return total
