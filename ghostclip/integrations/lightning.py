"""Lightning: a callback that makes a Trainer's training private, and a data module of Poisson batches.

`PrivacyCallback` is all that a script needs. Who calls `PrivacyEngine` in `configure_optimizers`, as Opacus's guide has
it, needs `DPLightningDataModule` for the loader. Fabric needs neither: `make_private`, then `fabric.setup`.

With the callback, Lightning's batches become draws, so that its steps, epochs, schedules and logs count releases. In
automatic optimization a draw is computed in parts that fit in memory: the strategy's `training_step` runs forward and
backward of each part, and what it returns is the mean loss without a graph.

Lightning comes under two names, `lightning.pytorch` and `pytorch_lightning`, whose classes do not know each other. The
classes here take their bases from what is in use, and importing them imports neither.
"""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, wraps
from typing import Any, Final

import torch
from torch import Tensor, nn

from ghostclip import _tree, _validate
from ghostclip.data import DPDataLoader
from ghostclip.data.collation import padding_of
from ghostclip.data.physical_batches import count_rows
from ghostclip.distributed.agreement import gathered
from ghostclip.errors import InvalidOptionError, NotOfferedError
from ghostclip.integrations._host import (
    Contradiction,
    HostTraining,
    PrivacyArguments,
    forgotten,
    refuse_options,
    warn_if_untested,
)
from ghostclip.privacy import checkpoints

_PLACES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def base_of(datamodule: Any) -> type:
    """Return the `LightningDataModule` that a module derives from, of whichever library; refuse what is none."""
    for kind in type(datamodule).__mro__:
        if kind.__name__ == "LightningDataModule" and kind.__module__.partition(".")[0] in _PLACES:
            return kind
    raise InvalidOptionError(
        f"datamodule {type(datamodule).__name__}: not a LightningDataModule. Give the one that the trainer would get, "
        "or make the loader private yourself (DPDataLoader.from_data_loader)."
    )


def callback_bases() -> tuple[type, ...]:
    """Return the `Callback` classes of the libraries that are in use, or of the one that is installed."""
    used = [name for name in _PLACES if _PLACES[name] in sys.modules] or list(_PLACES)
    bases: list[type] = []
    for name in used:
        try:
            bases.append(importlib.import_module(_PLACES[name]).Callback)
        except ImportError:
            continue
        warn_if_untested(name.replace("_", "-"))
        if _PLACES[name] not in sys.modules:
            break
    if not bases:
        raise NotOfferedError(
            "ghostclip.integrations.lightning: neither lightning nor pytorch_lightning is installed. Install one: "
            "pip install lightning."
        )
    return tuple(bases)


@lru_cache
def joined(kind: Any, bases: tuple[type, ...]) -> type:
    """Return a class that derives from one of ours and from Lightning's, the same one for the same arguments."""
    named = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind, *bases), named)


_OPTIONS: Final[tuple[Contradiction, ...]] = (
    ("gradient_clip_val", bool, "the batch's gradient would be clipped, which bounds no record's influence",
     "Leave it out: PrivacyCallback(max_grad_norm=...) clips each record"),
    ("precision", lambda value: value == "16-mixed", "its loss scale adapts to the data", "Use precision='bf16-mixed'"),
    ("reload_dataloaders_every_n_epochs", bool, "the account is of one loader over one data set", "Leave it out"),
)  # fmt: skip
_CALLBACKS: Final = {
    "GradientAccumulationScheduler": (
        "it changes the size of a draw in the course of the training, which is another mechanism",
        "Use Trainer(accumulate_grad_batches=...)",
    ),
    "BatchSizeFinder": (
        "it tries batch sizes on records, and another batch size is another mechanism",
        "Leave it out: PrivacyCallback(physical_batch='auto') finds what fits in memory",
    ),
    "LearningRateFinder": ("its trials are steps on the same records, and cost ε", "Try learning rates on public data"),
}
# Of processes whose memory is gone when the training has ended.
_LAUNCHER: Final = "_MultiProcessingLauncher"
_STRATEGIES: Final = ("SingleDeviceStrategy", "DDPStrategy")


def refuse(trainer: Any) -> None:
    """Refuse what contradicts a private training, before anything was trained."""
    owners = trainer, trainer.fit_loop, trainer._data_connector

    def value_of(name: str) -> Any:
        return next((value for owner in owners if (value := getattr(owner, name, None)) is not None), None)

    refuse_options(_OPTIONS, value_of, "Trainer({})")
    for callback in trainer.callbacks:
        kind_name = next((kind.__name__ for kind in type(callback).__mro__ if kind.__name__ in _CALLBACKS), None)
        if kind_name is not None:
            why, remedy = _CALLBACKS[kind_name]
            raise InvalidOptionError(f"callback {kind_name}: {why}. {remedy}.")
    kinds = [kind.__name__ for kind in type(trainer.strategy).__mro__]
    if not any(kind in _STRATEGIES for kind in kinds):
        raise InvalidOptionError(
            f"strategy {kinds[0]}: it shards or exchanges gradients by itself, where there are none before the "
            "release. Use strategy='ddp', or one device."
        )
    launcher = trainer.strategy.launcher
    if any(kind.__name__ == _LAUNCHER for kind in type(launcher).__mro__):
        raise InvalidOptionError(
            "strategy that starts the training in processes of its own (ddp_notebook, ddp_fork, ddp_spawn): weights "
            "come back from there and the account does not, so that ε would be 0 here, and begin at 0 in the next fit. "
            "Use strategy='ddp' in a script (python train.py, torchrun), or in a notebook one device: devices=1, "
            "strategy='auto'."
        )


class DPLightningDataModule:
    """Stands for a data module whose training loader samples as the accountant assumes; the rest is the module's own.

    An instance is also one of the `LightningDataModule` that the given module derives from.

    Attributes:
        datamodule: The module.
        generator: As given.

    Args:
        datamodule: Any Lightning data module; its training loader becomes a `DPDataLoader`.
        generator: Makes the sampling reproducible, and so not private against who knows it.

    Raises:
        InvalidOptionError: If it is no Lightning data module.
    """

    def __new__(cls, datamodule: Any, generator: torch.Generator | None = None) -> DPLightningDataModule:
        """Make an instance of the class that also derives from Lightning's."""
        base = base_of(datamodule)
        kind: Any = cls
        if not issubclass(cls, base):
            kind = joined(kind, (base,))
        return object.__new__(kind)

    def __init__(self, datamodule: Any, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.datamodule = datamodule
        self.generator = generator

    def train_dataloader(self) -> DPDataLoader:
        """Return the module's training loader with private sampling."""
        return DPDataLoader.from_data_loader(self.datamodule.train_dataloader(), generator=self.generator)


def _of_module(name: str) -> Callable[..., Any]:
    """Return a method that calls the data module's own."""
    return lambda self, *args, **kwargs: getattr(self.datamodule, name)(*args, **kwargs)


for _name in (
    "prepare_data", "setup", "teardown", "val_dataloader", "test_dataloader", "predict_dataloader", "state_dict",
    "load_state_dict", "transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer",
):  # fmt: skip
    setattr(DPLightningDataModule, _name, _of_module(_name))


# Options of `PrivacyArguments` that a callback takes.
_SHARED: Final = (
    "target_epsilon", "noise_multiplier", "target_delta", "planned_epochs", "clipping", "grad_sample_mode",
    "physical_batch", "noise_level", "mechanism", "noise_bands", "ledger", "reproducible_seed",
)  # fmt: skip


class PrivacyCallback:
    """Makes the training of a Lightning Trainer private: ``Trainer(callbacks=[PrivacyCallback(...)])``, nothing else.

    The training loader, wherever it comes from (a data module, the module, `fit`), is replaced by one with Poisson
    sampling and the same options. The optimizers that `configure_optimizers` returns become private. On average a
    Poisson batch has the loader's batch size × `accumulate_grad_batches` × processes records; a process computes at
    most the loader's batch size at once. ε at `target_delta` is logged as "epsilon" every `log_every_n_steps` steps and
    every epoch, and shown in the progress bar.

    Checkpoints hold the privacy account and the positions of sampling, noise and dropout, so `fit(ckpt_path=...)`
    continues as if nothing had happened. Keep them as secret as the data, because they hold the keys; publish the state
    of the module only.

    In manual optimization a Poisson batch is computed whole, by the module's code, and `accumulate_grad_batches` is 1.
    Several optimizers each step once per batch, after one backward for all of them. If only a part of the module sees
    records, as a GAN's discriminator does, name it with `module`: the other optimizers stay as they are.

    Privacy:
        One record is one entry of the training data set. ε covers the trained parameters; not losses and metrics that
        are logged; with `module` not what another part is trained on but that module's outputs and parameters. Options
        of the Trainer that contradict a private training are refused before the first step.

    Attributes:
        training: Engine, loader and optimizer.

    Args:
        max_grad_norm: C, the bound on each record's gradient.
        module: Name of the submodule that alone is trained on records ("discriminator"), by an optimizer of its own, in
            manual optimization; None for all that is trained.
        options: As for `PrivacyArguments`: `target_epsilon` or `noise_multiplier`, `target_delta`, `planned_epochs`,
            `clipping`, `grad_sample_mode` ("auto", "bookkeeping" or "hooks"), `physical_batch` (None computes the
            loader's batch size at once), `noise_level`, `mechanism`, `noise_bands`, `ledger`, `reproducible_seed`. The
            noise of a `target_epsilon` follows from `max_epochs` or `max_steps`.

    Raises:
        InvalidOptionError: If an option is out of range.

    Example:
        >>> privacy = PrivacyCallback(target_epsilon=3.0, target_delta=1e-5, max_grad_norm=1.0)
        >>> Trainer(max_epochs=3, callbacks=[privacy]).fit(module, datamodule)
    """

    @_validate.takes(*_validate.options_of(PrivacyArguments, *_SHARED))
    def __init__(self, *, max_grad_norm: float, module: str | None = None, options: dict[str, Any]) -> None:
        bases, before = callback_bases(), set(vars(self))
        self._kind = type(self)
        if not isinstance(self, bases):
            # A Trainer takes what derives from the Callback of its library, which is not imported before.
            self.__class__ = joined(type(self), bases)  # type: ignore[arg-type]
        super().__init__()
        _validate.positive(max_grad_norm, "max_grad_norm")
        if options["grad_sample_mode"] == "graph":
            raise InvalidOptionError(
                "grad_sample_mode='graph': a LightningModule's training_step runs before anyone knows its loss. Use "
                "'auto', or a loop of your own with ghostclip.GraphStep."
            )
        self._given = {"max_grad_norm": max_grad_norm, "module": module, **options}
        arguments = PrivacyArguments(**options)
        self._rank, self._module = 0, module
        self._said: set[str] = set()
        self.training = HostTraining(arguments, max_grad_norm=max_grad_norm, rank=lambda: self._rank)
        self._undo: list[Callable[[], None]] = []
        self._randomness: Any = None
        self._accumulated = 1
        self._draws: DPDataLoader | None = None
        self._ours = vars(self).keys() - before | {"_ours"}

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what another process makes a callback of, before a training: its options, and what a subclass holds.

        Returns:
            As for pickle.

        Raises:
            NotOfferedError: A training has begun: a copy would have an account of its own.
        """
        if self.training.optimizer is not None:
            raise NotOfferedError(
                "PrivacyCallback: a training has begun, whose account a copy would not share. Copy the callback before "
                "it, or save a checkpoint."
            )
        attributes = {name: value for name, value in vars(self).items() if name not in self._ours}
        return _remade, (self._kind, self._given, attributes)

    @property
    def epsilon(self) -> float:
        """ε at the δ that was given, of all releases up to now."""
        return self.training.epsilon()

    # Before the first step

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what contradicts, and replace the training loader wherever it comes from.

        Args:
            trainer: The trainer.
            pl_module: Its module.
            stage: Only "fit" is private.
        """
        if stage != "fit":
            return
        self._restore()
        refuse(trainer)
        self._draws = None
        self._rank = int(trainer.global_rank)
        self._accumulated = int(trainer.accumulate_grad_batches)
        # Lightning would divide losses by it, and step in between.
        self._replace(trainer, "accumulate_grad_batches", 1)
        source = trainer.fit_loop._data_source
        if source.is_module():
            make_loader = getattr(source.instance, source.name)
            self._replace(source.instance, source.name, wraps(make_loader)(lambda: self._private(make_loader, trainer)))
        else:
            loader = source.instance
            self._replace(source, "instance", self._private(lambda: loader, trainer))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the optimizers private.

        Args:
            trainer: The trainer; its optimizers are made, and no checkpoint is loaded yet.
            pl_module: Its module.

        Raises:
            InvalidOptionError: If there is no optimizer, or none of the private submodule alone.
        """
        if not trainer.optimizers:
            raise InvalidOptionError(
                "configure_optimizers: it returned none, so that there is nothing to make private."
            )
        if self._draws is None:
            source = trainer.fit_loop._data_source
            getattr(source.instance, source.name)()
        # As Lightning counts the releases of the whole training; infinite where it does not know.
        planned = trainer.estimated_stepping_batches
        model, indices = self._private_part(pl_module, trainer.optimizers)
        optimizers = [trainer.optimizers[index] for index in indices]
        _, private = self.training.make_private(
            model,
            optimizers[0] if len(optimizers) == 1 else optimizers,
            steps=None if math.isinf(planned) else int(planned),
            wrap_model=False,
        )
        made = dict(zip(indices, [private] if len(optimizers) == 1 else private, strict=True))
        trainer.optimizers = [made.get(index, one) for index, one in enumerate(trainer.optimizers)]
        strategy = trainer.strategy
        if isinstance(strategy.model, nn.parallel.DistributedDataParallel):
            # Ranks run forward different numbers of times; sums and weights are exchanged at the step.
            strategy.model = pl_module
        if pl_module.automatic_optimization:
            self._replace(strategy, "training_step", self._in_parts(trainer, pl_module, strategy.training_step))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue dropout where a checkpoint left it.

        Args:
            trainer: The trainer.
            pl_module: Its module.
        """
        if self._randomness is not None and self._rank < len(self._randomness):
            checkpoints.continue_generators(self._randomness[self._rank])
        self._randomness = None

    # What is said, and kept

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log ε with the step's other values.

        Args:
            trainer: The trainer.
            pl_module: Its module.
            outputs: Of the step.
            batch: Its batch.
            batch_idx: Its number.
        """
        if batch_idx == 0:
            self._warn_of_monitors(trainer)
        if trainer.global_step % max(1, trainer.log_every_n_steps) == 0:
            pl_module.log("epsilon", self.epsilon, prog_bar=True, batch_size=1)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log ε with the epoch's other values.

        Args:
            trainer: The trainer.
            pl_module: Its module.
        """
        pl_module.log("epsilon", self.epsilon, prog_bar=True, batch_size=1)
        self._warn_of_monitors(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of the generators that dropout draws from, of all ranks; the account is the optimizer's.

        Returns:
            Those of each rank. Lightning asks on all ranks and saves what the first says.
        """
        return {"randomness": gathered("generators", checkpoints.generators())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the positions until training starts.

        Args:
            state_dict: What `state_dict` returned.
        """
        self._randomness = state_dict["randomness"]

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave trainer, module and data as they were.

        Args:
            trainer: The trainer.
            pl_module: Its module.
            stage: Only "fit" was private.
        """
        if stage == "fit":
            self._restore()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave trainer, module and data as they were.

        Args:
            trainer: The trainer.
            pl_module: Its module.
            exception: What ended the training.
        """
        self._restore()

    # A step

    def _in_parts(self, trainer: Any, pl_module: Any, one_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that computes a draw in parts, backward included."""
        zero_grad = pl_module.optimizer_zero_grad
        # Lightning discards gradients between forward and backward: here that is before the first part.
        self._replace(pl_module, "optimizer_zero_grad", wraps(zero_grad)(lambda *_: None))
        # Ranks compute different numbers of parts: what is logged inside is this rank's own, and is reduced afterwards.
        reduce = _Reduce(trainer.strategy.reduce)
        self._replace(trainer.strategy, "reduce", reduce)

        def part_of_step(part: Any, more: tuple[Any, ...]) -> tuple[Any, int]:
            inputs = _tree.mapped(lambda leaf: leaf, part), *more
            reduce.inside = True
            try:
                output = one_step(part, *more)
            finally:
                reduce.inside = False
            output = dict(output) if isinstance(output, Mapping) else {"loss": output}
            loss, rows = output.get("loss"), count_rows(part) or 0
            if not isinstance(loss, Tensor):
                raise InvalidOptionError(
                    "training_step: it returned no loss, which skips the batch. Whether a draw is left out would "
                    "depend on its records. Return a loss for every batch; one of no records is a step of noise."
                )
            self._know_loss(trainer, pl_module, loss, inputs)
            pl_module.backward(loss)
            return output | {"loss": loss.detach()}, rows

        def step(batch: Any, *more: Any) -> Any:
            if isinstance(batch, Iterator):
                raise InvalidOptionError(
                    "training_step(dataloader_iter): a draw is computed in parts, for which it has to come as a batch. "
                    "Write training_step(batch, batch_idx), or use manual optimization."
                )
            zero_grad(trainer.current_epoch, more[0] if more else 0, trainer.optimizers[0])
            return _joined_output(self.training.run(batch, lambda part: part_of_step(part, more)))

        return step

    def _know_loss(self, trainer: Any, pl_module: Any, loss: Tensor, inputs: tuple[Any, ...]) -> None:
        """Let the engine compute a step's loss on other records as well, to see whether these follow each other."""
        clipper = self.training.optimizer.clipper

        def unseen(*inputs: Any) -> Tensor:
            with forgotten(pl_module) as attributes, clipper.unwatched(), trainer.precision_plugin.train_step_context():
                # Nothing is logged of a step that is only looked at.
                attributes.update(dict.fromkeys(("log", "log_dict"), lambda *_, **__: None))
                output = pl_module.training_step(*inputs)
                return output["loss"] if isinstance(output, Mapping) else output

        with trainer.precision_plugin.train_step_context():
            clipper.know_loss(loss, unseen, inputs, {}, criterion=pl_module)

    def _warn_of_monitors(self, trainer: Any) -> None:
        """Say once of each value of private batches that a stop, a checkpoint or a learning rate follows it."""
        logged = {f"{one.meta.name}{end}" for one in trainer._results.values() for end in ("", "_step", "_epoch")}
        follow = {type(one).__name__: getattr(one, "monitor", None) for one in trainer.callbacks}
        follow |= {
            type(one.scheduler).__name__: one.monitor for one in trainer.lr_scheduler_configs if one.reduce_on_plateau
        }
        for who, monitor in follow.items():
            if monitor in logged - {"epsilon"} - self._said:
                self._said.add(monitor)
                warnings.warn(
                    f"{who}(monitor={monitor!r}): it is computed from private records, and what follows it (when to "
                    "stop, which checkpoint is best, a learning rate) tells of them beyond ε. Monitor a value of "
                    "public records, let the learning rate follow the steps, or keep the last checkpoint.",
                    stacklevel=2,
                )

    def _private_part(self, pl_module: Any, optimizers: list[Any]) -> tuple[nn.Module, list[int]]:
        """Return what is trained on records, and the indices of its optimizers."""
        if self._module is None:
            return pl_module, list(range(len(optimizers)))
        part = dict(pl_module.named_modules()).get(self._module)
        ids = set() if part is None else {id(p) for p in part.parameters()}
        sets = [{id(p) for group in one.param_groups for p in group["params"]} for one in optimizers]
        chosen = [index for index, owned in enumerate(sets) if owned & ids]
        if part is None or not chosen or any(sets[index] - ids for index in chosen) or pl_module.automatic_optimization:
            raise InvalidOptionError(
                f"PrivacyCallback(module={self._module!r}): name a submodule of {type(pl_module).__name__} (one of "
                f"{', '.join(name for name, _ in pl_module.named_children())}) whose optimizer holds its parameters "
                "and no others, in manual optimization (self.automatic_optimization = False)."
            )
        return part, chosen

    def _private(self, make_loader: Callable[[], Any], trainer: Any) -> Any:
        """Return the draws of this training, made at the first call."""
        if self._draws is None:
            ranks = int(trainer.world_size)
            made = self.training.private_loader(
                make_loader(), ranks=ranks, accumulated=self._accumulated, source="train_dataloader"
            )
            padding_of(made.dataset, _with_hooks(made.collate_fn, trainer.strategy))
            self._draws = made
        return self._draws

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until the training ends."""
        before = {name: vars(owner)[name]} if name in vars(owner) else {}

        def undo() -> None:
            vars(owner).pop(name, None)
            vars(owner).update(before)

        setattr(owner, name, value)
        self._undo.append(undo)

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()
        self.training.leave()


def _remade(kind: type[PrivacyCallback], options: dict[str, Any], attributes: dict[str, Any]) -> PrivacyCallback:
    made = kind.__new__(kind)
    PrivacyCallback.__init__(made, **options)
    vars(made).update(attributes)
    return made


def _with_hooks(collate: Callable[..., Any], strategy: Any) -> Callable[..., Any]:
    """Return a collate function whose batches went through the hooks between a loader and `training_step`."""

    def collated(records: list[Any]) -> Any:
        with forgotten(strategy.lightning_module):
            return strategy.batch_to_device(strategy.lightning_module._on_before_batch_transfer(collate(records)))

    collated.__name__ = "followed by on_before_batch_transfer and on_after_batch_transfer"
    return collated


class _Reduce:
    """A strategy's reduction over ranks, left out inside a part; from one fit to the next it counts as the same."""

    def __init__(self, reduce: Callable[..., Any]) -> None:
        self.reduce, self.inside = reduce, False

    def __call__(self, value: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return value if self.inside else self.reduce(value, group=group, reduce_op=reduce_op)

    def __eq__(self, other: object) -> bool:
        return bool(self.reduce == getattr(other, "reduce", other))

    __hash__ = object.__hash__


def _joined_output(outputs: list[tuple[Any, int]]) -> Any:
    """Return the output of a step made of those of its parts: the mean loss, rows joined, other values of the last."""
    rows = max(1, sum(count for _, count in outputs))
    made = dict(outputs[-1][0])
    for name, value in made.items():
        parts = [(output[name], count) for output, count in outputs]
        if name == "loss":
            # Its backward, which Lightning calls, reaches nothing.
            made[name] = sum((part * (count / rows) for part, count in parts), torch.zeros_like(value)).requires_grad_()
        elif all(isinstance(part, Tensor) and part.dim() and part.shape[0] == count for part, count in parts):
            made[name] = torch.cat([part for part, _ in parts])
    return made
