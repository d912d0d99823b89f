"""Trainings that an error of the user's own ends on one of two ranks, as each rank sees them."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from tests.private_run import PrivateRun

CASES = ("forward in parts", "proved forward in parts", "forward", "loader", "optimizer")
UNSEEN = "loop in parts"
"""Raised between forward and backward, where nobody sees it."""
TIMEOUT = 120
"""Seconds that a rank waits for another that is there and does not come."""
LAST = 6
"""How many steps there are. The fourth forward is one that all ranks prove."""


class _Records(TensorDataset):
    """Records of which one cannot be read any more."""

    fails = False

    def __getitem__(self, index: int) -> Any:
        _raise_if(self.fails)
        return super().__getitem__(index)


class _Layer(nn.Linear):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        _raise_if(self.fails)
        return super().forward(x)


class _Update(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        _raise_if(self.fails)
        return super().step(closure)


def _raise_if(fails: bool) -> None:
    if fails:
        raise ValueError("the user's own error")


def run(rank: int, ranks: int, folder: str, case: str, recovers: bool) -> None:
    """Be one rank, and write down what was raised, and when.

    Args:
        rank: Its number; the last one meets the error.
        ranks: How many there are.
        folder: Where they meet, and where results go.
        case: Where the error is raised.
        recovers: Whether the last rank goes on after it, and ends without a word in the same step.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    meeting, timeout = f"file://{folder}/meeting", timedelta(seconds=TIMEOUT)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timeout)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), _Layer(5, 3))
    if case.endswith("in parts"):
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    records = _Records(torch.randn(16, 4), torch.arange(16) % 3)
    run = PrivateRun(records, model=net, inner=_Update, batch_size=8)
    model, private, loader = run.model, run.optimizer, run.loader
    culprit: Any = {"loader": records, "optimizer": run.optimizer.original_optimizer}.get(case, net[1])
    error, begun = ("", ""), time.monotonic()
    culprit = culprit if rank == ranks - 1 else None
    try:
        _train(model, private, loader, culprit, bad=3 if "proved" in case else 2, case=case, recovers=recovers)
    except Exception as raised:  # noqa: BLE001 - whatever it is, the test looks at it
        error = (type(raised).__name__, str(raised))
    torch.save((*error, time.monotonic() - begun), Path(folder) / f"rank{rank}.pt")
    os._exit(0)


def goes_on(rank: int, ranks: int, folder: str) -> None:
    """Be one rank of a loop that catches whatever is raised, where noise cannot be added on the second rank.

    Args:
        rank: Its number.
        ranks: How many there are.
        folder: Where they meet, and where what it said goes, with the parameters that it ended with.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    meeting, timeout = f"file://{folder}/meeting", timedelta(seconds=3)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timeout)
    torch.manual_seed(0)
    records = TensorDataset(torch.randn(16, 4), torch.arange(16) % 3)
    run = PrivateRun(records, model=nn.Linear(4, 3), batch_size=8)
    source, said = run.optimizer.noise_source._source, []
    for _ in range(3):
        for number, batch in enumerate(run.loader):
            if rank and number == 1:
                source.add_share_ = lambda *_, **__: _raise_if(fails=True)
            try:
                run.step(batch)
            except Exception as error:  # noqa: BLE001 - the loop goes on whatever it is
                said.append(str(error))
                source.__dict__.pop("add_share_", None)
    parameters = [p.detach() for p in run.bare.parameters()]
    torch.save((said, parameters, run.optimizer.releases), Path(folder) / f"rank{rank}.pt")
    os._exit(0)


def _train(model: Any, private: Any, loader: Any, culprit: Any, *, bad: int, case: str, recovers: bool) -> None:
    step = 0
    while step < LAST:
        for x, y in loader:
            step += 1
            last = culprit is not None and step == bad
            if last and recovers:
                culprit.fails = True
                with contextlib.suppress(ValueError):
                    model(x)
                culprit.fails = False
            private.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            _raise_if(fails=last and case == UNSEEN)
            loss.backward()
            if last and recovers:
                os._exit(0)
            if last:
                culprit.fails = True
            private.step()
