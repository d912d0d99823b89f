"""Whole loops on neighbouring data: sensitivity however batches are made and left, control flow without the record."""

from __future__ import annotations

import math

import pytest
import torch

from tests.audit.loops import LOOPS, run
from tests.audit.subject import BOUND

ADVERSARIES = {
    "ordinary": torch.tensor([1.5, -1.5, 1.5, 1.5]),
    "huge": torch.tensor([1e4, -1e4, 1e4, 1e4]),
    "NaN": torch.full((4,), math.nan),
    "infinite": torch.full((4,), math.inf),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_record_moves_every_release_by_at_most_c(loop):
    without = run(loop, None)
    assert len(without.releases) == {"left early": 9, "left in the middle": 10}.get(loop, 12)
    for name, record in ADVERSARIES.items():
        if loop == "workers" and name in {"huge", "infinite"}:
            continue  # starting processes takes most of the time, and what they load is the same
        with_it = run(loop, record)
        assert len(with_it.releases) == len(without.releases)
        moved = [(a - b).norm().item() / BOUND for a, b in zip(with_it.releases, without.releases, strict=True)]
        assert max(moved) <= 1 + 1e-5, f"{name}: {max(moved):.6g} C"
        taken_part = sum(distance > 0 for distance in moved)
        assert taken_part < len(moved), f"{name}: it moved steps it was not part of"
        assert taken_part > 0 or name in {"NaN", "infinite"}, f"{name}: it is part of no step, so nothing was tested"


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
@pytest.mark.parametrize("name", ADVERSARIES)
def test_what_can_be_seen_from_outside_does_not_depend_on_a_record(name, strategy):
    """Batches, noise draws, the account, the generators, warnings and log lines are those of the neighbour."""
    without = run("physical batches", None, sigma=1.0, strategy=strategy)
    with_it = run("physical batches", ADVERSARIES[name], sigma=1.0, strategy=strategy)
    assert with_it.sizes == without.sizes
    assert with_it.draws == without.draws
    assert with_it.draws
    assert with_it.account == without.account
    assert with_it.spoken == without.spoken
    assert torch.equal(with_it.generators, without.generators)


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
def test_the_operations_are_those_of_the_neighbour(strategy):
    """For an ordinary record, down to every tensor operation and its shapes."""
    without = run("plain", -ADVERSARIES["ordinary"], sigma=1.0, strategy=strategy)
    with_it = run("plain", ADVERSARIES["ordinary"], sigma=1.0, strategy=strategy)
    assert len(with_it.operations) > 500
    assert with_it.operations == without.operations
