"""Every row of the table of loops is exact, or refused before its first release."""

from __future__ import annotations

import pytest

from tests.loops.loop import Loop
from tests.loops.table import LOOPS, outcome_of, shortfall

# They start processes, half a minute each; CI runs three of their kind, `make test-slow` all.
FURTHER_OF_TWO_RANKS = {
    "accelerator prepares first",
    "accelerator prepares the private loader",
    "ddp second",
    "two ranks",
    "two ranks shuffled",
}


def _parameters():
    for loop in LOOPS:
        marks = [pytest.mark.integration] if loop.hosts else []
        marks += [pytest.mark.distributed] if loop.ranks > 1 else []
        marks += [pytest.mark.slow] if loop.slow or loop.name in FURTHER_OF_TWO_RANKS else []
        yield pytest.param(loop, id=loop.name.replace(" ", "_"), marks=marks)


@pytest.mark.parametrize("loop", list(_parameters()))
# What host libraries warn of, and how they leave their files and processes, is theirs.
@pytest.mark.filterwarnings("ignore")
def test_a_loop_is_exact_or_refused(loop: Loop):
    for host in loop.hosts:
        pytest.importorskip(host)
    outcome = outcome_of(loop)
    assert not shortfall(loop, outcome), f"{loop.about}\n{shortfall(loop, outcome)}\n{outcome.where}"


def test_names_are_names():
    names = [loop.name for loop in LOOPS]
    assert len(set(names)) == len(names)
    assert all(loop.about for loop in LOOPS)
    assert set(names) >= FURTHER_OF_TWO_RANKS
