"""Groups of parameters that share a norm and a bound: the whole model, each parameter alone, or named by the user."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Protocol

from ghostclip.errors import InvalidOptionError

_NAMES_SHOWN = 5


class Grouping(Protocol):
    """Puts every trainable parameter into one clip group."""

    @property
    def name(self) -> str:
        """Name of the grouping in a checkpoint."""

    def assign(self, names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Return the group of every parameter.

        Args:
            names: Names of the trainable parameters, in the model's order.

        Returns:
            ({parameter name: number of its group}, names of the groups in the order of their numbers).
        """

    def describe(self) -> dict[str, list[str]]:
        """Return what the user gave, in plain values."""


class Whole:
    """One norm over all parameters."""

    name = "whole"

    def assign(self, names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Return one group.

        Args:
            names: Names of the trainable parameters.

        Returns:
            Nothing to look up, and one name.
        """
        del names
        return {}, ("all",)

    def describe(self) -> dict[str, list[str]]:
        """Return nothing: there is no choice."""
        return {}


class PerParameter:
    """A norm for every parameter tensor; a parameter that several layers share is one."""

    name = "per_layer"

    def assign(self, names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Return a group for each parameter.

        Args:
            names: Names of the trainable parameters.

        Returns:
            Numbers in the model's order, and the names themselves.
        """
        return {name: number for number, name in enumerate(names)}, tuple(names)

    def describe(self) -> dict[str, list[str]]:
        """Return nothing: there is no choice."""
        return {}


class NamedGroups:
    """Groups that a user names, each by patterns of parameter names.

    Args:
        patterns: {group: shell patterns such as "encoder.*", or full names}.

    Raises:
        InvalidOptionError: If there is no group, or one without a pattern.
    """

    name = "per_group"

    def __init__(self, patterns: Mapping[str, Sequence[str]]) -> None:
        self._patterns = {
            group: [listed] if isinstance(listed, str) else list(listed) for group, listed in patterns.items()
        }
        empty = [group for group, listed in self._patterns.items() if not listed]
        if empty or not self._patterns:
            raise InvalidOptionError(f"groups={patterns!r}: name at least one group, and a pattern for each.")

    def assign(self, names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Return the one group that each parameter belongs to.

        Args:
            names: Names of the trainable parameters.

        Returns:
            Numbers in the order that the groups were given in, and the groups' names.

        Raises:
            InvalidOptionError: If a parameter belongs to no group or to several.
        """
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
        """Return the patterns."""
        return {group: list(listed) for group, listed in self._patterns.items()}
