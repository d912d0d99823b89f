"""What is tried and measured beside the private training: that a model can be private, held-out quality, costs.

Privacy:
    Dummy samples stand for private ones; ordinary steps run on a copy with fresh weights that is thrown away. What is
    measured on held-out samples is not protected.

Shapes: B samples, T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

import ghostclip
from ghostclip.clipper import Strategy
from ghostclip.clipping.options import factor_dtype_of
from ghostclip.data.physical_batch_size import find_max_physical_batch_size
from ghostclip.data.size_policies import largest_batch
from ghostclip.data.tensor_memory import peak_bytes
from ghostclip.distributed import sharded_model
from ghostclip.errors import UnsupportedModelError
from ghostclip.finetune.models import vocabulary_of
from ghostclip.finetune.options import FinetuneOptions
from ghostclip.finetune.samples import IGNORED, SampleDataset
from ghostclip.language.record_losses import losses_of
from ghostclip.language.tasks import task_of, without_adapters
from ghostclip.language.vocabulary_head import use_fused

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EVALUATION_BATCH = 32
# Of a GPU's free memory; the rest is for fragmentation, noise, and libraries that allocate by themselves.
CUDA_SHARE = 0.8
# On a CPU a batch larger than this only leaves the caches: 256 at once took longer per sample than 64.
CPU_ENOUGH = 64


class Quality(NamedTuple):
    """Nats per predicted token, or per sample where a class is predicted; then also the share that is right."""

    loss: float
    accuracy: float | None = None


def sample_losses(
    model: nn.Module, batch: Mapping[str, Tensor], dtype: str, *, fused: bool = False
) -> tuple[Tensor, Any]:
    """Return the losses (B,) of a batch on the model's device, as `DPTrainer` computes them, and the outputs."""
    task, device = task_of(model), next(model.parameters()).device
    assert task is not None, "made for a task"
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        return losses_of(model, {name: value.to(device) for name, value in batch.items()}, task, fused=fused)


@torch.no_grad()
def held_out_quality(model: nn.Module, samples: SampleDataset, options: FinetuneOptions) -> Quality:
    """Return the loss over all predictions of held-out samples, and the accuracy where classes are predicted."""
    classes, count = options.task == "classify", min(options.eval_samples, len(samples))
    was_training, total, predictions, right = model.training, 0.0, 0, 0
    model.eval()
    for start in range(0, count, EVALUATION_BATCH):
        batch = samples.rows(start, min(start + EVALUATION_BATCH, count))
        losses_B, outputs = sample_losses(model, batch, options.dtype)
        labels = batch["labels"].to(losses_B.device)
        counts_B = torch.ones_like(labels) if classes else (labels[:, 1:] != IGNORED).sum(1)
        total += float((losses_B.double() * counts_B).sum())
        predictions += int(counts_B.sum())
        right += int((outputs.logits.argmax(1) == labels).sum()) if classes else 0
    model.train(was_training)
    return Quality(total / predictions, right / count if classes else None)


def dummy_samples(count: int, width: int, model: nn.Module, options: FinetuneOptions) -> dict[str, Tensor]:
    """Return full-length samples of random tokens, for whatever must be tried without private data."""
    ids_BT = torch.randint(vocabulary_of(model), (count, width), generator=torch.Generator().manual_seed(0))
    labels = torch.ones(count, dtype=torch.int64) if options.task == "classify" else ids_BT
    return {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT), "labels": labels}


def try_private(model: nn.Module, width: int, options: FinetuneOptions) -> int:
    """Clip dummy samples, so that a model that cannot be private is refused before anything is written.

    Returns the samples to compute at once: what was asked for, or as many as fit, on a CPU those that still pay.
    """
    device, upper, budget = next(model.parameters()).device, largest_batch(options.batch_size), None
    if device.type == "cuda":
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        # What the optimizer will hold is not there yet: two tensors a parameter.
        budget = int(CUDA_SHARE * torch.cuda.mem_get_info(device)[0]) - 2 * trained
    else:
        upper = min(upper, CPU_ENOUGH)
    fused = options.task != "classify" and use_fused(
        without_adapters(model), options.vocabulary_head, allowed=options.strategy not in ("hooks", "graph")
    )
    clip = ghostclip.GhostClipper(
        model, max_grad_norm=1.0, strategy=cast("Strategy", options.strategy), memory_budget=options.memory_budget,
        factor_dtype=factor_dtype_of(options.factor_dtype), sharded=sharded_model(model),
    )  # fmt: skip
    with clip as clipper:

        def trial(size: int) -> None:
            batch = dummy_samples(size, width, model, options)
            clipper.backward(sample_losses(model, batch, options.dtype, fused=fused)[0])

        trial(2)
        if not bool((clipper.per_sample_norms > 0).any()):
            raise UnsupportedModelError(f"{type(model).__name__}: no trainable parameter receives a gradient")
        physical = options.physical_batch_size or find_max_physical_batch_size(
            trial, upper=upper, memory_budget=budget, device=device
        )
    model.zero_grad(set_to_none=True)
    return physical


def ordinary_cost(copy: PreTrainedModel, width: int, options: FinetuneOptions, physical: int) -> dict[str, Any]:
    """Take ordinary, non-private steps on dummy samples, in parts as large as those of private steps."""
    device, size, timed = next(copy.parameters()).device, options.batch_size, []
    optimizer = adamw(copy.train(), options.rate)
    samples = dummy_samples(size, width, copy, options)
    parts = [{name: value[at : at + physical] for name, value in samples.items()} for at in range(0, size, physical)]

    def compute() -> None:
        for part in parts:
            loss = sample_losses(copy, part, options.dtype)[0].sum() / size
            loss.backward()
            float(loss.detach())  # the private loop reads its loss too, which waits for the device

    peak = None
    for number in range(-2, options.comparison_steps):
        began = time.perf_counter()
        # The first step warms up; the second is slowed by the memory profiler.
        if number == -1:
            peak = peak_bytes(compute, device)
        else:
            compute()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        timed.append((size, time.perf_counter() - began))
    return cost_of(timed[2:], peak, size, physical)


def cost_of(timed: list[tuple[int, float]], peak: int | None, batch_size: int, physical: int) -> dict[str, Any]:
    """Return the median time of a step, of (samples, seconds) scaled to an expected batch, and its memory."""
    rates = [seconds / samples for samples, seconds in timed if samples > 0]
    return {
        "seconds_per_step": batch_size * median(rates) if rates else None,
        "timed_steps": len(timed),
        "peak_bytes_above_weights_and_optimizer": peak,
        "physical_batch": physical,
    }


def adamw(model: nn.Module, rate: float) -> torch.optim.AdamW:
    """Return the optimizer of compared steps, as private ones have it: weight decay would pull against the noise."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
