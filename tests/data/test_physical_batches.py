"""A logical batch in parts: each record in the sum once, whatever runs out of memory, and one release of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ghostclip import PhysicalBatches
from tests.engine.training import clipped_sum, parameters_of, small_data, small_model
from tests.private_run import PrivateRun

DATA = small_data(40)
# The draws and the noise are to be the same twice.
pytestmark = pytest.mark.filterwarnings("ignore::ghostclip.errors.FixedSeedWarning", "ignore:noise_multiplier=0")


def _private(*, noise=1.0, generator=None):
    torch.manual_seed(3)
    loader = DataLoader(DATA, batch_size=20, generator=torch.Generator().manual_seed(7))
    run = PrivateRun(
        DATA, lr=1.0, sigma=noise, data_loader=loader, max_grad_norm=0.5, noise_generator=generator
    )  # fmt: skip
    return run.engine, run.model, run.optimizer, run.loader


class Work:
    """Forward and backward that a memory of so many rows has room for."""

    def __init__(self, model, *, room):
        self.model, self.room, self.sizes = model, room, []

    def __call__(self, part):
        self.sizes.append(len(part[0]))
        loss = nn.functional.cross_entropy(self.model(part[0]), part[1])
        loss.backward()
        if len(part[0]) > self.room:
            # After the backward: the sums of this part are there, and must go.
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return len(part[0])


@pytest.mark.parametrize(("size", "room"), [(1, 99), (7, 99), (99, 99), (99, 3), (99, 1), (8, 5), ("auto", 6)])
def test_the_sum_is_that_of_the_whole_batch(size, room):
    engine, model, optimizer, loader = _private(noise=0.0)
    before, fresh = parameters_of(model), small_model()
    nn.utils.vector_to_parameters(before.clone(), fresh.parameters())
    parts, work = PhysicalBatches(optimizer, max_physical_batch_size=size), Work(model, room=room)
    batch = next(iter(loader))
    done = parts.run(batch, work)
    optimizer.step()
    assert sum(done) == len(batch[0])
    assert max(done) <= room
    expected = clipped_sum(fresh, batch, 0.5) / 20
    torch.testing.assert_close((before - parameters_of(model)).double(), expected, rtol=1e-4, atol=1e-6)
    assert engine.accountant.history == [(0.0, 0.5, 1)]


def test_what_all_samples_share_is_in_every_part_also_where_it_is_as_long_as_the_batch():
    _, model, optimizer, _ = _private(noise=0.0)
    parts, whole, seen = PhysicalBatches(optimizer, max_physical_batch_size=2), torch.arange(4.0), []

    def work(part):
        seen.append(part)
        model(part["x"]).square().sum().backward()

    for size in (5, 4):
        inputs = DATA.tensors[0][:size]
        parts.run({"x": inputs, "positions": whole}, work)
        optimizer.clipper.reset()
    assert [len(part["x"]) for part in seen] == [2, 2, 1, 2, 2]
    assert all(part["positions"] is whole for part in seen)


def test_the_same_draws_and_noise_as_without_lack_of_memory():
    ends = []
    for size, room in ((99, 99), (5, 99), (99, 4), ("auto", 9)):
        engine, model, optimizer, loader = _private(generator=torch.Generator().manual_seed(1))
        parts = PhysicalBatches(optimizer, max_physical_batch_size=size)
        work = Work(model, room=room)
        for batch in loader:
            parts.run(batch, work)
            optimizer.step()
            optimizer.zero_grad()
        assert engine.accountant.history == [(1.0, 0.5, 2)]
        ends.append(parameters_of(model))
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-5, atol=1e-6)


def test_one_record_that_does_not_fit_is_an_error_and_leaves_nothing():
    engine, model, optimizer, loader = _private()
    parts = PhysicalBatches(optimizer, max_physical_batch_size=8)
    with pytest.raises(torch.OutOfMemoryError):
        parts.run(next(iter(loader)), Work(model, room=0))
    assert not optimizer.clipper.has_clipped_sum
    assert len(engine.accountant) == 0
