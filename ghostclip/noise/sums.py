"""The sums of one logical batch at level "exact": integers from the first rounding to the noise.

Letters: B samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from ghostclip._validate import non_negative
from ghostclip.errors import InvalidOptionError
from ghostclip.noise.exact import ExactNoise
from ghostclip.noise.grid import Grid

Parameter = TypeVar("Parameter")


class ExactSums:
    """Adds up rounded per-sample gradients over the physical batches of a logical batch, and releases their noisy sum.

    Privacy:
        A release is the discrete Gaussian mechanism with noise multiplier σ on the logical batch, exactly, for samples
        whose gradients are functions of the sample alone (`Grid.quantize` says what that asks for). Between `add` and
        `release` the integers are as private as the data.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._sums: dict[object, torch.Tensor] = {}

    def add(self, grads: Mapping[Parameter, torch.Tensor], coef_B: torch.Tensor) -> None:
        """Clip, round and add one physical batch."""
        # The bound holds over all parameters, so a sample must be in one call only.
        for grad in grads.values():
            if grad.shape[:1] != coef_B.shape:
                raise InvalidOptionError(
                    f"{tuple(coef_B.shape)} clip factors for per-sample gradients {tuple(grad.shape)}."
                )
        totals = self.grid.quantize(list(grads.values()), coef_B)
        for parameter, total in zip(grads, totals, strict=True):
            if parameter in self._sums:
                self._sums[parameter] += total
            else:
                self._sums[parameter] = total

    def release(
        self, parameters: Sequence[torch.Tensor], noise_multiplier: float, source: ExactNoise
    ) -> list[torch.Tensor]:
        """Return Σ_b c_b·g_b + noise for each parameter in a fixed order, and forget the sums."""
        # A parameter without a sum is noise alone; one whose sum would not be released is refused.
        std = non_negative(noise_multiplier, "noise_multiplier") * self.grid.bound
        known = {id(parameter) for parameter in parameters}
        if any(id(parameter) not in known for parameter in self._sums):
            raise InvalidOptionError("parameters: gradients were added for a parameter that is not released.")
        sums, self._sums = self._sums, {}
        released = []
        for parameter in parameters:
            total = sums.pop(parameter, None)
            if total is None:
                total = torch.zeros(parameter.shape, dtype=torch.int64, device=parameter.device)
            source.add_(total, std)
            released.append(self.grid.to_float(total, dtype=torch.promote_types(parameter.dtype, torch.float32)))
        return released

    def clear(self) -> None:
        """Drop the sums, as after an abandoned loop."""
        self._sums = {}
