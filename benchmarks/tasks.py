"""What is trained in a measurement: a model, a batch for it, and each sample's own loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import GPT, LSTM, MLP, MnistCNN, ResNet

Batch = tuple[Tensor, Tensor]
SEED = 11


class PerSampleCrossEntropy(nn.Module):
    """Cross entropy that is averaged within each sample: `[B, ..., K]` and `[B, ...]` give `[B]`.

    The attribute `reduction` says whether the samples are averaged as well; Opacus sets it to "none" to get `[B]`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """The losses `[B]`, or their mean."""
        losses = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
        losses_B = losses.view(target.shape[0], -1).mean(dim=1)
        return losses_B if self.reduction == "none" else losses_B.mean()


def per_sample_losses(model: nn.Module, batch: Batch) -> Tensor:
    """The losses of a batch."""
    inputs, target = batch
    losses = F.cross_entropy(model(inputs).flatten(0, -2), target.flatten(), reduction="none")
    # An empty batch, which Poisson sampling draws, has as many positions as any other.
    return losses.view(target.shape[0], target.shape[1:].numel()).mean(dim=1)


@dataclass(frozen=True)
class Task:
    """A model with the batch it is measured on.

    Attributes:
        name: Short name, used on the command line and in files.
        title: What a reader of the table sees.
        batch_size: Samples in the batch.
        make_model: Builds the model, on the CPU, in float32.
        make_batch: Builds inputs and targets for a number of samples, on the CPU.
    """

    name: str
    title: str
    batch_size: int
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Batch]

    def model(self, device: torch.device) -> nn.Module:
        """The model in training mode; the same weights each time."""
        torch.manual_seed(SEED)
        return self.make_model().to(device).train()

    def batch(self, device: torch.device) -> Batch:
        """The batch; the same values each time."""
        torch.manual_seed(SEED + 1)
        inputs, target = self.make_batch(self.batch_size)
        return inputs.to(device), target.to(device)


def token_batch(vocabulary: int, length: int) -> Callable[[int], Batch]:
    """Random text whose targets are the next tokens."""

    def make(samples: int) -> Batch:
        ids_BT = torch.randint(0, vocabulary, (samples, length + 1))
        return ids_BT[:, :-1].contiguous(), ids_BT[:, 1:].contiguous()

    return make


def _labelled_batch(*shape: int) -> Callable[[int], Batch]:
    def make(samples: int) -> Batch:
        return torch.randn(samples, *shape), torch.randint(0, 10, (samples,))

    return make


def _text_batch(vocabulary: int, length: int) -> Callable[[int], Batch]:
    def make(samples: int) -> Batch:
        return torch.randint(0, vocabulary, (samples, length)), torch.randint(0, 2, (samples,))

    return make


def _gpt(name: str, length: int, samples: int) -> Task:
    title = f"GPT, 4 layers, d 256, 4 heads, T {length}, V 5000, B {samples}"
    return Task(name, title, samples, partial(GPT, positions=length), token_batch(5000, length))


def _tiny_gpt(name: str, length: int, samples: int) -> Task:
    small = partial(GPT, vocabulary=500, width=64, heads=4, layers=2, positions=length)
    return Task(name, f"GPT, 2 layers, d 64, T {length}, V 500, B {samples}", samples, small, token_batch(500, length))


def tasks(*, quick: bool) -> list[Task]:
    """Everything that is measured."""
    if quick:
        return [
            _tiny_gpt("gpt", 32, 4),
            _tiny_gpt("gpt-512", 64, 2),
            _tiny_gpt("gpt-1024", 96, 2),
            Task("cnn", "MNIST CNN, B 8", 8, MnistCNN, _labelled_batch(1, 28, 28)),
            Task("cnn-64", "MNIST CNN, B 4", 4, MnistCNN, _labelled_batch(1, 28, 28)),
            Task("mlp", "MLP 64-64-64-10, B 8", 8, partial(MLP, features=64, width=64), _labelled_batch(64)),
            Task("resnet", "ResNet, width 8, 12 x 12, B 4", 4, partial(ResNet, width=8), _labelled_batch(3, 12, 12)),
            Task("lstm", "LSTM, d 12, T 16, B 4", 4, partial(LSTM, vocabulary=50, width=12), _text_batch(50, 16)),
        ]
    return [
        _gpt("gpt", 128, 16),
        _gpt("gpt-512", 512, 4),
        _gpt("gpt-1024", 1024, 2),
        Task("cnn", "MNIST CNN (26,010 parameters), B 256", 256, MnistCNN, _labelled_batch(1, 28, 28)),
        Task("cnn-64", "MNIST CNN (26,010 parameters), B 64", 64, MnistCNN, _labelled_batch(1, 28, 28)),
        Task("mlp", "MLP 784-1024-1024-10, B 128", 128, MLP, _labelled_batch(784)),
        Task("resnet", "ResNet with group norm, 32 x 32 images, B 64", 64, ResNet, _labelled_batch(3, 32, 32)),
        Task("lstm", "Embedding, LSTM 100, T 128, B 64", 64, LSTM, _text_batch(10_004, 128)),
    ]


def find(name: str, *, quick: bool) -> Task:
    """The task of a name, as processes of their own are told."""
    for task in tasks(quick=quick):
        if task.name == name:
            return task
    raise LookupError(f"no task is called {name!r}")
