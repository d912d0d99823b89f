"""Training loops that scripts for several ranks have, as each of two processes runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ghostclip.distributed import DifferentiallyPrivateDistributedDataParallel
from tests.private_run import PrivateRun

RECORDS, BATCH, BOUND, RATE = 21, 4, 0.3, 0.5


class Loop(NamedTuple):
    """What a script does.

    Attributes:
        sampler: Whether it gives its loader a `DistributedSampler`.
        poisson: Its `poisson_sampling`.
        wrapper: How it wraps the model: before make_private ("first"), and goes on with that wrapper ("kept"), or
            afterwards ("second", and "unused" with find_unused_parameters); "opacus" before, in Opacus's wrapper.
        strategy: Its grad_sample_mode.
        parts: Records of a part of the batch that it calls backward for at once; None for all of them.
    """

    sampler: bool = False
    poisson: bool = True
    wrapper: str = ""
    strategy: str = "auto"
    parts: int | None = None


LOOPS = (
    Loop(),
    Loop(poisson=False),
    Loop(sampler=True),
    Loop(sampler=True, poisson=False),
    Loop(wrapper="opacus"),
    Loop(wrapper="first"),
    Loop(wrapper="first", sampler=True, poisson=False),
    Loop(wrapper="kept"),
    Loop(wrapper="kept", strategy="hooks"),
    Loop(wrapper="second"),
    Loop(wrapper="second", strategy="hooks"),
    Loop(wrapper="unused", sampler=True),
    Loop(parts=1),
)


def model(seed: int = 0) -> nn.Module:
    """A small model in float64, with a frozen parameter and a buffer."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 3)).double()
    net[2].weight.requires_grad_(False)
    net.register_buffer("count", torch.tensor(3))
    return net


def data() -> TensorDataset:
    """Records that know their number."""
    features = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(torch.arange(RECORDS), features, features.abs().argmax(1) % 3)


def find(rank: int, loops: Sequence[Loop]) -> list[dict[str, Any]]:
    """Return what one rank finds.

    Args:
        rank: Its number.
        loops: What it runs.

    Returns:
        Loop by loop.
    """
    return [train(loop, rank) for loop in loops]


def train(loop: Loop, rank: int) -> dict[str, Any]:
    """Train for two passes without noise.

    Args:
        loop: What the script does.
        rank: Number of this process; a wrapper that is put on first makes models equal that started differently.

    Returns:
        For each step the records of this rank and the parameters before it; the parameters at the end; what the
        account says; whether a wrapper would still add up gradients.
    """
    net = model(rank if loop.wrapper in {"first", "kept", "opacus"} else 0)
    given: nn.Module = net
    if loop.wrapper in {"first", "kept"}:
        given = DistributedDataParallel(net)
    elif loop.wrapper == "opacus":
        given = DifferentiallyPrivateDistributedDataParallel(net)
    sampler = DistributedSampler(data()) if loop.sampler else None
    run = PrivateRun(
        data(), model=given, lr=RATE, sigma=0.0, max_grad_norm=BOUND, poisson_sampling=loop.poisson,
        data_loader=DataLoader(data(), batch_size=BATCH, sampler=sampler, shuffle=None if loop.sampler else True),
        grad_sample_mode=loop.strategy,
    )  # fmt: skip
    engine, private, optimizer, loader = run.engine, run.model, run.optimizer, run.loader
    called = {
        "kept": lambda: given,
        "second": lambda: DistributedDataParallel(private),
        "unused": lambda: DistributedDataParallel(private, find_unused_parameters=True),
    }.get(loop.wrapper, lambda: private)()
    steps, divisors = [], list[float]()
    optimizer.attach_release_hook(lambda private, _: divisors.append(private.divisor))
    for epoch in range(2):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for numbers, x, y in loader:
            steps.append({"records": numbers.tolist(), "before": snapshot(net)})
            optimizer.zero_grad()
            size = loop.parts or max(1, len(x))
            for part, targets in zip(x.split(size), y.split(size), strict=True):
                nn.functional.cross_entropy(called(part), targets).backward()
            optimizer.step()
            steps[-1]["divisor"] = divisors.pop()
    return {
        "steps": steps,
        "after": snapshot(net),
        "batch": optimizer.expected_batch_size,
        "history": engine.accountant.history,
        "adds_up": any(getattr(module, "require_backward_grad_sync", False) for module in (given, called)),
    }


def snapshot(net: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the trainable parameters by name."""
    return {name: p.detach().clone() for name, p in net.named_parameters() if p.requires_grad}
