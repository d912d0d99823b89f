"""Modules that run on their own parts of parameters: what the tensor parallelism of transformers makes of a layer.

Its styles take the place of a module's ``forward``. Most give the layer DTensors, as torch's do. Those of experts and
of layers that are packed side by side run it on plain local tensors, and bring the results together afterwards; one
lets every rank's part of a gradient be added up after the backward, for norms of single heads.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from ghostclip import _torch
from ghostclip.errors import UnsupportedModelError

_GRADIENTS_ADD_UP: Final = "ReplicatedWithGradAllReduce"
# They route tokens to experts of other ranks: whose tokens those are, nothing tells.
_EXCHANGE_TOKENS: Final = frozenset({"EpDispatchExpertsParallel"})


def own_ways(model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    """Return names of parameters used as plain local parts, and of those whole on all ranks with partial gradients."""
    # The modules of the former bring the results together themselves. Refuses a module that sends tokens to experts of
    # other ranks.
    brought_together: set[str] = set()
    spread: set[str] = set()
    for path, module in model.named_modules():
        forward: Any = vars(module).get("forward")
        names = {f"{path}.{key}" if path else key: p for key, p in module.named_parameters(recurse=False)}
        style = _closed_over(forward, "self")
        if type(style).__name__ in _EXCHANGE_TOKENS:
            raise UnsupportedModelError(
                f"{path} ({type(module).__name__}): expert parallelism sends tokens to experts of other ranks, where "
                "nothing tells whose they are. Load the model with tp_plan='auto' alone, which divides every expert."
            )
        if getattr(forward, "__qualname__", "").startswith(_GRADIENTS_ADD_UP):
            spread.update(names)
        elif hasattr(style, "should_use_local_tensors") and _runs_on_parts(style, module):
            brought_together.update(name for name, p in names.items() if _torch.is_sharded_tensor(p))
    return frozenset(brought_together), frozenset(spread)


def _closed_over(function: Any, name: str) -> Any:
    """Return the value of a name in a nested function's closure, or None."""
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents


def _runs_on_parts(style: Any, module: nn.Module) -> bool:
    with torch.enable_grad():
        return bool(style.should_use_local_tensors(module))
