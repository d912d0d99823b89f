"""A divided model asks no more of the other ranks than without privacy, and holds no more; its bound holds."""

from __future__ import annotations

import pytest

from tests.distributed.sharded_measures import find
from tests.distributed.spawned import found_by_ranks

pytestmark = pytest.mark.distributed
RANKS = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the ranks found, in the order of the ranks."""
    return found_by_ranks(find, RANKS, tmp_path_factory.mktemp("measures"))


def test_book_keeping_has_the_collectives_of_a_training_without_privacy(found):
    for rank in found:
        counts = rank["collectives"]
        assert sum(counts["plain"].values()) > 2
        assert counts["bookkeeping"] == counts["plain"]


def test_a_rank_holds_no_more_than_without_privacy(found):
    for rank in found:
        assert rank["memory"]["bookkeeping"] <= 1.05 * rank["memory"]["plain"]


def test_one_sample_moves_the_sum_over_all_ranks_by_the_bound_at_most(found):
    for rank in found:
        assert max(rank["moves"]) <= 1 + 1e-6
        assert max(rank["moves"]) > 0.99
