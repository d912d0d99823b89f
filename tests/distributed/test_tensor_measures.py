"""Under tensor parallelism norms and sums are those of one process, one exchange completes them, the bound holds."""

from __future__ import annotations

import re

import pytest
import torch

from tests.distributed.spawned import found_by_ranks
from tests.distributed.tensor_measures import MOVED, by_layer, find

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
RANKS = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the ranks found, in the order of the ranks."""
    return found_by_ranks(find, RANKS, tmp_path_factory.mktemp("measures"))


@pytest.mark.filterwarnings("ignore")
def test_norms_of_each_layer_are_those_of_one_process(found):
    alone = by_layer(divided=False)
    for rank in found:
        torch.testing.assert_close(rank["by layer"]["norms"], alone["norms"], rtol=1e-12, atol=1e-12)
        for one, own in zip(alone["sums"], rank["by layer"]["sums"], strict=True):
            torch.testing.assert_close(own, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MOVED)
def test_one_sample_moves_the_sum_by_the_bound_at_most(found, name):
    for rank in found:
        assert max(rank["moves"][name]) <= 1 + 1e-6
        assert max(rank["moves"][name]) > 0.99


REFUSED = {
    "other_inputs": "InvalidOptionError: .*different inputs",
    "other_dropout": "UnsupportedModelError: .*their gradients differ",
    "divided_features": "UnsupportedModelError: .*'middle.factor'.*their gradients differ",
    "transposed": "UnsupportedModelError: .*'table.weight'",
    "divided_samples": "UnsupportedModelError: .*divided along axis 0, where samples lie",
    "own_tensors": "UnsupportedModelError: .*'weight'.*meets plain tensors in linear",
    "mixes": "SampleMixingError: the output of one sample depends on other samples",
    "divided_outputs": "UnsupportedModelError: Sequential returns a DTensor placed as .*0",
    "sharded_afterwards": "UnsupportedModelError: .*divided by fully_shard after the clipper was attached",
    "parts of losses": r"LossReductionError: the loss is a DTensor of shape \(4,\), placed as P",
    "a scalar on the mesh": r"LossReductionError: the loss is a DTensor of shape \(\), placed as R.*to_local",
    "a plain backward": r"LossReductionError: the loss is a DTensor of shape \(\), placed as R.*clipper.backward",
    "a scalar off the mesh": "LossReductionError: the loss is no sum over samples",
    "outside the context": r"LossReductionError: .*within loss_parallel\(\) alone",
    "off the mesh, outside": r"LossReductionError: .*within loss_parallel\(\) alone",
    "log-softmax alone": "LossReductionError: 'Select' takes a log_softmax",
    "log-softmax as well": "LossReductionError: 'Select' takes a log_softmax",
    "samples that meet": "SampleMixingError: the loss of one sample depends on other samples",
    "smoothed": "InvalidOptionError: token_losses: label_smoothing=0.1",
    "copies of sums": "InvalidOptionError: noise_source: adds up sums over other ranks",
    "noise of one rank": "InvalidOptionError: noise_source: this rank's own",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_exact_is_refused_on_every_rank(found, what):
    for rank in found:
        assert re.match(REFUSED[what], rank["refused"][what], re.DOTALL), rank["refused"][what]
