"""A model under tensor parallelism is trained as one process trains it: norms, sums and noise."""

from __future__ import annotations

import pytest

from tests.distributed.spawned import assert_as_one_process, found_by_ranks
from tests.distributed.tensor import ON_EIGHT, ON_FOUR, QUICK, TRAININGS, find

pytestmark = pytest.mark.distributed


OTHERS = tuple(name for name in TRAININGS if name not in QUICK)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return found_by_ranks(find, 2, tmp_path_factory.mktemp("quick"), 2, QUICK)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return found_by_ranks(find, 2, tmp_path_factory.mktemp("others"), 2, OTHERS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_train_as_one_process(quick, name):
    assert_as_one_process(quick, name, TRAININGS[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_two_ranks_train_as_one_process_however_the_model_is_divided(others, name):
    assert_as_one_process(others, name, TRAININGS[name])


@pytest.fixture(scope="module")
def on_four(tmp_path_factory):
    return found_by_ranks(find, 4, tmp_path_factory.mktemp("four"), 4, tuple(ON_FOUR))


@pytest.fixture(scope="module")
def on_eight(tmp_path_factory):
    return found_by_ranks(find, 8, tmp_path_factory.mktemp("eight"), 8, tuple(ON_EIGHT))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_train_as_one_process_on_a_mesh_of_two_axes(on_four, name):
    assert_as_one_process(on_four, name, ON_FOUR[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ON_EIGHT)
def test_eight_ranks_train_as_one_process_on_a_mesh_of_three_axes(on_eight, name):
    assert_as_one_process(on_eight, name, ON_EIGHT[name])
