"""Memory that a backward holds at every moment: read off its graph before it runs, without a measurement.

A measurement of the allocator would differ from run to run, and a plan made of it with it; the graph is the same each
time. Saved tensors are counted once for each storage, until the last operation that saved them has run.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.nodes import nodes_behind
from ghostclip.capture.param_use import ParamUse
from ghostclip.capture.row_origin import METADATA_KEY

# Operations whose input's gradient is the memory of their output's.
_VIEWS: Final = (
    "View", "UnsafeView", "Transpose", "T", "Permute", "Unsqueeze", "Squeeze", "Add", "Alias", "Reshape", "Expand",
    "Select", "Slice", "Unbind", "_Own", "_Enter", "_Source", "_Tie", "Clone",
)  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """One operation of a backward.

    Attributes:
        use: The use whose gradient arrives there, or None.
        live: Bytes of saved tensors while it runs, of this operation and all that follow.
        passing: Bytes of gradients that it takes and makes.
        arriving: Bytes of the gradient that it takes.
    """

    use: ParamUse | None
    live: int
    passing: int
    arriving: int


@dataclass
class Footprint:
    """A backward as a sequence of moments.

    Attributes:
        moments: In the order in which they will run.
        inputs: Bytes of what each use keeps of its inputs, where no other use keeps it; by the use's number (``id``).
    """

    moments: list[Moment]
    inputs: dict[int, int]

    def ordinary_peak(self) -> int:
        """Return the most that the same backward of ordinary training holds: at least this, its gradients included."""
        peak = built = 0
        seen: set[str] = set()
        for moment in self.moments:
            peak = max(peak, moment.live + moment.passing + built)
            if moment.use is not None:
                names = {name for tracked in moment.use.targets.values() for name in tracked.origin.names}
                built += parameter_bytes(moment.use, names - seen)
                seen |= names
        return max(peak, built)


def footprint_of(loss: Tensor, parameters: Iterable[Tensor]) -> Footprint:
    """Read the graph of a backward that will start at a loss.

    Args:
        loss: A tensor in the graph.
        parameters: Tensors that are alive whatever the backward does: their storages do not count.

    Returns:
        Its moments. Reading unpacks saved tensors, so that it must not be done under activation checkpointing.
    """
    return _read(nodes_in_order(loss.grad_fn), parameters)


def footprint_from(use: ParamUse, grad: Tensor, parameters: Iterable[Tensor]) -> Footprint:
    """Read what is left of a backward that has come to its first use.

    Args:
        use: The use.
        grad: The gradient of its output.
        parameters: As for `footprint_of`.

    Returns:
        Its moments from that use on: what the loss itself held is not among them.
    """
    constant = addresses(parameters)
    rest = _read(nodes_in_order(use.behind), parameters)
    own = sum(_storages(_inputs_of(use), constant).values())
    arriving = grad.numel() * grad.element_size()
    first = Moment(use, own + (rest.moments[0].live if rest.moments else 0), arriving, arriving)
    return Footprint([first, *rest.moments], {id(use): own, **rest.inputs})


def _read(nodes: Sequence[Any], parameters: Iterable[Tensor]) -> Footprint:
    constant = addresses(parameters)
    found = [read_node(node, constant) for node in nodes]
    uses, kept, saved = [use for use, *_ in found], [own for _, _, own, *_ in found], [every for _, every, *_ in found]
    last = {key: number for number, storages in enumerate(saved) for key in storages}
    freed = [0] * len(nodes)
    sizes = {key: size for storages in saved for key, size in storages.items()}
    for key, number in last.items():
        freed[number] += sizes[key]
    live = sum(sizes.values())
    moments = []
    for (use, _, _, arriving, passing), gone in zip(found, freed, strict=True):
        moments.append(Moment(use, live, passing, arriving))
        live -= gone
    owners = Counter(key for storages in kept for key in storages)
    inputs = {
        id(use): sum(size for key, size in storages.items() if owners[key] == 1)
        for use, storages in zip(uses, kept, strict=True)
        if use is not None
    }
    return Footprint(moments, inputs)


def read_node(node: Any, constant: set[int]) -> tuple[ParamUse | None, dict[Any, int], dict[Any, int], int, int]:
    """Read one operation of a backward.

    Args:
        node: Its node.
        constant: Addresses of memory that does not count.

    Returns:
        Its use, or None; the memory that it reads, and that which its use keeps of it (address and bytes); bytes of the
        gradient that it takes; bytes of that and of what it makes.
    """
    use = node.metadata.get(METADATA_KEY)
    kept = _storages(_inputs_of(use), constant)
    arriving = _bytes_of(_torch.outputs_of(node))
    made = 0 if node.name().removesuffix("Backward0").removesuffix("Backward") in _VIEWS else _made(node)
    return use, _storages(_torch.saved_tensors(node), constant) | kept, kept, arriving, arriving + made


def nodes_in_order(start: Any) -> list[Any]:
    """Return a node and those behind it as the engine runs them: the latest operation first.

    Args:
        start: The node.

    Returns:
        The nodes, those that accumulate gradients left out.
    """
    nodes = [node for node in nodes_behind([start]) if _torch.leaf_of(node) is None]
    return sorted(nodes, key=lambda node: -_torch.order_of(node))


def order(node: Any) -> int:
    """Return a number that grows with every node made."""
    return _torch.order_of(node)


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return where the memory of tensors begins."""
    return {_torch.local(tensor).untyped_storage().data_ptr() for tensor in tensors}


def _inputs_of(use: ParamUse | None) -> Sequence[Tensor]:
    return () if use is None or use.node is None else use.node.saved_tensors


def _storages(tensors: Iterable[Tensor], constant: set[int]) -> dict[int, int]:
    found = {}
    for tensor in map(_torch.local, tensors):
        if tensor.layout is torch.strided and not _torch.is_arriving(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in constant:
                found[storage.data_ptr()] = storage.nbytes()
    return found


def _made(node: Any) -> int:
    return sum(
        _bytes_of([_torch.outputs_of(following)[number]])
        for following, number in node.next_functions
        if following is not None
    )


def _bytes_of(metadata: Iterable[Any]) -> int:
    return sum(prod(item.shape) * item.dtype.itemsize for item in metadata if item.shape is not None)


def parameter_bytes(use: ParamUse, names: Iterable[str]) -> int:
    """Return the bytes of some parameters' gradients.

    Args:
        use: What consumed them.
        names: Which of its parameters.

    Returns:
        Their sum.
    """
    leaves = {name: leaf for tracked in use.targets.values() for name, leaf in tracked.origin.leaves.items()}
    parameters = [leaves[name].parameter for name in names]
    return sum(int(parameter.numel() * parameter.element_size()) for parameter in parameters)
