"""Options of a Lightning Trainer that contradict a private training, each with its remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ghostclip.errors import InvalidOptionError

# Name of the option, whether a value contradicts, why, and what to do.
_OPTIONS: Final[tuple[tuple[str, Callable[[Any], bool], str, str], ...]] = (
    (
        "gradient_clip_val",
        bool,
        "the batch's gradient would be clipped, which bounds no record's influence",
        "Leave it out: PrivacyCallback(max_grad_norm=...) clips each record",
    ),
    (
        "precision",
        lambda value: value == "16-mixed",
        "its loss scale adapts to the data",
        "Use precision='bf16-mixed'",
    ),
    (
        "reload_dataloaders_every_n_epochs",
        bool,
        "the account is of one loader over one data set",
        "Leave it out",
    ),
)
_CALLBACKS: Final = {
    "GradientAccumulationScheduler": (
        "it changes the size of a draw in the course of the training, which is another mechanism",
        "Use Trainer(accumulate_grad_batches=...)",
    ),
    "BatchSizeFinder": (
        "it tries batch sizes on records, and another batch size is another mechanism",
        "Leave it out: PrivacyCallback(physical_batch='auto') finds what fits in memory",
    ),
    "LearningRateFinder": (
        "its trials are steps on the same records, and cost ε",
        "Try learning rates on public data",
    ),
}
# Of processes whose memory is gone when the training has ended.
_LAUNCHER: Final = "_MultiProcessingLauncher"
_STRATEGIES: Final = ("SingleDeviceStrategy", "DDPStrategy")


def refuse(trainer: Any) -> None:
    """Refuse what contradicts a private training.

    Args:
        trainer: The trainer, before anything was trained.

    Raises:
        InvalidOptionError: Names the option, its value, why and the remedy.
    """
    for name, contradicts, why, remedy in _OPTIONS:
        owner = trainer if hasattr(trainer, name) else trainer.fit_loop
        value = getattr(owner, name, None)
        if value is None:
            value = getattr(trainer._data_connector, name, None)
        if contradicts(value):
            raise InvalidOptionError(f"Trainer({name}={value!r}): {why}. {remedy}.")
    for callback in trainer.callbacks:
        found = next((kind.__name__ for kind in type(callback).__mro__ if kind.__name__ in _CALLBACKS), None)
        if found is not None:
            why, remedy = _CALLBACKS[found]
            raise InvalidOptionError(f"callback {found}: {why}. {remedy}.")
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
