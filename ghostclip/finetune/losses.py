"""The loss of one sample, of each kind of task, and how good a model is on held-out samples.

A batch is ``ids_BT``, token ids padded at the right, and ``marks_B2``: the number of tokens that are not padding, and
what is predicted: the first token whose prediction counts, or the class.

Shapes: B samples, T tokens, V vocabulary, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ghostclip.finetune.passages import PassageDataset
from ghostclip.language.tasks import without_adapters
from ghostclip.language.vocabulary_head import use_fused, without_logits
from ghostclip.losses import token_losses

_IGNORED = -100

SampleLosses = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Losses ``[B]`` of a model on ``ids_BT`` and ``marks_B2``."""


@dataclass(frozen=True)
class Quality:
    """How good a model is on held-out samples.

    Attributes:
        loss: Nats per predicted token, or per sample where a class is predicted.
        accuracy: Share of the classes that are right; None where tokens are predicted.
    """

    loss: float
    accuracy: float | None = None

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where a float cannot hold it."""
        return math.exp(self.loss) if self.loss < 700.0 else math.inf


def _mask_of(ids_BT: Tensor, marks_B2: Tensor) -> Tensor:
    return torch.arange(ids_BT.shape[1], device=ids_BT.device) < marks_B2[:, :1]


def _labels(ids_BT: Tensor, marks_B2: Tensor) -> Tensor:
    given_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device) < marks_B2[:, 1:]
    return ids_BT.masked_fill(~_mask_of(ids_BT, marks_B2) | given_BT, _IGNORED)


def _predictions(model: nn.Module, ids_BT: Tensor, marks_B2: Tensor) -> tuple[Tensor, Tensor]:
    mask_BT = _mask_of(ids_BT, marks_B2)
    logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT.long(), use_cache=False).logits
    return logits_BTV, _labels(ids_BT, marks_B2)


def next_token_losses(model: nn.Module, ids_BT: Tensor, marks_B2: Tensor) -> tuple[Tensor, Tensor]:
    """Sum each sample's next-token losses and count its predicted tokens.

    Args:
        model: A causal language model of transformers.
        ids_BT: Token ids.
        marks_B2: Lengths, and the first token whose prediction counts.

    Returns:
        ``(sums_B, counts_B)``, float32; sums in nats.
    """
    sums_B = token_losses(*_predictions(model, ids_BT, marks_B2), reduction="sum")
    return sums_B, (marks_B2[:, 0] - marks_B2[:, 1].clamp(min=1)).clamp(min=0).float()


def passage_losses(model: nn.Module, ids_BT: Tensor, marks_B2: Tensor) -> Tensor:
    """Give each sample's loss: the mean over its *own* predicted tokens.

    Args:
        model: A causal language model of transformers.
        ids_BT: Token ids.
        marks_B2: Lengths, and the first token whose prediction counts.

    Returns:
        Losses ``[B]``, float32, in nats per token.
    """
    return token_losses(*_predictions(model, ids_BT, marks_B2), ignore_index=_IGNORED)


def _class_logits(model: nn.Module, ids_BT: Tensor, marks_B2: Tensor) -> Tensor:
    return model(input_ids=ids_BT, attention_mask=_mask_of(ids_BT, marks_B2).long()).logits.float()


def class_losses(model: nn.Module, ids_BT: Tensor, marks_B2: Tensor) -> Tensor:
    """Give each sample's loss: the cross entropy of its class.

    Args:
        model: A model of transformers for the classification of sequences.
        ids_BT: Token ids.
        marks_B2: Lengths and classes.

    Returns:
        Losses ``[B]``, float32, in nats.
    """
    return functional.cross_entropy(_class_logits(model, ids_BT, marks_B2), marks_B2[:, 1], reduction="none")


def losses_for(task: str, inner: nn.Module | None = None, *, vocabulary_head: str = "logits") -> SampleLosses:
    """Return the losses of a task.

    Args:
        task: One of ``TASKS``.
        inner: The model of transformers, or an adapted one, inside of whatever the losses will be of.
        vocabulary_head: Whether losses of tokens are computed without logits, see ``CHOICES``.

    Returns:
        Losses ``[B]`` of a model on a batch.

    Raises:
        UnsupportedModelError: "fused" was asked for, and the model does not fit.
    """
    if task == "classify":
        return class_losses
    bare = None if inner is None else without_adapters(inner)
    if bare is None or not use_fused(bare, vocabulary_head):
        return passage_losses

    def losses(model: nn.Module, ids_BT: Tensor, marks_B2: Tensor) -> Tensor:
        mask_BT = _mask_of(ids_BT, marks_B2)
        with without_logits(bare):
            labels_BT = _labels(ids_BT, marks_B2)
            outputs = model(input_ids=ids_BT, attention_mask=mask_BT.long(), labels=labels_BT, use_cache=False)
        found: Tensor = outputs.loss
        return found

    return losses


def _classified(model: nn.Module, ids_BT: Tensor, marks_B2: Tensor) -> tuple[Tensor, Tensor, int]:
    logits_BK = _class_logits(model, ids_BT, marks_B2)
    sums_B = functional.cross_entropy(logits_BK, marks_B2[:, 1], reduction="none")
    return sums_B, torch.ones_like(sums_B), int((logits_BK.argmax(1) == marks_B2[:, 1]).sum())


def _predicted(model: nn.Module, ids_BT: Tensor, marks_B2: Tensor) -> tuple[Tensor, Tensor, int]:
    return *next_token_losses(model, ids_BT, marks_B2), 0


def held_out_quality(
    model: nn.Module, samples: PassageDataset, *, task: str, limit: int, batch_size: int, dtype: str
) -> Quality:
    """Measure the loss over all predictions of held-out samples, and the accuracy where classes are predicted.

    Args:
        model: The model; its training mode is restored.
        samples: The held-out part.
        task: One of ``TASKS``.
        limit: Samples used at most, the first ones.
        batch_size: Samples computed at once.
        dtype: ``float32`` or ``bfloat16`` (autocast).

    Returns:
        The quality.
    """
    device = next(model.parameters()).device
    measure = _classified if task == "classify" else _predicted
    was_training = model.training
    model.eval()
    total = predictions = 0.0
    right, count = 0, min(limit, len(samples))
    with torch.no_grad(), precision(device, dtype):
        for start in range(0, count, batch_size):
            ids_BT, marks_B2 = samples.rows(start, min(start + batch_size, count))
            sums_B, counts_B, hits = measure(model, ids_BT.to(device), marks_B2.to(device))
            total += float(sums_B.double().sum())
            predictions += float(counts_B.sum())
            right += hits
    model.train(was_training)
    return Quality(total / predictions, right / count if task == "classify" else None)


def precision(device: torch.device, dtype: str) -> AbstractContextManager[object]:
    """Give the context in which forward passes run: autocast for ``bfloat16``, nothing for ``float32``.

    Args:
        device: Where they run.
        dtype: ``float32`` or ``bfloat16``.

    Returns:
        The context.
    """
    return torch.autocast(device.type, torch.bfloat16) if dtype == "bfloat16" else nullcontext()
