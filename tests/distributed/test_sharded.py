"""A model that ``fully_shard`` has divided is trained as one process trains it: sums, norms and noise."""

from __future__ import annotations

import pytest

from tests.distributed.sharded import ON_FOUR, QUICK, TRAININGS, find
from tests.distributed.spawned import assert_as_one_process, found_by_ranks

pytestmark = pytest.mark.distributed


OTHERS = tuple(name for name in TRAININGS if name not in QUICK)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return found_by_ranks(find, 2, tmp_path_factory.mktemp("quick"), QUICK)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return found_by_ranks(find, 2, tmp_path_factory.mktemp("others"), OTHERS)


@pytest.fixture(scope="module")
def on_four(tmp_path_factory):
    return found_by_ranks(find, 4, tmp_path_factory.mktemp("four"), tuple(ON_FOUR))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_train_as_one_process(quick, name):
    assert_as_one_process(quick, name, TRAININGS[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_two_ranks_train_as_one_process_however_the_model_is_divided(others, name):
    assert_as_one_process(others, name, TRAININGS[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_train_as_one_process(on_four, name):
    assert_as_one_process(on_four, name, ON_FOUR[name])
