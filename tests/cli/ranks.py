"""Runs of ``ghostclip finetune`` in two processes, as torchrun starts them; what each saw goes to files."""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed

from ghostclip.cli import main


class Job(NamedTuple):
    """One call of the command in all processes.

    Attributes:
        words: Of the command line.
        stops: The process that is asked to stop after its second step; None for none.
        only: Further words of the second process alone.
    """

    words: Sequence[str]
    stops: int | None = None
    only: Sequence[str] = ()


def run(rank: int, ranks: int, folder: str, jobs: dict[str, Job]) -> None:
    """Be one process.

    Args:
        rank: Its number.
        ranks: How many there are.
        folder: Where the processes work, and where results go.
        jobs: What to do, by name.
    """
    torch.set_num_threads(1)
    os.chdir(folder)
    store = distributed.FileStore(f"{folder}/ports", ranks)
    found = {}
    for name, job in jobs.items():
        if rank == 0:
            store.set(name, str(_free_port()))
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=store.get(name).decode(),
        )  # fmt: skip
        words = [*job.words, *(job.only if rank else ())]
        with _asked_to_stop(job.stops == rank):
            found[name] = _called(words)
    torch.save(found, Path(folder) / f"seen{rank}.pt")
    sys.stdout.flush()
    # Meshes are kept to the end of the process, with threads that the end would wait for.
    os._exit(0)


def _free_port() -> int:
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _called(words: Sequence[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            status = main(["finetune", *words])
        except SystemExit as stopped:
            status = int(stopped.code or 0)
    if distributed.is_initialized():
        # Refused: torchrun would end the process.
        distributed.destroy_process_group()
    return status, out.getvalue(), err.getvalue()


@contextmanager
def _asked_to_stop(asked: bool) -> Iterator[None]:
    from ghostclip.finetune.training import FinetuneTrainer

    plain, taken = FinetuneTrainer.finish_step, [0]

    def finish_step(self: FinetuneTrainer) -> bool:
        taken[0] += 1
        if taken[0] == 2:
            signal.raise_signal(signal.SIGINT)
        return plain(self)

    if asked:
        FinetuneTrainer.finish_step = finish_step  # type: ignore[method-assign]
    yield
    FinetuneTrainer.finish_step = plain  # type: ignore[method-assign]
