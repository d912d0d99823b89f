"""A model under tensor parallelism is trained as one process trains it: norms, sums and noise."""

from __future__ import annotations

import pytest
import torch
from torch import multiprocessing

from tests.distributed.sharded import train
from tests.distributed.tensor import ON_EIGHT, ON_FOUR, QUICK, TRAININGS, run

pytestmark = pytest.mark.distributed


def _trained(ranks, folder, names):
    multiprocessing.spawn(run, args=(ranks, str(folder), names), nprocs=ranks)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]


OTHERS = tuple(name for name in TRAININGS if name not in QUICK)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return _trained(2, tmp_path_factory.mktemp("quick"), QUICK)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return _trained(2, tmp_path_factory.mktemp("others"), OTHERS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_train_as_one_process(quick, name):
    _compare(quick, name, TRAININGS[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_two_ranks_train_as_one_process_however_the_model_is_divided(others, name):
    _compare(others, name, TRAININGS[name])


@pytest.fixture(scope="module")
def on_four(tmp_path_factory):
    return _trained(4, tmp_path_factory.mktemp("four"), tuple(ON_FOUR))


@pytest.fixture(scope="module")
def on_eight(tmp_path_factory):
    return _trained(8, tmp_path_factory.mktemp("eight"), tuple(ON_EIGHT))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_train_as_one_process_on_a_mesh_of_two_axes(on_four, name):
    _compare(on_four, name, ON_FOUR[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ON_EIGHT)
def test_eight_ranks_train_as_one_process_on_a_mesh_of_three_axes(on_eight, name):
    _compare(on_eight, name, ON_EIGHT[name])


def _compare(found, name, training):
    first = found[0][name]
    alone = train(training, divided=False, states=first["states"])
    for rank in found:
        assert rank[name]["epsilon"] == alone["epsilon"]
        assert rank[name]["wide"]
        assert rank[name]["in parts"]
        for one, own in zip(alone["parameters"], rank[name]["parameters"], strict=True):
            torch.testing.assert_close(own, one, rtol=training.rtol, atol=training.rtol)
