"""What each process does that trains with Opacus's distributed names."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ghostclip.compat.opacus.data_loader import DistributedUniformWithReplacementSampler
from ghostclip.compat.opacus.optimizers import DistributedDPOptimizer
from ghostclip.distributed import DifferentiallyPrivateDistributedDataParallel
from ghostclip.facade import GradSampleModule
from tests.compat.pairs import batch
from tests.process_group import process_group

BOUND, SIGMA = 0.5, 0.25
WRAPPERS = (DifferentiallyPrivateDistributedDataParallel, DistributedDataParallel)


def run(rank: int, ranks: int, folder: str) -> None:
    """Be one rank: take a half of the batch, step without noise and with it, and write the parameters down.

    Args:
        rank: Its number.
        ranks: How many there are.
        folder: Where they meet, and where results go.
    """
    torch.set_num_threads(1)
    with process_group(rank, ranks, folder):
        found = {wrapper.__name__: _states(wrapper, rank, ranks) for wrapper in WRAPPERS}
        sampler = DistributedUniformWithReplacementSampler(total_size=100, sample_rate=0.25)
        sampler.set_epoch(0)
        torch.save({**found, "batches": list(map(list, sampler))}, Path(folder) / f"rank{rank}.pt")


def _states(wrapper: type[nn.Module], rank: int, ranks: int) -> list[list[torch.Tensor]]:
    # Every rank's model starts differently; the wrapper makes them equal.
    torch.manual_seed(3 + rank)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    facade = GradSampleModule(wrapper(model))
    optimizer = DistributedDPOptimizer(
        torch.optim.SGD(facade.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        expected_batch_size=6,
    )
    x, y = batch()
    states = []
    for sigma in (0.0, SIGMA):
        optimizer.noise_multiplier = sigma
        nn.CrossEntropyLoss()(facade(x[rank::ranks]), y[rank::ranks]).backward()
        optimizer.step()
        states.append([p.detach().clone() for p in model.parameters()])
    return states
