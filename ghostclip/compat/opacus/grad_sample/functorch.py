"""A module as a function of its parameters, which scripts for Opacus use with `torch.func`.

For their own per-sample gradients, that is: ghostclip's come from the clipper, in every mode.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from ghostclip.compat.opacus._refused import refusing
from ghostclip.facade.module import GradSampleModule

__getattr__ = refusing(__name__)


def make_functional(
    mod: nn.Module,
    disable_autograd_tracking: bool = False,  # noqa: FBT001, FBT002 - Opacus's signature
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """Return a module as a function of its parameters, and the parameters.

    Args:
        mod: The module, private or not; the function runs a copy without a clipper.
        disable_autograd_tracking: Detach the parameters that are returned.

    Returns:
        `function(parameters, *inputs)`, and the parameters in the order of `mod.named_parameters()`.

    Privacy:
        Gradients of the function are not clipped.
    """
    own = mod._module if isinstance(mod, GradSampleModule) else mod
    names = [name for name, _ in own.named_parameters()]
    stateless = copy.deepcopy(own)

    def function(parameters: Sequence[Tensor], *inputs: Any) -> Any:
        return functional_call(stateless, dict(zip(names, parameters, strict=True)), inputs)

    values = tuple(own.parameters())
    return function, tuple(value.detach() for value in values) if disable_autograd_tracking else values
