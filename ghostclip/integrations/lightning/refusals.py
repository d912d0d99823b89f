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
