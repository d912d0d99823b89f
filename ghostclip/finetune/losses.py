"""The loss of one passage, and held-out perplexity.

Shapes: B samples, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from ghostclip.finetune.passages import PassageDataset
from ghostclip.losses import token_losses

_IGNORED = -100


def next_token_losses(model: nn.Module, ids_BT: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
    """Sum each passage's next-token losses and count its predicted tokens.

    Args:
        model: A causal language model of transformers.
        ids_BT: Token ids, padded at the right.
        lengths_B: Tokens that are not padding.

    Returns:
        ``(sums_B, counts_B)``, float32; sums in nats.
    """
    sums_B = token_losses(*_predictions(model, ids_BT, lengths_B), reduction="sum")
    return sums_B, (lengths_B - 1).clamp(min=0).float()


def _predictions(model: nn.Module, ids_BT: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
    mask_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device) < lengths_B[:, None]
    logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT.long(), use_cache=False).logits
    return logits_BTV, ids_BT.masked_fill(~mask_BT, _IGNORED)


def passage_losses(model: nn.Module, ids_BT: Tensor, lengths_B: Tensor) -> Tensor:
    """Give each passage's loss: the mean over its *own* predicted tokens.

    Args:
        model: A causal language model of transformers.
        ids_BT: Token ids, padded at the right.
        lengths_B: Tokens that are not padding.

    Returns:
        Losses ``[B]``, float32, in nats per token.
    """
    return token_losses(*_predictions(model, ids_BT, lengths_B), ignore_index=_IGNORED)


def perplexity(model: nn.Module, passages: PassageDataset, *, limit: int, batch_size: int, dtype: str) -> float:
    """Measure the perplexity over the tokens of held-out passages.

    Args:
        model: A causal language model; its training mode is restored.
        passages: The held-out part.
        limit: Passages used at most, the first ones.
        batch_size: Passages computed at once.
        dtype: ``float32`` or ``bfloat16`` (autocast).

    Returns:
        exp(mean loss per token).
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = tokens = 0.0
    count = min(limit, len(passages))
    with torch.no_grad(), precision(device, dtype):
        for start in range(0, count, batch_size):
            ids_BT, lengths_B = passages.rows(start, min(start + batch_size, count))
            sums_B, counts_B = next_token_losses(model, ids_BT.to(device), lengths_B.to(device))
            total += float(sums_B.double().sum())
            tokens += float(counts_B.sum())
    model.train(was_training)
    mean = total / tokens
    return math.exp(mean) if mean < 700.0 else math.inf


def precision(device: torch.device, dtype: str) -> AbstractContextManager[object]:
    """Give the context in which forward passes run: autocast for ``bfloat16``, nothing for ``float32``.

    Args:
        device: Where they run.
        dtype: ``float32`` or ``bfloat16``.

    Returns:
        The context.
    """
    return torch.autocast(device.type, torch.bfloat16) if dtype == "bfloat16" else nullcontext()
