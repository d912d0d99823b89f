"""Run a loop on several processes of this machine, joined by gloo."""

from __future__ import annotations

import functools
import os
import pickle
import socket
import tempfile
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import distributed

from tests.loops.loop import Loop, Seen
from tests.loops.oracle import see
from tests.loops.world import World

_WAIT = 60.0


@functools.cache
def _context():
    """A server that has torch loaded, from which processes are forked in no time."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.loops.warm"])
    return context


def see_on_ranks(loop: Loop, world: World) -> Seen:
    """Run a loop once, on as many processes as it asks for."""
    if loop.ranks == 1:
        return see(loop, world)
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        processes = [
            _context().Process(target=_rank, args=(loop, world, rank, port, folder), daemon=True)
            for rank in range(loop.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(_WAIT)
        found = [_result(Path(folder) / f"{rank}.pickle", process.exitcode) for rank, process in enumerate(processes)]
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return _merged(found)


def _rank(loop: Loop, world: World, rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 2)  # gloo and c10d write of every process that left
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(loop.ranks),
        "LOCAL_WORLD_SIZE": str(loop.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    world.rank, world.ranks = rank, loop.ranks
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=loop.ranks, timeout=timedelta(seconds=20)
    )
    seen = see(loop, world)
    place = Path(folder) / f"{rank}.pickle"
    place.with_suffix(".part").write_bytes(pickle.dumps(seen))
    place.with_suffix(".part").rename(place)
    # Whoever was refused does not wait for the others, and what gloo has to say at the end is not the loop's.
    os._exit(0)


def _result(place: Path, code: int | None) -> Seen:
    if place.exists():
        return pickle.loads(place.read_bytes())
    return Seen(error="TimeoutError: the ranks wait for each other" if code is None else f"Aborted: exit status {code}")


def _merged(found: list[Seen]) -> Seen:
    """What the first rank saw; a refusal on any rank is one, and ranks that differ are said to."""
    refusals = sorted((seen for seen in found if seen.refused), key=lambda seen: len(seen.releases))
    first = found[0]
    if refusals:
        first.error, first.refused, first.where = refusals[0].error, True, refusals[0].where
    else:
        failed = [seen for seen in found if seen.error]
        if failed:
            first.error, first.where = failed[0].error, failed[0].where
    for rank, other in enumerate(found[1:], start=1):
        first.moved += other.moved
        if len(other.releases) != len(first.releases):
            first.said = first.said or f"rank {rank}: {len(other.releases)} releases, rank 0: {len(first.releases)}"
        for number, (one, two) in enumerate(zip(first.releases, other.releases, strict=False), start=1):
            same = one.keys() == two.keys() and all(torch.allclose(one[n], two[n], atol=1e-12) for n in one)
            if not same:
                first.said = first.said or f"release {number} is another on rank {rank} than on rank 0"
    return first


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])
