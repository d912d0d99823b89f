"""Costs of releases as ledgers, budgets and checkpoints carry them: entries of an accountant's history, of any kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, cast

from ghostclip.accounting import Accountant, bounding_accountant
from ghostclip.accounting.history import Entry, Kind, OtherEntry, SamplingEvent, checked_others

Charge = Entry | OtherEntry
"""(σ, q, number of equal events), or (kind, parameters, number) for what is not a Poisson sample."""


@lru_cache(maxsize=64)
def cost_of(event: SamplingEvent, *, noise_multiplier: float, count: int = 1) -> Charge:
    """Return the charge of ``count`` events with noise multiplier σ, in units of one record's sensitivity."""
    keeper = bounding_accountant(relation=event.relation)
    keeper.record(event, noise_multiplier=noise_multiplier, count=count)
    return charges_of(keeper)[0]


def charges_of(accountant: Accountant) -> list[Charge]:
    """Return everything that an accountant has recorded, Poisson steps first."""
    accountant.check()
    return [cast("Charge", tuple(entry)) for entry in (*accountant.history, *accountant.others)]


def kind_of(charge: Charge) -> Kind:
    """Return a charge without its number, equal for equal charges."""
    return cast("Kind", (charge[0], charge[1]))


def times(kind: Kind, count: int) -> Charge:
    """Return ``count`` equal charges as one."""
    return cast("Charge", (*kind, count))


def joined(charges: Iterable[Charge]) -> list[Charge]:
    """Return charges in order, consecutive equal ones as one."""
    runs: list[Charge] = []
    for charge in charges:
        same = bool(runs) and kind_of(runs[-1]) == kind_of(charge)
        runs.append(times(kind_of(charge), charge[2] + runs.pop()[2]) if same else charge)
    return runs


def counted(charges: Iterable[Charge]) -> dict[Kind, int]:
    """Return the number of charges of each kind."""
    counts: dict[Kind, int] = {}
    for charge in charges:
        counts[kind_of(charge)] = counts.get(kind_of(charge), 0) + charge[2]
    return counts


def lacking(charges: Iterable[Charge], held: Iterable[Charge]) -> list[Charge]:
    """Return the charges that are missing among others, one for each kind."""
    there = counted(held)
    missing = {kind: count - there.get(kind, 0) for kind, count in counted(charges).items()}
    return [times(kind, count) for kind, count in missing.items() if count > 0]


def replace_charges(accountant: Accountant, charges: Sequence[Charge]) -> None:
    """Replace all that an accountant has recorded by charges, in their order."""
    accountant.history = [charge for charge in charges if not isinstance(charge[0], str)]
    accountant.others = [charge for charge in charges if isinstance(charge[0], str)]


def add_charges(accountant: Accountant, charges: Sequence[Charge]) -> None:
    for charge in charges:
        if isinstance(charge[0], str):
            last = accountant.others[-1:]
            accountant.others[-1:] = cast("list[OtherEntry]", joined([*last, charge]))
            continue
        sigma, rate, steps = charge
        for _ in range(steps):
            accountant.step(noise_multiplier=sigma, sample_rate=rate)


def accountant_of(accountant: Accountant, charges: Sequence[Charge]) -> Accountant:
    """Return a new accountant of the same kind and relation with these charges only."""
    other = bounding_accountant(accountant.mechanism(), relation=accountant.relation)
    replace_charges(other, charges)
    return other


def checked_charge(values: Sequence[Any]) -> Charge:
    """Return a charge that was read from a file as three plain values."""
    if isinstance(values[0], str):
        return checked_others([values], where="ledger")[0]
    sigma, rate, count = values
    return float(sigma), float(rate), int(count)
