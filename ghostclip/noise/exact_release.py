"""From a clipper's per-sample gradients to an exact release: what a private optimizer calls at level "exact"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ghostclip.errors import InvalidOptionError
from ghostclip.noise.exact import ExactNoise
from ghostclip.noise.grid import Grid
from ghostclip.noise.sums import ExactSums

if TYPE_CHECKING:
    from ghostclip.clipper import GhostClipper


class ExactRelease:
    """Rounds per-sample gradients after each backward, and releases the logical batch with discrete noise.

    Privacy:
        See `ExactSums` and `Grid.quantize`: physical batches of one record make the guarantee hold to the last bit.
        The clipper's own floating-point sums in `p.grad` are not released.
    """

    # strategy "hooks", with one norm
    def __init__(self, clipper: GhostClipper, source: ExactNoise, *, bits: int = 24) -> None:
        if clipper.resolve_strategy() != "hooks":
            raise InvalidOptionError(
                f"noise level 'exact' with strategy {clipper.resolve_strategy()!r}: gradients are rounded sample by "
                "sample, which only 'hooks' has. Use grad_sample_mode='hooks', or level 'secure'."
            )
        names = [name for name, _ in clipper.model.named_parameters()]
        if len(clipper.policy.layout(names).bounds) != 1 or clipper.policy.adaptation is not None:
            raise InvalidOptionError(
                "noise level 'exact' with a clip policy of several or adaptive bounds: use one fixed norm per sample."
            )
        self._clipper = clipper
        self._source = source
        self._bits = bits
        self._sums: ExactSums | None = None
        self._generation = clipper.generation

    def collect(self) -> None:
        """Round and add the per-sample gradients of the backward that just completed."""
        # Refuse those of several backwards.
        grads: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in self._clipper.trainable_parameters():
            found = self._clipper.take_samples(parameter)
            if len(found) > 1:
                raise InvalidOptionError(
                    f"{len(found)} backwards before one step at noise level 'exact': call step() after each backward "
                    "(physical batches: BatchMemoryManager), or add up the losses."
                )
            if found:
                grads[parameter] = found[0]
        if grads:
            self._open().add(grads, self._clipper.clip_coefficients)

    def release(self, parameters: Sequence[nn.Parameter], *, std: float) -> list[torch.Tensor]:
        """Return Σ_b c_b·g_b + noise of each parameter, and forget the logical batch."""
        sums, self._sums = self._open(), None
        # Rounded up: never less noise than was asked for.
        in_bounds = math.nextafter(std / (sums.grid.step * sums.grid.bound), math.inf) if std > 0 else 0.0
        return sums.release(parameters, in_bounds, self._source)

    def _open(self) -> ExactSums:
        """Return the sums of the clipper's present logical batch; those of a discarded one are discarded."""
        if self._sums is None or self._generation != self._clipper.generation:
            self._generation = self._clipper.generation
            # The bound in force when a logical batch begins; a schedule may change it in between.
            self._sums = ExactSums(Grid.for_norm(self._clipper.max_grad_norm, bits=self._bits))
        return self._sums
