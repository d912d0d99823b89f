"""The network of `mnist` on two processes: each takes its share of every batch, noise is added once."""
# ruff: noqa: T201 - an example prints what it finds

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

# Before there is a group: its functions hold on to one that they find, whose threads would then outlive it.
import torch.distributed.nn.functional
from torch import distributed, multiprocessing, nn
from torch.utils.data import DataLoader

from ghostclip import PrivacyEngine
from ghostclip.distributed import DifferentiallyPrivateDistributedDataParallel
from paper_repro.examples.data import digits
from paper_repro.examples.mnist import SampleConvNet
from paper_repro.examples.options import accuracy, options_of

RANKS = 2


def train(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Be one process.

    Args:
        rank: Its number.
        options: The command line.
        folder: Where the processes meet, and where the first one writes what it found.
    """
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    torch.manual_seed(options.seed)
    train_loader = DataLoader(digits(options.samples), batch_size=options.batch_size)
    test_loader = DataLoader(digits(1000), batch_size=500)

    model = DifferentiallyPrivateDistributedDataParallel(SampleConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=options.sigma,
        max_grad_norm=options.max_grad_norm,
    )
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, options.epochs + 1):
        model.train()
        seen = 0
        for images, targets in train_loader:
            optimizer.zero_grad()
            criterion(model(images), targets).backward()
            optimizer.step()
            seen += len(images)
        found = accuracy(model, test_loader)
        epsilon = privacy_engine.get_epsilon(options.delta)
        print(f"epoch {epoch}, rank {rank}: {seen} records, test accuracy {found:.1%}, ε = {epsilon:.2f}", flush=True)
    if rank == 0:
        torch.save({"accuracy": found, "chance": 0.1, "epsilon": epsilon}, Path(folder) / "found.pt")
    distributed.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Start the processes.

    Args:
        arguments: The command line; the process's own by default.

    Returns:
        Accuracy, chance and ε.
    """
    options = options_of(
        "mnist_ddp", __doc__, arguments, samples=6000, epochs=6, batch_size=256, lr=0.5, noise_multiplier=1.0
    )
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train, args=(options, folder), nprocs=RANKS)
        return torch.load(Path(folder) / "found.pt", weights_only=True)


if __name__ == "__main__":
    main()
