"""Table A: time of an epoch of DP-SGD on four small models, by batch size (the Opacus paper, Figure 1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from benchmarks.models import MnistCNN
from benchmarks.tasks import Batch, Task
from paper_repro.cases import Case, Size, Table, images, texts
from paper_repro.models.images import OpacusCifarCNN
from paper_repro.models.reviews import VOCABULARY, ReviewEmbedding, ReviewLSTM
from paper_repro.published import OPACUS_PAPER
from paper_repro.trainers import trainers

BATCH_SIZES = {"tiny": (4, 8), "small": (16, 32, 64, 128, 256), "full": (16, 32, 64, 128, 256, 512, 1024, 2048)}
LENGTH = 256
# Opacus loops over 256 positions in Python: on a CPU the smaller sizes are enough for ten minutes.
LSTM_ON_CPU = (16, 64)
SIGMA = 1.1


@dataclass(frozen=True)
class _Model:
    name: str
    title: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    data: str
    epoch: int


def _models(size: Size) -> list[_Model]:
    length = 16 if size == "tiny" else LENGTH
    reviews = texts(length, VOCABULARY, classes=2)
    return [
        _Model("mnist-cnn", "MNIST CNN, 26,010 parameters", MnistCNN, images(1, 28, 28), "mnist", 60_000),
        _Model("cifar-cnn", "CIFAR-10 CNN, 605,226 parameters", OpacusCifarCNN, images(3, 32, 32), "cifar10", 50_000),
        _Model("imdb-lstm", "IMDb LSTM, 1,081,402 parameters", ReviewLSTM, reviews, "imdb", 25_000),
        _Model("imdb-embedding", "IMDb embedding, 160,098 parameters", ReviewEmbedding, reviews, "imdb", 25_000),
    ]


def _case(model: _Model, batch_size: int, size: Size) -> Case:
    task = Task(f"{model.name}-{batch_size}", f"{model.title}, B {batch_size}", batch_size, model.make, model.batch)
    length = (16 if size == "tiny" else LENGTH) if model.data == "imdb" else 0
    return Case(task, model.name, model.title, model.epoch, {}, model.data, length, VOCABULARY if length else 0)


def table(size: Size) -> Table:
    """Describe the table.

    Args:
        size: How large the batches are.

    Returns:
        The table.
    """
    return Table(
        letter="A",
        title="Run time per epoch of DP-SGD on four small models",
        cases=tuple(
            _case(model, batch, size)
            for model in _models(size)
            for batch in BATCH_SIZES[size]
            if size != "small" or model.name != "imdb-lstm" or batch in LSTM_ON_CPU
        ),
        references=(),
        engines=lambda check: trainers(sigma=0.0 if check else SIGMA, keep=check, every=True),
        unit="epoch",
        minutes=6.0,
        checked_samples=16 if size != "tiny" else 4,
        notes=(
            f"Models and protocol: {OPACUS_PAPER}. SGD, σ = {SIGMA}, C = 1, float32. The paper shows its times as a "
            "picture only, so there is no published column. Opacus runs in each of its modes, torch.func as a user "
            "would write it. Of its other engines, JAX and BackPACK are measured by `python -m benchmarks`; TF Privacy "
            "and PyVacy are not run here.",
            "An epoch's time is the median step times the steps of an epoch; loading data is left out.",
            "The LSTM has torch's two bias vectors a gate, the paper's one: 400 parameters more."
            + (" On a CPU it is measured at two of the batch sizes." if size == "small" else ""),
        ),
    )
