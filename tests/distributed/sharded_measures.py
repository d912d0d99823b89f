"""What a divided model costs and promises, as each rank finds it: collectives, memory, sensitivity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from ghostclip import GhostClipper
from ghostclip._memory import peak_bytes
from ghostclip.distributed import ShardedModel
from tests.distributed.sharded import TRAININGS, built, losses_of, nested, samples

BOUND = 0.05


def find(rank: int) -> dict[str, Any]:
    """Return what one rank finds.

    Args:
        rank: Its number.

    Returns:
        By what it is of.
    """
    del rank
    return {"collectives": _collectives("gpt2"), "memory": _memory(), "moves": _moves()}


def _own(x: Tensor) -> Tensor:
    """This rank's rows of a batch that all ranks have."""
    return x[distributed.get_rank() :: distributed.get_world_size()]


def clipper_of(net: nn.Module, **options: Any) -> GhostClipper:
    """A clipper of a divided model, whose sums stay with it."""
    clipper = GhostClipper(net, sharded=ShardedModel(net), loss_reduction="sum", **options)
    clipper.withhold_gradients()
    return clipper


class Collectives(TorchDispatchMode):
    """Counts the collective operations of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def _collectives(name: str) -> Mapping[str, Mapping[str, int]]:
    """Count what a forward and a backward ask of the other ranks, without privacy and with it."""
    training = TRAININGS[name]
    x, y = (_own(part) for part in samples(training.inputs))
    found = {}
    for way in ("plain", "bookkeeping"):
        net = built(training)
        training.shard(net)
        assert isinstance(net, FSDPModule)
        net.set_force_sum_reduction_for_comms(True)
        clipper = None if way == "plain" else clipper_of(net, max_grad_norm=BOUND, strategy=way)
        for _ in range(3):
            with Collectives() as counted:
                losses = losses_of(net, training.inputs, x, y)
                losses.sum().backward() if clipper is None else clipper.backward(losses)
            if clipper is not None:
                clipper.reset()
        found[way] = dict(counted.counts)
    return found


def _wide() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(384, 384), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(384, 3))


def _memory() -> Mapping[str, int]:
    """Measure the live bytes of a step above those of the model."""
    x, y = torch.randn(8, 384), torch.arange(8) % 3
    found = {}
    for way in ("plain", "bookkeeping"):
        net = _wide()
        for layer in net:
            nested_in: Any = layer
            torch.distributed.fsdp.fully_shard(nested_in)
        torch.distributed.fsdp.fully_shard(net)
        assert isinstance(net, FSDPModule)
        net.set_force_sum_reduction_for_comms(True)
        clipper = None if way == "plain" else clipper_of(net, max_grad_norm=BOUND)

        def step(net: nn.Module = net, clipper: GhostClipper | None = clipper) -> None:
            losses = nn.functional.cross_entropy(net(x), y, reduction="none")
            losses.sum().backward() if clipper is None else clipper.backward(losses)

        peaks = []
        for _ in range(6):
            peaks.append(peak_bytes(step, torch.device("cpu")) or 0)
            net.zero_grad() if clipper is None else clipper.reset()
        # gloo's threads let go of what they have sent a moment later, or not. The first steps prove.
        found[way] = min(peaks[1:3] + peaks[4:])
    return found


def _moves() -> list[float]:
    """Leave one sample out after the other, and tell how far the sum over all ranks moves, in units of C."""
    training = TRAININGS["nested"]
    net = built(training)
    nested(net)
    clipper = clipper_of(net, max_grad_norm=BOUND)
    x, y = samples("features")

    def summed(left_out: int | None) -> list[Tensor]:
        kept = [number for number in range(8) if number != left_out]
        mine = torch.tensor([number for number in kept if number % 2 == distributed.get_rank()])
        losses_of(net, "features", x[mine], y[mine]).sum().backward()
        clipper.rest()
        sums: list[Any] = clipper.hand_over_sums(list(net.parameters()))
        clipper.reset()
        return [total.full_tensor() for total in sums]

    everything = summed(None)
    return [
        float(torch.cat([(a - b).flatten() for a, b in zip(everything, summed(number), strict=True)]).norm() / BOUND)
        for number in range(8)
    ]
