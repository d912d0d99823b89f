"""Table E: convolutional networks on CIFAR-10, seconds per epoch and memory (mixed ghost clipping)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from benchmarks.tasks import Task
from paper_repro.cases import Case, Size, Table, images
from paper_repro.models.images import SmallCifarCNN
from paper_repro.models.resnet import resnet18, resnet50
from paper_repro.models.vgg import cifar_vgg
from paper_repro.published import CIFAR, CIFAR_ENGINES
from paper_repro.trainers import trainers

SIGMA = 1.0
EPOCH = 50_000
MODELS: dict[str, tuple[str, Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "cnn": ("CNN, 550,570 parameters", SmallCifarCNN, SmallCifarCNN),
    "resnet18": ("ResNet-18, 11,173,962 parameters", resnet18, partial(resnet18, divide=16)),
    "resnet50": ("ResNet-50, 23,520,842 parameters", resnet50, partial(resnet50, divide=16)),
    "vgg11": ("VGG11, 9,231,114 parameters", partial(cifar_vgg, 11), partial(cifar_vgg, 11, divide=16)),
    "vgg16": ("VGG16, 14,728,266 parameters", partial(cifar_vgg, 16), partial(cifar_vgg, 16, divide=16)),
}
# On a CPU, what 2 cores do in half a second.
SMALL_BATCHES = {"cnn": 64, "resnet18": 8, "resnet50": 4, "vgg11": 16, "vgg16": 16}


def _case(name: str, size: Size) -> Case:
    title, make, make_tiny = MODELS[name]
    batch_size = {"tiny": 4, "small": SMALL_BATCHES[name], "full": 256}[size]
    title = f"{title}, a 16th as wide" if size == "tiny" and make is not make_tiny else title
    task = Task(name, f"{title}, B {batch_size}", batch_size, make_tiny if size == "tiny" else make, images(3, 32, 32))
    return Case(task, name, title, EPOCH, CIFAR.beside(name, CIFAR_ENGINES), "cifar10")


def table(size: Size) -> Table:
    """Describe the table.

    Args:
        size: How large the models and batches are.

    Returns:
        The table.
    """
    notes = [
        "Group norms stand where the networks had batch norms, so that samples do not mix; the count of parameters is "
        "the same. SGD, σ = 1, C = 1, float32.",
        "An epoch's time is the median step times the steps of an epoch; loading data is left out.",
    ]
    if size == "small":
        notes.append("The physical batches are smaller than the published 256, as the titles say; `--full` runs 256.")
    return Table(
        letter="E",
        title="Convolutional networks on CIFAR-10",
        cases=tuple(_case(name, size) for name in MODELS),
        references=(CIFAR,),
        engines=lambda check: trainers(sigma=0.0 if check else SIGMA, keep=check),
        unit="epoch",
        memory=True,
        minutes=5.5,
        timed_share=0.8,
        notes=tuple(notes),
    )
