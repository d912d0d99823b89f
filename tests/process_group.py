"""A process group of gloo that is gone, threads and all, when the block is left."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import distributed, multiprocessing

if TYPE_CHECKING:
    import pytest

_THREADS = Path("/proc/self/task")
_TIMEOUT = timedelta(minutes=2)
"""A rank that waits for one that does not come fails the test, in place of stopping it."""


def start_ranks(run: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Run a function of a module in several processes, and wait for them; what one raises is raised.

    They are forked from a server that has torch loaded, see `pytest_configure`: each would take seconds to load it.

    Args:
        run: Called with the number of the process, how many there are, and the arguments.
        ranks: How many processes.
        *arguments: Of the function.
    """
    multiprocessing.start_processes(run, args=(ranks, *arguments), nprocs=ranks, start_method="forkserver")


def asked(request: pytest.FixtureRequest, name: str, **others: Any) -> list[Any]:
    """Return the values of a parameter that this session's tests of a file take: processes need not find the rest.

    Args:
        request: Of a fixture of the file.
        name: Of the parameter.
        **others: Values of further parameters that the tests have.

    Returns:
        Each value once, in the order of the tests.
    """
    given = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return list(dict.fromkeys(of[name] for of in given if name in of and others.items() <= of.items()))


@contextmanager
def process_group(rank: int, ranks: int, folder: str, *, meshes: bool = False) -> Iterator[None]:
    """Join the others, and leave them.

    Args:
        rank: Number of this process.
        ranks: How many there are.
        folder: Where they meet.
        meshes: Whether device meshes were made, which torch keeps with their groups to the end of the process: leave
            that by `os._exit`.

    Yields:
        Nothing.

    Raises:
        AssertionError: If threads of gloo outlive the group: one that lets go of a tensor while Python ends aborts the
            process, which under load is seen now and then.
    """
    # Its functions have the world as a default argument. torch's optimizers load it when the first one is made: with
    # the world there already, it would never be let go.
    import torch.distributed.nn.functional  # noqa: F401

    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks, timeout=_TIMEOUT
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()
    gc.collect()
    if not meshes and _THREADS.exists():
        named = [(thread / "comm").read_text().strip() for thread in _THREADS.iterdir()]
        assert not [name for name in named if "gloo" in name], named
