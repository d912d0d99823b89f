"""`Placement`: how the parts of one parameter lie on a device mesh, and what the ranks along each axis compute on.

One description for every parallelism, read off a parameter's DTensor and one declaration, `sample_mesh_axes`: the mesh
axes whose ranks work on the same samples. Along all others each rank has samples of its own.

| along an axis | a parameter that it divides | a parameter with a copy on every rank |
|---|---|---|
| of samples (data parallel) | gathered before use: norms are whole | norms are whole |
| of `sample_mesh_axes` | each rank's square is a part of the sample's | the square counts once |
| of `sample_mesh_axes`, rows of one sample spread | as above | parts of a gradient: added up, then squared |
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

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
    spreads_rows: bool
    """Whether the rows of one sample that this parameter meets are spread over them."""


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
        """What selects it from the parameter."""
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))


@dataclass(frozen=True)
class Placement:
    """How one parameter lies on a mesh.

    Attributes:
        mesh: The mesh.
        axes: Its axes, in order.
        shape: Shape of the whole parameter.
    """

    mesh: DeviceMesh
    axes: tuple[MeshAxis, ...]
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
        """How many ranks the mesh has."""
        return prod(axis.size for axis in self.axes)

    @cached_property
    def here(self) -> Box:
        """The part on this rank, in the way of `torch.chunk`: equal parts, the last ones shorter or empty."""
        starts, sizes = [0] * len(self.shape), list(self.shape)
        for number in self.divided:
            axis = self.axes[number]
            dim = axis.divides
            assert dim is not None, "of an axis that divides"
            part = -(-sizes[dim] // axis.size)
            first = min(sizes[dim], part * self.mesh.get_local_rank(number))
            starts[dim], sizes[dim] = starts[dim] + first, min(part, sizes[dim] - first)
        return Box(tuple(starts), tuple(sizes), self.shape)


def placement_of(
    name: str, parameter: Any, *, sample_mesh_axes: Collection[str] = (), spreads_rows: Collection[str] = ()
) -> Placement:
    """Read off a parameter how it lies on its mesh.

    Args:
        name: The parameter's name, for messages.
        parameter: A DTensor.
        sample_mesh_axes: Axes whose ranks work on the same samples.
        spreads_rows: Those of them along which the rows of one sample that meet this parameter are spread.

    Returns:
        The placement.

    Raises:
        UnsupportedModelError: If the parameter is on the meta device, or lies in a way that there are no norms for.
    """
    from torch.distributed.tensor import Replicate, Shard

    if parameter.device.type == "meta":
        raise UnsupportedModelError(
            f"parameter '{name}' is on the meta device. Give the model memory and values first: model.to_empty(...), "
            "then its initialisation or a checkpoint."
        )
    mesh, axes = parameter.device_mesh, []
    names: Sequence[str] = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    for number, (axis, placed) in enumerate(zip(names, parameter.placements, strict=True)):
        if type(placed) not in {Shard, Replicate}:
            raise UnsupportedModelError(
                f"parameter '{name}' is placed as {placed} along mesh axis '{axis}': only Shard and Replicate are "
                "supported."
            )
        divides = placed.dim % parameter.dim() if isinstance(placed, Shard) else None
        axes.append(MeshAxis(axis, mesh.size(number), divides, axis in sample_mesh_axes, axis in spreads_rows))
    return Placement(mesh, tuple(axes), tuple(parameter.shape))


def local_part(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Return this rank's part of a whole tensor.

    Args:
        tensor: Shape of the whole parameter.
        placement: How it lies.

    Returns:
        A view.
    """
    return tensor[placement.here.slices]
