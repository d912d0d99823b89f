"""One training of one mechanism, and the noise that it is given for its ε."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine
from ghostclip.mechanisms import (
    AveragedWeights,
    BallsInBins,
    BandedInverse,
    BandedMatrixFactorization,
    BufferedToeplitz,
    CalibratedMechanism,
    Correlated,
    Mechanism,
    PoissonSampling,
    UnamplifiedSampling,
    plan_privacy,
)
from paper_repro.accuracy.tasks import Task, found

DECAY = 0.95
READ = ("last", "exponential", "tail")
"""Weights that are evaluated: those after the last step, and two averages."""


@dataclass(frozen=True)
class Row:
    """What is compared: a mechanism and a way to clip.

    Attributes:
        name: On the command line.
        title: What a reader sees.
        mechanism: None for a training that is not private.
        clipping: As `make_private` takes it.
        clips: What is tried for C.
    """

    name: str
    title: str
    mechanism: Mechanism | None
    clipping: str = "flat"
    clips: tuple[float, ...] = (1.0,)


ROWS = {
    row.name: row
    for row in (
        Row("poisson", "Poisson sampling", PoissonSampling()),
        Row("balls", "balls in bins", BallsInBins()),
        Row("banded-2", "banded inverse, 2 bands", BandedInverse(bands=2)),
        Row("banded-4", "banded inverse, 4 bands", BandedInverse(bands=4)),
        Row("banded-8", "banded inverse, 8 bands", BandedInverse(bands=8)),
        Row("bisr-4", "BISR(4)", BandedInverse(bands=4, coefficients="square_root")),
        Row("buffered-3", "BLT, 3 buffers", BufferedToeplitz(buffers=3)),
        Row("bandmf-2", "BandMF, 2 bands", BandedMatrixFactorization(bands=2)),
        Row("bandmf-4", "BandMF, 4 bands", BandedMatrixFactorization(bands=4)),
        Row("unamplified", "DP-SGD, no amplification", UnamplifiedSampling()),
        Row("poisson-c", "Poisson, C tuned too", PoissonSampling(), clips=(0.3, 1.0, 3.0)),
        Row("automatic", "Poisson, automatic clipping", PoissonSampling(), clipping="automatic"),
        Row("adaptive", "Poisson, adaptive clipping", PoissonSampling(), clipping="adaptive"),
        Row("nonprivate", "not private", None),
    )
}


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        task: Name of the task.
        row: Name of the row.
        epsilon: What it may cost.
        sigma: The noise multiplier for that.
        step_size: Learning rate times C.
        clip: C.
        seed: Of the initial weights; records and noise are drawn anew in each run.
        part: 1 to be evaluated on the records to choose by, 2 on those to report on.
        folder: The user's data.
        quick: Whether the task is the shortened one.
        priced: Whether ε is asked of the engine at the end.
    """

    task: str
    row: str
    epsilon: float
    sigma: float
    step_size: float
    clip: float
    seed: int
    part: int
    folder: Path | None = None
    quick: bool = False
    priced: bool = False


def quiet() -> None:
    """Take one core, and say nothing of what is left out on purpose: each model is proved once, before."""
    torch.set_num_threads(1)
    logging.getLogger("ghostclip").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def mechanism_of(row: Row, task: Task) -> Mechanism | None:
    """Return the mechanism for a task's length and momentum."""
    mechanism = row.mechanism
    if isinstance(mechanism, Correlated):
        mechanism = replace(mechanism, momentum=task.momentum)
    return None if mechanism is None else mechanism.for_epochs(task.epochs)


def planned(task: Task, row: Row, epsilon: float) -> CalibratedMechanism | None:
    """Return the noise for an ε; None for a training that is not private."""
    mechanism = mechanism_of(row, task)
    if mechanism is None:
        return None
    (plan,) = plan_privacy(
        num_samples=task.sizes[0],
        batch_size=task.batch_size,
        epochs=task.epochs,
        target_epsilon=epsilon,
        target_delta=task.delta,
        momentum=task.momentum,
        mechanisms=[mechanism],
    )
    return plan


def trained(job: Job) -> dict[str, float]:
    """Train, and return the accuracy of the last weights and of both averages; with ε if it is priced."""
    task, parts = found(job.task, job.folder, job.quick)
    torch.manual_seed(job.seed)
    model = task.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=job.step_size / job.clip, momentum=task.momentum)
    engine, module, stepper, loader = _private(job, task, (model, optimizer))
    steps = task.epochs * max(1, round(task.sizes[0] / task.batch_size))
    averages = {
        "exponential": AveragedWeights(model, optimizer, decay=DECAY),
        "tail": AveragedWeights(model, optimizer, kind="tail", start=steps // 2),
    }
    criterion = nn.CrossEntropyLoss()
    for _ in range(task.epochs):
        for inputs, targets in loader:
            stepper.zero_grad()
            criterion(module(inputs), targets).backward()
            stepper.step()
    module.eval()
    ways: dict[str, Callable[[], AbstractContextManager[None]]] = {name: averages[name].applied for name in averages}
    result = {name: _accuracy(module, parts[job.part], ways.get(name, nullcontext)) for name in READ}
    return {**result, "epsilon": engine.get_epsilon(task.delta)} if job.priced else result


def _private(job: Job, task: Task, given: tuple[nn.Module, Any], *, probe: bool = False) -> tuple[Any, Any, Any, Any]:
    row, (_, parts) = ROWS[job.row], found(job.task, job.folder, job.quick)
    inputs, targets = parts[0]
    # Records are numbers until a batch of them is taken at once.
    loader = DataLoader(
        range(len(targets)),  # type: ignore[arg-type] - what has a length and items is a data set
        batch_size=task.batch_size,
        shuffle=row.mechanism is None,
        collate_fn=lambda numbers: (inputs[numbers], targets[numbers]),
    )
    if row.mechanism is None:
        return None, *given, loader
    engine = PrivacyEngine()
    model, optimizer = given
    made = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=job.sigma,
        max_grad_norm=job.clip,
        clipping=row.clipping,
        mechanism=mechanism_of(row, task),
        probe=probe,
    )
    return engine, *made


@torch.no_grad()
def _accuracy(module: nn.Module, part: tuple[torch.Tensor, torch.Tensor], way: Callable[[], Any]) -> float:
    inputs, targets = part
    with way():
        right = [
            module(some).argmax(-1) == wanted
            for some, wanted in zip(inputs.split(1000), targets.split(1000), strict=True)
        ]
    return torch.cat(right).float().mean().item()


def prove(task: str, folder: Path | None, quick: bool) -> None:  # noqa: FBT001 - as `found`
    """Train a task's model for an epoch with every check of the library, which later trainings of it leave out."""
    job = Job(task, "poisson", 0.0, 1.0, 0.1, 1.0, seed=0, part=1, folder=folder, quick=quick)
    about, _ = found(task, folder, quick)
    model = about.make_model()
    _, module, optimizer, loader = _private(
        job, about, (model, torch.optim.SGD(model.parameters(), lr=0.0)), probe=True
    )
    criterion = nn.CrossEntropyLoss()
    for inputs, targets in loader:
        optimizer.zero_grad()
        criterion(module(inputs), targets).backward()
        optimizer.step()
