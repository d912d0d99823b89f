"""A few ordinary, non-private steps of the same model, measured beside the private ones.

Privacy:
    They run on a copy with fresh weights, on dummy tokens, and the copy is thrown away: nothing of them reaches the
    trained weights, and no private passage is read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ghostclip.data.memory import is_out_of_memory
from ghostclip.data.tensor_memory import peak_bytes
from ghostclip.finetune.losses import losses_for, precision
from ghostclip.finetune.options import FinetuneOptions
from ghostclip.finetune.steps import StepMeasures, adamw, dummy_passages, vocabulary_of


class OrdinarySteps:
    """Ordinary steps with the same shapes, optimizer and precision as the private ones.

    Args:
        model: A fresh copy of the model, on the device.
        options: The run's options.
        width: Tokens of a passage.
        physical_batch: Samples computed at once, as in the private steps.
    """

    def __init__(self, model: nn.Module, options: FinetuneOptions, *, width: int, physical_batch: int) -> None:
        self.measures = StepMeasures(physical_batch=physical_batch)
        self._model = model.train()
        self._device = next(model.parameters()).device
        self._dtype = options.dtype
        self._losses = losses_for(options.task)
        self._optimizer = adamw(model, options.rate)
        ids_BT, marks_B2 = dummy_passages(options.batch_size, width, vocabulary_of(model), self._device)
        self._samples = len(ids_BT)
        self._parts = list(zip(ids_BT.split(physical_batch), marks_B2.split(physical_batch), strict=True))

    def measure(self, count: int) -> None:
        """Take steps and time them; the first time, also warm up and measure memory.

        Args:
            count: Steps to time.
        """
        if not self.measures.timed:
            self._step(measure_memory=False)
            self._step(measure_memory=True)
        for _ in range(count):
            began = time.perf_counter()
            self._step(measure_memory=False)
            self.measures.timed.append((self._samples, time.perf_counter() - began))

    def _step(self, *, measure_memory: bool) -> None:
        for number, (ids_BT, marks_B2) in enumerate(self._parts, start=1):
            work = partial(self._part, ids_BT, marks_B2, last=number == len(self._parts))
            if measure_memory:
                peak = peak_bytes(work, self._device)
                self.measures.peak_bytes = max(self.measures.peak_bytes or 0, peak or 0) or None
            else:
                work()

    def _part(self, ids_BT: torch.Tensor, marks_B2: torch.Tensor, *, last: bool) -> None:
        with precision(self._device, self._dtype):
            loss = self._losses(self._model, ids_BT, marks_B2).sum() / self._samples
        loss.backward()
        float(loss.detach())  # the private loop reads its loss too, which waits for the device
        if last:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)


class Comparison:
    """Decides when ordinary steps are measured, and sees to it that a failure there costs the run nothing.

    On the CPU each follows right after a private step, spread over the run, and is compared with that one: both kinds
    of step then see the same machine, busy or idle. On other devices they wait for the end, when the trained model
    has left the device: a copy beside it might not fit.

    Args:
        make_copy: Gives a fresh copy of the model, on the CPU.
        options: The run's options.
        width: Tokens of a passage.
        device: Where the private steps run.
        alone: Whether one process takes them; the steps of several are compared with nothing.
    """

    def __init__(
        self,
        make_copy: Callable[[], nn.Module],
        options: FinetuneOptions,
        *,
        width: int,
        device: torch.device,
        alone: bool = True,
    ) -> None:
        self._make_copy = make_copy
        self._options = options
        self._width = width
        self._device = device
        self._steps: OrdinarySteps | None = None
        self._neighbours: list[tuple[int, float]] = []
        self.missing = "" if alone else "not measured (several processes)"
        if options.comparison_steps == 0:
            self.missing = "not measured (--comparison-steps 0)"

    @property
    def measures(self) -> StepMeasures | None:
        """Measures of the ordinary steps, if any were taken."""
        return None if self._steps is None or self.missing else self._steps.measures

    def private_steps(self, measures: StepMeasures) -> StepMeasures:
        """Give the private steps that ordinary ones are compared with.

        Args:
            measures: All of this session.

        Returns:
            Those right before an ordinary step; all, where there are none.
        """
        return replace(measures, timed=self._neighbours) if self._neighbours else measures

    def after_private_step(self, private: StepMeasures, *, left: int) -> None:
        """Measure on the CPU, when the time for another ordinary step has come.

        Args:
            private: The private steps of this session so far.
            left: Private steps to come.
        """
        done = len(private.timed)
        if self._device.type != "cpu" or done == 0:
            return
        due = math.ceil(done / (done + left) * self._options.comparison_steps)
        if self._measure_up_to(due, private.physical_batch):
            self._neighbours.append(private.timed[-1])

    def finish(self, *, physical_batch: int) -> None:
        """Measure what is left, after the last private step.

        Args:
            physical_batch: Samples computed at once; 0 where this session took no step.
        """
        if physical_batch == 0:
            self.missing = "not measured (this session took no private step)"
        self._measure_up_to(self._options.comparison_steps, physical_batch)

    def _measure_up_to(self, count: int, physical_batch: int) -> bool:
        """Measure until there are ``count``, and say whether anything was measured."""
        before = 0 if self._steps is None else len(self._steps.measures.timed)
        if self.missing or count <= before:
            return False
        # Building the copy and its dropout draw random numbers, which must not change those of the private run.
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            try:
                if self._steps is None:
                    copy = self._make_copy().to(self._device)
                    self._steps = OrdinarySteps(copy, self._options, width=self._width, physical_batch=physical_batch)
                self._steps.measure(count - before)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.missing = "not measured (out of memory)"
        return not self.missing


def seconds_per_step(measures: StepMeasures, batch_size: int) -> float | None:
    """Give the time of a step of ``batch_size`` samples.

    Poisson batches differ in size, so a step's time is scaled by its samples; the median ignores a machine's hiccups.

    Args:
        measures: What was measured.
        batch_size: Samples of the step in question.

    Returns:
        Seconds, or ``None`` where nothing was timed.
    """
    rates = sorted(seconds / samples for samples, seconds in measures.timed if samples > 0)
    return batch_size * rates[len(rates) // 2] if rates else None
