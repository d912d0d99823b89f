"""Adaptive clipping in two passes, under Opacus's import path.

The bound is adapted by the private optimizer in every strategy, from a count that is part of the step's release;
criteria and losses only say how.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ghostclip.utils.adaptive_clipping.losses import (
        DPLossFastGradientAdaptiveClipping,
        DPTensorFastGradientAdaptiveClipping,
    )

_HOME_OF = {
    "DPLossFastGradientAdaptiveClipping": "ghostclip.utils.adaptive_clipping.losses",
    "DPTensorFastGradientAdaptiveClipping": "ghostclip.utils.adaptive_clipping.losses",
    "PrivacyEngineAdaptiveClipping": "ghostclip.adaptive_engine",
}
__all__ = [
    "DPLossFastGradientAdaptiveClipping",
    "DPTensorFastGradientAdaptiveClipping",
    "PrivacyEngineAdaptiveClipping",
]


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Load the engine, which stands above this package, or a loss at its first use.

    Args:
        name: The attribute asked of the package.

    Returns:
        The class.

    Raises:
        AttributeError: If there is nothing of that name.
    """
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
