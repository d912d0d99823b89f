"""Adaptive clipping in two passes, under Opacus's import path.

The bound is adapted by the private optimizer in every strategy, from a count that is part of the step's release; the
criterion is the same as without.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PrivacyEngineAdaptiveClipping"]


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Load the engine, which stands above this package, at its first use.

    Args:
        name: The attribute asked of the package.

    Returns:
        The class.

    Raises:
        AttributeError: If there is nothing of that name.
        NotOfferedError: If the name is refused.
    """
    if name != "PrivacyEngineAdaptiveClipping":
        from ghostclip._refused import refusing

        refusing(__name__)(name)
    from importlib import import_module

    return import_module("ghostclip.adaptive_engine").PrivacyEngineAdaptiveClipping
