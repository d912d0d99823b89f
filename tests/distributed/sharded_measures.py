"""What a divided model costs and promises, as each rank finds it: collectives, memory, sensitivity, noise, refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from ghostclip import GhostClipper, PrivacyEngine
from ghostclip._memory import peak_bytes
from ghostclip.distributed import ShardedModel
from ghostclip.distributed.agreement import share_noise
from ghostclip.distributed.release import noisy_parts_, noisy_sums_
from ghostclip.errors import GhostClipError
from ghostclip.noise import make_noise_source
from tests.distributed.sharded import TRAININGS, blocks, built, losses_of, nested, samples, whole_of

SHAPES = ((40_001,), (300, 150), (3, 5), (1,), (7, 2))
STD, BOUND = 3.0, 0.05


def find(rank: int) -> dict[str, Any]:
    """Return what one rank finds.

    Args:
        rank: Its number.

    Returns:
        By what it is of.
    """
    return {
        "collectives": {name: _collectives(name) for name in ("nested", "gpt2")},
        "memory": _memory(),
        "moves": _moves(),
        "noise": _noise(),
        "refused": _refused(rank),
        "copies": _copies(rank),
    }


def _own(x: Tensor) -> Tensor:
    """This rank's rows of a batch that all ranks have."""
    return x[distributed.get_rank() :: distributed.get_world_size()]


def clipper_of(net: nn.Module, **options: Any) -> GhostClipper:
    """A clipper of a divided model, whose sums stay with it."""
    clipper = GhostClipper(net, sharded=ShardedModel(net), loss_reduction="sum", **options)
    clipper.own_gradients()
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
    """Count what a forward and a backward ask of the other ranks, without privacy, with it, and in two passes."""
    training = TRAININGS[name]
    x, y = (_own(part) for part in samples(training.inputs))
    found = {}
    for way in ("plain", "bookkeeping", "ghost"):
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


def _noise() -> Mapping[str, Any]:
    """Draw this rank's parts of the noise of several parameters, of which one is whole on every rank."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    found = {}
    for level in ("fast", "secure"):
        source = make_noise_source(level=level)
        share_noise(source)
        state = source.state_dict()
        sums: list[Tensor] = []
        for shape in SHAPES:
            dim = 1 if shape == (300, 150) else 0
            zeros = torch.zeros(shape)
            sums.append(zeros if shape == (3, 5) else distribute_tensor(zeros, mesh, [Shard(dim)]))
        noisy_parts_(sums, STD, source)
        found[level] = {
            "state": state,
            "noise": [whole_of(total) for total in sums],
            "held": [total.to_local().numel() if isinstance(total, DTensor) else total.numel() for total in sums],
        }
    return found


def _copies(rank: int) -> Mapping[str, Any]:
    """Reduce the sums of many small parameters, and of one that is no range of memory, that every rank has whole."""
    source = make_noise_source()
    share_noise(source)
    state = source.state_dict()
    sums = [torch.full((7, number), rank + 1.0) for number in range(1, 60)]
    sums[4], sums[9] = torch.full((40, 30), rank + 1.0).mT, torch.empty(0, 3)
    with Collectives() as counted:
        noisy_sums_(sums, STD, source)
    return {"state": state, "sums": [total.contiguous() for total in sums], "counts": dict(counted.counts)}


class _Mixes(nn.Module):
    """Gives each sample something of all samples, on one rank only."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.layer, self.mixes = nn.Linear(4, 3), mixes

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0) if self.mixes else x)


def _refused(rank: int) -> Mapping[str, str]:
    """Try what one rank refuses; every rank must hear of it."""

    def mixes() -> None:
        net = _Mixes(mixes=rank == 1).double()
        whole_model: Any = nn.Sequential(net)
        blocks(whole_model)
        clipper_of(whole_model, max_grad_norm=BOUND)
        whole_model(torch.randn(4, 4, dtype=torch.float64))

    def raises() -> None:
        net: Any = nn.Sequential(nn.Linear(4, 3)).double()
        blocks(net)
        clipper_of(net, max_grad_norm=BOUND)
        if rank == 0:
            net[0].forward = lambda x: x @ torch.ones(9, 9, dtype=torch.float64)
        net(torch.randn(4, 4, dtype=torch.float64))

    def sigma() -> None:
        _private(1.0 + rank)

    def later() -> None:
        net, optimizer, loader = _private(1.0)
        x, y = next(iter(loader))
        losses_of(net, "features", x, y).sum().backward()
        if rank == 1:
            optimizer.noise_multiplier = 0.5
        optimizer.step()

    return {attempt.__name__: _message(attempt) for attempt in (mixes, raises, sigma, later)}


def _private(noise_multiplier: float) -> tuple[Any, Any, Any]:
    net = built(TRAININGS["nested"])
    nested(net)
    x, y = samples("features")
    module, optimizer, loader = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=8),
        noise_multiplier=noise_multiplier,
        max_grad_norm=BOUND,
        loss_reduction="sum",
    )
    return module, optimizer, loader


def _message(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except (GhostClipError, RuntimeError) as error:
        return str(error)
    return ""
