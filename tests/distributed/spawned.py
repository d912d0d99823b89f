"""Processes of one test: what each finds, in the order of the ranks, and trainings that are those of one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.distributed.sharded import Training, train
from tests.process_group import process_group, start_ranks


def found_by_ranks(
    find: Callable[..., Any], ranks: int, folder: Path, *arguments: Any, meshes: bool = True
) -> list[Any]:
    """Run a function of a module in processes that train together.

    Args:
        find: Called with the number of the process and the arguments; returns what it has found.
        ranks: How many processes.
        folder: Where they meet.
        *arguments: Of the function.
        meshes: Whether it makes device meshes.

    Returns:
        What each has found.
    """
    start_ranks(_be, ranks, str(folder), find, arguments, meshes)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]


def _be(rank: int, ranks: int, folder: str, find: Callable[..., Any], arguments: Sequence[Any], meshes: bool) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with process_group(rank, ranks, folder, meshes=meshes):
        found = find(rank, *arguments)
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    if meshes:
        os._exit(0)


def assert_as_one_process(found: Sequence[Any], name: str, training: Training) -> None:
    """Compare the weights of a training, with noise, and its account, with those of one process.

    Args:
        found: What each rank has found.
        name: Of the training.
        training: The training.
    """
    alone = train(training, divided=False, states=found[0][name]["states"])
    for rank in found:
        assert rank[name]["epsilon"] == alone["epsilon"]
        assert rank[name]["wide"]
        assert rank[name]["in parts"]
        for one, own in zip(alone["parameters"], rank[name]["parameters"], strict=True):
            torch.testing.assert_close(own, one, rtol=training.rtol, atol=training.rtol)
