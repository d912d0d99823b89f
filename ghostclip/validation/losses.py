"""Loss functions as a check calls them, ``loss_fn(model, batch)``, made of what users have at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ghostclip.errors import InvalidOptionError

LossFn = Callable[[nn.Module, Any], Tensor]


def as_loss_fn(loss: nn.Module | Callable[..., Tensor] | None, batch: Any) -> LossFn:
    """Return the function that computes the loss of a batch.

    Args:
        loss: A criterion (a module, or a function of torch.nn.functional) for batches of inputs and targets; a function
            that is called as it is, ``loss(model, batch)``; None for models that compute their own loss.
        batch: A batch, which tells whether the other two are possible.

    Returns:
        Called with the model and a batch.

    Raises:
        InvalidOptionError: The loss is none of these, or does not go with the batch.
    """
    if loss is None:
        if not isinstance(batch, Mapping):
            raise InvalidOptionError(
                f"loss=None: the model's own loss is model(**batch).loss, for which the batch has to be a dict (with "
                f"labels); it is a {type(batch).__name__}. Give the loss: a criterion, or a function of model and "
                "batch."
            )
        return own_loss
    if isinstance(loss, nn.Module) or getattr(loss, "__module__", None) == "torch.nn.functional":
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise InvalidOptionError(
                f"loss={type(loss).__name__}: a criterion is called with model(inputs) and targets, for which the "
                "batch has to be a pair. Give a function instead: loss(model, batch)."
            )
        return lambda model, pair: loss(model(pair[0]), pair[1])
    if not callable(loss):
        raise InvalidOptionError(
            f"loss={loss!r}: give a criterion, a function of model and batch, or None for a model with its own loss."
        )
    return loss


def own_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the loss that a model computes itself, as those of transformers do.

    Args:
        model: The model.
        batch: Its arguments, labels among them.

    Returns:
        The loss.

    Raises:
        InvalidOptionError: The model returns none.
    """
    output = model(**batch)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise InvalidOptionError(
            f"loss=None: {type(model).__name__} returned no loss for a batch of {', '.join(batch)}. Add the labels to "
            "the batch, or give the loss: a function of model and batch."
        )
    return found
