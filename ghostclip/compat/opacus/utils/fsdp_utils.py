"""Which modules of a model hold parameters; sharding them over devices is refused by name."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ghostclip.compat.opacus._refused import refusing
from ghostclip.compat.opacus.utils.module_utils import has_trainable_params

__all__ = ["has_params", "has_trainable_params", "iterate_submodules"]

__getattr__ = refusing(__name__)


def has_params(module: nn.Module) -> bool:
    """Say whether a module itself, not its children, owns a parameter.

    Args:
        module: The module.

    Returns:
        Whether it does.
    """
    return next(module.parameters(recurse=False), None) is not None


def iterate_submodules(module: nn.Module) -> Iterator[nn.Module]:
    """List the modules inside a module, itself included, that own parameters.

    Args:
        module: The module.

    Yields:
        The modules.
    """
    yield from filter(has_params, module.modules())
