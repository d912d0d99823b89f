"""Independent pieces of work, done by several threads: numpy lets go of the interpreter while it draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch


def run(jobs: Iterator[Callable[[], None]], *, workers: int) -> None:
    """Run all jobs, in any order if there are several threads, and return when they are done."""
    # One thread at a time asks for the next job. The others end with the call, so that a process may fork.
    if workers <= 1:
        for job in jobs:
            job()
        return
    turn = Lock()

    # Threads start with gradients on, whatever the one that started them does.
    @torch.no_grad()
    def work() -> None:
        while True:
            with turn:
                job = next(jobs, None)
            if job is None:
                return
            job()

    with ThreadPoolExecutor(workers - 1) as pool:
        others = [pool.submit(work) for _ in range(workers - 1)]
        work()
    for other in others:
        other.result()
