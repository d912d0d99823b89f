"""One model on all ranks: its wrappers, equal parameters and buffers, and its state as a file has it.

That parameters and buffers are equal is checked, and made so only on request. Copies are taken out of torch's wrappers,
shards are refused. States of a divided model and its optimizer are whole for a file that rank 0 writes, and in parts
again when it is read, so that a file does not depend on how many ranks there were.

`Placement` says how the parts of one parameter lie on a device mesh, and what the ranks along each axis compute on. One
description for every parallelism, read off a parameter's DTensor and one declaration, `sample_mesh_axes`: the mesh axes
whose ranks work on the same samples. Along all others each rank has samples of its own.

| along an axis | a parameter that it divides | a parameter with a copy on every rank |
|---|---|---|
| of samples (data parallel) | gathered before use: norms are whole | norms are whole |
| of `sample_mesh_axes` | each rank's square is a part of the sample's | the square counts once |

Where a parameter of which every rank has a copy meets some of a sample's positions on each rank is seen as it runs
(`ghostclip.capture.ranks`): there ranks have parts of a gradient, which are added up, then squared.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from ghostclip import _torch
from ghostclip._tree import mapped, tensors
from ghostclip.distributed.agreement import Group, gathered, is_first, world_size
from ghostclip.errors import UnsupportedModelError
from ghostclip.kernels.sums import content_prints, read_prints


class MeshAxis(NamedTuple):
    """How one parameter lies along one axis of a device mesh."""

    name: str
    """As the mesh calls it; its number where it has no names."""
    size: int
    """Ranks along it."""
    divides: int | None
    """The dimension of the parameter that is divided among them; None where each has a copy."""
    same_samples: bool
    """Whether they work on the same samples: see `sample_mesh_axes`."""
    last: bool = False
    """Whether it divides what the axes after it have left of the dimension, as ``fully_shard`` divides parts."""


class Box(NamedTuple):
    """A part of a parameter: a range along each dimension."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]
    """Shape of the parameter."""

    @property
    def offset(self) -> int | None:
        """Number of the first element in the flattened parameter; None where the part is no range of that."""
        rest = [dim for dim in range(1, len(self.whole)) if self.sizes[dim] != self.whole[dim]]
        if rest:
            return None
        return self.starts[0] * prod(self.whole[1:]) if self.whole else 0

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the part in the whole parameter."""
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))


@dataclass(frozen=True)
class Placement:
    """How one parameter lies on a mesh."""

    mesh: DeviceMesh
    axes: tuple[MeshAxis, ...]
    # Shape of the whole parameter; a dimension of several blocks each of which is divided (gate and up side by side)
    # counts as two, the blocks and what a block has
    shape: tuple[int, ...]

    @property
    def divided(self) -> tuple[int, ...]:
        """Numbers of the axes that divide the parameter."""
        return tuple(number for number, axis in enumerate(self.axes) if axis.divides is not None)

    @property
    def copied(self) -> tuple[int, ...]:
        """Numbers of the axes along which every rank has a copy."""
        return tuple(number for number, axis in enumerate(self.axes) if axis.divides is None)

    @cached_property
    def here(self) -> Box:
        """The part on this rank, as `torch.chunk` divides: equal parts, the last ones shorter or empty."""
        starts, sizes = [0] * len(self.shape), list(self.shape)
        for number in sorted(self.divided, key=lambda number: self.axes[number].last):
            axis = self.axes[number]
            dim = axis.divides
            assert dim is not None, "of an axis that divides"
            part = -(-sizes[dim] // axis.size)
            first = min(sizes[dim], part * self.mesh.get_local_rank(number))
            starts[dim], sizes[dim] = starts[dim] + first, min(part, sizes[dim] - first)
        return Box(tuple(starts), tuple(sizes), self.shape)


def placement_of(name: str, parameter: Any, *, sample_mesh_axes: Collection[str] = ()) -> Placement:
    """Return how a DTensor parameter lies on its mesh; refuse the meta device and placements without norms."""
    from torch.distributed.tensor import Replicate, Shard

    if parameter.device.type == "meta":
        raise UnsupportedModelError(
            f"parameter '{name}' is on the meta device. Give the model memory and values first: model.to_empty(...), "
            "then its initialisation or a checkpoint."
        )
    mesh, axes, shape = parameter.device_mesh, [], tuple(parameter.shape)
    names: Sequence[str] = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    dims = [None if isinstance(placed, Replicate) else getattr(placed, "dim", -1) for placed in parameter.placements]
    blocks: dict[int, int] = {}
    for number, (axis, placed) in enumerate(zip(names, parameter.placements, strict=True)):
        divides = dims[number]
        # torch's _StridedShard, which says how many pieces there were before it divided each.
        pieces = 1 if type(placed) in {Shard, Replicate} else getattr(placed, "split_factor", 0)
        after = prod(mesh.size(other) for other in range(number + 1, mesh.ndim) if dims[other] == divides)
        if pieces > 1 and dims.count(divides) == 1 and divides is not None and shape[divides] % pieces == 0:
            blocks[divides] = pieces
        elif pieces not in {1, after}:
            raise UnsupportedModelError(
                f"parameter '{name}' is placed as {placed} along mesh axis '{axis}': supported are Shard, Replicate, "
                "and what fully_shard makes of a parameter that was divided before."
            )
        axes.append(MeshAxis(axis, mesh.size(number), divides, axis in sample_mesh_axes, pieces > 1))
    return _with_blocks(Placement(mesh, tuple(axes), shape), blocks)


def as_part_of(like: Any, part: Tensor) -> Tensor:
    """Return a contiguous local tensor as this rank's part of a DTensor that lies as ``like`` does."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(like.shape, device="meta").stride()
    local = part.view(like.to_local().shape).to(like.to_local().device)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=stride
    )  # fmt: skip


def _with_blocks(placement: Placement, blocks: dict[int, int]) -> Placement:
    """Return a placement whose dimensions of several blocks count as two each."""
    if not blocks:
        return placement
    shape: list[int] = []
    dims: list[int] = []
    for dim, size in enumerate(placement.shape):
        shape += [blocks[dim], size // blocks[dim]] if dim in blocks else [size]
        dims.append(len(shape) - 1)
    axes = (axis if axis.divides is None else axis._replace(divides=dims[axis.divides]) for axis in placement.axes)
    return Placement(placement.mesh, tuple(axes), tuple(shape))


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
    """What ranks compare of one parameter or buffer."""

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
    """Return parameters, then buffers, by name."""
    return [*model.named_parameters(), *model.named_buffers()]


def _layout(tensor: torch.Tensor) -> str:
    """Return shape, dtype and placement as text."""
    placed = f" {tensor.placements}" if _torch.is_sharded_tensor(tensor) else ""  # type: ignore[attr-defined]
    return f"{tuple(tensor.shape)} {tensor.dtype}{placed}"


def _part(name: str, tensor: torch.Tensor) -> str:
    """Return which part of a DTensor this rank has, as text; empty for a plain tensor."""
    return str(placement_of(name, tensor).here) if _torch.is_sharded_tensor(tensor) else ""


def _difference(ranks: Sequence[Sequence[_WeightEntry]]) -> str:
    """Return how the ranks' models differ, and the remedy; empty where they do not."""
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

    def gathered_leaf(leaf: Any) -> Any:
        if not _torch.is_sharded_tensor(leaf):
            return leaf
        # Parts that are kept in main memory are gathered where the ranks meet.
        whole = leaf.detach().to(leaf.device_mesh.device_type).full_tensor()
        return whole.cpu() if is_first() else None

    # On other ranks DTensors become None.
    return mapped(gathered_leaf, state)


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
