"""What is tried and measured beside the private training: that a model can be private, held-out quality, costs.

Privacy:
    Dummy samples stand for private ones; ordinary steps run on a copy with fresh weights that is thrown away. What is
    measured on held-out samples is not protected.

Shapes: B samples, T tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

import ghostclip
from ghostclip.clipper import Strategy
from ghostclip.clipping.options import factor_dtype_of
from ghostclip.data.memory import is_out_of_memory
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


@dataclass
class StepMeasures:
    """Times and memory of this session's private steps: (samples, seconds) of each timed one, and one peak in bytes."""

    timed: list[tuple[int, float]] = field(default_factory=list)
    peak_bytes: int | None = None
    physical_batch: int = 0

    def seconds(self, batch_size: int) -> float | None:
        """Return the median time of a step, scaled by its samples to an expected batch; None where none was timed."""
        rates = sorted(seconds / samples for samples, seconds in self.timed if samples > 0)
        return batch_size * rates[len(rates) // 2] if rates else None


@dataclass(frozen=True)
class Quality:
    """Nats per predicted token, or per sample where a class is predicted; then also the share that is right."""

    loss: float
    accuracy: float | None = None

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where a float cannot hold it."""
        return math.exp(self.loss) if self.loss < 700.0 else math.inf


def sample_losses(
    model: nn.Module, batch: Mapping[str, Tensor], dtype: str, *, fused: bool = False
) -> tuple[Tensor, Any]:
    """Return the losses (B,) of a batch on the model's device, as `DPTrainer` computes them, and the outputs."""
    task = task_of(model)
    assert task is not None, "made for a task"
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        return losses_of(model, {name: value.to(device) for name, value in batch.items()}, task, fused=fused)


def held_out_quality(model: nn.Module, samples: SampleDataset, options: FinetuneOptions) -> Quality:
    """Return the loss over all predictions of held-out samples, and the accuracy where classes are predicted."""
    was_training, total, predictions, right = model.training, 0.0, 0.0, 0
    classes, count = options.task == "classify", min(options.eval_samples, len(samples))
    model.eval()
    with torch.no_grad():
        for start in range(0, count, EVALUATION_BATCH):
            batch = samples.rows(start, min(start + EVALUATION_BATCH, count))
            losses_B, outputs = sample_losses(model, batch, options.dtype)
            labels = batch["labels"].to(losses_B.device)
            counts_B = torch.ones_like(losses_B) if classes else (labels[:, 1:] != IGNORED).sum(1)
            total += float((losses_B.double() * counts_B).sum())
            predictions += float(counts_B.sum())
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
    device = next(model.parameters()).device
    fused = options.task != "classify" and use_fused(
        without_adapters(model), options.vocabulary_head, allowed=options.strategy not in ("hooks", "graph")
    )
    budget, upper = None, largest_batch(options.batch_size)
    if device.type == "cuda":
        free, trained = torch.cuda.mem_get_info(device)[0], [p for p in model.parameters() if p.requires_grad]
        # What the optimizer will hold is not there yet: two tensors a parameter.
        budget = int(CUDA_SHARE * free) - 2 * sum(p.numel() * p.element_size() for p in trained)
    else:
        upper = min(upper, CPU_ENOUGH)
    clip = ghostclip.GhostClipper(
        model, max_grad_norm=1.0, strategy=cast("Strategy", options.strategy), memory_budget=options.memory_budget,
        factor_dtype=factor_dtype_of(options.factor_dtype), sharded=sharded_model(model),
    )  # fmt: skip
    with clip as clipper:

        def trial(size: int) -> None:
            batch = dummy_samples(size, width, model, options)
            clipper.backward(sample_losses(model, batch, options.dtype, fused=fused)[0])

        trial(2)
        silent = not bool((clipper.per_sample_norms > 0).any())
        physical = options.physical_batch_size
        if physical is None and not silent:
            physical = find_max_physical_batch_size(trial, upper=upper, memory_budget=budget, device=device)
    model.zero_grad(set_to_none=True)
    if silent or physical is None:
        raise UnsupportedModelError(f"{type(model).__name__}: no trainable parameter receives a gradient")
    return physical


class OrdinarySteps:
    """A few ordinary, non-private steps of a fresh copy, on dummy samples, with the shapes of the private ones.

    On the CPU each follows right after a private step, spread over the run, and is compared with that one: both kinds
    of step then see the same machine, busy or idle. On other devices they wait for the end, when the trained model
    has left the device: a copy beside it might not fit. A failure costs the run nothing.

    Attributes:
        missing: Why nothing was measured; empty where it was, or will be.

    Args:
        copy: Makes the copy, on the CPU.
        options: The run's.
        width: Tokens of a sample.
        device: Where the private steps run.
    """

    def __init__(
        self, copy: Callable[[], PreTrainedModel], options: FinetuneOptions, *, width: int, device: torch.device
    ) -> None:
        self._copy, self._options, self._width, self._device = copy, options, width, device
        self._model: nn.Module | None = None
        self._measures, self._neighbours = StepMeasures(), list[tuple[int, float]]()
        self.missing = "" if options.comparison_steps else "not measured (--comparison-steps 0)"

    @property
    def measures(self) -> StepMeasures | None:
        """Measures of the ordinary steps, if any were taken."""
        return self._measures if self._measures.timed and not self.missing else None

    def compared(self, measures: StepMeasures) -> StepMeasures:
        """Return the private steps right before an ordinary one; all, where there are none."""
        return replace(measures, timed=self._neighbours) if self._neighbours else measures

    def after_private_step(self, private: StepMeasures, *, left: int) -> None:
        """Measure on the CPU, when the time for another ordinary step has come."""
        done = len(private.timed)
        if self._device.type == "cpu" and done:
            due = math.ceil(done / (done + left) * self._options.comparison_steps)
            if self._measure_up_to(due, private.physical_batch):
                self._neighbours.append(private.timed[-1])

    def finish(self, *, physical_batch: int) -> None:
        """Measure what is left, after the last private step; of a session without steps nothing."""
        if physical_batch == 0:
            self.missing = "not measured (this session took no private step)"
        self._measure_up_to(self._options.comparison_steps, physical_batch)

    def _measure_up_to(self, count: int, physical_batch: int) -> bool:
        """Measure until there are so many, and return whether anything was measured."""
        if self.missing or count <= len(self._measures.timed):
            return False
        # Building the copy and its dropout draw random numbers, which must not change those of the private run.
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            try:
                if self._model is None:
                    self._begin(physical_batch)
                while len(self._measures.timed) < count:
                    began = time.perf_counter()
                    self._step()
                    self._measures.timed.append((self._options.batch_size, time.perf_counter() - began))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.missing = "not measured (out of memory)"
        return not self.missing

    def _begin(self, physical_batch: int) -> None:
        """Make the copy, warm up and measure memory."""
        self._model = self._copy().to(self._device).train()
        self._optimizer = adamw(self._model, self._options.rate)
        samples = dummy_samples(self._options.batch_size, self._width, self._model, self._options)
        split = {name: value.to(self._device).split(physical_batch) for name, value in samples.items()}
        self._parts = [dict(zip(split, part, strict=True)) for part in zip(*split.values(), strict=True)]
        self._measures.physical_batch = physical_batch
        self._step()
        self._step(lambda work: peak_bytes(work, self._device))

    def _step(self, run: Callable[[Callable[[], None]], int | None] = lambda work: work()) -> None:
        for number, part in enumerate(self._parts, start=1):
            peak = run(partial(self._part, part, last=number == len(self._parts)))
            self._measures.peak_bytes = max(self._measures.peak_bytes or 0, peak or 0) or None

    def _part(self, part: dict[str, Tensor], *, last: bool) -> None:
        assert self._model is not None, "made in the first step"
        loss = sample_losses(self._model, part, self._options.dtype)[0].sum() / self._options.batch_size
        loss.backward()
        float(loss.detach())  # the private loop reads its loss too, which waits for the device
        if last:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)


def adamw(model: nn.Module, rate: float) -> torch.optim.AdamW:
    """Return the optimizer of compared steps, as private ones have it: weight decay would pull against the noise."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
