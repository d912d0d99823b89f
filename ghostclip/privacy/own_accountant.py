"""An accountant that the user puts in the place of the engine's."""

from __future__ import annotations

from collections.abc import Sequence

from ghostclip.accounting import Accountant, IAccountant
from ghostclip.errors import InvalidOptionError
from ghostclip.privacy.charges import Charge, charges_of

_METHODS = ("step", "get_epsilon", "__len__", "mechanism")


def refuse_unfit(accountant: IAccountant) -> None:
    """Refuse an accountant without Opacus's four methods, or with steps already."""
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


def refuse_untold(own: IAccountant | None, charges: Sequence[Charge]) -> None:
    """Refuse charges that an accountant with four methods cannot represent."""
    strange = [charge[0] for charge in charges if isinstance(charge[0], str)]
    if own is not None and strange:
        raise InvalidOptionError(
            f"accountant {type(own).__name__}: step() takes Poisson samples, not releases of kind "
            f"{strange[0]!r}. Leave the engine its own, or derive yours from ghostclip.accounting.Accountant."
        )


def tell(own: IAccountant | None, charges: Sequence[Charge]) -> None:
    """Record releases in an accountant with four methods, if there is one."""
    if own is None:
        return
    for first, second, count in charges:
        for _ in range(count):
            own.step(noise_multiplier=first, sample_rate=second)  # type: ignore[arg-type]  # refused where it is no σ


def continue_own(own: IAccountant | None, accountant: Accountant) -> None:
    """Replace the history of an accountant with four methods by that of a loaded account."""
    if own is None:
        return
    held = charges_of(accountant)
    refuse_untold(own, held)
    if len(own) == 0:
        tell(own, held)
    else:
        own.load_state_dict({"history": accountant.history, "mechanism": own.mechanism()})
