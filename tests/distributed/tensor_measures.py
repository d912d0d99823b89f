"""What tensor parallelism costs and promises, as each rank finds it: norms, collectives, bounds, noise, refusals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import TensorDataset

from ghostclip import GhostClipper
from ghostclip.clipping.bounds import PerParameter
from ghostclip.clipping.policies import ClipPolicy
from ghostclip.distributed import ShardedModel, SharedNoise
from ghostclip.errors import GhostClipError
from ghostclip.losses import token_losses
from ghostclip.noise import make_noise_source
from ghostclip.optim import DPOptimizer
from tests.distributed import said_by
from tests.distributed.sharded import built, losses_of, samples, whole_of
from tests.distributed.sharded_measures import clipper_of
from tests.distributed.tensor import TRAININGS
from tests.private_run import PrivateRun

BOUND, SAMPLES = 0.05, 6
MOVED = ("gpt, two passes", "sequence", "divided classes")


def find(rank: int) -> dict[str, Any]:
    """Return what one rank finds.

    Args:
        rank: Its number.

    Returns:
        By what it is of.
    """
    return {
        "by layer": by_layer(divided=True),
        "moves": {name: _moves(name) for name in MOVED},
        "refused": _refused(rank),
    }


def _divided(name: str) -> nn.Module:
    net = built(TRAININGS[name])
    return TRAININGS[name].shard(net) or net


def _sums(net: nn.Module, clipper: GhostClipper) -> list[Tensor]:
    parameters = list(net.parameters())
    found = clipper.hand_over_sums(parameters)
    clipper.reset()
    return [whole_of(torch.zeros_like(p) if own is None else own) for p, own in zip(parameters, found, strict=True)]


def by_layer(*, divided: bool) -> Mapping[str, Any]:
    """Norms and clipped sums of a batch, with a bound for each parameter.

    Args:
        divided: Whether this is one of several ranks.

    Returns:
        Norms of the samples in each group, and the sum of each parameter.
    """
    policy = ClipPolicy(BOUND, grouping=PerParameter())
    if divided:
        net = _divided("sequence")
        clipper = clipper_of(net, policy=policy)
    else:
        net = built(TRAININGS["sequence"])
        clipper = GhostClipper(net, loss_reduction="sum", policy=policy)
        clipper.withhold_gradients()
    x, y = (part[:SAMPLES] for part in samples("even ids"))
    clipper.backward(losses_of(net, "even ids", x, y))
    return {"norms": clipper.group_norms, "sums": _sums(net, clipper)}


def _moves(name: str) -> list[float]:
    """Leave one sample out after the other, and tell how far the sum moves, in units of C."""
    training = TRAININGS[name]
    net = _divided(name)
    clipper = clipper_of(net, max_grad_norm=BOUND)
    x, y = samples(training.inputs)

    def summed(left_out: int | None) -> Tensor:
        kept = [number for number in range(SAMPLES) if number != left_out]
        with training.around():
            clipper.backward(losses_of(net, training.inputs, x[kept], y[kept]))
        return torch.cat([total.flatten() for total in _sums(net, clipper)])

    everything = summed(None)
    return [float((everything - summed(number)).norm() / BOUND) for number in range(SAMPLES)]


# ---------------------------------------------------------------- what is refused


class _Stray(nn.Module):
    """A layer of its own between columns and rows."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(4, 8), middle, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(self.up(x).tanh()))


class _Scale(nn.Module):
    """One factor for all features that a rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class _Mixes(nn.Module):
    """Gives each sample something of all samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class _Tied(nn.Module):
    """A head that computes with the transposed table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) @ self.table.weight.mT


def _forward(net: nn.Module, *, x: Tensor | None = None) -> None:
    clipper = clipper_of(net.double(), max_grad_norm=BOUND)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) if x is None else x
    clipper.backward(net(x).flatten(1).sum(1))


def _refused(rank: int) -> Mapping[str, str]:
    """Try what is refused; every rank must hear of it."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tp",))
    ends = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def other_inputs() -> None:
        torch.manual_seed(0)
        net = parallelize_module(_Stray(nn.Identity()), mesh, ends)
        _forward(net, x=torch.full((4, 4), float(rank), dtype=torch.float64))

    def other_dropout() -> None:
        torch.manual_seed(0)
        net = parallelize_module(
            nn.Sequential(_Stray(nn.Identity()), nn.Dropout(), nn.Linear(3, 3)),
            mesh,
            {"0.up": ends["up"], "0.down": ends["down"]},
        )
        torch.manual_seed(rank)
        _forward(net)

    def divided_features() -> None:
        torch.manual_seed(0)
        _forward(parallelize_module(_Stray(_Scale()), mesh, ends))

    def transposed() -> None:
        torch.manual_seed(0)
        net = parallelize_module(_Tied(), mesh, {"table": RowwiseParallel(input_layouts=Replicate())})
        _forward(net, x=torch.arange(8).view(4, 2))

    def divided_samples() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))
        _forward(parallelize_module(net, mesh, {"0": SequenceParallel(sequence_dim=0, use_local_output=True)}))

    def own_tensors() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), mesh, [Shard(0)]))
        _forward(net)

    def mixes() -> None:
        torch.manual_seed(0)
        _forward(parallelize_module(_Stray(_Mixes()), mesh, ends))

    def divided_outputs() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4))
        _forward(parallelize_module(net, mesh, {"0": ColwiseParallel(output_layouts=Shard(0), use_local_output=False)}))

    attempts = (
        other_inputs, other_dropout, divided_features, transposed, divided_samples, own_tensors, mixes, divided_outputs,
    )  # fmt: skip
    return _losses_refused(mesh) | _noise_refused(mesh) | {attempt.__name__: said_by(attempt) for attempt in attempts}


def _sharded_afterwards(mesh: Any) -> None:
    """Divide a model that is private already."""
    torch.manual_seed(0)
    net = _Stray(nn.Identity())
    data = TensorDataset(torch.randn(8, 4))
    run = PrivateRun(data, model=net, batch_size=4, max_grad_norm=BOUND, loss_reduction="sum")
    fully_shard(net, mesh=mesh)
    run.model(next(iter(run.loader))[0]).sum().backward()
    run.optimizer.step()


def _noise_refused(mesh: Any) -> Mapping[str, str]:
    """Try noise that does not know which ranks have the same samples."""

    def released_with(source: Any) -> None:
        # Every rank has all of what is trained.
        net = parallelize_module(_Stray(nn.LayerNorm(8)), mesh, {"up": ColwiseParallel(output_layouts=Replicate())})
        net.up.requires_grad_(False)
        clipper = clipper_of(net, max_grad_norm=BOUND)
        trained = [p for p in net.parameters() if p.requires_grad]
        DPOptimizer(
            torch.optim.SGD(trained, lr=0.1), noise_multiplier=1.0, expected_batch_size=4, loss_reduction="sum",
            clipper=clipper, noise_source=source,
        )  # fmt: skip

    attempts: dict[str, Callable[[], None]] = {
        "noise of one rank": lambda: released_with(make_noise_source()),
        "copies of sums": lambda: released_with(SharedNoise(make_noise_source())),
    }
    return {name: said_by(attempt) for name, attempt in attempts.items()}


def _losses_refused(mesh: Any) -> Mapping[str, str]:
    """Try losses of logits whose classes lie on several ranks."""

    def back(losses: Callable[[Tensor, Tensor], Tensor], *, within: bool = True, plain: bool = False) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6)).double()
        parallelize_module(net, mesh, {"0": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
        clipper = GhostClipper(net, sharded=ShardedModel(net), loss_reduction="mean", max_grad_norm=BOUND)
        with _taken_back(loss_parallel()):
            found = losses(net(torch.randn(4, 4).double()), torch.arange(4))
            if within:
                found.backward() if plain else clipper.backward(found)
        if not within:
            clipper.backward(found)

    each = functools.partial(nn.functional.cross_entropy, reduction="none")
    attempts: dict[str, Callable[[], None]] = {
        "sharded_afterwards": lambda: _sharded_afterwards(mesh),
        "parts of losses": lambda: back(lambda out, _: out.sum(1)),
        "a scalar on the mesh": lambda: back(nn.functional.cross_entropy),
        "a plain backward": lambda: back(lambda out, y: each(out, y).sum(), plain=True),
        "a scalar off the mesh": lambda: back(lambda out, y: nn.functional.cross_entropy(out, y).to_local()),
        "outside the context": lambda: back(each, within=False),
        "off the mesh, outside": lambda: back(lambda out, y: each(out, y).to_local(), within=False),
        "log-softmax alone": lambda: back(lambda out, _: out.log_softmax(1)[:, 3]),
        "log-softmax as well": lambda: back(_with_confidence),
        "samples that meet": lambda: back(lambda out, y: each(out, y) - each(out, y).mean()),
        "smoothed": lambda: back(lambda out, y: token_losses(out[:, None], y[:, None], label_smoothing=0.1)),
    }
    return {name: said_by(attempt) for name, attempt in attempts.items()}


@contextmanager
def _taken_back(context: AbstractContextManager[None]) -> Iterator[None]:
    """Leave a context of torch that an exception would not end."""
    with ExitStack() as stack:
        stack.enter_context(context)
        try:
            yield
        except GhostClipError:
            stack.close()
            raise


def _with_confidence(out: Tensor, labels: Tensor) -> Tensor:
    """A cross-entropy, and a term of the log-probabilities that it was made of."""
    logs = out.log_softmax(1)
    return nn.functional.nll_loss(logs, labels, reduction="none") - logs[:, 3]
