"""Training on several ranks."""

from collections.abc import Callable
from typing import Any

from ghostclip.errors import GhostClipError


def said_by(attempt: Callable[[], Any]) -> str:
    """Return class and text of what a try is refused with, empty where it goes through."""
    try:
        attempt()
    except GhostClipError as error:
        return f"{type(error).__name__}: {error}"
    return ""
