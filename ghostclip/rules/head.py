"""The vocabulary head with its cross-entropy: `ghostclip.kernels.head.vocabulary_losses`, and torch's function.

Shape letters: B samples, T positions, L the leading (row) axes, I features of a hidden state, V entries of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ghostclip.factors import Factor, Head, HeadBias
from ghostclip.factors.head import Shared
from ghostclip.kernels.head import Form, HeadCall, Table, Tokens
from ghostclip.kernels.head import vocabulary_losses as losses_of
from ghostclip.rules.registry import Call, Captured, Split, register_op


@register_op("vocabulary_losses", arguments="hidden weight bias labels call")
def vocabulary_losses(call: Call) -> Captured | None:
    """Return the capture of the loss of every position: weight ``Head``, bias ``Dense``; None for a tracked input."""
    x, weight, bias = (call.values[name] for name in ("hidden", "weight", "bias"))
    if "hidden" in call.tracked or x.dim() < 2:
        return None
    # The closure must not hold the input: it is kept through autograd, where checkpointing can drop it.
    run: HeadCall = call.values["call"]
    labels, num_batch_dims, wants_input = call.values["labels"], x.dim() - 1, x.requires_grad
    trained, table = call.tracked, Table(weight, bias, run.form)

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        assert run.lse is not None
        tokens = Tokens(*(split(part, num_batch_dims) for part in (saved[0].detach(), labels, run.lse, grad)))
        shared = Shared(wants_input=wants_input, wants_bias="bias" in trained)
        head = Head(tokens, table, shared)
        if wants_input:
            position_BT = split(torch.arange(1, grad.numel() + 1, device=grad.device).view(grad.shape), num_batch_dims)
            run.arrived = grad, lambda: _in_rows(head.input_gradient(), position_BT, saved[0].shape)
        factor_of: dict[str, Factor] = {"weight": head} if "weight" in trained else {}
        if "bias" in trained:
            factor_of["bias"] = HeadBias(head)
        return factor_of

    return Captured((x,), x, num_batch_dims, factors, "vocabulary head")


def _in_rows(grad_BTI: Tensor, place_BT: Tensor, shape: torch.Size) -> Tensor:
    """Return the gradient of hidden states in their own shape ``(*L, I)`` from that ordered by sample."""
    # ``place_BT`` counts rows from 1, 0 is padding.
    rows = shape.numel() // max(1, shape[-1])
    out_NI = grad_BTI.new_empty(rows + 1, shape[-1])
    out_NI[place_BT.flatten()] = grad_BTI.flatten(0, 1)
    return out_NI[1:].view(shape)


def linear_cross_entropy(  # noqa: PLR0913 - torch's arguments
    input: Tensor,  # noqa: A002 - torch's name
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    otherwise: Callable[..., Tensor],
) -> Tensor:
    """Run torch's function of this name as the loss of every position and a reduction, proved like any other."""
    # `otherwise` is torch's own, with logits: for probabilities as targets, several axes of classes, and smoothed
    # labels of weighted classes.
    of_classes = target.dtype == torch.int64 and linear_weight.dim() == 2 and target.shape == input.shape[:-1]
    if input.dim() != 2 or not of_classes or (weight is not None and label_smoothing):
        return otherwise(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )
    form = Form(-100 if ignore_index is None else ignore_index, label_smoothing)
    losses_N = losses_of(input, linear_weight, linear_bias, target, HeadCall(form)).to(input.dtype)
    counted_N = target != form.ignore_index
    if weight is not None:
        losses_N = losses_N * weight[target.where(counted_N, 0)]
    if reduction == "none":
        return losses_N
    if reduction == "sum":
        return losses_N.sum()
    if weight is None and bool(counted_N.all()):
        return losses_N.mean()
    shares_N = counted_N.to(losses_N.dtype) if weight is None else weight[target.where(counted_N, 0)] * counted_N
    return losses_N.sum() / shares_N.sum()
