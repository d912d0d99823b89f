"""Versions of other libraries that the integrations were tested with, and what is said once beside another one."""

from __future__ import annotations

import logging
import warnings
from functools import lru_cache
from importlib import metadata
from typing import Final

_log = logging.getLogger(__name__)

TESTED: Final[dict[str, tuple[str, str]]] = {
    "accelerate": ("1.15", "1.15"),
    "lightning": ("2.6", "2.6"),
    "peft": ("0.21", "0.21"),
    "pytorch-lightning": ("2.6", "2.6"),
    "timm": ("1.0", "1.0"),
    "transformers": ("5.23", "5.23"),
    "trl": ("1.16", "1.16"),
}
"""First and last tested version of each distribution, as far as they are compared: later figures do not count."""


@lru_cache
def warn_if_untested(distribution: str) -> None:
    """Warn, once in a process, of a library that is older than what was tested; note a newer one at level DEBUG.

    Args:
        distribution: Name of the distribution, as in `TESTED`.
    """
    first, last = TESTED[distribution]
    installed = metadata.version(distribution)
    figures = _figures(installed)
    older = figures[: len(_figures(first))] < _figures(first)
    if not older and figures[: len(_figures(last))] <= _figures(last):
        return
    tested = first if first == last else f"{first} to {last}"
    said = (
        f"{distribution} {installed} is installed; this integration was tested with {distribution} {tested}. What a "
        "version does differently is mostly refused, and may be missing in logs or checkpoints: compare a short run."
    )
    if older:
        warnings.warn(said, stacklevel=3)
    else:
        _log.debug(said)


def _figures(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (1, 15, 0) for "1.15.0rc1"."""
    found = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
        if digits != part:
            break
    return tuple(found)
