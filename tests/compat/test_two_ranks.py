"""Opacus's distributed names on two processes: one clipped sum, one draw of noise, records shared out."""

from __future__ import annotations

import pytest
import torch

from tests.compat.pairs import clipped_sum, small_model
from tests.compat.ranks import BOUND, WRAPPERS, run
from tests.process_group import start_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:noise_multiplier=0")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    start_ranks(run, 2, str(folder))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("wrapper", [wrapper.__name__ for wrapper in WRAPPERS])
def test_step_is_that_of_one_process(found, wrapper):
    before = torch.cat([p.detach().flatten() for p in small_model().parameters()])
    for rank in found:
        after = torch.cat([p.flatten() for p in rank[wrapper][0]])
        torch.testing.assert_close(6 * (before - after), clipped_sum(BOUND))


@pytest.mark.parametrize("wrapper", [wrapper.__name__ for wrapper in WRAPPERS])
def test_noise_is_added_once(found, wrapper):
    for first, second in zip(*(rank[wrapper][1] for rank in found), strict=True):
        assert torch.equal(first, second)


def test_records_are_shared_out(found):
    first, second = (rank["batches"] for rank in found)
    assert len(first) == len(second) == 4
    assert all(not set(one) & set(two) for one, two in zip(first, second, strict=True))
    assert sum(map(len, first + second)) > 0
