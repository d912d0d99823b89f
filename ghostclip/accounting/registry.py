"""Accountants by name."""

from __future__ import annotations

from ghostclip._validate import did_you_mean
from ghostclip.accounting.accountant import Accountant
from ghostclip.accounting.best import BestAccountant
from ghostclip.accounting.gdp import GaussianAccountant
from ghostclip.accounting.google import DPAccountingAccountant
from ghostclip.accounting.interface import IAccountant
from ghostclip.accounting.pld import PLDAccountant, PRVAccountant
from ghostclip.accounting.rdp import RDPAccountant
from ghostclip.errors import InvalidOptionError

DEFAULT_ACCOUNTANT = BestAccountant.mechanism()

_ACCOUNTANTS: dict[str, type[IAccountant]] = {
    accountant.mechanism(): accountant
    for accountant in (BestAccountant, RDPAccountant, PLDAccountant, PRVAccountant, DPAccountingAccountant)
}
_NOT_OFFERED = {
    GaussianAccountant.mechanism(): "it is a central-limit estimate that can lie far below the true ε, so it is "
    "refused as a guarantee; to compare, use ghostclip.accounting.GaussianAccountant(estimate=True)",
}


def register_accountant(mechanism: str, accountant: type[IAccountant], *, force: bool = False) -> None:
    """Register an accountant class under a name, for `create_accountant` and `PrivacyEngine(accountant=...)`.

    Args:
        mechanism: The name.
        accountant: The class, with Opacus's four methods (`IAccountant`).
        force: Whether to replace an accountant of that name.

    Raises:
        InvalidOptionError: If the name is taken and `force` is False.
    """
    # The class is built with the option `relation` only, and without any if it is no `Accountant`.
    if mechanism in _ACCOUNTANTS and not force:
        raise InvalidOptionError(f"accountant {mechanism!r} is registered already; pass force=True to replace it.")
    _ACCOUNTANTS[mechanism] = accountant


def accountant_names() -> list[str]:
    """Return the names that `create_accountant` knows, the default first."""
    return sorted(_ACCOUNTANTS, key=lambda name: (name != DEFAULT_ACCOUNTANT, name))


def create_accountant(mechanism: str = DEFAULT_ACCOUNTANT, *, relation: str = "zero_out") -> IAccountant:
    """Return a new accountant with an empty history.

    Args:
        mechanism: Its name: "best", "pld", "prv", "rdp", "dp_accounting", or one that was registered.
        relation: Which data sets count as neighbours: "zero_out", "add_remove" or "replace_one".

    Returns:
        The accountant.

    Raises:
        InvalidOptionError: If there is no accountant of that name.
    """
    # A registered class that is no `Accountant` is not told the relation.
    if mechanism in _ACCOUNTANTS:
        kind = _ACCOUNTANTS[mechanism]
        return kind(relation=relation) if issubclass(kind, Accountant) else kind()
    known = ", ".join(repr(name) for name in accountant_names())
    meant = "." if mechanism in _NOT_OFFERED else did_you_mean(mechanism, _ACCOUNTANTS, otherwise=".")
    reason = f" ({_NOT_OFFERED[mechanism]})" if mechanism in _NOT_OFFERED else ""
    raise InvalidOptionError(f"accountant={mechanism!r} is not available{reason}; choose from: {known}{meant}")


def bounding_accountant(mechanism: str = DEFAULT_ACCOUNTANT, *, relation: str = "zero_out") -> Accountant:
    """Return a new accountant that bounds ε and δ of any history; refuse one that only knows ε of recorded steps."""
    made = create_accountant(mechanism, relation=relation)
    if not isinstance(made, Accountant):
        raise InvalidOptionError(
            f"accountant={mechanism!r} ({type(made).__name__}): says ε of the steps it was told of and has no "
            "epsilon_bounds. Derive it from ghostclip.accounting.Accountant, or set engine.accountant to one."
        )
    return made
