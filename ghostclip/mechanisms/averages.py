"""Averages of a training's iterates: post-processing of what was released, so that they cost no privacy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ghostclip._torch import copy_all_, move_all_
from ghostclip._validate import choice
from ghostclip.errors import InvalidOptionError, ResumeError


class AveragedWeights:
    """Average of a model's parameters over the steps of its optimizer: exponential, or of the last part of a training.

    Noise in each step moves iterates about their mean; an average of them is nearer to it, often by points of accuracy,
    and is a function of what was released: (ε, δ) stays what it is. Buffers are the model's own.

    Args:
        model: The model, private or not.
        optimizer: Its optimizer: each of its steps that changes parameters is one iterate.
        kind: "exponential" (weights decay with the steps that have passed) or "tail" (the mean of all steps from
            `start` on).
        decay: Of "exponential", in [0, 1); the first steps count more, as for a shorter training:
            min(decay, (1 + t) / (10 + t)).
        start: Number of the step that "tail" begins with.

    Attributes:
        steps: Iterates that were averaged.

    Raises:
        InvalidOptionError: If an option is out of range.

    Cost:
        A copy of the parameters, and one pass over them in each step.

    Example:
        >>> averaged = ghostclip.mechanisms.AveragedWeights(model, optimizer, decay=0.99)
        >>> loss = model(torch.randn(4, 4)).sum()  # train as before, then
        >>> with averaged.applied():
        ...     score = model(torch.randn(4, 4))  # evaluate, or save
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, kind: str = "exponential", decay: float = 0.999, start: int = 0
    ) -> None:
        self._exponential = choice(kind, "kind", ("exponential", "tail")) == "exponential"
        if not 0 <= decay < 1:
            raise InvalidOptionError(f"decay={decay!r}: must be in [0, 1).")
        self._parameters: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._decay, self._start = decay, start
        self._averages = [p.detach().clone() for p in self._parameters]
        self._seen = self.steps = 0
        self._handle = optimizer.register_step_post_hook(lambda *_: self.update())

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters as they are for the next iterate; the optimizer's steps call it."""
        self._seen += 1
        if self._seen <= self._start:
            return
        self.steps += 1
        weight = 1 / self.steps
        if self._exponential:
            weight = max(1 - self._decay, 1 - (1 + self.steps) / (10 + self.steps))
        move_all_(self._averages, self._parameters, weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the averages, and give it its own parameters back at the end.

        Yields:
            Nothing.
        """
        originals = [p.detach().clone() for p in self._parameters]
        try:
            self._copy(self._averages)
            yield
        finally:
            self._copy(originals)

    @torch.no_grad()
    def _copy(self, values: list[torch.Tensor]) -> None:
        if self.steps:
            copy_all_(self._parameters, values)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and their numbers of steps, for a checkpoint; as private as the parameters."""
        return {"seen": self._seen, "steps": self.steps, "averages": list(self._averages)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state of the same parameters."""
        averages = state["averages"]
        if [one.shape for one in averages] != [one.shape for one in self._averages]:
            raise ResumeError("averages: saved of other parameters. Resume with the model of before.")
        self._seen, self.steps = int(state["seen"]), int(state["steps"])
        for average, saved in zip(self._averages, averages, strict=True):
            average.copy_(saved)

    def detach(self) -> None:
        """Take no note of further steps."""
        self._handle.remove()
