"""What is learnt: data in three fixed parts, a model, and how long it is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from paper_repro.data import DataError
from paper_repro.data.images import cifar10
from paper_repro.examples.char_lstm import CHARACTERS
from paper_repro.examples.data import paragraphs
from paper_repro.models.images import SmallCifarCNN

CONTEXT = 8
Part = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A data set and a training, the same for every mechanism but for its learning rate.

    Attributes:
        name: On the command line.
        title: What a reader sees.
        sizes: Records to train on, to choose learning rates by, and to report on; None for the last is what is left.
        batch_size: Records of a batch, on average.
        epochs: Passes.
        delta: δ, at most 1 / (10 N).
        epsilons: ε that are compared.
        step_sizes: What is tried for learning rate times clip bound.
        make_model: Makes the model.
        load: Reads the data; its argument is the folder that the user gave.
        momentum: Of SGD.
        tuning_seeds: Runs for each value tried; one is enough where there are many records to choose by.
    """

    name: str
    title: str
    sizes: tuple[int, int, int | None]
    batch_size: int
    epochs: int
    delta: float
    epsilons: tuple[float, ...]
    step_sizes: tuple[float, ...]
    make_model: Callable[[], nn.Module]
    load: Callable[[Path | None], Part]
    momentum: float = 0.0
    tuning_seeds: int = 2

    def parts(self, folder: Path | None) -> list[Part]:
        """Return the records to train on, to choose by and to report on, dealt out alike in every run."""
        inputs, targets = self.load(folder)
        train, chosen_by, reported_on = self.sizes
        left = len(targets) - train - chosen_by
        if left < (reported_on or 1):
            raise DataError(
                f"{self.name}: {len(targets)} records are fewer than the {sum(filter(None, self.sizes))} needed"
            )
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
        groups = order[: train + chosen_by + (reported_on or left)].split([train, chosen_by, reported_on or left])
        return [(inputs[group], targets[group]) for group in groups]


def digits(folder: Path | None) -> Part:
    """Return scikit-learn's 1,797 images of 8x8 pixels, as `[N, 64]`, and the digits that they show."""
    del folder
    try:
        from sklearn.datasets import load_digits
    except ImportError as problem:
        raise DataError("digits come with scikit-learn, which is not installed: pip install scikit-learn") from problem
    found = load_digits()
    return torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target).long()


def characters(folder: Path | None) -> Part:
    """Return windows of 8 characters of Python's documentation that do not overlap, and the character after each."""
    del folder
    text = "\n".join(text for _, text in paragraphs()).encode("ascii", "ignore")
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, CONTEXT + 1, CONTEXT + 1)
    return windows[:, :-1].contiguous(), windows[:, -1].contiguous()


def _of_user(folder: Path | None) -> Part:
    if folder is None:
        raise DataError("cifar10 is read from files of yours: name their folder with --data")
    return cifar10(folder)


def _digits_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def _characters_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(CHARACTERS, 8), nn.Flatten(), nn.Linear(8 * CONTEXT, 64), nn.Tanh(), nn.Linear(64, CHARACTERS)
    )


EPSILONS = (1.0, 3.0, 8.0)
TASKS = {
    task.name: task
    for task in (
        Task(
            name="digits",
            title="scikit-learn's digits, MLP 64-32-10",
            sizes=(1200, 237, 360),
            batch_size=120,
            epochs=8,
            delta=8e-5,
            epsilons=EPSILONS,
            step_sizes=(0.4, 1.0, 2.5, 6.0),
            make_model=_digits_model,
            load=digits,
        ),
        Task(
            name="text",
            title=f"next character of Python's documentation after {CONTEXT}, embedding and MLP",
            sizes=(16_000, 4000, 8000),
            batch_size=800,
            epochs=3,
            delta=6e-6,
            epsilons=EPSILONS,
            step_sizes=(1.0, 3.0, 8.0, 20.0, 50.0),
            tuning_seeds=1,
            make_model=_characters_model,
            load=characters,
        ),
        Task(
            name="cifar10",
            title="CIFAR-10, CNN of 550,570 parameters",
            sizes=(40_000, 5000, None),
            batch_size=500,
            epochs=10,
            delta=1e-6,
            epsilons=(*EPSILONS, 9.0),
            step_sizes=(0.1, 0.4, 1.0, 2.5),
            make_model=SmallCifarCNN,
            load=_of_user,
            momentum=0.9,
            tuning_seeds=1,
        ),
    )
}


def shortened(task: Task) -> Task:
    """Return a task of a hundredth of the work, which shows that everything runs, not what is better."""
    train = min(2000, task.sizes[0] // 2)
    return replace(
        task,
        sizes=(train, min(500, task.sizes[1]), 100),
        batch_size=train // 5,
        epochs=2,
        epsilons=(3.0,),
        step_sizes=task.step_sizes[2:4],
        tuning_seeds=1,
    )


@lru_cache(maxsize=2)
def found(name: str, folder: Path | None, quick: bool) -> tuple[Task, Sequence[Part]]:  # noqa: FBT001 - a cache's key
    """Return a task and its data, read once in each process."""
    task = shortened(TASKS[name]) if quick else TASKS[name]
    return task, task.parts(folder)
