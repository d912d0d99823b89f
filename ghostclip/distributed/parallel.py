"""A model on several ranks, as scripts for Opacus wrap it."""

from __future__ import annotations

from typing import Any

from torch import nn

from ghostclip.distributed.weights import broadcast_parameters


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """Gives every rank rank 0's parameters, and runs the model; sums meet in the private optimizer's step.

    Args:
        model: Each rank's model, of the same shapes.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        broadcast_parameters(model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model.

        Args:
            *args: The model's own arguments.
            **kwargs: The model's own keyword arguments.

        Returns:
            What the model returns.
        """
        return self.module(*args, **kwargs)
