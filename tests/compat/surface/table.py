"""Every public name of Opacus in one table: the same, different and why, or refused and why."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from tests.compat.surface.compare import difference
from tests.compat.surface.reasons import Reason, reason_for
from tests.compat.surface.walk import Name, public_names


class Row(NamedTuple):
    """One name of the surface."""

    path: str
    kind: str
    status: str
    """"same", "differs", "refused", or "unaccounted": none of the reasons fits."""
    form: str
    """What differs in form."""
    reason: Reason | None


def rows(package: ModuleType) -> list[Row]:
    """Compare every public name of a package with ours.

    Args:
        package: Opacus.

    Returns:
        The rows, in the order of the walk.
    """
    return [_row(name) for name in public_names(package)]


def _row(name: Name) -> Row:
    if name.problem:
        reason = reason_for(name.path, refused=False)
        return Row(name.path, name.kind, "differs" if reason else "unaccounted", name.problem, reason)
    form = difference(name)
    if form == "":
        return Row(name.path, name.kind, "same", "", None)
    reason = reason_for(name.path, refused=form is None)
    status = "unaccounted" if reason is None else "refused" if form is None else "differs"
    return Row(name.path, name.kind, status, form or "", reason)
