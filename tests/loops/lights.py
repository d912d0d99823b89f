"""Loops of Lightning's Trainer and of Fabric."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.loops.loop import Loop
from tests.loops.models import cross_entropy, functional, mlp, shared
from tests.loops.rows import row
from tests.loops.world import World

LOOPS: list[Loop] = []
_HOST = {"hosts": ("lightning",), "clips": (1.0,)}


def _module(world: World, body: nn.Module, optimizer: Any = None) -> Any:
    """A LightningModule around a model; it makes its optimizer, or is given one."""
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def training_step(self, batch: Any, _: int) -> Tensor:
            return functional.cross_entropy(self.body(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return optimizer or torch.optim.SGD(self.body.parameters(), lr=0.1)

    return Classifier()


def _trainer(world: World, **options: Any) -> Any:
    return quiet_trainer(world, **({"max_epochs": 1} | options))


def quiet_trainer(world: World, **options: Any) -> Any:
    """Return Lightning's Trainer on a CPU, which writes into a world's folder and nothing on the screen."""
    import lightning

    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": world.folder,
    }
    return lightning.Trainer(**(quiet | options))


def _private(world: World, *, among: int = 1, **options: Any) -> tuple[Any, Any, DataLoader]:
    body = world.watch(mlp, shared(cross_entropy(world), among))
    return world.private(body, torch.optim.SGD(body.parameters(), lr=0.1), world.loader(), **options)


@row(LOOPS, **_HOST, expect="exact", releases=4)
def _lightning_trainer(world: World) -> None:
    """Lightning's Trainer with the private model, optimizer and loader."""
    body, optimizer, loader = _private(world)
    _trainer(world).fit(_module(world, body, optimizer), loader)


@row(LOOPS, **_HOST)
def _lightning_with_its_own_loader(world: World) -> None:
    """The private loader is thrown away, and Lightning iterates the user's own."""
    body, optimizer, _ = _private(world)
    _trainer(world).fit(_module(world, body, optimizer), world.loader())


@row(LOOPS, **_HOST)
def _lightning_with_its_own_optimizer(world: World) -> None:
    """The private optimizer is thrown away: configure_optimizers makes another."""
    body, _, loader = _private(world)
    _trainer(world).fit(_module(world, body), loader)


@row(LOOPS, **_HOST, passes=2)
def _lightning_accumulates(world: World) -> None:
    """accumulate_grad_batches=2."""
    body, optimizer, loader = _private(world, among=2)
    _trainer(world, accumulate_grad_batches=2).fit(_module(world, body, optimizer), loader)


@row(LOOPS, **_HOST)
def _lightning_clips_again(world: World) -> None:
    """gradient_clip_val=0.5 beside the private optimizer."""
    body, optimizer, loader = _private(world)
    _trainer(world, gradient_clip_val=0.5).fit(_module(world, body, optimizer), loader)


@row(LOOPS, **_HOST)
def _resumed_through_lightning(world: World) -> None:
    """Saved by save_checkpoint and resumed by ckpt_path: the optimizer's state comes back."""
    place = Path(world.folder) / "lightning.ckpt"
    for epochs, resume in ((1, None), (2, place)):
        world.restart()
        body, optimizer, loader = _private(world)
        trainer = _trainer(world, max_epochs=epochs)
        trainer.fit(_module(world, body, optimizer), loader, ckpt_path=resume, weights_only=False)
        trainer.save_checkpoint(place)


def _fabric() -> Any:
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=1)


@row(LOOPS, **_HOST)
def _fabric_first(world: World) -> None:
    """Fabric sets up first, make_private second."""
    fabric = _fabric()
    bare = world.watch(mlp, cross_entropy(world))
    model, optimizer = fabric.setup(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(world.loader())
    model, optimizer, loader = world.private(model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        fabric.backward(functional.cross_entropy(model(x), y))
        optimizer.step()


@row(LOOPS, **_HOST)
def _fabric_second(world: World) -> None:
    """make_private first, Fabric second."""
    fabric = _fabric()
    model, optimizer, loader = _private(world)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for x, y in loader:
        optimizer.zero_grad()
        fabric.backward(functional.cross_entropy(model(x), y))
        optimizer.step()


@row(LOOPS, **_HOST)
def _resumed_through_fabric(world: World) -> None:
    """fabric.save and fabric.load of model and optimizer."""
    fabric = _fabric()
    for resume in (False, True):
        world.restart()
        model, optimizer, loader = _private(world)
        model, optimizer = fabric.setup(model, optimizer)
        state = {"model": model, "optimizer": optimizer}
        if resume:
            fabric.load(Path(world.folder) / "fabric.ckpt", state)
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(functional.cross_entropy(model(x), y))
            optimizer.step()
        fabric.save(Path(world.folder) / "fabric.ckpt", state)
