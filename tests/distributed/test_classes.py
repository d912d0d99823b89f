"""Logits whose classes lie on several ranks are proved as whole ones are, however many samples there are."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.classes import BATCHES, find, norms
from tests.distributed.spawned import found_by_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request, tmp_path_factory):
    """What ranks found, in their order; four have parts of several sizes."""
    return found_by_ranks(find, request.param, tmp_path_factory.mktemp("classes"), request.param)


@pytest.mark.parametrize("size", BATCHES)
def test_norms_are_those_of_one_process_however_many_samples_there_are(found, size):
    for rank in found:
        torch.testing.assert_close(rank["norms"][size], norms(size), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", BATCHES)
def test_samples_that_meet_by_a_factor_of_zero_are_refused_on_every_rank(found, size):
    assert not any(rank["mixed"][size] for rank in found)
