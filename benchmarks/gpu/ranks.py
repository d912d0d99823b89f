"""Private training over NCCL, held against gloo on CPUs: `python -m benchmarks.gpu.ranks --ranks 2` on two GPUs.

Both draw the same records and add no noise, so that they end at the same weights; with noise, all ranks must end at the
same ones. One rank needs one GPU, and shows that a process group of NCCL is taken for what it is.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.engines import CannotDo
from benchmarks.gpu.rows import Row, started
from ghostclip import PrivacyEngine
from ghostclip.distributed import broadcast_parameters

# Of weights after an epoch, between a GPU's float32 and a CPU's.
CLOSE = 1e-4
RECORDS = 64


def _train(device: torch.device, rank: int, sigma: float, drawn: Any) -> tuple[Any, list[torch.Tensor], float]:
    """Train for an epoch; returns the sampler's state at its beginning, the weights and ε."""
    torch.manual_seed(rank)
    features = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(features, features.abs().argmax(1) % 3)
    engine = PrivacyEngine()
    net: Any = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).to(device)
    broadcast_parameters(net)
    net, optimizer, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.5),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=sigma,
        max_grad_norm=0.3,
    )
    if drawn is not None:
        loader.load_state_dict(drawn)
    begun = loader.state_dict()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x.to(device)), y.to(device)).backward()
        optimizer.step()
    return begun, [p.detach().cpu() for p in net.parameters()], engine.get_epsilon(1e-5) if sigma else float("inf")


def _rank(rank: int, ranks: int, folder: str, backend: str) -> None:
    """Be one process of a group."""
    warnings.filterwarnings("ignore", message="noise_multiplier=0")
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend, init_method=f"file://{folder}/meeting-{backend}", rank=rank, world_size=ranks
    )
    try:
        place = Path(folder) / "drawn.pt"
        drawn = torch.load(place, weights_only=False) if place.exists() else {}
        found = {}
        for sigma in (0.0, 1.0):
            begun, weights, epsilon = _train(device, rank, sigma, drawn.get(rank, {}).get(sigma))
            found[sigma] = {"drawn": begun, "weights": weights, "epsilon": epsilon}
        torch.save(found, Path(folder) / f"{backend}-{rank}.pt")
    finally:
        distributed.destroy_process_group()


def _found(backend: str, ranks: int, folder: str) -> list[dict[float, Any]]:
    """Run a group and return what each of its ranks found."""
    multiprocessing.spawn(_rank, args=(ranks, folder, backend), nprocs=ranks)
    found = [torch.load(Path(folder) / f"{backend}-{rank}.pt", weights_only=False) for rank in range(ranks)]
    drawn = {rank: {sigma: of["drawn"] for sigma, of in one.items()} for rank, one in enumerate(found)}
    torch.save(drawn, Path(folder) / "drawn.pt")
    return found


def _off(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    pairs = zip(first, second, strict=True)
    return max(float((one - two).abs().max() / one.abs().max()) for one, two in pairs)


def _compared(row: Row, first: list[dict[float, Any]], second: list[dict[float, Any]]) -> None:
    """Compare a group with another without noise, and its ranks with each other with noise."""
    row["error"] = _off(first[0][0.0]["weights"], second[0][0.0]["weights"])
    row["ranks_apart"] = max(_off(second[0][1.0]["weights"], other[1.0]["weights"]) for other in second)
    row["epsilon"] = second[0][1.0]["epsilon"]
    same = row["ranks_apart"] == 0 and row["epsilon"] == first[0][1.0]["epsilon"]
    row["status"] = "ok" if row["error"] <= CLOSE and same else "wrong"


def main(given: list[str] | None = None) -> int:
    """Train over gloo twice, and over NCCL."""
    own = ("--ranks", {"type": int, "default": 1, "help": "how many processes, each with a GPU of its own"})
    job = started("benchmarks.gpu.ranks", __doc__, own, given=given)
    ranks = job.arguments.ranks
    with tempfile.TemporaryDirectory() as folder:
        control: list[dict[float, Any]] = []
        with job.case(f"gloo on CPUs, ranks: {ranks}") as row:
            control = _found("gloo", ranks, folder)
            (Path(folder) / "meeting-gloo").unlink(missing_ok=True)
            _compared(row, control, _found("gloo", ranks, folder))
        with job.case(f"NCCL, ranks: {ranks}") as row:
            if torch.cuda.device_count() < ranks:
                message = f"{torch.cuda.device_count()} GPUs are here"
                raise CannotDo(message)
            _compared(row, control, _found("nccl", ranks, folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
