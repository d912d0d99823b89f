"""Opacus's tree of names: change ``import opacus`` to ``import ghostclip.compat.opacus as opacus``.

What is offered does what Opacus's does, or something else for a stated reason; what is not offered says why where it is
imported. New code needs none of this: `ghostclip` has the same engine under its own names.
"""

from __future__ import annotations

import importlib
from typing import Any

from ghostclip import PrivacyEngine, __version__
from ghostclip.compat.opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping

__all__ = ["GradSampleModule", "GradSampleModuleFastGradientClipping", "PrivacyEngine", "__version__"]

_SUBMODULES = frozenset(
    {
        "accountants",
        "data_loader",
        "distributed",
        "grad_sample",
        "layers",
        "lightning",
        "optimizers",
        "privacy_engine",
        "schedulers",
        "scripts",
        "utils",
        "validators",
    }
)


def __getattr__(name: str) -> Any:
    """Load a submodule at its first use.

    Args:
        name: The attribute asked of the package.

    Returns:
        The module of that name.

    Raises:
        AttributeError: If the package has no such name.
    """
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names and submodules, loaded or not."""
    return sorted({*globals(), *__all__, *_SUBMODULES})
