"""A small private training that the tests of this folder vary, and a noise source that tells what it was asked for."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ghostclip
from ghostclip.data import DPDataLoader
from ghostclip.noise import FastNoise
from ghostclip.optim import DPOptimizer
from ghostclip.optim.draws import Draw

FEATURES, CLASSES, RECORDS = 5, 3, 60


class CountedNoise:
    """Real noise that notes the shape and the standard deviation of every draw."""

    level = "fast"

    def __init__(self) -> None:
        self.draws: list[tuple[tuple[int, ...], float]] = []
        self._source = FastNoise()

    @property
    def stds(self) -> list[float]:
        return [std for _, std in self.draws]

    def add_(self, tensor: torch.Tensor, std: float) -> None:
        self.draws.append((tuple(tensor.shape), std))
        self._source.add_(tensor, std)

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state)


def small_model() -> nn.Sequential:
    """Two layers with dropout between them."""
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.ReLU(), nn.Linear(7, CLASSES))


def small_data(records: int = RECORDS) -> TensorDataset:
    """Gradients large enough to be clipped at 1."""
    return TensorDataset(3 * torch.randn(records, FEATURES), torch.randint(0, CLASSES, (records,)))


class Training:
    """A model with clipper, private optimizer and counters around it."""

    def __init__(
        self,
        *,
        model: nn.Module | None = None,
        sigma: float = 1.0,
        bound: float = 1.0,
        expected: float | None = 4.0,
        reduction: str = "mean",
        learning_rate: float = 1.0,
    ) -> None:
        self.model = small_model() if model is None else model
        self.clipper = ghostclip.GhostClipper(self.model, max_grad_norm=bound, loss_reduction=reduction)
        self.noise = CountedNoise()
        self.optimizer = DPOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=learning_rate),
            noise_multiplier=sigma,
            expected_batch_size=expected,
            loss_reduction=reduction,
            clipper=self.clipper,
            noise_source=self.noise,
        )
        self.releases = 0
        self.optimizer.attach_step_hook(self._count)

    def _count(self, _: DPOptimizer) -> None:
        self.releases += 1

    def backward(self, batch: list[torch.Tensor]) -> None:
        """Forward and backward of the mean loss; an empty batch has a loss of zero."""
        inputs, targets = batch
        losses = nn.functional.cross_entropy(self.model(inputs), targets, reduction="none")
        self.clipper.backward(losses)

    def step(self, batch: list[torch.Tensor]) -> None:
        """One round of a usual loop."""
        self.optimizer.zero_grad()
        self.backward(batch)
        self.optimizer.step()


def declared(data: Dataset[Any], batch_size: int) -> ghostclip.DeclaredSampling:
    """Poisson sampling that the test does by hand; the loader that comes back samples as well, unasked."""
    loader = DPDataLoader(data, batch_size=batch_size)
    return ghostclip.DeclaredSampling(
        sample_rate=loader.sample_rate,
        expected_batch_size=batch_size,
        num_units=len(data),  # type: ignore[arg-type]
        data_loader=loader,
    )


def as_if_drawn(optimizer: DPOptimizer, *sizes: int) -> None:
    """Let the optimizer's private loader have drawn batches of these sizes, which the test hands over by hand."""
    for size in sizes:
        optimizer._draws.add(Draw(0, size, size))
        optimizer._draws.deliver()


def parameters_of(model: nn.Module) -> torch.Tensor:
    """All parameters in one vector."""
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def batch_of(data: Dataset[Any], *, start: int, stop: int) -> list[torch.Tensor]:
    """Some records, collated."""
    return torch.utils.data.default_collate([data[index] for index in range(start, stop)])


def clipped_sum(model: nn.Module, batch: list[torch.Tensor], bound: float) -> torch.Tensor:
    """The clipped sum, one sample at a time, in float64."""
    reference = copy.deepcopy(model).double()
    total = torch.zeros_like(parameters_of(reference))
    for inputs, target in zip(*batch, strict=True):
        loss = nn.functional.cross_entropy(reference(inputs.double()[None]), target[None])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(reference.parameters()))])
        total += gradient * min(1.0, bound / gradient.norm().item())
    return total


class FixedBatches(torch.utils.data.Sampler[list[int]]):
    """A batch sampler that yields given lists of indices."""

    def __init__(self, *batches: list[int]) -> None:
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def fixed_loader(data: TensorDataset, *batches: list[int], workers: int = 0) -> DataLoader[Any]:
    """A loader of exactly these logical batches, empty ones included."""

    def collate(samples: list[Any]) -> Any:
        return torch.utils.data.default_collate(samples) if samples else [part[:0] for part in data.tensors]

    return DataLoader(data, batch_sampler=FixedBatches(*batches), collate_fn=collate, num_workers=workers)
