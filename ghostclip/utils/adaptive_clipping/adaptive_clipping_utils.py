"""The names of the package one level deeper, where Opacus defines them."""

from __future__ import annotations

from typing import Any

from ghostclip.utils import adaptive_clipping


def __getattr__(name: str) -> Any:
    """Load a name of the package.

    Args:
        name: The attribute asked of the module.

    Returns:
        What the package has of that name.
    """
    return getattr(adaptive_clipping, name)
