"""Memory of single operations of a backward, and of what book-keeping stores of them: read off its graph.

A measurement of the allocator would differ from run to run, and a plan made of it with it; the graph is the same each
time.

Shape letters: T positions, I inputs, O outputs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.nodes import nodes_behind
from ghostclip.capture.param_use import ParamUse
from ghostclip.capture.row_origin import METADATA_KEY
from ghostclip.factors import convolution, planner
from ghostclip.factors.base import accumulation_dtype
from ghostclip.factors.convolution import CHUNK_ELEMENTS, CHUNK_ELEMENTS_ON_GPU
from ghostclip.kernels import products
from ghostclip.kernels.bounds import HALF

# Bytes by address.
Sizes = dict[Any, int]
# Operations whose input's gradient is the memory of their output's.
_VIEWS: Final = (
    "View", "UnsafeView", "Transpose", "T", "Permute", "Unsqueeze", "Squeeze", "Add", "Alias", "Reshape", "Expand",
    "Select", "Slice", "Unbind", "_Own", "_Enter", "_Source", "_Tie", "Clone",
)  # fmt: skip

# What reading or writing one element of 4 bytes costs, in FLOPs: products of layers run at this many for each.
_MOVED: Final = 64


def read_node(node: Any, constant: set[int]) -> tuple[ParamUse | None, Sizes, Sizes, int]:
    """Read one node."""
    # Its use or None, memory read and memory its use keeps (address and bytes), bytes of its gradient.
    use = node.metadata.get(METADATA_KEY)
    kept = storages(inputs_of(use), constant)
    arriving = _bytes_of(_torch.outputs_of(node))
    return use, storages(_torch.saved_tensors(node), constant) | kept, kept, arriving


@dataclass(eq=False)
class _Gradient:
    """Memory of a gradient on its way through a backward; several operations may wait for it."""

    size: int


def passing_of(nodes: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the bytes of gradients that are alive before and while each operation of a backward runs."""
    # Those that it takes and makes, what it needs beside that (`workspace` of a function of ours), and those that wait
    # for later operations: of a residual connection the gradient that goes around.
    waiting, found = dict[tuple[Any, int], _Gradient](), []
    for node in nodes:
        outputs = _torch.outputs_of(node)
        arrived = [waiting.pop((node, number)) for number in range(len(outputs)) if (node, number) in waiting]
        arrived = arrived or [_Gradient(_bytes_of(outputs))]
        before = _alive(waiting, arrived)
        added = _pass_on(node, waiting, arrived)
        found.append((before, _alive(waiting, arrived) + added + int(getattr(node, "workspace", 0))))
        use = node.metadata.get(METADATA_KEY)
        # A use of a matrix or a kernel may store the gradient of its output as it arrives: it is counted as the use's.
        if use is not None and any(tracked.origin.value.dim() > 1 for tracked in use.targets.values()):
            for gradient in arrived:
                gradient.size = 0
    return found


def _alive(waiting: dict[tuple[Any, int], _Gradient], arrived: Sequence[_Gradient]) -> int:
    return sum(gradient.size for gradient in {*waiting.values(), *arrived})


def _pass_on(node: Any, waiting: dict[tuple[Any, int], _Gradient], arrived: Sequence[_Gradient]) -> int:
    """Let the gradients that an operation makes wait; return the bytes of those that do not wait themselves."""
    added, is_view = 0, node.name().removesuffix("Backward0").removesuffix("Backward") in _VIEWS
    for following, number in node.next_functions:
        if following is None:
            continue
        size = _bytes_of([_torch.outputs_of(following)[number]])
        same = is_view and size == arrived[0].size
        if _torch.leaf_of(following) is not None:
            added += 0 if is_view else size
            continue
        there = waiting.get((following, number))
        if there is None:
            waiting[following, number] = arrived[0] if same else _Gradient(size)
            continue
        # What comes is added in place where nobody else holds what is there.
        added += 0 if same else size
        if not there.size or sum(gradient is there for gradient in (*waiting.values(), *arrived)) > 1:
            waiting[following, number] = _Gradient(size)
    return added


def nodes_in_order(start: Any) -> list[Any]:
    """Return a node and those behind it in the engine's order, the latest operation first, without leaves."""
    nodes = [node for node in nodes_behind([start]) if _torch.leaf_of(node) is None]
    return sorted(nodes, key=lambda node: -_torch.order_of(node))


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of tensors' memory."""
    return {_torch.local(tensor).untyped_storage().data_ptr() for tensor in tensors}


def inputs_of(use: ParamUse | None) -> Sequence[Tensor]:
    """Return the tensors that a use stores of its operation's input."""
    return () if use is None or use.node is None else use.node.saved_tensors


def storages(tensors: Iterable[Tensor], constant: set[int]) -> Sizes:
    """Return the bytes of tensors' memory by address, without what is at constant addresses."""
    found: Sizes = {}
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


class Shape(NamedTuple):
    """Sizes that decide on a layer's costs."""

    samples: int
    positions: int
    inputs: int
    outputs: int
    dtype: torch.dtype  # of its input and of its output's gradient
    device: torch.device

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the layer's per-sample gradients."""
        return self.samples * self.inputs * self.outputs * accumulation_dtype(self.dtype).itemsize

    @property
    def by_units(self) -> bool:
        """Whether its products run on matrix units."""
        return self.dtype in HALF and products.has_units(self.device)

    @property
    def moving(self) -> float:
        """Cost of reading or writing one byte of its tensors, in FLOPs of its products."""
        return planner.BYTE if self.by_units else _MOVED / 4


class UseMemory(NamedTuple):
    """What book-keeping stores of a use until the end, and what its forward costs."""

    gradient: int  # bytes besides its inputs: of its output's gradient, or of per-sample gradients
    with_inputs: bool  # whether its inputs are stored as well
    work: float = 0.0  # FLOPs of the product in its forward; 0 where it is no product
    matrix: tuple[str, Shape] | None = None  # parameter and sizes of a product with a matrix that is used once
    forming: int = 0  # temporary bytes of forming per-sample gradients, those of a convolution's windows
    widened: int = 0  # temporary bytes of what is stored in 16 bits, in 32


NOTHING: Final = UseMemory(0, with_inputs=False)


def memory_of(use: ParamUse, arriving: int, forward: ForwardContext) -> UseMemory:
    """Return what book-keeping stores of a use, for the bytes of its output's gradient."""
    found, kernel = _matrix_of(use, arriving, forward), _kernel_of(use)
    if found is not None:
        name, (samples, positions, inputs, outputs, dtype, _) = found
        by_rule = planner.keeps_per_sample(positions, inputs, outputs, dtype.itemsize)
        stored = (found[1].gradient_bytes, False) if by_rule else (arriving, True)
        once = found if forward.use_counts[name] == 1 else None
        return UseMemory(*stored, 2.0 * samples * positions * inputs * outputs, once)
    dense = _dense_bytes(use, forward)
    if kernel is None or not forward.batch_size:
        return UseMemory(dense or arriving, not dense)
    samples, size = forward.batch_size, kernel.element_size()
    positions = arriving // (samples * kernel.shape[0] * size)
    small = samples * kernel.numel() <= convolution.SMALL
    if not dense and (small or planner.keeps_per_sample(positions, kernel[0].numel(), kernel.shape[0], size)):
        dense = samples * kernel.numel() * max(4, size)
    forming = _windows(use, samples * positions * kernel[0].numel())
    return UseMemory(dense or arriving, not dense, 2.0 * samples * positions * kernel.numel(), forming=forming)


def _windows(use: ParamUse, unfolded: int) -> int:
    """Return the bytes of a convolution's windows, of so many elements, that are laid out at once."""
    if not inputs_of(use):
        return 0
    rows = inputs_of(use)[0]
    at_once = CHUNK_ELEMENTS if rows.device.type == "cpu" else CHUNK_ELEMENTS_ON_GPU
    laid_out = rows.numel() if rows.numel() <= at_once else 0
    return (laid_out + unfolded // max(1, -(-unfolded // at_once))) * accumulation_dtype(rows.dtype).itemsize


def _kernel_of(use: ParamUse) -> Tensor | None:
    """Return the kernel of a convolution; None for any other use."""
    kernels = [tracked.origin.value for tracked in use.targets.values() if tracked.origin.value.dim() > 2]
    return kernels[0] if len(kernels) == 1 else None


def _dense_bytes(use: ParamUse, forward: ForwardContext) -> int:
    """Return the bytes of per-sample gradients where all factors of a use are such; else 0."""
    if any(not form.startswith("dense") for form in use.site.forms.values()):
        return 0
    return sum(forward.batch_size * tracked.origin.value.numel() * 4 for tracked in use.targets.values())


def _matrix_of(use: ParamUse, arriving: int, forward: ForwardContext) -> tuple[str, Shape] | None:
    """Return the parameter and sizes of a use that is one product of a matrix with rows of samples."""
    if not inputs_of(use):
        return None
    rows = inputs_of(use)[0]
    for tracked in use.targets.values():
        weight = tracked.origin.value
        if tracked.origin.func or weight.dim() != 2 or rows.dim() < 2 or not rows.numel():
            continue
        inputs = rows.shape[-1]
        positions, rest = divmod(rows.numel() // inputs, max(1, forward.batch_size))
        outputs, other = divmod(weight.numel(), inputs)
        same = arriving == forward.batch_size * positions * outputs * rows.element_size()
        if rest or other or not same or inputs not in weight.shape:
            continue
        shape = Shape(forward.batch_size, positions, inputs, outputs, rows.dtype, rows.device)
        return tracked.origin.names[0], shape
    return None
