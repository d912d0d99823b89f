"""What each of two processes does that train by one graph a step; results go to files, which the test compares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ghostclip import GraphOptions, PrivacyEngine
from ghostclip.distributed import broadcast_parameters
from tests.process_group import process_group

BATCH = 12


def records() -> TensorDataset:
    """Forty records of three classes."""
    features = torch.randn(40, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(features, features.abs().argmax(1) % 3)


def model(seed: int) -> nn.Module:
    """A small model with a normalisation layer."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).double()


def train(rank: int, mode: str, *, wrapped: bool, state: Any = None) -> dict[str, Any]:
    """Train for two epochs without noise.

    Args:
        rank: Number of the process: models start differently where nobody sends them round.
        mode: The `grad_sample_mode`.
        wrapped: Whether the model is wrapped by DistributedDataParallel before.
        state: Of the sampler, to repeat another training.

    Returns:
        The sampler's state at the beginning, parameters at the end, and how often graphs ran.
    """
    net = model(rank)
    if wrapped:
        net = DistributedDataParallel(net)
    else:
        broadcast_parameters(net)
    net, optimizer, *given, loader = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.5),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(records(), batch_size=BATCH),
        noise_multiplier=0.0,
        max_grad_norm=0.3,
        grad_sample_mode=mode,
    )
    if state is not None:
        loader.load_state_dict(state)
    criterion = given[0] if given else nn.CrossEntropyLoss()
    begun, step = loader.state_dict(), None
    if mode == "graph":
        step = net.deferral.step
        step.options = GraphOptions(backend="aten")
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(net(x), y).backward()
            optimizer.step()
    runs = 0 if step is None else sum(graph.runs for graph in step.graphs)
    return {"state": begun, "parameters": [p.detach().clone() for p in net.parameters()], "runs": runs}


def run(rank: int, ranks: int, folder: str, kinds: Sequence[str]) -> None:
    """Be one rank.

    Args:
        rank: Its number.
        ranks: How many there are.
        folder: Where they meet, and where results go.
        kinds: Whether the model is wrapped, "True" or "False", of each training.
    """
    torch.set_num_threads(1)
    with process_group(rank, ranks, folder):
        found = {}
        for kind in kinds:
            graph = train(rank, "graph", wrapped=kind == "True")
            eager = train(rank, "bookkeeping", wrapped=kind == "True", state=graph["state"])
            found[kind] = {"graph": graph, "eager": eager}
    torch.save(found, Path(folder) / f"rank{rank}.pt")
