"""Slopes that are zero in one batch: what a loss multiplies by zero, or cuts off, may be multiplied by one in the next.

``logits - k * logits.mean(0)`` keeps samples apart while k is zero, as does a hinge between two samples that is not
active; the graph is the same before and after. To see what lies behind, gradients are followed from a loss to the
model's outputs twice: as they are, and with every operation that works entry by entry taken to have slope one, and
every one that picks entries to have picked any.
"""

import heapq
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.backward_entry import is_output
from ghostclip.capture.nodes import Edge, edge_of, shape_at
from ghostclip.capture.row_maps import RowMap, candidates
from ghostclip.evidence.loss_graph import above_outputs
from ghostclip.evidence.probe import Start, cotangent, touches_others

# More nodes than this between a loss and the outputs are not followed.
_MAX_NODES: Final = 512
# Operations that work entry by entry on operands that are spread over each other.
_ENTRYWISE: Final = frozenset(
    {
        "Abs", "Add", "Addcdiv", "Addcmul", "Atan2", "Celu", "Clamp", "ClampMax", "ClampMin", "Clone", "Cos", "Div",
        "Elu", "Erf", "Erfc", "Exp", "Exp2", "Expm1", "Fmax", "Fmin", "Gelu", "Hardshrink", "Hardsigmoid",
        "Hardswish", "Hardtanh", "HuberLoss", "LeakyRelu", "Lerp", "Log", "Log10", "Log1p", "Log2", "LogSigmoid",
        "Logaddexp", "Logaddexp2", "MaskedFill", "Maximum", "Minimum", "Mish", "MseLoss", "Mul", "NanToNum", "Neg",
        "Pow", "Reciprocal", "Relu", "Rsqrt", "Rsub", "Sigmoid", "Silu", "Sin", "SmoothL1Loss", "Softplus",
        "Softshrink", "Sqrt", "Sub", "Tanh", "Threshold", "ToCopy", "Where", "Xlogy",
    }
)  # fmt: skip
# Operations along an axis whose gradient goes to the picked entries alone.
_PICKING: Final = frozenset(
    {"Topk", "Sort", "Kthvalue", "Median", "Nanmedian", "Mode", "Max", "Min", "Cummax", "Cummin"}
)


def _is_steep(node: Any) -> bool:
    """Return whether a node's operation works entry by entry, or picks entries along an axis."""
    return _kind(node) in _ENTRYWISE or _picks(node)


def _picks(node: Any) -> bool:
    return _kind(node) in _PICKING and isinstance(_torch.saved_or(node, "dim", None), int)


def _kind(node: Any) -> str:
    return re.sub(r"Backward\d*$", "", node.name())


def separates_at_any_slope(begun: Sequence[Start], sets: Sequence[set[int]], *, batch_size: int, axis: int) -> bool:
    """Return whether gradients of some samples' values leave zeros in all others' outputs, whatever slopes are."""
    # True also where that cannot be told, and where they do not even with slopes as they are.
    if not any(_is_steep(node) for node, _ in above_outputs(edge_of(start.edge.source) for start in begun)):
        return True
    with torch.no_grad():
        return _is_separated(begun, sets, batch_size=batch_size, axis=axis)


def _is_separated(begun: Sequence[Start], sets: Sequence[set[int]], *, batch_size: int, axis: int) -> bool:
    maps = dict[Edge, list[RowMap]]()
    for steep in (False, True):
        for samples in sets:
            followed = _followed(begun, samples, batch_size=batch_size, steep=steep)
            for edge, grad in (followed or {}).items():
                rows = _with_whole_rows(grad, axis)
                known = maps.get(edge, _maps_of(rows, batch_size, axis=axis))
                left = _untouched(known, rows, samples, batch_size=batch_size)
                if steep and known and not left:
                    return False
                maps[edge] = known if steep else left
    return True


def _with_whole_rows(grad: Any, axis: int) -> Any:
    """Return a gradient of which every rank has all samples: parts are of classes, whatever torch has made of them."""
    if not _torch.is_sharded_tensor(grad):
        return grad
    from torch.distributed.tensor import Replicate

    whole = Replicate()
    return grad.redistribute(
        placements=[one if one.is_shard() and one.dim % grad.dim() != axis else whole for one in grad.placements]
    )


def _maps_of(grad: Any, batch_size: int, *, axis: int) -> list[RowMap]:
    """Return the row maps that sizes allow; along an axis of which ranks have parts there are classes, no samples."""
    placed = grad.placements if _torch.is_sharded_tensor(grad) else ()
    divided = {one.dim % grad.dim() for one in placed if one.is_shard()}
    known = candidates(tuple(grad.shape), batch_size, axis=axis)
    return [row_map for row_map in known if row_map.axis not in divided]


def _untouched(maps: Sequence[RowMap], grad: Any, samples: set[int], *, batch_size: int) -> list[RowMap]:
    """Return the row maps by which a gradient of some samples' values is zero in rows of others, on every rank."""
    # Each rank looks at its part alone: what would be gathered of a mesh is as large as all logits.
    part = _torch.part_of(grad)
    touched = [touches_others(one, part, part.dim(), samples, batch_size) for one in maps]
    if _torch.is_sharded_tensor(grad):
        touched = _on_any_rank(touched, grad.device_mesh, part.device)
    return [one for one, touches in zip(maps, touched, strict=True) if not touches]


def _on_any_rank(holds: Sequence[bool], mesh: Any, device: torch.device) -> list[bool]:
    """Return what holds on a rank of a mesh; called on all of them."""
    from torch.distributed.tensor import DTensor, Partial

    here = torch.tensor(holds, dtype=torch.int32, device=device)
    anywhere = DTensor.from_local(here, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()
    return [bool(flag) for flag in anywhere.tolist()]


def _followed(begun: Sequence[Start], samples: set[int], *, batch_size: int, steep: bool) -> dict[Edge, Tensor] | None:
    """Follow gradients of some samples' values to a model's outputs; None where there is too much on the way."""
    arrived, ends, numbers = defaultdict[Any, dict[int, Tensor]](dict), dict[Edge, Tensor](), count()
    pending = list[tuple[int, int, Any]]()

    def arrive(edge: Edge, grad: Tensor) -> None:
        node, output_nr = edge
        if node is None or node.name().endswith("AccumulateGrad"):
            return
        # As autograd's engine does between nodes.
        about = _torch.outputs_of(node)[output_nr]
        grad = grad.sum_to_size(about.shape).to(about.dtype)
        if is_output(edge):
            ends[edge] = ends[edge] + grad if edge in ends else grad
            return
        if node not in arrived:
            heapq.heappush(pending, (-_torch.order_of(node), next(numbers), node))
        before = arrived[node].get(output_nr)
        arrived[node][output_nr] = grad if before is None else before + grad

    for seed, start in enumerate(begun):
        arrive(
            edge_of(start.edge.source),
            cotangent(start, batch_size=batch_size, weights=dict.fromkeys(samples, 1.0), seed=seed),
        )
    for _ in range(_MAX_NODES):
        if not pending:
            return ends
        node = heapq.heappop(pending)[-1]
        for edge, grad in zip(node.next_functions, _behind(node, arrived.pop(node), steep=steep), strict=False):
            if grad is not None:
                arrive(edge, grad)
    return None


def _behind(node: Any, grads: dict[int, Tensor], *, steep: bool) -> Sequence[Tensor | None]:
    """Return the gradients of a node's inputs."""
    if steep and _is_steep(node) and 0 in grads and not _is_for_nothing(node):
        known = _of_any_pick(node, grads[0]) if _picks(node) else _at_slope_one(node, grads[0])
        if known is not None:
            return known
    input_grads = _torch.run_node(node, grads)
    return input_grads if isinstance(input_grads, tuple) else (input_grads,)


def _of_any_pick(node: Any, grad: Tensor) -> list[Tensor | None]:
    """Return the gradient of what entries were picked from, along an axis, as if all had been."""
    sizes = shape_at(node.next_functions[0]) or ()
    if not sizes:
        return [grad]
    axis = _torch.signed(_torch.saved(node, "dim")) % len(sizes)
    total = grad.abs() if grad.dim() < len(sizes) else grad.abs().sum(axis)
    return [total.unsqueeze(axis).expand(sizes)]


def _is_for_nothing(node: Any) -> bool:
    """Return whether a value is multiplied by 0 (not 0.0), which stands in code for a zero of its kind."""
    other = _torch.saved_or(node, "other", None)
    is_whole = isinstance(other, Tensor) and other.dim() == 0 and other.dtype is torch.int64
    return is_whole and "Mul" in node.name() and int(other) == 0


def _at_slope_one(node: Any, grad: Tensor) -> list[Tensor | None] | None:
    """Return the gradients of a node's inputs as if its slopes were one; None where shapes do not tell them."""
    input_grads = list[Tensor | None]()
    for edge in node.next_functions:
        sizes = None if edge[0] is None or edge[0].name().endswith("AccumulateGrad") else shape_at(edge)
        if sizes is None:
            input_grads.append(None)
            continue
        # A loss of each pair, say, with its own reduction.
        if grad.dim() == 0 and sizes:
            return None
        if torch.broadcast_shapes(sizes, grad.shape) != grad.shape:
            return None
        input_grads.append(grad.abs().sum_to_size(sizes))
    return input_grads
