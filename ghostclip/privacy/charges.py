"""Costs of releases as ledgers, budgets and checkpoints carry them: entries of an accountant's history, of any kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, cast

from ghostclip.accounting import Accountant, bounding_accountant
from ghostclip.accounting.events import SamplingEvent
from ghostclip.accounting.history import Entry, Kind, OtherEntry, checked_others

Charge = Entry | OtherEntry
"""(σ, q, number of equal events), or (kind, parameters, number) for what is not a Poisson sample."""


@lru_cache(maxsize=64)
def cost_of(event: SamplingEvent, *, noise_multiplier: float, count: int = 1) -> Charge:
    """Return what releases on a sample cost.

    Args:
        event: How units were selected.
        noise_multiplier: σ, in units of one record's sensitivity.
        count: How many such events.

    Returns:
        What an accountant records for them.
    """
    keeper = bounding_accountant(relation=event.relation)
    keeper.record(event, noise_multiplier=noise_multiplier, count=count)
    return charges_of(keeper)[0]


def charges_of(accountant: Accountant) -> list[Charge]:
    """Return everything that an accountant has recorded.

    Args:
        accountant: The accountant.

    Returns:
        Its entries, Poisson steps first.

    Raises:
        InvalidOptionError: If one of them is out of range.
    """
    accountant.check()
    return [cast("Charge", tuple(entry)) for entry in (*accountant.history, *accountant.others)]


def kind_of(charge: Charge) -> Kind:
    """Return a charge without its number.

    Args:
        charge: The charge.

    Returns:
        What makes two charges equal ones.
    """
    return cast("Kind", (charge[0], charge[1]))


def times(kind: Kind, count: int) -> Charge:
    """Return so many equal charges as one.

    Args:
        kind: Which.
        count: How many.

    Returns:
        The charge.
    """
    return cast("Charge", (*kind, count))


def joined(charges: Iterable[Charge]) -> list[Charge]:
    """Return charges with equal ones that follow each other as one.

    Args:
        charges: In their order.

    Returns:
        A new list.
    """
    runs: list[Charge] = []
    for charge in charges:
        same = bool(runs) and kind_of(runs[-1]) == kind_of(charge)
        runs.append(times(kind_of(charge), charge[2] + runs.pop()[2]) if same else charge)
    return runs


def counted(charges: Iterable[Charge]) -> dict[Kind, int]:
    """Return how many there are of each kind.

    Args:
        charges: In any order.

    Returns:
        Numbers by kind.
    """
    counts: dict[Kind, int] = {}
    for charge in charges:
        counts[kind_of(charge)] = counts.get(kind_of(charge), 0) + charge[2]
    return counts


def lacking(charges: Iterable[Charge], held: Iterable[Charge]) -> list[Charge]:
    """Return what of some charges others do not hold.

    Args:
        charges: What is wanted.
        held: What is there.

    Returns:
        One charge for each kind of which there are too few.
    """
    there = counted(held)
    missing = {kind: count - there.get(kind, 0) for kind, count in counted(charges).items()}
    return [times(kind, count) for kind, count in missing.items() if count > 0]


def replace_charges(accountant: Accountant, charges: Sequence[Charge]) -> None:
    """Let an accountant hold these charges and nothing else.

    Args:
        accountant: Forgets what it held.
        charges: In their order.
    """
    accountant.history = [charge for charge in charges if not isinstance(charge[0], str)]
    accountant.others = [charge for charge in charges if isinstance(charge[0], str)]


def add_charges(accountant: Accountant, charges: Sequence[Charge]) -> None:
    """Record charges.

    Args:
        accountant: Holds what was released before.
        charges: What is released now.
    """
    for charge in charges:
        if isinstance(charge[0], str):
            last = accountant.others[-1:]
            accountant.others[-1:] = cast("list[OtherEntry]", joined([*last, charge]))
            continue
        sigma, rate, steps = charge
        for _ in range(steps):
            accountant.step(noise_multiplier=sigma, sample_rate=rate)


def accountant_of(accountant: Accountant, charges: Sequence[Charge]) -> Accountant:
    """Return an accountant of the same kind and relation that holds these charges only.

    Args:
        accountant: Which kind.
        charges: What it holds.

    Returns:
        A new accountant.
    """
    other = bounding_accountant(accountant.mechanism(), relation=accountant.relation)
    replace_charges(other, charges)
    return other


def checked_charge(values: Sequence[Any]) -> Charge:
    """Return a charge that was read from a file.

    Args:
        values: Three plain values.

    Returns:
        The charge.

    Raises:
        InvalidOptionError: If it is of another form.
    """
    if isinstance(values[0], str):
        return checked_others([values], where="ledger")[0]
    sigma, rate, count = values
    return float(sigma), float(rate), int(count)
