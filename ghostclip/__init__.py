"""ghostclip trains PyTorch models with differential privacy at close to the cost of ordinary training.

The public names are loaded when they are first used, so that `import ghostclip` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ghostclip.accounting import get_noise_multiplier
    from ghostclip.clipper import GhostClipper
    from ghostclip.data import BatchMemoryManager, DeclaredSampling, DPDataLoader, PhysicalBatches
    from ghostclip.engine import PrivacyEngine
    from ghostclip.facade import GradSampleModule
    from ghostclip.graph import GraphOptions, GraphStep
    from ghostclip.optim import DPOptimizer
    from ghostclip.options import Options
    from ghostclip.rules import register_rule
    from ghostclip.validation.check import check, find_physical_batch
    from ghostclip.validation.fixers import ModuleValidator
    from ghostclip.validation.inspection import inspect_model
    from ghostclip.validation.validate import validate

__version__ = "0.1.0"

__all__ = [
    "BatchMemoryManager",
    "DPDataLoader",
    "DPOptimizer",
    "DeclaredSampling",
    "GhostClipper",
    "GradSampleModule",
    "GraphOptions",
    "GraphStep",
    "ModuleValidator",
    "Options",
    "PhysicalBatches",
    "PrivacyEngine",
    "check",
    "find_physical_batch",
    "get_noise_multiplier",
    "inspect_model",
    "register_rule",
    "validate",
    "__version__",
]

_HOME_OF = {
    "BatchMemoryManager": "ghostclip.data",
    "DPDataLoader": "ghostclip.data",
    "DPOptimizer": "ghostclip.optim",
    "DeclaredSampling": "ghostclip.data",
    "GhostClipper": "ghostclip.clipper",
    "GradSampleModule": "ghostclip.facade",
    "GraphOptions": "ghostclip.graph",
    "GraphStep": "ghostclip.graph",
    "ModuleValidator": "ghostclip.validation.fixers",
    "Options": "ghostclip.options",
    "PhysicalBatches": "ghostclip.data",
    "PrivacyEngine": "ghostclip.engine",
    "check": "ghostclip.validation.check",
    "find_physical_batch": "ghostclip.validation.check",
    "get_noise_multiplier": "ghostclip.accounting",
    "inspect_model": "ghostclip.validation.inspection",
    "register_rule": "ghostclip.rules",
    "validate": "ghostclip.validation.validate",
}
_SUBMODULES = frozenset(
    {
        "accounting",
        "audit",
        "clipping",
        "compat",
        "data",
        "distributed",
        "errors",
        "facade",
        "graph",
        "integrations",
        "kernels",
        "losses",
        "mechanisms",
        "noise",
        "optim",
        "privacy",
        "rules",
        "validation",
    }
)


def __getattr__(name: str) -> Any:
    """Load a public name, or a public submodule, at its first use.

    Args:
        name: The attribute asked of the package.

    Returns:
        The class or the module of that name.

    Raises:
        AttributeError: If the package has no such public name.
    """
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        from ghostclip._validate import did_you_mean

        meant = did_you_mean(name, __dir__())
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{meant}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not, and nothing else."""
    return sorted({*__all__, *_SUBMODULES})
