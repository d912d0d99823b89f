"""Physical batches: what is released is that of the logical batch, and an aborted loop leaves nothing behind."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ghostclip.data.physical_batches import BatchMemoryManager
from ghostclip.errors import DataError, InvalidOptionError, MissingGradientError
from tests.engine.training import Training, batch_of, fixed_loader, parameters_of, small_data, small_model

DATA = small_data()
LOGICAL = [list(range(11)), [], list(range(11, 15)), list(range(15, 16))]
NO_NOISE = pytest.mark.filterwarnings("ignore:noise_multiplier=0")


def manager(training: Training, *batches: list[int], size: int | str = 4, **options) -> BatchMemoryManager:
    loader = fixed_loader(DATA, *batches, workers=options.pop("workers", 0))
    return BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=training.optimizer, **options)


def twins(**options) -> tuple[Training, Training]:
    model = small_model()
    return Training(model=copy.deepcopy(model), **options), Training(model=model, **options)


@NO_NOISE
@pytest.mark.parametrize(("size", "zero_grad_first"), [(1, True), (3, False), (4, True), (100, False)])
def test_virtual_steps_equal_one_big_batch(size, zero_grad_first):
    training, whole = twins(sigma=0.0, bound=0.5)
    with manager(training, *LOGICAL, size=size) as loader:
        for batch in loader:
            assert len(batch[0]) <= size
            if zero_grad_first:
                training.optimizer.zero_grad()
            training.backward(batch)
            training.optimizer.step()
            if not zero_grad_first:
                training.optimizer.zero_grad()
    for batch in fixed_loader(DATA, *LOGICAL):
        whole.step(batch)
    torch.testing.assert_close(parameters_of(training.model), parameters_of(whole.model), rtol=1e-5, atol=1e-6)
    assert training.releases == whole.releases == len(LOGICAL)


class _Together(torch.utils.data.TensorDataset):
    def __getitems__(self, indices):
        assert indices, "no record was asked for"
        return [self[index] for index in indices]


def test_a_data_set_is_not_asked_for_no_records():
    training = Training(sigma=1.0)
    loader = fixed_loader(_Together(*DATA.tensors), *LOGICAL)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=training.optimizer) as batches:
        for batch in batches:
            training.step(batch)
    assert training.releases == len(LOGICAL)


def test_one_draw_and_one_count_for_each_logical_batch():
    training, draws = Training(sigma=1.0), []
    with manager(training, *LOGICAL) as loader:
        for batch in loader:
            training.step(batch)
            draws.append(len(training.noise.stds))
            assert training.optimizer.last_step_was_virtual == (len(draws) in (1, 2))
    parameters = len(list(training.model.parameters()))
    assert draws == [parameters * released for released in (0, 0, 1, 2, 3, 4)]
    assert training.releases == len(LOGICAL)


@pytest.mark.parametrize("way_out", ["break", "exception"])
@NO_NOISE
def test_loop_left_early_leaves_nothing_behind(way_out):
    training, clean = twins(sigma=0.0)

    def left_early(loader):
        for batch in loader:
            training.optimizer.zero_grad()
            training.backward(batch)
            if way_out == "exception":
                raise KeyboardInterrupt
            training.optimizer.step()
            break

    with manager(training, list(range(11)), list(range(11, 14))) as loader:
        with contextlib.suppress(KeyboardInterrupt):
            left_early(loader)
        assert not training.clipper.has_clipped_sum
        assert all(p.grad is None for p in training.model.parameters())
    assert training.releases == 0
    for own in (training, clean):
        own.step(batch_of(DATA, start=20, stop=25))
    assert torch.equal(parameters_of(training.model), parameters_of(clean.model))
    assert training.releases == 1


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_loaders_that_cannot_be_split_are_refused():
    training = Training(sigma=1.0)
    for loader, words in (
        (DataLoader(Stream(), batch_size=2), "Stream"),
        (DataLoader(DATA, batch_size=None), "batch size"),
        (DataLoader(DATA, batch_size=2, num_workers=1, in_order=False), "in_order"),
        (manager(training, [0, 1, 2]).__enter__(), "another BatchMemoryManager"),
    ):
        refused = BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=training.optimizer)
        with pytest.raises(DataError, match=words):
            refused.__enter__()


@pytest.mark.parametrize("size", [0, -1, 2.5, "largest", True, None])
def test_sizes_out_of_range_are_refused(size):
    with pytest.raises(InvalidOptionError, match="max_physical_batch_size"):
        manager(Training(), [0], size=size)


def test_a_step_left_out_is_refused_at_the_next_batch():
    training = Training()
    with manager(training, [0, 1, 2], [3, 4], size=2) as parts:
        batches = iter(parts)
        training.backward(next(batches))
        training.optimizer.step()
        training.backward(next(batches))
        with pytest.raises(MissingGradientError, match="after every physical batch"):
            next(batches)
    assert training.releases == 0


def _twice_each_part(training, parts):
    for batch in parts:
        training.step(batch)
        training.step(batch)


def _part_again_in_the_place_of_the_next(training, parts):
    batches = iter(parts)
    batch = next(batches)
    training.step(batch)
    training.backward(batch)
    next(batches)
    training.optimizer.step()


@NO_NOISE
@pytest.mark.parametrize("loop", [_twice_each_part, _part_again_in_the_place_of_the_next])
def test_no_part_stands_in_the_place_of_another_one_of_as_many_rows(loop):
    training = Training(sigma=0.0)
    with (
        manager(training, list(range(6)), size=3) as parts,
        pytest.raises(MissingGradientError, match=r"stepped on before|gone back through"),
    ):
        loop(training, parts)
    assert training.releases == 0


def test_a_size_that_is_found_is_known_inside_only_and_a_budget_finds_no_other():
    found = manager(Training(), [0], size="auto")
    with pytest.raises(InvalidOptionError, match="is found when"):
        _ = found.physical_batch_size
    with found:
        assert found.physical_batch_size == 1
    with pytest.raises(InvalidOptionError, match="memory_budget only says"):
        BatchMemoryManager(
            data_loader=fixed_loader(DATA, [0]), max_physical_batch_size=3, optimizer=Training().optimizer,
            memory_budget=10,
        )  # fmt: skip


def test_plain_optimizer_is_refused():
    inner = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(InvalidOptionError, match="make_private"):
        BatchMemoryManager(data_loader=fixed_loader(DATA, [0]), max_physical_batch_size=3, optimizer=inner)
