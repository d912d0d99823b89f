"""A divided training is saved by some ranks and continued by others; one that dies leaves the others with an error."""

from __future__ import annotations

import contextlib
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import TensorDataset

from ghostclip.distributed.agreement import require_agreement
from ghostclip.errors import GhostClipError
from tests import process_group as meeting
from tests.distributed import tensor
from tests.distributed.sharded import TRAININGS, Training, built, losses_of, samples, whole_of
from tests.private_run import PrivateRun
from tests.process_group import process_group

DELTA, DIES_IN = 1e-5, 3


DIVIDED: dict[str, Training] = {
    "nested": TRAININGS["nested"],
    "buffered noise": TRAININGS["buffered noise"],
    "tensor": Training(tensor.mlp, tensor.of_mlp),
    "two axes": Training(tensor.mlp, tensor.on_two_axes(tensor.of_mlp, 2, 2)),
}


def _begin(how: str = "nested", *, divided: bool = True, **options: Any) -> tuple[Any, Any, Any, Any, Any]:
    net = built(DIVIDED[how])
    if divided:
        DIVIDED[how].shard(net)
    run = PrivateRun(
        TensorDataset(*samples("features")), model=net, inner=torch.optim.AdamW, lr=0.05, batch_size=6,
        max_grad_norm=0.3, loss_reduction="sum", mechanism=DIVIDED[how].mechanism, **options,
    )  # fmt: skip
    return run.engine, net, run.model, run.optimizer, run.loader


def _step(model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    losses_of(model, "features", *batch).sum().backward()
    optimizer.step()


def _seen(engine: Any, net: Any, optimizer: Any) -> dict[str, Any]:
    state = optimizer.original_optimizer.state
    return {
        "parameters": [whole_of(p).detach().clone() for p in net.parameters()],
        "moments": [whole_of(state[p]["exp_avg_sq"]).clone() for p in net.parameters()],
        "noise": optimizer.noise_source.state_dict(),
        "epsilon": engine.get_epsilon(DELTA),
    }


def save(rank: int, ranks: int, folder: str, how: str = "nested") -> None:
    """Train for an epoch and save.

    Args:
        rank: Number of this process.
        ranks: How many there are.
        folder: Where they meet, and where results go.
        how: How the model is divided.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with process_group(rank, ranks, folder, meshes=True):
        engine, net, model, optimizer, loader = _begin(how)
        for batch in loader:
            _step(model, optimizer, batch)
        of_model, of_optimizer = get_state_dict(net, optimizer)
        checkpoint.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=f"{folder}/saved")
        torch.save(_seen(engine, net, optimizer), Path(folder) / f"saved{rank}.pt")
        distributed.barrier()
    os._exit(0)


def load(rank: int, ranks: int, folder: str, how: str = "nested") -> None:
    """Continue what other ranks have saved, for one step.

    Args:
        rank: Number of this process.
        ranks: How many there are.
        folder: Where they meet, and where results go.
        how: How the model is divided.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with process_group(rank, ranks, folder, meshes=True):
        engine, net, model, optimizer, loader = _begin(how)
        of_model, of_optimizer = get_state_dict(net, optimizer)
        state = {"model": of_model, "optimizer": of_optimizer}
        checkpoint.load(state, checkpoint_id=f"{folder}/saved")
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found = _seen(engine, net, optimizer)
        _step(model, optimizer, next(iter(loader)))
        found["later"] = engine.get_epsilon(DELTA)
        torch.save(found, Path(folder) / f"loaded{rank}.pt")
        distributed.barrier()
    os._exit(0)


def keep(rank: int, ranks: int, folder: str, how: str) -> None:
    """Train for an epoch, save one file, and go on for a step; then go on from the file again.

    Args:
        rank: Number of this process.
        ranks: How many there are.
        folder: Where they meet, and where results go.
        how: How the model is divided.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with process_group(rank, ranks, folder, meshes=True):
        engine, net, model, optimizer, loader = _begin(how)
        for batch in loader:
            _step(model, optimizer, batch)
        engine.save_checkpoint(path=f"{folder}/file.pt", module=model, optimizer=optimizer)
        _step(model, optimizer, next(iter(loader)))
        torch.save(_seen(engine, net, optimizer), Path(folder) / f"kept{rank}.pt")
        torch.save(go_on(folder, how), Path(folder) / f"resumed{rank}.pt")
        distributed.barrier()
    os._exit(0)


def go_on(folder: str, how: str, *, divided: bool = True) -> dict[str, Any]:
    """Continue the training of a file for a step.

    Args:
        folder: Where it lies.
        how: How the model is divided.
        divided: Whether this is one of several ranks.

    Returns:
        What is there afterwards.
    """
    engine, net, model, optimizer, loader = _begin(how, divided=divided)
    engine.load_checkpoint(path=f"{folder}/file.pt", module=model, optimizer=optimizer)
    _step(model, optimizer, next(iter(loader)))
    return _seen(engine, net, optimizer)


ENDS = ("dies", "raises", "refuses", "goes on")
"""How rank 1 is lost: within a step after its forward, by an error inside its backward, which ends the process, or by
losses of its own that are refused; it may catch that and go on to the step.
"""
WITHIN = timedelta(seconds=10)


def _raise(_: Any) -> None:
    raise RuntimeError("an error of its own")


def lose(rank: int, ranks: int, folder: str, how: str, divided: str) -> None:
    """Train until rank 1 is lost.

    Args:
        rank: Number of this process.
        ranks: How many there are.
        folder: Where they meet, and where results go.
        how: One of `ENDS`.
        divided: How the model is.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    meeting._TIMEOUT = WITHIN
    applied, error = 0, ""
    with process_group(rank, ranks, folder, meshes=True):
        _, _, model, optimizer, loader = _begin(divided, ledger=f"{folder}/ledger")
        for number, batch in enumerate(loader):
            try:
                optimizer.zero_grad()
                losses = losses_of(model, "features", *batch)
                if number == DIES_IN - 1 and rank == 1:
                    if how == "dies":
                        os._exit(0)
                    if how == "raises":
                        losses.register_hook(_raise)
                    else:
                        losses = losses * losses.detach().mean()
                with contextlib.suppress(*([GhostClipError] if how == "goes on" and rank == 1 else [])):
                    losses.sum().backward()
                if number == DIES_IN - 1 and how == "goes on" and rank == 1:
                    with contextlib.suppress(GhostClipError):
                        optimizer.step()
                    require_agreement("step", number)
                optimizer.step()
            except (RuntimeError, GhostClipError) as raised:
                error = f"{type(raised).__name__}: {raised}"
                break
            applied += 1
        torch.save({"applied": applied, "error": error}, Path(folder) / f"lost{rank}.pt")
        os._exit(0)
