"""In-place operations among parameters and constants: ``w = zeros(n, n); w[index] = p``, ``w = 2 * p; w += 1``.

A constant that a parameter is written into becomes a tensor derived from that parameter. What was computed from the
old value before must not see the new one, and what shares the memory must; where either cannot be told, it is refused.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.tracked import Operation, Origin, TrackedTensor, become, replace_tracked
from ghostclip.errors import UnsupportedModelError

# They change the form of the tensor object itself.
_RESHAPING = {"unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "resize_", "resize_as_", "set_"}


def write(operation: Operation, buffers: Iterable[Tensor]) -> Any:
    """Run an in-place operation without per-sample data; its first argument is tracked from now on."""
    # `buffers` outlive the forward. Refused where tensors that are not tracked would see the change.
    changed = operation.args[0]
    if operation.name in _RESHAPING or not isinstance(changed, Tensor) or not changed.is_floating_point():
        raise UnsupportedModelError(_refusal(operation))
    if isinstance(changed, TrackedTensor):
        graph = changed.origin.graph
        if graph.is_leaf:
            raise UnsupportedModelError(_refusal(operation))
    else:
        outlives = any(changed is buffer for buffer in buffers)
        if outlives or changed.requires_grad or _torch.is_view(changed) or _torch.shares_memory(changed):
            raise UnsupportedModelError(_refusal(operation))
        graph = changed.detach().clone()
    arguments = replace_tracked(operation.args[1:], lambda tracked: tracked.origin.graph)
    keywords = replace_tracked(operation.kwargs, lambda tracked: tracked.origin.graph)
    with torch.enable_grad():
        result = operation.func(graph, *arguments, **keywords)
    leaves = {name: leaf for tracked in operation.tracked for name, leaf in tracked.origin.leaves.items()}
    interceptor = operation.tracked[0].origin.interceptor
    if isinstance(changed, TrackedTensor):
        # The same object, so that whoever took a view of it finds that it was changed since.
        changed.origin.leaves.update(leaves)
        changed.origin.parent, changed.origin.func = None, operation.name
    else:
        become(changed, Origin(interceptor, graph, graph.detach(), leaves, None, operation.name))
    return None if result is None else changed


def _refusal(operation: Operation) -> str:
    names = ", ".join(dict.fromkeys(name for tracked in operation.tracked for name in tracked.origin.names))
    return (
        f"parameter '{names}' takes part in an in-place {operation.name.strip('_')} on a view or buffer, on memory "
        "that other tensors share, or together with per-sample data, so that it cannot be followed. Write it out of "
        "place (torch.cat, torch.stack, index_put, w = w * x), or freeze the parameter."
    )


def refuse_data(operation: Operation) -> None:
    """Refuse to write per-sample data into what was computed from parameters alone."""
    if operation.is_in_place and isinstance(operation.args[0], TrackedTensor):
        raise UnsupportedModelError(_refusal(operation))
