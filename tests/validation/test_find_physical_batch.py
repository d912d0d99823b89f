"""The largest physical batch for a model and a batch: found within memory, and a model left as it was."""

from __future__ import annotations

import copy
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ghostclip
from ghostclip import PrivacyEngine
from tests.engine.training import small_data, small_model


class _Hungry(nn.Module):
    """A model with room for so many rows, as a device would have."""

    def __init__(self, room):
        super().__init__()
        self.net, self.room, self.sizes = small_model(), room, []

    def forward(self, x):
        self.sizes.append(len(x))
        if len(x) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.net(x)


def _batch(samples):
    return torch.randn(samples, 5), torch.arange(samples) % 3


@pytest.mark.parametrize(("room", "upper", "least", "most"), [(50, 500, 40, 49), (500, 64, 64, 64), (3, 9, 2, 2)])
def test_the_largest_size_that_runs(room, upper, least, most):
    model = _Hungry(room)
    # The first forwards are run once more on one sample more.
    assert least <= ghostclip.find_physical_batch(model, _batch(2), nn.CrossEntropyLoss(), upper=upper) <= most + 1


class _Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x[:, None].expand(-1, 1 << 16, -1).exp()).mean(1)


def _found_in_60_mib():
    batch, loss = (torch.randn(1, 4), torch.zeros(1).long()), nn.CrossEntropyLoss()
    return ghostclip.find_physical_batch(_Wide(), batch, loss, upper=512, memory_budget=60 << 20)


def test_memory_of_the_process_is_the_limit_on_the_cpu():
    # In a process of its own: in this one earlier tests have left memory that is in use and yet free.
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
        assert 2 <= pool.submit(_found_in_60_mib).result() <= 80


@pytest.mark.parametrize("private", [False, True])
def test_nothing_is_changed_or_counted(private):
    model, engine = small_model(), PrivacyEngine()
    if private:
        model, optimizer, _ = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(small_data(), batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    before, state, batch = copy.deepcopy(model.state_dict()), None, _batch(3)
    state = torch.random.get_rng_state()
    assert ghostclip.find_physical_batch(model, batch, nn.CrossEntropyLoss(), upper=8) == 8
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    if private:
        assert not optimizer.clipper.has_clipped_sum
        assert not optimizer.clipper.rows_seen
        assert len(engine.accountant) == 0
    else:
        model(batch[0]).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
