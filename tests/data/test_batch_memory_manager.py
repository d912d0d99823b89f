"""Physical batches: what is released is that of the logical batch, and an aborted loop leaves nothing behind."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ghostclip.data.batch_memory_manager import BatchMemoryManager
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


@pytest.mark.parametrize("first", [True, False])
def test_loop_may_skip_the_model_for_an_empty_batch(first):
    training = Training(sigma=1.0)
    batches = [[], [1, 2]] if first else [[1, 2], []]
    with manager(training, *batches) as loader:
        for batch in loader:
            training.optimizer.zero_grad()
            if len(batch[0]):
                training.backward(batch)
            training.optimizer.step()
    assert training.releases == 2


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


@NO_NOISE
def test_pass_after_an_abandoned_one_starts_afresh():
    training, clean = twins(sigma=0.0)
    with manager(training, list(range(11))) as loader:
        held = iter(loader)
        training.step(next(held))
        for batch in loader:
            training.step(batch)
        with pytest.raises(MissingGradientError, match="does not continue"):
            training.step(next(held))
    clean.step(batch_of(DATA, start=0, stop=11))
    torch.testing.assert_close(parameters_of(training.model), parameters_of(clean.model), rtol=1e-5, atol=1e-6)
    assert training.releases == 1


def test_logical_batch_without_step_is_noticed():
    training = Training(sigma=1.0)

    def never_stepping(loader):
        for batch in loader:
            training.backward(batch)

    for batches in ([[0, 1], [2, 3]], [[0, 1]]):
        with manager(training, *batches) as loader:
            with pytest.raises(MissingGradientError, match="not released"):
                never_stepping(loader)


class Records(Dataset):
    """Records that are dictionaries with text in them, fetched many at a time."""

    def __init__(self):
        self.fetched: list[list[int]] = []

    def __len__(self):
        return 9

    def __getitem__(self, index):
        raise AssertionError("__getitems__ is there to be used")

    def __getitems__(self, indices):
        self.fetched.append(indices)
        return [{"x": torch.full((5,), float(i)), "text": f"record {i}", "pair": (i, [i])} for i in indices]


def test_any_structure_of_batches_passes_through():
    training, records = Training(sigma=1.0), Records()
    plain = DataLoader(records, batch_size=9)
    with BatchMemoryManager(data_loader=plain, max_physical_batch_size=5, optimizer=training.optimizer) as loader:
        for batch in loader:
            assert set(batch) == {"x", "text", "pair"}
            assert len(batch["text"]) == len(batch["x"]) == len(batch["pair"][0])
            losses = training.model(batch["x"]).sum(dim=1)
            training.clipper.backward(losses)
            training.optimizer.step()
        assert loader.dataset.fetched == records.fetched == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
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


def test_options_of_auto_are_refused_without_it():
    with pytest.raises(InvalidOptionError, match="auto"):
        manager(Training(), [0], size=3, memory_budget=10)


def test_plain_optimizer_is_refused():
    inner = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(InvalidOptionError, match="make_private"):
        BatchMemoryManager(data_loader=fixed_loader(DATA, [0]), max_physical_batch_size=3, optimizer=inner)


def test_auto_learns_from_the_real_steps():
    training = Training(sigma=1.0, expected=16.0)
    automatic = manager(training, *[list(range(30))] * 2, size="auto", memory_budget=2**30)
    with automatic as loader:
        sizes = []
        for batch in loader:
            sizes.append(len(batch[0]))
            training.step(batch)
    assert sum(sizes) == 60
    assert sizes[0] == 1
    assert sizes == sorted(sizes[:5]) + sizes[5:]
    assert max(sizes) >= 8
    assert automatic.physical_batch_size >= max(sizes)
    assert training.releases == 2
