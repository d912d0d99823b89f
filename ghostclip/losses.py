"""Losses of one value a sample: what a private backward is given where a scalar would tie samples together.

Shapes: B samples, T positions (tokens) of each, V classes (vocabulary), N = B·T.
"""

from typing import Literal

from torch import Tensor
from torch.nn import functional

from ghostclip import _validate
from ghostclip.errors import LossReductionError


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
        logits: Scores, shape ``(B, T, V)``; the loss is computed in float32 at least.
        labels: Classes, shape ``(B, T)``, int64.
        ignore_index: The label of positions that do not count.
        shift: Whether position t predicts the label at t + 1 (causal language models), as transformers' ``labels=``
            means it; False where each position has its own label (masked language models, token classification, T5).
        label_smoothing: As for ``torch.nn.functional.cross_entropy``.
        reduction: Whether a sample's positions are averaged or summed.

    Returns:
        Losses, shape ``(B,)``, float32 at least, in nats.

    Raises:
        LossReductionError: The shapes are others.

    Example:
        >>> logits, labels = torch.zeros(2, 5, 7), torch.ones(2, 5, dtype=torch.int64)
        >>> ghostclip.losses.token_losses(logits, labels)  # one for each sample, for clipper.backward
        tensor([1.9459, 1.9459])
    """
    _validate.choice(reduction, "reduction", ("mean", "sum"))
    if logits.dim() != 3 or labels.shape != logits.shape[:2]:
        message = (
            f"token_losses: logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)}; expected "
            "(B, T, V) and (B, T). Do not flatten them: the samples' axis must remain."
        )
        raise LossReductionError(message)
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    scores_NV = logits.flatten(0, 1)
    if scores_NV.dtype.itemsize < 4:
        scores_NV = scores_NV.float()
    losses_N = functional.cross_entropy(
        scores_NV,
        labels.flatten(),
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    losses_BT = losses_N.view(labels.shape)
    counted_BT = labels != ignore_index
    if reduction == "sum" or counted_BT.shape[1] == 1:
        return losses_BT.sum(1)
    # Weights, and no quotient: of a batch of one sample, a divisor with one entry could be anybody's count.
    shares_BT = counted_BT.to(losses_BT.dtype) / counted_BT.sum(1, keepdim=True).clamp(min=1)
    return (losses_BT * shares_BT).sum(1)
