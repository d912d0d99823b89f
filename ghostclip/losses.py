"""Losses of one value per sample: what a private backward is given where a scalar would tie samples together.

Shapes: B samples, T positions (tokens) of each, V classes (vocabulary), N = B·T, L any axes, I features of a hidden
state.
"""

from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ghostclip import _torch, _validate
from ghostclip.errors import InvalidOptionError, LossReductionError
from ghostclip.kernels.bounds import widened
from ghostclip.kernels.head import Form, HeadCall, vocabulary_losses

# Options of a head's loss that those of its samples hand on.
_HEAD_OPTIONS: Final = ("bias", "ignore_index", "label_smoothing", "logit_scale", "logit_cap", "z_loss")
# On the node of a product with a number that follows no data: see `scheduled`.
SCHEDULED: Final = "ghostclip_scheduled"


def token_losses(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    shift: bool = True,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Cross-entropy of each sample over its own counted positions, for language models and token classifiers.

    Transformers' own ``labels=`` divides by the counted tokens of the whole batch, so that one sample's length scales
    every other sample's gradient. Here a sample is divided by its own count, and one without any counted position has
    the loss 0.

    Privacy:
        A sample's loss is a function of its own logits and labels.

    Args:
        logits: Scores, shape ``(B, T, V)``; the loss is computed in float32 at least. Under `loss_parallel` a DTensor
            whose classes lie on several ranks; every rank is given whole losses.
        labels: Classes, shape ``(B, T)``, int64.
        ignore_index: The label of positions that do not count.
        shift: Whether position t predicts the label at t + 1 (causal language models), as transformers' ``labels=``
            means it; False where each position has its own label (masked language models, token classification, T5).
        label_smoothing: As for ``torch.nn.functional.cross_entropy``.
        reduction: Whether a sample's positions are averaged or summed.

    Returns:
        Losses, shape ``(B,)``, float32 at least, in nats.

    Raises:
        InvalidOptionError: Labels are smoothed of a DTensor.
        LossReductionError: The shapes are others.

    Example:
        >>> logits, labels = torch.zeros(2, 5, 7), torch.ones(2, 5, dtype=torch.int64)
        >>> ghostclip.losses.token_losses(logits, labels)  # one for each sample, for clipper.backward
        tensor([1.9459, 1.9459])
    """
    _validate.choice(reduction, "reduction", ("mean", "sum"))
    if label_smoothing and _torch.is_sharded_tensor(logits):
        raise InvalidOptionError(
            f"token_losses: label_smoothing={label_smoothing} of logits whose classes lie on several ranks, which "
            "torch's loss_parallel does not compute. Give logits.full_tensor(), or leave it at 0."
        )
    logits, labels = _aligned(logits, labels, "token_losses: logits", "(B, T, V)", shift=shift)
    scores_NV = widened(logits.flatten(0, 1))
    losses_N = functional.cross_entropy(
        scores_NV, labels.flatten(), ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    losses_N = _torch.part_of(losses_N)
    return _of_samples(losses_N.view(labels.shape), labels, ignore_index=ignore_index, reduction=reduction)


def scheduled(loss: Tensor, factor: float) -> Tensor:
    """Multiply a loss by a number that follows a public schedule: annealing of a term, a warm-up, a curriculum.

    A factor of all samples' losses that changes from step to step may have been computed from the batch, and is
    refused. This says that it was not.

    Privacy:
        The factor must be a function of public values: the number of the step, options, what was released. One that
        follows the batch (its tokens, its loss) makes each sample's gradient depend on the others, and no bound holds.

    Args:
        loss: Losses, shape ``(B,)``, or a scalar or a term of it, in nats or whatever the loss is measured in.
        factor: The number by which it is multiplied, at least 0.

    Returns:
        The product, of the shape and dtype of the loss.

    Raises:
        InvalidOptionError: The factor is no finite number of at least 0.

    Example:
        >>> reconstruction, divergence = torch.rand(8), torch.rand(8)
        >>> for step in range(1, 3):
        ...     losses = reconstruction + ghostclip.losses.scheduled(divergence, step / 750)
    """
    product = loss * _validate.non_negative(factor, "factor")
    node: Any = product.grad_fn
    if node is not None:
        node.metadata[SCHEDULED] = True
    return product


def linear_cross_entropy(  # noqa: PLR0913 - each option is one of the loss's own
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_cap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross-entropy of every position from hidden states, without the logits of all positions in memory.

    The same as ``cross_entropy(logit_cap·tanh(logit_scale·linear(hidden, weight, bias)/logit_cap), labels)``, with
    ``z_loss·lse²`` added, in tiles of logits that are formed, used and dropped. Any weights of positions may be
    multiplied by what is returned. In a model that ghostclip clips, samples' norms and clipped sums are formed of tiles
    as well; elsewhere it is an ordinary differentiable function.

    Cost: 2·N·V·I for the losses; their backward as much for the logits again and for each gradient. Privately 5 times
    2·N·V·I in all, and the norm: min(2·T·V·I, about T²·(V + I)) a sample.

    Privacy:
        A position's loss is a function of its own hidden state and label.

    Args:
        hidden: Hidden states, shape ``(*L, I)``.
        weight: The head's weight, shape ``(V, I)``, in the same dtype.
        labels: Classes, shape ``L``, int64.
        bias: The head's bias, shape ``(V,)``.
        ignore_index: The label of positions that do not count: their loss is 0.
        label_smoothing: As for ``torch.nn.functional.cross_entropy``.
        logit_scale: Factor of the logits.
        logit_cap: What logits are softly capped at, as in Gemma 2; None for no cap.
        z_loss: Factor of the squared log-sum-exp that is added to the loss (PaLM).

    Returns:
        Losses, shape ``L``, float64 for float64, else float32, in nats.

    Raises:
        InvalidOptionError: An option is out of its range.
        LossReductionError: The shapes do not fit.

    Example:
        >>> hidden, weight = torch.zeros(2, 5, 3), torch.zeros(7, 3)
        >>> ghostclip.losses.linear_cross_entropy(hidden, weight, torch.ones(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 5])
    """
    if not 0.0 <= label_smoothing <= 1.0:
        raise InvalidOptionError(f"label_smoothing={label_smoothing}: give a number from 0 to 1.")
    if logit_cap is not None and not logit_cap > 0.0:
        raise InvalidOptionError(f"logit_cap={logit_cap}: give a positive number, or None for no cap.")
    if (
        hidden.dim() < 2
        or labels.shape != hidden.shape[:-1]
        or weight.dim() != 2
        or weight.shape[1] != hidden.shape[-1]
    ):
        raise LossReductionError(
            f"linear_cross_entropy: hidden states of shape {tuple(hidden.shape)}, a weight of {tuple(weight.shape)} "
            f"and labels of {tuple(labels.shape)}; expected (*L, I), (V, I) and L, L of one axis at least."
        )
    kind = hidden.device.type
    if _torch.autocast_is_on(kind):
        narrow = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(narrow), weight.to(narrow)
    form = Form(ignore_index, label_smoothing, logit_cap, logit_scale, z_loss)
    return vocabulary_losses(hidden, weight, bias, labels.long(), HeadCall(form))


@_validate.takes(*_validate.options_of(linear_cross_entropy, *_HEAD_OPTIONS))
def head_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    shift: bool = True,
    reduction: Literal["mean", "sum"] = "mean",
    options: dict[str, Any],
) -> Tensor:
    """`token_losses` from hidden states, without the logits in memory: see `linear_cross_entropy`.

    Privacy:
        A sample's loss is a function of its own hidden states and labels.

    Args:
        hidden: Hidden states, shape ``(B, T, I)``.
        weight: As for `linear_cross_entropy`.
        labels: Classes, shape ``(B, T)``, int64.
        shift: As for `token_losses`.
        reduction: Whether a sample's positions are averaged or summed.
        options: `bias`, `ignore_index`, `label_smoothing`, `logit_scale`, `logit_cap` and `z_loss`, each by its own
            name, as for `linear_cross_entropy`.

    Returns:
        Losses, shape ``(B,)``, float32 at least, in nats.

    Raises:
        LossReductionError: The shapes are others.
    """
    _validate.choice(reduction, "reduction", ("mean", "sum"))
    hidden, labels = _aligned(hidden, labels, "head_losses: hidden states", "(B, T, I)", shift=shift)
    losses_BT = linear_cross_entropy(hidden, weight, labels, **options)
    return _of_samples(losses_BT, labels, ignore_index=options["ignore_index"], reduction=reduction)


def _of_samples(losses_BT: Tensor, labels: Tensor, *, ignore_index: int, reduction: str) -> Tensor:
    """Return each sample's loss from those of its positions."""
    counted_BT = labels != ignore_index
    if reduction == "sum" or counted_BT.shape[1] == 1:
        return losses_BT.sum(1)
    # Weights, and no quotient: of a batch of one sample, a divisor with one entry could be anybody's count.
    shares_BT = counted_BT.to(losses_BT.dtype) / counted_BT.sum(1, keepdim=True).clamp(min=1)
    return (losses_BT * shares_BT).sum(1)


def _aligned(values: Tensor, labels: Tensor, what: str, expected: str, *, shift: bool) -> tuple[Tensor, Tensor]:
    """Return what every position's prediction is made from, and what it is to predict."""
    if values.dim() != 3 or labels.shape != values.shape[:2]:
        raise LossReductionError(
            f"{what} of shape {tuple(values.shape)} and labels of shape {tuple(labels.shape)}; expected {expected} and "
            "(B, T). Do not flatten them: the samples' axis must remain."
        )
    return (values[:, :-1], labels[:, 1:]) if shift else (values, labels)
