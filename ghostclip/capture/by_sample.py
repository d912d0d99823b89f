"""Per-sample gradients of an operation without a rule: its own backward, run on every sample's rows at once.

The general way masks the output's gradient to one sample at a time and runs the operation's backward over the whole
batch for each, B times the work. Where the rows of the data can be told, the operation is run again under ``vmap`` on
each sample's rows alone: the work of one forward and one backward. What comes out is used only if it reproduces the
operation's output and adds up to the whole batch's gradient, which costs one more backward.

Shape letters: B samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.row_maps import RowMap

_FOLDED: Final = ("axis", "major", "minor")
# Relative differences beyond rounding, by dtype; sums over a batch in another order are within.
_TOLERANCE: Final = {torch.float64: 1e-9, torch.float32: 1e-3}


@dataclass(frozen=True, eq=False)
class Rerun:
    """An operation as it ran in the forward."""

    # runs it on other values of (its plain tensors, its parameters) and returns its differentiable outputs
    run: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
    inputs: Sequence[Tensor]  # its parameters
    plain: list[Tensor] = field(default_factory=list)  # its plain tensors, known once it has run
    # their versions then; data changed in place since cannot be run on again
    versions: list[int] = field(default_factory=list)

    def remember(self, plain: Sequence[Tensor]) -> None:
        """Note the values on which it runs in the forward."""
        self.plain[:] = plain
        self.versions[:] = _torch.versions(plain)


@dataclass(frozen=True, eq=False)
class Arrived:
    """One output with its gradient."""

    place: int  # index among the outputs
    output: Tensor  # with the operation's own graph
    grad: Tensor
    row_map: RowMap  # where its samples are


def gradients(region: Rerun, arrived: Sequence[Arrived], *, batch_size: int) -> list[Tensor] | None:
    """Return per-sample gradients ``(B, *P)`` of a region's parameters."""
    # None if it cannot be rerun with the same result.
    if batch_size < 2 or any(item.row_map.kind not in _FOLDED for item in arrived):
        return None
    if _torch.versions(region.plain) != region.versions:
        return None
    maps = [_map_of(tensor, arrived, batch_size) for tensor in region.plain]
    try:
        with _torch.no_slow_vmap():
            outputs, found = _vmapped(region, arrived, maps, batch_size)
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
        return None
    same = all(
        _close(own, _split(item.output.detach(), item.row_map, batch_size))
        for own, item in zip(outputs, arrived, strict=True)
    )
    return found if same and _adds_up(region, arrived, found) else None


def _vmapped(
    region: Rerun, arrived: Sequence[Arrived], maps: Sequence[RowMap | None], batch_size: int
) -> tuple[Sequence[Tensor], list[Tensor]]:
    """Run the operation and its backward for all samples; return outputs and gradients, samples first."""
    own = [
        tensor if row_map is None else _split(tensor, row_map, batch_size)
        for tensor, row_map in zip(region.plain, maps, strict=True)
    ]
    grads = [_split(item.grad, item.row_map, batch_size) for item in arrived]
    places = [item.place for item in arrived]

    def one(rows: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        def forward(*parameters: Tensor) -> tuple[Tensor, ...]:
            outputs = region.run(rows, parameters)
            return tuple(outputs[place] for place in places)

        outputs, pull = torch.func.vjp(forward, *region.inputs)[:2]
        return outputs, pull(tuple(grads))

    in_dims = ([None if row_map is None else 0 for row_map in maps], [0] * len(grads))
    outputs, found = torch.func.vmap(one, in_dims=in_dims, randomness="error")(own, grads)
    return outputs, list(found)


def _split(tensor: Tensor, row_map: RowMap, batch_size: int) -> Tensor:
    """Return every sample's rows of a tensor, samples first, with the rows' axis: ``(B, ..., rows, ...)``."""
    axis, rows = row_map.axis, tensor.shape[row_map.axis] // batch_size
    if row_map.kind == "minor":
        return tensor.detach().unflatten(axis, (rows, batch_size)).movedim(axis + 1, 0)
    return tensor.detach().unflatten(axis, (batch_size, rows)).movedim(axis, 0)


def _map_of(tensor: Tensor, arrived: Sequence[Arrived], batch_size: int) -> RowMap | None:
    """Guess the row map of an input from those of the outputs; None for a constant."""
    for item in arrived:
        row_map = item.row_map
        size = item.output.shape[row_map.axis]
        for axis in dict.fromkeys((row_map.axis, 0, 1)):
            if axis < tensor.dim() and tensor.shape[axis] == size:
                return RowMap(row_map.kind, axis)
    if tensor.dim() and tensor.shape[0] == batch_size:
        return RowMap("axis")
    return None


def _close(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    tolerance = _TOLERANCE.get(first.dtype, 5e-2)
    scale = float(second.abs().nan_to_num(0.0, 0.0, 0.0).max()) if second.numel() else 0.0
    return bool(torch.allclose(first, second, rtol=tolerance, atol=tolerance * scale, equal_nan=True))


def _adds_up(region: Rerun, arrived: Sequence[Arrived], found: Sequence[Tensor]) -> bool:
    outputs, grads = [item.output for item in arrived], [item.grad for item in arrived]
    whole = torch.autograd.grad(outputs, list(region.inputs), grads, retain_graph=True, materialize_grads=True)
    return all(_close(mine.sum(0), total) for mine, total in zip(found, whole, strict=True))
