"""Real data sets in place of synthetic inputs, read from files that the user has.

What is looked for in the folder, under the names that the data sets come with:

- MNIST: `train-images-idx3-ubyte` and `train-labels-idx1-ubyte`, each also with `.gz`
- CIFAR-10: `cifar-10-batches-bin/data_batch_*.bin` (the binary version)
- IMDb: `aclImdb/train/pos/*.txt` and `neg/*.txt`
- SNLI: `snli_1.0_train.jsonl`
- SST-2: `train.tsv` (columns sentence, label)
- E2E: `trainset.csv` (columns mr, ref)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.tasks import Batch
from paper_repro.cases import Case
from paper_repro.data import images, text
from paper_repro.data.errors import DataError

__all__ = ["DataError", "with_data"]


def _repeated(inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[int], Batch]:
    """The first samples, from the start again if there are too few."""

    def make(samples: int) -> Batch:
        chosen = torch.arange(samples) % len(targets)
        return inputs[chosen], targets[chosen]

    return make


def with_data(case: Case, folder: Path) -> Case:
    """The case on the real data set.

    Args:
        case: Says which data set its inputs stand for.
        folder: Where data sets lie.

    Returns:
        The case with a task that reads the data now.

    Raises:
        DataError: If a file is missing or malformed, or no data set belongs to the case.
    """
    if not case.data:
        raise DataError(f"{case.group} has no data set; leave --data out, or choose others with --case")
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    if case.data in images.LOADERS:
        inputs, targets = images.LOADERS[case.data](folder)
    else:
        inputs, targets = text.load(case.data, folder, length=case.length, vocabulary=case.vocabulary)
    return replace(case, task=replace(case.task, make_batch=_repeated(inputs, targets)))
