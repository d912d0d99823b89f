"""ghostclip trains PyTorch models with differential privacy at close to the cost of ordinary training.

The public names are loaded when they are first used, so that `import ghostclip` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ghostclip.clipping.clipper import GhostClipper
    from ghostclip.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from ghostclip.privacy_engine import PrivacyEngine
    from ghostclip.rules import register_rule
    from ghostclip.sampling import DeclaredSampling
    from ghostclip.validation.validate import validate

__version__ = "0.1.0"

__all__ = [
    "DeclaredSampling",
    "GhostClipper",
    "GradSampleModule",
    "GradSampleModuleFastGradientClipping",
    "PrivacyEngine",
    "register_rule",
    "validate",
    "__version__",
]

_HOME_OF = {
    "DeclaredSampling": "ghostclip.sampling",
    "GhostClipper": "ghostclip.clipping.clipper",
    "GradSampleModule": "ghostclip.grad_sample",
    "GradSampleModuleFastGradientClipping": "ghostclip.grad_sample",
    "PrivacyEngine": "ghostclip.privacy_engine",
    "register_rule": "ghostclip.rules",
    "validate": "ghostclip.validation.validate",
}
_SUBMODULES = frozenset(
    {
        "accountants",
        "accounting",
        "audit",
        "clipping",
        "data_loader",
        "distributed",
        "errors",
        "grad_sample",
        "inspection",
        "layers",
        "legacy",
        "lightning",
        "losses",
        "noise",
        "optimizers",
        "privacy_engine",
        "rules",
        "sampling",
        "schedulers",
        "utils",
        "validation",
        "validators",
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
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__, *_SUBMODULES})
