"""Pieces that private and ordinary steps share, so that only privacy differs between them.

Shapes: B samples, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

import ghostclip
from ghostclip.clipper import Strategy
from ghostclip.clipping.options import factor_dtype_of
from ghostclip.distributed import sharded_model
from ghostclip.errors import UnsupportedModelError
from ghostclip.finetune.losses import SampleLosses, precision
from ghostclip.finetune.options import FinetuneOptions

WARM_UP = 0.05
# The first step of a session finds the physical batch and fills caches; the second is slowed by the memory profiler.
UNTIMED_STEPS = 2


@dataclass
class StepMeasures:
    """Times and memory of this session's private steps: (samples, seconds) of each timed one, and one peak in bytes."""

    timed: list[tuple[int, float]] = field(default_factory=list)
    peak_bytes: int | None = None
    physical_batch: int = 0


def check_private(model: nn.Module, losses: SampleLosses, *, width: int, options: FinetuneOptions) -> None:
    """Clip two dummy passages, so that a model that cannot be made private is refused before anything is written.

    Args:
        model: The model, on its device; left as it was.
        losses: Of the samples.
        width: Tokens of a passage.
        options: How gradients are to be clipped, and in what the forward runs.

    Raises:
        UnsupportedModelError: No parameter gets a gradient.
    """
    device = next(model.parameters()).device
    ids_BT, marks_B2 = dummy_passages(2, width, vocabulary_of(model), device)
    clip = ghostclip.GhostClipper(
        model,
        max_grad_norm=1.0,
        strategy=cast("Strategy", options.strategy),
        memory_budget=options.memory_budget,
        factor_dtype=factor_dtype_of(options.factor_dtype),
        sharded=sharded_model(model),
    )
    with clip as clipper:
        with precision(device, options.dtype):
            losses_B = losses(model, ids_BT, marks_B2)
        clipper.backward(losses_B)
        silent = not bool((clipper.per_sample_norms > 0).any())
    model.zero_grad(set_to_none=True)
    if silent:
        raise UnsupportedModelError(f"{type(model).__name__}: no trainable parameter receives a gradient")


def dummy_passages(count: int, width: int, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make full-length passages of random tokens, for whatever must be tried without private data.

    Args:
        count: B.
        width: T.
        vocabulary: Ids to draw from.
        device: Where to put them.

    Returns:
        Ids ``[B, T]`` and marks ``[B, 2]``: their length, and 1, which is a token to predict and a class.
    """
    ids_BT = torch.randint(vocabulary, (count, width), generator=torch.Generator().manual_seed(0))
    return ids_BT.to(device), torch.tensor([[width, 1]], device=device).expand(count, 2)


def vocabulary_of(model: nn.Module) -> int:
    """Give the number of rows of a model's token embedding.

    Args:
        model: A model of transformers.

    Returns:
        V.
    """
    return int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]


def learning_rate_at(step: int, *, steps: int, peak: float) -> float:
    """Give the learning rate of a step: linear warm-up over the first twentieth, then linear decay towards 0.

    Args:
        step: The step, from 0.
        steps: Steps of the whole run.
        peak: The largest rate.

    Returns:
        The rate, above 0.
    """
    warm_up = max(1, round(WARM_UP * steps))
    rising = (step + 1) / warm_up
    falling = (steps - step) / max(1, steps - warm_up)
    return peak * min(1.0, rising, falling)


def adamw(model: nn.Module, rate: float) -> torch.optim.AdamW:
    """Make the optimizer of private and compared steps.

    Args:
        model: Its trainable parameters are optimized.
        rate: The learning rate.

    Returns:
        AdamW without weight decay, which would only pull against the noise.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
