"""The one shared table of cases: every engine, strategy and kernel is compared over it.

A new layer or usage is one row in the file of its family. `ALL_CASES` gathers them; `by_name` finds one.
"""

from tests.cases import (
    attention,
    calls,
    convs,
    custom_operations,
    custom_vision,
    embedding,
    inplace,
    linear,
    norms,
    sharing,
    transformers_models,
)
from tests.cases.table import Case

__all__ = ["ALL_CASES", "CORE_CASES", "Case", "by_name"]

_FAMILIES = (
    linear,
    embedding,
    norms,
    convs,
    custom_vision,
    custom_operations,
    sharing,
    inplace,
    calls,
    attention,
    transformers_models,
)

ALL_CASES: list[Case] = [case for family in _FAMILIES for case in family.CASES]
CORE_CASES: list[Case] = [case for case in ALL_CASES if "core" in case.tags]
_BY_NAME = {case.name: case for case in ALL_CASES}
assert len(_BY_NAME) == len(ALL_CASES), "two cases share a name"


def by_name(name: str) -> Case:
    """Return the case called `name`."""
    return _BY_NAME[name]
