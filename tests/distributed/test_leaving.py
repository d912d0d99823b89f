"""A rank that an error of the user's own ends says why, and the others raise that long before their timeout."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.leaving import CASES, TIMEOUT, UNSEEN, goes_on, run
from tests.process_group import start_ranks

pytestmark = pytest.mark.distributed
OWN = "the user's own error"


def _found(folder, case, *, recovers, ranks=2):
    start_ranks(run, ranks, str(folder), case, recovers)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks) if (folder / f"rank{rank}.pt").exists()]


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] if name != CASES[0] else []) for name in CASES]
)
def test_what_one_rank_raises_the_others_raise(tmp_path, case):
    other, own = _found(tmp_path, case, recovers=False)
    assert own[:2] == ("ValueError", OWN)
    assert other[:2] == ("InvalidOptionError", f"rank 1 was refused, and no rank goes on without it: {OWN}")
    assert max(own[2], other[2]) < TIMEOUT / 4


@pytest.mark.slow
def test_a_rank_that_waited_in_vain_is_not_the_reason(tmp_path):
    """Nobody hears of an error in the loop itself; then no rank says that another one which only waited was refused."""
    *others, own = _found(tmp_path, UNSEEN, recovers=False, ranks=3)
    assert own[:2] == ("ValueError", OWN)
    assert len(others) == 2
    assert all("was refused" not in said and "gloo" in said for _, said, _ in others)


@pytest.mark.slow
def test_an_error_that_was_overcome_is_not_the_reason(tmp_path):
    """The second rank ends in the same step without a word: what the first one says is torch's own message."""
    (other,) = _found(tmp_path, "forward", recovers=True)
    assert other[0] != "InvalidOptionError"
    assert OWN not in other[1]


@pytest.mark.slow
def test_a_rank_that_left_a_release_meets_the_others_no_more(tmp_path):
    """A loop that catches everything would else send its next batch where the others wait for its sum."""
    start_ranks(goes_on, 2, str(tmp_path))
    (other, others, releases), (own, owns, same) = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert releases == same == 1
    assert all(map(torch.equal, others, owns))
    assert own[0] == OWN
    assert other[0].endswith(f"no rank goes on without it: {OWN}")
    assert all("cannot meet them again" in said for said in own[1:] + other[1:])
