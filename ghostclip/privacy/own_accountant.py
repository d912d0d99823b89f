"""An accountant that the user puts in the place of the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ghostclip.accounting import Accountant, IAccountant, bounding_accountant
from ghostclip.errors import InvalidOptionError
from ghostclip.privacy.charges import Charge, charges_of, replace_charges

if TYPE_CHECKING:
    from ghostclip.privacy.account import Account

_METHODS = ("step", "get_epsilon", "__len__", "mechanism")


def install(account: Account, accountant: IAccountant) -> None:
    """Let an account be kept by an accountant of the user's.

    One that bounds any history keeps the account itself. One that only has Opacus's four methods is told of every
    release beside the engine's own, which stays what budgets and checkpoints go by.

    Privacy:
        Nothing that was released is forgotten: what the account holds is carried over, what the accountant holds counts
        too. What an accountant with four methods says is the user's claim; `engine.epsilon_bounds` is proved.

    Args:
        account: The account.
        accountant: The accountant.

    Raises:
        InvalidOptionError: If it is no accountant, gives no guarantee, or holds what cannot be added to the account.
    """
    if isinstance(accountant, Accountant):
        _keep_with(account, accountant)
        account.own = None
        return
    missing = [name for name in _METHODS if not callable(getattr(accountant, name, None))]
    if missing:
        raise InvalidOptionError(
            f"accountant {type(accountant).__name__}: has no {', '.join(missing)}. Derive it from "
            "ghostclip.accounting.IAccountant."
        )
    if len(accountant) > 0:
        raise InvalidOptionError(
            f"accountant {type(accountant).__name__}: holds {len(accountant)} steps that this engine's account does "
            "not. Set one without steps; it is told of those that were released."
        )
    held = charges_of(account.accountant)
    refuse_untold(accountant, held)
    tell(accountant, held)
    account.own = accountant


def _keep_with(account: Account, accountant: Accountant) -> None:
    """Put an accountant that bounds histories in the place of the account's."""
    before = account.accountant
    if accountant is before:
        return
    bounding_accountant(accountant.mechanism())
    held, brought, was_fresh = charges_of(before), charges_of(accountant), account.fresh
    if brought and account.ledger is not None:
        raise InvalidOptionError(
            f"accountant with {len(accountant)} steps: the engine's ledger does not hold them. Set one without steps."
        )
    if accountant.relation != before.relation:
        if held and brought:
            raise InvalidOptionError(
                f"accountant with relation={accountant.relation!r}: the account holds steps under {before.relation!r}, "
                "and the two do not add up."
            )
        if brought:
            account.require_relation(accountant.relation)
        accountant.relation = before.relation
    replace_charges(accountant, [*brought, *held])
    account.replace(accountant, fresh=was_fresh)


def refuse_untold(own: IAccountant | None, charges: Sequence[Charge]) -> None:
    """Refuse charges that an accountant with four methods has no word for.

    Args:
        own: The accountant, or None.
        charges: What is about to be released.

    Raises:
        InvalidOptionError: If there are such charges.
    """
    strange = [charge[0] for charge in charges if isinstance(charge[0], str)]
    if own is not None and strange:
        raise InvalidOptionError(
            f"accountant {type(own).__name__}: step() takes Poisson samples, not releases of kind "
            f"{strange[0]!r}. Leave the engine its own, or derive yours from ghostclip.accounting.Accountant."
        )


def tell(own: IAccountant | None, charges: Sequence[Charge]) -> None:
    """Tell an accountant with four methods of releases.

    Args:
        own: The accountant, or None.
        charges: What was released.
    """
    if own is None:
        return
    for first, second, count in charges:
        for _ in range(count):
            own.step(noise_multiplier=first, sample_rate=second)  # type: ignore[arg-type]  # refused where it is no σ


def continue_own(account: Account) -> None:
    """Let an accountant with four methods hold what a loaded account holds.

    Args:
        account: The account.

    Raises:
        InvalidOptionError: If it holds other steps and cannot load.
    """
    own = account.own
    if own is None:
        return
    held = charges_of(account.accountant)
    refuse_untold(own, held)
    if len(own) == 0:
        tell(own, held)
    else:
        own.load_state_dict({"history": account.accountant.history, "mechanism": own.mechanism()})
