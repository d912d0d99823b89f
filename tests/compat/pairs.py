"""The same training made private by both packages, down to the order of the calls."""

from __future__ import annotations

import importlib
import warnings
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.engine.training import declared

PACKAGES = ("ghostclip.compat.opacus", "opacus")


class Training(NamedTuple):
    """What `make_private` returned, and the model that went in."""

    model: nn.Module
    module: Any
    optimizer: Any
    criterion: Any
    loader: Any


def package(name: str) -> Any:
    """One of the two packages; Opacus's warnings when it is loaded are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def small_model() -> nn.Module:
    """Two layers with the same parameters every time."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batch(size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of very different length, so that clipping matters."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(size, 5, generator=generator, dtype=torch.float64) * torch.linspace(0.2, 8, size)[:, None]
    return x, torch.randint(0, 3, (size,), generator=generator)


def make_private(
    name: str,
    mode: str,
    *,
    criterion: Any = None,
    bound: float = 0.5,
    records: int = 60,
    batch_size: int = 6,
    options: Any = None,
) -> Training:
    """Make a training without noise private; both are handed the same batches, which ghostclip is told of."""
    model = small_model()
    data = TensorDataset(*batch(records))
    loader = (
        declared(data, batch_size) if name == "ghostclip.compat.opacus" else DataLoader(data, batch_size=batch_size)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = (
            package(name)
            .PrivacyEngine(accountant="rdp")
            .make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
                data_loader=loader,
                noise_multiplier=0.0,
                max_grad_norm=bound,
                criterion=nn.CrossEntropyLoss() if criterion is None else criterion,
                grad_sample_mode=mode,
                **(options or {}),
            )
        )
    module, optimizer, *rest = made
    return Training(model, module, optimizer, rest[0] if len(rest) == 2 else criterion, rest[-1])


def released(training: Training) -> torch.Tensor:
    """The sum that a step released, from how far plain SGD with a step length of 1 moved the parameters."""
    before = torch.cat([p.detach().flatten() for p in small_model().parameters()])
    after = torch.cat([p.detach().flatten() for p in training.model.parameters()])
    return (before - after) * training.optimizer.expected_batch_size


def clipped_sum(bound: float = 0.5, *, criterion: Any = None, size: int = 6) -> torch.Tensor:
    """The sum of clipped gradients, one sample at a time."""
    criterion = nn.CrossEntropyLoss() if criterion is None else criterion
    model, (x, y) = small_model(), batch(size)
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for inputs, target in zip(x, y, strict=True):
        loss = criterion(model(inputs[None]), target[None])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss.sum(), list(model.parameters()))])
        total += gradient * min(1.0, bound / gradient.norm().item())
    return total
