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
    """One operation of a backward, and bytes in memory while it runs."""

    use: ParamUse | None  # the use whose gradient arrives there, or None
    live: int  # saved tensors of this operation and all that follow
    passing: int  # gradients that it takes and makes, and those that wait
    arriving: int  # the gradient that it takes


@dataclass
class Footprint:
    """A backward as a sequence of moments."""

    moments: list[Moment]
    inputs: dict[int, int]  # bytes of inputs that no other use stores, by the use's `id`

    def ordinary_peak(self) -> int:
        """Return the peak of the same backward of ordinary training, at least its gradients."""
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
    """Read the graph of a backward that will start at a loss, without the parameters' memory."""
    # Reading unpacks saved tensors, so that it must not be done under activation checkpointing.
    return _read(nodes_in_order(loss.grad_fn), parameters)


def footprint_from(use: ParamUse, grad: Tensor, parameters: Iterable[Tensor]) -> Footprint:
    """Read the rest of a backward from its first use on, without what the loss itself stored."""
    constant = addresses(parameters)
    rest = _read(nodes_in_order(use.behind), parameters)
    own = sum(_storages(_inputs_of(use), constant).values())
    arriving = grad.numel() * grad.element_size()
    first = Moment(use, own + (rest.moments[0].live if rest.moments else 0), arriving, arriving)
    return Footprint([first, *rest.moments], {id(use): own, **rest.inputs})


def _read(nodes: Sequence[Any], parameters: Iterable[Tensor]) -> Footprint:
    constant = addresses(parameters)
    found = [read_node(node, constant) for node in nodes]
    uses, kept, saved = [use for use, *_ in found], [own for _, _, own, _ in found], [every for _, every, *_ in found]
    last = {key: number for number, storages in enumerate(saved) for key in storages}
    freed = [0] * len(nodes)
    sizes = {key: size for storages in saved for key, size in storages.items()}
    for key, number in last.items():
        freed[number] += sizes[key]
    live = sum(sizes.values())
    moments = []
    for (use, _, _, arriving), (_, passing), gone in zip(found, passing_of(nodes), freed, strict=True):
        moments.append(Moment(use, live, passing, arriving))
        live -= gone
    owners = Counter(key for storages in kept for key in storages)
    inputs = {
        id(use): sum(size for key, size in storages.items() if owners[key] == 1)
        for use, storages in zip(uses, kept, strict=True)
        if use is not None
    }
    return Footprint(moments, inputs)


def read_node(node: Any, constant: set[int]) -> tuple[ParamUse | None, dict[Any, int], dict[Any, int], int]:
    """Read one node."""
    # Its use or None, memory read and memory its use keeps (address and bytes), bytes of its gradient.
    use = node.metadata.get(METADATA_KEY)
    kept = _storages(_inputs_of(use), constant)
    arriving = _bytes_of(_torch.outputs_of(node))
    return use, _storages(_torch.saved_tensors(node), constant) | kept, kept, arriving


def passing_of(nodes: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the bytes of gradients that are alive before and while each operation of a backward runs."""
    # Those that it takes and makes, what it needs beside that (`workspace` of a function of ours), and those that wait
    # for later operations: of a residual connection the gradient that goes around.
    gradients, found = _Gradients(), []
    for node in nodes:
        before = gradients.take(node)
        made = gradients.make(node)
        found.append((before, before + made + int(getattr(node, "workspace", 0))))
        gradients.drop(node)
    return found


class _Gradients:
    """Memory of the gradients on their way through a backward; several nodes may share it."""

    def __init__(self) -> None:
        self._at: dict[tuple[Any, int], int] = {}
        self._sizes: list[int] = []
        self._holders: Counter[int] = Counter()
        self._own: list[int] = []
        self._alive = 0

    def take(self, node: Any) -> int:
        """Add arriving gradients; return the bytes of all that are alive."""
        places = [(node, number) for number in range(len(_torch.outputs_of(node)))]
        self._own = [self._at.pop(place) for place in places if place in self._at]
        if not self._own:
            self._own = [self._hold(self._new(_bytes_of(_torch.outputs_of(node))))]
        return self._alive

    def make(self, node: Any) -> int:
        """Add gradients that an operation makes; return their new bytes, not counted as alive before."""
        before, made = self._alive, 0
        own = self._own[0]
        passes_on = node.name().removesuffix("Backward0").removesuffix("Backward") in _VIEWS
        for following, number in node.next_functions:
            if following is None:
                continue
            size = _bytes_of([_torch.outputs_of(following)[number]])
            if _torch.leaf_of(following) is not None:
                made += 0 if passes_on else size
                continue
            same = passes_on and size == self._sizes[own]
            other = self._at.get((following, number))
            if other is None:
                self._at[following, number] = self._hold(own if same else self._new(size))
                continue
            # What comes is added in place where nobody else holds what is there.
            made += 0 if same else size
            if self._holders[other] > 1 or not self._sizes[other]:
                self._at[following, number] = self._hold(self._new(size))
                self._release(other)
        return made + self._alive - before

    def drop(self, node: Any) -> None:
        """Remove gradients that arrived; what a use keeps of them is counted as the use's."""
        use = node.metadata.get(METADATA_KEY)
        for storage in self._own:
            # A use of a matrix or a kernel may store the gradient of its output as it arrives.
            if use is not None and any(tracked.origin.value.dim() > 1 for tracked in use.targets.values()):
                self._alive -= self._sizes[storage]
                self._sizes[storage] = 0
            self._release(storage)

    def _new(self, size: int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1

    def _hold(self, storage: int) -> int:
        self._alive += 0 if self._holders[storage] else self._sizes[storage]
        self._holders[storage] += 1
        return storage

    def _release(self, storage: int) -> None:
        self._holders[storage] -= 1
        self._alive -= 0 if self._holders[storage] else self._sizes[storage]


def nodes_in_order(start: Any) -> list[Any]:
    """Return a node and those behind it in the engine's order, the latest operation first, without leaves."""
    nodes = [node for node in nodes_behind([start]) if _torch.leaf_of(node) is None]
    return sorted(nodes, key=lambda node: -_torch.order_of(node))


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of tensors' memory."""
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


def _bytes_of(metadata: Iterable[Any]) -> int:
    return sum(prod(item.shape) * item.dtype.itemsize for item in metadata if item.shape is not None)


def parameter_bytes(use: ParamUse, names: Iterable[str]) -> int:
    """Return the bytes of some parameters' gradients."""
    leaves = {name: leaf for tracked in use.targets.values() for name, leaf in tracked.origin.leaves.items()}
    parameters = [leaves[name].parameter for name in names]
    return sum(int(parameter.numel() * parameter.element_size()) for parameter in parameters)
