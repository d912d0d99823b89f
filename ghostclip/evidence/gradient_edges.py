"""Gradient edges: values that a backward can begin at, a model's outputs or what a scalar output was reduced from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ghostclip import _torch
from ghostclip.capture.sizes import UNKNOWN

_MAX_NODES = 256


@dataclass(frozen=True)
class GradientSource:
    """One value of the graph.

    Attributes:
        source: What autograd is told: a tensor, or an edge of the graph.
        shape: The value's shape.
        dtype: Its dtype.
        device: Its device.
        tensor: The value itself, where it is at hand.
        axis: The axis that holds samples, `CONSTANT` or `UNKNOWN`.
    """

    source: Any
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    tensor: Tensor | None = None
    axis: int = UNKNOWN

    @classmethod
    def of(cls, tensor: Tensor, axis: int = UNKNOWN) -> "GradientSource":
        """Return the place of a tensor in the graph.

        Args:
            tensor: The tensor.
            axis: The axis that holds samples, if it is known.

        Returns:
            Its place.
        """
        return cls(tensor, tensor.shape, tensor.dtype, tensor.device, tensor, axis)


def reduced_sources(scalars: Sequence[Tensor], has_rows: Callable[[GradientSource], bool]) -> list[GradientSource]:
    """Walk back from scalars to the first values that have rows of samples.

    Args:
        scalars: Tensors of no axis, in the graph.
        has_rows: Tells whether a value has an axis for the samples.

    Returns:
        The values where every path from the scalars first meets one; empty where the search was given up.
    """
    found: dict[tuple[Any, int], GradientSource] = {}
    pending: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr) for tensor in scalars]
    seen: set[tuple[Any, int]] = set()
    while pending:
        node, number = pending.pop()
        if node is None or (node, number) in seen or not _torch.outputs_of(node):
            continue
        if len(seen) >= _MAX_NODES:
            return []
        seen.add((node, number))
        place = source_at(node, number)
        if place is not None and has_rows(place):
            found[node, number] = place
        else:
            pending += node.next_functions
    return list(found.values())


def source_at(node: Any, number: int) -> GradientSource | None:
    """Return the place of an output of a node.

    Args:
        node: The node.
        number: Which of its outputs.

    Returns:
        The place; None for a leaf, or where it holds no floating values.
    """
    if number >= len(_torch.outputs_of(node)) or node.name().endswith("AccumulateGrad"):
        return None
    about = _torch.outputs_of(node)[number]
    if not about.dtype.is_floating_point:
        return None
    return GradientSource(GradientEdge(node, number), torch.Size(about.shape), about.dtype, about.device)
