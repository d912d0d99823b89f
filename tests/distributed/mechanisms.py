"""Trainings with mechanisms whose batches two processes share, as each of them runs them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import TensorDataset

from ghostclip.mechanisms import BallsInBins, BandedInverse, BufferedToeplitz, CyclicPoissonSampling, Mechanism
from tests.private_run import PrivateRun

RECORDS, BATCH, EPOCHS, DELTA = 24, 6, 2, 1e-2
MECHANISMS: dict[str, Mechanism] = {
    "balls in bins": BallsInBins(),
    "cyclic": CyclicPoissonSampling(groups=2),
    "banded inverse": BandedInverse(bands=3, epochs=EPOCHS),
    "buffered": BufferedToeplitz(buffers=2, epochs=EPOCHS),
}


def _begin(name: str, *, divided: bool) -> tuple[PrivateRun, list[Tensor]]:
    torch.manual_seed(0)
    # One parameter of several blocks of noise, of which each process draws a share.
    net: nn.Module = nn.Sequential(nn.Linear(1500, 50), nn.Tanh(), nn.Linear(50, 3)).double()
    if divided:
        net = nn.parallel.DistributedDataParallel(net)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(RECORDS, 1500, generator=generator, dtype=torch.float64)
    released: list[Tensor] = []
    run = PrivateRun(
        TensorDataset(features, torch.arange(RECORDS) % 3), model=net, inner=partial(torch.optim.SGD, momentum=0.5),
        batch_size=BATCH, max_grad_norm=0.3, mechanism=MECHANISMS[name],
    )  # fmt: skip
    run.optimizer.attach_release_hook(
        lambda _, found: released.append(torch.cat([p.detach().flatten().clone() for p in found]))
    )
    return run, released


def _epoch(run: PrivateRun) -> None:
    for x, y in run.loader:
        run.optimizer.zero_grad()
        nn.functional.cross_entropy(run.model(x), y).backward()
        run.optimizer.step()


def alone(name: str, states: dict[str, Any]) -> dict[str, Any]:
    """Train as one process, with the noise and the batches of others.

    Args:
        name: Of the mechanism.
        states: Of noise and batches.

    Returns:
        What was released, and ε.
    """
    run, released = _begin(name, divided=False)
    run.began(states)
    for _ in range(EPOCHS):
        _epoch(run)
    return {"released": torch.stack(released), "epsilon": run.engine.get_epsilon(DELTA)}


def find(rank: int, folder: str) -> dict[str, Any]:
    """Train with each mechanism, save between two epochs, and go on from the file once more.

    Args:
        rank: Number of this process.
        folder: Where files go.

    Returns:
        What was released, by the whole training and after resuming, and the states at the beginning.
    """
    found: dict[str, Any] = {}
    for name in MECHANISMS:
        run, released = _begin(name, divided=True)
        states = run.began()
        _epoch(run)
        if rank == 0:
            run.save(f"{folder}/{name}.pt")
        distributed.barrier()
        _epoch(run)
        again, resumed = _begin(name, divided=True)
        again.load(f"{folder}/{name}.pt")
        _epoch(again)
        rows = run.optimizer.noise_source._source._rows
        held = [] if rows is None else [u for _, sections in rows._held.values() for past in sections for u in past]
        found[name] = {
            "states": states,
            "released": torch.stack(released),
            "resumed": torch.stack(resumed),
            "epsilon": run.engine.get_epsilon(DELTA),
            "resumed epsilon": again.engine.get_epsilon(DELTA),
            "held": sum(u.numel() for u in held),
        }
    return found
