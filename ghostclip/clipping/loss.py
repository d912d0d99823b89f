"""What a loss must look like, and what autograd knows of how it was reduced."""

from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from ghostclip.errors import LossReductionError

# What torch.autograd.backward hands over to; absent from some versions.
_RUN: Final[Any] = getattr(torch.autograd.graph, "_engine_run_backward", None)
# torch's own losses keep their reduction as a number: 0 none, 1 mean, 2 sum.
_NAMES: Final = {1: "mean", 2: "sum"}


def back_propagate(loss: Tensor) -> None:
    """Back-propagate the sum of losses.

    Ones in the place of a sum are two operations fewer, and their nodes; and what ``loss.backward`` looks at on the way
    to autograd takes half as long as a small backward does.

    Args:
        loss: Per-sample losses, shape ``(B,)``, or a scalar.
    """
    ones = torch.ones_like(loss)
    if _RUN is None or type(loss) is not Tensor or not loss.requires_grad:
        loss.backward(ones)
    else:
        _RUN((loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def check_loss(loss: Tensor, *, reduction: str, batch_size: int) -> None:
    """Refuse a loss that is neither one value a sample nor a scalar reduced as declared.

    Args:
        loss: The loss.
        reduction: The declared reduction of scalars, ``"mean"`` or ``"sum"``.
        batch_size: B; 0 for an empty batch, whose losses have any length.

    Raises:
        LossReductionError: The shape is wrong, or autograd shows another reduction than the declared one.
    """
    if loss.dim() > 1:
        message = (
            f"the loss has shape {tuple(loss.shape)}; expected per-sample losses of shape (B,) or a scalar. "
            "Remove extra axes with loss.flatten() or loss.squeeze(1) after checking that there is one value a sample."
        )
        raise LossReductionError(message)
    if loss.dim() == 1:
        if batch_size and loss.shape[0] != batch_size:
            message = (
                f"{loss.shape[0]} losses were given for a batch of {batch_size} samples. Reduce the loss over "
                "everything but the "
                "samples (reduction='none', then a mean over each sample's own positions)."
            )
            raise LossReductionError(message)
        return
    shown = shown_reduction(loss.grad_fn, batch_size)
    if batch_size > 1 and shown is not None and shown != reduction:
        message = (
            f"loss_reduction={reduction!r} was declared, but the loss was reduced over the samples by a {shown}: "
            f"every norm would be off by the batch size. Pass loss_reduction={shown!r}, or give losses of shape (B,)."
        )
        raise LossReductionError(message)
    check_normaliser(loss.grad_fn, batch_size)


def check_normaliser(node: Any, batch_size: int) -> None:
    """Refuse a mean whose divisor depends on all samples together.

    ``cross_entropy(..., ignore_index=-100)`` over the tokens of a batch divides by the number of tokens that count in
    the whole batch (or by the sum of their class weights). Where samples differ in that number, removing one sample
    rescales all others, so that no bound on one sample's influence holds.

    Args:
        node: The loss's ``grad_fn``.
        batch_size: B.

    Raises:
        LossReductionError: Samples have different shares of the divisor.
    """
    if batch_size < 2 or getattr(node, "_saved_reduction", None) != 1 or not hasattr(node, "_saved_total_weight"):
        return
    target = node._saved_target
    if target.numel() % batch_size:
        raise LossReductionError(_not_over_samples(target.numel(), batch_size))
    weight = node._saved_weight
    share = torch.ones_like(target, dtype=torch.float64) if weight is None else weight.double()[target.clamp(min=0)]
    share = share.masked_fill(target == node._saved_ignore_index, 0.0)
    share_B = share.reshape(batch_size, -1).sum(1)
    if not torch.allclose(share_B, share_B[0].expand_as(share_B), rtol=1e-6, atol=0.0):
        message = (
            "the loss is a mean over all counted positions of the batch, and the samples count differently many "
            f"(between {share_B.min().item():g} and {share_B.max().item():g}): each sample's gradient would depend on "
            "the others' lengths. Use reduction='none' and average each sample over its own positions, giving (B,)."
        )
        raise LossReductionError(message)


def _not_over_samples(count: int, batch_size: int) -> str:
    return (
        f"the loss is a mean over {count} values for a batch of {batch_size} samples: part of the batch was left out, "
        "or samples have different numbers of values. Use reduction='none' and give one loss a sample, shape (B,)."
    )


def shown_reduction(node: Any, batch_size: int) -> str | None:
    """Return the reduction that the last operation of a loss shows, or None where it shows none.

    Args:
        node: The loss's ``grad_fn``.
        batch_size: B.

    Returns:
        ``"mean"``, ``"sum"`` or None.

    Raises:
        LossReductionError: A mean was taken over a number of values that the samples cannot share evenly.
    """
    if node is None:
        return None
    reduction = getattr(node, "_saved_reduction", None)
    if reduction in _NAMES:
        return _NAMES[reduction]
    name = node.name()
    if name not in ("MeanBackward0", "SumBackward0") or len(node._saved_self_sym_sizes) == 0:
        return None
    count = prod(node._saved_self_sym_sizes)
    if name == "MeanBackward0" and batch_size > 1 and count % batch_size:
        raise LossReductionError(_not_over_samples(count, batch_size))
    # Only one value a sample is sure to be a reduction over samples; over more axes a sum may be part of each loss.
    if prod(node._saved_self_sym_sizes) != batch_size:
        return None
    return "mean" if name == "MeanBackward0" else "sum"
