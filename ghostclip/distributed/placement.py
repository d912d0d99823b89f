"""`Placement`: how the parts of one parameter lie on a device mesh, and what the ranks along each axis compute on.

One description for every parallelism, read off a parameter's DTensor and one declaration, `sample_mesh_axes`: the mesh
axes whose ranks work on the same samples. Along all others each rank has samples of its own.

| along an axis | a parameter that it divides | a parameter with a copy on every rank |
|---|---|---|
| of samples (data parallel) | gathered before use: norms are whole | norms are whole |
| of `sample_mesh_axes` | each rank's square is a part of the sample's | the square counts once |

Where a parameter of which every rank has a copy meets some of a sample's positions on each rank is seen as it runs
(`ghostclip.capture.ranks`): there ranks have parts of a gradient, which are added up, then squared.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ghostclip.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class MeshAxis(NamedTuple):
    """One axis of a device mesh, as one parameter lies along it."""

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

    @property
    def ranks(self) -> int:
        return prod(axis.size for axis in self.axes)

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
