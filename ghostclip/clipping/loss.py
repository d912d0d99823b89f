"""Checks of a loss's shape, and its backward."""

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.errors import LossReductionError


def back_propagate(loss: Tensor) -> None:
    """Back-propagate the sum of losses ``(B,)``, or a scalar."""
    # A gradient of ones instead of a sum is two operations fewer, and their nodes; and what `loss.backward` checks on
    # the way to autograd takes half as long as a small backward does.
    ones = torch.ones_like(loss)
    if type(loss) is not Tensor or not loss.requires_grad:
        loss.backward(ones)
    else:
        _torch.run_backward((loss,), (ones,))


def check_shape(loss: Tensor, *, batch_size: int) -> None:
    """Refuse a loss that is neither one value per sample nor a scalar; an empty batch has losses of any length."""
    if loss.dim() > 1:
        message = (
            f"the loss has shape {tuple(loss.shape)}; expected per-sample losses of shape (B,) or a scalar. "
            "Remove extra axes with loss.flatten() or loss.squeeze(1) where there is one value per sample."
        )
        raise LossReductionError(message)
    if loss.dim() == 1 and batch_size and loss.shape[0] != batch_size:
        message = (
            f"{loss.shape[0]} losses were given for a batch of {batch_size} samples. Reduce the loss over everything "
            "but the samples (reduction='none', then a mean over each sample's own positions)."
        )
        raise LossReductionError(message)
