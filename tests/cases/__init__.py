"""The one shared table of cases: every engine, strategy and kernel is compared over it.

A new layer or usage is one row in the file of its family; a new family is a file with a list `CASES`. `ALL_CASES`
gathers them; `by_name` finds one.
"""

import importlib
import pkgutil

from tests.cases.table import Case

__all__ = ["ALL_CASES", "CORE_CASES", "Case", "by_name"]

_MODULES = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]

ALL_CASES: list[Case] = [case for module in _MODULES for case in getattr(module, "CASES", ())]
CORE_CASES: list[Case] = [case for case in ALL_CASES if "core" in case.tags]
_BY_NAME = {case.name: case for case in ALL_CASES}
assert len(_BY_NAME) == len(ALL_CASES), "two cases share a name"


def by_name(name: str) -> Case:
    """Return the case called `name`."""
    return _BY_NAME[name]
