"""What is trained in a measurement: a model, a batch for it, and each sample's own loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import GPT, MLP, MnistCNN

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
    """The losses of a batch.

    Args:
        model: Gives logits for the batch's inputs.
        batch: Inputs and targets.

    Returns:
        `[B]`, each the mean over the sample's own positions.
    """
    inputs, target = batch
    losses = F.cross_entropy(model(inputs).flatten(0, -2), target.flatten(), reduction="none")
    return losses.view(target.shape[0], -1).mean(dim=1)


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
        """The model in training mode; the same weights each time.

        Args:
            device: Where it is put.

        Returns:
            A new model.
        """
        torch.manual_seed(SEED)
        return self.make_model().to(device).train()

    def batch(self, device: torch.device) -> Batch:
        """The batch; the same values each time.

        Args:
            device: Where it is put.

        Returns:
            Inputs and targets.
        """
        torch.manual_seed(SEED + 1)
        inputs, target = self.make_batch(self.batch_size)
        return inputs.to(device), target.to(device)


def _token_batch(vocabulary: int, length: int) -> Callable[[int], Batch]:
    def make(samples: int) -> Batch:
        ids_BT = torch.randint(0, vocabulary, (samples, length + 1))
        return ids_BT[:, :-1].contiguous(), ids_BT[:, 1:].contiguous()

    return make


def _labelled_batch(*shape: int) -> Callable[[int], Batch]:
    def make(samples: int) -> Batch:
        return torch.randn(samples, *shape), torch.randint(0, 10, (samples,))

    return make


def tasks(*, quick: bool) -> list[Task]:
    """Everything that is measured.

    Args:
        quick: Small enough to finish in seconds; says that the code runs, not how fast.

    Returns:
        The tasks, the largest first.
    """
    if quick:
        small = {"vocabulary": 500, "width": 64, "heads": 4, "layers": 2, "positions": 32}
        return [
            Task("gpt", "GPT, 2 layers, d 64, T 32, V 500, B 4", 4, lambda: GPT(**small), _token_batch(500, 32)),
            Task("cnn", "MNIST CNN, B 8", 8, MnistCNN, _labelled_batch(1, 28, 28)),
            Task("mlp", "MLP 64-64-64-10, B 8", 8, lambda: MLP(features=64, width=64), _labelled_batch(64)),
        ]
    return [
        Task("gpt", "GPT, 4 layers, d 256, 4 heads, T 128, V 5000, B 16", 16, GPT, _token_batch(5000, 128)),
        Task("cnn", "MNIST CNN (26,010 parameters), B 256", 256, MnistCNN, _labelled_batch(1, 28, 28)),
        Task("mlp", "MLP 784-1024-1024-10, B 128", 128, MLP, _labelled_batch(784)),
    ]
