"""Opacus's tree of names: change ``import opacus`` to ``import ghostclip.compat.opacus as opacus``.

What is offered does what Opacus's does, or something else for a stated reason; what is not offered says why where it is
imported. New code needs none of this: `ghostclip` has the same engine under its own names. The modules are made from
the table in `surface`; `training`, `loading` and `functions` hold what is more than another name.
"""

from __future__ import annotations

import sys
from typing import Any

from ghostclip import PrivacyEngine, __version__
from ghostclip.compat.opacus import surface
from ghostclip.compat.opacus.training import GradSampleModuleFastGradientClipping
from ghostclip.facade import GradSampleModule

__all__ = ["GradSampleModule", "GradSampleModuleFastGradientClipping", "PrivacyEngine", "__version__"]

sys.meta_path.append(surface.SurfaceFinder())


def __getattr__(name: str) -> Any:
    return surface.missing(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *surface.submodules("")})
