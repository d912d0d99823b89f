"""The parameters of an optimizer."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer


def params(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups that require a gradient, in order.

    Args:
        optimizer: Any optimizer, private or not.

    Returns:
        The parameters.
    """
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
