"""A model on several ranks, as scripts for Opacus wrap it."""

from __future__ import annotations

from typing import Any

from torch import nn

from ghostclip.distributed.weights import broadcast_parameters


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """Opacus's wrapper: gives every rank rank 0's parameters; sums are added up in the private optimizer's step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        broadcast_parameters(model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
