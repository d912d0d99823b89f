"""Lightning's classes under whichever of its two names they were imported."""

from __future__ import annotations

import importlib
import sys
from functools import lru_cache
from typing import Any

from ghostclip.errors import InvalidOptionError, NotOfferedError
from ghostclip.integrations._versions import warn_if_untested

_LIBRARIES = ("lightning", "pytorch_lightning")
_PLACES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def base_of(datamodule: Any) -> type:
    """Return the `LightningDataModule` that a module derives from, of whichever library.

    Args:
        datamodule: What the user gave.

    Returns:
        The class.

    Raises:
        InvalidOptionError: If it is no data module.
    """
    for kind in type(datamodule).__mro__:
        if kind.__name__ == "LightningDataModule" and kind.__module__.partition(".")[0] in _LIBRARIES:
            return kind
    raise InvalidOptionError(
        f"datamodule {type(datamodule).__name__}: not a LightningDataModule. Give the one that the trainer would get, "
        "or make the loader private yourself (DPDataLoader.from_data_loader)."
    )


def callback_bases() -> tuple[type, ...]:
    """Return the `Callback` classes of the libraries that are in use, or of the one that is installed.

    Returns:
        One class, or two where a process uses both.

    Raises:
        NotOfferedError: If neither is installed.
    """
    used = [name for name in _LIBRARIES if _PLACES[name] in sys.modules] or list(_LIBRARIES)
    found: list[type] = []
    for name in used:
        try:
            found.append(importlib.import_module(_PLACES[name]).Callback)
        except ImportError:
            continue
        warn_if_untested(name.replace("_", "-"))
        if _PLACES[name] not in sys.modules:
            break
    if not found:
        raise NotOfferedError(
            "ghostclip.integrations.lightning: neither lightning nor pytorch_lightning is installed. Install one: "
            "pip install lightning."
        )
    return tuple(found)


@lru_cache
def joined(kind: Any, bases: tuple[type, ...]) -> type:
    """Return a class that derives from one of ours and from Lightning's.

    Args:
        kind: Ours.
        bases: Lightning's.

    Returns:
        The class, the same one for the same arguments; it is called as ours.
    """
    named = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind, *bases), named)
