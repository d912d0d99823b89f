"""What accelerate, Fabric and torch.compile put around a private model, or put around it before it is made private."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.data import DPDataLoader
from ghostclip.facade import GradSampleModule

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

BOUND = 0.1


def _parts():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    data = TensorDataset(torch.randn(6, 5), torch.randint(0, 3, (6,)))
    return model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(data, batch_size=6)


def _private(model, optimizer, loader):
    return ghostclip.PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.0, max_grad_norm=BOUND
    )


def _update(called, optimizer, loader, backward):
    """Return how far one full batch moves the weights, times its size: the clipped sum, of learning rate 1."""
    first = next(p for p in called.parameters()).detach().clone()
    for x, y in loader:
        optimizer.zero_grad()
        backward(nn.functional.cross_entropy(called(x), y))
        optimizer.step()
    return (first - next(p for p in called.parameters()).detach()) * 6


def _wanted(*, bf16):
    """Return the same from one sample at a time."""
    model, _, loader = _parts()
    total = torch.zeros_like(model[0].weight)
    for x, y in zip(*loader.dataset.tensors, strict=True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(x[None])
        nn.functional.cross_entropy(output.float(), y[None]).backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        total += model[0].weight.grad * min(1.0, BOUND / norm)
    return total


def test_accelerate_unwraps_to_what_it_was_given():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model, optimizer, loader = _private(*_parts())
    prepared = accelerator.prepare(model)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert unwrapped is model
    assert list(unwrapped.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    torch.testing.assert_close(_update(unwrapped, optimizer, loader, torch.Tensor.backward), _wanted(bf16=False))


def test_what_wraps_the_facade_stays_with_it():
    """On the model it would call itself; a copy carries it along, and detaching leaves the model without it."""
    model, x = _parts()[0], torch.randn(2, 5)
    facade = GradSampleModule(model, clipper=ghostclip.GhostClipper(model, max_grad_norm=1.0))
    before = facade.forward
    facade.forward = lambda x: 2 * before(x)
    facade._original_forward = before
    assert not {"forward", "_original_forward"} & set(vars(model))
    assert torch.equal(facade(x), 2 * model(x))
    del facade.forward
    assert torch.equal(facade(x), model(x))
    facade.compile(backend="aot_eager")
    assert torch.equal(copy.deepcopy(facade)(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(facade))(x), model(x))


def test_loader_that_fabric_has_wrapped_stays_wrapped():
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model, optimizer, loader = _parts()
    wrapped = fabric.setup_dataloaders(loader)
    *_, private = _private(model, optimizer, wrapped)
    assert type(private) is type(wrapped)
    assert isinstance(private._dataloader, DPDataLoader)
