"""One model on all ranks: its wrappers, equal parameters and buffers, and its state as a file has it.

That parameters and buffers are equal is checked, and made so only on request. Copies are taken out of torch's wrappers,
shards are refused. States of a divided model and its optimizer are whole for a file that rank 0 writes, and in parts
again when it is read, so that a file does not depend on how many ranks there were.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from ghostclip import _torch
from ghostclip._tree import tensors
from ghostclip.distributed.agreement import Group, gathered, is_first, world_size
from ghostclip.distributed.placement import as_part_of, placement_of
from ghostclip.errors import UnsupportedModelError
from ghostclip.kernels.fingerprints import content_prints, read_prints

_log = logging.getLogger(__name__)


def copy_inside(module: nn.Module) -> nn.Module:
    """Return the model inside a DistributedDataParallel, which adds up no gradients from then on."""
    # Clipped sums meet in the private optimizer's step; the wrapper may still be called.
    while isinstance(module, nn.parallel.DistributedDataParallel):
        _log.info("DistributedDataParallel is set aside: the private optimizer adds up the ranks' clipped sums.")
        # As in its no_sync(): otherwise it would wait for gradients that autograd never makes.
        module.require_backward_grad_sync = False
        module = module.module
    return module


def refuse_sharded(module: nn.Module) -> None:
    """Refuse a model that is sharded in a way that hides which layer a value belongs to."""
    # DTensors are `ShardedModel`'s.
    # Nothing can be an instance of what was never loaded.
    kind: type | None = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    for path, part in module.named_modules():
        if kind is not None and isinstance(part, (kind,)):
            raise UnsupportedModelError(
                f"{path or 'module'} (FullyShardedDataParallel): its flat parameters hide which layer a value is of. "
                "Use torch.distributed.fsdp.fully_shard, which took its place."
            )


class _WeightEntry(NamedTuple):
    """Properties of one parameter or buffer that ranks compare."""

    name: str
    layout: str
    trainable: bool
    digest: int
    part: str = ""
    """Which part of it this rank holds; empty for all of it."""


@torch.no_grad()
def broadcast_parameters(model: nn.Module, group: Group = None) -> None:
    """Give every rank rank 0's parameters and buffers; called on all ranks, and of no effect where there is one only.

    Args:
        model: Each rank's model, of the same names, shapes and dtypes.
        group: The ranks that train together.

    Raises:
        UnsupportedModelError: On all ranks, if the models have other names, shapes or dtypes: they are parts of one
            model, not copies of it.
    """
    if world_size(group) == 1:
        return
    layouts = [(name, _layout(tensor)) for name, tensor in _tensors(model)]
    by_rank = gathered("parameters to broadcast", layouts, group)
    for rank, other in enumerate(by_rank):
        if other != by_rank[0]:
            raise UnsupportedModelError(
                f"{type(model).__name__}: {_first_difference(rank, dict(by_rank[0]), dict(other))} Only copies of one "
                "model can be broadcast."
            )
    first = 0 if group is None else distributed.get_global_rank(group, 0)
    for _, tensor in _tensors(model):
        shared = tensor.detach().contiguous()
        # As bytes: not every backend knows every dtype.
        distributed.broadcast(shared.reshape(-1).view(torch.uint8), src=first, group=group)
        tensor.copy_(shared)


def require_equal_weights(model: nn.Module, group: Group = None) -> None:
    """Refuse a model whose names, shapes, dtypes, values or trainability differ between ranks; called on all of them.

    Cost:
        One pass over the values, on their device, and one exchange of a digest of each.
    """
    if world_size(group) == 1:
        return
    entries = [
        _WeightEntry(name, _layout(tensor), tensor.requires_grad, digest, _part(name, tensor))
        for (name, tensor), digest in zip(_tensors(model), digests(model), strict=True)
    ]
    difference = _difference(gathered("parameters", entries, group))
    if difference:
        raise UnsupportedModelError(f"{type(model).__name__}: {difference}")


@torch.no_grad()
def digests(model: nn.Module) -> list[int]:
    """Return a 64-bit digest of each parameter, then each buffer, equal only for bit-equal values."""
    # All are under way before the first is waited for.
    prints = [content_prints([_torch.local(tensor.detach()).contiguous().reshape(-1)]) for _, tensor in _tensors(model)]
    return [number for number, _ in read_prints(prints)]


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _layout(tensor: torch.Tensor) -> str:
    placed = f" {tensor.placements}" if _torch.is_sharded_tensor(tensor) else ""  # type: ignore[attr-defined]
    return f"{tuple(tensor.shape)} {tensor.dtype}{placed}"


def _part(name: str, tensor: torch.Tensor) -> str:
    return str(placement_of(name, tensor).here) if _torch.is_sharded_tensor(tensor) else ""


def _difference(ranks: Sequence[Sequence[_WeightEntry]]) -> str:
    """Return what ranks cannot both have of one model, and the remedy; empty where there is nothing."""
    layouts = [{entry.name: entry.layout for entry in entries} for entries in ranks]
    for rank, layout in enumerate(layouts):
        if list(layout.items()) != list(layouts[0].items()):
            return (
                f"{_first_difference(rank, layouts[0], layout)} Ranks that share batches train copies of one model. "
                "Stages of a pipeline go into a ghostclip.distributed.Pipeline."
            )
    for entries in zip(*ranks, strict=True):
        name, trainable = entries[0].name, entries[0].trainable
        others = [rank for rank, entry in enumerate(entries) if entry.trainable != trainable]
        if others:
            there, here = ("frozen", "trainable") if trainable else ("trainable", "frozen")
            return (
                f"'{name}' of rank {', '.join(map(str, others))} is {there}, of rank 0 {here}. Freeze the same "
                "parameters on every rank."
            )
        # Of what ranks hold in parts, only those that hold the same ones have the same values.
        holders: dict[str, int] = {}
        firsts = [entries[holders.setdefault(entry.part, rank)] for rank, entry in enumerate(entries)]
        others = [rank for rank, entry in enumerate(entries) if entry.digest != firsts[rank].digest]
        if others:
            return (
                f"'{name}' of rank {', '.join(map(str, others))} has other values than rank "
                f"{holders[entries[others[0]].part]}'s. Ranks that share batches train one model: load the same "
                "checkpoint or seed alike on every rank, or call ghostclip.distributed.broadcast_parameters(model) on "
                "every rank before make_private, which gives all of them rank 0's. Stages of a pipeline go into a "
                "Pipeline."
            )
    return ""


def _first_difference(rank: int, first: dict[str, str], other: dict[str, str]) -> str:
    """Return a sentence on the first name, shape or dtype in which a rank's model differs from rank 0's."""
    for name in [*first, *other]:
        if first.get(name) != other.get(name):
            return f"'{name}' is {other.get(name, 'missing')} on rank {rank}, {first.get(name, 'missing')} on rank 0."
    return f"rank {rank} has the parameters of rank 0 in another order."


def is_in_parts(state: Any) -> bool:
    """Return whether a nested state contains DTensors."""
    return any(map(_torch.is_sharded_tensor, tensors(state)))


@torch.no_grad()
def gathered_whole(state: Any) -> Any:
    """Return a nested state whose tensors are whole and in main memory on rank 0; called on all ranks.

    Cost:
        One all-gather a tensor; a device holds one whole tensor at a time.
    """
    # On other ranks DTensors become None.
    if isinstance(state, Mapping):
        # A model's state is a dict with attributes of its own, which only its own class reads.
        return {name: gathered_whole(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [gathered_whole(value) for value in state] if isinstance(state, list) else (*map(gathered_whole, state),)
    if not _torch.is_sharded_tensor(state):
        return state
    # Parts that are kept in main memory are gathered where the ranks meet.
    whole = state.detach().to(state.device_mesh.device_type).full_tensor()
    return whole.cpu() if is_first() else None


def parts_for(saved: Any, like: Any) -> Any:
    """Return this rank's part of a saved whole tensor, laid out as ``like``; anything else as it is."""
    fits = isinstance(saved, Tensor) and _torch.is_sharded_tensor(like) and saved.shape == like.shape
    if not fits or _torch.is_sharded_tensor(saved):
        return saved
    placement = placement_of("saved state", like)
    return as_part_of(like, saved.reshape(placement.shape)[placement.here.slices].contiguous())


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """Opacus's wrapper: gives every rank rank 0's parameters; sums are added up in the private optimizer's step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        broadcast_parameters(model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
