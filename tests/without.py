"""pytest plugin (`-p tests.without`): packages named in WITHOUT, comma-separated, are not found by any import."""

from __future__ import annotations

import os
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_NAMES = frozenset(os.environ.get("WITHOUT", "").split(","))
_find = PathFinder.find_spec


def _find_others(cls: type, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
    return None if name.partition(".")[0] in _NAMES else _find(name, path, target)


# The one finder of installed packages: an import ends as where they are missing, and find_spec gives None.
PathFinder.find_spec = classmethod(_find_others)
