"""What ranks must not be given, and what follows from taking each refusal at its word."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, default_collate

from ghostclip import GhostClipper
from ghostclip.data import DPDataLoader
from ghostclip.distributed import SharedNoise, broadcast_parameters
from ghostclip.distributed.agreement import Share, require_agreement, require_one_draw
from ghostclip.errors import GhostClipError
from ghostclip.noise import make_noise_source
from tests.distributed.loops import data, model, snapshot
from tests.private_run import PrivateRun

DRAWS = {
    "equal": (Share(5, 3, 9, 1.0, 0.5), Share(4, 3, 9, 1.0, 0.5)),
    "dealt out": (Share(5, 3, 9), Share(4)),
    "sampled by the user": (Share(5), Share(7)),
    "sharded again": (Share(5, 0, 5), Share(4, 1, 4)),
    "too few rows": (Share(5, 3, 9), Share(3, 3, 9)),
    "another bound": (Share(5, 3, 9, 1.0, 0.5), Share(4, 3, 9, 1.0, 0.6)),
    "another noise": (Share(5, 3, 9, 1.0, 0.5), Share(4, 3, 9, 1.1, 0.5)),
    "one refuses": (Share(5, 3, 9), None),
}
"""What the two ranks bring to a step."""


FAULTS = (
    "none", "every other batch", "a row less", "no backward", "another noise multiplier", "another bound",
    "another learning rate", "another order", "one frozen", "a lost update",
)  # fmt: skip
"""What rank 1 (of every other batch, each rank) does to its third step, or to its optimizer from the beginning."""


def find(rank: int) -> dict[str, Any]:
    """Return what one rank finds.

    Args:
        rank: Its number.

    Returns:
        By what it is of.
    """
    tries: dict[str, Callable[[], Any]] = {
        **{f"draw: {name}": lambda shares=shares: require_one_draw(shares[rank]) for name, shares in DRAWS.items()},
        **_models(rank),
        **_loaders(rank),
        **_wrappers(),
        **{f"step: {fault}": lambda fault=fault: _faulty_step(rank, fault) for fault in FAULTS},
        "noise of another checkpoint": lambda: _resumed_on_one(rank),
        "another order": lambda: require_agreement("step" if rank else "size", 1),
    }
    return {name: outcome(attempt) for name, attempt in tries.items()}


def outcome(attempt: Callable[[], Any]) -> tuple[str, str]:
    """Return the class and the text of what a try raises, empty if nothing."""
    try:
        attempt()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test judges it
        return type(error).__name__, str(error)
    finally:
        # A rank that waits at another place than this one would fail here.
        distributed.barrier()
    return "", ""


def private(
    net: nn.Module,
    loader: Any = None,
    *,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    noise_multiplier: float = 1.0,
    max_grad_norm: float = 0.5,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **options: Any,
) -> None:
    """Make a training private on this rank, and make two steps."""
    run = PrivateRun(
        data(), model=net, inner=kind, sigma=noise_multiplier, max_grad_norm=max_grad_norm,
        data_loader=DataLoader(data(), batch_size=4) if loader is None else loader, **options,
    )  # fmt: skip
    trained, optimizer, loader = run.model, run.optimizer, run.loader
    called = trained if wrap is None else wrap(trained)
    for _, (_, x, y) in zip(range(2), loader, strict=False):
        nn.functional.cross_entropy(called(x), y).backward()
        optimizer.step()


def _faulty_step(rank: int, fault: str) -> None:
    """Make steps until one is refused; nothing may have been released by it.

    Args:
        rank: Number of this process.
        fault: What happens.
    """
    net = model()
    loader = DataLoader(data(), batch_size=8, generator=torch.Generator().manual_seed(3))

    def inner(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters[::-1] if fault == "another order" and rank == 1 else parameters, lr=lr)

    run = PrivateRun(data(), model=net, inner=inner, max_grad_norm=0.5, data_loader=loader)
    trained, optimizer, loader = run.model, run.optimizer, run.loader
    for number, (_, x, y) in enumerate(batch for _ in range(4) for batch in loader):
        faulty = rank == 1 and number == 2
        if fault == "every other batch" and number % 2 != rank:
            continue
        if faulty:
            _set_otherwise(optimizer, net, fault)
        keep = len(x) - 1 if fault == "a row less" and faulty else len(x)
        if not (fault == "no backward" and faulty):
            nn.functional.cross_entropy(trained(x[:keep]), y[:keep]).backward()
        if fault == "a lost update" and faulty:
            _step_in_vain(optimizer)
            continue
        before = snapshot(net)
        try:
            optimizer.step()
        except GhostClipError:
            assert all(torch.equal(before[name], p) for name, p in snapshot(net).items()), "released nevertheless"
            raise


def _set_otherwise(optimizer: Any, net: Any, fault: str) -> None:
    if fault == "another noise multiplier":
        optimizer.noise_multiplier = 2.0
    elif fault == "another bound":
        optimizer.max_grad_norm = 0.6
    elif fault == "another learning rate":
        optimizer.param_groups[0]["lr"] = 0.05
    elif fault == "one frozen":
        net[3].bias.requires_grad_(False)


def _step_in_vain(optimizer: Any) -> None:
    """Make a step that ends in an error of the user's own, after all ranks have agreed on it."""

    def fail(*_: Any) -> None:
        raise ValueError

    handle = optimizer.register_step_pre_hook(fail)
    with contextlib.suppress(ValueError):
        optimizer.step()
    handle.remove()


def _models(rank: int) -> dict[str, Callable[[], Any]]:
    """Models that differ, and the remedy of the refusal."""

    def with_other(change: Callable[[nn.Module], Any], *, remedy: bool = False) -> Any:
        net = model()
        if rank == 1:
            change(net)
        if remedy:
            broadcast_parameters(net)
        return private(net)

    def last_bit(net: nn.Module) -> None:
        flat = net[3].bias.detach()
        flat[2] = torch.nextafter(flat[2], torch.tensor(9.0, dtype=flat.dtype))

    def longer(net: nn.Module) -> None:
        net.append(nn.Linear(3, 3).double())

    changes: dict[str, Callable[[nn.Module], Any]] = {
        "last bit": last_bit,
        "buffer": lambda net: net.count.add_(1),
        "frozen": lambda net: net[3].bias.requires_grad_(False),
        "shape": lambda net: net.__setitem__(3, nn.Linear(4, 7).double()),
        "name": longer,
        "dtype": lambda net: net.float(),
        "stage": lambda net: net.load_state_dict(model(1).state_dict()),
    }
    tries = {f"model: {name}": lambda c=change: with_other(c) for name, change in changes.items()}
    for name in ("last bit", "stage", "shape"):
        tries[f"broadcast: {name}"] = lambda c=changes[name]: with_other(c, remedy=True)
    tries["model: evaluation"] = lambda: private(model().train(rank == 0))

    def tried_twice() -> None:
        net, kind = model(), torch.optim.LBFGS if rank else torch.optim.SGD
        with contextlib.suppress(GhostClipError):
            private(net, kind=kind)
        private(net)

    tries["model: tried twice"] = tried_twice
    tries["optimizer: on one"] = lambda: private(model(), kind=torch.optim.LBFGS if rank else torch.optim.SGD)
    tries["mechanism: sigma"] = lambda: private(model(), noise_multiplier=1.0 + rank)
    tries["account: accountant"] = lambda: private(model(), accountant="prv" if rank else "rdp")
    tries["mechanism: reduction"] = lambda: private(model(), loss_reduction="sum" if rank else "mean")
    return tries


def _loaders(rank: int) -> dict[str, Callable[[], Any]]:
    """Loaders that ranks cannot share."""

    def dealt(dataset: Any = None, **options: Any) -> DataLoader[Any]:
        return DataLoader(data(), batch_size=4, sampler=DistributedSampler(dataset or data(), **options))

    apart = DPDataLoader.from_data_loader
    return {
        "sampler: four ranks": lambda: private(model(), dealt(num_replicas=4, rank=rank)),
        "sampler: remedy": lambda: private(model(), dealt()),
        "sampler: other remedy": lambda: private(model()),
        "sampler: other records": lambda: private(model(), dealt(Subset(data(), range(9)))),
        "sampler: apart": lambda: apart(dealt(), distributed=False),
        "loader: empty on one": lambda: private(
            model(), DataLoader(data() if rank else Subset(data(), []), batch_size=4)
        ),
        "loader: not a loader on one": lambda: private(model(), None if rank else "a loader"),
        "loader: another order on one": lambda: private(
            model(), DataLoader(Subset(data(), range(len(data()))[:: 1 - 2 * rank]), batch_size=4)
        ),
        "loader: random records": lambda: private(model(), DataLoader(_Augmented(rank), batch_size=4)),
        "loader: mixed on one": lambda: private(
            model(), DataLoader(data(), batch_size=4, collate_fn=_centred if rank else None)
        ),
    }


class _Augmented(Dataset[Any]):
    """Records that each reading changes, by random numbers of each rank's own."""

    def __init__(self, rank: int) -> None:
        self._random = torch.Generator().manual_seed(rank)

    def __len__(self) -> int:
        return len(data())

    def __getitem__(self, index: int) -> Any:
        number, x, y = data()[index]
        return number, x + torch.randn(x.shape, generator=self._random, dtype=x.dtype), y


def _centred(records: list[Any]) -> Any:
    number, x, y = default_collate(records)
    return number, x - x.mean(0), y


def _wrappers() -> dict[str, Callable[[], Any]]:
    """Wrappers that have to go, or that make a model's parts."""

    def apart() -> DataLoader[Any]:
        return DPDataLoader.from_data_loader(DataLoader(data(), batch_size=4), distributed=False)

    def bare() -> None:
        net = DistributedDataParallel(model())
        clipper = GhostClipper(net, max_grad_norm=0.5)
        _, x, y = data()[:4]
        clipper.backward(nn.functional.cross_entropy(net(x), y, reduction="none"))

    return {
        "wrapper: apart": lambda: private(DistributedDataParallel(model()), apart()),
        "wrapper: apart, second": lambda: private(model(), apart(), wrap=DistributedDataParallel),
        "wrapper: bare clipper": bare,
        "wrapper: static": lambda: private(model(), wrap=lambda m: DistributedDataParallel(m, static_graph=True)),
        "wrapper: static, first": lambda: private(DistributedDataParallel(model(), static_graph=True)),
        "wrapper: devices": lambda: private(nn.DataParallel(model())),
    }


def _resumed_on_one(rank: int) -> None:
    shared = SharedNoise(make_noise_source())
    shared.require_one_draw(Share(1))
    if rank == 1:
        shared.load_state_dict({**shared.state_dict(), "position": 7})
    shared.require_one_draw(Share(1))
