"""A model that ``fully_shard`` or tensor parallelism divides is trained as one process trains it."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.distributed import sharded, tensor
from tests.distributed.spawned import assert_as_one_process, found_by_ranks
from tests.process_group import asked

pytestmark = pytest.mark.distributed


def _others(of):
    return {name: training for name, training in of.TRAININGS.items() if name not in of.QUICK}


# Each is run by processes of its own: their number, and what they train.
GROUPS = {
    "sharded": (2, {name: sharded.TRAININGS[name] for name in sharded.QUICK}),
    "sharded, others": (2, _others(sharded)),
    "sharded on four": (4, sharded.ON_FOUR),
    "tensor": (2, {name: tensor.TRAININGS[name] for name in tensor.QUICK}),
    "tensor, others": (2, _others(tensor)),
    "tensor on four": (4, tensor.ON_FOUR),
    "tensor on eight": (8, tensor.ON_EIGHT),
}
QUICK = ("sharded", "tensor")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What the ranks of a group found, which start when they are asked for, and train what this session compares."""

    def run(group):
        find = sharded.find if group.startswith("sharded") else tensor.find
        ranks, trainings = GROUPS[group][0], tuple(asked(request, "name", group=group))
        return found_by_ranks(find, ranks, tmp_path_factory.mktemp("ranks"), ranks, trainings)

    return functools.cache(run)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("group", "name"),
    [
        pytest.param(group, name, marks=() if group in QUICK else pytest.mark.slow)
        for group, (_, trainings) in GROUPS.items()
        for name in trainings
    ],
)
def test_ranks_train_as_one_process(found, group, name):
    assert_as_one_process(found(group), name, GROUPS[group][1][name])


@pytest.mark.parametrize("size", tensor.BATCHES)
@pytest.mark.parametrize("group", ["tensor", pytest.param("tensor on four", marks=pytest.mark.slow)])
def test_losses_of_divided_classes_are_proved_however_many_samples_there_are(found, group, size):
    """Norms are those of one process; samples that meet by a factor of zero are refused on every rank."""
    for rank in found(group):
        torch.testing.assert_close(rank["norms"][size], tensor.norms(size), rtol=1e-12, atol=1e-12)
        assert not rank["mixed"][size]
