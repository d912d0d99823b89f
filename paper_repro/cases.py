"""What a table is made of: cases that are measured, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from benchmarks.engines import Engine
from benchmarks.tasks import Batch, Task
from paper_repro.published import Reference

# "tiny" shows that everything runs; "small" fits 2 CPU cores; "full" is as published.
Size = Literal["tiny", "small", "full"]


@dataclass(frozen=True)
class Case:
    """One model at one batch size.

    Attributes:
        task: The model and its batch.
        group: Short name of the model; cases of one group differ in the batch size only, and are checked together.
        title: What a reader sees for the group.
        epoch: Samples of an epoch, where times are published by epoch; else 0.
        published: Names of engines with what was published for the like.
        data: Name of the data set that the inputs stand for; "" if there is none.
        length: Positions of a sample, if it is text.
        vocabulary: Its ids are below this.
    """

    task: Task
    group: str
    title: str
    epoch: int = 0
    published: Mapping[str, str] = field(default_factory=dict)
    data: str = ""
    length: int = 0
    vocabulary: int = 0


@dataclass(frozen=True)
class Table:
    """A published table, to be measured again.

    Attributes:
        letter: Its name on the command line.
        title: What a reader sees.
        cases: What is measured.
        references: What was published.
        engines: All engines; the argument says whether for the check (no noise, gradients kept) or for timing.
        unit: What a time stands for in the table: "step", "epoch" or "examples".
        memory: Whether peak memory is measured as well.
        minutes: What the whole table takes, about, on two cores of a CPU.
        timed_share: Share of it for checks and times; the rest is for memory and the like.
        checked_samples: Samples of the batch that engines are checked on.
        notes: What differs from the publication.
        extra: "stages" or "capacity": a second measurement that the table has.
    """

    letter: str
    title: str
    cases: tuple[Case, ...]
    references: tuple[Reference, ...]
    engines: Callable[[bool], list[Engine]]
    unit: Literal["step", "epoch", "examples"] = "step"
    memory: bool = False
    minutes: float = 6.0
    timed_share: float = 1.0
    checked_samples: int = 4
    notes: tuple[str, ...] = ()
    extra: str = ""


def images(*shape: int, classes: int = 10) -> Callable[[int], Batch]:
    """Random images with labels.

    Args:
        *shape: Channels, height, width.
        classes: Number of classes.

    Returns:
        Makes a batch of a number of samples.
    """
    return lambda samples: (torch.randn(samples, *shape), torch.randint(0, classes, (samples,)))


def texts(length: int, vocabulary: int, *, classes: int = 0) -> Callable[[int], Batch]:
    """Random ids with labels.

    Args:
        length: Ids of a sample.
        vocabulary: Ids are below this.
        classes: Number of classes; 0 to predict the next id at every position.

    Returns:
        Makes a batch of a number of samples.
    """

    def make(samples: int) -> Batch:
        ids_BT = torch.randint(0, vocabulary, (samples, length + 1))
        if classes:
            return ids_BT[:, :-1].contiguous(), torch.randint(0, classes, (samples,))
        return ids_BT[:, :-1].contiguous(), ids_BT[:, 1:].contiguous()

    return make
