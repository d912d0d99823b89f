"""A divided model asks no more of the other ranks than without privacy, and holds no more; its noise is one draw."""

from __future__ import annotations

import pytest
import torch

from ghostclip.noise import make_noise_source
from ghostclip.noise.keyed import add_noise_
from tests.distributed.sharded_measures import SHAPES, STD, find
from tests.distributed.spawned import assert_parts_of_one_draw, found_by_ranks

pytestmark = pytest.mark.distributed
RANKS = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the ranks found, in the order of the ranks."""
    return found_by_ranks(find, RANKS, tmp_path_factory.mktemp("measures"))


@pytest.mark.parametrize("name", ["nested", "gpt2"])
def test_book_keeping_has_the_collectives_of_a_training_without_privacy(found, name):
    for rank in found:
        counts = rank["collectives"][name]
        assert sum(counts["plain"].values()) > 2
        assert counts["bookkeeping"] == counts["plain"]


def test_two_passes_gather_once_more_and_ask_twice(found):
    for rank in found:
        counts = rank["collectives"]["nested"]
        assert sum(counts["ghost"].values()) <= 2 * sum(counts["plain"].values()) + 4


def test_a_rank_holds_no_more_than_without_privacy(found):
    for rank in found:
        assert rank["memory"]["bookkeeping"] <= 1.05 * rank["memory"]["plain"]


def test_one_sample_moves_the_sum_over_all_ranks_by_the_bound_at_most(found):
    for rank in found:
        assert max(rank["moves"]) <= 1 + 1e-6
        assert max(rank["moves"]) > 0.99


@pytest.mark.parametrize("level", ["fast", "secure"])
def test_parts_of_the_noise_are_those_of_one_draw_to_the_bit(found, level):
    assert_parts_of_one_draw(found, level, SHAPES, STD)


def test_sums_of_small_parameters_are_reduced_together(found):
    first = found[0]["copies"]
    source = make_noise_source()
    source.load_state_dict(first["state"])
    expected = [torch.full(total.shape, 1.0) for total in first["sums"]]
    expected[4] = torch.full((40, 30), 1.0).mT
    add_noise_(source, expected, STD)
    for rank in found:
        assert rank["copies"]["counts"] == {"c10d::allreduce_": 1}
        for one, own in zip(expected, rank["copies"]["sums"], strict=True):
            assert torch.equal(one + 2.0, own)


REFUSED = {
    "mixes": "the output of one sample depends on other samples",
    "raises": "",
    "sigma": "mechanism (σ, C, clipping) of rank 1 is",
    "later": "adds noise of",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_one_rank_refuses_no_rank_goes_on_with(found, what):
    for rank in found:
        assert rank["refused"][what]
        assert REFUSED[what] in rank["refused"][what]
