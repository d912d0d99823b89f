"""Mechanisms under DistributedDataParallel: the noise of one process on all ranks, also where it is correlated."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.mechanisms import BATCH, MECHANISMS, RECORDS, alone, find
from tests.distributed.spawned import found_by_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mechanisms")
    return found_by_ranks(find, 2, folder, str(folder), meshes=False)


@pytest.mark.parametrize("name", MECHANISMS)
def test_two_ranks_release_what_one_process_does(found, name):
    one, two = (rank[name] for rank in found)
    assert torch.equal(one["released"], two["released"])
    wanted = alone(name, one["states"])
    torch.testing.assert_close(one["released"], wanted["released"], rtol=1e-10, atol=1e-12)
    assert one["epsilon"] == two["epsilon"] == wanted["epsilon"]


@pytest.mark.parametrize("name", MECHANISMS)
def test_two_ranks_go_on_to_the_bit_where_they_were_saved(found, name):
    for rank in found:
        whole, resumed = rank[name]["released"], rank[name]["resumed"]
        assert torch.equal(resumed, whole[len(whole) - len(resumed) :])
        assert rank[name]["resumed epsilon"] == rank[name]["epsilon"]


@pytest.mark.parametrize(("name", "buffers"), [("banded inverse", 0), ("buffered", 2)])
def test_each_rank_holds_its_share_of_the_buffers(found, name, buffers):
    mechanism = MECHANISMS[name]
    assert mechanism.correlation(mechanism.scheme(RECORDS, BATCH)).buffers == buffers
    parameters = found[0][name]["released"].shape[1]
    held = [rank[name]["held"] for rank in found]
    assert sum(held) == buffers * parameters
    assert max(held) < 0.7 * buffers * parameters or not buffers
