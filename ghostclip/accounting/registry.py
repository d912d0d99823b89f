"""Accountants by name."""

from __future__ import annotations

from ghostclip.accounting.accountant import Accountant
from ghostclip.accounting.rdp import RDPAccountant
from ghostclip.errors import InvalidOptionError

_ACCOUNTANTS: dict[str, type[Accountant]] = {RDPAccountant.mechanism(): RDPAccountant}
_NOT_OFFERED = {
    "prv": "its numerical error is not certified and it fails on a part of the usual settings",
    "gdp": "it is a central-limit estimate that can lie far below the true ε, so it guarantees nothing",
}


def register_accountant(mechanism: str, accountant: type[Accountant], *, force: bool = False) -> None:
    """Make an accountant available to `create_accountant`.

    Args:
        mechanism: Name to find it by.
        accountant: Class that is built without arguments.
        force: Replace an accountant of the same name.

    Raises:
        InvalidOptionError: If the name is taken and `force` is False.
    """
    if mechanism in _ACCOUNTANTS and not force:
        raise InvalidOptionError(f"accountant {mechanism!r} is registered already; pass force=True to replace it.")
    _ACCOUNTANTS[mechanism] = accountant


def create_accountant(mechanism: str) -> Accountant:
    """Return a new accountant with an empty ledger.

    Args:
        mechanism: Name, for example "rdp".

    Returns:
        The accountant.

    Raises:
        InvalidOptionError: If there is none of that name.
    """
    if mechanism in _ACCOUNTANTS:
        return _ACCOUNTANTS[mechanism]()
    known = ", ".join(repr(name) for name in sorted(_ACCOUNTANTS))
    reason = f" ({_NOT_OFFERED[mechanism]})" if mechanism in _NOT_OFFERED else ""
    raise InvalidOptionError(f"accountant={mechanism!r} is not available{reason}; choose from: {known}.")
