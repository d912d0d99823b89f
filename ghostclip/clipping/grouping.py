"""Groups of parameters that share a norm and a bound: the whole model, each parameter alone, or named by the user."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Protocol

from ghostclip.errors import InvalidOptionError

_NAMES_SHOWN = 5


class Grouping(Protocol):
    """Assignment of every trainable parameter to one clip group."""

    @property
    def name(self) -> str:
        """Name of the grouping in a checkpoint."""

    def assign(self, names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Return ({parameter name: number of its group}, names of the groups in the order of their numbers)."""

    def describe(self) -> dict[str, list[str]]:
        """Return the user's choice in plain values."""


class Whole:
    """One norm over all parameters."""

    name = "whole"

    def assign(self, names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        del names
        return {}, ("all",)

    def describe(self) -> dict[str, list[str]]:
        return {}


class PerParameter:
    """A norm for every parameter tensor; a parameter that several layers share is one."""

    name = "per_layer"

    def assign(self, names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        return {name: number for number, name in enumerate(names)}, tuple(names)

    def describe(self) -> dict[str, list[str]]:
        return {}


class NamedGroups:
    """Groups that a user names, by shell patterns such as "encoder.*", or full names."""

    name = "per_group"

    def __init__(self, patterns: Mapping[str, Sequence[str]]) -> None:
        self._patterns = {
            group: [listed] if isinstance(listed, str) else list(listed) for group, listed in patterns.items()
        }
        empty = [group for group, listed in self._patterns.items() if not listed]
        if empty or not self._patterns:
            raise InvalidOptionError(f"groups={patterns!r}: name at least one group, and a pattern for each.")

    def assign(self, names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Return the groups, in the user's order; refuse a parameter that belongs to no group or to several."""
        found = {name: self._groups_of(name) for name in names}
        wrong = [f"{name} ({', '.join(groups) or 'none'})" for name, groups in found.items() if len(groups) != 1]
        if wrong:
            more = f" and {len(wrong) - _NAMES_SHOWN} more" if len(wrong) > _NAMES_SHOWN else ""
            raise InvalidOptionError(
                f"groups: every trainable parameter belongs to exactly one group; not so: "
                f"{', '.join(wrong[:_NAMES_SHOWN])}{more}. Add a pattern such as '*' for the rest, or freeze them."
            )
        order = list(self._patterns)
        return {name: order.index(groups[0]) for name, groups in found.items()}, tuple(order)

    def _groups_of(self, name: str) -> list[str]:
        """Return the groups with a pattern that the name matches; full names count before patterns."""
        exact = [group for group, listed in self._patterns.items() if name in listed]
        if exact:
            return exact
        return [
            group for group, listed in self._patterns.items() if any(fnmatchcase(name, pattern) for pattern in listed)
        ]

    def describe(self) -> dict[str, list[str]]:
        return {group: list(listed) for group, listed in self._patterns.items()}
