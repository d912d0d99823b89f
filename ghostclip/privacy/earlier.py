"""What else trained a model: modules remember the accounts whose releases reached their parameters.

A notebook's cell that is run again makes a new engine for a model that another one has trained: its ε begins at 0,
while the model tells what all of them have released. A copy of a model remembers as well; a state that is loaded into
another model, and a model that was pickled, do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from ghostclip.privacy.charges import accountant_of, charges_of
from ghostclip.privacy.discretisation import released_bounds
from ghostclip.privacy.summary import rounded_up

if TYPE_CHECKING:
    from ghostclip.accounting import Accountant

_KEY: Final = "_ghostclip_released_by"


class Released:
    """The releases of one account, without the rest of an engine."""

    # the account's table itself
    # exchanged with the account's
    def __init__(self, accountant: Accountant, runs: dict[str, int]) -> None:
        self.accountant, self.runs = accountant, runs

    def holds(self, other: Released) -> bool:
        """Return whether this account continues another: it is the same, or was loaded or composed from it."""
        loaded = bool(other.runs) and all(self.runs.get(run, 0) >= count for run, count in other.runs.items())
        return other is self or other.accountant is self.accountant or loaded


class _Marks(list[Released]):
    """The accounts that have released into a module; of a copy the same ones, of a pickle none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Marks:
        return _Marks(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Marks, ()


def remember(model: nn.Module, released: Released) -> None:
    """Let the modules with trained parameters remember an account; called at its first release into a model."""
    for module in model.modules():
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            marks = vars(module).setdefault(_KEY, _Marks())
            if all(one is not released for one in marks):
                marks.append(released)


def earlier(model: nn.Module, released: Released) -> list[Released]:
    """Return the other accounts that have released into a model, or a part of it, that this one does not continue."""
    found = {id(one): one for module in model.modules() for one in vars(module).get(_KEY, ())}
    return [one for one in found.values() if not released.holds(one) and len(one.accountant)]


def warning_of(model: nn.Module, others: Sequence[Released], delta: float) -> str:
    """Return the text of a warning: a model was trained by other engines before."""
    spent = " and ".join(f"ε ≤ {_epsilon(one.accountant, delta)} in {len(one.accountant)} releases" for one in others)
    return (
        f"{type(model).__name__} was trained by another PrivacyEngine before ({spent}, at δ = {delta:g}). This "
        "engine's ε is of its own releases alone; for the same records all of them add up. To go on in one account, "
        "call make_private on the engine that trained the model, or set engine.accountant = earlier_engine.accountant "
        "before make_private. To begin anew, build the model anew."
    )


def texts_of(others: Iterable[Released], own: Released, delta: float) -> Iterator[str]:
    """Yield clauses for a summary on what other engines have released into the models."""
    for one in others:
        if own.holds(one):
            continue
        together = ""
        if one.accountant.relation == own.accountant.relation:
            joined = accountant_of(own.accountant, [*charges_of(one.accountant), *charges_of(own.accountant)])
            together = f", for the same records ε ≤ {_epsilon(joined, delta)} together"
        yield (
            f"beside it another engine trained this model, with ε ≤ {_epsilon(one.accountant, delta)} in "
            f"{len(one.accountant)} releases{together}"
        )


def _epsilon(accountant: Accountant, delta: float) -> str:
    return rounded_up(released_bounds(accountant, delta, coordinates=0).upper)
