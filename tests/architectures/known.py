"""The whole table: every family's rows, and which of them every run checks."""

import importlib
from collections import defaultdict
from typing import Final

from tests.architectures.table import Architecture

_FAMILIES: Final = (
    "decoders",
    "recurrent",
    "encoders",
    "vision",
    "detection",
    "audio",
    "vision_language",
    "time_series",
    "convolutional",
    "adapters",
    "pairs",
)
ALL: list[Architecture] = [
    row for module in _FAMILIES for row in importlib.import_module(f"tests.architectures.{module}").ARCHITECTURES
]
_QUICK_OF_A_FAMILY: Final = 7
assert len({row.name for row in ALL}) == len(ALL), "two architectures share a name"


def quick() -> set[str]:
    """Return the names of the rows that every run checks: the first of each family; the slow run checks all."""
    by_family: dict[str, list[str]] = defaultdict(list)
    for row in ALL:
        by_family[row.family].append(row.name)
    return {name for names in by_family.values() for name in names[:_QUICK_OF_A_FAMILY]}


def first_of_families() -> set[str]:
    """Return one name for each family: those that every strategy is compared on."""
    return set({row.family: row.name for row in reversed(ALL)}.values())
