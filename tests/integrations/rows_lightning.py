"""What becomes of the features of Lightning's Trainer and of Fabric."""

from __future__ import annotations

import contextlib
import csv
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from ghostclip import BatchMemoryManager
from ghostclip.errors import InvalidOptionError
from tests.integrations.table import Row, row
from tests.integrations.trainings import DELTA, MIXED, STEPS, exact, refused
from tests.loops.lights import quiet_trainer
from tests.loops.loop import Loop
from tests.loops.models import cross_entropy, dropping, functional, mlp
from tests.loops.ranks import see_on_ranks
from tests.loops.world import BATCH, RECORDS, World

ROWS: list[Row] = []
_HOST = {"tool": "Lightning", "hosts": ("lightning",)}
_SUMS = "sums against one record at a time, leave-one-out, noise, ε"


# The user's script


def module_of(body: nn.Module, **hooks: Any) -> Any:
    """Return a user's LightningModule.

    Args:
        body: The model.
        hooks: Methods to replace.
    """
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = body
            self.seen: list[dict[str, float]] = []

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = functional.cross_entropy(self.body(batch[0]), batch[1])
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.body.parameters(), lr=0.1)

    for name, hook in hooks.items():
        setattr(Classifier, name, hook)
    return Classifier()


def data_of(world: World, **options: Any) -> Any:
    """Return a user's data module.

    Args:
        world: Whose records.
        options: Of the training loader.
    """
    import lightning

    class Records(lightning.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return world.loader(**options)

        def val_dataloader(self) -> DataLoader:
            return DataLoader(world.data, batch_size=8)

    return Records()


def trainer_of(world: World, callbacks: Any = (), **options: Any) -> Any:
    """Return a Trainer that is quiet.

    Args:
        world: Where it may write.
        callbacks: Its callbacks.
        options: Others of its options.
    """
    given = {"max_steps": STEPS, "log_every_n_steps": 1, "limit_val_batches": 0}
    return quiet_trainer(world, callbacks=list(callbacks), **(given | options))


def privacy_of(world: World, **options: Any) -> Any:
    """Return the callback that makes a training as private as a world says.

    Args:
        world: The world.
        options: Others of its options.
    """
    from ghostclip.integrations.lightning import PrivacyCallback

    made = PrivacyCallback(
        **({"noise_multiplier": world.sigma, "target_delta": DELTA, "max_grad_norm": world.clip} | options)
    )
    world.engine = made.training.engine
    return made


def _fit(world: World, *, make: Callable[[], nn.Module] = mlp, hooks: Any = None, **options: Any) -> Any:
    """A user's script with the callback in it."""
    half = options.pop("half", True)
    body = world.watch(make, cross_entropy(world))
    given = {"accumulate_grad_batches": 2 // world.ranks} if half else {}
    trainer = trainer_of(world, [privacy_of(world, **options.pop("privacy", {}))], **(given | options))
    trainer.fit(module_of(body, **(hooks or {})), data_of(world, batch_size=BATCH // 2 if half else BATCH))
    return trainer


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def automatic(folder: Path) -> None:
    """PrivacyCallback, automatic optimization, accumulate_grad_batches=2."""
    exact(_fit, clips=(0.5, 0.1))


def _mixing(change: Callable[[Tensor], Tensor], weights: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def training_step(self: Any, batch: Any, _: int) -> Tensor:
        logits = self.body(change(batch[0]))
        losses = functional.cross_entropy(logits, batch[1], reduction="none")
        loss = (losses * weights(losses.detach())).mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    return training_step


_ALIKE = torch.ones_like
_MIXING: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "mixup": (lambda x: 0.6 * x + 0.4 * x.flip(0), _ALIKE),
    "mixup in a random order": (lambda x: 0.6 * x + 0.4 * x.roll(1 + int(torch.randint(2, ())), 0), _ALIKE),
    "inputs standardised over the batch": (lambda x: (x - x.mean(0)) / (x.std(0) + 0.1), _ALIKE),
    "weights normalised over the batch": (lambda x: x, lambda losses: losses.softmax(0) * len(losses)),
    "weights by ranks in the batch": (lambda x: x, lambda losses: losses.argsort().argsort() / len(losses)),
}
for _what, _how in _MIXING.items():

    def _step_that_mixes(folder: Path, *, how: Any = _how) -> None:
        refused(partial(_fit, hooks={"training_step": _mixing(*how)}, half=False))

    _step_that_mixes.__doc__ = f"training_step with {_what}."
    row(ROWS, **_HOST, outcome="refused", note=MIXED)(_step_that_mixes)


@row(ROWS, **_HOST, outcome="refused", note="followed by .*on_after_batch_transfer.*depends on the record beside it")
def mixed_by_a_hook(folder: Path) -> None:
    """on_after_batch_transfer with mixup."""

    def mixed(self: Any, batch: Any, _: int) -> Any:
        if not self.trainer.training:
            return batch
        return 0.6 * batch[0] + 0.4 * batch[0][torch.randperm(len(batch[0]))], batch[1]

    refused(partial(_fit, hooks={"on_after_batch_transfer": mixed}))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def changed_by_a_hook(folder: Path) -> None:
    """on_after_batch_transfer that changes each record by itself."""

    def changed(self: Any, batch: Any, _: int) -> Any:
        self.batches = getattr(self, "batches", 0) + 1
        return batch[0] + 0 * torch.randn_like(batch[0]), batch[1]

    exact(partial(_fit, hooks={"on_after_batch_transfer": changed}))


@row(ROWS, **_HOST, outcome="exact", note="what is logged, each value once")
def logged_once(folder: Path) -> None:
    """training_step that logs, and notes values in attributes, beside steps that are only looked at."""
    world = World(sigma=1.0)
    calls = []

    def training_step(self: Any, batch: Any, _: int) -> Tensor:
        loss = functional.cross_entropy(self.body(batch[0]), batch[1])
        self.latest = float(loss)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        calls.append(self.latest)
        return loss

    trainer = _fit(world, hooks={"training_step": training_step}, half=False)
    assert len(calls) > STEPS, "no step was looked at"
    assert trainer.lightning_module.latest == trainer.callback_metrics["train_loss_step"].item()


@row(ROWS, tool="Lightning", hosts=("pytorch_lightning",), outcome="exact", note="releases, and ε of each step")
def under_its_other_name(folder: Path) -> None:
    """Imported as pytorch_lightning."""
    import pytorch_lightning

    from ghostclip.integrations.lightning import PrivacyCallback

    class Classifier(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def training_step(self, batch: Any, _: int) -> Tensor:
            return functional.cross_entropy(self.body(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    privacy = PrivacyCallback(noise_multiplier=1.0, target_delta=DELTA, max_grad_norm=1.0)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    trainer = pytorch_lightning.Trainer(accelerator="cpu", max_epochs=1, callbacks=[privacy], **quiet)
    trainer.fit(Classifier(), DataLoader(World().data, batch_size=BATCH))
    assert trainer.global_step == len(privacy.training.engine.accountant) == 4
    assert privacy.epsilon > 0


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def loader_given_to_fit(folder: Path) -> None:
    """A DataLoader given to fit(), with two batches more than it is long."""

    def train(world: World) -> None:
        body = world.watch(mlp, cross_entropy(world))
        trainer_of(world, [privacy_of(world)], max_steps=6).fit(module_of(body), world.loader())

    exact(train, releases=6)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def loader_of_the_module(folder: Path) -> None:
    """train_dataloader of the LightningModule; estimated_stepping_batches for a schedule."""

    def train(world: World) -> None:
        body = world.watch(mlp, cross_entropy(world))

        def configure(module: Any) -> Any:
            optimizer = torch.optim.SGD(module.body.parameters(), lr=0.1)
            steps = module.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        hooks = {"train_dataloader": lambda _: world.loader(), "configure_optimizers": configure}
        trainer_of(world, [privacy_of(world)], max_steps=-1, max_epochs=1).fit(module_of(body, **hooks))

    exact(train, releases=4)


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def physical_batches(folder: Path) -> None:
    """physical_batch="auto": as large as memory allows."""
    exact(lambda world: _fit(world, privacy={"physical_batch": "auto"}))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS + ", computed again in parts")
def out_of_memory(folder: Path) -> None:
    """Memory runs out in the backward of more than two records at once."""

    def step(module: Any, batch: Any, _: int) -> Tensor:
        losses = functional.cross_entropy(module.body(batch[0]), batch[1])
        if len(batch[0]) > 2:
            losses.register_hook(_no_memory)
        return losses

    exact(lambda world: _fit(world, hooks={"training_step": step}))


def _no_memory(_: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def outputs_in_a_dict(folder: Path) -> None:
    """training_step returns a dict; gradients are logged on the way."""

    def step(module: Any, batch: Any, _: int) -> dict[str, Tensor]:
        logits = module.body(batch[0])
        return {"loss": functional.cross_entropy(logits, batch[1]), "logits": logits.detach()}

    def end(module: Any, outputs: Any, batch: Any, _: int) -> None:
        assert outputs["logits"].shape[0] == len(batch[0])

    def before(module: Any, _: Any) -> None:
        module.log("norm", sum(p.grad.norm() for p in module.parameters() if p.grad is not None) or 0.0)

    hooks = {"training_step": step, "on_train_batch_end": end, "on_before_optimizer_step": before}
    exact(lambda world: _fit(world, hooks=hooks))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def manual_optimization(folder: Path) -> None:
    """Manual optimization."""
    exact(lambda world: _fit(world, hooks=_MANUAL, half=False))


def _manual_step(module: Any, batch: Any, _: int) -> None:
    optimizers = module.optimizers()
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for optimizer in optimizers:
        optimizer.zero_grad()
    module.manual_backward(functional.cross_entropy(module.body(batch[0]), batch[1]))
    for optimizer in optimizers:
        optimizer.step()


_MANUAL = {"training_step": _manual_step, "automatic_optimization": False}


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def manual_optimization_of_an_iterator(folder: Path) -> None:
    """Manual optimization, training_step(dataloader_iter)."""

    def training_step(self: Any, dataloader_iter: Any) -> None:
        batch, number, _ = next(dataloader_iter)
        _manual_step(self, batch, number)

    exact(lambda world: _fit(world, hooks=_MANUAL | {"training_step": training_step}, half=False))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS)
def several_optimizers(folder: Path) -> None:
    """Manual optimization with an optimizer for the matrices and one for the rest."""

    def configure(module: Any) -> Any:
        matrices = [p for p in module.parameters() if p.dim() > 1]
        others = [p for p in module.parameters() if p.dim() < 2]
        return [torch.optim.SGD(matrices, lr=0.1), torch.optim.Adam(others, lr=0.1)]

    hooks = _MANUAL | {"configure_optimizers": configure}
    exact(lambda world: _fit(world, hooks=hooks, half=False, max_steps=2 * STEPS))


@row(ROWS, **_HOST, outcome="exact", note=_SUMS + ", up to rounding")
def mixed_precision(folder: Path) -> None:
    """precision="bf16-mixed"."""

    def step(module: Any, batch: Any, _: int) -> Tensor:
        assert module.body(batch[0].float()).dtype == torch.bfloat16
        return functional.cross_entropy(module.body(batch[0].float()), batch[1])

    def train(world: World) -> None:
        body = world.watch(_small, _small_losses(world))
        trainer = trainer_of(world, [privacy_of(world)], precision="bf16-mixed")
        trainer.fit(module_of(body, training_step=step), data_of(world, batch_size=BATCH))

    exact(train, tolerance=2e-2)


def _small() -> nn.Module:
    return mlp().float()


def _small_losses(world: World) -> Any:
    def losses(model: nn.Module, records: list[int]) -> Tensor:
        return functional.cross_entropy(model(world.features[records].float()), world.labels[records], reduction="none")

    return losses


@row(ROWS, **_HOST, ranks=2, slow=True, outcome="exact", note=_SUMS)
def two_processes(folder: Path) -> None:
    """strategy="ddp", two processes, use_distributed_sampler as it is."""
    exact(_fit_on_ranks, ranks=2)


@row(ROWS, **_HOST, ranks=2, slow=True, outcome="exact", note=_SUMS)
def two_processes_by_hand(folder: Path) -> None:
    """strategy="ddp", two processes, manual optimization."""
    exact(_fit_by_hand_on_ranks, ranks=2)


def _fit_on_ranks(world: World, **options: Any) -> None:
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    _fit(world, strategy="ddp", devices=2, plugins=[TorchElasticEnvironment()], **options)


def _fit_by_hand_on_ranks(world: World) -> None:
    _fit_on_ranks(world, hooks=_MANUAL)


@row(ROWS, **_HOST, ranks=2, slow=True, outcome="exact", note=_SUMS)
def two_processes_that_log_together(folder: Path) -> None:
    """self.log(..., sync_dist=True), two processes, whose draws have different numbers of parts."""
    exact(_fit_logged_on_ranks, ranks=2)


def _fit_logged_on_ranks(world: World) -> None:
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    given = {"strategy": "ddp", "devices": 2, "plugins": [TorchElasticEnvironment()]}
    trainer = trainer_of(world, [privacy_of(world)], accumulate_grad_batches=BATCH // 2, **given)
    module = module_of(world.watch(mlp, cross_entropy(world)), training_step=_logging_step)
    trainer.fit(module, data_of(world, batch_size=1))
    means: list[Any] = [None] * world.ranks
    torch.distributed.all_gather_object(means, float(trainer.callback_metrics["logged_epoch"]))
    assert len(set(means)) == 1


def _logging_step(self: Any, batch: Any, _: int) -> Tensor:
    loss = functional.cross_entropy(self.body(batch[0]), batch[1])
    self.log("logged", loss, on_step=True, on_epoch=True, sync_dist=True)
    return loss


# What is logged and kept


@row(ROWS, **_HOST, outcome="exact", note="ε of every step's log against another library's accountant")
def epsilon_in_the_logs(folder: Path) -> None:
    """ε is logged beside the loss, in every step and epoch, and shown by the progress bar."""
    from lightning.pytorch.loggers import CSVLogger

    from tests.loops.judge import epsilon_of

    world = World(sigma=1.0, folder=str(folder))
    logger = CSVLogger(folder)
    trainer = trainer_of(world, [privacy_of(world)], logger=logger, max_steps=-1, max_epochs=2)
    torch.manual_seed(0)
    trainer.fit(module_of(mlp()), data_of(world))
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    logged = {int(row["step"]): float(row["epsilon"]) for row in rows if row["epsilon"]}
    assert sorted(logged) == list(range(8)), logged
    for step, epsilon in logged.items():
        due = epsilon_of(BATCH / RECORDS, 1.0, step + 1)
        assert due * 0.995 <= epsilon <= due * 1.02, f"step {step + 1}: ε = {epsilon}, due {due}"
    assert "epsilon" in trainer.progress_bar_metrics
    assert all(name in row for row in rows for name in ("train_loss_step", "train_loss_epoch"))


def _saved(
    folder: Path, name: str, *, steps: int, every: int, resume: Path | None = None, **others: Any
) -> tuple[Tensor, float, Any]:
    """Train a model with dropout, save on the way, and return its parameters, ε and the history."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    world = World(sigma=1.0, folder=str(folder))
    torch.manual_seed(1 if resume is None else 99)
    body = dropping()
    kept = ModelCheckpoint(dirpath=folder / name, every_n_train_steps=every, save_top_k=-1, filename="{step}")
    privacy = privacy_of(world)
    options = {"max_steps": steps, "enable_checkpointing": True, "limit_val_batches": 1.0} | others
    trainer = trainer_of(world, [privacy, kept], **options)
    hooks = {"validation_step": lambda module, batch, _: None, "configure_optimizers": _adam}
    trainer.fit(module_of(body, **hooks), data_of(world, generator=None), ckpt_path=resume)
    return (
        nn.utils.parameters_to_vector(body.parameters()).detach(),
        privacy.epsilon,
        privacy.training.engine.accountant,
    )


def _adam(module: Any) -> Any:
    optimizer = torch.optim.Adam(module.body.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@row(ROWS, **_HOST, outcome="exact", note="parameters bit by bit, ε and history, with dropout, Adam and a schedule")
def resumed(folder: Path) -> None:
    """Killed and resumed by fit(ckpt_path=...), in the middle of an epoch and at its end."""
    whole, epsilon, account = _saved(folder, "whole", steps=7, every=1)
    for step in (3, 4, 6):
        again = _saved(folder, f"from {step}", steps=7, every=9, resume=folder / "whole" / f"step={step}.ckpt")
        assert torch.equal(again[0], whole), f"resumed at step {step}: other parameters"
        assert again[1] == epsilon, f"resumed at step {step}: ε {again[1]}, undisturbed {epsilon}"
        assert again[2].history == account.history


def _resume_on_ranks(world: World) -> None:
    """Train, and train once more from a checkpoint on the way; what differs is said."""
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from torch import distributed

    place = [world.folder]
    distributed.broadcast_object_list(place)
    several = {"strategy": "ddp", "devices": 2, "plugins": [TorchElasticEnvironment()]}
    folder = Path(place[0])
    whole = _saved(folder, "whole", steps=6, every=1, **several)
    again = _saved(folder, "again", steps=6, every=9, resume=folder / "whole" / "step=3.ckpt", **several)
    if not torch.equal(again[0], whole[0]) or again[1] != whole[1] or again[2].history != whole[2].history:
        world.said = (
            f"resumed: ε {again[1]}, undisturbed {whole[1]}; parameters equal: {torch.equal(again[0], whole[0])}"
        )
    distributed.barrier()


@row(ROWS, **_HOST, ranks=2, slow=True, outcome="exact", note="parameters bit by bit on each rank, ε and history")
def resumed_on_two_processes(folder: Path) -> None:
    """Killed and resumed by fit(ckpt_path=...); strategy="ddp", two processes."""
    seen = see_on_ranks(Loop("row", "", _resume_on_ranks, ranks=2), World(sigma=1.0))
    assert not seen.error, f"{seen.error} ({seen.where})"
    assert not seen.said, seen.said


@row(
    ROWS, **_HOST, outcome="exact", note="attributes, hooks and gradients of module and trainer; a second fit adds to ε"
)
def left_as_it_was(folder: Path) -> None:
    """After fit() module and trainer are as they were; a second fit() goes on with the account."""
    world = World(sigma=1.0, folder=str(folder))
    privacy, module = privacy_of(world), module_of(mlp())
    trainer = trainer_of(world, [privacy], accumulate_grad_batches=2, limit_val_batches=0)
    data = data_of(world, batch_size=3)
    trainer.fit(module, data)
    assert trainer.accumulate_grad_batches == 2
    assert not vars(module).keys() & {"training_step", "optimizer_zero_grad", "train_dataloader"}
    assert "training_step" not in vars(trainer.strategy)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert "train_dataloader" not in vars(data)
    functional.cross_entropy(module.body(world.features), world.labels).backward()
    assert all(p.grad is not None for p in module.parameters())
    module.zero_grad()
    first = privacy.epsilon
    trainer.save_checkpoint(folder / "after.ckpt")
    trainer.fit_loop.epoch_loop.max_steps = 2 * STEPS
    trainer.fit(module, data)
    assert len(privacy.training.engine.accountant) == 2 * STEPS
    assert privacy.epsilon > first


# Refusals


def _refusal(match: str, train: Callable[[World], Any], feature: str) -> None:
    def drive(folder: Path) -> None:
        refused(train)

    drive.__doc__ = feature
    row(ROWS, **_HOST, outcome="refused", note=match)(drive)


_refusal("gradient_clip_val=0.5.*max_grad_norm", lambda world: _fit(world, gradient_clip_val=0.5), "gradient_clip_val.")
_refusal(
    "reload_dataloaders_every_n_epochs=1",
    lambda world: _fit(world, reload_dataloaders_every_n_epochs=1),
    "reload_dataloaders_every_n_epochs.",
)
_refusal(
    "it returned no loss",
    lambda world: _fit(world, hooks={"training_step": lambda module, batch, _: None}),
    "training_step returns None.",
)


def _pulling_step(module: Any, dataloader_iter: Any) -> Tensor:
    batch, _, _ = next(dataloader_iter)
    return functional.cross_entropy(module.body(batch[0]), batch[1])


_refusal(
    "dataloader_iter.*manual optimization",
    lambda world: _fit(world, hooks={"training_step": _pulling_step}),
    "training_step(dataloader_iter).",
)


@row(ROWS, **_HOST, outcome="refused", note="precision='16-mixed'.*bf16-mixed")
def adaptive_loss_scale(folder: Path) -> None:
    """precision="16-mixed" (on a CPU Lightning makes bf16-mixed of it)."""
    from ghostclip.integrations.lightning import refuse

    trainer = trainer_of(World(folder=str(folder)))
    trainer.precision_plugin.precision = "16-mixed"
    refuse(trainer)


def _with_callback(world: World, name: str, **options: Any) -> None:
    from lightning.pytorch import callbacks

    body = world.watch(mlp, cross_entropy(world))
    trainer = trainer_of(world, [privacy_of(world), getattr(callbacks, name)(**options)])
    module = module_of(body)
    module.batch_size = BATCH
    trainer.fit(module, data_of(world))


_refusal(
    "GradientAccumulationScheduler.*accumulate_grad_batches",
    lambda world: _with_callback(world, "GradientAccumulationScheduler", scheduling={1: 2}),
    "GradientAccumulationScheduler.",
)
_refusal(
    "BatchSizeFinder.*physical_batch='auto'", lambda world: _with_callback(world, "BatchSizeFinder"), "BatchSizeFinder."
)
_refusal(
    "LearningRateFinder.*public data", lambda world: _with_callback(world, "LearningRateFinder"), "LearningRateFinder."
)


class _Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([])


def _over(world: World, loader: Any, **options: Any) -> None:
    body = world.watch(mlp, cross_entropy(world))
    trainer_of(world, [privacy_of(world, **options.pop("privacy", {}))], **options).fit(module_of(body), loader)


_refusal(
    "WeightedRandomSampler.*leave the sampler out",
    lambda world: _over(world, DataLoader(world.data, batch_size=4, sampler=WeightedRandomSampler([0.5] * 24, 24))),
    "A weighted sampler.",
)
_refusal("from a stream.*map-style", lambda world: _over(world, DataLoader(_Stream(), batch_size=2)), "Streamed data.")
_refusal(
    "expected one torch.utils.data.DataLoader, got dict",
    lambda world: _over(world, {"a": world.loader(), "b": world.loader()}),
    "Several training loaders at once.",
)


def _mixed_up(records: list[Any]) -> Any:
    features, labels = torch.utils.data.default_collate(records)
    return 0.7 * features + 0.3 * features.flip(0), labels


_refusal(
    "depends on the record beside",
    lambda world: _over(world, world.loader(collate_fn=_mixed_up)),
    "Mixup in the collate function.",
)
_refusal(
    "target_epsilon: .*max_epochs",
    lambda world: _over(
        world, world.loader(), max_epochs=-1, max_steps=-1, privacy={"target_epsilon": 1.0, "noise_multiplier": None}
    ),
    "target_epsilon without max_epochs or max_steps.",
)
_refusal(
    "1 of its draws|3 of its draws",
    lambda world: _over(world, _private_loader(world), accumulate_grad_batches=3),
    "accumulate_grad_batches over a loader that is private already.",
)


def _private_loader(world: World) -> Any:
    from ghostclip import DPDataLoader

    return DPDataLoader.from_data_loader(world.loader())


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


_refusal("BatchNorm1d.*GroupNorm", lambda world: _fit(world, make=_normed), "Batch normalisation.")


# Fabric

_FABRIC = {"tool": "Fabric", "hosts": ("lightning",)}


def fabric_of(world: World, **options: Any) -> Any:
    """Return a Fabric, over the ranks of a world.

    Args:
        world: The world.
        options: Others of its options.

    Returns:
        Launched.
    """
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    several = {"strategy": "ddp", "plugins": [TorchElasticEnvironment()]} if world.ranks > 1 else {}
    made = Fabric(accelerator="cpu", devices=world.ranks, **(several | options))
    made.launch()
    return made


def _set_up(world: World, order: str, fabric: Any, trained: tuple[Any, Any, Any], private: Any) -> tuple[Any, Any, Any]:
    model, optimizer, loader = trained
    if order == "first":
        return private(*fabric.setup(model, optimizer), fabric.setup_dataloaders(loader))
    model, optimizer, loader = private(model, optimizer, loader)
    return (*fabric.setup(model, optimizer), fabric.setup_dataloaders(loader))


class _WithFabric:
    """A script with Fabric, set up before or after make_private, that other processes can be handed."""

    def __init__(self, order: str, *, parts: int | None = None, **options: Any) -> None:
        self._order, self._parts, self._options = order, parts, options

    def __call__(self, world: World) -> None:
        fabric = fabric_of(world, **self._options)
        # float64 is not touched by autocast.
        single = "precision" in self._options
        body = world.watch(_small, _small_losses(world)) if single else world.watch(mlp, cross_entropy(world))
        each = BATCH // world.ranks if self._order == "first" else BATCH
        trained = body, torch.optim.SGD(body.parameters(), lr=0.1), world.loader(batch_size=each)
        model, optimizer, loader = _set_up(world, self._order, fabric, trained, world.private)
        with contextlib.ExitStack() as stack:
            if self._parts is not None:
                loader = stack.enter_context(
                    BatchMemoryManager(data_loader=loader, max_physical_batch_size=self._parts, optimizer=optimizer)
                )
            for x, y in loader:
                optimizer.zero_grad()
                fabric.backward(functional.cross_entropy(model(x.float() if single else x), y))
                optimizer.step()


def _fabric_row(order: str, feature: str, *, ranks: int = 1, tolerance: float | None = None, **options: Any) -> None:
    said = {"first": "fabric.setup, then make_private", "second": "make_private, then fabric.setup"}[order]

    def drive(folder: Path) -> None:
        given = {} if tolerance is None else {"tolerance": tolerance}
        exact(_WithFabric(order, **options), ranks=ranks, releases=4, **given)

    drive.__doc__ = f"{said}{feature}."
    note = _SUMS + (", up to rounding" if tolerance else "")
    row(ROWS, **_FABRIC, ranks=ranks, slow=ranks > 1, outcome="exact", note=note)(drive)


for _order in ("second", "first"):
    _fabric_row(_order, "; one process")
    if _order == "second":
        _fabric_row(_order, "; two processes", ranks=2)
    _fabric_row(_order, "; precision='bf16-mixed'", precision="bf16-mixed", tolerance=2e-2)
    _fabric_row(_order, "; BatchMemoryManager with the loader and the optimizer that are set up", parts=3)


@row(ROWS, **_FABRIC, ranks=2, slow=True, outcome="refused", note="model, optimizer and loader themselves")
def fabric_first_on_two_processes(folder: Path) -> None:
    """fabric.setup, then make_private; two processes."""
    loop = Loop("row", "", _WithFabric("first"), ranks=2)
    seen = see_on_ranks(loop, World(sigma=1.0))
    assert seen.refused, seen.error
    assert not seen.releases
    raise InvalidOptionError(seen.error)


def _with_fabric(
    folder: Path, order: str, *, until: int, save: int = -1, load: bool = False
) -> tuple[Tensor, float, Any]:
    """Train with dropout, save or load on the way; return parameters, ε and the history."""
    world = World(sigma=1.0)
    torch.manual_seed(99 if load else 1)
    fabric, body, engine = fabric_of(world), dropping(), world.new_engine()
    trained = body, torch.optim.Adam(body.parameters(), lr=0.05), DataLoader(world.data, batch_size=BATCH)
    model, optimizer, loader = _set_up(world, order, fabric, trained, world.private)
    state = {"model": model, "optimizer": optimizer, "randomness": torch.get_rng_state()}
    if load:
        fabric.load(folder / "state.ckpt", state)
        torch.set_rng_state(state["randomness"])
    while len(engine.accountant) < until:
        for x, y in loader:
            fabric.backward(functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if len(engine.accountant) == save:
                fabric.save(folder / "state.ckpt", state | {"randomness": torch.get_rng_state()})
            if len(engine.accountant) == until:
                break
    return (
        nn.utils.parameters_to_vector(body.parameters()).detach(),
        engine.get_epsilon(1e-3),
        engine.accountant.history,
    )


def _resumed_with_fabric(order: str, said: str) -> None:
    def drive(folder: Path) -> None:
        whole = _with_fabric(folder, order, until=7, save=3)
        again = _with_fabric(folder, order, until=7, load=True)
        assert again[1:] == whole[1:], f"ε {again[1]}, undisturbed {whole[1]}"
        assert torch.equal(again[0], whole[0]), "resumed: other parameters"

    drive.__doc__ = f"Killed and resumed by fabric.save and fabric.load, in the middle of an epoch; {said}."
    row(ROWS, **_FABRIC, outcome="exact", note="parameters bit by bit, ε and history, with dropout and Adam")(drive)


_resumed_with_fabric("second", "make_private, then fabric.setup")
_resumed_with_fabric("first", "fabric.setup, then make_private")
