"""Two processes: one record, on whichever rank it is, moves the sum of both by at most C, and shards share no noise."""

from __future__ import annotations

import math

import pytest
import torch

from tests.audit.ranks import run
from tests.audit.subject import BOUND, adversarial_records
from tests.process_group import start_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
RANKS = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the ranks released."""
    folder = tmp_path_factory.mktemp("ranks")
    start_ranks(run, RANKS, str(folder))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


def test_one_record_moves_the_sum_of_all_ranks_by_at_most_c(found):
    for name in adversarial_records():
        first, second = (rank[name] - rank["usual"] for rank in found)
        assert torch.equal(first, second), f"{name}: the ranks differ"
        moved = first.norm().item() / BOUND
        assert moved <= 1 + 1e-5, f"{name}: {moved:.6g} C"
    assert (found[0]["ordinary"] - found[0]["usual"]).norm() > 0.9 * BOUND


def test_shards_of_two_ranks_are_independent_though_seeds_are_equal(found):
    first, second = (rank["shard"] for rank in found)
    assert first.numel() == second.numel() == 4000
    assert abs((first * second).sum().item()) / math.sqrt(4000) < 6
    for shard in (first, second):
        assert abs(shard.square().mean().item() - 1) < 6 * math.sqrt(2 / 4000)
